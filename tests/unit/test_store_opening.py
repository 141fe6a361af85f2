"""Opening of stores: a medium that fails delays the use of a store, and not the engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ConfigError, LayoutError, StoreError
from aiokv.stores import StoreUse
from aiokv.stores.base import Result
from aiokv.stores.breaker import FIRST_PAUSE_SECONDS
from aiokv.stores.guard import CLOSE_SECONDS, StoreGuard
from aiokv.stores.proof import Proof
from aiokv.stores.use import RETRY_SECONDS
from aiokv.testing import ScriptedStore, running_clock, spin
from tests.unit.store_memory import Arena, digests, ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.stores.base import StoreMemory

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]


class Rig:
    """A guard on a scripted store, and its arena."""

    def __init__(self, store: ScriptedStore, **use: object) -> None:
        self.store = store
        self.guard = StoreGuard(StoreUse(store, **use))
        self.renew()

    def renew(self) -> None:
        """Take another arena, as after a sleep."""
        self.arena = Arena()
        self.proof = Proof(self.arena.memory)

    async def open(self) -> None:
        await self.guard.open(self.arena.memory, self.proof)

    async def reopen(self) -> None:
        await self.guard.reopen(self.arena.memory, self.proof)

    async def save(self, number: int) -> int:
        """Save the block with this id, payload and key."""
        self.arena.write((number,), (number,))
        await self.proof.seal(digests((number,)), ids(number))
        return int((await self.guard.save(digests((number,)), ids(number))).results[0])

    async def load(self, number: int, block: int) -> int:
        return int((await self.guard.load(digests((number,)), ids(block))).results[0])

    @property
    def states(self) -> tuple[str, str]:
        counts = self.guard.statistics()
        return counts.reading, counts.saving


@asynccontextmanager
async def guarded(store: ScriptedStore, **use: object) -> AsyncIterator[Rig]:
    """Close the guard at the end, and check that it leaves no task."""
    rig = Rig(store, **use)
    try:
        yield rig
    finally:
        store.end_script()
        await rig.guard.aclose()
        rig.proof.close()
        await spin(3)
        assert asyncio.all_tasks() == {asyncio.current_task()}


def failing(times: int, error: Exception | None = None) -> ScriptedStore:
    """Return a store whose first ``times`` openings fail."""
    store = ScriptedStore()
    for call in range(times):
        store.fail("open", call=call, error=error or StoreError("no disk"))
    return store


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events of the log about the state of the store."""
    return [record.event for record in caplog.records if record.levelname != "INFO"]


async def test_store_that_fails_to_open_is_used_when_a_later_attempt_succeeds(caplog):
    async with guarded(failing(3)) as rig:
        await rig.open()
        assert not rig.guard.is_open
        assert rig.states == ("open", "open")
        assert rig.guard.statistics().failure == "no disk"
        assert await rig.save(1) == Result.FAILED
        await running_clock().advance(7 * FIRST_PAUSE_SECONDS)  # pauses of 1, 2 and 4 times as long
        assert rig.guard.is_open
        assert rig.states == ("closed", "closed")
        assert rig.guard.statistics().failure == ""
        assert await rig.save(1) == Result.DONE
        assert await rig.load(1, 33) == Result.DONE
        assert rig.arena.holds(33, 1)
    assert logged(caplog) == ["store.not_opened", "store.available"]


async def test_attempts_have_growing_pauses_and_each_reason_is_logged_once(caplog):
    store = failing(8)
    store.fail("open", error=StoreError("disk full"))
    async with guarded(store) as rig:
        await rig.open()
        calls = []
        for second in range(200):
            await running_clock().advance(1.0)
            if len(calls) < store.calls["open"]:
                calls += [second] * (store.calls["open"] - len(calls))
        pauses = [after - before for before, after in pairwise(calls)]
        assert pauses == sorted(pauses)
        assert pauses[-1] == RETRY_SECONDS
    reasons = [r.reason for r in caplog.records if r.event == "store.not_opened"]
    assert reasons == ["no disk", "disk full"]


@pytest.mark.parametrize(
    "error", [ConfigError("bad option"), LayoutError("odd"), ImportError("no module")]
)
async def test_wrong_configuration_ends_the_start(error, caplog):
    async with guarded(failing(1, error)) as rig:
        with pytest.raises(type(error) if error.args[0] != "no module" else ConfigError) as raised:
            await rig.open()
        assert error.args[0] in str(raised.value)
        await running_clock().advance(100.0)
        assert rig.store.calls["open"] == 1
    assert logged(caplog) == []


async def test_required_store_that_fails_to_open_ends_the_start():
    async with guarded(failing(1), required=True) as rig:
        with pytest.raises(StoreError, match="no disk"):
            await rig.open()
        await running_clock().advance(100.0)
        assert rig.store.calls["open"] == 1


@pytest.mark.parametrize("error", [OSError("bad sector"), RuntimeError("odd")])
async def test_unknown_error_of_open_counts_as_a_failure_of_the_medium(error):
    async with guarded(failing(1, error)) as rig:
        await rig.open()
        assert rig.guard.statistics().failure == (
            f"store scripted:memory cannot be opened: {error.args[0]}"
        )
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert rig.guard.is_open


async def test_start_waits_for_a_hanging_store_up_to_its_deadline(caplog):
    store = ScriptedStore()
    gate = store.hold("open")
    async with guarded(store, deadline_seconds=2.0) as rig:
        start = asyncio.create_task(rig.open())
        await running_clock().advance(1.9)
        assert not start.done()
        assert rig.states == ("open", "open")  # during the first attempt, too
        await running_clock().advance(0.2)
        await start
        assert rig.states == ("open", "open")
        gate.open()
        await spin(5)
        assert rig.guard.is_open
        assert await rig.save(1) == Result.DONE
    assert logged(caplog) == ["store.not_opened", "store.available"]


async def test_error_after_the_start_went_on_is_logged_and_followed_by_attempts(caplog):
    store = ScriptedStore()
    gate = store.hold("open", call=0)
    store.fail("open", call=0, error=ConfigError("bad option"))
    async with guarded(store, deadline_seconds=2.0) as rig:
        start = asyncio.create_task(rig.open())
        await running_clock().advance(2.1)
        await start
        gate.open()
        await spin(5)
        assert rig.guard.statistics().failure == "bad option"
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert rig.guard.is_open
    assert logged(caplog) == ["store.not_opened", "store.not_opened", "store.available"]


class CancellingStore(ScriptedStore):
    """A store whose first opening cancels a task of its own, and awaits it."""

    async def open(self, memory: StoreMemory) -> None:
        if not self.calls["open"]:
            self.calls["open"] += 1
            inner = asyncio.create_task(asyncio.sleep(1.0))
            inner.cancel()
            await inner
        await super().open(memory)


async def test_store_that_cancels_its_own_opening_is_opened_by_a_later_attempt():
    async with guarded(CancellingStore()) as rig:
        await rig.open()
        assert "cancelled its own opening" in rig.guard.statistics().failure
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert rig.guard.is_open


async def test_start_waits_for_a_required_store_without_limit():
    store = ScriptedStore()
    gate = store.hold("open")
    async with guarded(store, required=True) as rig:
        start = asyncio.create_task(rig.open())
        await running_clock().advance(1000.0)
        assert not start.done()
        gate.open()
        await start
        assert rig.guard.is_open


async def test_close_ends_the_attempts():
    async with guarded(failing(100)) as rig:
        await rig.open()
        assert await rig.guard.aclose()
        assert rig.states == ("closed", "closed")
        calls = rig.store.calls["open"]
        await running_clock().advance(100.0)
        assert rig.store.calls["open"] == calls


class StubbornStore(ScriptedStore):
    """A store that opens although the call is cancelled."""

    async def open(self, memory: StoreMemory) -> None:
        with suppress(asyncio.CancelledError):
            await super().open(memory)


async def test_store_that_ignores_the_cancellation_of_open_is_closed_afterwards():
    store = StubbornStore()
    gate = store.hold("open")
    async with guarded(store, deadline_seconds=1.0) as rig:
        start = asyncio.create_task(rig.open())
        await running_clock().advance(1.1)
        await start
        closing = asyncio.create_task(rig.guard.aclose())
        await spin(5)
        assert store.calls["aclose"] == 0
        gate.open()
        assert await closing
        assert not rig.guard.is_open
        assert await rig.save(1) == Result.FAILED
        assert store.calls["aclose"] == 1


@pytest.mark.parametrize(
    ("operation", "ends_all"), [("open", False), ("open", True), ("aclose", False)]
)
async def test_store_that_opens_or_closes_after_the_close_was_cancelled_uses_the_memory(
    operation, ends_all
):
    store = StubbornStore()
    gate = store.hold(operation)
    async with guarded(store, deadline_seconds=1.0) as rig:
        start = asyncio.create_task(rig.open())
        await running_clock().advance(1.1)
        await start
        closing = asyncio.create_task(rig.guard.aclose())
        await spin(5)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks if ends_all else (closing,):
            task.cancel()
        await asyncio.wait({closing})
        await spin(5)
        assert not rig.guard.close_without_loop()
        gate.open()
        await rig.guard.aclose()
        assert rig.guard.close_without_loop()


async def test_close_reports_that_an_opening_in_progress_may_access_the_memory():
    store = ScriptedStore()
    gate = store.hold("open")
    async with guarded(store) as rig:
        start = asyncio.create_task(rig.open())
        await spin(3)
        closing = asyncio.create_task(rig.guard.aclose())
        await running_clock().advance(CLOSE_SECONDS + 1.0)
        assert not await closing
        await start
        gate.open()


async def test_store_that_failed_before_a_sleep_opens_on_the_new_memory():
    store = failing(2)
    async with guarded(store) as rig:
        await rig.open()
        assert await rig.guard.aclose()
        old = rig.arena
        rig.proof.close()
        rig.renew()
        await rig.reopen()  # the second failure
        assert not rig.guard.is_open
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert rig.guard.is_open
        old.write((1,), (9,))
        assert await rig.save(1) == Result.DONE
        assert await rig.load(1, 33) == Result.DONE
        assert rig.arena.holds(33, 1)


async def test_cancelled_reopening_is_continued_by_the_next_call():
    store = ScriptedStore()
    async with guarded(store) as rig:
        await rig.open()
        await rig.guard.aclose()
        gate = store.hold("open", call=1)
        for _ in range(2):
            waking = asyncio.create_task(rig.reopen())
            await spin(5)
            waking.cancel()
            await asyncio.wait({waking})
        assert store.calls["open"] == 2
        gate.open()
        await rig.reopen()
        assert rig.guard.is_open
        assert store.calls["open"] == 2


@pytest.mark.parametrize("error", [ConfigError("in use by process 7"), StoreError("no disk")])
async def test_reopening_is_tried_again_after_any_error(error):
    store = ScriptedStore()
    store.fail("open", call=1, error=error)
    async with guarded(store, required=True) as rig:
        await rig.open()
        await rig.guard.aclose()
        await rig.reopen()
        assert rig.states == ("open", "open")
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert rig.guard.is_open


async def test_store_that_is_not_used_for_reads_stays_off_while_it_fails_to_open():
    async with guarded(failing(1), read=False) as rig:
        await rig.open()
        assert rig.states == ("off", "open")
