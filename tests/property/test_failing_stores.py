"""Random requests over stores that fail, delay, reorder, drop and corrupt (I10, I3, I4, I7)."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import AllocateTimeout, ControlTimeout, StoreError
from aiokv.stores import StoreUse
from aiokv.testing import ScriptedDevice, ScriptedStore, running_clock, spin
from tests.harness.cache import Cache, prompt
from tests.harness.recurrence import Hybrid
from tests.harness.windows import Windowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import CacheEngine, Lease

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
        self.cache: Any = self.new_cache(
            device=ScriptedDevice(),
            stores=uses,
            store_policy=self.rng.choice(
                ("write_through", "write_through", "nth_use:2", "write_back")
            ),
            store_queue_blocks=self.rng.choice((2, 4096)),
        )
        self.stores += [part for store in self.stores for part in store.parts.values()]
        self.engine: CacheEngine = self.cache.engine
        self.requests: set[asyncio.Task[None]] = set()

    def new_cache(self, **config: Any) -> Any:
        return Cache(**SIZES, **config)

    def prompt(self) -> Any:
        return prompt(self.rng.randrange(8), self.rng.randrange(3, 7))

    async def serve(self, tokens: Any, **allocate: Any) -> Lease:
        return await self.cache.serve(tokens, **allocate)

    def use_weights(self, weights: int) -> None:
        self.cache.memory.weights = weights

    async def request(self, tokens: Any) -> None:
        lease: Lease | None = None
        try:
            lease = await self.serve(
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
                await self.engine.evict(24, rng.choice(("device", "host")))
            case 11:
                await self.control()
            case 12:
                await self.finish_stores(self.engine.reset())
            case 13:
                await self.purge()
            case _:
                await running_clock().advance(rng.choice((0.05, 0.3, 1.0, 6.0)))
        await spin(rng.randrange(6))
        assert self.engine.check_invariants() == []
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
                async with self.engine.updating_weights(version=version):
                    self.use_weights(
                        {"": 0, "1": 1}.get(
                            "?" if version is None else version, self.rng.randrange(2, 10**6)
                        )
                    )
            case _:
                await self.finish_stores(self.engine.prefetch(self.prompt(), timeout=1.0))

    async def purge(self) -> None:
        """Purge the salt of all requests, while they go on."""
        with suppress(StoreError, ControlTimeout):
            await self.finish_stores(self.engine.purge(""))
            assert not any(store.objects for store in self.stores)

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
        await self.finish_stores(self.engine.drain())

    async def run(self) -> None:
        async with self.cache:
            for _ in range(STEPS):
                await self.step()
            await self.settle()
            for store in self.stores:
                assert not any(self.in_use(store))


class TwiceComputedLoad(Load):
    """As ``Load``, for a small model whose ``check`` compares all that a lease has, bit for bit."""

    def prompt(self) -> list[int]:
        length = self.rng.randrange(5, 15)
        tokens = [self.rng.randrange(3), *range(1, length)]
        if self.rng.randrange(2):
            tokens[length // 2] = 99  # parts from the others there
        return tokens

    async def serve(self, tokens: Sequence[int], **allocate: Any) -> Lease:
        model = self.cache
        lease = model.engine.match(tokens)
        try:
            await lease.allocate(len(tokens), **allocate)
            await lease.layers.wait_all()
            model.check(lease, tokens, lease.cached_tokens)
            model.prefill(lease, tokens)
        except BaseException:
            lease.release()
            raise
        return lease

    def use_weights(self, weights: int) -> None:
        self.cache.weights = weights


class StateLoad(TwiceComputedLoad):
    """Requests to a model with recurrent state."""

    def new_cache(self, **config: Any) -> Any:
        host_state_slots = self.rng.choice((1, 2, 3, 8))
        return Hybrid(host_state_slots=host_state_slots, state_slots=4, **SIZES, **config)


class WindowLoad(TwiceComputedLoad):
    """Requests to a model with sliding windows."""

    def new_cache(self, **config: Any) -> Any:
        return Windowed(
            host_windows=self.rng.choice((2, 5, 12, 24)),
            window_blocks=self.rng.choice((14, 30)),
            sinks=self.rng.choice(({}, {"near": 3}, {"near": 1, "far": 2})),
            **SIZES,
            **config,
        )


@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("load", [Load, StateLoad, WindowLoad])
@pytest.mark.parametrize("seed", range(8))
async def test_no_request_fails_and_no_block_is_wrong(seed, load):
    await run_twice(load, seed)


@pytest.mark.loop("uvloop")
@pytest.mark.parametrize("load", [Load, StateLoad, WindowLoad])
async def test_no_request_fails_and_no_block_is_wrong_on_uvloop(load):
    await run_twice(load, 8)


async def run_twice(load: type[Load], seed: int) -> None:
    """Run a load; a second engine finds what the first one has saved, or does not."""
    objects: list[dict[bytes, bytes]] = [{}, {}]
    for run in range(2):
        await load(100 * seed + run, objects).run()
