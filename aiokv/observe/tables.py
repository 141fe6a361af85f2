"""Tables of metrics: the name, the help and the labels of each field of each record of statistics.

A metric is a counter if its name ends in ``_total``, a histogram if its fields are histograms, else
a gauge. Names have no prefix here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from aiokv.worker.lanes import ROUTE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping


class Metric(NamedTuple):
    """A metric of a record.

    Attributes:
        name: without the prefix ``aiokv_``.
        help: one sentence.
        fields: labels by name of the field of the record. A field has a number, a
            ``DurationHistogram``, or numbers by cause.
    """

    name: str
    help: str
    fields: Mapping[str, Mapping[str, str]]


Table = tuple[Metric, ...]


def one(name: str, field: str, help: str, **labels: str) -> Metric:  # noqa: A002
    """Return a metric of one field."""
    return Metric(name, help, {field: labels})


def by(name: str, label: str, help: str, **fields: str) -> Metric:  # noqa: A002
    """Return a metric of several fields, each with its value of one label."""
    return Metric(name, help, {field: {label: value} for field, value in fields.items()})


def by_tier(name: str, help: str, *, device: str, host: str) -> Metric:  # noqa: A002
    """Return a metric with a field per tier."""
    return by(name, "tier", help, **{device: "device", host: "host"})


def by_direction(name: str, help: str, *, receive: str, send: str) -> Metric:  # noqa: A002
    """Return a metric with a field per direction of transfers from and to other engines."""
    return by(name, "direction", help, **{receive: "receive", send: "send"})


def by_state(name: str, help: str, **states: tuple[str, ...]) -> Metric:  # noqa: A002
    """Return a metric with the fields ``{tier}_{state}``; each argument lists a tier's states."""
    fields = {
        f"{tier}_{state}": {"tier": tier, "state": state}
        for tier, its_states in states.items()
        for state in its_states
    }
    return Metric(name, help, fields)


LOCAL_ROUTES: Final = tuple(
    name for name in ROUTE_NAMES if not name.endswith(("fetch", "receive", "send"))
)
"""Routes whose failures are failures: a store and another engine may lack a block."""

STATISTICS: Final[Table] = (
    one(
        "prompt_tokens_total",
        "prompt_tokens",
        "Prompt tokens of grants: the denominator of the hit rates.",
    ),
    by_tier(
        "hit_tokens_total",
        "Prompt tokens of grants that a tier had in its cache.",
        device="hit_device_tokens",
        host="hit_host_tokens",
    ),
    one(
        "hit_store_tokens_total",
        "hit_store_tokens",
        "Hit tokens of both tiers that a fetch from a store had brought, at their first hit.",
    ),
    one(
        "computed_tokens_total",
        "computed_tokens",
        "Positions whose computation was committed; again, when they were computed again.",
    ),
    one(
        "computed_prompt_tokens_total",
        "computed_prompt_tokens",
        "Computed positions that belong to prompts.",
    ),
    one("grants_total", "grants", "Leases that were granted; a resumed lease counts again."),
    by(
        "leases",
        "state",
        "Leases: open ones, and released ones whose blocks a batch or a peer still uses.",
        leases="open",
        releasing_leases="releasing",
    ),
    by(
        "waiting_leases",
        "reason",
        "Leases that wait, by reason.",
        waiting="capacity",
        waiting_for_quota="quota",
        waiting_for_store="store",
        waiting_for_pending="pending",
    ),
    by(
        "preemptions_total",
        "kind",
        "Block tables that were given up (drop), whose move to host memory was begun (swap), or "
        "that were lost with a rank (lost).",
        preemptions="drop",
        swaps="swap",
        lost_leases="lost",
    ),
    one(
        "expired_leases_total",
        "expired_leases",
        "Leases that were released because they were not used within their ttl_seconds.",
    ),
    by_tier(
        "capacity_blocks",
        "Capacity of a tier in blocks: the denominator of the occupancy.",
        device="device_blocks",
        host="host_blocks",
    ),
    by_state(
        "blocks",
        "Blocks of a tier by state; their sum is the capacity.",
        device=("free", "cached", "leased", "in_flight"),
        host=("free", "cached", "in_flight"),
    ),
    one(
        "evictable_device_blocks",
        "evictable_blocks",
        "Cached device blocks that no lease uses.",
    ),
    one("published_blocks_total", "published_blocks", "Computed blocks that became shareable."),
    by_tier(
        "evicted_blocks_total",
        "Cached blocks that were evicted from a tier, by cause: room for leases, host copies or "
        "fetches (capacity), a call of evict (request), resize or sleep.",
        device="evicted_device_by_cause",
        host="evicted_host_by_cause",
    ),
    one(
        "dropped_blocks_total",
        "dropped_by_cause",
        "Cached blocks that left the cache, because no tier has them any more, by cause: as for "
        "evicted blocks, or a reset, or a failed copy.",
    ),
    one(
        "reclaimed_host_copies_total",
        "reclaimed_twins",
        "Host copies of blocks on the device that made room for other blocks.",
    ),
    by(
        "copied_blocks_total",
        "direction",
        "Blocks that were copied between host memory and the device.",
        onloaded_blocks="onload",
        offloaded_blocks="offload",
    ),
    one(
        "failed_blocks_total",
        "failed_blocks",
        "Blocks whose copy between host memory and the device failed.",
    ),
    one(
        "skipped_backups_total",
        "skipped_backups",
        "Blocks that were due for a copy to host memory and got none, because it was full.",
    ),
    by_tier(
        "capacity_state_slots",
        "Slots of recurrent state of a tier.",
        device="state_slots",
        host="host_state_slots",
    ),
    Metric(
        "state_slots",
        "Slots of recurrent state by state; leases and transfers have the others.",
        {
            "state_free": {"tier": "device", "state": "free"},
            "state_snapshots": {"tier": "device", "state": "snapshot"},
            "host_state_free": {"tier": "host", "state": "free"},
            "host_state_snapshots": {"tier": "host", "state": "snapshot"},
        },
    ),
    one(
        "restored_states_total",
        "restored_states",
        "Leases that began with a copy of a snapshot, from either tier.",
    ),
    one("onloaded_states_total", "onloaded_states", "Snapshots that were copied to the device."),
    by_tier(
        "evicted_snapshots_total",
        "Snapshots of recurrent state that were evicted from a tier.",
        device="evicted_snapshots",
        host="evicted_host_snapshots",
    ),
    one("saved_snapshots_total", "saved_snapshots", "Snapshots that were copied to host memory."),
    by(
        "store_snapshots_total",
        "outcome",
        "Snapshots that were saved to a store (stored) or not (unstored), brought from a store "
        "(fetched) or not (unfetched).",
        stored_snapshots="stored",
        unstored_snapshots="unstored",
        fetched_snapshots="fetched",
        unfetched_snapshots="unfetched",
    ),
    one("fetches_total", "fetches", "Fetches from stores that were begun."),
    by(
        "fetch_blocks_total",
        "outcome",
        "Blocks of fetches: verified ones (fetched); missing, wrong or late ones (unfetched).",
        fetched_blocks="fetched",
        unfetched_blocks="unfetched",
    ),
    by(
        "save_blocks_total",
        "outcome",
        "Blocks to be saved to stores, by outcome.",
        saved_blocks="saved",
        dropped_saves="dropped",
        rejected_saves="rejected",
        refused_saves="refused",
        failed_saves="failed",
    ),
    by_direction(
        "peer_transfers_total",
        "Transfers of blocks from (receive) and to (send) other engines.",
        receive="receives",
        send="sends",
    ),
    by_direction(
        "peer_failed_transfers_total",
        "Transfers from and to other engines that failed.",
        receive="failed_receives",
        send="failed_sends",
    ),
    by_direction(
        "peer_blocks_total",
        "Blocks that were received and verified, or sent and acknowledged.",
        receive="received_blocks",
        send="sent_blocks",
    ),
    by_direction(
        "peer_states_total",
        "Recurrent states that were received and verified, or sent and acknowledged.",
        receive="received_states",
        send="sent_states",
    ),
    by_direction(
        "peer_window_blocks_total",
        "Blocks of window groups that were received and verified, or sent and acknowledged.",
        receive="received_window_blocks",
        send="sent_window_blocks",
    ),
    one("index_nodes", "nodes", "Nodes of the prefix index."),
    one("index_bytes", "index_bytes", "Memory of the prefix index, without token ids."),
    one("index_token_bytes", "token_bytes", "Memory of the token ids of the prefix index."),
)

REQUESTS: Final[Table] = (
    by(
        "wait_seconds",
        "reason",
        "Waits of requests: for capacity or quota, for stores, for blocks that another lease "
        "computes (pending), or that another engine sends (peer).",
        capacity_wait="capacity",
        pending_wait="pending",
        store_wait="store",
        peer_wait="peer",
    ),
    one("onload_seconds", "onload", "Time from the submission of an onload to its last layer."),
    one("hold_seconds", "hold", "Time for which a lease had blocks."),
    by(
        "failed_waits_total",
        "outcome",
        "Calls of allocate that ended without a grant.",
        timed_out_waits="timed_out",
        cancelled_waits="cancelled",
        refused_waits="refused",
        too_large_requests="too_large",
    ),
    by(
        "computed_stored_total",
        "reason",
        "Requests that computed blocks that a store had, because computing was sooner (declined) "
        "or the store was slower than expected (late).",
        declined_fetches="declined",
        late_fetches="late",
    ),
    one(
        "prefill_tokens_per_second",
        "prefill_tokens_per_second",
        "Configured or measured speed of the model on prompts; 0 before the first measurement.",
    ),
)

WINDOW: Final[Table] = (
    by_tier(
        "window_capacity_blocks",
        "Capacity of a window group in blocks.",
        device="device_blocks",
        host="host_blocks",
    ),
    by_state(
        "window_blocks",
        "Blocks of a window group by state.",
        device=("free", "cached"),
        host=("free", "cached"),
    ),
    one(
        "window_set_aside_blocks",
        "device_set_aside",
        "Device blocks of a window group that leases have or will need.",
    ),
    by(
        "window_copied_blocks_total",
        "direction",
        "Blocks of a window group that were copied between host memory and the device.",
        onloaded_blocks="onload",
        saved_blocks="offload",
    ),
    by(
        "window_evicted_blocks_total",
        "tier",
        "Blocks of a window group that were evicted.",
        evicted_host_blocks="host",
    ),
    by(
        "window_store_blocks_total",
        "outcome",
        "Blocks of a window group that were saved to a store (stored) or not (unstored), brought "
        "from a store (fetched) or not (unfetched).",
        stored_blocks="stored",
        unstored_blocks="unstored",
        fetched_blocks="fetched",
        unfetched_blocks="unfetched",
    ),
)

WORKER: Final[Table] = (
    one(
        "corrupt_onloads_total",
        "corrupt",
        "Onloads whose bytes did not have the checksums of the committed blocks; no request used "
        "them.",
    ),
    one("held_transfers", "held", "Transfers that wait until their step is closed."),
)

LANE: Final[Table] = (
    by(
        "transfers_in_flight",
        "state",
        "Transfers of a route that wait for the device (queued), or that it executes (submitted).",
        queued="queued",
        submitted="submitted",
    ),
    by(
        "transfers_total",
        "outcome",
        "Transfers of a route that have ended.",
        done="done",
        failed="failed",
        cancelled="cancelled",
    ),
    one("transfer_bytes_total", "moved_bytes", "Bytes that a route has moved."),
    one(
        "transfer_busy_seconds_total",
        "busy_seconds",
        "Time during which a route had at least one transfer in progress.",
    ),
    one(
        "transfer_queue_seconds_total",
        "queue_seconds",
        "Time that the done and failed transfers of a route have waited for the device.",
    ),
    one(
        "transfer_bytes_per_second",
        "bytes_per_second",
        "Bandwidth of a route: moving average over transfers of 1 MiB and more.",
    ),
)

LAYER_WAITS: Final[Table] = (
    one(
        "layer_wait_seconds",
        "waits",
        "Waits of model runners for a layer of an onload that had not arrived.",
    ),
)

POLLER: Final[Table] = (
    one("poller_events_total", "events", "Events of devices that were announced."),
    one("poller_queries_total", "queries", "Queries of events."),
    one("poller_watched_events", "pending", "Events that are watched now."),
    by(
        "poller_recent_latency_seconds",
        "percentile",
        "Time from the end of an event to its callback, over the latest 4096 events.",
        latency_p50_seconds="50",
        latency_p99_seconds="99",
    ),
    one(
        "poller_latency_seconds",
        "latency",
        "Time from the end of an event to its callback.",
    ),
    one(
        "poller_busy_seconds_total",
        "busy_seconds",
        "Time that the poller itself has used on the event loop.",
    ),
    one(
        "poller_pending_seconds_total",
        "pending_seconds",
        "Time during which at least one event was watched.",
    ),
)

RANK: Final[Table] = (
    one("rank_connected", "connected", "1 while the rank takes part in transfers; else 0."),
    one("rank_silent_seconds", "silent_seconds", "Time since the last message of the rank."),
)

GUARD: Final[Table] = (
    one("store_unavailable_total", "opened", "Times that the store became unavailable."),
    one("store_lookups_total", "lookups", "Lookups of a store."),
    one("store_asked_blocks_total", "lookup_keys", "Blocks that a store was asked for."),
    one("store_found_blocks_total", "found_keys", "Blocks that a lookup has found."),
    by(
        "store_blocks_total",
        "outcome",
        "Blocks of loads and saves, by outcome; present: the store already had the block.",
        loaded_blocks="loaded",
        saved_blocks="saved",
        present_blocks="present",
        missing_blocks="missing",
        wrong_blocks="wrong",
        refused_blocks="refused",
        failed_blocks="failed",
    ),
    by(
        "store_bytes_total",
        "operation",
        "Payload of loaded and saved blocks.",
        loaded_bytes="load",
        saved_bytes="save",
    ),
    by(
        "store_failed_operations_total",
        "reason",
        "Operations that exceeded their deadline (timeout), were not made because the store was "
        "unavailable (rejected), or got no slot before their deadline (busy).",
        timeouts="timeout",
        rejected="rejected",
        busy="busy",
    ),
    one("store_operations", "running", "Operations that the store executes now."),
    one(
        "store_overdue_operations",
        "overdue",
        "Operations that the store still executes after their deadline.",
    ),
    by(
        "store_recent_seconds",
        "operation",
        "Duration of lookups, and of loads and saves of less than 256 KiB: moving average.",
        lookup_seconds="lookup",
        load_seconds="load",
        save_seconds="save",
    ),
    by(
        "store_recent_bytes_per_second",
        "operation",
        "Bandwidth of loads and saves of 256 KiB and more: moving average.",
        load_bytes_per_second="load",
        save_bytes_per_second="save",
    ),
)

STORE: Final[Table] = (
    one("store_objects", "blocks", "Objects in the store."),
    one("store_used_bytes", "used_bytes", "Bytes of the objects on the medium of the store."),
    one("store_capacity_bytes", "capacity_bytes", "Limit of the bytes of the store."),
    one(
        "store_evicted_objects_total",
        "evicted_blocks",
        "Objects that the store has dropped to make room.",
    ),
    one(
        "store_quarantined_objects",
        "quarantined_blocks",
        "Objects or slots that are no longer used, because their bytes were wrong.",
    ),
)

PEERS: Final[Table] = (
    by_direction(
        "peer_tickets_total",
        "Tickets that were made (receive), and that were opened at their receiver (send).",
        receive="receives",
        send="sends",
    ),
    by_direction(
        "peer_open_tickets",
        "Tickets whose receive or send has not ended.",
        receive="receiving",
        send="sending",
    ),
    by_direction(
        "peer_complete_tickets_total",
        "Tickets whose positions have all arrived, or were all acknowledged.",
        receive="complete_receives",
        send="complete_sends",
    ),
    one(
        "peer_refused_sends_total",
        "refused_sends",
        "Tickets that could not be sent: wrong, expired, or refused by the receiver.",
    ),
    one("peer_wanted_tokens_total", "wanted_tokens", "Positions that the tickets requested."),
    one("peer_received_tokens_total", "received_tokens", "Positions that have arrived."),
    one(
        "peer_delivered_tokens_total",
        "delivered_tokens",
        "Positions that receivers have acknowledged.",
    ),
    one(
        "peer_receive_wait_seconds_total",
        "receive_wait_seconds",
        "Time that requests have waited for blocks of other engines.",
    ),
)

RANK_PEERS: Final[Table] = (
    one("peer_landing_slots", "landing_slots", "Slots for arriving parcels."),
    one("peer_free_landing_slots", "free_slots", "Slots for arriving parcels without an owner."),
    one("peer_connections", "connections", "Open connections to receivers."),
)

RECEIVER: Final[Table] = (
    one("peer_receiver_tickets", "tickets", "Tickets that senders may open now."),
    by(
        "peer_receiver_tickets_total",
        "outcome",
        "Tickets that a sender has opened, whose opening was refused, or that expired.",
        opened="opened",
        refused="refused",
        expired="expired",
    ),
    by(
        "peer_received_parcels_total",
        "outcome",
        "Parcels that arrived: verified, with wrong bytes, without a valid credit, or after their "
        "plan was given up (dropped).",
        parcels="verified",
        wrong="wrong",
        stale="stale",
        dropped="dropped",
    ),
    one("peer_received_bytes_total", "received_bytes", "Payload of verified parcels."),
)

SENDER: Final[Table] = (
    one("peer_sender_tickets", "tickets", "Tickets that are being sent."),
    by(
        "peer_sender_tickets_total",
        "outcome",
        "Tickets that were accepted by their receiver, or that expired.",
        opened="opened",
        expired="expired",
    ),
    by(
        "peer_sent_parcels_total",
        "outcome",
        "Parcels that were acknowledged, and parcels that were written again.",
        parcels="acknowledged",
        retries="retried",
    ),
    one("peer_sent_bytes_total", "sent_bytes", "Payload of acknowledged parcels."),
    one(
        "peer_credit_waits_total",
        "waits",
        "Times that a ready parcel had to wait for a credit of its receiver.",
    ),
)
