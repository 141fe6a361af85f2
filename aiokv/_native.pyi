"""
Native core of aiokv: prefix index, block pools, block copies, file I/O.
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


def keep_forever(object: object) -> None:
    """
    Never destroy an object: a forked process lacks the threads that its destructor joins.
    """

def build_info() -> dict[str, object]:
    """
    Return how the extension was built: compiler, type (of CMake), optimized, and cuda_architectures (as CMake has them, separated by commas; empty without CUDA).
    """

class Event:
    """A point in a stream's order. Thread-safe."""

    def __init__(self) -> None: ...

    @property
    def done(self) -> bool:
        """Recorded and finished, successfully or not."""

    @property
    def recorded(self) -> bool: ...

    @property
    def generation(self) -> int:
        """Number of recordings so far."""

    @property
    def error(self) -> str | None:
        """Text of the failure; None while not done and on success."""

    @property
    def finished_seconds(self) -> float | None:
        """time.monotonic() at the end; None while not done."""

    def begin(self) -> None:
        """
        Record the event for work of the host, which finish() ends; streams may wait for it.
        """

    def finish(self, error: str = '') -> None:
        """End the host's work; an error fails what waits for it."""

    def synchronize(self) -> None:
        """Block until it is done."""

class Stream:
    """A thread that executes its work in order of submission."""

    def __init__(self, name: str) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def depth(self) -> int:
        """Work items and records that have not finished."""

    def record(self, event: Event) -> None:
        """Finish `event` when all work so far has finished."""

    def wait_event(self, event: Event) -> None:
        """Start later work after the event, which must have been recorded."""

    def synchronize(self) -> None:
        """Block until all work so far is done."""

    def close(self) -> None:
        """Execute the queued work, then join the thread."""

    def abort(self) -> None:
        """Fail the queued work, then join the thread."""

class BlockMap:
    """Addresses of the blocks of both tiers. Borrows the memory."""

    def __init__(self, num_layers: int, pieces: Sequence[tuple[int, int, int, int, int]], host_base: int, host_stride: int, host_blocks: int, device_blocks: int) -> None: ...

class CopyJob:
    """One transfer in flight. Thread-safe."""

    @property
    def layer_events(self) -> list[Event]: ...

    @property
    def error(self) -> tuple[int, str] | None:
        """(first bad block, reason), or None."""

class DlpackTensor:
    """Memory of a DLPack capsule; borrowed."""

    def __init__(self, capsule: object) -> None: ...

    @property
    def layout(self) -> tuple[int, list[int], list[int], int, int]:
        """
        (pointer, shape, strides in elements, bits of an element, DLPack device type).
        """

class TimerFd:
    """A monotonic timer as a file descriptor."""

    def __init__(self) -> None: ...

    def fileno(self) -> int: ...

    def arm(self, delay_seconds: float) -> None:
        """Expire once, after delay_seconds; replaces an earlier arming."""

    def drain(self) -> None:
        """Read the expiry, so that select() waits again."""

    def close(self) -> None: ...

def check_ids(source_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], target_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, source: str, source_blocks: int, target: str, target_blocks: int) -> None:
    """
    Raise UsageError on ids out of range, unequal or empty lists, duplicate destinations, and a destination that is a source of the same pool. Pools: 'device', 'host', 'state'.
    """

def copy_blocks(stream: Stream, block_map: BlockMap, host_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], device_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, onload: bool, after: Event | None, owner: object) -> CopyJob:
    """
    Queue a copy and return at once. Raises as check_ids() does, before the first byte moves.
    """

def move_slots(stream: Stream, pieces: Sequence[tuple[int, int, int]], num_slots: int, sources: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], targets: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, after: Event | None, owner: object) -> CopyJob:
    """
    Queue copies (source -1: zeros) of state slots; pieces are (pointer, stride, bytes).
    """

class Histogram:
    """Durations in buckets bounded by powers of two seconds."""

    def __init__(self) -> None: ...

    def add(self, seconds: float) -> None:
        """Count a duration; a negative one as 0."""

    @property
    def counts(self) -> list[int]:
        """Durations per bucket."""

    @property
    def sum_seconds(self) -> float: ...

    @staticmethod
    def bounds_seconds() -> list[float]:
        """Return the upper bounds of all buckets but the last, which has none."""

class TierCounts:
    """Blocks, or states, of a block group in one tier."""

    @property
    def blocks(self) -> int: ...

    @property
    def free(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def leased(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def evicted_by_cause(self) -> dict[str, int]: ...

    @property
    def evicted_blocks(self) -> int: ...

class GroupStatistics:
    """Blocks, or states, of a block group."""

    @property
    def device(self) -> TierCounts: ...

    @property
    def host(self) -> TierCounts: ...

    @property
    def set_aside_blocks(self) -> int: ...

    @property
    def cloned(self) -> int:
        """Copies on the device that leases began with."""

    @property
    def onloaded_blocks(self) -> int: ...

    @property
    def offloaded_blocks(self) -> int: ...

    @property
    def fetched_blocks(self) -> int: ...

    @property
    def unfetched_blocks(self) -> int: ...

    @property
    def saved_blocks(self) -> int: ...

    @property
    def unsaved_by_cause(self) -> dict[str, int]: ...

    @property
    def received_blocks(self) -> int: ...

    @property
    def sent_blocks(self) -> int: ...

class CoreStatistics:
    @property
    def attention(self) -> GroupStatistics: ...

    @property
    def missed_tokens_by_cause(self) -> dict[str, int]: ...

    @property
    def evictable_blocks(self) -> int: ...

    @property
    def leases(self) -> int: ...

    @property
    def releasing_leases(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def hit_device_tokens(self) -> int: ...

    @property
    def hit_host_tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def grants(self) -> int: ...

    @property
    def computed_tokens(self) -> int: ...

    @property
    def computed_prompt_tokens(self) -> int: ...

    @property
    def dropped_by_cause(self) -> dict[str, int]: ...

    @property
    def published_blocks(self) -> int: ...

    @property
    def failed_blocks(self) -> int: ...

    @property
    def skipped_backups(self) -> int: ...

    @property
    def reclaimed_host_copies(self) -> int: ...

    @property
    def hit_store_tokens(self) -> int: ...

    @property
    def fetches(self) -> int: ...

    @property
    def receives(self) -> int: ...

    @property
    def failed_receives(self) -> int: ...

    @property
    def sends(self) -> int: ...

    @property
    def failed_sends(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...

    @property
    def token_bytes(self) -> int: ...

ATTENTION_GROUP: int = -2

STATE_GROUP: int = -1

@overload
def copy_ints(list: list[object], out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    Write the integers of a list or an array to `out`; return how many of them, from the first on, are ints of 32 bits.
    """

@overload
def copy_ints(array: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> int: ...

class Outcome(enum.Enum):
    DONE = 0

    FAILED = 1

    CANCELLED = 2

class SavePolicy(enum.Enum):
    NONE = 0

    WRITE_THROUGH = 1

    NTH_USE = 2

    WRITE_BACK = 3

class StoreConfig:
    """Rule of when host blocks are saved to the stores."""

    def __init__(self, *, policy: SavePolicy = SavePolicy.WRITE_THROUGH, uses: int = 2, queue_blocks: int = 4096, ahead_blocks: int = 0) -> None: ...

class MoveRoute(enum.Enum):
    ON_DEVICE = 0

    FROM_HOST = 1

    TO_HOST = 2

def eviction_policies() -> list[str]:
    """Names of all eviction policies."""

class LeaseState(enum.Enum):
    MATCHED = 1
    """Holds nothing."""

    GRANTED = 2
    """Has refs on its hit, and device blocks."""

    FAILED = 3
    """Like GRANTED; an onload failed, and recompute_from was not called yet."""

    SWAPPING = 4
    """Like GRANTED; a transfer copies the table to host memory."""

    SWAPPED = 5
    """Holds host copies; allocate resumes it."""

    RELEASING = 6
    """
    Has no handle; batches or transfers of peers in flight keep its blocks.
    """

class Core:
    """Prefix index, block pools, leases and eviction; not thread-safe."""

    def __init__(self, *, block_tokens: int, device_blocks: int, host_blocks: int = 0, leave_tokens: int = 1, reserve_blocks: int = 0, write_policy: SavePolicy = SavePolicy.NONE, write_uses: int = 2, low_watermark_blocks: int = 0, min_onload_blocks: int = 0, eviction: str = 'lru', state_slots: int = 0, windows: Sequence[tuple[int, int, int, int, int]] = [], max_leases: int = 1048575, stores: StoreConfig | None = None, host_state_slots: int = 0, external_device: bool = False, splits_items: bool = False, shares: Mapping[str, float] = {}, history_blocks: int = 0) -> None: ...

    def match(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context: str = '', reads: bool = True, writes: bool = True) -> tuple[int, int, int]:
        """
        Open a lease: (lease, device_blocks, host_blocks) of the longest cached prefix.
        """

    def match_items(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], items: Sequence[tuple[bytes, int, int]], context: str = '', reads: bool = True, writes: bool = True) -> tuple[int, int, int]:
        """match() of a prompt with items: (content hash, offset, length)."""

    def would_hit(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], items: Sequence[tuple[bytes, int, int]], context: str = '') -> tuple[int, int]:
        """
        (device_blocks, host_blocks) that match would find; opens no lease, and refreshes no recency.
        """

    def allocate(self, lease: int, num_tokens: int, reserve_blocks: int | None = None) -> int:
        """
        Take refs and all blocks. 0: no room, nothing taken; 1: all there; 2: some load. `reserve_blocks`: None for the configured number.
        """

    def prolong(self, lease: int, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        Add the cached blocks of the next tokens to a granted lease that computes nothing. Returns as allocate does; 0 also if none of them is cached.
        """

    def pending(self, lease: int) -> tuple[int, int]:
        """
        (lease, blocks): the lease that will compute what follows the match; (0, 0): none.
        """

    def can_allocate(self, lease: int, num_tokens: int, saves: bool = False, reserve_blocks: int | None = None) -> bool:
        """
        Return whether allocate would grant now; `saves`: after take_write_backs found nothing.
        """

    def allocatable_blocks(self, limit: int, saves: bool = False, salt: str = '') -> int:
        """
        Device blocks that allocate could take now for a lease of `salt` without cached blocks, whatever the reserve, up to `limit`; `saves` as for can_allocate.
        """

    def extendable_blocks(self, limit: int, saves: bool = False, salt: str = '') -> int:
        """
        Device blocks that extend could take now, up to `limit`, if its first lease is of `salt`; `saves` as for can_allocate.
        """

    def indexed_blocks(self, lease: int) -> int:
        """Blocks of the lease that are in the index, from the first on."""

    def rematch(self, lease: int) -> tuple[int, int]:
        """
        (cached_tokens, prompt_tokens) of a lease that waits for its grant: of a match made now. The hit counts as used now.
        """

    def check_request(self, lease: int, num_tokens: int, reserve_blocks: int | None = None) -> None:
        """Raise what allocate would for a request that can never be granted."""

    def retract(self, lease: int, step: int = 0) -> int:
        """
        Undo allocate; the lease stays matched. Return the lease that keeps the blocks for the batches in flight, or 0.
        """

    def lease_state(self, lease: int) -> LeaseState:
        """
        Return the state of the lease; a lease that has ended raises LeaseError.
        """

    def computes(self, lease: int) -> bool:
        """False if the lease only keeps its hit."""

    def hit(self, lease: int) -> tuple[int, int]:
        """(device_blocks, host_blocks) as matched, or as granted."""

    def hit_blocks(self, lease: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """Device ids of the hit: of a match made now, or of the grant."""

    def onloads(self, lease: int) -> list[int]:
        """Unfinished transfers that write blocks of the lease."""

    def append(self, lease: int, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def append_items(self, lease: int, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], items: Sequence[tuple[bytes, int, int]]) -> None:
        """
        append() with items; offsets count from the first position of the prompt.
        """

    def commit(self, lease: int, num_tokens: int, step: int = 0) -> int:
        """Index computed blocks; returns how many became shareable."""

    def advance(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], width: int, counts: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, draft_tokens: int = 0, step: int = 0) -> tuple[int, list[int], list[int], Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]]:
        """
        Name the tokens that a step has produced, rows of `width`, of which counts[i] count (None: all); commit all positions before the last token of each lease, and give the lease draft_tokens positions behind that token. Return (published blocks, rows without room, rows that got blocks, device blocks that are computed now).
        """

    def truncate(self, lease: int, num_tokens: int, step: int = 0) -> int:
        """Return what retract() returns."""

    def extend(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_tokens: int) -> bool: ...

    def commit_blocks(self, lease: int, ids: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], group_ids: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, step: int = 0, kept_blocks: int = 0) -> int:
        """
        assign() ids whose positions are computed, append() tokens, and commit() all positions of the table.
        """

    def retire(self, lease: int, label: str = '') -> bool:
        """
        Drop the refs of a lease whose ids the server's cache keeps. Return False if it could not save blocks later.
        """

    def assign(self, lease: int, ids: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], computed_tokens: int = 0, group_ids: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        Append device ids of a server to the table of a lease; group_ids has one row of as many ids per other group, -1 for none, or is empty.
        """

    def is_idle(self, lease: int) -> bool:
        """
        Return whether no transfer uses ids that the lease, which may have ended, has named.
        """

    def idle_after_step(self, lease: int) -> int:
        """
        Return the newest unfinished step that the transfers of is_idle() wait for, or 0.
        """

    def take_queued_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        Return the device ids of the external saves that were queued since the last call.
        """

    def give_up_saves(self) -> None:
        """Save nothing of what external saves have queued."""

    def settle(self) -> tuple[list[int], list[int], list[int]] | None:
        """
        End the released leases that waited for external saves only. Return these leases, those of which saves have made blocks matchable, and those that have become idle; or None if there are none.
        """

    def release(self, lease: int, step: int = 0, used_in: int = 0, label: str = '') -> bool:
        """
        Return False when batches or transfers of peers in flight keep the blocks until they have ended. `label`: see Lease.release; "" for none.
        """

    def begin_batch(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """Begin a batch that computes with these leases; return its number."""

    def has_onloads(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
        """Return True while a lease has onloads in flight."""

    def end_batch(self, batch: int, step: int = 0) -> list[int]:
        """
        End a batch, or let its work belong to `step`; return the leases that this releases.
        """

    def batches(self, lease: int) -> list[int]:
        """Return the batches in flight that compute with the lease."""

    def is_released(self, lease: int) -> bool:
        """
        Return whether the lease is released while batches in flight keep its blocks.
        """

    def recompute_from(self, lease: int) -> int: ...

    def block_table(self, lease: int, group: int = -1) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """Of all layers but those of window groups, or of one group."""

    def max_extend_tokens(self, lease: int) -> int:
        """Positions that have blocks in every window group."""

    @property
    def hold_times(self) -> Histogram:
        """Times for which leases that compute had blocks; those that ended."""

    def block_tables(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], fill: int, group: int = -1) -> None:
        """
        Write the block tables into rows of `out`, the rest of each row `fill`.
        """

    def longest_table(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """Number of blocks of the longest block table."""

    def lengths(self, leases: Sequence[int] | Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """Number of named positions of each lease; 0 for a released one."""

    def is_current(self, lease: int) -> bool:
        """Return whether the lease is granted and its hit can still be matched."""

    def await_use(self, lease: int) -> None:
        """
        Let take_used() return the lease once another lease has hit all that it holds.
        """

    def awaits_use(self, lease: int) -> bool:
        """
        Return whether await_use() was called, and the hit was not used since then.
        """

    def take_used(self) -> list[int]:
        """Return leases of await_use() whose hit was used since the last call."""

    def is_granted(self, lease: int) -> bool: ...

    def num_tokens(self, lease: int) -> int: ...

    def cached_tokens(self, lease: int) -> int: ...

    def usage(self, lease: int) -> tuple[int, int, int, int]:
        """
        (prompt_tokens, cached_device_tokens, cached_host_tokens, computed_blocks).
        """

    def cached_store_tokens(self, lease: int) -> int:
        """
        Of the cached tokens: those whose blocks a fetch brought for this lease.
        """

    def note_left_in_store(self, lease: int, blocks: int, why: str) -> None:
        """
        Note that stores have the first blocks of a prompt, and why not all were fetched: 'declined', 'late' or 'failed'.
        """

    def missed(self, lease: int) -> list[tuple[int, int, str, float | None, str, bool, int, str | None, tuple[int, int, int] | None]]:
        """
        Causes of the missed blocks of the last grant: (first block, end, cause, seconds since the eviction, its cause or why a store's blocks were not fetched, whether the host had the last copy, lease that needed the room or computes the blocks, other context, (position, token, known token)).
        """

    def group_hit(self, lease: int, group: int) -> tuple[int, int]:
        """
        (device_blocks, host_blocks) of the last grant in a group; group -1: state.
        """

    def missing(self, lease: int, blocks: int = 2048) -> tuple[int, bytes]:
        """
        (first block, digests) of the first blocks behind the cached ones that stores may have.
        """

    def begin_fetch(self, lease: int, blocks: int, replaced: int = 0) -> int:
        """
        Begin to fetch missing blocks, or join the fetch that brings the first, unless it is `replaced`; 0: none.
        """

    def boundaries(self, lease: int, skip: int = 0) -> tuple[int, int, int, bytes, bytes]:
        """
        (hit, cached, first_block, digests, may_end) of the blocks behind the hit, from block hit + skip on; may_end: one byte per block, 0 where a hit would cut an item.
        """

    def has_copies(self, lease: int, group: int, first_block: int, end_block: int) -> bytes:
        """
        One byte per cached block: 1 if a tier has its copy in the group; group -1: state.
        """

    def begin_auxiliary_fetch(self, lease: int, group: int, blocks: int) -> int:
        """
        Begin to fetch what a hit of the first blocks lacks in the group, or join a fetch; 0: none.
        """

    def wants_saves(self) -> bool: ...

    def take_saves(self) -> int:
        """Begin a save; 0: there is nothing to save."""

    def store_transfer(self, transfer: int) -> tuple[int, bytes, bytes, bytes]:
        """(group, host_blocks, digests, follows) of a fetch or a save in flight."""

    def receive(self, lease: int, ticket_id: bytes, num_tokens: int, group: int = -2, first_block: int = 0, step: int = 0) -> int:
        """
        Begin to receive the blocks of a group that are needed behind `num_tokens` positions: of group -2, full attention, those from `first_block` on; of group -1 the recurrent state, the end of which commits these positions. Return the transfer.
        """

    def send(self, lease: int, ticket_id: bytes, num_tokens: int, group: int = -2, first_block: int = 0, first_range: int = 0, end_range: int = 0, mark: int = 0, step: int = 0) -> int:
        """
        Begin to send the blocks of a group that are needed behind `num_tokens` computed positions; of group -2 those from `first_block` on, or ranges of their layers, which need not be computed before a mark. Return the transfer.
        """

    def end_ticket(self, lease: int, ticket_id: bytes) -> None:
        """
        No caller waits for the transfers of the ticket: those in flight are abandoned.
        """

    def commit_received(self, lease: int, num_tokens: int) -> int:
        """Index received blocks; returns how many became shareable."""

    def prompt_digest(self, lease: int, num_tokens: int) -> bytes:
        """Digest of the first positions, for any block_tokens."""

    def peer_transfer(self, transfer: int) -> tuple[bool, bytes, int, bytes, bytes, int, tuple[int, int], int]:
        """
        (receives, ticket_id, group, blocks of the prompt, own blocks or the state slot, after_step, (first range of layers, end range), mark); group -1: recurrent state, -2: all other layers without a window.
        """

    def peer_transfers(self, lease: int) -> list[int]:
        """Transfers in flight that receive or send blocks of the lease."""

    def take_peer_ends(self) -> list[tuple[int, int, int, bool]]:
        """
        Return (transfer, lease, blocks, commits) of those that have ended since the last call, and whose lease has a handle.
        """

    def take_abandoned_peer_transfers(self) -> list[int]: ...

    def is_in_flight(self, transfer: int) -> bool: ...

    def saving(self, lease: int) -> int:
        """
        A backup of the lease's blocks that is under way and that a swap has to wait for; 0: none.
        """

    def swap_out(self, lease: int, step: int = 0) -> bool:
        """
        Begin to move the whole table to host memory; False, and nothing changed: no room.
        """

    def swap_transfer(self, lease: int) -> int:
        """The transfer of a swap that is under way, or 0."""

    def is_swapped(self, lease: int) -> bool: ...

    def computed_tokens(self, lease: int) -> int: ...

    def uncovered_tokens(self, lease: int, num_tokens: int) -> int:
        """
        Return how many of the first `num_tokens` positions are neither computed, received, nor part of a batch.
        """

    def fork(self, lease: int, step: int = 0) -> tuple[int, Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]]:
        """
        (lease, source_blocks, target_blocks): blocks to copy on the device; lease 0: no room.
        """

    def hold_only(self, lease: int, whole: bool = False) -> None:
        """
        The lease will compute nothing: it gets no state slot. With `whole` it may hit the last block of its prompt.
        """

    def snapshot(self, lease: int, num_tokens: int, step: int = 0) -> tuple[int, int]:
        """
        (source, target): the state slot to copy on the device now; target -1: none.
        """

    def discard_snapshot(self, lease: int, slot: int) -> None:
        """The copy that snapshot() asked for was not made."""

    def snapshot_points(self, lease: int) -> list[int]: ...

    def state_slot(self, lease: int) -> int:
        """The lease's own, or -1."""

    def is_move(self, transfer: int) -> bool:
        """The transfer moves state slots or window blocks."""

    def move(self, transfer: int) -> tuple[MoveRoute, int, bytes, bytes, int]:
        """
        (route, window group, source ids, target ids, after_step); group -1: state slots, of which source -1 is zeros.
        """

    def take_group_save(self) -> int:
        """
        Begin to copy blocks of one group besides attention to host memory; 0: there is nothing to copy.
        """

    def take_backups(self) -> int:
        """
        Begin to back up a bounded number of queued blocks; 0: there is nothing to copy.
        """

    def has_queued_backups(self) -> bool:
        """Return whether take_backups() has left blocks to its next call."""

    def take_write_backs(self, wanted_blocks: int = 0) -> int: ...

    def wants_write_backs(self) -> bool: ...

    def wants_backups(self) -> bool: ...

    def must_look_further(self) -> bool:
        """
        Return whether eviction stopped at a block that take_write_backs(more) has not seen.
        """

    def transfer(self, transfer: int) -> tuple[bytes, bytes, int]:
        """(device_blocks, host_blocks, after_step)."""

    def complete(self, transfer: int, outcome: Outcome, first_bad_block: int = 0, results: bytes = ...) -> list[int]:
        """
        `results`: of a save, one byte per block, or none. Return the leases that waited for a transfer of a peer and are released now.
        """

    def take_abandoned(self) -> list[int]: ...

    def mark_cancelling(self, transfer: int) -> None:
        """
        Note that a worker was asked to cancel a transfer: no other lease joins it.
        """

    def close_step(self, step: int) -> None: ...

    def finish_step(self, step: int) -> None: ...

    def unfinished_step(self) -> int:
        """Return the newest step that may still use blocks, or 0."""

    def retain(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context: str, items: Sequence[tuple[bytes, int, int]], priority: int, end: int) -> int:
        """
        Evict the cached blocks of a prompt after others until end_retentions(end).
        """

    def demote(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context: str, items: Sequence[tuple[bytes, int, int]]) -> int:
        """
        Evict the last blocks of a prompt, which nothing else shares, before others.
        """

    def forget(self, tokens: Sequence[int] | Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], context: str, items: Sequence[tuple[bytes, int, int]]) -> int:
        """Drop the last blocks of a prompt, which nothing else shares."""

    def end_retentions(self, now: int) -> None: ...

    def retained_blocks(self) -> dict[str, int]:
        """Number of retained blocks that no lease uses, by context."""

    def evict_device(self, blocks: int) -> int: ...

    def evict_host(self, blocks: int) -> int: ...

    def resize_device(self, blocks: int) -> None: ...

    @property
    def device_blocks(self) -> int: ...

    @property
    def granted_leases(self) -> int: ...

    @property
    def computing_leases(self) -> int:
        """Leases that have blocks and compute, which those of pins do not."""

    @property
    def swapped_leases(self) -> int: ...

    @property
    def computed_prompt_tokens(self) -> int:
        """As in the statistics."""

    def room(self) -> tuple[int, int, int]:
        """
        (device_free, evictable, state_slots) that no lease holds; statistics() in O(1).
        """

    def forget_device(self) -> None: ...

    def forget_host(self) -> None: ...

    def reset(self, new_weights: bool = False) -> None: ...

    def purge(self, salt: str) -> None: ...

    @property
    def reports_stores(self) -> bool:
        """True if an event stream reports the stores."""

    def note_lacking(self, lease: int) -> None:
        """Report that no store has the first missing block of a lease."""

    def statistics(self) -> CoreStatistics: ...

    def group_statistics(self, group: int) -> GroupStatistics: ...

    def violations(self) -> list[str]: ...

    def oldest_leases(self, limit: int) -> list[tuple[int, float, int, int, int, int, int]]:
        """Open leases as describe() returns them, in bounded time."""

    def describe(self, lease: int) -> tuple[int, float, int, int, int, int, int]:
        """
        (id, age_seconds, prompt_tokens, cached_tokens, num_tokens, computed_tokens, blocks).
        """

    def hottest_prefixes(self, limit: int) -> tuple[list[tuple[int, int, str, int, int, int, int, int, int, int]], bool]:
        """
        ([(parent, node, context, first_block, blocks, device_blocks, host_blocks, uses, refs, children)], complete); parent is a place in the list, or -1.
        """

    def blocks(self) -> list[tuple[str, bytes, int, int, int, int, int]]:
        """
        Return the blocks that can be matched: (context, prefix tokens, device id, host id, flags, refs, pins). Flags: 1 device valid, 2 device loading, 4 host valid, 8 host loading.
        """

class BlockEvent(enum.Enum):
    STORED = 0
    """Copies have become valid."""

    REMOVED = 1
    """Copies are gone, or cannot be matched."""

    CLEARED = 2
    """No block is on any medium."""

class Medium(enum.Enum):
    DEVICE = 0

    HOST = 1

    STORE = 2
    """Reported by streams with_stores only."""

class EventStream:
    """
    Contents of the tiers, then each change; after an overflow, the contents again.
    """

    def __init__(self, core: Core, max_blocks: int, with_stores: bool = False) -> None: ...

    @property
    def is_due(self) -> bool:
        """True if drain() has or seeks events; False: all is reported."""

    def drain(self, max_blocks: int) -> list[tuple[BlockEvent, Medium, bytes | None, bytes, bytes, str, list[bytes]]]:
        """
        Return the next events, of about max_blocks blocks: (event, medium, digest of the block before them or None, 32 bytes per block, int32 tokens, context, item key of each block or nothing).
        """

    def repeat(self) -> None:
        """Report all existing blocks once more."""

    @property
    def dropped_blocks(self) -> int:
        """Events of blocks that a full queue has dropped."""

    @property
    def restarts(self) -> int:
        """Times that the queue was full."""

def sha256_implementation() -> str:
    """Name the implementation that digests use on this processor."""

def root_digest(block_tokens: int, context: str) -> bytes:
    """
    Return the digest (32 bytes) that the first blocks of prompts of a context chain to.
    """

def salt_label(salt: str) -> bytes:
    """Return the label (5 bytes) at the end of the keys of a salt."""

def block_digests(root: bytes, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tokens: int, items: Sequence[tuple[bytes, int, int]] = [], *, portable: bool = False) -> bytes:
    """
    Return the digests of the whole blocks of a prompt, 32 bytes each; items are (hash, offset, length). portable=True does without special instructions. Raises UsageError.
    """

def derive_keys(fingerprint: bytes, digests: bytes, *, portable: bool = False) -> bytes:
    """
    Return the keys, 32 bytes each, of block digests in the stores of a fingerprint. Raises UsageError.
    """

def seal_blocks(address: int, pitch_bytes: int, payload_bytes: int, blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: bytes, *, num_blocks: int) -> None:
    """
    Write the trailers of host blocks behind their payloads. Block i of num_blocks begins at address + i * pitch_bytes. Call it in a thread: it releases the GIL and reads all payloads. Raises UsageError before the first access.
    """

def verify_blocks(address: int, pitch_bytes: int, payload_bytes: int, blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: bytes, *, num_blocks: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """
    Return Result.DONE or Result.WRONG for each block: whether its trailer is that of the key and of the payload. Arguments, threads and errors as of seal_blocks().
    """

def copy_objects(source: tuple[int, int, int], source_blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], target: tuple[int, int, int], target_blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, payload_bytes: int, keys: bytes) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """
    Copy the objects of blocks between two memories, each given by its address, pitch_bytes and num_blocks, and return for each copy what verify_blocks() would. Threads and errors as of seal_blocks().
    """

def verify_object(buffer: object, key: bytes) -> bool:
    """
    Return True if a contiguous buffer is a payload and the trailer of the payload and key. Releases the GIL. Raises UsageError on a key of another length than 32 bytes.
    """

class ObjectWriter:
    """
    Writes objects, whose bytes arrive in pieces, to host blocks, and verifies each. Arguments and errors as of verify_blocks(). One thread at a time may use it.
    """

    def __init__(self, address: int, pitch_bytes: int, payload_bytes: int, blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: bytes, *, num_blocks: int) -> None: ...

    def write(self, piece: object) -> None:
        """
        Append the next bytes, a contiguous buffer of any length; bytes behind the last object are ignored. Releases the GIL.
        """

    def results(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Return Result.DONE for each object that was written as a whole and is right, and Result.WRONG for the others.
        """

class SlotTable:
    """Slots of a disk store: keys, free slots and recency. Not thread-safe."""

    def __init__(self, capacity: int) -> None: ...

    def contains(self, keys: bytes, oldest: int = 0, newest: int = 4294967295) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        Return for each key whether it is stored, and was saved from `oldest` to `newest` (Unix times, inclusive).
        """

    def pin(self, keys: bytes, oldest: int = 0, newest: int = 4294967295) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Return the slot of each key, or -1. Until unpin(), the slots found are not reused.
        """

    def unpin(self, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Undo pin() for these slots."""

    def reserve(self, count: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Take up to `count` free slots, in rising order."""

    def release(self, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Give back reserved slots about which no record was written."""

    def commit(self, keys: bytes, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], seconds: int) -> None:
        """Let the keys be found; their data and records are written."""

    def discard(self, keys: bytes, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Give back reserved slots whose records may have been written."""

    def grow(self, count: int) -> None:
        """Let reserve() use `count` more slots."""

    def remove(self, keys: bytes) -> int:
        """Remove the keys that are stored; return their number."""

    def quarantine(self, keys: bytes) -> int:
        """Remove the keys that are stored and never reuse their slots."""

    def evict(self, count: int) -> int:
        """
        Remove the least recently used keys that are not pinned; return their number.
        """

    def take_records(self) -> bytes:
        """Return the records of removals since the last call, without checksums."""

    def settle(self, total: int, count: int) -> bool:
        """
        Free up to `count` of the slots that were unsettled when `unsettled_total` had this value; return True when none of them is left.
        """

    @property
    def unsettled_total(self) -> int: ...

    def begin_snapshot(self) -> None: ...

    def snapshot(self, count: int) -> bytes:
        """Return the next records of the snapshot, b"" at its end."""

    def list_keys(self, first: int, count: int, label: bytes) -> bytes:
        """
        Return the keys of `count` slots from `first` on that end with `label`.
        """

    def newest(self, count: int) -> bytes:
        """Return the `count` most recently used keys, the last one used first."""

    def label_counts(self, count: int) -> dict[str, dict[bytes, int]]:
        """
        Return the numbers of keys by label, of the `count` largest labels of each kind.
        """

    def publish(self, counters: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Count the stored keys in `counters`, which several tables may share, until the table is destroyed; see may_have_any(). Call once.
        """

    @property
    def high_water(self) -> int:
        """Slots that were ever reserved."""

    @property
    def capacity(self) -> int: ...

    @property
    def limit(self) -> int:
        """Slots that exist on the medium."""

    @property
    def stored(self) -> int: ...

    @property
    def available(self) -> int:
        """Slots that reserve() can take."""

    @property
    def unsettled(self) -> int: ...

    @property
    def quarantined(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory in use."""

    def check(self) -> str:
        """Return the first violated invariant, or ""."""

KEY_COUNTERS_PER_KEY: int = 12

def may_have_any(counters: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: bytes) -> bool:
    """
    Return False if no table that has published its keys in `counters` has any of these.
    """

class JournalReplay:
    """Rebuilds a slot table from a journal."""

    def __init__(self, table: SlotTable, epoch: int, boot: bytes, num_slots: int) -> None: ...

    def feed(self, bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Read the next bytes: whole records, except at the end of the file."""

    def finish(self) -> None:
        """Apply the records that are proven; slots without a key become free."""

    @property
    def end(self) -> int:
        """Position behind the last valid record."""

    @property
    def damaged(self) -> int:
        """Invalid records before `end`."""

    @property
    def torn(self) -> int:
        """Invalid records behind `end`."""

    @property
    def unproven(self) -> int:
        """Adds that were dropped: a power cut may have lost their data."""

    @property
    def outside(self) -> int:
        """Records of slots above the capacity, or from num_slots on."""

class ReuseSketch:
    """Approximate number of recent offers of each key."""

    def __init__(self, period: int, most: int) -> None: ...

    def count(self, keys: bytes) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Count an offer of each key; return the number of its earlier offers, up to `most`, [N] int32.
        """

    def counters(self) -> bytes:
        """Return the state, for restore()."""

    def restore(self, counters: bytes) -> None:
        """Replace the state by that of a sketch of the same size."""

def add_records(keys: bytes, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], seconds: int) -> bytes:
    """Return records that add the keys, without checksums."""

def synced_record() -> bytes:
    """Return the record that proves the adds before it, without checksum."""

def session_record(boot: bytes) -> bytes:
    """Return the record that begins a session, without checksum."""

def stamp_records(records: bytes, epoch: int, position: int) -> bytes:
    """Return the records with checksums for their place in the journal."""

class IoQueue:
    """
    Reads and writes of files that end asynchronously, announced by an eventfd.
    """

    def __init__(self, entries: int = 64, backend: str = 'auto') -> None:
        """
        At most `entries` requests are in the kernel at a time. backend: 'auto', 'io_uring' or 'threads'.
        """

    @property
    def backend(self) -> str:
        """'io_uring' or 'threads'."""

    @property
    def reason(self) -> str:
        """Why io_uring is not used; '' when it is."""

    @property
    def fd(self) -> int:
        """
        The eventfd: readable from the end of the last request of a submit() until pop() has removed all results; -1 when closed.
        """

    @property
    def pending(self) -> int:
        """Requests whose results were not removed."""

    def register_buffer(self, address: int, num_bytes: int, tag: int) -> None:
        """
        Let the kernel map memory once for all later requests. The result, with the tag, is 0, or the -errno with which it refused: requests are then slower.
        """

    def submit(self, fd: int, write: bool, addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], tags: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        Start one request per element and return their number. Raises LayoutError, before the first one starts, on a request that is too long, or that is not aligned for a file with O_DIRECT.
        """

    def flush(self, fd: int, tag: int) -> None:
        """Start an fdatasync of the file."""

    def cancel(self, tags: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Ask to end requests early. Each still has a result: -ECANCELED when it was cancelled in time.
        """

    def peek(self, limit: int = 4096) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
        """
        Return the oldest results, (tags, results), and keep them. A result is the number of bytes (fewer than requested: the file ended), 0 for a flush, or -errno.
        """

    def pop(self, count: int) -> None:
        """Remove the oldest results."""

    def reap(self) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
        """Return results as peek() does, and remove them."""

    def close(self) -> None:
        """
        Cancel the requests that have not started, and block until the kernel accesses no memory of the others. Results can be read afterwards. Idempotent.
        """

class Repack:
    """
    Strided copies between two layouts of the same blocks. Immutable, thread-safe.
    """

    def __init__(self, groups: Sequence[tuple[int, Sequence[tuple[int, int, int]], int, tuple[int, int, int, int], tuple[int, int, int, int], Sequence[tuple[int, int]]]], gaps: Sequence[tuple[int, int]], *, source_bytes: int, target_bytes: int) -> None:
        """
        Groups of pieces of equal geometry: (item bytes, axes as (length, source stride, target stride), tokens per row or 0, rows of the source and rows of the target as (length, inner length, outer stride, inner stride), pieces as (source offset, target offset)), all in bytes; and gaps of the target, (offset, bytes), which become zero. Raises LayoutError when a piece exceeds the block of either side.
        """

    def run(self, parts: Annotated[NDArray[numpy.int64], dict(shape=(None, 5), order='C', device='cpu', writable=False)]) -> None:
        """
        Copy parts, rows of int64 (source address, target address, first token in the source, first token in the target, tokens). Call it in a thread: it releases the GIL. Raises UsageError before the first access. The addresses are not checked.
        """

class Turn:
    """Which thread may run the code of an event loop."""

    def __init__(self) -> None: ...

    def offer(self) -> None:
        """Loop's thread: let others borrow the turn until `reclaim`."""

    def reclaim(self) -> bool:
        """
        Loop's thread: wait for a borrower, and end the offer. Return True if others have had the turn.
        """

    def set_wake_socket(self, wake_socket: int) -> None:
        """
        Set the descriptor of the socket to which a byte is sent to wake the loop.
        """

    def wake(self) -> None:
        """
        End the loop's wait for events, if it waits; at the end of a `call` that runs.
        """

    def call(self, function: object, *args: object) -> bool:
        """
        Call a function with the turn and return its value, if the loop waits for events and no other thread has the turn; return False otherwise. Does not wait.
        """
