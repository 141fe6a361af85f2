"""The soak, a short one; and that it finds what it looks for."""

from __future__ import annotations

import pytest

from aiokv.testing import TransitionLog, replay_transitions
from aiokv.testing.flaky import ChaosDevice
from aiokv.worker.checksums import Checksums
from tests.soak import __main__ as soak
from tests.soak.load import Load


def test_three_seconds_of_soak(tmp_path):
    log = tmp_path / "transitions.jsonl"
    totals = soak.soak(3.0, seed=7, log=log)
    assert totals.rounds >= 4
    assert totals.operations > 500
    assert min(totals.checked_blocks, totals.cancelled, totals.faults) > 0
    assert totals.onloaded_blocks > 0
    assert replay_transitions(TransitionLog.load(log)) > 100, "those of the last round"


def test_a_copy_that_lies_is_found_and_leaves_the_transitions(monkeypatch, capsys, tmp_path):
    """Negative control: garbage is reported as moved."""
    monkeypatch.setattr(ChaosDevice, "ended", _forget_the_failure)
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "DEVICES", ("chaos",))
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--seconds", "10", "--seed", "3", "--log", str(log)]) == 1
    told = capsys.readouterr().err
    assert "VIOLATION" in told
    assert "seed 3, round" in told
    assert " match " in told, "the last operations"
    assert str(log) in told
    assert replay_transitions(TransitionLog.load(log)) > 10


def test_a_checksum_that_nobody_compares_is_found(monkeypatch, capsys, tmp_path):
    """Negative control: spoilt host blocks are taken for good."""
    monkeypatch.setattr(Checksums, "verify", lambda self, plan, failure: failure)
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(Load, "acts", lambda load: [load.spoil])
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--seconds", "10", "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION" in capsys.readouterr().err


def test_spoilt_blocks_are_found_and_named(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(Load, "acts", lambda load: [load.spoil])
    totals = soak.soak(3.0, seed=2, log=tmp_path / "transitions.jsonl")
    assert totals.spoilt_found > 0


def _forget_the_failure(self, copy):
    copy._error = None
    super(ChaosDevice, self).ended(copy)


def test_the_command_refuses_nonsense():
    with pytest.raises(SystemExit):
        soak.main(["--seconds", "soon"])
