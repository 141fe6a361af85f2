"""EventPoller: queries of events, their times, and the callbacks."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ClosedError, DeviceError
from aiokv.testing import ManualEvent, run_until_idle, spin
from aiokv.worker import poller as poller_module
from aiokv.worker import watches
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from aiokv.worker.watches import Callback

pytestmark = pytest.mark.asyncio


def opened_poller(loop: asyncio.AbstractEventLoop) -> EventPoller:
    poller = EventPoller()
    poller.open(loop)
    return poller


class Countdown:
    """Event that is done at its n-th query."""

    def __init__(self, queries: int) -> None:
        self.left = queries
        self.asked_at: list[float] = []

    @property
    def done(self) -> bool:
        self.asked_at.append(time.monotonic())
        self.left -= 1
        return self.left <= 0

    def synchronize(self) -> None:
        raise AssertionError("the poller must not block")


class CountingLoop:
    """Loop that counts scheduled callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.calls = 0

    def call_soon(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.calls += 1
        return self._loop.call_soon(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def into(results: list[Any], name: Any = None) -> Callback:
    return lambda error: results.append(error if name is None else name)


async def closed(poller: EventPoller) -> None:
    poller.close()
    await spin(2)  # the timer's descriptor is closed one pass later


async def test_nothing_is_scheduled_while_nothing_is_pending() -> None:
    loop = CountingLoop(asyncio.get_running_loop())
    poller = opened_poller(loop)  # type: ignore[arg-type]
    assert poller.idle
    await spin(3)
    assert loop.calls == 0
    event = Countdown(3)
    await poller.wait(event)
    assert poller.idle
    calls = loop.calls
    await spin(5)
    assert loop.calls == calls
    assert len(event.asked_at) == 3
    await closed(poller)


async def test_done_event_is_not_watched() -> None:
    loop = CountingLoop(asyncio.get_running_loop())
    poller = opened_poller(loop)  # type: ignore[arg-type]
    await poller.wait(Countdown(1))
    assert loop.calls == 0
    assert poller.statistics().queries == 0
    poller.close()


async def test_only_the_first_event_of_each_stream_is_queried() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    heads, tails, seen = [ManualEvent(), ManualEvent()], [ManualEvent(), ManualEvent()], []
    for key in (0, 1):
        poller.watch(heads[key], key, into(seen, f"head{key}"))
        poller.watch(tails[key], key, into(seen, f"tail{key}"))
    tails[0].complete()  # cannot happen on a real stream; it must have no effect
    await spin(3)
    assert seen == []
    assert [tail.queries for tail in tails] == [0, 0]
    assert all(head.queries for head in heads)
    heads[0].complete()
    while len(seen) < 2:
        await spin()
    assert seen == ["head0", "tail0"]
    heads[1].complete()
    tails[1].complete()
    while not poller.idle:
        await spin()
    assert seen == ["head0", "tail0", "head1", "tail1"]
    await closed(poller)


async def test_callbacks_never_run_inside_watch() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[Any] = []
    poller.watch(Countdown(1), "s", into(seen))
    assert seen == []
    await spin(2)
    assert seen == [None]
    await closed(poller)


async def test_a_callback_may_watch_the_next_event() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[int] = []

    def again(error: BaseException | None) -> None:
        seen.append(len(seen))
        if len(seen) < 5:
            poller.watch(Countdown(2), "s", again)

    poller.watch(Countdown(1), "s", again)
    while not poller.idle:
        await spin()
    assert seen == [0, 1, 2, 3, 4]
    await closed(poller)


async def test_no_query_long_before_the_expected_end() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    event = Countdown(3)  # wait() itself queries once
    started = time.monotonic()
    await poller.wait(event, work_seconds=0.0015)
    assert event.asked_at[1] - started >= 0.0015 - poller_module.FIRST_LEAD_SECONDS
    await closed(poller)


async def test_a_wrong_expectation_costs_latency_only() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    event = Countdown(4)
    started = time.monotonic()
    await poller.wait(event, work_seconds=3600.0)
    assert event.asked_at[-1] - started >= 3 * watches.MAX_SLEEP_SECONDS
    await closed(poller)


def poll_now(poller: EventPoller, key: str) -> None:
    """Poll as if the lead before the expected end had begun."""
    stream = poller._streams[key]
    stream.due = stream.next_query = 1e-9
    poller._pass()
    poller.statistics()  # accounts for what has ended


async def test_the_next_expectation_starts_where_an_end_was_seen() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    first, second, seen = ManualEvent(), ManualEvent(), []
    poller.watch(first, "s", into(seen, "first"), work_seconds=60.0)
    poller.watch(second, "s", into(seen, "second"), work_seconds=60.0)
    poll_now(poller, "s")
    before = time.monotonic()
    first.complete()
    poll_now(poller, "s")
    assert seen == ["first"]
    assert before + 60.0 <= poller._streams["s"].ends_at <= time.monotonic() + 60.0
    await closed(poller)


async def test_lead_grows_after_a_missed_end_and_shrinks_after_a_seen_end() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    first, second, seen = Countdown(1), Countdown(2), []
    poller.watch(first, "s", into(seen, "first"), work_seconds=60.0)
    poller.watch(second, "s", into(seen, "second"), work_seconds=60.0)
    poll_now(poller, "s")
    assert seen == ["first"]
    grown = poller.lead_seconds
    assert grown > poller_module.FIRST_LEAD_SECONDS
    assert poller._streams["s"].ends_at <= time.monotonic() + 60.0 - poller_module.MIN_LEAD_SECONDS
    poll_now(poller, "s")
    poll_now(poller, "s")
    assert seen == ["first", "second"]
    assert poller.lead_seconds < grown
    await closed(poller)


async def test_abandoned_work_still_delays_the_expected_end_of_later_work() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[Any] = []
    watches = [poller.watch(ManualEvent(), "s", into(seen), work_seconds=60.0) for _ in range(3)]
    begin = poller._streams["s"].ends_at - 60.0
    watches[1].cancel()
    watches[0].cancel()
    assert poller._streams["s"].ends_at == pytest.approx(begin + 180.0)
    watches[2].cancel()
    assert poller.idle
    await closed(poller)


async def test_a_nearer_expectation_rearms_the_timer(monkeypatch: Any) -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(poller_module, "time", SteppedClock())
        poller.watch(ManualEvent(), "far", into(seen, "far"), work_seconds=60.0)
        armed_for = poller._timer_at
        poller.watch(Countdown(1), "near", into(seen, "near"), work_seconds=0.0005)
        assert poller._timer_at < armed_for
    await poller.wait(Countdown(2), work_seconds=0.001)
    assert seen == ["near"]
    await closed(poller)
    assert seen == ["near", "far"]  # by the ClosedError


async def test_overdue_event_is_queried_less_and_less_often() -> None:
    budget, first = watches.POLL_BUDGET_SECONDS, watches.MIN_BACKOFF_SECONDS
    due = 100.0
    assert watches.next_query(due, due - 1e-3) == due
    assert watches.next_query(due, 50.0) == 50.0 + watches.MAX_SLEEP_SECONDS
    assert watches.next_query(due, due + budget / 2) == due + budget / 2
    assert watches.next_query(due, due + budget * 1.01) >= due + budget + first
    assert watches.next_query(due, due + 5) == pytest.approx(due + 5 + watches.MAX_BACKOFF_SECONDS)


async def test_an_event_that_takes_longer_than_the_budget_still_arrives() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    event = ManualEvent()
    asyncio.get_running_loop().call_later(0.01, event.complete)
    await poller.wait(event)
    statistics = poller.statistics()
    assert statistics.events == 1
    assert event.finished_seconds is not None
    await closed(poller)


async def test_cancelling_a_waiter_detaches_it_and_stops_the_polling() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    event = ManualEvent()
    task = asyncio.create_task(poller.wait(event))
    await spin(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert poller.idle
    queries = event.queries
    await spin(5)
    assert event.queries == queries
    await closed(poller)


async def test_cancelled_watch_in_the_middle_does_not_delay_the_stream() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    events, seen = [ManualEvent() for _ in range(3)], []
    watches = [poller.watch(event, "s", into(seen, i)) for i, event in enumerate(events)]
    watches[1].cancel()
    watches[1].cancel()
    events[0].complete()
    events[2].complete()
    while not poller.idle:
        await spin()
    assert seen == [0, 2]
    assert events[1].queries == 0
    await closed(poller)


async def test_waiter_cancelled_in_the_pass_that_finishes_the_event() -> None:
    """I7: the hand-off and the cancellation happen in one loop pass."""
    poller = opened_poller(asyncio.get_running_loop())
    event = ManualEvent()
    task = asyncio.create_task(poller.wait(event))
    await spin(2)
    event.complete()
    poller.watch(Countdown(1), "canceller", lambda _: task.cancel())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert poller.idle
    await closed(poller)


async def test_a_raising_callback_is_reported_and_the_others_run(
    loop_errors: list[dict[str, Any]],
) -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[str] = []

    def broken(error: BaseException | None) -> None:
        raise ValueError("callback")

    poller.watch(Countdown(1), "a", broken)
    poller.watch(Countdown(1), "a", into(seen, "second"))
    poller.watch(Countdown(1), "b", into(seen, "other"))
    while not poller.idle:
        await spin()
    assert sorted(seen) == ["other", "second"]
    assert [str(context["exception"]) for context in loop_errors] == ["callback"]
    loop_errors.clear()
    await closed(poller)


async def test_a_query_that_raises_ends_the_wait_with_a_device_error() -> None:
    """The error of a broken device reaches the waiter."""
    poller = opened_poller(asyncio.get_running_loop())
    event = ManualEvent()
    task = asyncio.create_task(poller.wait(event))
    await spin(2)
    event.query_error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="illegal memory access"):
        await task
    await closed(poller)


async def test_close_fails_the_waiters_and_refuses_new_ones() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[Any] = []
    poller.watch(ManualEvent(), "s", into(seen))
    task = asyncio.create_task(poller.wait(ManualEvent()))
    await spin(2)
    poller.close()
    poller.close()
    with pytest.raises(ClosedError):
        await task
    assert isinstance(seen[0], ClosedError)
    with pytest.raises(ClosedError):
        poller.watch(ManualEvent(), "s", into(seen))
    await spin(2)


async def test_statistics_report_latency_and_cpu_share() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    assert poller.statistics().cpu_share == 0.0
    for _ in range(10):
        await poller.wait(Countdown(4))
    statistics = poller.statistics()
    assert (statistics.events, statistics.pending) == (10, 0)
    assert statistics.queries == 30  # wait() queries once itself
    assert 0 < statistics.latency_p50_seconds <= statistics.latency_p99_seconds
    assert 0 < statistics.cpu_share < 1
    await closed(poller)


async def test_wake_schedules_what_the_loop_has_forgotten() -> None:
    """A loop that KeyboardInterrupt ends may forget the callback that it was about to call."""
    poller = opened_poller(asyncio.get_running_loop())
    seen: list[str] = []
    poller.watch(Countdown(2), "s", into(seen, "watch"))
    poller.soon(lambda: seen.append("soon"))
    for handle in (poller._next_pass, poller._next_soon):
        assert handle is not None
        handle.cancel()
    await spin(4)
    assert seen == []
    poller.wake()
    await run_until_idle(lambda: poller.idle)
    assert sorted(seen) == ["soon", "watch"]
    await closed(poller)


async def test_remaining_actions_of_soon_run_in_the_pass_after_an_interrupt() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    interrupts, seen = Interrupts(), []
    poller.soon(interrupts)
    poller.soon(lambda: seen.append("behind"))
    with pytest.raises(KeyboardInterrupt):
        poller._run_soon()
    assert poller._next_soon is not None
    await spin(2)
    assert (interrupts.calls, seen) == (1, ["behind"])
    await closed(poller)


class Interrupts:
    """Callback that raises KeyboardInterrupt in its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object) -> None:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt


async def test_an_interrupted_callback_is_called_again_and_the_others_once() -> None:
    poller = opened_poller(asyncio.get_running_loop())
    interrupts, seen = Interrupts(), []
    poller.watch(Countdown(1), "a", interrupts)
    poller.watch(Countdown(1), "a", into(seen, "behind"))
    poller.watch(Countdown(1), "b", into(seen, "beside"))
    with pytest.raises(KeyboardInterrupt):
        poller._pass()
    while not poller.idle:
        await spin()
    assert interrupts.calls == 2
    assert sorted(seen) == ["behind", "beside"]
    await closed(poller)


class SteppedClock:
    """Replacement of ``time`` that only the test advances."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now


async def test_busy_seconds_exclude_the_time_of_callbacks(monkeypatch: Any) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(poller_module, "time", clock)
    poller = opened_poller(asyncio.get_running_loop())
    event = ManualEvent()

    def takes_long(error: BaseException | None) -> None:
        clock.now += 30.0

    poller.watch(event, "stream", takes_long)
    event.complete()
    while not poller.idle:
        clock.now += 0.001
        await spin(1)
    assert clock.now > 30.0
    assert poller.statistics().busy_seconds == 0.0
    await closed(poller)


async def test_a_poller_that_a_callback_closes_schedules_no_further_pass() -> None:
    loop = CountingLoop(asyncio.get_running_loop())
    poller = opened_poller(loop)  # type: ignore[arg-type]
    first, second = ManualEvent(), ManualEvent()
    calls: list[int] = []
    errors: list[Any] = []

    def close(error: BaseException | None) -> None:
        poller.close()
        calls.append(loop.calls)

    poller.watch(first, "stream", close)
    poller.watch(second, "stream", into(errors))
    first.complete()
    while not calls:
        await spin(1)
    await spin(5)
    assert loop.calls == calls[0]
    assert [type(error) for error in errors] == [ClosedError]
    assert poller.idle
