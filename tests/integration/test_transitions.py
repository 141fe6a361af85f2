"""Recorded transitions of a scheduler give equal results when they are run again."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import msgspec
import pytest

from aiokv import CacheConfig, CacheEngine, Item
from aiokv.errors import LeaseError, UsageError
from aiokv.scheduler.fetches import Fetches
from aiokv.scheduler.peers import ReceivesAndSends
from aiokv.scheduler.pins import Pins
from aiokv.scheduler.retention import Retention
from aiokv.scheduler.scheduler import TRANSITIONS, CacheScheduler
from aiokv.scheduler.store_saver import StoreSaver
from aiokv.testing import Mismatch, TransitionLog, record, replay_transitions

if TYPE_CHECKING:
    from pathlib import Path

A = list(range(33))


def engine_of(**changes: object) -> CacheEngine:
    sizes = {"device_blocks": 16, "host_blocks": 32, "block_tokens": 4}
    return CacheEngine(CacheConfig(**{**sizes, **changes}))


async def use(engine: CacheEngine) -> None:
    """Backups, an onload, a swap, a fork, a pin, lines, a refusal, an update of the weights."""
    async with engine:
        async with engine.match(A, owner="first", items=[Item(b"cat", 2, 4)]) as lease:
            await lease.allocate(33)
            lease.commit(33)
            with pytest.raises(LeaseError):
                lease.commit(34)
            with engine.computing([lease]):
                lease.truncate(32)
            lease.fork().release()
        await engine.drain()
        await engine.evict(16)
        async with engine.match(A, items=[Item(b"cat", 2, 4)]) as lease:
            await lease.allocate(33)
            await lease.layers.wait_all()
            await lease.preempt(swap=True)
            await lease.resume(33)
            waiting = engine.match([7] * 40)
            task = asyncio.create_task(waiting.allocate(40))
            await asyncio.sleep(0)
            engine.extend([lease], 1)
        await task
        waiting.release()
        pin = await engine.pin(A, items=[Item(b"cat", 2, 4)])
        async with engine.updating_weights():
            pass
        assert pin.released
        engine.step()


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("salted", [None, 24])
async def test_replayed_transitions_equal_the_recorded_ones(
    policy: str, salted: int | None
) -> None:
    engine = engine_of(write_policy=policy, salt_quota_blocks=salted)
    with record(engine) as recording:
        await use(engine)
    names = {transition.name for transition in recording.log.transitions}
    assert {"match", "allocate", "commit", "complete", "swap_out", "pins.pin", "reset"} <= names
    assert replay_transitions(recording.log) == len(recording.log.transitions) > 30


@pytest.mark.asyncio
async def test_a_log_in_a_file_is_replayed_as_one_in_memory(tmp_path: Path) -> None:
    engine = engine_of()
    with record(engine, tmp_path / "log.jsonl") as recording:
        await use(engine)
    assert recording.log.transitions == []
    log = TransitionLog.load(tmp_path / "log.jsonl")
    assert log.config["device_blocks"] == 16
    assert replay_transitions(log) == len(log.transitions) > 30


@pytest.mark.asyncio
@pytest.mark.parametrize("change", ["result", "effects", "plan"])
async def test_a_transition_that_differs_is_named(change: str) -> None:
    engine = engine_of()
    with record(engine) as recording:
        await use(engine)
    log = recording.log
    index = next(
        i for i, transition in enumerate(log.transitions) if "submit" in transition.effects
    )
    changed = msgspec.to_builtins(log.transitions[index])
    if change == "result":
        changed["result"] = 99
    elif change == "effects":
        del changed["effects"]["submit"]
    else:
        changed["effects"]["submit"][0]["after_step"] += 1
    log.transitions[index] = msgspec.convert(changed, type(log.transitions[index]))
    with pytest.raises(Mismatch, match=f"transition {index}, ") as error:
        replay_transitions(log)
    assert error.value.recorded is log.transitions[index]


@pytest.mark.asyncio
async def test_recording_ends_with_stop() -> None:
    engine = engine_of()
    recording = record(engine)
    async with engine:
        engine.match(A).release()
        recorded = len(recording.log.transitions)
        recording.stop()
        recording.stop()
        engine.match(A).release()
        assert len(recording.log.transitions) == recorded == 3


@pytest.mark.asyncio
async def test_an_engine_that_was_entered_cannot_be_recorded() -> None:
    engine = engine_of()
    async with engine:
        with pytest.raises(UsageError, match="empty cache"):
            record(engine)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not a log"),
        ('{"version": 1', "not a log"),
        ('{"version": 7, "config": {}}', "version 7"),
        ('{"version": 2, "config": {}}\nnonsense\n', "line 2"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=match):
        TransitionLog.load(path)


PARTS = {
    "": CacheScheduler,
    "fetches.": Fetches,
    "peers.": ReceivesAndSends,
    "pins.": Pins,
    "retention.": Retention,
    "store_saver.": StoreSaver,
}


def test_every_transition_returns_effects_and_is_recorded() -> None:
    methods = {
        prefix + name: method
        for prefix, owner in PARTS.items()
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }
    returning = {
        name
        for name, method in methods.items()
        if method.__annotations__["return"] == "Done"
        or method.__annotations__["return"].endswith("Effects]")
    }
    assert returning == set(TRANSITIONS)
    assert set(methods) - returning == {
        "allocatable_blocks",
        "applied",
        "can_allocate",
        "extendable_blocks",
        "fetches.check",
        "fetches.ended",
        "peers.cancel_abandoned",
        "peers.note_ends",
        "pins.check",
        "pins.end_all",
        "pins.end_lost",
        "pins.end_used",
        "store_saver.want",
        "violations",
    }
