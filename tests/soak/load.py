"""Load of the soak: clients with random operations, which check every byte they read."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from aiokv.errors import (
    AllocateTimeout,
    ClosedError,
    LeaseError,
    RequestTooLarge,
    TransferError,
    WouldBlock,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterator

    from aiokv import CacheEngine, Lease
    from tests.harness.memory import Memory
    from tests.soak.peers import Prefill
    from tests.soak.stores import RoundStores

SALTS = ("", "tenant-a", "tenant-b")
STORE_TIMEOUTS = (None, 0.0, 0.002)
LATE_PASSES = 12  # of the loop, until a late runner has written
CORRUPT = re.compile(r"checksum of host block (\d+)")  # in the error of an onload
VERSIONS = 3  # of the weights that may come back


class Violation(Exception):
    """Error: the engine violated an invariant."""


class Load:
    """Random requests against one engine; ``log`` holds the last operations."""

    def __init__(
        self,
        engine: CacheEngine,
        memory: Memory,
        rng: random.Random,
        stores: RoundStores,
        prefill: Prefill | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.rng = rng
        self.stores = stores
        self.prefill = prefill
        self.operations = 0
        self.hit_tokens = 0
        self.received_tokens = 0
        self.cancelled = 0
        self.failed_onloads = 0
        self.late_writes = 0
        self.corrupted_blocks = 0
        self.corrupted_found = 0
        self._corrupted_hosts: set[int] = set()
        self.new_weights = max(memory.weights, VERSIONS)
        self.stopping = False
        self.closing = False
        self.log: deque[tuple[object, ...]] = deque(maxlen=60)

    def note(self, *what: object) -> None:
        self.operations += 1
        self.log.append((self.operations, *what))

    def note_failure(self, error: TransferError) -> None:
        """Count a failed onload.

        Raises:
            Violation: the engine reports a host block that the operator has not corrupted.
        """
        self.failed_onloads += 1
        if (reported := CORRUPT.search(str(error))) is None:
            return
        if int(reported[1]) not in self._corrupted_hosts:
            raise Violation(f"an intact block is reported: {error}") from error
        self.corrupted_found += 1

    # --- clients --------------------------------------------------------------------------------

    async def client(self, name: str) -> None:
        """Serve requests in sequence until stopped."""
        with self.until_closed():
            while not self.stopping:
                await self.act(name)
                await asyncio.sleep(0)

    @contextmanager
    def until_closed(self) -> Iterator[None]:
        """End at the ``ClosedError`` of an engine that the round closes."""
        try:
            yield
        except ClosedError:
            if not self.closing:
                raise

    async def act(self, name: str) -> None:
        draw = self.rng.random()
        if draw < 0.90:
            await self.request(name)
        elif draw < 0.95:
            await self.prefetch(name)
        else:
            await self.pin(name)

    async def request(self, name: str) -> None:
        rng = self.rng
        tokens, salt = self.prompt(), rng.choice(SALTS)
        reads, writes = rng.random() < 0.97, rng.random() < 0.97
        self.note(name, "match", len(tokens), salt)
        async with self.engine.match(
            tokens, salt=salt, owner=name, read=reads, write=writes
        ) as lease:
            if rng.random() < 0.1:
                await self.pause()
            if not await self.allocate(name, lease, len(tokens)):
                return
            request = Request(self, name, lease, tokens, salt)
            await request.run()
            self.note(name, "release")

    async def allocate(self, name: str, lease: Lease, n: int) -> bool:
        rng = self.rng
        if rng.random() < 0.2:
            n = rng.randint(1, n)
        if rng.random() < 0.2:
            n += rng.randint(0, 2 * self.memory.block_tokens)
        self.note(name, "allocate", n)
        at_once = rng.random() < 0.2
        timeout = rng.choice((None, None, None, 0.0, 0.002))
        wait_pending = rng.choice((0.0, 0.0, 0.01, 10.0))
        wait_store = rng.choice((0.0, 0.001, 0.01, math.inf))
        try:
            if at_once:
                return lease.try_allocate(n)
            await lease.allocate(
                n,
                priority=rng.randint(0, 2),
                timeout=timeout,
                wait_pending=wait_pending,
                wait_store=wait_store,
            )
        except (AllocateTimeout, RequestTooLarge):
            return False
        return True

    async def prefetch(self, name: str) -> None:
        ttl = self.rng.choice((0.0, 0.002, 0.02))
        self.note(name, "prefetch", ttl)
        try:
            await self.engine.prefetch(
                self.prompt(),
                salt=self.rng.choice(SALTS),
                ttl_seconds=ttl,
                timeout=self.rng.choice(STORE_TIMEOUTS),
            )
        except TransferError as error:
            self.note_failure(error)

    async def pin(self, name: str) -> None:
        self.note(name, "pin")
        tokens, salt = self.prompt(), self.rng.choice(SALTS)
        try:
            pin = await self.engine.pin(
                tokens,
                salt=salt,
                ttl_seconds=self.rng.choice((None, 0.002)),
                timeout=self.rng.choice(STORE_TIMEOUTS),
            )
        except WouldBlock:
            return
        except TransferError as error:
            self.note_failure(error)
            return
        try:
            await self.pause()
        finally:
            self.note(name, "unpin", pin.tokens)
            pin.release()

    async def pause(self) -> None:
        for _ in range(self.rng.randint(0, 6)):
            await asyncio.sleep(0)

    def prompt(self) -> np.ndarray:
        """Draw prompts that share prefixes: a few choices per block, the first is likeliest."""
        rng, size = self.rng, self.memory.block_tokens
        blocks = min(1 + int(rng.expovariate(0.25)), 24)
        choices = [min(int(rng.expovariate(1.5)), 3) for _ in range(blocks)]
        tokens = np.repeat(np.array(choices, np.int32), size) * 1000
        tokens += np.arange(blocks * size, dtype=np.int32)
        return tokens[: rng.randint((blocks - 1) * size + 1, blocks * size)]

    # --- the operator ---------------------------------------------------------------------------

    async def operate(self) -> None:
        """Run one of the operator's actions at random intervals."""
        with self.until_closed():
            while not self.stopping:
                for _ in range(self.rng.randint(5, 100)):
                    await asyncio.sleep(0)
                    if self.stopping:
                        break
                await self.rng.choice(self.acts())()

    def acts(self) -> list[Callable[[], Awaitable[None]]]:
        acts = [self.evict] * 3
        acts += [self.reset, self.resize, self.quiesce, self.hold, self.update_weights, self.sleep]
        if self.engine.config.verify == "checksum" and not self.stores.kinds:
            acts += [self.corrupt] * 4
        return acts

    async def break_stores(self) -> None:
        """Cause faults of the stores at random intervals."""
        while not self.stopping:
            for _ in range(self.rng.randint(20, 400)):
                await asyncio.sleep(0)
                if self.stopping:
                    return
            if acts := self.stores.acts():
                act = self.rng.choice(acts)
                self.note("store", act.__name__)
                await act()

    async def evict(self) -> None:
        tier = self.rng.choice(("device", "device", "host"))
        blocks = self.rng.choice((0, 4, 12, 60))
        self.note("operator", "evict", tier, blocks)
        await self.engine.evict(blocks, tier)

    async def reset(self) -> None:
        self.note("operator", "reset")
        await self.engine.reset()

    async def resize(self) -> None:
        most = len(self.memory.tensors[0])
        blocks = self.rng.randint(most * 2 // 3, most)
        self.note("operator", "resize", blocks)
        try:
            await self.engine.resize(blocks, timeout=0.02)
        except TimeoutError:
            self.note("operator", "resize timed out")

    async def corrupt(self) -> None:
        """Change a host block behind the engine's back: no request may get it any more."""
        await self.engine.evict(4)  # so that some are on the host only
        cached = self.engine.inspect.parts.scheduler.read.cached_blocks()
        blocks = [
            (context, np.frombuffer(prefix, np.int32), host)
            for context, prefix, device, host, _, _, pins in cached
            if device < 0 <= host and not pins
        ]
        if not blocks:
            return
        context, prefix, host = self.rng.choice(blocks)
        self.note("operator", "corrupt host block", host)
        self.engine.inspect.parts.worker.memory.arena.blocks[host] ^= 0xFF
        self._corrupted_hosts.add(host)
        self.corrupted_blocks += 1
        await self.read_corrupted(np.append(prefix, np.int32(0)), context.partition(":")[2])

    async def read_corrupted(self, tokens: np.ndarray, salt: str) -> None:
        """Allocate with a priority before all waiting requests."""
        async with self.engine.match(tokens, salt=salt, owner="operator") as lease:
            try:
                await lease.allocate(len(tokens), priority=-1, timeout=0.05)
                await lease.layers.wait_all()
            except TransferError as error:
                self.note_failure(error)
                return
            except (AllocateTimeout, RequestTooLarge):
                return
            blocks = lease.cached_tokens // self.memory.block_tokens
            words = self.memory.words(tokens, salt, self.memory.weights)
            self.memory.check(lease.block_table[:blocks], words[:blocks], "operator")

    async def hold(self) -> None:
        self.note("operator", "pause")
        self.engine.pause()
        try:
            await self.pause()
        finally:
            self.engine.resume()

    async def quiesce(self) -> None:
        self.note("operator", "quiesce")
        try:
            await self.engine.quiesce(timeout=0.02)
        except TimeoutError:
            self.note("operator", "quiesce timed out")
            return
        statistics = self.engine.statistics()
        try:
            if (
                statistics.attention.device.leased
                or statistics.attention.device.in_flight + statistics.attention.host.in_flight
            ):
                raise Violation(f"not quiet after quiesce: {statistics}")
        finally:
            self.engine.resume()

    async def update_weights(self) -> None:
        """Go to weights that were used before, whose blocks the stores have, or to new ones."""
        weights = self.rng.randrange(VERSIONS)
        version = None if self.rng.random() < 0.3 else str(weights)
        if version is None:
            self.new_weights += 1
            weights = self.new_weights
        self.note("operator", "update weights", version)
        try:
            async with self.engine.updating_weights(timeout=0.05, version=version):
                for _ in range(4):  # earlier leases have recorded the old weights
                    await asyncio.sleep(0)
                self.memory.weights = weights
        except TimeoutError:
            self.note("operator", "update timed out")
            return
        if self.prefill is not None:
            await self.prefill.update_weights(weights, version)

    async def sleep(self) -> None:
        tags = self.rng.choice((("device",), ("host",), ("device", "host")))
        self.note("operator", "sleep", *tags)
        try:
            await self.engine.sleep(tags, timeout=0.05)
        except TimeoutError:
            self.note("operator", "sleep timed out", *sorted(self.engine.asleep))
            if not self.engine.asleep:
                return  # else a store was still closing
        await self.pause()
        if "device" in tags:
            self.memory.take(len(self.memory.tensors[0]))
        await self.engine.wake_up(tags, regions=self.memory.regions)
        self.note("operator", "woke up")


class Request:
    """A granted lease and what it has computed.

    Attributes:
        tokens: of all positions that were computed; the lease gets the ids of the sampled ones
            later, with ``append``.
        named: positions whose token ids the lease has.
    """

    def __init__(self, load: Load, name: str, lease: Lease, tokens: np.ndarray, salt: str) -> None:
        self.load = load
        self.memory = load.memory
        self.name = name
        self.lease = lease
        self.tokens = tokens
        self.named = len(tokens)
        self.salt = salt
        self.weights = load.memory.weights
        self.size = load.memory.block_tokens

    async def run(self) -> None:
        rng = self.load.rng
        self.load.hit_tokens += self.lease.cached_tokens
        if rng.random() < 0.05:
            return  # the client ends while its onload runs
        received = await self.receive()
        cached = max(await self.arrive(), received)
        self.check(cached)
        self.sample()
        if rng.random() < 0.3:
            await self.compute_late(cached, self.lease.num_tokens)
        else:
            self.compute(cached, self.lease.num_tokens)
        await self.commit(cached)
        for _ in range(rng.choice((0, 0, 0, 1, 4))):
            if not await self.decode():
                break
        if rng.random() < 0.05:
            self.fork()
        if rng.random() < 0.05 and not await self.preempt():
            return
        if rng.random() < 0.3:
            await self.load.pause()
        self.check(self.full_tokens)

    async def receive(self) -> int:
        """Let the other engine compute the prompt; return the first position that is missing."""
        rng, prefill, lease = self.load.rng, self.load.prefill, self.lease
        if prefill is None or rng.random() < 0.5:
            return 0
        timeout = rng.choice((0.002, 0.2, 2.0))
        try:
            async with lease.receive(timeout=timeout) as receiving:
                self.load.note(self.name, "receive", timeout)
                prefill.begin(self.tokens, self.salt, receiving.ticket)
                if rng.random() < 0.1:
                    await self.load.pause()
                else:
                    await receiving.wait()
        except LeaseError:  # nothing is missing, or an onload has failed
            return 0
        received = await receiving.wait()
        self.load.received_tokens += receiving.received_tokens
        self.check(received)
        return received

    def fork(self) -> None:
        """Fork a sample that reads the computed blocks."""
        self.load.note(self.name, "fork")
        try:
            child = self.lease.fork()
        except WouldBlock:
            return
        with_parent, self.lease = self.lease, child
        try:
            self.check(self.full_tokens)
        finally:
            self.lease = with_parent
            child.release()

    async def preempt(self) -> bool:
        """Preempt and resume; return False on a timeout."""
        lease, rng = self.lease, self.load.rng
        positions, swap = lease.num_tokens, rng.random() < 0.7
        self.load.note(self.name, "preempt", swap)
        try:
            await lease.preempt(swap=swap)
        except (WouldBlock, TransferError):
            return True
        await self.load.pause()
        self.load.note(self.name, "resume", positions)
        try:
            await lease.resume(positions, priority=rng.randint(0, 2), timeout=0.05)
        except (AllocateTimeout, RequestTooLarge):
            return False
        cached = await self.arrive()
        if self.weights != self.memory.weights:
            return False  # cached blocks may be from either weights
        self.check(cached)
        self.compute(cached, lease.num_tokens)
        await self.commit(cached)
        return True

    @property
    def full_tokens(self) -> int:
        """Return the allocated positions with tokens."""
        return min(len(self.tokens), self.lease.num_tokens)

    async def arrive(self) -> int:
        """Wait for the onload; return the cached tokens."""
        lease = self.lease
        try:
            await lease.layers.wait_all()
        except TransferError as error:
            self.load.note_failure(error)
            while True:
                try:
                    position = lease.recompute_from()
                    break
                except LeaseError:  # another transfer still writes blocks of the lease
                    await asyncio.sleep(0)
            self.load.note(self.name, "recompute from", position)
            if position is None:
                raise Violation(f"{self.name}: an onload failed, nothing to recompute") from None
            if position != lease.cached_tokens:
                raise Violation(
                    f"{self.name}: {lease.cached_tokens} cached, not {position}"
                ) from None
        return lease.cached_tokens

    def words(self) -> np.ndarray:
        return self.memory.words(self.tokens[: self.full_tokens], self.salt, self.weights)

    def check(self, tokens: int) -> None:
        blocks = min(tokens, self.full_tokens) // self.size
        self.memory.check(self.lease.block_table[:blocks], self.words()[:blocks], self.name)

    def sample(self) -> None:
        """Draw the tokens of the positions behind the known ones.

        A position is computed once, before its commit: its block may be copied from then on.
        """
        room = self.lease.num_tokens - len(self.tokens)
        if room > 0:
            sampled = np.array([self.load.rng.randint(0, 1) for _ in range(room)], np.int32)
            self.tokens = np.concatenate([self.tokens, sampled])

    def append(self) -> None:
        """Give the lease the ids of the sampled tokens, some of which are committed already."""
        if self.named < len(self.tokens):
            self.lease.append(self.tokens[self.named :])
            self.named = len(self.tokens)

    def compute(self, begin: int, end: int) -> None:
        first, last = begin // self.size, min(end, self.full_tokens) // self.size
        if first < last:
            self.memory.write(self.lease.block_table[first:last], self.words()[first:last])

    async def compute_late(self, begin: int, end: int) -> None:
        """Write as a runner in a thread does: later, even after the request has ended."""
        first, last = begin // self.size, min(end, self.full_tokens) // self.size
        runner = LateRunner(
            self.memory, self.lease.block_table[first:last], self.words()[first:last]
        )
        self.load.note(self.name, "compute late", first, last)
        with self.load.engine.computing([self.lease]) as batch:
            batch.ends_with(runner.done)
            runner.start(passes=self.load.rng.randint(0, LATE_PASSES))
            self.load.late_writes += 1
            while not runner.done.done():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def commit(self, done: int) -> None:
        """Compute in chunks, as a prefill does."""
        lease, rng = self.lease, self.load.rng
        while done < lease.num_tokens:
            done = min(done + rng.randint(1, 6 * self.size), lease.num_tokens)
            self.load.note(self.name, "commit", done)
            lease.commit(done)
            self.load.engine.step()
            if rng.random() < 0.5:
                await asyncio.sleep(0)

    async def decode(self) -> bool:
        """Append positions, or drafts that are truncated again."""
        lease, rng = self.lease, self.load.rng
        more = rng.randint(1, 2 * self.size)
        self.load.note(self.name, "extend", more)
        before = lease.num_tokens
        try:
            self.load.engine.extend([lease], more)
        except WouldBlock:
            return False
        if rng.random() < 0.3:
            self.load.note(self.name, "truncate", before)
            lease.truncate(before)
            self.tokens = self.tokens[:before]
            self.named = min(self.named, before)
            return True
        self.sample()
        self.append()
        self.compute(before, lease.num_tokens)
        await self.commit(before)
        return True


class LateRunner:
    """Runner that writes blocks some passes of the loop later, even after their release."""

    def __init__(self, memory: Memory, block_table: np.ndarray, words: np.ndarray) -> None:
        self.memory = memory
        self.block_table = block_table
        self.words = words
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()

    def start(self, passes: int) -> None:
        loop = asyncio.get_running_loop()
        if passes:
            loop.call_soon(self.start, passes - 1)
            return
        self.memory.write(self.block_table, self.words)
        self.done.set_result(None)
