"""Membership and liveness of ranks, per generation."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiokv.base.logs import Log
from aiokv.errors import ClosedError, RankLost
from aiokv.ranks.messages import (
    HELLO_CODEC,
    MANAGER_CODEC,
    PROTOCOL_VERSION,
    AskStatistics,
    Begin,
    Broken,
    Close,
    Left,
    RankConnection,
    RankCounts,
    Ready,
    Refuse,
    Reply,
    Reports,
    TicketEnded,
)
from aiokv.ranks.rank_state import RankState
from aiokv.wire.connection import Callbacks, WireLimits
from aiokv.wire.frames import FrameWriter
from aiokv.wire.listener import Listener
from aiokv.wire.sockets import HandshakeError, check_user, first_message

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from aiokv.base.types import Tier
    from aiokv.config.cache_config import WindowGroup
    from aiokv.ranks.messages import FromConnectedRank, FromManager, Hello, Layout
    from aiokv.ranks.processes import RankProcesses
    from aiokv.ranks.rank_socket import RankSocket
    from aiokv.ranks.rank_state import RankTimeouts
    from aiokv.stores.identity import StoreIdentity

log = Log(__name__)

SPARE_CONNECTIONS: Final = 64  # connections without a Hello, in addition to one per rank


class Membership:
    """The ranks of a group, from the manager's side. Used on one loop, from ``open`` on.

    Args:
        num_ranks: number of ranks.
        rank_socket: socket that ranks connect to.
        timeouts: time limits.
        processes: starts the ranks; None when they are started externally.
        clock: seconds.
        on_reports: gets the reports of the current generation.
        on_reply: gets the replies to requests.
        on_ticket_ended: called when a ticket has ended on a rank.
        has_stores: True if each rank must have stores, False if none may have any.
        has_peers: likewise for peers.
        on_lost: called when a rank that took part is lost.

    Attributes:
        ranks: state of each rank.
        generation: number of the current or newest generation; 0 before the first.
        device_blocks: the least that a rank must have.
        layout: layout of every rank, from the first Hello on.
        stale_reports: messages of an earlier generation, ignored.
        closing: ``aclose`` or ``terminate`` was called.
        closed: all connections and processes have ended.
    """

    def __init__(
        self,
        num_ranks: int,
        rank_socket: RankSocket,
        timeouts: RankTimeouts,
        processes: RankProcesses | None,
        *,
        clock: Callable[[], float],
        on_reports: Callable[[RankState, Reports], None],
        on_reply: Callable[[RankState, Reply], None],
        on_ticket_ended: Callable[[RankState, TicketEnded], None],
        on_lost: Callable[[RankLost], None],
        has_stores: bool = False,
        has_peers: bool = False,
    ) -> None:
        self._socket = rank_socket
        self._timeouts = timeouts
        self._processes = processes
        self.device_blocks = 0
        self._windows: Mapping[str, WindowGroup] = {}
        self._on_reports = on_reports
        self._on_reply = on_reply
        self._has_stores = has_stores
        self._has_peers = has_peers
        self._on_ticket_ended = on_ticket_ended
        self._on_lost = on_lost
        self._limits = WireLimits()  # limits of connections; set by `open`
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
        self._running = False  # True while a generation runs

    # --- opening and closing --------------------------------------------------------------------

    async def open(self, device_blocks: int, windows: Mapping[str, WindowGroup]) -> None:
        """Listen for ranks, whose tensors must have at least the blocks of these sizes.

        Args:
            device_blocks: number of device blocks of the tensors outside window groups.
            windows: the window groups whose tensors the ranks must have.

        Raises:
            ConfigError: the socket cannot be made; see :func:`listen`.

        Cancellation: nothing is left behind.
        """
        self.device_blocks = device_blocks
        self._windows = windows
        self._ticked_at = self._clock()
        timeouts = self._timeouts
        self._limits = WireLimits(
            handshake_seconds=timeouts.hello,
            max_unauthenticated=len(self.ranks) + SPARE_CONNECTIONS,
            ping_seconds=timeouts.heartbeat,
            silent_pings=max(2, math.ceil(timeouts.silence / timeouts.heartbeat)),
        )
        self._socket.open(self._listen)

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
                path = self._socket.open(self._listen)
                if self._processes is not None:
                    away = [state.rank for state in self.ranks if state.connection is None]
                    await self._processes.start(away, path)
                await self._until(lambda state: state.connection is not None)
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
                self.send(message)
                await self._until(lambda state: state.ready)
                self._running = True
        except TimeoutError:
            late = min(self.ranks, key=lambda state: (state.connection is not None, state.ready))
            why = "it is not ready" if late.connection is not None else self._why(late)
            raise RankLost(
                f"rank {late.rank}: {why}, after {self._timeouts.start} s", rank=late.rank
            ) from None
        finally:
            if self._socket.is_private:
                self._socket.close()  # a manager that is killed later leaves no file behind

    async def _until(self, condition: Callable[[RankState], bool]) -> None:
        """Wait until the condition holds for all ranks."""
        waits_for_hello = {state.rank for state in self.ranks if state.connection is None}
        while not all(condition(state) for state in self.ranks):
            await self.next_change()
            if self.closing:
                raise ClosedError("the group of ranks is closing")
            waits_for_hello -= {state.rank for state in self.ranks if state.connection is not None}
            for state in self.ranks:
                ended = self._processes is not None and not self._processes.is_running(state.rank)
                if state.connection is None and (state.rank not in waits_for_hello or ended):
                    raise RankLost(f"rank {state.rank}: {self._why(state)}", rank=state.rank)

    async def next_change(self) -> None:
        """Wait until a rank connects, is ready or disconnects; the caller checks which.

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
        for state in self.ranks:
            if state.connection is not None:
                state.connection.send(Close())
            elif self._processes is not None:
                self._processes.kill(state.rank)  # without a connection, no Close can be sent
        self._socket.end_handshakes()
        try:
            async with asyncio.timeout(self._timeouts.close):
                while any(state.connection is not None for state in self.ranks):
                    await self.next_change()
                if self._processes is not None:
                    await self._processes.wait()
        except TimeoutError:
            names = [state.rank for state in self.ranks if state.connection is not None]
            log.warning("ranks.cut_off", ranks=names, waited_seconds=self._timeouts.close)
            for state in self.ranks:
                if state.connection is not None:
                    state.connection.abort(f"it did not close within {self._timeouts.close} s")
        if self._processes is not None:
            await self._processes.kill_all()
        await self._socket.aclose()
        while any(state.connection is not None for state in self.ranks):
            await self.next_change()  # wait until the closed connection has ended
        self.closed = True

    def terminate(self) -> None:
        """Cut all connections, kill the processes, and stop listening, without waiting."""
        self.closing = self.closed = True
        for state in self.ranks:
            if state.connection is not None:
                state.connection.abort(_CLOSING)
        if self._processes is not None:
            self._processes.terminate()
        self._socket.close()
        self.notify()

    def close_without_loop(self) -> None:
        """Kill and reap the processes, and remove the socket, after the loop was closed.

        The connections end with the objects of the closed loop.
        """
        self.closing = self.closed = True
        if self._processes is not None:
            self._processes.reap_all()
        with suppress(RuntimeError):  # its loop is closed; its file was removed before
            self._socket.close()

    def send(self, message: FromManager) -> int:
        """Send a message, encoded once, to every connected rank; return its bytes.

        Raises:
            InternalError: the message is longer than a rank accepts.
        """
        encoded = MANAGER_CODEC.encoded(message)
        for state in self.ranks:
            if state.connection is not None:
                state.connection.send_encoded(encoded)
        return len(encoded)

    def notify(self) -> None:
        """Wake coroutines that wait for a change of a rank."""
        for change in self._change_waiters:
            if not change.done():
                change.set_result(None)

    # --- liveness -------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Ask each rank for its counts.

        Returns:
            False when this loop was blocked before this call and not before the last one: reports
            of ranks may still be unread in the sockets.
        """
        now = self._clock()
        late = now - self._ticked_at > 2 * self._timeouts.heartbeat
        reads_first, self._was_late = late and not self._was_late, late
        self._ticked_at = now
        for state in self.ranks:
            if state.ready and state.connection is not None:
                state.connection.send_encoded(_ASK)
        return not reads_first

    def lose(self, state: RankState, reason: str) -> None:
        """Cut a rank off, and kill its process if the group has started it."""
        if state.connection is not None:
            state.connection.abort(reason)
        if self._processes is not None:
            self._processes.kill(state.rank)
        self._disconnect(state, reason)

    def _disconnect(self, state: RankState, reason: str) -> None:
        took_part, state.ready = self._running and state.ready, False
        state.connection, state.absence_reason = None, reason
        state.stores, state.peers, state.endpoints, state.filters = [], [], [], None
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

    def _listen(self, listening: socket.socket, name: str) -> Listener[RankConnection]:
        return Listener(listening, name, self._authenticated, self._start, self._limits)

    async def _authenticated(
        self, _: object, accepted: socket.socket, remote: str
    ) -> RankConnection:
        """Return the connection of a rank, by its user and its Hello; see ``wire.Listener``."""
        check_user(accepted)
        hello = await first_message(accepted, HELLO_CODEC)
        try:
            state = self.admit(hello)
        except HandshakeError as refusal:
            log.warning("rank.refused", rank=hello.rank, reason=str(refusal))
            self.on_refused(hello.rank, str(refusal))
            refused = MANAGER_CODEC.encoded(Refuse(reason=str(refusal)))
            await asyncio.get_running_loop().sock_sendall(
                accepted, FrameWriter(None).frame(refused)
            )
            raise
        state.connection = RankConnection(accepted, remote, MANAGER_CODEC)
        self.notify()
        return state.connection

    def _start(self, connection: RankConnection) -> None:
        """Read the messages of a rank that was admitted."""
        state = next(state for state in self.ranks if state.connection is connection)
        connection.start(
            Callbacks(
                lambda message: self.on_message(state, message),
                lambda reason: self.on_closed(connection, state, reason),
            )
        )

    def admit(self, hello: Hello) -> RankState:
        """Return the rank of a new connection, which takes its place.

        Raises:
            HandshakeError: the rank is refused.
        """
        if hello.protocol != PROTOCOL_VERSION:
            raise HandshakeError(
                f"rank {hello.rank} has protocol {hello.protocol}, not {PROTOCOL_VERSION}; all "
                "ranks need the same version of aiokv"
            )
        if self.closing:
            raise HandshakeError(_CLOSING)
        if not 0 <= hello.rank < len(self.ranks):
            raise HandshakeError(f"rank is {hello.rank}; it must be in [0, {len(self.ranks)})")
        state = self.ranks[hello.rank]
        if state.connection is not None:
            raise HandshakeError(f"rank {hello.rank} is connected already")
        if hello.layout.num_blocks < self.device_blocks:
            raise HandshakeError(
                f"device_blocks is {self.device_blocks}, but the tensors of rank {hello.rank} hold "
                f"only {hello.layout.num_blocks} blocks"
            )
        for name, group in self._windows.items():
            blocks = hello.layout.window_blocks.get(name, 0)
            if blocks < group.device_blocks:
                raise HandshakeError(
                    f"the window group {name!r} has device_blocks={group.device_blocks}, but its "
                    f"registered tensors of rank {hello.rank} hold only {blocks} blocks"
                )
        if hello.has_stores != self._has_stores:
            raise HandshakeError(
                f"rank {hello.rank} has {'' if hello.has_stores else 'no '}stores, but the "
                f"RankGroup was made with has_stores={self._has_stores}"
            )
        if hello.has_peers != self._has_peers:
            raise HandshakeError(
                f"rank {hello.rank} has {'' if hello.has_peers else 'no '}peers, but the "
                f"RankGroup was made with has_peers={self._has_peers}"
            )
        if self.layout is None:
            self.layout = hello.layout
        elif hello.layout.fingerprint != self.layout.fingerprint:
            raise HandshakeError(f"the layout of rank {hello.rank} differs from the other ranks'")
        state.layout, state.has_left = hello.layout, False
        self._note_message(state)
        return state

    def on_refused(self, rank: int, reason: str) -> None:
        """Note why a connection for a rank was refused."""
        if 0 <= rank < len(self.ranks) and self.ranks[rank].connection is None:
            self.ranks[rank].absence_reason = reason

    def _note_message(self, state: RankState) -> None:
        state.heard_at = self._clock()

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
        elif isinstance(message, Reply):
            self._on_reply(state, message)
        elif isinstance(message, TicketEnded):
            self._on_ticket_ended(state, message)
        elif isinstance(message, RankCounts):
            state.note_statistics(message)
        elif isinstance(message, Ready) and message.generation == self.generation:
            state.progress_at = state.heard_at
            state.endpoints, state.peer_layout = message.endpoints, message.peer_layout
            state.ticket_key, state.layer_ends = message.ticket_key, message.layer_ends
            state.unpinned_bytes = message.unpinned_bytes
            state.ready = True
            if state.connection is not None:
                state.connection.watch(self._limits)
            self.notify()

    def on_closed(self, connection: RankConnection, state: RankState, reason: str) -> None:
        """Take note that the connection of a rank has ended."""
        if state.connection is connection:
            if connection.timed_out and self._processes is not None:
                self._processes.kill(state.rank)
            self._disconnect(state, reason)
        self.notify()


_ASK: Final = MANAGER_CODEC.encoded(AskStatistics())
_CLOSING: Final = "the group is closing"
