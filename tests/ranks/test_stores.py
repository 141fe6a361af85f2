"""Ranks with stores: each keeps its shard, and a block is there when all have it."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from aiokv import Regions
from aiokv.base.plan import FETCH, SAVE, TransferPlan, TransferReport, id_bytes
from aiokv.errors import RankLost, StoreError
from aiokv.ranks import Rank, RankTimeouts
from aiokv.ranks.messages import (
    Begin,
    ChangeWeights,
    Lookup,
    Reply,
    decode_from_manager,
    decode_from_rank,
    encode,
)
from aiokv.ranks.reduce import GroupTransfer
from aiokv.stores.base import KEY_BYTES, SharedFilter, StoreFilters
from aiokv.stores.breaker import FIRST_PAUSE_SECONDS
from aiokv.stores.identity import StoreIdentity
from aiokv.stores.proof import derive_keys
from aiokv.testing import ScriptedStore, run_until_idle, running_clock, spin
from aiokv.wire.frames import ProtocolError
from aiokv.worker.device.base import CopyError
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.stores import WorkerStores
from tests.ranks.loopback import PATIENT, Ranked
from tests.ranks.raw import frame_of

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.base.plan import Route

pytestmark = pytest.mark.asyncio

A = list(range(9))  # four blocks can be hit
SIZES = {"device_blocks": 16, "host_blocks": 16}


def ranked(path: Path, stores: list[ScriptedStore], **options: object) -> Ranked:
    return Ranked(path, stores=stores, new_device=None, model="tests", **SIZES, **options)


async def filled(path: Path) -> list[ScriptedStore]:
    """Return the stores of two ranks after an engine has served a prompt."""
    stores = [ScriptedStore(f"rank {i}") for i in range(2)]
    (path / "first").mkdir()
    async with ranked(path / "first", stores) as r:
        await r.serve(A)
        await r.finish()
    return stores


async def test_each_rank_brings_its_shard_after_a_restart(tmp_path):
    stores = await filled(tmp_path)
    assert [len(store.objects) for store in stores] == [4, 4]
    assert not set(stores[0].objects) & set(stores[1].objects)  # the rank is in the key
    async with ranked(tmp_path, stores) as r:
        assert await r.serve(A, wait_store=math.inf) == 8
        assert [s.worker.store_statistics()[0].loaded_blocks for s in r.shards] == [4, 4]


async def test_purge_removes_the_shards_of_all_ranks(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        assert await r.engine.purge("") == 8
        assert [len(store.objects) for store in stores] == [0, 0]
        assert await r.serve(A, wait_store=math.inf) == 0


async def test_purge_that_fails_on_one_rank_names_it_and_purges_the_others(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        stores[1].fail("remove")
        with pytest.raises(StoreError, match=r"rank 1: .*scripted:rank 1 was not purged"):
            await r.engine.purge("")
        assert [len(store.objects) for store in stores] == [0, 4]
        stores[1].end_script()
        assert await r.engine.purge("") == 4


async def test_prompt_that_the_first_rank_is_known_to_lack_asks_no_rank(tmp_path):
    stores = await filled(tmp_path)
    memory = tmp_path / "counters"
    memory.write_bytes(bytes(4096))  # of a store without keys
    identity = memory.stat().st_dev, memory.stat().st_ino
    lookups = 0

    async def heartbeat(r: Ranked, *, is_shared: bool) -> None:
        shared = SharedFilter(str(memory), 0, 4096, identity) if is_shared else None
        stores[0].shared_filter = lambda: shared
        (first, *_) = r.group._membership.ranks
        first.filters = unanswered = StoreFilters(b"", [], covers_all=True)
        r.pass_time(1.0)
        await run_until_idle(lambda: first.filters is not unanswered)

    async with ranked(tmp_path, stores) as r:
        for number, is_shared in enumerate((False, True, False, True)):
            await heartbeat(r, is_shared=is_shared)
            assert r.group.stores.is_lacking(bytes(KEY_BYTES)) == is_shared
            await r.serve([number, *A], wait_store=math.inf)
            lookups += not is_shared
            assert stores[0].calls["lookup"] == lookups
        async with r.engine.updating_weights(version="2"):  # the filter is that of other keys
            pass
        await r.serve([9, *A], wait_store=math.inf)
        assert stores[0].calls["lookup"] == lookups + 1
        memory.rename(tmp_path / "kept")
        memory.write_bytes(bytes(4096))
        await heartbeat(r, is_shared=True)  # names another file now
        await r.serve([10, *A], wait_store=math.inf)
        assert stores[0].calls["lookup"] == lookups + 2


async def test_block_that_one_rank_lacks_is_missing_on_all(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        stores[1].answer("lookup", results=[1, 1, 0, 1])
        assert await r.serve(A, wait_store=math.inf) == 4


async def test_block_that_one_rank_cannot_load_is_fetched_by_no_rank(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        stores[1].corrupt("load", block=2)
        assert await r.serve(A, wait_store=math.inf) == 4


@pytest.mark.parametrize("operation", ["lookup", "load", "save"])
async def test_dead_store_of_one_rank_makes_misses_and_no_errors(tmp_path, operation):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        stores[1].fail(operation)
        cached = await r.serve(A, wait_store=math.inf)
        assert cached == (8 if operation == "save" else 0)
        await r.serve(list(range(50, 59)), wait_store=math.inf)
        await r.finish()
        saved = r.engine.statistics().attention.saved_blocks
        assert saved == (0 if operation == "save" else 8)
        assert r.group.failure is None


async def test_lookup_that_raises_in_a_rank_is_answered_with_a_miss(tmp_path, monkeypatch):
    async def lookup(self: WorkerStores, digests: bytes) -> None:
        raise RuntimeError("a defect")

    stores = await filled(tmp_path)
    timeouts = RankTimeouts(heartbeat=1000.0, silence=500.0, lookup=400.0)
    async with ranked(tmp_path, stores, timeouts=timeouts) as r:
        monkeypatch.setattr(WorkerStores, "lookup", lookup)
        async with asyncio.timeout(30):
            assert await r.serve(A, wait_store=math.inf) == 0


async def test_rank_that_does_not_answer_a_lookup_makes_a_miss(tmp_path):
    stores = await filled(tmp_path)
    timeouts = RankTimeouts(heartbeat=1000.0, silence=500.0, lookup=0.01)
    async with ranked(tmp_path, stores, timeouts=timeouts) as r:
        stores[1].hold("lookup")
        assert await r.serve(A, wait_store=math.inf) == 0
        stores[1].end_script()
        await spin(20)


async def test_stuck_load_releases_its_waiters_and_does_not_lose_the_rank(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        gate = stores[1].hold("load")
        serving = asyncio.create_task(r.serve(A, wait_store=math.inf))
        await run_until_idle(lambda: stores[1].calls["load"] == 1)
        r.pass_time(PATIENT.transfer + 1)
        assert await serving == 0
        await run_until_idle(lambda: r.engine.statistics().worker.attention.offload.done == 1)
        for _ in range(3):
            r.pass_time(PATIENT.transfer + 1)
        assert r.group.failure is None
        assert r.engine.statistics().attention.host.in_flight >= 4
        gate.open()
        await r.finish()
        assert r.engine.statistics().attention.host.in_flight == 0


@pytest.mark.clock
@pytest.mark.parametrize("stuck", [0, 1])
async def test_load_beyond_the_deadline_of_the_store_releases_its_waiters(tmp_path, stuck):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        gate = stores[stuck].hold("load")
        serving = asyncio.create_task(r.serve(A, wait_store=math.inf))
        await run_until_idle(lambda: stores[stuck].calls["load"] == 1)
        await running_clock().advance(4.9)
        await spin(100)
        assert not serving.done()
        await running_clock().advance(0.2)
        await run_until_idle(serving.done)  # no time of the group has passed
        assert await serving == 0
        assert r.engine.statistics().attention.host.in_flight >= 4  # still the fetch's
        assert r.engine.check_invariants() == []
        await run_until_idle(lambda: r.engine.statistics().worker.attention.offload.done == 1)
        for _ in range(3):
            r.pass_time(PATIENT.transfer + 1)
        assert r.group.failure is None
        assert r.group.group_statistics().given_up == 0
        gate.open()
        await r.finish()
        assert r.engine.statistics().attention.host.in_flight == 0


async def test_updated_weights_change_the_keys_of_all_ranks(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        async with r.engine.updating_weights(version="2"):
            pass
        assert await r.serve(A, wait_store=math.inf) == 0
        await r.finish()
        assert [len(store.objects) for store in stores] == [8, 8]
        async with r.engine.updating_weights(version=""):
            pass
        assert await r.serve(A, wait_store=math.inf) == 8


async def test_statistics_show_the_stores_of_each_rank(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        assert r.engine.statistics().stores == []
        stores[1].corrupt("load", call=0, block=0)
        assert await r.serve(A, wait_store=math.inf) == 0
        await r.finish()
        r.pass_time(1.0)  # a heartbeat
        await run_until_idle(lambda: len(r.engine.statistics().stores) == 2)
        shown = r.engine.statistics().stores
        assert [(s.rank, s.url, s.reading) for s in shown] == [
            (0, "scripted:rank 0", "closed"), (1, "scripted:rank 1", "closed"),
        ]  # fmt: skip
        assert [(s.loaded_blocks, s.wrong_blocks) for s in shown] == [(4, 0), (3, 1)]
        for shard, statistics in zip(r.shards, shown, strict=True):
            (own,) = shard.worker.store_statistics()
            assert statistics.loaded_bytes == own.loaded_bytes > 0
        assert [row["rank"] for row in r.engine.inspect.dump()["statistics"]["stores"]] == [0, 1]  # type: ignore[attr-defined]
        await r.lose(1)
        assert [s.rank for s in r.engine.statistics().stores] == [0]
        await r.restart(1)
        r.pass_time(1.0)
        await run_until_idle(lambda: len(r.engine.statistics().stores) == 2)


async def test_lost_rank_ends_waits_for_stores_and_comes_back(tmp_path):
    stores = await filled(tmp_path)
    async with ranked(tmp_path, stores) as r:
        gate = stores[0].hold("lookup")
        lease = r.engine.match(A)
        serving = asyncio.create_task(lease.allocate(len(A), wait_store=math.inf))
        await run_until_idle(lambda: stores[0].calls["lookup"] == 1)
        losing = asyncio.create_task(r.lose(1))
        with pytest.raises(Exception, match="rank 1"):
            await serving
        gate.open()
        await losing
        lease.release()
        await r.restart(1)
        assert await r.serve(A, wait_store=math.inf) == 8


@pytest.mark.parametrize("has_stores", [True, False])
async def test_group_and_rank_must_agree_about_stores(tmp_path, has_stores):
    stores = [ScriptedStore("rank 0"), ScriptedStore("rank 1")]
    r = ranked(tmp_path, stores)
    if has_stores:
        r.shards[1].stores = ()
        r.shards[1].fresh()
    else:
        r = Ranked(tmp_path, new_device=None, **SIZES)
        r.shards[1].stores = stores[1:]
        r.shards[1].fresh()
    with pytest.raises(RankLost, match="stores, but the RankGroup was made with has_stores"):
        await r.__aenter__()
    for shard in r.shards:
        await shard.worker.aclose()
    await r.engine.aclose()
    await spin(5)


async def test_rank_uses_the_weights_that_change_while_it_begins(tmp_path):
    store, path = ScriptedStore(), tmp_path / "group"
    identity = StoreIdentity(model="m", weights_version="1", block_tokens=2, num_ranks=1)
    manager: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def manage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        begin = Begin(generation=1, host_blocks=4, closed_step=0, asleep=[], identity=identity)
        writer.writelines(frame_of(encode(m)) for m in (begin, ChangeWeights(version="2")))
        manager.set_result(writer)

    server = await asyncio.start_unix_server(manage, path)
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((4, 8), np.int8)])
    async with Rank(path, 0, regions, stores=[store]):
        writer = await manager
        writer.write(frame_of(encode(Lookup(number=1, digests=bytes(32)))))
        await run_until_idle(lambda: store.calls["lookup"] == 1)
        writer.close()
    server.close()
    now = msgspec.structs.replace(identity, weights_version="2")
    assert store.keys == [("lookup", [derive_keys(now.fingerprint(regions), bytes(32))])]


# --- messages and reduction -----------------------------------------------------------------------


async def test_messages_with_stores_are_encoded_and_decoded():
    identity = StoreIdentity(model="m", weights_version="1", block_tokens=16, num_ranks=4)
    begin = Begin(generation=1, host_blocks=8, closed_step=0, asleep=[], identity=identity)
    assert decode_from_manager(encode(begin)) == begin
    lookup = Lookup(number=3, digests=bytes(64))
    assert decode_from_manager(encode(lookup)) == lookup
    reply = Reply(number=3, seconds=[0.1, 0.25])
    assert decode_from_rank(encode(reply)) == reply


def transfer(route: Route) -> GroupTransfer:
    plan = TransferPlan(
        transfer_id=1,
        route=route,
        source_blocks=id_bytes([0, 1, 2]),
        target_blocks=id_bytes([4, 5, 6]),
        digests=bytes(96),
    )
    counter = LayerDoneCounter(2, transfer_id=1)
    return GroupTransfer(plan, counter, num_ranks=2, num_bytes=3, since=0.0)


async def test_save_is_stored_where_all_ranks_have_stored_it():
    group = transfer(SAVE)
    group.end(1, TransferReport(transfer_id=1, outcome="done", results=bytes([0, 3, 0])))
    assert group.end(0, TransferReport(transfer_id=1, outcome="done", results=bytes([0, 0, 4])))
    assert (group.reduced(), group.results) == (None, bytes([0, 3, 4]))


@pytest.mark.parametrize(
    "bad",
    [
        TransferReport(transfer_id=1, outcome="done", results=b"\0"),
        TransferReport(transfer_id=1, outcome="cancelled"),
    ],
)
async def test_save_without_results_of_a_rank_is_not_stored(bad):
    group = transfer(SAVE)
    group.end(0, TransferReport(transfer_id=1, outcome="done", results=bytes(3)))
    group.end(1, bad)
    assert group.reduced() is not None or group.results == bytes([4, 4, 4])


def overdue(first_bad_block: int) -> TransferReport:
    return TransferReport(
        transfer_id=1, outcome="failed", first_bad_block=first_bad_block, reason="too late"
    )


async def test_overdue_fetch_releases_waiters_and_ends_with_the_reports():
    group = transfer(FETCH)
    assert group.may_give_up
    group.release(1, overdue(1))
    assert group.counter.given_up
    assert group.counter.failure.reason == "rank 1: too late"
    assert not group.may_give_up  # no time limit follows: the rank is not slow
    assert group.owing == {0, 1}
    group.end(0, TransferReport(transfer_id=1, outcome="done", first_bad_block=3))
    assert not group.counter.at_rest
    assert group.end(1, overdue(1))
    assert group.reduced() == CopyError(1, "rank 1: too late", 1)


async def test_only_a_fetch_may_be_overdue():
    group = transfer(SAVE)
    with pytest.raises(ProtocolError, match="rank 1 reports that transfer 1 is overdue"):
        group.release(1, overdue(0))
    assert not group.counter.given_up


async def test_fetch_is_proven_up_to_the_first_block_that_a_rank_lacks():
    group = transfer(FETCH)
    group.end(0, TransferReport(transfer_id=1, outcome="done", first_bad_block=3))
    group.end(1, TransferReport(transfer_id=1, outcome="failed", first_bad_block=2))
    failure = group.reduced()
    assert failure is not None
    assert failure.first_bad_block == 2


@pytest.mark.clock
async def test_store_of_one_rank_that_fails_to_open_is_used_later(tmp_path):
    stores = await filled(tmp_path)
    stores[1].fail("open", call=1)
    async with ranked(tmp_path, stores) as r:
        states = [s.worker.store_statistics()[0].reading for s in r.shards]
        assert states == ["closed", "open"]
        assert await r.serve(A, wait_store=math.inf) == 0
        assert r.group.failure is None
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        assert stores[1].opened == 2
        await r.finish()
        await r.engine.reset()
        assert await r.serve(A, wait_store=math.inf) == 8
        r.pass_time(PATIENT.heartbeat + 1)
        await run_until_idle(lambda: len(r.engine.statistics().stores) == 2)
        assert r.engine.health().unavailable_stores == []
