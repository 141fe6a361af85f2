"""The engine logs what it does, in the context of the request that it does it for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aiokv.base.logs import log_fields
from aiokv.testing import ScriptedDevice, ScriptedStore, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import Cache
from tests.harness.served import Served, computed, resumed, swapped_out
from tests.peers.engines import prompt, two_engines
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]
B = [11, 12, 13, 14, 15, 16, 17]


class Events(list[dict[str, Any]]):
    """Fields of the records that were logged."""

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self if event["event"] in names]

    @property
    def names(self) -> list[str]:
        return [event["event"] for event in self]


@pytest.fixture
def events():
    """Return the events of the test; all levels are shown."""
    found = Events()
    plain = set(vars(logging.makeLogRecord({})))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = {k: v for k, v in vars(record).items() if k not in plain}
            found.append({"level": record.levelname, **fields})

    logger, handler = logging.getLogger("aiokv"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def test_opening_and_closing_with_sizes_and_device(events):
    async with Served(device_blocks=8, host_blocks=16) as served:
        regions = served.memory.regions
    opened, closed = events.named("engine.opened", "engine.closed")
    assert opened.pop("opening_seconds") >= 0
    assert opened == {
        "event": "engine.opened",
        "level": "INFO",
        "device": "manual",
        "block_tokens": 2,
        "device_blocks": 8,
        "device_bytes": 8 * regions.block_bytes,
        "host_blocks": 16,
        "host_bytes": 16 * regions.payload_bytes,
        "layers": 2,
        "write_policy": "write_through",
        "eviction_policy": "adaptive",
        "stores": [],
        "endpoints": [],
    }
    assert (closed["level"], closed["leases_held"]) == ("INFO", 0)
    assert closed["open_seconds"] > 0


async def test_a_request_that_waits_is_preempted_and_moves_bytes(events):
    async with Served(device_blocks=4) as served:
        with log_fields(request_id="r1"):
            first = await computed(served, A, owner="first")
        await served.complete_offloads()

        async def second() -> None:
            with log_fields(request_id="r2"):
                async with served.engine.match(B, owner="second") as lease:
                    await lease.allocate(7)
                    served.compute(lease, B)
                    lease.commit(7)

        task = asyncio.ensure_future(second())
        await spin(2)
        with log_fields(request_id="r1"):
            await first.preempt()
        await task
        await served.complete_offloads()
        served.engine.step()
        with log_fields(request_id="r1"):
            resuming = asyncio.ensure_future(first.resume(7))
        await spin(2)
        served.device.complete_all()
        await resuming
        await served.settle()
        first.release()
    (preempted,) = events.named("lease.preempted")
    assert (preempted["level"], preempted["owner"], preempted["swap"]) == ("INFO", "first", False)
    assert preempted["request_id"] == "r1"
    (waited,) = events.named("lease.waited")
    assert (waited["level"], waited["owner"], waited["phase"]) == ("DEBUG", "second", "capacity")
    assert (waited["outcome"], waited["request_id"]) == ("done", "r2")
    (evicted, *_) = events.named("blocks.evicted")
    assert evicted["device_blocks"] == 3
    assert {e["route"] for e in events.named("transfer.ended")} == {"onload", "offload"}
    for ended in events.named("transfer.ended"):
        assert ended["level"] == "DEBUG"
        assert ended["seconds"] >= 0
        assert ended["num_bytes"] == ended["blocks"] * served.memory.regions.block_bytes


async def test_misses_name_their_causes(events):
    async with Served(host_blocks=0, miss_history_blocks=16) as served:
        (await computed(served, A, owner="r1")).release()
        await served.engine.evict(1)
        (await computed(served, A, owner="r2")).release()
    first, second = events.named("lease.missed")
    assert (first["level"], first["owner"]) == ("DEBUG", "r1")
    assert [range_["cause"] for range_ in first["missed"]] == ["never_seen"]
    assert second["owner"] == "r2"
    (missed,) = second["missed"]
    assert missed["cause"] == "evicted"
    assert missed["eviction_cause"] == "request"
    assert None not in missed.values()


async def test_swap_evict_reset_pause_and_resize(events):
    async with Served() as served:
        lease = await computed(served, A, owner="r1")
        await served.complete_offloads()
        await swapped_out(served, lease)
        await resumed(served, lease, 7)
        lease.release()
        await served.engine.evict(2)
        served.engine.pause()
        served.engine.resume()
        await served.engine.reset()
        await served.engine.resize(6)
        async with served.engine.updating_weights(version="v2"):
            pass
    fields = {e["event"]: e for e in events}
    assert fields["lease.preempted"]["swap"] is True
    assert fields["blocks.evicted_on_request"] | {"level": "DEBUG"} == {
        "event": "blocks.evicted_on_request", "level": "DEBUG", "tier": "device", "blocks": 2,
        "asked": 2,
    }  # fmt: skip
    resized = fields["engine.resized"]
    assert (resized["device_blocks"], resized["before_blocks"]) == (6, 8)
    assert fields["weights.updated"]["version"] == "v2"
    nouns = ("engine", "cache", "weights")
    assert [name for name in events.names if name.split(".")[0] in nouns] == [
        "engine.opened", "engine.paused", "engine.resumed", "cache.reset", "engine.resized",
        "weights.updated", "engine.closed",
    ]  # fmt: skip


async def test_sleep_and_wake_up(events):
    async with Served(manual=False) as served:
        await served.engine.sleep(["device", "host"])
        await served.engine.wake_up(["host"])
        await served.engine.wake_up(["device"], regions=served.memory.regions)
        await served.engine.wake_up()
    slept, host, device = events.named("engine.slept", "engine.woke_up")
    assert slept["tiers"] == ["device", "host"]
    assert (host["tiers"], host["still_asleep"]) == (["host"], ["device"])
    assert (device["tiers"], device["still_asleep"]) == (["device"], [])


@pytest.mark.clock
async def test_stores_are_opened_and_closed(events):
    store = ScriptedStore()
    async with Cache(device=ScriptedDevice(), stores=[store]):
        (opened,) = events.named("store.opened")
        assert (opened["level"], opened["url"], opened["group"]) == ("INFO", store.url, "attention")
    (engine,) = events.named("engine.opened")
    assert engine["stores"] == [store.url]
    (closed,) = events.named("store.closed")
    assert closed["url"] == store.url


async def test_receives_end_in_the_context_of_their_request(events):
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        with log_fields(request_id="r1"):
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=8))
                assert await receiving.wait() == 30
        await prefill
        with log_fields(request_id="r2"):
            other = await d.granted(prompt(30, seed=2))
            receiving = other.receive(timeout=PATIENCE_SECONDS)
            await receiving.__aenter__()
        other.release()  # outside the context of the request
        await receiving.__aexit__(None, None, None)
    (completed,) = events.named("receive.completed")
    assert (completed["level"], completed["tokens"], completed["request_id"]) == ("DEBUG", 30, "r1")
    (sent,) = events.named("send.completed")
    assert sent["ticket"] == completed["ticket"]
    (ended,) = events.named("receive.ended")
    assert (ended["level"], ended["request_id"]) == ("WARNING", "r2")
    assert ended["reason"] == "the lease was released"


async def test_ranks_are_the_device(events, tmp_path):
    async with Ranked(tmp_path, num_ranks=2, new_device=None) as ranked:
        blocks = ranked.engine.config.device_blocks
    (opened,) = events.named("engine.opened")
    assert (opened["device"], opened["device_bytes"]) == ("2 ranks", blocks * 16 * 2)
