"""StepClock and Gate: step numbers, and pauses that prevent grants."""

from __future__ import annotations

import pytest

from aiokv.errors import UsageError
from aiokv.scheduler.clock import StepClock
from aiokv.scheduler.gate import Gate


def test_steps_are_numbered_from_one_and_finish_in_order():
    clock = StepClock()
    assert [clock.close() for _ in range(4)] == [1, 2, 3, 4]
    assert (clock.next, clock.last_unfinished) == (5, 4)
    clock.finish(2)
    clock.finish(2)  # idempotent
    clock.finish(1)
    assert clock.last_unfinished == 4
    clock.finish(4)
    assert clock.last_unfinished == 0


def test_step_that_finished_before_it_was_closed_is_not_unfinished():
    """A worker may report the end of a step from inside the call that closes it."""
    clock = StepClock()
    clock.finish(1)
    assert clock.close() == 1
    assert clock.last_unfinished == 0
    assert clock.close() == 2
    assert clock.last_unfinished == 2


def test_open_step_is_named_only_when_steps_matter():
    clock = StepClock()
    assert clock.open == 0
    clock.track(True)
    assert clock.open == 1
    clock.close()
    assert clock.open == 2


def test_gate_is_closed_while_there_is_a_pause_or_a_hold():
    gate = Gate()
    for change, closed in (
        ("pause", True),
        ("pause", True),
        ("hold", True),
        ("resume", True),
        ("resume", True),
        ("let_go", False),
        ("hold", True),
        ("hold_to_pause", True),
        ("resume", False),
    ):
        gate.change(change)  # type: ignore[arg-type]
        assert gate.closed is closed, change


@pytest.mark.parametrize("held", [False, True])
def test_resume_without_a_pause_is_refused_and_ends_no_hold(held: bool):
    gate = Gate()
    if held:
        gate.change("hold")
    with pytest.raises(UsageError, match="without pause"):
        gate.change("resume")
    assert gate.closed is held
