"""``aiokv explain``: why prompt tokens of a recorded trace were not hit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiokv.cli.arguments import add_choice, add_count, add_trace, trace_path
from aiokv.cli.rows import print_rows
from aiokv.config.cache_config import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from aiokv.trace.explain import MissReport


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say why prompt tokens of a recorded trace were not hit",
        description="Serve the requests of a trace one after the other, and report the causes of "
        "the missed blocks, and the requests that missed most. See Lease.missed for the causes.",
    )
    add_trace(parser)
    add_count(parser, "--block-tokens", 16, "tokens per block")
    add_count(parser, "--device-blocks", 32_000, "capacity of the device tier in blocks")
    add_count(parser, "--host-blocks", 0, "capacity of the host tier in blocks; 0: none", minimum=0)
    text = "which blocks to evict first"
    add_choice(parser, "--eviction-policy", EVICTION_POLICIES, text, DEFAULT_EVICTION_POLICY)
    text = "evicted blocks to remember; 0: as many as both tiers have"
    add_count(parser, "--miss-history-blocks", 0, text, minimum=0)
    add_count(parser, "--largest", 10, "requests to list, those with the most missed tokens")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result as JSON to this file"
    )


def run(args: argparse.Namespace) -> int:
    """Print the causes and the requests with the largest misses.

    Returns:
        The exit status.

    Raises:
        AiokvError: the trace cannot be read, no request fits the device, or the file cannot be
            written.
    """
    from aiokv import CacheConfig
    from aiokv.cli.files import check_writable, write_json
    from aiokv.cli.running import run_async
    from aiokv.trace.explain import explain
    from aiokv.trace.format import stream_trace

    check_writable(args.json)
    config = CacheConfig(
        block_tokens=args.block_tokens,
        device_blocks=args.device_blocks,
        host_blocks=args.host_blocks,
        eviction_policy=args.eviction_policy,
        miss_history_blocks=args.miss_history_blocks or args.device_blocks + args.host_blocks,
        strict=False,  # no model computes
    )
    requests = stream_trace(trace_path(args.trace), args.limit)
    report = run_async(explain(requests, config, args.largest))
    print_rows(f"misses of {Path(args.trace).name}", _rows(report, args.block_tokens))
    if args.json:
        write_json(args.json, report)
    return 0


def _rows(report: MissReport, block_tokens: int) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.requests:,}"
    if report.rejected_requests:
        yield "requests larger than the device", f"{report.rejected_requests:,}"
    yield "prompt tokens", f"{report.prompt_tokens:,}"
    yield "hit tokens", _share(report.hit_tokens, report.prompt_tokens)
    for cause, tokens in sorted(report.missed_tokens.items(), key=lambda each: -each[1]):
        if tokens:
            share = _share(tokens, report.prompt_tokens)
            yield f"missed tokens, {cause}", f"{share} in {tokens // block_tokens:,} blocks"
    for request in report.largest:
        causes = ", ".join(f"{cause} {n:,}" for cause, n in request.missed_tokens.items())
        name = f"request {request.number:,} at {request.timestamp_ms / 1e3:,.0f} s"
        yield name, f"{request.prompt_tokens:,} prompt tokens, missed: {causes}"


def _share(tokens: int, of: int) -> str:
    return f"{tokens:,} ({tokens / of:.2%})"
