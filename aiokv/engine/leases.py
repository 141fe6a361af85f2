"""Leases: the part of an engine that each :class:`Lease` and each call on many leases uses."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aiokv.base import checks
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.logs import DEBUG, Log
from aiokv.base.plan import Priority, clone_plan
from aiokv.base.types import LeaseState, as_block_ids, as_items, as_tokens, lease_name
from aiokv.engine.contexts import context_of
from aiokv.engine.coverage import Coverage
from aiokv.engine.lifetime import Phase
from aiokv.engine.observers import outcome_of
from aiokv.engine.receiving import Receiving
from aiokv.engine.recording import Recordings
from aiokv.engine.sending import Sending
from aiokv.errors import (
    AllocateTimeout,
    LeaseError,
    RequestTooLarge,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.lease import Lease
from aiokv.peers.ticket import MAX_TIMEOUT_SECONDS
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.scheduler.granting import READY
from aiokv.worker.views import done_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.base.types import Hit, Item, TokenIds
    from aiokv.engine.computing import Computing
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.fetches import Fetches, StoreWait
    from aiokv.engine.observers import End, WaitName
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import Exchange
    from aiokv.engine.steps import Steps
    from aiokv.scheduler.effects import Effects, Grant
    from aiokv.worker.device.base import Event
    from aiokv.worker.views import LayerView

log = Log(__name__)

NO_NAME: Final = ""  # compared by identity: the default needs no check


def _as_limit(value: object) -> int:
    if value is None:
        return checks.MAX_INT32
    return checks.integer("limit", value, minimum=0, maximum=checks.MAX_INT32)


class Leases:
    """Calls of leases: applies the scheduler's transitions, and awaits grants and transfers.

    Every method on a lease raises ``LeaseError`` after the lease was released; see :class:`Lease`
    for the other errors, and for the state after a cancellation.

    Attributes:
        read: read access to the scheduler's state.
        recordings: notes the prompts of leases for a trace, while one is recorded.
    """

    def __init__(
        self,
        parts: Parts,
        steps: Steps,
        computing: Computing,
        fetches: Fetches,
        exchange: Exchange,
        expiries: Expiries,
    ) -> None:
        self.read = parts.scheduler.read
        self.recordings = Recordings(parts.scheduler.read)
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._apply = parts.dispatcher.apply
        self._waiters = parts.dispatcher.conditions.waiters
        self._worker = parts.worker
        self._transfers = parts.transfers
        self._open_step = parts.open_step
        self._steps = steps
        self._computing = computing
        self._fetches = fetches
        self._exchange = exchange
        self._flows = exchange.flows  # empty when no lease receives or sends
        self._requests = parts.requests
        self._observers = parts.observers
        self._expiries = expiries
        self._timers = expiries.timers
        expiries.tell_expired(self._expire)
        self._verifies = parts.config.verify == "checksum"
        self._coverage = Coverage(parts.config, parts.scheduler.read)
        self._done = done_view(parts.worker.facts.num_layers)

    def open(self) -> None:
        """Note that the worker is open: from now on it knows the number of layers."""
        self._done = done_view(self._worker.facts.num_layers)
        self._coverage.open(self._lifetime.loop)

    @property
    def done(self) -> LayerView:
        """Layers of a lease that waits for no transfer."""
        return self._done

    # --- matching -------------------------------------------------------------------------------

    def match(
        self,
        tokens: TokenIds,
        *,
        salt: str = NO_NAME,
        adapter: str = NO_NAME,
        items: Sequence[Item] = (),
        owner: str = NO_NAME,
        read: bool = True,
        write: bool = True,
    ) -> Lease:
        """See ``CacheEngine.match``."""
        self._lifetime.check_open()
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
        lease_id = self._apply(
            self._scheduler.match(array, context, triples, read, write, owner, salt)
        )
        if self._observers.active:
            self._observers.matched(lease_id)
        if self.recordings.active:
            self.recordings.matched(lease_id, array, context, triples)
        return Lease(self, lease_id, owner, salt, self._done)

    def would_hit(self, tokens: TokenIds, *, salt: str, adapter: str, items: Sequence[Item]) -> Hit:
        """See ``CacheEngine.would_hit``."""
        self._lifetime.check_loop()
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
    ) -> Lease:
        """Match for a lease that computes no positions and only keeps its hit on the tiers.

        Args:
            tokens: as for ``CacheEngine.match``; so are ``salt``, ``adapter`` and ``items``.
            owner: name of the lease for error and log messages.
            whole: True if the hit may include the last block of the prompt.
        """
        self._lifetime.check_open()
        lease_id = self._apply(
            self._scheduler.match(
                as_tokens(tokens),
                context_of(checks.text("salt", salt), checks.text("adapter", adapter)),
                as_items(items) if items else (),
                owner=owner,
                salt=salt,
                holds="whole prompt" if whole else "prompt",
            )
        )
        if self._observers.active:
            self._observers.matched(lease_id)
        return Lease(self, lease_id, owner, salt, self._done)

    # --- capacity -------------------------------------------------------------------------------

    def allocate(
        self, lease: Lease, num_tokens: int, priority: int, reserve_blocks: int | None
    ) -> bool:
        """Grant now, or let the lease wait for capacity; see ``Lease.allocate`` for the errors.

        Returns:
            False when the lease waits: the caller awaits ``wait_granted``.
        """
        self._lifetime.check_open()
        try:
            result = self._scheduler.allocate(
                lease.id or lease.live_id(), num_tokens, priority, False, reserve_blocks
            )
        except RequestTooLarge as error:
            self._requests.note_error(error)
            raise
        if result[0] is READY and result[1] is NO_EFFECTS and not self._waiters:
            # There is nothing to apply, and no condition to test.
            if self._observers.active:
                self._observers.granted(lease)
            return True
        return self._take_grant(lease, result)

    async def allocate_from_stores(
        self,
        lease: Lease,
        num_tokens: int,
        priority: int,
        timeout: float | None,
        wait_store: float | None,
        queued_tokens: int,
        reserve_blocks: int | None,
    ) -> None:
        """Allocate after the missing blocks were fetched from the stores; see ``Lease.allocate``.

        Cancellation: the lease holds no blocks; fetches in flight go on.
        """
        self._lifetime.check_open()
        lease_id = lease.live_id()
        if not self._fetches.has_stores or not self._fetches.is_incomplete(lease_id):
            if not self.allocate(lease, num_tokens, priority, reserve_blocks):
                await self.wait_granted(lease, num_tokens, timeout)
            return
        try:
            result = self._scheduler.allocate(lease_id, num_tokens, priority, True, reserve_blocks)
        except RequestTooLarge as error:
            self._requests.note_error(error)
            raise
        self._apply(result)
        try:
            wait = self._fetches.begin(lease_id, wait_store, queued_tokens)
        except BaseException:
            self._stop_waiting(lease, lease_id)
            raise
        try:
            await self.wait_granted(lease, num_tokens, timeout, wait)
        finally:
            wait.stop()
            lease.note_store_wait(wait.seconds)
            self._requests.store_wait.add(wait.seconds)

    def try_allocate(
        self,
        lease: Lease,
        num_tokens: int,
        onload_priority: Priority = Priority.DEMAND,
        reserve_blocks: int | None = None,
    ) -> bool:
        """Grant now, or return False."""
        self._lifetime.check_open()
        try:
            result = self._scheduler.try_allocate(
                lease.live_id(), num_tokens, None, onload_priority, reserve_blocks
            )
        except RequestTooLarge as error:
            self._requests.note_error(error)
            raise
        return self._take_grant(lease, result)

    def _take_grant(self, lease: Lease, result: tuple[Grant | None, Effects]) -> bool:
        """Apply the effects of a grant, and let the lease wait for the layers that it onloads."""
        try:
            grant = self._apply(result)
            if grant is None:
                return False
            self._show_grant(lease, grant)
        except BaseException:  # without its layers, the lease must not count as granted
            self._apply(self._scheduler.stop_waiting(lease.live_id()))
            raise
        return True

    def _show_grant(self, lease: Lease, grant: Grant) -> None:
        if grant.onloads:
            lease.layers = self._transfers.view(lease.live_id(), grant.onloads, lease.owner)
        if self._observers.active:
            self._observers.granted(lease)

    def can_allocate(self, lease: Lease, num_tokens: int, reserve_blocks: int | None) -> bool:
        """See ``Lease.can_allocate``."""
        self._lifetime.check_open()
        return self._scheduler.can_allocate(lease.live_id(), num_tokens, reserve_blocks)

    def allocatable_blocks(self, salt: str, reserve_blocks: int | None, limit: int | None) -> int:
        """See ``CacheEngine.allocatable_blocks``."""
        self._lifetime.check_open()
        checks.text("salt", salt)
        if reserve_blocks is not None:
            reserve_blocks = checks.reserve_blocks(reserve_blocks)
        return self._scheduler.allocatable_blocks(salt, reserve_blocks, _as_limit(limit))

    def extendable_blocks(self, limit: int | None) -> int:
        """See ``CacheEngine.extendable_blocks``."""
        self._lifetime.check_loop()
        return self._scheduler.extendable_blocks(_as_limit(limit))

    async def wait_granted(
        self,
        lease: Lease,
        num_tokens: int,
        timeout: float | None,
        store_wait: StoreWait | None = None,
    ) -> None:
        """Wait until a lease that waits for capacity is granted.

        Args:
            lease: the lease.
            num_tokens: absolute number of positions.
            timeout: seconds; None for no limit.
            store_wait: wait for a store that comes first, in the place of the lease.

        Raises:
            AllocateTimeout: after ``timeout`` seconds; and the other errors of ``Lease.allocate``.

        Cancellation: the lease holds no blocks.
        """
        lease_id = lease.live_id()
        began = time.monotonic()
        outcome: End = "done"
        is_shown = False
        if self._observers.active and store_wait is None:
            self._observers.begin_wait(lease_id, lease.owner, "capacity", began)

        def on_grant(grant: Grant) -> None:
            nonlocal is_shown
            self._show_grant(lease, grant)
            is_shown = True

        try:
            async with asyncio.timeout(timeout):
                while not await self._dispatcher.granted(lease_id, on_grant):
                    grant = self._apply(self._scheduler.take_turn(lease_id))
                    if grant is not None:
                        on_grant(grant)
                        break
            lease.live_id()  # raises if the lease was released in the same pass as its grant
        except TimeoutError:
            if is_shown and lease.id and self.read.is_granted(lease_id):
                return  # the grant came just before the deadline
            reason, hint = self.read.explain_wait(lease.salt, num_tokens, self._open_step.explain())
            outcome = "timeout"
            self._stop_waiting(lease, lease_id)
            self._requests.note_timeout()
            # No variable has the error: with its traceback, it would keep the lease alive.
            raise self._timeout(
                lease_id,
                f"allocate timed out after {timeout} s: no room for {num_tokens} positions: "
                f"{reason}",
                hint,
            ) from None
        except BaseException as error:
            outcome = outcome_of(error)
            self._stop_waiting(lease, lease_id)
            self._requests.note_error(error)
            raise
        finally:
            self._dispatcher.forget_wait(lease_id)
            elsewhere = 0.0 if store_wait is None else store_wait.seconds
            seconds = max(time.monotonic() - began - elsewhere, 0.0)
            lease.note_capacity_wait(seconds)
            self._requests.capacity_wait.add(seconds)
            if store_wait is None:
                self._note_wait(lease, lease_id, "capacity", began, outcome)
            elif store_wait.ended is None:
                store_wait.end(outcome)
            else:
                self._note_wait(lease, lease_id, "capacity", store_wait.ended, outcome)

    def _timeout(self, lease_id: int, message: str, hint: str) -> AllocateTimeout:
        error = AllocateTimeout(message, hint=hint)
        error.lease_id, error.owner = lease_id, self.read.owner(lease_id)
        return error

    def _stop_waiting(self, lease: Lease, lease_id: int) -> None:
        self._apply(self._scheduler.stop_waiting(lease_id))
        lease.leave_layers(self._done)
        if self._observers.active:  # granted in the same pass
            self._observers.end_grant(lease_id, "cancelled")

    async def wait_pending(self, lease: Lease, timeout: float | None) -> None:
        """Wait until no other lease is computing more of the prefix, at most ``timeout`` seconds.

        Raises:
            LeaseError: the lease waits already, or was released while it waited.

        Cancellation: the lease no longer waits; nothing else changed.
        """
        lease_id = lease.live_id()
        pending_tokens = self.read.pending_tokens(lease_id)
        if not self._apply(self._scheduler.wait_pending(lease_id)):
            return
        began = time.monotonic()
        outcome: End = "done"
        if self._observers.active:
            self._observers.begin_wait(lease_id, lease.owner, "pending", began)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._dispatcher.resumed(lease_id)
                    if not self._apply(self._scheduler.wait_pending(lease_id)):
                        return
        except TimeoutError:
            outcome = "timeout"  # this lease computes the blocks again
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._apply(self._scheduler.stop_wait_pending(lease_id))
            seconds = time.monotonic() - began
            lease.note_pending_wait(pending_tokens, seconds)
            self._requests.pending_wait.add(seconds)
            self._note_wait(lease, lease_id, "pending", began, outcome)

    def _note_wait(
        self,
        lease: Lease,
        lease_id: int,
        name: WaitName,
        began: float,
        outcome: End,
    ) -> None:
        """Tell log and observers the end of a wait."""
        if self._observers.active:
            self._observers.end_wait(lease_id, lease.owner, name, began, outcome)
        if log.is_on(DEBUG):
            log.debug(
                "lease.waited",
                lease_id=lease_id,
                owner=lease_name(lease.owner, lease_id),
                phase=name,
                seconds=max(time.monotonic() - began, 0.0),
                outcome=outcome,
            )

    # --- granted leases -------------------------------------------------------------------------

    def assign(self, lease: Lease, block_ids: TokenIds, computed_tokens: int) -> None:
        """See ``Lease.assign``."""
        self._lifetime.check_loop()
        lease_id = lease.held_id()
        result = self._scheduler.assign(lease_id, as_block_ids(block_ids), computed_tokens)
        try:
            grant = self._apply(result)
            if grant.onloads and not lease.layers.transfer_ids:
                lease.layers = self._transfers.view(lease_id, grant.onloads, lease.owner)
        except BaseException:  # without its layers, the lease must not count as granted
            self._apply(self._scheduler.stop_waiting(lease_id))
            raise
        if self._timers:
            self._expiries.stop(lease.id)

    def is_idle(self, lease_id: int) -> bool:
        """See ``Lease.is_idle``."""
        self._lifetime.check_thread()
        return self.read.is_idle(lease_id) or not self._lifetime.is_running

    async def idle(self, lease_id: int) -> None:
        """See ``Lease.idle``."""
        while not self.is_idle(lease_id):
            if step := self.read.idle_after_step(lease_id):
                self._open_step.check_wait(step, "transfers")
            await self._dispatcher.idle(lease_id)

    def expire_after(self, lease: Lease, seconds: float) -> None:
        """See ``Lease.expire_after``."""
        self._lifetime.check_loop()
        if self.read.state(lease.live_id()) not in (LeaseState.GRANTED, LeaseState.FAILED):
            raise LeaseError(
                f"expire_after: {lease!r} is {lease.state.value}; only a granted lease can expire",
                hint="call allocate first",
            )
        self._expiries.start(lease, seconds)

    def keep(self, lease: Lease) -> None:
        """See ``Lease.keep``."""
        self._lifetime.check_loop()
        self._expiries.stop(lease.live_id())

    def _expire(self, lease: Lease, seconds: float) -> None:
        owner = self.read.owner(lease.id)
        log.info("lease.expired", lease_id=lease.id, owner=owner, unused_seconds=seconds)
        self._note_releasing(lease.id)
        lease_id = lease.note_expired(seconds)
        self._apply(self._scheduler.expire(lease_id))
        self._note_released(lease_id, f"the lease was not used for {seconds:g} s, and has expired")

    def append(self, lease: Lease, tokens: TokenIds, items: Sequence[Item]) -> None:
        """See ``Lease.append``."""
        self._lifetime.check_loop()
        if items:
            array, triples = as_tokens(tokens), as_items(items)
            self._apply(self._scheduler.append(lease.live_id(), array, triples))
        else:
            self._apply(self._scheduler.append(lease.live_id(), as_tokens(tokens)))
        if self._timers:
            self._expiries.stop(lease.id)

    def commit(self, lease: Lease, num_tokens: int, ready: Event | None) -> int:
        """See ``Lease.commit``."""
        self._lifetime.check_loop()
        if self._coverage.active:
            self._coverage.check_commit(lease, num_tokens)
        if ready is None:
            published = self._apply(self._scheduler.commit(lease.id or lease.live_id(), num_tokens))
            if self._timers:
                self._expiries.stop(lease.id)
            if self._flows:
                self._exchange.committed(lease.id)
            return published
        self._worker.steps.check_event(ready)
        published = self._apply(
            self._scheduler.commit(lease.live_id(), num_tokens, closes_step=True)
        )
        if self._timers:
            self._expiries.stop(lease.id)
        self._steps.close(ready)
        if self._flows:
            self._exchange.committed(lease.id)
        return published

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """See ``Lease.truncate``."""
        self._lifetime.check_loop()
        self._apply(self._scheduler.truncate(lease.live_id(), num_tokens))
        self._expiries.stop(lease.id)
        if self._flows:
            self._exchange.truncated(lease.id, num_tokens)

    def recompute_from(self, lease: Lease) -> int | None:
        """See ``Lease.recompute_from``."""
        self._lifetime.check_loop()
        if lease.layers.given_up:
            raise LeaseError(f"recompute_from: a slow rank may still write blocks of {lease!r}")
        lease_id = lease.held_id()
        position = self._apply(self._scheduler.recompute_from(lease_id))
        if position >= 0:
            # Else each later step that waits for the layers would raise the accepted failure.
            lease.leave_layers(self._done)
            return position
        if self.read.onloads(lease_id):
            try:
                lease.layers.raise_for_error()
            except TransferError as error:
                raise LeaseError(
                    f"recompute_from: a transfer of {lease!r} has failed but not ended",
                    hint="await layers.wait_all(), then call recompute_from again",
                ) from error
        return None

    def fork(self, lease: Lease, owner: str, stream: object) -> Lease:
        """See ``Lease.fork``."""
        self._lifetime.check_open()
        owner = owner or lease.owner
        fork = self._apply(self._scheduler.fork(lease.live_id(), owner))
        self._expiries.stop(lease.id)
        child = Lease(self, fork.lease_id, owner, lease.salt, self._done)
        if self._observers.active:
            self._observers.matched(child.id)
            self._observers.granted(child)
        try:
            clone = clone_plan(ATTENTION, fork.source_blocks, fork.target_blocks)
            self._worker.steps.clone(clone, stream)
            if fork.state_slots is not None:
                self._copy_state(*fork.state_slots, stream)
        except BaseException:
            child.release()
            raise
        if self._verifies:
            self._worker.steps.record_checksums(fork.target_blocks, self.read.open_step)
        return child

    def snapshot(self, lease: Lease, num_tokens: int, stream: object) -> bool:
        """See ``Lease.snapshot``."""
        self._lifetime.check_loop()
        slots = self._apply(self._scheduler.snapshot(lease.live_id(), num_tokens))
        self._expiries.stop(lease.id)
        if slots is None:
            return False
        try:
            self._copy_state(*slots, stream)
        except BaseException:
            self._apply(self._scheduler.discard_snapshot(lease.live_id(), slots[1]))
            raise
        return True

    def _copy_state(self, source: int, target: int, stream: object) -> None:
        self._worker.steps.clone(clone_plan(STATE, [source], [target]), stream)

    # --- other engines --------------------------------------------------------------------------

    def receive(
        self, lease: Lease, num_tokens: int | None, timeout: float, open_timeout: float | None
    ) -> Receiving:
        """See ``Lease.receive``."""
        self._lifetime.check_thread()
        if num_tokens is not None:
            num_tokens = checks.integer(
                "num_tokens", num_tokens, minimum=1, maximum=checks.MAX_INT32
            )
        timeout = checks.positive("timeout", timeout)
        if timeout > MAX_TIMEOUT_SECONDS:
            raise UsageError(f"timeout is {timeout}; it must be at most {MAX_TIMEOUT_SECONDS} s")
        if open_timeout is None:
            open_timeout = timeout / 2
        open_timeout = checks.positive("open_timeout", open_timeout)
        self._expiries.stop(lease.id)
        return Receiving(self._exchange, lease, num_tokens, timeout, open_timeout)

    def send(self, lease: Lease, ticket: bytes) -> Sending:
        """See ``CacheEngine.send``."""
        self._lifetime.check_thread()
        self._expiries.stop(self.lease_id(lease))
        return Sending(self._exchange, lease, ticket)

    # --- preemption and release -----------------------------------------------------------------

    async def preempt(self, lease: Lease, *, swap: bool) -> None:
        """See ``Lease.preempt``."""
        self._lifetime.check_open()
        if swap:
            await self._swap_out(lease)
            return
        self._apply(self._scheduler.preempt(lease.live_id()))
        self._expiries.stop(lease.id)
        lease.leave_layers(self._done)
        if self._observers.active:
            self._observers.end_grant(lease.id, "preempted")
        self._log_preempted(lease.id, swap=False)
        if self._flows:
            self._exchange.gave_back(lease.id, "the lease was preempted")

    async def _swap_out(self, lease: Lease) -> None:
        await self._computing.wait_ended(lease)
        await self._exchange.stop(lease.live_id(), "the lease was preempted")
        while saving := self.read.saving(lease.live_id()):
            await self._transfers.ended(saving)
            await self._computing.wait_ended(lease)
        self._lifetime.check_open()
        lease_id = lease.live_id()
        transfer_id = self._apply(self._scheduler.swap_out(lease_id))
        if transfer_id is None:
            raise WouldBlock(
                "preempt: the host tier has no room for the block table, or the cache was reset "
                "after the grant",
                hint="preempt without swap, or raise CacheConfig.host_blocks",
            )
        self._expiries.stop(lease_id)
        lease.leave_layers(self._done)
        if self._observers.active:
            self._observers.end_grant(lease_id, "swapped")
        if not transfer_id:
            return
        if self._observers.active:
            self._observers.caused(lease_id, transfer_id)
        await self._transfers.ended(transfer_id)
        if lease.state in (LeaseState.GRANTED, LeaseState.FAILED):
            raise TransferError(
                "preempt: the copy of the block table to host memory failed; the lease keeps its "
                "blocks",
                direction="offload",
            )
        self._log_preempted(lease_id, swap=True)

    def _log_preempted(self, lease_id: int, *, swap: bool) -> None:
        log.info("lease.preempted", lease_id=lease_id, owner=self.read.owner(lease_id), swap=swap)

    def release(self, lease: Lease, after: Event | None) -> None:
        """See ``Lease.release``."""
        if not self._lifetime.is_running:
            lease.id = 0  # closing the engine has ended the lease
            return
        self._lifetime.check_loop()
        used_in = 0 if after is None else self._steps.close(after)
        if self.recordings.active or self._coverage.active:
            self._note_releasing(lease.id)  # while it has its id: an interrupt loses no blocks
        lease_id, lease.id = lease.id, 0
        self._apply(self._scheduler.release(lease_id, used_in))
        self._note_released(lease_id, "the lease was released")

    def _note_releasing(self, lease_id: int) -> None:
        if self.recordings.active:
            self.recordings.releases(lease_id)
        if self._coverage.active:
            self._coverage.note_release(lease_id)

    def _note_released(self, lease_id: int, reason: str) -> None:
        if self._timers:
            self._expiries.stop(lease_id)
        if self._observers.active:
            self._observers.released(lease_id)
        if self._flows:
            self._exchange.gave_back(lease_id, reason)

    def collect(self, lease_id: int) -> bool:
        """Release a garbage-collected lease; return True if it held blocks. Any thread."""
        if self._lifetime.phase is Phase.ABANDONED:
            return False
        held = self.read.holds_blocks(lease_id)
        # Release it in a later pass: the garbage collector may run in the middle of a grant.
        if self._lifetime.is_running and not self._lifetime.loop.is_closed():
            self._lifetime.loop.call_soon_threadsafe(self._release_collected, lease_id)
        return held

    def _release_collected(self, lease_id: int) -> None:
        if self._lifetime.is_running:
            self._note_releasing(lease_id)
            self._apply(self._scheduler.release(lease_id))
            if self._timers:
                self._expiries.stop(lease_id)
            if self._observers.active:
                self._observers.released(lease_id)

    # --- checks ---------------------------------------------------------------------------------

    def check_loop(self) -> None:
        """See ``Lifetime.check_loop``."""
        self._lifetime.check_loop()

    def check_thread(self) -> None:
        """See ``Lifetime.check_thread``."""
        self._lifetime.check_thread()

    def lease_id(self, lease: Lease) -> int:
        """Return the id of a lease of this engine.

        Raises:
            UsageError: ``lease`` is not a lease.
            LeaseError: the lease is released, or belongs to another engine.
        """
        if not isinstance(lease, Lease):
            raise UsageError(f"lease is {lease!r}; it must be a Lease")
        if lease.leases is not self:
            raise LeaseError(f"{lease!r} belongs to another engine")
        return lease.live_id()

    def lease_ids(self, leases: Sequence[Lease]) -> list[int]:
        """Return the ids of leases of this engine; raise the errors of ``lease_id``."""
        if type(leases) is not list:
            leases = checks.sequence("leases", leases)
        return [
            lease.id
            if type(lease) is Lease and lease.leases is self and lease.id
            else self.lease_id(lease)  # raises, except for a subclass of Lease
            for lease in leases
        ]
