"""Serve random conversations until cancelled, with the live page of the engine beside them."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from aiokv.demo.runner import ModelRunner
from aiokv.demo.runs import open_engine
from aiokv.demo.serving import Server
from aiokv.observe.asgi import asgi

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import aiokv
    from aiokv.demo.runs import DemoConfig, Scenario

PAUSE_SECONDS = 1.0  # mean time of a client between two conversations


async def run_live(
    scenario: Scenario,
    config: DemoConfig,
    *,
    clients: int,
    listener: socket.socket,
) -> None:
    """Serve conversations of a workload again and again, the first ones most often.

    The engine has the small device tier and the host tier of the demo, so that blocks move.

    Args:
        scenario: the model, and the conversations to choose from.
        config: sizes of the cache and of the batch.
        clients: number of concurrent clients.
        listener: bound socket of the page; the caller closes it.

    Raises:
        AiokvError: the first failure of a request.

    Cancellation: the server and the engine are closed.
    """
    cache = scenario.model.new_cache(config.pressure_blocks, config.block_tokens)
    serving = replace(
        config.serving, max_running=clients, wait_store=math.inf if config.store else 0.0
    )
    async with open_engine(
        scenario,
        config,
        cache,
        device_blocks=config.pressure_blocks,
        host_blocks=config.host_blocks,
        store=config.store,
    ) as engine:
        with ModelRunner(scenario.model, cache) as runner:
            server = Server(engine, runner, serving)
            async with server.computing() as group:
                chosen = random.Random(serving.seed)
                talking = [
                    group.create_task(_talk(server, scenario, chosen)) for _ in range(clients)
                ]
                try:
                    await _serve_page(engine, listener)
                finally:
                    for task in talking:
                        task.cancel()


async def _talk(server: Server, scenario: Scenario, chosen: random.Random) -> None:
    """Serve one conversation after the other."""
    conversations = scenario.workload.conversations
    while True:
        await asyncio.sleep(chosen.expovariate(1 / PAUSE_SECONDS))
        await server.converse(conversations[int(len(conversations) * chosen.random() ** 2)])
        server.ttft_seconds.clear()  # the page shows no times of single requests
        server.capacity_wait_seconds.clear()


class _PageServer(uvicorn.Server):
    """Server of the live page. It leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_page(engine: aiokv.CacheEngine, listener: socket.socket) -> None:
    """Serve the live page until cancelled."""
    config = uvicorn.Config(asgi(engine), log_level="warning", timeout_graceful_shutdown=1)
    server = _PageServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving
