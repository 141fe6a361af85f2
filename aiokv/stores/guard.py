"""StoreGuard: keeps the failures of one store away from requests.

Each operation has a deadline, and a slot among a bounded number of operations. A breaker refuses
calls while the store is unavailable. Loaded blocks count only after their bytes are verified.

An operation has two ends. The caller gets its results at the deadline at the latest. The blocks
belong to the operation until the store's coroutine has really ended: ``StoreResults.overdue``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import numpy as np

from aiokv import _native
from aiokv.base.groups import ATTENTION
from aiokv.base.logs import Log
from aiokv.base.plan import Priority
from aiokv.base.statistics import GuardStatistics, StoreStatistics
from aiokv.errors import AiokvError, ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, selected
from aiokv.stores.breaker import Breaker
from aiokv.stores.cost import Cost
from aiokv.stores.guard_statistics import GuardCounts
from aiokv.stores.missing import MAX_KEYS, MissingKeys
from aiokv.stores.opening import Opening
from aiokv.stores.operations import Limit, Operations, error_text
from aiokv.stores.options import without_user
from aiokv.stores.write_budget import WriteBudget

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from numpy.typing import NDArray

    from aiokv.stores.accesses import Accesses
    from aiokv.stores.base import SharedFilter, Store, StoreMemory
    from aiokv.stores.breaker import State
    from aiokv.stores.cost import StoreBatch
    from aiokv.stores.proof import Proof
    from aiokv.stores.use import StoreUse

T = TypeVar("T")
log = Log(__name__)

PART_BYTES: Final = 256 << 20  # per operation, and so per deadline
CLOSE_SECONDS: Final = 10.0  # for operations in flight to end
FOLLOW_PAUSE_SECONDS: Final = 30.0  # before the keys of a store are listed again after an error


class StoreResults(NamedTuple):
    """Results of a load or a save.

    Attributes:
        results: ``[N]`` uint8 ``Result``.
        overdue: set when the store still accesses blocks beyond its deadline; done when it has
            stopped.
    """

    results: NDArray[np.uint8]
    overdue: asyncio.Task[Any] | None = None


class _Way(NamedTuple):
    """Loads or saves: the call of the store, and where its outcomes are noted.

    Attributes:
        operation: name of the store's method.
        call: the store's method.
        admits: returns True when an operation may be passed to the store.
        breaker: counts the outcomes.
        cost: duration of the operations.
    """

    operation: Literal["load", "save"]
    call: Callable[..., Awaitable[Any]]
    admits: Callable[[], bool]
    breaker: Breaker
    cost: Cost


class Costs(NamedTuple):
    """Durations of the operations of one store, its write budget, and what it is known not to have,
    for all groups.

    Attributes:
        lookup: cost of lookups.
        load: cost of loads, verification included.
        save: cost of saves that have written blocks.
        writes: the write budget; None without limits.
        missing: keys that the store is known not to have.
    """

    lookup: Cost
    load: Cost
    save: Cost
    writes: WriteBudget | None
    missing: MissingKeys

    @classmethod
    def new(cls, use: StoreUse) -> Costs:
        """Return costs that were not measured yet."""
        folder = use.store.state_folder
        path = None if folder is None else folder / "admission"
        limits = use.write_limits()
        writes = WriteBudget(limits, path) if limits else None
        return cls(Cost(), Cost(), Cost(), writes, MissingKeys(use.missing_seconds))


class GuardedLookup:
    """One lookup of a store, in one or more calls of the store, one after the other.

    The deadline limits the time of all calls together. A call that exceeds it is a failure of the
    store only if the store has answered no call of the lookup: otherwise the lookup is long, and
    the store works.

    Args:
        call: looks up keys with a limit.
        seconds: limit of all calls.
    """

    def __init__(
        self,
        call: Callable[[bytes, Limit], Awaitable[NDArray[np.bool_] | None]],
        seconds: float,
    ) -> None:
        self._call = call
        self._seconds_left = seconds
        self._is_answered = False

    async def ask(self, keys: bytes) -> NDArray[np.bool_] | None:
        """Return for each key whether the store has it, ``[N]`` bool; None without an answer.

        Cancellation: the call goes on until the deadline. Its outcome counts for the breaker:
        requests that wait for a shorter time than the deadline must not keep a store that is stuck
        in use.
        """
        if self._seconds_left <= 0:
            return None
        began = _now()
        limit = Limit(began + self._seconds_left, is_failure=not self._is_answered)
        found = await self._call(keys, limit)
        self._seconds_left -= _now() - began
        self._is_answered |= found is not None
        return found


class StoreGuard:
    """One store, behind deadlines, a breaker and the proof of its bytes.

    No error of the store leaves the guard, except from ``open``: without a result, a lookup finds
    nothing, and a load or a save is ``FAILED``. Used on one loop.

    Args:
        use: the store, and how it is used.
        costs: durations, shared with the other groups of the store, whose operations use the same
            medium; None for new ones.

    Attributes:
        use: as given.
        costs: as given.
        is_open: ``open`` has succeeded, and ``aclose`` was not called since.
    """

    def __init__(self, use: StoreUse, costs: Costs | None = None) -> None:
        self.use = use
        self._store: Store = use.store
        # A user's store may have left credentials in its URL.
        self._url = without_user(use.store.url)
        self._memory: StoreMemory | None = None
        self._proof: Proof | None = None
        self._reads = Breaker(partial(self._log_change, "read"), use.retry_seconds)
        self._saves = Breaker(partial(self._log_change, "save"), use.retry_seconds)
        self._counts = GuardCounts()
        self._operations = Operations(use.store.max_concurrent, lambda: self.is_open, self._counts)
        self._background: set[asyncio.Task[Any]] = set()
        self._opening: Opening | None = None
        self._closing: asyncio.Task[None] | None = None
        self._last_opening: asyncio.Task[None] | None = None
        self.is_open = False
        self._payload_bytes = 0
        self._object_bytes = 1
        self._group = ATTENTION
        self._has_logged_wrong = False
        self._has_logged_statistics = False
        self._has_logged_may_have = False
        self.costs = Costs.new(use) if costs is None else costs
        store = use.store
        self._loading = _Way("load", store.load, self.admits_read, self._reads, self.costs.load)
        self._saving = _Way(
            "save", store.save_chains, self._admits_save, self._saves, self.costs.save
        )

    # --- opening and closing ----------------------------------------------------------------------

    async def open(self, memory: StoreMemory, proof: Proof) -> None:
        """Open the store on the host arena, at the start of an engine.

        When its medium or its server fails, attempts go on in the background until one succeeds,
        or until ``aclose``; likewise when the first attempt takes longer than
        ``StoreUse.deadline_seconds``.

        Raises:
            AiokvError: the store is configured wrongly: its first error is no ``StoreError``.
            StoreError: the first attempt has failed, and the store is required.

        Cancellation, and after an error: call ``aclose``.
        """
        opening = self._begin_opening(memory, proof, self._ends_start)
        error = await opening.first(None if self.use.required else self.use.deadline_seconds)
        if error is not None and self._ends_start(error):
            raise error

    async def reopen(self, memory: StoreMemory, proof: Proof) -> None:
        """Open the store on a new arena after ``aclose``, unless it is open. As :meth:`open`, but
        attempts go on after any error.

        Cancellation: the attempts go on.
        """
        opening = self._begin_opening(memory, proof, lambda error: False)
        await opening.first(self.use.deadline_seconds)

    def _ends_start(self, error: AiokvError) -> bool:
        return self.use.required or not isinstance(error, StoreError)

    def _begin_opening(
        self, memory: StoreMemory, proof: Proof, gives_up: Callable[[AiokvError], bool]
    ) -> Opening:
        """Return the attempts to open the store; begin them unless they have begun."""
        if self._opening is None:
            self._memory = memory
            self._group = memory.group
            attempt = partial(self._open_store, memory, self._closing)
            on_open = partial(self._note_open, memory, proof)
            self._opening = Opening(self._url, attempt, on_open, gives_up, self.use.retry_seconds)
            self._last_opening = self._opening.task
        return self._opening

    async def _open_store(self, memory: StoreMemory, closing: asyncio.Task[None] | None) -> None:
        """Open the store when ``closing`` and operations from before it have ended."""
        if before := {task for task in (closing, *self._operations.running) if task is not None}:
            _, stuck = await asyncio.wait(before, timeout=CLOSE_SECONDS)
            if stuck:
                raise StoreError(f"store {self._url} cannot be opened again: it has not closed yet")
        try:
            await self._store.open(memory)
            if self.costs.writes is not None:
                await self.costs.writes.open()
        except AiokvError:
            raise
        except ImportError as error:
            raise ConfigError(f"store {self._url} needs a package: {error}") from error
        except Exception as error:
            raise StoreError(f"store {self._url} cannot be opened: {error_text(error)}") from error

    def _note_open(self, memory: StoreMemory, proof: Proof) -> None:
        self._proof = proof
        self._payload_bytes = memory.payload_bytes
        self._object_bytes = memory.pitch_bytes
        self.is_open = True
        log.info("store.opened", url=self._url, group=self._group)
        if self._store.follows_keys and self.use.read and self._group == ATTENTION:
            self._spawn(self._follow())

    async def aclose(self) -> bool:
        """Cancel operations in flight, and close the store. Idempotent.

        Returns:
            True when the store no longer accesses the memory. False when it has not stopped within
            ``CLOSE_SECONDS``: the memory must not be freed.

        Cancellation: the operations are cancelled; call it again.
        """
        self.is_open = False
        if self._opening is not None:
            self._opening.cancel()
            for task in (*self._operations.running, *self._background):
                task.cancel()
            close = self._close_store(self._opening.task, self._closing)
            self._closing = asyncio.get_running_loop().create_task(close)
            self._opening = None
        tasks = {*self._operations.running, *self._background}
        if self._closing is not None:
            tasks.add(self._closing)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            if stuck:
                log.error("store.stuck", url=self._url, waited_seconds=CLOSE_SECONDS)
                _native.keep_forever(self._memory)
                return False
        if self._proof is not None:
            log.info("store.closed", url=self._url, group=self._group)
        self._memory = self._proof = None
        return True

    async def _close_store(
        self, opening: asyncio.Task[None], earlier: asyncio.Task[None] | None
    ) -> None:
        """Close the store when attempts to open it, and an earlier close, have ended."""
        await asyncio.wait({opening} if earlier is None else {opening, earlier})
        try:
            if self.costs.writes is not None:
                await self.costs.writes.aclose()
            await self._store.aclose()
        except Exception as error:
            log.warning("store.close_failed", url=self._url, reason=error_text(error))

    def close_without_loop(self) -> bool:
        """Stop after the loop was closed; return False when the store may still access memory."""
        self.is_open = False
        tasks = (*self._operations.running, self._last_opening, self._closing)
        is_used = any(task is not None and not task.done() for task in tasks)
        if is_used:
            _native.keep_forever(self._memory)
        return not is_used

    # --- operations -------------------------------------------------------------------------------

    def begin_lookup(self, *, of_prefix: bool = False) -> GuardedLookup:
        """Return a lookup with the deadline of the store: of any keys, or of a prompt's blocks."""
        lookup = self._store.lookup_prefix if of_prefix else self._store.lookup
        return GuardedLookup(partial(self._look_up, lookup), self.use.lookup_seconds)

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the store has it, ``[N]`` bool; all False without an answer.

        Cancellation: as for ``GuardedLookup.ask``.
        """
        found = await self.begin_lookup().ask(keys)
        return np.zeros(len(keys) // KEY_BYTES, np.bool_) if found is None else found

    async def _look_up(
        self, lookup: Callable[[bytes], Awaitable[Any]], keys: bytes, limit: Limit
    ) -> NDArray[np.bool_] | None:
        if not keys or not self.admits_read():
            return None
        task = self._spawn(self._call_lookup(lookup, keys, limit))
        await asyncio.wait({task})
        return None if task.cancelled() else task.result()

    async def _call_lookup(
        self, lookup: Callable[[bytes], Awaitable[Any]], keys: bytes, limit: Limit
    ) -> NDArray[np.bool_] | None:
        num_keys = len(keys) // KEY_BYTES
        self._counts.lookups += 1
        self._counts.lookup_keys += num_keys
        began, missing = _now(), self.costs.missing
        num_stored = missing.num_stored
        call = partial(lookup, keys)
        ended, _ = await self._operations.run("lookup", call, self._reads, limit)
        if ended is None:
            return None
        found, reason = ended.array(num_keys, np.bool_)
        if found is None:
            self._reads.fail("lookup", reason, _now())
            return None
        self._reads.succeed("lookup")
        self.costs.lookup.note_latency(_now() - began, _now())
        num_found = int(np.count_nonzero(found))
        self._counts.found_keys += num_found
        if num_found < num_keys and missing.num_stored == num_stored:
            # Keys behind the first one may be missing in the answer only; see Store.lookup_prefix.
            first = int(found.argmin()) * KEY_BYTES
            missing.note_missing(keys[first : first + KEY_BYTES], _now())
        return found

    def may_have_any(self, keys: bytes) -> bool:
        """Return False if the store is known to have none of the keys, without a lookup."""
        if self.is_open:
            try:
                if not self._store.may_have_any(keys):
                    return False
            except Exception as error:
                if not self._has_logged_may_have:
                    self._has_logged_may_have = True
                    log.warning("store.may_have_failed", url=self._url, reason=error_text(error))
                return True
        return self.costs.missing.may_have_any(keys, _now())

    def shared_filter(self) -> SharedFilter | None:
        """Return the filter of the store; None without one."""
        return self._store.shared_filter() if self.is_open else None

    def note_spared_lookup(self) -> None:
        """Count a lookup that was not made, because ``may_have_any`` was False."""
        self._counts.spared_lookups += 1

    async def _follow(self) -> None:
        """Keep a filter of the keys of the store, of all groups, while it is open."""
        is_logged = False
        while True:
            try:
                if not await self.costs.missing.follow(self._store.follow_keys()):
                    log.warning("store.too_many_keys", url=self._url, limit=MAX_KEYS)
                    return
            except Exception as error:
                if not is_logged:
                    log.info("store.not_followed", url=self._url, reason=error_text(error))
                is_logged = True
                await asyncio.sleep(FOLLOW_PAUSE_SECONDS)

    async def load(
        self,
        keys: bytes,
        blocks: NDArray[np.int32],
        priority: int = Priority.DEMAND,
        accesses: Accesses | None = None,
    ) -> StoreResults:
        """Load object ``i`` into host block ``blocks[i]``, and verify it.

        Args:
            keys: one per block.
            blocks: host blocks.
            priority: lower numbers get a slot first.
            accesses: gets each operation that accesses the blocks.

        Cancellation: the store's load is cancelled; see ``accesses`` for its end.
        """
        return await self._move(self._loading, keys, blocks, priority, accesses)

    def admit(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which blocks the write budget lets be saved, ``[N]``; the others are refused.

        Pass those to ``save``, or their number to ``refund``.
        """
        if self.costs.writes is None or not self.is_open:
            return np.ones(len(keys) // KEY_BYTES, np.bool_)
        admitted = self.costs.writes.admit(keys, self._object_bytes, _now())
        self._counts.refused_blocks += int(np.count_nonzero(~admitted))
        return admitted

    def refund(self, num_blocks: int, admitted_at: float) -> None:
        """Give the write budget back what was admitted at a time of the loop and is not written."""
        if self.costs.writes is not None:
            self.costs.writes.refund(num_blocks * self._object_bytes, admitted_at)

    async def save(
        self,
        keys: bytes,
        blocks: NDArray[np.int32],
        accesses: Accesses | None = None,
        follows: NDArray[np.bool_] | None = None,
        admitted_at: float | None = None,
    ) -> StoreResults:
        """Store the sealed object in host block ``blocks[i]``, which ``admit`` has admitted.

        Args:
            keys: one per block.
            blocks: host blocks.
            accesses: as for ``load``.
            follows: see ``Store.save_chains``; None if no block follows another one.
            admitted_at: time of the loop of the call of ``admit``; None for now.

        Cancellation: the store's save is cancelled; see ``accesses`` for its end. The write budget
        counts all blocks as written, as it does after the deadline.
        """
        if follows is None:
            follows = np.zeros(len(blocks), np.bool_)
        if admitted_at is None:
            admitted_at = _now()
        reply = await self._move(self._saving, keys, blocks, Priority.BACKUP, accesses, follows)
        is_stored = np.isin(reply.results, (Result.DONE, Result.PRESENT))
        self.costs.missing.note_stored(selected(keys, is_stored))
        if reply.overdue is None:
            self.refund(int(np.count_nonzero(reply.results != Result.DONE)), admitted_at)
        return reply

    async def _move(
        self,
        way: _Way,
        keys: bytes,
        blocks: NDArray[np.int32],
        priority: int,
        accesses: Accesses | None,
        *arrays: NDArray[np.bool_],
    ) -> StoreResults:
        """Load or save blocks, one operation of the store per part."""
        results = np.full(len(blocks), Result.FAILED, np.uint8)
        batch = way.cost.begin(len(blocks) * self._payload_bytes, _now(), len(blocks))
        try:
            overdue = await self._move_parts(
                way, keys, (blocks, *arrays), priority, accesses, results, batch
            )
        finally:
            batch.end()
        return StoreResults(results, overdue)

    async def _move_parts(
        self,
        way: _Way,
        keys: bytes,
        arrays: tuple[NDArray[Any], ...],
        priority: int,
        accesses: Accesses | None,
        results: NDArray[np.uint8],
        batch: StoreBatch,
    ) -> asyncio.Task[Any] | None:
        """Move the parts until one fails, and write their results; return its overdue task."""
        overdue, num_counted = None, 0
        for part in self._parts(len(results)):
            if not way.admits():
                break
            num_bytes = (part.stop - part.start) * self._payload_bytes
            part_keys = keys[part.start * KEY_BYTES : part.stop * KEY_BYTES]
            call = partial(way.call, part_keys, *(array[part] for array in arrays))
            ended, overdue = await self._operations.run(
                way.operation, call, way.breaker, self._limit(), priority, accesses
            )
            if ended is None:
                if overdue is not None:
                    batch.note(num_bytes, 0, _now())
                break
            largest = Result.FAILED if way is self._loading else Result.PRESENT
            moved, reason = ended.array(part.stop - part.start, np.uint8, largest)
            if moved is None:
                way.breaker.fail(way.operation, reason, _now())
                break
            if way is self._loading:
                moved = await self._verified(part_keys, arrays[0][part], moved, accesses)
            results[part] = moved
            self._note(way, moved)
            done = int(np.count_nonzero(moved == Result.DONE))
            if done:
                batch.note(num_bytes, done * self._payload_bytes, _now())
            else:
                batch.skip(num_bytes, _now())
            num_counted = part.stop
        self._counts.note(way.operation, results[num_counted:])
        return overdue

    def _parts(self, num_blocks: int) -> list[slice]:
        step = max(1, PART_BYTES // max(self._payload_bytes, 1))
        return [slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)]

    async def _verified(
        self,
        keys: bytes,
        blocks: NDArray[np.int32],
        results: NDArray[np.uint8],
        accesses: Accesses | None,
    ) -> NDArray[np.uint8]:
        """Return the results after the proof of the loaded blocks, unless the store has verified
        them; quarantine the wrong ones."""
        loaded = np.flatnonzero(results == Result.DONE)
        results = results.copy()
        if len(loaded) and self._proof is not None and not self._store.verifies_loads:
            loaded_keys = selected(keys, loaded)
            results[loaded] = await self._proof.verify(loaded_keys, blocks[loaded], accesses)
        wrong = np.flatnonzero(results == Result.WRONG)
        if len(wrong):
            wrong_keys = selected(keys, wrong)
            if not self._has_logged_wrong:
                self._has_logged_wrong = True
                log.warning(
                    "store.wrong_block",
                    url=self._url,
                    key=wrong_keys[:KEY_BYTES].hex(),
                    expected_bytes=self._payload_bytes,
                )
            if self.use.save and self._saves.state == "closed":
                self._spawn(self._quarantine(wrong_keys))
        return results

    def _note(self, way: _Way, results: NDArray[np.uint8]) -> None:
        """Note the results of one operation."""
        self._counts.note(way.operation, results)
        done = int(np.isin(results, (Result.DONE, Result.PRESENT)).sum())
        failed = int(np.count_nonzero(results == Result.FAILED))
        wrong = int(np.count_nonzero(results == Result.WRONG))
        if failed:
            way.breaker.fail(way.operation, f"{failed} of {len(results)} blocks failed", _now())
        elif wrong and not done:
            way.breaker.fail(way.operation, f"{wrong} of {len(results)} blocks were wrong", _now())
        else:
            way.breaker.succeed(way.operation)

    async def _quarantine(self, keys: bytes) -> None:
        """Remove wrong objects, and keep saves from reusing their places on the medium."""
        call = partial(self._store.quarantine, keys)
        ended, _ = await self._operations.run(
            "quarantine", call, self._saves, self._limit(), Priority.BACKUP
        )
        if ended is not None:
            if ended.reason:
                self._saves.fail("quarantine", ended.reason, _now())
            else:
                self._saves.succeed("quarantine")

    async def purge(self, label: bytes) -> int:
        """Remove all objects with a label, after the operations beyond their deadlines have ended;
        return their number.

        No deadline and no breaker limit it: the caller limits the time.

        Raises:
            StoreError: the store is not open, or the engine may not remove its objects; or the
                store failed. Some objects may have been removed.

        Cancellation: some objects may have been removed.
        """
        if not self.is_open or not self.use.save:
            why = "not open" if self.use.save else "used with save=False"
            raise StoreError(f"store {self._url} was not purged: it is {why}")
        # An operation beyond its deadline may be a save.
        ended = await self._operations.run_alone(partial(self._store.purge, label))
        if ended.reason:
            raise StoreError(f"store {self._url} was not purged: {ended.reason}")
        return int(ended.value)

    # --- availability -----------------------------------------------------------------------------

    def admits_read(self) -> bool:
        """Return True when the store may be read; count a refusal, and begin a due probe."""
        if self.is_open and self.use.read:
            if self._reads.state == "closed":
                return True
            if self._reads.may_probe(_now()):
                self._spawn(self._probe())
            self._counts.rejected += 1
        return False

    def is_late(self) -> bool:
        """Return True while loads take much longer than expected, or operations beyond their
        deadlines have not ended."""
        return bool(self._operations.overdue) or self.costs.load.is_late(_now())

    def _admits_save(self) -> bool:
        """Return True when a save may be passed to the store.

        No request waits for a save, so a save is its own probe.
        """
        if not self.is_open or not self.use.save:
            return False
        if self._saves.state == "closed" or self._saves.may_probe(_now()):
            return True
        self._counts.rejected += 1
        return False

    async def _probe(self) -> None:
        """Probe the store in the background: no request waits for it.

        The probe stands for a load, and so has the deadline of loads and one of their slots: while
        loads beyond their deadlines hold all slots, a further load could not run either.
        """
        ended, _ = await self._operations.run(
            "probe", self._store.probe, self._reads, self._limit()
        )
        if ended is None:
            return
        if ended.reason:
            self._reads.fail("probe", ended.reason, _now())
        else:
            self._reads.succeed("probe")

    def _log_change(self, direction: str, state: State, reason: str) -> None:
        if state == "open":
            log.warning("store.unavailable", url=self._url, operations=direction, reason=reason)
        else:
            log.warning("store.available", url=self._url, operations=direction)

    def _limit(self) -> Limit:
        """Return the limit of an operation that begins now, other than a lookup."""
        return Limit(_now() + self.use.deadline_seconds)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --- statistics -------------------------------------------------------------------------------

    def statistics(self) -> GuardStatistics:
        """Return the counters of the guard and of its store."""
        counts = self._counts
        failure = "" if self._opening is None else self._opening.failure
        is_opening = self._opening is not None and not self.is_open
        return GuardStatistics(
            kind=self._store.kind,
            url=self._url,
            group=self._group,
            reading="off" if not self.use.read else "open" if is_opening else self._reads.state,
            saving="off" if not self.use.save else "open" if is_opening else self._saves.state,
            failure=failure,
            opened=self._reads.opened + self._saves.opened,
            loaded_bytes=counts.loaded_blocks * self._payload_bytes,
            saved_bytes=counts.saved_blocks * self._payload_bytes,
            running=len(self._operations.running),
            overdue=len(self._operations.overdue),
            filter_keys=self.costs.missing.filter_keys,
            write_budget_left=1.0 if self.costs.writes is None else self.costs.writes.left,
            lookup_seconds=self.costs.lookup.latency_seconds,
            load_seconds=self.costs.load.latency_seconds,
            load_bytes_per_second=self.costs.load.bytes_per_second,
            save_seconds=self.costs.save.latency_seconds,
            save_bytes_per_second=self.costs.save.bytes_per_second,
            store=self._store_statistics(),
            **vars(counts),
        )

    def _store_statistics(self) -> StoreStatistics:
        """Return the counters of the store; unknown ones while it is closed, or after an error."""
        if not self.is_open:
            return StoreStatistics()
        try:
            return self._store.statistics()
        except Exception as error:
            if not self._has_logged_statistics:
                self._has_logged_statistics = True
                log.warning("store.no_statistics", url=self._url, reason=error_text(error))
            return StoreStatistics()


def _now() -> float:
    return asyncio.get_running_loop().time()
