"""Replay of a trace on several engines behind a router: the hits that routing by prefix adds."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec

from aiokv import CacheEngine
from aiokv.errors import UsageError
from aiokv.trace.format import expand_tokens
from aiokv.trace.loops import CHUNK_REQUESTS, plain_loop
from aiokv.trace.report import FleetReport, RouterPoint
from aiokv.trace.router import ROUTER_NAMES, RouterName, new_router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.trace.replay import ReplayOptions, Stages, Workload
    from aiokv.trace.router import Router


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Engines and routers of a replay.

    Attributes:
        engines: number of engines, each with the capacity of ``ReplayOptions``.
        routers: routers to compare, each on new engines.
        tokens_per_second: prompt tokens that one engine computes per second of the trace.
    """

    engines: int
    routers: tuple[RouterName, ...] = ROUTER_NAMES
    tokens_per_second: float = 10_000.0


async def replay_fleet(
    workload: Workload, options: ReplayOptions, fleet: FleetOptions, stages: Stages
) -> FleetReport:
    """Run the workload on ``fleet.engines`` new engines, once per router.

    Requests run one after another, at the times of the trace; the engines compute nothing.

    Raises:
        UsageError: no request fits a device, or ``options`` are not those of a plain replay.
    """
    if not options.is_plain:
        raise UsageError(
            "several engines are replayed with one lease at a time, without host tier, speed and "
            "execute",
            hint="leave out --host-blocks, --concurrency, --speed and --execute",
        )
    fitting = workload.fitting(options.device_blocks * options.block_tokens)
    points = []
    for name in fleet.routers:
        router = new_router(name, fleet.engines, fleet.tokens_per_second)
        points.append(await _run(fitting, options, fleet, router, name, stages))
    return FleetReport(
        trace=workload.trace,
        config=msgspec.to_builtins(options) | msgspec.to_builtins(fleet),
        requests=len(fitting.requests),
        rejected_requests=len(workload.requests) - len(fitting.requests),
        prompt_tokens=fitting.prompt_tokens,
        routers=points,
    )


async def _run(
    workload: Workload,
    options: ReplayOptions,
    fleet: FleetOptions,
    router: Router,
    name: RouterName,
    stages: Stages,
) -> RouterPoint:
    total = len(workload.requests)
    progress = stages(f"{name}, {fleet.engines} engines", total)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(CacheEngine(options.cache_config))
            for _ in range(fleet.engines)
        ]
        for count, request in enumerate(workload.requests, start=1):
            tokens, now = expand_tokens(request), workload.arrival_seconds(request)
            held = [engine.would_hit(tokens).total for engine in engines]
            engine = engines[router.choose(held, len(tokens), now)]
            await plain_loop(engine, [(tokens, request.returns)])
            if count % CHUNK_REQUESTS == 0 or count == total:
                progress(count % CHUNK_REQUESTS or CHUNK_REQUESTS)
                await asyncio.sleep(0)
        return _point(name, engines, workload.prompt_tokens)


def _point(name: RouterName, engines: Sequence[CacheEngine], prompt_tokens: int) -> RouterPoint:
    statistics = [engine.statistics() for engine in engines]
    hits = sum(each.hit_device_tokens for each in statistics)
    computed = [each.prompt_tokens - each.hit_device_tokens for each in statistics]
    return RouterPoint(
        router=name,
        hit_tokens=hits,
        hit_rate=hits / prompt_tokens,
        computed_tokens=computed,
        imbalance=max(computed) * len(computed) / max(1, sum(computed)),
    )
