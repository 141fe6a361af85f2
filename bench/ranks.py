"""Cost of several ranks: microseconds from the plans of a step to their reports.

The same plans (32 onloads of 8 blocks of 4 KiB, 4 layers) go to the controller of this process and
to groups of 1, 2 and 4 ranks, each in its own process. A group adds the cost of messages:
encoding, sockets, and the wake-ups of the ranks' loops.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv import Regions
from aiokv.base.percentiles import percentile
from aiokv.base.plan import ONLOAD, TransferPlan
from aiokv.ranks import Rank, RankGroup
from aiokv.worker.base import WorkerStart
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.base.plan import TransferReport
    from aiokv.worker.base import Worker

LAYERS = 4
PLANS = 32
PLAN_BLOCKS = 8
BLOCK_BYTES = 1 << 10  # a layer
BLOCKS = PLANS * PLAN_BLOCKS
GROUPS = (1, 2, 4)


def run(quick: bool) -> dict[str, Any]:
    steps = 50 if quick else 1_000
    results: dict[str, Any] = {"in_process": uvloop.run(_in_process(steps))}
    for num_ranks in GROUPS[:1] if quick else GROUPS:
        results[f"ranks_{num_ranks}"] = uvloop.run(_in_ranks(num_ranks, steps))
    return results


async def rank(path: Path, number: int) -> None:
    """Entry of a rank's process."""
    async with Rank(path, number, _regions()) as worker:
        await worker.closed()


def _regions() -> Regions:
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=[np.ones((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(LAYERS)])
    return regions


def _check_report(report: TransferReport) -> None:
    if report.outcome != "done":
        raise RuntimeError(report.reason)


async def _in_process(steps: int) -> dict[str, float]:
    return await _opened(CacheController(_regions(), CpuDevice()), steps)


async def _in_ranks(num_ranks: int, steps: int) -> dict[str, float]:
    group = RankGroup(num_ranks, entry="bench.ranks:rank")
    results = await _opened(group, steps)
    statistics = group.group_statistics()
    results["plans_per_batch"] = statistics.plans / statistics.batches
    results["batch_bytes"] = statistics.batch_bytes / statistics.batches
    return results


async def _opened(worker: Worker, steps: int) -> dict[str, float]:
    poller = EventPoller()
    poller.open(asyncio.get_running_loop())
    await worker.open(
        WorkerStart(
            device_blocks=BLOCKS,
            host_blocks=BLOCKS,
            poller=poller,
            on_report=_check_report,
            on_step=lambda step, error: None,
        )
    )
    try:
        return await _measure(worker, steps)
    finally:
        await worker.aclose()
        poller.close()


async def _measure(worker: Worker, steps: int) -> dict[str, float]:
    await _step(worker, 0)  # pages, caches
    submits, steps_taken, cpu = [], [], time.process_time()
    for step in range(1, steps + 1):
        submitted, ended = await _step(worker, step)
        submits.append(submitted)
        steps_taken.append(ended)
    ordered = sorted(steps_taken)
    return {
        "step_p50_us": percentile(ordered, 50) * 1e6,
        "step_p99_us": percentile(ordered, 99) * 1e6,
        "submit_us": float(np.median(submits)) * 1e6,
        "cpu_us": (time.process_time() - cpu) * 1e6 / steps,
    }


async def _step(worker: Worker, step: int) -> tuple[float, float]:
    """Return the seconds until all plans are submitted and until all are reported."""
    ids = np.arange(BLOCKS, dtype=np.int32).reshape(PLANS, PLAN_BLOCKS)
    plans = [
        TransferPlan(
            transfer_id=1 + step * PLANS + i,
            route=ONLOAD,
            source_blocks=ids[i].tobytes(),
            target_blocks=ids[i].tobytes(),
        )
        for i in range(PLANS)
    ]
    began = time.perf_counter()
    for plan in plans:
        worker.plans.submit(plan)
    submitted = time.perf_counter()
    await worker.plans.drain()
    return submitted - began, time.perf_counter() - began


if __name__ == "__main__":
    print(*run(quick=False).items(), sep="\n")
