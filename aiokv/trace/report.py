"""Results of a replay, as plain data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from aiokv.base.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


SweptTier = Literal["device", "host", "disk"]


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
        rss_delta_bytes: growth of the resident memory from before the engine was made to after the
            replay.
        cached_blocks: cached blocks at the end. A block on both tiers counts once.
        index_bytes: memory of the index and the pools by their own counters, without token ids.
        token_bytes: memory of the token ids.
        index_bytes_per_block: ``index_bytes / cached_blocks``.
    """

    rss_delta_bytes: int
    cached_blocks: int
    index_bytes: int
    token_bytes: int
    index_bytes_per_block: float


class ExecuteReport(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a replay with ``execute`` has written and verified."""

    block_bytes: int
    written_blocks: int
    verified_blocks: int


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that were copied between the tiers, and blocks that were evicted.

    All counts include verified copies only.

    Attributes:
        block_bytes: bytes per block: of a real block with ``execute``, else nominal.
        onloaded_blocks: blocks copied to the device.
        offloaded_blocks: blocks copied to host memory.
        onloaded_bytes: bytes of these onloaded blocks.
        offloaded_bytes: bytes of these offloaded blocks.
        evicted_host_blocks: blocks evicted from host memory.
        skipped_backups: blocks that were due for a save while the host tier was full.
        reclaimed_host_copies: host copies that were evicted while the block was on the device, too.
        dropped_blocks: blocks whose last copy was evicted.
    """

    block_bytes: int
    onloaded_blocks: int
    offloaded_blocks: int
    onloaded_bytes: int
    offloaded_bytes: int
    evicted_host_blocks: int
    skipped_backups: int
    reclaimed_host_copies: int
    dropped_blocks: int

    @property
    def moved_bytes(self) -> int:
        return self.onloaded_bytes + self.offloaded_bytes


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated disk tier.

    Attributes:
        capacity_blocks: capacity of the tier.
        blocks: blocks on disk at the end.
        loaded_blocks: blocks that were found on disk.
        saved_blocks: blocks that were written.
        loaded_bytes: bytes of the loaded blocks.
        saved_bytes: bytes of the saved blocks.
        evicted_blocks: blocks that were evicted to make room.
    """

    capacity_blocks: int
    blocks: int
    loaded_blocks: int
    saved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    evicted_blocks: int


class PolicyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one write policy on the same trace; fields as in :class:`ReplayReport`."""

    write_policy: str
    hit_tokens: dict[str, int]
    hit_rate: float
    evicted_blocks: int
    failed_onloads: int
    requests_per_second: float
    traffic: TrafficReport
    execute: ExecuteReport | None


class EvictionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one eviction policy on the same trace; other fields as in :class:`ReplayReport`.

    Attributes:
        min_hit_tokens: upper bound of the hit tokens on the device, by MIN over the trace's own
            blocks of 512 tokens.
        device_share_of_min: hit tokens on the device divided by ``min_hit_tokens``.
    """

    eviction_policy: str
    hit_tokens: dict[str, int]
    hit_rate: float
    min_hit_tokens: int
    device_share_of_min: float
    requests_per_second: float


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens with one size of each tier.

    Attributes:
        device_blocks: capacity of the device tier.
        host_blocks: capacity of the host tier.
        disk_blocks: capacity of the simulated disk.
        block_bytes: bytes per block, nominal or of the model.
        prompt_tokens: prompt tokens of the whole trace.
        hit_tokens: as in :class:`ReplayReport`.
        hit_rate: their total divided by ``prompt_tokens``.
        is_knee: from here on, more of the tier that was varied most buys few more hits.
    """

    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    block_bytes: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    hit_rate: float
    is_knee: bool = False

    def num_bytes(self, tier: str) -> int:
        """Return the memory of a tier in bytes."""
        blocks: int = getattr(self, f"{tier}_blocks")
        return blocks * self.block_bytes


class ReplayReport(msgspec.Struct, kw_only=True):
    """Result of a replay, which ``aiokv replay --json`` writes.

    Attributes:
        trace: name of the trace.
        config: options of the replay, by name.
        requests: number of requests that ran.
        rejected_requests: number of requests that need more blocks than the device has; these did
            not run.
        prompt_tokens: prompt tokens of the requests that ran.
        hit_tokens: prompt tokens found in the cache, by tier, and their ``total``; ``disk`` is one
            of the tiers if it is simulated.
        hit_rate: ``total / prompt_tokens``.
        evicted_blocks: cached blocks that were evicted from the device.
        failed_onloads: number of leases whose onload failed and that computed the blocks again.
        index_seconds: CPU time of the event loop's thread in match, allocate, commit and release of
            all requests; the preparation of token arrays is not included.
        requests_per_second: ``requests / index_seconds``.
        wall_seconds: wall-clock time of the same loop.
        latency_us: wall-clock microseconds per call, by operation.
        memory: memory of the engine.
        traffic: blocks that were copied between the tiers; blocks found on disk count as copied to
            host memory.
        disk: the simulated disk tier, if there is one.
        execute: blocks written and verified, with ``execute``.
        capacities: results by capacity of the tiers, if several were replayed.
        write_policies: results by write policy, if they were compared.
        eviction_policies: results by eviction policy, if they were compared.
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
    disk: DiskReport | None = None
    execute: ExecuteReport | None = None
    capacities: list[CapacityPoint] | None = None
    write_policies: list[PolicyPoint] | None = None
    eviction_policies: list[EvictionPoint] | None = None


class RouterPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one router.

    Attributes:
        router: name of the router.
        hit_tokens: prompt tokens found in the cache of the engine that got the prompt.
        hit_rate: ``hit_tokens`` divided by all prompt tokens.
        computed_tokens: prompt tokens that each engine had to compute.
        imbalance: the largest of ``computed_tokens`` divided by their mean; 1 is even.
    """

    router: str
    hit_tokens: int
    hit_rate: float
    computed_tokens: list[int]
    imbalance: float


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay on several engines, which ``aiokv replay --engines N --json`` writes.

    Attributes:
        trace: name of the trace.
        config: options of the replay, by name.
        requests: number of requests that ran.
        rejected_requests: number of requests that need more blocks than a device has; these did
            not run.
        prompt_tokens: prompt tokens of the requests that ran.
        routers: results by router.
    """

    trace: str
    config: dict[str, Any]
    requests: int
    rejected_requests: int
    prompt_tokens: int
    routers: list[RouterPoint]


class OrderPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one order of admission with users; times are simulated.

    Attributes:
        admission: order of admission.
        requests: requests that were served.
        requests_per_hour: these requests per hour.
        prompt_tokens: prompt tokens of the granted requests.
        hit_tokens: prompt tokens found in the cache.
        hit_rate: ``hit_tokens / prompt_tokens``.
        wait_p50_seconds: median time from arrival to grant.
        wait_p95_seconds: 95th percentile of these times.
        wait_max_seconds: the longest of these times.
        longest_overtaken_seconds: the longest time that a request had waited when a later one was
            granted.
        model_busy: share of the time in which the model computed.
    """

    admission: str
    requests: int
    requests_per_hour: float
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    wait_p50_seconds: float
    wait_p95_seconds: float
    wait_max_seconds: float
    longest_overtaken_seconds: float
    model_busy: float


class UsersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay with users, which ``aiokv replay --users N --json`` writes.

    Attributes:
        trace: name of the trace.
        config: options of the replay, by name.
        sessions: sessions of the trace.
        rejected_requests: requests of the trace that need more blocks than the device has; these
            did not run.
        orders: results by order of admission.
    """

    trace: str
    config: dict[str, Any]
    sessions: int
    rejected_requests: int
    orders: list[OrderPoint]


def percentiles_us(samples_ns: Mapping[str, Sequence[int]]) -> dict[str, Percentiles]:
    """Return nearest-rank percentiles of nanosecond samples, by operation that has samples."""
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
    """Return the resident set size of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
