"""Incoming: a ticket that senders may open, and the fragments that have arrived. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.peers.messages import block_key, shown_block, split_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from aiokv.peers.arrivals import ArrivalMapping, Fragment, Receive, SenderBlocks
    from aiokv.peers.assembly import Assembly, AssemblySlots
    from aiokv.peers.ticket import Ticket

C = TypeVar("C", bound="Hashable")  # a connection


class OpenSender(Generic[C]):
    """A sender rank that has opened a ticket."""

    def __init__(self, rank: int, connection: C, source: SenderBlocks) -> None:
        self.rank = rank
        self.connection = connection
        self.source = source


class IncomingTicket(Generic[C]):
    """A ticket that senders may open. Blocks are named by ``block_key``.

    A block of a plan waits until its fragment, or the fragments of all ranges of its layers, have
    arrived, or until it was put together in an assembly; or until its plan is given up. Ranges that
    have arrived, and assemblies, are those of waiting blocks.

    Args:
        ticket: made by the engine of this rank.
        deadline: by the clock of the receiver.
        num_pools: groups of whole blocks.
        slots: assembly slots of this rank.
        open_by: by the clock of the receiver; the ticket ends then if no sender has opened it.

    Attributes:
        deadline: by the clock of the receiver.
        num_pools: groups of whole blocks; the groups behind them are ranges of layers of group 0.
        senders: by rank; those that have ended are removed.
        sources: blocks of all ranks that have opened it; each has a part of each block.
        done: reason why a sender, which has sent all that it had, sends nothing more.
        waiting: block -> plan, of blocks without a fragment.
        in_hand: fragments that are being verified, by rank and block of the sender.
        parked: verified slots of blocks that no plan has asked for yet, by block.
        ranges: ranges of layers that have arrived, of blocks in ``waiting`` that are not complete.
        planned: blocks that a plan has, or had.
        planned_groups: groups that have, or had, a plan. Those of state and windows have one plan.
        assemblies: blocks of ``waiting`` that fragments are being placed in.
        placing: fragments that are being placed, with the assemblies that they are written to.
        deferred: fragments that the senders keep for want of room here, by rank and block of the
            sender, in order.
        is_covered: the senders together have all heads of this rank.
    """

    def __init__(
        self,
        ticket: Ticket,
        deadline: float,
        num_pools: int,
        slots: AssemblySlots,
        open_by: float = math.inf,
    ) -> None:
        self._slots = slots
        self.ticket = ticket
        self.deadline = deadline
        self._open_by = open_by
        self.num_pools = num_pools
        self.senders: dict[int, OpenSender[C]] = {}
        self.sources: dict[int, SenderBlocks] = {}
        self.done = ""
        self.receives: dict[int, Receive] = {}
        self.waiting: dict[int, Receive] = {}
        self.in_hand: dict[tuple[int, int], Fragment] = {}
        self.parked: dict[int, int] = {}
        self.ranges: dict[int, set[int]] = {}
        self.planned: set[int] = set()
        self.planned_groups: set[int] = set()
        self.wrong: dict[int, int] = {}
        self.assemblies: dict[int, Assembly] = {}
        self.placing: dict[Fragment, dict[int, Assembly]] = {}
        self.deferred: dict[tuple[int, int], None] = {}
        self.is_covered = False
        self.closed = ""

    @property
    def ends_at(self) -> float:
        """Time at which the ticket ends, as far as it is known now."""
        return self.deadline if self.sources else min(self.deadline, self._open_by)

    @property
    def num_unplanned(self) -> int:
        """Number of landing slots with fragments of blocks that no plan has asked for yet.

        They are parked, or will be when they are verified.
        """
        in_hand = (place for place, fragment in self.in_hand.items() if fragment.mapping is None)
        return len(self.parked) + sum(self.whole(block) not in self.planned for _, block in in_hand)

    @property
    def has_transfers(self) -> bool:
        """True while it has plans, or fragments that are being verified or placed."""
        return bool(self.receives or self.in_hand or self.placing)

    # --- groups and places ------------------------------------------------------------------------

    def is_range(self, group: int) -> bool:
        """Return True for a group that is a range of layers."""
        return group >= self.num_pools

    def whole(self, key: int) -> int:
        """Return the key of the block that a block, or a range of its layers, belongs to."""
        group, block = split_key(key)
        return block_key(0, block) if self.is_range(group) else key

    def num_ranges(self, group: int) -> int:
        """Return the fragments of a group that make up a block, which is not put together.

        Returns:
            0 for whole blocks.
        """
        if not self.is_range(group):
            return 0
        num_groups = (len(source.mappings) for source in self.sources.values())
        return max(num_groups, default=self.num_pools) - self.num_pools

    def receiver_keys(self, mapping: ArrivalMapping, sender_key: int) -> list[int]:
        """Return the blocks of the receiver that have tokens of a block of the sender."""
        group, block = split_key(self.whole(sender_key))
        return [block_key(group, index) for index in mapping.receiver_blocks(block)]

    def has(self, source: SenderBlocks, group: int, block: int) -> bool:
        """Return True for a block that has positions of the ticket, or the state behind them."""
        first = self.ticket.first_position // source.block_tokens
        end = -(-self.ticket.num_tokens // source.block_tokens)
        if group == 0 or self.is_range(group):
            return group < len(source.mappings) and first <= block < end
        # A state is one block, with the number 0.
        return group < len(source.mappings) and (first <= block < end or block == 0)

    # --- blocks of plans --------------------------------------------------------------------------

    def plan(self, receive: Receive) -> None:
        """Let the blocks of a plan wait; none of them has, or had, a plan."""
        self.planned |= receive.missing
        self.planned_groups.add(receive.group)
        self.waiting |= dict.fromkeys(receive.missing, receive)

    def withdraw(self, receive: Receive) -> None:
        """Let the blocks of a plan wait no more. Idempotent."""
        for block in receive.positions:
            if self.waiting.get(block) is receive:
                del self.waiting[block]
                self.ranges.pop(block, None)
                assembly = self.assemblies.pop(block, None)
                if assembly is not None:
                    self._slots.drop(assembly)

    def lacks(self, key: int) -> bool:
        """Return True for a block, or range of its layers, that a plan waits for."""
        block = self.whole(key)
        return block in self.waiting and key not in self.ranges.get(block, ())

    def arrive(self, key: int) -> Receive | None:
        """Note the arrival of a block, or of a range of its layers; return the plan that waits.

        Returns None when no plan waits for it.
        """
        block = self.whole(key)
        receive = self.waiting.get(block)
        if receive is None or receive.failure is not None:
            return None
        if key != block:
            arrived = self.ranges.setdefault(block, set())
            if key in arrived:
                return None
            arrived.add(key)
            if len(arrived) < self.num_ranges(split_key(key)[0]):
                return receive
        self.ranges.pop(block, None)
        del self.waiting[block]
        return receive

    # --- blocks that are put together -------------------------------------------------------------

    def waiting_blocks(self, mapping: ArrivalMapping | None, place: tuple[int, int]) -> list[int]:
        """Return the blocks that wait for a fragment of this rank and block of the sender."""
        blocks = [] if mapping is None else self.receiver_keys(mapping, place[1])
        return [
            block
            for block in blocks
            if block in self.waiting
            and (block not in self.assemblies or place not in self.assemblies[block].placed)
        ]

    def may_be_planned(self, mapping: ArrivalMapping, sender_block: int) -> bool:
        """Return True if a fragment has tokens of a block that has no plan yet."""
        ticket, group = self.ticket, split_key(self.whole(sender_block))[0]
        if group:
            return group not in self.planned_groups
        return any(
            ticket.first_position < (block + 1) * ticket.block_tokens
            and block * ticket.block_tokens < ticket.num_tokens
            and block not in self.planned
            for block in mapping.receiver_blocks(split_key(sender_block)[1])
        )

    def reserved(self, place: tuple[int, int]) -> int:
        """Return the assembly slots that a fragment leaves free, by rank and block of the sender.

        The sender may still compute the block of a range of layers that is not the last one: half
        of the slots remain for blocks that will be complete soon.
        """
        rank, key = place
        group = split_key(key)[0]
        is_early = self.is_range(group) and group + 1 < len(self.sources[rank].mappings)
        return self._slots.num_slots // 2 if is_early else 0

    def slots_needed(self, source: SenderBlocks, place: tuple[int, int]) -> int | None:
        """Return the least assembly slots for a deferred fragment; None if it must wait."""
        if source.is_identity:
            return 0 if self.whole(place[1]) in self.planned else None
        mapping = source.mappings[split_key(place[1])[0]]
        blocks = self.waiting_blocks(mapping, place)
        if not self.is_covered:
            return None
        if any(block in self.assemblies for block in blocks):
            return 0
        if blocks:
            return 1
        return None if self.may_be_planned(mapping, place[1]) else 0

    def begin_placing(self, fragment: Fragment) -> dict[int, int]:
        """Return the assembly slots of the blocks that a fragment has tokens of.

        Blocks for which there is no room are left out: the fragment comes again for them.
        """
        waiting = self.waiting_blocks(fragment.mapping, fragment.place)
        reserved = self.reserved(fragment.place)
        targets = []
        for block in waiting if self.is_covered and not self.closed else ():
            if block not in self.assemblies and self._slots.num_free > reserved:
                self.assemblies[block] = self._slots.begin()
            if block in self.assemblies:
                targets.append(block)
        if not targets:
            return {}
        assemblies = {block: self.assemblies[block] for block in targets}
        for assembly in assemblies.values():
            assembly.placing += 1
        self.placing[fragment] = assemblies
        return {block: assembly.slot for block, assembly in assemblies.items()}

    def place(
        self, fragment: Fragment, assemblies: dict[int, Assembly]
    ) -> Iterator[tuple[int, int, Receive]]:
        """Note that a fragment was placed in assemblies, by block.

        Yields:
            Each block that is complete now, its assembly slot and its plan.
        """
        for block, assembly in assemblies.items():
            self._slots.end_write(assembly, fragment.place)
            is_written = not assembly.is_dropped and not assembly.placing
            if is_written and self._is_complete(block, assembly):
                receive = self.waiting.pop(block)
                del self.assemblies[block]
                yield block, assembly.slot, receive

    def _is_complete(self, block: int, assembly: Assembly) -> bool:
        """Return True when a block has the fragments of all ranks that have opened the ticket."""
        end = self.ticket.num_tokens
        group, index = split_key(block)
        return all(
            self._has_placed(assembly, rank, source, block_key(group, sent))
            for rank, source in self.sources.items()
            for sent in source.mappings[group].sender_blocks(index)
            if sent * source.block_tokens < end
        )

    def _has_placed(self, assembly: Assembly, rank: int, source: SenderBlocks, key: int) -> bool:
        """Return True if the whole block of a sender, or all ranges of its layers, were placed."""
        if (rank, key) in assembly.placed:
            return True
        group, block = split_key(key)
        ranges = range(self.num_pools, len(source.mappings)) if group == 0 else ()
        return bool(ranges) and all(
            (rank, block_key(each, block)) in assembly.placed for each in ranges
        )

    # --- observation ------------------------------------------------------------------------------

    def slots_used(self) -> list[int]:
        """Return the assembly slots that are used for it."""
        placing = (assembly for each in self.placing.values() for assembly in each.values())
        known = {id(each): each for each in (*self.assemblies.values(), *placing)}
        return [assembly.slot for assembly in known.values() if assembly.slot >= 0]

    def violations(self) -> list[str]:
        """Return a description of each violated invariant, computed from scratch."""
        problems = [
            f"{shown_block(block)} waits, but no plan asks for it"
            for block in self.waiting.keys() - self.planned
        ]
        kept = [("ranges", self.ranges.keys()), ("an assembly", self.assemblies.keys())]
        problems += [
            f"{shown_block(block)} has {what}, but no plan waits for it"
            for what, blocks in kept
            for block in blocks - self.waiting.keys()
        ]
        return problems
