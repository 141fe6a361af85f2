"""Granting: grants leases, and awaits capacity, pending blocks and stores for them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from aiokv.base import checks
from aiokv.base.logs import DEBUG, Log
from aiokv.base.plan import Priority
from aiokv.base.types import lease_name
from aiokv.engine.misses import missed_ranges
from aiokv.engine.observers import outcome_of
from aiokv.errors import AllocateTimeout, RequestTooLarge
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.scheduler.granting import READY

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.engine.fetches import Fetches, StoreWait
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.observers import End, WaitName
    from aiokv.engine.parts import Parts
    from aiokv.scheduler.effects import Effects, Grant

log = Log(__name__)


class Granting:
    """Grants of leases, and the waits before them; see ``Lease.allocate`` for the errors."""

    def __init__(self, parts: Parts, fetches: Fetches) -> None:
        self._read = parts.scheduler.read
        self._explains = parts.config.miss_history_blocks > 0
        self._overtake_seconds = math.inf
        if parts.config.admission == "cached_first":
            self._overtake_seconds = parts.config.max_overtake_seconds
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._apply = parts.dispatcher.apply
        self._waiters = parts.dispatcher.conditions.waiters
        self._transfers = parts.transfers
        self._open_step = parts.open_step
        self._fetches = fetches
        self._requests = parts.requests
        self._observers = parts.observers

    def allocate(
        self, record: LeaseRecord, num_tokens: int, priority: int, reserve_blocks: int | None
    ) -> bool:
        """Grant now, or let the lease wait for capacity.

        Returns:
            False when the lease waits: the caller awaits ``wait_granted``.
        """
        self._lifetime.check_open()
        try:
            result = self._scheduler.allocate(
                record.id or record.live_id(), num_tokens, priority, False, reserve_blocks
            )
        except RequestTooLarge as error:
            self._requests.note_error(error)
            raise
        if result[0] is READY and result[1] is NO_EFFECTS and not self._waiters:
            # No effect has to be applied, and no waiter checked.
            if self._observers.active or self._explains:
                self._note_grant(record)
            return True
        return self._take_grant(record, result)

    async def allocate_from_stores(
        self,
        record: LeaseRecord,
        num_tokens: int,
        priority: int,
        timeout: float | None,
        wait_store: float | None,
        queued_tokens: int,
        reserve_blocks: int | None,
    ) -> None:
        """Allocate after the missing blocks were fetched from the stores.

        Cancellation: the lease holds no blocks; fetches in flight go on.
        """
        self._lifetime.check_open()
        lease_id = record.live_id()
        if not self._fetches.has_stores or not self._fetches.is_incomplete(lease_id):
            if not self.allocate(record, num_tokens, priority, reserve_blocks):
                await self.wait_granted(record, num_tokens, timeout)
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
            self._stop_waiting(record)
            raise
        try:
            await self.wait_granted(record, num_tokens, timeout, wait)
        finally:
            wait.stop()
            record.waits.add_store(wait.seconds)
            self._requests.store_wait.add(wait.seconds)

    def try_allocate(
        self,
        record: LeaseRecord,
        num_tokens: int,
        onload_priority: Priority = Priority.DEMAND,
        reserve_blocks: int | None = None,
    ) -> bool:
        """Grant now, or return False."""
        self._lifetime.check_open()
        try:
            result = self._scheduler.try_allocate(
                record.live_id(), num_tokens, None, onload_priority, reserve_blocks
            )
        except RequestTooLarge as error:
            self._requests.note_error(error)
            raise
        return self._take_grant(record, result)

    def prolong(self, record: LeaseRecord, tokens: NDArray[np.int32]) -> bool:
        """Add cached blocks to the lease of a prefix; return False if it gets none."""
        self._lifetime.check_open()
        grant = self._apply(self._scheduler.pins.prolong(record.live_id(), tokens))
        if grant is not None and grant.onloads:
            record.layers = self._transfers.view(record.id, grant.onloads, record.owner)
        return grant is not None

    def _take_grant(self, record: LeaseRecord, result: tuple[Grant | None, Effects]) -> bool:
        """Apply the effects of a grant, and let the lease wait for the layers of its onload."""
        try:
            grant = self._apply(result)
            if grant is None:
                return False
            self._show_grant(record, grant)
        except BaseException:  # a lease without its layers must not count as granted
            self._apply(self._scheduler.stop_waiting(record.live_id()))
            raise
        return True

    def _show_grant(self, record: LeaseRecord, grant: Grant) -> None:
        if grant.onloads:
            record.layers = self._transfers.view(record.live_id(), grant.onloads, record.owner)
        self._note_grant(record)

    def _note_grant(self, record: LeaseRecord) -> None:
        """Report a grant to the observers, and the causes of its misses to the log."""
        if self._observers.active:
            self._observers.granted(record)
        if self._explains and log.is_on(DEBUG):
            lease_id, read = record.number, self._read
            if missed := missed_ranges(read.missed(lease_id), read.block_tokens):
                log.debug(
                    "lease.missed",
                    lease_id=lease_id,
                    owner=lease_name(record.owner, lease_id),
                    missed=[each.known_fields() for each in missed],
                )

    def allocatable_blocks(self, salt: str, reserve_blocks: int | None, limit: int | None) -> int:
        """See ``CacheEngine.allocatable_blocks``."""
        self._lifetime.check_open()
        checks.text("salt", salt)
        if reserve_blocks is not None:
            reserve_blocks = checks.reserve_blocks(reserve_blocks)
        return self._scheduler.allocatable_blocks(salt, reserve_blocks, _as_limit(limit))

    def extendable_blocks(self, salt: str, limit: int | None) -> int:
        """See ``CacheEngine.extendable_blocks``."""
        self._lifetime.check_loop()
        checks.text("salt", salt)
        return self._scheduler.extendable_blocks(salt, _as_limit(limit))

    async def wait_granted(
        self,
        record: LeaseRecord,
        num_tokens: int,
        timeout: float | None,
        store_wait: StoreWait | None = None,
    ) -> None:
        """Wait until a lease that waits for capacity is granted.

        Args:
            record: the lease.
            num_tokens: absolute number of positions.
            timeout: seconds; None for no limit.
            store_wait: wait for a store before the grant; the lease keeps its place in line.

        Raises:
            AllocateTimeout: after ``timeout`` seconds; and the other errors of ``Lease.allocate``.

        Cancellation: the lease holds no blocks.
        """
        lease_id = record.live_id()
        began = time.monotonic()
        outcome: End = "done"
        is_shown = False
        timer = None
        if self._overtake_seconds < math.inf:
            loop = self._lifetime.loop
            timer = loop.call_later(self._overtake_seconds, self._end_overtaking, lease_id)
        if self._observers.active and store_wait is None:
            self._observers.begin_wait(lease_id, record.owner, "capacity", began)

        def on_grant(grant: Grant) -> None:
            nonlocal is_shown
            self._show_grant(record, grant)
            is_shown = True

        try:
            async with asyncio.timeout(timeout):
                while not await self._dispatcher.granted(lease_id, on_grant):
                    grant = self._apply(self._scheduler.take_turn(lease_id))
                    if grant is not None:
                        on_grant(grant)
                        break
            record.live_id()  # raises if the lease was released in the same pass as its grant
        except TimeoutError:
            if is_shown and record.id and self._read.is_granted(lease_id):
                return  # the grant came just before the deadline
            reason, hint = self._read.explain_wait(
                record.salt, num_tokens, self._open_step.explain()
            )
            outcome = "timeout"
            self._stop_waiting(record)
            self._requests.note_timeout()
            # Keep the error in no variable: its traceback would keep the lease alive.
            raise self._timeout(
                lease_id,
                f"allocate timed out after {timeout} s: no room for {num_tokens} positions: "
                f"{reason}",
                hint,
            ) from None
        except BaseException as error:
            outcome = outcome_of(error)
            self._stop_waiting(record)
            self._requests.note_error(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._dispatcher.forget_wait(lease_id)
            elsewhere = 0.0 if store_wait is None else store_wait.seconds
            seconds = max(time.monotonic() - began - elsewhere, 0.0)
            record.waits.add_capacity(seconds)
            self._requests.capacity_wait.add(seconds)
            if store_wait is None:
                self._note_wait(record, "capacity", began, outcome)
            elif store_wait.ended is None:
                store_wait.end(outcome)
            else:
                self._note_wait(record, "capacity", store_wait.ended, outcome)

    def _end_overtaking(self, lease_id: int) -> None:
        if not self._lifetime.is_usable:
            return
        if self._apply(self._scheduler.end_overtaking(lease_id)) and log.is_on(DEBUG):
            log.debug(
                "lease.overdue",
                lease_id=lease_id,
                owner=lease_name(self._read.owner(lease_id), lease_id),
                waited_seconds=self._overtake_seconds,
            )

    def _timeout(self, lease_id: int, message: str, hint: str) -> AllocateTimeout:
        error = AllocateTimeout(message, hint=hint)
        error.lease_id, error.owner = lease_id, self._read.owner(lease_id)
        return error

    def _stop_waiting(self, record: LeaseRecord) -> None:
        self._apply(self._scheduler.stop_waiting(record.number))
        record.leave_layers()
        if self._observers.active:  # granted in the same pass
            self._observers.end_grant(record.number, "cancelled")

    async def wait_pending(self, record: LeaseRecord, timeout: float | None) -> None:
        """Wait until no other lease is computing more of the prefix, at most ``timeout`` seconds.

        Raises:
            LeaseError: the lease waits already, or was released while it waited.

        Cancellation: the lease no longer waits; nothing else changed.
        """
        lease_id = record.live_id()
        pending_tokens = self._read.pending_tokens(lease_id)
        if not self._apply(self._scheduler.wait_pending(lease_id)):
            return
        began = time.monotonic()
        outcome: End = "done"
        if self._observers.active:
            self._observers.begin_wait(lease_id, record.owner, "pending", began)
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
            record.waits.add_pending(pending_tokens, seconds)
            self._requests.pending_wait.add(seconds)
            self._note_wait(record, "pending", began, outcome)

    def _note_wait(self, record: LeaseRecord, name: WaitName, began: float, outcome: End) -> None:
        """Report the end of a wait to the log and the observers."""
        lease_id = record.number
        if self._observers.active:
            self._observers.end_wait(lease_id, record.owner, name, began, outcome)
        if log.is_on(DEBUG):
            log.debug(
                "lease.waited",
                lease_id=lease_id,
                owner=lease_name(record.owner, lease_id),
                phase=name,
                seconds=max(time.monotonic() - began, 0.0),
                outcome=outcome,
            )


def _as_limit(value: object) -> int:
    if value is None:
        return checks.MAX_INT32
    return checks.integer("limit", value, minimum=0, maximum=checks.MAX_INT32)
