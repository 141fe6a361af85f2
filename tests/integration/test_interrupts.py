"""Ctrl-C at any line of a loop callback: no event is lost and every request is served."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
import uvloop

import aiokv
from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.testing import ManualEvent, ScriptedStore, run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.served import BLOCK_TOKENS, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

    from aiokv.base.plan import TransferReport
    from aiokv.scheduler.effects import Effects

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

LOOPS = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
HERE = str(Path(aiokv.__file__).parent)
A, B = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 11, 12, 13]
RUNS = 120  # of the lines of callbacks, evenly spread
INTERRUPTS = 40


class Interrupter:
    """Tracer that raises KeyboardInterrupt before the n-th aiokv line of loop callbacks.

    Lines that a task executes do not count: there, the interrupt ends the user's own code.
    """

    def __init__(self, at: int = 0) -> None:
        self.lines = 0
        self._at = at

    def __enter__(self) -> Self:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        filename = frame.f_code.co_filename
        if not filename.startswith(HERE) or "/testing/" in filename:
            return None
        loop = asyncio._get_running_loop()
        if loop is None or asyncio.current_task(loop) is not None:
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._on_line


def run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine to its end, also after interrupts; return the number of interrupts."""
    task = loop.create_task(main)
    loop.call_later(PATIENCE_SECONDS, task.cancel)
    interrupts = 0
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            interrupts += 1
    task.result()
    return interrupts


async def complete(device: Any) -> None:
    while True:
        for copy in device.copies:
            if copy.after is None or copy.after.done:
                copy.complete_all()
        await asyncio.sleep(0)


async def serve_all(served: Served, *, in_stream: bool) -> None:
    """Backups, onloads that two leases join, a swap, steps, a cancellation; all bytes checked."""
    engine, device = served.engine, served.device
    assert device is not None
    device.computes_in_stream = in_stream
    async with engine:
        completing = asyncio.create_task(complete(device))
        await served.serve(A)
        event = ManualEvent()
        engine.step(event)
        asyncio.get_running_loop().call_soon(event.complete)
        await engine.drain()
        await engine.evict(8)
        for array in served.kv:
            array[:] = 0
        first, second, gone = engine.match(A), engine.match(A), engine.match(B)
        for lease, tokens in ((first, A), (second, A), (gone, B)):
            await lease.allocate(len(tokens), timeout=PATIENCE_SECONDS)
        gone.release()
        for lease in (first, second):
            await lease.layers.wait_all(PATIENCE_SECONDS)
            assert lease.cached_tokens == 6
            served.check(lease, A, 6)
        second.release()
        with engine.computing([first]) as batch:  # its end is in a callback
            computed = ManualEvent()
            batch.ends_with(computed)
        computed.complete()
        swapping = asyncio.create_task(first.preempt(swap=True))
        await asyncio.sleep(0)
        engine.step()
        await swapping
        await first.resume(7)
        engine.step()  # blocks released earlier are free from here on
        await first.layers.wait_all(PATIENCE_SECONDS)
        served.check(first, A, 6)
        first.release()
        engine.step()
        await engine.drain()
        assert engine.check_invariants() == []
        statistics = engine.statistics()
        assert statistics.leases == 0
        assert (statistics.attention.device.in_flight, statistics.attention.host.in_flight) == (
            0,
            0,
        )
        await engine.aclose()
        completing.cancel()


@LOOPS
@pytest.mark.parametrize("in_stream", [False, True], ids=["computed", "in_stream"])
def test_an_interrupt_at_any_line_of_a_callback_loses_nothing(
    new_loop: LoopFactory, in_stream: bool
) -> None:
    def play(at: int) -> int:
        loop = new_loop()
        with Interrupter(at) as interrupter:
            interrupts = run(loop, serve_all(Served(), in_stream=in_stream))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert interrupts == (0 < at <= interrupter.lines), at
        return interrupter.lines

    lines = play(0)
    assert lines > RUNS
    for at in range(1, lines, max(lines // RUNS, 1)):
        play(at)


async def save_and_fetch(served: Served, store: ScriptedStore) -> None:
    """Blocks that go to a store and come back; all bytes checked."""
    engine, device = served.engine, served.device
    async with engine:
        completing = asyncio.create_task(complete(device))
        await served.serve(A)
        engine.step()
        await run_until_idle(lambda: len(store.objects) == 3)
        await engine.drain()
        await engine.evict(8)
        await engine.evict(16, "host")
        for array in served.kv:
            array[:] = 0
        lease = engine.match(A)
        await lease.allocate(len(A), timeout=PATIENCE_SECONDS, wait_store=math.inf)
        await lease.layers.wait_all(PATIENCE_SECONDS)
        assert lease.cached_tokens == 6
        served.check(lease, A, 6)
        lease.release()
        engine.step()
        await engine.drain()
        assert engine.check_invariants() == []
        assert engine.statistics().attention.host.in_flight == 0
        await engine.aclose()
        completing.cancel()


@LOOPS
def test_an_interrupt_at_any_line_of_a_callback_loses_no_transfer_of_a_store(
    new_loop: LoopFactory,
) -> None:
    def play(at: int) -> int:
        loop, store = new_loop(), ScriptedStore()
        with Interrupter(at) as interrupter:
            interrupts = run(loop, save_and_fetch(Served(stores=[store]), store))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert interrupts == (0 < at <= interrupter.lines), at
        return interrupter.lines

    lines = play(0)
    assert lines > RUNS
    for at in range(1, lines, max(lines // RUNS, 1)):
        play(at)


def prompt(number: int) -> np.ndarray:
    return np.arange(9) + 100 * number


async def serve(engine: CacheEngine, kv: list[np.ndarray], number: int) -> None:
    """Serve a request whose blocks hold its number, and check its hit."""
    tokens = prompt(number)
    async with engine.match(tokens) as lease:
        await lease.allocate(len(tokens))
        await lease.layers.wait_all()
        cached = lease.cached_tokens // BLOCK_TOKENS
        for array in kv:
            assert (array[lease.block_table[:cached]] == number).all()
            array[lease.block_table[cached:]] = number
        lease.commit(len(tokens))


async def serve_until_interrupted(
    engine: CacheEngine, kv: list[np.ndarray], killer: threading.Thread
) -> None:
    await engine.__aenter__()
    killer.start()
    number = 0
    while True:
        number = number % 20 + 1
        await serve(engine, kv, number)
        if number % 5 == 0:
            await engine.evict(40)
        await asyncio.sleep(0)


@LOOPS
# The signal may come between the creation of a coroutine, such as Timeout.__aexit__, and its await.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_after_a_real_sigint_requests_are_served_and_closing_ends(new_loop: LoopFactory) -> None:
    rng = random.Random(7)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    previous = signal.getsignal(signal.SIGINT)
    try:
        for _ in range(INTERRUPTS):
            kv = [np.zeros((64, 4096), np.int8) for _ in range(2)]
            regions = Regions(num_layers=2)
            regions.add("kv", layers=kv)
            sizes = {"device_blocks": 64, "host_blocks": 128, "block_tokens": BLOCK_TOKENS}
            config = CacheConfig(**sizes, drain_timeout_seconds=0.0)
            engine = CacheEngine(config, regions)
            loop = new_loop()
            loop.set_exception_handler(lambda loop, context: None)  # of tasks that it ended
            killer = threading.Timer(
                rng.uniform(0.005, 0.03), signal.pthread_kill, (main_thread, signal.SIGINT)
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(serve_until_interrupted(engine, kv, killer))
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # uvloop may raise for one signal twice
            killer.join()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            serving = asyncio.wait_for(serve(engine, kv, 21), PATIENCE_SECONDS)
            loop.run_until_complete(serving)
            loop.run_until_complete(asyncio.wait_for(engine.aclose(), PATIENCE_SECONDS))
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.asyncio
@pytest.mark.parametrize("outcome", ["done", "failed"])
async def test_a_report_that_is_sent_again_changes_nothing(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt came after the last line of the first delivery."""
    async with Served() as served:
        await served.to_host(A)
        scheduler = served.engine.scheduler
        reports: list[TransferReport] = []
        complete = scheduler.complete

        def noting(report: TransferReport) -> tuple[None, Effects]:
            reports.append(report)
            return complete(report)

        monkeypatch.setattr(scheduler, "complete", noting)
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            (copy,) = served.device.onloads
            copy.complete_all() if outcome == "done" else copy.fail_all(block=1)
            await served.settle()
            assert [report.outcome for report in reports] == [outcome]
            before = served.engine.dump()
            complete(reports[0])
            assert served.engine.dump() == before
            assert served.engine.check_invariants() == []
            assert lease.cached_tokens == (6 if outcome == "done" else 2)
        await served.complete_offloads()
