"""RequestBlocks: the leases behind the requests of one scheduler, in few crossings."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiokv import Hit, LeaseState
from aiokv.base import checks
from aiokv.connectors.fastdeploy.batches import Batches
from aiokv.connectors.fastdeploy.commits import Commits
from aiokv.connectors.fastdeploy.handovers import Handovers
from aiokv.connectors.fastdeploy.holding import Holding
from aiokv.connectors.fastdeploy.holdings import Holdings
from aiokv.connectors.fastdeploy.looks import NO_LOOK, Looks
from aiokv.connectors.fastdeploy.requests import (
    UnknownRequest,
    items_of,
    log_unshared,
    prompt_length,
    tokens_of,
)
from aiokv.connectors.fastdeploy.room import Room
from aiokv.connectors.fastdeploy.steps import Steps
from aiokv.connectors.fastdeploy.taking import Taking
from aiokv.errors import (
    ClosedError,
    LeaseError,
    UsageError,
    WouldBlock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv import Item
    from aiokv.connectors.fastdeploy.handovers import LayerMark
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.sync import Calls, EngineFuture, SyncEngine, SyncLease

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
        self._lock = threading.RLock()
        self._holdings = Holdings(sizes)
        self.handovers = Handovers(engine, sizes.layer_ends, self._lock, self._holdings.by_id)
        self._steps = Steps(engine, step_event)
        self._room = Room(engine, self._steps, self._holdings, self.handovers)
        self._taking = Taking(engine, self._holdings, self._steps, self._room)
        self._commits = Commits(self._holdings, self.handovers, self._steps, self._room)
        self._looks = Looks(self._holdings, self._commits)
        self._batches = Batches(sizes.role)
        self._refused = ""  # id of the request that was just told to wait
        self._lacks_room = False  # whether the scheduler was told so about the matched request
        self._layer_marks: list[LayerMark] = []  # of the last batch

    def close(self) -> None:
        """Release everything that is held."""
        with self._lock:
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            self._holdings.record_release_of_all(calls)
            calls.run()

    # --- state ------------------------------------------------------------------------------------

    def holding(self, request_id: str) -> Holding | None:
        """Return the lease and blocks of a request; None if it has none."""
        return self._holdings.by_id.get(request_id)

    def note_resize(self, sizes: Sizes) -> None:
        """Take over new sizes, after the engine has changed its own."""
        with self._lock:
            self._holdings.sizes = sizes
            self._room.certain = 0

    @property
    def last_step(self) -> int:
        """Number of the last closed step."""
        return self._steps.last

    @property
    def free_device_blocks(self) -> int:
        """Number of empty device blocks, including those taken in advance. Does not cross."""
        with self._lock:
            # Calls of other threads to the engine can count blocks twice.
            free = self.engine.free_device_blocks + self._holdings.spare_blocks
            return min(free, self._holdings.sizes.device_blocks)

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
        holdings = self._holdings
        with self._lock:
            self._refused, self._lacks_room = "", False
            if onload and (parked := self._match_again(request)) is not None:
                return parked
            tokens, items = tokens_of(request), self._items_to_share(request)
            calls = self.engine.calls()
            self._record_end(calls, request.request_id)
            look = self._looks.record_once(calls)
            self._commits.record_batch(calls)
            holding = holdings.add(request, len(tokens), items)
            if not holding.shares_blocks:
                calls.run(raise_errors=False)
                self._looks.note(look)
                return holding
            holding.lease = holding.record_match(calls, tokens, read=True)
            granted = calls.add(self._room.grant, holding.lease, holding.prefill_tokens, onload)
            may_wait = self._steps.may_wait or not self._steps.has_changed
            self._steps.has_changed, self._steps.may_wait = True, False
            calls.run(raise_errors=False)
            self._looks.note(look)
            if granted.error is None:
                holding.hit, self._room.certain = granted.value
                saves_first = holdings.sizes.write_policy == "write_back"
                self._steps.may_wait = may_wait and not (saves_first or holding.hit.host_tokens)
                size = holdings.sizes.block_tokens
                holdings.read_table(holding, holding.hit.total // size)
                holding.scheduled_tokens = holding.committed_tokens = holding.given * size
                holdings.matched = holding
            elif _is_refusal(granted.error):  # the items were refused, for example
                log_unshared(request, granted.error)
                holding.shares_blocks = False
            else:
                del holdings.by_id[request.request_id]
                raise granted.error
            return holding

    def _match_again(self, request: Request) -> Holding | None:
        """Return the blocks of a request that the last batch had no room for, if no match is due.

        A match finds more when the block behind the cached prefix has been committed since.
        """
        holdings = self._holdings
        parked, by_id = holdings.parked, holdings.by_id
        if parked is None or parked.request is not request or request.request_id in by_id:
            return None
        num_tokens = prompt_length(request) + len(request.output_token_ids)
        if num_tokens != parked.prefill_tokens or any(
            running.committed_tokens <= parked.hit.total
            and len(running.request.output_token_ids) >= running.next_outputs
            for running in by_id.values()
        ):
            return None
        return holdings.unpark(parked)

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
            holding = self._holdings.onloading.pop(request.request_id, None)
            if holding is None:
                holding = self.match(request)
                lease = holding.lease
                if lease is None or not holding.table or lease.layers.has_arrived:
                    return holding, None
                holding.arrival = self.engine.submit(lease.inner.layers.wait_all)
                self._holdings.remove(request.request_id)
                return self._wait_for_onload(holding), holding.arrival
            if holding.arrival is None or not holding.arrival.done():
                return self._wait_for_onload(holding), None
            self._holdings.restore(holding)
            num_tokens = prompt_length(request) + len(request.output_token_ids)
            if holding.arrival.exception() is not None or num_tokens != holding.prefill_tokens:
                return self.match(request, onload=False), None
            self._holdings.matched = holding
            return holding, None

    def _wait_for_onload(self, holding: Holding) -> Holding:
        """Refuse a request until its onload has arrived; return an empty holding."""
        self._refused = holding.request.request_id
        self._holdings.onloading[self._refused] = holding
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
            self._commits.record_due(calls)
            self._holdings.record_parked(calls)
            self._steps.has_changed = True
            queued = sum(holding.queued_tokens for holding in self._holdings.by_id.values())
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
            matched = self._holdings.matched
            missing = num_blocks - (0 if matched is None else matched.spare)
            if missing > self._room.known and not self._taking.find(missing, matched):
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
            holding = self._holdings.by_id.get(request.request_id)
            if holding is not None and holding.has_failed and not holding.table:
                raise LeaseError(
                    f"request {request.request_id!r} has lost its blocks: the workers have freed "
                    "their tensors",
                    hint="preempt or abort the request",
                )
            if holding is None:
                items = self._items_to_share(request)
                holding = self._holdings.add(request, len(tokens_of(request)), items)
                if self._holdings.sizes.role == "decode":
                    holding.awaited_since = time.monotonic()
            holding.check_alignment()
            self._holdings.matched = None
            missing = num_blocks - holding.spare
            is_promised = num_blocks <= self._room.promised
            wait_seconds = PROMISE_SECONDS if is_promised else 0.0
            if missing > 0 and not self._taking.take(holding, missing, wait_seconds):
                if not is_promised:
                    return []
                raise WouldBlock(
                    f"request {request.request_id!r}: no room for {num_blocks} blocks after "
                    f"{wait_seconds} s",
                    hint="schedule the request again in the next step",
                )
            holding.is_scheduled = True
            holding.next_outputs = 0
            self._commits.add_to_batch(holding)
            self._room.promised = max(self._room.promised - num_blocks, 0)
            return self._holdings.give(holding, num_blocks)

    def allocate_unshared(self, request_id: str, num_blocks: int) -> list[int]:
        """Take blocks for a request whose tokens are not known; see ``allocate``."""
        with self._lock:
            holding = self._holdings.by_id.get(request_id)
            if holding is None:
                holding = self._holdings.add(UnknownRequest(request_id), 1, None)
            return self.allocate(holding.request, num_blocks)

    def give_back(self, request_id: str, block_ids: list[int]) -> None:
        """Give the last blocks of a request back, or all of them.

        Raises:
            UsageError: the ids are not the last blocks of the request. Nothing changed.
        """
        with self._lock:
            holding = self._holdings.by_id.get(request_id)
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
                calls.truncate(holding.lease, kept * self._holdings.sizes.block_tokens)
            self._steps.record_close(calls)
            calls.run()
            self._holdings.read_table(holding, kept)

    def holder(self, block_id: int) -> str | None:
        """Return the id of a request that has taken a block; None without one."""
        with self._lock:
            for request_id, holding in self._holdings.by_id.items():
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
            holdings = self._holdings
            holdings.stop_waiting(request_id)
            holding = holdings.by_id.get(request_id)
            if keep_seconds and holding is not None:
                holding.kept_until = time.monotonic() + keep_seconds
            calls = self.engine.calls()
            if holdings.parked is not None and holdings.parked.request.request_id == request_id:
                holdings.record_parked(calls)
            if self._lacks_room and holding is not None and holding is holdings.matched:
                self._park(calls, holding)
            else:
                self._record_end(calls, request_id)
            if len(calls):
                self._run(calls)

    def _park(self, calls: Calls, holding: Holding) -> None:
        """Keep the blocks of a request that the scheduler has no room for until the next batch."""
        if holding.hit.host_tokens:  # a later match may find the blocks that are arriving
            self._record_end(calls, holding.request.request_id)
        else:
            self._holdings.park(calls, holding, self._batches.count)

    def end_all(self) -> None:
        """Give all blocks of all requests back; nothing that is not shared yet stays cached."""
        with self._lock:
            self._room.forget()  # no grant is certain any more
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            self._holdings.record_release_of_all(calls)
            self._steps.record_close(calls)
            calls.run(raise_errors=False)

    def lose_all(self) -> None:
        """Take note that all device blocks are gone. Requests that had some must be matched again.

        Until then, ``allocate`` refuses them: their block tables name blocks of other requests.
        """
        with self._lock:
            self._room.forget()
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            self._holdings.record_loss(calls)
            calls.run(raise_errors=False)

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
            holdings, batches = self._holdings, self._batches
            holdings.matched = None
            batches.count += 1
            self._commits.end_batch()
            self._looks.end_batch()
            has_transfers = holdings.sizes.host_blocks > 0 or self.handovers.are_moving
            looks = self._looks.are_due
            waits = self._steps.may_wait and bool(holdings.prefilling)
            self._steps.may_wait = False
            has_changed = self._steps.is_held or (
                has_transfers and self._steps.has_changed and not waits
            )
            is_left = holdings.is_left(batches.count)
            is_due = looks or has_changed or is_left or self._room.is_reserved
            if not (is_due or holdings.prefilling or holdings.leaving):
                return self._steps.last
            calls = self.engine.calls()
            self._room.record_unreserve(calls)
            holdings.record_departures(calls)
            if is_left:
                holdings.record_parked(calls)
            due, look = holdings.pop_prefilling(), NO_LOOK
            if has_transfers:
                for holding in due:
                    self._commits.record(calls, holding)
            if looks or (has_transfers and (len(calls) or has_changed)):
                look = self._looks.record(calls)
                due = look.requests
            batches.note_first_tokens(due)
            if len(calls) or has_changed:
                batches.record_times(calls)
                self._steps.record_end(calls)
            announced = self.handovers.record_layers(calls, due)
            if len(calls):
                self._run(calls)  # blocks of the closed step may have to be saved first
            self._layer_marks = [
                mark for answer in announced if answer.error is None for mark in answer.value
            ]
            batches.note(due)
            self._looks.note(look)
            return self._steps.last

    def _run(self, calls: Calls) -> None:
        """Make calls, and ask for the room of a step in the same crossing."""
        room = self._room.record(calls, 0)
        calls.run(raise_errors=False)
        self._room.certain = 0 if room.error is not None else room.value

    @property
    def layer_marks(self) -> list[LayerMark]:
        """Marks of the layers that the batch of the last ``end_schedule`` computes."""
        return self._layer_marks

    def failed_requests(self) -> list[str]:
        """Return the ids of requests whose onloads have failed, in one crossing."""
        with self._lock:
            calls = self.engine.calls()
            leased = [holding for holding in self._holdings.by_id.values() if holding.table]
            states = [calls.add(_state, holding.lease) for holding in leased if holding.lease]
            calls.run(raise_errors=False)
            for holding, state in zip(leased, states, strict=True):
                if state.error is None and state.value is LeaseState.FAILED:
                    holding.has_failed = True
            by_id = self._holdings.by_id
            return [request_id for request_id, holding in by_id.items() if holding.has_failed]

    # --- recording of calls -----------------------------------------------------------------------

    def _items_to_share(self, request: Request) -> Sequence[Item] | None:
        """Return the items of a request; None when it shares no block.

        It raises nothing: call it before calls are recorded, which change the holdings.
        """
        if not self._holdings.sizes.shares_blocks:
            return None
        try:
            return items_of(request)
        except UsageError as error:
            log_unshared(request, error)
            return None

    def _record_end(self, calls: Calls, request_id: str) -> None:
        """Commit what a request has computed, and give its blocks back, if it has some."""
        holding = self._holdings.remove(request_id)
        if holding is None:
            return
        if holding.is_scheduled:
            self._commits.record(calls, holding)
        if not holding.has_arrived or holding.kept_until:
            # A release would cancel the onload. The workers may not have begun the batch that waits
            # for it, and other requests may have joined it.
            self._holdings.leave(holding)
        else:
            holding.record_release(calls)
        self._steps.record_close(calls)


def _is_refusal(error: BaseException) -> bool:
    """Return True if a prompt was refused for its contents."""
    cause = error.__cause__
    return isinstance(cause, UsageError) and not isinstance(cause, ClosedError)


def _state(lease: SyncLease) -> LeaseState:
    return lease.inner.state
