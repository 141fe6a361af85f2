"""Observers: records of transfers, phases of leases and batches, while an observer is registered.

    hooks of the engine's parts ─► record ─► (end of the pass of the loop) ─► observers

Callers of a hook test ``Observers.active`` first: without an observer, an engine tests that boolean
and allocates nothing. Records reach the observers in a callback of the loop, outside all
transitions, so an observer cannot affect the call that it observes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from aiokv.base.plan import Outcome, RouteName  # noqa: TC001 - msgspec reads the annotations
from aiokv.base.types import lease_name
from aiokv.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextvars import Context

    from aiokv.base.plan import TransferPlan
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.scheduler.reader import CacheReader
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.poller import EventPoller

WaitName = Literal["pending", "store", "capacity", "peer"]
PhaseName = Literal["pending", "store", "capacity", "peer", "onload", "granted"]
End = Literal[
    "done",
    "timeout",
    "cancelled",
    "failed",
    "released",
    "preempted",
    "swapped",
    "lost",
    "closed",
    "open",
]


class TransferSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer from its submission to its end.

    Times are those of ``time.monotonic()``, in seconds.

    Attributes:
        transfer_id: number of the transfer in its engine.
        route: ``"onload"``, ``"offload"``, ``"clone"``, ``"fetch"``, ``"save"``, ``"receive"`` or
            ``"send"``.
        group: group of the blocks: ``"attention"``, ``"state"``, or a name in
            ``CacheConfig.windows``.
        blocks: number of blocks (or state slots) of the plan.
        num_bytes: bytes of the plan, over all ranks; 0 without tensors.
        queued_at: when the engine submitted the plan to the worker.
        started_at: when the device, the stores or the peer began with it, or when it was sent to
            the ranks; None before, and if none of them did.
        ended_at: when its last byte had arrived, or it failed; now while ``outcome`` is "open".
        outcome: ``"done"``, ``"failed"``, ``"cancelled"``, or ``"open"`` while it is in flight.
        reason: text of the first failure; empty without one.
        lease_id: lease whose grant, fetch, swap, receive or send began it; 0 for all others, such
            as copies to host memory.
    """

    transfer_id: int
    route: RouteName
    group: str
    blocks: int
    num_bytes: int
    queued_at: float
    started_at: float | None
    ended_at: float
    outcome: Outcome | Literal["open"]
    reason: str = ""
    lease_id: int = 0


class LeasePhase(msgspec.Struct, frozen=True, kw_only=True):
    """A time during which a lease waited, or held blocks.

    Times are those of ``time.monotonic()``, in seconds.

    Attributes:
        lease_id: number of the lease in its engine.
        owner: name of the lease, as given to ``match``; its id in hexadecimal without one.
        phase: the waits are ``"pending"`` (for blocks that another lease computes), ``"store"``,
            ``"capacity"`` (also for the quota of its salt) and ``"peer"`` (a call of
            ``Receiving.wait``). ``"onload"`` is the time from a grant until the last byte of the
            lease's onloads had arrived. ``"granted"`` is the time during which the lease held
            device blocks.
        began_at: start of the phase. A ``"granted"`` phase that began before the observation has
            the start of the observation.
        ended_at: end of the phase; now while ``outcome`` is ``"open"``.
        outcome: for a wait or an onload, ``"done"``, ``"timeout"``, ``"cancelled"`` or
            ``"failed"``. For a ``"granted"`` phase, ``"released"``, ``"preempted"``, ``"swapped"``,
            ``"lost"`` (with a rank), ``"cancelled"`` (in the pass of the grant), or ``"closed"``
            (with the engine); ``"open"`` while the phase lasts.
        prompt_tokens: tokens of the prompt, for ``"onload"`` and ``"granted"``; otherwise 0.
        cached_tokens: cached prompt tokens of the grant, for the same phases; otherwise 0.
    """

    lease_id: int
    owner: str
    phase: PhaseName
    began_at: float
    ended_at: float
    outcome: End
    prompt_tokens: int = 0
    cached_tokens: int = 0


class BatchSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of the model, from ``engine.computing`` to the end of its work.

    Attributes:
        batch_id: number of the batch in its engine.
        leases: number of leases that the model computed with.
        began_at: start of the ``with`` block, in seconds of ``time.monotonic()``.
        ended_at: end of the block, and of all its work and events; now while ``is_open``.
        is_open: the batch has not ended.
    """

    batch_id: int
    leases: int
    began_at: float
    ended_at: float
    is_open: bool = False


Record: TypeAlias = TransferSpan | LeasePhase | BatchSpan
Observer: TypeAlias = "Callable[[Record, Context | None], object]"


class _Grant:
    """A grant in progress; ``onloads`` are the transfers that have not ended."""

    __slots__ = ("began_at", "cached_tokens", "onload_outcome", "onloads", "owner", "prompt_tokens")

    def __init__(self, owner: str, began_at: float) -> None:
        self.owner = owner
        self.began_at = began_at
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.onloads: set[int] = set()
        self.onload_outcome: End = "done"


class Observers:
    """The observers of one engine, and the records in progress while there is an observer.

    Args:
        read: read access to the scheduler's state.
        poller: runs callbacks at the end of a pass of the loop.

    Attributes:
        active: True while an observer is registered. Test it before any call of a hook.
    """

    __slots__ = (
        "_batches",
        "_causes",
        "_closed",
        "_contexts",
        "_grants",
        "_is_delivering",
        "_joined",
        "_observers",
        "_poller",
        "_queue",
        "_read",
        "_transfers",
        "_waits",
        "active",
    )

    def __init__(self, read: CacheReader, poller: EventPoller) -> None:
        self.active = False
        self._read = read
        self._poller = poller
        self._observers: tuple[Observer, ...] = ()
        self._closed = False
        self._is_delivering = False
        # Records that were not delivered yet.
        self._queue: deque[tuple[Record, Context | None]] = deque()
        self._contexts: dict[
            int, Context
        ] = {}  # contexts of the tasks that called match, by lease id
        # Owner and start of each wait.
        self._waits: dict[tuple[int, WaitName], tuple[str, float]] = {}
        self._grants: dict[int, _Grant] = {}  # by lease id
        self._causes: dict[int, tuple[int, Context | None]] = {}  # lease of a transfer in flight
        self._joined: dict[int, list[int]] = {}  # leases that wait for a transfer in flight
        self._batches: dict[int, tuple[int, float]] = {}  # leases and start, by batch id
        self._transfers: Callable[[], Iterable[tuple[TransferPlan, LayerDoneCounter]]] = tuple

    # --- registration ---------------------------------------------------------------------------

    def add(self, observer: Observer) -> None:
        """See ``Inspection.add_observer``."""
        if not callable(observer):
            raise UsageError(
                f"observer is {observer!r}; it must be a function of a record and a context"
            )
        if self._closed:
            raise ClosedError("add_observer: the engine is closed")
        if observer in self._observers:
            raise UsageError(f"observer {observer!r} was added already")
        if not self._observers:
            now = time.monotonic()
            for lease_id, owner in self._read.granted():
                self._grants[lease_id] = _Grant(owner, now)
        self._observers += (observer,)
        self.active = True

    def remove(self, observer: Observer) -> None:
        """See ``Inspection.remove_observer``."""
        self.flush()
        self._drop(observer)

    def _drop(self, observer: Observer) -> None:
        self._observers = tuple(kept for kept in self._observers if kept != observer)
        if not self._observers:
            self._stop()

    def _stop(self) -> None:
        self.active = False
        for state in (self._contexts, self._waits, self._grants, self._causes, self._joined):
            state.clear()
        self._batches.clear()
        self._queue.clear()

    def close(self) -> None:
        """End all phases in progress, deliver all records, and drop the observers. Idempotent."""
        if self._closed:
            return
        self.end_grants("closed")
        self.flush()
        self._closed = True
        self._observers = ()
        self._stop()

    def follow(
        self, in_flight: Callable[[], Iterable[tuple[TransferPlan, LayerDoneCounter]]]
    ) -> None:
        """Take the function that returns the transfers in flight, for ``unfinished``."""
        self._transfers = in_flight

    # --- delivery -------------------------------------------------------------------------------

    def _post(self, record: Record, context: Context | None) -> None:
        self._queue.append((record, context))
        if len(self._queue) == 1 and not self._poller.closed:
            self._poller.soon(self.flush)

    def flush(self) -> None:
        """Deliver the queued records. Idempotent; an exception drops the observer that raised.

        Returns at once when an observer calls it: the records follow behind the one that it has.
        """
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue:
                self._deliver(*self._queue.popleft())
        finally:
            self._is_delivering = False

    def _deliver(self, record: Record, context: Context | None) -> None:
        for observer in self._observers:
            if observer not in self._observers:
                continue  # another observer has removed it
            try:
                observer(record, context)
            except Exception as error:
                self._drop(observer)
                _report(observer, error)

    def in_flight(self) -> list[TransferSpan]:
        """Return the transfers in progress, as records that end now."""
        now = time.monotonic()
        return [self._span(plan, counter, now, "open", "") for plan, counter in self._transfers()]

    def unfinished(self) -> list[Record]:
        """Return transfers, phases and batches in progress, as records that end now."""
        now = time.monotonic()
        records: list[Record] = [*self.in_flight()]
        records += [
            _wait(lease_id, owner, name, began_at, now, "open")
            for (lease_id, name), (owner, began_at) in self._waits.items()
        ]
        for lease_id, grant in self._grants.items():
            if grant.onloads:
                records.append(_phase(lease_id, grant, "onload", now, "open"))
            records.append(_phase(lease_id, grant, "granted", now, "open"))
        records += [
            BatchSpan(batch_id=batch_id, leases=leases, began_at=at, ended_at=now, is_open=True)
            for batch_id, (leases, at) in self._batches.items()
        ]
        return records

    # --- hooks: leases --------------------------------------------------------------------------

    def matched(self, lease_id: int) -> None:
        """Note the context of the task that matches a lease."""
        self._contexts[lease_id] = copy_context()

    def begin_wait(self, lease_id: int, owner: str, name: WaitName, began_at: float) -> None:
        """Note that a lease waits from ``began_at`` on."""
        self._waits[lease_id, name] = (owner, began_at)

    def end_wait(
        self,
        lease_id: int,
        owner: str,
        name: WaitName,
        began_at: float,
        outcome: End,
        ended_at: float | None = None,
    ) -> None:
        """Record a wait that ends now or ended at ``ended_at``; its begin need not be noted."""
        self._waits.pop((lease_id, name), None)
        if name == "capacity" and outcome == "done" and lease_id in self._grants:
            ended_at = self._grants[lease_id].began_at  # the task runs some passes later
        if ended_at is None:
            ended_at = time.monotonic()
        phase = _wait(lease_id, owner, name, began_at, ended_at, outcome)
        self._post(phase, self._contexts.get(lease_id))

    def granted(self, record: LeaseRecord) -> None:
        """Note that a lease holds device blocks, and waits for the transfers of its layers."""
        grant = _Grant(record.owner, time.monotonic())
        prompt_tokens, on_device, on_host, _ = self._read.usage(record.id)
        grant.prompt_tokens, grant.cached_tokens = prompt_tokens, on_device + on_host
        self._grants[record.id] = grant
        for transfer_id in record.layers.transfer_ids:
            self.caused(record.id, transfer_id)
            self._joined.setdefault(transfer_id, []).append(record.id)
            grant.onloads.add(transfer_id)

    def caused(self, lease_id: int, transfer_id: int) -> None:
        """Note that a lease needs a transfer; the first lease is its cause."""
        self._causes.setdefault(transfer_id, (lease_id, self._contexts.get(lease_id)))

    def end_grant(self, lease_id: int, outcome: End) -> None:
        """Record that a lease has given its device blocks back. Idempotent."""
        grant = self._grants.pop(lease_id, None)
        if grant is None:
            return
        now, context = time.monotonic(), self._contexts.get(lease_id)
        if grant.onloads:
            self._post(_phase(lease_id, grant, "onload", now, "cancelled"), context)
        self._post(_phase(lease_id, grant, "granted", now, outcome), context)

    def end_grants(self, outcome: End) -> None:
        """Record the end of all grants: the blocks of all leases are gone."""
        for lease_id in list(self._grants):
            self.end_grant(lease_id, outcome)

    def released(self, lease_id: int) -> None:
        """Record the end of a lease. Idempotent."""
        self.end_grant(lease_id, "released")
        self._contexts.pop(lease_id, None)

    # --- hooks: transfers and batches -----------------------------------------------------------

    def transfer_ended(
        self, plan: TransferPlan, counter: LayerDoneCounter, outcome: Outcome, reason: str
    ) -> None:
        """Record the end of a transfer."""
        span = self._span(plan, counter, counter.end_seconds, outcome, reason)
        _, context = self._causes.pop(plan.transfer_id, (0, None))
        self._post(span, context)
        for lease_id in self._joined.pop(plan.transfer_id, ()):
            grant = self._grants.get(lease_id)
            if grant is None or plan.transfer_id not in grant.onloads:
                continue  # the lease has given its blocks back
            grant.onloads.remove(plan.transfer_id)
            if outcome != "done":
                grant.onload_outcome = outcome
            if not grant.onloads:
                phase = _phase(lease_id, grant, "onload", span.ended_at, grant.onload_outcome)
                self._post(phase, self._contexts.get(lease_id))

    def _span(
        self,
        plan: TransferPlan,
        counter: LayerDoneCounter,
        ended_at: float,
        outcome: Outcome | Literal["open"],
        reason: str,
    ) -> TransferSpan:
        queued_at, started_at = counter.created_seconds, counter.started_seconds
        lease_id, _ = self._causes.get(plan.transfer_id, (0, None))
        return TransferSpan(
            transfer_id=plan.transfer_id,
            route=plan.route.name,
            group=plan.group,
            blocks=plan.num_blocks,
            num_bytes=counter.num_bytes,
            queued_at=queued_at,
            started_at=started_at,
            # The device's clock may be some microseconds behind the host's.
            ended_at=max(ended_at, queued_at if started_at is None else started_at),
            outcome=outcome,
            reason=reason,
            lease_id=lease_id,
        )

    def batch_began(self, batch_id: int, leases: int) -> None:
        """Note the start of a batch."""
        self._batches[batch_id] = (leases, time.monotonic())

    def batch_ended(self, batch_id: int) -> None:
        """Record the end of a batch. Idempotent."""
        if batch_id in self._batches:
            leases, began_at = self._batches.pop(batch_id)
            now = time.monotonic()
            span = BatchSpan(batch_id=batch_id, leases=leases, began_at=began_at, ended_at=now)
            self._post(span, None)


def _wait(
    lease_id: int, owner: str, name: WaitName, began_at: float, ended_at: float, outcome: End
) -> LeasePhase:
    return LeasePhase(
        lease_id=lease_id,
        owner=lease_name(owner, lease_id),
        phase=name,
        began_at=began_at,
        ended_at=max(ended_at, began_at),
        outcome=outcome,
    )


def _phase(
    lease_id: int, grant: _Grant, name: PhaseName, ended_at: float, outcome: End
) -> LeasePhase:
    return LeasePhase(
        lease_id=lease_id,
        owner=lease_name(grant.owner, lease_id),
        phase=name,
        began_at=grant.began_at,
        ended_at=max(ended_at, grant.began_at),
        outcome=outcome,
        prompt_tokens=grant.prompt_tokens,
        cached_tokens=grant.cached_tokens,
    )


def _report(observer: Observer, error: Exception) -> None:
    """Give the exception of an observer to the loop's exception handler."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    loop.call_exception_handler(
        {
            "message": f"aiokv: the observer {observer!r} raised, and was removed",
            "exception": error,
        }
    )


def outcome_of(error: BaseException | None) -> End:
    """Return the outcome of a wait that ``error`` has ended, or None for one without an error."""
    if error is None:
        return "done"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
