"""An exception such as KeyboardInterrupt at any guarded line breaks the engine, and nothing else.

Guarded are the transitions of the scheduler, the application of their effects, and the passes of
the poller. After the exception no wrong byte is served, every call raises BrokenEngineError,
``aclose`` returns, the memory is free and no thread is left.
"""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import BrokenEngineError, ClosedError, TransferError
from aiokv.testing import ManualEvent, ScriptedStore, run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.interrupting import Interrupter, first_of_each
from tests.harness.patience import PROGRAM_SECONDS
from tests.harness.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv import Lease

    Scenario = Callable[[Served, list[Lease]], Coroutine[Any, Any, None]]
    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

A, B = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 11, 12, 13]
STRIDE = 3  # every line takes 20 s
SAMPLES = 20  # of the lines, for other loops and exceptions


async def complete(device: Any) -> None:
    while True:
        for copy in device.copies:
            if copy.after is None or copy.after.done:
                copy.complete_all()
        await asyncio.sleep(0)


async def serve_all(served: Served, leases: list[Lease]) -> None:
    """Backups, onloads that two leases join, a swap, steps, a cancellation; all bytes checked."""
    engine = served.engine
    await served.serve(A)
    event = ManualEvent()
    engine.step(event)
    asyncio.get_running_loop().call_soon(event.complete)
    await engine.drain()
    await engine.evict(8)
    for array in served.kv:
        array[:] = 0
    first, second, gone = (engine.match(tokens) for tokens in (A, A, B))
    leases += first, second, gone
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
    waiting = engine.match(B)
    leases.append(waiting)
    await waiting.allocate(16, timeout=PATIENCE_SECONDS)
    resuming = asyncio.create_task(first.resume(7))
    await asyncio.sleep(0)
    waiting.append([1])
    waiting.commit(8)
    engine.extend([waiting], 0)
    engine.advance(engine.batch([waiting]), [2])
    waiting.release()
    engine.step()
    await resuming
    engine.step()  # blocks released earlier are free from here on
    await first.layers.wait_all(PATIENCE_SECONDS)
    served.check(first, A, 6)
    first.release()
    engine.step()
    await engine.drain()


async def save_and_fetch(served: Served, leases: list[Lease]) -> None:
    """Blocks that go to a store and come back; all bytes checked."""
    engine = served.engine
    store: Any = served.store  # type: ignore[attr-defined]
    await served.serve(A)
    engine.step()
    await run_until_idle(lambda: len(store.objects) == 3)
    await engine.drain()
    await engine.evict(8)
    await engine.evict(16, "host")
    for array in served.kv:
        array[:] = 0
    lease = engine.match(A)
    leases.append(lease)
    await lease.allocate(len(A), timeout=PATIENCE_SECONDS, wait_store=math.inf)
    await lease.layers.wait_all(PATIENCE_SECONDS)
    assert lease.cached_tokens == 6
    served.check(lease, A, 6)
    lease.release()
    engine.step()
    await engine.drain()


def plain() -> Served:
    served = Served()
    served.device.computes_in_stream = True
    return served


def with_store() -> Served:
    store = ScriptedStore()
    served = Served(stores=[store])
    served.store = store  # type: ignore[attr-defined]
    return served


SCENARIOS = pytest.mark.parametrize(
    ("new", "scenario"),
    [(plain, serve_all), (with_store, save_and_fetch)],
    ids=["device", "store"],
)


async def run(served: Served, scenario: Scenario, leases: list[Lease]) -> None:
    completing = asyncio.create_task(complete(served.device))
    try:
        await scenario(served, leases)
    finally:
        completing.cancel()


def refused_calls(engine: CacheEngine, leases: list[Lease]) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = [
        lambda: engine.match(A),
        engine.step,
        engine.pause,
        lambda: engine.computing(leases[:1]).__enter__(),
        lambda: engine.extend(leases[:1], 1),
        lambda: engine.advance(engine.batch(), []),
    ]
    for lease in leases:
        if lease.id:
            calls += [
                lambda lease=lease: lease.state,  # type: ignore[misc]
                lambda lease=lease: lease.cached_tokens,  # type: ignore[misc]
                lambda lease=lease: lease.append([1]),  # type: ignore[misc]
                lambda lease=lease: lease.commit(1),  # type: ignore[misc]
                lambda lease=lease: lease.truncate(1),  # type: ignore[misc]
                lambda lease=lease: lease.try_allocate(1),  # type: ignore[misc]
            ]
    return calls


async def check_broken(served: Served, leases: list[Lease]) -> None:
    """All calls are refused, no layer of an onload in flight arrives, and closing ends."""
    engine = served.engine
    await spin(2)  # waits end in the next pass
    for call in refused_calls(engine, leases):
        with pytest.raises(BrokenEngineError, match="has ended a change of its state"):
            call()
    for waits in (engine.evict(1), engine.reset(), engine.drain(), engine.sleep()):
        with pytest.raises(BrokenEngineError):
            await asyncio.wait_for(waits, PATIENCE_SECONDS)
    for lease in leases:
        if not lease.layers.is_done:
            with pytest.raises(TransferError):
                await lease.layers.wait_all(PATIENCE_SECONDS)
        lease.release()
    assert served.device is not None
    served.device.complete_all()  # as a device does when it is closed
    await asyncio.wait_for(engine.aclose(), PATIENCE_SECONDS)
    with pytest.raises(ClosedError):
        engine.match(A)


def complete_on(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, None] | asyncio.Task[None],
    exception: type[BaseException],
) -> None:
    """Run to the end, also when tasks that await the interrupted one raise its exception again."""
    task = asyncio.ensure_future(work, loop=loop)
    while not task.done():
        with suppress(exception, RuntimeError):  # uvloop stops after SystemExit of a callback
            loop.run_until_complete(task)
    task.result()


def play(
    new_loop: LoopFactory,
    new: Callable[[], Served],
    scenario: Scenario,
    at: int,
    exception: type[BaseException] = KeyboardInterrupt,
) -> Interrupter:
    """Run a scenario, raise the exception before the ``at``-th line, and check what is left."""
    loop, served, leases = new_loop(), new(), list[Any]()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    loop.run_until_complete(served.engine.__aenter__())
    task = loop.create_task(run(served, scenario, leases))
    loop.call_later(PATIENCE_SECONDS, task.cancel)
    with (
        Interrupter(at, exception) as interrupter,
        suppress(exception, BrokenEngineError, TransferError),
    ):
        loop.run_until_complete(task)
    if interrupter.has_raised:  # a run may have fewer lines than the one that counted them
        complete_on(loop, check_broken(served, leases), exception)
        raised = [context.get("exception") for context in errors]
        assert all(isinstance(e, (exception, BrokenEngineError)) for e in raised), (at, raised)
    else:
        loop.run_until_complete(served.engine.aclose())
    task.cancel()  # it may wait for what the test has prepared
    with suppress(asyncio.CancelledError, exception, BrokenEngineError, TransferError):
        complete_on(loop, task, exception)
    loop.run_until_complete(asyncio.sleep(0))
    assert not asyncio.all_tasks(loop)
    loop.close()
    # Its memory is free: another engine gets the tensors and the device.
    again = CacheEngine(
        CacheConfig(block_tokens=2, device_blocks=8, host_blocks=4),
        served.memory.regions,
        served.device,
    )
    asyncio.run(_open_and_close(again))
    return interrupter


async def _open_and_close(engine: CacheEngine) -> None:
    async with engine:
        pass


@SCENARIOS
def test_interrupt_at_any_guarded_line_breaks_the_engine(
    new: Callable[[], Served], scenario: Scenario
) -> None:
    lines = first_of_each(play(asyncio.new_event_loop, new, scenario, 0).places)
    assert len(lines) > 500
    played = [play(asyncio.new_event_loop, new, scenario, at) for at in lines[::STRIDE]]
    assert sum(run.has_raised for run in played) > len(played) * 0.9


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
@SCENARIOS
def test_other_loop_and_exception_break_the_engine_likewise(
    new: Callable[[], Served], scenario: Scenario, exception: type[BaseException]
) -> None:
    lines = first_of_each(play(uvloop.new_event_loop, new, scenario, 0).places)
    for at in lines[:: len(lines) // SAMPLES]:
        play(uvloop.new_event_loop, new, scenario, at, exception)


def out_of_memory(*_: object) -> Any:
    raise MemoryError("std::bad_alloc")


async def in_transition(served: Served, monkeypatch: pytest.MonkeyPatch) -> Lease:
    monkeypatch.setattr(served.engine.inspect.parts.scheduler._preemption, "preempt", out_of_memory)
    lease = served.engine.match(A)
    await lease.allocate(7)
    with pytest.raises(MemoryError):
        await lease.preempt()
    return lease


async def in_effects(served: Served, monkeypatch: pytest.MonkeyPatch) -> Lease:
    await served.to_host(A)
    monkeypatch.setattr(served.engine.inspect.parts.worker.plans, "submit", out_of_memory)
    lease = served.engine.match(A)
    with pytest.raises(MemoryError):
        await lease.allocate(7)
    return lease


async def in_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> Lease:
    lease = served.engine.match(A)
    monkeypatch.setattr(served.engine._lifecycle._steps, "finish", out_of_memory)
    event = ManualEvent()
    served.engine.step(event)
    event.complete()
    await run_until_idle(lambda: not served.engine.inspect.parts.lifetime.is_usable)
    return lease


@pytest.mark.asyncio
@pytest.mark.parametrize("fail", [in_transition, in_effects, in_pass])
async def test_memory_error_breaks_the_engine(
    fail: Callable[[Served, pytest.MonkeyPatch], Coroutine[Any, Any, Lease]],
    monkeypatch: pytest.MonkeyPatch,
    loop_errors: list[dict[str, Any]],
) -> None:
    served = Served()
    await served.engine.__aenter__()
    await check_broken(served, [await fail(served, monkeypatch)])
    loop_errors.clear()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_program_that_ctrl_c_interrupts_closes_its_engine(runner: str, times: int) -> None:
    """The second Ctrl-C ends the wait for a lease that is held."""
    program = Path(__file__).with_name("interrupted_program.py")
    held = ["held"] if times == 2 else []
    with subprocess.Popen(
        [sys.executable, str(program), runner, *held], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            said.append(process.stdout.readline())
        said += process.stdout.readlines()
        assert process.wait(PROGRAM_SECONDS) == 0
    expected = ["serving\n", "closing\n", "interrupted\n", "closed, 0 threads left\n"]
    assert said == expected
