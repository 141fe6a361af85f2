"""A short soak, and negative controls of its checks."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.scheduler.events import BlockEvents
from aiokv.statistics import LeasePhase, TransferSpan
from aiokv.stores import proof
from aiokv.testing import TransitionLog, replay_transitions
from aiokv.worker.checksums import Checksums
from tests.harness.flaky import ChaosDevice
from tests.soak import __main__ as soak
from tests.soak.load import Load, Violation
from tests.soak.peers import Prefill
from tests.soak.records import RoundRecords
from tests.soak.stores import RoundStores

ROUNDS = 100  # by far more than a soak needs until it has found or done what a test expects


@pytest.fixture
def short_rounds(monkeypatch):
    """Let a soak end soon after it has found something."""
    monkeypatch.setattr(soak, "ROUND_OPERATIONS", 1500)
    monkeypatch.setattr(soak, "PEERS", (False,))


def test_short_soak(monkeypatch, tmp_path):
    """The goals are reached by work, not by time: a busy machine takes longer."""
    monkeypatch.setattr(soak, "ROUND_OPERATIONS", 1000)
    log = tmp_path / "transitions.jsonl"

    def is_enough(totals: soak.Totals) -> bool:
        return (
            totals.rounds >= 4
            and totals.operations > 500
            and min(totals.checked_blocks, totals.cancelled, totals.faults) > 0
            and totals.onloaded_blocks > 0
            and len(TransitionLog.load(log).transitions) > 100
        )

    totals = soak.soak(7, log, ROUNDS, enough=is_enough)
    assert is_enough(totals)
    assert replay_transitions(TransitionLog.load(log)) > 100, "those of the last round"


@pytest.mark.usefixtures("short_rounds")
def test_failed_copy_reported_as_complete_is_detected_and_leaves_its_log(
    monkeypatch, capsys, tmp_path
):
    """Negative control: a failed copy is reported as complete."""
    monkeypatch.setattr(ChaosDevice, "ended", _drop_the_failure)
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "DEVICES", ("chaos",))
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    printed = capsys.readouterr().err
    assert "VIOLATION" in printed
    assert "seed 3, round" in printed
    assert re.search(r"^\d+ client-\d+ [a-z_]+", printed, re.MULTILINE), "the last operations"
    assert str(log) in printed
    assert replay_transitions(TransitionLog.load(log)) > 10


@pytest.mark.usefixtures("short_rounds")
def test_missing_checksum_comparison_is_detected(monkeypatch, capsys, tmp_path):
    """Negative control: corrupted host blocks pass the checksum comparison."""
    monkeypatch.setattr(Checksums, "verify", lambda self, plan, failure: failure)
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(Load, "acts", lambda load: [load.corrupt])
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION" in capsys.readouterr().err


@pytest.mark.usefixtures("short_rounds")
def test_corrupted_blocks_are_detected_and_named(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(Load, "acts", lambda load: [load.corrupt])
    log = tmp_path / "transitions.jsonl"
    totals = soak.soak(2, log, ROUNDS, enough=lambda totals: totals.corrupted_found > 0)
    assert totals.corrupted_found > 0


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("stores", [(), ("disk", "scripted")])
def test_intact_blocks_are_not_reported(monkeypatch, tmp_path, stores):
    """Onloads are verified, and the operator corrupts no block."""
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(soak, "STORES", (stores,))
    monkeypatch.setattr(Load, "acts", lambda load: [load.evict, load.reset])
    log = tmp_path / "transitions.jsonl"
    totals = soak.soak(
        1,
        log,
        ROUNDS,
        enough=lambda totals: totals.rounds >= 2 and totals.onloaded_blocks > 0,
    )
    assert totals.onloaded_blocks > 0
    assert (totals.corrupted_blocks, totals.corrupted_found) == (0, 0)


@pytest.mark.usefixtures("short_rounds")
def test_report_of_an_intact_block_is_detected(monkeypatch, capsys, tmp_path):
    """Negative control: checksums are recorded of other bytes than those that are copied."""
    record = Checksums.record

    def record_wrong(self, device_ids):
        record(self, device_ids)
        self._device.update((block, 0) for block in device_ids.tolist())

    monkeypatch.setattr(Checksums, "record", record_wrong)
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(soak, "VERIFY", ("checksum",))
    monkeypatch.setattr(Load, "acts", lambda load: [load.evict])
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION: an intact block is reported" in capsys.readouterr().err


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("kind", ["disk", "scripted"])
def test_blocks_of_stores_are_read_after_a_restart(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(soak, "STORES", ((kind,),))
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))

    def is_covered(totals: soak.Totals) -> bool:
        moved = min(totals.saved_blocks, totals.fetched_blocks)
        if kind == "disk":
            return min(moved, totals.disk_loads_compared, totals.disk_blocks_found_again) > 0
        return min(moved, totals.store_faults) > 0

    totals = soak.soak(
        4,
        tmp_path / "transitions.jsonl",
        ROUNDS,
        enough=lambda totals: totals.rounds >= 2 and is_covered(totals),
    )
    assert totals.engines > totals.rounds
    assert is_covered(totals)


@pytest.mark.usefixtures("short_rounds")
def test_missing_proof_of_loaded_blocks_is_detected(monkeypatch, capsys, tmp_path):
    """Negative control: wrong bytes of a store count as loaded."""
    monkeypatch.setattr(proof, "verify_blocks", lambda *args: np.zeros(len(args[3]), np.uint8))
    monkeypatch.setattr(soak, "STORES", (("scripted",),))
    monkeypatch.setattr(soak, "POLICIES", ("write_through",))
    monkeypatch.setattr(RoundStores, "acts", lambda stores: [stores.damage])
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION" in capsys.readouterr().err


@pytest.mark.usefixtures("short_rounds")
def test_views_of_subscribers_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "EVENTS_SHARE", 1.0)

    def is_covered(totals: soak.Totals) -> bool:
        return totals.event_views_compared > 50 and totals.event_messages_lost > 0

    totals = soak.soak(5, tmp_path / "transitions.jsonl", ROUNDS, enough=is_covered)
    assert is_covered(totals)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("change", ["stored", "removed"])
def test_missing_event_is_detected(monkeypatch, capsys, tmp_path, change):
    """Negative control: every tenth change of one kind is not reported."""
    take, changes = BlockEvents.take, itertools.count()

    def take_most(self, max_blocks):
        runs = take(self, max_blocks)
        return [run for run in runs if run.change != change or next(changes) % 10 != 9]

    monkeypatch.setattr(soak, "EVENTS_SHARE", 1.0)
    monkeypatch.setattr(BlockEvents, "take", take_most)
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION: events: " in capsys.readouterr().err


def _drop_the_failure(self, copy):
    copy._error = None
    super(ChaosDevice, self).ended(copy)


def test_command_refuses_invalid_arguments():
    with pytest.raises(SystemExit):
        soak.main(["--rounds", "many"])


@pytest.mark.usefixtures("short_rounds")
def test_blocks_of_another_engine_are_received(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "PEERS", (True,))
    totals = soak.soak(
        4,
        tmp_path / "transitions.jsonl",
        ROUNDS,
        enough=lambda totals: totals.received_tokens > 100,
    )
    assert totals.received_tokens > 100
    assert totals.peer_sends > 0


@pytest.mark.usefixtures("short_rounds")
def test_wrong_blocks_of_another_engine_are_detected(monkeypatch, capsys, tmp_path):
    """Negative control: the other engine has other weights under the same name."""
    monkeypatch.setattr(soak, "PEERS", (True,))

    def begin(prefill, *arguments):
        prefill.side.memory.weights = 99
        prefill_begin(prefill, *arguments)

    prefill_begin = Prefill.begin
    monkeypatch.setattr(Prefill, "begin", begin)
    log = tmp_path / "transitions.jsonl"
    assert soak.main(["--rounds", str(ROUNDS), "--seed", "3", "--log", str(log)]) == 1
    assert "VIOLATION" in capsys.readouterr().err


@pytest.mark.parametrize(
    "problem", ["ended twice", "not in order", "overlap", "records of attention onload"]
)
def test_wrong_records_are_found(problem):
    engine = CacheEngine(CacheConfig(device_blocks=8))
    times: dict[str, Any] = {"queued_at": 1.0, "started_at": 2.0, "ended_at": 3.0}
    span: dict[str, Any] = {
        "transfer_id": 1,
        "route": "offload",
        "group": "attention",
        "blocks": 1,
        "num_bytes": 1,
        "outcome": "failed",
    }
    phase: dict[str, Any] = {
        "lease_id": 1,
        "owner": "r1",
        "phase": "granted",
        "outcome": "released",
    }
    records = {
        "ended twice": [TransferSpan(**span, **times)] * 2,
        "not in order": [TransferSpan(**span, **times | {"started_at": 4.0})],
        "overlap": [LeasePhase(**phase, began_at=t, ended_at=t + 2.0) for t in (1.0, 2.0)],
        "records of attention onload": [
            TransferSpan(**span | {"route": "onload", "outcome": "done"}, **times)
        ],
    }
    checker = RoundRecords(engine, random.Random(1))  # random() < 0.5
    checker.__enter__()
    for record in records[problem]:
        checker._note(record, None)
    with pytest.raises(Violation, match=problem):
        checker.__exit__(None, None, None)
