"""I9 on random runs: the recorded transitions of an engine give equal plans when run again."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, CacheEngine, Lease, WindowGroup
from aiokv.errors import AiokvError
from aiokv.testing import record, replay_transitions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REQUESTS = 60
BLOCK_TOKENS = 4

CONFIGS: dict[str, dict[str, Any]] = {
    "write_through": {"host_blocks": 40},
    "selective": {"host_blocks": 40, "write_policy": "nth_use:2"},
    "write_back": {"host_blocks": 24, "write_policy": "write_back", "eviction_policy": "lru"},
    "no_host": {"host_blocks": 0},
    "quota": {"host_blocks": 40, "salt_quota_blocks": 16},
    "cached_first": {
        "host_blocks": 40,
        "admission": "cached_first",
        "max_overtake_seconds": 0.0,
        "max_running_leases": 4,
        "salt_quota_blocks": 20,
    },
    "shares": {"host_blocks": 40, "salt_shares": {"a": 0.4, "b": 0.2}},
    "state": {"host_blocks": 40, "state_slots": 6},
    "host_state": {"host_blocks": 40, "state_slots": 5, "host_state_slots": 6},
    "windows": {"host_blocks": 0, "windows": {"w": WindowGroup(window_tokens=8, device_blocks=24)}},
    "host_windows": {
        "host_blocks": 40,
        "windows": {"w": WindowGroup(window_tokens=8, device_blocks=24, host_blocks=30)},
    },
}


class Run:
    """Random requests on one engine without tensors, some cancelled, with control calls between."""

    def __init__(self, engine: CacheEngine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)

    async def request(self) -> None:
        rng = self.rng
        tokens = [rng.randrange(2) for _ in range(rng.choice([5, 9, 14, 23, 40]))]
        salt = rng.choice(["a", "b"])
        async with self.engine.match(tokens, salt=salt, owner="r") as lease:
            await lease.allocate(
                len(tokens),
                priority=rng.randrange(3),
                timeout=rng.choice([None, 0.0, 60.0]),
                wait_pending=rng.choice([0.0, 60.0]),
            )
            await self.compute(lease, len(tokens))
            for _ in range(rng.randrange(4)):
                await self.change(lease, tokens)
                await asyncio.sleep(0)

    async def compute(self, lease: Lease, num_tokens: int) -> None:
        with self.engine.computing([lease]):
            with suppress(AiokvError):
                await lease.layers.wait_all()
            lease.recompute_from()
            await asyncio.sleep(0)
        if self.rng.random() < 0.9:
            lease.commit(num_tokens)
        if self.engine.config.state_slots and num_tokens % BLOCK_TOKENS == 0:
            lease.snapshot(num_tokens)

    async def change(self, lease: Lease, tokens: list[int]) -> None:
        rng = self.rng
        verb = rng.choice(["extend", "append", "swap", "preempt", "fork", "truncate"])
        if verb == "extend":
            self.engine.extend([lease], rng.randrange(1, 6))
        elif verb == "append":
            lease.append([rng.randrange(2)])
            lease.commit(lease.num_tokens)
        elif verb == "fork":
            lease.fork().release()
        elif verb == "truncate":
            lease.truncate(rng.randrange(1, lease.num_tokens + 1))
        else:
            await lease.preempt(swap=verb == "swap")
            await lease.resume(len(tokens))

    async def control(self) -> None:
        engine, rng = self.engine, self.rng
        if rng.random() < 0.3:
            self.prefer([rng.randrange(2) for _ in range(rng.randrange(4, 24))])
        verb = rng.choice(
            ["evict", "pin", "prefetch", "reset", "purge", "resize", "pause", "step", "drain"]
        )
        if verb == "evict":
            await engine.evict(rng.randrange(8))
        elif verb == "pin":
            pin = await engine.pin([rng.randrange(2) for _ in range(9)])
            asyncio.get_running_loop().call_soon(pin.release)
        elif verb == "prefetch":
            await engine.prefetch([rng.randrange(2) for _ in range(9)], ttl_seconds=60.0)
        elif verb == "reset":
            await engine.reset()
        elif verb == "purge":
            await engine.purge(rng.choice(["a", "b"]))
        elif verb == "resize":
            await engine.resize(rng.choice([24, 32]), timeout=0.0)
        elif verb == "pause":
            engine.pause()
            asyncio.get_running_loop().call_soon(engine.resume)
        elif verb == "drain":
            await engine.drain()
        else:
            engine.step()

    def prefer(self, tokens: list[int]) -> None:
        verb, salt = self.rng.choice(["retain", "demote", "forget"]), self.rng.choice(["a", "b"])
        more: dict[str, Any] = {"seconds": 0.0, "priority": 2} if verb == "retain" else {}
        getattr(self.engine, verb)(tokens, salt=salt, **more)

    async def play(self) -> None:
        tasks = []
        for _ in range(REQUESTS):
            tasks.append(asyncio.create_task(quiet(self.request)))
            if self.rng.random() < 0.2:
                self.rng.choice(tasks).cancel()
            if self.rng.random() < 0.4:
                await quiet(self.control)
            for _ in range(self.rng.randrange(6)):
                await asyncio.sleep(0)
        while left := [task for task in tasks if not task.done()]:
            self.rng.choice(left).cancel()
            for _ in range(4):
                await asyncio.sleep(0)
        assert self.engine.check_invariants() == []


async def quiet(operation: Callable[[], Awaitable[object]]) -> None:
    """Run an operation whose refusal is part of the run."""
    with suppress(AiokvError):
        await operation()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_transitions_of_a_random_run_give_equal_plans(name: str, seed: int) -> None:
    sizes = {"device_blocks": 32, "block_tokens": BLOCK_TOKENS, "drain_timeout_seconds": 0.0}
    engine = CacheEngine(CacheConfig(**{**sizes, **CONFIGS[name]}))

    async def play() -> None:
        async with engine:
            await Run(engine, seed).play()

    with record(engine) as recording:
        asyncio.run(play())
    assert replay_transitions(recording.log) > 3 * REQUESTS
