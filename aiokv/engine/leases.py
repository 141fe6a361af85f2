"""Leases: creates the leases of an engine, and holds the parts of the engine that leases use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.base.types import as_items, as_tokens
from aiokv.engine.contexts import context_of
from aiokv.engine.coverage import Coverage
from aiokv.engine.granting import Granting
from aiokv.engine.lease import Lease
from aiokv.engine.lease_record import LeaseRecord
from aiokv.engine.lifetime import Phase
from aiokv.engine.recording import Recordings
from aiokv.engine.sending import Sending
from aiokv.errors import LeaseError, UsageError
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.worker.views import done_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.base.types import Hit, Item, TokenIds
    from aiokv.engine.computing import Computing
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.fetches import Fetches
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import PeerTickets
    from aiokv.engine.steps import Steps
    from aiokv.worker.device.base import Event

log = Log(__name__)

NO_NAME: Final = ""  # compared by identity, so the default needs no check


class Leases:
    """Creates leases, and ends leases that the application did not release.

    Attributes:
        read: read access to the scheduler's state.
        scheduler: makes the transitions of leases.
        apply: applies the effects of a transition; see ``Dispatcher.apply``. Transitions that are
            made most often skip it when there are neither effects nor ``waiters``.
        waiters: tasks that wait for a condition; see ``Conditions.waiters``.
        check_loop: see ``Lifetime.check_loop``.
        check_open: see ``Lifetime.check_open``.
        check_thread: see ``Lifetime.check_thread``.
        granting: grants leases, and awaits capacity.
        steps: closes steps.
        computing: batches in flight.
        peer_tickets: receives and sends.
        tickets: receives and sends in progress; empty when no lease has one.
        transfers: transfers in flight, and views of them.
        worker: copies blocks between leases.
        dispatcher: awaits the effects of other transitions.
        open_step: refuses waits that the end of the open step would have to end.
        lifetime: phase and loop of the engine.
        observers: get records of leases, while there are any.
        recordings: notes the prompts of leases for a trace, while one is recorded.
        coverage: check of strict mode.
        expiries: timers of leases.
        timers: timers that run; empty when no lease has one.
        used: notes a use of a lease, which stops its timer; see ``Expiries.stop``.
        verifies: True if the worker checks the checksums of blocks.
        done: layers of a lease that waits for no transfer.
        num_ended: number of leases that have ended so far.
    """

    def __init__(
        self,
        parts: Parts,
        steps: Steps,
        computing: Computing,
        fetches: Fetches,
        peer_tickets: PeerTickets,
        expiries: Expiries,
    ) -> None:
        self.read = parts.scheduler.read
        self.scheduler = parts.scheduler
        self.dispatcher = parts.dispatcher
        self.apply = parts.dispatcher.apply
        self.waiters = parts.dispatcher.conditions.waiters
        self.lifetime = parts.lifetime
        self.check_loop = parts.lifetime.check_loop
        self.check_open = parts.lifetime.check_open
        self.check_thread = parts.lifetime.check_thread
        self.granting = Granting(parts, fetches)
        self.steps = steps
        self.computing = computing
        self.peer_tickets = peer_tickets
        self.tickets = peer_tickets.by_lease
        self.transfers = parts.transfers
        self.worker = parts.worker
        self.open_step = parts.open_step
        self.observers = parts.observers
        self.recordings = Recordings(parts.scheduler.read)
        self.coverage = Coverage(parts.config, parts.scheduler.read)
        self.verifies = parts.config.verify == "checksum"
        self.expiries = expiries
        self.timers = expiries.timers
        self.used = expiries.stop
        self.done = done_view(parts.worker.facts.num_layers)
        self.num_ended = 0
        expiries.tell_expired(self._expire)

    def open(self) -> None:
        """Note that the worker is open: from now on it knows the number of layers."""
        self.done = done_view(self.worker.facts.num_layers)
        self.coverage.open(self.lifetime.loop)

    # --- prompts --------------------------------------------------------------------------------

    def match(
        self,
        tokens: TokenIds,
        salt: str,
        adapter: str,
        items: Sequence[Item],
        owner: str,
        read: bool,
        write: bool,
    ) -> Lease:
        """See ``CacheEngine.match``."""
        self.check_open()
        if salt is not NO_NAME:
            checks.text("salt", salt)
        if adapter is not NO_NAME:
            checks.text("adapter", adapter)
        if owner is not NO_NAME:
            checks.text("owner", owner)
        if read is not True:
            checks.flag("read", read)
        if write is not True:
            checks.flag("write", write)
        array = as_tokens(tokens)
        context = context_of(salt, adapter) if salt or adapter else ""
        triples = as_items(items) if items else ()
        result = self.scheduler.match(array, context, triples, read, write, owner, salt)
        lease_id, effects = result
        if effects is not NO_EFFECTS or self.waiters:
            self.apply(result)
        if self.observers.active:
            self.observers.matched(lease_id)
        if self.recordings.active:
            self.recordings.matched(lease_id, array, context, triples)
        return Lease(LeaseRecord(self, lease_id, lease_id, owner, salt, self.done))

    def would_hit(self, tokens: TokenIds, *, salt: str, adapter: str, items: Sequence[Item]) -> Hit:
        """See ``CacheEngine.would_hit``."""
        self.check_loop()
        context = context_of(checks.text("salt", salt), checks.text("adapter", adapter))
        return self.read.would_hit(as_tokens(tokens), context, as_items(items))

    def match_to_hold(
        self,
        tokens: TokenIds,
        *,
        salt: str,
        adapter: str,
        items: Sequence[Item],
        owner: str,
        whole: bool,
    ) -> LeaseRecord:
        """Match for a lease that computes no positions and only keeps its hit on the tiers.

        Args:
            tokens: as for ``CacheEngine.match``; so are ``salt``, ``adapter`` and ``items``.
            owner: name of the lease for error and log messages.
            whole: True if the hit may include the last block of the prompt.

        Returns:
            The record of a lease without a handle: the caller must call ``release``.
        """
        self.check_open()
        lease_id = self.apply(
            self.scheduler.match(
                as_tokens(tokens),
                context_of(checks.text("salt", salt), checks.text("adapter", adapter)),
                as_items(items) if items else (),
                owner=owner,
                salt=salt,
                holds="whole prompt" if whole else "prompt",
            )
        )
        return self._opened(lease_id, owner, salt)

    def forked(self, lease_id: int, owner: str, salt: str) -> Lease:
        """Return the lease of a fork, which the scheduler has granted."""
        record = self._opened(lease_id, owner, salt)
        if self.observers.active:
            self.observers.granted(record)
        return Lease(record)

    def _opened(self, lease_id: int, owner: str, salt: str) -> LeaseRecord:
        if self.observers.active:
            self.observers.matched(lease_id)
        return LeaseRecord(self, lease_id, lease_id, owner, salt, self.done)

    # --- other engines --------------------------------------------------------------------------

    def send(self, lease: Lease, ticket: bytes) -> Sending:
        """See ``CacheEngine.send``."""
        self.check_thread()
        self.used(self.record_of(lease).id)
        return Sending(self.peer_tickets, lease, ticket)

    # --- ends -----------------------------------------------------------------------------------

    def release(
        self,
        record: LeaseRecord,
        after: Event | None = None,
        returns: str = "",
        unused_seconds: float | None = None,
    ) -> None:
        """End a lease in the scheduler and in all parts of the engine that keep state for it.

        Idempotent.

        Args:
            record: the lease.
            after: see ``Lease.release``.
            returns: see ``Lease.release``.
            unused_seconds: time after which the lease has expired; None for one that is released.
        """
        if not self.lifetime.is_usable and record.id:
            record.id = 0  # the lease ended with the engine
            self.num_ended += 1
        lease_id = record.id
        if not lease_id:
            return
        self.check_loop()
        used_in = 0 if after is None else self.steps.close(after)
        if self.recordings.active:
            self.recordings.releases(lease_id, returns)
        if self.coverage.active:
            self.coverage.note_release(lease_id)
        record.id = 0
        self.num_ended += 1
        scheduler = self.scheduler
        if unused_seconds is None:
            result = scheduler.release(lease_id, used_in, returns)
        else:
            result = scheduler.expire(lease_id)
        if result[1] is not NO_EFFECTS or self.waiters:
            self.apply(result)
        if self.timers:
            self.used(lease_id)
        if self.observers.active:
            self.observers.released(lease_id)
        if self.tickets:
            reason = "the lease was released"
            if unused_seconds is not None:
                reason = f"the lease was not used for {unused_seconds:g} s, and has expired"
            self.peer_tickets.gave_back(lease_id, reason)

    def _expire(self, record: LeaseRecord, seconds: float) -> None:
        owner = self.read.owner(record.id)
        log.info("lease.expired", lease_id=record.id, owner=owner, unused_seconds=seconds)
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
        record.end = f"expired at {clock}.{int(now % 1 * 1000):03d} UTC, unused for {seconds:g} s"
        self.release(record, unused_seconds=seconds)

    def collect(self, record: LeaseRecord) -> bool:
        """Release a garbage-collected lease; return True if it held blocks. Any thread."""
        if self.lifetime.phase is Phase.ABANDONED:
            return False
        held = self.read.holds_blocks(record.id)
        # Release it in a later pass: the garbage collector may run in the middle of a grant.
        if self.lifetime.is_running and not self.lifetime.loop.is_closed():
            self.lifetime.loop.call_soon_threadsafe(self.release, record)
        return held

    # --- leases of calls --------------------------------------------------------------------------

    def record_of(self, lease: Lease) -> LeaseRecord:
        """Return the record of a lease of this engine.

        Raises:
            UsageError: ``lease`` is not a lease.
            LeaseError: the lease is released, or belongs to another engine.
        """
        if not isinstance(lease, Lease):
            raise UsageError(f"lease is {lease!r}; it must be a Lease")
        if lease.record.leases is not self:
            raise LeaseError(f"{lease!r} belongs to another engine")
        lease.record.live_id()
        return lease.record

    def lease_ids(self, leases: Iterable[Lease]) -> list[int]:
        """Return the ids of leases of this engine; raise the errors of ``record_of``."""
        if type(leases) is not list:
            leases = checks.sequence("leases", leases)
        try:
            ids = [lease.record.id for lease in leases if lease.record.leases is self]
        except AttributeError:
            ids = []
        if len(ids) == len(leases) and 0 not in ids:
            return ids
        return [self.record_of(lease).id for lease in leases]  # raises
