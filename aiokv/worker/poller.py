"""EventPoller: the only place that queries the events of a device.

One per loop. Events of one stream finish in order, so only the oldest of each stream is queried::

    watch ......... timerfd ......... |-- every loop pass --|... every 1/8 of the time overdue ...
                    expected end - lead                     budget used up

The observed end of an event is the beginning of the work of the next one, so a stream's
expectations do not drift. When an event had ended before its first query, the poller slept too
long: the lead grows a little, and shrinks again with every end that was observed.

Nothing is scheduled while nothing is pending. The timer is a timerfd on ``add_reader``: asyncio
rounds its own timers up to 1 ms, and uvloop turns timers under 0.5 ms into a busy loop.

An exception such as KeyboardInterrupt in a callback of the poller breaks the engine or the rank:
see :class:`~aiokv.base.state_guard.StateGuard`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv import _native
from aiokv.base.percentiles import percentile
from aiokv.base.state_guard import StateGuard
from aiokv.base.statistics import DurationHistogram, PollerStatistics
from aiokv.errors import ClosedError, DeviceError, UsageError
from aiokv.worker.watches import Watch, WatchedStream, next_query

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from aiokv.worker.device.base import Event
    from aiokv.worker.watches import Callback

FIRST_LEAD_SECONDS: Final = 40e-6  # a timerfd wake-up costs 10 to 40 us
MIN_LEAD_SECONDS: Final = 15e-6
MAX_LEAD_SECONDS: Final = 100e-6
LEAD_GROWTH_SECONDS: Final = 10e-6  # after a late wake-up; with the next value, 1 in 25 is late
LEAD_SHRINKAGE_SECONDS: Final = 0.4e-6  # after a wake-up in time
BURST_SECONDS: Final = 20e-6  # longest series of queries while the loop has no other work
IDLE_PASS_SECONDS: Final = 20e-6  # longest pass of a loop without other work
LATENCY_SAMPLES: Final = 4096


IDLE: Final = PollerStatistics(latency=DurationHistogram.of(_native.Histogram()))


class EventPoller:
    """Queries events, from callbacks of one loop. Not thread-safe.

    ``open`` binds it to its loop, on which every method is called, and every callback.

    Args:
        guard: notes exceptions that end a callback.
    """

    def __init__(self, guard: StateGuard | None = None) -> None:
        self._guard = guard or StateGuard()
        self._bound_loop: asyncio.AbstractEventLoop | None = None
        self.lead_seconds = FIRST_LEAD_SECONDS  # how long before an expected end to begin polling
        self._streams: dict[Hashable, WatchedStream] = {}
        # Events that were announced as ended, with the time of the announcement; see _pass.
        self._ended: deque[tuple[WatchedStream, Watch, float]] = deque()
        self._soon: deque[Callable[[], object]] = deque()
        self._next_soon: asyncio.Handle | None = None
        self._timer: _native.TimerFd | None = None
        self._timer_at = 0.0  # time of the next expiry; 0: none
        self._next_pass: asyncio.Handle | None = None
        self._in_pass = False
        self._calling: Watch | None = None  # the watch whose callback runs
        self._passed_at = 0.0  # time at which the last pass ended
        self._closed = False
        self._events = 0
        self._queries = 0
        self._latencies = np.zeros(LATENCY_SAMPLES)  # latencies of the newest events, in a ring
        self._latency = _native.Histogram()
        self._busy_seconds = 0.0
        self._callback_seconds = 0.0
        self._pending_seconds = 0.0
        self._pending_since = 0.0

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the poller to ``loop``; a closed poller can be opened again.

        Raises:
            UsageError: it is open.
        """
        if self._bound_loop is not None and not self._closed:
            raise UsageError("the event poller is open already", hint="close() it first")
        self._bound_loop = loop
        self._closed = False

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._bound_loop is None:
            raise UsageError("the event poller is not open")
        return self._bound_loop

    def watch(
        self,
        event: Event,
        stream_key: Hashable,
        callback: Callback,
        work_seconds: float | None = None,
    ) -> Watch:
        """Call ``callback(None)`` on the loop when the event is done; never from inside watch().

        Args:
            event: see :class:`aiokv.worker.device.base.Event`.
            stream_key: events with one key finish in the order in which they are watched.
            callback: gets the exception instead when the query raised, or
                :class:`ClosedError` when the poller was closed first.
            work_seconds: from the end of the event before it in its stream, or from now if there
                is none, to its own; it saves CPU time, and errors in it only cost latency.

        Raises:
            ClosedError: the poller is closed.
            UsageError: the poller is not open.
        """
        if self._closed:
            raise ClosedError("the event poller is closed")
        watch = Watch(event, stream_key, callback, work_seconds, self._discard)
        stream = self._streams.get(stream_key)
        if stream is not None:
            stream.queue.append(watch)
            return watch
        now = time.monotonic()
        if not self._streams:
            self._pending_since = now
        stream = WatchedStream(stream_key)
        stream.queue.append(watch)
        stream.expect(now, now, self.lead_seconds)
        self._streams[stream_key] = stream
        if not self._in_pass and not self._ended:
            self._schedule(now)
        return watch

    def soon(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` in a later callback of the loop, in the order of these calls.

        Args:
            callback: an exception that it raises goes to the loop's exception handler.

        Raises:
            ClosedError: the poller is closed.
        """
        if self._closed:
            raise ClosedError("the event poller is closed")
        self._soon.append(callback)
        if self._next_soon is None:
            self._next_soon = self._loop.call_soon(self._run_soon)

    def wake(self) -> None:
        """Schedule a pass, in place of one that the loop may have forgotten.

        A loop that an exception such as KeyboardInterrupt has ended may forget a callback. Call
        this method before waiting for events on a loop that may have been ended and run again.
        """
        if self._next_soon is not None:
            self._next_soon.cancel()
            self._next_soon = self._loop.call_soon(self._run_soon)
        self._cancel_pass()
        if self._streams:
            self._next_pass = self._loop.call_soon(self._on_next_pass)

    async def wait(self, event: Event, work_seconds: float | None = None) -> None:
        """Wait for one event, independently of the watched streams.

        Raises:
            DeviceError: the query of the event failed.

        Cancellation: detaches the waiter; the event goes on.
        """
        if event.done:
            return
        future: asyncio.Future[None] = self._loop.create_future()

        def announce(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        watch = self.watch(event, future, announce, work_seconds)
        try:
            await future
        finally:
            watch.cancel()

    def statistics(self) -> PollerStatistics:
        """Return latency and CPU time of the waits so far. Any thread."""
        if asyncio._get_running_loop() is self._bound_loop:
            self._account()
        pending_seconds, pending_since = self._pending_seconds, self._pending_since
        if self._streams:
            pending_seconds += time.monotonic() - pending_since
        ordered: list[float] = np.sort(self._latencies[: self._events]).tolist()
        return PollerStatistics(
            events=self._events,
            queries=self._queries,
            pending=sum(watch.callback is not None for watch in self._watches()),
            latency_p50_seconds=percentile(ordered, 50) if ordered else 0.0,
            latency_p99_seconds=percentile(ordered, 99) if ordered else 0.0,
            busy_seconds=self._busy_seconds,
            pending_seconds=pending_seconds,
            latency=DurationHistogram.of(self._latency),
        )

    @property
    def idle(self) -> bool:
        """True if no event is watched, so that no callback is scheduled."""
        return not self._soon and all(watch.callback is None for watch in self._watches())

    @property
    def closed(self) -> bool:
        """True after ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Announce ClosedError to all waiters, remove the timer from the loop. Idempotent."""
        self._closed = True
        self._run_soon()
        while self._streams:
            stream = self._streams.pop(next(iter(self._streams)))
            for watch in stream.queue:
                if watch is not self._calling:  # else its own callback is closing the poller
                    self._announce(watch, ClosedError("the event poller was closed"))
            stream.queue.clear()
        self._ended.clear()
        self._cancel_pass()
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fileno())
            # uvloop removes a reader in its next pass. Until then, the descriptor must stay open,
            # so that no other file gets its number.
            self._loop.call_soon(self._timer.close)
            self._timer = None

    def _watches(self) -> Iterator[Watch]:
        # A copy, because another thread may read statistics.
        for stream in list(self._streams.values()):
            yield from list(stream.queue)

    def _discard(self, watch: Watch) -> None:
        self._account()
        stream = self._streams.get(watch.key)
        if stream is None or not stream.queue or stream.queue[0] is not watch:
            return  # it is removed later, when it is the oldest
        now = time.monotonic()
        skipped_seconds = stream.drop_cancelled() - (watch.work_seconds or 0.0)
        self._next_of(stream, stream.ends_at + skipped_seconds, now)
        if not self._in_pass:
            self._schedule(now)

    def _next_of(self, stream: WatchedStream, began_at: float, now: float) -> None:
        """Expect the next event of a stream, whose work began at ``began_at``."""
        if stream.queue:
            stream.expect(began_at, now, self.lead_seconds)
        elif self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
            if not self._streams:
                self._pending_seconds += now - self._pending_since

    def _on_timer(self) -> None:
        if self._timer is None:
            return
        try:
            self._timer.drain()
            self._timer_at = 0.0
            self._cancel_pass()  # this call replaces the scheduled pass
            self._pass()
        except BaseException as error:
            self._guard.note(error)
            raise

    def _on_next_pass(self) -> None:
        try:
            self._next_pass = None
            self._pass()
        except BaseException as error:
            self._guard.note(error)
            raise

    def _run_soon(self) -> None:
        """Call the callbacks that are queued now."""
        self._next_soon = None
        try:
            for _ in range(len(self._soon)):
                callback = self._soon.popleft()
                try:
                    callback()
                except Exception as raised:
                    self._tell_loop("a callback", raised)
        except BaseException as error:
            self._guard.note(error)
            raise
        finally:
            if self._soon and self._next_soon is None:
                self._next_soon = self._loop.call_soon(self._run_soon)

    def _tell_loop(self, what: str, raised: Exception) -> None:
        self._guard.note(raised)  # the exception may be a MemoryError
        self._loop.call_exception_handler({"message": f"aiokv: {what} raised", "exception": raised})

    def _pass(self) -> None:
        """Query the oldest event of each stream that is due, and announce the ones that are done.

        The poller accounts for an end in its next pass, behind the tasks that the end has woken.
        """
        started = time.monotonic()
        self._callback_seconds = 0.0
        self._in_pass = True
        try:
            self._account()
            due = [stream for stream in self._streams.values() if stream.next_query <= started]
            idle = len(due) == 1 and started - self._passed_at <= IDLE_PASS_SECONDS
            for stream in due:
                if stream.queue:  # a callback may have cancelled the rest
                    self._ask(stream, started + BURST_SECONDS if idle else 0.0)
                else:
                    self._next_of(stream, started, started)
        finally:
            self._in_pass = False
            if not self._ended:
                self._schedule(time.monotonic())
            elif self._next_pass is None and not self._closed:
                self._next_pass = self._loop.call_soon(self._on_next_pass)
        self._passed_at = now = time.monotonic()
        self._busy_seconds += now - started - self._callback_seconds

    def _ask(self, stream: WatchedStream, until: float) -> None:
        """Query a stream's oldest event, repeatedly before the time ``until``.

        Behind an event that is done the next one is queried, if it should have ended as well.
        """
        while True:
            watch = stream.queue[0]
            self._queries += 1
            error: BaseException | None = None
            try:
                done = watch.event.done
            except Exception as raised:  # the callback gets the exception
                done, error = True, raised
            now = time.monotonic()
            if done:
                self._announce(watch, error)
                if stream.queue and stream.queue[0] is watch:  # the callback may have cancelled it
                    self._ended.append((stream, watch, now))
                    stream.queue.popleft()
                self._callback_seconds += time.monotonic() - now
                if not _next_has_ended(stream, watch, now):
                    return
                self._account()
                if not stream.queue:
                    return
                continue
            stream.asked_at = now
            stream.next_query = next_query(stream.due, now)
            if now >= until or stream.next_query > now:
                return

    def _account(self) -> None:
        """Bring the streams up to date with the events that have been announced."""
        while self._ended:
            stream, watch, seen_at = self._ended[0]
            began_at = self._note_end(stream, watch, seen_at) + stream.drop_cancelled()
            self._next_of(stream, began_at, time.monotonic())
            self._ended.popleft()

    def _note_end(self, stream: WatchedStream, watch: Watch, now: float) -> float:
        """Count an event that is done; return when it ended, as far as can be known."""
        finished_at: float | None = getattr(watch.event, "finished_seconds", None)
        latency = max(now - (finished_at or stream.asked_at or now), 0.0)
        self._latencies[self._events % LATENCY_SAMPLES] = latency
        self._events += 1
        self._latency.add(latency)
        seen = stream.asked_at >= stream.due
        if stream.slept:
            change = -LEAD_SHRINKAGE_SECONDS if seen else LEAD_GROWTH_SECONDS
            lead_seconds = self.lead_seconds + change
            self.lead_seconds = min(max(lead_seconds, MIN_LEAD_SECONDS), MAX_LEAD_SECONDS)
        if finished_at is not None:
            return finished_at
        # The poller slept too long. If this makes the estimate too early, the next observed end
        # corrects it.
        return now if seen else min(now, stream.ends_at) - self.lead_seconds

    def _announce(self, watch: Watch, error: BaseException | None) -> None:
        """Call the callback; the watch is over when that has returned."""
        callback = watch.callback
        if callback is None:
            return
        if error is not None and not isinstance(error, (ClosedError, DeviceError)):
            cause = error
            error = DeviceError(f"the query of an event failed: {cause}")
            error.__cause__ = cause
        caller, self._calling = self._calling, watch
        try:
            callback(error)
        except Exception as raised:
            self._tell_loop("the callback of an event", raised)
        finally:
            self._calling = caller
        watch.callback = None

    def _schedule(self, now: float) -> None:
        if not self._streams:
            self._cancel_pass()
            return
        wake_at = min(stream.next_query for stream in self._streams.values())
        if wake_at > now:
            self._cancel_pass()
            self._wake_at(wake_at)
        elif self._next_pass is None:
            self._next_pass = self._loop.call_soon(self._on_next_pass)

    def _cancel_pass(self) -> None:
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = None

    def _wake_at(self, at: float) -> None:
        if self._timer is None:
            self._timer = _native.TimerFd()
            self._loop.add_reader(self._timer.fileno(), self._on_timer)
        if at != self._timer_at:
            self._timer.arm(at - time.monotonic())
            self._timer_at = at


def _next_has_ended(stream: WatchedStream, watch: Watch, now: float) -> bool:
    """Return True if the event after ``watch``, which has ended, is expected to have ended."""
    if not stream.queue:
        return False
    finished_at: float | None = getattr(watch.event, "finished_seconds", None)
    return (finished_at or now) + (stream.queue[0].work_seconds or 0.0) <= now
