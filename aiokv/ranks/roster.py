"""Membership and liveness of ranks, per generation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, RankLost
from aiokv.observe.logs import Log
from aiokv.ranks.channel import ChannelError, frame_of
from aiokv.ranks.connection import Connection
from aiokv.ranks.messages import (
    PROTOCOL_VERSION,
    Answer,
    Begin,
    Broken,
    Close,
    Ping,
    Pong,
    Ready,
    Reports,
    encode,
)
from aiokv.ranks.seats import Seat

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.ranks.channel import Channel
    from aiokv.ranks.listener import Listener
    from aiokv.ranks.messages import Hello, Layout
    from aiokv.ranks.processes import RankProcesses
    from aiokv.ranks.seats import RankTimeouts
    from aiokv.types import Tier

log = Log(__name__)

SPARE_CONNECTIONS: Final = 64  # connections without a Hello, in addition to one per rank


class Roster:
    """The ranks of a group, as the manager sees them.

    Args:
        listener: where ranks connect.
        processes: starts the ranks; None when they are started externally.
        on_reports: gets the reports of the current generation.
        on_answer: gets what ranks say to ``Sleep`` and ``WakeUp``.
        on_lost: called when a rank that took part is gone.

    Attributes:
        device_blocks: at least so many every rank must have.
        layout: of every rank, from the first Hello on.
        stale_reports: frames of an earlier generation, ignored.
    """

    def __init__(
        self,
        num_ranks: int,
        listener: Listener,
        timeouts: RankTimeouts,
        processes: RankProcesses | None,
        *,
        clock: Callable[[], float],
        device_blocks: int,
        on_reports: Callable[[Seat, Reports], None],
        on_answer: Callable[[Seat, Answer], None],
        on_lost: Callable[[RankLost], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._timeouts = timeouts
        self._processes = processes
        self.device_blocks = device_blocks
        self._on_reports = on_reports
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._strangers: dict[
            Channel, None
        ] = {}  # unauthenticated peers, without a Hello, in order of arrival
        self._news: list[asyncio.Future[None]] = []  # of coroutines that wait for a change
        self._clock = clock
        self._ticked_at = clock()
        self._was_late = False
        self.seats = [Seat(rank) for rank in range(num_ranks)]
        self.generation = 0
        self.layout: Layout | None = None
        self.stale_reports = 0
        self.closing = False
        self.closed = False
        self._running = False  # a generation

    # --- opening and closing --------------------------------------------------------------------

    async def open(self) -> None:
        """Listen for ranks.

        Raises:
            ConfigError: as :func:`listen`.

        Cancellation: nothing is left behind.
        """
        await self._listener.open(self._new_channel)

    async def begin(self, host_blocks: int, closed_step: int, asleep: list[Tier]) -> None:
        """Start the ranks that are away, and a generation on all of them.

        When it returns, nothing of an earlier generation moves anywhere.

        Raises:
            RankLost: one died on the way, was refused, or was not ready in time.

        Cancellation: no generation is running; call it again.
        """
        self._running = False
        for seat in self.seats:
            seat.ready = False
        self.generation += 1
        try:
            async with asyncio.timeout(self._timeouts.start):
                path = await self._listener.open(self._new_channel)
                if self._processes is not None:
                    away = [seat.rank for seat in self.seats if seat.channel is None]
                    await self._processes.start(away, path)
                await self._until(lambda seat: seat.channel is not None)
                message = Begin(
                    generation=self.generation,
                    host_blocks=host_blocks,
                    closed_step=closed_step,
                    asleep=asleep,
                )
                for seat in self.seats:
                    seat.finished_step = closed_step
                self.send(frame_of(encode(message)))
                await self._until(lambda seat: seat.ready)
                self._running = True
        except TimeoutError:
            late = min(self.seats, key=lambda seat: (seat.channel is not None, seat.ready))
            why = "it is not ready" if late.channel is not None else self._why(late)
            raise RankLost(
                f"rank {late.rank}: {why}, after {self._timeouts.start} s", rank=late.rank
            ) from None
        finally:
            if self._listener.is_private:
                self._listener.close()  # a manager that is killed later leaves no files

    async def _until(self, condition: Callable[[Seat], bool]) -> None:
        """Wait until the condition holds for all seats."""
        waits_for_hello = {seat.rank for seat in self.seats if seat.channel is None}
        while not all(condition(seat) for seat in self.seats):
            await self.next_news()
            if self.closing:
                raise ClosedError("the group of ranks closes")
            waits_for_hello -= {seat.rank for seat in self.seats if seat.channel is not None}
            for seat in self.seats:
                died = self._processes is not None and not self._processes.is_alive(seat.rank)
                if seat.channel is None and (seat.rank not in waits_for_hello or died):
                    raise RankLost(f"rank {seat.rank}: {self._why(seat)}", rank=seat.rank)

    async def next_news(self) -> None:
        """Wait until a rank connects, answers, is ready or leaves; the caller checks which.

        Cancellation: nothing changed.
        """
        news: asyncio.Future[None] = self._loop.create_future()
        self._news.append(news)
        try:
            await news
        finally:
            self._news.remove(news)

    def _why(self, seat: Seat) -> str:
        """Return why a rank is not connected."""
        if self._processes is None or self._processes.is_alive(seat.rank):
            return seat.why_away
        return f"{seat.why_away}; {self._processes.describe(seat.rank)}"

    async def aclose(self) -> None:
        """Let ranks finish what moves, and go; cut off those that take too long. Idempotent.

        Cancellation: call it again.
        """
        self.closing = True
        if self._processes is not None:
            self._processes.closing = True
        self.notify()
        close = frame_of(encode(Close()))
        for seat in self.seats:
            if seat.channel is not None:
                seat.channel.send(close)
            elif self._processes is not None:
                self._processes.kill(seat.rank)  # no connection to send Close on
        for stranger in list(self._strangers):
            stranger.cut(_CLOSING)
        try:
            async with asyncio.timeout(self._timeouts.close):
                while any(seat.channel is not None for seat in self.seats):
                    await self.next_news()
                if self._processes is not None:
                    await self._processes.wait()
        except TimeoutError:
            names = [seat.rank for seat in self.seats if seat.channel is not None]
            log.warning("ranks.cut_off", ranks=names, waited_seconds=self._timeouts.close)
            for seat in self.seats:
                if seat.channel is not None:
                    seat.channel.cut("it took too long to close")
        if self._processes is not None:
            await self._processes.kill_all()
        self._listener.close()
        while self._strangers or any(seat.channel is not None for seat in self.seats):
            await self.next_news()  # of channels that were cut
        self.closed = True

    def terminate(self) -> None:
        """Cut all connections, kill the processes, and stop listening, without waiting."""
        self.closing = self.closed = True
        for channel in [*self._strangers, *(seat.channel for seat in self.seats)]:
            if channel is not None:
                channel.cut(_CLOSING)
        if self._processes is not None:
            self._processes.terminate()
        self._listener.close()
        self.notify()

    def send(self, frame: bytes) -> None:
        """Send the same bytes to every connected rank."""
        for seat in self.seats:
            if seat.channel is not None:
                seat.channel.send(frame)

    def notify(self) -> None:
        """Wake coroutines that wait for a change of a rank."""
        for news in self._news:
            if not news.done():
                news.set_result(None)

    # --- life -----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Send a heartbeat to each rank, and cut off ranks that were silent for too long.

        A rank is only lost after two unanswered heartbeats, however late this loop is: the loop
        reads its sockets between two calls.

        Returns:
            False when this loop was blocked before this call and not before the last one: reports
            of ranks may still be unread in the sockets.
        """
        now = self._clock()
        late = now - self._ticked_at > 2 * self._timeouts.heartbeat
        reads_first, self._was_late = late and not self._was_late, late
        self._ticked_at = now
        for seat in self.seats:
            if not seat.ready or seat.channel is None:
                continue
            if now - seat.heard_at > self._timeouts.silence and seat.unanswered >= 2:
                self.lose(seat, f"it said nothing for {self._timeouts.silence} s")
            else:
                seat.unanswered += 1
                seat.channel.send(_PING)
        return not reads_first

    def lose(self, seat: Seat, reason: str) -> None:
        """Cut a rank off, and kill its process if the group has started it."""
        if seat.channel is not None:
            seat.channel.cut(reason)
        if self._processes is not None:
            self._processes.kill(seat.rank)
        self._away(seat, reason)

    def _away(self, seat: Seat, reason: str) -> None:
        took_part, seat.ready = self._running and seat.ready, False
        seat.channel, seat.why_away = None, reason
        if took_part and not self.closing:
            log.error("rank.lost", rank=seat.rank, reason=reason)
            self._on_lost(RankLost(f"rank {seat.rank} is lost: {reason}", rank=seat.rank))
        self.notify()

    # --- connections ----------------------------------------------------------------------------

    def _new_channel(self) -> Channel:
        while len(self._strangers) >= len(self.seats) + SPARE_CONNECTIONS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cut("too many connections without a Hello")
        connection = Connection(self, self._loop, self._timeouts.hello)
        self._strangers[connection.channel] = None
        if self.closing:
            connection.channel.cut(_CLOSING)
        return connection.channel

    def admit(self, channel: Channel, hello: Hello) -> Seat:
        """Give a rank its seat.

        Raises:
            ChannelError: it does not belong here.
        """
        if hello.protocol != PROTOCOL_VERSION:
            raise ChannelError(f"protocol {hello.protocol}, not {PROTOCOL_VERSION}")
        if self.closing:
            raise ChannelError(_CLOSING)
        if not 0 <= hello.rank < len(self.seats):
            raise ChannelError(f"there is no rank {hello.rank} in a group of {len(self.seats)}")
        seat = self.seats[hello.rank]
        if seat.channel is not None:
            raise ChannelError(f"rank {hello.rank} is here already")
        if hello.layout.num_blocks < self.device_blocks:
            raise ChannelError(
                f"rank {hello.rank} has {hello.layout.num_blocks} device blocks, fewer than "
                f"{self.device_blocks}"
            )
        if self.layout is None:
            self.layout = hello.layout
        elif hello.layout.fingerprint != self.layout.fingerprint:
            raise ChannelError(f"the layout of rank {hello.rank} is not that of the others")
        seat.channel, seat.layout = channel, hello.layout
        self._strangers.pop(channel, None)
        self._hear(seat)
        self.notify()
        return seat

    def on_refused(self, rank: int, reason: str) -> None:
        if 0 <= rank < len(self.seats) and self.seats[rank].channel is None:
            self.seats[rank].why_away = reason

    def _hear(self, seat: Seat) -> None:
        seat.heard_at = self._clock()
        seat.unanswered = 0

    def on_message(self, seat: Seat, message: Ready | Reports | Answer | Pong | Broken) -> None:
        self._hear(seat)
        if isinstance(message, Broken):
            self.lose(seat, message.reason)
        elif isinstance(message, Reports):
            if message.generation != self.generation or not seat.ready:
                self.stale_reports += 1
                return
            seat.progress_at = seat.heard_at
            seat.finished_step = max(seat.finished_step, message.finished_step)
            self._on_reports(seat, message)
        elif isinstance(message, Answer):
            self._on_answer(seat, message)
            self.notify()
        elif isinstance(message, Ready) and message.generation == self.generation:
            seat.progress_at = seat.heard_at
            seat.ready = True
            self.notify()

    def on_closed(self, channel: Channel, seat: Seat | None, reason: str) -> None:
        self._strangers.pop(channel, None)
        if seat is not None and seat.channel is channel:
            self._away(seat, reason)
        self.notify()


_PING: Final = frame_of(encode(Ping()))
_CLOSING: Final = "the group closes"
