"""StoreGuard: no failure of a store reaches a request, and no wrong byte passes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.stores import StoreUse
from aiokv.stores import cost as cost_module
from aiokv.stores import guard as guard_module
from aiokv.stores.base import Result
from aiokv.stores.breaker import FIRST_PAUSE_SECONDS
from aiokv.stores.cost import HALF_LIFE_SECONDS
from aiokv.stores.guard import StoreGuard
from aiokv.stores.proof import Proof
from aiokv.testing import ScriptedStore, running_clock, spin
from tests.unit.store_memory import Arena, digests, ids

if TYPE_CHECKING:
    from aiokv.base.statistics import GuardStatistics, StoreStatistics

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

DONE, MISSING, WRONG, REFUSED, FAILED, PRESENT = map(int, Result)


class Guarded:
    """A guard on a scripted store, opened."""

    def __init__(self, store: ScriptedStore | None = None, **use: object) -> None:
        self.store = store or ScriptedStore()
        self.arena = Arena()
        self.guard = StoreGuard(StoreUse(self.store, **use))
        self.proof = Proof(self.arena.memory)

    async def __aenter__(self) -> Self:
        await self.guard.open(self.arena.memory, self.proof)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.store.end_script()
        await self.guard.aclose()
        self.proof.close()

    async def save(self, *numbers: int) -> list[int]:
        """Save blocks whose ids, payloads and keys belong to the numbers."""
        self.arena.write(numbers, numbers)
        await self.proof.seal(digests(numbers), ids(*numbers))
        return (await self.guard.save(digests(numbers), ids(*numbers))).results.tolist()

    async def load(self, *numbers: int, shift: int = 32) -> list[int]:
        blocks = ids(*(number + shift for number in numbers))
        return (await self.guard.load(digests(numbers), blocks)).results.tolist()

    async def lookup(self, *numbers: int) -> list[bool]:
        return (await self.guard.lookup(digests(numbers))).tolist()

    @property
    def counts(self) -> GuardStatistics:
        return self.guard.statistics()


async def test_saved_blocks_are_found_and_loaded():
    async with Guarded() as g:
        assert await g.save(1, 2) == [DONE, DONE]
        assert await g.lookup(1, 3, 2) == [True, False, True]
        assert await g.load(1, 3, 2) == [DONE, MISSING, DONE]
        assert g.arena.holds(33, 1)
        assert g.arena.holds(34, 2)
        counts = g.counts
    assert (counts.saved_blocks, counts.loaded_blocks, counts.missing_blocks) == (2, 2, 1)
    assert (counts.lookups, counts.lookup_keys, counts.found_keys) == (1, 3, 2)
    assert counts.loaded_bytes == 2 * 1000


@pytest.mark.parametrize("smallest_large", [1, 1 << 20], ids=["bandwidth", "latency"])
async def test_blocks_that_a_store_has_count_as_present_and_move_no_bytes(
    monkeypatch, smallest_large
):
    monkeypatch.setattr(cost_module, "LATENCY_BYTES", smallest_large)
    store = ScriptedStore(keeps_objects=True)
    async with Guarded(store) as g:
        store.delay("save", seconds=1.0)
        for numbers, results in (((1, 2), [DONE, DONE]), ((1, 3), [PRESENT, DONE])):
            saving = asyncio.create_task(g.save(*numbers))
            await running_clock().advance(1.0)
            assert saving.result() == results
        before = g.counts
        store.end_script()
        for _ in range(20):
            assert await g.save(1, 2, 3) == [PRESENT] * 3  # the clock stands still
        counts = g.counts
    assert (counts.saved_blocks, counts.saved_bytes) == (3, 3_000)
    assert (before.present_blocks, counts.present_blocks) == (1, 61)
    assert counts.save_seconds == before.save_seconds
    assert counts.save_bytes_per_second == before.save_bytes_per_second
    if smallest_large == 1:
        older = 0.5 ** (1.0 / HALF_LIFE_SECONDS)  # weight of the first save
        expected = (2_000 * older + 1_000) / (older + 1)
        assert counts.save_bytes_per_second == pytest.approx(expected)
    else:
        assert counts.save_seconds == pytest.approx(1.0)


async def test_present_is_no_result_of_a_load():
    async with Guarded() as g:
        await g.save(1)
        g.store.answer("load", results=[PRESENT])
        assert await g.load(1) == [FAILED]
        assert (g.counts.loaded_blocks, g.counts.failed_blocks) == (0, 1)


async def test_wrong_bytes_are_counted_removed_and_logged_once(caplog):
    async with Guarded() as g:
        g.store.corrupt("save", call=0, block=1)
        await g.save(1, 2, 3)
        with caplog.at_level(logging.WARNING):
            assert await g.load(1, 2, 3) == [DONE, WRONG, DONE]
            await spin(5)
            assert await g.load(1, 2, 3) == [DONE, MISSING, DONE]
            g.store.corrupt("load")
            assert await g.load(1) == [WRONG]
            await spin(5)
        assert g.counts.wrong_blocks == 2
    assert [r.event for r in caplog.records] == ["store.wrong_block"]


async def test_wrong_objects_are_quarantined_where_the_store_can():
    class Quarantine(ScriptedStore):
        quarantined: bytes = b""

        async def quarantine(self, keys: bytes) -> np.ndarray:
            self.quarantined += keys
            return await self.remove(keys)

    store = Quarantine()
    async with Guarded(store) as g:
        store.corrupt("save", call=0, block=1)
        await g.save(1, 2, 3)
        await g.load(1, 2, 3)
        await spin(5)
        assert store.quarantined == digests([2])
        assert await g.load(2) == [MISSING]


async def test_results_of_a_store_may_be_read_only():
    class ReadOnly(ScriptedStore):
        async def load(self, keys: bytes, blocks: np.ndarray) -> np.ndarray:
            return np.frombuffer((await super().load(keys, blocks)).tobytes(), np.uint8)

    async with Guarded(ReadOnly()) as g:
        g.store.corrupt("save", call=0, block=1)
        await g.save(1, 2)
        assert await g.load(1, 2) == [DONE, WRONG]


async def test_object_of_another_key_is_wrong():
    async with Guarded() as g:
        await g.save(1, 2)
        one, two = list(g.store.objects)
        g.store.objects[one], g.store.objects[two] = g.store.objects[two], g.store.objects[one]
        assert await g.load(1, 2) == [WRONG, WRONG]


async def test_object_that_is_cut_is_wrong():
    async with Guarded() as g:
        await g.save(1)
        (key,) = g.store.objects
        g.store.objects[key] = g.store.objects[key][:-40]
        assert await g.load(1) == [WRONG]


async def test_large_batches_are_verified_in_a_thread(monkeypatch):
    monkeypatch.setattr("aiokv.stores.proof.INLINE_BYTES", 1)
    async with Guarded() as g:
        await g.save(1, 2)
        g.store.corrupt("load", block=0)
        assert await g.load(1, 2) == [WRONG, DONE]


@pytest.mark.parametrize("operation", ["lookup", "load", "save"])
async def test_errors_of_a_store_are_results(operation):
    async with Guarded() as g:
        await g.save(1)
        for error in (StoreError("down"), OSError(5, "EIO"), ValueError()):
            g.store.end_script()
            g.store.fail(operation, error=error)
            expected = {"lookup": [False], "load": [FAILED], "save": [FAILED]}[operation]
            assert await getattr(g, operation)(1) == expected


async def test_traceback_of_a_scripted_error_does_not_grow_with_each_operation():
    store, error, lengths = ScriptedStore(), StoreError("down"), set()
    store.fail("lookup", error=error)
    for _ in range(3):
        with pytest.raises(StoreError) as caught:
            await store.lookup(b"")
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("operation", "results"),
    [
        ("lookup", [True]),
        ("load", [0]),
        ("load", [0, 9]),
        ("load", ["x", "y"]),
        ("save", []),
        ("save", [0, 0, 0]),
    ],
)
async def test_malformed_results_are_failures(operation, results):
    async with Guarded() as g:
        await g.save(1, 2)
        g.store.answer(operation, results=results)
        expected = [False] * 2 if operation == "lookup" else [FAILED] * 2
        if results == ["x", "y"]:
            g.store.end_script()
            g.store.fail(operation, error=TypeError("no results"))
        assert await getattr(g, operation)(1, 2) == expected


async def test_deadline_ends_the_call_and_the_blocks_stay_owned():
    async with Guarded() as g:
        await g.save(1)
        gate = g.store.hold("load")
        call = asyncio.create_task(g.guard.load(digests([1]), ids(33)))
        await running_clock().advance(4.9)
        assert not call.done()
        await running_clock().advance(0.2)
        reply = call.result()
        assert reply.results.tolist() == [FAILED]
        assert not reply.overdue.done()
        assert g.store.in_use[33] == 1
        assert (g.counts.timeouts, g.counts.overdue, g.counts.running) == (1, 1, 1)
        gate.open()
        await asyncio.wait({reply.overdue})
        assert g.store.in_use[33] == 0
        await spin(2)
        assert g.counts.running == 0


async def test_lookup_has_a_shorter_deadline():
    async with Guarded(lookup_deadline_seconds=0.1) as g:
        g.store.delay("lookup", seconds=1.0)
        call = asyncio.create_task(g.lookup(1))
        await running_clock().advance(0.09)
        assert not call.done()
        await running_clock().advance(0.02)
        assert call.result() == [False]


async def opened(g: Guarded, *, operation: str = "lookup") -> None:
    """Let the breaker open."""
    g.store.fail(operation)
    for _ in range(3):
        await getattr(g, operation)(1)
    assert "open" in (g.counts.reading, g.counts.saving)


async def test_breaker_opens_after_failures_in_a_row_and_is_logged_once(caplog):
    async with Guarded() as g:
        with caplog.at_level(logging.WARNING):
            g.store.fail("lookup", call=0)
            g.store.fail("lookup", call=1)
            for _ in range(3):
                await g.lookup(1)  # the third succeeds
            assert g.counts.reading == "closed"
            await opened(g)
            calls = g.store.calls["lookup"]
            for _ in range(100):
                assert await g.lookup(1) == [False]
                assert await g.load(1) == [FAILED]
        assert g.store.calls["lookup"] == calls
        assert g.store.calls["load"] == 0
        assert g.counts.rejected == 200
        assert g.counts.opened == 1
    assert [r.event for r in caplog.records] == ["store.unavailable"]


async def test_open_breaker_does_not_suspend_and_costs_microseconds():
    async with Guarded() as g:
        await opened(g)
        keys = digests(range(100))
        began = time.thread_time()
        for _ in range(1000):
            call = g.guard.lookup(keys)
            with pytest.raises(StopIteration):
                call.send(None)
        assert time.thread_time() - began < 1.0


async def test_probe_in_the_background_closes_the_breaker(caplog):
    async with Guarded() as g:
        await g.save(1)
        await opened(g)
        g.store.end_script()
        await running_clock().advance(FIRST_PAUSE_SECONDS - 0.01)
        await g.lookup(1)
        await spin(5)
        assert g.counts.reading == "open"
        await running_clock().advance(0.02)
        with caplog.at_level(logging.WARNING):
            assert await g.lookup(1) == [False]  # begins the probe, and does not wait for it
            assert g.counts.reading == "probing"
            await spin(5)
        assert g.counts.reading == "closed"
        assert await g.lookup(1) == [True]
    assert [r.event for r in caplog.records] == ["store.unavailable", "store.available"]


async def test_probe_has_a_slot_and_the_deadline_of_loads():
    async with Guarded(ScriptedStore(max_concurrent=1), deadline_seconds=2.0) as g:
        await g.save(1)
        gate = g.store.hold("load", call=0)
        load = asyncio.create_task(g.load(1))
        await running_clock().advance(2.1)
        assert await load == [FAILED]
        await opened(g)
        calls = g.store.calls["lookup"]
        for _ in range(5):  # a load would get no slot, so the probe gets none
            await running_clock().advance(3.0)
            assert await g.lookup(1) == [False]
        assert (g.store.calls["lookup"], g.counts.reading) == (calls, "probing")
        assert g.counts.busy > 0
        gate.open()
        await spin(5)
        assert g.store.calls["lookup"] == calls + 1


async def test_store_is_probed_again_after_it_was_closed_during_a_probe():
    async with Guarded() as g:
        await g.save(1)
        g.store.fail("lookup")
        for _ in range(3):
            await g.lookup(1)
        g.store.end_script()
        g.store.delay("lookup", seconds=0.2)
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await g.lookup(1)
        await spin(5)
        assert g.counts.reading == "probing"
        await g.guard.aclose()
        g.store.end_script()
        await g.guard.open(g.arena.memory, g.proof)  # as after a sleep
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await g.lookup(1)
        await spin(5)
        assert await g.lookup(1) == [True]


async def test_store_is_probed_again_after_it_was_closed_while_a_probe_waited_for_a_slot():
    async with Guarded(ScriptedStore(max_concurrent=1)) as g:
        await g.save(1)
        gate = g.store.hold("load", call=0)
        load = asyncio.create_task(g.load(1))
        await opened(g)
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await g.lookup(1)
        await spin(5)
        assert g.counts.reading == "probing"
        closing = asyncio.create_task(g.guard.aclose())
        await spin(5)
        gate.open()
        assert await closing
        await load
        g.store.end_script()
        await g.guard.open(g.arena.memory, g.proof)
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await g.lookup(1)
        await spin(5)
        assert await g.lookup(1) == [True]


async def test_lookups_whose_callers_stop_waiting_open_the_breaker():
    async with Guarded() as g:
        g.store.hold("lookup")
        for _ in range(3):
            call = asyncio.create_task(g.lookup(1))
            await running_clock().advance(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await running_clock().advance(0.3)
        assert (g.counts.reading, g.counts.timeouts) == ("open", 3)


async def test_store_is_opened_again_only_when_it_has_closed():
    async with Guarded() as g:
        gate = g.store.hold("aclose")
        closing = asyncio.create_task(g.guard.aclose())
        await spin(5)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        opening = asyncio.create_task(g.guard.open(g.arena.memory, g.proof))
        await spin(10)
        assert g.store.opened == 1
        gate.open()
        await opening
        assert g.store.opened == 2
        gate = g.store.hold("aclose")
        closing = asyncio.create_task(g.guard.aclose())
        await running_clock().advance(guard_module.CLOSE_SECONDS + 1)
        assert not await closing
        opening = asyncio.create_task(g.guard.reopen(g.arena.memory, g.proof))
        await running_clock().advance(guard_module.CLOSE_SECONDS + 1)
        await opening
        assert "has not closed" in g.counts.failure
        gate.open()
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert g.store.opened == 3


@pytest.mark.parametrize("longest", [10.0, 3.0])
async def test_pause_grows_while_probes_fail_and_is_bounded(longest):
    async with Guarded(**({} if longest == 10.0 else {"retry_seconds": longest})) as g:
        await opened(g)
        probes = []
        for tenth in range(2000):
            before = g.store.calls["lookup"]
            await g.lookup(1)
            await running_clock().advance(0.1)
            if g.store.calls["lookup"] > before:
                probes.append(tenth / 10)
        pauses = np.diff(probes)
        assert (np.diff(pauses) >= -0.2).all()
        assert 0.9 <= pauses[0] <= 1.2
        assert longest - 0.5 <= pauses[-1] <= longest + 0.5
        assert g.counts.opened == 1


async def test_failing_loads_reopen_the_breaker_though_lookups_succeed():
    async with Guarded() as g:
        await g.save(1)
        await opened(g, operation="load")
        for _ in range(2):  # the probe, which is a lookup, succeeds; the first load fails again
            await running_clock().advance(40)
            await g.lookup(1)
            await spin(5)
            assert g.counts.reading == "closed"
            await g.load(1)
            assert g.counts.reading == "open"


async def test_failing_saves_do_not_stop_reads():
    """A full or read-only disk still serves its blocks."""
    async with Guarded() as g:
        await g.save(1)
        await opened(g, operation="save")
        assert g.counts.saving == "open"
        assert await g.load(1) == [DONE]
        saves = g.store.calls["save"]
        assert await g.save(2) == [FAILED]
        assert g.store.calls["save"] == saves
        g.store.end_script()
        await running_clock().advance(FIRST_PAUSE_SECONDS + 0.01)
        assert await g.save(2) == [DONE]  # its own probe
        assert g.counts.saving == "closed"


@pytest.mark.parametrize("results", [[0, FAILED], [FAILED, FAILED], [0, REFUSED], [0]])
async def test_save_that_fails_removes_no_block(results):
    """Other caches may have saved a block of the same key before."""
    async with Guarded() as g:
        await g.save(1, 2)
        before = dict(g.store.objects)
        g.store.answer("save", results=results)
        await g.save(1, 2)
        await spin(5)
        assert (g.store.objects, g.store.calls["remove"]) == (before, 0)


async def test_refused_blocks_do_not_open_the_breaker():
    async with Guarded(ScriptedStore(capacity_blocks=1)) as g:
        assert await g.save(1, 2) == [DONE, REFUSED]
        for _ in range(5):
            assert await g.save(2) == [REFUSED]
        assert g.counts.saving == "closed"
        assert g.counts.refused_blocks == 6


async def test_operations_are_bounded_and_demand_goes_before_saves():
    async with Guarded(ScriptedStore(max_concurrent=1)) as g:
        await g.save(1, 2)
        gate = g.store.hold("load", call=0)
        first = asyncio.create_task(g.load(1))
        await spin(3)
        save = asyncio.create_task(g.save(2))
        await spin(3)
        second = asyncio.create_task(g.load(2))
        await spin(3)
        assert (g.store.calls["load"], g.store.calls["save"]) == (1, 1)
        gate.open()
        await asyncio.gather(first, save, second)
        assert [operation for operation, _ in g.store.keys] == ["save", "load", "load", "save"]


async def test_call_without_a_slot_fails_at_its_deadline_and_does_not_blame_the_store():
    async with Guarded(ScriptedStore(max_concurrent=1), deadline_seconds=1.0) as g:
        gate = g.store.hold("load", call=0)
        first = asyncio.create_task(g.load(1))
        await running_clock().advance(1.1)
        assert first.result() == [FAILED]
        call = asyncio.create_task(g.load(2))  # the first has not ended, and keeps its slot
        await running_clock().advance(1.1)
        assert call.result() == [FAILED]
        assert (g.store.calls["load"], g.counts.busy, g.counts.timeouts) == (1, 1, 1)
        gate.open()
        await spin(5)
        assert await g.load(2) == [MISSING]


async def test_calls_that_wait_for_a_slot_while_the_store_fails_are_not_made():
    async with Guarded(ScriptedStore(max_concurrent=1)) as g:
        g.store.fail("load")
        gate = g.store.hold("load", call=0)
        loads = [asyncio.create_task(g.load(number)) for number in range(6)]
        await spin(5)
        gate.open()
        assert await asyncio.gather(*loads) == [[FAILED]] * 6
        assert g.store.calls["load"] < 6
        assert g.counts.reading == "open"
        assert (g.counts.running, g.counts.timeouts) == (0, 0)
        g.store.end_script()
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await g.lookup(1)  # the probe gets the slot
        await spin(5)
        assert g.counts.reading == "closed"
        assert await g.load(1) == [MISSING]


async def test_call_that_waits_for_a_slot_when_the_store_closes_is_not_made():
    async with Guarded(ScriptedStore(max_concurrent=1)) as g:
        gate = g.store.hold("load", call=0)
        loads = [asyncio.create_task(g.load(number)) for number in range(3)]
        await spin(5)
        closing = asyncio.create_task(g.guard.aclose())
        await spin(5)
        gate.open()
        assert await closing
        assert await asyncio.gather(*loads) == [[FAILED]] * 3
        assert g.store.calls["load"] == 1


async def test_cancelled_caller_cancels_the_operation():
    async with Guarded() as g:
        g.store.delay("load", seconds=3.0)
        call = asyncio.create_task(g.load(1))
        await spin(5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await spin(5)
        assert (g.counts.running, g.counts.reading) == (0, "closed")


async def test_close_waits_for_operations_that_end_late():
    g = await Guarded().__aenter__()
    gate = g.store.hold("load")
    call = asyncio.create_task(g.load(1))
    await spin(5)
    closing = asyncio.create_task(g.guard.aclose())
    await spin(20)
    assert not closing.done()
    gate.open()
    assert await closing
    assert await call == [FAILED]
    assert not g.store.is_open
    g.proof.close()


async def test_close_gives_up_a_stuck_store_and_says_so(caplog):
    g = await Guarded().__aenter__()
    gate = g.store.hold("load")
    call = asyncio.create_task(g.load(1))
    await spin(5)
    closing = asyncio.create_task(g.guard.aclose())
    await running_clock().advance(guard_module.CLOSE_SECONDS + 1)
    assert not closing.result()  # the memory must not be freed
    assert "store.stuck" in [r.event for r in caplog.records]
    gate.open()
    await call
    assert await g.guard.aclose()
    g.proof.close()


async def test_large_loads_are_split_and_each_part_has_the_deadline(monkeypatch):
    monkeypatch.setattr(guard_module, "PART_BYTES", 2000)
    async with Guarded(deadline_seconds=1.0) as g:
        await g.save(1, 2, 3, 4, 5)
        g.store.delay("load", seconds=0.8)
        call = asyncio.create_task(g.load(1, 2, 3, 4, 5))
        await running_clock().advance(2.5)
        assert call.result() == [DONE] * 5
        assert g.store.calls["load"] == 3
        g.store.hold("load", call=4)
        call = asyncio.create_task(g.load(1, 2, 3, 4, 5))
        await running_clock().advance(2.0)
        assert call.result() == [DONE, DONE, FAILED, FAILED, FAILED]


async def test_results_of_parts_before_a_deadline_are_counted(monkeypatch):
    monkeypatch.setattr(guard_module, "PART_BYTES", 2000)
    async with Guarded(deadline_seconds=1.0) as g:
        await g.save(1, 3, 4)
        g.store.hold("load", call=1)
        call = asyncio.create_task(g.load(1, 2, 3, 4))
        await running_clock().advance(1.5)
        assert call.result() == [DONE, MISSING, FAILED, FAILED]
        counts = g.counts
    assert (counts.loaded_blocks, counts.missing_blocks, counts.failed_blocks) == (1, 1, 2)


async def test_load_whose_parts_end_without_blocks_is_not_late(monkeypatch):
    monkeypatch.setattr(guard_module, "PART_BYTES", 2000)
    monkeypatch.setattr(cost_module, "LATENCY_BYTES", 1)
    async with Guarded() as g:
        await g.save(1, 2)
        g.store.delay("load", call=0, seconds=0.1)
        call = asyncio.create_task(g.load(1, 2))
        await running_clock().advance(0.11)
        assert call.result() == [DONE, DONE]
        bandwidth = g.counts.load_bytes_per_second
        g.store.delay("load", seconds=0.155)  # less than LATE_FACTOR * 0.1 s + LATE_SECONDS
        call = asyncio.create_task(g.load(3, 4, 5, 6, 7, 8, 9, 10))
        was_late = []
        while not call.done():
            was_late.append(g.guard.is_late())
            await running_clock().advance(0.005)
        assert not any(was_late)
        assert call.result() == [MISSING] * 8
        assert g.counts.load_bytes_per_second == bandwidth


class CountingStore(ScriptedStore):
    """A store that counts the calls of ``statistics``, and raises in the first ones."""

    asked = 0
    failures = 0

    def statistics(self) -> StoreStatistics:
        self.asked += 1
        if self.asked <= self.failures:
            raise OSError(5, "the medium is gone")
        return super().statistics()


async def test_only_an_open_store_is_asked_for_its_statistics():
    store = CountingStore()
    g = Guarded(store)
    assert g.counts.store.blocks == -1
    async with g:
        await g.save(1, 2)
        assert g.counts.store.blocks == 2
    assert g.counts.store.blocks == -1
    assert store.asked == 1
    assert g.counts.saved_blocks == 2


async def test_an_error_of_the_statistics_is_logged_once(caplog):
    store = CountingStore()
    store.failures = 2
    async with Guarded(store) as g:
        with caplog.at_level(logging.WARNING):
            shown = [g.counts.store.blocks for _ in range(3)]
    assert shown == [-1, -1, 0]
    assert [r.event for r in caplog.records] == ["store.no_statistics"]


async def test_latency_and_bandwidth_are_averages():
    async with Guarded() as g:
        await g.save(1)
        g.store.delay("load", seconds=0.5)
        for _ in range(3):
            call = asyncio.create_task(g.load(1))
            await running_clock().advance(0.6)
            await call
        assert g.counts.load_seconds == pytest.approx(0.5)
        now = running_clock().now
        latency, per_byte = g.guard.costs.load.parts(now)
        assert latency == pytest.approx(0.5, rel=0.01)
        assert per_byte == 0.0


async def test_use_flags_switch_directions_off():
    async with Guarded(save=False) as g:
        assert await g.save(1) == [FAILED]
        assert await g.lookup(1) == [False]
        assert (g.counts.saving, g.counts.reading) == ("off", "closed")
    async with Guarded(read=False) as g:
        assert await g.save(1) == [DONE]
        assert await g.lookup(1) == [False]
        assert g.store.calls["lookup"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"read": 1},
        {"deadline_seconds": 0},
        {"lookup_deadline_seconds": float("inf")},
        {"retry_seconds": 0.0},
        {"read": False, "save": False},
    ],
)
async def test_bad_use_is_refused(options):
    with pytest.raises(ConfigError):
        StoreUse(ScriptedStore(), **options)
    with pytest.raises(ConfigError, match="must be a Store"):
        StoreUse("disk:/x")
    incomplete = ScriptedStore()
    incomplete.remove = None
    with pytest.raises(ConfigError, match="must be a Store"):
        StoreUse(incomplete)


class UnsureStore(ScriptedStore):
    """A store that raises when it is asked what it is known not to have."""

    def may_have_any(self, keys: bytes) -> bool:
        raise OSError("no index")


async def test_store_that_raises_in_may_have_any_is_asked_and_logged_once(caplog):
    async with Guarded(UnsureStore()) as g:
        assert g.guard.may_have_any(digests([1]))
        assert g.guard.may_have_any(digests([2]))
    assert [r.event for r in caplog.records] == ["store.may_have_failed"]
