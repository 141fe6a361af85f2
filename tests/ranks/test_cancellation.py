"""Each coroutine of ranks and engine, cancelled at each of its awaits, can be called again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import Regions
from aiokv.testing import run_until_idle, spin
from tests.harness.cancelling import cancelled_at
from tests.ranks.loopback import LAYERS, Ranked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from aiokv.ranks import Rank

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]
B = [8, 9, 10, 11, 12, 13, 14]


@asynccontextmanager
async def ranks(tmp_path: Any, number: int) -> AsyncIterator[Ranked]:
    """Make two ranks with their own devices, in their own directory."""
    directory = tmp_path / str(number)
    directory.mkdir(mode=0o700)
    async with Ranked(directory, new_device=None) as ranked:
        yield ranked


async def at_each_await(
    tmp_path: Any,
    prepare: Callable[[Ranked], Awaitable[None]],
    verb: Callable[[Ranked], Coroutine[Any, Any, Any]],
    check: Callable[[Ranked], Awaitable[None]],
) -> int:
    """Prepare, call the verb, cancel it at its n-th await, check; with a new group per n.

    Returns:
        at how many awaits it was cancelled.
    """
    for number in count(1):
        async with ranks(tmp_path, number) as ranked:
            await prepare(ranked)
            was_cancelled = await cancelled_at(verb(ranked), number)
            assert ranked.engine.check_invariants() == []
            await check(ranked)
            assert ranked.engine.check_invariants() == []
        if not was_cancelled:
            return number - 1
    raise AssertionError


async def nothing(ranked: Ranked) -> None:
    """Do nothing, as preparation or check."""


# --- opening, closing, restarting -----------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["once", "and_again"])
async def test_opening_cancelled_at_any_await_leaves_nothing(tmp_path, again):
    cancelled = 0
    for number in count(1):
        directory = tmp_path / str(number)
        directory.mkdir(mode=0o700)
        ranked = Ranked(directory, new_device=None)
        runners = [asyncio.create_task(enter_and_leave(shard.worker)) for shard in ranked.shards]
        was_cancelled = await cancelled_at(ranked.engine.__aenter__(), number, again=again)
        if not was_cancelled:
            break
        cancelled += 1
        await spin(5)
        assert list(directory.iterdir()) == []
        for runner in runners:
            runner.cancel()
        await asyncio.wait(runners)
        await ranked.engine.aclose()
    await ranked.engine.aclose()
    await asyncio.gather(*runners)
    assert cancelled >= 2


async def enter_and_leave(worker: Rank) -> None:
    """Enter and leave a rank as its process does."""
    async with worker:
        await worker.closed()


async def test_closing_cancelled_at_any_await_can_be_called_again(tmp_path):
    cancelled = 0
    for number in count(1):
        async with ranks(tmp_path, number) as ranked:
            await ranked.serve(A)
            leaving = [asyncio.create_task(ranked._leave(shard)) for shard in ranked.shards]
            was_cancelled = await cancelled_at(ranked.engine.aclose(), number)
            await ranked.engine.aclose()
            await asyncio.gather(*leaving)
            assert not ranked.group.path.exists()
            assert not ranked.group.plans
        if not was_cancelled:
            break
        cancelled += 1
    assert cancelled >= 1


async def test_a_restart_cancelled_at_any_await_can_be_called_again(tmp_path):
    entering: list[asyncio.Task[Any]] = []

    async def lose_one(ranked: Ranked) -> None:
        await ranked.serve(A)
        await ranked.lose(1)
        entering.append(asyncio.create_task(ranked.shards[1].worker.__aenter__()))

    async def serve(ranked: Ranked) -> None:
        if ranked.group.failure is not None:
            await ranked.engine.restart_ranks()
        await entering.pop()
        assert await ranked.serve(A) == 0
        await ranked.finish()
        assert await ranked.serve(A) == 6

    assert await at_each_await(tmp_path, lose_one, lambda r: r.engine.restart_ranks(), serve) >= 2


# --- verbs ----------------------------------------------------------------------------------------


def new_tensors(ranked: Ranked) -> None:
    for shard in ranked.shards:
        shard.kv = [np.zeros_like(array) for array in shard.kv]
        shard.worker.regions = Regions(num_layers=LAYERS)
        shard.worker.regions.add("kv", layers=shard.kv)


async def put_on_host(ranked: Ranked) -> None:
    await ranked.to_host(A)


async def is_served(ranked: Ranked) -> None:
    """Check that there is no violation and that a served prompt is cached."""
    await ranked.serve(A)
    await ranked.finish()
    assert await ranked.serve(A) == 6


@pytest.mark.parametrize("tiers", [["host"], ["device", "host"]], ids="_".join)
async def test_sleep_cancelled_at_any_await_can_be_followed_by_either_verb(tmp_path, tiers):
    async def wake_up(ranked: Ranked) -> None:
        await ranked.engine.sleep(tiers)
        if "device" in tiers:
            new_tensors(ranked)
        await ranked.engine.wake_up()
        await is_served(ranked)

    def sleep(ranked: Ranked) -> Coroutine[Any, Any, None]:
        return ranked.engine.sleep(tiers)

    assert await at_each_await(tmp_path, put_on_host, sleep, wake_up) >= 1


async def test_wake_up_cancelled_at_any_await_can_be_called_again(tmp_path):
    async def fall_asleep(ranked: Ranked) -> None:
        await ranked.to_host(A)
        await ranked.engine.sleep(["device"])
        new_tensors(ranked)

    async def wake_up(ranked: Ranked) -> None:
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 6

    def verb(ranked: Ranked) -> Coroutine[Any, Any, None]:
        return ranked.engine.wake_up()

    assert await at_each_await(tmp_path, fall_asleep, verb, wake_up) >= 1


@pytest.mark.parametrize("first", [["device"], ["device", "host"]], ids="_".join)
async def test_wake_up_cancelled_at_any_await_can_be_called_with_other_tensors(tmp_path, first):
    abandoned: list[np.ndarray] = []

    async def fall_asleep(ranked: Ranked) -> None:
        await ranked.to_host(A)
        await ranked.engine.sleep()
        new_tensors(ranked)

    async def wake_up_others(ranked: Ranked) -> None:
        if "device" not in ranked.engine.asleep:
            await ranked.engine.sleep(["device"])
        abandoned[:] = [array for shard in ranked.shards for array in shard.kv]
        new_tensors(ranked)
        for array in abandoned:
            array[:] = 55
        await ranked.engine.wake_up(["device"])
        await ranked.engine.wake_up(["host"])
        await is_served(ranked)
        await ranked.to_host(B)
        assert await ranked.serve(B) == 6, "compares the bytes"
        assert all((array == 55).all() for array in abandoned)

    def verb(ranked: Ranked) -> Coroutine[Any, Any, None]:
        return ranked.engine.wake_up(first)

    assert await at_each_await(tmp_path, fall_asleep, verb, wake_up_others) >= 1


async def test_restart_of_sleeping_ranks_cancelled_at_any_await_binds_the_next_tensors(tmp_path):
    entering: list[asyncio.Task[Any]] = []

    async def lose_one_asleep(ranked: Ranked) -> None:
        await ranked.to_host(A)
        await ranked.engine.sleep()
        await ranked.lose(1)
        entering.append(asyncio.create_task(ranked.shards[1].worker.__aenter__()))

    async def wake_up(ranked: Ranked) -> None:
        if ranked.group.failure is not None:
            await ranked.engine.restart_ranks()
        await entering.pop()
        assert ranked.engine.asleep == {"device", "host"}
        abandoned = [array for shard in ranked.shards for array in shard.kv]
        new_tensors(ranked)
        for array in abandoned:
            array[:] = 55
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 0
        await ranked.to_host(B)
        assert await ranked.serve(B) == 6, "compares the bytes"
        assert all((array == 55).all() for array in abandoned)

    def restart(ranked: Ranked) -> Coroutine[Any, Any, None]:
        return ranked.engine.restart_ranks()

    assert await at_each_await(tmp_path, lose_one_asleep, restart, wake_up) >= 2


CONTROL: dict[str, Callable[[Ranked], Coroutine[Any, Any, None]]] = {
    "sleep": lambda ranked: ranked.engine.sleep(),
    "sleep_device": lambda ranked: ranked.engine.sleep(["device"]),
    "sleep_host": lambda ranked: ranked.engine.sleep(["host"]),
    "quiesce": lambda ranked: ranked.engine.quiesce(),
    "reset": lambda ranked: ranked.engine.reset(),
    "resize": lambda ranked: ranked.engine.resize(4),
    "update_weights": lambda ranked: update_weights(ranked),
}


@pytest.mark.parametrize("verb", CONTROL)
async def test_calls_after_a_cancelled_control_call_find_no_half_of_it(tmp_path, verb):
    async def call_others(ranked: Ranked) -> None:
        if verb == "quiesce" and ranked.engine.inspect.dump()["paused"]:
            ranked.engine.resume()
        await ranked.engine.sleep()
        abandoned = [array for shard in ranked.shards for array in shard.kv]
        new_tensors(ranked)
        for array in abandoned:
            array[:] = 55
        await ranked.engine.wake_up()
        async with ranked.engine.updating_weights(version="2"):
            pass
        await ranked.engine.resize(6)
        assert ranked.engine.statistics().attention.device.blocks == 6
        await ranked.engine.quiesce()
        ranked.engine.resume()
        await is_served(ranked)
        await ranked.to_host(B)
        assert await ranked.serve(B) == 6, "compares the bytes"
        assert all((array == 55).all() for array in abandoned)

    await at_each_await(tmp_path, put_on_host, CONTROL[verb], call_others)


async def request(ranked: Ranked) -> None:
    await ranked.serve(A)


async def swap(ranked: Ranked) -> None:
    async with ranked.engine.match(A) as lease:
        await lease.allocate(7)
        await lease.layers.wait_all()
        ranked.compute(lease, A, lease.cached_tokens)
        lease.commit(7)
        ranked.step()
        await lease.preempt(swap=True)
        await lease.resume(7)
        ranked.check(lease, A)


async def update_weights(ranked: Ranked) -> None:
    async with ranked.engine.updating_weights(10.0):
        await asyncio.sleep(0)


VERBS: dict[str, Callable[[Ranked], Coroutine[Any, Any, Any]]] = {
    "request": request,
    "swap": swap,
    "prefetch": lambda ranked: ranked.engine.prefetch(A),
    "evict": lambda ranked: ranked.engine.evict(8),
    "reset": lambda ranked: ranked.engine.reset(),
    "drain": lambda ranked: ranked.engine.drain(),
    "resize": lambda ranked: ranked.engine.resize(4),
    "update_weights": update_weights,
    "group_drain": lambda ranked: ranked.group.plans.drain(),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_a_verb_cancelled_at_any_await_leaves_the_cache_consistent(tmp_path, verb):
    async def check(ranked: Ranked) -> None:
        ranked.step()
        await is_served(ranked)

    await at_each_await(tmp_path, put_on_host, verb, check)


# --- of a rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["once", "and_again"])
async def test_a_rank_cancelled_at_any_await_of_its_entry_leaves_nothing(tmp_path, again):
    cancelled = 0
    for number in count(1):
        async with ranks(tmp_path, number) as ranked:
            await ranked.lose(1)
            restarting = asyncio.create_task(ranked.engine.restart_ranks())
            worker = ranked.shards[1].worker
            was_cancelled = await cancelled_at(worker.__aenter__(), number, again=again)
            if was_cancelled:
                restarting.cancel()
                await asyncio.wait((restarting,))
                membership = ranked.group._membership
                await run_until_idle(
                    lambda r=membership: not r._socket.handshakes and not r.ranks[1].connection
                )
                ranked.shards[1].fresh()
                await ranked.restart(1)
            else:
                await restarting
            assert await ranked.serve(A) == 0
        if not was_cancelled:
            break
        cancelled += 1
    assert cancelled >= 1


async def test_a_rank_whose_closing_is_cancelled_at_any_await_can_close_again(tmp_path):
    cancelled = 0
    for number in count(1):
        async with ranks(tmp_path, number) as ranked:
            await ranked.serve(A)
            stays, goes = ranked.shards
            closing = asyncio.create_task(ranked.engine.aclose())
            leaving = asyncio.create_task(ranked._leave(stays))
            waiting = asyncio.create_task(goes.worker.closed())
            waiting.cancel()
            assert await goes.worker.closed() == "the group is closing"
            was_cancelled = await cancelled_at(goes.worker.aclose(), number)
            await goes.worker.aclose()
            await asyncio.gather(closing, leaving)
        if not was_cancelled:
            break
        cancelled += 1
    assert cancelled >= 1
