"""Soak: random operations with faults and cancellations, every byte and every invariant checked.

Rounds go through all write policies, devices and loops. In each, clients match, allocate, onload,
compute, commit, extend, pin and prefetch over a cache that is too small, while copies fail at
random, clients are cancelled at random, and an operator evicts, resets, resizes, pauses, updates
weights and sleeps; in some, salts have a quota, or checksums find the host blocks that the operator
corrupts. Some rounds have stores, a directory of the disk and one that fails, delays, drops and
corrupts, and several engines, one after the other, some of which are closed while they serve. In
some, another engine computes prompts and sends their blocks. In most, subscribers of the KV events
compare what they know with the index, one of them over ZeroMQ, where messages are lost. A round
ends with every pool full and nothing left. See ``load`` for the load, ``stores``, ``peers`` and
``events``. The transitions of an engine that finds a violation are left in a file for
``replay_transitions``.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from aiokv import CacheConfig, CacheEngine
from aiokv.cli.progress import show_progress
from aiokv.config.save_policy import SaveMoment, SavePolicy
from aiokv.testing import record
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.flaky import ChaosDevice, FlakyDevice
from tests.harness.leftovers import open_descriptors, running_threads
from tests.harness.memory import Memory, WrongBytes
from tests.soak.events import RoundEvents
from tests.soak.load import LATE_PASSES, Load, Violation
from tests.soak.peers import Prefill, receiving_peers
from tests.soak.records import RoundRecords
from tests.soak.stores import RoundStores

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

POLICIES: tuple[SaveMoment, ...] = ("none", "write_through", "nth_use", "write_back")
DEVICES = ("chaos", "flaky")
VERIFY = ("off", "checksum", "off")  # cycled, so that each policy and device gets several
STORES: tuple[tuple[str, ...], ...] = ((), ("disk",), ("scripted",), ("disk", "scripted"), ())
PEERS = (False, True, False)  # cycled
EVENTS_SHARE = 0.7  # of the rounds that have subscribers of the KV events
ENGINES = 3  # of a round with stores
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
CLIENTS = 24
ROUND_OPERATIONS = 30_000  # of all engines of a round; 2 to 10 s
CHECK_OPERATIONS = 50  # between two checks of the invariants
CANCEL_SHARE = 0.1  # of the passes of the loop that cancel a client


class Totals(msgspec.Struct, kw_only=True):
    """Counts of a soak."""

    rounds: int = 0
    operations: int = 0
    invariant_checks: int = 0
    checked_blocks: int = 0
    hit_tokens: int = 0
    received_tokens: int = 0
    peer_sends: int = 0
    cancelled: int = 0
    faults: int = 0
    failed_onloads: int = 0
    late_writes: int = 0
    corrupted_blocks: int = 0
    corrupted_found: int = 0
    onloaded_blocks: int = 0
    offloaded_blocks: int = 0
    evicted_blocks: int = 0
    engines: int = 0
    store_faults: int = 0
    saved_blocks: int = 0
    fetched_blocks: int = 0
    hit_store_tokens: int = 0
    disk_loads_compared: int = 0
    disk_blocks_found_again: int = 0
    event_views_compared: int = 0
    event_blocks_dropped: int = 0
    event_messages_lost: int = 0
    seconds: float = 0.0

    @property
    def operations_per_second(self) -> float:
        return self.operations / self.seconds if self.seconds else 0.0


class Round:
    """One round: an engine from opening to closing, or several on the same stores.

    Args:
        seed: of all random choices.
        policy: write policy.
        device: ``"chaos"`` or ``"flaky"``.
        verify: see ``CacheConfig``.
        stores: kinds of stores; ignored without a host tier.
        peers: let another engine compute some prompts, and receive their blocks.
        folder: existing folder for the files of the disk store.
        totals: counts to be added to.
    """

    def __init__(
        self,
        seed: int,
        policy: str,
        device: str,
        verify: str,
        stores: tuple[str, ...],
        peers: bool,
        folder: Path,
        totals: Totals,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.stores = RoundStores(() if policy == "none" else stores, rng, folder)
        device_blocks = rng.randint(40, 160)
        self.config = CacheConfig(
            block_tokens=rng.choice((1, 4, 16)),
            device_blocks=device_blocks,
            host_blocks=0 if policy == "none" else rng.choice((8, 60, 250)),
            write_policy=str(SavePolicy(policy, rng.randint(1, 3))),
            low_watermark_blocks=rng.choice((None, 0, device_blocks // 4)),
            min_onload_tokens=rng.choice((0, 0, 8)),
            leave_tokens=rng.choice((1, 1, 2)),
            reserve_blocks=rng.choice((0, 4)),
            miss_history_blocks=rng.choice((0, 20, 500)),
            eviction_policy=rng.choice(("lru", "lru", "adaptive")),
            salt_quota_blocks=rng.choice((None, None, device_blocks // 2)),
            verify=verify,
            model="soak" if self.stores.kinds or peers else "",
            store_policy=str(
                SavePolicy(
                    rng.choice(("write_through", "write_through", "nth_use", "write_back")),
                    rng.randint(1, 3),
                )
            ),
            store_queue_blocks=rng.choice((8, 4096)),
            prefill_tokens_per_second=rng.choice((1.0, 2e3, None)),
        )
        self.memory = Memory(device_blocks, self.config.block_tokens, axes=("tokens", "dim"))
        self._new_device = partial(ChaosDevice if device == "chaos" else FlakyDevice, rng)
        self.device = self._new_device()
        self.peers = peers
        self.totals = totals
        self.load: Load | None = None
        self.events: RoundEvents | None = None
        self._has_events = rng.random() < EVENTS_SHARE
        self._checked_at = 0

    async def run(self, operations: int, log: Path) -> None:
        """Run the round, and write the transitions of its last scheduler to ``log``.

        Args:
            operations: of all engines; the last operations of each come in addition.
            log: file for the transitions.

        Raises:
            Violation: see there.
        """
        mover = asyncio.create_task(self._move())
        engines = ENGINES if self.stores.kinds else 1
        try:
            for number in range(engines):
                last = number == engines - 1
                await self._serve(
                    operations // engines, log, abrupt=not last and self.rng.random() < 0.5
                )
        finally:
            mover.cancel()
            await asyncio.wait([mover])
            self._add_up_round()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            raise Violation(f"tasks remain: {left}")
        self._check_stores()

    async def _serve(self, operations: int, log: Path, *, abrupt: bool) -> None:
        """Run one engine; with ``abrupt``, close it while its clients use it."""
        self.memory.take(len(self.memory.tensors[0]))
        self.device = self._new_device()
        self.totals.engines += 1
        config = dataclasses.replace(self.config, weights_version=str(self.memory.weights))
        prefill = Prefill(self.memory, self.rng) if self.peers else None
        engine = CacheEngine(
            config,
            self.memory.regions,
            self.device,
            stores=self.stores.new(),
            peers=receiving_peers(self.memory, self.rng) if self.peers else None,
        )
        with record(engine, log), RoundRecords(engine, self.rng):
            async with (
                prefill or nullcontext(),
                engine,
                self._subscribed(engine) or nullcontext(),
            ):
                self._checked_at = 0
                self.load = load = Load(engine, self.memory, self.rng, self.stores, prefill)
                try:
                    await self._drive(load, operations, abrupt=abrupt)
                    if not abrupt:
                        await self._end(engine)
                finally:
                    self._add_up(engine, load)
        self._check_stores()

    def _subscribed(self, engine: CacheEngine) -> RoundEvents | None:
        self.events = RoundEvents(engine, self.rng) if self._has_events else None
        return self.events

    def _check_stores(self) -> None:
        if violations := self.stores.acknowledged.violations:
            raise Violation(f"disk store: {'; '.join(violations[:5])}")

    async def _move(self) -> None:
        while True:
            if isinstance(self.device, ChaosDevice):
                self.device.move(self.rng.randint(0, 4))
            await asyncio.sleep(0)

    async def _drive(self, load: Load, operations: int, *, abrupt: bool) -> None:
        names = [f"client-{i}" for i in range(CLIENTS)]
        tasks = {asyncio.create_task(load.client(name)): name for name in names}
        others = {asyncio.create_task(load.operate()), asyncio.create_task(load.break_stores())}
        receiver = asyncio.create_task(self._receive())
        watch = StallWatch(load)
        try:
            while load.operations < operations:
                watch.check([*tasks, *others])
                if self.rng.random() < CANCEL_SHARE:
                    load.cancelled += self.rng.choice(list(tasks)).cancel()
                await asyncio.sleep(0)
                if self.events is not None:
                    self.events.take_some()
                for task in [task for task in tasks if task.done()]:
                    name = tasks.pop(task)
                    _raise_failure(task)
                    tasks[asyncio.create_task(load.client(name))] = name
                for task in [task for task in others if task.done()]:
                    _raise_failure(task)
                    raise Violation(f"{task} ended early")
                if receiver.done():
                    _raise_failure(receiver)
                self._check_invariants(load)
            load.stopping = True
            if abrupt:
                load.closing = True
                await load.engine.aclose(self.rng.choice((0.0, 0.0, 0.02)))
            self.stores.end_faults()
            await self._await_all({*tasks, *others}, load)
        finally:
            for task in (*tasks, *others, receiver):
                task.cancel()
            await asyncio.wait({*tasks, *others, receiver})
            for _ in range(LATE_PASSES + 1):  # runners of clients that a close has ended
                await asyncio.sleep(0)

    async def _receive(self) -> None:
        if self.events is not None:
            await self.events.receive()

    async def _await_all(self, tasks: set[asyncio.Task[None]], load: Load) -> None:
        watch = StallWatch(load)
        while not all(task.done() for task in tasks):
            watch.check(tasks)
            self._check_invariants(load)
            await asyncio.sleep(0)
        for task in tasks:
            _raise_failure(task)

    def _check_invariants(self, load: Load) -> None:
        if load.operations - self._checked_at < CHECK_OPERATIONS:
            return
        self._checked_at = load.operations
        self.totals.invariant_checks += 1
        violations = load.engine.check_invariants()
        if self.peers:
            violations += load.engine.inspect.parts.worker.tickets.violations()  # type: ignore[attr-defined]
        if self.events is not None and not load.closing:
            violations += self.events.violations()
        if violations:
            raise Violation("; ".join(violations[:5]))

    async def _end(self, engine: CacheEngine) -> None:
        """Check that every pool is full again."""
        await engine.quiesce(timeout=PATIENCE_SECONDS)
        engine.resume()
        violations = await self._remote_violations()
        await engine.reset()
        violations += await self._remote_violations()
        statistics = engine.statistics()
        violations += engine.check_invariants()
        if statistics.attention.device.free != statistics.attention.device.blocks:
            violations.append("the device pool is not full")
        if statistics.attention.host.free != statistics.attention.host.blocks:
            violations.append("the host pool is not full")
        if statistics.leases or statistics.waiting:
            violations.append("leases are out")
        if quota := engine.inspect.dump()["quota"]:
            violations.append(f"blocks are counted to salts: {quota}")
        if violations:
            raise Violation(f"{'; '.join(violations[:5])}: {statistics}")

    async def _remote_violations(self) -> list[str]:
        return [] if self.events is None else await self.events.remote_violations()

    def _add_up_round(self) -> None:
        self.totals.rounds += 1
        self.totals.store_faults += self.stores.faults
        self.totals.checked_blocks += self.memory.checked_blocks
        self.totals.disk_loads_compared += self.stores.acknowledged.loaded
        self.totals.disk_blocks_found_again += self.stores.acknowledged.found_again

    def _add_up(self, engine: CacheEngine, load: Load) -> None:
        totals, statistics = self.totals, engine.statistics()
        totals.operations += load.operations
        totals.hit_tokens += load.hit_tokens
        totals.received_tokens += load.received_tokens
        totals.peer_sends += 0 if load.prefill is None else load.prefill.sends
        totals.cancelled += load.cancelled
        totals.failed_onloads += load.failed_onloads
        totals.late_writes += load.late_writes
        totals.corrupted_blocks += load.corrupted_blocks
        totals.corrupted_found += load.corrupted_found
        totals.faults += self.device.faults.count
        totals.onloaded_blocks += statistics.attention.onloaded_blocks
        totals.offloaded_blocks += statistics.attention.offloaded_blocks
        totals.evicted_blocks += statistics.attention.device.evicted_blocks
        totals.saved_blocks += statistics.attention.saved_blocks
        totals.fetched_blocks += statistics.attention.fetched_blocks
        totals.hit_store_tokens += statistics.hit_store_tokens
        if self.events is not None:
            totals.event_views_compared += self.events.views
            totals.event_blocks_dropped += self.events.dropped
            totals.event_messages_lost += self.events.lost


class StallWatch:
    """Detector of clients that all wait without end."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._operations = load.operations
        self._since = time.monotonic()

    def check(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Compare the operations with those of the last call.

        Raises:
            Violation: no operation has begun for ``PATIENCE_SECONDS``.
        """
        now = time.monotonic()
        if self._operations != self._load.operations:
            self._operations, self._since = self._load.operations, now
        elif now - self._since > PATIENCE_SECONDS:
            stuck = [str(task.get_stack(limit=8)) for task in tasks if not task.done()]
            raise Violation(f"{len(stuck)} tasks hang: {self._load.engine!r} {stuck[:3]}")


def _raise_failure(task: asyncio.Task[None]) -> None:
    """Raise the exception of a finished task, unless it was cancelled."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, Violation | WrongBytes):
        raise error
    raise Violation(f"unexpected {error!r}") from error


def _collect_into(
    errors: list[dict[str, object]],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, object]], None]:
    return lambda _, context: errors.append(context)


def soak(
    seed: int,
    log: Path,
    rounds: int,
    progress: Callable[[int], None] = lambda count: None,
    enough: Callable[[Totals], bool] = lambda totals: False,
) -> Totals:
    """Run rounds until the totals are enough. A busy machine does as much, and takes longer.

    Args:
        seed: of the first round; each next round has another one.
        log: file for the transitions of the round under way, for ``replay_transitions``.
        rounds: limit on the number of rounds.
        progress: called with 1 after each round.
        enough: called after each round; True ends the soak.

    Raises:
        SoakFailure: a round found a violation; ``log`` has the transitions of that round.
    """
    totals = Totals()
    kinds = [(p, d, name) for name in LOOPS for d in DEVICES for p in POLICIES]
    begin, before = time.monotonic(), _open()
    for number in range(rounds):
        policy, device, loop = kinds[number % len(kinds)]
        round_seed = seed * 1_000_003 + number
        verify, stores = VERIFY[number % len(VERIFY)], STORES[number % len(STORES)]
        peers = PEERS[number % len(PEERS)]
        loop_errors: list[dict[str, object]] = []
        try:
            with (
                tempfile.TemporaryDirectory(prefix="aiokv-soak-") as folder,
                asyncio.Runner(loop_factory=LOOPS[loop]) as runner,
            ):
                one = Round(round_seed, policy, device, verify, stores, peers, Path(folder), totals)
                runner.get_loop().set_exception_handler(_collect_into(loop_errors))
                runner.run(one.run(ROUND_OPERATIONS, log))
                gc.collect()  # "exception was never retrieved" comes with the last reference
            if loop_errors:
                raise Violation(f"the loop's exception handler got: {loop_errors[:3]}")
            if number and (left := _open() - before):
                raise Violation(f"threads or descriptors remain: {left}")
        except (Violation, WrongBytes) as error:
            kind = f"{policy}, {device}, {verify}, {loop}, stores {stores}, peers {peers}"
            raise SoakFailure(seed, number, kind, one) from error
        before = before if number else _open()  # the first loop opens libuv's own pipes
        progress(1)
        if enough(totals):
            break
    totals.seconds = time.monotonic() - begin
    return totals


class SoakFailure(Exception):
    """A violation, and the arguments that reproduce it."""

    def __init__(self, seed: int, number: int, kind: str, one: Round) -> None:
        log = one.load.log if one.load is not None else ()
        self.operations = [" ".join(map(str, entry)) for entry in log]
        super().__init__(f"seed {seed}, round {number} ({kind}), {one.config}")


def _open() -> set[str]:
    return running_threads() | open_descriptors()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=75, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="seed of the run (default: random, printed)")
    parser.add_argument(
        "--log",
        type=Path,
        help="file for the transitions of the round under way, kept after a violation "
        "(default: aiokv-soak-SEED.jsonl in the folder for temporary files)",
    )
    args = parser.parse_args(argv)
    seed = random.randrange(2**32) if args.seed is None else args.seed
    print(f"soak: seed {seed}", file=sys.stderr)
    log = args.log or Path(tempfile.gettempdir(), f"aiokv-soak-{seed}.jsonl")
    try:
        with show_progress("rounds", sys.stderr) as stages:
            totals = soak(seed, log, args.rounds, stages("soak", args.rounds))
    except SoakFailure as failure:
        print(*failure.operations, sep="\n", file=sys.stderr)
        traceback.print_exception(failure.__cause__)
        print(f"soak: VIOLATION: {failure.__cause__}\nsoak: {failure}", file=sys.stderr)
        print(f"soak: the transitions of the round are in {log}", file=sys.stderr)
        return 1
    log.unlink(missing_ok=True)
    for name, value in msgspec.structs.asdict(totals).items():
        print(f"{name}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value:,}")
    print(f"operations_per_second: {totals.operations_per_second:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
