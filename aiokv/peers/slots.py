"""ArenaSlots: how the memory of peers is divided. Pure.

::

    landing slot 0 | landing slot 1 | ... | assembly | ... | outgoing | ...
    block │ block  | block │ block        | block    |     | block    |

Each block has room for a trailer behind a host block, a state slot or a window block, whichever is
the largest. Received fragments arrive in landing slots, which
are larger where a sender may have larger blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiokv.errors import ConfigError
from aiokv.layout.host_block import TRAILER_BYTES, aligned

if TYPE_CHECKING:
    from aiokv.layout.regions import Regions
    from aiokv.peers.options import Peers

ASSEMBLY_SHARE: Final = 4  # 1/4 of the ring's blocks assembles blocks of other layouts
FRAGMENT_TOKENS: Final = 64  # tokens of the largest block that a landing slot of a large ring holds
MIN_LANDING_SLOTS: Final = 8  # a smaller ring has smaller slots instead
# A copy engine of an H200 moves slots at multiples of 4 KiB to another GPU at 350 GB/s, others at
# 285 GB/s.
DEVICE_ALIGNMENT: Final = 4096


def device_slot_bytes(payload_bytes: int) -> int:
    """Return the distance between slots in the memory of a GPU."""
    return aligned(payload_bytes + TRAILER_BYTES, DEVICE_ALIGNMENT)


class ArenaSlots(NamedTuple):
    """Numbers of blocks of the arena.

    Attributes:
        slot_bytes: distance between blocks.
        ring: blocks for landing and assembly.
        assembly: blocks of the ring in which fragments of other layouts are put together.
        outgoing: blocks for sending.
    """

    slot_bytes: int
    ring: int
    assembly: int
    outgoing: int

    @classmethod
    def of(cls, options: Peers, regions: Regions) -> Self:
        """Return the division for the blocks of some tensors.

        Raises:
            ConfigError: ``ring_bytes`` or ``outgoing_bytes`` is less than a block.
        """
        pools = [regions, *map(regions.group_blocks, regions.groups)]
        payload_bytes = max(*[pool.payload_bytes for pool in pools], TRAILER_BYTES)
        slot_bytes = payload_bytes + TRAILER_BYTES
        if options.slots_on_device:
            if regions.state_pieces or regions.num_window_blocks:
                raise ConfigError(
                    f"the transport {options.transport!r} moves no recurrent state and no blocks "
                    "of sliding windows",
                    hint="use Peers(transport='tcp') on both servers",
                )
            slot_bytes = device_slot_bytes(payload_bytes)
        blocks = []
        for name in ("ring_bytes", "outgoing_bytes"):
            size = int(getattr(options, name))
            if size < slot_bytes:
                raise ConfigError(
                    f"{name} is {size}; a block takes {slot_bytes} bytes",
                    hint=f"set Peers({name}=...) to some tens of blocks",
                )
            blocks.append(size // slot_bytes)
        ring = 0 if options.listen is None else blocks[0]
        # Fragments in GPU memory are not assembled, because the layouts are equal.
        is_mapped = not options.slots_on_device and any(
            piece.axes is not None for piece in regions.all_pieces()
        )
        return cls(slot_bytes, ring, ring // ASSEMBLY_SHARE if is_mapped else 0, blocks[1])

    @property
    def total(self) -> int:
        """All blocks."""
        return self.ring + self.outgoing

    def blocks_per_slot(self, block_tokens: int) -> int:
        """Return the blocks of a landing slot: 1, unless blocks can be mapped to larger ones."""
        if not self.assembly:
            return 1
        wanted = -(-FRAGMENT_TOKENS // block_tokens)
        return max(min(wanted, (self.ring - self.assembly) // MIN_LANDING_SLOTS), 1)

    @property
    def first_assembly(self) -> int:
        """Index of the first assembly block."""
        return self.ring - self.assembly

    @property
    def first_outgoing(self) -> int:
        """Index of the first outgoing block."""
        return self.ring
