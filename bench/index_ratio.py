"""CPU time per request of the prefix index, beside that of an older checkout in the same run.

``AIOKV_BASELINE=OLD/.venv/bin/python python -m bench index_ratio`` runs ``bench/index_loop.py``
with both Pythons by turns, for the public trace at three capacities, and for prompts that leave a
common one at every block, each with a new block and a token (``forks``). ``requests_per_second``
and ``native_us`` are medians of the rounds. ``ratio`` and ``native_ratio`` are medians of the
quotients of a round, which a machine of varying speed changes least; above 1, the older one is
slower. Without ``AIOKV_BASELINE``, the same checkout runs twice.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.config.cache_config import EVICTION_POLICIES
from aiokv.trace.format import HASH_BLOCK_TOKENS
from aiokv.trace.replay import load_workload
from bench.harness import find_trace
from bench.index_loop import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPACITIES = (32_000, 320_000, 1_600_000)
ROUNDS = 5
FORKS = 256  # blocks of the common prompt
PROMPTS_PER_FORK = 24


def run(quick: bool) -> dict[str, Any]:
    baseline = os.environ.get("AIOKV_BASELINE")
    rounds = 1 if quick or baseline is None else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        forks = Path(folder, "forks.npz")
        write_forks(forks, 1 if quick else PROMPTS_PER_FORK)
        loads = {"forks": (forks, CAPACITIES[0])}
        if not quick and find_trace() is not None:
            trace = Path(folder, "trace.npz")
            write_trace(trace, find_trace())
            loads |= {f"{blocks}_blocks": (trace, blocks) for blocks in CAPACITIES}
        return {
            f"{name}.{policy}": _compare(
                baseline or sys.executable, rounds, str(path), policy, blocks
            )
            for name, (path, blocks) in loads.items()
            for policy in EVICTION_POLICIES
        }


def write_trace(path: Path, trace: Path | None, limit: int | None = None) -> None:
    """Write the prompts of the first ``limit`` requests for ``bench/index_loop.py``."""
    requests = load_workload(str(trace), limit).requests
    _write(path, [r.hash_ids for r in requests], [r.input_tokens for r in requests])


def write_forks(path: Path, prompts_per_fork: int) -> None:
    """Write prompts that leave a common one at every block."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, 100_000, FORKS * BLOCK_TOKENS)
    prompts = [
        [*common[: fork * BLOCK_TOKENS], *rng.integers(0, 100_000, BLOCK_TOKENS + 1)]
        for _ in range(prompts_per_fork)
        for fork in rng.permutation(FORKS)
    ]
    _write(path, prompts, [len(prompt) for prompt in prompts], unit=1)


def _write(
    path: Path,
    ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    unit: int = HASH_BLOCK_TOKENS,
) -> None:
    np.savez(
        path,
        ids=np.concatenate([np.array(each, np.int32) for each in ids]),
        ends=np.cumsum([len(each) for each in ids]),
        lengths=np.array(lengths),
        unit=unit,
    )


def _compare(baseline: str, rounds: int, *args: str | int) -> dict[str, float]:
    pairs = [(loop(baseline, *args), loop(sys.executable, *args)) for _ in range(rounds)]
    return {
        "requests_per_second": 1e6 / statistics.median(new["api_us"] for _, new in pairs),
        "baseline_requests_per_second": 1e6 / statistics.median(old["api_us"] for old, _ in pairs),
        "ratio": statistics.median(old["api_us"] / new["api_us"] for old, new in pairs),
        "native_us": statistics.median(new["native_us"] for _, new in pairs),
        "native_ratio": statistics.median(
            old["native_us"] / new["native_us"] for old, new in pairs
        ),
    }


def loop(python: str, *args: str | int) -> dict[str, float]:
    """Run ``bench/index_loop.py``; return what it prints."""
    script = Path(__file__).with_name("index_loop.py")
    command = [python, "-P", str(script), *map(str, args)]
    times: dict[str, float] = json.loads(subprocess.check_output(command))
    return times
