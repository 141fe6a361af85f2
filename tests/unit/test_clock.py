"""Clock that only the test advances, on both kinds of loop."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.testing import running_clock, spin

pytestmark = pytest.mark.clock


@pytest.mark.asyncio
async def test_timeouts_expire_when_the_test_advances_the_clock():
    clock = running_clock()
    ended: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.Event().wait()
        ended.append((name, clock.now))
        if name == "short":
            await wait("again", seconds)

    tasks = [asyncio.create_task(wait(n, s)) for n, s in (("long", 3600.0), ("short", 1.0))]
    await spin(50)
    assert ended == []
    await clock.advance(2.5)
    assert ended == [("short", 1001.0), ("again", 1002.0)], "in order, each at its time"
    await clock.advance(3600)
    await asyncio.gather(*tasks)
    assert ended[-1] == ("long", 4600.0)
    assert (clock.timers, clock.now) == (0, 4602.5)


@pytest.mark.asyncio
async def test_cancelled_timers_do_not_fire():
    clock, loop, calls = running_clock(), asyncio.get_running_loop(), []
    timers = [loop.call_later(seconds, calls.append, seconds) for seconds in (1, 2, 3)]
    loop.call_at(clock.now + 1.5, timers[1].cancel)
    timers[2].cancel()
    assert clock.timers == 3
    await clock.advance(10)
    assert calls == [1]
    with pytest.raises(ValueError, match="-1"):
        await clock.advance(-1)


@pytest.mark.asyncio
async def test_timer_exception_reaches_the_loop_exception_handler(loop_errors):
    def fail() -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().call_later(1, fail)
    await running_clock().advance(1)
    (error,) = loop_errors
    assert isinstance(error["exception"], ZeroDivisionError)
    loop_errors.clear()


def test_other_loops_have_no_clock():
    async def ask() -> None:
        with pytest.raises(RuntimeError, match="clocked_loop"):
            running_clock()

    asyncio.run(ask())
