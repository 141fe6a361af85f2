"""engine.inspect.leases(), hottest_prefixes(), and engine.health(): lists for tools."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from aiokv import CacheConfig, CacheEngine, LeaseState
from aiokv.errors import UsageError
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin
from tests.harness.served import Served, begin, computed

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


def waits(served: Served) -> dict[str, str]:
    return {lease.owner: lease.waits_for for lease in served.engine.inspect.leases()}


async def test_leases_are_listed_with_what_they_wait_for():
    async with Served(device_blocks=8) as served:
        await served.to_host(A)
        swapping = await computed(served, [31, 32, 33], owner="swapping")
        await served.complete_offloads()
        swap = await begin(served, swapping.preempt(swap=True))
        loading = await served.engine.match(A, owner="loading").allocate(7)
        matched = served.engine.match(A)
        large = [served.engine.match(range(100, 114), owner=f"large{i}") for i in range(3)]
        tasks = [
            asyncio.create_task(lease.allocate(14, priority=-i)) for i, lease in enumerate(large)
        ]
        await spin(2)
        listed = served.engine.inspect.leases()
        assert [lease.owner for lease in listed[:3]] == ["large2", "large1", "large0"]
        assert waits(served) == {
            "large0": "capacity",
            "large1": "capacity",
            "large2": "capacity",
            "loading": "onload",
            "swapping": "offload",
            hex(matched.id): "",
        }
        by_owner = {lease.owner: lease for lease in listed}
        assert by_owner["loading"].state is LeaseState.GRANTED
        assert (by_owner["loading"].prompt_tokens, by_owner["loading"].cached_tokens) == (7, 6)
        assert by_owner["loading"].blocks == 4
        assert by_owner[hex(matched.id)].cached_tokens == 6
        assert by_owner["large0"].state is LeaseState.WAITING
        assert all(lease.age_seconds >= 0 for lease in listed)
        assert [lease.owner for lease in served.engine.inspect.leases(2)] == ["large2", "large1"]
        assert served.engine.inspect.leases(0) == []
        some = served.engine.inspect.leases(4, max_waiting=1)
        assert [lease.owner for lease in some][:1] == ["large2"]
        assert {lease.owner for lease in some[1:]} == {"swapping", "loading", hex(matched.id)}
        assert served.engine.inspect.leases(1, max_waiting=9)[0].owner == "large2"
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        served.device.complete_all()
        await served.settle()
        await swap
        for lease in (swapping, loading, matched, *large):
            lease.release()
        assert served.engine.inspect.leases() == []


async def test_waits_for_quota_and_for_other_leases_are_listed():
    async with Served(salt_quota_blocks=4, write_policy="none") as served:
        engine = served.engine
        first = await engine.match(A, salt="a", owner="first").allocate(7)
        second = engine.match([8, *A], salt="a", owner="second")
        third = engine.match(A, salt="a", owner="third")
        tasks = [
            asyncio.create_task(second.allocate(7)),
            asyncio.create_task(third.allocate(7, wait_pending=60)),
        ]
        await spin(2)
        assert waits(served) == {"first": "", "second": "quota", "third": "pending"}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for lease in (first, second, third):
            lease.release()


async def test_a_lease_that_a_batch_uses_after_its_release_is_listed():
    async with Served(write_policy="none") as served:
        lease = await served.engine.match(A, owner="left").allocate(7)
        with served.engine.computing([lease]):
            lease.release()
            (listed,) = served.engine.inspect.leases()
            assert (listed.owner, listed.state, listed.waits_for) == ("left", "released", "batch")
        assert served.engine.inspect.leases() == []


async def test_hottest_prefixes_form_a_tree_with_salts_and_adapters():
    async with Served(device_blocks=16, write_policy="none") as served:
        engine = served.engine
        await served.serve([*range(4), 10, 11, 12])
        await served.serve([*range(4), 20, 21, 22])
        lease = engine.match([1, 2, 3], salt="a:b", adapter="lora")
        await lease.allocate(3)
        lease.commit(3)
        hot = engine.inspect.hottest_prefixes()
        assert hot.is_complete
        first = hot.prefixes[0]
        assert (first.uses, first.first_token, first.num_tokens, first.branches) == (2, 0, 4, 2)
        assert (first.parent, first.salt, first.adapter) == (None, "", "")
        salted = next(prefix for prefix in hot.prefixes if prefix.salt)
        assert (salted.salt, salted.adapter, salted.leases) == ("a:b", "lora", 1)
        assert [prefix.parent for prefix in hot.prefixes].count(0) == 2
        assert len(engine.inspect.hottest_prefixes(1).prefixes) == 1
        assert "10" not in str(msgspec.to_builtins(first))  # no token ids
        lease.release()


async def test_bad_limits_are_refused():
    engine = CacheEngine(CacheConfig(device_blocks=8))
    for call in (engine.inspect.leases, engine.inspect.hottest_prefixes):
        with pytest.raises(UsageError, match="limit is -1"):
            call(-1)
        with pytest.raises(UsageError, match="limit is 'x'"):
            call("x")


async def test_health_follows_the_life_of_an_engine():
    device = ManualDevice()
    device.unpinned_bytes = 4096
    served = Served()
    engine = CacheEngine(
        CacheConfig(device_blocks=8, host_blocks=8, block_tokens=2), served.memory.regions, device
    )
    assert engine.health().phase == "new"
    async with engine:
        health = engine.health()
        assert (health.phase, health.failure, health.asleep) == ("open", "", [])
        assert (health.is_paused, health.unpinned_bytes) == (False, 4096)
        await engine.sleep(["host"])
        assert engine.health().asleep == ["host"]
        assert engine.health().is_paused
        await engine.wake_up()
        errors: list[BaseException] = []

        def call_elsewhere() -> None:
            for call in (engine.health, engine.inspect.leases, engine.inspect.hottest_prefixes):
                try:
                    call()
                except UsageError as error:
                    errors.append(error)

        thread = threading.Thread(target=call_elsewhere)
        thread.start()
        thread.join()
        assert len(errors) == 3
    assert engine.health().phase == "closed"


async def test_health_names_the_failure_of_the_device():
    served = Served(device_blocks=2)
    served.device.computes_in_stream = True
    async with served:
        event = ManualEvent()
        served.engine.step(event)
        assert served.engine.health().failure == ""
        event.query_error = RuntimeError("the GPU is gone")
        await run_until_idle(lambda: served.engine.health().failure != "")
        assert "the GPU is gone" in served.engine.health().failure
