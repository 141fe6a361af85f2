"""Gate: pauses and holds are counted, and each ends by itself."""

from __future__ import annotations

import pytest

from aiokv.errors import UsageError
from aiokv.scheduler.gate import Gate


def state(gate: Gate) -> tuple[bool, bool, bool]:
    return gate.closed, gate.held, gate.has_one_hold


def test_pause_closes_the_gate_without_a_hold():
    gate = Gate()
    assert state(gate) == (False, False, False)
    gate.change("pause")
    gate.change("pause")
    assert state(gate) == (True, False, False)
    gate.change("resume")
    assert state(gate) == (True, False, False)
    gate.change("resume")
    assert state(gate) == (False, False, False)


def test_hold_closes_the_gate_until_the_last_hold_ends():
    gate = Gate()
    gate.change("hold")
    assert state(gate) == (True, True, True)
    gate.change("hold")
    assert state(gate) == (True, True, False)
    gate.change("let_go")
    gate.change("pause")
    assert state(gate) == (True, True, False)
    gate.change("let_go")
    assert state(gate) == (True, False, False)


def test_hold_becomes_a_pause():
    gate = Gate()
    gate.change("hold")
    gate.change("hold_to_pause")
    assert state(gate) == (True, False, False)
    gate.change("resume")
    assert state(gate) == (False, False, False)


@pytest.mark.parametrize("held", [False, True])
def test_resume_without_a_pause_changes_nothing(held):
    gate = Gate()
    if held:
        gate.change("hold")
    before = state(gate)
    with pytest.raises(UsageError, match="without pause") as caught:
        gate.change("resume")
    assert ("updating_weights" in caught.value.hint) is held
    assert state(gate) == before
