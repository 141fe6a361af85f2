"""FetchLine: turns of fetches, and the expected time of all fetches in line."""

from __future__ import annotations

import pytest

from aiokv.engine.fetch_line import AT_A_TIME, FetchLine

pytestmark = pytest.mark.asyncio


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_turns_come_in_order_of_arrival():
    line = FetchLine(Time())
    places = [line.enter(1.0) for _ in range(AT_A_TIME + 2)]
    assert [place.turn.done() for place in places] == [True, True, False, False]
    assert line.num_fetching == AT_A_TIME
    line.leave(places[2])  # it no longer waits
    line.leave(places[0])
    assert places[3].turn.done()
    for place in places:
        line.leave(place)
        line.leave(place)
    assert line.is_empty


async def test_place_whose_wait_was_cancelled_gets_no_turn_before_it_leaves():
    line = FetchLine(Time())
    places = [line.enter(1.0) for _ in range(AT_A_TIME + 2)]
    places[2].turn.cancel()
    line.leave(places[2])
    line.leave(places[0])
    assert places[3].turn.done()


async def test_expected_time_of_the_line_is_the_sum_of_its_fetches():
    clock = Time()
    line = FetchLine(clock)
    assert line.seconds == 0
    first = line.enter(1.0)
    assert line.seconds == pytest.approx(1.0)
    line.enter(2.0)
    line.enter(3.0)
    assert line.seconds == pytest.approx(6.0)
    clock.now += 1.0  # two of them share the store
    assert line.seconds == pytest.approx(5.0)
    line.note(first, 0.25)
    assert line.seconds == pytest.approx(0.25 + 1.5 + 3.0)
    clock.now += 10.0
    assert line.seconds == pytest.approx(3.0)  # both are late, so the time of their rest is unknown
    line.leave(first)
    assert line.seconds == pytest.approx(3.0)
