"""Output of the demo: one row per measure, one column per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import rich.box
from rich.table import Table

from aiokv.errors import UsageError
from aiokv.observe.units import format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from aiokv.demo.ledger import Comparison


class ReusedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens found in the cache, by the tier that had them."""

    device: int
    host: int
    total: int


class Percentiles(msgspec.Struct, frozen=True):
    """Median and 99th percentile; None when nothing was measured."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: list[float]) -> Percentiles:
        if not values:
            return cls(None, None)
        p50, p99 = np.percentile(values, (50, 99))
        return cls(round(float(p50), 3), round(float(p99), 3))


class Traffic(msgspec.Struct, frozen=True):
    """Bytes moved in one direction, and how long it was busy with them."""

    transfers: int
    bytes: int
    busy_seconds: float
    gigabytes_per_second: float | None


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the workload; the names are the keys of ``--json``."""

    name: str
    label: str
    device_blocks: int
    host_blocks: int
    seconds: float
    requests: int
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: ReusedTokens
    repeated_tokens: int
    generated_tokens: int
    preemptions: int
    disconnections: int
    failed_onloads: int
    steps: int
    compute_seconds: float
    ttft_ms: Percentiles
    capacity_wait_ms: Percentiles
    onload: Traffic
    offload: Traffic
    layer_wait_ms: float
    wakeup_us: Percentiles
    rows_not_finite: int
    corrupted: str
    compared: Comparison | None

    @property
    def equal(self) -> bool:
        return self.compared is None or self.compared.equal


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

    @property
    def equal(self) -> bool:
        return self.tokens_equal and self.logits_equal and self.blocks_equal

    @property
    def rows_not_finite(self) -> int:
        """Rows of logits of the reference that hold NaN or infinity; they compare as equal bits."""
        return self.runs[0].rows_not_finite

    def write(self, path: Path) -> None:
        """Write as JSON.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


Cell = Callable[[RunResult], str]

ROWS: tuple[tuple[str, Cell], ...] = (
    ("device / host blocks", lambda run: f"{run.device_blocks:,} / {run.host_blocks:,}"),
    ("prompt tokens", lambda run: f"{run.prompt_tokens:,}"),
    ("  computed", lambda run: _share(run.computed_tokens, run.prompt_tokens)),
    ("  reused, device", lambda run: _share(run.reused_tokens.device, run.prompt_tokens)),
    ("  reused, host", lambda run: _share(run.reused_tokens.host, run.prompt_tokens)),
    ("computed again, preempted", lambda run: f"{run.repeated_tokens:,} ({run.preemptions:,}x)"),
    ("disconnected and sent again", lambda run: f"{run.disconnections:,}x"),
    ("generated tokens", lambda run: f"{run.generated_tokens:,}"),
    ("time to first token, p50 / p99", lambda run: _pair(run.ttft_ms, 1e-3)),
    ("waited for blocks, p50 / p99", lambda run: _pair(run.capacity_wait_ms, 1e-3)),
    ("onload", lambda run: _traffic(run.onload)),
    ("offload", lambda run: _traffic(run.offload)),
    ("runner waited for layers", lambda run: format_seconds(run.layer_wait_ms * 1e-3)),
    ("wake-up latency, p50 / p99", lambda run: _pair(run.wakeup_us, 1e-6)),
    ("run time", lambda run: format_seconds(run.seconds)),
    ("tokens equal", lambda run: _tokens_verdict(run.compared)),
    ("logits equal, bit for bit", lambda run: _logits_verdict(run.compared)),
    ("cached blocks hold what was computed", lambda run: _blocks_verdict(run.compared)),
)


def print_table(console: Console, result: DemoResult) -> None:
    table = Table(title=result.workload, caption=result.model, box=rich.box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for run in result.runs:
        table.add_column(run.label, justify="right")
    for title, cell in ROWS:
        table.add_row(title, *(cell(run) for run in result.runs))
    console.print(table)


def _share(tokens: int, total: int) -> str:
    return f"{tokens:,} ({tokens / total:.0%})"


def _pair(values: Percentiles, unit_seconds: float) -> str:
    if values.p50 is None or values.p99 is None:
        return "-"
    p50, p99 = (format_seconds(value * unit_seconds) for value in (values.p50, values.p99))
    return f"{p50} / {p99}"


def _traffic(traffic: Traffic) -> str:
    speed = traffic.gigabytes_per_second
    return "-" if speed is None else f"{traffic.bytes / 1e6:,.1f} MB at {speed:.1f} GB/s"


def _tokens_verdict(compared: Comparison | None) -> str:
    if compared is None:
        return "reference"
    if compared.tokens_different:
        return f"NO: {compared.tokens_different:,} of {compared.tokens_compared:,}"
    return f"yes, {compared.tokens_compared:,}"


def _logits_verdict(compared: Comparison | None) -> str:
    if compared is None:
        return "reference"
    if compared.rows_different:
        return f"NO: {compared.rows_different:,} of {compared.rows_compared:,} rows"
    return f"yes, {compared.rows_compared:,} rows"


def _blocks_verdict(compared: Comparison | None) -> str:
    if compared is None:
        return "reference"
    if compared.blocks_wrong:
        return f"NO: {compared.blocks_wrong:,} of {compared.blocks_read:,} read"
    return f"yes, {compared.blocks_read:,} read"
