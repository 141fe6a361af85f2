"""Replay of a trace against an engine; reports the prompt tokens that the cache saves."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv import CacheConfig, CacheEngine
from aiokv.config.cache_config import (  # msgspec reads the annotations
    DEFAULT_EVICTION_POLICY,
    EVICTION_POLICIES,
    EvictionPolicy,
)
from aiokv.errors import UsageError
from aiokv.trace.disk_tier import DiskOptions, DiskTier
from aiokv.trace.format import HASH_BLOCK_TOKENS, TraceRequest, read_trace
from aiokv.trace.knee import knee_of
from aiokv.trace.loops import Replayer, Samples, plain_loop, run_in_chunks, timed_loop
from aiokv.trace.min_oracle import min_hit_tokens
from aiokv.trace.payload import Payload
from aiokv.trace.report import (
    CapacityPoint,
    DiskReport,
    EvictionPoint,
    ExecuteReport,
    MemoryReport,
    PolicyPoint,
    ReplayReport,
    TrafficReport,
    percentiles_us,
    resident_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from aiokv.statistics import Statistics
    from aiokv.trace.report import SweptTier

    Progress = Callable[[int], None]
    # (stage, total) -> function that takes the number of requests done since its last call
    Stages = Callable[[str, int], Progress]
    Observe = Callable[[CacheEngine], AbstractContextManager[object]]


COMPARED_POLICIES: Final = ("write_through", "nth_use:2", "write_back")


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a replay.

    Attributes:
        block_tokens: tokens per block.
        device_blocks: capacity of the device tier in blocks.
        host_blocks: capacity of the host tier in blocks; 0 for no host tier.
        write_policy: policy that decides when blocks are copied to host memory.
        eviction_policy: policy that decides which blocks are evicted first.
        block_bytes: nominal bytes per block, for the reported traffic; ignored with ``execute``.
        concurrency: number of leases held at once. At full speed, a lease is held until
            ``concurrency`` later leases have come; by timestamps, until its answer is decoded.
        speed: replay speed relative to the timestamps; None for as fast as possible.
        token_seconds: decode time per output token in trace time, when ``speed`` is set.
        execute: move real bytes on the cpu device and check them.
        execute_bytes: memory of both tiers together in bytes, with ``execute``.
        disk: simulated disk tier below the host tier; None for none.
        latencies: time each operation in a second pass over the trace. Replays that are not plain
            always time the operations, in their only pass.
    """

    block_tokens: int = 16
    device_blocks: int = 32_000
    host_blocks: int = 0
    write_policy: str = "write_through"
    eviction_policy: EvictionPolicy = DEFAULT_EVICTION_POLICY
    block_bytes: int = 2 << 20  # 16 tokens of an 8B model: 32 layers, 8 KV heads of 128, 2 bytes
    concurrency: int = 1
    speed: float | None = None
    token_seconds: float = 0.02
    execute: bool = False
    execute_bytes: int = 256 << 20
    disk: DiskOptions | None = None
    latencies: bool = True

    @property
    def cache_config(self) -> CacheConfig:
        """Configuration of an engine with these capacities and policies."""
        return CacheConfig(
            block_tokens=self.block_tokens,
            device_blocks=self.device_blocks,
            host_blocks=self.host_blocks,
            write_policy=self.write_policy,
            eviction_policy=self.eviction_policy,
            strict=False,  # no model computes
        )

    @property
    def is_plain(self) -> bool:
        """True for a replay with one lease at a time, one tier and no bytes."""
        return (
            self.concurrency == 1
            and self.host_blocks == 0
            and self.speed is None
            and not self.execute
        )


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a trace; their prompts are expanded one at a time.

    Attributes:
        trace: name of the trace.
        requests: the requests in order of arrival.
        start_ms: timestamp of the first request of the trace.
    """

    trace: str
    requests: list[TraceRequest]
    start_ms: float

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.input_tokens for request in self.requests)

    def arrival_seconds(self, request: TraceRequest) -> float:
        """Return the arrival of a request after the start of the trace."""
        return (request.timestamp_ms - self.start_ms) / 1e3

    def fitting(self, capacity_tokens: int) -> Workload:
        """Return the workload without the prompts that exceed ``capacity_tokens``.

        Raises:
            UsageError: all prompts exceed it.
        """
        kept = [request for request in self.requests if request.input_tokens <= capacity_tokens]
        if not kept:
            raise UsageError(
                f"none of the {len(self.requests)} requests of {self.trace} fits the device's "
                f"capacity of {capacity_tokens} tokens",
                hint="raise device_blocks",
            )
        return msgspec.structs.replace(self, requests=kept)


def load_workload(path: str, limit: int | None = None) -> Workload:
    """Read a trace, or its first ``limit`` requests.

    Raises:
        TraceError: see :func:`read_trace`.
    """
    return workload_of(path, read_trace(path, limit))


def workload_of(name: str, requests: list[TraceRequest]) -> Workload:
    """Return the workload of ``requests``, one or more in order of arrival.

    Args:
        name: name of the trace, for reports and messages.
        requests: requests in order of arrival.
    """
    return Workload(trace=name, requests=requests, start_ms=requests[0].timestamp_ms)


def _not_observed(engine: CacheEngine) -> AbstractContextManager[object]:
    return nullcontext()


async def replay(
    workload: Workload,
    options: ReplayOptions,
    stages: Stages,
    observe: Observe = _not_observed,
) -> ReplayReport:
    """Run the workload on a new engine.

    Args:
        workload: the trace.
        options: options of the replay.
        stages: shows progress.
        observe: returns a context for an engine that replays the trace, such as
            ``engine.inspect.observing()``. A plain replay enters it for its pass with latencies, so
            that the CPU time of the index does not include it.

    Raises:
        InternalError: with ``execute``, a cached block held the wrong bytes.
        UsageError: no request fits the device, or the disk tier cannot be simulated.
    """
    _check_disk(options)
    fitting = workload.fitting(options.device_blocks * options.block_tokens)
    gc.collect()
    rss_before = resident_bytes()
    if options.is_plain:
        run = await _replay_plain(fitting, options, stages, observe)
    else:
        run = await _replay_general(fitting, options, stages, observe)
    rejected = len(workload.requests) - len(fitting.requests)
    return _make_report(fitting, options, run, rss_before, rejected)


def _check_disk(options: ReplayOptions) -> None:
    """Raise if the disk tier cannot be simulated exactly with the other options."""
    if options.disk is None:
        return
    if options.host_blocks == 0:
        raise UsageError(
            f"disk_blocks is {options.disk.blocks}, but host_blocks is 0; blocks move between disk "
            "and device through host memory",
            hint="add --host-blocks",
        )
    if options.write_policy != "write_through":
        raise UsageError(
            f"disk_blocks is {options.disk.blocks} with the write policy {options.write_policy!r}; "
            "the simulated disk saves blocks when they are committed, which needs 'write_through'",
            hint="use --write-policy write_through",
        )
    if options.execute:
        raise UsageError(
            f"disk_blocks is {options.disk.blocks} with execute; the disk tier is simulated, and "
            "moves no bytes",
            hint="leave out --execute or --disk-blocks",
        )


class _Run(msgspec.Struct, kw_only=True):
    """Measurements of one pass, from which the report is made."""

    cpu_seconds: float
    wall_seconds: float
    statistics: Statistics
    rss_bytes: int
    samples: Samples
    failed_onloads: int = 0
    payload: Payload | None = None
    disk: DiskTier | None = None


async def _replay_plain(
    workload: Workload, options: ReplayOptions, stages: Stages, observe: Observe
) -> _Run:
    requests = workload.requests
    async with CacheEngine(options.cache_config) as engine:
        progress = stages(_stage("replay", options), len(requests))
        clock = await run_in_chunks(lambda chunk: plain_loop(engine, chunk), requests, progress)
        statistics = engine.statistics()
        rss_bytes = resident_bytes()
    samples = Samples()
    if options.latencies:
        async with CacheEngine(options.cache_config) as timed:
            progress = stages(_stage("latencies", options), len(requests))
            with observe(timed):
                await run_in_chunks(
                    lambda chunk: timed_loop(timed, chunk, samples), requests, progress
                )
    return _Run(
        cpu_seconds=clock.cpu_seconds,
        wall_seconds=clock.wall_seconds,
        statistics=statistics,
        rss_bytes=rss_bytes,
        samples=samples,
    )


async def _replay_general(
    workload: Workload, options: ReplayOptions, stages: Stages, observe: Observe
) -> _Run:
    payload = _make_payload(options)
    regions = payload.regions if payload else None
    disk = DiskTier(options.disk, block_tokens=options.block_tokens) if options.disk else None
    requests, speed = workload.requests, options.speed
    progress = stages(_stage("replay", options), len(requests))
    async with CacheEngine(options.cache_config, regions=regions) as engine:
        replayer = Replayer(engine, block_tokens=options.block_tokens, payload=payload, disk=disk)
        with observe(engine):
            if speed is None:
                await replayer.window(requests, options.concurrency, progress)
            else:
                await replayer.by_timestamps(
                    requests,
                    [workload.arrival_seconds(request) / speed for request in requests],
                    [r.output_tokens * options.token_seconds / speed for r in requests],
                    options.concurrency,
                    progress,
                )
        return _Run(
            cpu_seconds=replayer.clock.cpu_seconds,
            wall_seconds=replayer.clock.wall_seconds,
            statistics=engine.statistics(),
            rss_bytes=resident_bytes(),
            samples=replayer.samples,
            failed_onloads=replayer.failed_onloads,
            payload=payload,
            disk=disk,
        )


def check_sweep(
    options: ReplayOptions, host_blocks: Sequence[int], disk_blocks: Sequence[int]
) -> None:
    """Check the options of a sweep before its first replay.

    Raises:
        UsageError: the disk tier cannot be simulated.
    """
    for host, disk in itertools.product(
        host_blocks or [options.host_blocks],
        disk_blocks or [options.disk.blocks if options.disk else 0],
    ):
        changed = msgspec.structs.replace(
            options, host_blocks=host, disk=_with_blocks(options.disk, disk)
        )
        _check_disk(changed)


async def sweep_capacities(
    workload: Workload,
    options: ReplayOptions,
    capacities: Sequence[int],
    stages: Stages,
    *,
    host_blocks: Sequence[int] = (),
    disk_blocks: Sequence[int] = (),
) -> list[CapacityPoint]:
    """Return the hit tokens for each combination of capacities, with the other options unchanged.

    Rates are relative to all prompt tokens of the trace, so that points are comparable: a request
    that does not fit the device counts as no hit. The knee of each line over the tier with the
    most sizes is marked.

    Args:
        workload: the trace.
        options: options of all replays, except the capacities.
        capacities: numbers of device blocks.
        stages: shows progress.
        host_blocks: numbers of host blocks; empty for that of ``options``.
        disk_blocks: numbers of blocks of the simulated disk; empty for that of ``options``.
    """
    points = []
    hosts = sorted(set(host_blocks)) or [options.host_blocks]
    disks = sorted(set(disk_blocks)) or [options.disk.blocks if options.disk else 0]
    for device, host, disk in itertools.product(capacities, hosts, disks):
        changed = msgspec.structs.replace(
            options,
            device_blocks=device,
            host_blocks=host,
            disk=_with_blocks(options.disk, disk),
            latencies=False,
        )
        report = await replay(workload, changed, stages)
        points.append(
            CapacityPoint(
                device_blocks=device,
                host_blocks=host,
                disk_blocks=disk,
                block_bytes=report.traffic.block_bytes,
                prompt_tokens=workload.prompt_tokens,
                hit_tokens=report.hit_tokens,
                hit_rate=report.hit_tokens["total"] / workload.prompt_tokens,
            )
        )
    return _with_knees(points)


def doubling_capacities(workload: Workload, block_tokens: int) -> list[int]:
    """Return eight numbers of device blocks, each twice the last; the largest holds all prompts."""
    ids = {block for request in workload.requests for block in request.hash_ids}
    largest, needed = 1_000, len(ids) * HASH_BLOCK_TOKENS // block_tokens
    while largest < needed:
        largest *= 2
    return [max(1, largest >> shift) for shift in range(7, -1, -1)]


def _with_blocks(disk: DiskOptions | None, blocks: int) -> DiskOptions | None:
    """Return the options of a disk with another capacity; None for a capacity of 0."""
    if blocks == 0:
        return None
    return msgspec.structs.replace(disk or DiskOptions(blocks=blocks), blocks=blocks)


def swept_tier(points: Sequence[CapacityPoint]) -> SweptTier:
    """Return the tier with the most sizes; the first one of several."""
    tiers: tuple[SweptTier, ...] = ("device", "host", "disk")
    return max(tiers, key=lambda tier: len({point.num_bytes(tier) for point in points}))


def _with_knees(points: Sequence[CapacityPoint]) -> list[CapacityPoint]:
    tier = swept_tier(points)
    lines: dict[tuple[int, ...], list[int]] = {}
    for index, point in enumerate(points):
        others = [name for name in ("device", "host", "disk") if name != tier]
        lines.setdefault(tuple(map(point.num_bytes, others)), []).append(index)
    knees = set()
    for line in lines.values():
        line.sort(key=lambda index: points[index].num_bytes(tier))
        sizes = [points[index].num_bytes(tier) for index in line]
        knee = knee_of(sizes, [points[index].hit_rate for index in line])
        if knee is not None:
            knees.add(line[knee])
    return [
        msgspec.structs.replace(point, is_knee=index in knees) for index, point in enumerate(points)
    ]


async def compare_policies(
    workload: Workload, options: ReplayOptions, stages: Stages
) -> tuple[ReplayReport, list[PolicyPoint]]:
    """Replay with each write policy of ``COMPARED_POLICIES``, with the other options unchanged.

    Returns:
        The full report for ``options.write_policy``, and one point per policy.
    """
    reports = await _compare("write_policy", COMPARED_POLICIES, workload, options, stages)
    points = [
        PolicyPoint(
            write_policy=policy,
            hit_tokens=report.hit_tokens,
            hit_rate=report.hit_rate,
            evicted_blocks=report.evicted_blocks,
            failed_onloads=report.failed_onloads,
            requests_per_second=report.requests_per_second,
            traffic=report.traffic,
            execute=report.execute,
        )
        for policy, report in reports.items()
    ]
    return reports[options.write_policy], points


async def compare_evictions(
    workload: Workload, options: ReplayOptions, stages: Stages
) -> tuple[ReplayReport, list[EvictionPoint]]:
    """Replay with each policy of ``EVICTION_POLICIES``, and compute the bound MIN.

    Returns:
        The full report for ``options.eviction_policy``, and one point per policy.
    """
    reports = await _compare("eviction_policy", EVICTION_POLICIES, workload, options, stages)
    capacity_tokens = options.device_blocks * options.block_tokens
    fitting = workload.fitting(capacity_tokens)
    best = min_hit_tokens(fitting.requests, capacity_tokens // HASH_BLOCK_TOKENS)
    points = [
        EvictionPoint(
            eviction_policy=policy,
            hit_tokens=report.hit_tokens,
            hit_rate=report.hit_rate,
            min_hit_tokens=best,
            device_share_of_min=report.hit_tokens["device"] / max(1, best),
            requests_per_second=report.requests_per_second,
        )
        for policy, report in reports.items()
    ]
    return reports[options.eviction_policy], points


async def _compare(
    field: str, policies: Sequence[str], workload: Workload, options: ReplayOptions, stages: Stages
) -> dict[str, ReplayReport]:
    """Replay once per value of an option; return the reports by value."""
    reports = {}
    for policy in policies:
        changed = msgspec.structs.replace(options, **{field: policy})
        named = partial(_named_stage, stages, policy)
        reports[policy] = await replay(workload, changed, named)
    return reports


def _named_stage(stages: Stages, name: str, stage: str, total: int) -> Progress:
    return stages(f"{name}: {stage}", total)


def _stage(name: str, options: ReplayOptions) -> str:
    return f"{name}, {options.device_blocks:,} blocks"


def _make_payload(options: ReplayOptions) -> Payload | None:
    if not options.execute:
        return None
    return Payload(
        device_blocks=options.device_blocks,
        host_blocks=options.host_blocks,
        budget_bytes=options.execute_bytes,
    )


def _make_report(
    workload: Workload, options: ReplayOptions, run: _Run, rss_before: int, rejected: int
) -> ReplayReport:
    requests, prompt_tokens = len(workload.requests), workload.prompt_tokens
    hit_tokens = _hit_tokens(run)
    return ReplayReport(
        trace=workload.trace,
        config=msgspec.to_builtins(options),
        requests=requests,
        rejected_requests=rejected,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        hit_rate=hit_tokens["total"] / prompt_tokens,
        evicted_blocks=run.statistics.attention.device.evicted_blocks,
        failed_onloads=run.failed_onloads,
        index_seconds=run.cpu_seconds,
        requests_per_second=requests / run.cpu_seconds,
        wall_seconds=run.wall_seconds,
        latency_us=percentiles_us(run.samples.by_operation()),
        memory=_memory(run, rss_before),
        traffic=_traffic(run, options),
        disk=_disk(run.disk, options),
        execute=_execute(run.payload),
    )


def _hit_tokens(run: _Run) -> dict[str, int]:
    tiers = {
        "device": run.statistics.hit_device_tokens,
        "host": run.statistics.hit_host_tokens,
    }
    if run.disk is not None:
        tiers["disk"] = run.disk.hit_tokens
    return tiers | {"total": sum(tiers.values())}


def _memory(run: _Run, rss_before: int) -> MemoryReport:
    statistics = run.statistics
    cached_blocks = statistics.nodes - 1  # without the root
    return MemoryReport(
        rss_delta_bytes=run.rss_bytes - rss_before,
        cached_blocks=cached_blocks,
        index_bytes=statistics.index_bytes,
        token_bytes=statistics.token_bytes,
        index_bytes_per_block=statistics.index_bytes / max(cached_blocks, 1),
    )


def _traffic(run: _Run, options: ReplayOptions) -> TrafficReport:
    statistics = run.statistics
    block_bytes = run.payload.block_bytes if run.payload else options.block_bytes
    return TrafficReport(
        block_bytes=block_bytes,
        onloaded_blocks=statistics.attention.onloaded_blocks,
        offloaded_blocks=statistics.attention.offloaded_blocks,
        onloaded_bytes=statistics.attention.onloaded_blocks * block_bytes,
        offloaded_bytes=statistics.attention.offloaded_blocks * block_bytes,
        evicted_host_blocks=statistics.attention.host.evicted_blocks,
        skipped_backups=statistics.skipped_backups,
        reclaimed_host_copies=statistics.reclaimed_host_copies,
        dropped_blocks=statistics.dropped_blocks,
    )


def _disk(disk: DiskTier | None, options: ReplayOptions) -> DiskReport | None:
    if disk is None or options.disk is None:
        return None
    return DiskReport(
        capacity_blocks=options.disk.blocks,
        blocks=len(disk),
        loaded_blocks=disk.loaded_blocks,
        saved_blocks=disk.saved_blocks,
        loaded_bytes=disk.loaded_blocks * options.block_bytes,
        saved_bytes=disk.saved_blocks * options.block_bytes,
        evicted_blocks=disk.evicted_blocks,
    )


def _execute(payload: Payload | None) -> ExecuteReport | None:
    if payload is None:
        return None
    return ExecuteReport(
        block_bytes=payload.block_bytes,
        written_blocks=payload.written_blocks,
        verified_blocks=payload.verified_blocks,
    )
