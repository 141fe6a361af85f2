"""Lengths of the runs of host blocks in transfers: input of the GPU bench's ``replay`` rows.

Replays the trace with a host tier of 320,000 blocks and, once that is full, counts for every onload
how many of its blocks are in runs of each length (consecutive host ids, after sorting).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.trace.replay import ReplayOptions, load_workload, replay
from aiokv.worker.controller import CacheController
from bench import harness

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.plan import TransferPlan
    from aiokv.worker.layers import LayerDoneCounter

HOST_BLOCKS, DEVICE_BLOCKS = 320_000, 32_000
REQUESTS, WARM = 2_500, 1_000  # 750 blocks a request: full after some 500


def main() -> int:
    trace = harness.find_trace()
    if trace is None:
        print("bench.host_runs: no trace, see AIOKV_TRACE", file=sys.stderr)
        return 1
    counts: Counter[int] = Counter()
    progress = {"requests": 0}
    submit = CacheController.submit

    def watched(controller: CacheController, plan: TransferPlan) -> LayerDoneCounter:
        if plan.direction == "onload" and progress["requests"] >= WARM:
            counts.update(run_lengths(np.sort(plan.source_ids)))
        return submit(controller, plan)

    def stages(stage: str, total: int) -> Callable[[int], None]:
        def note(done: int) -> None:
            if stage != "expand":
                progress["requests"] += done

        return note

    CacheController.submit = watched  # type: ignore[method-assign]
    workload = load_workload(str(trace), REQUESTS)
    options = ReplayOptions(
        host_blocks=HOST_BLOCKS, device_blocks=DEVICE_BLOCKS, concurrency=8, latencies=False
    )
    asyncio.run(replay(workload, options, stages))
    found = result(counts)
    run = harness.Run(machine=harness.machine(), benches={"host_runs": found})
    harness.save(run, harness.RESULTS / "host_runs.json")
    print({key: value for key, value in found.items() if not isinstance(value, dict)})
    return 0


def run_lengths(ids: np.ndarray) -> Counter[int]:
    """Return the number of blocks by the length of their run."""
    boundaries = np.flatnonzero(np.diff(ids) != 1) + 1
    lengths = np.diff(np.concatenate(([0], boundaries, [len(ids)])))
    blocks: Counter[int] = Counter()
    for length in lengths.tolist():
        blocks[length] += length
    return blocks


def result(counts: Counter[int]) -> dict[str, Any]:
    runs = sum(blocks // length for length, blocks in counts.items())
    return {
        "host_blocks": HOST_BLOCKS,
        "requests": REQUESTS - WARM,
        "onloaded_blocks": sum(counts.values()),
        "mean_run_blocks": sum(counts.values()) / max(runs, 1),
        "blocks_by_run_length": {str(length): counts[length] for length in sorted(counts)},
    }


if __name__ == "__main__":
    sys.exit(main())
