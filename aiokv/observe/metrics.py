"""Metrics of an engine for Prometheus, read from its statistics at each scrape.

::

    text = exposition(engine)                           # one engine, label engine="default"
    text = exposition({"chat": engine, "code": other})  # several

The modules of tables (``tables.py``) name the metric of each field of each record. The text is a
valid response to a scrape; see ``CONTENT_TYPE``. Labels are bounded: no metric has a label of
tokens, requests or owners, and salts beyond the largest ones are summed up as ``"other"``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import aiokv
from aiokv.base.types import DurationHistogram
from aiokv.observe import tables
from aiokv.observe.exposition import CONTENT_TYPE, Family, Sample, labelled, merged, text_of
from aiokv.worker.lanes import ROUTE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.base.types import RequestStatistics, Statistics
    from aiokv.engine import CacheEngine
    from aiokv.observe.exposition import Kind
    from aiokv.observe.tables import Table
    from aiokv.stores.guard_statistics import GuardStatistics
    from aiokv.worker.lanes import WorkerStatistics

__all__ = ["CONTENT_TYPE", "DEFAULT_ENGINE", "MAX_SALTS", "exposition", "families", "named_engines"]

DEFAULT_ENGINE: Final = "default"
"""Name of an engine that is given without one."""

MAX_SALTS: Final = 20
"""Number of salts that are labels, those with the most blocks; the others are ``"other"``."""

OTHER_SALTS: Final = "other"
BREAKER_STATES: Final = ("closed", "open", "probing", "off")
UNKNOWN: Final = -1  # a size that a store does not know


def exposition(
    engines: CacheEngine | Mapping[str, CacheEngine], *, salt_label: Callable[[str], str] = str
) -> str:
    """Return the metrics of one or several engines as Prometheus text, format 0.0.4.

    Args:
        engines: an engine, or engines by name, on whose loops the call is made. The name is the
            label ``engine``.
        salt_label: returns the label of a salt, which may name a tenant.

    Raises:
        UsageError: the call is made in another thread than that of an engine's loop.
    """
    return text_of(
        merged(
            family
            for name, engine in named_engines(engines).items()
            for family in labelled(families(engine, salt_label=salt_label), {"engine": name})
        )
    )


def named_engines(
    engines: CacheEngine | Mapping[str, CacheEngine],
) -> Mapping[str, CacheEngine]:
    """Return engines by name; one without a name is ``DEFAULT_ENGINE``."""
    return engines if isinstance(engines, Mapping) else {DEFAULT_ENGINE: engines}


def families(engine: CacheEngine, *, salt_label: Callable[[str], str] = str) -> list[Family]:
    """Return all metrics of an engine, without the label ``engine``.

    Args:
        engine: the engine.
        salt_label: as for ``exposition``.

    Raises:
        UsageError: the call is made in another thread than that of the engine's loop.
    """
    return merged(_families(engine, salt_label))


def _families(engine: CacheEngine, salt_label: Callable[[str], str]) -> Iterator[Family]:
    statistics = engine.statistics()
    peers = engine.peer_statistics()
    worker = engine.worker_statistics()
    yield _one("aiokv_info", "Version of aiokv.", 1, version=aiokv.__version__)
    yield _one("aiokv_block_tokens", "Tokens per block.", engine.config.block_tokens)
    yield _one(
        "aiokv_failed",
        "1 after the device or a rank has failed, so that no request is granted; else 0.",
        int(engine.health().failure != ""),
    )
    yield Family(
        "aiokv_asleep",
        "gauge",
        "1 while the memory of the tier is freed by sleep; else 0.",
        [Sample("", {"tier": t}, int(t in engine.asleep)) for t in ("device", "host")],
    )
    yield from _rows(tables.STATISTICS, statistics)
    yield from _rows(tables.REQUESTS, engine.request_statistics())
    yield from _quota_families(engine, salt_label)
    for group, window in statistics.windows.items():
        yield from _rows(tables.WINDOW, window, group=group)
    yield from _rows(tables.WORKER, worker)
    for route in ROUTE_NAMES:
        yield from _rows(tables.LANE, getattr(worker, route), route=route)
    layer_waits = engine.layer_wait_statistics()
    yield from _rows(tables.LAYER_WAITS, layer_waits)
    yield Family(
        "aiokv_waited_layer_seconds_total",
        "counter",
        "Time of all waits for a layer of an onload; a wait for all layers counts for the last.",
        [
            Sample("", {"layer": str(layer)}, seconds)
            for layer, seconds in enumerate(layer_waits.layer_seconds)
        ],
    )
    yield from _rows(tables.POLLER, engine.poller_statistics(), rank="")
    for rank in engine.rank_statistics():
        yield from _rows(tables.RANK, rank, rank=str(rank.rank))
        yield from _rows(tables.POLLER, rank.poller, rank=str(rank.rank))
    stores = engine.store_statistics()
    for store, name in zip(stores, _store_names(stores), strict=True):
        yield from _store_families(store, name)
    yield from _rows(tables.PEERS, peers)
    for use in peers.ranks:
        number = _rank(use.rank)
        yield from _rows(tables.RANK_PEERS, use, rank=number)
        yield from _rows(tables.RECEIVER, use.received, rank=number)
        yield from _rows(tables.SENDER, use.sent, rank=number)
    yield _failures(statistics, engine.request_statistics(), worker, stores)


def _failures(
    statistics: Statistics,
    requests: RequestStatistics,
    worker: WorkerStatistics,
    stores: list[GuardStatistics],
) -> Family:
    """Return all failures by kind; other families count each of them in more detail."""
    kinds = {
        "allocate_timeout": requests.timed_out_waits,
        "allocate_refused": requests.refused_waits + requests.too_large_requests,
        "transfer": sum(getattr(worker, route).failed for route in tables.LOCAL_ROUTES),
        "corrupt_onload": worker.corrupt,
        "receive": statistics.failed_receives,
        "send": statistics.failed_sends,
        "store_timeout": sum(store.timeouts for store in stores),
        "store_busy": sum(store.busy for store in stores),
        "store_wrong_block": sum(store.wrong_blocks for store in stores),
        "store_failed_block": sum(store.failed_blocks for store in stores),
        "lost_lease": statistics.lost_leases,
    }
    samples = [Sample("", {"kind": kind}, count) for kind, count in kinds.items()]
    return Family("aiokv_failures_total", "counter", "Failures by kind.", samples)


def _quota_families(engine: CacheEngine, salt_label: Callable[[str], str]) -> Iterator[Family]:
    """Yield the blocks of the largest salts, and the sum of the others."""
    if engine.config.salt_quota_blocks is None:
        return
    yield _one(
        "aiokv_salt_quota_blocks",
        "Device blocks that the leases of one salt may hold.",
        engine.config.salt_quota_blocks,
    )
    held = engine.salt_statistics()
    yield _one("aiokv_salts", "Salts whose leases hold device blocks.", len(held))
    others = held.pop(OTHER_SALTS, 0)  # a salt of this name counts as one of the others
    largest = sorted(held, key=lambda salt: (-held[salt], salt))[:MAX_SALTS]
    others += sum(held.values()) - sum(held[salt] for salt in largest)
    yield Family(
        "aiokv_salt_blocks",
        "gauge",
        f"Device blocks that the leases of a salt hold; beyond the {MAX_SALTS} largest salts, the "
        f"sum is {OTHER_SALTS}.",
        [
            *(Sample("", {"salt": salt_label(salt)}, held[salt]) for salt in largest),
            Sample("", {"salt": OTHER_SALTS}, others),
        ],
    )


def _store_names(stores: list[GuardStatistics]) -> Iterator[str]:
    """Yield the URL of each store, with ``#2`` and so on behind one that occurs again.

    A scrape with two samples of equal labels is invalid.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    for store in stores:
        place = (store.url, store.kind, store.pool, store.rank)
        seen[place] += 1
        yield store.url if seen[place] == 1 else f"{store.url}#{seen[place]}"


def _store_families(statistics: GuardStatistics, name: str) -> Iterator[Family]:
    labels = {
        "store": name,
        "kind": statistics.kind,
        "pool": statistics.pool,
        "rank": _rank(statistics.rank),
    }
    yield from _rows(tables.GUARD, statistics, **labels)
    yield from _rows(tables.STORE, statistics.store, **labels)
    for operation, state in (("read", statistics.reading), ("save", statistics.saving)):
        yield Family(
            "aiokv_store_breaker_state",
            "gauge",
            "1 for the state of the store's breaker, 0 for the others: closed (in use), open "
            "(unavailable), probing, off (not used).",
            [
                Sample("", {**labels, "operation": operation, "state": s}, int(s == state))
                for s in BREAKER_STATES
            ],
        )
    yield Family(
        "aiokv_store_detail",
        "untyped",
        "Counters and sizes of this kind of store, by name.",
        [
            Sample("", {**labels, "name": name}, value)
            for name, value in statistics.store.details.items()
        ],
    )


def _rank(number: int | None) -> str:
    """Return the label of a rank; Prometheus treats an empty label as one that is absent."""
    return "" if number is None else str(number)


def _one(name: str, text: str, value: float, **labels: str) -> Family:
    return Family(name, "gauge", text, [Sample("", labels, value)])


def _rows(table: Table, record: Any, **labels: str) -> Iterator[Family]:
    """Yield the families of a table for one record; sizes that a store does not know are absent."""
    for metric in table:
        kind: Kind = "counter" if metric.name.endswith("_total") else "gauge"
        samples: list[Sample] = []
        for field, metric_labels in metric.fields.items():
            value, field_labels = getattr(record, field), {**labels, **metric_labels}
            if isinstance(value, DurationHistogram):
                kind = "histogram"
                samples += _histogram(value, field_labels)
            elif isinstance(value, dict):
                samples += (Sample("", {**field_labels, "cause": c}, n) for c, n in value.items())
            elif isinstance(value, bool):
                samples.append(Sample("", field_labels, int(value)))
            elif value != UNKNOWN:
                samples.append(Sample("", field_labels, value))
        if samples:
            yield Family(f"aiokv_{metric.name}", kind, metric.help, samples)


def _histogram(histogram: DurationHistogram, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield cumulative buckets, the sum and the count."""
    bounds = [*map(repr, histogram.bounds_seconds), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield Sample("_bucket", {**labels, "le": bound}, count)
    yield Sample("_sum", labels, histogram.sum_seconds)
    yield Sample("_count", labels, histogram.count)
