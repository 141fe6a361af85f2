"""Statistics of an engine: one tree of frozen structs, whose fields name their metrics.

A field is annotated with a :class:`Metric`, which has the name, the kind and the help of the
metric and the labels of the field. ``observe/metrics.py`` renders the tree for Prometheus; the
live page and ``aiokv top`` read the same tree as JSON. A new number needs a field here, and the
code that counts it.

A field that is a struct, or a list or a dict of structs, is a branch. Fields with a :class:`Label`
add their value as a label to all numbers of their struct and of its branches.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, Self, get_type_hints

import msgspec

from aiokv.base.groups import ATTENTION

if TYPE_CHECKING:
    from aiokv._native import Histogram

Kind = Literal["counter", "gauge", "histogram", "untyped"]


class Metric(NamedTuple):
    """Metric of one or several fields.

    Attributes:
        kind: as in the line ``# TYPE`` of an exposition.
        name: name without the prefix ``aiokv_``.
        help: help text of one sentence.
        key_label: name of the label whose value is the key of a dict, the index of a list, or a
            state.
        states: all values of a str field; the metric is 1 for the present one, else 0.
        labels: labels of the field, by name.
    """

    kind: Kind
    name: str
    help: str
    key_label: str = ""
    states: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    def __call__(self, **labels: str) -> Metric:
        """Return the metric with the labels of one of its fields."""
        return self._replace(labels=tuple(labels.items()))


class Label(NamedTuple):
    """Label of all numbers of a struct, or of a branch.

    Attributes:
        name: name of the label. For a dict of structs, its value is the key.
        value: constant value; None for the value of the field.
    """

    name: str
    value: str | None = None


def counter(name: str, help: str, key_label: str = "") -> Metric:  # noqa: A002
    """Return a metric that only increases; its name ends in ``_total``."""
    return Metric("counter", name, help, key_label)


def gauge(name: str, help: str, key_label: str = "") -> Metric:  # noqa: A002
    """Return a metric that increases and decreases."""
    return Metric("gauge", name, help, key_label)


def histogram(name: str, help: str) -> Metric:  # noqa: A002
    """Return a metric of a :class:`DurationHistogram`."""
    return Metric("histogram", name, help)


def mark_of(kind: type[msgspec.Struct], field: str) -> Metric | Label | None:
    """Return the metric or the label of a field; None without one."""
    return _marks(kind)[field]


def metric_of(kind: type[msgspec.Struct], field: str) -> Metric | None:
    """Return the metric of a field; None without one."""
    mark = mark_of(kind, field)
    return mark if isinstance(mark, Metric) else None


@cache
def _marks(kind: type[msgspec.Struct]) -> dict[str, Metric | Label | None]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: _mark(getattr(hints[name], "__metadata__", ())) for name in hints}


def _mark(marks: tuple[object, ...]) -> Metric | Label | None:
    return next((mark for mark in marks if isinstance(mark, Metric | Label)), None)


UNKNOWN: Final = -1
"""Value of a size that is not known; it has no sample in the metrics."""


class DurationHistogram(msgspec.Struct, frozen=True):
    """Durations, counted in buckets whose upper bounds are powers of two seconds.

    Attributes:
        counts: durations per bucket: those above the bound before it, up to its own; the last
            bucket has no bound.
        sum_seconds: sum of all durations.
        bounds_seconds: upper bounds of all buckets but the last: from 2**-20 s to 4096 s.
    """

    counts: list[int]
    sum_seconds: float
    bounds_seconds: list[float]

    @classmethod
    def of(cls, histogram: Histogram) -> Self:
        """Return the present counts of a native histogram."""
        return cls(histogram.counts, histogram.sum_seconds, histogram.bounds_seconds())

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)


# --- pools ----------------------------------------------------------------------------------------

_BLOCKS: Final = gauge(
    "blocks",
    "Blocks of a group in a tier by state: free, cached (of the index), leased (of one lease "
    "alone), in_flight (destination of a transfer); their sum is the capacity.",
)
_COPIED: Final = counter(
    "copied_blocks_total", "Blocks of a group that were copied between host memory and the device."
)
_FETCHED: Final = counter(
    "fetch_blocks_total",
    "Blocks of fetches from stores: verified ones (fetched); missing, wrong or late ones "
    "(unfetched).",
)
_SAVED: Final = counter("save_blocks_total", "Blocks to be saved to stores, by outcome.")


_PEER_BLOCKS: Final = counter(
    "peer_blocks_total",
    "Blocks of a group that were received and verified, or sent and acknowledged.",
)


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one group in one tier: capacity, present states, and counters.

    The capacity ``blocks`` is ``free + cached + leased + in_flight``. A block of the group
    ``"state"`` is a state slot; its *cached* slots have snapshots.
    """

    blocks: Annotated[
        int,
        gauge("capacity_blocks", "Capacity of a group in a tier: the denominator of occupancy."),
    ]
    free: Annotated[int, _BLOCKS(state="free")]
    cached: Annotated[int, _BLOCKS(state="cached")]
    leased: Annotated[int, _BLOCKS(state="leased")]
    in_flight: Annotated[int, _BLOCKS(state="in_flight")]
    evicted_by_cause: Annotated[
        dict[str, int],
        counter(
            "evicted_blocks_total",
            "Cached blocks that were evicted from a tier, by cause: room for leases, host copies "
            "or fetches (capacity), a call of evict (request), resize or sleep.",
            "cause",
        ),
    ]

    @property
    def evicted_blocks(self) -> int:
        """Blocks that were evicted for any cause."""
        return sum(self.evicted_by_cause.values())

    @property
    def used_share(self) -> float:
        """Share of the capacity that is not free; 0.0 without a capacity."""
        return 1 - self.free / self.blocks if self.blocks else 0.0


class BlockGroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one group: ``"attention"``, ``"state"`` (recurrent state), or a window group.

    *Unsaved* blocks were to be saved to the stores and were not. Causes of ``"attention"``:
    *dropped* (the queue was full, or the block was evicted or the host tier slept before),
    *refused* by a store or its write budget, or *failed*. The other groups count them together, as
    *unsaved*.
    """

    device: Annotated[TierStatistics, Label("tier", "device")]
    host: Annotated[TierStatistics, Label("tier", "host")]
    set_aside_blocks: Annotated[
        int,
        gauge(
            "set_aside_blocks",
            "Device blocks of a window group that leases have or will need; 0 for other groups.",
        ),
    ]
    onloaded_blocks: Annotated[int, _COPIED(direction="onload")]
    offloaded_blocks: Annotated[int, _COPIED(direction="offload")]
    fetched_blocks: Annotated[int, _FETCHED(outcome="fetched")]
    unfetched_blocks: Annotated[int, _FETCHED(outcome="unfetched")]
    saved_blocks: Annotated[int, _SAVED(outcome="saved")]
    unsaved_by_cause: Annotated[dict[str, int], _SAVED._replace(key_label="outcome")]
    received_blocks: Annotated[int, _PEER_BLOCKS(direction="receive")]
    sent_blocks: Annotated[int, _PEER_BLOCKS(direction="send")]

    @property
    def unsaved_blocks(self) -> int:
        """Blocks that were to be saved to the stores and were not, for any cause."""
        return sum(self.unsaved_by_cause.values())


# --- leases and the index -------------------------------------------------------------------------

_HITS: Final = counter("hit_tokens_total", "Prompt tokens of grants that a tier had in its cache.")
_LEASES: Final = gauge(
    "leases",
    "Leases: open ones, and released ones whose blocks a batch or a peer still uses (releasing).",
)
_WAITING: Final = gauge("waiting_leases", "Leases that wait, by reason.")
_PREEMPTED: Final = counter(
    "preemptions_total",
    "Block tables that were given up (drop), whose move to host memory was begun (swap), or that "
    "were lost with a rank (lost).",
)
_TRANSFERS: Final = counter(
    "peer_transfers_total",
    "Transfers of blocks from (receive) and to (send) other engines that were begun.",
)
_FAILED_TRANSFERS: Final = counter(
    "peer_failed_transfers_total", "Transfers from and to other engines that failed."
)


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Leases, pools and index of a cache: counters since the engine was made, and present states.

    *Computed* tokens are positions that ``commit`` has noted, again after a preemption.
    ``hit_store_tokens`` is a part of the hits of device and host: only the first lease that is
    granted with a block that a fetch has brought counts; leases of pins and prefetches do not.
    """

    prompt_tokens: Annotated[
        int,
        counter(
            "prompt_tokens_total", "Prompt tokens of grants: the denominator of the hit rates."
        ),
    ]
    hit_device_tokens: Annotated[int, _HITS(tier="device")]
    hit_host_tokens: Annotated[int, _HITS(tier="host")]
    hit_store_tokens: Annotated[
        int,
        counter(
            "hit_store_tokens_total",
            "Hit tokens of both tiers that a fetch from a store had brought, at their first hit.",
        ),
    ]
    missed_tokens_by_cause: Annotated[
        dict[str, int],
        counter(
            "missed_tokens_total",
            "Prompt tokens of grants that were not hit, by cause: see Lease.missed. All are 0 "
            "without CacheConfig.miss_history_blocks.",
            "cause",
        ),
    ]
    computed_tokens: Annotated[
        int,
        counter(
            "computed_tokens_total",
            "Positions whose computation was committed; again, when they were computed again.",
        ),
    ]
    computed_prompt_tokens: Annotated[
        int,
        counter("computed_prompt_tokens_total", "Computed positions that belong to prompts."),
    ]
    grants: Annotated[
        int, counter("grants_total", "Leases that were granted; a resumed lease counts again.")
    ]
    leases: Annotated[int, _LEASES(state="open")]
    releasing_leases: Annotated[int, _LEASES(state="releasing")]
    waiting: Annotated[int, _WAITING(reason="capacity")]
    waiting_for_quota: Annotated[int, _WAITING(reason="quota")]
    waiting_for_store: Annotated[int, _WAITING(reason="store")]
    waiting_for_pending: Annotated[int, _WAITING(reason="pending")]
    preemptions: Annotated[int, _PREEMPTED(kind="drop")]
    swaps: Annotated[int, _PREEMPTED(kind="swap")]
    lost_leases: Annotated[int, _PREEMPTED(kind="lost")]
    expired_leases: Annotated[
        int,
        counter(
            "expired_leases_total",
            "Leases that were released because they were not used within their ttl_seconds.",
        ),
    ]
    overdue_requests: Annotated[
        int,
        counter(
            "overdue_requests_total",
            "Requests that have waited for max_overtake_seconds, so that no later request of their "
            "priority is granted before them.",
        ),
    ]
    groups: Annotated[dict[str, BlockGroupStatistics], Label("group")]
    evictable_blocks: Annotated[
        int, gauge("evictable_device_blocks", "Cached device blocks that no lease uses.")
    ]
    published_blocks: Annotated[
        int, counter("published_blocks_total", "Computed blocks that became shareable.")
    ]
    dropped_by_cause: Annotated[
        dict[str, int],
        counter(
            "dropped_blocks_total",
            "Cached blocks that left the cache, because no tier has them any more, by cause: as "
            "for evicted blocks, or a reset, or a failed copy.",
            "cause",
        ),
    ]
    reclaimed_host_copies: Annotated[
        int,
        counter(
            "reclaimed_host_copies_total",
            "Host copies of blocks on the device that made room for other blocks.",
        ),
    ]
    failed_blocks: Annotated[
        int,
        counter(
            "failed_blocks_total",
            "Blocks whose copy between host memory and the device failed.",
        ),
    ]
    skipped_backups: Annotated[
        int,
        counter(
            "skipped_backups_total",
            "Blocks that were due for a copy to host memory and got none, because it was full.",
        ),
    ]
    restored_states: Annotated[
        int,
        counter(
            "restored_states_total",
            "Leases that began with a copy of a snapshot, from either tier.",
        ),
    ]
    fetches: Annotated[int, counter("fetches_total", "Fetches from stores that were begun.")]
    receives: Annotated[int, _TRANSFERS(direction="receive")]
    sends: Annotated[int, _TRANSFERS(direction="send")]
    failed_receives: Annotated[int, _FAILED_TRANSFERS(direction="receive")]
    failed_sends: Annotated[int, _FAILED_TRANSFERS(direction="send")]
    nodes: Annotated[int, gauge("index_nodes", "Nodes of the prefix index.")]
    index_bytes: Annotated[
        int, gauge("index_bytes", "Memory of the prefix index, without token ids.")
    ]
    token_bytes: Annotated[
        int, gauge("index_token_bytes", "Memory of the token ids of the prefix index.")
    ]

    @property
    def attention(self) -> BlockGroupStatistics:
        """Blocks of all layers with full attention."""
        return self.groups[ATTENTION]

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens of grants that a tier had in its cache."""
        return self.hit_device_tokens + self.hit_host_tokens

    @property
    def dropped_blocks(self) -> int:
        """Cached blocks that left the cache for any cause."""
        return sum(self.dropped_by_cause.values())


_WAITS: Final = histogram(
    "wait_seconds",
    "Waits of requests: for capacity or quota, for stores, for blocks that another lease computes "
    "(pending), or that another engine sends (peer).",
)
_FAILED_WAITS: Final = counter(
    "failed_waits_total",
    "Calls of allocate that ended without a grant: AllocateTimeout (timed_out), cancelled while "
    "they waited, RequestTooLarge (too_large), or another error (refused).",
)
_COMPUTED_STORED: Final = counter(
    "computed_stored_total",
    "Requests that computed blocks that a store had, because computing was sooner (declined) or "
    "the store was slower than expected (late).",
)


class RequestStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of requests since the engine was made, and how they ended.

    ``capacity_wait`` has the waits of all leases that were not granted at once, without the time
    that they waited for stores. ``hold`` has times of leases that compute, to a tick of the kernel
    (1 to 10 ms); added when they give their blocks back.
    """

    capacity_wait: Annotated[DurationHistogram, _WAITS(reason="capacity")]
    pending_wait: Annotated[DurationHistogram, _WAITS(reason="pending")]
    store_wait: Annotated[DurationHistogram, _WAITS(reason="store")]
    peer_wait: Annotated[DurationHistogram, _WAITS(reason="peer")]
    onload: Annotated[
        DurationHistogram,
        histogram("onload_seconds", "Time from the submission of an onload to its last layer."),
    ]
    hold: Annotated[
        DurationHistogram, histogram("hold_seconds", "Time for which a lease had blocks.")
    ]
    timed_out_waits: Annotated[int, _FAILED_WAITS(outcome="timed_out")]
    cancelled_waits: Annotated[int, _FAILED_WAITS(outcome="cancelled")]
    refused_waits: Annotated[int, _FAILED_WAITS(outcome="refused")]
    too_large_requests: Annotated[int, _FAILED_WAITS(outcome="too_large")]
    declined_fetches: Annotated[int, _COMPUTED_STORED(reason="declined")]
    late_fetches: Annotated[int, _COMPUTED_STORED(reason="late")]
    prefill_tokens_per_second: Annotated[
        float,
        gauge(
            "prefill_tokens_per_second",
            "Configured or measured speed of the model on prompts; 0 before the first measurement.",
        ),
    ]


# --- transfers ------------------------------------------------------------------------------------

_IN_FLIGHT: Final = gauge(
    "transfers_in_flight",
    "Transfers of a group and route that wait for the device (queued), or that it executes "
    "(submitted).",
)
_ENDED: Final = counter(
    "transfers_total",
    "Transfers of a group and route that have ended: all their blocks were moved (done), an error "
    "occurred (failed), or they never reached the device (cancelled).",
)


class RouteStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of the blocks of one group on one route.

    With ranks, a transfer counts once, and ``queue_seconds`` is the mean over the ranks, as of
    their last answers to heartbeats. Routes of stores and peers have no queue. A fetch or a receive
    is *done* when all blocks of its plan have arrived; a send when the receiver has acknowledged
    them; ``moved_bytes`` of a save are those of blocks that a store has taken.
    """

    queued: Annotated[int, _IN_FLIGHT(state="queued")] = 0
    submitted: Annotated[int, _IN_FLIGHT(state="submitted")] = 0
    done: Annotated[int, _ENDED(outcome="done")] = 0
    failed: Annotated[int, _ENDED(outcome="failed")] = 0
    cancelled: Annotated[int, _ENDED(outcome="cancelled")] = 0
    moved_bytes: Annotated[
        int, counter("transfer_bytes_total", "Bytes of a group that a route has moved.")
    ] = 0
    busy_seconds: Annotated[
        float,
        counter(
            "transfer_busy_seconds_total",
            "Time during which a group had at least one transfer in progress on a route.",
        ),
    ] = 0.0
    queue_seconds: Annotated[
        float,
        counter(
            "transfer_queue_seconds_total",
            "Time that the done and failed transfers of a group and route have waited for the "
            "device, and for their step.",
        ),
    ] = 0.0
    bytes_per_second: Annotated[
        float,
        gauge(
            "transfer_bytes_per_second",
            "Bandwidth of a group on a route: moving average over transfers of 1 MiB and more; 0 "
            "before the first.",
        ),
    ] = 0.0


class GroupTransferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one group, by route. A route that the worker lacks has moved nothing."""

    onload: Annotated[RouteStatistics, Label("route", "onload")] = RouteStatistics()
    offload: Annotated[RouteStatistics, Label("route", "offload")] = RouteStatistics()
    clone: Annotated[RouteStatistics, Label("route", "clone")] = RouteStatistics()
    fetch: Annotated[RouteStatistics, Label("route", "fetch")] = RouteStatistics()
    save: Annotated[RouteStatistics, Label("route", "save")] = RouteStatistics()
    receive: Annotated[RouteStatistics, Label("route", "receive")] = RouteStatistics()
    send: Annotated[RouteStatistics, Label("route", "send")] = RouteStatistics()

    @property
    def routes(self) -> dict[str, RouteStatistics]:
        """All routes, by name."""
        return msgspec.structs.asdict(self)


_BLOCK_BYTES: Final = gauge(
    "block_bytes", "Bytes of one block of a group in a tier, over all layers and ranks."
)


class BlockSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one block of a group, over all layers and ranks; -1 for unknown."""

    device: Annotated[int, _BLOCK_BYTES(tier="device")] = UNKNOWN
    host: Annotated[int, _BLOCK_BYTES(tier="host")] = UNKNOWN


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of a worker, by group: ``"attention"``, ``"state"``, and the window groups.

    ``block_sizes`` lacks the groups without tensors, and all groups before the tensors are known;
    with ranks, it has ``"attention"`` only.
    """

    held: Annotated[int, gauge("held_transfers", "Transfers that wait until their step is closed.")]
    corrupt: Annotated[
        int,
        counter(
            "corrupt_onloads_total",
            "Onloads whose bytes did not have the checksums of the committed blocks; no request "
            "used them.",
        ),
    ]
    groups: Annotated[dict[str, GroupTransferStatistics], Label("group")]
    block_sizes: Annotated[dict[str, BlockSizes], Label("group")] = {}

    @property
    def attention(self) -> GroupTransferStatistics:
        """Transfers of the blocks of all layers with full attention."""
        return self.groups[ATTENTION]


class LayerWaitStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Waits for layers that had not arrived when they began, of coroutines, threads and streams.

    A wait ends when the layer arrives, or with an error. ``gpu_wait`` counts the time until the
    layer was submitted, for which it blocks its caller; how long the stream waits is not known.
    ``layer_seconds`` is empty before the first wait.
    """

    waits: Annotated[
        DurationHistogram,
        histogram(
            "layer_wait_seconds",
            "Waits of model runners for a layer of an onload that had not arrived.",
        ),
    ]
    layer_seconds: Annotated[
        list[float],
        counter(
            "waited_layer_seconds_total",
            "Time of all waits for a layer of an onload; a wait for all layers counts for the "
            "last.",
            "layer",
        ),
    ]


_LATENCY: Final = gauge(
    "poller_recent_latency_seconds",
    "Time from the end of an event to its callback, over the latest 4096 events; by the device's "
    "clock where events tell it, else since the query before.",
)


class PollerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and CPU time of waiting for devices."""

    events: Annotated[
        int, counter("poller_events_total", "Events of devices that were announced.")
    ] = 0
    queries: Annotated[int, counter("poller_queries_total", "Queries of events.")] = 0
    pending: Annotated[int, gauge("poller_watched_events", "Events that are watched now.")] = 0
    latency_p50_seconds: Annotated[float, _LATENCY(percentile="50")] = 0.0
    latency_p99_seconds: Annotated[float, _LATENCY(percentile="99")] = 0.0
    latency: Annotated[
        DurationHistogram,
        histogram("poller_latency_seconds", "Time from the end of an event to its callback."),
    ]
    busy_seconds: Annotated[
        float,
        counter(
            "poller_busy_seconds_total",
            "Time that the poller itself has used on the event loop.",
        ),
    ] = 0.0
    pending_seconds: Annotated[
        float,
        counter(
            "poller_pending_seconds_total",
            "Time during which at least one event was watched.",
        ),
    ] = 0.0

    @property
    def cpu_share(self) -> float:
        """Share of ``pending_seconds`` that the poller was busy."""
        return self.busy_seconds / self.pending_seconds if self.pending_seconds else 0.0


class RankStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank; ``poller`` is that of its last answer to a heartbeat.

    ``state`` is ``"ready"``, or the reason why the rank is not connected.
    """

    rank: Annotated[int, Label("rank")]
    connected: Annotated[
        bool, gauge("rank_connected", "1 while the rank takes part in transfers; else 0.")
    ]
    state: str
    silent_seconds: Annotated[
        float, gauge("rank_silent_seconds", "Time since the last message of the rank.")
    ]
    finished_step: Annotated[
        int,
        gauge(
            "rank_finished_step",
            "Newest step that has finished on the rank, with all steps before it.",
        ),
    ]
    owes_reply: Annotated[
        bool,
        gauge(
            "rank_owes_reply",
            "1 while the rank has not answered the newest sleep or wake_up; else 0.",
        ),
    ]
    poller: PollerStatistics


# --- stores ---------------------------------------------------------------------------------------


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a store since it was opened, and its present size; -1 for unknown.

    A limit that does not exist is unknown. ``details`` has further counters of the kind of store.
    """

    blocks: Annotated[int, gauge("store_objects", "Objects in the store.")] = UNKNOWN
    used_bytes: Annotated[
        int, gauge("store_used_bytes", "Bytes of the objects on the medium of the store.")
    ] = UNKNOWN
    capacity_bytes: Annotated[
        int, gauge("store_capacity_bytes", "Limit of the bytes of the store.")
    ] = UNKNOWN
    evicted_blocks: Annotated[
        int,
        counter("store_evicted_objects_total", "Objects that the store has dropped to make room."),
    ] = 0
    quarantined_blocks: Annotated[
        int,
        gauge(
            "store_quarantined_objects",
            "Objects or slots that are no longer used, because their bytes were wrong.",
        ),
    ] = 0
    labels: Annotated[
        dict[str, int],
        Metric(
            "gauge",
            "store_label_objects",
            "Objects by the labels of model, weights and salt in their keys; beyond the 20 largest "
            "labels of each, the sum of the others.",
            key_label="label",
        ),
    ] = {}
    details: Annotated[
        dict[str, int],
        Metric(
            "untyped",
            "store_detail",
            "Counters and sizes of this kind of store, by name.",
            key_label="name",
        ),
    ] = {}


_STORE_BLOCKS: Final = counter(
    "store_blocks_total",
    "Blocks of loads and saves, by outcome: loaded and verified; saved; present: the store already "
    "had the block; missing: a load did not find it; wrong bytes; refused by the store; or failed: "
    "the operation failed, was rejected, or got no slot.",
)
_STORE_BYTES: Final = counter("store_bytes_total", "Payload of loaded and saved blocks.")
_STORE_FAILURES: Final = counter(
    "store_failed_operations_total",
    "Operations that exceeded their deadline (timeout), were not made because the store was "
    "unavailable (rejected), or got no slot before their deadline (busy).",
)
_STORE_SECONDS: Final = gauge(
    "store_recent_seconds",
    "Duration of lookups, and of loads and saves of less than 256 KiB, over all groups of the "
    "store: moving average. Extreme durations are bounded, and old ones fade.",
)
_STORE_SPEED: Final = gauge(
    "store_recent_bytes_per_second",
    "Bandwidth of loads and saves of 256 KiB and more, verification included: moving average.",
)
_BREAKER: Final = Metric(
    "gauge",
    "store_breaker_state",
    "1 for the state of the store's breaker, 0 for the others: closed (in use), open "
    "(unavailable), probing, off (not used).",
    key_label="state",
    states=("closed", "open", "probing", "off"),
)


class GuardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one store since its engine was made.

    ``kind`` and ``url`` are those of the store. The counts of blocks are those of ``group``; a
    block of the group ``"state"`` is a snapshot of recurrent state. ``rank`` is the rank that has
    the store; None without ranks. ``failure`` is the reason why the store could not be opened yet;
    empty when it is open, and while it is closed because host memory is asleep.
    """

    url: Annotated[str, Label("store")]
    kind: Annotated[str, Label("kind")]
    group: Annotated[str, Label("group")] = ATTENTION
    rank: Annotated[int | None, Label("rank")] = None
    reading: Annotated[str, _BREAKER(operation="read")]
    saving: Annotated[str, _BREAKER(operation="save")]
    failure: str = ""
    opened: Annotated[
        int, counter("store_unavailable_total", "Times that the store became unavailable.")
    ]
    lookups: Annotated[
        int,
        counter(
            "store_lookups_total",
            "Lookups of a store: several per long prompt with Store.max_lookup_keys.",
        ),
    ]
    spared_lookups: Annotated[
        int,
        counter(
            "store_spared_lookups_total",
            "Lookups that were not made, because the store was known not to have the block.",
        ),
    ] = 0
    filter_keys: Annotated[
        int,
        gauge(
            "store_filter_blocks",
            "Blocks of all groups in the filter of a store whose changes the engine follows; 0 "
            "while it does not.",
        ),
    ] = 0
    lookup_keys: Annotated[
        int, counter("store_asked_blocks_total", "Blocks that a store was asked for.")
    ]
    found_keys: Annotated[
        int, counter("store_found_blocks_total", "Blocks that a lookup has found.")
    ]
    loaded_blocks: Annotated[int, _STORE_BLOCKS(outcome="loaded")]
    saved_blocks: Annotated[int, _STORE_BLOCKS(outcome="saved")]
    present_blocks: Annotated[int, _STORE_BLOCKS(outcome="present")]
    missing_blocks: Annotated[int, _STORE_BLOCKS(outcome="missing")]
    wrong_blocks: Annotated[int, _STORE_BLOCKS(outcome="wrong")]
    refused_blocks: Annotated[int, _STORE_BLOCKS(outcome="refused")]
    failed_blocks: Annotated[int, _STORE_BLOCKS(outcome="failed")]
    loaded_bytes: Annotated[int, _STORE_BYTES(operation="load")]
    saved_bytes: Annotated[int, _STORE_BYTES(operation="save")]
    timeouts: Annotated[int, _STORE_FAILURES(reason="timeout")]
    rejected: Annotated[int, _STORE_FAILURES(reason="rejected")]
    busy: Annotated[int, _STORE_FAILURES(reason="busy")]
    running: Annotated[int, gauge("store_operations", "Operations that the store executes now.")]
    overdue: Annotated[
        int,
        gauge(
            "store_overdue_operations",
            "Operations that the store still executes after their deadline.",
        ),
    ]
    write_budget_left: Annotated[
        float,
        gauge(
            "store_write_budget_left",
            "Share of the write budget that is left: above 0.125 each block is saved, below it "
            "those used a second time, at 0 none. 1 without a budget.",
        ),
    ] = 1.0
    lookup_seconds: Annotated[float, _STORE_SECONDS(operation="lookup")]
    load_seconds: Annotated[float, _STORE_SECONDS(operation="load")]
    save_seconds: Annotated[float, _STORE_SECONDS(operation="save")]
    load_bytes_per_second: Annotated[float, _STORE_SPEED(operation="load")]
    save_bytes_per_second: Annotated[float, _STORE_SPEED(operation="save")]
    store: StoreStatistics

    @property
    def is_available(self) -> bool:
        """True while the store is open, and lookups, loads and saves pass or are not used."""
        return {self.reading, self.saving} <= {"closed", "off"}


# --- peers ----------------------------------------------------------------------------------------

_RECEIVER_TICKETS: Final = counter(
    "peer_receiver_tickets_total",
    "Tickets that at least one sender has opened, whose opening was refused, or that expired: at "
    "their deadline, or because no sender had opened them in time.",
)
_RECEIVED_FRAGMENTS: Final = counter(
    "peer_received_fragments_total",
    "Fragments that arrived: verified; with a wrong length, key or checksum (wrong); without a "
    "valid credit (stale); or after their plan or ticket was given up (dropped).",
)
_SENDER_TICKETS: Final = counter(
    "peer_sender_tickets_total",
    "Tickets that were accepted by their receiver, or that expired.",
)
_SENT_FRAGMENTS: Final = counter(
    "peer_sent_fragments_total",
    "Fragments that were acknowledged, or written again (retried).",
)


class ReceiverCounts(msgspec.Struct, kw_only=True):
    """Tickets and fragments that a rank receives, since its worker was made."""

    tickets: Annotated[
        int, gauge("peer_receiver_tickets", "Tickets that senders may open now.")
    ] = 0
    opened: Annotated[int, _RECEIVER_TICKETS(outcome="opened")] = 0
    refused: Annotated[int, _RECEIVER_TICKETS(outcome="refused")] = 0
    expired: Annotated[int, _RECEIVER_TICKETS(outcome="expired")] = 0
    fragments: Annotated[int, _RECEIVED_FRAGMENTS(outcome="verified")] = 0
    wrong: Annotated[int, _RECEIVED_FRAGMENTS(outcome="wrong")] = 0
    stale: Annotated[int, _RECEIVED_FRAGMENTS(outcome="stale")] = 0
    dropped: Annotated[int, _RECEIVED_FRAGMENTS(outcome="dropped")] = 0
    received_bytes: Annotated[
        int, counter("peer_received_bytes_total", "Payload of verified fragments.")
    ] = 0


class SenderCounts(msgspec.Struct, kw_only=True):
    """Tickets and fragments that a rank sends, since its worker was made."""

    tickets: Annotated[int, gauge("peer_sender_tickets", "Tickets that are being sent.")] = 0
    opened: Annotated[int, _SENDER_TICKETS(outcome="opened")] = 0
    expired: Annotated[int, _SENDER_TICKETS(outcome="expired")] = 0
    fragments: Annotated[int, _SENT_FRAGMENTS(outcome="acknowledged")] = 0
    retries: Annotated[int, _SENT_FRAGMENTS(outcome="retried")] = 0
    sent_bytes: Annotated[
        int, counter("peer_sent_bytes_total", "Payload of acknowledged fragments.")
    ] = 0
    waits: Annotated[
        int,
        counter(
            "peer_credit_waits_total",
            "Times that a ready fragment had to wait for a credit of its receiver.",
        ),
    ] = 0


class RankPeerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the connections to peers since the engine was made; ``rank`` is None without ranks."""

    rank: Annotated[int | None, Label("rank")] = None
    received: ReceiverCounts
    sent: SenderCounts
    landing_slots: Annotated[int, gauge("peer_landing_slots", "Slots for arriving fragments.")]
    free_slots: Annotated[
        int,
        gauge("peer_free_landing_slots", "Slots for arriving fragments without an owner."),
    ]
    connections: Annotated[int, gauge("peer_connections", "Open connections to receivers.")]


_TICKETS: Final = counter(
    "peer_tickets_total",
    "Tickets that were made (receive), and that were opened at their receiver (send).",
)
_OPEN_TICKETS: Final = gauge("peer_open_tickets", "Tickets whose receive or send has not ended.")
_COMPLETE_TICKETS: Final = counter(
    "peer_complete_tickets_total",
    "Tickets whose positions have all arrived, or were all acknowledged.",
)


class PeerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Receives and sends of an engine since it was made; ``ranks`` has one entry without ranks."""

    receives: Annotated[int, _TICKETS(direction="receive")]
    sends: Annotated[int, _TICKETS(direction="send")]
    receiving: Annotated[int, _OPEN_TICKETS(direction="receive")]
    sending: Annotated[int, _OPEN_TICKETS(direction="send")]
    complete_receives: Annotated[int, _COMPLETE_TICKETS(direction="receive")]
    complete_sends: Annotated[int, _COMPLETE_TICKETS(direction="send")]
    refused_sends: Annotated[
        int,
        counter(
            "peer_refused_sends_total",
            "Tickets that could not be sent: wrong, expired, or refused by the receiver.",
        ),
    ]
    wanted_tokens: Annotated[
        int, counter("peer_wanted_tokens_total", "Positions that the tickets requested.")
    ]
    received_tokens: Annotated[
        int, counter("peer_received_tokens_total", "Positions that have arrived.")
    ]
    delivered_tokens: Annotated[
        int,
        counter("peer_delivered_tokens_total", "Positions that receivers have acknowledged."),
    ]
    receive_wait_seconds: Annotated[
        float,
        counter(
            "peer_receive_wait_seconds_total",
            "Time that requests have waited for blocks of other engines.",
        ),
    ]
    ranks: list[RankPeerStatistics]


# --- the tree -------------------------------------------------------------------------------------


class Statistics(CacheStatistics, frozen=True, kw_only=True):
    """All statistics of an engine: see ``CacheEngine.statistics``.

    Beside those of :class:`CacheStatistics`: waits of ``requests``, transfers of the ``worker``,
    waits for layers in this process, the event ``poller`` of this process, ``ranks`` (empty without
    ranks and before ``async with``), ``stores`` in the configured order (with ranks, those of each
    rank in turn, at most ``RankTimeouts.heartbeat`` old), and ``peers``.
    """

    requests: RequestStatistics
    worker: WorkerStatistics
    layer_waits: LayerWaitStatistics
    poller: Annotated[PollerStatistics, Label("rank", "")]
    ranks: list[RankStatistics]
    stores: list[GuardStatistics]
    peers: PeerStatistics

    @property
    def failures(self) -> dict[str, int]:
        """All failures by kind; other fields count each of them in more detail.

        A fetch or a receive that brings less than its plan is no failure: a store and another
        engine may lack a block.
        """
        groups = self.worker.groups.values()
        return {
            "allocate_timeout": self.requests.timed_out_waits,
            "allocate_refused": self.requests.refused_waits + self.requests.too_large_requests,
            "transfer": sum(
                route.failed
                for group in groups
                for route in (group.onload, group.offload, group.clone, group.save)
            ),
            "corrupt_onload": self.worker.corrupt,
            "receive": self.failed_receives,
            "send": self.failed_sends,
            "store_timeout": sum(store.timeouts for store in self.stores),
            "store_busy": sum(store.busy for store in self.stores),
            "store_wrong_block": sum(store.wrong_blocks for store in self.stores),
            "store_failed_block": sum(store.failed_blocks for store in self.stores),
            "lost_lease": self.lost_leases,
        }
