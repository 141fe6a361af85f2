"""Lease: the cached blocks that one request uses, and the blocks that the request computes."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Final, Self

from aiokv.base import checks
from aiokv.base.callers import outer_caller
from aiokv.base.checks import MAX_INT32, Unique
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.logs import Log
from aiokv.base.plan import clone_plan
from aiokv.base.types import LeaseState, as_block_ids, as_items, as_priority, as_tokens
from aiokv.base.usage import Usage
from aiokv.engine.misses import missed_ranges
from aiokv.engine.receiving import Receiving
from aiokv.errors import (
    LeaseError,
    TransferError,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.peers.ticket import MAX_TIMEOUT_SECONDS
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.misses import MissedRange
    from aiokv.base.types import Hit, Item, TokenIds
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.worker.device.base import Event
    from aiokv.worker.views import LayerView

log = Log(__name__)

# Modules that call `release` for the application. Others are not searched for the caller.
_RELEASING_MODULES: Final = frozenset({"aiokv.engine.lease", "aiokv.engine.batches"})
_NO_WAIT: Final = 0.0  # compared by identity, so the default needs no check


class Lease(Unique):
    """Blocks of one request, as ``engine.match`` returns them; only the engine makes leases.

    States (see :class:`LeaseState`): *matched* (holds no blocks) -> *granted* (references to the
    cached blocks, own blocks for the other positions) -> *released* (further calls raise
    ``LeaseError``). Any thread may use ``id``, ``owner``, ``salt``, ``block_table``,
    ``window_table``, ``layers.gpu_wait`` and ``layers.is_done``. All other methods must be called
    on the engine's loop, and raise ``UsageError`` elsewhere. A lease cannot be copied; :meth:`fork`
    makes a second one.

    Attributes:
        record: state that the engine keeps for the lease; only for the engine.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record

    @property
    def id(self) -> int:
        """Number of the lease in its engine; 0 once released."""
        return self.record.id

    @property
    def owner(self) -> str:
        """Name of the request for error and log messages."""
        return self.record.owner

    @property
    def salt(self) -> str:
        """Namespace of the prompt, whose quota counts the blocks."""
        return self.record.salt

    @property
    def layers(self) -> LayerView:
        """View of the transfers that the lease waits for; done when there are none."""
        return self.record.layers

    # --- capacity -----------------------------------------------------------------------------

    def __await__(self) -> Generator[None, None, Self]:
        """Return the lease without suspending, for ``await engine.match(...)``."""
        yield from ()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.record.id:
            self.release()

    async def allocate(
        self,
        num_tokens: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
        wait_pending: float = _NO_WAIT,
        wait_store: float = _NO_WAIT,
        queued_tokens: int = 0,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> Self:
        """Wait for capacity, then take the blocks of ``num_tokens`` positions at once.

        The engine matches the prefix again when it grants the lease: from then on,
        ``cached_tokens`` is final, and the onloads have started.

        For chunked prefill, allocate the whole prompt, and compute it in chunks. A server that
        allocates only the first chunk, and calls ``extend`` for the later ones, admits requests
        that then preempt one another; and ``extend`` adds empty blocks, so the model computes
        cached blocks beyond ``num_tokens`` again. With ``reserve_blocks`` of at least one block per
        running request, each grant leaves blocks for the next ``extend``.

        Args:
            num_tokens: absolute number of positions, 1 to 2147483647.
            priority: an integer; a lower number is granted first, equal numbers in order of
                arrival.
            timeout: seconds to wait for capacity; None or ``math.inf`` for no limit.
            wait_pending: seconds to wait first for blocks that another lease is computing; when
                the time has passed, this lease computes the blocks again.
            wait_store: seconds to wait for blocks that a store has. The lease keeps its place in
                line meanwhile, and other leases may be granted before it. 0 asks no store,
                ``math.inf`` sets no limit. The lease does not wait for blocks that the model
                computes sooner: see ``CacheConfig.prefill_tokens_per_second``. Blocks that arrive
                later are cached for the next lease.
            queued_tokens: number of tokens of other prompts that the model computes before this
                one, at least 0. Blocks that arrive from a store in this time do not delay the
                request. It has no effect without ``wait_store``.
            reserve_blocks: free or evictable device blocks that the grant leaves to ``extend``,
                also when the lease has waited; None for ``CacheConfig.reserve_blocks``. A lease
                that waits for a large reserve keeps the leases behind it waiting.
            ttl_seconds: seconds after the grant at which the engine releases the lease, unless it
                is used before: see ``expire_after``. None for no limit.

        Returns:
            The lease itself, granted.

        Raises:
            AllocateTimeout: ``timeout`` has passed. The lease holds no blocks and may try again.
            RequestTooLarge: the device, without the reserve, or the salt's quota can never hold the
                request; raised without waiting.
            LeaseError: the lease is released (also while it waits), is granted already, or waits
                in another task; or ``num_tokens`` is out of range.
            UsageError: ``num_tokens``, ``priority``, ``queued_tokens`` or ``reserve_blocks`` is not
                an integer; ``queued_tokens``, ``reserve_blocks`` or ``ttl_seconds`` is negative; or
                another argument is not a number. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: the lease holds no blocks, as after ``match``.
        Checkpoint: only when the lease has to wait.
        """
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        if timeout is not None:
            timeout = checks.timeout(timeout)
        if type(priority) is not int:
            priority = as_priority(priority)
        if reserve_blocks is not None:
            reserve_blocks = checks.reserve_blocks(reserve_blocks)
        if ttl_seconds is not None:
            ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        record = self.record
        granting = record.leases.granting
        if wait_pending is not _NO_WAIT:
            wait_pending = checks.seconds("wait_pending", wait_pending)
            if wait_pending > 0 and self.pending_tokens:
                await granting.wait_pending(record, checks.timeout(wait_pending))
        if wait_store is not _NO_WAIT:
            wait_store = checks.seconds("wait_store", wait_store)
        if wait_store > 0:
            limit = checks.timeout(wait_store)
            queued_tokens = checks.integer("queued_tokens", queued_tokens, minimum=0)
            await granting.allocate_from_stores(
                record, num_tokens, priority, timeout, limit, queued_tokens, reserve_blocks
            )
        elif not granting.allocate(record, num_tokens, priority, reserve_blocks):
            await granting.wait_granted(record, num_tokens, timeout)
        if ttl_seconds is not None:
            self.expire_after(ttl_seconds)
        return self

    def try_allocate(
        self,
        num_tokens: int,
        *,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> bool:
        """Allocate without waiting; return False if that is not possible now.

        Args:
            num_tokens: absolute number of positions, 1 to 2147483647.
            reserve_blocks: as for ``allocate``.
            ttl_seconds: as for ``allocate``.

        Returns:
            True when the lease is granted. False, and nothing changed, when too few blocks are
            free or evictable, when this or another lease waits for capacity, or when granting is
            paused.

        Raises:
            RequestTooLarge: the device, without the reserve, or the salt's quota can never hold the
                request.
            LeaseError: the lease is released, or is granted already; or ``num_tokens`` is out of
                range. Nothing changed.
            UsageError: ``num_tokens`` or ``reserve_blocks`` is not an integer, ``ttl_seconds`` is
                not a number, or one of the latter two is negative. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        if reserve_blocks is not None:
            reserve_blocks = checks.reserve_blocks(reserve_blocks)
        if ttl_seconds is not None:
            ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        granting = self.record.leases.granting
        if not granting.try_allocate(self.record, num_tokens, reserve_blocks=reserve_blocks):
            return False
        if ttl_seconds is not None:
            self.expire_after(ttl_seconds)
        return True

    def can_allocate(self, num_tokens: int, *, reserve_blocks: int | None = None) -> bool:
        """Return True if ``try_allocate(num_tokens)`` would succeed now; changes nothing.

        The answer is exact. ``attention.device.free + evictable_blocks`` of the statistics is an
        upper bound: it includes blocks that are being copied, or that have to be saved before they
        can be evicted. The cached blocks of the lease need no room. The call costs as much as
        ``try_allocate``. ``CacheEngine.allocatable_blocks`` answers without a lease.

        Args:
            num_tokens: absolute number of positions, 1 to 2147483647.
            reserve_blocks: as for ``allocate``.

        Raises:
            RequestTooLarge: the device, without the reserve, or the salt's quota can never hold the
                request.
            LeaseError: the lease is released, or is granted already; or ``num_tokens`` is out of
                range.
            UsageError: ``num_tokens`` or ``reserve_blocks`` is not an integer, or
                ``reserve_blocks`` is negative.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """
        if reserve_blocks is not None:
            reserve_blocks = checks.reserve_blocks(reserve_blocks)
        num_tokens = checks.integer("num_tokens", num_tokens)
        leases = self.record.leases
        leases.check_open()
        return leases.scheduler.can_allocate(self.record.live_id(), num_tokens, reserve_blocks)

    async def preempt(self, *, swap: bool = False) -> None:
        """Give the device blocks back; ``resume`` takes blocks again.

        Commit all computed positions first.

        A swap waits until no batch computes with the lease (see ``CacheEngine.computing``). Blocks
        that were committed in the open step move after ``engine.step`` has closed the step, so do
        not await ``preempt`` before that call. While the table moves, the lease can only be
        released.

        Recurrent state and sliding windows stay on the device, where another lease may take their
        place. The lease then resumes at the last block boundary that can still be hit.

        Args:
            swap: True to move the whole block table, including the partial last block, to host
                memory and keep it there. False to keep full blocks only as cached blocks, which can
                be evicted: the model computes all other positions again. False also gives up a
                table that an earlier swap has moved.

        Raises:
            WouldBlock: swap: the host tier has no room, or the cache was reset. The lease keeps
                its blocks, and nothing was evicted.
            TransferError: swap: the copy failed. The lease keeps its blocks.
            LeaseError: the lease is released, or waits for capacity. Swap: the lease is not
                granted, its onloads are in flight, or the call is made inside the ``with`` block of
                a batch that computes with it.
            ClosedError: the engine is closed or closing; also raised while a swap waits for a
                batch.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: a swap that has begun completes in the background.
        """
        record = self.record
        leases = record.leases
        leases.check_open()
        if swap:
            await self._swap_out()
            return
        lease_id = record.live_id()
        leases.apply(leases.scheduler.preempt(lease_id))
        leases.used(lease_id)
        record.leave_layers()
        if leases.observers.active:
            leases.observers.end_grant(lease_id, "preempted")
        self._log_preempted(lease_id, swap=False)
        if leases.tickets:
            leases.peer_tickets.gave_back(lease_id, "the lease was preempted")

    async def _swap_out(self) -> None:
        record = self.record
        leases = record.leases
        await leases.computing.wait_ended(record)
        await leases.peer_tickets.stop(record.live_id(), "the lease was preempted")
        while saving := leases.read.saving(record.live_id()):
            await leases.transfers.ended(saving)
            await leases.computing.wait_ended(record)
        leases.check_open()
        lease_id = record.live_id()
        transfer_id = leases.apply(leases.scheduler.swap_out(lease_id))
        if transfer_id is None:
            raise WouldBlock(
                "preempt: the host tier has no room for the block table, or the cache was reset "
                "after the grant",
                hint="preempt without swap, or raise CacheConfig.host_blocks",
            )
        leases.used(lease_id)
        record.leave_layers()
        if leases.observers.active:
            leases.observers.end_grant(lease_id, "swapped")
        if not transfer_id:
            return
        if leases.observers.active:
            leases.observers.caused(lease_id, transfer_id)
        await leases.transfers.ended(transfer_id)
        if self.state in (LeaseState.GRANTED, LeaseState.FAILED):
            raise TransferError(
                "preempt: the copy of the block table to host memory failed; the lease keeps its "
                "blocks",
                direction="offload",
            )
        self._log_preempted(lease_id, swap=True)

    def _log_preempted(self, lease_id: int, *, swap: bool) -> None:
        owner = self.record.leases.read.owner(lease_id)
        log.info("lease.preempted", lease_id=lease_id, owner=owner, swap=swap)

    async def resume(
        self,
        num_tokens: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
        reserve_blocks: int | None = None,
    ) -> Self:
        """Allocate again after ``preempt``.

        The first ``cached_tokens`` positions then need no computing. After a reset, all positions
        must be computed again.

        Args:
            num_tokens: absolute number of positions, 1 to 2147483647; after a swap at least the
                number of positions that were computed before the swap.
            priority: as for ``allocate``.
            timeout: as for ``allocate``.
            reserve_blocks: as for ``allocate``.

        Returns:
            The lease itself, granted.

        Raises:
            AiokvError: as for ``allocate``. The lease stays preempted; a swapped table
                stays in host memory.

        Cancellation: the lease stays preempted, and can be resumed later.
        """
        return await self.allocate(
            num_tokens, priority=priority, timeout=timeout, reserve_blocks=reserve_blocks
        )

    def expire_after(self, seconds: float) -> None:
        """Let the engine release the lease when ``seconds`` have passed, unless it is used before.

        For blocks that are allocated ahead of work that may not arrive, such as the decode blocks
        of a request whose prefill runs on another server. A use ends the limit: a successful
        ``commit``, ``append``, ``extend``, ``truncate``, ``fork``, ``snapshot``, ``preempt``,
        ``CacheEngine.computing`` or ``CacheEngine.advance`` of the lease, a call of ``receive`` or
        ``send``, and ``keep``. ``advance`` does not if it has no room for the lease. Reading
        ``block_table`` or other properties does not. Another ``expire_after`` replaces the limit.

        The engine then releases the lease as ``release`` does: blocks that a batch or a transfer
        uses are given back when these have ended. Methods of an expired lease raise ``LeaseError``
        with the time of the expiry; ``release`` has no effect. ``Statistics.expired_leases`` counts
        these leases.

        Args:
            seconds: from now, on the clock of the engine's loop; ``math.inf`` for no limit.

        Raises:
            LeaseError: the lease is not granted, or is released. Nothing changed.
            UsageError: ``seconds`` is negative or not a number. Nothing changed.
            ClosedError: the engine is closed.
        """
        seconds = checks.seconds("seconds", seconds, minimum=0.0)
        record = self.record
        leases = record.leases
        leases.check_loop()
        state = leases.read.state(record.live_id())
        if state not in (LeaseState.GRANTED, LeaseState.FAILED):
            raise LeaseError(
                f"expire_after: {self!r} is {state.value}; only a granted lease can expire",
                hint="call allocate first",
            )
        leases.expiries.start(record, seconds)

    def keep(self) -> None:
        """End the limit of ``expire_after`` or ``ttl_seconds``. Idempotent.

        Raises:
            LeaseError: the lease has expired, or is released.
            ClosedError: the engine is closed.
        """
        self.record.leases.check_loop()
        self.record.leases.used(self.record.live_id())

    def fork(self, *, owner: str = "", stream: object = None) -> Lease:
        """Return a second lease on the same positions, e.g. for n > 1 samples of one prompt.

        Both leases share the full blocks; the other blocks are copied on the device.

        Args:
            owner: name of the new lease; empty for the name of this lease.
            stream: compute stream in whose order the blocks are copied; required on a GPU.

        Raises:
            WouldBlock: the device has no room for the copied blocks, or the salt's quota is used
                up. Nothing changed.
            UsageError: the tensors are on a GPU and ``stream`` is None, or the model has window
                groups. Nothing changed.
            LeaseError: the lease is not granted, or its onloads are in flight. Nothing changed.
            ClosedError: the engine is closed or closing.
        """
        checks.text("owner", owner)
        record = self.record
        leases = record.leases
        leases.check_open()
        owner = owner or record.owner
        fork = leases.apply(leases.scheduler.fork(record.live_id(), owner))
        leases.used(record.id)
        child = leases.forked(fork.lease_id, owner, record.salt)
        worker = leases.worker.steps
        try:
            worker.clone(clone_plan(ATTENTION, fork.source_blocks, fork.target_blocks), stream)
            if fork.state_slots is not None:
                self._copy_state(*fork.state_slots, stream)
        except BaseException:
            child.release()
            raise
        if leases.verifies:
            worker.record_checksums(fork.target_blocks, leases.read.open_step)
        return child

    def release(self, after: Event | None = None, *, returns: str = "") -> None:
        """Release the lease and give all its blocks back. Idempotent.

        When a batch in flight computes with the lease, its blocks are reused after the batch has
        ended.

        Args:
            after: event that was recorded on the compute stream after the last work that uses the
                blocks and after all other work of the open step; the call closes the step with this
                event. None leaves the step open.
            returns: label of the request, which tells when a request with the same prefix may come,
                e.g. ``"tool_use"`` or ``"end_turn"``; at most 64 characters, ``""`` for none. With
                ``eviction_policy="adaptive"``, the engine learns from later requests what a label
                means; the text has no meaning of its own. The first 14 different labels are learned
                one by one, all others as one. ``"lru"`` ignores labels.

        Raises:
            UsageError: the worker cannot wait for an event of this type, or ``returns`` is no str
                or too long; nothing changed.
        """
        record = self.record
        if not record.id:
            return
        if after is not None:
            after = as_event("after", after)
        if returns != "":
            checks.label("returns", returns)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") in _RELEASING_MODULES:
            frame = outer_caller().frame
        record.end = (frame.f_code, frame.f_lasti)
        record.leases.release(record, after, returns)

    def __del__(self) -> None:
        if self.record.id and self.record.leases.collect(self.record):
            warnings.warn(
                f"{self!r} was never released; the engine releases it now",
                UnreleasedLeaseWarning,
                stacklevel=2,
                source=self,
            )

    # --- state and block tables -----------------------------------------------------------------

    @property
    def state(self) -> LeaseState:
        """State of the lease."""
        leases, lease_id = self.record.leases, self.record.id
        leases.check_thread()
        return leases.read.state(lease_id) if lease_id else LeaseState.RELEASED

    @property
    def hit(self) -> Hit:
        """Cached prefix in tokens by tier: of the last match or, once granted, of the grant."""
        record = self.record
        record.leases.check_thread()
        return record.leases.read.hit(record.live_id())

    @property
    def hit_blocks(self) -> NDArray[np.int32]:
        """Device ids of the blocks of the hit, in order: a copy, int32 ``[N]``.

        Before the grant, the call looks the prefix up again if the cache has changed since the last
        match; ``hit.device_tokens`` is ``N * block_tokens`` after it. The ids are a snapshot:
        nothing is pinned, and any later grant may evict the blocks and use their ids for others.
        From the grant on, the ids are the first N of ``block_table``. Blocks in host memory have no
        device id.

        Raises:
            LeaseError: the lease is released, or its blocks were lost with a rank.
            UsageError: the call is made in another thread.
        """
        record = self.record
        record.leases.check_thread()
        return record.leases.read.hit_blocks(record.held_id())

    @property
    def pending_tokens(self) -> int:
        """Number of tokens after the hit that another lease is computing; 0 once granted."""
        record = self.record
        record.leases.check_thread()
        return record.leases.read.pending_tokens(record.live_id())

    @property
    def cached_tokens(self) -> int:
        """Number of leading positions of a grant that need no computing.

        Decreases when an onload fails.
        """
        record = self.record
        record.leases.check_thread()
        return record.leases.read.cached_tokens(record.held_id())

    @property
    def usage(self) -> Usage:
        """Cached tokens and waiting times of the request so far; read it before ``release``."""
        record = self.record
        read, waits = record.leases.read, record.waits
        record.leases.check_thread()
        lease_id = record.live_id()
        prompt_tokens, cached_device, cached_host, computed_blocks = read.usage(lease_id)
        onload_seconds = waits.onload_seconds
        if (running := record.layers.elapsed_seconds) is not None:
            onload_seconds = (onload_seconds or 0.0) + running
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_device_tokens=cached_device,
            cached_host_tokens=cached_host,
            groups=read.group_hits(lease_id),
            fetched_tokens=read.cached_store_tokens(lease_id),
            received_tokens=waits.received_tokens,
            pending_tokens=waits.pending_tokens,
            computed_blocks=computed_blocks,
            capacity_wait_seconds=waits.capacity_seconds,
            pending_wait_seconds=waits.pending_seconds,
            store_wait_seconds=waits.store_seconds,
            peer_wait_seconds=waits.peer_seconds,
            onload_seconds=onload_seconds,
        )

    @property
    def missed(self) -> tuple[MissedRange, ...]:
        """Causes of the prompt blocks that the last grant did not hit, in order of position.

        Empty before a grant, without ``CacheConfig.miss_history_blocks``, and when the hit reaches
        the last block that a hit can have. The causes are those at the time of the grant. Read them
        before ``release``.
        """
        record = self.record
        record.leases.check_thread()
        read = record.leases.read
        return missed_ranges(read.missed(record.live_id()), read.block_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of positions that the block table holds."""
        record = self.record
        record.leases.check_thread()
        return record.leases.read.num_tokens(record.held_id())

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Device block ids in order: a copy, int32 ``[ceil(num_tokens / block_tokens)]``.

        While the lease is granted, ids do not change; ``extend`` appends ids. Any thread.
        """
        return self.record.leases.read.block_table(self.record.held_id())

    def window_table(self, group: str) -> NDArray[np.int32]:
        """Return a copy of the block table of a group of sliding-window layers. Any thread.

        An entry is -1 for a block that has left the window (``commit`` gives it back), and for a
        block that the window has not reached; other entries do not change. The blocks of the first
        ``WindowGroup.sink_tokens`` positions keep their ids while the lease is granted.

        Args:
            group: name of the group in ``CacheConfig.windows``.

        Returns:
            int32 ids, as many as ``block_table`` has.

        Raises:
            UsageError: ``CacheConfig.windows`` has no such group.
        """
        group = checks.text("group", group)
        return self.record.leases.read.block_table(self.record.live_id(), group)

    @property
    def max_extend_tokens(self) -> int:
        """First position without a block in some window group: the next step must end there.

        ``commit`` increases it; while window blocks of the lease are onloaded, the end of the
        onload does. ``num_tokens`` for models without window groups.
        """
        record = self.record
        record.leases.check_thread()
        return record.leases.read.max_extend_tokens(record.live_id())

    @property
    def state_slot(self) -> int:
        """Row of the recurrent-state tensors that belongs to the lease while it is granted.

        Once ``layers`` are done, the row holds the state after ``cached_tokens`` positions: zeros,
        or a copy of a snapshot. -1 when the lease is not granted, and for models without recurrent
        state.
        """
        record = self.record
        record.leases.check_thread()
        return record.leases.read.state_slot(record.live_id())

    @property
    def snapshot_points(self) -> tuple[int, ...]:
        """Positions after the hit at which a snapshot of the state helps later prompts most.

        These are the position where this prompt diverges from cached prompts, since other prompts
        may diverge there, too, and the last block boundary that an equal prompt can hit. Ascending;
        let chunks of the prompt end there.
        """
        record = self.record
        record.leases.check_thread()
        return record.leases.read.snapshot_points(record.live_id())

    # --- device blocks of a server ----------------------------------------------------------------

    def assign(
        self,
        block_ids: TokenIds,
        *,
        computed_tokens: int = 0,
        priority: int = 0,
        groups: Mapping[str, TokenIds] | None = None,
    ) -> None:
        """Set the device blocks of the next positions, with ``CacheConfig.external_device``.

        The first call after a grant begins the onload of the cached positions into these blocks:
        ``layers`` waits for it. Its blocks must cover ``cached_tokens``. Later calls append blocks,
        for further chunks of the prompt and for decoding.

        Leases may share blocks that they read, and that hold the same positions of the same tokens
        in each of them. The server must not free or reuse a block before each lease to which it was
        assigned is released or preempted, and idle. When the onload that writes a block fails, it
        fails for each lease that has the block: see ``recompute_from``. When a save still reads a
        block that is assigned for positions to compute, the save is given up, so that no other
        bytes are cached.

        A group of ``CacheConfig.windows`` has ids of its own for the same positions. The first call
        names those that the hit needs: blocks inside a window before ``cached_tokens``, or the one
        with the recurrent state. The ``commit`` that covers a position saves the block that the
        group has there; afterwards, the server may free the block, but nothing may write it before
        the lease is idle. So a server that frees blocks behind a window names them when their
        positions are computed, and as -1 when it has freed them before. If the onload of any group
        fails, the lease has to be preempted: see ``recompute_from``.

        Args:
            block_ids: one-dimensional integers, from 0 to ``device_blocks - 1``, in the order of
                the positions.
            computed_tokens: for the first call only: leading positions that the server's own cache
                has in these blocks. They are not onloaded, and count as computed for ``commit``. A
                multiple of ``block_tokens``, or a position in the last block.
            priority: for the first call only: an integer, at least 0. Of the onloads that wait for
                their turn, those with lower numbers are copied first.
            groups: by name of the group, as many ids as ``block_ids``; -1 where the server has no
                block of the group. A group that is left out has none.

        Raises:
            LeaseError: the lease is not granted; the blocks of the first call, or those of a group,
                do not cover the cached positions; or cached positions were dropped after the grant,
                by a reset or because a copy was wrong: ``preempt``, then ``allocate`` again.
                Nothing changed.
            UsageError: a block is out of range, is listed twice, or is a block of the lease
                already; a transfer in flight uses a block into which cached positions would be
                copied, or writes a block that the lease is to compute; ``computed_tokens`` is out
                of range; ``priority`` is not an integer, or negative; a group is unknown, or has
                another number of ids; or the engine owns the device blocks. Nothing changed.
            ClosedError: the engine is closed.
        """
        computed_tokens = checks.integer("computed_tokens", computed_tokens)
        if priority != 0:
            priority = checks.integer("priority", priority, minimum=0)
        record = self.record
        leases = record.leases
        leases.check_loop()
        lease_id = record.held_id()
        ids = as_block_ids(block_ids)
        group_ids = leases.read.group_ids(groups, len(ids)) if groups else None
        result = leases.scheduler.assign(lease_id, ids, computed_tokens, priority, group_ids)
        try:
            grant = leases.apply(result)
            if grant.onloads and not record.layers.transfer_ids:
                record.layers = leases.transfers.view(lease_id, grant.onloads, record.owner)
        except BaseException:  # a lease without its layers must not count as granted
            leases.apply(leases.scheduler.stop_waiting(lease_id))
            raise
        leases.used(lease_id)

    def commit_blocks(
        self,
        block_ids: TokenIds,
        tokens: TokenIds,
        *,
        groups: Mapping[str, TokenIds] | None = None,
        kept_blocks: int = 0,
    ) -> int:
        """Set device blocks that are computed, and their tokens, and share them.

        One call in place of ``append``, ``assign`` and ``commit``, for each lease of which a step
        has completed blocks. All positions of the lease's blocks count as computed.

        Args:
            block_ids: as for ``assign``. If this is the first call after the grant, nothing is
                onloaded: the blocks cover ``cached_tokens``, and have the cached positions, too.
            tokens: as for ``append``.
            groups: as for ``assign``.
            kept_blocks: number of leading blocks of the lease that the server's own cache will
                keep. They are copied to host memory while it has free blocks; nothing is evicted
                for their copies, except for those that copies of later blocks need. A later call
                copies what is left.

        Returns:
            The number of blocks that became shareable, as for ``commit``.

        Raises:
            LeaseError, UsageError, ClosedError: as for ``assign`` and ``append``. Nothing changed.
        """
        record = self.record
        leases = record.leases
        leases.check_loop()
        lease_id = record.held_id()
        group_ids = leases.read.group_ids(groups, len(block_ids)) if groups else None
        published = leases.apply(
            leases.scheduler.commit_blocks(lease_id, block_ids, tokens, group_ids, kept_blocks)
        )
        if leases.timers:
            leases.used(lease_id)
        if leases.tickets:
            leases.peer_tickets.committed(lease_id)
        return published

    def retire(self, *, returns: str = "") -> bool:
        """Drop the references to host blocks, because the server's own cache has the device blocks.

        Call it when the request has ended. Of the copies in host memory, those of the lease are
        evicted first from now on, if no other request needs them, so that host memory keeps what
        the server has lost. Copies in progress, and copies that stores have yet to save, are
        evicted first when this has ended. Leases that wait for it keep at most an eighth of host
        memory, or one lease does; copies beyond that are evicted unsaved. Before the server reuses
        the blocks, call ``commit_blocks([], [])``, which copies what host memory lacks, and
        ``release``.

        Args:
            returns: label of the request; see ``release``.

        Returns:
            False if the lease can copy no blocks later: release it. Nothing changed then. This is
            so while a copy to its blocks is in flight, after a failed copy, with ``write=False``
            or ``windows``, and after a reset.

        Raises:
            LeaseError: the lease was released.
            UsageError: the engine owns the device blocks, or ``returns`` is no str or too long.
            ClosedError: the engine is closed or closing.
        """
        if returns != "":
            checks.label("returns", returns)
        record = self.record
        leases = record.leases
        leases.check_open()
        lease_id = record.live_id()
        retires = leases.apply(leases.scheduler.retire(lease_id, returns))
        if retires and leases.recordings.active:
            leases.recordings.releases(lease_id, returns)
        return retires

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids of the transfers in flight that write blocks of the lease.

        A rank's runner waits for their layers with ``Rank.layers(transfer_ids)``.
        """
        record = self.record
        record.leases.check_thread()
        return tuple(record.leases.read.onloads(record.live_id()))

    @property
    def is_idle(self) -> bool:
        """True if no transfer reads or writes device blocks that were assigned to the lease.

        Saves go on after the lease is preempted or released, and this property covers them. Always
        True where the engine owns the device blocks. Any thread.
        """
        leases = self.record.leases
        return leases.read.is_idle(self.record.number) or not leases.lifetime.is_running

    async def idle(self) -> None:
        """Wait until ``is_idle``.

        Saves of blocks that were committed in an open step wait for its end: close it first, with
        ``CacheEngine.step`` or the ``ready`` of ``commit``.

        Raises:
            UsageError: a transfer waits for the end of the open step, which the caller must close
                first; or the call is made in another thread.

        Cancellation: nothing changed.
        """
        lease_id, leases = self.record.number, self.record.leases
        leases.check_thread()
        while not self.is_idle:
            if step := leases.read.idle_after_step(lease_id):
                leases.open_step.check_wait(step, "transfers")
            await leases.dispatcher.idle(lease_id)

    # --- computed positions ---------------------------------------------------------------------

    def commit(
        self, num_tokens: int, ready: Event | None = None, *, in_next_step: bool = False
    ) -> int:
        """Note that the first ``num_tokens`` positions are computed, and share their full blocks.

        The engine indexes only positions whose tokens it knows: those of the prompt and of
        ``append``. It indexes blocks that follow an onload after the onload has completed and been
        verified.

        The bytes of these positions, named or not, are final when the open step has ended: the
        engine may copy their blocks from then on. ``verify="checksum"`` reports a block that was
        written later as corrupt.

        Args:
            num_tokens: absolute number of positions. A number that was committed before shares the
                blocks that ``append`` has named since, if any.
            ready: event that was recorded on the compute stream after the computation and after all
                other work of the open step; the call closes the step with this event. None leaves
                the step open.
            in_next_step: True if the positions are not computed yet, and the step after the open
                one will compute them. Until then, only work that the device does behind that of
                this lease may read them. No transfer reads them before that step has ended.

        Returns:
            The number of blocks that became shareable.

        Raises:
            LeaseError: ``num_tokens`` exceeds the positions of the lease. Nothing changed.
            UsageError: ``num_tokens`` is not an integer, or the worker cannot wait for an event
                like ``ready``; or ``in_next_step`` is given with ``ready``, with
                ``CacheConfig.external_device`` or with checksums. Nothing changed.
            ClosedError: the engine is closed.
        """
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        if ready is not None:
            ready = as_event("ready", ready)
            if in_next_step:
                raise UsageError("commit: ready is given, so in_next_step must be False")
        record = self.record
        leases = record.leases
        leases.check_loop()
        if leases.coverage.active and not in_next_step:
            leases.coverage.check_commit(record, num_tokens)
        lease_id = record.id or record.live_id()
        if ready is None:
            if in_next_step:
                result = leases.scheduler.commit(lease_id, num_tokens, in_next_step=True)
            else:
                result = leases.scheduler.commit(lease_id, num_tokens)
            published, effects = result
            if effects is not NO_EFFECTS or leases.waiters:
                leases.apply(result)
            if leases.timers:
                leases.used(lease_id)
        else:
            leases.worker.steps.check_event(ready)
            result = leases.scheduler.commit(lease_id, num_tokens, closes_step=True)
            published = leases.apply(result)
            if leases.timers:
                leases.used(lease_id)
            leases.steps.close(ready)
        if leases.tickets:
            leases.peer_tickets.committed(lease_id)
        return published

    def snapshot(self, num_tokens: int, stream: object = None) -> bool:
        """Save the recurrent state after ``num_tokens`` positions, so that prompts can hit there.

        The snapshot takes a state slot on the device. With ``CacheConfig.host_state_slots``, the
        write policy copies it to host memory, too, where it stays when that slot is used again.

        Call it after the ``commit`` of these positions and before the next step changes the state
        in ``state_slot``.

        Args:
            num_tokens: absolute number of positions: the number of the last ``commit``, and a
                multiple of ``block_tokens``.
            stream: compute stream in whose order the state is copied; required on a GPU.

        Returns:
            True when the state was saved. False when there is a snapshot already, the positions
            cannot be indexed, or every state slot is in use.

        Raises:
            LeaseError: the lease is not granted, or ``num_tokens`` is not the committed number of
                positions or not a multiple of ``block_tokens``. Nothing changed.
            UsageError: the model has no recurrent state.
        """
        num_tokens = checks.integer("num_tokens", num_tokens)
        record = self.record
        leases = record.leases
        leases.check_loop()
        lease_id = record.live_id()
        slots = leases.apply(leases.scheduler.snapshot(lease_id, num_tokens))
        leases.used(lease_id)
        if slots is None:
            return False
        try:
            self._copy_state(*slots, stream)
        except BaseException:
            leases.apply(leases.scheduler.discard_snapshot(lease_id, slots[1]))
            raise
        return True

    def _copy_state(self, source: int, target: int, stream: object) -> None:
        self.record.leases.worker.steps.clone(clone_plan(STATE, [source], [target]), stream)

    def append(self, tokens: TokenIds, *, items: Sequence[Item] = ()) -> None:
        """Set the tokens of the next positions, so that their blocks can be shared.

        Args:
            tokens: ``[N]`` token ids, e.g. the generated ones, or those of the next turn; copied.
            items: multimodal items among these positions, in order and without overlap. Their
                offsets count from the first position of the prompt, as for ``match``.

        Raises:
            LeaseError: the lease has fewer than N positions left. Nothing changed.
            UsageError: ``tokens`` is not a flat sequence of int32, or an item is outside the
                appended positions or out of order. Nothing changed.
            ClosedError: the engine is closed.
        """
        record = self.record
        leases = record.leases
        leases.check_loop()
        lease_id = record.id or record.live_id()
        if type(tokens) is not list:
            tokens = as_tokens(tokens)
        if items:
            leases.apply(leases.scheduler.append(lease_id, tokens, as_items(items)))
        else:
            leases.apply(leases.scheduler.append(lease_id, tokens))
        if leases.timers:
            leases.used(lease_id)

    def truncate(self, num_tokens: int) -> None:
        """Give back the positions from ``num_tokens`` on, e.g. those of rejected draft tokens.

        Multimodal items after ``num_tokens`` no longer belong to the lease.

        Args:
            num_tokens: absolute number of positions to keep.

        Raises:
            LeaseError: ``num_tokens`` is inside shared blocks, inside blocks that ``resume`` is
                onloading, inside a multimodal item, or beyond the end; the recurrent state or a
                window is already past it; the lease has sliding windows, and whole blocks would be
                given back while a batch or a transfer to another engine uses them; or the lease is
                not granted. Nothing changed.
            UsageError: ``num_tokens`` is not an integer. Nothing changed.
        """
        num_tokens = checks.integer("num_tokens", num_tokens)
        leases = self.record.leases
        leases.check_loop()
        lease_id = self.record.live_id()
        leases.apply(leases.scheduler.truncate(lease_id, num_tokens))
        leases.used(lease_id)
        if leases.tickets:
            leases.peer_tickets.truncated(lease_id, num_tokens)

    def recompute_from(self) -> int | None:
        """Accept a failed onload: the lease continues with the positions before the failed block.

        After a failure, ``commit`` indexes no block until this call. From this call on, ``layers``
        waits for nothing, and raises no error.

        Leases that waited for the same onload share its blocks: each computes the same tokens into
        the same blocks. When the weights change in between, ``preempt`` these leases instead, so
        that none reads what another has computed with other weights.

        Returns:
            The first position to compute again, or None when no onload failed. The position is
            never inside a multimodal item: the model computes the item again from its start;
            unless ``CacheConfig.item_hits`` is ``"partial"``.

        Raises:
            LeaseError: a failed transfer still writes blocks of the lease: await
                ``layers.wait_all()`` first, or ``preempt`` or release the lease if a rank is slow.
                Or the lease has recurrent state or windows, which cannot be rolled back:
                ``preempt`` and ``resume`` it.
        """
        record = self.record
        leases = record.leases
        leases.check_loop()
        if record.layers.given_up:
            raise LeaseError(f"recompute_from: a slow rank may still write blocks of {self!r}")
        lease_id = record.held_id()
        position = leases.apply(leases.scheduler.recompute_from(lease_id))
        if position >= 0:
            # Otherwise, each later step that waits for the layers would raise the accepted failure.
            record.leave_layers()
            return position
        if leases.read.onloads(lease_id):
            try:
                record.layers.raise_for_error()
            except TransferError as error:
                raise LeaseError(
                    f"recompute_from: a transfer of {self!r} has failed but not ended",
                    hint="await layers.wait_all(), then call recompute_from again",
                ) from error
        return None

    # --- other engines ----------------------------------------------------------------------------

    def receive(
        self,
        num_tokens: int | None = None,
        *,
        timeout: float = 10.0,
        open_timeout: float | None = None,
    ) -> Receiving:
        """Let another engine compute positions of this lease, and send their blocks.

        ::

            await lease.allocate(len(tokens))
            async with lease.receive(timeout=10.0) as receiving:
                ...  # send the prompt and receiving.ticket to the server of the other engine
                first = await receiving.wait()
            ...  # compute the positions from `first` on

        The logits of the last position stay with the other engine: let its server reply with the
        first generated token, or receive ``len(tokens) - 1`` positions and compute the last one.

        Blocks that arrive are committed in order, chunk by chunk: other leases can use them at
        once. While blocks are in flight, no batch can compute with the lease, and ``commit`` takes
        no position behind those that have arrived. Leaving the block cancels what is missing, and
        waits until no transfer writes the blocks of the lease any more.

        With recurrent state or windows, no position is usable before all of them have arrived: the
        windows and the state after the last position come last. If their transfer fails,
        ``state`` may be ``"failed"``: then ``preempt`` the lease, ``allocate`` again, and compute
        from ``cached_tokens`` on.

        ``preempt``, ``release`` and ``truncate`` end the receive; so do ``CacheEngine.reset`` and
        ``updating_weights``. Onloads of the lease go first: the other engine may compute meanwhile.

        Args:
            num_tokens: absolute number of positions, whose tokens are known; None for all
                positions of the matched prompt that the lease has. Received are those that are
                not computed yet.
            timeout: seconds after which the receive ends, up to 86,400. Then this engine computes
                what is missing.
            open_timeout: seconds after which the receive ends if the other engine has not opened
                the ticket with ``engine.send``, such as because its server was killed; None for
                half of ``timeout``. The other engine opens the ticket when its lease is granted:
                allow for the queue of its server.

        Returns:
            A :class:`Receiving`, to be entered with ``async with`` once. Entering it raises the
            errors of the state of the lease.

        Raises:
            UsageError: an argument is not a number, or is out of range. Nothing changed.
            LeaseError: the lease is released.

        Cancellation: as leaving the block. Received blocks stay committed.
        """
        lease_id, leases = self.record.live_id(), self.record.leases
        leases.check_thread()
        if num_tokens is not None:
            num_tokens = checks.integer("num_tokens", num_tokens, minimum=1, maximum=MAX_INT32)
        timeout = checks.positive("timeout", timeout)
        if timeout > MAX_TIMEOUT_SECONDS:
            raise UsageError(f"timeout is {timeout}; it must be at most {MAX_TIMEOUT_SECONDS} s")
        if open_timeout is None:
            open_timeout = timeout / 2
        open_timeout = checks.positive("open_timeout", open_timeout)
        leases.used(lease_id)
        return Receiving(leases.peer_tickets, self, num_tokens, timeout, open_timeout)

    def __repr__(self) -> str:
        return repr(self.record)
