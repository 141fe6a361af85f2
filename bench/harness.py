"""Helpers of all benches: the machine, result files, and the comparison of two runs.

A bench returns a (nested) dict of numbers. The unit at the end of a name sets the better direction,
so a comparison needs no table of its own: ``requests_per_second`` up, ``aclose_seconds`` down.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tests.harness.traces import find_trace as find_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

_HIGHER = "per_second|ratio|gbps"
_LOWER = "seconds|ms|us|ns|share|per_block"
# One slow wake-up moves these by any factor; they are shown and never compared.
_TAIL = "p99|p999|max"

Better = Literal["higher", "lower"]


class Run(msgspec.Struct, kw_only=True):
    """Content of ``bench/results/*.json``."""

    machine: dict[str, str]
    benches: dict[str, dict[str, Any]]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One metric in two runs; ``ratio`` is new / old."""

    metric: str
    old: float
    new: float
    worse: bool

    @property
    def ratio(self) -> float:
        return self.new / self.old if self.old else math.inf


def machine() -> dict[str, str]:
    """Return the properties of the machine and the build that affect results."""
    import uvloop

    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "uvloop": uvloop.__version__,
        "compiler": _first_line("c++", "--version"),
        "revision": _first_line("git", "describe", "--always", "--dirty"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0]


def flatten(results: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested dict under dotted names; other values are left out."""
    flat: dict[str, float] = {}
    for key, value in results.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = value
    return flat


def better(metric: str) -> Better | None:
    """Return the better direction by the unit in the name; None when the metric is not compared."""
    *groups, name = metric.split(".")
    if _has_word(_TAIL, name):
        return None
    # In "wake_us.p50" the unit is in an outer key.
    for part in (name, *reversed(groups)):
        if _has_word(_HIGHER, part):
            return "higher"
        if _has_word(_LOWER, part):
            return "lower"
    return None


def _has_word(words: str, name: str) -> bool:
    return re.search(f"(^|_)({words})(_|$)", name) is not None


def compare(old: Run, new: Run, noise: float) -> list[Change]:
    """Return a comparison per metric of both runs; worse after a loss beyond ``noise`` (0 to 1)."""
    changes = []
    before = flatten(old.benches)
    for metric, value in flatten(new.benches).items():
        if metric in before:
            worse = _is_worse(better(metric), before[metric], value, noise)
            changes.append(Change(metric=metric, old=before[metric], new=value, worse=worse))
    return changes


def _is_worse(direction: Better | None, old: float, new: float, noise: float) -> bool:
    if direction == "higher":
        return new * (1 + noise) < old
    if direction == "lower":
        return new > old * (1 + noise)
    return False


def save(run: Run, path: Path) -> None:
    """Write a run as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")


def save_each(run: Run, names: Iterable[str]) -> None:
    """Write ``bench/results/<name>.json`` for each bench."""
    for name in names:
        one = Run(machine=run.machine, benches={name: run.benches[name]})
        save(one, RESULTS / f"{name}.json")


def load(path: Path) -> Run:
    """Read a run; raises ``OSError`` or ``msgspec.DecodeError``."""
    return msgspec.json.decode(path.read_bytes(), type=Run)
