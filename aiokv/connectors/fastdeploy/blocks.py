"""RequestBlocks: the leases behind the requests of one scheduler, in few crossings."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiokv import Hit, LeaseState
from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.connectors.fastdeploy.handovers import Handovers
from aiokv.connectors.fastdeploy.holding import Holding
from aiokv.connectors.fastdeploy.requests import (
    UnknownRequest,
    items_of,
    prompt_length,
    tokens_of,
)
from aiokv.connectors.fastdeploy.room import Room
from aiokv.connectors.fastdeploy.steps import Steps
from aiokv.connectors.prefills import PrefillClock
from aiokv.errors import (
    AiokvError,
    ClosedError,
    LeaseError,
    RequestTooLarge,
    TransferError,
    UsageError,
    WouldBlock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import Item
    from aiokv.connectors.fastdeploy.handovers import LayerMark
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.sync import Answer, Calls, EngineFuture, SyncEngine, SyncLease

log = Log(__name__)

PROMISE_SECONDS: Final = 10.0  # wait for blocks that `can_allocate` has promised


class RequestBlocks:
    """Leases of the requests of one scheduler, by request id. Any thread.

    Blocks that the workers compute become shareable when the batch after theirs is scheduled: all
    batches go through the workers in order, so a request that finds a block computes after it. With
    ``Sizes.shares_in_batch``, later requests of the same batch find them, too. The workers close
    the open step before they compute this batch, so such blocks belong to the step after it, and
    only ``end_schedule`` closes the open step after such a commit::

        schedule() of batch n    match, commit in the next step, match    end: close step s
        workers                  close s | compute batch n | close s + 1 with batch n + 1

    Args:
        engine: the cache; it is open.
        sizes: settings of the scheduler.
        step_event: returns an event behind all work that the runner has submitted, or None when all
            of it has finished; None with ranks, which close steps themselves.

    Attributes:
        engine: the cache.
        handovers: prompts that move between servers.
    """

    def __init__(
        self,
        engine: SyncEngine,
        sizes: Sizes,
        step_event: Callable[[], Any] | None = None,
    ) -> None:
        self.engine = engine
        self._sizes = sizes
        self._block_tokens = sizes.block_tokens
        self._lock = threading.RLock()
        self._holdings: dict[str, Holding] = {}
        self._leaving: list[Holding] = []  # ended requests with onloads in flight
        self._onloading: dict[str, Holding] = {}  # requests that wait for their onloads
        self._refused = ""  # id of the request that was just told to wait
        self._has_committed = False  # True after a commit, until the next batch is scheduled
        self._schedules = 0  # number of batches since the last look at all requests
        self._prefilling: list[Holding] = []  # requests to look at after each batch
        self._prefill_times: list[tuple[int, float]] = []  # to tell the engine in a crossing
        self._spare = 0  # sum of the spare blocks of `_holdings` and `_parked`
        self._matched: Holding | None = None  # request of the last match, until blocks are taken
        self._lacks_room = False  # whether the scheduler was told so about `_matched`
        self._parked: Holding | None = None  # request that was matched and found no room
        self._parked_in = 0  # number of batches at that time
        self._batched: list[Holding] = []  # requests with blocks for the batch being scheduled
        self._batch = 0  # number of batches
        self._prefills = PrefillClock()
        self.handovers = Handovers(engine, sizes.layer_ends, self._lock, self._holdings)
        self._steps = Steps(engine, step_event)
        self._room = Room(engine, sizes, self._steps, self._holdings, self.handovers)
        self._layer_marks: list[LayerMark] = []  # of the last batch

    def close(self) -> None:
        """Release everything that is held."""
        with self._lock:
            calls = self.engine.calls()
            self._record_release_of_all(calls)
            calls.run()

    # --- state ------------------------------------------------------------------------------------

    def holding(self, request_id: str) -> Holding | None:
        """Return the lease and blocks of a request; None if it has none."""
        return self._holdings.get(request_id)

    def note_resize(self, sizes: Sizes) -> None:
        """Take over new sizes, after the engine has changed its own."""
        with self._lock:
            self._sizes = sizes
            self._room.note_resize(sizes)

    @property
    def last_step(self) -> int:
        """Number of the last closed step."""
        return self._steps.last

    @property
    def free_device_blocks(self) -> int:
        """Number of empty device blocks, including those taken in advance. Does not cross."""
        with self._lock:
            # Calls of other threads to the engine can count blocks twice.
            return min(self.engine.free_device_blocks + self._spare, self._sizes.device_blocks)

    @property
    def has_copies(self) -> bool:
        """True if blocks are being copied, sent or received, or wait for it. Does not cross."""
        counts = self.engine.cache_statistics().attention
        return counts.device.in_flight + counts.host.in_flight > 0 or self.handovers.are_moving

    # --- verbs of requests ------------------------------------------------------------------------

    def match(self, request: Request, *, onload: bool = True) -> Holding:
        """Match the tokens of a request, and grant the cached prefix, in one crossing.

        Onloads of blocks in host memory begin. Without room for these, only the prefix on the
        device is granted. What the request held before is given back.

        Args:
            request: the scheduler's object.
            onload: False to grant only the prefix on the device.
        """
        with self._lock:
            self._refused, self._lacks_room = "", False
            if onload and (parked := self._match_again(request)) is not None:
                return parked
            tokens, items = tokens_of(request), self._items_to_share(request)
            calls = self.engine.calls()
            self._record_end(calls, request.request_id)
            looked: list[Holding] = []
            if not self._has_committed:  # once per `schedule()`
                self._has_committed = True
                looked = self._record_commits(calls)
                self._schedules = 0
            ahead = [running for running in looked if self._needs_blocks(running)]
            extended = self._record_ahead(calls, ahead)
            if self._sizes.shares_in_batch:
                self._record_batch(calls)
            holding = self._hold(request, len(tokens), items)
            if not holding.shares_blocks:
                calls.run(raise_errors=False)
                self._note_looks(looked, ahead, extended)
                return holding
            holding.lease = self._match(calls, holding, tokens, read=True)
            granted = calls.add(self._room.grant, holding.lease, holding.prefill_tokens, onload)
            may_wait = self._steps.may_wait or not self._steps.has_changed
            self._steps.has_changed, self._steps.may_wait = True, False
            calls.run(raise_errors=False)
            self._note_looks(looked, ahead, extended)
            if granted.error is None:
                holding.hit, self._room.certain = granted.value
                saves_first = self._sizes.write_policy == "write_back"
                self._steps.may_wait = may_wait and not (saves_first or holding.hit.host_tokens)
                self._read_table(holding, holding.hit.total // self._block_tokens)
                cached = holding.given * self._block_tokens
                holding.scheduled_tokens = holding.committed_tokens = cached
                self._matched = holding
            elif _is_refusal(granted.error):  # the items were refused, for example
                _log_unshared(request, granted.error)
                holding.shares_blocks = False
            else:
                del self._holdings[request.request_id]
                raise granted.error
            return holding

    def _match_again(self, request: Request) -> Holding | None:
        """Return the blocks of a request that the last batch had no room for, if no match is due.

        A match finds more when the block behind the cached prefix has been committed since.
        """
        parked = self._parked
        if parked is None or parked.request is not request or request.request_id in self._holdings:
            return None
        cached = parked.hit.total
        if prompt_length(request) + len(request.output_token_ids) != parked.prefill_tokens or any(
            running.committed_tokens <= cached
            and len(running.request.output_token_ids) >= running.next_outputs
            for running in self._holdings.values()
        ):
            return None
        self._holdings[request.request_id] = self._matched = parked
        self._parked = None
        self._prefilling.append(parked)
        return parked

    def match_arrived(self, request: Request) -> tuple[Holding, EngineFuture[None] | None]:
        """Match a request that is scheduled when its blocks have arrived from host memory.

        Until then, the request holds nothing for the scheduler: ``can_allocate`` says no, and the
        scheduler gives the request back, which keeps the onload. A later call finds the onload.
        When it has failed, only the blocks on the device are granted.

        Returns:
            The holding, which is empty while the request waits; and a future of the onload, when
            the call has begun one.
        """
        with self._lock:
            self._refused, self._lacks_room = "", False
            request_id = request.request_id
            holding = self._onloading.pop(request_id, None)
            if holding is None:
                holding = self.match(request)
                lease = holding.lease
                if lease is None or not holding.table or lease.layers.has_arrived:
                    return holding, None
                self._drop(request_id)
                holding.arrival = self.engine.submit(lease.inner.layers.wait_all)
                return self._wait_for_onload(holding), holding.arrival
            if holding.arrival is None or not holding.arrival.done():
                return self._wait_for_onload(holding), None
            self._holdings[request_id] = holding
            self._spare += holding.spare
            num_tokens = prompt_length(request) + len(request.output_token_ids)
            if holding.arrival.exception() is not None or num_tokens != holding.prefill_tokens:
                return self.match(request, onload=False), None
            self._prefilling.append(holding)
            self._matched = holding
            return holding, None

    def _wait_for_onload(self, holding: Holding) -> Holding:
        """Refuse a request until its onload has arrived; return an empty holding."""
        self._refused = holding.request.request_id
        self._onloading[self._refused] = holding
        return Holding(holding.request, holding.prefill_tokens, None)

    def fetch(self, request: Request, seconds: float) -> EngineFuture[Hit] | None:
        """Begin to bring blocks of a request from the stores to host memory; does not wait.

        Args:
            request: the scheduler's object; it waits until the fetch has ended.
            seconds: limit of the wait.

        Returns:
            A future of the cached prefix by tier; None if the request shares no block.
        """
        tokens, items = tokens_of(request), self._items_to_share(request)
        if items is None:
            return None
        with self._lock:
            calls = self.engine.calls()
            self._record_commits(calls)
            self._record_parked(calls)
            self._steps.has_changed = True
            queued = sum(holding.queued_tokens for holding in self._holdings.values())
            prefetch = partial(
                self.engine.cache.prefetch,
                tokens,
                items=items,
                timeout=seconds,
                tier="host",
                queued_tokens=queued,
            )
            fetch = calls.begin(prefetch)
            self._run(calls)
            return fetch

    def can_allocate(self, num_blocks: int) -> bool:
        """Return True if ``num_blocks`` blocks can be allocated; the answer is exact.

        Blocks that must be saved before they are evicted do not count: the call begins to save
        them, for a later call.
        """
        num_blocks = max(checks.integer("num_blocks", num_blocks), 0)
        with self._lock:
            if self._refused:
                return False
            spare = 0 if self._matched is None else self._matched.spare
            missing = num_blocks - spare
            if missing > self._room.known and not self._find_room(missing, self._matched):
                self._lacks_room = True
                return False
            return self._room.promise(num_blocks, missing)

    def allocate(self, request: Request, num_blocks: int) -> list[int]:
        """Take blocks for the next positions of a request.

        Returns:
            Their ids; empty without room, and for 0 or fewer blocks.

        Raises:
            WouldBlock: without room, although ``can_allocate`` has just promised it: other code
                that uses the engine took the blocks, and gave none back within 10 s.
            LeaseError: the blocks of the request are gone. Nothing changed.
        """
        num_blocks = max(checks.integer("num_blocks", num_blocks), 0)
        with self._lock:
            holding = self._holdings.get(request.request_id)
            if holding is not None and holding.has_failed and not holding.table:
                raise LeaseError(
                    f"request {request.request_id!r} has lost its blocks: the workers have freed "
                    "their tensors",
                    hint="preempt or abort the request",
                )
            if holding is None:
                items = self._items_to_share(request)
                holding = self._hold(request, len(tokens_of(request)), items)
                if self._sizes.role == "decode":
                    holding.awaited_since = time.monotonic()
            holding.check_alignment()
            self._matched = None
            missing = num_blocks - holding.spare
            is_promised = num_blocks <= self._room.promised
            wait_seconds = PROMISE_SECONDS if is_promised else 0.0
            if missing > 0 and not self._take(holding, missing, wait_seconds):
                if not is_promised:
                    return []
                raise WouldBlock(
                    f"request {request.request_id!r}: no room for {num_blocks} blocks after "
                    f"{wait_seconds} s",
                    hint="schedule the request again in the next step",
                )
            first = holding.given
            holding.given += num_blocks
            self._spare -= num_blocks
            holding.is_scheduled = True
            if self._sizes.shares_in_batch:
                self._batched.append(holding)
            holding.next_outputs = 0
            self._room.promised = max(self._room.promised - num_blocks, 0)
            return holding.table[first : holding.given]

    def allocate_unshared(self, request_id: str, num_blocks: int) -> list[int]:
        """Take blocks for a request whose tokens are not known; see ``allocate``."""
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None:
                request = UnknownRequest(request_id)
                holding = Holding(request, 1, None)
                self._holdings[request_id] = holding
                self._prefilling.append(holding)
            return self.allocate(holding.request, num_blocks)

    def give_back(self, request_id: str, block_ids: list[int]) -> None:
        """Give the last blocks of a request back, or all of them.

        Raises:
            UsageError: the ids are not the last blocks of the request. Nothing changed.
        """
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None or not block_ids:
                return  # `end` has given the blocks back meanwhile
            kept = holding.given - len(block_ids)
            given = holding.table[: holding.given]
            if sorted(given[max(kept, 0) :]) != sorted(block_ids):
                raise UsageError(
                    f"request {request_id!r} cannot give blocks {block_ids} back: its blocks are "
                    f"{given}",
                    hint="give back its last blocks, or all of them",
                )
            if not kept:
                self.end(request_id)
                return
            calls = self.engine.calls()
            if holding.lease is not None:
                calls.truncate(holding.lease, kept * self._block_tokens)
            self._steps.record_close(calls)
            calls.run()
            self._read_table(holding, kept)

    def holder(self, block_id: int) -> str | None:
        """Return the id of a request that has taken a block; None without one."""
        with self._lock:
            for request_id, holding in self._holdings.items():
                if block_id in holding.table[: holding.given]:
                    return request_id
            return None

    def end(
        self, request_id: str, *, keep_seconds: float = 0.0, is_preempted: bool = False
    ) -> None:
        """Commit the computed positions, and give back all blocks. Idempotent.

        Full blocks of known tokens stay cached. A request that was matched and then found no room
        keeps its blocks until the end of the next batch, in which FastDeploy matches it again, or
        until they are needed.

        Args:
            request_id: as given by the scheduler.
            keep_seconds: how long no other request may write the blocks, which are being sent.
            is_preempted: True if the request goes on later; the outcome of its send is kept.
        """
        with self._lock:
            if is_preempted:
                self.handovers.preempt(request_id)
            else:
                self.handovers.forget(request_id)
            if request_id == self._refused:
                self._refused = ""  # the scheduler will match the request again
                return
            if (holding := self._onloading.pop(request_id, None)) is not None:
                self._leaving.append(holding)
            holding = self._holdings.get(request_id)
            if keep_seconds and holding is not None:
                holding.kept_until = time.monotonic() + keep_seconds
            calls = self.engine.calls()
            if self._parked is not None and self._parked.request.request_id == request_id:
                self._record_parked(calls)
            if self._lacks_room and holding is self._matched is not None:
                self._park(calls, self._matched)
            else:
                self._record_end(calls, request_id)
            if len(calls):
                self._run(calls)

    def _park(self, calls: Calls, holding: Holding) -> None:
        """Keep the blocks of a request that the scheduler has no room for until the next batch."""
        if holding.hit.host_tokens:  # a later match may find the blocks that are arriving
            self._record_end(calls, holding.request.request_id)
            return
        self._record_parked(calls)
        self._drop(holding.request.request_id)
        self._parked, self._parked_in = holding, self._batch
        self._spare += holding.spare

    def end_all(self) -> None:
        """Give all blocks of all requests back; nothing that is not shared yet stays cached."""
        with self._lock:
            self._room.forget()  # no grant is certain any more
            calls = self.engine.calls()
            self._record_release_of_all(calls)
            self._steps.record_close(calls)
            calls.run(raise_errors=False)

    def lose_all(self) -> None:
        """Take note that all device blocks are gone. Requests that had some must be matched again.

        Until then, ``allocate`` refuses them: their block tables name blocks of other requests.
        """
        with self._lock:
            self._room.forget()
            self._spare = 0
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            for holding in self._all_holdings():
                _release(calls, holding)
                holding.has_failed = holding.has_failed or bool(holding.table)
                holding.lease, holding.table, holding.given = None, [], 0
            calls.run(raise_errors=False)
            self._leaving.clear()
            self._onloading.clear()
            self._parked = None

    def close_step(self) -> None:
        """Close the open step, so that the next ``end_schedule`` returns it or a later one."""
        with self._lock:
            calls = self.engine.calls()
            self._steps.record_close(calls)
            calls.run()

    def end_schedule(self) -> int:
        """Note that a batch has been scheduled, in one crossing or none.

        Looks at the requests in prefill each time, and at all of them every few batches: commits
        what earlier batches compute, takes blocks ahead for requests that need some soon, asks for
        the room of the next step, and closes the step. The first match of a ``schedule()`` does the
        first two in its own crossing. Without a host tier, no transfer waits for the end of a step,
        so that it may end later. A batch with new requests leaves the step open, unless an onload
        waits: the next batch commits their prompts, and closes it in the same crossing.

        Returns:
            Number of the step that the workers close before they compute the batch.
        """
        with self._lock:
            self._room.promised, self._refused = 0, ""
            self._layer_marks = []
            self._batched.clear()
            self._matched = None
            self._batch += 1
            self._schedules += 1
            has_transfers = self._sizes.host_blocks > 0 or self.handovers.are_moving
            looks = self._schedules >= self._sizes.look_schedules and bool(self._holdings)
            waits = self._steps.may_wait and bool(self._prefilling)
            self._steps.may_wait = False
            has_changed = self._steps.is_held or (
                has_transfers and self._steps.has_changed and not waits
            )
            is_left = self._parked is not None and self._parked_in + 1 < self._batch
            is_due = looks or has_changed or is_left or self._room.is_reserved
            if not (is_due or self._prefilling or self._leaving):
                self._has_committed = False
                return self._steps.last
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            self._record_departures(calls)
            if is_left:
                self._record_parked(calls)
            due = self._prefilling = [
                holding
                for holding in self._prefilling
                if holding.is_prefilling
                and self._holdings.get(holding.request.request_id) is holding
            ]
            if has_transfers:
                for holding in due:
                    self._record_commit(calls, holding)
            looked: list[Holding] = []
            if looks or (has_transfers and (len(calls) or has_changed)):
                looked = due = self._record_commits(calls)
                self._schedules = 0
            self._note_prefill(due)
            ahead = [holding for holding in looked if self._needs_blocks(holding)]
            extended = self._record_ahead(calls, ahead)
            if len(calls) or has_changed:
                self._record_end_of_step(calls)
            announced = self.handovers.record_layers(calls, due)
            if len(calls):
                self._run(calls)  # blocks of the closed step may have to be saved first
            self._layer_marks = [
                mark for answer in announced if answer.error is None for mark in answer.value
            ]
            self._has_committed = False
            self._note_batch(due)
            self._note_looks(looked, ahead, extended)
            return self._steps.last

    def _record_ahead(self, calls: Calls, ahead: list[Holding]) -> Answer[Any] | None:
        """Take the next blocks of requests that decode."""
        leases = [holding.lease for holding in ahead if holding.lease is not None]
        if not leases:
            return None
        return calls.extend(leases, self._sizes.decode_blocks * self._block_tokens)

    def _note_looks(
        self, looked: list[Holding], ahead: list[Holding], extended: Answer[Any] | None
    ) -> None:
        """Note which requests were looked at, and the blocks that were taken ahead for some."""
        if extended is not None and extended.error is None:
            for holding in ahead:
                self._read_table(holding, holding.given)
        for holding in looked:
            holding.note_looked(self._sizes)

    def _record_end_of_step(self, calls: Calls) -> None:
        for measured in self._prefill_times:
            calls.note_prefill(*measured)
        self._prefill_times.clear()
        self._steps.record_end(calls)

    def _run(self, calls: Calls) -> None:
        """Make calls, and ask for the room of a step in the same crossing."""
        room = self._room.record(calls, 0)
        calls.run(raise_errors=False)
        self._room.certain = 0 if room.error is not None else room.value

    def _note_batch(self, due: list[Holding]) -> None:
        """Note which positions the scheduled batch computes, for later commits and for its time."""
        num_tokens, waits = 0, False
        for holding in due:
            if self._sizes.role == "decode":  # another server computes the prompts
                if len(holding.request.output_token_ids) > holding.base_outputs:
                    holding.scheduled_tokens, holding.awaited_since = holding.prefill_tokens, 0.0
                continue
            end = holding.batch_end
            if end > holding.scheduled_tokens:
                num_tokens += end - holding.scheduled_tokens
                waits = waits or not holding.has_arrived
                holding.scheduled_tokens, holding.last_batch = end, self._batch
        if not waits:
            self._prefills.begin(self._batch, num_tokens)

    def _note_prefill(self, due: list[Holding]) -> None:
        """Note how long the batches took whose requests have their first tokens."""
        ended = 0
        for holding in due:
            if holding.last_batch and len(holding.request.output_token_ids) > holding.base_outputs:
                ended, holding.last_batch = max(ended, holding.last_batch), 0
        measured = self._prefills.end(ended) if ended else None
        if measured is not None:
            self._prefill_times.append(measured)

    @property
    def layer_marks(self) -> list[LayerMark]:
        """Marks of the layers that the batch of the last ``end_schedule`` computes."""
        return self._layer_marks

    def failed_requests(self) -> list[str]:
        """Return the ids of requests whose onloads have failed, in one crossing."""
        with self._lock:
            calls = self.engine.calls()
            leased = [holding for holding in self._holdings.values() if holding.table]
            states = [calls.add(_state, holding.lease) for holding in leased if holding.lease]
            calls.run(raise_errors=False)
            for holding, state in zip(leased, states, strict=True):
                if state.error is None and state.value is LeaseState.FAILED:
                    holding.has_failed = True
            return [
                request_id for request_id, holding in self._holdings.items() if holding.has_failed
            ]

    # --- recording of calls -----------------------------------------------------------------------

    def _items_to_share(self, request: Request) -> Sequence[Item] | None:
        """Return the items of a request; None when it shares no block.

        It raises nothing: call it before calls are recorded, which change the holdings.
        """
        if not self._sizes.shares_blocks:
            return None
        try:
            return items_of(request)
        except UsageError as error:
            _log_unshared(request, error)
            return None

    def _hold(self, request: Request, num_tokens: int, items: Sequence[Item] | None) -> Holding:
        holding = Holding(request, num_tokens, items)
        self._holdings[request.request_id] = holding
        self._prefilling.append(holding)
        return holding

    def _match(
        self, calls: Calls, holding: Holding, tokens: NDArray[np.int32], *, read: bool
    ) -> SyncLease:
        shares = holding.shares_blocks
        return calls.match(
            tokens,
            items=holding.items if shares else (),
            owner=holding.request.request_id,
            read=read and shares,
            write=shares,
        )

    def _record_commits(self, calls: Calls) -> list[Holding]:
        """Commit the computed blocks of all requests; return those that had to be looked at."""
        due = [
            holding
            for holding in self._holdings.values()
            if len(holding.request.output_token_ids) >= holding.next_outputs
        ]
        for holding in due:
            self._record_commit(calls, holding)
        return due

    def _record_batch(self, calls: Calls) -> None:
        """Commit the blocks of the prompts that the batch being scheduled computes."""
        for holding in self._batched:
            if self._holdings.get(holding.request.request_id) is holding:
                self._record_commit(calls, holding, in_batch=True)

    def _record_commit(self, calls: Calls, holding: Holding, *, in_batch: bool = False) -> None:
        """Commit the full blocks that are computed and not committed yet.

        Args:
            calls: gets the calls.
            holding: the request.
            in_batch: True for blocks that the batch being scheduled computes.
        """
        lease = holding.lease
        is_sent = self.handovers.is_sent(holding.request.request_id)
        if lease is None or not holding.table or not (holding.shares_blocks or is_sent):
            return
        holding.check_alignment()
        usable = len(holding.table) if holding.usable_blocks is None else holding.usable_blocks
        size = self._block_tokens
        computed = (
            holding.batch_end if in_batch else holding.computed_tokens(self._sizes.tail_tokens)
        )
        computed = min(computed, usable * size)
        if not self._sizes.shares_outputs:
            computed = min(computed, holding.prefill_tokens)
        if not (is_sent and computed == holding.prefill_tokens):
            computed -= computed % size
        if computed <= holding.committed_tokens:
            return
        if self._parked and holding.committed_tokens <= self._parked.hit.total < computed:
            self._record_parked(calls)  # a match may find more
        if computed > holding.named_tokens:
            outputs = holding.request.output_token_ids
            first = holding.named_tokens - prompt_length(holding.request)
            tokens = outputs[first : first + computed - holding.named_tokens]
            holding.named_tokens = computed
            calls.add(_append_and_commit, holding, lease, tokens, computed)
        elif in_batch:
            calls.commit(lease, computed, in_next_step=True)
            self._steps.is_held = True
        else:
            calls.commit(lease, computed)
        holding.committed_tokens = computed
        self._room.certain = 0  # unknown: the blocks before a committed one cannot be evicted

    def _drop(self, request_id: str) -> Holding | None:
        """Forget the holding of a request, and return it."""
        holding = self._holdings.pop(request_id, None)
        if holding is not None:
            self._spare -= holding.spare
            if holding is self._matched:
                self._matched = None
        return holding

    def _record_parked(self, calls: Calls) -> None:
        """Give back the blocks of the request that the last batch had no room for."""
        parked, self._parked = self._parked, None
        if parked is not None:
            self._spare -= parked.spare
            _release(calls, parked)  # no batch has used its blocks: the step may stay open

    def _record_end(self, calls: Calls, request_id: str) -> bool:
        holding = self._drop(request_id)
        if holding is None:
            return False
        if holding.is_scheduled:
            self._record_commit(calls, holding)
        if not holding.has_arrived or holding.kept_until:
            # A release would cancel the onload. The workers may not have begun the batch that waits
            # for it, and other requests may have joined it.
            self._leaving.append(holding)
        else:
            _release(calls, holding)
        self._steps.record_close(calls)
        return True

    def _record_release_of_all(self, calls: Calls) -> None:
        self._room.record_unreserve(calls)
        for holding in self._all_holdings():
            _release(calls, holding)
        self._holdings.clear()
        self._spare, self._parked = 0, None
        self._leaving.clear()
        self._onloading.clear()

    def _all_holdings(self) -> list[Holding]:
        parked = [] if self._parked is None else [self._parked]
        return [*self._holdings.values(), *self._leaving, *self._onloading.values(), *parked]

    def _record_departures(self, calls: Calls) -> bool:
        """Release requests that have ended, and whose onloads have arrived since."""
        now = time.monotonic()
        arrived = [
            holding
            for holding in self._leaving
            if holding.has_arrived and holding.kept_until <= now
        ]
        for holding in arrived:
            _release(calls, holding)
            self._leaving.remove(holding)
        return bool(arrived)

    # --- room -------------------------------------------------------------------------------------

    def _needs_blocks(self, holding: Holding) -> bool:
        """Return True for a request that decodes and whose next blocks are due."""
        if not self._sizes.decode_blocks or holding.spare or holding.usable_blocks is not None:
            return False
        outputs = len(holding.request.output_token_ids)
        total = prompt_length(holding.request) + outputs
        left = holding.given * self._block_tokens - total
        return outputs > holding.base_outputs and left <= self._sizes.decode_slots

    def _take(self, holding: Holding, num_blocks: int, wait_seconds: float) -> bool:
        """Append blocks to the lease of a request, for which the engine may have to save others."""
        if num_blocks > self._sizes.device_blocks:
            return False
        return self._extend(holding, num_blocks) or (
            self._find_room(num_blocks, holding, wait_seconds) and self._extend(holding, num_blocks)
        )

    def _extend(self, holding: Holding, num_blocks: int) -> bool:
        """Append blocks to the lease of a request; return False without room."""
        num_tokens = num_blocks * self._block_tokens
        calls = self.engine.calls()
        self._room.record_unreserve(calls)
        if holding.table and holding.lease is not None:
            answer: Answer[Any] = calls.extend([holding.lease], num_tokens)
        else:
            if holding.lease is not None:  # a grant without a hit; it is too late for a later hit
                calls.release(holding.lease)
            tokens = tokens_of(holding.request)[: holding.prefill_tokens]
            holding.lease = self._match(calls, holding, tokens, read=False)
            answer = calls.try_allocate(holding.lease, num_tokens)
        calls.run(raise_errors=False)
        if isinstance(answer.error, WouldBlock | RequestTooLarge) or answer.value is False:
            return False
        self._read_table(holding, holding.given)
        self._steps.has_changed = True
        self._room.certain = max(self._room.certain - num_blocks, 0)
        return True

    def _read_table(self, holding: Holding, given: int) -> None:
        """Read the blocks of a lease, of which the scheduler has the first ``given``."""
        before = holding.spare
        holding.next_outputs, holding.given = 0, given
        if holding.lease is not None:
            holding.table = holding.lease.block_table.tolist()
        self._spare += holding.spare - before

    def _find_room(self, num_blocks: int, user: Holding | None, wait_seconds: float = 0.0) -> bool:
        """Ask the engine for room; take spare blocks back, and begin saves, if that helps.

        Args:
            num_blocks: number of blocks.
            user: the request that needs them, and keeps its spare blocks.
            wait_seconds: how long to wait for copies of blocks.
        """
        empty = self.engine.free_device_blocks + self.engine.evictable_device_blocks
        empty += self._room.reserved_blocks
        held = self._spare - (0 if user is None else user.spare)
        held += 0 if self._parked is None else self._parked.given
        leaving = sum(len(left.table) for left in (*self._leaving, *self._onloading.values()))
        if empty + held + leaving < num_blocks:
            return False  # no crossing
        if self._room.has(num_blocks):
            return True
        if held:
            spares = [
                other for other in self._holdings.values() if other.spare and other is not user
            ]
            calls = self.engine.calls()
            self._record_parked(calls)
            for holding in spares:
                if holding.lease is not None:
                    calls.truncate(holding.lease, holding.given * self._block_tokens)
            self._steps.record_close(calls)
            calls.run(raise_errors=False)
            for holding in spares:
                self._read_table(holding, holding.given)
            if self._room.has(num_blocks):
                return True
        if self._wait_for_departures(wait_seconds) and self._room.has(num_blocks):
            return True
        if self.engine.free_device_blocks + self.engine.evictable_device_blocks < num_blocks:
            return False
        return self._room.make(num_blocks, wait_seconds)

    def _wait_for_departures(self, wait_seconds: float) -> bool:
        """Release ended requests when their onloads have arrived; return True if there are any.

        Requests that wait in the scheduler's queue lose the blocks that have arrived for them.
        """
        for request_id, holding in list(self._onloading.items()):
            if holding.has_arrived:
                self._leaving.append(self._onloading.pop(request_id))
        if not self._leaving:
            return False
        deadline = time.monotonic() + wait_seconds
        for holding in self._leaving if wait_seconds else ():
            if holding.lease is not None:
                with suppress(TransferError, TimeoutError):
                    left = deadline - time.monotonic()
                    holding.lease.layers.wait_all(max(left, 0.0))
        calls = self.engine.calls()
        has_departed = self._record_departures(calls)
        self._steps.record_close(calls)
        calls.run()
        return has_departed


def _release(calls: Calls, holding: Holding) -> None:
    if holding.lease is not None:
        calls.release(holding.lease)


def _append_and_commit(
    holding: Holding, lease: SyncLease, tokens: list[int], computed: int
) -> None:
    """Name generated tokens, and commit. If they are refused, the request shares no further block.

    Tokens that come later would be named at the positions of the refused ones. On the loop.
    """
    try:
        lease.inner.append(tokens)
    except AiokvError as error:
        _log_unshared(holding.request, error)
        holding.shares_blocks = False
    lease.inner.commit(computed)


def _log_unshared(request: Request, error: BaseException) -> None:
    log.warning("fastdeploy.request_not_shared", request_id=request.request_id, reason=str(error))


def _is_refusal(error: BaseException) -> bool:
    """Return True if a prompt was refused for its contents."""
    cause = error.__cause__
    return isinstance(cause, UsageError) and not isinstance(cause, ClosedError)


def _state(lease: SyncLease) -> LeaseState:
    return lease.inner.state
