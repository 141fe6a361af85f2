"""``aiokv replay TRACE``: the prompt tokens that a cache of a given size saves on a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.cli.arguments import (
    SAVING_POLICIES,
    add_choice,
    add_count,
    add_option,
    add_trace,
    from_arguments,
    positive_float,
    trace_path,
)
from aiokv.cli.replay_rows import fleet_rows, rows, user_rows
from aiokv.cli.rows import print_rows
from aiokv.cli.sweep import add_arguments, add_plot, block_bytes, check_plot, sweep_of, write_plot
from aiokv.config.cache_config import (
    ADMISSION_ORDERS,
    DEFAULT_EVICTION_POLICY,
    EVICTION_POLICIES,
)
from aiokv.errors import UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterable

    from aiokv import CacheEngine
    from aiokv.cli.progress import Stages
    from aiokv.statistics import Observation
    from aiokv.trace.disk_tier import DiskOptions
    from aiokv.trace.replay import ReplayOptions, Workload
    from aiokv.trace.report import FleetReport, ReplayReport, UsersReport
    from aiokv.trace.router import RouterName

R = TypeVar("R")

ROUTERS: tuple[RouterName, ...] = ("prefix", "round-robin")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay a Mooncake trace and report the hits",
        description="Replay a trace in the public Mooncake format (one JSON object per line).",
    )
    add_trace(parser)
    _add_cache(parser.add_argument_group("cache"))
    add_arguments(parser.add_argument_group("sizes to compare"))
    _add_disk(parser.add_argument_group("simulated disk"))
    _add_load(parser.add_argument_group("load"))
    _add_fleet(parser.add_argument_group("several engines"))
    _add_users(parser.add_argument_group("users in simulated time"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result as JSON to this file"
    )
    output.add_argument(
        "--verbose",
        action="store_true",
        help="also print the time and the memory of the replay itself",
    )
    add_plot(output)
    output.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.json[.gz]",
        help="write transfers, waits and leases as a trace for ui.perfetto.dev: the newest 65,536 "
        "of each; recording adds to the latencies",
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--block-tokens", 16, "tokens per block")
    add_count(group, "--device-blocks", 32_000, "capacity of the device tier in blocks")
    add_count(group, "--host-blocks", 0, "capacity of the host tier in blocks; 0: none", minimum=0)
    text = "when to copy blocks to host memory; all: compare the three copying policies"
    add_choice(group, "--write-policy", (*SAVING_POLICIES, "none", "all"), text)
    text = "which blocks to evict first; all: compare the policies with each other and with MIN"
    add_choice(
        group, "--eviction-policy", (*EVICTION_POLICIES, "all"), text, DEFAULT_EVICTION_POLICY
    )


def _add_disk(group: argparse._ArgumentGroup) -> None:
    add_count(
        group,
        "--disk-blocks",
        0,
        "capacity in blocks of a simulated disk below the host tier; 0: none",
        minimum=0,
    )
    text = "when to save blocks on the disk: write_through or nth_use:N, such as nth_use:2"
    add_option(group, "--disk-policy", _disk_policy, "write_through", text, "POLICY")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--concurrency", 1, "leases held at once")
    text = "max: as fast as possible; X: X times as fast as the timestamps"
    add_option(group, "--speed", _speed, "max", text, "max|X")
    text = "with --speed X: milliseconds that a request holds its blocks per output token"
    add_option(group, "--token-ms", positive_float, 20.0, text, "MS")
    group.add_argument(
        "--execute", action="store_true", help="move real bytes on the cpu device, and check them"
    )
    add_count(group, "--execute-mib", 256, "with --execute: MiB of both tiers together", "MIB")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--engines", 1, "engines behind a router, each with --device-blocks")
    add_choice(
        group,
        "--router",
        ("all", *ROUTERS),
        "with --engines: prefix chooses the engine with the shortest expected time to first token; "
        "all: compare the routers",
    )
    text = "with --engines: prompt tokens that an engine computes per second of the trace"
    add_option(group, "--tokens-per-second", positive_float, 10_000.0, text, "X")


def _add_users(group: argparse._ArgumentGroup) -> None:
    text = "users that send the next request of a session after each answer; 0: replay the trace"
    add_count(group, "--users", 0, text, minimum=0)
    text = "with --users: order of the requests that wait beyond --concurrency; all: compare both"
    add_choice(group, "--admission", ("all", *ADMISSION_ORDERS), text)
    for flag, default, text, metavar in (
        ("--max-overtake", 600.0, "seconds that a request may be overtaken", "SECONDS"),
        ("--hours", 4.0, "simulated time", "H"),
        ("--prefill-speed", 47_000.0, "prompt tokens that the model computes per second", "X"),
        ("--decode-speed", 500.0, "output tokens per second, of all requests together", "X"),
        ("--link-gb", 25.0, "GB per second from host memory to the device", "X"),
    ):
        add_option(group, flag, positive_float, default, f"with --users: {text}", metavar)


def run(args: argparse.Namespace) -> int:
    """Run the replay; print the result on stdout and progress on stderr.

    Returns:
        The exit status.

    Raises:
        AiokvError: see :func:`aiokv.trace.replay.replay`; or an output file cannot be written.
    """
    from aiokv.cli.files import check_writable

    for path in (args.json, args.plot, args.timeline):
        check_writable(path)
    check_plot(args.plot)
    if args.engines > 1:
        fleet = _with_progress(_replay_fleet, args)
        _write(fleet, fleet_rows(fleet), args.json)
    elif args.users:
        import uvloop

        from aiokv.testing.clock import clocked_loop

        users = _with_progress(_replay_users, args, "percent", clocked_loop(uvloop.Loop))
        _write(users, user_rows(users), args.json)
    else:
        report = _with_progress(_replay, args)
        _write(report, rows(report, verbose=args.verbose), args.json)
        if args.plot:
            write_plot(args.plot, report)
    return 0


def _with_progress(
    replay: Callable[[argparse.Namespace, Stages], Coroutine[Any, Any, R]],
    args: argparse.Namespace,
    unit: str = "requests",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> R:
    from aiokv.cli.progress import show_progress
    from aiokv.cli.running import run_async

    with show_progress(unit, sys.stderr) as stages:
        return run_async(replay(args, stages), loop_factory)


def _write(
    report: ReplayReport | FleetReport | UsersReport,
    lines: Iterable[tuple[str, str]],
    json: Path | None,
) -> None:
    from aiokv.cli.files import write_json

    # First: a file that cannot be written must not cost the work.
    print_rows(f"replay of {Path(report.trace).name}", lines)
    if json:
        write_json(json, report)


async def _replay_users(args: argparse.Namespace, stages: Stages) -> UsersReport:
    from aiokv.trace.replay import load_workload
    from aiokv.trace.users import UserOptions, replay_users

    _refuse_comparisons(args, f"--users is {args.users}", "--users")
    workload = load_workload(trace_path(args.trace), args.limit)
    users = UserOptions(
        users=args.users,
        admission=ADMISSION_ORDERS if args.admission == "all" else (args.admission,),
        max_overtake_seconds=args.max_overtake,
        seconds=args.hours * 3600,
        prefill_tokens_per_second=args.prefill_speed,
        decode_tokens_per_second=args.decode_speed,
        link_bytes_per_second=args.link_gb * 1e9,
    )
    return await replay_users(workload, _make_options(args), users, stages)


def _refuse_comparisons(args: argparse.Namespace, given: str, flag_to_leave: str) -> None:
    """Raise ``UsageError`` for flags of a replay that compares, plots or records one engine."""
    unusable = {
        "--write-policy all": args.write_policy == "all",
        "--eviction-policy all": args.eviction_policy == "all",
        "--disk-blocks": args.disk_blocks > 0,
        "--capacities": args.capacities is not None,
        "--host-capacities": args.host_capacities is not None,
        "--disk-capacities": args.disk_capacities is not None,
        "--plot": args.plot is not None,
        "--timeline": args.timeline is not None,
    }
    for flag, is_set in unusable.items():
        if is_set:
            raise UsageError(
                f"{given} with {flag}, which replays the trace on one engine",
                hint=f"leave out {flag} or {flag_to_leave}",
            )


async def _replay_fleet(args: argparse.Namespace, stages: Stages) -> FleetReport:
    from aiokv.trace.fleet import FleetOptions, replay_fleet
    from aiokv.trace.replay import load_workload

    _refuse_comparisons(args, f"--engines is {args.engines}", "--engines")
    workload = load_workload(trace_path(args.trace), args.limit)
    routers = ROUTERS if args.router == "all" else (args.router,)
    fleet = from_arguments(FleetOptions, args, routers=routers)
    return await replay_fleet(workload, _make_options(args), fleet, stages)


async def _replay(args: argparse.Namespace, stages: Stages) -> ReplayReport:
    from aiokv.trace.replay import (
        check_sweep,
        compare_evictions,
        compare_policies,
        doubling_capacities,
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
    sweep = sweep_of(args)
    if sweep is not None:
        check_sweep(options, sweep.host, sweep.disk)
    workload = load_workload(trace_path(args.trace), args.limit)
    if args.write_policy == "all":
        report, points = await compare_policies(workload, options, stages)
        report.write_policies = points
    elif args.eviction_policy == "all":
        report, evictions = await compare_evictions(workload, options, stages)
        report.eviction_policies = evictions
    else:
        report = await _replay_once(workload, options, stages, args.timeline)
    if sweep is not None:
        report.capacities = await sweep_capacities(
            workload,
            options,
            sweep.device or doubling_capacities(workload, options.block_tokens),
            stages,
            host_blocks=sweep.host,
            disk_blocks=sweep.disk,
        )
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
        observations.append(engine.inspect.observing())
        return observations[-1]

    report = await replay(workload, options, stages, observe)
    write_timeline(timeline, observations[0].timeline())
    return report


def _make_options(args: argparse.Namespace) -> ReplayOptions:
    from aiokv.trace.replay import ReplayOptions

    chosen = {
        name: policy
        for name, policy in (
            ("write_policy", SAVING_POLICIES[0]),
            ("eviction_policy", DEFAULT_EVICTION_POLICY),
        )
        if getattr(args, name) == "all"
    }
    return from_arguments(
        ReplayOptions,
        args,
        block_bytes=block_bytes(args),
        token_seconds=args.token_ms / 1e3,
        execute_bytes=args.execute_mib << 20,
        disk=_disk_options(args),
        latencies=bool(args.verbose or args.json or args.timeline),
        **chosen,
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
    return DiskOptions(blocks=args.disk_blocks, policy=args.disk_policy)


def _disk_policy(text: str) -> str:
    from aiokv.config.save_policy import SavePolicy
    from aiokv.trace.disk_tier import DISK_POLICIES

    try:
        return str(SavePolicy.parse("the policy", text, DISK_POLICIES))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _speed(text: str) -> float | None:
    return None if text == "max" else positive_float(text)
