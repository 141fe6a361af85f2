"""Ctrl-C in the threads that open, close and wait for an engine or a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig
from aiokv.errors import ClosedError, ControlTimeout
from aiokv.sync import RankThread, SyncEngine
from tests.harness.patience import PROGRAM_SECONDS
from tests.sync.served_ranks import LONG, Device, Served, new_regions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
START = threading.Thread.start
THREADS = ("aiokv-engine", "aiokv-rank")

Service = SyncEngine | RankThread


@pytest.fixture(params=["engine", "rank"])
def service(request, tmp_path) -> Service:
    if request.param == "rank":
        return RankThread(tmp_path / "ranks", 0, new_regions())
    return SyncEngine(CacheConfig(block_tokens=4, device_blocks=8))


def begin(service: Service) -> None:
    service.start() if isinstance(service, RankThread) else service.open()


def use(service: Service) -> None:
    service.statistics() if isinstance(service, RankThread) else service.match([1])


@contextmanager
def starting(monkeypatch, replacement: Callable[[threading.Thread], None]) -> Iterator[None]:
    """Start the threads of services with ``replacement(thread)``."""

    def start_or_replace(thread: threading.Thread) -> None:
        (replacement if thread.name in THREADS else START)(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_replace)
        yield


def check_ended(service: Service) -> None:
    """Check that no call waits for the thread, which does not run."""
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ClosedError):
            threads.submit(use, service).result(LONG)
        threads.submit(service.close).result(LONG)


def test_an_interrupt_before_the_thread_starts_ends_the_service(service, monkeypatch):
    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with starting(monkeypatch, interrupt), pytest.raises(KeyboardInterrupt):
        begin(service)
    check_ended(service)


def test_an_interrupt_while_the_thread_starts_ends_the_service(service, monkeypatch):
    """``Thread.start`` waits until the thread runs, and an interrupt may come then."""
    go_on = threading.Event()
    started = []

    def start_and_interrupt(thread: threading.Thread) -> None:
        run = thread.run
        thread.run = lambda: go_on.wait(LONG) and run()  # type: ignore[func-returns-value]
        START(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with starting(monkeypatch, start_and_interrupt), pytest.raises(KeyboardInterrupt):
        begin(service)
    check_ended(service)
    go_on.set()
    started[0].join(LONG)
    assert not started[0].is_alive()


def test_a_close_while_the_thread_starts_ends_the_opening(service, monkeypatch):
    def close_and_start(thread: threading.Thread) -> None:
        service.close()
        START(thread)

    with starting(monkeypatch, close_and_start), ThreadPoolExecutor(1) as threads:
        opened = threads.submit(begin, service)
        with pytest.raises(ClosedError):
            opened.result(LONG)
    check_ended(service)


def test_failing_loop_factory_ends_the_service():
    def fail() -> Any:
        raise OSError("no more files")

    engine = SyncEngine(CacheConfig(block_tokens=4, device_blocks=8), loop_factory=fail)
    with pytest.raises(OSError, match="no more files"):
        engine.open()
    check_ended(engine)


def test_the_interpreter_exits_after_an_interrupted_opening(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.sync.rank_ending_program",
            "interrupt",
            str(tmp_path),
        ],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted"] * 3


@contextmanager
def interrupted(*functions: str) -> Iterator[None]:
    """Interrupt the main thread, which runs the test, when it is inside these functions.

    A signal just before a system call does not interrupt the call, so the signal is repeated.
    """
    main = threading.get_ident()
    assert main == threading.main_thread().ident
    has_left = threading.Event()
    interrupts = []

    def names() -> Iterator[str]:
        frame = sys._current_frames()[main]
        while frame is not None:
            yield frame.f_code.co_qualname
            frame = frame.f_back

    def send() -> None:
        while not interrupts and not has_left.is_set():
            if set(functions) <= set(names()):
                signal.pthread_kill(main, signal.SIGINT)

    def interrupt(number: int, frame: object) -> None:
        if not interrupts:
            interrupts.append(number)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        has_left.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_wait_ready_leaves_the_rank_connecting(tmp_path):
    with RankThread(tmp_path / "ranks", 0, new_regions()) as rank:
        with interrupted("RankThread.wait_ready", "Condition.wait"):
            rank.wait_ready()
        assert rank.failure is None
        with pytest.raises(ControlTimeout):
            rank.wait_ready(0)


def test_an_interrupt_of_a_wait_leaves_the_transfer_moving(tmp_path):
    device = Device()
    with Served(tmp_path, [device]) as served:
        rank = served.ranks[0]
        served.fill_host()
        with served.load() as lease:
            copy = device.taken.get(timeout=LONG)
            layers = rank.layers(lease.layers.transfer_ids)
            with interrupted("ThreadWaits.wait"):
                layers.wait(0)
            with interrupted("ThreadWaits.wait"):
                rank.wait_done(layers.transfer_ids)
            absent = rank.layers([99])
            with interrupted("EngineFuture.result"):
                absent.wait(0)
            assert not layers.is_done
            copy.complete_all()
            layers.wait_all(LONG)
            rank.wait_done(layers.transfer_ids, LONG)
            layers.raise_for_error()


def test_an_interrupt_of_close_leaves_the_rank_closing(tmp_path):
    device = Device()
    with Served(tmp_path, [device]) as served:
        rank = served.ranks[0]
        served.fill_host()
        with served.load() as lease:
            copy = device.taken.get(timeout=LONG)
            with interrupted("LoopThread.close", "Condition.wait"):
                rank.close()
            assert not rank.is_done(lease.layers.transfer_ids)
            copy.complete_all()
            rank.close()
        assert rank.failure is None


def test_an_interrupt_of_close_leaves_the_engine_closing():
    engine = SyncEngine(CacheConfig(block_tokens=4, device_blocks=8))
    engine.open()
    lease = engine.match(range(4))
    lease.allocate(4).result()
    with interrupted("LoopThread.close", "Condition.wait"):
        engine.close(LONG)
    with pytest.raises(ClosedError):
        engine.match([1])
    lease.release()
    engine.close()
