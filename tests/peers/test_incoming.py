"""Incoming, DeferredFragments, UnplannedFragments: blocks and fragments of a ticket that wait."""

from __future__ import annotations

from aiokv.base.plan import RECEIVE, TransferPlan, id_bytes
from aiokv.peers.arrivals import Fragment, Receive, SenderBlocks
from aiokv.peers.assembly import AssemblySlots
from aiokv.peers.deferred import DeferredFragments
from aiokv.peers.incoming import IncomingTicket, OpenSender
from aiokv.peers.messages import block_key
from aiokv.peers.unplanned import UnplannedFragments

from .world import EQUAL, SPLIT, World

LAYERS = 1  # the first group that is a range of layers


class Receiving:
    """Tickets of one rank, each of which sender rank 0 has opened.

    With ``SPLIT``, blocks 2 i and 2 i + 1 of the sender are the halves of block i.
    """

    def __init__(self, num_slots=4, *, mapping=SPLIT, num_ranges=0):
        self.mapping = mapping
        self.slots = AssemblySlots(num_slots)
        self.deferred = DeferredFragments(self.slots)
        self._world = World(0, mapping=mapping)
        self._source = SenderBlocks((mapping,) * (1 + num_ranges), None, 4)

    def ticket(self, num_blocks):
        incoming = IncomingTicket(self._world.expect(num_blocks), 1.0, 1, self.slots)
        incoming.sources[0] = self._source
        incoming.senders[0] = OpenSender(0, "connection", self._source)
        incoming.is_covered = True
        return incoming

    def plan(self, incoming, *blocks):
        ids = id_bytes(list(blocks))
        plan = TransferPlan(transfer_id=1, route=RECEIVE, source_blocks=ids, target_blocks=ids)
        receive = Receive(plan, 0)
        incoming.plan(receive)
        return receive

    def fragment(self, incoming, block, group=0):
        return Fragment(incoming.ticket.ticket_id, 0, block, group, 0, 0, b"", self.mapping)

    def place(self, incoming, block):
        """Place a block of the sender; return the blocks that are complete."""
        fragment = self.fragment(incoming, block)
        incoming.begin_placing(fragment)
        return [done for done, _, _ in incoming.place(fragment, incoming.placing.pop(fragment))]

    def taken(self):
        return [fragment.block for fragment in self.deferred.take()]


# --- blocks of plans ------------------------------------------------------------------------------


def test_block_arrives_once():
    receiving = Receiving(mapping=EQUAL)
    incoming = receiving.ticket(2)
    receive = receiving.plan(incoming, 0, 1)
    assert incoming.arrive(1) is receive
    assert incoming.arrive(1) is None
    assert list(incoming.waiting) == [0]


def test_block_waits_until_all_ranges_of_its_layers_have_arrived():
    receiving = Receiving(mapping=EQUAL, num_ranges=2)
    incoming = receiving.ticket(1)
    receive = receiving.plan(incoming, 0)
    first, last = block_key(LAYERS, 0), block_key(LAYERS + 1, 0)
    assert incoming.arrive(first) is receive
    assert incoming.arrive(first) is None
    assert [incoming.lacks(key) for key in (first, last, 0)] == [False, True, True]
    assert incoming.arrive(last) is receive
    assert not incoming.waiting
    assert incoming.violations() == []


def test_withdrawn_plan_leaves_neither_ranges_nor_assemblies():
    receiving = Receiving(2)
    incoming = receiving.ticket(2)
    receive = receiving.plan(incoming, 0, 1)
    assert receiving.place(incoming, 0) == []
    fragment = receiving.fragment(incoming, 2)
    assert list(incoming.begin_placing(fragment)) == [1]
    assert (receiving.slots.num_free, len(incoming.slots_used())) == (0, 2)
    incoming.withdraw(receive)
    incoming.withdraw(receive)  # again, after an interrupt
    assert receiving.slots.num_free == 1, "a thread writes the slot of block 1"
    assert list(incoming.place(fragment, incoming.placing.pop(fragment))) == []
    assert receiving.slots.violations(0) == incoming.violations() == []


def test_ranges_of_a_withdrawn_plan_are_forgotten():
    receiving = Receiving(mapping=EQUAL, num_ranges=2)
    incoming = receiving.ticket(1)
    receive = receiving.plan(incoming, 0)
    incoming.arrive(block_key(LAYERS, 0))
    assert incoming.ranges
    incoming.withdraw(receive)
    assert not incoming.ranges
    assert incoming.violations() == []


# --- blocks that are put together -----------------------------------------------------------------


def test_block_is_complete_with_its_last_fragment():
    receiving = Receiving()
    incoming = receiving.ticket(2)
    receiving.plan(incoming, 0, 1)
    assert receiving.place(incoming, 1) == []
    assert receiving.place(incoming, 2) == []
    assert receiving.place(incoming, 0) == [0]
    assert list(incoming.waiting) == list(incoming.assemblies) == [1]


def test_fragment_without_room_or_without_all_heads_is_not_placed():
    receiving = Receiving(1)
    incoming = receiving.ticket(2)
    receiving.plan(incoming, 0, 1)
    assert receiving.place(incoming, 0) == []
    assert incoming.begin_placing(receiving.fragment(incoming, 2)) == {}
    incoming.is_covered = False
    assert incoming.begin_placing(receiving.fragment(incoming, 1)) == {}
    assert not incoming.placing


def test_early_layers_leave_half_of_the_slots_to_others():
    receiving = Receiving(4, num_ranges=2)
    incoming = receiving.ticket(4)
    receiving.plan(incoming, 0, 1, 2, 3)
    placed = [incoming.begin_placing(receiving.fragment(incoming, 2 * i, LAYERS)) for i in range(3)]
    assert [list(slots) for slots in placed] == [[0], [1], []]
    last = receiving.fragment(incoming, 4, LAYERS + 1)
    assert list(incoming.begin_placing(last)) == [2]


# --- fragments that senders keep ------------------------------------------------------------------


def test_deferred_fragments_are_taken_in_order_as_far_as_there_is_room():
    receiving = Receiving(1)
    tickets = [receiving.ticket(2), receiving.ticket(2)]
    for block, incoming in enumerate(tickets):
        receiving.plan(incoming, 0, 1)
        receiving.deferred.add(incoming, (0, 2 * block))
    assert receiving.taken() == [0]
    slot = receiving.slots.begin().slot
    assert receiving.taken() == []
    receiving.slots.free(slot)
    assert receiving.taken() == [2]
    assert receiving.taken() == []
    assert receiving.deferred.violations(tickets) == []


def test_deferred_fragment_of_a_block_that_has_a_slot_needs_no_other_slot():
    receiving = Receiving(1)
    incoming = receiving.ticket(1)
    receiving.plan(incoming, 0)
    assert receiving.place(incoming, 0) == []
    receiving.deferred.add(incoming, (0, 1))
    assert receiving.taken() == [1]


def test_deferred_fragment_of_early_layers_waits_for_a_slot_beyond_the_reserved_half():
    receiving = Receiving(4, num_ranges=2)
    incoming = receiving.ticket(1)
    receiving.plan(incoming, 0)
    early, last = block_key(LAYERS, 0), block_key(LAYERS + 1, 0)
    used = [receiving.slots.begin().slot for _ in range(2)]
    for key in (early, last):
        receiving.deferred.add(incoming, (0, key))
    assert receiving.taken() == [last]
    receiving.slots.free(used[0])
    assert receiving.taken() == [early]


def test_deferred_fragment_waits_for_the_plan_of_its_block():
    for mapping in (SPLIT, EQUAL):
        receiving = Receiving(mapping=mapping)
        incoming = receiving.ticket(1)
        receiving.deferred.add(incoming, (0, 0))
        assert receiving.taken() == []
        receiving.plan(incoming, 0)
        assert receiving.taken() == [0]


def test_deferred_fragment_that_no_plan_can_need_is_taken_at_once():
    """The receiver answers it, so that the plan of the sender ends."""
    receiving = Receiving(0)
    incoming = receiving.ticket(1)
    incoming.withdraw(receiving.plan(incoming, 0))
    receiving.deferred.add(incoming, (0, 0))
    assert receiving.taken() == [0]


def test_deferred_fragment_of_a_sender_that_has_ended_is_removed():
    receiving = Receiving()
    incoming = receiving.ticket(1)
    receiving.plan(incoming, 0)
    receiving.deferred.add(incoming, (0, 0))
    del incoming.senders[0]
    assert receiving.taken() == []
    assert not incoming.deferred


def test_deferred_fragment_of_a_ticket_that_is_not_listed_is_a_violation():
    receiving = Receiving()
    incoming = receiving.ticket(1)
    incoming.deferred[0, 0] = None
    (problem,) = receiving.deferred.violations([incoming])
    assert problem.endswith("has deferred fragments, but is not listed")


# --- fragments that arrive before their plan ------------------------------------------------------


def test_unplanned_fragments_take_at_most_half_of_the_landing_slots():
    receiving = Receiving(mapping=EQUAL)
    unplanned = UnplannedFragments(4)
    tickets = [receiving.ticket(2), receiving.ticket(2)]
    for slot, incoming in enumerate(tickets):
        assert unplanned.has_room
        unplanned.note(incoming)
        incoming.parked[0] = slot
    assert not unplanned.has_room
    assert unplanned.violations(tickets) == []
    tickets[0].parked.clear()
    assert unplanned.has_room
    assert unplanned.violations(tickets) == []


def test_fragment_in_hand_counts_until_a_plan_asks_for_its_block():
    receiving = Receiving(mapping=EQUAL)
    unplanned = UnplannedFragments(2)
    incoming = receiving.ticket(1)
    unplanned.note(incoming)
    fragment = receiving.fragment(incoming, 0)._replace(mapping=None)
    incoming.in_hand[fragment.place] = fragment
    assert not unplanned.has_room
    receiving.plan(incoming, 0)
    assert unplanned.has_room


def test_violations_name_unplanned_fragments_beyond_the_half_and_tickets_that_are_not_noted():
    receiving = Receiving(mapping=EQUAL)
    incoming = receiving.ticket(2)
    incoming.parked |= {0: 0, 1: 1}
    not_noted, too_many = UnplannedFragments(2).violations([incoming])
    assert not_noted.endswith("has unplanned fragments, but is not noted")
    assert too_many == "2 slots have fragments that no plan waits for; at most 1 may"
