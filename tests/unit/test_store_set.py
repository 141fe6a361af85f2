"""StoreSet: lookups, fetches and saves over several stores."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from aiokv.base.plan import FETCH, SAVE, TransferPlan, id_bytes
from aiokv.errors import ConfigError, StoreError
from aiokv.stores import StoreUse, missing
from aiokv.stores.base import Result, split_keys
from aiokv.stores.cost import LATE_SECONDS
from aiokv.stores.guard import FOLLOW_PAUSE_SECONDS
from aiokv.stores.proof import derive_keys
from aiokv.stores.store_set import StoreSet
from aiokv.testing import ScriptedStore, running_clock, spin
from tests.unit.store_memory import Arena, digests

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from aiokv.stores.store_set import Fetched, Saved

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

DONE, MISSING, WRONG, REFUSED, FAILED, PRESENT = map(int, Result)
FINGERPRINT = bytes(range(32))
SHIFT = 32  # host blocks of a fetch, from the numbers of its payloads


class Stores:
    """A StoreSet on scripted stores, opened; block n is saved from host block n."""

    def __init__(self, *stores: ScriptedStore | StoreUse) -> None:
        self.set = StoreSet(stores)
        self.stores = [s.store if isinstance(s, StoreUse) else s for s in stores]
        self.arena = Arena()

    async def __aenter__(self) -> Self:
        await self.set.open(self.arena.memory, FINGERPRINT)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for store in self.stores:
            store.end_script()
        await self.set.aclose()

    async def save(self, *numbers: int) -> list[int]:
        return list((await self.saved(*numbers)).results)

    async def saved(self, *numbers: int) -> Saved:
        self.arena.write(numbers, numbers)
        plan = TransferPlan(
            transfer_id=1,
            route=SAVE,
            source_blocks=id_bytes(numbers),
            target_blocks=id_bytes(range(len(numbers))),
            digests=digests(numbers),
        )
        return await self.set.save(plan)

    async def fetch(self, *numbers: int) -> Fetched:
        plan = TransferPlan(
            transfer_id=2,
            route=FETCH,
            source_blocks=id_bytes(range(len(numbers))),
            target_blocks=id_bytes([n + SHIFT for n in numbers]),
            digests=digests(numbers),
        )
        fetched = await self.set.fetch(plan)
        assert all(self.arena.holds(n + SHIFT, n) for n in numbers[: fetched.blocks])
        return fetched

    async def lookup(self, *numbers: int) -> int:
        return (await self.set.lookup(digests(numbers))).blocks


async def put(store: ScriptedStore, numbers: Iterable[int]) -> ScriptedStore:
    """Put blocks into a store, as an earlier process would."""
    async with Stores(StoreUse(store)) as stores:
        await stores.save(*numbers)
    store.calls.clear()
    store.keys.clear()
    return store


async def test_longest_unbroken_run_counts_whatever_store_has_the_blocks():
    first = await put(ScriptedStore("a"), [1, 3, 6])
    second = await put(ScriptedStore("b"), [2, 4, 6])
    async with Stores(first, second) as s:
        assert await s.lookup(1, 2, 3, 4, 5, 6) == 4
        assert await s.lookup(5, 6) == 0
        assert (await s.fetch(1, 2, 3, 4)).blocks == 4
        assert (first.calls["load"], second.calls["load"]) == (1, 1)  # one batch per store
        assert len(first.keys[-1][1]) == 2


async def test_stores_are_asked_at_the_same_time_and_the_first_one_suffices():
    first = await put(ScriptedStore("a"), [1, 2])
    second = ScriptedStore("b")
    async with Stores(first, second) as s:
        second.delay("lookup", seconds=0.2)
        first.delay("lookup", seconds=0.1)
        call = asyncio.create_task(s.lookup(1, 2))
        await running_clock().advance(0.15)
        assert call.result() == 2
        call = asyncio.create_task(s.lookup(1, 2, 3))  # the second may have block 3
        await running_clock().advance(0.15)
        assert not call.done()
        await running_clock().advance(0.06)
        assert call.result() == 2


async def test_configured_order_decides_where_a_block_comes_from():
    first = await put(ScriptedStore("a"), [1, 2])
    second = await put(ScriptedStore("b"), [1, 2])
    async with Stores(second, first) as s:
        assert await s.lookup(1, 2) == 2
        assert (await s.fetch(1, 2)).blocks == 2
        assert (first.calls["load"], second.calls["load"]) == (0, 1)


@pytest.mark.parametrize("fault", ["missing", "error", "wrong", "refused by the breaker"])
async def test_next_store_brings_the_blocks_that_the_first_cannot(fault):
    first = await put(ScriptedStore("a"), [1, 2, 3])
    second = await put(ScriptedStore("b"), [1, 2, 3])
    async with Stores(first, second) as s:
        assert await s.lookup(1, 2, 3) == 3
        if fault == "missing":
            first.objects.pop(derive_keys(FINGERPRINT, digests([2])))
        elif fault == "wrong":
            first.corrupt("load", block=1)
        else:
            first.fail("load")
        if fault == "refused by the breaker":
            for _ in range(3):
                await s.fetch(1)
            calls = first.calls["load"]
        assert await s.fetch(1, 2, 3) == (3, "", ())
        if fault == "refused by the breaker":
            assert first.calls["load"] == calls
        if fault in ("missing", "wrong"):
            assert len(second.keys[-1][1]) == 1  # only the block that was not there


async def test_fetch_without_a_lookup_asks_all_stores_in_order():
    first = await put(ScriptedStore("a"), [1])
    second = await put(ScriptedStore("b"), [2])
    async with Stores(first, second) as s:
        assert (await s.fetch(1, 2)).blocks == 2
        assert await s.fetch(1, 3, 2) == (1, "block 1: missing", ())


async def test_blocks_behind_a_lost_one_are_not_fetched_from_the_next_store():
    first = await put(ScriptedStore("a"), [1, 2])
    second = await put(ScriptedStore("b"), [3])
    async with Stores(first, second) as s:
        first.objects.clear()
        assert (await s.fetch(1, 2, 3)).blocks == 0
        assert second.calls["load"] == 1
        assert second.keys[-1] == ("load", second.keys[-1][1])
        second.calls.clear()
        second.objects.clear()
        assert (await s.fetch(1, 2, 3)).blocks == 0


async def test_a_part_of_an_answer_serves_a_fetch_that_begins_later():
    first = ScriptedStore("a")
    second = await put(ScriptedStore("b"), range(8))
    async with Stores(first, second) as s:
        assert await s.lookup(*range(8)) == 8
        assert (await s.fetch(4, 5)).blocks == 2
        assert first.calls["load"] == 0  # known not to have them
        assert (await s.fetch(7, 9)).blocks == 1
        assert [len(keys) for _, keys in first.keys] == [8, 1]


async def test_answer_of_a_repeated_lookup_is_kept_longest(monkeypatch):
    monkeypatch.setattr("aiokv.stores.store_set.REMEMBERED_LOOKUPS", 2)
    first = ScriptedStore("a")
    second = await put(ScriptedStore("b"), range(3))
    async with Stores(first, second) as s:
        for number in (0, 1, 0, 2):
            assert await s.lookup(number) == 1
        assert (await s.fetch(0)).blocks == 1
        assert first.calls["load"] == 0  # known not to have it
        assert (await s.fetch(1)).blocks == 1
        assert first.calls["load"] == 1


async def test_deadline_ends_a_fetch_and_another_store_does_not_write_into_its_blocks():
    first = await put(ScriptedStore("a"), [1, 2])
    second = await put(ScriptedStore("b"), [0, 1, 2])
    async with Stores(first, second) as s:
        assert await s.lookup(0, 1, 2) == 3
        gate = first.hold("load")
        call = asyncio.create_task(s.fetch(0, 1, 2))
        await running_clock().advance(5.1)
        fetched = call.result()
        assert (fetched.blocks, fetched.reason) == (1, "block 1: failed")
        assert second.calls["load"] == 1
        (overdue,) = fetched.overdue
        assert first.in_use[33] == 1
        gate.open()
        await asyncio.wait({overdue})
        assert first.in_use[33] == 0


async def fetched_at_once(s: Stores, number: int) -> int:
    """Return the blocks of a fetch that does not wait for the clock."""
    call = asyncio.create_task(s.fetch(number))
    await spin(20)
    assert call.done()
    return call.result().blocks


async def test_store_whose_loads_are_late_is_asked_after_the_others():
    first = await put(ScriptedStore("a"), [1, 2, 3])
    second = await put(ScriptedStore("b"), [1, 2])
    async with Stores(first, second) as s:
        assert await s.lookup(1, 2, 3) == 3
        stuck = first.hold("load")
        late = asyncio.create_task(s.fetch(1))
        await running_clock().advance(LATE_SECONDS + 0.01)
        assert await fetched_at_once(s, 2) == 1
        assert (first.calls["load"], second.calls["load"]) == (1, 1)
        waiting = asyncio.create_task(s.fetch(3))  # which only the late store has
        await spin(5)
        assert (first.calls["load"], second.calls["load"]) == (2, 2)
        stuck.open()
        await spin(20)
        assert (late.result().blocks, waiting.result().blocks) == (1, 1)
        assert (await s.fetch(2)).blocks == 1
        assert (first.calls["load"], second.calls["load"]) == (3, 2)


async def test_store_with_overdue_loads_is_asked_after_the_others():
    first = await put(ScriptedStore("a"), [1, 2])
    second = await put(ScriptedStore("b"), [1, 2])
    async with Stores(first, second) as s:
        first.hold("load")
        late = asyncio.create_task(s.fetch(1))
        await running_clock().advance(5.1)
        assert (await late).blocks == 0
        assert await fetched_at_once(s, 2) == 1
        assert (first.calls["load"], second.calls["load"]) == (1, 1)


async def test_blocks_of_a_late_store_come_from_other_stores_only_if_these_have_them():
    first = await put(ScriptedStore("a"), [1, 2])
    second, third = ScriptedStore("b"), await put(ScriptedStore("c"), [2])
    async with Stores(first, second, StoreUse(third, read=False)) as s:
        first.delay("load", call=0, seconds=1.0)
        measured = asyncio.create_task(s.fetch(1))
        await running_clock().advance(1.0)
        assert measured.result().blocks == 1
        stuck = first.hold("load", call=1)
        late = asyncio.create_task(s.fetch(1))
        await running_clock().advance(2.0)
        answer = await s.set.lookup(digests([2]))
        assert answer.blocks == 1
        assert answer.seconds[0] >= 1.0
        waiting = asyncio.create_task(s.fetch(2))
        await spin(5)
        assert (first.calls["load"], second.calls["load"], third.calls["load"]) == (3, 0, 0)
        stuck.open()
        await spin(20)
        assert (late.result().blocks, waiting.result().blocks) == (1, 1)


async def test_store_that_is_not_used_for_reads_is_never_chosen_for_a_fetch():
    first, second = ScriptedStore("a"), await put(ScriptedStore("b"), [1])
    async with Stores(first, StoreUse(second, read=False)) as s:
        fetched = await s.fetch(1)  # without a lookup
        assert (fetched.blocks, fetched.reason) == (0, "block 0: missing")


async def test_keys_of_a_late_store_are_searched_in_the_stores_behind_it():
    first = await put(ScriptedStore("a"), range(4))
    second = listing("b", range(2), 1)
    async with Stores(first, second) as s:
        first.hold("load", call=0)
        late = asyncio.create_task(s.fetch(0))
        await running_clock().advance(LATE_SECONDS + 0.01)
        assert await looked_up(s, 4, 0.1) == 4
        assert asked(second)
        first.end_script()
        await late


async def test_seconds_grow_with_the_blocks_and_stores_work_at_the_same_time():
    first = await put(ScriptedStore("a"), [1, 2])
    second = await put(ScriptedStore("b"), [1, 2, 3, 4])
    async with Stores(first, second) as s:
        answer = await s.set.lookup(digests([1, 2, 3, 4]))
        assert answer.seconds.tolist() == [0.0] * 4  # nothing is measured yet
        first.delay("load", seconds=0.3)
        second.delay("load", seconds=0.1)
        call = asyncio.create_task(s.fetch(1, 2, 3, 4))
        await running_clock().advance(0.4)
        assert call.result().blocks == 4
        answer = await s.set.lookup(digests([1, 2, 3, 4]))
        assert answer.seconds == pytest.approx([0.3] * 4, rel=0.01)
        answer = await s.set.lookup(digests([3, 4]))
        assert answer.seconds == pytest.approx([0.1] * 2, rel=0.01)


async def test_save_goes_to_all_stores_that_take_saves():
    stores = [ScriptedStore(name) for name in "abc"]
    async with Stores(stores[0], StoreUse(stores[1], save=False), stores[2]) as s:
        assert await s.save(1, 2) == [DONE, DONE]
        assert [len(store.objects) for store in stores] == [2, 0, 2]


async def test_block_counts_as_saved_when_one_store_has_it():
    full, failing, good = ScriptedStore("a", capacity_blocks=0), ScriptedStore("b"), None
    failing.fail("save")
    async with Stores(full, failing) as s:
        assert await s.save(1) == [REFUSED]
    good = ScriptedStore("c")
    async with Stores(ScriptedStore("a", capacity_blocks=0), good) as s:
        assert await s.save(1) == [DONE]
    only = ScriptedStore("d")
    only.fail("save")
    async with Stores(only) as s:
        assert await s.save(1) == [FAILED]


async def test_blocks_that_all_stores_have_count_as_saved_and_not_as_written():
    stores = ScriptedStore("a"), ScriptedStore("b")
    stores[0].answer("save", results=[PRESENT, PRESENT, PRESENT, REFUSED])
    stores[1].answer("save", results=[PRESENT, DONE, FAILED, FAILED])
    async with Stores(*stores) as s:
        saved = await s.saved(1, 2, 3, 4)
    assert list(saved.results) == [DONE, DONE, DONE, REFUSED]
    assert saved.written_blocks == 1


async def test_another_fingerprint_finds_nothing_and_ends_fetches_in_flight():
    store = await put(ScriptedStore(), [1, 2])
    async with Stores(store) as s:
        assert await s.lookup(1, 2) == 2
        store.delay("load", seconds=1.0)
        call = asyncio.create_task(s.fetch(1, 2))
        await spin(5)
        s.set.change_fingerprint(bytes(32))
        await running_clock().advance(1.1)
        assert call.result().blocks == 0
        assert await s.lookup(1, 2) == 0
        s.set.change_fingerprint(FINGERPRINT)
        assert await s.lookup(1, 2) == 2


async def test_store_that_cannot_be_opened_closes_the_others():
    first, second = ScriptedStore("a"), ScriptedStore("b")
    second.fail("open", error=ConfigError("locked by another process"))
    with pytest.raises(ConfigError, match="locked"):
        await Stores(first, second).__aenter__()
    assert (first.opened, first.is_open) == (1, False)


async def test_reopened_stores_use_the_new_arena(caplog):
    first, second = ScriptedStore("a"), ScriptedStore("b")
    async with Stores(first, second) as s:
        await s.save(1, 2)
        assert await s.set.aclose()
        assert await s.lookup(1) == 0
        assert (await s.fetch(1)).blocks == 0
        assert await s.save(1) == [FAILED]
        s.arena = Arena()
        second.fail("open", error=StoreError("no server"))
        await s.set.reopen(s.arena.memory, FINGERPRINT)
        assert await s.lookup(1, 2) == 2
        assert (await s.fetch(1, 2)).blocks == 2
        second.end_script()
        await running_clock().advance(1.0)
        assert second.is_open
    assert "store.not_opened" in [record.event for record in caplog.records]


async def test_cancelled_lookup_leaves_no_task_when_the_deadline_has_passed():
    first, second = ScriptedStore("a"), ScriptedStore("b")
    async with Stores(first, second) as s:
        first.delay("lookup", seconds=1.0)
        call = asyncio.create_task(s.lookup(1))
        await spin(3)
        call.cancel()
        await spin(5)
        assert call.cancelled()
        await running_clock().advance(0.3)
        assert len(asyncio.all_tasks()) == 1


# --- stores that need a request per key -----------------------------------------------------------


def listing(name: str, numbers: Iterable[int], max_lookup_keys: int = 4) -> ScriptedStore:
    """Return a store that knows the keys of blocks, and takes 0.03 s for each lookup."""
    keys = derive_keys(FINGERPRINT, digests(numbers))
    store = ScriptedStore(name, max_lookup_keys=max_lookup_keys)
    store.objects.update(dict.fromkeys(split_keys(keys), b""))
    store.delay("lookup", seconds=0.03)
    return store


async def looked_up(s: Stores, count: int, seconds: float) -> int:
    """Return the length of the run that a lookup of blocks finds within ``seconds``."""
    call = asyncio.create_task(s.lookup(*range(count)))
    await running_clock().advance(seconds)
    assert call.done()
    return call.result()


def asked(store: ScriptedStore) -> list[int]:
    """Return the number of keys per lookup."""
    return [len(keys) for operation, keys in store.keys if operation == "lookup"]


@pytest.mark.parametrize(("stored", "num_rounds"), [(0, 1), (1280, 1), (1279, 2), (700, 2)])
async def test_end_of_a_long_prefix_is_found_in_few_rounds(stored, num_rounds):
    store = listing("a", range(stored), 64)
    async with Stores(store) as s:
        assert await looked_up(s, 1280, 0.03 * num_rounds + 0.001) == stored
        assert len(asked(store)) == num_rounds
        assert max(asked(store)) <= 64


async def test_lookup_that_its_deadline_cuts_off_finds_a_part_and_is_no_failure():
    store = listing("a", range(90))
    async with Stores(StoreUse(store, lookup_deadline_seconds=0.05)) as s:
        for _ in range(5):
            assert await looked_up(s, 100, 0.06) == 67
        (statistics,) = s.set.statistics()
        assert (statistics.reading, statistics.timeouts, statistics.lookups) == ("closed", 5, 10)
        assert await looked_up(s, 4, 0.04) == 4


async def test_long_lookups_at_the_same_time_are_no_failures():
    store = listing("a", range(90))
    async with Stores(StoreUse(store, lookup_deadline_seconds=0.05)) as s:
        calls = [asyncio.create_task(s.lookup(*range(100))) for _ in range(4)]
        await running_clock().advance(0.06)
        assert [call.result() for call in calls] == [67] * 4
        (statistics,) = s.set.statistics()
        assert (statistics.reading, statistics.timeouts) == ("closed", 4)


async def test_lookups_without_any_answer_are_failures():
    store = listing("a", range(100))
    store.delay("lookup", seconds=1.0)
    async with Stores(store) as s:
        for _ in range(3):
            assert await looked_up(s, 100, 0.26) == 0
        (statistics,) = s.set.statistics()
        assert (statistics.reading, statistics.lookups) == ("open", 3)


async def test_run_of_two_stores_is_found_though_neither_has_all_of_it():
    old, new = listing("a", range(50)), listing("b", range(50, 90))
    async with Stores(new, old) as s:
        assert await looked_up(s, 100, 0.2) == 90


async def test_store_that_answers_no_round_is_not_asked_again():
    good, stuck = listing("a", range(50)), listing("b", range(100))
    stuck.hold("lookup")
    async with Stores(good, stuck) as s:
        assert await looked_up(s, 100, 0.5) == 50
        assert len(asked(stuck)) == 1
        assert len(asked(good)) > 2


async def test_only_keys_that_earlier_stores_lack_are_searched():
    first, second = listing("a", range(40), 0), listing("b", range(60))
    async with Stores(first, second) as s:
        assert await looked_up(s, 100, 0.3) == 60
        assert asked(first) == [100]
        every = {key for _, keys in second.keys for key in keys}
        assert every.isdisjoint(first.objects)
        assert await looked_up(s, 40, 0.04) == 40  # the second is not asked


async def test_later_store_that_takes_any_number_of_keys_answers_for_all():
    first, second = listing("a", range(20)), listing("b", range(100), 0)
    async with Stores(first, second) as s:
        assert await looked_up(s, 100, 0.07) == 100
        assert (asked(first), asked(second)) == ([4], [100])


async def test_objects_of_any_position_are_found_from_the_last_one_on():
    store = listing("a", [1, 4, 8])
    async with Stores(StoreUse(store, lookup_deadline_seconds=0.07)) as s:
        call = asyncio.create_task(s.set.find(digests(range(10))))
        await running_clock().advance(0.08)
        found = np.isfinite(call.result().seconds)
        assert np.flatnonzero(found).tolist() == [4, 8]  # the deadline cuts off the third round
        assert s.set.statistics()[0].reading == "closed"


async def test_no_stores_or_blocks_cost_nothing():
    async with Stores(ScriptedStore()) as s:
        assert await s.lookup() == 0
        assert s.stores[0].calls["lookup"] == 0
        assert np.array_equal((await s.set.lookup(b"")).seconds, [])


# --- keys that a store is known not to have -------------------------------------------------------


class FollowedStore(ScriptedStore):
    """A store that a test tells which keys it reports; an exception ends the reports."""

    follows_keys = True

    def __init__(self, name: str = "memory") -> None:
        super().__init__(name)
        self.reports: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.num_followed = 0

    async def follow_keys(self) -> AsyncGenerator[bytes | None]:
        self.num_followed += 1
        while not isinstance(report := await self.reports.get(), Exception):
            yield report
        raise report

    async def report(self, *reports: bytes | Exception | None) -> None:
        for report in reports:
            self.reports.put_nowait(report)
        await spin()


class IndexedStore(ScriptedStore):
    """A store that knows its keys without a lookup."""

    def may_have_any(self, keys: bytes) -> bool:
        return any(key in self.objects for key in split_keys(keys))


def keys(*numbers: int) -> bytes:
    return derive_keys(FINGERPRINT, digests(numbers))


async def test_prompt_that_a_store_does_not_have_is_looked_up_once_in_seconds():
    store = await put(ScriptedStore(), [1])
    async with Stores(StoreUse(store, remember_missing_seconds=5.0)) as s:
        assert await s.lookup(1, 2, 3) == 1
        for _ in range(3):
            assert await s.lookup(2, 3) == 0
            assert (await s.set.find(digests([2]))).seconds.tolist() == [np.inf]
        assert await s.lookup(1, 2) == 1  # block 1 may be stored
        assert (store.calls["lookup"], s.set.statistics()[0].spared_lookups) == (2, 6)
        store.calls["lookup"] = 0
        await put(ScriptedStore(objects=store.objects), [2])  # as another engine
        await running_clock().advance(4.9)
        assert await s.lookup(2) == 0
        await running_clock().advance(0.2)
        assert await s.lookup(2) == 1
        assert store.calls["lookup"] == 1


async def test_block_that_this_engine_has_saved_is_found_at_once():
    store = ScriptedStore()
    async with Stores(StoreUse(store, remember_missing_seconds=5.0)) as s:
        assert await s.lookup(1, 2) == 0
        await s.save(1)
        assert await s.lookup(1, 2) == 1
        held = store.hold("lookup", call=2)
        store.answer("lookup", call=2, results=[0])  # of before the save
        call = asyncio.create_task(s.lookup(3))
        await spin()
        await s.save(3)
        held.open()
        assert await call == 0
        assert await s.lookup(3) == 1


@pytest.mark.parametrize("fault", ["error", "deadline"])
async def test_lookup_without_an_answer_is_not_remembered(fault):
    store = await put(ScriptedStore(), [1])
    async with Stores(StoreUse(store, remember_missing_seconds=5.0)) as s:
        if fault == "error":
            store.fail("lookup", call=0)
        else:
            store.delay("lookup", call=0, seconds=1.0)
        call = asyncio.create_task(s.lookup(1))
        await running_clock().advance(0.3)
        assert await call == 0
        assert await s.lookup(1) == 1


async def test_remote_store_is_asked_only_for_what_the_local_one_lacks():
    local = await put(ScriptedStore("disk"), [1, 2, 3])
    remote = FollowedStore("remote")
    await put(remote, [1, 4])
    async with Stores(local, StoreUse(remote, remember_missing_seconds=5.0)) as s:
        await remote.report(keys(1, 4), None)
        assert await s.lookup(1, 2, 3, 5, 4) == 3
        assert await s.lookup(1, 2) == 2
        assert remote.calls["lookup"] == 0
        local.fail("load", call=0)
        assert (await s.fetch(1)).blocks == 1  # the remote store may have it, too
        assert await s.lookup(1, 2, 3, 4, 5) == 4
        assert remote.calls["lookup"] == 1
        assert (await s.fetch(1, 2, 3, 4)).blocks == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
async def test_run_is_found_though_stores_are_known_to_lack_its_first_block(order):
    parts = [(1, 2), (3, 4), (5, 6)]
    made = [await put(ScriptedStore(str(n)), part) for n, part in enumerate(parts)]
    uses = [StoreUse(made[n], remember_missing_seconds=5.0) for n in order]
    async with Stores(*uses) as s:
        assert [await s.lookup(*range(1, 8)) for _ in range(3)] == [6] * 3
        assert (await s.fetch(*range(1, 7))).blocks == 6


@pytest.mark.parametrize("max_lookup_keys", [0, 4])
async def test_local_store_is_asked_for_what_follows_the_blocks_of_a_remote_one(max_lookup_keys):
    remote = await put(ScriptedStore("remote"), [1, 2])
    local = await put(IndexedStore("disk", max_lookup_keys=max_lookup_keys), [3, 4])
    async with Stores(local, StoreUse(remote, remember_missing_seconds=5.0)) as s:
        assert await s.lookup(1, 2, 3, 4, 5) == 4
        assert await s.lookup(5, 3) == 0  # what follows a missing block is of no use
        assert [local.calls["lookup"], remote.calls["lookup"]] == [1, 2]
        assert s.set.statistics()[0].spared_lookups == 1


async def test_copies_of_other_groups_are_looked_up_only_if_one_may_be_stored():
    store = await put(IndexedStore("disk"), [3])
    async with Stores(store) as s:
        assert np.isinf((await s.set.find(digests([1, 2]))).seconds).all()
        assert (store.calls["lookup"], s.set.statistics()[0].spared_lookups) == (0, 1)
        assert np.isfinite((await s.set.find(digests([1, 2, 3]))).seconds).tolist() == [0, 0, 1]
        assert store.calls["lookup"] == 1


async def test_filter_of_a_followed_store_spares_lookups_of_prompts_that_it_never_had():
    store = FollowedStore()
    await put(store, [1, 2])
    async with Stores(store) as s:
        assert await s.lookup(3) == 0  # the list is not complete: the store is asked
        await store.report(keys(1), keys(2))
        assert await s.lookup(4) == 0
        assert store.calls["lookup"] == 2
        await store.report(None)
        assert [await s.lookup(n, 9) for n in (1, 2, 3, 4)] == [1, 1, 0, 0]
        assert (store.calls["lookup"], s.set.statistics()[0].filter_keys) == (4, 2)
        await put(ScriptedStore(objects=store.objects), [3])
        await store.report(keys(3))  # another engine has saved it
        assert await s.lookup(3) == 1
        await s.save(4)  # not reported yet
        assert await s.lookup(4) == 1


async def test_store_whose_reports_end_is_asked_until_it_is_listed_again(caplog):
    caplog.set_level("INFO")
    store = FollowedStore()
    async with Stores(store) as s:
        await store.report(None)
        await put(ScriptedStore(objects=store.objects), [1])
        assert await s.lookup(1) == 0
        await store.report(StoreError("lost"))
        assert await s.lookup(1) == 1
        assert s.set.statistics()[0].filter_keys == 0
        await running_clock().advance(FOLLOW_PAUSE_SECONDS + 0.1)
        assert store.num_followed == 2
        await store.report(keys(1), None)
        assert [await s.lookup(1), await s.lookup(2)] == [1, 0]
        assert store.calls["lookup"] == 2
    assert [r.message.partition(" ")[0] for r in caplog.records].count("store.not_followed") == 1


async def test_store_is_listed_again_when_most_keys_of_the_filter_may_have_been_removed(
    monkeypatch,
):
    monkeypatch.setattr(missing, "FIRST_LAYER_KEYS", 8)
    store = FollowedStore()
    async with Stores(store) as s:
        await store.report(keys(*range(10)), None, keys(*range(10, 28)))
        assert (store.num_followed, s.set.statistics()[0].filter_keys) == (1, 28)
        await store.report(keys(28))
        assert (store.num_followed, s.set.statistics()[0].filter_keys) == (2, 0)


async def test_store_with_too_many_keys_has_no_filter(monkeypatch, caplog):
    monkeypatch.setattr(missing, "FIRST_LAYER_KEYS", 8)
    monkeypatch.setattr(missing, "MAX_LAYERS", 1)
    store = FollowedStore()
    async with Stores(store) as s:
        await store.report(keys(*range(9)), None)
        await running_clock().advance(2 * FOLLOW_PAUSE_SECONDS)
        assert (store.num_followed, s.set.statistics()[0].filter_keys) == (1, 0)
        assert await s.lookup(30) == 0
        assert store.calls["lookup"] == 1
    assert any(r.message.startswith("store.too_many_keys") for r in caplog.records)
