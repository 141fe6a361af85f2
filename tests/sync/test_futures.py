"""Futures of what may wait: grants, cancellation, deadlines, interrupts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import threading

import pytest
import uvloop

from aiokv import LeaseState
from aiokv.errors import AllocateTimeout, LeaseError, RequestTooLarge, UsageError
from aiokv.sync import SyncEngine
from aiokv.testing import clocked_loop, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.sync.conftest import BLOCKS, TOKENS

ALL = BLOCKS * TOKENS


@pytest.fixture
def full(engine):
    """A lease that holds all blocks."""
    with engine.match([1]) as lease:
        lease.allocate(ALL).result()
        yield lease


def test_a_grant_with_room_is_there_at_once(engine):
    with engine.match([1, 2]) as lease:
        future = lease.allocate(2)
        assert future.done()
        assert future.result() is lease


def test_a_wait_for_a_future_checks_its_timeout(engine, full):
    with engine.match([2]) as lease:
        future = lease.allocate(ALL)
        for timeout in ("soon", float("nan"), True):
            for wait in (future.result, future.exception):
                with pytest.raises(UsageError, match="timeout is"):
                    wait(timeout)
        with pytest.raises(TimeoutError):
            future.result(-1)
        future.cancel()


def test_a_wait_ends_with_the_release_of_another_lease(engine, full):
    with engine.match([2]) as lease:
        future = lease.allocate(ALL)
        assert not future.done()
        engine.health()  # a later call: the lease is in line
        assert engine.statistics().waiting == 1
        full.release()
        assert concurrent.futures.wait([future], timeout=PATIENCE_SECONDS).done == {future}
        assert lease.num_tokens == ALL


def test_a_lease_that_has_waited_knows_its_cached_tokens(engine):
    prompt = list(range(9))
    with engine.match(prompt) as first:
        first.allocate(9).result()
        first.commit(9)
    with engine.match([1]) as holder, engine.match(prompt) as lease:
        holder.allocate(ALL - 2 * TOKENS).result()
        future = lease.allocate(12)
        assert not future.done()
        holder.release()
        assert future.result(timeout=PATIENCE_SECONDS).cached_tokens == 8


def test_calls_do_not_wait_for_their_futures(engine, full):
    calls = engine.calls()
    lease = calls.match([2])
    future = calls.allocate(lease, ALL)
    too_large = calls.allocate(lease, ALL + 1)
    calls.run()
    with pytest.raises(RequestTooLarge):
        too_large.result()
    assert not future.done()
    lease.release()
    with pytest.raises(LeaseError):
        future.result()


def test_a_cancelled_wait_has_left_the_line_before_the_next_call(engine, full):
    with engine.match([2]) as first, engine.match([3]) as second:
        waiting = first.allocate(ALL)
        full.truncate(TOKENS)
        assert not second.try_allocate(TOKENS)  # the first lease comes first
        assert waiting.cancel()
        assert second.try_allocate(TOKENS)
        assert waiting.cancelled()
        assert first.state is LeaseState.MATCHED
        assert first.try_allocate(TOKENS)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result()


def test_a_grant_in_the_moment_of_the_cancellation_is_taken_back(engine, full):
    with engine.match([2]) as lease:
        waiting = lease.allocate(ALL)
        calls = engine.calls()
        calls.release(full)  # grants; the task of the wait resumes in the next pass
        cancelled = calls.add(waiting.cancel)
        calls.run()
        assert cancelled.value is True
        assert lease.state is LeaseState.MATCHED
        assert engine.statistics().attention.device.leased == 0
        assert lease.allocate(ALL).result(timeout=PATIENCE_SECONDS) is lease


def test_a_future_that_is_cancelled_before_it_is_sent_takes_nothing(engine):
    calls = engine.calls()
    lease = calls.match([1])
    future = calls.allocate(lease, 4)
    begun = calls.begin(engine.cache.drain)
    assert future.cancel()
    assert begun.cancel()
    calls.run()
    assert lease.state is LeaseState.MATCHED
    assert future.cancelled()
    assert concurrent.futures.wait([future, begun]).not_done == set()
    lease.release()


def test_a_future_with_a_value_cannot_be_cancelled(engine):
    with engine.match([1]) as lease:
        future = lease.allocate(4)
        assert not future.cancel()
        assert lease.state is LeaseState.GRANTED


def test_a_deadline_passes_on_the_clock_of_the_loop(config):
    with SyncEngine(config, loop_factory=clocked_loop(uvloop.Loop)) as engine:
        holder, lease = engine.match([1]), engine.match([2])
        holder.allocate(ALL).result()
        future = lease.allocate(ALL, timeout=30)
        with pytest.raises(TimeoutError):
            future.result(timeout=0)
        assert not future.done()
        engine.call(engine.cache.loop.clock.advance, 31)
        with pytest.raises(AllocateTimeout, match="30"):
            future.result()
        assert isinstance(future.exception(), AllocateTimeout)
        for held in [holder, lease]:
            held.release()


@pytest.mark.parametrize(
    "wrong", [{"timeout": "long"}, {"priority": 1.5}, {"wait_pending": "long"}, {"wait_store": ""}]
)
def test_a_wrong_argument_is_an_error_of_the_future(engine, wrong):
    with engine.match([1]) as lease:
        with pytest.raises(UsageError):
            lease.allocate(4, **wrong).result()
        assert lease.state is LeaseState.MATCHED


def test_the_engine_thread_does_not_wait_for_itself(engine, full):
    with engine.match([2]) as lease:
        future = lease.allocate(ALL)
        with pytest.raises(UsageError, match="own thread"):
            engine.call(future.result)
        with pytest.raises(UsageError, match="own thread"):
            engine.call(engine.close)
        future.cancel()


def test_callbacks_make_calls_at_once_in_the_engine_thread(engine, full):
    tables = []
    with engine.match([2]) as lease:
        future = lease.allocate(ALL)
        ended = threading.Event()

        def on_grant(_):
            tables.append((threading.current_thread().name, lease.num_tokens))
            ended.set()

        future.add_done_callback(on_grant)
        full.release()
        assert ended.wait(PATIENCE_SECONDS)
    assert tables == [("aiokv-engine", ALL)]


def test_submit_awaits_and_cancel_ends_the_coroutine(engine, full):
    future = engine.submit(engine.cache.quiesce)
    assert engine.health().is_paused
    assert future.cancel()
    assert concurrent.futures.wait(
        [future], timeout=PATIENCE_SECONDS
    ).done  # the coroutine has ended
    assert not engine.health().is_paused
    full.release()
    engine.call(engine.cache.quiesce, timeout=PATIENCE_SECONDS)
    engine.call(engine.cache.resume)
    assert not engine.health().is_paused


def test_a_coroutine_that_cancels_itself_cancels_its_future(engine):
    async def give_up():
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        engine.call(give_up)
    assert (
        concurrent.futures.wait([engine.submit(give_up)], timeout=PATIENCE_SECONDS).not_done
        == set()
    )


def test_an_error_of_a_submitted_function_is_raised(engine):
    def fail():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        engine.call(fail)
    assert engine.health().phase == "open"


@pytest.fixture
def interrupts():
    """A function that interrupts the main thread and waits, and an event that lets it return."""
    main, arrived, go_on = threading.main_thread().ident, threading.Event(), threading.Event()

    def on_signal(*_):
        if not arrived.is_set():
            arrived.set()
            raise KeyboardInterrupt

    def interrupt():
        while not arrived.wait(0.01):  # a signal that comes just before a wait does not end it
            signal.pthread_kill(main, signal.SIGINT)
        assert go_on.wait(PATIENCE_SECONDS)

    before = signal.signal(signal.SIGINT, on_signal)
    yield interrupt, go_on
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_goes_on_and_may_be_awaited_again(engine, interrupts):
    interrupt, go_on = interrupts
    made = []
    calls = engine.calls()
    lease = calls.match([1])
    calls.add(interrupt)
    granted = calls.try_allocate(lease, 4)
    calls.add(made.append, 1)
    begun, send = threading.Event(), threading.Event()
    engine.submit(lambda: (begun.set(), send.wait(PATIENCE_SECONDS)))  # so that the loop makes them
    assert begun.wait(PATIENCE_SECONDS)
    calls.post()
    send.set()
    with pytest.raises(KeyboardInterrupt):
        calls.run()
    assert not granted.done
    go_on.set()
    calls.run()
    assert granted.value is True
    assert made == [1]
    lease.release()


def test_an_interrupted_direct_call_leaks_nothing(engine, interrupts):
    interrupt, go_on = interrupts
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the interrupt comes at once
        engine.cache.loop.call_soon_threadsafe(interrupt)
        engine.match([1])
    go_on.set()
    engine.call(lambda: None)  # the match is made
    gc.collect()  # the traceback of the interrupt refers to the lease
    engine.call(lambda: None)
    assert engine.statistics().leases == 0


def test_an_interrupted_wait_is_cancelled(engine, full, interrupts):
    interrupt, go_on = interrupts
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the interrupt comes at once
        engine.cache.loop.call_soon_threadsafe(interrupt)
        engine.call(engine.cache.quiesce)
    go_on.set()
    engine.call(spin, 10)
    assert not engine.health().is_paused
