"""Causes of the missed blocks of a recorded trace: what ``aiokv explain`` reports."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from aiokv import CacheEngine
from aiokv.errors import UsageError
from aiokv.trace.format import expand_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv import CacheConfig
    from aiokv.trace.format import TraceRequest


class MissedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Misses of one request.

    Attributes:
        number: place in the trace, from 1.
        timestamp_ms: arrival.
        prompt_tokens: tokens of the prompt.
        missed_tokens: missed tokens by cause, the most frequent cause first.
    """

    number: int
    timestamp_ms: float
    prompt_tokens: int
    missed_tokens: dict[str, int]


class MissReport(msgspec.Struct, frozen=True, kw_only=True):
    """Missed blocks of a trace by cause.

    Attributes:
        requests: requests that were served.
        rejected_requests: requests whose prompts exceed the device.
        prompt_tokens: prompt tokens of the served requests.
        hit_tokens: tokens of them that were cached.
        missed_tokens: tokens of full blocks that were not hit, by the causes of ``Lease.missed``.
        largest: requests with the most missed tokens, in descending order.
    """

    requests: int
    rejected_requests: int
    prompt_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int]
    largest: list[MissedRequest]


async def explain(
    requests: Iterable[TraceRequest], config: CacheConfig, num_largest: int
) -> MissReport:
    """Serve requests one after the other on a new engine, and count the causes of their misses.

    Memory does not depend on the number of requests.

    Args:
        requests: requests in the order in which they are served.
        config: configuration of the engine, with ``miss_history_blocks``.
        num_largest: most requests in ``MissReport.largest``.

    Raises:
        UsageError: all prompts exceed the device.
    """
    capacity_tokens = config.device_blocks * config.block_tokens
    counts: Counter[str] = Counter()
    largest: list[tuple[int, int, MissedRequest]] = []
    async with CacheEngine(config) as engine:
        for number, request in enumerate(requests, start=1):
            counts["requests"] += 1
            if request.input_tokens > capacity_tokens:
                continue
            async with engine.match(expand_tokens(request)) as lease:
                await lease.allocate(request.input_tokens)
                causes: Counter[str] = Counter()
                for missed in lease.missed:
                    causes[missed.cause] += missed.num_tokens
                await lease.layers.wait_all()
                lease.commit(request.input_tokens)
                lease.release(returns=request.returns)
            found = MissedRequest(
                number=number,
                timestamp_ms=request.timestamp_ms,
                prompt_tokens=request.input_tokens,
                missed_tokens=dict(causes.most_common()),
            )
            heapq.heappush(largest, (causes.total(), -number, found))
            if len(largest) > num_largest:
                heapq.heappop(largest)
        await engine.drain()
        statistics = engine.statistics()
    served = statistics.grants
    if not served:
        raise UsageError(
            f"none of the {counts['requests']} requests fits the device's capacity of "
            f"{capacity_tokens} tokens",
            hint="raise device_blocks",
        )
    return MissReport(
        requests=served,
        rejected_requests=counts["requests"] - served,
        prompt_tokens=statistics.prompt_tokens,
        hit_tokens=statistics.hit_tokens,
        missed_tokens=statistics.missed_tokens_by_cause,
        largest=[found for *_, found in sorted(largest, reverse=True)],
    )
