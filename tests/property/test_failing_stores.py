"""Random requests over stores that fail, delay, reorder, drop and corrupt (I10, I3, I4, I7)."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

import pytest

from aiokv import AllocateTimeout
from aiokv.stores import StoreUse
from aiokv.testing import ScriptedDevice, ScriptedStore, running_clock, spin
from tests.harness.cache import Cache, prompt

if TYPE_CHECKING:
    import numpy as np

    from aiokv import Lease

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

STEPS = 300
SIZES = {"device_blocks": 24, "host_blocks": 12}


class Load:
    """Requests, faults and control operations in a random order.

    ``Cache.check`` compares every cached block byte for byte with what the model computes for its
    prompt, with the present weights: a wrong block of a store would be noticed there.
    """

    def __init__(self, seed: int, objects: list[dict[bytes, bytes]]) -> None:
        self.rng = random.Random(seed)
        self.stores = [
            ScriptedStore(
                name,
                objects=kept,
                max_concurrent=self.rng.choice((1, 2, 4)),
                capacity_blocks=self.rng.choice((None, None, 10)),
            )
            for name, kept in zip("ab", objects, strict=True)
        ]
        uses = [StoreUse(store, deadline_seconds=self.rng.choice((1, 5))) for store in self.stores]
        self.cache = Cache(
            device=ScriptedDevice(),
            stores=uses,
            store_policy=self.rng.choice(("at_commit", "at_commit", "at_nth_use", "on_eviction")),
            store_admission=self.rng.choice(("all", "all", "reused")),
            store_queue_blocks=self.rng.choice((2, 4096)),
            **SIZES,
        )
        self.requests: set[asyncio.Task[None]] = set()

    def prompt(self) -> np.ndarray:
        return prompt(self.rng.randrange(8), self.rng.randrange(3, 7))

    async def request(self, tokens: np.ndarray) -> None:
        lease: Lease | None = None
        try:
            lease = await self.cache.serve(
                tokens,
                wait_store=self.rng.choice((0.3, 2.0, math.inf, math.inf)),
                timeout=self.rng.choice((None, 3.0)),
            )
            await spin(self.rng.randrange(4))
        except AllocateTimeout:
            return
        finally:
            if lease is not None:
                lease.release()

    def begin(self) -> None:
        task = asyncio.create_task(self.request(self.prompt()))
        self.requests.add(task)
        task.add_done_callback(self.requests.discard)

    def cancel(self) -> None:
        if self.requests:
            self.rng.choice(sorted(self.requests, key=id)).cancel()

    def fault(self) -> None:
        store, rng = self.rng.choice(self.stores), self.rng
        operation = rng.choice(("lookup", "load", "save", "remove"))
        call = rng.choice((None, store.calls[operation], store.calls[operation] + 1))
        match rng.randrange(6):
            case 0:
                store.fail(operation, call, rng.choice((OSError("EIO"), ValueError())))
            case 1:
                store.delay(operation, call, seconds=rng.choice((0.1, 0.5, 3.0, 20.0)))
            case 2:
                store.corrupt(rng.choice(("load", "save")), block=rng.choice((None, 0, 1)))
            case 3:
                store.answer(operation, call, results=rng.choice(((), (0,), (1, 1, 1, 1))))
            case 4:
                for key in rng.sample(sorted(store.objects), len(store.objects) // 3):
                    del store.objects[key]
            case _:
                store.hold(operation, call)

    async def step(self) -> None:
        rng = self.rng
        match rng.randrange(18):
            case 0 | 1 | 2 | 3 | 4 | 5:
                self.begin()
            case 6:
                self.cancel()
            case 7 | 8:
                self.fault()
            case 9:
                rng.choice(self.stores).end_script()
            case 10:
                await self.cache.engine.evict(24, rng.choice(("device", "host")))
            case 11:
                await self.control()
            case 12 | 13:
                await self.finish_stores(self.cache.engine.reset())
            case _:
                await running_clock().advance(rng.choice((0.05, 0.3, 1.0, 6.0)))
        await spin(rng.randrange(6))
        assert self.cache.engine.check_invariants() == []
        for store in self.stores:
            assert all(count in (0, 1) for count in self.in_use(store)), "two loads into one block"

    @staticmethod
    def in_use(store: ScriptedStore) -> list[int]:
        return list(store.in_use.values())

    async def control(self) -> None:
        """Change the weights, or prefetch."""
        match self.rng.randrange(2):
            case 0:
                await self.settle()
                version = self.rng.choice(("", "", "1", None))
                async with self.cache.engine.updating_weights(version=version):
                    self.cache.memory.weights = {"": 0, "1": 1}.get(
                        "?" if version is None else version, self.rng.randrange(2, 10**6)
                    )
            case _:
                await self.finish_stores(self.cache.engine.prefetch(self.prompt(), timeout=1.0))

    async def finish_stores(self, work: object) -> None:
        """Await some work, which the operations of the stores may hold up."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        for _ in range(100):
            if task.done():
                break
            await running_clock().advance(1.0)
            for store in self.stores:
                store.end_script()
        await task

    async def settle(self) -> None:
        """Let all requests end."""
        for store in self.stores:
            store.end_script()
        for _ in range(200):
            if not self.requests:
                break
            await running_clock().advance(1.0)
        assert not self.requests
        await self.finish_stores(self.cache.engine.drain())

    async def run(self) -> None:
        async with self.cache:
            for _ in range(STEPS):
                await self.step()
            await self.settle()
            for store in self.stores:
                assert not any(self.in_use(store))


@pytest.mark.parametrize("seed", range(8))
async def test_no_request_fails_and_no_block_is_wrong(seed):
    """A second engine finds what the first one has saved, or does not."""
    objects: list[dict[bytes, bytes]] = [{}, {}]
    for run in range(2):
        await Load(100 * seed + run, objects).run()
