"""AcceptedConnections: the connections that senders have opened to a rank.

::

    connection ─► first Open ─► accept of the transport ─► messages and fragments ─► Receiver
    end of the connection ─► fence of the transport ─► its slots are free

Only a one-sided transport accepts and fences: its senders may write landing slots after the end of
their connection.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, TypeGuard

from aiokv.base.logs import Log
from aiokv.errors import PeerError
from aiokv.peers.messages import MAX_REASON_CHARACTERS, Landed, Open, Refused

if TYPE_CHECKING:
    from aiokv.peers.messages import Message
    from aiokv.peers.receiver import Receiver
    from aiokv.peers.transport import PeerMemory, Transport
    from aiokv.peers.wire import Connection

log = Log(__name__)

MAX_WAITING: Final = 4096  # messages of a sender that the transport has not accepted yet
QUARANTINE_LOG_SECONDS: Final = 10.0  # after which slots in quarantine are logged


class _ReceiverEnd:
    """Handler of a connection that a sender has opened."""

    def __init__(self, accepted: AcceptedConnections, connection: Connection) -> None:
        self._accepted = accepted
        self._connection = connection

    def on_message(self, message: Message) -> None:
        self._accepted.on_message(self._connection, message)

    def place(self, landed: Landed) -> memoryview | None:
        return self._accepted.slot_for(self._connection, landed)

    def on_fragment(self, landed: Landed) -> None:
        self._accepted.on_fragment(self._connection, landed)

    def on_closed(self, reason: str) -> None:
        self._accepted.on_closed(self._connection, reason)


class AcceptedConnections:
    """Connections of senders; a connection without a receiver waits for the next receiver.

    Args:
        transport: transport of the fragments.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._receiver: Receiver[Connection] | None = None
        self._landing: PeerMemory | None = None
        self._connections: set[Connection] = set()
        self._waiting: dict[Connection, list[Message]] = {}  # messages that follow the first Open
        self._metadata: dict[Connection, bytes] = {}  # metadata of one-sided transports
        self._accepts: set[asyncio.Task[None]] = set()
        self._fences: dict[Connection, asyncio.Task[None]] = {}

    @property
    def connections(self) -> list[Connection]:
        """Connections that have not ended."""
        return list(self._connections)

    def metadata(self, connection: Connection) -> bytes:
        """Return the metadata with which the sender of a connection writes into landing slots."""
        return self._metadata.get(connection, b"")

    def serve(self, receiver: Receiver[Connection], landing: PeerMemory) -> None:
        """Give messages and fragments to a receiver.

        Args:
            receiver: new.
            landing: its slots.
        """
        self._receiver, self._landing = receiver, landing

    def refuse(self) -> None:
        """Refuse all tickets until ``serve``. Idempotent."""
        self._receiver = self._landing = None

    def add(self, connection: Connection) -> None:
        """Start a connection that was accepted."""
        self._connections.add(connection)
        connection.start(_ReceiverEnd(self, connection))

    async def finish(self, seconds: float) -> None:
        """Wait until the transport has accepted the senders, for some seconds.

        Cancellation: stops waiting.
        """
        if self._accepts:
            await asyncio.wait(list(self._accepts), timeout=seconds)

    async def cancel_fences(self) -> None:
        """Stop the waits for the ends of writes: the transport will be closed. Idempotent.

        Cancellation: call it again.
        """
        for fence in self._fences.values():
            fence.cancel()  # the transport closes the connections that it waits for
        if self._fences:
            await asyncio.wait(list(self._fences.values()))

    # --- messages ---------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: Message) -> None:
        """Take a message of a sender."""
        receiver = self._receiver
        if connection in self._waiting:
            waiting = self._waiting[connection]
            if len(waiting) >= MAX_WAITING:
                connection.abort(f"the peer sent {MAX_WAITING} messages before it was accepted")
            else:
                waiting.append(message)
        elif isinstance(message, Landed):  # sent over a one-sided transport
            if self._begin_fragment(connection, message):
                self.on_fragment(connection, message)
        elif receiver is None:
            if isinstance(message, Open):
                refused = Refused(ticket_id=message.ticket_id, kind="ticket", reason="it sleeps")
                connection.send(refused)
        elif self._needs_accept(message, connection):
            self._waiting[connection] = [message]
            accept = asyncio.get_running_loop().create_task(self._accept(connection, message))
            self._accepts.add(accept)
            accept.add_done_callback(self._accepts.discard)
        else:
            receiver.on_message(connection, message)

    def _needs_accept(self, message: Message, connection: Connection) -> TypeGuard[Open]:
        return (
            self._transport.one_sided
            and isinstance(message, Open)
            and message.transport == self._transport.name
            and connection not in self._metadata
        )

    async def _accept(self, connection: Connection, first: Open) -> None:
        """Prepare the transport for a sender, then handle its messages in order."""
        refusal = ""
        try:
            metadata = await self._transport.accept(connection, first.transport_metadata)
        except PeerError as error:
            metadata, refusal = b"", str(error)[:MAX_REASON_CHARACTERS]
        except Exception as error:
            metadata = b""
            abort_for(connection, error)
        finally:
            messages = self._waiting.pop(connection)
        self._metadata[connection] = metadata
        if connection.reason:  # on_closed was called already
            self._begin_fence(connection, may_write=False)
            return
        if refusal:
            refused = Refused(ticket_id=first.ticket_id, kind="ticket", reason=refusal)
            connection.send(refused)
            connection.close()
            return
        try:
            for message in messages:
                self.on_message(connection, message)
        except Exception as error:
            abort_for(connection, error)

    # --- fragments --------------------------------------------------------------------------------

    def slot_for(self, connection: Connection, landed: Landed) -> memoryview | None:
        """Return the slot for a fragment, or None to discard it."""
        landing = self._landing
        if landing is None or not self._begin_fragment(connection, landed):
            return None
        return landing.slot(landed.slot, landed.fragment_bytes)

    def _begin_fragment(self, connection: Connection, landed: Landed) -> bool:
        """Return False for a fragment to discard."""
        receiver, landing = self._receiver, self._landing
        if receiver is None or landing is None or landed.fragment_bytes > landing.slot_bytes:
            return False
        return receiver.begin_fragment(connection, landed) == "land"

    def on_fragment(self, connection: Connection, landed: Landed) -> None:
        """Note that a fragment is in its slot."""
        if self._receiver is not None:
            self._receiver.end_fragment(connection, landed)

    # --- ends -------------------------------------------------------------------------------------

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection."""
        may_write = self._receiver is not None and self._receiver.on_closed(connection, reason)
        self._connections.discard(connection)
        if connection in self._metadata:
            self._begin_fence(connection, may_write=may_write)

    def _begin_fence(self, connection: Connection, *, may_write: bool) -> None:
        """Free the slots of a connection that has ended when its sender cannot write any more.

        Idempotent.
        """
        if connection not in self._fences:
            fence = asyncio.get_running_loop().create_task(self._fence(connection, may_write))
            self._fences[connection] = fence
            fence.add_done_callback(lambda _: self._fences.pop(connection, None))
        self._metadata.pop(connection, None)

    async def _fence(self, connection: Connection, may_write: bool) -> None:
        receiver = self._receiver
        warning = asyncio.get_running_loop().call_later(
            QUARANTINE_LOG_SECONDS,
            partial(
                log.warning,
                "peer.slots_in_quarantine",
                remote=connection.remote,
                reason="the sender may still write, and has not closed its connection",
            ),
        )
        try:
            await self._transport.fence(connection, may_write=may_write)
        except PeerError as error:
            log.error("peer.slots_left_in_quarantine", remote=connection.remote, reason=str(error))
            return
        finally:
            warning.cancel()
        if receiver is not None and receiver is self._receiver:
            receiver.fenced(connection)


def abort_for(connection: Connection, error: Exception) -> None:
    """Cut a connection for an error of this process, and report the error to the loop."""
    connection.abort(f"an internal error: {error!r}")
    asyncio.get_running_loop().call_exception_handler(
        {
            "message": f"aiokv: an error cut the connection to {connection.remote}",
            "exception": error,
        }
    )
