"""Random requests over two engines whose connections and copies fail (I1 to I11 on both sides).

Each engine receives and sends. Between them, proxies cut, change, repeat, reorder and hold back
what is on its way; leases are released, preempted, forked, truncated and cancelled during
transfers; engines are reset, put to sleep, get other weights, and are restarted on the same port.
With layers, some parts of a prompt are sent layer by layer; layers that are never committed have
wrong bytes. Every position that is cached or was received is compared with the bytes of its prompt,
and so are the recurrent state and the windows before each position that is computed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import WindowGroup
from aiokv.errors import (
    AllocateTimeout,
    ClosedError,
    LeaseError,
    PeerError,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.testing import running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.flaky import ChaosDevice
from tests.peers.engines import BLOCK_TOKENS, Side
from tests.peers.proxy import FAULTS, Proxy, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv import Lease
    from aiokv.engine.receiving import Receiving
    from aiokv.engine.sending import Sending
    from tests.peers.proxy import Fault

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

STEPS = 120
SALTS = ("", "tenant")
SEEDS = range(200 if os.environ.get("AIOKV_DEEP") else 6)
STATE: dict[str, Any] = {"state_slots": 8}
LAYERS: dict[str, Any] = {"layers": 4, "layer_ranges": 3}
WINDOWS: dict[str, Any] = {
    "windows": {
        "near": WindowGroup(window_tokens=6, device_blocks=40, step_tokens=8),
        "far": WindowGroup(window_tokens=15, device_blocks=60, step_tokens=8, sink_tokens=3),
    }
}


class Engine:
    """One of the engines; it may be restarted on its port.

    Args:
        rng: of the load.
        model: recurrent state and window groups, as for ``Side``.

    Attributes:
        side: the engine that runs on the port now.
        weights: version of its weights.
        restarts: number of engines that were closed while they were used.
    """

    def __init__(self, rng: random.Random, model: dict[str, Any]) -> None:
        self.rng = rng
        self.model = model
        self.weights = 0
        self.side = self._new_side("127.0.0.1")
        self.restarts = 0

    def _new_side(self, listen: str) -> Side:
        rng = self.rng
        side = Side(
            ChaosDevice(rng, refuse_share=0.01, fail_share=0.02),
            listen=listen,
            chunk_blocks=rng.choice((1, 2, 3)),
            ring_blocks=rng.choice((1, 2, 5, 16)),
            device_blocks=rng.choice((24, 64)),
            host_blocks=32,
            write_policy=rng.choice(("none", "write_through", "write_back")),
            weights_version=str(self.weights),
            **self.model,
        )
        side.memory.weights = self.weights
        return side

    @property
    def port(self) -> int:
        (endpoint,) = self.side.engine.inspect.parts.worker.tickets.endpoints
        return endpoint.port

    async def restart(self) -> None:
        """Close the engine while it is used, and open another one on its port."""
        old, port = self.side, self.port
        self.restarts += 1
        closing = asyncio.ensure_future(old.engine.aclose(0.0))
        await self.complete(closing)
        self.side = self._new_side(f"127.0.0.1:{port}")
        await self.side.engine.__aenter__()

    async def complete(self, work: asyncio.Future[None]) -> None:
        """Await some work while copies end."""
        while not work.done():
            self.move(8)
            await asyncio.sleep(0)
        await work

    def move(self, layers: int) -> None:
        """End some copies."""
        assert isinstance(self.side.device, ChaosDevice)
        self.side.device.move(layers)

    def check(self) -> None:
        """Check the invariants of the engine and of its connections."""
        assert self.side.engine.check_invariants() == []
        assert self.side.engine.inspect.parts.worker.tickets.violations() == []  # type: ignore[attr-defined]


class Request:
    """A prompt that one engine receives and the other sends."""

    def __init__(self, load: Load, decode: int) -> None:
        rng = self.rng = load.rng
        self.load = load
        self.decode = load.engines[decode]
        self.prefill = load.engines[1 - decode]
        self.proxy = load.proxies[decode]
        length = rng.randint(1, 40)
        self.tokens = np.arange(length, dtype=np.int32) + 1000 * rng.randrange(4)
        self.tokens[length // 2 :] += 500 * rng.randrange(2)
        self.salt = rng.choice(SALTS)
        self.senders: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Receive the prompt, compute what is missing, and check all of it."""
        side = self.decode.side
        try:
            async with side.engine.match(self.tokens, salt=self.salt) as lease:
                await lease.allocate(len(self.tokens), timeout=5.0)
                await self.receive(Part(side, lease, self.tokens))
        except (AllocateTimeout, ClosedError):
            return
        finally:
            for task in self.senders:
                task.cancel()
            if self.senders:
                await asyncio.wait(self.senders)
            for task in self.senders:
                if not task.cancelled():
                    task.result()

    async def receive(self, part: Part) -> None:
        rng, lease, length = self.rng, part.lease, len(self.tokens)
        wanted = rng.choice((None, None, rng.randint(1, length)))
        try:
            receiving = await lease.receive(wanted, timeout=rng.choice((0.5, 3.0))).__aenter__()
        except LeaseError:  # nothing is missing
            await part.compute(await part.cached(), length)
            return
        leaves = True
        try:
            await self.send(receiving.ticket)
            leaves = await self.use(part, receiving)
        finally:
            await receiving.__aexit__(None, None, None)
        if not leaves:
            return
        first = await receiving.wait()
        part.check(first)
        self.load.received += receiving.received_tokens
        if lease.state == "failed":
            first = await part.accept_failure()
        await part.compute(first, length)

    async def send(self, blob: bytes) -> None:
        """Give the ticket to the other engine, sometimes twice, late, or never."""
        rng = self.rng
        if rng.random() < 0.1:
            self.load.tickets.append((self, blob))  # for an engine that opens later
        if rng.random() < 0.05:
            return
        if rng.random() < 0.8:
            blob = self.proxy.via(blob)
        for _ in range(rng.choice((1, 1, 1, 2))):
            self.senders.append(asyncio.create_task(self.serve(blob)))
            await spin(rng.randrange(4))

    async def use(self, part: Part, receiving: Receiving) -> bool:
        """Use the lease while it receives; return True if it still has its blocks."""
        rng, lease = self.rng, part.lease
        limit = receiving.statistics.wanted_tokens
        match rng.randrange(12):
            case 0:
                await spin(rng.randrange(40))
                return True  # left early
            case 1:
                await spin(rng.randrange(40))
                lease.release()
                return False
            case 2:
                await spin(rng.randrange(40))
                await part.preempt(swap=False)
                return False
            case 3:
                await spin(rng.randrange(40))
                await part.preempt(swap=True)
                return False
            case 4:
                await spin(rng.randrange(40))
                try:
                    lease.truncate(rng.randint(max(lease.cached_tokens, 1), len(self.tokens)))
                except LeaseError:
                    return True
                await receiving.wait()
                part.tokens = self.tokens[: lease.num_tokens]
                part.check(min(await receiving.wait(), lease.num_tokens))
                return False
            case 5:
                await receiving.wait(min(BLOCK_TOKENS, limit))
                part.fork()
            case 6 | 7:
                part.check(await receiving.wait(rng.randint(0, limit)))
        part.check(await receiving.wait())
        return True

    async def serve(self, blob: bytes) -> None:
        """Compute the prompt on the other engine, and send it."""
        rng, side = self.rng, self.prefill.side
        tokens = self.tokens.copy()
        salt = self.salt
        if rng.random() < 0.05:
            tokens[-1] += 1
        try:
            async with side.engine.match(tokens, salt=salt) as lease:
                await lease.allocate(len(tokens), timeout=5.0)
                part = Part(side, lease, tokens)
                async with side.engine.send(lease, blob) as sending:
                    done = await part.cached()
                    while done < len(tokens) and rng.random() > 0.03:
                        end = min(done + rng.randint(1, 12), len(tokens))
                        if self.load.is_layered and rng.random() < 0.7:
                            is_right = rng.random() < 0.85
                            await part.announce(sending, done, end, rng, is_right=is_right)
                            if not is_right:
                                break
                        await part.compute(done, end)
                        done = end
                        await spin(rng.randrange(4))
                        match rng.randrange(40):
                            case 0:
                                sending.cancel()
                            case 1:
                                lease.release()
                                break
                            case 2:
                                await part.preempt(swap=rng.random() < 0.5)
                                break
                            case 3:
                                part.fork()
                            case 4:
                                lease.truncate(done)
                                break
        except (AllocateTimeout, ClosedError, PeerError, UsageError):
            return


class Part:
    """A lease and the bytes that its positions must have."""

    def __init__(self, side: Side, lease: Lease, tokens: np.ndarray) -> None:
        self.side = side
        self.lease = lease
        self.tokens = tokens
        self.weights = side.memory.weights
        self.salt = lease.salt

    def check(self, end: int) -> None:
        """Compare the first positions."""
        self._check(self.lease, end)

    def _check(self, lease: Lease, end: int) -> None:
        places, words = self._places(lease, 0, min(end, lease.num_tokens, len(self.tokens)))
        self.side.memory.check(places, words, lease.owner)

    def _places(
        self, lease: Lease, first: int, end: int
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        positions = np.arange(first, end)
        places = lease.block_table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        words = self.side.memory.position_words(self.tokens[:end], self.salt, self.weights)
        return places, words[first:]

    async def cached(self) -> int:
        """Wait for the onload; return the first position that is not there."""
        try:
            await self.lease.layers.wait_all()
        except TransferError:
            return await self.accept_failure()
        self.check(self.lease.cached_tokens)
        return self.lease.cached_tokens

    async def accept_failure(self) -> int:
        """Return the first position to compute after a failed onload."""
        while True:
            try:
                self.lease.recompute_from()
            except LeaseError as error:  # another transfer still accesses blocks of the lease
                if self.lease.state == "released":
                    raise
                if "preempt" in str(error):  # its state, or its windows, are lost
                    return await self.begin_again()
                await asyncio.sleep(0)
            else:
                return self.lease.cached_tokens

    async def begin_again(self) -> int:
        """Give the blocks back, and take others; return the first position to compute."""
        await self.lease.preempt()
        await self.lease.allocate(len(self.tokens), timeout=5.0)
        self.weights = self.side.memory.weights  # they may have been updated meanwhile
        return await self.cached()

    async def compute(self, first: int, end: int) -> None:
        """Write positions, and check all before them."""
        end = min(end, self.lease.num_tokens)
        with ExitStack() as stack:
            await self._enter_batch(stack)
            while first < end:
                stop = min(end, self.lease.max_extend_tokens)
                places, words = self._places(self.lease, 0, stop)
                self.side.memory.write((places[0][first:], places[1][first:]), words[first:])
                self.side.memory.compute_sides(self.lease, words, first, stop)
                self.lease.commit(stop)
                first = stop
        self.check(end)

    async def announce(
        self, sending: Sending, first: int, end: int, rng: random.Random, *, is_right: bool
    ) -> None:
        """Write layers of positions, and let them be sent; commit none."""
        end = min(end, self.lease.num_tokens)
        num_layers = rng.randint(1, self.side.memory.layers)
        for layer in range(num_layers):
            if self.lease.state != "granted" or sending.failure is not None:
                return
            places, words = self._places(self.lease, first, end)
            self.side.memory.write(places, words if is_right else ~words, range(layer, layer + 1))
            sending.layers_done(end, layer + 1)
            await spin(rng.randrange(4))

    async def _enter_batch(self, stack: ExitStack) -> None:
        """Begin a batch of the lease, when its state is not being sent any more."""
        while True:
            try:
                stack.enter_context(self.side.engine.computing([self.lease]))
            except LeaseError as error:
                if "being sent" not in str(error):
                    raise
                await asyncio.sleep(0)
            else:
                return

    async def preempt(self, *, swap: bool) -> None:
        try:
            await self.lease.preempt(swap=swap)
        except (WouldBlock, TransferError, LeaseError):
            return

    def fork(self) -> None:
        """Fork, check the computed positions of the child, and release it."""
        if self.side.memory.windows:  # a lease with windows cannot be forked
            return
        done = self.lease.cached_tokens
        try:
            child = self.lease.fork()
        except (WouldBlock, LeaseError):  # an onload of the lease has failed
            return
        self._check(child, done)
        child.release()


class Load:
    """Requests, faults and control operations in a random order."""

    def __init__(self, seed: int, model: dict[str, Any] | None = None) -> None:
        self.rng = random.Random(seed)
        self.engines = [Engine(self.rng, model or {}), Engine(self.rng, model or {})]
        self.proxies: list[Proxy] = []
        self.requests: set[asyncio.Task[None]] = set()
        self.control: set[asyncio.Task[None]] = set()
        self.tickets: list[tuple[Request, bytes]] = []
        self.is_layered = "layer_ranges" in (model or {})
        self.fault_share = self.rng.choice((0.0, 0.002, 0.01, 0.05))
        self.received = 0

    def fault(self, unit: Unit) -> Fault:
        """Return the fault of the next unit on its way."""
        if self.rng.random() >= self.fault_share:
            return "none"
        return self.rng.choice(FAULTS)

    def begin(self, work: object, group: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        group.add(task)

    async def step(self) -> None:
        rng = self.rng
        engine = rng.choice(self.engines)
        match rng.randrange(24):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7:
                self.begin(Request(self, rng.randrange(2)).run(), self.requests)
            case 8:
                if self.requests:
                    rng.choice(sorted(self.requests, key=id)).cancel()
            case 9 | 10:
                await running_clock().advance(rng.choice((0.01, 0.3, 1.0)))
            case 11:
                if self.tickets:
                    request, blob = self.tickets.pop(rng.randrange(len(self.tickets)))
                    self.begin(request.serve(blob), self.requests)
            case 12:
                self.begin(self.evict(engine.side), self.control)
            case 13 if not self.control and rng.random() < 0.3:
                self.begin(self.do_control(engine), self.control)
        for _ in range(rng.randrange(30)):
            self.pass_once()
            await asyncio.sleep(0)
        self.check()

    async def evict(self, side: Side) -> None:
        with suppress(ClosedError):
            await side.engine.evict(24, self.rng.choice(("device", "host")))

    def pass_once(self) -> None:
        for engine in self.engines:
            engine.move(self.rng.randrange(3))

    async def do_control(self, engine: Engine) -> None:
        rng, side = self.rng, engine.side
        try:
            match rng.randrange(4):
                case 0:
                    await side.engine.reset(timeout=2.0)
                case 1:
                    await self.update_weights(engine)
                case 2:
                    tags = rng.choice((("device",), ("host",), ("device", "host")))
                    await side.engine.sleep(tags, timeout=1.0)
                    if "device" in tags:
                        side.memory.take(len(side.memory.tensors[0]))
                    await side.engine.wake_up(tags, regions=side.memory.regions)
                case _:
                    await engine.restart()
        except TimeoutError:
            if side.engine.asleep:
                await side.engine.wake_up(side.engine.asleep, regions=side.memory.regions)

    async def update_weights(self, engine: Engine) -> None:
        version = self.rng.randrange(2)
        async with engine.side.engine.updating_weights(timeout=2.0, version=str(version)):
            engine.side.memory.weights = engine.weights = version

    def check(self) -> None:
        for engine in self.engines:
            engine.check()
        for group in (self.requests, self.control):
            for task in [task for task in group if task.done()]:
                group.discard(task)
                if not task.cancelled():
                    task.result()

    async def end(self) -> None:
        """Let all requests end, within the deadlines of their tickets; nothing is held then."""
        self.fault_share = 0.0
        await self.until(lambda: not self.requests and not self.control, 20.0)
        for engine in self.engines:  # connections that a proxy holds up are cut after a while
            await self.until(engine.side.is_at_rest, 20.0)
        for engine in self.engines:
            side = engine.side
            await engine.complete(asyncio.ensure_future(side.engine.reset()))
            await side.at_rest()
            statistics = side.engine.statistics()
            assert statistics.attention.device.free == statistics.attention.device.blocks
            assert statistics.attention.host.free == statistics.attention.host.blocks
            assert not statistics.leases

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, ``seconds`` by the clock and as long as native threads may take."""
        patient_until, ticks = time.monotonic() + PATIENCE_SECONDS, 0
        while ticks < seconds / 0.1 or time.monotonic() < patient_until:
            ticks += 1
            for _ in range(20):
                if condition():
                    return
                self.pass_once()
                await asyncio.sleep(0)
            await running_clock().advance(0.1)
            self.check()
        states = [engine.side.engine.statistics().peers for engine in self.engines]
        raise AssertionError(f"not within {seconds} s: {self.requests} {self.control} {states}")

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                await engine.side.engine.__aenter__()
                stack.push_async_callback(self.close, engine)
            for engine in self.engines:
                proxy = Proxy(engine.port, self.fault, self.rng)
                self.proxies.append(await stack.enter_async_context(proxy))
            try:
                for _ in range(STEPS):
                    await self.step()
                await self.end()
            finally:
                for task in (*self.requests, *self.control):
                    task.cancel()
                for task in (*self.requests, *self.control):
                    while not task.done():
                        self.pass_once()
                        await asyncio.sleep(0)

    async def close(self, engine: Engine) -> None:
        await engine.complete(asyncio.ensure_future(engine.side.engine.aclose(0.0)))


@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_fault_of_a_peer_yields_a_wrong_byte(seed):
    await Load(seed).run()


@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", [LAYERS, LAYERS | STATE | WINDOWS], ids=["layers", "all"])
async def test_no_fault_of_a_peer_yields_a_wrong_layer(seed, model):
    await Load(seed, model).run()


@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "model", [STATE, WINDOWS, STATE | WINDOWS], ids=["state", "windows", "both"]
)
async def test_no_fault_of_a_peer_yields_a_wrong_state_or_window(seed, model):
    await Load(seed, model).run()


@pytest.mark.loop("uvloop")
@pytest.mark.parametrize("seed", [200, 201])
async def test_no_fault_of_a_peer_yields_a_wrong_byte_on_uvloop(seed):
    await Load(seed, LAYERS | STATE | WINDOWS).run()
