"""Results of ``aiokv replay`` as rows of a name and a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.units import format_seconds
from aiokv.cli.sweep import sweep_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.trace.report import FleetReport, ReplayReport, UsersReport


def fleet_rows(report: FleetReport) -> Iterator[tuple[str, str]]:
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


def user_rows(report: UsersReport) -> Iterator[tuple[str, str]]:
    for point in report.orders:
        ratio = point.requests / max(1, report.orders[0].requests)
        text = f"{point.requests_per_hour:,.0f} requests per hour"
        if point is not report.orders[0]:
            text += f", {ratio:.2f} times those of {report.orders[0].admission}"
        yield point.admission, text
        waits = (point.wait_p50_seconds, point.wait_p95_seconds, point.wait_max_seconds)
        text = " / ".join(f"{seconds:,.0f} s" for seconds in waits)
        yield "  wait for the grant p50 / p95 / max", text
        yield "  longest overtaken", f"{point.longest_overtaken_seconds:,.0f} s"
        yield "  prompt tokens that hit", f"{point.hit_rate:.1%}"
        yield "  model busy", f"{point.model_busy:.0%}"
    yield "sessions of the trace", f"{report.sessions:,}"
    if report.rejected_requests:
        yield "requests larger than the device", f"{report.rejected_requests:,}"


def rows(report: ReplayReport, *, verbose: bool) -> list[tuple[str, str]]:
    """Return the hits and the traffic; with ``verbose``, also time and memory of the replay."""
    found = [
        ("requests", f"{report.requests:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
    ]
    if report.rejected_requests:
        found.append(("requests larger than the device", f"{report.rejected_requests:,}"))
    for tier, tokens in report.hit_tokens.items():
        share = tokens / report.prompt_tokens
        found.append((f"hit tokens, {tier}", f"{tokens:,} ({share:.2%})"))
    found.append(("evicted device blocks", f"{report.evicted_blocks:,}"))
    if report.failed_onloads:
        found.append(("failed onloads", f"{report.failed_onloads:,}"))
    found += _traffic_rows(report)
    for eviction in report.eviction_policies or ():
        text = (
            f"hits {eviction.hit_tokens['total']:,} tokens ({eviction.hit_rate:.2%}), on the "
            f"device {eviction.device_share_of_min:.3f} of the {eviction.min_hit_tokens:,} of MIN"
        )
        found.append((eviction.eviction_policy, text))
    found += sweep_rows(report.capacities or ())
    if report.execute:
        found.append(("blocks written", f"{report.execute.written_blocks:,}"))
        found.append(("cached blocks verified", f"{report.execute.verified_blocks:,}"))
    return found + (_own_rows(report) if verbose else [])


def _own_rows(report: ReplayReport) -> list[tuple[str, str]]:
    return [
        ("index CPU time", format_seconds(report.index_seconds)),
        ("requests per CPU second", f"{report.requests_per_second:,.0f}"),
        ("wall-clock time", format_seconds(report.wall_seconds)),
        *_latency_rows(report),
        *_memory_rows(report),
    ]


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
    return [
        ("cached blocks", f"{memory.cached_blocks:,}"),
        ("index memory", f"{memory.index_bytes / 2**20:,.1f} MiB"),
        ("index memory per cached block", f"{memory.index_bytes_per_block:.1f} B"),
        ("token ids", f"{memory.token_bytes / 2**20:,.1f} MiB"),
        ("growth of resident memory", f"{memory.rss_delta_bytes / 2**20:,.1f} MiB"),
    ]
