"""SendQueue and OutgoingSlots: credits are asked for once, and slots are free again once."""

from __future__ import annotations

import pytest

from aiokv.base.plan import SEND, TransferPlan, id_bytes
from aiokv.peers.departures import Parcel, Send, Target
from aiokv.peers.messages import Return, SlotCredit
from aiokv.peers.outgoing_slots import OutgoingSlots
from aiokv.peers.send_queue import SendQueue

from .world import EQUAL, SPLIT

CREDITS = [SlotCredit(slot, 1) for slot in range(4)]


def parcels(queue, count, mapping=EQUAL):
    ids = id_bytes(list(range(count)))
    plan = TransferPlan(transfer_id=1, route=SEND, source_blocks=ids, target_blocks=ids)
    send, target = Send(plan, [0]), Target(queue.connection, (mapping,))
    return [Parcel(send, block, queue, target, b"") for block in range(count)]


@pytest.fixture
def queue():
    return SendQueue("connection")


# --- credits --------------------------------------------------------------------------------------


def test_one_credit_is_asked_for_per_parcel(queue):
    first, second, third = parcels(queue, 3)
    assert queue.add([first, second]) == 2
    assert queue.add([third]) == 1
    queue.add_credits(CREDITS[:3])
    assert [queue.take() for _ in range(3)] == [first, second, third]
    assert [parcel.credit for parcel in (first, second, third)] == CREDITS[:3]
    assert queue.violations() == []


def test_spare_credits_are_used_before_others_are_asked_for(queue):
    first, second, third = parcels(queue, 3)
    queue.add([first])
    queue.add_credits(CREDITS[:1])
    first.dropped = True
    queue.remove_dropped()
    assert queue.violations() != []
    assert queue.add([second, third]) == 1
    assert queue.violations() == []


def test_credits_and_wishes_that_no_parcel_waits_for_are_given_back(queue):
    waiting = parcels(queue, 4)
    queue.add(waiting)
    queue.add_credits(CREDITS[:3])
    for parcel in waiting[1:]:
        parcel.dropped = True
    queue.remove_dropped()
    assert queue.take_spare() == Return(slots=[CREDITS[2], CREDITS[1]], unwanted=1)
    assert queue.take_spare() is None
    assert queue.next is waiting[0]


def test_parcel_without_a_credit_is_not_next(queue):
    queue.add(parcels(queue, 1))
    assert queue.next is None
    queue.add_credits(CREDITS[:1])
    assert queue.next is not None
    queue.disconnect()
    assert queue.next is None


# --- slots ----------------------------------------------------------------------------------------


def test_parcel_that_is_cut_out_of_a_block_takes_two_slots(queue):
    slots = OutgoingSlots(4)
    (parcel,) = parcels(queue, 1, SPLIT)
    slots.take(parcel)
    assert (queue.slots, slots.num_free) == (2, 2)
    slots.free_block(parcel)
    slots.free_block(parcel)  # again, after an interrupt
    assert (queue.slots, slots.num_free) == (1, 3)
    slots.free(parcel)
    slots.free(parcel)
    assert (queue.slots, slots.num_free) == (0, 4)
    assert slots.violations(0) == []


def test_slot_in_use_is_not_freed(queue):
    slots = OutgoingSlots(1)
    (parcel,) = parcels(queue, 1)
    slots.take(parcel)
    parcel.busy = True
    slots.free(parcel)
    assert slots.num_free == 0
    parcel.busy = False
    slots.free(parcel)
    assert slots.num_free == 1


def test_one_receiver_takes_at_most_half_of_the_slots(queue):
    slots, other = OutgoingSlots(4), SendQueue("other")
    for parcel in parcels(queue, 2):
        assert slots.has_room(parcel)
        slots.take(parcel)
    assert not slots.has_room(parcels(queue, 1)[0])
    assert slots.has_room(parcels(other, 1)[0])
    assert slots.has_room(parcels(other, 1, SPLIT)[0])
    slots.take(parcels(other, 1)[0])
    assert not slots.has_room(parcels(other, 1, SPLIT)[0]), "it needs two"


def test_violations_name_slots_that_are_free_twice(queue):
    slots = OutgoingSlots(1)
    (parcel,) = parcels(queue, 1)
    slots.take(parcel)
    slot = parcel.slot
    slots.free(parcel)
    parcel.slot = slot
    slots.free(parcel)
    assert slots.violations(0) == [
        "outgoing slots are free twice: [0, 0]",
        "0 outgoing slots used and 2 free of 1",
    ]
