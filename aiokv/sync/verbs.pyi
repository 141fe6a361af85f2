"""Methods of ``Calls``, ``SyncLease`` and ``SyncEngine`` that are made from the table of verbs.

Written by ``make stubs``.
"""

from aiokv.base.misses import MissedRange
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

    def extendable_blocks(self, *, salt: str = '', limit: int | None = None) -> Answer[int]:
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

    def commit_blocks(
        self, lease: SyncLease, block_ids: TokenIds, tokens: TokenIds, *, groups: Mapping[str,
        TokenIds] | None = None, kept_blocks: int = 0
    ) -> Answer[int]:
        """Set device blocks that are computed, and their tokens, and share them.

        See ``Lease.commit_blocks``.
        """

    def retire(self, lease: SyncLease, *, returns: str = '') -> Answer[bool]:
        """Drop the references to host blocks, because the server's own cache has the device blocks.

        See ``Lease.retire``.
        """

    def transfer_ids(self, lease: SyncLease) -> Answer[tuple[int, ...]]:
        """Ids of the transfers in flight that write blocks of the lease.

        See ``Lease.transfer_ids``.
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

    def missed(self, lease: SyncLease) -> Answer[tuple[MissedRange, ...]]:
        """Causes of the prompt blocks that the last grant did not hit, in order of position.

        See ``Lease.missed``.
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

        See ``Lease.hit_blocks``.
        """

    @property
    def pending_tokens(self) -> int:
        """Number of tokens after the hit that another lease is computing; 0 once granted."""

    def allocate(
        self, num_tokens: int, *, priority: int = 0, timeout: float | None = None, wait_pending:
        float = 0.0, wait_store: float = 0.0, queued_tokens: int = 0, reserve_blocks: int | None =
        None, ttl_seconds: float | None = None
    ) -> EngineFuture[SyncLease]:
        """Wait for capacity, then take the blocks of ``num_tokens`` positions at once.

        See ``Lease.allocate``.
        """

    def try_allocate(
        self, num_tokens: int, *, reserve_blocks: int | None = None, ttl_seconds: float | None =
        None
    ) -> bool:
        """Allocate without waiting; return False if that is not possible now.

        See ``Lease.try_allocate``.
        """

    def can_allocate(self, num_tokens: int, *, reserve_blocks: int | None = None) -> bool:
        """Return True if ``try_allocate(num_tokens)`` would succeed now; changes nothing.

        See ``Lease.can_allocate``.
        """

    def preempt(self) -> None:
        """Give the device blocks back; ``allocate`` takes blocks again.

        See ``Lease.preempt``.
        """

    def swap_out(self) -> EngineFuture[None]:
        """Move the whole block table to host memory and keep it there.

        See ``Lease.preempt``.
        """

    def expire_after(self, seconds: float) -> None:
        """Let the engine release the lease when ``seconds`` have passed, unless it is used before.

        See ``Lease.expire_after``.
        """

    def keep(self) -> None:
        """End the limit of ``expire_after`` or ``ttl_seconds``. Idempotent.

        See ``Lease.keep``.
        """

    def fork(self, *, owner: str = '', stream: object = None) -> SyncLease:
        """Return a second lease on the same positions, e.g. for n > 1 samples of one prompt.

        See ``Lease.fork``.
        """

    def release(self, after: Event | None = None, *, returns: str = '') -> None:
        """Release the lease and give all its blocks back. Idempotent.

        See ``Lease.release``.
        """

    def assign(
        self, block_ids: TokenIds, *, computed_tokens: int = 0, priority: int = 0, groups:
        Mapping[str, TokenIds] | None = None
    ) -> None:
        """Set the device blocks of the next positions, with ``CacheConfig.external_device``.

        See ``Lease.assign``.
        """

    def commit_blocks(
        self, block_ids: TokenIds, tokens: TokenIds, *, groups: Mapping[str, TokenIds] | None =
        None, kept_blocks: int = 0
    ) -> int:
        """Set device blocks that are computed, and their tokens, and share them.

        See ``Lease.commit_blocks``.
        """

    def retire(self, *, returns: str = '') -> bool:
        """Drop the references to host blocks, because the server's own cache has the device blocks.

        See ``Lease.retire``.
        """

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids of the transfers in flight that write blocks of the lease.

        See ``Lease.transfer_ids``.
        """

    @property
    def is_idle(self) -> bool:
        """True if no transfer reads or writes device blocks that were assigned to the lease.

        See ``Lease.is_idle``.
        """

    def idle(self) -> EngineFuture[None]:
        """Wait until ``is_idle``.

        See ``Lease.idle``.
        """

    def commit(
        self, num_tokens: int, ready: Event | None = None, *, in_next_step: bool = False
    ) -> int:
        """Note that the first ``num_tokens`` positions are computed, and share their full blocks.

        See ``Lease.commit``.
        """

    def append(self, tokens: TokenIds, *, items: Sequence[Item] = ()) -> None:
        """Set the tokens of the next positions, so that their blocks can be shared.

        See ``Lease.append``.
        """

    def truncate(self, num_tokens: int) -> None:
        """Give back the positions from ``num_tokens`` on, e.g. those of rejected draft tokens.

        See ``Lease.truncate``.
        """

    def snapshot(self, num_tokens: int, stream: object = None) -> bool:
        """Save the recurrent state after ``num_tokens`` positions, so that prompts can hit there.

        See ``Lease.snapshot``.
        """

    def recompute_from(self) -> int | None:
        """Accept a failed onload: the lease continues with the positions before the failed block.

        See ``Lease.recompute_from``.
        """

    @property
    def state(self) -> LeaseState:
        """State of the lease."""

    @property
    def num_tokens(self) -> int:
        """Number of positions that the block table holds."""

    @property
    def usage(self) -> Usage:
        """Cached tokens and waiting times of the request so far; read it before ``release``."""

    @property
    def missed(self) -> tuple[MissedRange, ...]:
        """Causes of the prompt blocks that the last grant did not hit, in order of position.

        See ``Lease.missed``.
        """

    def receive(
        self, num_tokens: int | None = None, *, timeout: float = 10.0, open_timeout: float | None =
        None
    ) -> SyncReceiving:
        """Let another engine compute positions of this lease, and send their blocks.

        See ``Lease.receive``.
        """

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Device block ids in order: a copy, int32 ``[ceil(num_tokens / block_tokens)]``.

        See ``Lease.block_table``.
        """

    def window_table(self, group: str) -> NDArray[np.int32]:
        """Return a copy of the block table of a group of sliding-window layers. Any thread.

        See ``Lease.window_table``.
        """

class EngineVerbs:
    """Methods of ``SyncEngine``: each crosses to the engine's thread."""

    def match(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = (),
        owner: str = '', read: bool = True, write: bool = True
    ) -> SyncLease:
        """Look up the cached prefix of a prompt, and refresh its recency.

        See ``CacheEngine.match``.
        """

    def would_hit(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> Hit:
        """Return the cached prefix that ``match`` would find, and change nothing.

        See ``CacheEngine.would_hit``.
        """

    def retain(
        self, tokens: TokenIds, *, seconds: float, priority: int = 0, salt: str = '', adapter: str =
        '', items: Sequence[Item] = ()
    ) -> int:
        """Evict the cached blocks of a prompt after all blocks that are not retained.

        See ``CacheEngine.retain``.
        """

    def demote(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> int:
        """Evict the last cached blocks of a prompt before all other blocks, until their next use.

        See ``CacheEngine.demote``.
        """

    def forget(
        self, tokens: TokenIds, *, salt: str = '', adapter: str = '', items: Sequence[Item] = ()
    ) -> int:
        """Drop the last cached blocks of a prompt from the device and host memory.

        See ``CacheEngine.forget``.
        """

    def allocatable_blocks(
        self, *, salt: str = '', reserve_blocks: int | None = None, limit: int | None = None
    ) -> int:
        """Return the number of blocks of the largest request that could be granted now.

        See ``CacheEngine.allocatable_blocks``.
        """

    def extendable_blocks(self, *, salt: str = '', limit: int | None = None) -> int:
        """Return the number of device blocks that ``extend`` could take now.

        See ``CacheEngine.extendable_blocks``.
        """

    def extend(self, leases: Batch[Any] | Iterable[SyncLease], num_tokens: int) -> None:
        """Add ``num_tokens`` positions to each lease: to all of them, or to none.

        See ``CacheEngine.extend``.
        """

    def send(self, lease: SyncLease, ticket: bytes) -> SyncSending:
        """Send the blocks of a lease to the engine that has made a ticket.

        See ``CacheEngine.send``.
        """

    def computing(self, leases: Batch[LeaseT] | Iterable[LeaseT]) -> SyncComputing[LeaseT]:
        """Protect the blocks of leases while the model computes with them.

        See ``CacheEngine.computing``.
        """

    def advance(
        self, batch: SyncComputing[LeaseT] | Batch[LeaseT], tokens: StepTokenIds, counts: TokenIds |
        None = None, *, draft_tokens: int = 0
    ) -> tuple[LeaseT, ...]:
        """Account for a step of the model in one call: commit, append and extend for each lease.

        See ``CacheEngine.advance``.
        """

    def step(self, event: Event | None = None) -> int:
        """Close the open step, whose work finishes with ``event``.

        See ``CacheEngine.step``.
        """

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note the time in which the model has computed tokens of prompts.

        See ``CacheEngine.note_prefill``.
        """

    def layers(self, leases: Batch[Any] | Iterable[SyncLease]) -> SyncLayers:
        """Return one layer counter over all transfers that a step waits for.

        See ``CacheEngine.layers``.
        """

    def block_tables(
        self, leases: Batch[Any] | Iterable[SyncLease], out: NDArray[np.int32] | None = None, fill:
        int = -1, group: str | None = None
    ) -> NDArray[np.int32]:
        """Return the block tables as rows, padded with ``fill``.

        See ``CacheEngine.block_tables``.
        """

    def lengths(self, leases: Batch[Any] | Iterable[SyncLease]) -> NDArray[np.int32]:
        """Return the number of positions of each lease whose tokens are named.

        See ``CacheEngine.lengths``.
        """

    def updating_weights(
        self, timeout: float | None = None, *, version: str | None = None
    ) -> SyncWeightsUpdate:
        """Drop all cached blocks, and stop granting inside the ``async with`` block.

        See ``CacheEngine.updating_weights``.
        """

    def purge(
        self, salt: str, *, hold_seconds: float = 0.0, timeout: float | None = 60.0
    ) -> EngineFuture[int]:
        """Remove all blocks of a salt from memory and from all stores; return the number of objects
        that were removed from stores.

        See ``CacheEngine.purge``.
        """

    def health(self) -> Health:
        """Return the state of the engine, for health checks. Takes microseconds.

        See ``CacheEngine.health``.
        """
