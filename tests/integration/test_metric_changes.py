"""Metrics change by the right amounts: each script lists all counters that it changes."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import AllocateTimeout, ClosedError, RequestTooLarge
from aiokv.observe.metrics import families
from aiokv.testing import ScriptedStore, run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.memory import Memory
from tests.harness.served import Served
from tests.peers.engines import prompt, two_engines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio

PROMPT = [1, 2, 3, 4, 5, 6, 7]  # 3 full blocks and a partial one
CLOCK_MONOTONIC_COARSE = 6  # of Linux
OTHER = [11, 12, 13, 14, 15, 16, 17]
NOT_COUNTED = (
    "failures_total",
    "_seconds_total",
    "_queries_total",
    "_events_total",
    "poller_latency_seconds",
)


def counters(engine: CacheEngine) -> dict[str, float]:
    """Return counters and counts of histograms, without times, the poller and sums by kind."""
    return dict(_counters(engine))


def _counters(engine: CacheEngine) -> Iterator[tuple[str, float]]:
    for family in families(engine):
        name = family.name.removeprefix("aiokv_")
        if family.kind not in ("counter", "histogram") or name.endswith(NOT_COUNTED):
            continue
        for sample in family.samples:
            if sample.suffix in ("", "_count"):
                yield " ".join([name.removesuffix("_total"), *sample.labels.values()]), sample.value


def failures(engine: CacheEngine) -> dict[str, float]:
    """Return the failures by kind, without kinds that have none."""
    (family,) = (f for f in families(engine) if f.name == "aiokv_failures_total")
    return {sample.labels["kind"]: sample.value for sample in family.samples if sample.value}


class Changes:
    """Counters that have changed since the last look."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._last = counters(engine)

    def take(self) -> dict[str, float]:
        last, self._last = self._last, counters(self._engine)
        assert {name for name in last if self._last[name] < last[name]} == set()
        return {
            name: value - last[name]
            for name, value in self._last.items()
            if value != last.get(name, 0)
        }


async def test_a_miss_and_a_device_hit():
    async with Served(host_blocks=0) as served:
        changes = Changes(served.engine)
        await served.serve(PROMPT)
        assert changes.take() == {
            "prompt_tokens": 7,
            "computed_tokens": 7,
            "computed_prompt_tokens": 7,
            "grants": 1,
            "published_blocks": 3,
            "hold_seconds": 1,
        }
        await served.serve(PROMPT)
        assert changes.take() == {
            "prompt_tokens": 7,
            "hit_tokens device": 6,
            "computed_tokens": 1,
            "computed_prompt_tokens": 1,
            "grants": 1,
            "hold_seconds": 1,
        }


async def test_generated_tokens_are_computed_but_not_of_the_prompt():
    async with Served(host_blocks=0) as served:
        changes = Changes(served.engine)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(10)
            lease.append([8, 9, 10])
            lease.commit(5)
            lease.commit(9)
            lease.commit(9)
            changed = changes.take()
            assert changed["computed_tokens"] == 9
            assert changed["computed_prompt_tokens"] == 7
            assert "hold_seconds" not in changed
        assert changes.take() == {"hold_seconds": 1}


async def test_a_host_hit_after_a_call_of_evict():
    async with Served() as served:
        changes = Changes(served.engine)
        await served.serve(PROMPT)
        await served.complete_offloads()
        changed = changes.take()
        assert changed.pop("transfer_bytes attention offload") > 0
        assert changed == {
            "prompt_tokens": 7,
            "computed_tokens": 7,
            "computed_prompt_tokens": 7,
            "grants": 1,
            "published_blocks": 3,
            "hold_seconds": 1,
            "copied_blocks attention offload": 3,
            "transfers attention offload done": changed["transfers attention offload done"],
        }
        await served.engine.evict(3)
        assert changes.take() == {"evicted_blocks attention device request": 3}
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            served.device.complete_all()
            await served.settle()
            changed = changes.take()
            assert changed.pop("transfer_bytes attention onload") > 0
            assert changed == {
                "prompt_tokens": 7,
                "hit_tokens host": 6,
                "grants": 1,
                "copied_blocks attention onload": 3,
                "transfers attention onload done": 1,
                "onload_seconds": 1,
            }
        assert changes.take() == {"hold_seconds": 1}
        await served.engine.evict(3)
        await served.engine.evict(3, tier="host")
        assert changes.take() == {
            "evicted_blocks attention device request": 3,
            "evicted_blocks attention host request": 3,
            "dropped_blocks request": 3,
        }


async def test_a_failed_onload():
    async with Served() as served:
        await served.to_host(PROMPT)
        changes = Changes(served.engine)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            served.device.onloads[0].fail_all(block=1)
            await served.settle()
            assert changes.take() == {
                "prompt_tokens": 7,
                "hit_tokens host": 6,
                "grants": 1,
                "copied_blocks attention onload": 1,
                "failed_blocks": 2,
                "dropped_blocks failure": 2,
                "transfers attention onload failed": 1,
            }


async def test_a_corrupt_onload():
    async with Served(verify="checksum") as served:
        await served.to_host(PROMPT)
        changes = Changes(served.engine)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            (copy,) = served.device.onloads
            served.device.arena.blocks[copy.host_ids[1], 0] ^= 1
            copy.complete_all()
            await served.settle()
            changed = changes.take()
            assert changed["corrupt_onloads"] == 1
            assert changed["transfers attention onload failed"] == 1
            assert failures(served.engine) == {"corrupt_onload": 1, "transfer": 1}
            assert changed["failed_blocks"] == 2


async def test_a_failed_copy_is_not_counted_as_corrupt():
    async with Served(verify="checksum") as served:
        await served.to_host(PROMPT)
        changes = Changes(served.engine)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            served.device.onloads[0].fail_all(block=1)
            await served.settle()
            changed = changes.take()
            assert "corrupt_onloads" not in changed
            assert changed["transfers attention onload failed"] == 1


async def test_evictions_by_cause():
    async with Served(host_blocks=0, device_blocks=4) as served:
        changes = Changes(served.engine)

        def causes() -> dict[str, float]:
            return {name: n for name, n in changes.take().items() if "ed_blocks " in name}

        await served.serve(PROMPT)
        assert causes() == {}
        await served.serve(OTHER)
        assert causes() == {
            "evicted_blocks attention device capacity": 3,
            "dropped_blocks capacity": 3,
        }
        await served.engine.reset()
        assert causes() == {"dropped_blocks reset": 3}
        await served.serve(PROMPT)
        await served.engine.resize(1)
        resized = causes()
        assert (
            resized["evicted_blocks attention device resize"]
            == resized["dropped_blocks resize"]
            >= 2
        )
        await served.engine.resize(4)
        await served.serve(PROMPT)
        causes()
        await served.engine.sleep(["device"])
        assert causes() == {"evicted_blocks attention device sleep": 3, "dropped_blocks sleep": 3}
        await served.engine.wake_up(["device"], regions=served.memory.regions)
    async with Served(host_blocks=3, device_blocks=4) as served:
        changes = Changes(served.engine)
        await served.to_host(PROMPT)
        await served.serve(OTHER)
        await complete_during(served.engine.evict(3), served.device)  # saves them first
        changed = changes.take()
        assert changed["evicted_blocks attention host capacity"] == 3
        assert changed["dropped_blocks capacity"] == 3
        await served.engine.sleep(["host"])
        assert changes.take() == {
            "evicted_blocks attention host sleep": 3,
            "dropped_blocks sleep": 3,
        }
        await served.engine.wake_up(["host"])


async def test_capacity_waits_by_outcome():
    async with Served(host_blocks=0, device_blocks=4) as served:
        engine = served.engine
        first = engine.match(PROMPT)
        await first.allocate(7)
        changes = Changes(engine)

        async def wait(**allocate: Any) -> None:
            async with engine.match(OTHER) as lease:
                await lease.allocate(7, **allocate)

        with pytest.raises(AllocateTimeout):
            await wait(timeout=0)
        assert changes.take() == {"wait_seconds capacity": 1, "failed_waits timed_out": 1}
        task = asyncio.ensure_future(wait())
        await spin(2)
        assert engine.statistics().waiting == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert changes.take() == {"wait_seconds capacity": 1, "failed_waits cancelled": 1}
        async with engine.match(OTHER) as lease:
            with pytest.raises(RequestTooLarge):
                await lease.allocate(9)
            assert changes.take() == {"failed_waits too_large": 1}
            with pytest.raises(RequestTooLarge):
                lease.try_allocate(9)
            assert changes.take() == {"failed_waits too_large": 1}
        task = asyncio.ensure_future(wait())
        await spin(2)
        first.release()
        await task
        changed = changes.take()
        assert changed["wait_seconds capacity"] == 1
        assert changed["grants"] == 1
        assert failures(engine) == {"allocate_timeout": 1, "allocate_refused": 2}
        assert not [name for name in changed if name.startswith("failed_waits")]


async def test_a_wait_that_the_closing_engine_refuses():
    engine = CacheEngine(CacheConfig(device_blocks=4, block_tokens=2))
    await engine.__aenter__()
    first, second = engine.match(PROMPT), engine.match(OTHER)
    await first.allocate(7)
    task = asyncio.ensure_future(second.allocate(7))
    await spin(2)
    await engine.aclose(0)
    with pytest.raises(ClosedError):
        await task
    first.release()
    assert engine.statistics().requests.refused_waits == 1


async def test_a_pending_wait():
    async with Served(host_blocks=0, device_blocks=16) as served:
        engine = served.engine
        first = engine.match(PROMPT)
        await first.allocate(7)
        changes = Changes(engine)
        async with engine.match(PROMPT) as second:
            task = asyncio.ensure_future(second.allocate(7, wait_pending=60))
            await spin(2)
            assert engine.statistics().waiting_for_pending == 1
            first.commit(7)
            await task
        assert engine.statistics().waiting_for_pending == 0
        changed = changes.take()
        assert changed["wait_seconds pending"] == 1
        assert changed["hit_tokens device"] == 6
        first.release()


async def test_the_time_for_which_a_lease_has_blocks_ends_with_the_preemption():
    def now() -> float:
        return time.clock_gettime(CLOCK_MONOTONIC_COARSE)

    async with Served(host_blocks=0) as served:
        lease = served.engine.match(PROMPT)
        before = now()
        await lease.allocate(7)
        granted = now()
        while now() < granted + 0.02:  # a few ticks of this clock
            pass
        preempting = now()
        await lease.preempt()
        hold = served.engine.statistics().requests.hold
        assert hold.count == 1
        assert preempting - granted - 1e-6 <= hold.sum_seconds <= now() - before + 1e-6
        lease.release()
        assert served.engine.statistics().requests.hold == hold


async def test_preemptions_by_kind():
    async with Served() as served:
        changes = Changes(served.engine)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            lease.commit(7)
            await served.complete_offloads()
            changes.take()
            await lease.preempt()
            assert changes.take() == {"preemptions drop": 1, "hold_seconds": 1}
            await lease.resume(7)
            lease.commit(7)
            changes.take()
            task = asyncio.ensure_future(lease.preempt(swap=True))
            await served.complete_offloads()
            await task
            changed = changes.take()
            assert changed["preemptions swap"] == 1
            assert changed["hold_seconds"] == 1


async def test_the_largest_salts_have_labels_and_the_others_are_summed_up(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("aiokv.observe.metrics.MAX_SALTS", 2)
    async with Served(device_blocks=32, host_blocks=0, salt_quota_blocks=4) as served:
        engine = served.engine
        sizes = {"a": 1, "b": 4, "c": 3, "d": 2, "other": 4}
        leases = [engine.match(PROMPT, salt=salt) for salt in sizes]
        for lease in leases:
            await lease.allocate(2 * sizes[lease.salt])

        def blocks() -> dict[str, float]:
            (family,) = (f for f in families(engine) if f.name == "aiokv_salt_blocks")
            return {sample.labels["salt"]: sample.value for sample in family.samples}

        assert blocks() == {"b": 4, "c": 3, "other": 4 + 1 + 2}
        waiting = engine.match(PROMPT, salt="b")
        task = asyncio.ensure_future(waiting.allocate(2))
        await spin(2)
        statistics = engine.statistics()
        assert (statistics.waiting_for_quota, statistics.waiting) == (1, 0)
        task.cancel()
        await asyncio.wait([task])
        for lease in (*leases, waiting):
            lease.release()
        assert blocks() == {"other": 0}
        names = {family.name: family.samples for family in families(engine)}
        assert names["aiokv_salt_quota_blocks"][0].value == 4
        assert names["aiokv_salts"][0].value == 0


async def test_the_time_in_the_queue_ends_when_the_device_has_the_transfer():
    """A transfer that waits behind two others waits until the first of those has ended."""
    async with Served(device_blocks=16) as served:
        prompts = [[10 * n + i for i in range(7)] for n in range(3)]
        for tokens in prompts:
            await served.to_host(tokens)
        leases = [served.engine.match(tokens) for tokens in prompts]
        for lease in leases:
            await lease.allocate(7)
        lane = served.engine.statistics().worker.attention.onload
        assert (lane.submitted, lane.queued, lane.queue_seconds) == (2, 1, 0.0)
        await asyncio.sleep(0)
        served.device.complete_all()
        await served.settle()
        before = served.engine.statistics().worker.attention.onload.queue_seconds
        served.device.complete_all()
        await served.settle()
        after = served.engine.statistics().worker.attention.onload
        assert after.done == 3
        assert after.queue_seconds > before > 0
        for lease in leases:
            lease.release()


async def test_a_cancelled_onload_has_no_time_in_the_queue():
    async with Served(device_blocks=16) as served:
        prompts = [[10 * n + i for i in range(7)] for n in range(3)]
        for tokens in prompts:
            await served.to_host(tokens)
        leases = [served.engine.match(tokens) for tokens in prompts]
        for lease in leases:
            await lease.allocate(7)
        leases[2].release()  # its onload is queued behind the two others
        await spin(5)
        lane = served.engine.statistics().worker.attention.onload
        assert (lane.cancelled, lane.queue_seconds) == (1, 0.0)
        served.device.complete_all()
        await served.settle()
        for lease in leases:
            lease.release()


async def test_a_wait_for_a_store():
    store = ScriptedStore()
    async with Served(manual=False, stores=[store]) as served:
        engine = served.engine
        await served.serve(PROMPT)
        await engine.drain()
        await run_until_idle(lambda: engine.statistics().attention.saved_blocks == 3)
        await engine.evict(8)
        await engine.evict(16, tier="host")
        gate = store.hold("load")
        changes = Changes(engine)
        async with engine.match(PROMPT) as lease:
            task = asyncio.ensure_future(lease.allocate(7, wait_store=math.inf))
            await run_until_idle(lambda: store.calls["load"] == 1)
            statistics = engine.statistics()
            assert (statistics.waiting_for_store, statistics.waiting_for_quota) == (1, 0)
            gate.open()
            await task
            await lease.layers.wait_all()
            changed = changes.take()
            assert changed["wait_seconds store"] == 1
            assert changed["hit_store_tokens"] == 6
            assert changed["fetch_blocks attention fetched"] == 3
            labels = f"{store.url} scripted attention "
            assert changed[f"store_blocks {labels} loaded"] == 3
            assert changed[f"store_asked_blocks {labels}"] == 3
            assert changed[f"store_found_blocks {labels}"] == 3
        assert engine.statistics().waiting_for_store == 0


async def test_a_wait_for_another_engine():
    tokens = prompt(20)
    async with two_engines() as (p, d):
        changes = Changes(d.engine)
        lease = await d.granted(tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            await asyncio.gather(p.prefill(tokens, receiving.ticket), receiving.wait())
        lease.release()
        changed = changes.take()
        assert changed["wait_seconds peer"] == 1
        assert changed["peer_received_tokens"] == 20
        assert changed["peer_wanted_tokens"] == 20
        assert changed["peer_complete_tickets receive"] == 1
        assert changed["peer_blocks attention receive"] == 5
        assert "computed_tokens" not in changed


@pytest.mark.asyncio
async def test_two_stores_of_one_url_have_different_labels(tmp_path: Path):
    memory = Memory(16, 4, axes=("tokens", "dim"))
    config = CacheConfig(model="m", block_tokens=4, device_blocks=16, host_blocks=16)
    url = f"directory:{tmp_path}"
    async with CacheEngine(config, memory.regions, stores=[url, url]) as engine:
        found = families(engine)
    for family in found:
        labels = [(s.suffix, frozenset(s.labels.items())) for s in family.samples]
        assert len(labels) == len(set(labels)), family.name
    stores = {s.labels["store"] for f in found for s in f.samples if "store" in s.labels}
    assert stores == {url, f"{url}#2"}
