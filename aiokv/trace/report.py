"""Results of a replay, as plain data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.observe.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one operation, in microseconds of wall-clock."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the engine.

    Attributes:
        rss_delta_bytes: what the process grew by, from before the engine to after the replay.
        cached_blocks: blocks in the larger tier at the end.
        index_bytes: of the index and the pools by their own counters, token ids left out.
        token_bytes: of the token ids.
        index_bytes_per_block: ``index_bytes / cached_blocks``.
    """

    rss_delta_bytes: int
    cached_blocks: int
    index_bytes: int
    token_bytes: int
    index_bytes_per_block: float


class ExecuteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--execute`` moved and checked."""

    block_bytes: int
    written_blocks: int
    verified_blocks: int


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """What moved between the tiers, and what went.

    Attributes:
        block_bytes: of a real block with ``--execute``, else a nominal one.
        onloaded_bytes: towards the device; proven copies only, as all counts here.
        skipped_backups: blocks that found no room on the host when they were to be saved.
        reclaimed_twins: host copies given up while the block was on the device.
        dropped_blocks: blocks whose last copy went.
    """

    block_bytes: int
    onloaded_blocks: int
    offloaded_blocks: int
    onloaded_bytes: int
    offloaded_bytes: int
    evicted_host_blocks: int
    skipped_backups: int
    reclaimed_twins: int
    dropped_blocks: int

    @property
    def moved_bytes(self) -> int:
        return self.onloaded_bytes + self.offloaded_bytes


class PolicyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One write policy on the same trace; fields as in :class:`ReplayReport`."""

    write_policy: str
    hit_tokens: dict[str, int]
    hit_rate: float
    evicted_blocks: int
    failed_onloads: int
    requests_per_second: float
    traffic: TrafficReport
    execute: ExecuteReport | None


class EvictionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One eviction policy on the same trace.

    Attributes:
        min_hit_tokens: what no policy can beat on the device tier, by MIN over the trace's own
            blocks of 512 tokens.
        device_share_of_min: hit tokens on the device, by ``min_hit_tokens``.
    """

    eviction_policy: str
    hit_tokens: dict[str, int]
    hit_rate: float
    min_hit_tokens: int
    device_share_of_min: float
    requests_per_second: float


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens at one number of device blocks; ``hit_rate`` is of all prompt tokens given."""

    device_blocks: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    hit_rate: float


class ReplayReport(msgspec.Struct, kw_only=True):
    """Result of a replay; what ``--json`` writes.

    Attributes:
        requests: requests that ran.
        rejected_requests: requests that need more blocks than the device has; they did not run.
        prompt_tokens: of the requests that ran.
        hit_tokens: prompt tokens found in the cache, by tier, and their ``total``.
        hit_rate: ``total / prompt_tokens``.
        evicted_blocks: device blocks that were taken back from the cache.
        failed_onloads: leases whose onload failed and that computed the rest again.
        index_seconds: CPU time of the loop's thread over match, allocate, commit and release of all
            requests, token arrays prepared outside the clock.
        requests_per_second: ``requests / index_seconds``.
        wall_seconds: wall-clock of the same loop.
        latency_us: by operation.
        write_policies: every write policy on the same trace, when they were compared.
        eviction_policies: the same of the eviction policies.
    """

    trace: str
    config: dict[str, Any]
    requests: int
    rejected_requests: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    hit_rate: float
    evicted_blocks: int
    failed_onloads: int
    index_seconds: float
    requests_per_second: float
    wall_seconds: float
    latency_us: dict[str, Percentiles]
    memory: MemoryReport
    traffic: TrafficReport
    execute: ExecuteReport | None = None
    capacities: list[CapacityPoint] | None = None
    write_policies: list[PolicyPoint] | None = None
    eviction_policies: list[EvictionPoint] | None = None


def percentiles_us(samples_ns: Mapping[str, Sequence[int]]) -> dict[str, Percentiles]:
    """Nearest-rank percentiles of nanosecond samples; operations without a sample are left out."""
    result = {}
    for operation, samples in samples_ns.items():
        if samples:
            ordered = sorted(ns / 1e3 for ns in samples)
            p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
            result[operation] = Percentiles(
                count=len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1]
            )
    return result


def resident_bytes() -> int:
    """Resident set size of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def available_bytes() -> int:
    """Memory of this machine that can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
