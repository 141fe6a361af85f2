"""Calls that a thread makes itself while the loop of the engine waits for events."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from aiokv.engine.dispatcher import Dispatcher
from aiokv.errors import BrokenEngineError, UsageError
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.sync import SyncEngine
from aiokv.sync.loop import SharedLoop
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv import CacheConfig

PROMPT = list(range(16))


@pytest.fixture
def shared(config: CacheConfig) -> Iterator[SyncEngine]:
    with SyncEngine(config) as engine:
        rest(engine)
        yield engine


def rest(engine: SyncEngine) -> None:
    """Wait until the loop waits for events, and no callback is due."""
    while not engine.cache.loop.call_here(lambda: True):
        pass


def thread_of(engine: SyncEngine) -> int:
    return engine.call(get_ident)


@contextmanager
def busy(engine: SyncEngine) -> Iterator[None]:
    """Keep the loop in a callback."""
    entered, go_on = threading.Event(), threading.Event()
    engine.submit(lambda: (entered.set(), go_on.wait(PATIENCE_SECONDS)))
    assert entered.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        go_on.set()


def test_calls_are_made_in_the_thread_of_their_caller_while_the_loop_waits(shared):
    calls = shared.calls()
    made_in = calls.add(get_ident)
    lease = calls.match(PROMPT)
    granted = calls.try_allocate(lease, 16)
    calls.run()
    assert made_in.value == get_ident()
    assert granted.value
    assert asyncio._get_running_loop() is None
    lease.release()


def test_posted_calls_are_made_in_the_thread_of_the_loop_while_it_waits(shared):
    calls = shared.calls()
    assert calls.done  # there are none
    made_in = calls.add(get_ident)
    assert not calls.done
    calls.post()
    shared.call(int)  # behind the posted calls
    assert calls.done
    assert made_in.value == thread_of(shared) != get_ident()


def test_calls_are_made_in_the_thread_of_the_loop_while_it_is_busy(shared):
    calls = shared.calls()
    made_in = calls.add(get_ident)
    with busy(shared):
        calls.post()
        assert not calls.done
    calls.run()
    assert made_in.value == thread_of(shared) != get_ident()


def test_calls_of_a_thread_with_a_running_loop_are_made_in_the_thread_of_the_engine(shared):
    async def call() -> int:
        calls = shared.calls()
        made_in = calls.add(get_ident)
        calls.run()
        return made_in.value

    assert asyncio.run(call()) == thread_of(shared)


def test_other_loops_make_all_calls_in_their_thread(config):
    with SyncEngine(config, loop_factory=uvloop.new_event_loop) as engine:
        calls = engine.calls()
        made_in = calls.add(get_ident)
        calls.run()
        assert made_in.value == thread_of(engine) != get_ident()


def test_callbacks_and_timers_of_a_call_wake_the_loop(shared):
    loop, ran = shared.cache.loop, Future()
    calls = shared.calls()
    calls.add(loop.call_soon, lambda: ran.set_result(get_ident()))
    calls.run()
    engine_thread = ran.result(PATIENCE_SECONDS)
    assert engine_thread != get_ident()
    rest(shared)
    rang = Future()
    calls = shared.calls()
    far = calls.add(loop.call_later, 10 * PATIENCE_SECONDS, pytest.fail)
    calls.add(loop.call_later, 0.001, lambda: rang.set_result(get_ident()))
    calls.run()
    assert rang.result(PATIENCE_SECONDS) == engine_thread
    far.value.cancel()


def test_an_event_of_a_call_is_seen(shared):
    """A reader that a call adds belongs to the wait that goes on."""
    arrived, (read, write) = Future(), os.pipe()
    loop = shared.cache.loop
    calls = shared.calls()
    calls.add(loop.add_reader, read, lambda: arrived.done() or arrived.set_result(None))
    calls.run()
    os.write(write, b"x")
    arrived.result(PATIENCE_SECONDS)
    shared.call(loop.remove_reader, read)
    os.close(read)
    os.close(write)


def test_event_of_a_descriptor_that_a_call_has_closed_meanwhile_is_dropped(shared):
    """Its number may belong to another descriptor, whose reader must stay."""
    loop, first, second = shared.cache.loop, [], Future()
    old, old_end = os.pipe()
    new, new_end = os.pipe()

    def exchange() -> None:
        loop.add_reader(old, first.append, 1)
        os.write(old_end, b"x")  # the loop's thread has the event now, and waits for its turn
        while not loop_is_back():
            pass
        loop.remove_reader(old)
        os.dup2(new, old)  # as if the number was given to another file
        loop.add_reader(old, lambda: second.done() or second.set_result(None))

    def loop_is_back() -> bool:
        frame = sys._current_frames()[engine_thread]
        while frame is not None:
            if frame.f_code.co_qualname == "EpollSelector.select":
                return False
            frame = frame.f_back
        return True

    engine_thread = thread_of(shared)
    rest(shared)
    calls = shared.calls()
    calls.add(exchange)
    calls.run()
    os.write(new_end, b"x")
    second.result(PATIENCE_SECONDS)
    assert first == []
    shared.call(loop.remove_reader, old)
    for descriptor in (old, old_end, new, new_end):
        os.close(descriptor)


def test_a_cancelled_future_has_its_effect_before_the_next_call(shared):
    holder = shared.match([1])
    holder.allocate(32).result()
    first = shared.match([2]).allocate(32)
    last = shared.match([3])
    second = last.allocate(4)
    rest(shared)
    assert first.cancel()
    holder.release()
    second.result(PATIENCE_SECONDS)
    last.release()


def test_a_call_comes_behind_what_its_thread_has_scheduled_before(config):
    """Even if the loop makes a pass while ``call_soon_threadsafe`` is about to schedule it."""

    class InterruptedLoop(SharedLoop):
        caller = 0  # thread that is interrupted, and whose next wake-up comes late

        def _check_closed(self) -> None:
            super()._check_closed()
            if get_ident() == self.caller:
                super()._write_to_self()
                while not self.call_here(lambda: True):
                    pass

        def _write_to_self(self) -> None:
            if get_ident() != self.caller:
                super()._write_to_self()
            self.caller = 0

    with SyncEngine(config, loop_factory=InterruptedLoop) as engine:
        rest(engine)
        loop, made = engine.cache.loop, []
        loop.caller = get_ident()
        loop.call_soon_threadsafe(made.append, 1)
        calls = engine.calls()
        calls.add(made.append, 2)
        calls.run()
        assert made == [1, 2]


def test_a_loop_that_wants_its_turn_gets_it_from_a_thread_that_always_calls(shared):
    """The wake-up of each pass is refused to the caller until the loop has run."""
    ran, ended = [], threading.Event()

    def call() -> None:
        while not ended.is_set():
            shared.health()

    with ThreadPoolExecutor(1) as threads:
        caller = threads.submit(call)
        for number in range(200):
            shared.call(ran.append, number)
        ended.set()
        caller.result(PATIENCE_SECONDS)
    assert ran == list(range(200))


def test_two_threads_never_run_engine_code_at_once(shared, monkeypatch):
    inside, overlaps, makers = [], [], set()

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            me = get_ident()
            makers.add(me)
            inside.append(me)
            if any(other != me for other in list(inside)):
                overlaps.append(list(inside))
            os.sched_yield()  # without the GIL
            try:
                return function(*args, **kwargs)
            finally:
                os.sched_yield()
                if any(other != me for other in list(inside)):
                    overlaps.append(list(inside))
                inside.remove(me)

        return call

    for name in ("match", "try_allocate", "commit", "release", "close_step"):
        monkeypatch.setattr(CacheScheduler, name, watched(getattr(CacheScheduler, name)))
    monkeypatch.setattr(Dispatcher, "apply", watched(Dispatcher.apply))

    begin = threading.Barrier(4)

    def serve(seed: int) -> None:
        begin.wait(PATIENCE_SECONDS)
        for number in range(100):
            prompt = [seed, *range(number % 12)]
            lease = shared.match(prompt)
            lease.allocate(len(prompt)).result(PATIENCE_SECONDS)  # may wait, on the loop
            lease.commit(len(prompt))
            shared.step()
            lease.release()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(serve, range(4)))
    assert overlaps == []
    assert len(makers) > 1


def test_calls_inside_a_call_are_made_at_once(shared):
    calls = shared.calls()
    nested = calls.add(lambda: shared.would_hit(PROMPT).total)
    refused = calls.add(shared.close)
    calls.run(raise_errors=False)
    assert nested.value == 0
    assert isinstance(refused.error, UsageError)


def test_debug_mode_accepts_calls_of_the_thread_with_the_turn(config):
    def new_loop() -> SharedLoop:
        loop = SharedLoop()
        loop.set_debug(True)
        return loop

    with SyncEngine(config, loop_factory=new_loop) as engine:
        rest(engine)
        ran = Future()
        calls = engine.calls()
        calls.add(engine.cache.loop.call_soon, ran.set_result, None)
        calls.run()
        ran.result(PATIENCE_SECONDS)
        with pytest.raises(RuntimeError, match="Non-thread-safe"):
            engine.cache.loop.call_soon(print)


@pytest.fixture
def interrupt() -> Iterator[Any]:
    """A function that interrupts the main thread, which calls it."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raise_interrupt)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("raise_errors", [True, False])
def test_an_interrupted_call_is_not_made_twice_and_the_others_are_made(
    shared, interrupt, raise_errors
):
    calls, made = shared.calls(), []
    calls.add(made.append, 1)
    interrupted = calls.add(interrupt)
    future = calls.begin(asyncio.sleep, 0)
    calls.add(made.append, 2)
    with pytest.raises(KeyboardInterrupt):
        calls.run(raise_errors=raise_errors)
    with pytest.raises(KeyboardInterrupt):
        calls.run(raise_errors=raise_errors)
    assert isinstance(interrupted.error, KeyboardInterrupt)
    assert made == [1, 2]
    assert future.result(PATIENCE_SECONDS) is None
    assert asyncio._get_running_loop() is None
    assert shared.health().phase == "open"


def test_an_interrupt_between_two_calls_leaves_the_rest_for_the_next_run(shared, monkeypatch):
    made = []

    class Stopping(list):
        """Answers whose iteration is interrupted once, behind the first."""

        is_first = True

        def __iter__(self) -> Iterator[Any]:
            for answer in list.__iter__(self):
                yield answer
                if self.is_first:
                    Stopping.is_first = False
                    raise KeyboardInterrupt

    calls = shared.calls()
    answers = Stopping()
    monkeypatch.setattr(calls, "_answers", answers)
    monkeypatch.setattr(calls, "_add", answers.append)
    calls.add(made.append, 1)
    calls.add(made.append, 2)
    with pytest.raises(KeyboardInterrupt):
        calls.run()
    assert made == [1]
    calls.run()
    assert made == [1, 2]


def test_an_interrupt_of_a_transition_in_a_call_breaks_the_engine(shared, monkeypatch, interrupt):
    lease = shared.match(PROMPT)
    lease.allocate(16).result(PATIENCE_SECONDS)
    waiting = shared.match([1]).allocate(32)
    rest(shared)

    with monkeypatch.context() as patch:
        patch.setattr(CacheScheduler, "commit", _interrupted(CacheScheduler.commit, interrupt))
        with pytest.raises(KeyboardInterrupt):
            lease.commit(16)
    with pytest.raises(BrokenEngineError):
        shared.would_hit(PROMPT)
    with pytest.raises(BrokenEngineError):
        waiting.result(PATIENCE_SECONDS)
    lease.release()


def _interrupted(method: Any, interrupt: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            method(self, *args, **kwargs)
            interrupt()
        except BaseException as error:
            self.errors.note(error)
            raise

    return call
