"""HostFormat: the bytes of a block in host memory and in the stores.

::

    device block | k of layer 0 | v of layer 0 | k of layer 1 | ...                      block_bytes
    host block   | payload: each piece encoded, at a multiple of 64 bytes  | trailer | - pitch_bytes
    object       | payload                                                 | trailer |

The payload is what the device tier copies, what stores seal and verify, and what the sizes of
``host_bytes`` are computed from. Without stores, there is no trailer and no space behind it.

Peers exchange the bytes of the device, whatever the format: the layouts of two servers are mapped
by the axes of the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiokv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST_ALIGNMENT_BYTES: Final = 64  # a cache line: streaming stores, and no false sharing
TRAILER_BYTES: Final = 64
STORE_ALIGNMENT_BYTES: Final = 4096  # host blocks begin at multiples of this when there are stores


class PiecePayload(NamedTuple):
    """The bytes of a piece, one region in one layer, in a host block.

    Attributes:
        num_bytes: bytes that are written, the same number for every block.
        encode: address of a C function ``int encode(void *host, const void *device, size_t n)``
            that writes ``num_bytes`` bytes of a host block from the ``n`` bytes of the piece on the
            device; 0 to copy them unchanged. It returns 0, or another number to refuse the bytes,
            which fails the transfer. Threads call it concurrently, without the GIL.
        decode: address of ``int decode(void *device, const void *host, size_t n)``, likewise.
    """

    num_bytes: int
    encode: int = 0
    decode: int = 0


class HostFormat(Protocol):
    """Encoding of blocks outside the device. Immutable; kept alive by the ``Regions`` with it.

    A piece is encoded on its own, into as many bytes for every block. So the layers of a block
    arrive one by one, each from its own part of the payload, and blocks have places of one size
    in memory and on disks. A codec whose results vary in length pads them, and refuses a block
    whose result is longer.

    Attributes:
        name: part of the fingerprint of stored blocks, so blocks of another format are not found;
            empty for the bytes of the device. A change of the encoding needs a new name.
        is_exact: decoding returns the bytes that were encoded, as ``verify="checksum"`` requires.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool: ...

    def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
        """Return the form of a piece in host memory.

        Args:
            num_bytes: bytes of the piece on the device, at least 1.
            dtype: name of its element type, such as ``"bfloat16"``.
        """


class DeviceBytes:
    """The format of hosts that keep the bytes of the device unchanged."""

    name: Final = ""
    is_exact: Final = True

    def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
        """Return the piece as it is."""
        return PiecePayload(num_bytes)


DEVICE_BYTES: Final[HostFormat] = DeviceBytes()


def checked_payload(host_format: HostFormat, num_bytes: int, dtype: str) -> PiecePayload:
    """Return the form of a piece in host memory.

    Raises:
        LayoutError: the format returns no bytes, only one of the two functions, or another number
            of bytes without functions.
    """
    payload = host_format.payload(num_bytes, dtype)
    is_copied = not payload.encode and not payload.decode
    is_encoded = payload.encode and payload.decode
    if payload.num_bytes < 1 or not (is_encoded or (is_copied and payload.num_bytes == num_bytes)):
        raise LayoutError(
            f"host format {host_format.name!r}: {num_bytes} bytes of {dtype} become {payload}; "
            "expected at least 1 byte with both functions, or the same number without them"
        )
    return payload


def aligned(num_bytes: int, unit: int = HOST_ALIGNMENT_BYTES) -> int:
    """Return the next multiple of ``unit``; by default, the size of a piece in a payload."""
    return -(-num_bytes // unit) * unit


def payload_bytes(pieces: Iterable[int]) -> int:
    """Return the bytes of the payload of a block from those of its encoded pieces."""
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
