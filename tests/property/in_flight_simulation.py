"""Random leases while batches are in flight; every byte that a batch reads is compared.

A batch reads and writes its blocks late: on a device that computes in a stream when the stream gets
there, else when its thread does, in any order. Requests are cancelled, released, preempted, forked,
truncated and collected meanwhile. All that is random comes from one seed.

Each position that is computed has the version of the weights of its batch, and the bytes depend on
all versions up to a position. Requests go on computing while the weights are updated: what they
hold then was computed with several versions, and no other request may read it, except for a fork.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from concurrent.futures import Future as ThreadFuture
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import (
    AllocateTimeout,
    ControlTimeout,
    LeaseError,
    RequestTooLarge,
    TransferError,
    WouldBlock,
)
from aiokv.testing import ManualEvent

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

    from aiokv import CacheEngine, Lease
    from aiokv.testing import ManualDevice
    from tests.harness.memory import Memory

BLOCK_TOKENS = 4
SALTS = ("", "tenant-a")
VERSIONS = (1, 2)  # of weights, to which updates return
PATIENCE = 4_000  # passes of the loop until all work ends when nothing is delayed


class UpdateError(Exception):
    """Error in the block of an update of the weights."""


class Part:
    """The words of some positions of a lease.

    Attributes:
        places: block and offset of each.
    """

    def __init__(self, table: np.ndarray, begin: int, words: np.ndarray) -> None:
        positions = np.arange(begin, begin + len(words))
        self.places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        self.words = words


class Work:
    """Work of a batch: read the cached blocks, then write its own."""

    def __init__(self, world: World, label: str, reads: Part, writes: Part) -> None:
        self.world = world
        self.label = label
        self.reads = reads
        self.writes = writes
        self.done: ThreadFuture[None] = ThreadFuture()
        self.done.set_running_or_notify_cancel()

    def run(self) -> None:
        self.world.check(self.reads, self.label)
        self.world.write(self.writes)
        self.done.set_result(None)


class World:
    """An engine, its memories and its simulated compute.

    Args:
        engine: entered.
        memories: one a rank.
        devices: whose copies the simulation completes.
        in_stream: work happens in the order of its launches, and steps have events.
        close_step: closes the open step with an event.
        has_events: True if verbs of the engine take events.
        updates_often: True if most control operations update the weights.
        has_stores: True if the engine has stores.
    """

    def __init__(
        self,
        engine: CacheEngine,
        memories: Sequence[Memory],
        devices: Sequence[ManualDevice],
        rng: random.Random,
        *,
        in_stream: bool,
        close_step: Callable[[ManualEvent], None],
        has_events: bool,
        updates_often: bool = False,
        has_stores: bool = False,
    ) -> None:
        self.engine = engine
        self.memories = memories
        self.devices = devices
        self.rng = rng
        self.in_stream = in_stream
        self.close_step = close_step
        self.has_events = has_events
        self.updates_often = updates_often
        self.has_stores = has_stores
        self.stream: deque[Work | ManualEvent] = deque()
        self.threads: list[Work] = []
        self.requests: dict[asyncio.Task[None], Request] = {}
        self.operator: asyncio.Task[None] | None = None
        self.weights = 0  # version that batches compute with
        self.newest_weights = max(VERSIONS)
        self.is_entering = False  # an update has begun, and the weights are not changed yet
        self.number = 0
        self.checked_positions = 0
        self.mixed_forks = 0  # of parents that have computed with several versions
        self.updates = 0
        self.steps = 0  # calls of the operator and of requests
        self.log: deque[object] = deque(maxlen=40)
        self.calm = False  # nothing new begins

    # --- bytes ----------------------------------------------------------------------------------

    def write(self, part: Part) -> None:
        for memory in self.memories:
            memory.write(part.places, part.words)

    def check(self, part: Part, label: str) -> None:
        for memory in self.memories:
            memory.check(part.places, part.words, label)
        self.checked_positions += len(part.words)

    # --- the device -----------------------------------------------------------------------------

    def launch(self, work: Work) -> None:
        if self.in_stream:
            self.stream.append(work)
        else:
            self.threads.append(work)

    def record(self) -> ManualEvent:
        """Return an event behind all launched work."""
        event = ManualEvent()
        self.stream.append(event)
        return event

    def advance(self) -> None:
        """Complete some work on the device."""
        rng = self.rng
        if self.stream and rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):
                if self.stream:
                    self._run(self.stream.popleft())
        if self.threads and rng.random() < 0.5:
            self._run(self.threads.pop(rng.randrange(len(self.threads))))
        copies = [c for d in self.devices for c in d.copies if c.after is None or c.after.done]
        if copies and rng.random() < 0.6:
            copy = rng.choice(copies)
            layer = rng.choice(copy.pending_layers)
            if rng.random() < 0.05 and not self.calm and len(self.memories) == 1:
                copy.fail(layer, block=rng.randint(0, len(copy.host_ids) - 1))
            elif rng.random() < 0.5:
                copy.complete(layer)
            else:
                copy.complete_all()

    @staticmethod
    def _run(work: Work | ManualEvent) -> None:
        if isinstance(work, ManualEvent):
            work.complete()
        else:
            work.run()

    # --- events ---------------------------------------------------------------------------------

    async def run(self, passes: int) -> None:
        try:
            for _ in range(passes):
                self.steps += 1
                self.act()
                self.advance()
                for _ in range(self.rng.randint(0, 3)):
                    await asyncio.sleep(0)
                self.verify()
            await self.finish_all()
        finally:  # after an error, copies wait for these events when the engine closes
            for work in self.stream:
                if isinstance(work, ManualEvent):
                    work.complete()

    def begin(self, request: Request, run: Coroutine[Any, Any, None]) -> None:
        self.requests[asyncio.create_task(run)] = request

    def act(self) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < 0.25 and len(self.requests) < 6:
            self.number += 1
            request = Request(self, f"r{self.number}")
            self.begin(request, request.run() if rng.random() < 0.9 else request.pin())
        elif draw < 0.32 and self.requests:
            task = rng.choice(list(self.requests))
            self.log.append(f"cancel {self.requests[task].name}")
            task.cancel()
        elif draw < 0.36 and self.requests:
            rng.choice(list(self.requests.values())).preempt_from_outside()
        elif draw < 0.5 and self.in_stream:
            self.log.append("step")
            self.close_step(self.record())
        elif draw < (0.6 if self.updates_often else 0.53) and self.operator is None:
            self.operator = asyncio.create_task(self.operate())
        elif draw > 0.997:
            gc.collect()
        elif draw > 0.99 and self.operator is not None and not self.is_entering:
            self.log.append("cancel the operator")
            self.operator.cancel()

    def verify(self) -> None:
        violations = self.engine.check_invariants()
        assert not violations, violations
        for task in [task for task in self.requests if task.done()]:
            del self.requests[task]
            if not task.cancelled():
                task.result()
        if self.operator is not None and self.operator.done():
            if not self.operator.cancelled():
                self.operator.result()
            self.operator = None

    async def finish_all(self) -> None:
        """Complete all work, and check that all pools are full."""
        self.calm = True
        for number in range(PATIENCE):
            if number % 100 == 0:
                gc.collect()
            if not self.requests and self.operator is None and not self.engine.statistics().leases:
                break
            if self.engine.asleep and self.operator is None:
                self.operator = asyncio.create_task(self.operate())
            if self.in_stream and not self.stream:
                self.close_step(self.record())
            self.advance()
            await asyncio.sleep(0)
            self.verify()
        else:
            raise AssertionError(f"hangs: {self.engine.inspect.dump()}")
        resetting = asyncio.create_task(self.engine.reset())
        while not resetting.done() or self.stream or self.threads:
            if self.in_stream and not self.stream and not resetting.done():
                self.close_step(self.record())
            self.advance()
            await asyncio.sleep(0)
        await resetting
        gc.collect()
        while self.engine.inspect.dump()["leases"]:  # noqa: ASYNC110 - those that batches keep, too
            await asyncio.sleep(0)
        self.verify()
        end = self.engine.statistics()
        assert end.attention.device.free == end.attention.device.blocks, end
        assert end.attention.host.free == end.attention.host.blocks, end

    async def operate(self) -> None:
        engine, rng = self.engine, self.rng
        if engine.asleep:  # an earlier call was cancelled while it woke the engine up
            await self.wake_up()
            return
        what = rng.choice(("evict", "evict", "reset", "resize", "quiesce", "sleep", "weights"))
        if self.updates_often and rng.random() < 0.7:
            what = "weights"
        self.log.append(what)
        timeout = rng.choice((0.0, 0.01))
        try:
            match what:
                case "evict":
                    await engine.evict(rng.randint(1, 8), rng.choice(("device", "host")))
                case "reset":
                    await engine.reset(timeout)
                case "resize":
                    await engine.resize(rng.randint(8, self.device_blocks), timeout)
                case "quiesce":
                    await engine.quiesce(timeout)
                    engine.resume()
                case "weights":
                    await self.update_weights(rng.choice((timeout, None)))
                case "sleep":
                    await self.sleep(timeout)
        except (ControlTimeout, WouldBlock, TransferError) as error:
            self.log.append(error)

    async def update_weights(self, timeout: float | None) -> None:
        """Update the weights, to an earlier version too, while the requests go on."""
        rng = self.rng
        self.newest_weights += 1
        unknown = self.newest_weights
        weights = rng.choice((unknown, *VERSIONS))
        version = None if weights == unknown else str(weights)
        try:
            async with self.engine.updating_weights(timeout, version=version):
                self.is_entering = True
                for _ in range(4):  # leases that were granted before have recorded their version
                    await asyncio.sleep(0)
                self.is_entering = False
                self.weights = unknown
                self.updates += 1
                for _ in range(rng.choice((0, 20, 60))):
                    await asyncio.sleep(0)
                    tokens, salt = self.prompt()
                    assert not self.engine.would_hit(tokens, salt=salt).total
                if rng.random() < 0.1:
                    raise UpdateError
                self.weights = weights
        except UpdateError:
            self.log.append("the update has failed")

    async def sleep(self, timeout: float) -> None:
        has_ranks = len(self.memories) > 1
        tags = ("host",) if has_ranks else self.rng.choice((("device",), ("device", "host")))
        try:
            await self.engine.sleep(tags, timeout=timeout)
            await self.pause()
        finally:
            if "device" in self.engine.asleep:
                self.memories[0].take(self.device_blocks)
            if self.engine.asleep:  # with ranks also after a timeout
                await self.wake_up()

    async def wake_up(self) -> None:
        has_ranks = len(self.memories) > 1
        await self.engine.wake_up(regions=None if has_ranks else self.memories[0].regions)

    @property
    def device_blocks(self) -> int:
        return len(self.memories[0].tensors[0])

    async def pause(self) -> None:
        for _ in range(self.rng.randint(0, 10)):
            await asyncio.sleep(0)

    def prompt(self) -> tuple[np.ndarray, str]:
        """Draw one of a few prompts with shared prefixes."""
        rng = self.rng
        kinds = (*[0] * 19, 1) if self.updates_often else (0, 0, 0, 1)
        blocks = [rng.choice(kinds) for _ in range(rng.randint(1, 5))]
        tokens = np.repeat(np.array(blocks, np.int32), BLOCK_TOKENS) * 100
        tokens += np.arange(len(tokens), dtype=np.int32)
        salt = rng.choice(SALTS if not self.updates_often else ("", "", "", *SALTS))
        return tokens[: len(tokens) - rng.randint(0, BLOCK_TOKENS - 1)], salt


class Request:
    """Run the requests of one client."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.engine = world.engine
        self.rng = world.rng
        self.name = name
        self.tokens, self.salt = world.prompt()
        self.weights = 0  # at the grant
        self.versions = np.zeros(0, np.int64)  # that have computed the first positions
        self.cached = 0  # positions of the hit, before onloads have failed
        self.lease: Lease | None = None
        self.preempting: asyncio.Task[None] | None = None
        self.grant = 0  # preempted so many times
        # without names, the open step covers it
        self.is_named = not world.in_stream or self.rng.random() < 0.7

    def note(self, *what: object) -> None:
        self.world.log.append((self.name, *what))

    # --- the contents of blocks -----------------------------------------------------------------

    def part(self, lease: Lease, begin: int, end: int) -> Part:
        memory = self.world.memories[0]
        words = memory.position_words(self.tokens[:end], self.salt, self.versions[:end])
        return Part(lease.block_table, begin, words[begin:])

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        self.lease = self.engine.match(self.tokens, salt=self.salt, owner=self.name)
        await self.until_end()

    async def pin(self) -> None:
        """Pin or prefetch what is cached of the prompt."""
        self.note("pin")
        try:
            if self.rng.random() < 0.5:
                await self.engine.prefetch(self.tokens, salt=self.salt, timeout=None)
                return
            pin = await self.engine.pin(self.tokens, salt=self.salt)
        except (WouldBlock, TransferError):
            return
        try:
            for _ in range(self.rng.randint(0, 60)):
                await asyncio.sleep(0)
        finally:
            pin.release()

    async def until_end(self, done: int | None = None) -> None:
        """Run the request, or one that was forked from ``done`` positions, and end its lease."""
        rng = self.rng
        try:
            try:
                await (self.request() if done is None else self.decode(done))
            except (AllocateTimeout, RequestTooLarge):
                return
            finally:
                if self.preempting is not None:
                    self.preempting.cancel()
        finally:
            lease, self.lease = self.lease, None
            how = rng.choice(("release", "release", "after", "collect"))
            self.note("ends", how)
            if how == "after" and self.world.has_events:
                lease.release(after=self.world.record())
            elif how != "collect":
                lease.release()

    async def request(self) -> None:
        rng, lease = self.rng, self.lease
        assert lease is not None
        n = rng.randint(1, len(self.tokens))
        self.note("allocate", n)
        await lease.allocate(
            n,
            priority=rng.randint(0, 1),
            timeout=rng.choice((None, None, 0.0, 0.01)),
            wait_pending=rng.choice((0.0, 0.0, 0.01)),
            wait_store=rng.choice((0.0, 0.01, 1.0)) if self.world.has_stores else 0.0,
        )
        await self.decode(await self.arrive())

    async def decode(self, done: int) -> None:
        """Compute further positions, behind the first ``done``."""
        rng = self.rng
        goes_on = self.world.updates_often  # until an update, mostly
        for _ in range(rng.randint(1, 20 if goes_on else 6)):
            done = await self.compute(done)
            draw = rng.random()
            if draw < 0.4:
                self.extend()
            elif draw < 0.55:
                self.truncate(done)
            elif draw < (0.85 if goes_on else 0.7):
                self.fork(done)
            elif draw > (0.97 if goes_on else 0.85):
                await self.preempt()
            self.world.steps += 2  # a computation, and one of these
            if goes_on:
                await self.world.pause()
            if await self.settle():
                done = await self.arrive()

    async def arrive(self) -> int:
        """Wait for the onload; return the number of cached positions."""
        lease = self.lease
        assert lease is not None
        self.weights, self.cached = self.world.weights, lease.cached_tokens
        try:
            await lease.layers.wait_all()
        except TransferError:
            while True:
                if self.preempting is not None:
                    if await self.settle():
                        return await self.arrive()
                    continue
                try:
                    lease.recompute_from()
                    break
                except LeaseError:  # another transfer still writes blocks of the lease
                    await asyncio.sleep(0)
        if await self.settle():
            return await self.arrive()
        self.note("arrived", lease.cached_tokens)
        self.versions = np.full(lease.cached_tokens, self.weights)
        return lease.cached_tokens

    async def compute(self, done: int) -> int:
        """Run a batch from ``done`` to the end, or a chunk; return the computed positions."""
        rng, world, lease = self.rng, self.world, self.lease
        assert lease is not None
        end = min(len(self.tokens), lease.num_tokens)
        if rng.random() < 0.3 and end > done:
            end = rng.randint(done + 1, end)
        end = max(end, done)
        if done < self.cached and world.weights != self.weights:
            end = done  # leases that joined the failed onload share its blocks, with their versions
        self.versions = np.append(self.versions[:done], np.full(end - done, world.weights))
        reads, writes = self.part(lease, 0, done), self.part(lease, done, end)
        work = Work(world, f"{self.name} at {done}", reads, writes)
        grant = self.grant
        self.note("compute", done, end, lease.block_table.tolist())
        if not self.is_named:
            world.launch(work)
        else:
            with self.engine.computing([lease]) as batch:
                world.launch(work)
                if world.in_stream:
                    if world.has_events and rng.random() < 0.4:
                        batch.ends_with(world.record())
                else:
                    batch.ends_with(work.done)
                if not world.in_stream or rng.random() < 0.3:
                    while not work.done.done() and rng.random() < 0.98:  # noqa: ASYNC110
                        await asyncio.sleep(0)
        if not world.in_stream:
            while not work.done.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        if self.preempting is None and grant == self.grant:
            if end == len(self.tokens) and rng.random() < 0.3:
                self.advance(end)
                return end
            ready = world.record() if world.has_events and rng.random() < 0.2 else None
            self.note("commit", end)
            lease.commit(end, ready)
        return end

    def advance(self, end: int) -> None:
        """Commit the first ``end`` positions and name the next one, as a decode step does."""
        token = self.rng.randint(0, 1)
        self.note("advance", end, token)
        batch = self.engine.batch([self.lease] if self.lease else [])
        if self.engine.advance(batch, [token], draft_tokens=self.rng.choice((0, 0, 3))):
            self.lease.commit(end)
        else:
            self.tokens = np.append(self.tokens, np.int32(token))

    def extend(self) -> None:
        lease, rng = self.lease, self.rng
        if self.preempting is not None:
            return
        try:
            self.engine.extend([lease], rng.randint(1, 2 * BLOCK_TOKENS))
        except WouldBlock:
            return
        room = lease.num_tokens - len(self.tokens)
        if room > 0 and rng.random() < 0.7:
            named = np.array([rng.randint(0, 1) for _ in range(room)], np.int32)
            lease.append(named)
            self.tokens = np.concatenate([self.tokens, named])

    def truncate(self, done: int) -> None:
        """Truncate draft positions, none of which is in a block of a failed onload: leases that
        joined the onload share its blocks.
        """
        lease = self.lease
        if self.preempting is not None or lease.num_tokens <= done or done < max(self.cached, 1):
            return
        to = self.rng.randint(done, lease.num_tokens)
        self.note("truncate", to)
        lease.truncate(to)
        self.tokens = self.tokens[:to]

    def fork(self, done: int) -> None:
        """Fork a sample that reads the computed blocks; it ends, or goes on by itself."""
        world, lease = self.world, self.lease
        assert lease is not None
        if self.preempting is not None or len(world.memories) > 1:
            return
        if world.in_stream:  # the copy belongs to the stream
            while world.stream:
                World._run(world.stream.popleft())
        try:
            child = lease.fork()
        except WouldBlock:
            return
        work = Work(
            world, f"fork of {self.name}", self.part(child, 0, done), self.part(child, 0, 0)
        )
        world.mixed_forks += len(set(self.versions[:done].tolist())) > 1
        self.note("fork", child.block_table.tolist())
        self.is_named = True  # from the first batch that names a grant on, all have to
        with self.engine.computing([child, lease]) as batch:
            world.launch(work)
            if not world.in_stream:
                batch.ends_with(work.done)
        if self.rng.random() < 0.5 and len(world.requests) < 8 and not world.calm:
            sample = Request(world, f"{self.name}f")
            sample.lease, sample.tokens, sample.salt = child, self.tokens, self.salt
            sample.versions, sample.weights = self.versions, self.weights
            sample.is_named = True
            world.begin(sample, sample.until_end(done))
        elif self.rng.random() < 0.5:
            child.release()

    async def preempt(self) -> None:
        self.preempt_from_outside()

    def preempt_from_outside(self) -> None:
        if self.lease is None or self.preempting is not None:
            return
        if not len(self.lease.block_table):
            return
        swap = self.rng.random() < 0.6
        self.note("preempt", swap)
        self.preempting = asyncio.create_task(self._preempt(self.lease, swap))

    async def _preempt(self, lease: Lease, swap: bool) -> None:
        try:
            await lease.preempt(swap=swap)
        except (WouldBlock, TransferError):
            pass
        except LeaseError as error:
            if not any(word in str(error) for word in ("transfers", "cannot be used", "waits")):
                raise

    async def settle(self) -> bool:
        """Resume after a preemption; return True if there was one."""
        lease = self.lease
        if self.preempting is None:
            return False
        preempting = self.preempting
        await asyncio.wait([preempting])
        self.preempting = None
        preempting.result()
        if len(lease.block_table):
            return False
        self.grant += 1
        await self.world.pause()
        n = max(len(self.tokens), 1)
        self.note("resume", n)
        await lease.resume(n, timeout=self.rng.choice((None, 0.01)))
        return True
