"""Methods of ``Calls``, ``SyncLease`` and ``SyncEngine`` that are made from the table of verbs.

Written by ``make stubs``.
"""

from aiokv.base.types import Health
from aiokv.base.types import Hit
from aiokv.base.types import Item
from aiokv.base.types import LeaseState
from aiokv.base.types import StepTokenIds
from aiokv.base.types import TokenIds
from aiokv.base.usage import Usage
from aiokv.engine.batch import Batch
from aiokv.engine.batch import LeaseT
from aiokv.sync.answers import Answer
from aiokv.sync.computing import SyncComputing
from aiokv.sync.futures import EngineFuture
from aiokv.sync.layers import SyncLayers
from aiokv.sync.lease import SyncLease
from aiokv.sync.transfers import SyncReceiving
from aiokv.sync.transfers import SyncSending
from aiokv.sync.weights import SyncWeightsUpdate
from aiokv.worker.device.base import Event
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from numpy.typing import NDArray
from typing import Any
import numpy as np

class RecordedVerbs:
    """Methods of ``Calls``: each records a call and returns its answer."""

    def match(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = (),
        owner: str = '', read: bool = True, write: bool = True
    ) -> SyncLease:
        """Look up the cached prefix of a prompt, and refresh its recency.

        See ``CacheEngine.match``.
        """

    def would_hit(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> Answer[Hit]:
        """Return the cached prefix that ``match`` would find, and change nothing.

        See ``CacheEngine.would_hit``.
        """

    def retain(
        self, tokens: TokenIds, *, seconds: float, priority: int = 0, salt: str = '', adapter: str =
        '', items: Sequence[Item] = ()
    ) -> Answer[int]:
        """Evict the cached blocks of a prompt after all blocks that are not retained.

        See ``CacheEngine.retain``.
        """

    def demote(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> Answer[int]:
        """Evict the last cached blocks of a prompt before all other blocks, until their next use.

        See ``CacheEngine.demote``.
        """

    def forget(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> Answer[int]:
        """Drop the last cached blocks of a prompt from the device and host memory.

        See ``CacheEngine.forget``.
        """

    def hit_blocks(self, lease: SyncLease) -> Answer[NDArray[np.int32]]:
        """Device ids of the blocks of the hit, in order: a copy, int32 ``[N]``.

        See ``Lease.hit_blocks``.
        """

    def pending_tokens(self, lease: SyncLease) -> Answer[int]:
        """Number of tokens after the hit that another lease is computing; 0 once granted.

        See ``Lease.pending_tokens``.
        """

    def allocate(
        self, lease: SyncLease, num_tokens: int, *, priority: int = 0, timeout: float | None = None,
        wait_pending: float = 0.0, wait_store: float = 0.0, queued_tokens: int = 0, reserve_blocks:
        int | None = None, ttl_seconds: float | None = None
    ) -> EngineFuture[SyncLease]:
        """Wait for capacity, then take the blocks of ``num_tokens`` positions at once.

        See ``Lease.allocate``.
        """

    def try_allocate(
        self, lease: SyncLease, num_tokens: int, *, reserve_blocks: int | None = None, ttl_seconds:
        float | None = None
    ) -> Answer[bool]:
        """Allocate without waiting; return False if that is not possible now.

        See ``Lease.try_allocate``.
        """

    def can_allocate(
        self, lease: SyncLease, num_tokens: int, *, reserve_blocks: int | None = None
    ) -> Answer[bool]:
        """Return True if ``try_allocate(num_tokens)`` would succeed now; changes nothing.

        See ``Lease.can_allocate``.
        """

    def allocatable_blocks(
        self, *, salt: str = '', reserve_blocks: int | None = None, limit: int | None = None
    ) -> Answer[int]:
        """Return the number of blocks of the largest request that could be granted now.

        See ``CacheEngine.allocatable_blocks``.
        """

    def extendable_blocks(self, *, limit: int | None = None) -> Answer[int]:
        """Return the number of device blocks that ``extend`` could take now.

        See ``CacheEngine.extendable_blocks``.
        """

    def extend(self, leases: Batch[Any] | Iterable[SyncLease], num_tokens: int) -> Answer[None]:
        """Add ``num_tokens`` positions to each lease: to all of them, or to none.

        See ``CacheEngine.extend``.
        """

    def preempt(self, lease: SyncLease) -> Answer[None]:
        """Give the device blocks back; ``allocate`` takes blocks again.

        See ``Lease.preempt``.
        """

    def swap_out(self, lease: SyncLease) -> EngineFuture[None]:
        """Move the whole block table to host memory and keep it there.

        See ``Lease.preempt``.
        """

    def expire_after(self, lease: SyncLease, seconds: float) -> Answer[None]:
        """Let the engine release the lease when ``seconds`` have passed, unless it is used before.

        See ``Lease.expire_after``.
        """

    def keep(self, lease: SyncLease) -> Answer[None]:
        """End the limit of ``expire_after`` or ``ttl_seconds``. Idempotent.

        See ``Lease.keep``.
        """

    def fork(
        self, lease: SyncLease, *, owner: str = '', stream: object = None
    ) -> Answer[SyncLease]:
        """Return a second lease on the same positions, e.g. for n > 1 samples of one prompt.

        See ``Lease.fork``.
        """

    def release(
        self, lease: SyncLease, after: Event | None = None, *, returns: str = ''
    ) -> Answer[None]:
        """Release the lease and give all its blocks back. Idempotent.

        See ``Lease.release``.
        """

    def assign(
        self, lease: SyncLease, block_ids: TokenIds, *, computed_tokens: int = 0, priority: int = 0,
        groups: Mapping[str, TokenIds] | None = None
    ) -> Answer[None]:
        """Set the device blocks of the next positions, with ``CacheConfig.external_device``.

        See ``Lease.assign``.
        """

    def transfer_ids(self, lease: SyncLease) -> Answer[tuple[int, ...]]:
        """Ids of the transfers in flight that write blocks of the lease.

        See ``Lease.transfer_ids``.
        """

    def is_idle(self, lease: SyncLease) -> Answer[bool]:
        """True if no transfer reads or writes device blocks that were assigned to the lease.

        See ``Lease.is_idle``.
        """

    def idle(self, lease: SyncLease) -> EngineFuture[None]:
        """Wait until ``is_idle``.

        See ``Lease.idle``.
        """

    def commit(
        self, lease: SyncLease, num_tokens: int, ready: Event | None = None, *, in_next_step: bool =
        False
    ) -> Answer[int]:
        """Note that the first ``num_tokens`` positions are computed, and share their full blocks.

        See ``Lease.commit``.
        """

    def append(
        self, lease: SyncLease, tokens: TokenIds, *, items: Sequence[Item] = ()
    ) -> Answer[None]:
        """Set the tokens of the next positions, so that their blocks can be shared.

        See ``Lease.append``.
        """

    def truncate(self, lease: SyncLease, num_tokens: int) -> Answer[None]:
        """Give back the positions from ``num_tokens`` on, e.g. those of rejected draft tokens.

        See ``Lease.truncate``.
        """

    def snapshot(self, lease: SyncLease, num_tokens: int, stream: object = None) -> Answer[bool]:
        """Save the recurrent state after ``num_tokens`` positions, so that prompts can hit there.

        See ``Lease.snapshot``.
        """

    def recompute_from(self, lease: SyncLease) -> Answer[int | None]:
        """Accept a failed onload: the lease continues with the positions before the failed block.

        See ``Lease.recompute_from``.
        """

    def state(self, lease: SyncLease) -> Answer[LeaseState]:
        """State of the lease.

        See ``Lease.state``.
        """

    def num_tokens(self, lease: SyncLease) -> Answer[int]:
        """Number of positions that the block table holds.

        See ``Lease.num_tokens``.
        """

    def usage(self, lease: SyncLease) -> Answer[Usage]:
        """Cached tokens and waiting times of the request so far; read it before ``release``.

        See ``Lease.usage``.
        """

    def advance(
        self, batch: SyncComputing[LeaseT] | Batch[LeaseT], tokens: StepTokenIds, counts: TokenIds |
        None = None, *, draft_tokens: int = 0
    ) -> Answer[tuple[LeaseT, ...]]:
        """Account for a step of the model in one call: commit, append and extend for each lease.

        See ``CacheEngine.advance``.
        """

    def step(self, event: Event | None = None) -> Answer[int]:
        """Close the open step, whose work finishes with ``event``.

        See ``CacheEngine.step``.
        """

    def note_prefill(self, num_tokens: int, seconds: float) -> Answer[None]:
        """Note the time in which the model has computed tokens of prompts.

        See ``CacheEngine.note_prefill``.
        """

    def layers(self, leases: Batch[Any] | Iterable[SyncLease]) -> Answer[SyncLayers]:
        """Return one layer counter over all transfers that a step waits for.

        See ``CacheEngine.layers``.
        """

    def block_tables(
        self, leases: Batch[Any] | Iterable[SyncLease], out: NDArray[np.int32] | None = None, fill:
        int = -1, group: str | None = None
    ) -> Answer[NDArray[np.int32]]:
        """Return the block tables as rows, padded with ``fill``.

        See ``CacheEngine.block_tables``.
        """

    def lengths(self, leases: Batch[Any] | Iterable[SyncLease]) -> Answer[NDArray[np.int32]]:
        """Return the number of positions of each lease whose tokens are named.

        See ``CacheEngine.lengths``.
        """

    def purge(
        self, salt: str, *, hold_seconds: float = 0.0, timeout: float | None = 60.0
    ) -> EngineFuture[int]:
        """Remove all blocks of a salt from memory and from all stores; return the number of objects

        See ``CacheEngine.purge``.
        """

    def health(self) -> Answer[Health]:
        """Return the state of the engine, for health checks. Takes microseconds.

        See ``CacheEngine.health``.
        """

class LeaseVerbs:
    """Methods of ``SyncLease``: each crosses to the engine's thread."""

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

    @property
    def pending_tokens(self) -> int:
        """Number of tokens after the hit that another lease is computing; 0 once granted.
        """

    def allocate(
        self, num_tokens: int, *, priority: int = 0, timeout: float | None = None, wait_pending:
        float = 0.0, wait_store: float = 0.0, queued_tokens: int = 0, reserve_blocks: int | None =
        None, ttl_seconds: float | None = None
    ) -> EngineFuture[SyncLease]:
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

        For threads, the call returns an :class:`EngineFuture` at once, whose ``cancel()`` has the effects
        of a cancellation.
        """

    def try_allocate(
        self, num_tokens: int, *, reserve_blocks: int | None = None, ttl_seconds: float | None =
        None
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

    def preempt(self) -> None:
        """Give the device blocks back; ``allocate`` takes blocks again.

        See ``Lease.preempt``; ``swap_out`` does the same with ``swap=True``.
        """

    def swap_out(self) -> EngineFuture[None]:
        """Move the whole block table to host memory and keep it there.

        See ``Lease.preempt`` with ``swap=True``. The future ends with the copy.

        For threads, the call returns an :class:`EngineFuture` at once, whose ``cancel()`` has the effects
        of a cancellation.
        """

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

    def keep(self) -> None:
        """End the limit of ``expire_after`` or ``ttl_seconds``. Idempotent.

        Raises:
            LeaseError: the lease has expired, or is released.
            ClosedError: the engine is closed.
        """

    def fork(self, *, owner: str = '', stream: object = None) -> SyncLease:
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

    def release(self, after: Event | None = None, *, returns: str = '') -> None:
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

    def assign(
        self, block_ids: TokenIds, *, computed_tokens: int = 0, priority: int = 0, groups:
        Mapping[str, TokenIds] | None = None
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

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids of the transfers in flight that write blocks of the lease.

        A rank's runner waits for their layers with ``Rank.layers(transfer_ids)``.
        """

    @property
    def is_idle(self) -> bool:
        """True if no transfer reads or writes device blocks that were assigned to the lease.

        Saves go on after the lease is preempted or released, and this property covers them. Always
        True where the engine owns the device blocks.
        """

    def idle(self) -> EngineFuture[None]:
        """Wait until ``is_idle``.

        Saves of blocks that were committed in an open step wait for its end: close it first, with
        ``CacheEngine.step`` or the ``ready`` of ``commit``.

        Raises:
            UsageError: a transfer waits for the end of the open step, which the caller must close
                first; or the call is made in another thread.

        Cancellation: nothing changed.

        For threads, the call returns an :class:`EngineFuture` at once, whose ``cancel()`` has the effects
        of a cancellation.
        """

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

    @property
    def state(self) -> LeaseState:
        """State of the lease.
        """

    @property
    def num_tokens(self) -> int:
        """Number of positions that the block table holds.
        """

    @property
    def usage(self) -> Usage:
        """Cached tokens and waiting times of the request so far; read it before ``release``.
        """

    def receive(
        self, num_tokens: int | None = None, *, timeout: float = 10.0, open_timeout: float | None =
        None
    ) -> SyncReceiving:
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

        For threads, the object is entered with ``with``, and what is awaited returns an
        :class:`EngineFuture`. Nothing crosses before it is entered.
        """

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Device block ids in order: a copy, int32 ``[ceil(num_tokens / block_tokens)]``.

        While the lease is granted, ids do not change; ``extend`` appends ids. Any thread.
        """

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

class EngineVerbs:
    """Methods of ``SyncEngine``: each crosses to the engine's thread."""

    def match(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = (),
        owner: str = '', read: bool = True, write: bool = True
    ) -> SyncLease:
        """Look up the cached prefix of a prompt, and refresh its recency.

        The lease holds no blocks until it is granted: the prefix can still be evicted.

        Args:
            tokens: ``[N]`` token ids, N >= 1; copied. A contiguous int32 array is fastest.
            salt: namespace of the prompt, e.g. a tenant; prompts share blocks only within one salt.
            adapter: name of a LoRA adapter, or of anything else that changes the KV; prompts share
                blocks only within one adapter.
            items: multimodal items of the prompt, in order and without overlap.
            owner: name of the request for error and log messages.
            read: False to use no cached block.
            write: False to publish no block.

        Returns:
            A lease in state ``MATCHED``. It can be awaited, which does not suspend, or entered with
            ``async with``, which releases it at the end.

        Raises:
            UsageError: ``tokens`` is empty or has an id outside int32, an item is outside the
                prompt or out of order, or another argument has the wrong type. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """

    def would_hit(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> Hit:
        """Return the cached prefix that ``match`` would find, and change nothing.

        A router that asks several engines sends the prompt to the one with the longest prefix. The
        call refreshes no recency and holds nothing, so prompts that are sent elsewhere keep no
        block in the cache.

        Args:
            tokens: ``[N]`` token ids of the prompt, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The prefix in tokens by tier. Blocks that only a store has are not counted.

        Raises:
            UsageError: an argument is wrong, as for ``match``; or the call is made outside the
                engine's loop.
            ClosedError: the engine is closed.
        """

    def retain(
        self, tokens: TokenIds, *, seconds: float, priority: int = 0, salt: str = '', adapter: str =
        '', items: Sequence[Item] = ()
    ) -> int:
        """Evict the cached blocks of a prompt after all blocks that are not retained.

        Unlike a pin, a retention refuses no memory to a request: when no other block can be
        evicted, retained blocks are, the lowest priority first, and then those whose retention
        ends first. A second call for the same blocks extends the retention or raises its priority.
        The call covers full blocks of full attention on the device and in host memory; later blocks
        of the session, its snapshots of recurrent state and its sliding windows are not covered.
        Priorities and times are those of TensorRT-LLM's ``KvCacheRetentionConfig``.

        Args:
            tokens: ``[N]`` token ids, as for ``match``. Call after the commit of their blocks.
            seconds: time from now, at most 86,400. The retention ends at most an eighth of the time
                later, or one second; the blocks then count as used at that time.
            priority: 0 to 3; blocks of higher priorities are evicted later.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of retained tokens: the cached full blocks of the prompt.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """

    def demote(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> int:
        """Evict the last cached blocks of a prompt before all other blocks, until their next use.

        These are the blocks that only this prompt has: none that another cached prompt continues,
        or that a lease or a transfer uses. So release the leases of the session first.

        Args:
            tokens: ``[N]`` token ids of the whole session, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of demoted tokens.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """

    def forget(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> int:
        """Drop the last cached blocks of a prompt from the device and host memory.

        For a session that has ended. The blocks are those of ``demote``; stores keep theirs.

        Args:
            tokens: ``[N]`` token ids of the whole session, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of dropped tokens.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """

    def allocatable_blocks(
        self, *, salt: str = '', reserve_blocks: int | None = None, limit: int | None = None
    ) -> int:
        """Return the number of blocks of the largest request that could be granted now.

        ``try_allocate`` of a prompt of which nothing is cached succeeds up to that number of
        blocks, and not beyond; the call changes nothing. It is 0 while another lease waits for
        capacity, and while granting is paused. Ask ``Lease.can_allocate`` for a prompt with a hit,
        whose cached blocks need no room; and for models with recurrent state or sliding windows,
        which need state slots or window blocks too.

        The number is exact, unlike ``attention.device.free + evictable_blocks`` of the statistics,
        which includes blocks that are being copied, or that have to be saved before they can be
        evicted.

        Args:
            salt: salt of the request, whose quota counts the blocks.
            reserve_blocks: as for ``Lease.allocate``.
            limit: the result is at most this number, from 0; None for no limit. With ``limit=n``,
                it is n exactly when a request of n blocks would be granted: ask so for one request.
                With a host tier, the call costs as much as evicting the blocks that it counts,
                except with the write policy ``"none"``; and where the host tier has no room to
                save what a large request evicts, that request drops unsaved blocks and may
                succeed although a smaller one waits.

        Raises:
            UsageError: ``salt`` is not a string, or a number is not an integer or is negative.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """

    def extendable_blocks(self, *, limit: int | None = None) -> int:
        """Return the number of device blocks that ``extend`` could take now.

        ``extend`` succeeds when all its leases together need at most that number of further blocks,
        and raises ``WouldBlock`` otherwise; the call changes nothing. Reserve, quota, pauses and
        leases that wait do not count, because they do not stop ``extend``. A lease needs
        ``ceil(n / block_tokens)`` blocks for ``n`` positions, of which ``len(block_table)`` are
        there. Models with sliding windows need window blocks, too.

        Args:
            limit: as for ``allocatable_blocks``.

        Raises:
            UsageError: ``limit`` is not an integer or is negative.
            ClosedError: the engine is closed.
        """

    def extend(self, leases: Batch[Any] | Iterable[SyncLease], num_tokens: int) -> None:
        """Add ``num_tokens`` positions to each lease: to all of them, or to none.

        Never waits, and takes free blocks before leases that wait in ``allocate``. ``advance`` adds
        the positions of a decode step.

        Args:
            leases: granted leases, each listed once.
            num_tokens: positions to add per lease, 0 to 2147483647.

        Raises:
            WouldBlock: too few blocks are free or evictable; preempt a lease and call ``extend``
                again. Nothing changed.
            LeaseError: a lease is released, not granted, listed twice, or belongs to another
                engine. Nothing changed.
            UsageError: an argument has the wrong type; or a server owns the device blocks, and
                names those of new positions with ``lease.assign``. Nothing changed.
        """

    def send(self, lease: SyncLease, ticket: bytes) -> SyncSending:
        """Send the blocks of a lease to the engine that has made a ticket.

        ::

            async with engine.send(lease, ticket):
                for n in chunks_of_the_prompt:
                    ...  # compute the positions up to n
                    lease.commit(n)

        Entering the block checks the ticket and connects. Cached blocks are sent at once, the
        others as ``lease.commit`` notes them, while the model computes the next ones. On a device
        that computes in a stream, blocks move when their step is closed: see ``step``. Leaving the
        block waits until the receiver has acknowledged all blocks, but not beyond the deadline of
        the ticket; an exception cancels the send. The failure of the other engine raises nothing
        after the entry: see ``Sending.failure``.

        Recurrent state and windows are sent when exactly ``Sending.num_tokens`` positions are
        committed, and no batch computes with the lease: let a step end there. Until they are
        acknowledged, the lease can neither compute nor commit. A commit of further positions in the
        same step ends the send, because the state of the ticket does not exist any more.

        ``preempt`` and ``release`` end the send, and so does ``truncate`` into the positions of the
        ticket; so do ``reset`` and ``updating_weights``.

        Args:
            lease: a granted lease of the same prompt, salt, adapter and items as that of the
                receiving engine.
            ticket: ``Receiving.ticket`` of that engine.

        Returns:
            A :class:`Sending`, to be entered with ``async with`` once. Entering raises the errors
            of the ticket and of the connection: see ``Sending.__aenter__``.

        Raises:
            UsageError: ``lease`` is not a lease.
            LeaseError: the lease is released, or belongs to another engine.

        Cancellation: while connecting, nothing is left behind; later, the send is cancelled, and
        the receiver keeps the blocks that have arrived.

        For threads, the object is entered with ``with``, and what is awaited returns an
        :class:`EngineFuture`. Nothing crosses before it is entered.
        """

    def computing(self, leases: Batch[LeaseT] | Iterable[LeaseT]) -> SyncComputing[LeaseT]:
        """Protect the blocks of leases while the model computes with them.

        ::

            with engine.computing(leases) as batch:
                await batch.run(model.forward, ...)

        When a lease is released, cancelled, preempted, truncated or garbage-collected while the
        batch is in flight, the engine reuses its blocks only after the batch has ended. So no other
        request gets a block that a thread or a stream may still write. ``truncate`` of a lease with
        sliding windows raises ``LeaseError`` instead if it would give whole blocks back.

        The batch ends when the ``with`` block, all calls of ``batch.run`` and all work passed to
        ``batch.ends_with`` have ended. On a device that computes in a stream, and with ranks, work
        without an event belongs to the step that is open when the batch ends; ``step(event)``
        covers that work.

        Args:
            leases: granted leases, each listed once; or a batch, from which the entry of the block
                drops the released leases. A lease may be computed with in several blocks at a time.

        Returns:
            A context manager that can be entered once.

        Raises:
            UsageError: ``leases`` is not a sequence of leases.
            LeaseError: raised on entry: a lease is not granted, is being swapped, is released, is
                listed twice, or belongs to another engine. Nothing changed.

        For threads, the object is entered with ``with``, and what is awaited returns an
        :class:`EngineFuture`. Nothing crosses before it is entered.
        """

    def advance(
        self, batch: SyncComputing[LeaseT] | Batch[LeaseT], tokens: StepTokenIds, counts: TokenIds |
        None = None, *, draft_tokens: int = 0
    ) -> tuple[LeaseT, ...]:
        """Account for a step of the model in one call: commit, append and extend for each lease.

        ::

            with engine.computing(batch) as step:
                tokens = await step.run(model, engine.block_tables(batch))
            for lease in engine.advance(step, tokens):
                ...  # no room: preempt it, or call advance again later
            engine.step()

        The next step computes the last token of each lease. So the call names the tokens of the
        lease, commits all positions before the last token, and makes sure that the lease has
        positions for the last token and for ``draft_tokens`` behind it. The first call for a lease
        follows its prefill: it commits the whole prompt. The commits belong to the open step, so
        call ``advance`` before ``step``; on a GPU, where the tokens arrive later, the blocks are
        saved one step later.

        With speculative decoding, the tokens of a lease are the accepted draft tokens, whose
        positions the step has computed, and then the token that the model has sampled. The
        positions of rejected draft tokens stay with the lease; the next step computes them anew.

        Leases get blocks in the order of their rows. A lease without room is left as it is, and
        ``advance`` can be called again for it alone. Before you preempt it, call ``append`` with
        all its tokens but the last, and ``commit`` of these positions: otherwise the model computes
        them again.

        Args:
            batch: what ``computing(batch)`` has returned, so that the rows are those of the step:
                leases that were released or removed since its block was entered are skipped, and
                leases that were added are not advanced. Or a ``Batch`` that ``computing`` has not
                had, such as ``engine.batch([lease])``. Each lease is granted.
            tokens: ids from 0, one row per lease: ``[N]`` or ``[N, K]`` integers, or a list of N
                lists. An int32 array is fastest.
            counts: ``[N]``, with ``[N, K]``: number of leading tokens of each row, the others are
                padding; a lease with 0 tokens is left as it is. None for all K.
            draft_tokens: positions behind the last token of each lease, for the draft tokens of the
                next step.

        Returns:
            The leases for which there was no room, in the order of their rows; usually empty.

        Raises:
            UsageError: a token is negative or too large, a count is out of range, or ``tokens`` has
                another number of rows than the batch. ``computing`` has had the ``Batch``; or the
                ``ComputeBatch`` was not entered, or has a list. Nothing changed in any lease.
            LeaseError: a lease is not granted; or it has fewer positions than the tokens before its
                last one need. ``lease_id`` and ``owner`` of the error name it. Nothing changed in
                any lease.
            ClosedError: the engine is closed.
        """

    def step(self, event: Event | None = None) -> int:
        """Close the open step, whose work finishes with ``event``.

        A step consists of the blocks that were committed in it, the blocks of batches that ended
        in it (see ``computing``), and the blocks that leases outside any batch released in it.
        Transfers of these blocks wait for the event on the device.

        On a device that computes before the call returns (cpu), closing a step only starts the
        backups. On other devices, close a step after the last commit, too: blocks of an open step
        cannot be saved, so ``allocate`` waits where it has to save them first. A timeout
        error names such a step, and the engine logs a warning.

        Args:
            event: an event that was recorded on the compute stream after the work of the step and
                before the work of later steps; None when the work has finished. With ranks always
                None: the step finishes when every rank has closed it with ``Rank.step`` and has
                finished its work.

        Returns:
            The number of the step that was closed.

        Raises:
            UsageError: the worker cannot wait for an event of this type. The step stays open.
            DeviceError: with ``verify="checksum"``, the event has failed. The next call of ``step``
                ends this step, too.
            ClosedError: the engine is closed.
        """

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note the time in which the model has computed tokens of prompts.

        With this speed, the engine decides which blocks of a store to fetch, and which to compute.
        It measures the batches of ``computing`` itself. If the configuration has
        ``prefill_tokens_per_second``, measurements have no effect.

        Args:
            num_tokens: positions of prompts that one batch has computed, without generated ones.
                Batches of fewer than 64, or a quarter of a larger recent batch, do not count.
            seconds: duration of the batch alone, without pauses. Leave out batches that waited for
                onloads.

        Raises:
            UsageError: an argument is not a number, or is not above 0.
        """

    def layers(self, leases: Batch[Any] | Iterable[SyncLease]) -> SyncLayers:
        """Return one layer counter over all transfers that a step waits for.

        Args:
            leases: leases of the step.

        Returns:
            A view that raises ``TransferError`` when blocks of any of these leases failed. The
            error has no position: call ``recompute_from`` of each lease to get one.

        Raises:
            LeaseError: a lease is released or belongs to another engine.
        """

    def block_tables(
        self, leases: Batch[Any] | Iterable[SyncLease], out: NDArray[np.int32] | None = None, fill:
        int = -1, group: str | None = None
    ) -> NDArray[np.int32]:
        """Return the block tables as rows, padded with ``fill``.

        Args:
            leases: B leases; the table of a lease that is not granted is empty, and that of a
                released lease of a batch.
            out: ``[>= B, >= M]`` writable C-contiguous int32 array, where M is the length of the
                longest table; every element is written. None for a new ``[B, M]`` array.
            fill: value of the elements after the end of a table, and of rows without a lease.
            group: name of a window group, as for ``Lease.window_table``; None for the layers
                outside window groups.

        Returns:
            ``out``, or the new array: int32 device block ids.

        Raises:
            UsageError: ``out`` is too small or has another type or layout, or ``group`` is
                unknown. Nothing was written.
            LeaseError: a lease is released or belongs to another engine.
        """

    def lengths(self, leases: Batch[Any] | Iterable[SyncLease]) -> NDArray[np.int32]:
        """Return the number of positions of each lease whose tokens are named.

        In a decode step, these are the sequence lengths for attention kernels: the last named token
        is the one that the step computes.

        Args:
            leases: B leases.

        Returns:
            ``[B]`` int32; 0 for a released lease of a batch.

        Raises:
            LeaseError: a lease is released or belongs to another engine.
        """

    def updating_weights(
        self, timeout: float | None = None, *, version: str | None = None
    ) -> SyncWeightsUpdate:
        """Drop all cached blocks, and stop granting inside the ``async with`` block.

        KV that was computed with the old weights is wrong for the new ones. Open leases keep their
        blocks and may go on computing, with either weights; from the start of the block on, they
        publish, save and send no more, until they are preempted and resumed. Pins are released.
        Receives and sends in flight end when the block is entered; their leases keep the positions
        that have arrived.

        Args:
            timeout: seconds to wait on entry for transfers in flight within this engine and to its
                stores; None for no limit.
            version: version of the new weights: blocks of this version are found in the stores
                from now on. With None, or after an exception in the block, the weights get a random
                version, of which no store has blocks.

        Returns:
            An async context manager.

        Raises:
            ControlTimeout: raised on entry: transfers did not end in time. Nothing changed: the
                engine grants again, and receives and sends go on.

        Cancellation: before the block is entered, as for ``ControlTimeout``; inside the block, the
        engine grants again, without cached blocks.

        For threads, the object is entered with ``with``, and what is awaited returns an
        :class:`EngineFuture`. Nothing crosses before it is entered.
        """

    def purge(
        self, salt: str, *, hold_seconds: float = 0.0, timeout: float | None = 60.0
    ) -> EngineFuture[int]:
        """Remove all blocks of a salt from memory and from all stores; return the number of objects
        that were removed from stores.

        After the return, no block of the salt that existed before the call, or that a request open
        at its call computes, is found: on the device, in host memory, in any block group, or in a
        store of this engine. Open leases of the salt keep their blocks, but use and publish no
        others. Leases that are made during the call do not use the cache. Pins of the salt end.
        Saves in flight end before the stores are purged. With ranks, each rank purges its stores.

        Engines that share a store each need a call, since blocks in the memory of one engine can be
        saved again. Call all of them with ``hold_seconds`` above the time that it takes to call
        them, plus the longest ``StoreUse.deadline_seconds``: then all have stopped using the salt
        before the first one purges the store.

        A call that fails, is cancelled or is killed has removed a part. Call again: a second call
        removes the rest. ``aiokv store purge`` removes the blocks of stores that no engine uses.

        Args:
            salt: as for ``match``; ``""`` for prompts without a salt.
            hold_seconds: time before the stores are purged.
            timeout: seconds after ``hold_seconds``; None for no limit.

        Raises:
            StoreError: a store cannot be reached, is used with ``save=False``, or failed; memory
                and the other stores were purged.
            ControlTimeout: saves or stores did not end in time; memory was purged.

        Cancellation: memory was purged, and stores in part.

        For threads, the call returns an :class:`EngineFuture` at once, whose ``cancel()`` has the effects
        of a cancellation.
        """

    def health(self) -> Health:
        """Return the state of the engine, for health checks. Takes microseconds.

        Raises:
            UsageError: the call is made in another thread.
        """
