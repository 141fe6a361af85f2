"""Run the benches: one table with the machine in it, JSON in ``bench/results/``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench import harness

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHES = (
    "index",
    "index_ratio",
    "miss_history",
    "digest",
    "policy",
    "output_labels",
    "write_budget",
    "two_tiers",
    "wakeup",
    "transfer",
    "serving",
    "admission",
    "fetch_or_compute",
    "cancel_storm",
    "shutdown",
    "ranks",
    "loop_held",
    "reset",
    "sync",
    "steps",
    "fastdeploy",
    "peer_layouts",
    "peers_transports",
    "disk_io",
    "disk",
    "host_store",
    "redis_store",
    "store_misses",
    "remote_stores",
    "s3_requests",
    "peers_tcp",
    "peers",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    earlier = harness.load(args.compare) if args.compare else None
    run = harness.Run(machine=harness.machine(), benches={})
    for name in args.benches or BENCHES:
        started = time.perf_counter()
        run.benches[name] = importlib.import_module(f"bench.{name}").run(args.quick)
        print(f"bench: {name} took {time.perf_counter() - started:.1f} s", file=sys.stderr)
    harness.save_each(run, run.benches)
    if args.save:
        harness.save(run, args.save)
    console.print(_results_table(run))
    if earlier is None:
        return 0
    changes = harness.compare(earlier, run, args.noise)
    console.print(_changes_table(changes, earlier, args.noise))
    return 1 if any(change.worse for change in changes) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "benches",
        nargs="*",
        metavar="BENCH",
        help=f"benches to run, of {', '.join(BENCHES)}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="smaller inputs, less exact results")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="compare with a saved run; exit 1 if worse"
    )
    parser.add_argument(
        "--noise", type=float, default=0.25, help="relative loss that counts as equal (%(default)s)"
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.benches) - set(BENCHES)):
        parser.error(f"unknown bench: {', '.join(unknown)}; choose from {', '.join(BENCHES)}")
    return args


def _results_table(run: harness.Run) -> Table:
    machine = ", ".join(f"{key} {value}" for key, value in run.machine.items())
    table = Table("bench", "metric", title="aiokv benches", caption=machine)
    table.add_column("value", justify="right")
    for name, results in run.benches.items():
        for metric, value in harness.flatten(results).items():
            table.add_row(name, metric, _number(value))
        table.add_section()
    return table


def _changes_table(changes: Sequence[harness.Change], old: harness.Run, noise: float) -> Table:
    title = f"compared with {old.machine.get('revision', 'unknown')} (new / old, noise {noise:.0%})"
    table = Table("metric", title=title)
    for column in ("old", "new", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for change in changes:
        ratio = f"{change.ratio:.2f}"
        verdict = "[red]worse[/red]" if change.worse else ""
        table.add_row(change.metric, _number(change.old), _number(change.new), ratio, verdict)
    return table


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
