"""Ends of an engine in a thread: closing, failure, fork, and the exit of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from aiokv import CacheConfig
from aiokv.errors import BrokenEngineError, ClosedError, ConfigError, UsageError
from aiokv.sync import SyncEngine
from aiokv.sync.answers import Answer
from aiokv.sync.crossing import Crossing
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.patience import PROGRAM_SECONDS

ALL = 32
ROOT = Path(__file__).parents[2]
PROGRAM = "tests.sync.ending_program"


def test_close_ends_what_waits(config, caplog):
    engine = SyncEngine(config)
    with engine, ThreadPoolExecutor(2) as threads:
        holder = engine.match([1])
        holder.allocate(ALL).result()
        waiting = engine.match([2]).allocate(ALL)
        blocked = threads.submit(engine.call, engine.cache.quiesce)
        while not engine.health().is_paused:
            pass
        closed = [threads.submit(engine.close, 0.0)]
        engine.close(0.0)
        for future in (waiting, blocked):
            with pytest.raises(ClosedError):
                future.result(PATIENCE_SECONDS)
        closed[0].result(PATIENCE_SECONDS)
    engine.close()
    holder.release()
    assert "Exception in callback" not in caplog.text


def test_leases_can_be_released_while_the_engine_closes():
    with SyncEngine(CacheConfig(block_tokens=4, device_blocks=8)) as engine:
        lease = engine.match(range(4))
        lease.allocate(4).result()
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(engine.close, 60.0)
            while engine.health().phase == "open":
                pass
            with pytest.raises(ClosedError):
                engine.match([1])
            assert lease.commit(4) == 1
            lease.release()
            closed.result(PATIENCE_SECONDS)


def test_a_with_block_waits_for_leases_unless_it_has_failed():
    config = CacheConfig(block_tokens=4, device_blocks=8, drain_timeout_seconds=60.0)
    with ThreadPoolExecutor(1) as threads:
        with SyncEngine(config) as engine:
            lease = engine.match(range(4))
            lease.allocate(4).result()

            def compute() -> int:
                while engine.health().phase == "open":
                    pass
                for _ in range(100):
                    assert engine.health().phase == "closing"
                return lease.commit(4)

            committed = threads.submit(compute)
            committed.add_done_callback(lambda _: lease.release())
        assert committed.result(PATIENCE_SECONDS) == 1
    with pytest.raises(KeyError), SyncEngine(config) as engine:  # noqa: PT012
        held = engine.match(range(4))
        held.allocate(4).result()
        raise KeyError
    held.release()


def test_calls_that_come_with_a_close_are_refused(config):
    """Also if the loop makes them in the pass in which it learns of the close."""
    engine = SyncEngine(config)
    engine.open()
    thread = engine._thread
    entered, go_on = threading.Event(), threading.Event()
    blocking = engine.submit(lambda: (entered.set(), go_on.wait())[1])
    entered.wait()
    thread.post(thread._begin_closing, 0.0)  # as close() does
    match = Answer(engine.cache.match, ([1, 2],))
    crossing = Crossing(thread, [match])
    thread.send(crossing)
    go_on.set()
    crossing.wait()
    assert isinstance(match.error, ClosedError)
    assert blocking.result()
    engine.close()


def test_an_engine_is_opened_once(config):
    engine = SyncEngine(config)
    with pytest.raises(UsageError, match="not open"):
        engine.match([1])
    with engine, pytest.raises(UsageError, match="opened once"):
        engine.open()
    with pytest.raises(UsageError, match="opened once"):
        engine.open()
    unopened = SyncEngine(config)
    unopened.close()
    with pytest.raises(ClosedError):
        unopened.match([1])
    with pytest.raises(UsageError, match="opened once"):
        unopened.open()
    with pytest.raises(UsageError, match="drain_timeout"):
        engine.close("soon")


def test_wrong_arguments_are_refused_before_a_thread_starts():
    with pytest.raises(ConfigError):
        SyncEngine("no config")
    with pytest.raises(ConfigError):
        SyncEngine(CacheConfig(device_blocks=8), no_such=1)


def test_an_engine_that_cannot_be_opened_leaves_no_thread(config, tmp_path):
    (tmp_path / "file").write_text("no folder")
    config = CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8, model="m")
    engine = SyncEngine(config, stores=[f"disk:{tmp_path / 'file'}?bytes=1MiB&required=true"])
    with pytest.raises(Exception) as caught:  # noqa: PT011
        engine.open()
    assert not isinstance(caught.value, ClosedError)
    with pytest.raises((ClosedError, UsageError)):
        engine.match([1])
    engine.close()


def test_the_failure_of_the_thread_reaches_everything_that_waits(config, caplog):
    engine = SyncEngine(config)
    engine.open()
    holder = engine.match([1])
    holder.allocate(ALL).result()
    waiting = engine.match([2]).allocate(ALL)
    begun, go_on = threading.Event(), threading.Event()

    def fail():
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        raise SystemExit(7)

    engine.cache.loop.call_soon_threadsafe(fail)
    assert begun.wait(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        calls = engine.calls()
        calls.match([1])
        crossing = threads.submit(calls.run)
        go_on.set()
        # The loop may have made the calls in its last pass.
        assert isinstance(crossing.exception(30), BrokenEngineError | None)
    with pytest.raises(BrokenEngineError):
        waiting.result(PATIENCE_SECONDS)
    with pytest.raises(BrokenEngineError, match="SystemExit") as caught:
        engine.match([1])
    assert isinstance(caught.value.__cause__, SystemExit)
    holder.release()
    engine.close()
    assert "sync.thread_failed" in caplog.text


def test_a_cancelled_future_stays_cancelled_after_close(config):
    with SyncEngine(config) as engine:
        holder = engine.match([1])
        holder.allocate(ALL).result()
        waiting = engine.match([2]).allocate(ALL)
        assert waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    holder.release()


def run_program(case, folder):
    return subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-m", PROGRAM, case, str(folder)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )


def test_the_interpreter_exits_with_an_open_engine(tmp_path):
    done = run_program("leave", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main ends", "the wait has ended"]
    assert "Fatal" not in done.stderr
    assert any((tmp_path / "store").rglob("*"))


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path):
    done = run_program("fork", tmp_path / "store")
    assert done.stdout.splitlines() == ["child True", "child status 0", "parent 0"], done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("error")
def test_calls_that_arrive_during_the_close_after_a_failure_get_the_failure(config):
    engine = SyncEngine(config)
    engine.open()
    thread = engine._thread
    entered, go_on, made = threading.Event(), threading.Event(), []

    def fail():
        entered.set()
        go_on.wait()
        # The loop makes the calls of this pass. A wait that ends later keeps them for the next one.
        thread.cancel_task(unending, first=True)
        raise SystemExit

    unending = Mock(done=bool)
    thread.post(fail)
    entered.wait()
    crossing = Crossing(thread, [Answer(made.append, (1,))])
    crossing.send(here=False)
    go_on.set()
    crossing.wait()
    assert isinstance(crossing.first_error, BrokenEngineError)
    assert made == []
    engine.close()
