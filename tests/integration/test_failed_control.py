"""Calls that follow a cancelled control call get the bytes that the model has computed.

Each call of ``CALLS`` is cancelled at each of its awaits. Then another call is made, with other
arguments, and blocks are read through the device, host memory and a store.
"""

from __future__ import annotations

import asyncio
import math
import random
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiokv import Peers
from aiokv.errors import ControlTimeout, LayoutError, UsageError
from aiokv.stores import StoreUse
from aiokv.testing import ScriptedStore, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt
from tests.harness.cancelling import cancelled_at
from tests.harness.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    import numpy as np

    from aiokv import Hit, Lease
    from aiokv.stores.base import StoreMemory

A, C, D = (prompt(seed, 2) for seed in range(1, 4))
B = prompt(4, 6)
DEVICE_BLOCKS = 10
GARBAGE = 0xDEAD

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]


class SlowStore(ScriptedStore):
    """A store that suspends while it opens and while it closes."""

    async def open(self, memory: StoreMemory) -> None:
        await spin(2)
        await super().open(memory)
        try:
            await spin(2)
        except BaseException:
            await super().aclose()
            raise

    async def aclose(self) -> None:
        await spin(2)
        await super().aclose()


class Model(Cache):
    """A model with a store and peers. Its device completes a copy per pass of the loop.

    Attributes:
        holder: a lease that is released some passes after ``prepare``.
        abandoned: tensors that the engine must not write any more.
    """

    def __init__(self) -> None:
        self.store = SlowStore()
        super().__init__(
            device_blocks=DEVICE_BLOCKS,
            host_blocks=12,
            stores=[StoreUse(self.store, lookup_deadline_seconds=PATIENCE_SECONDS)],
            peers=Peers(
                secret="0123456789abcdef",
                listen="127.0.0.1",
                ring_bytes=1 << 13,
                outgoing_bytes=1 << 13,
            ),
            weights_version="0",
        )
        self.device.computes_in_stream = True
        self.holder: Lease | None = None
        self.abandoned: list[np.ndarray] = []
        self._driver: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        assert self._driver is not None
        self._driver.cancel()
        if exc is not None:
            self.store.end_script()
        await super().__aexit__(exc_type, exc, traceback)

    async def _drive(self) -> None:
        """Complete a copy, and close a step, in each pass; release the holder."""
        for passes in count():
            self.engine.step()
            ready = [copy for copy in self.device.copies if copy.after is None or copy.after.done]
            if ready:
                ready[0].complete(ready[0].pending_layers[0])
            if passes % 4 == 3 and self.holder is not None:
                self.holder.release()
                self.holder = None
            await asyncio.sleep(0)

    async def prepare(self) -> None:
        """Leave one prompt in the store and one on the device, with a backup in flight."""
        await self.fill(A)
        await self.engine.drain()
        await self.engine.reset()
        self.holder = await self.serve(B)

    def new_tensors(self) -> None:
        """Give up the tensors, which others use from now on."""
        self.abandoned += self.memory.tensors
        self.memory.take(DEVICE_BLOCKS)
        for tensor in self.abandoned:
            tensor[:] = GARBAGE

    async def wake_up(self, tags: Sequence[Any] = ("device", "host")) -> None:
        """Wake tiers up, the device with new tensors."""
        regions = None
        if "device" in tags and "device" in self.engine.asleep:
            self.new_tensors()
            regions = self.memory.regions
        await self.engine.wake_up(tags, regions=regions)

    async def update(self, version: int) -> None:
        async with self.engine.updating_weights(version=str(version)):
            await spin(2)
            self.memory.weights = version

    async def read(self, tokens: np.ndarray, **allocate: Any) -> Hit:
        """Serve a prompt; return its hit, whose bytes were compared."""
        lease = await self.serve(tokens, **allocate)
        hit = lease.hit
        lease.release()
        return hit

    async def reads_what_it_computes(self) -> None:
        """Compare the bytes of hits on the device, in host memory and in the store."""
        assert not self.engine.inspect.dump()["paused"]
        for tokens in (A, C):
            await self.read(tokens)
        assert (await self.read(C)).device_tokens == 8
        await self.engine.drain()
        await self.engine.evict(DEVICE_BLOCKS)
        for tensor in self.memory.tensors:
            tensor[:] = GARBAGE
        assert (await self.read(C)).host_tokens == 8
        await self.engine.drain()
        await self.engine.reset()
        assert (await self.read(C, wait_store=math.inf)).host_tokens == 8
        assert all((tensor == GARBAGE).all() for tensor in self.abandoned)
        assert self.engine.regions is self.memory.regions
        assert self.engine.check_invariants() == []


async def sleep_and_wake_up(model: Model, *tags: Any) -> None:
    await model.engine.sleep(tags)
    await model.wake_up(tags)


async def quiesce(model: Model) -> None:
    await model.engine.quiesce()
    model.engine.resume()


async def nothing(model: Model) -> None:
    """Prepare nothing."""


async def fall_asleep(model: Model) -> None:
    await model.engine.sleep()


async def host_asleep(model: Model) -> None:
    await model.engine.sleep()
    await model.wake_up(["device"])


Call = tuple["Callable[[Model], Awaitable[None]]", "Callable[[Model], Coroutine[Any, Any, None]]"]

CALLS: dict[str, Call] = {
    "sleep": (nothing, lambda model: model.engine.sleep()),
    "sleep_device": (nothing, lambda model: model.engine.sleep(["device"])),
    "sleep_host": (nothing, lambda model: model.engine.sleep(["host"])),
    "wake_up": (fall_asleep, lambda model: model.wake_up()),
    "wake_up_host": (host_asleep, lambda model: model.wake_up(["host"])),
    "resize": (nothing, lambda model: model.engine.resize(6)),
    "reset": (nothing, lambda model: model.engine.reset()),
    "quiesce": (nothing, lambda model: model.engine.quiesce()),
    "update": (nothing, lambda model: model.update(1)),
}


async def resize(model: Model) -> None:
    await model.engine.resize(DEVICE_BLOCKS - 1)
    assert model.statistics.attention.device.blocks == DEVICE_BLOCKS - 1


NEXT: dict[str, Callable[[Model], Coroutine[Any, Any, None]]] = {
    "sleep": lambda model: sleep_and_wake_up(model, "device", "host"),
    "sleep_device": lambda model: sleep_and_wake_up(model, "device"),
    "sleep_host": lambda model: sleep_and_wake_up(model, "host"),
    "wake_up": lambda model: model.wake_up(),
    "wake_up_host": lambda model: model.wake_up(["host"]),
    "resize": resize,
    "reset": lambda model: model.engine.reset(),
    "quiesce": quiesce,
    "update": lambda model: model.update(2),
}


@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("cancelled", CALLS)
async def test_call_after_a_cancelled_call_finds_no_half_of_it(cancelled, following):
    prepare, call = CALLS[cancelled]
    for number in count(1):
        async with Model() as model:
            await model.prepare()
            await prepare(model)
            was_cancelled = await cancelled_at(call(model), number)
            assert model.engine.check_invariants() == []
            if cancelled == "quiesce" and not was_cancelled:
                model.engine.resume()
            if model.engine.asleep:
                async with model.engine.match(D) as lease:
                    assert not lease.try_allocate(1)
            await NEXT[following](model)
            await model.wake_up()
            await model.reads_what_it_computes()
        if not was_cancelled:
            break
    assert number > 1, "the call suspends"


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_failed_wake_up_keeps_no_tensors(how):
    async with Model() as model:
        await model.engine.sleep()
        gate = model.store.hold("open")
        model.new_tensors()
        waking = asyncio.create_task(
            model.engine.wake_up(regions=model.memory.regions, timeout=5.0)
        )
        await spin(10)
        assert model.engine.inspect.parts.worker.memory.regions is model.memory.regions
        if how == "cancelled":
            waking.cancel()
        await running_clock().advance(6.0)
        gate.open()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else ControlTimeout):
            await waking
        assert model.engine.asleep == {"device", "host"}
        assert not any(
            piece.owner for piece in model.engine.inspect.parts.worker.memory.regions.all_pieces()
        )
        with pytest.raises(LayoutError, match="needs its tensors"):
            await model.engine.wake_up()
        await model.wake_up()
        await model.reads_what_it_computes()


async def test_tensors_that_a_wake_up_would_not_use_are_refused():
    async with Model() as model:
        await model.engine.wake_up(regions=model.memory.regions)
        others = Memory(DEVICE_BLOCKS, BLOCK_TOKENS).regions
        with pytest.raises(UsageError, match="new tensors, but the device tier is awake"):
            await model.engine.wake_up(regions=others)
        await model.engine.sleep()
        with pytest.raises(UsageError, match="new tensors, but the device tier is not in tags"):
            await model.engine.wake_up(["host"], regions=others)
        assert model.engine.asleep == {"device", "host"}
        await model.wake_up()
        await model.reads_what_it_computes()


async def test_update_that_is_cancelled_on_entry_changes_nothing():
    for number in count(1):
        async with Model() as model:
            await model.prepare()
            hit = model.hit(B)
            entered = False

            async def update(model: Model = model) -> None:
                async with model.engine.updating_weights(version="1"):
                    nonlocal entered
                    entered = True

            await cancelled_at(update(), number)
            if entered:
                break
            assert model.hit(B) == hit
            assert (await model.read(A, wait_store=math.inf)).host_tokens == 8, "of the store"
            await model.reads_what_it_computes()
    assert number > 1, "the entry suspends"


@pytest.mark.parametrize("seed", range(20))
async def test_walk_of_cancelled_control_calls_reads_what_it_computes(seed):
    rng = random.Random(seed)
    calls: list[Callable[[Model], Coroutine[Any, Any, None]]] = [
        *NEXT.values(),
        lambda model: model.engine.sleep(rng.choice((["device"], ["host"], ["device", "host"]))),
        lambda model: model.engine.resize(rng.randint(4, DEVICE_BLOCKS)),
        lambda model: model.update(rng.randint(3, 9)),
    ]
    async with Model() as model:
        await model.prepare()
        for _ in range(8):
            await cancelled_at(rng.choice(calls)(model), rng.randint(1, 25))
            assert model.engine.check_invariants() == []
            if not model.engine.asleep and rng.random() < 0.5:
                await model.read(A)
        await model.wake_up()
        await model.reads_what_it_computes()
