"""Membership and liveness of ranks, per generation."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiokv.base.logs import Log
from aiokv.errors import ClosedError, RankLost
from aiokv.ranks.channel import ChannelError, frame_of
from aiokv.ranks.connection import Connection
from aiokv.ranks.messages import (
    PROTOCOL_VERSION,
    Begin,
    Broken,
    Close,
    ControlReply,
    Left,
    LookupReply,
    Ping,
    Pong,
    Reports,
    TicketEnded,
    TicketReply,
    encode,
)
from aiokv.ranks.rank_state import RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.base.types import Tier
    from aiokv.config.cache_config import WindowGroup
    from aiokv.ranks.channel import Channel
    from aiokv.ranks.listener import Listener
    from aiokv.ranks.messages import FromConnectedRank, Hello, Layout
    from aiokv.ranks.processes import RankProcesses
    from aiokv.ranks.rank_state import RankTimeouts
    from aiokv.stores.identity import StoreIdentity

log = Log(__name__)

SPARE_CONNECTIONS: Final = 64  # connections without a Hello, in addition to one per rank


class Membership:
    """The ranks of a group, from the manager's side. Used on one loop, from ``open`` on.

    Args:
        num_ranks: number of ranks.
        listener: the socket that ranks connect to.
        timeouts: time limits.
        processes: starts the ranks; None when they are started externally.
        clock: seconds.
        on_reports: gets the reports of the current generation.
        on_reply: gets the replies to ``Sleep`` and ``WakeUp``.
        on_lookup: gets the replies to ``Lookup``.
        on_ticket: gets the replies to ``OpenTicket``.
        has_stores: True if each rank must have stores, False if none may have any.
        has_peers: likewise for peers.
        on_lost: called when a rank that took part is lost.

    Attributes:
        ranks: state of each rank.
        generation: number of the current or newest generation; 0 before the first.
        device_blocks: the least that a rank must have.
        layout: of every rank, from the first Hello on.
        stale_reports: messages of an earlier generation, ignored.
        closing: ``aclose`` or ``terminate`` was called.
        closed: all connections and processes have ended.
    """

    def __init__(
        self,
        num_ranks: int,
        listener: Listener,
        timeouts: RankTimeouts,
        processes: RankProcesses | None,
        *,
        clock: Callable[[], float],
        on_reports: Callable[[RankState, Reports], None],
        on_reply: Callable[[RankState, ControlReply], None],
        on_lookup: Callable[[RankState, LookupReply], None],
        on_ticket: Callable[[RankState, TicketReply | TicketEnded], None],
        on_lost: Callable[[RankLost], None],
        has_stores: bool = False,
        has_peers: bool = False,
    ) -> None:
        self._listener = listener
        self._timeouts = timeouts
        self._processes = processes
        self.device_blocks = 0
        self._windows: Mapping[str, WindowGroup] = {}
        self._on_reports = on_reports
        self._on_reply = on_reply
        self._on_lookup = on_lookup
        self._has_stores = has_stores
        self._has_peers = has_peers
        self._on_ticket = on_ticket
        self._on_lost = on_lost
        self._unauthenticated: dict[Channel, None] = {}  # peers without a Hello, oldest first
        self._change_waiters: list[asyncio.Future[None]] = []
        self._clock = clock
        self._ticked_at = 0.0
        self._was_late = False
        self.ranks = [RankState(rank) for rank in range(num_ranks)]
        self.generation = 0
        self.layout: Layout | None = None
        self.stale_reports = 0
        self.closing = False
        self.closed = False
        self._running = False  # a generation

    # --- opening and closing --------------------------------------------------------------------

    async def open(self, device_blocks: int, windows: Mapping[str, WindowGroup]) -> None:
        """Listen for ranks, whose tensors must have at least the blocks of these sizes.

        Args:
            device_blocks: of the tensors outside window groups.
            windows: the window groups whose tensors the ranks must have.

        Raises:
            ConfigError: the socket cannot be made; see :func:`listen`.

        Cancellation: nothing is left behind.
        """
        self.device_blocks = device_blocks
        self._windows = windows
        self._ticked_at = self._clock()
        await self._listener.open(self._new_channel)

    async def begin(
        self,
        host_blocks: int,
        closed_step: int,
        asleep: list[Tier],
        identity: StoreIdentity | None,
        windows: Mapping[str, WindowGroup],
    ) -> None:
        """Start the missing ranks, and a new generation on all ranks.

        When it returns, no transfer of an earlier generation moves on any rank.

        Raises:
            RankLost: a rank ended, was refused, or was not ready in time.

        Cancellation: no generation is running; call it again.
        """
        self._running = False
        for state in self.ranks:
            state.ready = False
        self.generation += 1
        try:
            async with asyncio.timeout(self._timeouts.start):
                path = await self._listener.open(self._new_channel)
                if self._processes is not None:
                    away = [state.rank for state in self.ranks if state.channel is None]
                    await self._processes.start(away, path)
                await self._until(lambda state: state.channel is not None)
                message = Begin(
                    generation=self.generation,
                    host_blocks=host_blocks,
                    closed_step=closed_step,
                    asleep=asleep,
                    identity=identity,
                    windows=dict(windows),
                )
                for state in self.ranks:
                    state.finished_step = closed_step
                self.send(frame_of(encode(message)))
                await self._until(lambda state: state.ready)
                self._running = True
        except TimeoutError:
            late = min(self.ranks, key=lambda state: (state.channel is not None, state.ready))
            why = "it is not ready" if late.channel is not None else self._why(late)
            raise RankLost(
                f"rank {late.rank}: {why}, after {self._timeouts.start} s", rank=late.rank
            ) from None
        finally:
            if self._listener.is_private:
                self._listener.close()  # a manager that is killed later leaves no file behind

    async def _until(self, condition: Callable[[RankState], bool]) -> None:
        """Wait until the condition holds for all ranks."""
        waits_for_hello = {state.rank for state in self.ranks if state.channel is None}
        while not all(condition(state) for state in self.ranks):
            await self.next_change()
            if self.closing:
                raise ClosedError("the group of ranks is closing")
            waits_for_hello -= {state.rank for state in self.ranks if state.channel is not None}
            for state in self.ranks:
                ended = self._processes is not None and not self._processes.is_running(state.rank)
                if state.channel is None and (state.rank not in waits_for_hello or ended):
                    raise RankLost(f"rank {state.rank}: {self._why(state)}", rank=state.rank)

    async def next_change(self) -> None:
        """Wait until a rank connects, replies, is ready or disconnects; the caller checks which.

        Cancellation: nothing changed.
        """
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._change_waiters.append(change)
        try:
            await change
        finally:
            self._change_waiters.remove(change)

    def _why(self, state: RankState) -> str:
        """Return why a rank is not connected."""
        if self._processes is None or self._processes.is_running(state.rank):
            return state.absence_reason
        return f"{state.absence_reason}; {self._processes.describe(state.rank)}"

    async def aclose(self) -> None:
        """Let ranks finish moving transfers and close; cut off slow ones. Idempotent.

        Cancellation: call it again.
        """
        self.closing = True
        if self._processes is not None:
            self._processes.closing = True
        self.notify()
        close = frame_of(encode(Close()))
        for state in self.ranks:
            if state.channel is not None:
                state.channel.send(close)
            elif self._processes is not None:
                self._processes.kill(state.rank)  # no connection to send Close on
        for peer in list(self._unauthenticated):
            peer.cut(_CLOSING)
        try:
            async with asyncio.timeout(self._timeouts.close):
                while any(state.channel is not None for state in self.ranks):
                    await self.next_change()
                if self._processes is not None:
                    await self._processes.wait()
        except TimeoutError:
            names = [state.rank for state in self.ranks if state.channel is not None]
            log.warning("ranks.cut_off", ranks=names, waited_seconds=self._timeouts.close)
            for state in self.ranks:
                if state.channel is not None:
                    state.channel.cut(f"it did not close within {self._timeouts.close} s")
        if self._processes is not None:
            await self._processes.kill_all()
        self._listener.close()
        while self._unauthenticated or any(state.channel is not None for state in self.ranks):
            await self.next_change()  # the end of a channel that was cut
        self.closed = True

    def terminate(self) -> None:
        """Cut all connections, kill the processes, and stop listening, without waiting."""
        self.closing = self.closed = True
        for channel in [*self._unauthenticated, *(state.channel for state in self.ranks)]:
            if channel is not None:
                channel.cut(_CLOSING)
        if self._processes is not None:
            self._processes.terminate()
        self._listener.close()
        self.notify()

    def close_without_loop(self) -> None:
        """Kill and reap the processes, and remove the socket, after the loop was closed.

        The connections end with the objects of the closed loop.
        """
        self.closing = self.closed = True
        if self._processes is not None:
            self._processes.reap_all()
        with suppress(RuntimeError):  # the server's loop is closed; its file is removed before
            self._listener.close()

    def send(self, frame: bytes) -> None:
        """Send the same bytes to every connected rank."""
        for state in self.ranks:
            if state.channel is not None:
                state.channel.send(frame)

    def notify(self) -> None:
        """Wake coroutines that wait for a change of a rank."""
        for change in self._change_waiters:
            if not change.done():
                change.set_result(None)

    # --- liveness -------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Send a heartbeat to each rank, and cut off ranks that were silent for too long.

        A rank is lost only after two unanswered heartbeats, however late this loop is: the loop
        reads its sockets between two calls.

        Returns:
            False when this loop was blocked before this call and not before the last one: reports
            of ranks may still be unread in the sockets.
        """
        now = self._clock()
        late = now - self._ticked_at > 2 * self._timeouts.heartbeat
        reads_first, self._was_late = late and not self._was_late, late
        self._ticked_at = now
        for state in self.ranks:
            if not state.ready or state.channel is None:
                continue
            if now - state.heard_at > self._timeouts.silence and state.unanswered >= 2:
                self.lose(state, f"it sent nothing for {self._timeouts.silence} s")
            else:
                state.unanswered += 1
                state.channel.send(_PING)
        return not reads_first

    def lose(self, state: RankState, reason: str) -> None:
        """Cut a rank off, and kill its process if the group has started it."""
        if state.channel is not None:
            state.channel.cut(reason)
        if self._processes is not None:
            self._processes.kill(state.rank)
        self._disconnect(state, reason)

    def _disconnect(self, state: RankState, reason: str) -> None:
        took_part, state.ready = self._running and state.ready, False
        state.channel, state.absence_reason = None, reason
        state.stores, state.peers, state.endpoints = [], [], []
        if took_part and not self.closing:
            if state.has_left:
                reason = "its process has closed it"
                log.info("rank.left", rank=state.rank)
            else:
                log.error("rank.lost", rank=state.rank, reason=reason)
            lost = f"rank {state.rank} is lost: {reason}"
            self._on_lost(RankLost(lost, rank=state.rank, has_left=state.has_left))
        self.notify()

    # --- connections ----------------------------------------------------------------------------

    def _new_channel(self) -> Channel:
        while len(self._unauthenticated) >= len(self.ranks) + SPARE_CONNECTIONS:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cut("too many connections without a Hello")
        connection = Connection(self, self._timeouts.hello)
        self._unauthenticated[connection.channel] = None
        if self.closing:
            connection.channel.cut(_CLOSING)
        return connection.channel

    def admit(self, channel: Channel, hello: Hello) -> RankState:
        """Assign a connection to its rank.

        Raises:
            ChannelError: the rank is refused.
        """
        if hello.protocol != PROTOCOL_VERSION:
            raise ChannelError(
                f"rank {hello.rank} has protocol {hello.protocol}, not {PROTOCOL_VERSION}; all "
                "ranks need the same version of aiokv"
            )
        if self.closing:
            raise ChannelError(_CLOSING)
        if not 0 <= hello.rank < len(self.ranks):
            raise ChannelError(f"rank is {hello.rank}; it must be in [0, {len(self.ranks)})")
        state = self.ranks[hello.rank]
        if state.channel is not None:
            raise ChannelError(f"rank {hello.rank} is connected already")
        if hello.layout.num_blocks < self.device_blocks:
            raise ChannelError(
                f"device_blocks is {self.device_blocks}, but the tensors of rank {hello.rank} hold "
                f"only {hello.layout.num_blocks} blocks"
            )
        for name, group in self._windows.items():
            blocks = hello.layout.window_blocks.get(name, 0)
            if blocks < group.device_blocks:
                raise ChannelError(
                    f"the window group {name!r} has device_blocks={group.device_blocks}, but its "
                    f"registered tensors of rank {hello.rank} hold only {blocks} blocks"
                )
        if hello.has_stores != self._has_stores:
            raise ChannelError(
                f"rank {hello.rank} has {'' if hello.has_stores else 'no '}stores, but the "
                f"RankGroup was made with has_stores={self._has_stores}"
            )
        if hello.has_peers != self._has_peers:
            raise ChannelError(
                f"rank {hello.rank} has {'' if hello.has_peers else 'no '}peers, but the "
                f"RankGroup was made with has_peers={self._has_peers}"
            )
        if self.layout is None:
            self.layout = hello.layout
        elif hello.layout.fingerprint != self.layout.fingerprint:
            raise ChannelError(f"the layout of rank {hello.rank} differs from the other ranks'")
        state.channel, state.layout, state.has_left = channel, hello.layout, False
        self._unauthenticated.pop(channel, None)
        self._note_message(state)
        self.notify()
        return state

    def on_refused(self, rank: int, reason: str) -> None:
        """Note why a connection for a rank was refused."""
        if 0 <= rank < len(self.ranks) and self.ranks[rank].channel is None:
            self.ranks[rank].absence_reason = reason

    def _note_message(self, state: RankState) -> None:
        state.heard_at = self._clock()
        state.unanswered = 0

    def on_message(self, state: RankState, message: FromConnectedRank) -> None:
        """Process a message of a connected rank."""
        self._note_message(state)
        if isinstance(message, Broken):
            self.lose(state, message.reason)
        elif isinstance(message, Left):
            state.has_left = True
        elif isinstance(message, Reports):
            if message.generation != self.generation or not state.ready:
                self.stale_reports += 1
                return
            state.progress_at = state.heard_at
            state.finished_step = max(state.finished_step, message.finished_step)
            self._on_reports(state, message)
        elif isinstance(message, ControlReply):
            self._on_reply(state, message)
            self.notify()
        elif isinstance(message, LookupReply):
            self._on_lookup(state, message)
        elif isinstance(message, TicketReply | TicketEnded):
            self._on_ticket(state, message)
        elif isinstance(message, Pong):
            state.note_statistics(message)
        elif message.generation == self.generation:  # Ready
            state.progress_at = state.heard_at
            state.endpoints, state.peer_layout = message.endpoints, message.peer_layout
            state.ticket_key, state.layer_ends = message.ticket_key, message.layer_ends
            state.unpinned_bytes = message.unpinned_bytes
            state.ready = True
            self.notify()

    def on_closed(self, channel: Channel, state: RankState | None, reason: str) -> None:
        """Take note that a connection has ended."""
        self._unauthenticated.pop(channel, None)
        if state is not None and state.channel is channel:
            self._disconnect(state, reason)
        self.notify()


_PING: Final = frame_of(encode(Ping()))
_CLOSING: Final = "the group is closing"
