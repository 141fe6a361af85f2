"""Results of the demo, and their table: one row per measure, one column per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import rich.box
from rich.table import Table

from aiokv.base.percentiles import percentile
from aiokv.base.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from aiokv.demo.ledger import Comparison
    from aiokv.demo.requests import Request
    from aiokv.demo.split_report import SplitResult


class ReusedTokens(msgspec.Struct):
    """Prompt tokens found in the cache, by the tier that had them."""

    device: int = 0
    host: int = 0
    store: int = 0
    total: int = 0


class Percentiles(msgspec.Struct, frozen=True):
    """Median and 99th percentile; None when nothing was measured."""

    p50: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: list[float], scale: float) -> Percentiles:
        """Return the percentiles of ``values``, each multiplied by ``scale``."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(round(scale * percentile(ordered, percent), 3) for percent in (50, 99)))


class Traffic(msgspec.Struct, frozen=True):
    """Bytes moved in one direction, and the time that it took."""

    transfers: int
    bytes: int
    busy_seconds: float
    gigabytes_per_second: float | None


class ServingStatistics(msgspec.Struct, kw_only=True):
    """Sums over a run. Each prompt token is reused from one tier, received or computed, once.

    Attributes:
        computed_tokens: prompt tokens that the model computed because no tier had them.
        received_tokens: prompt tokens that another server has computed and sent.
        layer_wait_ms: time in which the runner waited for layers from the host.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: ReusedTokens = msgspec.field(default_factory=ReusedTokens)
    received_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    disconnections: int = 0
    failed_onloads: int = 0
    steps: int = 0
    compute_seconds: float = 0.0
    layer_wait_ms: float = 0.0

    def add(self, request: Request) -> None:
        """Count a request that has ended."""
        reused, (device, host, store) = self.reused_tokens, request.reused_tokens
        self.requests += 1
        self.prompt_tokens += request.prompt_length
        received = request.received_tokens
        self.computed_tokens += request.prompt_length - device - host - store - received
        self.received_tokens += received
        reused.device += device
        reused.host += host
        reused.store += store
        reused.total += device + host + store
        self.generated_tokens += len(request.generated)


class RunResult(ServingStatistics, kw_only=True):
    """One run of the workload; the names are the keys of ``--json``."""

    name: str
    label: str
    device_blocks: int
    host_blocks: int
    seconds: float
    repeated_tokens: int
    ttft_ms: Percentiles
    capacity_wait_ms: Percentiles
    onload: Traffic
    offload: Traffic
    fetch: Traffic
    save: Traffic
    wakeup_us: Percentiles
    rows_not_finite: int
    corrupted: str
    compared: Comparison | None


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one demo."""

    tokens_equal: bool
    logits_equal: bool
    blocks_equal: bool
    workload: str
    model: str
    runs: list[RunResult]

    @classmethod
    def of(cls, runs: list[RunResult], *, workload: str, model: str) -> DemoResult:
        compared = [run.compared for run in runs if run.compared is not None]
        return cls(
            tokens_equal=all(comparison.tokens_different == 0 for comparison in compared),
            logits_equal=all(comparison.rows_different == 0 for comparison in compared),
            blocks_equal=all(comparison.blocks_wrong == 0 for comparison in compared),
            workload=workload,
            model=model,
            runs=runs,
        )


Cell = Callable[[RunResult], str]

ROWS: tuple[tuple[str, Cell], ...] = (
    ("device / host blocks", lambda run: f"{run.device_blocks:,} / {run.host_blocks:,}"),
    ("prompt tokens", lambda run: f"{run.prompt_tokens:,}"),
    ("  computed", lambda run: format_share(run.computed_tokens, run)),
    ("  reused, device", lambda run: format_share(run.reused_tokens.device, run)),
    ("  reused, host", lambda run: format_share(run.reused_tokens.host, run)),
    ("  reused, store", lambda run: format_share(run.reused_tokens.store, run)),
    ("computed again, preempted", lambda run: f"{run.repeated_tokens:,} ({run.preemptions:,}x)"),
    ("disconnected and sent again", lambda run: f"{run.disconnections:,}x"),
    ("generated tokens", lambda run: f"{run.generated_tokens:,}"),
    ("time to first token, p50 / p99", lambda run: format_pair(run.ttft_ms, 1e-3)),
    ("waited for blocks, p50 / p99", lambda run: format_pair(run.capacity_wait_ms, 1e-3)),
    ("onload", lambda run: _traffic(run.onload)),
    ("offload", lambda run: _traffic(run.offload)),
    ("loaded from the store", lambda run: _traffic(run.fetch)),
    ("saved to the store", lambda run: _traffic(run.save)),
    ("runner waited for layers", lambda run: format_seconds(run.layer_wait_ms * 1e-3)),
    ("wake-up latency, p50 / p99", lambda run: format_pair(run.wakeup_us, 1e-6)),
    ("run time", lambda run: format_seconds(run.seconds)),
)

COMPARISONS: tuple[tuple[str, Callable[[Comparison], str]], ...] = (
    ("tokens equal", lambda found: _verdict(found.tokens_different, found.tokens_compared)),
    (
        "logits equal, bit for bit",
        lambda found: _verdict(found.rows_different, found.rows_compared, " rows"),
    ),
    (
        "cached blocks hold what was computed",
        lambda found: _verdict(found.blocks_wrong, found.blocks_read, " read"),
    ),
)


def print_table(console: Console, result: DemoResult) -> None:
    """Print all measures of all runs."""
    rows = [(title, *(cell(run) for run in result.runs)) for title, cell in ROWS]
    found = [run.compared for run in result.runs]
    for title, verdict in COMPARISONS:
        rows.append((title, *("reference" if one is None else verdict(one) for one in found)))
    print_columns(console, result, [run.label for run in result.runs], rows)


def print_columns(
    console: Console,
    result: DemoResult | SplitResult,
    labels: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    """Print a table: each row is its title and its cells; "-" stands for those that it lacks."""
    table = Table(title=result.workload, caption=result.model, box=rich.box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for label in labels:
        table.add_column(label, justify="right")
    for title, *cells in rows:
        table.add_row(title, *cells, *["-"] * (len(labels) - len(cells)))
    console.print(table)


def format_share(tokens: int, run: ServingStatistics) -> str:
    """Return tokens, and their share of the prompt tokens."""
    return f"{tokens:,} ({tokens / max(1, run.prompt_tokens):.0%})"


def format_pair(values: Percentiles, unit_seconds: float) -> str:
    """Return the median and the 99th percentile as times."""
    if values.p50 is None or values.p99 is None:
        return "-"
    return " / ".join(format_seconds(value * unit_seconds) for value in (values.p50, values.p99))


def _traffic(traffic: Traffic) -> str:
    speed = traffic.gigabytes_per_second
    return "-" if speed is None else f"{traffic.bytes / 1e6:,.1f} MB at {speed:.1f} GB/s"


def _verdict(wrong: int, total: int, unit: str = "") -> str:
    """Return "yes" with the number compared, or "NO" with the number of differences."""
    return f"NO: {wrong:,} of {total:,}{unit}" if wrong else f"yes, {total:,}{unit}"
