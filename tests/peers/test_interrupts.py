"""KeyboardInterrupt in one of two engines that exchange blocks breaks that engine only."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import uvloop

from aiokv.errors import AiokvError, BrokenEngineError
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.interrupting import Interrupter, first_of_each
from tests.peers.engines import Side, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv import Lease

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

TOKENS = prompt(22)
RUNS = 8  # of the guarded lines, evenly spread


async def move(p: Side, d: Side, leases: list[Lease]) -> None:
    """Send a prompt, of which both engines have a part; compare all bytes that arrive."""
    await p.serve(TOKENS[:9])
    lease = await d.granted(TOKENS)
    leases.append(lease)
    async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
        sending = asyncio.create_task(p.prefill(TOKENS, receiving.ticket))
        arrived = await receiving.wait()
        d.check(lease, TOKENS, arrived)
        await sending
    lease.release()


async def close(p: Side, d: Side, leases: list[Lease]) -> None:
    """A broken engine refuses calls; both engines close."""
    refusing = 0
    for side in (p, d):
        try:
            side.engine.match(TOKENS).release()
        except BrokenEngineError:
            refusing += 1
    assert refusing == 1
    for lease in leases:
        lease.release()
    for side in (p, d):
        await asyncio.wait_for(side.engine.aclose(drain_timeout=0.0), PATIENCE_SECONDS)


def finish(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Run a loop until a future is done.

    An interrupt stops uvloop once more when it runs again, with a RuntimeError.
    """
    while not future.done():
        with suppress(KeyboardInterrupt, RuntimeError):
            loop.run_until_complete(future)
    future.result()


def play(new_loop: LoopFactory, at: int) -> Interrupter:
    loop, leases = new_loop(), list["Lease"]()
    loop.set_exception_handler(lambda _, context: None)
    p, d = Side(listen=None), Side()
    for side in (p, d):
        loop.run_until_complete(side.engine.__aenter__())
    moving = loop.create_task(move(p, d, leases))
    with Interrupter(at) as interrupter, suppress(KeyboardInterrupt, AiokvError):
        loop.run_until_complete(moving)
    if interrupter.has_raised:  # a run may have fewer lines than the one that counted them
        finish(loop, loop.create_task(close(p, d, leases)))
        for task in asyncio.all_tasks(loop):
            task.cancel()
    else:
        for side in (p, d):
            finish(loop, loop.create_task(side.engine.aclose()))
    for _ in range(2):
        finish(loop, loop.create_task(asyncio.sleep(0)))
    loop.close()
    return interrupter


# A task that is interrupted before it has returned its lease leaves the lease to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_interrupt_at_a_guarded_line_breaks_one_engine_and_both_close(
    new_loop: LoopFactory,
) -> None:
    lines = first_of_each(play(new_loop, 0).places)
    assert len(lines) > 200
    played = [play(new_loop, at) for at in lines[:: len(lines) // RUNS]]
    assert sum(run.has_raised for run in played) > RUNS // 2
