"""Order of transfers, and transfers that wait for a step, without a loop."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.base.plan import ONLOAD, Priority, TransferPlan
from aiokv.errors import UsageError
from aiokv.testing import ManualEvent
from aiokv.worker.steps import StepEvents, WorkerStepClock
from aiokv.worker.transfers import StepGate, TransferQueue


class Waiting:
    """What queue and gate read of a plan."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self.priority: int = plan.priority


def transfer(number: int, priority: int = Priority.DEMAND, after_step: int = 0) -> Any:
    return Waiting(
        TransferPlan(
            transfer_id=number,
            route=ONLOAD,
            target_blocks=b"",
            source_blocks=b"",
            priority=priority,
            after_step=after_step,
        )
    )


def numbers(queue: TransferQueue) -> list[int]:
    found = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        found.append(first.plan.transfer_id)
    return found


def test_transfers_are_ordered_by_priority_then_arrival() -> None:
    """A demand onload goes before a backup."""
    queue = TransferQueue()
    order = [Priority.BACKUP, Priority.DEMAND, Priority.PREFETCH, Priority.JOINED, Priority.DEMAND]
    for number, priority in enumerate(order):
        queue.push(transfer(number, priority))
    assert len(queue) == 5
    assert numbers(queue) == [1, 4, 3, 2, 0]
    assert len(queue) == 0


def test_removed_transfers_are_skipped_and_not_referenced() -> None:
    queue = TransferQueue()
    waiting = [transfer(number) for number in range(100)]
    for each in waiting:
        queue.push(each)
    for each in waiting[:99]:
        queue.remove(each)
    assert len(queue) == 1
    assert len(queue._heap) < 40
    assert numbers(queue) == [99]


def test_raised_priority_moves_a_transfer_forward_and_keeps_its_age() -> None:
    queue = TransferQueue()
    waiting = [transfer(number, priority=2) for number in range(4)]
    for each in waiting:
        queue.push(each)
    for number in (3, 1):
        waiting[number].priority = 0
        queue.raise_priority(waiting[number])
    assert len(queue) == 4
    assert numbers(queue) == [1, 3, 0, 2]


def test_open_step_holds_transfers_and_its_close_queues_them_in_order() -> None:
    clock = WorkerStepClock()
    gate = StepGate(clock)
    assert not gate.hold(transfer(9))
    for number, step in enumerate([3, 1, 2, 1, 5]):
        assert gate.hold(transfer(number, after_step=step))
    assert len(gate) == 5
    clock.close(3)
    assert [freed.plan.transfer_id for freed in gate.free()] == [1, 3, 2, 0]
    assert len(gate) == 1
    assert not gate.hold(transfer(9, after_step=3))


def test_a_step_closes_once() -> None:
    clock = WorkerStepClock()
    clock.close(2)
    for step in (1, 2):
        with pytest.raises(
            UsageError, match=f"step {step} is closed already; the last closed step is 2"
        ):
            clock.close(step)
    assert clock.closed == 2


def test_a_held_transfer_can_be_taken_out() -> None:
    clock = WorkerStepClock()
    gate = StepGate(clock)
    held = transfer(1, after_step=4)
    gate.hold(held)
    gate.remove(held)
    clock.close(4)
    assert gate.free() == []
    assert len(gate) == 0


def test_the_event_of_a_step_is_the_first_one_not_before_it() -> None:
    events = StepEvents()
    two, four = ManualEvent(), ManualEvent()
    events.add(2, two)
    events.add(3, None)  # reports that step 3 had finished when it was closed
    events.add(4, four)
    assert events.event_for(1) is two
    assert events.event_for(2) is two
    assert events.event_for(3) is None
    assert events.event_for(4) is four
    events.drop(2)
    assert events.event_for(2) is None
    assert events.event_for(3) is None
    assert events.event_for(4) is four
    events.drop(4)
    events.add(5, None)
    assert len(events) == 0
    assert events.event_for(5) is None
