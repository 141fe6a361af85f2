"""Hit tokens of ``adaptive`` over many capacities, compared with ``lru`` and with smaller caches.

Two properties, for each trace: ``adaptive`` hits at least 0.99 of ``lru`` at each capacity, and a
larger cache hits at least 0.97 of each smaller one. Capacities are no powers of two, and are given
in blocks of 512 tokens. Traces of ``AIOKV_TRACE`` are left out where they are missing; families are
generated with a seed on which no constant was chosen.

``python -m bench policy`` runs it. ``python -m bench.policy_sweep [--quick] [TRACE ...]`` runs it
alone, with other traces, and writes ``bench/results/policy_sweep.json``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from aiokv.trace.format import expand_tokens, read_trace
from bench import harness
from tests.harness.trace_families import FAMILIES, generate_family
from tests.harness.traces import find_traces, hit_tokens, trace_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.trace.format import TraceRequest

CAPACITIES: Final = 24
SEED: Final = 200
TRACE_RANGE: Final = (300, 16_000)
FAMILY_RANGE: Final = (70, 7_000)
# Prompts of a larger trace are expanded for each capacity, and cached in blocks of 512 tokens.
MAX_TOKENS_IN_MEMORY: Final = 1 << 28
LEAST_LRU_RATIO: Final = 0.99
LEAST_SMALLER_RATIO: Final = 0.97


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_sweep", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, default=find_traces(), metavar="TRACE")
    parser.add_argument("--quick", action="store_true", help="smaller inputs, less exact results")
    args = parser.parse_args()
    results = run(args.quick, args.traces)
    measured = harness.Run(machine=harness.machine(), benches={"policy_sweep": results})
    harness.save_each(measured, measured.benches)


def run(quick: bool, traces: Sequence[Path]) -> dict[str, Any]:
    """Print a table per trace; return the rows, and the least ratios of each trace."""
    count = 3 if quick else CAPACITIES
    results = {}
    for path in traces:
        requests = read_trace(path, 1_000 if quick else None)
        capacities = capacities_between(*TRACE_RANGE, count)
        name = path.name.partition(".")[0]
        if sum(request.input_tokens for request in requests) > MAX_TOKENS_IN_MEMORY:
            results[name] = _sweep(name, _Expanded(requests), capacities, 512)
        else:
            results[name] = _sweep(name, trace_prompts(requests), capacities, 16)
    for name in FAMILIES:
        prompts = trace_prompts(generate_family(name, 300 if quick else 6_000, seed=SEED))
        capacities = capacities_between(*FAMILY_RANGE, count)
        results[name] = _sweep(name, prompts, capacities, 64)
    return results


class _Expanded:
    """Prompts of a trace that does not fit the memory as a whole."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return map(expand_tokens, self._requests)


def capacities_between(least: int, most: int, count: int) -> list[int]:
    """Return ``count`` capacities in geometric steps, none of them a power of two."""
    steps = (least * (most / least) ** (i / (count - 1)) for i in range(count))
    return [n + 1 if n.bit_count() == 1 else n for n in map(round, steps)]


def _sweep(
    name: str, prompts: Iterable[NDArray[np.int32]], capacities: Sequence[int], block_tokens: int
) -> dict[str, Any]:
    rows = []
    most = 0  # hits of the best smaller cache
    for capacity in capacities:
        lru = hit_tokens(prompts, capacity, "lru", block_tokens)
        adaptive = hit_tokens(prompts, capacity, "adaptive", block_tokens)
        rows.append(
            {
                "capacity": capacity,
                "lru_hit_tokens": lru,
                "adaptive_hit_tokens": adaptive,
                "lru_ratio": adaptive / lru if lru else None,
                "smaller_ratio": adaptive / most if most else None,
            }
        )
        most = max(most, adaptive)
    Console(width=100, highlight=False).print(_table(name, rows, block_tokens))
    return {
        "block_tokens": block_tokens,
        "least_lru_ratio": _least(rows, "lru_ratio"),
        "least_smaller_ratio": _least(rows, "smaller_ratio"),
        "rows": rows,
    }


def _least(rows: Sequence[dict[str, Any]], column: str) -> float | None:
    return min((row[column] for row in rows if row[column] is not None), default=None)


def _table(name: str, rows: Sequence[dict[str, Any]], block_tokens: int) -> Table:
    table = Table(title=f"{name}, blocks of {block_tokens} tokens")
    for column in ("512-token blocks", "lru", "adaptive", "/ lru", "/ best smaller", "monotone"):
        table.add_column(column, justify="right")
    for row in rows:
        smaller = row["smaller_ratio"]
        table.add_row(
            f"{row['capacity']:,}",
            f"{row['lru_hit_tokens']:,}",
            f"{row['adaptive_hit_tokens']:,}",
            _ratio(row["lru_ratio"], LEAST_LRU_RATIO),
            _ratio(smaller, LEAST_SMALLER_RATIO),
            "yes" if smaller is None or smaller >= LEAST_SMALLER_RATIO else "no",
        )
    return table


def _ratio(ratio: float | None, least: float) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.3f}" if ratio >= least else f"[red]{ratio:.3f}[/red]"


if __name__ == "__main__":
    main()
