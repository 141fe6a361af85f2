"""Counters of the connector in vLLM's log and on its /metrics page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from aiokv.base.statistics import CacheStatistics, Statistics

COUNTERS: Final = {
    "loaded_blocks": "Blocks that were loaded into the KV cache, summed over ranks",
    "failed_blocks": "Blocks whose loads have failed, summed over ranks",
    "loaded_tokens": "Tokens that requests did not compute because host memory had them",
    "saved_blocks": "Blocks that were copied to host memory",
    "store_hit_tokens": "Tokens of loaded_tokens that came from stores",
    "store_fetched_blocks": "Blocks that were fetched from stores to host memory",
    "stored_blocks": "Blocks that were saved to stores",
    "unstored_blocks": "Blocks that were not saved: the queue was full, or a store has failed",
    "store_wait_seconds": "Time that requests have waited for stores",
    "declined_fetches": "Requests that computed blocks that a store had, because this was sooner",
    "late_fetches": "Requests that stopped waiting for a store that was slower than expected",
    "evicted_blocks": "Blocks that were evicted from host memory",
    "errors": "Calls of the cache that have failed; their requests are computed without it",
}
GAUGES: Final = {
    "host_blocks": "Capacity of host memory in blocks",
    "host_cached_blocks": "Blocks in host memory",
    "requests": "Requests that the connector follows",
    "prefill_tokens_per_second": "Configured or measured speed of the model on prompts",
    "store_load_bytes_per_second": "Measured bandwidth of loads, summed over stores and ranks",
    "store_save_bytes_per_second": "The same for saves",
    "usable": "1, or 0 after a failure of the cache",
}


@dataclass
class ConnectorStatistics(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report; ``data`` maps the names of COUNTERS and GAUGES to numbers."""

    def reset(self) -> None:
        """Set all counts to 0."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another report, and take its state."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, float]:
        """Return the counts, for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True without any count."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics ``vllm:aiokv_*``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: kind(name=f"vllm:aiokv_{name}", documentation=text, labelnames=labelnames)
            for kind, texts in ((metric_types[Counter], COUNTERS), (metric_types[Gauge], GAUGES))
            for name, text in texts.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if name in COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)


class EngineCounts:
    """Counts of an engine since the last report."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def report(self, statistics: CacheStatistics, *, errors: int) -> dict[str, float]:
        """Return the counts since the last call."""
        now: dict[str, float] = {
            "loaded_tokens": statistics.hit_host_tokens,
            "saved_blocks": statistics.attention.offloaded_blocks,
            "store_hit_tokens": statistics.hit_store_tokens,
            "evicted_blocks": statistics.attention.host.evicted_blocks,
            "errors": errors,
        }
        return self._since_last(now) | {
            "host_blocks": statistics.attention.host.blocks,
            "host_cached_blocks": statistics.attention.host.cached,
        }

    def report_stores(self, statistics: Statistics) -> dict[str, float]:
        """Return the counts of the stores since the last call, and the present speeds."""
        requests, stores = statistics.requests, statistics.stores
        blocks = statistics.attention
        now: dict[str, float] = {
            "store_fetched_blocks": blocks.fetched_blocks,
            "stored_blocks": blocks.saved_blocks,
            "unstored_blocks": blocks.unsaved_blocks - blocks.unsaved_by_cause["refused"],
            "store_wait_seconds": requests.store_wait.sum_seconds,
            "declined_fetches": requests.declined_fetches,
            "late_fetches": requests.late_fetches,
        }
        return self._since_last(now) | {
            "prefill_tokens_per_second": requests.prefill_tokens_per_second,
            "store_load_bytes_per_second": sum(store.load_bytes_per_second for store in stores),
            "store_save_bytes_per_second": sum(store.save_bytes_per_second for store in stores),
        }

    def _since_last(self, now: dict[str, float]) -> dict[str, float]:
        counts = {name: value - self._last.get(name, 0) for name, value in now.items()}
        self._last |= now
        return counts
