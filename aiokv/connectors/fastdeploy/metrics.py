"""CacheMetrics: hit rates of requests, by the names of FastDeploy's metrics."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

PUBLISH_CALLS: Final = 16  # a batch in 16: setting the gauges costs as much as scheduling one

# FastDeploy's scheduler counts the tokens itself.
_RATES: Final = {"hit_req_rate", "hit_token_rate", "gpu_hit_token_rate", "cpu_hit_token_rate"}


@dataclass
class CacheMetrics:
    """Requests and tokens since the manager was made, and how many of them hit.

    Attributes:
        req_count: requests that were matched, again after a preemption.
        hit_req_count: those that hit at least one block.
        total_token_num: tokens of these requests.
        total_gpu_matched_token_num: tokens that were on the device.
        total_cpu_matched_token_num: tokens that came from host memory.
    """

    req_count: int = 0
    hit_req_count: int = 0
    total_token_num: int = 0
    total_gpu_matched_token_num: int = 0
    total_cpu_matched_token_num: int = 0
    _published: int = 0
    _calls: int = 0  # calls of `publish` since the gauges were set

    def note(self, num_tokens: int, device_tokens: int, host_tokens: int) -> None:
        """Count one request."""
        self.req_count += 1
        self.hit_req_count += device_tokens + host_tokens > 0
        self.total_token_num += num_tokens
        self.total_gpu_matched_token_num += device_tokens
        self.total_cpu_matched_token_num += host_tokens

    @property
    def matched_token_num(self) -> int:
        """Tokens that hit in any tier."""
        return self.total_gpu_matched_token_num + self.total_cpu_matched_token_num

    @property
    def hit_req_ratio(self) -> float:
        """Share of the requests that hit, 0 to 1."""
        return _ratio(self.hit_req_count, self.req_count)

    @property
    def hit_token_ratio(self) -> float:
        """Share of the tokens that hit, 0 to 1."""
        return _ratio(self.matched_token_num, self.total_token_num)

    @property
    def gpu_hit_token_ratio(self) -> float:
        """Share of the tokens that hit on the device, 0 to 1."""
        return _ratio(self.total_gpu_matched_token_num, self.total_token_num)

    @property
    def cpu_hit_token_ratio(self) -> float:
        """Share of the tokens that hit in host memory, 0 to 1."""
        return _ratio(self.total_cpu_matched_token_num, self.total_token_num)

    def publish(self) -> None:
        """Set FastDeploy's own gauges of hit rates, if requests were matched since they were set.

        Sets them in one of 16 calls at most. Without effect in a process that has not imported
        FastDeploy's metrics.
        """
        self._calls += 1
        if self._calls < PUBLISH_CALLS or self.req_count == self._published:
            return
        metrics = sys.modules.get("fastdeploy.metrics.metrics")
        if metrics is None:
            return
        self._published, self._calls = self.req_count, 0
        for name, value in self.as_gauges().items():
            if name in _RATES:
                getattr(metrics.main_process_metrics, name).set(value)

    def as_gauges(self) -> dict[str, float]:
        """Return the hit rates and token counts by the names of FastDeploy's gauges."""
        return {
            "hit_req_rate": self.hit_req_ratio,
            "hit_token_rate": self.hit_token_ratio,
            "gpu_hit_token_rate": self.gpu_hit_token_ratio,
            "cpu_hit_token_rate": self.cpu_hit_token_ratio,
            "prefix_cache_token_num": self.matched_token_num,
            "prefix_gpu_cache_token_num": self.total_gpu_matched_token_num,
            "prefix_cpu_cache_token_num": self.total_cpu_matched_token_num,
        }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
