"""Two ranks in separate processes, on two GPUs where available."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, CacheEngine, Hit
from aiokv.ranks import RankGroup
from tests.gpu.rank_process import BLOCKS, LAYERS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio

PROMPT = list(range(17))  # four full blocks, and a token that is computed each time
OVERWRITTEN = 200


class Runners:
    """Controller that sends commands to the runners of both ranks and waits for their replies."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.gpus: dict[int, int] = {}
        self.both = asyncio.Event()

    async def on_runner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self._streams[hello["rank"]] = (reader, writer)
        self.gpus[hello["rank"]] = hello["gpu"]
        if len(self._streams) == 2:
            self.both.set()

    async def ask(self, rank: int, **command: Any) -> dict[str, Any]:
        reader, writer = self._streams[rank]
        writer.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        return answer

    def close(self) -> None:
        for _, writer in self._streams.values():
            writer.close()


async def test_both_ranks_get_their_own_bytes_back(tmp_path: Path) -> None:
    runners = Runners()
    server = await asyncio.start_unix_server(runners.on_runner, str(tmp_path / "runner"))
    config = CacheConfig(block_tokens=4, device_blocks=BLOCKS, host_blocks=16)
    ranks = RankGroup(2, path=tmp_path / "ranks", entry="tests.gpu.rank_process:main")
    async with CacheEngine(config, ranks=ranks) as engine:
        await runners.both.wait()
        async with engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            computed = [int(block) for block in lease.block_table[:4]]
            lease.commit(len(PROMPT))
        step = engine.step()
        for rank in range(2):  # the step's event comes behind what it computes
            await runners.ask(rank, fill=10 + 60 * rank, blocks=computed, step=step)
        await engine.drain()
        assert await engine.evict(4) == 4
        for rank in range(2):
            await runners.ask(rank, fill=OVERWRITTEN, blocks=list(range(BLOCKS)))
        async with engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            assert lease.hit == Hit(0, 16)
            await lease.layers.wait_all()
            found = [int(block) for block in lease.block_table[:4]]
            for rank in range(2):
                values = (await runners.ask(rank, read=found))["values"]
                assert values == [
                    [10 + 60 * rank + 16 * layer + block for block in computed]
                    for layer in range(LAYERS)
                ]
        step = engine.step()
        for rank in range(2):
            await runners.ask(rank, step=step)
        runners.close()
    server.close()
