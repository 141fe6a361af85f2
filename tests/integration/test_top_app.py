"""``aiokv top`` against the ASGI app of a running engine."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn

from aiokv import cli
from aiokv.cli.top.dump import DumpClient
from aiokv.cli.top.figures import figures_of
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio


async def serve(app) -> tuple[uvicorn.Server, asyncio.Task[None], str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    return server, task, f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def test_top_shows_what_the_engine_does(capsys):
    asgi = pytest.importorskip("aiokv.observe.asgi", reason="needs the ASGI app").asgi
    async with Served(device_blocks=8, host_blocks=8) as served:
        server, task, address = await serve(asgi(served.engine))
        client = DumpClient(address, 30.0)
        first = await asyncio.to_thread(client.fetch)
        lease = served.engine.match([1, 2, 3, 4, 5], owner="chat-7")
        await lease.allocate(5)
        waiting = served.engine.match(list(range(100, 115)), owner="chat-8")
        allocation = asyncio.create_task(waiting.allocate(15))
        await asyncio.sleep(0)
        second = await asyncio.to_thread(client.fetch)

        figures = figures_of(second, first)["default"]
        assert figures.total.leases == 2
        assert figures.total.waiting == 1
        assert figures.recent is not None
        assert figures.recent.prompt_tokens == 5
        assert [each.owner for each in figures.leases] == ["chat-8", "chat-7"]
        assert figures.leases[0].waits_for == "capacity"
        assert figures.leases[1].blocks == 3
        blocks = figures.total.attention
        assert (blocks.device.blocks, blocks.device.leased, blocks.device.free) == (8, 3, 5)
        assert blocks.host.blocks == 8

        assert await asyncio.to_thread(cli.main, ["top", "--once", address]) == 0
        assert "chat-8" in capsys.readouterr().out
        assert await asyncio.to_thread(cli.main, ["top", "--once", "--json", address]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["engines"]["default"]["total"]["waiting"] == 1

        lease.release()
        await allocation
        waiting.release()
        server.should_exit = True
        await task
