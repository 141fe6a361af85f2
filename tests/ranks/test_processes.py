"""Ranks as real processes: killed, restarted, and ended with their manager."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiokv import CacheConfig, CacheEngine, Hit
from aiokv.errors import BrokenEngineError, ClosedError, ConfigError, RankLost, TransferError
from aiokv.ranks import RankGroup
from aiokv.ranks.processes import RankProcesses
from aiokv.testing import run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cancelling import cancelled_at
from tests.harness.patience import PROGRAM_SECONDS
from tests.ranks import process_rank
from tests.ranks.loopback import BLOCK_TOKENS, Model

if TYPE_CHECKING:
    from collections.abc import Iterator

A = [1, 2, 3, 4, 5, 6, 7]
ROOT = Path(__file__).parents[2]
INTERRUPTS = 2  # of the guarded lines of a rank; each starts three processes


class _Process:
    """One rank: its tensors, and the connection to its runner."""

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
        """The cpu device needs no help from the test."""


class Processes(Model):
    """An engine over two rank processes."""

    def __init__(self, directory: Path, entry: str = "main") -> None:
        self.directory = directory
        self.group = RankGroup(
            2, path=directory / "ranks", entry=f"tests.ranks.process_rank:{entry}"
        )
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
        """Wait until that number of processes exists."""
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
async def test_process_killed_during_an_onload_can_be_restarted(tmp_path, monkeypatch):
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
        plans = ranked.group.plans
        await run_until_idle(lambda: [e.work.owing for e in plans] == [{1}], 10_000_000)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(
            TransferError, match=r"rank 1 is lost: the (other side closed the )?connection"
        ) as caught:
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


async def interrupt_rank(directory: Path, at: int) -> None:
    """Serve while rank 1 is interrupted; its process ends, and another one takes its place."""
    (directory / "interrupt").write_text(str(at))
    async with Processes(directory, "interrupted") as ranked:
        pids = ranked.group.pids()
        if not at:
            await ranked.to_host(A)
            assert await ranked.serve(A) == 6
            await ranked.finish()
            return
        with suppress(BrokenEngineError, TransferError):
            await ranked.to_host(A)
            await ranked.serve(A)
            await ranked.finish()
        await run_until_idle(lambda: not is_alive(pids[1]), 10_000_000)
        await run_until_idle(lambda: ranked.group.failure is not None, 10_000_000)
        with pytest.raises(BrokenEngineError, match="rank 1 is lost"):
            ranked.engine.match(A)
        ranked.forget(1)
        await ranked.engine.restart_ranks()
        await ranked.runners(2)
        await ranked.to_host(A)
        assert await ranked.serve(A) == 6  # compared, byte for byte
        await ranked.finish()
        pids += ranked.group.pids()
        assert ranked.engine.check_invariants() == []
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.asyncio
async def test_an_interrupt_at_a_guarded_line_ends_the_rank_which_can_be_restarted(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    counted = tmp_path / "counted"
    counted.mkdir()
    await interrupt_rank(counted, 0)
    lines = [int(line) for line in (counted / "lines").read_text().split()]
    assert len(lines) > 100
    serving = lines[len(lines) // 2 :]  # the first ones connect the rank
    for at in serving[:: len(serving) // INTERRUPTS]:
        directory = tmp_path / str(at)
        directory.mkdir()
        await interrupt_rank(directory, at)


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


# --- the end of the manager -----------------------------------------------------------------------


def manager(tmp_path: Path, entry: str, how: str) -> subprocess.Popen[str]:
    """Start a manager with its own process group, as in a terminal, and its own TMPDIR."""
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.managed", entry, how, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        text=True,
        process_group=0,
    )


@contextmanager
def pids_of(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Yield the pids of the two ranks; end them after the test."""
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert len(pids) == 2, process.communicate()
        yield pids
    finally:
        process.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for_the_end_of(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(descriptor) as handle:
        assert select.select([handle], [], [], 10)[0], f"process {pid} is left"


@pytest.mark.parametrize("entry", ["idle", "stuck"])
def test_rank_processes_end_with_their_manager(tmp_path, entry):
    """Ranks end when they see the end of the manager, and also when their loop is blocked."""
    process = manager(tmp_path, f"tests.ranks.process_rank:{entry}", "kills_itself")
    with pids_of(process) as pids:
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        for pid in pids:
            wait_for_the_end_of(pid)


def test_ctrl_c_lets_a_manager_with_a_handler_finish_its_request(tmp_path):
    process = manager(tmp_path, "tests.ranks.process_rank:idle", "finishes")
    with pids_of(process) as pids:
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        stdout, stderr = process.communicate(timeout=PROGRAM_SECONDS)
        assert (process.returncode, stderr) == (0, "")
        assert stdout == "Hit(device_tokens=6, host_tokens=0) None\n"
        assert not any(is_alive(pid) for pid in pids)


def test_ctrl_c_without_a_handler_shows_the_traceback_of_the_manager_only(tmp_path):
    process = manager(tmp_path, "tests.ranks.process_rank:idle", "waits")
    with pids_of(process) as pids:
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PROGRAM_SECONDS)
        assert (process.returncode, stdout) == (-signal.SIGINT, "")
        assert stderr.count("KeyboardInterrupt\n") == 1
        assert (
            stderr.count("Traceback") == 2
        )  # the cancellation, and the exception that replaced it
        assert "aiokv" not in stderr.replace("aiokv.engine", "").replace(str(ROOT), "")
        assert not any(is_alive(pid) for pid in pids)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_interrupt_of_a_rank_alone_ends_it_without_a_traceback(tmp_path):
    process = manager(tmp_path, "tests.ranks.process_rank:idle", "finishes")
    with pids_of(process) as pids:
        os.kill(pids[1], signal.SIGINT)
        wait_for_the_end_of(pids[1])
        os.kill(process.pid, signal.SIGKILL)
        assert process.communicate(timeout=PROGRAM_SECONDS)[1].count("Traceback") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_manager_that_is_killed_leaves_no_files(tmp_path, number):
    process = manager(tmp_path, "tests.ranks.process_rank:idle", "waits")
    with pids_of(process) as pids:
        assert list((tmp_path / "tmp").iterdir()) == []
        os.kill(process.pid, number)
        assert process.wait(PATIENCE_SECONDS) == -number
        for pid in pids:
            wait_for_the_end_of(pid)
    assert list((tmp_path / "tmp").iterdir()) == []


# --- imports of a rank ----------------------------------------------------------------------------

SERVE = """
import asyncio, numpy as np, aiokv
from aiokv.ranks import Rank, RankGroup

async def rank_main(path, rank):
    regions = aiokv.Regions(num_layers=1)
    regions.add("k", layers=[np.zeros((8, 4), np.int8)])
    async with Rank(path, rank, regions) as worker:
        await worker.closed()

async def main():
    group = RankGroup(1, entry="served_from_elsewhere:rank_main")
    async with aiokv.CacheEngine(aiokv.CacheConfig(device_blocks=8), ranks=group):
        print("served")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_rank_imports_from_its_manager_s_path_and_not_from_the_current_folder(tmp_path):
    script, current = tmp_path / "script", tmp_path / "current"
    script.mkdir()
    current.mkdir()
    (script / "served_from_elsewhere.py").write_text(SERVE)
    for name in ("json", "numpy", "served_from_elsewhere"):
        (current / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script / "served_from_elsewhere.py")],
        cwd=current,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", "")


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_restarts_cancelled_at_any_await_leave_one_process_per_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    async with Processes(tmp_path) as ranked:
        await ranked.serve(A)
        os.kill(ranked.group.pids()[1], signal.SIGKILL)
        await run_until_idle(lambda: ranked.group.failure is not None)
        ranked.forget(1)
        cancelled = 0
        while await cancelled_at(ranked.engine.restart_ranks(), cancelled + 1):
            cancelled += 1
            processes = ranked.group._processes
            assert len(processes._running) == 2
        assert cancelled >= 2
        await ranked.runners(2)
        assert sorted(ranked.group.pids()) == sorted(children())
        assert await ranked.serve(A) == 0
    assert children() == []


def children() -> list[int]:
    """Return the child processes, unreaped ones included."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.asyncio
async def test_a_start_cancelled_again_and_again_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for number in (1, 2):
        group = RankGroup(2, entry="tests.ranks.process_rank:idle")
        engine = CacheEngine(CacheConfig(device_blocks=4), ranks=group)
        assert await cancelled_at(engine.__aenter__(), number, again=True)
        await run_until_idle(lambda: children() == [])
        assert group.path is not None
        assert not group.path.parent.exists()
        await spin(3)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the connections of a closed loop
def test_a_group_is_closed_after_its_loop_was_closed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    group = RankGroup(2, path=tmp_path / "ranks", entry="tests.ranks.process_rank:idle")
    engine = CacheEngine(CacheConfig(device_blocks=4), ranks=group)
    with asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        assert len(children()) == len(group.pids()) == 2
    asyncio.run(engine.aclose())
    assert (children(), group.pids()) == ([], [])
    assert not (tmp_path / "ranks").exists()
    asyncio.run(engine.aclose())


@pytest.mark.asyncio
async def test_no_process_is_started_once_the_group_closes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    processes = RankProcesses("tests.ranks.process_rank:idle", lambda: None)
    await processes.start([0], tmp_path / "s")
    starting = asyncio.create_task(processes.start([0], tmp_path / "s"))
    await spin()  # it waits for the end of the previous process
    await processes.kill_all()
    with pytest.raises(ClosedError):
        await starting
    assert children() == []
    await spin(2)


@pytest.mark.asyncio
async def test_a_process_that_cannot_be_started_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    group = RankGroup(1, entry="tests.ranks.process_rank:idle")
    with pytest.raises(RankLost, match="rank 0: cannot start '/nowhere/python'"):
        await CacheEngine(CacheConfig(device_blocks=4), ranks=group).__aenter__()
