"""Sizes of a block in host memory and in the stores.

::

    device block | k of layer 0 | v of layer 0 | k of layer 1 | ...                   block_bytes
    host block   | payload: each piece at a multiple of 64 bytes       | trailer | - pitch_bytes
    object       | payload                                             | trailer |

A piece is one region in one layer. The payload is what the device tier copies, what stores seal and
verify, and what the sizes of ``host_bytes`` are computed from. Without stores, there is no trailer
and no space behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST_ALIGNMENT_BYTES: Final = 64  # a cache line: streaming stores, and no false sharing
TRAILER_BYTES: Final = 64
STORE_ALIGNMENT_BYTES: Final = 4096  # host blocks begin at multiples of this when there are stores


def aligned(num_bytes: int, unit: int = HOST_ALIGNMENT_BYTES) -> int:
    """Return the next multiple of ``unit``; by default, the size of a piece in a payload."""
    return -(-num_bytes // unit) * unit


def payload_bytes(pieces: Iterable[int]) -> int:
    """Return the bytes of the payload of a block from those of its pieces."""
    return sum(map(aligned, pieces))


def pitch_bytes(payload_bytes: int, *, with_stores: bool) -> int:
    """Return the distance between host blocks.

    Args:
        payload_bytes: bytes of the payload.
        with_stores: True if stores access the blocks, which have a trailer then.
    """
    if not with_stores:
        return payload_bytes
    return aligned(payload_bytes + TRAILER_BYTES, STORE_ALIGNMENT_BYTES)
