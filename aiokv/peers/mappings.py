"""Mappings: which ranks of other engines have blocks that one rank can send or receive. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.base.groups import ATTENTION, layers_group
from aiokv.base.groups import STATE as STATE_GROUP
from aiokv.errors import LayoutError, UsageError
from aiokv.layout.block_layout import STATE, window_pool
from aiokv.layout.mapping import BlockLayout, BlockMapping, covers, sources
from aiokv.peers.arrivals import SenderBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.peers.messages import Open
    from aiokv.peers.ticket import Endpoint, Ticket

MIN_CUT_SLOTS: Final = 2  # one for a block and one for a fragment of it
MAX_MAPPINGS: Final = 256


class Mappings:
    """Mappings from and to the blocks of one rank, made once per pair of layouts.

    Args:
        own: layout of the rank.
        outgoing_slots: slots for sending.
        only_equal: refuse layouts whose fragments are no whole blocks.
        layer_ranges: wanted; see ``Peers.layer_ranges``.

    Attributes:
        ranges: first and end of the layers of each range in which blocks can be sent; empty without
            ranges.
        num_pools: groups of whole blocks; the groups of ranges of layers follow.
    """

    def __init__(
        self,
        own: BlockLayout,
        outgoing_slots: int,
        *,
        only_equal: bool = False,
        layer_ranges: int = 1,
    ) -> None:
        ranges = own.pool().ranges(layer_ranges)
        self.ranges = ranges if len(ranges) > 1 else []
        self.num_pools = len(own.pools)
        self._own = own
        self._only_equal = only_equal
        self._outgoing_slots = outgoing_slots
        self._mappings: dict[tuple[bytes, bytes, int], tuple[BlockMapping, ...]] = {}

    @property
    def last_range(self) -> int | None:
        """Group of the last range of layers; None without ranges."""
        return self.num_pools + len(self.ranges) - 1 if self.ranges else None

    def groups(self, plan: TransferPlan) -> list[int]:
        """Return the groups that a plan moves; one, unless it moves several ranges of layers.

        Raises:
            UsageError: this rank has no tensors of a group.
        """
        if not plan.end_range:
            return [self.group(plan)]
        first, end = plan.first_range, plan.end_range
        if not 0 <= first < end <= len(self.ranges):
            raise UsageError(
                f"transfer {plan.transfer_id}: the ranges of layers are {first} to {end - 1}; this "
                f"rank has {len(self.ranges)}",
                hint="set the same Peers(layer_ranges=...) on all ranks",
            )
        return list(range(self.num_pools + first, self.num_pools + end))

    def device_group(self, plan: TransferPlan, group: int) -> str:
        """Return the name by which a device knows the blocks of a group of a plan."""
        if group < self.num_pools:
            return plan.group
        return layers_group(*self.ranges[group - self.num_pools])

    def group(self, plan: TransferPlan) -> int:
        """Return the group of the blocks, the state or the window blocks that a plan moves.

        Raises:
            UsageError: this rank has no tensors of the group.
        """
        if plan.group == ATTENTION:
            return 0
        name = STATE if plan.group == STATE_GROUP else window_pool(plan.group)
        if name not in self._own.pool_names:
            raise UsageError(
                f"transfer {plan.transfer_id}: the pool is {name!r}; this rank has "
                f"{', '.join(map(repr, self._own.pool_names))}"
            )
        return self._own.pool_names.index(name)

    def receivers(
        self, ticket: Ticket, layouts: Sequence[bytes]
    ) -> list[tuple[Endpoint, tuple[BlockMapping, ...]]]:
        """Return the receiver ranks that this rank sends to, and the mappings of all groups.

        Args:
            ticket: ticket of another engine.
            layouts: layouts of all ranks of this engine, encoded; empty for an engine of one rank.

        Raises:
            LayoutError: the blocks cannot be mapped; or there are too few outgoing slots.
        """
        senders = [BlockLayout.decode(blob) for blob in layouts] or [self._own]
        receivers = []
        for endpoint in ticket.endpoints:
            receiver = BlockLayout.decode(endpoint.layout)
            if self._own.rank not in sources(senders, receiver):
                continue
            mappings = self._of_groups(self._own, receiver, len(self.ranges))
            is_cut = not all(mapping.fragment_is_block for mapping in mappings)
            if is_cut and self._outgoing_slots < MIN_CUT_SLOTS:
                raise LayoutError(
                    f"the engine has {self._outgoing_slots} outgoing slots; blocks of another "
                    f"layout need {MIN_CUT_SLOTS}",
                    hint="raise Peers.outgoing_bytes",
                )
            receivers.append((endpoint, mappings))
        return receivers

    def source(self, message: Open) -> SenderBlocks:
        """Return the blocks of a sender.

        Raises:
            LayoutError: they cannot be mapped to the blocks of this rank.
        """
        try:
            layout = BlockLayout.decode(message.layout)
        except UsageError as error:
            raise LayoutError(str(error)) from None
        if (layout.rank, layout.block_tokens) != (message.sender_rank, message.sender_block_tokens):
            raise LayoutError(
                f"the sender's layout has rank {layout.rank} and {layout.block_tokens} tokens per "
                f"block; its message has rank {message.sender_rank} and "
                f"{message.sender_block_tokens} tokens per block"
            )
        if message.layer_ranges not in (0, len(self.ranges)):
            raise LayoutError(
                f"the sender divides the layers into {message.layer_ranges} ranges, the receiver "
                f"into {len(self.ranges) or 1}",
                hint="set the same Peers(layer_ranges=...) on both servers",
            )
        mappings = self._of_groups(layout, self._own, message.layer_ranges)
        return SenderBlocks(mappings, layout, layout.block_tokens)

    def covers(self, layouts: list[BlockLayout]) -> bool:
        """Return True when ranks of these layouts together have all heads of this rank."""
        return covers(layouts, self._own)

    def _of_groups(
        self, sender: BlockLayout, receiver: BlockLayout, num_ranges: int
    ) -> tuple[BlockMapping, ...]:
        """Return the mapping of each group: of the pools, then of the ranges of layers.

        Raises:
            LayoutError: the layouts cannot be mapped.
        """
        key = (sender.encode(), receiver.encode(), num_ranges)
        mappings = self._mappings.get(key)
        if mappings is None:
            while len(self._mappings) >= MAX_MAPPINGS:
                del self._mappings[next(iter(self._mappings))]
            pools = [BlockMapping(sender, receiver, pool) for pool in receiver.pool_names]
            ranges = receiver.pool().ranges(num_ranges) if num_ranges else []
            mappings = (*pools, *(BlockMapping(sender, receiver, layers=each) for each in ranges))
            _check_windows(sender, receiver)
            if self._only_equal and not all(mapping.is_identity for mapping in mappings):
                raise LayoutError(
                    "the blocks of the sender and of the receiver have different layouts, which "
                    "the transport 'cuda_ipc' does not convert",
                    hint="use Peers(transport='tcp') on both servers",
                )
            self._mappings[key] = mappings
        return mappings


def _check_windows(sender: BlockLayout, receiver: BlockLayout) -> None:
    """Check that each window block of the receiver arrives whole, or not at all.

    A sender has only the blocks that its sink and its window reach. Where a block of the receiver
    begins inside one of the sender, or with one, the sender has all of it; a larger block of the
    receiver may begin before the window of the sender.

    Raises:
        LayoutError: a window block may arrive in part.
    """
    sent, kept = sender.block_tokens, receiver.block_tokens
    if sent % kept and any(name.startswith(window_pool("")) for name in receiver.pool_names):
        raise LayoutError(
            f"the sender has {sent} positions per block, the receiver {kept}; with sliding "
            "windows, those of the sender must be a multiple of those of the receiver",
            hint="set the same CacheConfig.block_tokens on both servers",
        )
