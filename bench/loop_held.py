"""CPU time for which one call or one callback holds the loop in a large engine.

One engine with 60,000 leases, 20,000 waiters (a quota line, a capacity line, and requests that wait
for pending blocks), 10,000 pins, 1.6 million device blocks, and 1 million host blocks, fragmented.
Each method is called some hundred times; its callbacks count as calls of the method.

* ``held_ms.VERB``: CPU time of the loop's thread in one call, the median and the longest. CPU time,
  not wall time, so that other processes do not count.
* ``verbs_over_1_ms``: number of methods whose longest call takes above 1 ms. ``reset``, ``resize``
  and ``dump`` visit all leases or blocks by design and are not called.

A second engine has a device that computes in a stream: there all leases are released in one step,
whose end frees their blocks (``step``, ``step_done``).

``fill_*`` are the calls that fill the cache: some of these enlarge a table or sort the eviction
queue. The garbage collector is off: one pass over the objects of this many requests takes longer
than any method, and a server calls ``gc.freeze()``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import AllocateTimeout, InternalError
from aiokv.observe.snapshot import snapshot
from aiokv.testing.manual import ManualDevice, ManualEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from aiokv import Lease
    from aiokv.base.types import Tier

T = TypeVar("T")
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 4  # of cached prompts
LEASE_BLOCKS = 16
TENANTS = 4
LIMIT_MS = 1.0


@dataclass(frozen=True)
class Sizes:
    leases: int = 60_000
    waiters: int = 20_000
    device_blocks: int = 1_600_000
    host_blocks: int = 1_000_000
    pins: int = 10_000
    calls: int = 200

    @property
    def quota_blocks(self) -> int:
        return self.device_blocks // 4

    def divided(self, by: int) -> Sizes:
        return replace(
            self,
            leases=self.leases // by,
            waiters=self.waiters // by,
            device_blocks=self.device_blocks // by,
            host_blocks=self.host_blocks // by,
            pins=self.pins // by,
            calls=max(10, self.calls // by),
        )


def run(quick: bool) -> dict[str, Any]:
    return measure(Sizes().divided(50) if quick else Sizes())


def measure(sizes: Sizes) -> dict[str, Any]:
    """The results for an engine of this size."""
    return asyncio.run(_Bench(sizes).run())


class LoopWatch:
    """Times calls and the callbacks of the running loop, by verb."""

    def __init__(self) -> None:
        self.verb = ""
        self.held_ns: dict[str, list[int]] = defaultdict(list)

    @contextlib.contextmanager
    def watching(self, own: asyncio.Task[Any] | None) -> Iterator[None]:
        """Count callbacks from now on, except for the steps of the task ``own``."""
        run_handle = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            is_own = getattr(handle._callback, "__self__", None) is own  # type: ignore[attr-defined]
            began = time.thread_time_ns()
            run_handle(handle)
            if self.verb and not is_own:
                self.held_ns[self.verb].append(time.thread_time_ns() - began)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run_handle  # type: ignore[method-assign]

    def call(self, verb: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function; callbacks that follow count for ``verb`` as well."""
        self.verb = verb
        began = time.thread_time_ns()
        try:
            return function(*args, **options)
        finally:
            self.held_ns[verb].append(time.thread_time_ns() - began)

    async def start(self, verb: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return a task after its first steps."""
        self.verb = verb
        task = asyncio.create_task(work)
        await _passes()
        return task

    def results(self) -> dict[str, Any]:
        held_ms = {
            verb: {"p50": statistics.median(held) / 1e6, "max": max(held) / 1e6}
            for verb, held in self.held_ns.items()
        }
        over = sum(held["max"] > LIMIT_MS for held in held_ms.values())
        return {"held_ms": held_ms, "verbs_over_1_ms": over}


class _Bench:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.watch = LoopWatch()
        self.prompts = 0
        self.leases: list[Lease] = []  # granted, not committed
        self.cached: list[tuple[np.ndarray, str]] = []  # on the device and on the host

    async def run(self) -> dict[str, Any]:
        sizes = self.sizes
        config = CacheConfig(
            device_blocks=sizes.device_blocks,
            host_blocks=sizes.host_blocks,
            block_tokens=BLOCK_TOKENS,
            salt_quota_blocks=sizes.quota_blocks,
        )
        began = time.perf_counter()
        gc.disable()
        async with CacheEngine(config) as engine:
            self.engine = engine
            await self._fill()
            waiting = await self._wait_without_capacity_line()
            set_up = time.perf_counter() - began
            try:
                with self.watch.watching(asyncio.current_task()):
                    await self._leases()
                    await self._residency()
                    await self._lines(waiting)
            finally:
                gc.enable()
            await _cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
            for lease in self.leases:
                lease.release()
        await self._run_in_stream()
        return {"set_up_seconds": set_up, **self.watch.results()}

    async def _run_in_stream(self) -> None:
        """Release all leases in one step, whose blocks are free when its event is done."""
        watch, sizes = self.watch, self.sizes
        device = ManualDevice()
        device.computes_in_stream = True
        config = CacheConfig(device_blocks=sizes.device_blocks, block_tokens=BLOCK_TOKENS)
        gc.disable()
        async with CacheEngine(config, device=device) as engine:
            self.engine = engine
            try:
                leases = [self._granted() for _ in range(sizes.leases)]
                with watch.watching(asyncio.current_task()):
                    for lease in leases:
                        watch.call("release_in_step", lease.release)
                    event = ManualEvent()
                    watch.call("step", engine.step, event)
                    event.complete()
                    watch.verb = "step_done"
                    await engine.quiesce()  # until the step is over
                    engine.resume()
                    for _ in range(sizes.calls):
                        watch.call("allocate_after_step", self._granted).release()
            finally:
                gc.enable()

    # --- set-up ---------------------------------------------------------------------------------

    def _prompt(self, blocks: int, more_tokens: int = 1) -> tuple[np.ndarray, str]:
        """Return a new prompt and its salt."""
        self.prompts += 1
        tokens = np.full(blocks * BLOCK_TOKENS + more_tokens, 7, np.int32)
        tokens[0] = self.prompts
        return tokens, f"tenant {self.prompts % TENANTS}"

    def _match(self, prompt: tuple[np.ndarray, str]) -> Lease:
        return self.engine.match(prompt[0], salt=prompt[1])

    def _granted(self, blocks: int = LEASE_BLOCKS) -> Lease:
        lease = self._match(self._prompt(blocks))
        if not lease.try_allocate(blocks * BLOCK_TOKENS):
            raise InternalError("the cache of the bench is too small for its leases")
        return lease

    async def _cache(self, prompts: int) -> list[tuple[np.ndarray, str]]:
        """Cache that number of new prompts on both tiers."""
        cached = [self._prompt(PROMPT_BLOCKS) for _ in range(prompts)]
        for i, prompt in enumerate(cached):
            lease = self.watch.call("fill_match", self._match, prompt)
            self.watch.call("fill_allocate", lease.try_allocate, PROMPT_BLOCKS * BLOCK_TOKENS)
            self.watch.call("fill_commit", lease.commit, PROMPT_BLOCKS * BLOCK_TOKENS)
            self.watch.call("fill_release", lease.release)
            if i % 2_000 == 0:
                await self.engine.drain()
        await self.engine.drain()
        return cached

    async def _fill(self) -> None:
        """Create leases, pins, a full device, and a fragmented host pool."""
        engine, sizes = self.engine, self.sizes
        prompts = await self._cache(sizes.device_blocks * 5 // 8 // PROMPT_BLOCKS)
        for prompt in prompts[::2]:
            self._match(prompt).release()
        gone = len(prompts) // 2 * PROMPT_BLOCKS
        await engine.evict(gone)
        for prompt in prompts[::2]:
            self._match(prompt).release()
        await engine.evict(gone * 4 // 5, "host")
        self.cached = prompts[::2]

        granted = sizes.leases * 5 // 6
        self.leases = [self.watch.call("fill_granted", self._granted) for _ in range(granted)]
        for i in range(0, granted, 4):
            self.leases[i].commit(LEASE_BLOCKS * BLOCK_TOKENS)
            if i % 2_000 == 0:
                await engine.drain()
        self.leases += [
            self._match(self._prompt(LEASE_BLOCKS)) for _ in range(sizes.leases - granted)
        ]
        for _ in range(sizes.pins):
            tokens, salt = self.cached.pop(0)
            await engine.pin(tokens, salt=salt)

    async def _wait_without_capacity_line(self) -> dict[str, list[asyncio.Task[Any]]]:
        """Start half of the waiters: for a salt's quota and for the pending blocks of a lease."""
        engine, sizes = self.engine, self.sizes
        holder = engine.match(np.ones(1, np.int32), salt="full")
        await holder.allocate(sizes.quota_blocks * BLOCK_TOKENS)
        self.leases.append(holder)
        number = sizes.waiters // 4
        quota = [
            asyncio.create_task(_allocate(engine.match(np.ones(5, np.int32), salt="full"), 5))
            for _ in range(number)
        ]
        tokens, salt = self._prompt(64)
        self.owner = engine.match(tokens, salt=salt)
        await self.owner.allocate(len(tokens))
        pending = [
            asyncio.create_task(
                _allocate(engine.match(tokens, salt=salt), len(tokens), wait_pending=1e6)
            )
            for _ in range(number)
        ]
        await _passes()
        return {"quota": quota, "pending": pending}

    # --- verbs ----------------------------------------------------------------------------------

    async def _leases(self) -> None:
        watch, engine, calls = self.watch, self.engine, self.sizes.calls
        tokens = LEASE_BLOCKS * BLOCK_TOKENS
        leases = []
        for _ in range(calls):
            lease = watch.call("match", self._match, self._prompt(LEASE_BLOCKS))
            watch.call("pending_tokens", getattr, lease, "pending_tokens")
            watch.call("can_allocate", lease.can_allocate, tokens)
            watch.call("allocate", lease.try_allocate, tokens)
            leases.append(lease)
        for lease in leases:
            watch.call("extend", engine.extend, [lease], BLOCK_TOKENS)
            watch.call("append", lease.append, [1] * (BLOCK_TOKENS - 1))
            watch.call("commit", lease.commit, tokens)
            await self._backups_pass()
            watch.call("truncate", lease.truncate, tokens + 1)
            watch.call("fork", lease.fork).release()
        for _ in range(calls):  # each evicts as many blocks as it takes, and backs up as many
            lease = self._match(self._prompt(LEASE_BLOCKS))
            watch.call("can_evict_and_allocate", lease.can_allocate, tokens)
            watch.call("evict_and_allocate", lease.try_allocate, tokens)
            watch.call("evict_and_commit", lease.commit, tokens)
            await self._backups_pass()
            leases.append(lease)
        watch.call("extend_256", engine.extend, leases[:256], 1)
        self._batches(leases[:256])
        for lease in leases[::2]:
            await (await watch.start("preempt", lease.preempt()))
        for lease in leases[1::2]:
            await (await watch.start("preempt_swap", lease.preempt(swap=True)))
            await (await watch.start("resume", lease.resume(tokens)))
        for lease in leases:
            watch.call("release", lease.release)
            await _passes()
        for lease in [self._granted() for _ in range(calls)]:
            watch.call("release_uncommitted", lease.release)
            await _passes()
        for _ in range(calls):
            watch.call("statistics", engine.statistics)
            watch.call("health", engine.health)
            watch.call("leases", engine.inspect.leases, 200)
            watch.call("hottest_prefixes", engine.inspect.hottest_prefixes)
            watch.call("snapshot", snapshot, engine)

    def _batches(self, leases: list[Lease]) -> None:
        """Open batches of 256 leases, which stay granted or are released during the batch."""
        watch, engine = self.watch, self.engine
        for _ in range(self.sizes.calls // 10):
            batch = engine.computing(leases)
            watch.call("computing_begin_256", batch.__enter__)
            watch.call("computing_end_256", batch.__exit__, None, None, None)
        for _ in range(self.sizes.calls // 10):
            leaving = [self._granted() for _ in leases]
            batch = engine.computing(leaving)
            batch.__enter__()
            for lease in leaving:
                watch.call("release_computing", lease.release)
            watch.call("computing_end_256_released", batch.__exit__, None, None, None)

    async def _backups_pass(self) -> None:
        """Measure the callback that sends committed blocks to the host."""
        self.watch.verb = "backups_pass"
        await _passes()
        await self.engine.drain()

    async def _residency(self) -> None:
        watch, engine, calls = self.watch, self.engine, self.sizes.calls
        on_device, self.cached = self.cached[-2 * calls :], self.cached[: -2 * calls]
        for tokens, salt in on_device[::2]:
            pin = await (await watch.start("pin", engine.pin(tokens, salt=salt)))
            watch.call("pin_release", pin.release)
            await _passes()
        for tokens, salt in on_device[1::2]:
            await (await watch.start("prefetch", engine.prefetch(tokens, salt=salt)))
        on_host = self.cached[:calls]  # the lease with the quota evicted the oldest
        for tokens, salt in on_host:
            await (await watch.start("prefetch_from_host", engine.prefetch(tokens, salt=salt)))
        for tokens, salt in self.cached[calls : 2 * calls]:
            lease = self._match((tokens, salt))
            watch.call("onload", lease.try_allocate, len(tokens))
            watch.call("cancel_onload", lease.release)
            await _passes()
        tiers: tuple[Tier, ...] = ("device", "host")
        for tier in tiers:
            for _ in range(calls):
                await (await watch.start(f"evict_64_{tier}", engine.evict(64, tier)))

    async def _lines(self, waiting: dict[str, list[asyncio.Task[Any]]]) -> None:
        watch, engine, calls = self.watch, self.engine, self.sizes.calls
        huge = self.sizes.quota_blocks * BLOCK_TOKENS
        watch.verb = ""
        first = engine.match(np.ones(5, np.int32), salt="huge")
        capacity = [asyncio.create_task(_allocate(first, huge))]
        await _passes()
        if engine.statistics().waiting == 0:
            raise InternalError("the request that heads the capacity line was granted")
        for i in range(self.sizes.waiters // 2):
            lease = self._match(self._prompt(1))
            if i < calls:
                capacity.append(
                    await watch.start("allocate_in_line", _allocate(lease, 5, priority=i % 5))
                )
                continue
            watch.verb = ""
            capacity.append(asyncio.create_task(_allocate(lease, 5, priority=i % 5)))
        await _passes()
        for lease in self.leases[1 : 2 * calls : 2]:
            watch.call("release_with_line", lease.release)
            await _passes()
        watch.call("commit_awaited", self.owner.commit, 16 * BLOCK_TOKENS)
        await _passes()
        for line, tasks in {"capacity": capacity[1:], **waiting}.items():
            for task in _spread(tasks, calls):
                watch.call(f"cancel_{line}", task.cancel)
                await _passes()
        watch.call("release_awaited", self.owner.release)
        await _passes()
        for _ in range(calls):
            task = await watch.start("timeout", _timed_out(self._match(self._prompt(1))))
            await task
        quiesce = await watch.start("quiesce", engine.quiesce())
        for lease in self.leases[1 + 2 * calls : 1 + 4 * calls : 2]:
            watch.call("release_while_quiescing", lease.release)
            await _passes()
        watch.verb = ""
        await _cancel_all([quiesce])
        resize = asyncio.create_task(engine.resize(self.sizes.device_blocks // 2))
        await _passes()
        for lease in self.leases[1 + 4 * calls : 1 + 6 * calls : 2]:
            watch.call("release_while_resizing", lease.release)
            await _passes()
        watch.verb = ""
        if resize.done():
            raise InternalError("no lease was in the way of the resize")
        await _cancel_all([resize])


async def _allocate(lease: Lease, num_tokens: int, **options: Any) -> None:
    async with lease:
        await lease.allocate(num_tokens, **options)


async def _timed_out(lease: Lease) -> None:
    """Wait in line with a deadline that has passed."""
    with contextlib.suppress(AllocateTimeout):
        await _allocate(lease, 5, timeout=0)


async def _passes() -> None:
    """Run three passes of the loop, and so the callbacks that a call has scheduled."""
    for _ in range(3):
        await asyncio.sleep(0)


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _spread(tasks: list[asyncio.Task[Any]], number: int) -> list[asyncio.Task[Any]]:
    """Return that number of items, evenly spread from the first to the last."""
    return tasks[:: max(1, len(tasks) // number)][:number]


def main(argv: list[str] | None = None) -> int:
    """Print one run of a chosen size as a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.loop_held", description=__doc__)
    parser.add_argument("--divide", type=int, default=1, help="divide all sizes (%(default)s)")
    results = measure(Sizes().divided(parser.parse_args(argv).divide))
    print(f"set-up {results['set_up_seconds']:.1f} s, CPU ms per call:   median      longest")
    for verb, held in sorted(results["held_ms"].items(), key=lambda item: -item[1]["max"]):
        mark = "  > 1 ms" if held["max"] > LIMIT_MS else ""
        print(f"  {verb:<28}{held['p50']:>18.4f}{held['max']:>13.3f}{mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
