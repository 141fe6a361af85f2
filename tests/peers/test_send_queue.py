"""SendQueue and OutgoingSlots: credits are asked for once, and slots are free again once."""

from __future__ import annotations

import pytest

from aiokv.base.plan import SEND, TransferPlan, id_bytes
from aiokv.peers.departures import Fragment, ReceiverRank, Send
from aiokv.peers.messages import Return, SlotCredit
from aiokv.peers.outgoing_slots import OutgoingSlots
from aiokv.peers.send_queue import SendQueue

from .world import EQUAL, SPLIT

CREDITS = [SlotCredit(slot, 1) for slot in range(4)]


def fragments(queue, count, mapping=EQUAL):
    ids = id_bytes(list(range(count)))
    plan = TransferPlan(transfer_id=1, route=SEND, source_blocks=ids, target_blocks=ids)
    send, target = Send(plan, [0]), ReceiverRank(queue.connection, (mapping,))
    return [Fragment(send, block, queue, target, b"") for block in range(count)]


@pytest.fixture
def queue():
    return SendQueue("connection")


# --- credits --------------------------------------------------------------------------------------


def test_one_credit_is_asked_for_per_fragment(queue):
    first, second, third = fragments(queue, 3)
    assert queue.add([first, second]) == 2
    assert queue.add([third]) == 1
    queue.add_credits(CREDITS[:3])
    assert [queue.take() for _ in range(3)] == [first, second, third]
    assert [fragment.credit for fragment in (first, second, third)] == CREDITS[:3]
    assert queue.violations() == []


def test_spare_credits_are_used_before_others_are_asked_for(queue):
    first, second, third = fragments(queue, 3)
    queue.add([first])
    queue.add_credits(CREDITS[:1])
    first.dropped = True
    queue.remove_dropped()
    assert queue.violations() != []
    assert queue.add([second, third]) == 1
    assert queue.violations() == []


def test_no_credit_is_asked_for_while_spare_ones_suffice(queue):
    first, second = fragments(queue, 2)
    queue.add([first])
    queue.add_credits(CREDITS[:1])
    first.dropped = True
    queue.remove_dropped()
    assert queue.add([second]) == queue.wanted == 0
    assert queue.violations() == []


def test_credits_and_wishes_that_no_fragment_waits_for_are_given_back(queue):
    waiting = fragments(queue, 4)
    queue.add(waiting)
    queue.add_credits(CREDITS[:3])
    for fragment in waiting[1:]:
        fragment.dropped = True
    queue.remove_dropped()
    assert queue.take_spare() == Return(slots=[CREDITS[2], CREDITS[1]], unwanted=1)
    assert queue.take_spare() is None
    assert queue.next is waiting[0]


def test_fragment_without_a_credit_is_not_next(queue):
    queue.add(fragments(queue, 1))
    assert queue.next is None
    queue.add_credits(CREDITS[:1])
    assert queue.next is not None
    queue.disconnect()
    assert queue.next is None


# --- slots ----------------------------------------------------------------------------------------


def test_fragment_that_is_cut_out_of_a_block_takes_two_slots(queue):
    slots = OutgoingSlots(4)
    (fragment,) = fragments(queue, 1, SPLIT)
    slots.take(fragment)
    assert (queue.slots, slots.num_free) == (2, 2)
    slots.free_block(fragment)
    slots.free_block(fragment)  # again, after an interrupt
    assert (queue.slots, slots.num_free) == (1, 3)
    slots.free(fragment)
    slots.free(fragment)
    assert (queue.slots, slots.num_free) == (0, 4)
    assert slots.violations(0) == []


def test_slot_in_use_is_not_freed(queue):
    slots = OutgoingSlots(1)
    (fragment,) = fragments(queue, 1)
    slots.take(fragment)
    fragment.busy = True
    slots.free(fragment)
    assert slots.num_free == 0
    fragment.busy = False
    slots.free(fragment)
    assert slots.num_free == 1


def test_one_receiver_takes_at_most_half_of_the_slots(queue):
    slots, other = OutgoingSlots(4), SendQueue("other")
    for fragment in fragments(queue, 2):
        assert slots.has_room(fragment)
        slots.take(fragment)
    assert not slots.has_room(fragments(queue, 1)[0])
    assert slots.has_room(fragments(other, 1)[0])
    assert slots.has_room(fragments(other, 1, SPLIT)[0])
    slots.take(fragments(other, 1)[0])
    assert not slots.has_room(fragments(other, 1, SPLIT)[0]), "it needs two"


def test_violations_name_slots_that_are_free_twice(queue):
    slots = OutgoingSlots(1)
    (fragment,) = fragments(queue, 1)
    slots.take(fragment)
    slot = fragment.slot
    slots.free(fragment)
    fragment.slot = slot
    slots.free(fragment)
    assert slots.violations(0) == [
        "outgoing slots are free twice: [0, 0]",
        "0 outgoing slots used and 2 free of 1",
    ]
