"""RequestBlocks: the leases behind the requests of one scheduler, in few crossings."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiokv import (
    AllocateTimeout,
    ClosedError,
    Hit,
    LeaseError,
    LeaseState,
    RequestTooLarge,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.connectors.fastdeploy.requests import items_of, prompt_length, tokens_of
from aiokv.observe.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import Lease
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.sync import Answer, Calls, SyncEngine, SyncLease

log = Log(__name__)

SAVE_WAIT_SECONDS: Final = 0.02  # for saves in flight, before blocks count as missing


class Holding:
    """What one request holds in the cache.

    ::

        table:  | matched | given to the scheduler | spare |
                                          given ──►|

    Attributes:
        request: the scheduler's object.
        lease: the lease; None before the first block of a request without a hit.
        hit: cached prefix by tier, as it was granted.
        table: ids of all blocks of the lease.
        given: blocks at the beginning of ``table`` that the scheduler has in its block table.
        named_tokens: positions at the beginning whose tokens the lease knows.
        prefill_tokens: prompt and generated tokens at the time of the match.
        base_outputs: generated tokens among them.
        scheduled_tokens: positions of batches that have been handed to the workers.
        committed_tokens: positions that the lease has committed.
        usable_blocks: blocks at the beginning that are at the same place in the scheduler's block
            table; None while all are.
        is_scheduled: True when a batch has been scheduled that uses the blocks.
        shares_blocks: False when no other request may find the blocks.
        has_failed: True when an onload of the request has failed: its KV is wrong.
    """

    __slots__ = (
        "base_outputs",
        "committed_tokens",
        "given",
        "has_failed",
        "hit",
        "is_scheduled",
        "lease",
        "named_tokens",
        "prefill_tokens",
        "request",
        "scheduled_tokens",
        "shares_blocks",
        "table",
        "usable_blocks",
    )

    def __init__(self, request: Request, prefill_tokens: int, *, shares_blocks: bool) -> None:
        self.request = request
        self.shares_blocks = shares_blocks
        self.has_failed = False
        self.lease: SyncLease | None = None
        self.hit = Hit(0, 0)
        self.table: list[int] = []
        self.given = 0
        self.named_tokens = self.prefill_tokens = prefill_tokens
        self.base_outputs = prefill_tokens - prompt_length(request)
        self.scheduled_tokens = 0
        self.committed_tokens = 0
        self.usable_blocks: int | None = None
        self.is_scheduled = False

    @property
    def spare(self) -> int:
        """Number of blocks that the scheduler has not taken yet."""
        return len(self.table) - self.given

    def check_alignment(self) -> None:
        """Find out if the scheduler uses its blocks in another order than the lease.

        It does when it puts blocks of one allocation into a second table (``extend_block_tables``).
        The blocks behind that place are never shared.
        """
        in_use = len(self.request.block_tables)
        if in_use < self.given and (self.usable_blocks is None or in_use < self.usable_blocks):
            self.usable_blocks = in_use

    def computed_tokens(self, tail_tokens: int) -> int:
        """Return the number of leading positions whose KV later batches find computed.

        These are the positions of batches that the workers got before, and those before a generated
        token that has arrived.
        """
        outputs = len(self.request.output_token_ids)
        computed = self.scheduled_tokens
        if outputs > self.base_outputs:
            computed = max(computed, prompt_length(self.request) + outputs - tail_tokens)
        return computed


class RequestBlocks:
    """Leases of the requests of one scheduler, by request id. Any thread.

    Blocks that the workers compute become shareable when the batch after theirs is scheduled: all
    batches go through the workers in order, so a request that finds a block computes after it.

    Args:
        engine: the cache; it is open.
        sizes: settings of the scheduler.
        step_event: returns an event behind all work that the runner has submitted, or None when all
            of it has finished; None with ranks, which close steps themselves.
        save_wait_seconds: how long an allocation waits for blocks that are being saved.
    """

    def __init__(
        self,
        engine: SyncEngine,
        sizes: Sizes,
        step_event: Callable[[], Any] | None = None,
        save_wait_seconds: float = SAVE_WAIT_SECONDS,
    ) -> None:
        self.engine = engine
        self._sizes = sizes
        self._block_tokens = sizes.block_tokens
        self._step_event = step_event
        self._save_wait_seconds = save_wait_seconds
        self._lock = threading.RLock()
        self._holdings: dict[str, Holding] = {}
        self._room = 0  # blocks that can be taken for sure
        self._promised = 0  # blocks that a caller was told it can take
        self.last_step = 0  # number of the step that was closed last
        self._probe = engine.match([0], read=False, write=False, owner="FastDeploy")

    def close(self) -> None:
        """Release everything that is held."""
        with self._lock:
            calls = self.engine.calls()
            for holding in self._holdings.values():
                _release(calls, holding)
            calls.release(self._probe)
            self._holdings.clear()
            calls.run()

    # --- state ------------------------------------------------------------------------------------

    def holding(self, request_id: str) -> Holding | None:
        """Return what a request holds; None for nothing."""
        return self._holdings.get(request_id)

    def note_resize(self, sizes: Sizes) -> None:
        """Take over new sizes, after the engine has changed its own."""
        with self._lock:
            self._sizes, self._room = sizes, 0

    @property
    def spare_blocks(self) -> int:
        """Number of blocks that leases have ahead of the scheduler."""
        with self._lock:
            return sum(holding.spare for holding in self._holdings.values())

    # --- verbs of requests ------------------------------------------------------------------------

    def match(self, request: Request) -> Holding:
        """Match the tokens of a request, and grant the cached prefix, in one crossing.

        Onloads of blocks in host memory begin. Without room for these, only the prefix on the
        device is granted. What the request held before is given back.
        """
        tokens = tokens_of(request)
        with self._lock:
            calls = self.engine.calls()
            self._record_end(calls, request.request_id)
            self._record_commits(calls)
            holding = self._hold(request, len(tokens))
            if not holding.shares_blocks:
                calls.run(raise_errors=False)
                return holding
            holding.lease = self._match(calls, holding, tokens, read=True)
            granted = calls.add(_grant_hit, holding.lease)
            calls.run(raise_errors=False)
            if granted.error is None:
                holding.hit, holding.table = granted.value
                holding.given = len(holding.table)
                cached = holding.given * self._block_tokens
                holding.scheduled_tokens = holding.committed_tokens = cached
                self._room = max(self._room - holding.given, 0)
            elif _is_refusal(granted.error):  # of the items, for example
                log.warning(
                    "fastdeploy.request_not_shared",
                    request_id=request.request_id, reason=str(granted.error),
                )  # fmt: skip
                holding.shares_blocks = False
            else:
                del self._holdings[request.request_id]
                raise granted.error
            return holding

    def can_allocate(self, num_blocks: int) -> bool:
        """Return True if ``num_blocks`` blocks can be allocated; exact.

        Waits shortly when blocks are only missing because they are being saved.
        """
        with self._lock:
            if num_blocks > self._room and not self._find_room(num_blocks):
                return False
            self._promised = max(num_blocks, 0)
            return True

    def allocate(self, request: Request, num_blocks: int) -> list[int]:
        """Take blocks for the next positions of a request.

        Returns:
            Their ids; empty without room.

        Raises:
            WouldBlock: without room, although ``can_allocate`` has just promised it.
        """
        with self._lock:
            holding = self._holdings.get(request.request_id)
            if holding is None:
                holding = self._hold(request, len(tokens_of(request)))
            holding.check_alignment()
            missing = num_blocks - holding.spare
            if missing > 0 and not self._take(holding, missing):
                if num_blocks > self._promised:
                    return []
                raise WouldBlock(
                    f"request {request.request_id!r}: no room for {num_blocks} blocks",
                    hint="schedule the request again in the next step",
                )
            first = holding.given
            holding.given += num_blocks
            holding.is_scheduled = True
            self._promised = max(self._promised - num_blocks, 0)
            return holding.table[first : holding.given]

    def end(self, request: Request) -> None:
        """Commit what is computed, and give all blocks back. Idempotent.

        Full blocks of known tokens stay cached.
        """
        with self._lock:
            calls = self.engine.calls()
            if self._record_end(calls, request.request_id):
                calls.run(raise_errors=False)

    def end_all(self) -> None:
        """Give all blocks of all requests back; nothing that is not shared yet stays cached."""
        with self._lock:
            calls = self.engine.calls()
            for holding in self._holdings.values():
                _release(calls, holding)
            self._holdings.clear()
            self._record_step(calls)
            calls.run(raise_errors=False)

    def end_schedule(self) -> int:
        """Note that a batch has been scheduled, in one crossing.

        Commits what earlier batches compute, takes blocks ahead for requests that need some soon,
        asks for the room of the next step, and closes the step.

        Returns:
            Number of the step that the workers close before they compute the batch.
        """
        with self._lock:
            calls = self.engine.calls()
            self._record_commits(calls)
            ahead = [holding for holding in self._holdings.values() if self._needs_blocks(holding)]
            blocks = self._sizes.decode_blocks
            leases = [holding.lease for holding in ahead if holding.lease is not None]
            extended = calls.extend(leases, blocks * self._block_tokens)
            room = self._sizes.step_blocks(len(self._holdings))
            can_allocate = calls.can_allocate(self._probe, room * self._block_tokens)
            self._record_step(calls)
            calls.run(raise_errors=False)
            if extended.error is None:
                for holding in ahead:
                    self._update_table(holding)
            has_room = can_allocate.error is None and can_allocate.value
            self._room = room if has_room else self.engine.statistics().device_free
            self._promised = 0
            for holding in self._holdings.values():
                holding.scheduled_tokens = max(
                    holding.scheduled_tokens,
                    min(holding.request.num_computed_tokens, holding.prefill_tokens),
                )
            return self.last_step

    def commit_arrived(self, request: Request) -> None:
        """Share the blocks of a request whose tokens have arrived."""
        with self._lock:
            holding = self._holdings.get(request.request_id)
            if holding is not None:
                calls = self.engine.calls()
                self._record_commit(calls, holding)
                if len(calls):
                    self._record_step(calls)
                    calls.run(raise_errors=False)

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

    def _hold(self, request: Request, num_tokens: int) -> Holding:
        shares_blocks = self._sizes.shares_blocks and items_of(request) is not None
        holding = Holding(request, num_tokens, shares_blocks=shares_blocks)
        self._holdings[request.request_id] = holding
        return holding

    def _match(
        self, calls: Calls, holding: Holding, tokens: NDArray[np.int32], *, read: bool
    ) -> SyncLease:
        shares = holding.shares_blocks
        return calls.match(
            tokens,
            items=(items_of(holding.request) or ()) if shares else (),
            owner=holding.request.request_id,
            read=read and shares,
            write=shares,
        )

    def _record_commits(self, calls: Calls) -> None:
        for holding in self._holdings.values():
            self._record_commit(calls, holding)

    def _record_commit(self, calls: Calls, holding: Holding) -> None:
        """Commit the full blocks that are computed and not committed yet."""
        lease = holding.lease
        if lease is None or not holding.table or not holding.shares_blocks:
            return
        holding.check_alignment()
        usable = len(holding.table) if holding.usable_blocks is None else holding.usable_blocks
        size = self._block_tokens
        computed = min(holding.computed_tokens(self._sizes.tail_tokens), usable * size)
        if not self._sizes.shares_outputs:
            computed = min(computed, holding.prefill_tokens)
        computed -= computed % size
        if computed <= holding.committed_tokens:
            return
        if computed > holding.named_tokens:
            outputs = holding.request.output_token_ids
            first = holding.named_tokens - prompt_length(holding.request)
            calls.append(lease, outputs[first : first + computed - holding.named_tokens])
            holding.named_tokens = computed
        calls.commit(lease, computed)
        holding.committed_tokens = computed

    def _record_end(self, calls: Calls, request_id: str) -> bool:
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return False
        if holding.is_scheduled:
            self._record_commit(calls, holding)
        _release(calls, holding)
        self._record_step(calls)
        return True

    def _record_step(self, calls: Calls) -> None:
        """Close the step: transfers may write the blocks that were given back in it."""
        calls.add(self._close_step)

    def _close_step(self) -> None:
        event = None if self._step_event is None else self._step_event()
        self.last_step = self.engine.cache.step(event)

    # --- room -------------------------------------------------------------------------------------

    def _needs_blocks(self, holding: Holding) -> bool:
        """Return True for a request that decodes and whose next blocks are due."""
        if not self._sizes.decode_blocks or holding.spare or holding.usable_blocks is not None:
            return False
        outputs = len(holding.request.output_token_ids)
        total = prompt_length(holding.request) + outputs
        left = holding.given * self._block_tokens - total
        return outputs > holding.base_outputs and left <= self._sizes.decode_slots

    def _take(self, holding: Holding, num_blocks: int) -> bool:
        """Append blocks to the lease of a request, for which the engine may have to save others."""
        return self._extend(holding, num_blocks) or (
            self._find_room(num_blocks) and self._extend(holding, num_blocks)
        )

    def _extend(self, holding: Holding, num_blocks: int) -> bool:
        """Append blocks to the lease of a request; return False without room."""
        num_tokens = num_blocks * self._block_tokens
        calls = self.engine.calls()
        if holding.table and holding.lease is not None:
            answer: Answer[Any] = calls.extend([holding.lease], num_tokens)
        else:
            if holding.lease is not None:  # without a hit; a hit that came later is too late
                calls.release(holding.lease)
            tokens = tokens_of(holding.request)[: holding.prefill_tokens]
            holding.lease = self._match(calls, holding, tokens, read=False)
            answer = calls.try_allocate(holding.lease, num_tokens)
        calls.run(raise_errors=False)
        if isinstance(answer.error, LeaseError) and self._accept_failure(holding):
            return self._extend(holding, num_blocks)
        if isinstance(answer.error, WouldBlock | RequestTooLarge) or answer.value is False:
            return False
        self._update_table(holding)
        self._room = max(self._room - num_blocks, 0)
        return True

    def _accept_failure(self, holding: Holding) -> bool:
        """Let a request with a failed onload go on, without sharing anything any more.

        The worker raises the error of the onload; ``failed_requests`` names the request.
        """
        if holding.lease is None or holding.lease.state is not LeaseState.FAILED:
            return False
        holding.has_failed, holding.shares_blocks = True, False
        with suppress(TransferError):
            holding.lease.layers.wait_all()
        holding.lease.recompute_from()
        return True

    def _update_table(self, holding: Holding) -> None:
        if holding.lease is not None:
            holding.table = holding.lease.block_table.tolist()

    def _find_room(self, num_blocks: int) -> bool:
        """Ask the engine for room; take spare blocks back, or wait for saves, if that helps."""
        if self._has_room(num_blocks):
            return True
        spares = [holding for holding in self._holdings.values() if holding.spare]
        if spares:
            calls = self.engine.calls()
            for holding in spares:
                if holding.lease is not None:
                    calls.truncate(holding.lease, holding.given * self._block_tokens)
            self._record_step(calls)
            calls.run(raise_errors=False)
            for holding in spares:
                self._update_table(holding)
            if self._has_room(num_blocks):
                return True
        statistics = self.engine.statistics()
        if statistics.device_free + statistics.evictable_blocks < num_blocks:
            return False
        future = self._probe.allocate(
            num_blocks * self._block_tokens, timeout=self._save_wait_seconds
        )
        try:
            future.result()
        except (AllocateTimeout, RequestTooLarge):
            return False
        calls = self.engine.calls()
        calls.preempt(self._probe)
        self._record_step(calls)
        calls.run()
        self._room = num_blocks
        return True

    def _has_room(self, num_blocks: int) -> bool:
        if num_blocks <= 0:
            return True
        answer = self.engine.calls()
        can_allocate = answer.can_allocate(self._probe, num_blocks * self._block_tokens)
        answer.run(raise_errors=False)
        if isinstance(can_allocate.error, RequestTooLarge) or not can_allocate.value:
            return False
        self._room = num_blocks
        return True


def _release(calls: Calls, holding: Holding) -> None:
    if holding.lease is not None:
        calls.release(holding.lease)


def _grant_hit(lease: SyncLease) -> tuple[Hit, list[int]]:
    """Take the cached prefix, or the part on the device if the rest has no room. On the loop."""
    inner: Lease = lease.inner
    found = inner.hit
    for num_tokens in (found.total, found.device_tokens):
        if num_tokens and inner.try_allocate(num_tokens):
            if inner.cached_tokens != num_tokens:
                raise UsageError(f"{inner!r} was granted {inner.cached_tokens} cached tokens")
            hit = Hit(found.device_tokens, num_tokens - found.device_tokens)
            return hit, inner.block_table.tolist()
    return Hit(0, 0), []


def _is_refusal(error: BaseException) -> bool:
    """Return True if a prompt was refused for its contents."""
    cause = error.__cause__
    return isinstance(cause, UsageError) and not isinstance(cause, ClosedError)


def _state(lease: SyncLease) -> LeaseState:
    return lease.inner.state
