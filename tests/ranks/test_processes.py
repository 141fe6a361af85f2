"""Ranks as real processes: killed, restarted, and never left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from aiokv import (
    BrokenEngineError,
    CacheConfig,
    CacheEngine,
    ConfigError,
    Hit,
    RankLost,
    TransferError,
)
from aiokv.ranks import RankGroup
from aiokv.testing import run_until_idle
from tests.ranks import process_rank
from tests.ranks.loopback import BLOCK_TOKENS, Model

A = [1, 2, 3, 4, 5, 6, 7]
ROOT = Path(__file__).parents[2]


class _Process:
    """One rank: its tensors, and the line to its runner."""

    def __init__(self, directory: Path, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.kv = process_rank.tensors(directory, number, "r+")
        self.worker = self
        self._writer = writer

    def step(self, number: int) -> None:
        self._writer.write(f"{number}\n".encode())

    def close(self) -> None:
        self._writer.close()

    def complete_all(self) -> None:
        """The cpu device needs nobody."""


class Processes(Model):
    """Two processes, and an engine over them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.group = RankGroup(2, path=directory / "ranks", entry="tests.ranks.process_rank:main")
        config = CacheConfig(
            block_tokens=BLOCK_TOKENS, device_blocks=process_rank.BLOCKS, host_blocks=16
        )
        self.engine = CacheEngine(config, ranks=self.group)
        self._by_rank: dict[int, Any] = {}
        self._came = asyncio.Event()

    @property
    def shards(self) -> list[Any]:  # type: ignore[override]
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    async def _on_runner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = int(await reader.readline())
        self._by_rank[rank] = _Process(self.directory, rank, writer)
        self._came.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(
            self._on_runner, str(self.directory / "runner")
        )
        await self.engine.__aenter__()
        await self.runners(2)
        return self

    async def runners(self, count: int) -> None:
        """Wait until so many are there."""
        while len(self._by_rank) < count:
            self._came.clear()
            await self._came.wait()

    async def __aexit__(self, *exc: object) -> None:
        for shard in self.shards:
            shard.close()
        await self.engine.__aexit__(*exc)
        self._server.close()

    def forget(self, rank: int) -> None:
        self._by_rank.pop(rank).close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.asyncio
async def test_a_process_that_is_killed_in_an_onload_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    async with Processes(tmp_path) as ranked:
        await ranked.to_host(A)
        assert await ranked.serve(A) == 6
        await ranked.to_host(A)
        pids = ranked.group.pids()
        os.kill(pids[1], signal.SIGSTOP)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        waiting = asyncio.create_task(lease.layers.wait_all())
        transfers = ranked.group.exchange._transfers
        await run_until_idle(lambda: [t.owing for t in transfers.values()] == [{1}], 10_000_000)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TransferError, match="rank 1 is lost: it hung up") as caught:
            await waiting
        assert caught.value.rank == 1
        with pytest.raises(BrokenEngineError):
            ranked.engine.match(A)
        ranked.forget(1)
        await ranked.engine.restart_ranks()
        await ranked.runners(2)
        assert [pids[0] == ranked.group.pids()[0], pids[1] == ranked.group.pids()[1]] == [
            True,
            False,
        ]
        assert ranked.engine.match(A).hit == Hit(0, 0)
        await lease.resume(7)
        assert lease.cached_tokens == 0
        ranked.compute(lease, A)
        lease.commit(7)
        lease.release()
        ranked.step()
        await ranked.finish()
        await ranked.engine.evict(8)
        for shard in ranked.shards:
            for array in shard.kv:
                array[:] = 77
        assert await ranked.serve(A) == 6  # compared, byte for byte
        assert ranked.engine.check_invariants() == []
        pids += ranked.group.pids()
    assert not any(is_alive(pid) for pid in pids)
    assert {path.name for path in tmp_path.iterdir()} & {"ranks"} == set()


@pytest.mark.asyncio
async def test_a_process_that_fails_at_its_start_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    group = RankGroup(2, entry="tests.ranks.process_rank:fails")
    with pytest.raises(RankLost, match=r"rank 1: .*ended with status 3"):
        await CacheEngine(CacheConfig(device_blocks=4), ranks=group).__aenter__()
    assert group.pids() == []
    assert group.path is not None
    assert not group.path.parent.exists()  # the private directory


def test_an_entry_is_a_function_of_a_module():
    for entry in ("module", "module:", ":function", "module:not a name"):
        with pytest.raises(ConfigError, match="module:function"):
            RankGroup(1, entry=entry)


def test_ranks_do_not_outlive_their_manager(tmp_path):
    manager = subprocess.run(
        [sys.executable, "-m", "tests.ranks.orphaned_manager", str(tmp_path)],
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=30,
    )
    pids = [int(pid) for pid in manager.stdout.split()]
    assert (len(pids), manager.returncode) == (2, -signal.SIGKILL), manager.stderr
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with open(descriptor) as handle:
            assert select.select([handle], [], [], 10)[0], f"process {pid} is left"
