"""Print when the GPU copied and computed, from a trace of ``python -m bench.vllm --profile``.

``python -m bench.vllm.timeline TRACE.json.gz...`` prints the share of time in which the GPU
computes, copies, does both or is idle, and the intervals of each.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GAP_MS = 1.0  # shorter gaps between two intervals of a kind are not shown

Interval = tuple[float, float]


def main(argv: Sequence[str]) -> int:
    for name in argv:
        _print_trace(Path(name))
    return 0


def _print_trace(path: Path) -> None:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    by_kind: dict[str, list[Interval]] = {}
    for event in events:
        kind = _kind(event)
        if kind is not None:
            began = event["ts"] / 1e3
            by_kind.setdefault(kind, []).append((began, began + event["dur"] / 1e3))
    if not by_kind:
        print(f"{path.name}: no events of a GPU")
        return
    busy = {kind: merged(intervals) for kind, intervals in by_kind.items()}
    start = min(intervals[0][0] for intervals in busy.values())
    end = max(intervals[-1][1] for intervals in busy.values())
    print(f"{path.name}: {end - start:.0f} ms")
    for kind, intervals in sorted(busy.items()):
        print(
            f"  {kind:12} {total(intervals):8.1f} ms busy, {total(intervals) / (end - start):.2f}"
        )
    compute, onload = busy.get("compute", []), busy.get("onload", [])
    both = total(compute) + total(onload) - total(merged([*compute, *onload]))
    print(f"  compute and onload at once: {both:.1f} ms")
    neither = end - start - total(merged([*compute, *onload]))
    print(f"  neither: {neither:.1f} ms")
    for kind, intervals in sorted(busy.items()):
        shown = merged(intervals, _GAP_MS)
        text = " ".join(f"{a - start:.0f}-{b - start:.0f}" for a, b in shown if b - a > 0.2)
        print(f"  {kind}: {text}")


def _kind(event: dict[str, Any]) -> str | None:
    category, name = event.get("cat"), event.get("name", "")
    if category == "gpu_memcpy":
        if event.get("args", {}).get("bytes", 0) < 65_536:
            return None  # inputs and outputs of a step
        return "onload" if "HtoD" in name else "offload" if "DtoH" in name else "within"
    if category == "kernel":
        if "aiokv" not in name:
            return "compute"
        return "gather" if "gather" in name else "scatter"
    return None


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union of intervals; intervals with a gap of at most ``gap`` are joined."""
    result: list[Interval] = []
    for began, ended in sorted(intervals):
        if result and began <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((began, ended))
    return result


def total(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(ended - began for began, ended in intervals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
