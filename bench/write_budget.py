"""Hits of a disk store with a write budget, beside those of a disk without one.

A simulated week: the trace of each day is that of ``agent-a``, with prompts of its own, 24 hours
after that of the day before. Blocks of 512 tokens pass through host memory (LRU) to the disk
(LRU), whose admission is ``aiokv.stores.write_budget.WriteBudget``. A row is a budget per day, as a
share of the mean of the blocks that the disk without a budget writes per day:

- ``hit_ratio``: blocks found in host memory or on the disk, over those without a budget;
- ``disk_hit_ratio``: the same for the blocks found on the disk alone;
- ``written_ratio``: blocks written, over those without a budget;
- ``fullest_day_ratio``: the most blocks written in any 24 hours, over the budget.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.stores.base import KEY_BYTES
from aiokv.stores.write_budget import WriteBudget
from aiokv.trace.format import read_trace
from tests.harness.traces import find_traces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.trace.format import TraceRequest

TRACE = "agent-a"
DAY = 86_400.0
HOST_BLOCKS = 8_000  # 4 M tokens
DISK_BLOCKS = 128_000
SHARES = (0.75, 0.5, 0.25)


class Week(NamedTuple):
    """Counts of blocks."""

    host_hits: int
    disk_hits: int
    written: int
    fullest_day: int


def run(quick: bool) -> dict[str, Any]:
    paths = [path for path in find_traces() if path.name.startswith(TRACE)]
    if not paths:
        return {}
    requests = read_trace(paths[0])
    days = 1 if quick else 7
    free = _replay(requests, days, None)
    results: dict[str, Any] = {
        "without_budget": {
            "host_hit_blocks": free.host_hits,
            "disk_hit_blocks": free.disk_hits,
            "written_blocks": free.written,
        }
    }
    for share in SHARES[1:2] if quick else SHARES:
        budget = int(share * free.written / days)
        week = _replay(requests, days, WriteBudget([(budget, DAY)]))
        results[f"budget_{share:g}"] = {
            "hit_ratio": (week.host_hits + week.disk_hits) / (free.host_hits + free.disk_hits),
            "disk_hit_ratio": week.disk_hits / free.disk_hits,
            "written_ratio": week.written / free.written,
            "fullest_day_ratio": week.fullest_day / budget,
        }
    return results


def _replay(requests: list[TraceRequest], days: int, budget: WriteBudget | None) -> Week:
    host: OrderedDict[int, None] = OrderedDict()
    disk: OrderedDict[int, None] = OrderedDict()
    host_hits = disk_hits = written = fullest = 0
    day: deque[tuple[float, int]] = deque()
    of_day = 0
    for now, ids in _arrivals(requests, days):
        in_host = next((i for i, block in enumerate(ids) if block not in host), len(ids))
        found = next((i for i in range(in_host, len(ids)) if ids[i] not in disk), len(ids))
        host_hits, disk_hits = host_hits + in_host, disk_hits + found - in_host
        for block in reversed(ids[in_host:found]):
            disk.move_to_end(block)
        for block in reversed(ids):
            host[block] = None
            host.move_to_end(block)
        while len(host) > HOST_BLOCKS:
            host.popitem(last=False)
        offered = [block for block in ids if block not in disk]
        if budget is not None and offered:
            admitted = budget.admit(_keys(offered), 1, now)
            offered = [block for block, fits in zip(offered, admitted, strict=True) if fits]
        for block in offered:
            disk[block] = None
        while len(disk) > DISK_BLOCKS:
            disk.popitem(last=False)
        day.append((now, len(offered)))
        written, of_day = written + len(offered), of_day + len(offered)
        while day[0][0] <= now - DAY:
            of_day -= day.popleft()[1]
        fullest = max(fullest, of_day)
    return Week(host_hits, disk_hits, written, fullest)


def _arrivals(requests: list[TraceRequest], days: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the seconds and the blocks of each request of the week."""
    num_ids = 1 + max(max(request.hash_ids) for request in requests)
    arrivals = sorted(
        (request.timestamp_ms / 1e3 + day * DAY, day, i)
        for day in range(days)
        for i, request in enumerate(requests)
    )
    for now, day, i in arrivals:
        if now < days * DAY:
            yield now, [block + day * num_ids for block in requests[i].hash_ids]


def _keys(blocks: list[int]) -> bytes:
    """Return a key of random bytes per block."""
    words = np.array(blocks, np.uint64)[:, None] + np.arange(KEY_BYTES // 8, dtype=np.uint64) * 7
    words = (words ^ (words >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (words ^ (words >> np.uint64(32))).tobytes()
