"""TcpTransport: fragments on the control connection itself; needs no package and no driver.

A fragment follows the frame of its ``Landed``. The sender's kernel copies it from the outgoing
slot, and the receiver's kernel copies it into the landing slot: no byte of it is copied by Python.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError, InternalError
from aiokv.peers.messages import Return

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.errors import PeerError
    from aiokv.peers.transport import Outgoing, PeerMemory
    from aiokv.peers.wire import Connection


class TcpTransport:
    """See :class:`~aiokv.peers.transport.Transport`."""

    name = "tcp"
    one_sided = False

    def __init__(self) -> None:
        self._outgoing: PeerMemory | None = None

    async def open(self, landing: PeerMemory, outgoing: PeerMemory) -> None:
        """Note the outgoing slots; the landing slots come from ``Handler.place``.

        Raises:
            ConfigError: the slots are in the memory of a GPU.
        """
        if landing.device is not None or outgoing.device is not None:
            raise ConfigError(
                "the transport 'tcp' cannot move blocks from and to the memory of a GPU",
                hint="use host memory, or Peers(transport='nixl')",
            )
        self._outgoing = outgoing

    def metadata(self) -> bytes:
        """Return nothing: the control connection is all that a peer needs."""
        return b""

    async def accept(self, connection: Connection, metadata: bytes) -> bytes:
        """Return nothing: the sender has the connection already."""
        return b""

    async def connect(self, connection: Connection, metadata: bytes) -> TcpLink:
        """Return a link that writes on ``connection``."""
        if self._outgoing is None:
            raise InternalError("the tcp transport is not open")
        return TcpLink(connection, self._outgoing)

    async def fence(self, connection: Connection, *, may_write: bool) -> None:
        """Return at once: nothing arrives on a connection that has ended."""

    async def aclose(self) -> None:
        """Forget the outgoing slots."""
        self._outgoing = None


class TcpLink:
    """See :class:`~aiokv.peers.transport.Link`.

    Args:
        connection: to the receiver.
        outgoing: slots of the sender.
    """

    def __init__(self, connection: Connection, outgoing: PeerMemory) -> None:
        self._connection = connection
        self._outgoing = outgoing

    async def write(self, fragments: Sequence[Outgoing]) -> None:
        """Write fragments; see :meth:`~aiokv.peers.transport.Link.write`."""
        writes = self._connection.write(
            (fragment.landed, self._outgoing.slot(fragment.slot, fragment.landed.fragment_bytes))
            for fragment in fragments
        )
        try:
            failure = await asyncio.shield(writes.ended)
        except asyncio.CancelledError:
            unsent = writes.withdraw()
            if unsent:
                self._connection.send(Return(slots=[landed.credit for landed in unsent]))
            await _settled(writes.ended)
            raise
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        """Do nothing: the connection belongs to its owner."""


async def _settled(ended: asyncio.Future[PeerError | None]) -> None:
    """Wait for a future, however often the task is cancelled meanwhile."""
    while not ended.done():
        try:
            await asyncio.wait((ended,))
        except asyncio.CancelledError:
            continue
