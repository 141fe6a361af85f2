"""Ranks in threads: waits of a worker's threads, failures, ends, fork and exit."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig
from aiokv.devices import CpuStream
from aiokv.errors import (
    BrokenEngineError,
    ClosedError,
    ConfigError,
    ControlTimeout,
    RankLost,
    TransferError,
    TransferTimeout,
    UsageError,
)
from aiokv.ranks import RankGroup
from aiokv.ranks import counters as counters_module
from aiokv.sync import RankThread, SyncEngine
from aiokv.testing.manual import ManualStream
from tests.harness.patience import PROGRAM_SECONDS
from tests.sync.served_ranks import (
    BLOCKS,
    LONG,
    PROMPT,
    TOKENS,
    Device,
    Served,
    new_regions,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def loading(tmp_path, device):
    """A rank that loads the 4 cached blocks of a lease, and the copy of its device."""
    with Served(tmp_path, [device]) as served:
        served.fill_host()
        with served.engine.match([99]) as other:
            other.allocate(4).result()  # so that device and host ids differ
            with served.load() as lease:
                copy = device.taken.get(timeout=LONG)
                assert (copy.device_ids != copy.host_ids).all()
                yield served.ranks[0], lease, copy


def test_threads_of_two_ranks_wait_for_their_bytes(tmp_path):
    with Served(tmp_path, [None, None]) as served:
        served.fill_host()
        with served.load() as lease:
            for number, rank in enumerate(served.ranks):
                layers = rank.layers(lease.layers.transfer_ids)
                assert layers.transfer_ids == lease.layers.transfer_ids
                for layer, tensor in enumerate(tensors(rank.regions)):
                    layers.wait(layer, timeout=LONG)
                    for position, block in enumerate(lease.block_table[:4]):
                        assert (tensor[block] == served.content(number, layer, position)).all()
                rank.wait_done(layers.transfer_ids, LONG)
                assert layers.is_done
                assert layers.failures() == []
                layers.raise_for_error()
            assert [rank.statistics().attention.onload.done for rank in served.ranks] == [1, 1]


def test_a_wait_ends_when_its_layer_has_arrived(loading):
    rank, lease, copy = loading
    layers = rank.layers(lease.layers.transfer_ids)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(layers.wait, 0)
        last = threads.submit(layers.wait_all)
        copy.complete(0)
        first.result(LONG)
        with pytest.raises(TransferTimeout, match=r"layer 1 did not arrive within 0\.0 s"):
            layers.wait(1, timeout=0)
        assert not last.done()
        assert not layers.is_done
        copy.complete(1)
        last.result(LONG)
    rank.wait_done(layers.transfer_ids, LONG)
    assert layers.is_done
    statistics = rank.layer_wait_statistics()
    assert 2 <= statistics.waits.count <= 3, "the wait for layer 0 may have begun too late"
    assert layers.wait_seconds(1) == statistics.layer_seconds[1] > 0


def test_a_stream_waits_for_the_layers(loading, device):
    rank, lease, copy = loading
    layers, stream = rank.layers(lease.layers.transfer_ids), ManualStream()
    layers.gpu_wait(0, stream, timeout=LONG)
    layers.gpu_wait_all(stream, timeout=LONG)
    assert stream.waits == [(copy, 0), (copy, 0), (copy, 1)]
    copy.complete_all()


def test_a_layer_that_is_not_submitted_ends_gpu_wait_at_the_deadline(tmp_path, device):
    device.delayed_layers = {1}
    with Served(tmp_path, [device]) as served:
        served.fill_host()
        with served.load() as lease:
            layers, stream = served.ranks[0].layers(lease.layers.transfer_ids), ManualStream()
            copy = device.taken.get(timeout=LONG)
            layers.gpu_wait(0, stream)
            with pytest.raises(TransferTimeout, match="layer 1 was not submitted"):
                layers.gpu_wait(1, stream, timeout=0)
            with pytest.raises(TransferTimeout, match="layer 1 was not submitted"):
                layers.gpu_wait_all(stream, timeout=0)
            copy.submit(1)
            layers.gpu_wait(1, stream)
            assert stream.waits[-1] == (copy, 1)
            copy.complete_all()


def test_a_failed_transfer_names_its_blocks(loading):
    rank, lease, copy = loading
    ids = lease.layers.transfer_ids
    layers = rank.layers(ids)
    copy.complete(0)
    copy.fail(1, block=2)
    with pytest.raises(TransferError, match="failed by the test"):
        layers.wait(1, timeout=LONG)
    with pytest.raises(TransferError):
        layers.raise_for_error()
    (failure,) = layers.failures()
    assert (failure.transfer_id, failure.first_bad_block) == (ids[0], 2)
    assert list(failure.block_ids) == lease.block_table[2:4].tolist()
    rank.wait_done(ids, LONG)
    assert rank.is_done(ids)


def test_a_wait_begins_before_the_plan_arrives(tmp_path):
    with Served(tmp_path, [None]) as served, ThreadPoolExecutor(2) as threads:
        rank = served.ranks[0]
        served.fill_host()
        with served.load() as lease:
            (first,) = lease.layers.transfer_ids
            lease.layers.wait_all()
        served.step()
        served.engine.call(served.engine.cache.drain)
        next_ids = [first + 1]
        layers = rank.layers(next_ids)
        with pytest.raises(TransferTimeout, match=rf"plans of the transfers \[{first + 1}\]"):
            layers.wait_all(timeout=0)
        with pytest.raises(TransferTimeout):
            rank.wait_done(next_ids, timeout=0)
        assert not rank.is_done(next_ids)
        both = rank.layers([first, *next_ids])
        assert not layers.is_done
        assert not both.is_done
        assert layers.failures() == []
        waiting = threads.submit(layers.gpu_wait_all, CpuStream("runner"), LONG)
        done = threads.submit(rank.wait_done, next_ids, LONG)
        served.engine.call(served.engine.cache.evict, 4)
        with served.load() as lease:
            assert lease.layers.transfer_ids == tuple(next_ids)
            waiting.result(LONG)
            done.result(LONG)
        assert rank.is_done(next_ids)
        assert both.is_done


def test_a_save_is_waited_for(tmp_path, device):
    with Served(tmp_path, [device]) as served:
        rank = served.ranks[0]
        with served.engine.match(PROMPT) as lease:
            lease.allocate(17).result()
            lease.commit(17)
        assert not rank.is_done([1])
        served.step()
        copy = device.taken.get(timeout=LONG)
        assert copy.direction == "offload"
        rank.statistics()  # behind the callback that has submitted the copy
        assert not rank.is_done([1])
        with pytest.raises(TransferTimeout):
            rank.wait_done([1], timeout=0)
        copy.complete_all()
        rank.wait_done([1], LONG)
        assert rank.is_done([1])


def test_a_transfer_that_ended_long_ago_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(counters_module, "KEPT_COUNTERS", 1)
    with Served(tmp_path, [None]) as served:
        rank = served.ranks[0]
        served.fill_host()  # one save
        with served.load() as lease:
            rank.wait_done(lease.layers.transfer_ids, LONG)
            kept = rank.layers(lease.layers.transfer_ids)
            kept.wait_all()
            served.engine.call(served.engine.cache.drain)
        forgotten = rank.layers([1])
        for call in (
            lambda: forgotten.wait(0),
            lambda: forgotten.gpu_wait(0, CpuStream("runner")),
            lambda: forgotten.is_done,
            forgotten.raise_for_error,
            forgotten.failures,
        ):
            with pytest.raises(UsageError, match="no longer has"):
                call()
        assert rank.is_done([1])
        rank.wait_done([1])
        assert kept.is_done


def test_tensors_of_a_rank_can_be_replaced(tmp_path):
    rank = RankThread(tmp_path / "ranks", 0, new_regions())
    regions = rank.regions = new_regions()
    assert rank.regions is regions


def test_no_transfer_is_waited_for_without_ids(tmp_path):
    rank = RankThread(tmp_path / "ranks", 0, new_regions())
    layers = rank.layers([])
    layers.wait(1)
    layers.gpu_wait_all(CpuStream("runner"))
    assert layers.is_done
    assert rank.is_done([])
    rank.wait_done([])
    with pytest.raises(UsageError, match="layer"):
        layers.wait(2)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError):
        RankThread(tmp_path / "ranks", -1, new_regions())
    with pytest.raises(ConfigError):
        RankThread(tmp_path / "ranks", 0, new_regions(), no_such=1)
    rank = RankThread(tmp_path / "ranks", 0, new_regions())
    with pytest.raises(UsageError, match=r"RankThread is not open.*start"):
        rank.wait_ready()
    with pytest.raises(UsageError, match="not open"):
        rank.layers([1]).wait(0)
    with pytest.raises(UsageError, match="not open"):
        rank.step(1)
    with pytest.raises(UsageError, match="transfer_ids"):
        rank.layers(["1"])
    with pytest.raises(UsageError, match="timeout"):
        rank.wait_done([], "soon")


def test_a_rank_starts_before_its_engine(tmp_path):
    rank = RankThread(tmp_path / "ranks", 0, new_regions())
    with rank:
        with pytest.raises(UsageError, match="once"):
            rank.start()
        assert not rank.is_ready
        with pytest.raises(ControlTimeout, match=r"not begun within 0 s"):
            rank.wait_ready(timeout=0)
        with pytest.raises(TransferTimeout, match="not begun"):
            rank.layers([1]).wait(0, timeout=0)
        group = RankGroup(1, path=tmp_path / "ranks")
        config = CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS)
        with SyncEngine(config, ranks=group):
            rank.wait_ready(LONG)
            assert rank.is_ready
            assert rank.number == 0
            rank.raise_for_error()
    assert rank.failure is None or isinstance(rank.failure, ClosedError)


def test_the_end_of_the_group_ends_the_rank_and_its_waits(tmp_path):
    with Served(tmp_path, [None]) as served, ThreadPoolExecutor(1) as threads:
        rank = served.ranks[0]
        waiting = threads.submit(rank.layers([99]).wait, 0)
        served.engine.close(0.0)
        with pytest.raises(ClosedError):
            waiting.result(LONG)
        with pytest.raises(ClosedError, match="group"):
            rank.layers([99]).wait(0)
        assert isinstance(rank.failure, ClosedError)
        with pytest.raises(ClosedError, match="the rank has ended"):
            rank.raise_for_error()
        rank.close()
        assert rank.is_done([99])


def test_a_closed_rank_is_lost_to_the_engine(tmp_path, device):
    with Served(tmp_path, [device]) as served, ThreadPoolExecutor(2) as threads:
        served.fill_host()
        rank = served.ranks[0]
        with served.load() as lease:
            copy = device.taken.get(timeout=LONG)
            layers = rank.layers(lease.layers.transfer_ids)
            layers.gpu_wait(0, ManualStream())
            waiting = threads.submit(layers.wait_all)
            closed = threads.submit(rank.close)
            assert not rank.is_done(layers.transfer_ids)
            copy.complete_all()
            closed.result(LONG)
            waiting.result(LONG)
            assert rank.is_done(layers.transfer_ids)
            assert rank.failure is None
            with pytest.raises(ClosedError, match="closed"):
                rank.layers([99]).wait(0)
            while not served.engine.health().failure:
                pass


def test_a_close_ends_the_attempts_to_connect(tmp_path):
    rank = RankThread(tmp_path / "ranks", 0, new_regions())
    with ThreadPoolExecutor(1) as threads:
        rank.start()
        waiting = threads.submit(rank.wait_ready)
        rank.close()
        with pytest.raises(ClosedError):
            waiting.result(LONG)
    assert rank.failure is None
    rank.close()


def test_a_rank_without_a_group_gives_up_at_its_deadline(tmp_path):
    with RankThread(tmp_path / "ranks", 0, new_regions(), connect_timeout=1e-3) as rank:
        with pytest.raises(ClosedError, match="no group listens"):
            rank.wait_ready(LONG)
        assert isinstance(rank.failure, ControlTimeout)


def test_a_refused_rank_has_the_reason(tmp_path):
    group = RankGroup(1, path=tmp_path / "ranks")
    config = CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS)
    refused = RankThread(tmp_path / "ranks", 1, new_regions())
    with refused, ThreadPoolExecutor(1) as threads:
        engine = SyncEngine(config, ranks=group)
        opened = threads.submit(engine.open)
        with pytest.raises(ClosedError, match="refused"):
            refused.wait_ready(LONG)
        assert isinstance(refused.failure, RankLost)
        with RankThread(tmp_path / "ranks", 0, new_regions()) as rank:
            opened.result(LONG)
            rank.wait_ready(LONG)
            engine.close(0.0)


def test_the_failure_of_the_thread_reaches_everything_that_waits(tmp_path, device, caplog):
    with Served(tmp_path, [device]) as served, ThreadPoolExecutor(2) as threads:
        served.fill_host()
        rank = served.ranks[0]
        absent = threads.submit(rank.layers([99]).wait, 0)
        with served.load() as lease:
            copy = device.taken.get(timeout=LONG)
            moving = threads.submit(rank.wait_done, lease.layers.transfer_ids)
            device.loop.call_soon_threadsafe(sys.exit, 7)
            while rank.failure is None:
                pass
            copy.complete_all()
            assert isinstance(absent.exception(LONG), BrokenEngineError | ClosedError)
            assert isinstance(moving.exception(LONG), BrokenEngineError | ClosedError | None)
            rank.close()
        assert isinstance(rank.failure, BrokenEngineError)
        with pytest.raises(BrokenEngineError, match=r"thread of the rank.*SystemExit"):
            rank.raise_for_error()
        with pytest.raises(BrokenEngineError):
            rank.layers([99]).wait(0)
    assert "sync.thread_failed" in caplog.text


def run_program(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.sync.rank_ending_program", case, str(folder)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )


def test_the_interpreter_exits_with_a_running_rank(tmp_path):
    done = run_program("leave", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main ends", "the wait has ended"]
    assert "Fatal" not in done.stderr


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path):
    done = run_program("fork", tmp_path)
    assert done.stdout.splitlines() == [
        "child {True} False ClosedError",
        "child status 0",
        "parent True",
    ], done.stderr
    assert done.returncode == 0, done.stderr


@contextmanager
def manager(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], str]]]:
    """Run an engine in a separate process; yield the process and a function that queries it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sync.manager_program", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(line: str) -> str:
        print(line, file=process.stdin, flush=True)
        return process.stdout.readline().strip()

    try:
        yield process, ask
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()


def test_killed_manager_ends_the_rank_and_its_waits(tmp_path, device):
    """The device finishes its copies, and a rank of the same process joins the next group."""
    regions = new_regions()
    with manager(tmp_path) as (process, ask), ThreadPoolExecutor(3) as threads:
        rank = RankThread(tmp_path / "ranks", 0, regions, device, connect_timeout=LONG)
        with rank:
            assert ask("open") == "open"
            rank.wait_ready(LONG)
            assert ask("compute") == "step 1"
            rank.step(1)
            device.taken.get(timeout=LONG).complete_all()
            assert ask("evict") == "evicted"
            transfer_id = int(ask("load"))
            copy = device.taken.get(timeout=LONG)
            layers = rank.layers([transfer_id])
            layers.gpu_wait(0, ManualStream())
            absent = threads.submit(rank.layers([99]).wait, 0)
            done = threads.submit(rank.wait_done, [99])
            process.kill()
            for wait in (absent, done):
                assert isinstance(wait.exception(LONG), ClosedError)
            moving = threads.submit(layers.wait_all)
            while rank.failure is None:
                pass
            assert not rank.is_ready
            assert not rank.is_done([transfer_id])  # the copy writes its blocks
            copy.complete_all()
            moving.result(LONG)
            rank.wait_done([transfer_id], LONG)
            with pytest.raises(ClosedError, match="the rank has ended"):
                rank.raise_for_error()
        assert isinstance(rank.failure, ClosedError)
        with pytest.raises(ClosedError):
            rank.step(2)
    with manager(tmp_path) as (_, ask), RankThread(tmp_path / "ranks", 0, regions) as rank:
        assert ask("open") == "open"
        rank.wait_ready(LONG)


def test_plan_that_arrives_during_the_lookup_is_found(tmp_path, monkeypatch):
    with Served(tmp_path, [None]) as served:
        served.fill_host()
        with served.load() as lease:
            lease.layers.wait_all()
            rank, find = served.ranks[0], counters_module.Counters.find
            rank.wait_done(lease.layers.transfer_ids, LONG)
            looks = []

            def find_later(counters: counters_module.Counters, transfer_id: int) -> object:
                looks.append(transfer_id)
                return None if len(looks) == 1 else find(counters, transfer_id)

            monkeypatch.setattr(counters_module.Counters, "find", find_later)
            assert rank.layers(lease.layers.transfer_ids).is_done


def test_ranks_in_worker_processes_wait_for_their_layers(tmp_path):
    """The workers run before the engine is opened, and get ids in messages, as those of vLLM."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sync.rank_worker_program", str(tmp_path), str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]

    def ask(line: str) -> list[str]:
        for worker in workers:
            print(line, file=worker.stdin, flush=True)
        return [worker.stdout.readline().strip() for worker in workers]

    try:
        assert ask("start") == ["started"] * 2
        config = CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=8)
        group = RankGroup(2, path=tmp_path / "ranks")
        with SyncEngine(config, ranks=group) as engine:
            with engine.match(PROMPT) as lease:
                lease.allocate(17).result()
                blocks = ",".join(map(str, lease.block_table[:4]))
                assert ask(f"compute {blocks}") == ["computed"] * 2
                lease.commit(17)
            step = engine.call(lambda: engine.cache.open_step)
            assert ask(f"step {step}") == ["closed"] * 2
            engine.step()
            engine.call(engine.cache.drain)
            assert ask("saved 1") == ["True"] * 2
            engine.call(engine.cache.evict, BLOCKS)
            assert ask("clear") == ["cleared"] * 2
            with engine.match(PROMPT) as lease:
                lease.allocate(17).result()
                blocks = ",".join(map(str, lease.block_table[:4]))
                (transfer_id,) = lease.layers.transfer_ids
                assert ask(f"load {transfer_id} {blocks}") == ["True"] * 2
        assert ask("end") == ["ended"] * 2
        for worker in workers:
            worker.communicate()
        assert [worker.wait(LONG) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
