"""Link: the connection of an engine to the service of its host, and the shared memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from aiokv.errors import StoreError
from aiokv.stores.host.messages import (
    ADMISSION_CODEC,
    ENGINE_CODEC,
    FIRST_CODEC,
    PROTOCOL_VERSION,
    Counts,
    Hello,
    Inspect,
    Refuse,
    Release,
    Reply,
    Report,
    Welcome,
)
from aiokv.stores.host.shared_memory import SharedMemory
from aiokv.wire.connection import Callbacks, Connection
from aiokv.wire.frames import FrameWriter, ProtocolError
from aiokv.wire.sockets import (
    HandshakeError,
    check_user,
    connected_to,
    first_message_with_descriptor,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiokv.stores.base import StoreMemory
    from aiokv.stores.host.messages import (
        Admission,
        FirstMessage,
        FromEngine,
        FromService,
        Load,
        Lookup,
        Newest,
        Publish,
        Purge,
        Remove,
        Save,
    )

    Request = Lookup | Load | Save | Remove | Publish | Purge | Newest

T = TypeVar("T")


class Link:
    """Requests to the service, and their replies. Used on one loop.

    Attributes:
        counts: counts of the last reply.
        labels: objects by label, from the last reply that had them.
    """

    def __init__(self, connection: Connection[FromEngine, FromService]) -> None:
        self.counts = Counts()
        self.labels: dict[str, int] = {}
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        connection.start(Callbacks(self._on_message, self._on_closed))

    @property
    def has_ended(self) -> bool:
        """True when the service has closed the connection, or has ended."""
        return bool(self._connection.reason)

    def next_number(self) -> int:
        """Return the number of the next request."""
        return next(self._numbers)

    async def ask(self, request: Request) -> bytes:
        """Send a request; return the data of its reply.

        Raises:
            StoreError: the connection has ended, or the request has failed.

        Cancellation: the service gives back the slots of the request.
        """
        if self.has_ended:
            raise self._lost()
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = reply
        self._connection.send(request)
        try:
            return await reply
        except asyncio.CancelledError:
            self.release(request.number)
            raise
        finally:
            del self._waiting[request.number]

    def release(self, number: int) -> None:
        """Give back the slots of a request."""
        self._connection.send(Release(number=number))

    def close(self) -> None:
        """End the connection."""
        self._connection.abort("closed")

    def _on_message(self, message: FromService) -> None:
        if not isinstance(message, Reply):
            raise ProtocolError(f"the message {type(message).__name__}")
        self.counts = message.counts
        if message.counts.labels is not None:
            self.labels = message.counts.labels
        reply = self._waiting.get(message.number)
        if reply is None or reply.done():
            return
        if message.error:
            where = self._connection.remote
            reply.set_exception(StoreError(f"the host service at {where}: {message.error}"))
        else:
            reply.set_result(message.data)

    def _on_closed(self, reason: str) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._lost())

    def _lost(self) -> StoreError:
        return StoreError(
            f"the host service at {self._connection.remote} is lost: {self._connection.reason}"
        )


async def attach(path: Path, memory: StoreMemory) -> tuple[Link, SharedMemory]:
    """Return a new link to the service that listens at ``path``, and its slots.

    Raises:
        StoreError: no service listens there, or it refuses the engine.

    Cancellation: nothing is left behind.
    """
    hello = Hello(
        version=PROTOCOL_VERSION,
        payload_bytes=memory.payload_bytes,
        pitch_bytes=memory.pitch_bytes,
        share=memory.quota_share,
    )
    connected, admission, descriptor = await _admission(path, hello)
    try:
        if not isinstance(admission, Welcome) or descriptor is None:
            raise StoreError(f"the host service at {path} has sent no memory")
        shared = SharedMemory(
            descriptor,
            admission.num_slots,
            memory.payload_bytes,
            memory.pitch_bytes,
            admission.num_counters,
        )
    except BaseException:
        connected.close()
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return Link(Connection(connected, str(path), ENGINE_CODEC)), shared


@asynccontextmanager
async def visiting(path: Path) -> AsyncIterator[tuple[Link, Report]]:
    """Open a link to the service that listens at ``path`` for requests about all sizes; yield it
    and the counts of the service.

    Raises:
        StoreError: no service listens there.
    """
    connected, report, _ = await _admission(path, Inspect(version=PROTOCOL_VERSION))
    if not isinstance(report, Report):
        connected.close()
        raise StoreError(f"the host service at {path} has sent no report")
    link = Link(Connection(connected, str(path), ENGINE_CODEC))
    try:
        yield link, report
    finally:
        link.close()


async def inspect(path: Path) -> Report:
    """Return the counts of the service that listens at ``path``.

    Raises:
        StoreError: no service listens there.
    """
    async with visiting(path) as (_, report):
        return report


async def _admission(
    path: Path, first: FirstMessage
) -> tuple[socket.socket, Admission, int | None]:
    """Connect, and return the socket, the answer to the first message, and its descriptor."""
    try:
        connected = await connected_to(socket.AF_UNIX, str(path))
    except OSError as error:
        raise StoreError(
            f"no host service listens at {path}: {error}",
            hint=f"start it with: aiokv store serve {path} --bytes 64GiB",
        ) from error
    try:
        check_user(connected)
        frame = FrameWriter(None).frame(FIRST_CODEC.encoded(first))
        await asyncio.get_running_loop().sock_sendall(connected, frame)
        answer, descriptor = await first_message_with_descriptor(connected, ADMISSION_CODEC)
        if isinstance(answer, Refuse):
            raise StoreError(f"the host service at {path} refuses the engine: {answer.reason}")
    except (HandshakeError, ProtocolError, OSError) as error:
        connected.close()
        raise StoreError(f"the host service at {path} cannot be used: {error}") from error
    except BaseException:
        with suppress(OSError):
            connected.close()
        raise
    return connected, answer, descriptor
