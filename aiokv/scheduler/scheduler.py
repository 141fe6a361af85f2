"""CacheScheduler: every decision of the cache, one synchronous call per state transition.

The scheduler has no await, future, clock or device: its decisions depend only on the order of the
calls (I9). The state of blocks and leases is native (``Core``); the Python parts hold the waiting
lines, quotas, pins and step numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

from aiokv.base.misses import NOTHING_LEFT, LeftInStore
from aiokv.base.plan import Priority
from aiokv.base.state_guard import StateGuard
from aiokv.base.types import LeaseState, StepTokens, as_tokens
from aiokv.errors import (
    BrokenEngineError,
    ClosedError,
    LeaseError,
    UsageError,
    WouldBlock,
)
from aiokv.scheduler.admission import Admission, WaitingRequest, already_waits
from aiokv.scheduler.clock import StepClock
from aiokv.scheduler.decoding import Decoding
from aiokv.scheduler.effects import Fork, Grant, Outbox
from aiokv.scheduler.external import ExternalBlocks
from aiokv.scheduler.fetches import Fetches
from aiokv.scheduler.gate import Gate
from aiokv.scheduler.granting import Granting
from aiokv.scheduler.guarded import TransitionErrors, guarded
from aiokv.scheduler.owners import Owners
from aiokv.scheduler.peers import ReceivesAndSends
from aiokv.scheduler.pending import PendingBlocks
from aiokv.scheduler.pins import Pins
from aiokv.scheduler.plans import PlanMaker, new_core
from aiokv.scheduler.preemption import Preemption
from aiokv.scheduler.quota import SaltQuota
from aiokv.scheduler.reader import CacheReader
from aiokv.scheduler.releases import Releases
from aiokv.scheduler.retention import Retention
from aiokv.scheduler.saver import Saver
from aiokv.scheduler.sharded import SHARDS
from aiokv.scheduler.store_saver import StoreSaver
from aiokv.scheduler.waits import PER_CALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import TransferReport
    from aiokv.base.types import LeaseIds, Tier, TokenIds
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.effects import Done, Effects
    from aiokv.scheduler.gate import GateChange

TRANSITIONS: Final = (
    "advance",
    "match",
    "try_allocate",
    "allocate",
    "take_turn",
    "end_store_wait",
    "end_overtaking",
    "stop_waiting",
    "wait_pending",
    "stop_wait_pending",
    "release",
    "assign",
    "expire",
    "append",
    "commit",
    "commit_blocks",
    "retire",
    "extend",
    "advance_batch",
    "truncate",
    "recompute_from",
    "fork",
    "snapshot",
    "discard_snapshot",
    "preempt",
    "swap_out",
    "begin_batch",
    "end_batch",
    "track_steps",
    "close_step",
    "finish_step",
    "collect_backups",
    "fetches.begin",
    "fetches.note_lacking",
    "store_saver.collect",
    "save",
    "peers.commit_received",
    "peers.receive",
    "peers.send",
    "peers.end",
    "complete",
    "note_cancelling",
    "pins.prolong",
    "pins.await_use",
    "pins.pin",
    "pins.unpin",
    "retention.retain",
    "retention.end_at",
    "retention.demote",
    "retention.forget",
    "change_gate",
    "evict",
    "reset",
    "begin_purge",
    "end_purge",
    "resize",
    "sleep",
    "wake_up",
    "close",
    "stop_saving",
    "fail",
    "lose_blocks",
    "restart",
)
"""Methods of ``CacheScheduler``, or of a part of it, that return ``(value, effects)``."""


class CacheScheduler:
    """Decides on matches, grants, transfers and evictions of one cache.

    The methods in ``TRANSITIONS`` are transitions: they return ``(value, effects)``, and the
    dispatcher applies the effects before the next transition. A transition that raises has changed
    nothing. The id of a released lease raises ``LeaseError``.

    Args:
        config: sizes and rules of the cache.
        has_stores: True if blocks can be fetched from stores and saved to them.
        guard: breaks the engine when an exception leaves the state of the cache unknown.

    Attributes:
        errors: notes the exceptions of transitions.
        read: read access to the state.
        store_saver: transition that saves blocks to the stores.
        fetches: transitions that fetch blocks from the stores.
        peers: transitions of the receives and sends.
        pins: transitions of the pins.
        retention: transitions that change the order of eviction.
        has_stores: as given.
    """

    def __init__(
        self, config: CacheConfig, has_stores: bool = False, guard: StateGuard | None = None
    ) -> None:
        core = new_core(config, has_stores)
        self.has_stores = has_stores
        self._core = core
        self._records_checksums = config.verify == "checksum"
        self._block_tokens = config.block_tokens
        self._reserve_blocks = config.reserve_blocks
        self._state_slots = config.state_slots
        self._saves_states = config.host_state_slots > 0
        self._saves_windows = any(group.host_blocks for group in config.windows.values())
        self._owners = Owners()
        self._guard = guard or StateGuard()
        self.errors = errors = TransitionErrors(self._owners, self._guard)
        self._salts: dict[int, str] | None = None if config.salt_quota_blocks is None else {}
        self._purging: Counter[str] = Counter()
        self._outbox = Outbox()
        self._clock = StepClock()
        self._gate = Gate()
        self._plans = PlanMaker(core, saves_states=self._saves_states, windows=config.windows)
        self._saver = Saver(config, core, self._plans, self._outbox)
        self.store_saver = StoreSaver(
            core, self._gate, self._plans, self._outbox, errors, has_stores
        )
        self.fetches = Fetches(config, core, self._plans, self._outbox, errors, self.store_saver)
        self._granting = Granting(config, core, self._plans, self._saver, self._outbox)
        self._quota = SaltQuota(config.salt_quota_blocks)
        self._admission = Admission(
            config, core, self._gate, self._quota, self._granting, self._outbox, errors
        )
        self._pending = PendingBlocks(core, self._outbox)
        self.peers = ReceivesAndSends(
            config,
            core,
            self._plans,
            self._outbox,
            self._clock,
            errors=errors,
            owners=self._owners,
            pending=self._pending,
            saver=self._saver,
            settle=self._settle,
        )
        self._releases = Releases(
            core,
            self._clock,
            owners=self._owners,
            salts=self._salts,
            lost=self._granting.lost,
            quota=self._quota,
            admission=self._admission,
            pending=self._pending,
        )
        self.pins = Pins(
            core,
            self._outbox,
            errors,
            self._releases,
            self._admission,
            self._granting,
            self._settle,
        )
        self.retention = Retention(core, self._outbox, errors, self._settle)
        self._preemption = Preemption(
            config,
            core,
            self._plans,
            self._outbox,
            self._clock,
            owners=self._owners,
            quota=self._quota,
            pending=self._pending,
            lost=self._granting.lost,
        )
        self._external: ExternalBlocks | None = None
        if config.external_device:
            self._external = ExternalBlocks(
                core,
                self._outbox,
                self._granting,
                self._pending,
                self._releases,
                records_checksums=self._records_checksums,
            )
        self._decoding = Decoding(
            config, core, self._outbox, self._clock, self._saver, self._quota, self._pending
        )
        self._requests = self._admission.requests
        self._waiters = self._pending.waiters
        self._advances = False  # True if an effect has requested `advance`
        self._is_closed = False
        self.read = CacheReader(
            config,
            core,
            owners=self._owners,
            clock=self._clock,
            gate=self._gate,
            quota=self._quota,
            admission=self._admission,
            lost=self._granting.lost,
            pins=self.pins,
            pending=self._pending,
            preemption=self._preemption,
            releases=self._releases,
        )

    # --- effects --------------------------------------------------------------------------------

    def applied(self) -> None:
        """Note that the dispatcher has applied all effects that were returned."""
        self._outbox.clear()

    def _settle(self) -> Effects:
        """End a transition that may have freed blocks: serve the leases that wait for them."""
        if self._external is not None:
            self._external.settle()
        if self.pins.num_until_used:
            self.pins.end_used()
        if self._granting.onloads:
            self._granting.cancel_abandoned()
        if self._saves_windows and self._core.wants_backups():
            self._saver.want()  # a save of window blocks waits until some ids are not reserved
        if self.peers.has_begun:
            self.peers.cancel_abandoned()
        if (self._requests or self._waiters) and not self._advances:
            if self._outbox.pending.cancel:
                # The worker may cancel these onloads at once, so no grant may join them before
                # that.
                self._outbox.request_advance(True)
                self._advances = True
            else:
                self._serve()
        return self._outbox.pending

    def _serve(self) -> None:
        is_left = self._admission.serve()
        for _ in range(PER_CALL):
            if not self._pending.end_one():
                break
        else:
            is_left = True
        if self.pins.num_until_used and self.pins.end_used():
            is_left = True  # the pins' quota may suffice for the next request
        if self._granting.onloads:
            self._granting.cancel_abandoned()
        self._advances = is_left
        self._outbox.request_advance(is_left)

    @guarded
    def advance(self) -> Done:
        """Serve more of the waiting leases; called in the pass after the request."""
        self._advances = False
        return None, self._settle()

    # --- match, grant and release ---------------------------------------------------------------

    def match(
        self,
        tokens: NDArray[np.int32],
        context: str = "",
        items: Sequence[tuple[bytes, int, int]] = (),
        reads: bool = True,
        writes: bool = True,
        owner: str = "",
        salt: str = "",
        holds: Literal["", "prompt", "whole prompt"] = "",
    ) -> tuple[int, Effects]:
        """Open a lease on the longest cached prefix of a prompt; return its id.

        Args:
            tokens: ``[N]`` int32, N >= 1.
            context: namespace; prompts share blocks only within one context.
            items: (content hash, offset, length) of each multimodal item, in order.
            reads: False to use no cached block.
            writes: False to publish no block.
            owner: name of the lease for messages.
            salt: salt whose quota counts the blocks.
            holds: not empty for a lease that computes no positions and only keeps its hit on the
                tiers; with ``"whole prompt"``, the hit may include the last block.
        """
        try:
            if holds:
                writes = False  # then no lease waits for blocks of this one
            if self._purging and salt in self._purging:
                reads = writes = False
            if items:
                found = self._core.match_items(tokens, items, context, reads, writes)
            else:
                found = self._core.match(tokens, context, reads, writes)
            lease_id = found[0]
            self._owners.shards[lease_id % SHARDS][lease_id] = owner
            if self._salts is not None:
                self._salts[lease_id] = salt
            if holds:
                self._core.hold_only(lease_id, whole=holds == "whole prompt")
            return lease_id, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    def try_allocate(
        self,
        lease_id: int,
        num_tokens: int,
        priority: int | None = None,
        onload_priority: Priority = Priority.DEMAND,
        reserve_blocks: int | None = None,
    ) -> tuple[Grant | None, Effects]:
        """Grant now, or return None: there is no room, or other requests go first.

        Args:
            lease_id: a matched or preempted lease.
            num_tokens: absolute number of positions.
            priority: as for ``allocate``; None for a request that goes before no waiting request.
            onload_priority: priority of the onload that the grant begins.
            reserve_blocks: blocks that the grant leaves to ``extend``; None for the configured
                number.

        Raises:
            LeaseError: the lease is granted already, or ``num_tokens`` is out of range.
            RequestTooLarge: the device or the salt's quota can never hold the request.
        """
        try:
            is_free = not self._requests and not self._gate.closed and self._salts is None
            if not is_free and self._must_wait(lease_id, num_tokens, priority, reserve_blocks):
                return None, self._outbox.pending
            if self._salts is None:
                grant = self._granting.attempt(
                    lease_id, num_tokens, onload_priority, reserve_blocks
                )
            else:
                grant = self._grant_counted(lease_id, num_tokens, onload_priority, reserve_blocks)
            if grant is not None:
                if self.has_stores:
                    self.store_saver.want()
                if self.pins.num_until_used:
                    return grant, self._settle()
            return grant, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    def _must_wait(
        self, lease_id: int, num_tokens: int, priority: int | None, reserve_blocks: int | None
    ) -> bool:
        """Return True if a request has to wait for other requests or for the gate.

        Raises:
            LeaseError, RequestTooLarge: the request can never be granted.
        """
        if self._salts is not None:
            self._core.check_request(lease_id, num_tokens, reserve_blocks)
            self._quota.check_request(self._blocks_for(num_tokens))
        if (self._requests or self._gate.closed) and self._admission.must_wait(lease_id, priority):
            self._core.check_request(lease_id, num_tokens, reserve_blocks)
            return True
        return False

    def _grant_counted(
        self,
        lease_id: int,
        num_tokens: int,
        onload_priority: Priority,
        reserve_blocks: int | None,
    ) -> Grant | None:
        """Grant if there is room and the salt's quota admits the lease."""
        salt = self._salt(lease_id)
        num_blocks = self._blocks_for(num_tokens)
        if not self._quota.admits(salt, num_blocks):
            return None
        grant = self._granting.attempt(lease_id, num_tokens, onload_priority, reserve_blocks)
        if grant is not None:
            self._quota.count(lease_id, salt, num_blocks)
        return grant

    @guarded
    def can_allocate(
        self, lease_id: int, num_tokens: int, reserve_blocks: int | None = None
    ) -> bool:
        """Return True if ``try_allocate`` would grant now. Not a transition: changes nothing.

        Raises:
            LeaseError, RequestTooLarge: as ``try_allocate``.
        """
        return (
            not self._must_wait(lease_id, num_tokens, None, reserve_blocks)
            and not self._granting.is_full(lease_id)
            and self._quota.admits(self._salt(lease_id), self._blocks_for(num_tokens))
            and self._core.can_allocate(
                lease_id, num_tokens, self._saver.drops_unsaved, reserve_blocks
            )
        )

    def allocatable_blocks(self, salt: str, reserve_blocks: int | None, limit: int) -> int:
        """Return the blocks of the largest uncached request that ``try_allocate`` would grant now.

        Not a transition: changes nothing.

        Args:
            salt: salt of the lease.
            reserve_blocks: as for ``try_allocate``.
            limit: the result is at most this number.
        """
        if reserve_blocks is None:
            reserve_blocks = self._reserve_blocks
        free, evictable, _ = self._core.room()
        quota = self._quota.room(salt)
        limit = min(limit, free + evictable - reserve_blocks, limit if quota is None else quota)
        if self._gate.closed or len(self._admission) or self._granting.is_at_limit:
            limit = 0
        return self._core.allocatable_blocks(max(limit, 0), self._saver.drops_unsaved, salt)

    def extendable_blocks(self, salt: str, limit: int) -> int:
        """Return the blocks that ``extend`` could take now, at most ``limit``.

        Not a transition: changes nothing.

        Args:
            salt: salt of the first lease.
            limit: the result is at most this number.
        """
        return self._core.extendable_blocks(limit, self._saver.drops_unsaved, salt)

    @guarded
    def allocate(
        self,
        lease_id: int,
        num_tokens: int,
        priority: int,
        waits_for_store: bool = False,
        reserve_blocks: int | None = None,
    ) -> tuple[Grant | None, Effects]:
        """Grant now, or let the lease wait: first for its salt's quota, then for capacity.

        Args:
            lease_id: a matched or preempted lease.
            num_tokens: absolute number of positions.
            priority: lower numbers are granted first, equal numbers in order of arrival.
            waits_for_store: True to take the place in line, and let other requests pass until
                ``end_store_wait`` is called.
            reserve_blocks: as for ``try_allocate``.

        Returns:
            The grant; None when the lease waits: a later effect ends the wait.

        Raises:
            LeaseError: the lease is granted or waits already, or ``num_tokens`` is out of range.
            RequestTooLarge: the device or the salt's quota can never hold the request.
        """
        if not waits_for_store:
            result = self.try_allocate(
                lease_id, num_tokens, priority, Priority.DEMAND, reserve_blocks
            )
            if result[0] is not None:
                return result
        return self._join_line(lease_id, num_tokens, priority, waits_for_store, reserve_blocks)

    def _join_line(
        self,
        lease_id: int,
        num_tokens: int,
        priority: int,
        waits_for_store: bool,
        reserve_blocks: int | None,
    ) -> Done:
        """Let a lease wait for capacity, or for a store while it keeps its place in line."""
        self._check_not_waiting(lease_id)
        salt = self._salt(lease_id)
        num_blocks = self._blocks_for(num_tokens)
        request = WaitingRequest(lease_id, salt, num_tokens, num_blocks, priority, reserve_blocks)
        if waits_for_store:
            self._core.check_request(lease_id, num_tokens, reserve_blocks)
            self._quota.check_request(num_blocks)
            self._admission.join_store(request)
            return None, self._outbox.pending
        counted = self._quota.admits(salt, num_blocks)
        if counted:
            self._quota.count(lease_id, salt, num_blocks)
        self._admission.join(request, counted=counted)
        return None, self._outbox.pending

    @guarded
    def end_store_wait(self, lease_id: int, left: LeftInStore = NOTHING_LEFT) -> Done:
        """Serve a lease that waits for a store in its place from now on. Idempotent."""
        self._admission.end_store_wait(lease_id, left)
        return None, self._settle()

    @guarded
    def end_overtaking(self, lease_id: int) -> tuple[bool, Effects]:
        """Let a request that waits go before all later requests of its priority. Idempotent.

        Returns:
            False if it does not wait, did so before, or ``admission`` is not ``"cached_first"``.
        """
        return self._admission.end_overtaking(lease_id), self._settle()

    @guarded
    def take_turn(self, lease_id: int) -> tuple[Grant | None, Effects]:
        """Grant a lease that an effect has told that it is first in line.

        Returns:
            The grant; None when there is no room and the lease continues to wait, or when the wait
            has ended otherwise: a later effect tells the result.
        """
        grant = self._admission.take_turn(lease_id)
        return grant, self._outbox.pending if grant is None else self._settle()

    @guarded
    def stop_waiting(self, lease_id: int) -> Done:
        """End the wait of a lease whose task no longer waits; undo a grant that came meanwhile."""
        if lease_id in self._requests:
            if not self._admission.leave(lease_id):
                return None, self._outbox.pending
        elif self.read.state(lease_id) in (LeaseState.GRANTED, LeaseState.FAILED):
            self._preemption.retract(lease_id)
            self._quota.give_back(lease_id)
        return None, self._settle()

    @guarded
    def wait_pending(self, lease_id: int) -> tuple[bool, Effects]:
        """Wait for the lease that computes the blocks after the match.

        Returns:
            False when no lease computes them. Otherwise a later effect tells when to call
            ``wait_pending`` again.

        Raises:
            LeaseError: the lease waits already.
        """
        if lease_id in self._waiters:
            raise LeaseError(
                f"lease {self._owners.name(lease_id)!r} already waits for pending blocks "
                "in another task"
            )
        return self._pending.join(lease_id), self._outbox.pending

    @guarded
    def stop_wait_pending(self, lease_id: int) -> Done:
        """Note that the lease no longer waits for pending blocks. Idempotent."""
        self._pending.leave(lease_id)
        return None, self._outbox.pending

    def release(self, lease_id: int, used_in: int = 0, returns: str = "") -> Done:
        """Release a lease. Blocks that batches in flight use are freed when the batches end.

        Args:
            lease_id: a lease without a handle.
            used_in: closed step that used the blocks, in addition to batches; 0 for none.
            returns: label of the request; see ``Lease.release``.
        """
        if self._guard.failure is not None:
            return self.errors.refuse("release")
        try:
            if self._requests or self._waiters:
                waited = self._releases.end_waits(lease_id)
                held = self._core.is_granted(lease_id) or self._core.is_swapped(lease_id)
                if not (waited or held):  # it frees no blocks that leases wait for
                    self._releases.release(lease_id, used_in, returns)
                    return None, self._outbox.pending
            self._releases.release(lease_id, used_in, returns)
            return None, self._settle()
        except BaseException as error:
            self.errors.note(error)
            raise

    @guarded
    def expire(self, lease_id: int) -> Done:
        """Release a lease that was not used in time."""
        self._releases.expired_leases += 1
        return self.release(lease_id)

    # --- granted leases -------------------------------------------------------------------------

    @guarded
    def assign(
        self,
        lease_id: int,
        block_ids: NDArray[np.int32],
        computed_tokens: int = 0,
        onload_priority: int = Priority.DEMAND,
        group_ids: NDArray[np.int32] | None = None,
    ) -> tuple[Grant, Effects]:
        """Append device blocks of the server to the table of a lease; see ``Lease.assign``.

        Args:
            lease_id: a granted lease.
            block_ids: ``[N]`` int32.
            computed_tokens: see ``Lease.assign``.
            onload_priority: priority of the onloads.
            group_ids: ``[G * N]`` int32, a row per group of ``CacheConfig.windows``; None for no
                ids.

        Returns:
            The lease, and the onloads of it that are in flight: the first call begins one per
            group.

        Raises:
            LeaseError: the lease is not granted; or its cached blocks were dropped after the grant,
                or are more than the blocks of the first call.
            UsageError: the server has no such block, the lease has it already, a transfer in flight
                uses it, ``computed_tokens`` is out of range, or the engine owns the device blocks.
        """
        grant = self._externals("assign").assign(
            lease_id, block_ids, computed_tokens, onload_priority, group_ids
        )
        return grant, self._settle()

    @guarded
    def commit_blocks(
        self,
        lease_id: int,
        block_ids: TokenIds,
        tokens: TokenIds,
        group_ids: NDArray[np.int32] | None = None,
        kept_blocks: int = 0,
    ) -> tuple[int, Effects]:
        """Append computed blocks of the server and tokens, and commit; see ``Lease.commit_blocks``.

        Args:
            lease_id: a granted lease.
            block_ids: ``[N]`` integers; as for ``tokens``, those of a list are converted natively.
            tokens: ``[M]`` integers.
            group_ids: as for ``assign``.
            kept_blocks: see ``Lease.commit_blocks``.

        Returns:
            The number of blocks that became shareable.

        Raises:
            LeaseError, UsageError: as for ``assign`` and ``append``.
        """
        published = self._externals("commit_blocks").commit_blocks(
            lease_id, block_ids, tokens, group_ids, self._clock.open, kept_blocks
        )
        if published and not self._clock.tracked:
            self._saver.want()
        if self._waiters:
            self._pending.advanced(lease_id)
            return published, self._settle()
        return published, self._outbox.pending

    @guarded
    def retire(self, lease_id: int, returns: str = "") -> tuple[bool, Effects]:
        """Drop the refs of a lease whose blocks the server's cache keeps; see ``Lease.retire``."""
        return self._externals("retire").retire(lease_id, returns), self._outbox.pending

    def _externals(self, call: str) -> ExternalBlocks:
        if self._external is None:
            raise UsageError(
                f"{call}: CacheConfig.external_device is False: allocate names the device blocks",
                hint="CacheConfig(external_device=True, ...) for device blocks of a server",
            )
        return self._external

    def append(
        self,
        lease_id: int,
        tokens: NDArray[np.int32] | list[int],
        items: Sequence[tuple[bytes, int, int]] = (),
    ) -> Done:
        """Set the tokens of the next positions, so that they can be indexed.

        Args:
            lease_id: a granted lease.
            tokens: ``[N]`` int32, or a list.
            items: (content hash, offset in the prompt, length) of each item among these positions.

        Raises:
            LeaseError: the lease has fewer positions left than ``tokens``.
            UsageError: an item is outside these positions or out of order; or an element of a list
                is not an integer of int32.
        """
        try:
            if items:
                self._core.append_items(lease_id, as_tokens(tokens), items)
                return None, self._outbox.pending
            try:
                self._core.append(lease_id, tokens)
                return None, self._outbox.pending
            except TypeError:  # an element of the list is not an `int` of int32
                pass
            self._core.append(lease_id, as_tokens(tokens))
            return None, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    def commit(
        self,
        lease_id: int,
        num_tokens: int,
        closes_step: bool = False,
        in_next_step: bool = False,
    ) -> tuple[int, Effects]:
        """Index the full blocks of the first ``num_tokens`` positions.

        Args:
            lease_id: a granted lease.
            num_tokens: absolute number of computed positions.
            closes_step: True if the next transition of the caller closes the open step.
            in_next_step: True if the step after the open one computes the positions.

        Returns:
            The number of blocks that became shareable.

        Raises:
            LeaseError: ``num_tokens`` exceeds the positions of the lease.
            UsageError: ``in_next_step``, and a server owns the device blocks, or the worker records
                checksums.
        """
        try:
            core = self._core
            step = self._clock.next if closes_step else self._clock.open
            if in_next_step:
                if self._external is not None or self._records_checksums:
                    what = "external_device" if self._external is not None else "verify='checksum'"
                    raise UsageError(f"commit: in_next_step cannot be used with {what}")
                step = self._clock.next + 1
            if self._external is not None:
                published = core.commit(lease_id, num_tokens, step)
                self._external.settle()
            elif self._records_checksums:
                first = core.computed_tokens(lease_id) // self._block_tokens
                published = core.commit(lease_id, num_tokens, step)
                computed = core.block_table(lease_id)[first : num_tokens // self._block_tokens]
                self._outbox.effects.computed.append(computed)
            else:
                published = core.commit(lease_id, num_tokens, step)
            if published and not (self._clock.tracked or in_next_step):
                self._saver.want()
            if self._waiters:
                self._pending.advanced(lease_id)
                return published, self._settle()
            return published, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    def extend(self, lease_ids: LeaseIds, num_tokens: int) -> tuple[bool, Effects]:
        """Add ``num_tokens`` positions to each lease; return False, and add none, without room.

        Raises:
            UsageError: a server owns the device blocks.
            LeaseError: a lease is not granted or listed twice, or ``num_tokens`` is out of range.
        """
        try:
            extended: bool | None = self._core.extend(lease_ids, num_tokens)
            if not extended and self._saver.saves_before_extend:
                # Save the blocks that are evicted next, or drop them if the host has no room.
                wanted = sum(self._blocks_to_add(lease_id, num_tokens) for lease_id in lease_ids)
                extended = self._saver.try_after_saving(
                    lambda: self._core.extend(lease_ids, num_tokens), wanted
                )
            if self._core.wants_backups():
                self._saver.want()
            if not extended:
                return False, self._outbox.pending
            if self._salts is not None:
                self._recount(lease_ids)
                return True, self._settle()
            return True, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    @guarded
    def advance_batch(
        self,
        lease_ids: NDArray[np.int64],
        tokens: NDArray[np.int32],
        width: int = 1,
        counts: NDArray[np.int32] | None = None,
        draft_tokens: int = 0,
    ) -> tuple[list[int], Effects]:
        """Name the tokens of a step, commit the positions before them, and add the next positions.

        Earlier rows get blocks first. Rows of released leases, and rows without tokens, change
        nothing.

        Args:
            lease_ids: ``[N]`` ids of granted or released leases.
            tokens: ``[N * width]``, row by row.
            width: tokens per row.
            counts: ``[N]`` leading tokens of each row that count; None for all.
            draft_tokens: positions that each lease gets behind its last token.

        Returns:
            The rows without room, whose leases are unchanged, in ascending order.

        Raises:
            LeaseError: a lease is not granted, is listed twice, or has not computed as many
                positions.
            UsageError: a token, a count or ``draft_tokens`` is out of range.
        """
        step_tokens = StepTokens(tokens, width, counts)
        refused = self._decoding.advance(lease_ids, step_tokens, draft_tokens)
        if self._external is not None:
            self._external.settle()
        if self._waiters or self._salts is not None:
            return refused, self._settle()
        return refused, self._outbox.pending

    def _blocks_to_add(self, lease_id: int, num_tokens: int) -> int:
        held = self._core.num_tokens(lease_id)
        return self._blocks_for(held + num_tokens) - self._blocks_for(held)

    def _recount(self, lease_ids: LeaseIds) -> None:
        for lease_id in map(int, lease_ids):
            self._quota.recount(lease_id, self._blocks_for(self._core.num_tokens(lease_id)))

    @guarded
    def truncate(self, lease_id: int, num_tokens: int) -> Done:
        """Give back the positions from ``num_tokens`` on.

        Raises:
            LeaseError: see ``Lease.truncate``.
        """
        core = self._core
        num_blocks = self._blocks_for(core.num_tokens(lease_id))
        keeper = core.truncate(lease_id, num_tokens, self._clock.open)
        if keeper:
            self._owners[keeper] = self._owners[lease_id]
            cut_blocks = num_blocks - self._blocks_for(num_tokens)
            self._quota.count(keeper, self._salt(lease_id), cut_blocks)
        if self._salts is not None:
            self._recount([lease_id])
        if self._waiters:  # the cut blocks may be enough for them
            self._pending.withdrawn(lease_id)
        return None, self._settle()

    @guarded
    def recompute_from(self, lease_id: int) -> tuple[int, Effects]:
        """Accept a failed onload; return the first position to compute again, or -1.

        Raises:
            LeaseError: a transfer still writes blocks of the lease, or its recurrent state or
                windows cannot be rolled back.
        """
        return self._core.recompute_from(lease_id), self._outbox.pending

    @guarded
    def fork(self, lease_id: int, owner: str) -> tuple[Fork, Effects]:
        """Open a second lease on the same positions.

        Raises:
            WouldBlock: the device has no room, or the salt's quota is used up.
            LeaseError: the lease is not granted, or its onloads are in flight.
        """
        salt = self._salt(lease_id)
        num_blocks = self._blocks_for(self._core.num_tokens(lease_id))
        if not self._quota.fits(salt, num_blocks):
            raise WouldBlock(
                f"fork: salt {salt!r} holds {self._quota.held(salt)} blocks; {num_blocks} more "
                f"exceed CacheConfig.salt_quota_blocks, which is {self._quota.limit_blocks}",
                hint="raise CacheConfig.salt_quota_blocks, or preempt a lease of this salt",
            )
        child, sources, targets = self._core.fork(lease_id, self._clock.open)
        if not child:
            raise WouldBlock(
                f"fork: no room for the blocks that lease {self.read.owner(lease_id)!r} does not "
                "share",
                hint="preempt another lease",
            )
        self._owners[child] = owner
        if self._salts is not None:
            self._salts[child] = salt
            self._quota.count(child, salt, num_blocks)
        slots = None
        if self._state_slots:
            slots = (self._core.state_slot(lease_id), self._core.state_slot(child))
        return Fork(child, sources, targets, slots), self._outbox.pending

    @guarded
    def snapshot(self, lease_id: int, num_tokens: int) -> tuple[tuple[int, int] | None, Effects]:
        """Reserve a slot for a snapshot of the recurrent state after ``num_tokens`` positions.

        Returns:
            (source, target) slots to copy on the device now; None when no snapshot is made.

        Raises:
            LeaseError: the lease is not granted, or ``num_tokens`` is not the committed number of
                positions or not a multiple of ``block_tokens``.
            UsageError: the model has no recurrent state.
        """
        source, target = self._core.snapshot(lease_id, num_tokens, self._clock.open)
        if self._saves_states and not self._clock.tracked:
            self._saver.want()
        return None if target < 0 else (source, target), self._outbox.pending

    @guarded
    def discard_snapshot(self, lease_id: int, slot: int) -> Done:
        """Note that the copy that ``snapshot`` has requested was not made."""
        self._core.discard_snapshot(lease_id, slot)
        return None, self._outbox.pending

    # --- preemption -----------------------------------------------------------------------------

    @guarded
    def preempt(self, lease_id: int) -> Done:
        """Take back the blocks of a lease, or the table that an earlier swap has moved.

        Raises:
            LeaseError: the lease waits for capacity, or it holds no blocks and no swapped table.
        """
        self._check_not_waiting(lease_id)
        self._preemption.preempt(lease_id)
        return None, self._settle()

    def _check_not_waiting(self, lease_id: int) -> None:
        if lease_id in self._requests:
            raise already_waits(self._owners.name(lease_id))

    @guarded
    def swap_out(self, lease_id: int) -> tuple[int | None, Effects]:
        """Begin to move the table of a lease to host memory.

        Returns:
            The transfer; 0 when there is nothing to move. None when the host tier has no room, or
            the cache was reset after the grant: the lease keeps its blocks.

        Raises:
            LeaseError: the lease is not granted, waits for capacity, or its onloads are in flight.
        """
        self._check_not_waiting(lease_id)
        transfer_id = self._preemption.swap_out(lease_id)
        return transfer_id, self._outbox.pending if transfer_id is None else self._settle()

    # --- batches and steps ----------------------------------------------------------------------

    @guarded
    def begin_batch(self, lease_ids: LeaseIds) -> tuple[int, Effects]:
        """Begin a batch that computes with these leases; return its number.

        Raises:
            LeaseError: a lease is not granted, is being swapped, or is listed twice.
        """
        return self._releases.begin_batch(lease_ids), self._outbox.pending

    @guarded
    def end_batch(self, batch_id: int, *, in_open_step: bool) -> Done:
        """End a batch and free the blocks of its released leases. Idempotent.

        With ``in_open_step``, the blocks are freed when the open step has finished.
        """
        self._releases.end_batch(batch_id, self._clock.open if in_open_step else 0)
        return None, self._settle()

    @guarded
    def track_steps(self, tracked: bool) -> Done:
        """Set whether commits may precede the computing; called before the first match."""
        self._clock.track(tracked)
        return None, self._outbox.pending

    def close_step(self) -> tuple[int, Effects]:
        """Close the open step and return its number; its committed blocks can be saved now."""
        if self._guard.failure is not None:
            return self.errors.refuse("close_step")
        try:
            step = self._clock.close()
            self._core.close_step(step)
            self._collect_backups()
            return step, self._outbox.pending
        except BaseException as error:
            self.errors.note(error)
            raise

    def finish_step(self, step: int) -> Done:
        """Note that the device has finished ``step`` and all steps before it. Idempotent."""
        if self._guard.failure is not None:
            return self.errors.refuse("finish_step")
        try:
            self._clock.finish(step)
            self._core.finish_step(step)
            return None, self._settle()
        except BaseException as error:
            self.errors.note(error)
            raise

    # --- transfers ------------------------------------------------------------------------------

    @guarded
    def collect_backups(self) -> tuple[bool, Effects]:
        """Begin the backups of the write policy; return False if there are none."""
        return self._collect_backups(), self._outbox.pending

    def _collect_backups(self) -> bool:
        begun = self._saver.collect()
        if self._external is not None:  # give up blocks that cannot be saved
            if not self._saver.is_active:
                self._core.give_up_saves()
            self._external.settle()
        return begun

    @guarded
    def save(self, num_blocks: int) -> tuple[int, Effects]:
        """Begin to save the blocks that must be saved before ``num_blocks`` can be evicted.

        Returns:
            The transfer that saves them; 0 when there are none.
        """
        return self._saver.make_clean(num_blocks), self._outbox.pending

    @guarded
    def complete(self, report: TransferReport) -> Done:
        """Account for the end of a transfer."""
        transfer_id = report.transfer_id
        self._releases.forget(self._plans.complete(report))
        self.peers.note_ends()
        self._granting.ended(transfer_id)
        if self.has_stores:
            self.fetches.ended(transfer_id)
            self.store_saver.want()
        self._preemption.ended(transfer_id)
        if report.outcome != "done":
            # Leases of the transfer may not compute the blocks that others wait for.
            self._pending.all_withdrawn()
        self._pending.reported(transfer_id)
        self._saver.want()  # the end of an onload publishes the blocks committed after it
        return None, self._settle()

    @guarded
    def note_cancelling(self, transfer_id: int) -> Done:
        """Note that the worker was asked to cancel a transfer: no other lease joins it."""
        self._core.mark_cancelling(transfer_id)
        return None, self._outbox.pending

    # --- control --------------------------------------------------------------------------------

    @guarded
    def change_gate(self, change: GateChange) -> Done:
        """Begin or end a pause or a hold; see ``Gate``.

        Raises:
            UsageError: ``"resume"`` without a pause.
        """
        self._gate.change(change)
        if self.has_stores:
            self.store_saver.want()
        return None, self._settle()

    @guarded
    def evict(self, num_blocks: int, tier: Tier) -> tuple[tuple[int, int], Effects]:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        Returns:
            (evicted blocks, transfer): more blocks can be evicted when the transfer has ended; the
            transfer is 0 if there is none.

        Raises:
            UsageError: ``tier`` is ``"device"``, whose blocks a server owns.
        """
        if tier == "host":
            return (self._core.evict_host(num_blocks), 0), self._settle()
        if self._external is not None:
            raise UsageError(
                "evict: with CacheConfig.external_device, the engine has no device blocks",
                hint="evict host blocks with tier='host'",
            )
        evicted = self._core.evict_device(num_blocks)
        saving = 0
        while evicted < num_blocks:
            saving = self._saver.save_oldest(num_blocks - evicted)
            # Without a transfer, take_write_backs has let blocks be dropped for which the host has
            # no room.
            more = 0 if saving else self._core.evict_device(num_blocks - evicted)
            if not more:
                break
            evicted += more
        return (evicted, saving), self._settle()

    @guarded
    def reset(self, reason: str, *, new_weights: bool = False) -> Done:
        """Drop all cached blocks and pins. Open leases keep their blocks, but publish no more.

        Args:
            reason: why, for the errors of pins.
            new_weights: True to explain later misses of these blocks by the change of the weights.
        """
        self._core.reset(new_weights=new_weights)
        self.pins.end_all(reason)
        self._pending.all_withdrawn()
        return None, self._settle()

    @guarded
    def begin_purge(self, salt: str) -> Done:
        """Drop all cached blocks and pins of a salt. Until ``end_purge``, leases of the salt use no
        cached block and publish none; those that are open now never do again."""
        self._core.purge(salt)
        self._purging[salt] += 1
        self.pins.end_lost("its salt was purged")
        self._pending.all_withdrawn()
        return None, self._settle()

    @guarded
    def end_purge(self, salt: str) -> Done:
        """Let new leases of the salt use and publish blocks again, unless another purge goes on."""
        self._purging[salt] -= 1
        self._purging += Counter()  # keeps positive counts
        return None, self._outbox.pending

    @guarded
    def resize(self, device_blocks: int) -> tuple[bool, Effects]:
        """Change the capacity of the device tier; return False if blocks beyond it are in use.

        Raises:
            UsageError: a server owns the device blocks.
        """
        if self._external is not None:
            self._core.resize_device(device_blocks)  # raises
        try:
            self._core.resize_device(device_blocks)
        except UsageError:
            return False, self._outbox.pending
        return True, self._settle()

    @guarded
    def sleep(self, tiers: frozenset[Tier]) -> Done:
        """Drop the cached blocks of these tiers, and begin no more offloads until ``wake_up``."""
        if "device" in tiers:
            self._core.forget_device()
        if "host" in tiers:
            self._core.forget_host()
        self._stop_offloads(True)
        return None, self._outbox.pending

    @guarded
    def wake_up(self) -> Done:
        """Allow offloads again: no tier is asleep any more."""
        self._stop_offloads(False)
        return None, self._outbox.pending

    def _stop_offloads(self, stopped: bool) -> None:
        self._saver.stopped = self.store_saver.stopped = stopped
        if stopped:
            self._collect_backups()  # begins none

    @guarded
    def close(self) -> Done:
        """End all waits and pins: the engine closes."""
        self._is_closed = self.store_saver.is_closing = True
        self._admission.refuse_all(
            lambda: ClosedError("allocate: the engine was closed while the lease waited")
        )
        self.pins.end_all("the engine closed")
        self._pending.close()
        return None, self._settle()

    @guarded
    def stop_saving(self) -> Done:
        """Begin no more offloads: the engine closes, and has waited for all leases."""
        self._stop_offloads(True)
        return None, self._outbox.pending

    @guarded
    def fail(self, reason: str) -> Done:
        """End all waits for capacity: the device or a rank has failed."""
        self._admission.refuse_all(lambda: BrokenEngineError(f"the worker failed: {reason}"))
        return None, self._settle()

    @guarded
    def lose_blocks(self, reason: str) -> Done:
        """Drop all cached blocks and take the blocks of all leases: a rank was lost."""
        self._preemption.lost_rank = reason
        self.pins.end_all("a rank was lost")
        self._core.reset()
        self._preemption.take_all()
        self._pending.all_withdrawn()
        return None, self._settle()

    @guarded
    def restart(self) -> Done:
        """Serve again: all ranks have been restarted, without any cached block."""
        self._preemption.take_all()
        self._preemption.lost_rank = ""
        return None, self._settle()

    # --- checks ---------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """Return a description of each violated invariant: I1-I6 and those of the lines."""
        core, live = self._core, self._owners
        held = {
            lease_id: self._blocks_for(core.num_tokens(lease_id))
            for lease_id in live
            if core.is_granted(lease_id)
        }
        found = core.violations() + self._admission.check(live) + self._pending.check(live)
        found += self._quota.check(held, live) + self.pins.check() + self.fetches.check()
        if self._is_closed and (len(self._admission) or self._quota.requests()):
            found.append("lines: leases wait for capacity of a closed engine")
        statistics = core.statistics()
        if (in_core := statistics.leases + statistics.releasing_leases) != len(live):
            found.append(f"leases: the core has {in_core}, the scheduler {len(live)}")
        return found

    def _salt(self, lease_id: int) -> str:
        return "" if self._salts is None else self._salts.get(lease_id, "")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
