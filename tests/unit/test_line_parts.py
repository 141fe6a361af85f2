"""Work that is spread over passes of the loop, and waits that are ended in groups."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.engine.lines import PER_PASS, InPasses, Waiter, Wakeups
from aiokv.errors import ClosedError
from aiokv.scheduler.admission import Admission
from aiokv.testing import spin

pytestmark = pytest.mark.asyncio


class Work:
    """So many pieces; ``raises_at`` interrupts the step that does that piece."""

    def __init__(self, pieces: int, raises_at: int = -1) -> None:
        self.left = pieces
        self.raises_at = raises_at
        self.passes = InPasses(self.step)

    def step(self) -> bool:
        if self.left == self.raises_at:
            self.raises_at = -1
            raise KeyboardInterrupt
        self.left -= self.left > 0
        return self.left > 0


async def test_small_work_is_done_at_once():
    work = Work(PER_PASS)
    work.passes.start()
    assert work.left == 0


async def test_large_work_goes_on_in_later_passes_and_ends():
    work = Work(3 * PER_PASS)
    for left in (2, 1, 0):
        work.passes.start()  # also while it goes on: no pass does more
        work.passes.start()
        assert work.left == left * PER_PASS
        await spin()
        left -= 1
    await spin(3)
    work.left = 1
    await spin(3)
    assert work.left == 1, "nothing is scheduled any more"
    work.passes.start()
    assert work.left == 0


async def test_interrupted_work_goes_on_in_the_next_pass():
    work = Work(5, raises_at=3)
    with pytest.raises(KeyboardInterrupt):
        work.passes.start()
    assert work.left == 3
    await spin()
    assert work.left == 0


async def test_step_that_makes_more_work_is_called_again():
    calls: list[int] = []

    def step() -> bool:
        calls.append(len(calls))
        if len(calls) == 1:
            passes.start()
        return False

    passes = InPasses(step)
    passes.start()
    assert calls == [0, 1]


async def test_waiters_end_in_order_of_rank_up_to_the_given_one():
    line: Admission[Waiter] = Admission()
    waiters = [Waiter(i, line, rank) for i, rank in enumerate((3, 1, 2))]
    wakeups = Wakeups()
    wakeups.end_all([line], up_to=2)
    assert [waiter.is_woken for waiter in waiters] == [False, True, True]
    assert len(line) == 1
    wakeups.end_all([line])
    assert waiters[0].is_woken
    for waiter in waiters:
        await waiter.wait()


async def test_each_waiter_gets_an_error_of_its_own():
    line: Admission[Waiter] = Admission()
    waiters = [Waiter(i, line, 0) for i in range(3)]
    Wakeups().end_all([line], failure=lambda: ClosedError("closed"))
    errors = []
    for waiter in waiters:
        with pytest.raises(ClosedError) as caught:
            await waiter.wait()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3


async def test_waiter_that_left_before_its_turn_is_not_woken():
    line: Admission[Waiter] = Admission()
    waiters = [Waiter(i, line, 0) for i in range(2 * PER_PASS)]
    wakeups = Wakeups()
    wakeups.end_all([line])
    waiters[-1].leave()
    await asyncio.sleep(0)
    assert [waiter.is_woken for waiter in waiters] == [True] * (2 * PER_PASS - 1) + [False]
    assert wakeups.lines() == []
