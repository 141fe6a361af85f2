"""StoreSet: all stores of a worker, in the order in which they are asked.

lookup ─► stores that take any number of keys ─► a search in those that need a request per key
       ─► the longest prefix that all stores together have
fetch  ─► one batch per store ─► blocks that a store could not bring ─► the next store ─► ...
save   ─► every store that takes saves
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import IntEnum, auto
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiokv.stores.base import KEY_BYTES, Result, StoreFilters, selected, split_keys
from aiokv.stores.guard import Costs, StoreGuard, StoreResults
from aiokv.stores.proof import Proof, derive_keys
from aiokv.stores.search import KeySearch, PrefixSearch
from aiokv.stores.use import StoreUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan
    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.accesses import Accesses
    from aiokv.stores.base import Store, StoreMemory
    from aiokv.stores.guard import GuardedLookup
    from aiokv.stores.search import Search

REMEMBERED_LOOKUPS: Final = 256
REMEMBERED_REFUSALS: Final = 1 << 16
SEARCHED_LOOKUPS: Final = 8  # for a key that is not their first: 0.01 ms per 1,000 keys of each


class StoreAnswer(NamedTuple):
    """Answer of the stores to a list of digests.

    Attributes:
        blocks: number of leading digests whose blocks are in a store.
        seconds: ``[blocks]`` float64, ascending: expected time to fetch the first i + 1 blocks.
        is_lacking: the stores are known not to have the next block.
    """

    blocks: int
    seconds: NDArray[np.float64]
    is_lacking: bool = False


class Found(NamedTuple):
    """Answer of the stores to a list of digests of any objects.

    Attributes:
        seconds: ``[N]`` float64, expected time to fetch each object; infinity if it is missing.
        latency_seconds: to be added once per fetch.
    """

    seconds: NDArray[np.float64]
    latency_seconds: float = 0.0

    @classmethod
    def nothing(cls, num_objects: int) -> Found:
        """Return the answer that no store has any object."""
        return cls(np.full(num_objects, np.inf))


NOTHING: Final = StoreAnswer(0, np.zeros(0))


class _Turn(IntEnum):
    """When a store is asked in a lookup, in this order."""

    LOCAL = auto()  # takes any number of keys, and answers from the memory of this process
    REMOTE = auto()  # takes any number of keys
    SEARCHED = auto()  # takes few keys at a time
    BY_PREFIX = auto()  # looks up a prompt from its first block on


class Fetched(NamedTuple):
    """Outcome of a fetch, for the leases that wait for its blocks.

    Attributes:
        blocks: number of leading blocks that were loaded and verified.
        reason: result of the block behind them; empty if all were loaded.
        overdue: operations that still access host blocks of the plan.
    """

    blocks: int
    reason: str = ""
    overdue: tuple[asyncio.Task[Any], ...] = ()


class Saved(NamedTuple):
    """Outcome of a save.

    Attributes:
        results: one ``Result`` per block; ``DONE`` when at least one store has the block.
        overdue: operations that still access host blocks of the plan.
        written_blocks: number of blocks that at least one store has written; the stores already had
            the other blocks that are ``DONE``.
    """

    results: bytes
    overdue: tuple[asyncio.Task[Any], ...] = ()
    written_blocks: int = 0


class StoreSet:
    """Guards of all stores of a worker. Used on one loop.

    Args:
        stores: in the order in which blocks are taken from them.
        costs: costs of each store, as for ``StoreGuard``; None for new ones.

    Attributes:
        costs: costs of each store.
    """

    def __init__(
        self, stores: Sequence[Store | StoreUse], costs: Sequence[Costs] | None = None
    ) -> None:
        uses = [store if isinstance(store, StoreUse) else StoreUse(store) for store in stores]
        self.costs = [Costs.new(use) for use in uses] if costs is None else costs
        self._guards = list(map(StoreGuard, uses, self.costs))
        self._reads = np.array([use.read for use in uses], np.bool_)
        self._fingerprint = b""
        self._payload_bytes = 0
        self._proof: Proof | None = None
        self._limited = np.array([costs.writes is not None for costs in self.costs], np.bool_)
        self._refused = _Refused()
        self._lookups = _Lookups()
        self._asking: set[asyncio.Task[NDArray[np.bool_] | None]] = set()

    # --- opening and closing ----------------------------------------------------------------------

    async def open(self, memory: StoreMemory, fingerprint: bytes) -> None:
        """Open all stores on the host arena; see ``StoreGuard.open``.

        Raises:
            AiokvError: a store is configured wrongly, or a required store cannot be opened; all
                are closed.

        Cancellation: all are closed.
        """
        proof = self._begin(memory, fingerprint)
        try:
            for guard in self._guards:
                await guard.open(memory, proof)
        except BaseException:
            await self.aclose()
            raise

    async def reopen(self, memory: StoreMemory, fingerprint: bytes) -> None:
        """Open the closed stores on a new arena; see ``StoreGuard.reopen``.

        Cancellation: call it again, or ``aclose``.
        """
        proof = self._begin(memory, fingerprint)
        await asyncio.gather(*(guard.reopen(memory, proof) for guard in self._guards))

    def _begin(self, memory: StoreMemory, fingerprint: bytes) -> Proof:
        self._fingerprint = fingerprint
        self._payload_bytes = memory.payload_bytes
        if self._proof is None:
            self._proof = Proof(memory)
        return self._proof

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Use other keys from now on. Fetches in flight bring no block."""
        self._fingerprint = fingerprint

    async def aclose(self) -> bool:
        """Cancel operations in flight and close all stores. Idempotent.

        Returns:
            True when no store accesses the memory. False when a store has not stopped in
            time: the memory must not be freed.

        Cancellation: call it again.
        """
        ends = await asyncio.gather(*(guard.aclose() for guard in self._guards))
        if self._asking:  # the guards have ended these lookups
            await asyncio.wait(self._asking)
        self._close_proof()
        return all(ends)

    def close_without_loop(self) -> bool:
        """As ``aclose``, after the loop was closed: the stores themselves stay open."""
        ends = [guard.close_without_loop() for guard in self._guards]
        self._close_proof()
        return all(ends)

    def _close_proof(self) -> None:
        if self._proof is not None:
            self._proof.close()
            self._proof = None

    # --- operations -------------------------------------------------------------------------------

    def may_have(self, digest: bytes) -> bool:
        """Return False if all stores that are read are known not to have a block; a lookup of a
        prompt that begins with the block is then not needed."""
        if self._may_have(derive_keys(self._fingerprint, digest)):
            return True
        for guard in self._guards:
            if guard.use.read:
                guard.note_spared_lookup()
        return False

    def _may_have(self, key: bytes) -> bool:
        return any(guard.use.read and guard.may_have_any(key) for guard in self._guards)

    def is_lacking(self, digest: bytes) -> bool:
        """Return True if no store has a block, also none that is not read."""
        return self._is_lacking(derive_keys(self._fingerprint, digest))

    def _is_lacking(self, key: bytes) -> bool:
        return not any(guard.may_have_any(key) for guard in self._guards)

    def shared_filters(self) -> StoreFilters | None:
        """Return the filters of all stores that are read; None if one of them has none."""
        found = [guard.shared_filter() for guard in self._guards if guard.use.read]
        filters = [one for one in found if one is not None]
        if len(filters) < len(found):
            return None
        return StoreFilters(self._fingerprint, filters, len(found) == len(self._guards))

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Return how many leading blocks the stores have, and how long fetching them takes.

        Stores that need a request per key are asked for few of the blocks: see
        :class:`~aiokv.stores.search.PrefixSearch`. So a block may be missing all the same, and the
        fetch then ends before it.

        Args:
            digests: digests of consecutive blocks, ``KEY_BYTES`` each.

        Cancellation: the lookups of the stores go on until their deadlines, for the breakers.
        """
        num_blocks = len(digests) // KEY_BYTES
        if not num_blocks or self._proof is None:
            return NOTHING
        readable = [i for i, guard in enumerate(self._guards) if guard.admits_read()]
        if not readable or not self.may_have(digests[:KEY_BYTES]):
            return NOTHING
        keys = derive_keys(self._fingerprint, digests)
        found = await self._ask(readable, keys, is_prefix=True)
        anywhere = found.any(axis=0)
        blocks = num_blocks if anywhere.all() else int(anywhere.argmin())
        next_key = keys[blocks * KEY_BYTES :][:KEY_BYTES]
        is_lacking = bool(next_key) and self._is_lacking(next_key)
        holders = found[:, :blocks]
        if blocks:
            self._lookups.remember(keys[: blocks * KEY_BYTES], holders)
        return StoreAnswer(blocks, self._fetch_seconds(holders), is_lacking)

    async def find(self, digests: bytes) -> Found:
        """Return which objects the stores have, and how long fetching each of them takes.

        Args:
            digests: digests of any blocks, ``KEY_BYTES`` each.

        Cancellation: as for ``lookup``.
        """
        num_objects = len(digests) // KEY_BYTES
        readable = [i for i, guard in enumerate(self._guards) if guard.admits_read()]
        if not num_objects or not readable or self._proof is None:
            return Found.nothing(num_objects)
        keys = derive_keys(self._fingerprint, digests)
        found = await self._ask(readable, keys, is_prefix=False)
        self._lookups.remember(keys, found)
        now = asyncio.get_running_loop().time()
        costs = np.array([guard.costs.load.parts(now) for guard in self._guards])
        first = _first_holders(self._guards, found)
        seconds = np.where(found.any(axis=0), costs[first, 1] * self._payload_bytes, np.inf)
        return Found(seconds, float(costs[first, 0].max()))

    async def _ask(self, readable: list[int], keys: bytes, *, is_prefix: bool) -> NDArray[np.bool_]:
        """Return which stores may have which objects, ``[stores, N]``.

        Stores that take any number of keys are asked first. The others are asked for the keys that
        no store before them has, in the rounds of a search. A store that is known to have nothing
        of use is asked once others have the keys before its own.

        Args:
            readable: stores to be asked.
            keys: one per object.
            is_prefix: the objects are blocks of one prompt, from the first one on.
        """
        found = np.zeros((len(self._guards), len(keys) // KEY_BYTES), np.bool_)
        turns = {i: _turn(self._guards[i].use, is_prefix=is_prefix) for i in readable}
        waiting, num_waiting = list(readable), 0
        while len(waiting) != num_waiting and not self._on_time(found).all():
            num_waiting = len(waiting)
            for turn in sorted({turns[i] for i in waiting}):
                stores = [i for i in waiting if turns[i] is turn]
                if useful := self._useful(stores, keys, found, is_prefix=is_prefix):
                    await self._ask_in_turn(turn, useful, keys, found, is_prefix=is_prefix)
                    waiting = [i for i in waiting if i not in useful]
        for i in waiting:
            self._guards[i].note_spared_lookup()
        return found

    async def _ask_in_turn(
        self,
        turn: _Turn,
        stores: list[int],
        keys: bytes,
        found: NDArray[np.bool_],
        *,
        is_prefix: bool,
    ) -> None:
        """Ask stores of the same turn, and note what they may have."""
        if turn is _Turn.SEARCHED:
            await self._ask_in_rounds(stores, keys, found, is_prefix=is_prefix)
        elif turn is not _Turn.BY_PREFIX or not self._on_time(found[: stores[0]]).all():
            of_prefix = turn is _Turn.BY_PREFIX
            lookups = {i: self._guards[i].begin_lookup(of_prefix=of_prefix) for i in stores}
            await self._ask_round(lookups, keys, found)

    def _useful(
        self, stores: list[int], keys: bytes, found: NDArray[np.bool_], *, is_prefix: bool
    ) -> list[int]:
        """Return the stores that may have a key that the stores asked so far lack: the first such
        key of a prefix, or any of them. Without such a key, return all: they may be quicker."""
        lacking = np.flatnonzero(~self._on_time(found))
        if not len(lacking):
            return stores
        wanted = selected(keys, lacking[:1] if is_prefix else lacking)
        return [i for i in stores if self._guards[i].may_have_any(wanted)]

    async def _ask_in_rounds(
        self,
        in_rounds: list[int],
        keys: bytes,
        found: NDArray[np.bool_],
        *,
        is_prefix: bool,
    ) -> None:
        """Search stores that take ``max_lookup_keys`` at a time, and note what they may have."""
        held = self._on_time(found[: in_rounds[0]])
        width = min(self._guards[i].use.store.max_lookup_keys for i in in_rounds)
        search: Search
        if is_prefix:
            known = np.asarray(found.any(axis=0))
            search = PrefixSearch(len(in_rounds), held, known, width)
        else:
            search = KeySearch(len(in_rounds), held, width)
        await self._search(in_rounds, keys, search)
        found[in_rounds] = search.holders()

    async def _search(self, stores: list[int], keys: bytes, search: Search) -> None:
        """Ask stores in rounds, until the search ends or no store answers in time.

        A store that does not answer a round is not asked again.
        """
        lookups = {i: self._guards[i].begin_lookup() for i in stores}
        every_key = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        while len(asked := search.next_keys()):
            found = np.zeros((len(self._guards), len(asked)), np.bool_)
            lookups = await self._ask_round(lookups, every_key[asked].tobytes(), found)
            if not lookups:
                return
            search.note(asked, found[stores])

    async def _ask_round(
        self, lookups: dict[int, GuardedLookup], keys: bytes, found: NDArray[np.bool_]
    ) -> dict[int, GuardedLookup]:
        """Ask stores for keys at the same time, and note in ``found`` which of them they have.

        Neither asks the later stores nor waits for them when the first ones in order have all keys:
        the later ones may have them, too. Stores that are late do not count as the first ones:
        blocks come from the later ones, if these have them.

        Returns:
            The lookups that were answered.
        """
        answered: dict[int, GuardedLookup] = {}
        if covered := [i for i in lookups if self._on_time(found[:i]).all()]:
            found[covered] = True
            lookups = {i: lookup for i, lookup in lookups.items() if i not in covered}
        if len(lookups) == 1:  # no task, so that an open breaker costs no pass of the loop
            ((store, lookup),) = lookups.items()
            if (answer := await lookup.ask(keys)) is not None:
                found[store] = answer
                answered[store] = lookup
            return answered
        loop = asyncio.get_running_loop()
        tasks = {i: loop.create_task(lookup.ask(keys)) for i, lookup in lookups.items()}
        self._asking.update(tasks.values())
        for task in tasks.values():
            task.add_done_callback(self._asking.discard)
        try:
            for i, task in tasks.items():
                if (answer := await task) is None:
                    continue
                found[i] = answer
                answered[i] = lookups[i]
                if self._on_time(found).all():
                    found[[later for later in tasks if later > i]] = True
                    break
        except BaseException:
            for task in tasks.values():
                task.cancel()
            raise
        return answered

    def _on_time(self, found: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the keys that the first ``len(found)`` stores have, without late answers."""
        guards = self._guards[: len(found)]
        on_time = [i for i, guard in enumerate(guards) if not guard.is_late()]
        return np.asarray(found[on_time].any(axis=0))

    def _fetch_seconds(self, holders: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the expected time per prefix; the stores work at the same time."""
        now = asyncio.get_running_loop().time()
        seconds = np.zeros(holders.shape[1])
        first = _first_holders(self._guards, holders)
        for i, guard in enumerate(self._guards):
            counts = np.cumsum(first == i)
            latency, per_byte = guard.costs.load.parts(now)
            cost = latency + counts * (per_byte * self._payload_bytes)
            np.maximum(seconds, np.where(counts, cost, 0.0), out=seconds)
        return seconds

    async def fetch(self, plan: TransferPlan, accesses: Accesses | None = None) -> Fetched:
        """Load the blocks of a plan into its host blocks, and verify them.

        Args:
            plan: the plan.
            accesses: gets each operation that accesses the host blocks.

        Returns:
            The result of the fetch. The call returns at the latest when the deadlines of all asked
            stores have passed.

        Cancellation: the loads of the stores are cancelled; see ``accesses`` for their ends.
        """
        if self._proof is None:
            return Fetched(0, "the stores are closed")
        fingerprint = self._fingerprint
        keys = derive_keys(fingerprint, plan.digests)
        holders = self._lookups.holders(keys, self._reads)
        fetch = _Fetch(self._guards, plan, keys, holders, accesses)
        while batches := fetch.batches():
            replies = await _all_of([fetch.load(guard, indices) for guard, indices in batches])
            for (guard, indices), reply in zip(batches, replies, strict=True):
                fetch.note(guard, indices, reply)
        if self._fingerprint != fingerprint:
            return Fetched(0, "the version of the weights has changed", tuple(fetch.overdue))
        return fetch.end()

    async def save(self, plan: TransferPlan, accesses: Accesses | None = None) -> Saved:
        """Seal the host blocks of a plan, and save them to all stores that take saves.

        Args:
            plan: the plan.
            accesses: as for ``fetch``.

        Cancellation: the saves of the stores are cancelled; see ``accesses`` for their ends.
        """
        results = np.full(plan.num_blocks, Result.FAILED, np.uint8)
        if self._proof is None or not self._guards:
            return Saved(results.tobytes())
        keys, blocks = derive_keys(self._fingerprint, plan.digests), plan.source_ids
        admitted = np.array([guard.admit(keys) for guard in self._guards], np.bool_)
        admitted_at = asyncio.get_running_loop().time()
        is_refused = np.asarray(~admitted.all(axis=0))
        self._refused.skip(keys, admitted, self._limited)
        used = np.flatnonzero(admitted.any(axis=0))
        try:
            await self._proof.seal(selected(keys, used), blocks[used], accesses)
        except BaseException:
            for guard, wanted in zip(self._guards, admitted, strict=True):
                guard.refund(int(np.count_nonzero(wanted)), admitted_at)
            raise
        follows = np.frombuffer(plan.follows or bytes(plan.num_blocks), np.bool_)
        saves = zip(self._guards, admitted, strict=True)
        replies = await _all_of(
            [
                _save(guard, keys, blocks, follows, wanted, accesses, admitted_at)
                for guard, wanted in saves
            ]
        )
        for reply in replies:
            results[reply.results == Result.REFUSED] = np.minimum(
                results[reply.results == Result.REFUSED], Result.REFUSED
            )
        written = np.zeros(plan.num_blocks, np.bool_)
        for reply in replies:
            results[np.isin(reply.results, (Result.DONE, Result.PRESENT))] = Result.DONE
            written |= reply.results == Result.DONE
        self._refused.note(keys, is_refused, results)
        results[is_refused] = Result.REFUSED  # offered again, for the write budget
        overdue = tuple(reply.overdue for reply in replies if reply.overdue is not None)
        return Saved(results.tobytes(), overdue, int(np.count_nonzero(written)))

    async def purge(self, label: bytes) -> int:
        """Remove all objects with a label from all stores; return their number.

        Raises:
            StoreError: a store was not purged; the others were.

        Cancellation: some objects may have been removed.
        """
        purges = [guard.purge(label) for guard in self._guards]
        results = await asyncio.gather(*purges, return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            raise errors[0]
        return sum(result for result in results if isinstance(result, int))

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order."""
        return [guard.statistics() for guard in self._guards]


class _Fetch:
    """Progress of one fetch.

    Attributes:
        overdue: operations that still access host blocks of the plan.
    """

    def __init__(
        self,
        guards: list[StoreGuard],
        plan: TransferPlan,
        keys: bytes,
        holders: NDArray[np.bool_],
        accesses: Accesses | None,
    ) -> None:
        self._guards = guards
        self._accesses = accesses
        self._plan = plan
        self._keys = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        self._left = holders  # [stores, N]: stores that were not asked for a block yet
        self._arrived = np.zeros(plan.num_blocks, np.bool_)
        self._end = plan.num_blocks  # the first block that no store can bring
        self._last: NDArray[np.uint8] = np.full(plan.num_blocks, Result.MISSING, np.uint8)
        self.overdue: list[asyncio.Task[Any]] = []

    def batches(self) -> list[tuple[int, NDArray[np.intp]]]:
        """Return for each store the blocks to be loaded from it next; empty at the end."""
        missing = ~self._arrived[: self._end]
        left = self._left[:, : self._end] & missing
        lost = missing & ~left.any(axis=0)
        if lost.any():  # blocks behind a missing one cannot be used
            self._end = int(lost.argmax())
            left = left[:, : self._end]
        if not left.any():
            return []
        first = np.where(left.any(axis=0), _first_holders(self._guards, left), -1)
        return [(i, np.flatnonzero(first == i)) for i in sorted(set(first.tolist())) if i >= 0]

    async def load(self, guard: int, indices: NDArray[np.intp]) -> StoreResults:
        """Load blocks from a store."""
        return await self._guards[guard].load(
            self._keys[indices].tobytes(),
            self._plan.target_ids[indices],
            self._plan.priority,
            self._accesses,
        )

    def note(self, guard: int, indices: NDArray[np.intp], reply: StoreResults) -> None:
        """Note the results of a batch."""
        self._last[indices] = reply.results
        self._left[guard, indices] = False
        arrived = reply.results == Result.DONE
        self._arrived[indices[arrived]] = True
        if reply.overdue is not None:  # until its end, no other store may write into these blocks
            self.overdue.append(reply.overdue)
            self._left[:, indices[~arrived]] = False

    def end(self) -> Fetched:
        """Return the result."""
        if self._end == self._plan.num_blocks:
            return Fetched(self._end)
        reason = f"block {self._end}: {Result(int(self._last[self._end])).name.lower()}"
        return Fetched(self._end, reason, tuple(self.overdue))


class _Lookups:
    """Answers of the latest lookups: which store has which key. A hint, for the fetches."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[bytes, NDArray[np.bool_]]] = OrderedDict()

    def remember(self, keys: bytes, holders: NDArray[np.bool_]) -> None:
        """Remember that store i has key n where ``holders[i, n]``."""
        first = keys[:KEY_BYTES]
        self._answers[first] = (keys, holders)
        self._answers.move_to_end(first)
        if len(self._answers) > REMEMBERED_LOOKUPS:
            self._answers.popitem(last=False)

    def holders(self, keys: bytes, reads: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the stores to be asked for keys, ``[stores, N]``.

        Args:
            keys: keys of the objects.
            reads: ``[stores]``, the stores to be asked where nothing is known.
        """
        holders = np.repeat(reads[:, None], len(keys) // KEY_BYTES, axis=1)
        known, found = self._find(keys[:KEY_BYTES])
        length = min(len(known), len(keys))
        if length and known[:length] == keys[:length]:
            num_known = length // KEY_BYTES
            holders[:, :num_known] = found[:, :num_known]
        return holders

    def _find(self, first: bytes) -> tuple[bytes, NDArray[np.bool_]]:
        """Return the answer from a key on; an empty one if no recent lookup had the key."""
        if first in self._answers:
            return self._answers[first]
        for keys, holders in islice(reversed(self._answers.values()), SEARCHED_LOOKUPS):
            offset = keys.find(first)
            if offset >= 0 and offset % KEY_BYTES == 0:
                return keys[offset:], holders[:, offset // KEY_BYTES :]
        return b"", np.zeros((0, 0), np.bool_)


class _Refused:
    """Blocks that a write budget has refused, and that other stores have. They are offered again,
    and not saved again to the other stores."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def skip(self, keys: bytes, admitted: NDArray[np.bool_], limited: NDArray[np.bool_]) -> None:
        """Clear in ``admitted``, ``[stores, N]``, what stores without a limit have already."""
        if self._keys:
            again = np.array([key in self._keys for key in split_keys(keys)], np.bool_)
            admitted &= limited[:, None] | ~again

    def note(self, keys: bytes, is_refused: NDArray[np.bool_], results: NDArray[np.uint8]) -> None:
        """Note the results of a save in the stores without a limit."""
        if not self._keys and not is_refused.any():
            return
        for i, key in enumerate(split_keys(keys)):
            if not is_refused[i]:
                self._keys.pop(key, None)
            elif results[i] == Result.DONE:
                self._keys[key] = None
        while len(self._keys) > REMEMBERED_REFUSALS:
            del self._keys[next(iter(self._keys))]


def _turn(use: StoreUse, *, is_prefix: bool) -> _Turn:
    """Return when a store is asked in a lookup."""
    if is_prefix and use.store.finds_prefixes:
        return _Turn.BY_PREFIX
    if use.store.max_lookup_keys > 0:
        return _Turn.SEARCHED
    return _Turn.REMOTE if use.missing_seconds else _Turn.LOCAL


def _first_holders(guards: Sequence[StoreGuard], holders: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return for each object the first store that has it; stores that are late come last.

    Args:
        guards: the stores, in order.
        holders: ``[stores, N]``, which store has which object.
    """
    order = np.array(sorted(range(len(guards)), key=lambda i: guards[i].is_late()), np.intp)
    first: NDArray[np.intp] = order[holders[order].argmax(axis=0)]
    return first


async def _save(
    guard: StoreGuard,
    keys: bytes,
    blocks: NDArray[np.int32],
    follows: NDArray[np.bool_],
    admitted: NDArray[np.bool_],
    accesses: Accesses | None,
    admitted_at: float,
) -> StoreResults:
    """Save the admitted blocks to a store; the others are ``REFUSED``."""
    results = np.full(len(blocks), Result.REFUSED, np.uint8)
    if not admitted.any():
        return StoreResults(results)
    follows = follows & np.concatenate(([False], admitted[:-1]))
    reply = await guard.save(
        selected(keys, admitted), blocks[admitted], accesses, follows[admitted], admitted_at
    )
    results[admitted] = reply.results
    return StoreResults(results, reply.overdue)


async def _all_of(calls: list[Any]) -> list[StoreResults]:
    """Await calls concurrently. A single call gets no task."""
    if len(calls) == 1:
        return [await calls[0]]
    return list(await asyncio.gather(*calls))
