"""``aiokv replay TRACE.jsonl``: the prompt tokens that a cache of a given size saves on a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aiokv.cli.arguments import SAVING_POLICIES, add_count, at_least, positive_float
from aiokv.errors import UsageError
from aiokv.observe.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv import CacheEngine, Observation
    from aiokv.cli.progress import Stages
    from aiokv.config import EvictionPolicy
    from aiokv.demo.router import RouterName
    from aiokv.trace.disk_tier import DiskAdmission, DiskOptions, DiskPolicy
    from aiokv.trace.replay import ReplayOptions, Workload
    from aiokv.trace.report import FleetReport, ReplayReport

EVICTION_POLICIES: tuple[EvictionPolicy, ...] = ("adaptive", "lru")
DISK_POLICIES: tuple[DiskPolicy, ...] = ("at_commit", "at_nth_use")
DISK_ADMISSIONS: tuple[DiskAdmission, ...] = ("all", "reused")
ROUTERS: tuple[RouterName, ...] = ("prefix", "round-robin")
PLOT_SUFFIXES = (".svg",)
DEFAULT_CAPACITIES = "8000,16000,32000,64000,128000,256000,512000,1024000"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay a Mooncake trace and report the hits",
        description="Replay a trace in the public Mooncake format (one JSON object per line).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE.jsonl")
    add("--limit", type=at_least(1), metavar="N", help="replay only the first N requests")
    add_count(parser, "--block-tokens", 16, "tokens per block")
    add_count(parser, "--device-blocks", 32_000, "capacity of the device tier in blocks")
    add_count(parser, "--host-blocks", 0, "capacity of the host tier in blocks; 0: none", minimum=0)
    add(
        "--write-policy",
        choices=(*SAVING_POLICIES, "none", "all"),
        default=SAVING_POLICIES[0],
        help="when to copy blocks to host memory; all: compare the three copying policies",
    )
    add(
        "--eviction-policy",
        choices=(*EVICTION_POLICIES, "all"),
        default=EVICTION_POLICIES[0],
        help="which blocks to evict first; all: compare the policies with each other and with MIN",
    )
    add_count(
        parser,
        "--disk-blocks",
        0,
        "capacity in blocks of a simulated disk below the host tier; 0: none",
        minimum=0,
    )
    add(
        "--disk-policy",
        choices=DISK_POLICIES,
        default=DISK_POLICIES[0],
        help="when to save blocks on the simulated disk",
    )
    add_count(parser, "--disk-uses", 2, "the n of --disk-policy at_nth_use")
    add(
        "--disk-admission",
        choices=DISK_ADMISSIONS,
        default=DISK_ADMISSIONS[0],
        help="reused: save a block on the simulated disk only when it was offered before",
    )
    add_count(parser, "--block-kib", 2048, "nominal KiB per block, for the reported bytes", "KIB")
    add_count(parser, "--concurrency", 1, "leases held at once")
    add(
        "--speed",
        type=_speed,
        default="max",
        metavar="max|X",
        help="max: as fast as possible; X: X times as fast as the timestamps",
    )
    add(
        "--token-ms",
        type=positive_float,
        default=20.0,
        metavar="MS",
        help="with --speed X: milliseconds that a request holds its blocks per output token",
    )
    add("--execute", action="store_true", help="move real bytes on the cpu device, and check them")
    add_count(parser, "--execute-mib", 256, "with --execute: MiB of both tiers together", "MIB")
    add_count(parser, "--engines", 1, "engines behind a router, each with --device-blocks")
    add(
        "--router",
        choices=(*ROUTERS, "all"),
        default="all",
        help="with --engines: prefix sends a prompt where its first token would come soonest; "
        "all: compare the routers",
    )
    add(
        "--tokens-per-second",
        type=positive_float,
        default=10_000.0,
        metavar="X",
        help="with --engines: prompt tokens that an engine computes per second of the trace",
    )
    add("--json", type=Path, metavar="FILE", help="write the result as JSON to this file")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the hit rate against --capacities")
    add(
        "--timeline",
        type=Path,
        metavar="FILE.json[.gz]",
        help="write transfers, waits and leases as a trace for ui.perfetto.dev: the newest 65,536 "
        "of each; recording adds to the latencies",
    )
    add(
        "--capacities",
        type=_capacities,
        metavar="N,N,...",
        help="numbers of device blocks to replay, for --plot and the result "
        f"({DEFAULT_CAPACITIES} for --plot)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the replay; print the result on stdout and progress on stderr.

    Returns:
        The exit status.

    Raises:
        AiokvError: see :func:`aiokv.trace.replay.replay`; or an output file cannot be written.
    """
    from aiokv.cli.files import check_writable, write_json
    from aiokv.cli.progress import show_progress
    from aiokv.cli.running import run_async

    for path in (args.json, args.plot, args.timeline):
        check_writable(path)
    _check_suffix(args.plot)
    if args.engines > 1:
        return _run_fleet(args)
    with show_progress("requests", sys.stderr) as stages:
        report = run_async(_replay(args, stages))
    _print_rows(
        report.trace, list(_rows(report))
    )  # first: a file that cannot be written must not cost the work
    if args.json:
        write_json(args.json, report)
    if args.plot:
        _write_plot(args.plot, report)
    return 0


def _run_fleet(args: argparse.Namespace) -> int:
    from aiokv.cli.files import write_json
    from aiokv.cli.progress import show_progress
    from aiokv.cli.running import run_async

    with show_progress("requests", sys.stderr) as stages:
        report = run_async(_replay_fleet(args, stages))
    _print_rows(report.trace, list(_fleet_rows(report)))
    if args.json:
        write_json(args.json, report)
    return 0


async def _replay_fleet(args: argparse.Namespace, stages: Stages) -> FleetReport:
    from aiokv.trace.fleet import FleetOptions, replay_fleet
    from aiokv.trace.replay import load_workload

    one_engine = {
        "--write-policy all": args.write_policy == "all",
        "--eviction-policy all": args.eviction_policy == "all",
        "--disk-blocks": args.disk_blocks > 0,
        "--capacities": args.capacities is not None,
        "--plot": args.plot is not None,
        "--timeline": args.timeline is not None,
    }
    for flag, is_set in one_engine.items():
        if is_set:
            raise UsageError(
                f"--engines is {args.engines} with {flag}, which replays on one engine",
                hint=f"leave out {flag} or --engines",
            )
    workload = load_workload(
        args.trace, args.limit, stages, largest_tokens=args.device_blocks * args.block_tokens
    )
    fleet = FleetOptions(
        engines=args.engines,
        routers=ROUTERS if args.router == "all" else (args.router,),
        tokens_per_second=args.tokens_per_second,
    )
    return await replay_fleet(workload, _make_options(args), fleet, stages)


async def _replay(args: argparse.Namespace, stages: Stages) -> ReplayReport:
    from aiokv.trace.replay import (
        compare_evictions,
        compare_policies,
        load_workload,
        sweep_capacities,
    )

    if args.write_policy == args.eviction_policy == "all":
        raise UsageError(
            "--write-policy and --eviction-policy are both 'all'; only one of them can be",
            hint="choose one policy for the other flag",
        )
    if args.timeline and "all" in (args.write_policy, args.eviction_policy):
        raise UsageError(
            "--timeline shows one replay, but 'all' compares the policies of several replays",
            hint="choose one --write-policy and one --eviction-policy",
        )
    options = _make_options(args)
    capacities = args.capacities or (_capacities(DEFAULT_CAPACITIES) if args.plot else [])
    largest_tokens = max([args.device_blocks, *capacities]) * args.block_tokens
    workload = load_workload(args.trace, args.limit, stages, largest_tokens=largest_tokens)
    if args.write_policy == "all":
        report, points = await compare_policies(workload, options, stages)
        report.write_policies = points
    elif args.eviction_policy == "all":
        report, evictions = await compare_evictions(workload, options, stages)
        report.eviction_policies = evictions
    else:
        report = await _replay_once(workload, options, stages, args.timeline)
    if capacities:
        report.capacities = await sweep_capacities(workload, options, capacities, stages)
    return report


async def _replay_once(
    workload: Workload, options: ReplayOptions, stages: Stages, timeline: Path | None
) -> ReplayReport:
    """Replay on one engine; write its timeline, if asked for."""
    from aiokv.engine.timeline import write_timeline
    from aiokv.trace.replay import replay

    if timeline is None:
        return await replay(workload, options, stages)
    observations: list[Observation] = []

    def observe(engine: CacheEngine) -> Observation:
        observations.append(engine.observing())
        return observations[-1]

    report = await replay(workload, options, stages, observe)
    write_timeline(timeline, observations[0].timeline())
    return report


def _make_options(args: argparse.Namespace) -> ReplayOptions:
    from aiokv.trace.replay import ReplayOptions

    return ReplayOptions(
        block_tokens=args.block_tokens,
        device_blocks=args.device_blocks,
        host_blocks=args.host_blocks,
        write_policy=SAVING_POLICIES[0] if args.write_policy == "all" else args.write_policy,
        eviction_policy=(
            EVICTION_POLICIES[0] if args.eviction_policy == "all" else args.eviction_policy
        ),
        block_bytes=args.block_kib << 10,
        concurrency=args.concurrency,
        speed=args.speed,
        token_seconds=args.token_ms / 1e3,
        execute=args.execute,
        execute_bytes=args.execute_mib << 20,
        disk=_disk_options(args),
    )


def _disk_options(args: argparse.Namespace) -> DiskOptions | None:
    from aiokv.trace.disk_tier import DiskOptions

    if args.disk_blocks == 0:
        return None
    if args.write_policy == "all":
        raise UsageError(
            f"--disk-blocks is {args.disk_blocks} with --write-policy all; the disk is simulated "
            "for 'write_through' only",
            hint="use --write-policy write_through",
        )
    return DiskOptions(
        blocks=args.disk_blocks,
        policy=args.disk_policy,
        uses=args.disk_uses,
        admission=args.disk_admission,
    )


def _check_suffix(plot: Path | None) -> None:
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(
            f"--plot {plot}: the suffix {plot.suffix!r} is not supported; it must be "
            f"{' or '.join(PLOT_SUFFIXES)}",
            hint=f"--plot {plot.with_suffix(PLOT_SUFFIXES[0])}",
        )


def _write_plot(path: Path, report: ReplayReport) -> None:
    from aiokv.cli.files import write_file
    from aiokv.trace.plot import hit_rate_svg

    title = f"{Path(report.trace).name}: prompt tokens found in the cache"
    write_file(path, hit_rate_svg(report.capacities or [], title).encode())


def _print_rows(trace: str, rows: Sequence[tuple[str, str]]) -> None:
    from aiokv.cli.rows import print_rows

    print_rows(f"replay of {Path(trace).name}", rows)


def _fleet_rows(report: FleetReport) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.requests:,}"
    yield "prompt tokens", f"{report.prompt_tokens:,}"
    if report.rejected_requests:
        yield "requests larger than a device", f"{report.rejected_requests:,}"
    for point in report.routers:
        text = (
            f"{point.hit_tokens:,} ({point.hit_rate:.2%}); the busiest engine computes "
            f"{point.imbalance:.2f} times the mean"
        )
        yield f"hit tokens, {point.router}", text


def _rows(report: ReplayReport) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{report.requests:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
    ]
    if report.rejected_requests:
        rows.append(("requests larger than the device", f"{report.rejected_requests:,}"))
    for tier, tokens in report.hit_tokens.items():
        share = tokens / report.prompt_tokens
        rows.append((f"hit tokens, {tier}", f"{tokens:,} ({share:.2%})"))
    rows += [
        ("evicted device blocks", f"{report.evicted_blocks:,}"),
        ("index CPU time", format_seconds(report.index_seconds)),
        ("requests per CPU second", f"{report.requests_per_second:,.0f}"),
        ("wall-clock time", format_seconds(report.wall_seconds)),
    ]
    if report.failed_onloads:
        rows.append(("failed onloads", f"{report.failed_onloads:,}"))
    rows += _traffic_rows(report)
    rows += _latency_rows(report)
    rows += _memory_rows(report)
    for eviction in report.eviction_policies or ():
        text = (
            f"hits {eviction.hit_tokens['total']:,} tokens ({eviction.hit_rate:.2%}), on the "
            f"device {eviction.device_share_of_min:.3f} of the {eviction.min_hit_tokens:,} of MIN"
        )
        rows.append((eviction.eviction_policy, text))
    for point in report.capacities or ():
        hits = f"{point.hit_tokens['total']:,} ({point.hit_rate:.2%})"
        rows.append((f"hit tokens with {point.device_blocks:,} device blocks", hits))
    return rows


def _traffic_rows(report: ReplayReport) -> list[tuple[str, str]]:
    traffic = report.traffic
    if not report.config["host_blocks"]:
        return []
    rows = [
        ("copied to host memory", _moved(traffic.offloaded_blocks, traffic.offloaded_bytes)),
        ("copied to the device", _moved(traffic.onloaded_blocks, traffic.onloaded_bytes)),
    ]
    if report.disk is not None:
        disk = report.disk
        rows += [
            ("saved on disk", _moved(disk.saved_blocks, disk.saved_bytes)),
            ("loaded from disk", _moved(disk.loaded_blocks, disk.loaded_bytes)),
            ("evicted disk blocks", f"{disk.evicted_blocks:,}"),
        ]
        if disk.rejected_blocks:
            rows.append(("blocks not admitted to disk", f"{disk.rejected_blocks:,}"))
    for point in report.write_policies or ():
        hits, moved = point.hit_tokens, point.traffic
        text = (
            f"hits {hits['total']:,} tokens ({point.hit_rate:.2%}; device {hits['device']:,}, "
            f"host {hits['host']:,}), copied to host memory "
            f"{moved.offloaded_bytes / 2**30:,.2f} GiB, "
            f"to the device {moved.onloaded_bytes / 2**30:,.2f} GiB, evicted device blocks "
            f"{point.evicted_blocks:,}, host blocks {moved.evicted_host_blocks:,}"
        )
        rows.append((point.write_policy, text))
    return rows


def _moved(blocks: int, num_bytes: int) -> str:
    return f"{blocks:,} blocks, {num_bytes / 2**30:,.2f} GiB"


def _latency_rows(report: ReplayReport) -> list[tuple[str, str]]:
    rows = []
    for name, times in report.latency_us.items():
        values = (format_seconds(us * 1e-6) for us in (times.p50, times.p99, times.max))
        rows.append((f"{name} p50 / p99 / max", " / ".join(values)))
    return rows


def _memory_rows(report: ReplayReport) -> list[tuple[str, str]]:
    memory = report.memory
    rows = [
        ("cached blocks", f"{memory.cached_blocks:,}"),
        ("index memory", f"{memory.index_bytes / 2**20:,.1f} MiB"),
        ("index memory per cached block", f"{memory.index_bytes_per_block:.1f} B"),
        ("token ids", f"{memory.token_bytes / 2**20:,.1f} MiB"),
        ("growth of resident memory", f"{memory.rss_delta_bytes / 2**20:,.1f} MiB"),
    ]
    if report.execute:
        rows.append(("blocks written", f"{report.execute.written_blocks:,}"))
        rows.append(("cached blocks verified", f"{report.execute.verified_blocks:,}"))
    return rows


def _speed(text: str) -> float | None:
    return None if text == "max" else positive_float(text)


def _capacities(text: str) -> list[int]:
    return [at_least(1)(part) for part in text.split(",")]
