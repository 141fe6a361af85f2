"""CPU time of explaining misses: through the API, and in the native core alone.

``bench/index_loop.py`` runs without and with ``miss_history_blocks`` by turns, for prompts that
fork at every block and the first requests of the traces of ``AIOKV_TRACE``, with a history of a
quarter of the device's blocks (``quarter``) and of as many. ``cost`` and ``native_cost`` are
medians of the quotients of a round: 1.02 means 2 % more time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from aiokv.config.cache_config import EVICTION_POLICIES
from bench.index_ratio import PROMPTS_PER_FORK, loop, write_forks, write_trace
from tests.harness.traces import find_traces

CAPACITIES = (32_000, 96_000)
REQUESTS = 1_500
HISTORIES = {"quarter": 0.25, "full": 1.0}
ROUNDS = 5


def run(quick: bool) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        loads = {"forks": Path(folder, "forks.npz")}
        write_forks(loads["forks"], 1 if quick else PROMPTS_PER_FORK)
        for trace in [] if quick else find_traces():
            name = trace.name.split(".")[0]
            loads[name] = Path(folder, f"{name}.npz")
            write_trace(loads[name], trace, REQUESTS)
        return {
            f"{name}.{blocks}_blocks.{policy}": _compare(path, policy, blocks, quick)
            for name, path in loads.items()
            for blocks in CAPACITIES[: 1 if name == "forks" else None]
            for policy in EVICTION_POLICIES
        }


def _compare(path: Path, policy: str, blocks: int, quick: bool) -> dict[str, float]:
    histories = [0, *(int(share * blocks) for share in HISTORIES.values())]
    rounds = [
        [loop(sys.executable, str(path), policy, blocks, history) for history in histories]
        for _ in range(1 if quick else ROUNDS)
    ]
    found = {"requests_per_second": 1e6 / statistics.median(each[0]["api_us"] for each in rounds)}
    for i, name in enumerate(HISTORIES, 1):
        for key, kind in (("cost", "api_us"), ("native_cost", "native_us")):
            quotients = [each[i][kind] / each[0][kind] for each in rounds]
            found[f"{name}.{key}"] = statistics.median(quotients)
    return found
