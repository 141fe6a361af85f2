"""Incoming: a ticket that senders may open, and what has arrived for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.peers.messages import block_key, split_key

if TYPE_CHECKING:
    from collections.abc import Hashable

    from aiokv.peers.arrivals import Mapping, Parcel, Receive, Source
    from aiokv.peers.ticket import Ticket

C = TypeVar("C", bound="Hashable")  # a connection


class OpenSender(Generic[C]):
    """A sender rank that has opened a ticket."""

    def __init__(self, rank: int, connection: C, source: Source) -> None:
        self.rank = rank
        self.connection = connection
        self.source = source


class Assembly:
    """A block that parcels are being placed in.

    Attributes:
        slot: assembly slot.
        placed: parcels that it has, by rank and block of the sender.
        placing: parcels that a thread is writing to it.
        is_dropped: its plan was given up; the slot is freed when no thread writes it.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.placed: set[tuple[int, int]] = set()
        self.placing = 0
        self.is_dropped = False


class Incoming(Generic[C]):
    """A ticket that senders may open. Blocks are named by ``block_key``.

    Attributes:
        deadline: by the clock of the receiver.
        num_pools: groups of whole blocks; the groups behind them are ranges of layers of group 0.
        senders: by rank; those that have ended are removed.
        sources: blocks of all ranks that have opened it; each has a part of each block.
        done: reason why a sender, which has sent all that it had, sends nothing more.
        waiting: block -> plan, of blocks without a parcel.
        in_hand: parcels that are being verified, by rank and block of the sender.
        parked: verified slots of blocks that no plan has asked for yet, by block.
        ranges: ranges of layers that have arrived, of blocks in ``waiting`` that are not complete.
        planned: blocks that a plan has, or had.
        planned_groups: groups that have, or had, a plan. Those of state and windows have one plan.
        assemblies: blocks of ``waiting`` that parcels are being placed in.
        placing: parcels that are being placed, with the assemblies that they are written to.
        deferred: parcels that the senders keep for want of room here, by rank and block of the
            sender, in order.
        is_covered: the senders together have all heads of this rank.
    """

    def __init__(self, ticket: Ticket, deadline: float, num_pools: int) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.num_pools = num_pools
        self.senders: dict[int, OpenSender[C]] = {}
        self.sources: dict[int, Source] = {}
        self.done = ""
        self.receives: dict[int, Receive] = {}
        self.waiting: dict[int, Receive] = {}
        self.in_hand: dict[tuple[int, int], Parcel] = {}
        self.parked: dict[int, int] = {}
        self.ranges: dict[int, set[int]] = {}
        self.planned: set[int] = set()
        self.planned_groups: set[int] = set()
        self.wrong: dict[int, int] = {}
        self.assemblies: dict[int, Assembly] = {}
        self.placing: dict[Parcel, dict[int, Assembly]] = {}
        self.deferred: dict[tuple[int, int], None] = {}
        self.is_covered = False
        self.closed = ""

    @property
    def num_unplanned(self) -> int:
        """Number of landing slots with parcels of blocks that no plan has asked for yet.

        They are parked, or will be when they are verified.
        """
        in_hand = (place for place, parcel in self.in_hand.items() if parcel.mapping is None)
        return len(self.parked) + sum(self.whole(block) not in self.planned for _, block in in_hand)

    def is_range(self, group: int) -> bool:
        """Return True for a group that is a range of layers."""
        return group >= self.num_pools

    def whole(self, key: int) -> int:
        """Return the key of the block that a block, or a range of its layers, belongs to."""
        group, block = split_key(key)
        return block_key(0, block) if self.is_range(group) else key

    def num_ranges(self, source: Source) -> int:
        """Return the ranges of layers in which a sender may send a block; 0 without any."""
        return len(source.mappings) - self.num_pools

    def receiver_keys(self, mapping: Mapping, sender_key: int) -> list[int]:
        """Return the blocks of the receiver that have tokens of a block of the sender."""
        group, block = split_key(self.whole(sender_key))
        return [block_key(group, index) for index in mapping.receiver_blocks(block)]

    def has(self, source: Source, group: int, block: int) -> bool:
        """Return True for a block that has positions of the ticket, or the state behind them."""
        first = self.ticket.first_position // source.block_tokens
        end = -(-self.ticket.num_tokens // source.block_tokens)
        if group == 0 or self.is_range(group):
            return group < len(source.mappings) and first <= block < end
        # The state is one block, with the number 0.
        return group < len(source.mappings) and (first <= block < end or block == 0)

    def waiting_blocks(self, mapping: Mapping | None, place: tuple[int, int]) -> list[int]:
        """Return the blocks that wait for a parcel of this rank and block of the sender."""
        blocks = [] if mapping is None else self.receiver_keys(mapping, place[1])
        return [
            block
            for block in blocks
            if block in self.waiting
            and (block not in self.assemblies or place not in self.assemblies[block].placed)
        ]

    def may_be_planned(self, mapping: Mapping, sender_block: int) -> bool:
        """Return True if a parcel has tokens of a block that has no plan yet."""
        ticket, group = self.ticket, split_key(self.whole(sender_block))[0]
        if group:
            return group not in self.planned_groups
        return any(
            ticket.first_position < (block + 1) * ticket.block_tokens
            and block * ticket.block_tokens < ticket.num_tokens
            and block not in self.planned
            for block in mapping.receiver_blocks(split_key(sender_block)[1])
        )

    def is_complete(self, block: int, assembly: Assembly) -> bool:
        """Return True when a block has the parcels of all ranks that have opened the ticket."""
        end = self.ticket.num_tokens
        group, index = split_key(block)
        return all(
            self._has_placed(assembly, rank, source, block_key(group, sent))
            for rank, source in self.sources.items()
            for sent in source.mappings[group].sender_blocks(index)
            if sent * source.block_tokens < end
        )

    def _has_placed(self, assembly: Assembly, rank: int, source: Source, key: int) -> bool:
        """Return True if the whole block of a sender, or all ranges of its layers, were placed."""
        if (rank, key) in assembly.placed:
            return True
        group, block = split_key(key)
        ranges = range(self.num_pools, len(source.mappings)) if group == 0 else ()
        return bool(ranges) and all(
            (rank, block_key(each, block)) in assembly.placed for each in ranges
        )
