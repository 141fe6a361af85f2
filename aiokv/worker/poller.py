"""EventPoller: the only place that asks whether an event of a device is done.

One a loop. Events of one stream finish in order, so only the oldest of each stream is asked::

    watch ......... timerfd ......... |-- every loop pass --|... every 1/8 of the time overdue ...
                    expected end - lead                     budget used up

Nothing is scheduled while nothing is pending. The timer is a timerfd on ``add_reader``: asyncio
rounds its own timers up to 1 ms, and uvloop makes a busy loop of anything under 0.5 ms.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv import _native
from aiokv.errors import ClosedError, DeviceError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Sequence

    from aiokv.worker.device.base import Event

    Callback = Callable[[BaseException | None], None]

LEAD_SECONDS: Final = 40e-6  # begin before the expected end: a timerfd wake-up costs 10 to 40 us
POLL_BUDGET_SECONDS: Final = 200e-6  # then polling every pass stops paying for its CPU time
MIN_BACKOFF_SECONDS: Final = 50e-6
MAX_BACKOFF_SECONDS: Final = 1e-3
BACKOFF_SHARE: Final = 0.125  # sleep this share of the time overdue
MAX_SLEEP_SECONDS: Final = 2e-3  # bounds what a wrong expectation can cost; 500 queries a second
LATENCY_SAMPLES: Final = 4096


class PollerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What waiting costs.

    Attributes:
        events: finished and announced.
        queries: times an event was asked.
        pending: watched now.
        latency_p50_seconds: event done to callback running, over the latest 4096 events. By the
            device's clock where events tell it, else the time since the query before.
        busy_seconds: spent in the poller's callbacks, the announced callbacks not counted.
        pending_seconds: during which at least one event was watched.
    """

    events: int
    queries: int
    pending: int
    latency_p50_seconds: float
    latency_p99_seconds: float
    busy_seconds: float
    pending_seconds: float

    @property
    def cpu_share(self) -> float:
        """Share of the time with something pending that the poller used itself."""
        return self.busy_seconds / self.pending_seconds if self.pending_seconds else 0.0


class Watch:
    """A watched event; ``cancel()`` detaches the callback and does nothing to the event."""

    __slots__ = ("_poller", "asked_at", "callback", "due", "event", "key", "next_query")

    def __init__(
        self, poller: EventPoller, event: Event, key: Hashable, callback: Callback, due: float
    ) -> None:
        self._poller = poller
        self.event = event
        self.key = key
        self.callback: Callback | None = callback
        self.due = due
        self.next_query = 0.0  # set when it gets to the head of its stream
        self.asked_at = 0.0

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._poller._discard(self)


class EventPoller:
    """Asks events whether they are done, from callbacks of one loop. Not thread-safe.

    Args:
        loop: the loop that every method is called on, and every callback.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[Hashable, deque[Watch]] = {}
        self._timer: _native.TimerFd | None = None
        self._timer_at = 0.0  # 0: not armed
        self._next_pass: asyncio.Handle | None = None
        self._in_pass = False
        self._closed = False
        self._events = 0
        self._queries = 0
        self._latencies: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        self._busy_seconds = 0.0
        self._pending_seconds = 0.0
        self._pending_since = 0.0

    def watch(
        self,
        event: Event,
        stream_key: Hashable,
        callback: Callback,
        expected_seconds: float | None = None,
    ) -> Watch:
        """Call ``callback(None)`` on the loop once the event is done; never from inside watch().

        Args:
            event: see :class:`aiokv.worker.device.base.Event`.
            stream_key: events with one key finish in the order in which they are watched.
            callback: gets the exception instead when asking the event raised, or
                :class:`ClosedError` when the poller was closed first.
            expected_seconds: from now to the event's end; it saves CPU time, and errors in it
                only cost latency.

        Raises:
            ClosedError: the poller is closed.
        """
        if self._closed:
            raise ClosedError("the event poller is closed")
        now = time.monotonic()
        due = now if expected_seconds is None else now + expected_seconds - LEAD_SECONDS
        watch = Watch(self, event, stream_key, callback, max(due, now))
        if not self._streams:
            self._pending_since = now
        queue = self._streams.get(stream_key)
        if queue is not None:
            queue.append(watch)
            return watch
        self._streams[stream_key] = deque((watch,))
        watch.next_query = _next_query(watch.due, now)
        if not self._in_pass:
            self._schedule(now)
        return watch

    async def wait(self, event: Event, expected_seconds: float | None = None) -> None:
        """Wait for one event on a stream of its own.

        Raises:
            DeviceError: the device cannot tell any more.

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

        watch = self.watch(event, future, announce, expected_seconds)
        try:
            await future
        finally:
            watch.cancel()

    def statistics(self) -> PollerStatistics:
        pending_seconds = self._pending_seconds
        if self._streams:
            pending_seconds += time.monotonic() - self._pending_since
        ordered = sorted(self._latencies)
        return PollerStatistics(
            events=self._events,
            queries=self._queries,
            pending=sum(map(len, self._streams.values())),
            latency_p50_seconds=_quantile(ordered, 0.5),
            latency_p99_seconds=_quantile(ordered, 0.99),
            busy_seconds=self._busy_seconds,
            pending_seconds=pending_seconds,
        )

    @property
    def idle(self) -> bool:
        """Nothing is watched, and so nothing is scheduled."""
        return not self._streams

    def close(self) -> None:
        """Announce ClosedError to whoever waits, take the timer off the loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        watches = [watch for queue in self._streams.values() for watch in queue]
        self._streams.clear()
        self._sleep_until(0.0)
        for watch in watches:
            self._announce(watch, ClosedError("the event poller was closed"))
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fileno())
            # uvloop takes a reader off in its next pass; until then the descriptor must not be
            # handed out again.
            self._loop.call_soon(self._timer.close)
            self._timer = None

    def _discard(self, watch: Watch) -> None:
        queue = self._streams.get(watch.key)
        if queue is None or queue[0] is not watch:
            return  # it goes when it gets to the head
        self._drop_cancelled(watch.key, queue)
        if not self._in_pass:
            self._schedule(time.monotonic())

    def _drop_cancelled(self, key: Hashable, queue: deque[Watch]) -> None:
        while queue and queue[0].callback is None:
            queue.popleft()
        if not queue:
            del self._streams[key]
            if not self._streams:
                self._pending_seconds += time.monotonic() - self._pending_since

    def _on_timer(self) -> None:
        if self._timer is None:
            return
        self._timer.drain()
        self._timer_at = 0.0
        self._pass()

    def _on_next_pass(self) -> None:
        self._next_pass = None
        self._pass()

    def _pass(self) -> None:
        """Ask the oldest event of each stream that is due, announce, plan the next pass."""
        started = time.monotonic()
        callbacks_seconds = 0.0
        finished: list[tuple[Watch, BaseException | None]] = []
        self._in_pass = True
        try:
            for key, queue in list(self._streams.items()):
                if queue[0].next_query > started:
                    continue
                self._ask(key, queue, finished)
            if finished:
                announced_at = time.monotonic()
                for watch, error in finished:
                    self._announce(watch, error)
                callbacks_seconds = time.monotonic() - announced_at
        finally:
            self._in_pass = False
        now = time.monotonic()
        self._schedule(now)
        self._busy_seconds += now - started - callbacks_seconds

    def _ask(
        self,
        key: Hashable,
        queue: deque[Watch],
        finished: list[tuple[Watch, BaseException | None]],
    ) -> None:
        while queue:
            watch = queue[0]
            if watch.callback is not None:
                self._queries += 1
                error: BaseException | None = None
                try:
                    done = watch.event.done
                except Exception as raised:  # handed to whoever waits
                    done, error = True, raised
                now = time.monotonic()
                if not done:
                    watch.asked_at = now
                    watch.next_query = _next_query(watch.due, now)
                    return
                self._note_latency(watch, now)
                finished.append((watch, error))
            queue.popleft()
        self._drop_cancelled(key, queue)

    def _note_latency(self, watch: Watch, now: float) -> None:
        self._events += 1
        finished_at: float | None = getattr(watch.event, "finished_seconds", None)
        if finished_at is None:
            finished_at = watch.asked_at or now
        self._latencies.append(max(now - finished_at, 0.0))

    def _announce(self, watch: Watch, error: BaseException | None) -> None:
        callback, watch.callback = watch.callback, None
        if callback is None:
            return
        if error is not None and not isinstance(error, (ClosedError, DeviceError)):
            cause = error
            error = DeviceError(f"the device cannot tell whether an event is done: {cause}")
            error.__cause__ = cause
        try:
            callback(error)
        except Exception as raised:
            self._loop.call_exception_handler(
                {"message": "aiokv: the callback of an event raised", "exception": raised}
            )

    def _schedule(self, now: float) -> None:
        if not self._streams:
            self._sleep_until(0.0)
            return
        wake_at = min(queue[0].next_query for queue in self._streams.values())
        if wake_at > now:
            self._sleep_until(wake_at)
            return
        self._sleep_until(0.0)
        if self._next_pass is None:
            self._next_pass = self._loop.call_soon(self._on_next_pass)

    def _sleep_until(self, at: float) -> None:
        """Arm the timer; 0 disarms it. Replaces a pass that polling has scheduled."""
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = None
        if at == self._timer_at:
            return
        self._timer_at = at
        if self._timer is None:
            self._timer = _native.TimerFd()
            self._loop.add_reader(self._timer.fileno(), self._on_timer)
        if at:
            self._timer.arm(at - time.monotonic())
        else:
            self._timer.disarm()


def _next_query(due: float, now: float) -> float:
    """When a stream's oldest event is asked next; ``now`` means in the next pass."""
    if now < due:
        return min(due, now + MAX_SLEEP_SECONDS)
    waited = now - due
    if waited < POLL_BUDGET_SECONDS:
        return now
    return now + min(max(waited * BACKOFF_SHARE, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0
