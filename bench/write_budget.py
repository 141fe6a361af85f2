"""Hits of a disk store with a write budget, beside those of a disk without one.

A simulated week: the trace of each day is that of ``agent-a``, with prompts of its own, 24 hours
after that of the day before; or the hour of ``conversation_trace``, stretched to a day. Blocks of
512 tokens pass through host memory (LRU) to the disk (LRU), whose admission is
``aiokv.stores.write_budget.WriteBudget``. A row is a budget per day, as a share of the mean of the
blocks that the disk without a budget writes per day:

- ``hit_ratio``: blocks found in host memory or on the disk, over those without a budget;
- ``disk_hit_ratio``: the same for the blocks found on the disk alone;
- ``written_ratio``: blocks written, over those without a budget;
- ``fullest_day_ratio``: the most blocks written in any 24 hours, over the budget.

Two rows without a budget show what can be reached: ``foresight`` admits the blocks that the disk
will be asked for, and ``computed_again`` those that are computed a second time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.stores.base import KEY_BYTES
from aiokv.stores.write_budget import WriteBudget
from aiokv.trace.format import read_trace
from tests.harness.traces import find_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.trace.format import TraceRequest

    # (blocks that the disk lacks, how many of them host memory has, now) -> blocks to write
    Admit = Callable[[list[int], int, float], list[int]]

DAY = 86_400.0
SHARES = (0.75, 0.5, 0.25)


class Case(NamedTuple):
    """A trace, and memory in blocks of 512 tokens."""

    trace: str
    stretch: float
    host_blocks: int
    disk_blocks: int


CASES = {
    "agent-a": Case("agent-a", 1.0, 8_000, 128_000),  # 4 M tokens in memory
    "conversation": Case("conversation_trace", 24.0, 2_000, 32_000),
}


class Week(NamedTuple):
    """Counts of blocks.

    Attributes:
        asked: number of requests that the host memory had not, by block.
    """

    host_hits: int
    disk_hits: int
    written: int
    fullest_day: int
    asked: Counter[int]


def run(quick: bool) -> dict[str, Any]:
    results = {}
    for name, case in CASES.items():
        paths = [path for path in find_traces() if path.name.startswith(case.trace)]
        if paths:
            results[name] = _compare(read_trace(paths[0]), case, quick)
        if quick:
            break
    return results


def _compare(requests: list[TraceRequest], case: Case, quick: bool) -> dict[str, Any]:
    days = 1 if quick else 7
    free = _replay(requests, case, days, lambda blocks, _, __: blocks)
    results: dict[str, Any] = {
        "without_budget": {
            "host_hit_blocks": free.host_hits,
            "disk_hit_blocks": free.disk_hits,
            "written_blocks": free.written,
        }
    }

    def note(name: str, admit: Admit, budget: float) -> None:
        week = _replay(requests, case, days, admit)
        results[name] = {
            "hit_ratio": (week.host_hits + week.disk_hits) / (free.host_hits + free.disk_hits),
            "disk_hit_ratio": week.disk_hits / free.disk_hits,
            "written_ratio": week.written / free.written,
        }
        if budget:
            results[name]["fullest_day_ratio"] = week.fullest_day / budget

    for share in SHARES[1:2] if quick else SHARES:
        budget = int(share * free.written / days)
        note(f"budget_{share:g}", _within(WriteBudget([(budget, DAY)])), budget)
    note("foresight", lambda blocks, _, __: [b for b in blocks if free.asked[b] > 1], 0)
    computed: set[int] = set()

    def admit_again(blocks: list[int], in_host: int, _: float) -> list[int]:
        again = [block for block in blocks[in_host:] if block in computed]
        computed.update(blocks[in_host:])
        return again

    note("computed_again", admit_again, 0)
    return results


def _within(budget: WriteBudget) -> Admit:
    def admit(blocks: list[int], _: int, now: float) -> list[int]:
        admitted = budget.admit(_keys(blocks), 1, now)
        return [block for block, fits in zip(blocks, admitted, strict=True) if fits]

    return admit


def _replay(requests: list[TraceRequest], case: Case, days: int, admit: Admit) -> Week:
    host: OrderedDict[int, None] = OrderedDict()
    disk: OrderedDict[int, None] = OrderedDict()
    host_hits = disk_hits = written = fullest = 0
    asked: Counter[int] = Counter()
    day: deque[tuple[float, int]] = deque()
    of_day = 0
    for now, ids in _arrivals(requests, case.stretch, days):
        in_host = next((i for i, block in enumerate(ids) if block not in host), len(ids))
        found = next((i for i in range(in_host, len(ids)) if ids[i] not in disk), len(ids))
        host_hits, disk_hits = host_hits + in_host, disk_hits + found - in_host
        asked.update(ids[in_host:])
        for block in reversed(ids[in_host:found]):
            disk.move_to_end(block)
        for block in reversed(ids):
            host[block] = None
            host.move_to_end(block)
        while len(host) > case.host_blocks:
            host.popitem(last=False)
        offered = [block for block in ids if block not in disk]
        cached = sum(block not in disk for block in ids[:in_host])
        if offered:
            offered = admit(offered, cached, now)
        for block in offered:
            disk[block] = None
        while len(disk) > case.disk_blocks:
            disk.popitem(last=False)
        day.append((now, len(offered)))
        written, of_day = written + len(offered), of_day + len(offered)
        while day[0][0] <= now - DAY:
            of_day -= day.popleft()[1]
        fullest = max(fullest, of_day)
    return Week(host_hits, disk_hits, written, fullest, asked)


def _arrivals(
    requests: list[TraceRequest], stretch: float, days: int
) -> Iterator[tuple[float, list[int]]]:
    """Yield the seconds and the blocks of each request of the week."""
    num_ids = 1 + max(max(request.hash_ids) for request in requests)
    arrivals = sorted(
        (request.timestamp_ms / 1e3 * stretch + day * DAY, day, i)
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
