"""Sockets of connections before they are authenticated: addresses, connecting, reading."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from aiokv.wire.frames import LENGTH_BYTES, decoded, too_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.wire.messages import Codec

R = TypeVar("R")

CLOSED: Final = "the other side closed the connection during the handshake"
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


class HandshakeError(Exception):
    """The other side is refused, because it did not authenticate itself.

    Attributes:
        may_be_secret: True if another secret may be the cause.
    """

    def __init__(self, message: str, *, may_be_secret: bool = False) -> None:
        super().__init__(message)
        self.may_be_secret = may_be_secret


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` after ``seconds``.

    It waits in two halves, so that a loop that was blocked reads its sockets before the deadline
    passes.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        half = loop.call_later(seconds / 2, lambda: timeout.reschedule(loop.time() + seconds / 2))
        try:
            yield
        finally:
            half.cancel()


def place(host: str, port: int) -> str:
    """Return host and port as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def remote_of(connected: socket.socket) -> str:
    """Return a name of the other end, for messages.

    Raises:
        OSError: the other side has closed the connection.
    """
    if connected.family == socket.AF_UNIX:
        return f"process {_credentials(connected)[0]}"
    host, port = connected.getpeername()[:2]
    return place(host, port)


def check_user(connected: socket.socket) -> None:
    """Check with the kernel that the other side of a Unix socket runs as the same user.

    Raises:
        HandshakeError: it runs as another user.
    """
    uid = _credentials(connected)[1]
    if uid != os.getuid():
        raise HandshakeError(f"the other side runs as user {uid}, not as user {os.getuid()}")


def _credentials(connected: socket.socket) -> tuple[int, int, int]:
    """Return the ids of process, user and group at the other end of a Unix socket."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return cast("tuple[int, int, int]", _CREDENTIALS.unpack(credentials))


def means_any(address: str) -> bool:
    """Return True if a socket that is bound to the address accepts on all addresses."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_unspecified


async def resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return families and addresses of a host; an IP address is returned without a look-up.

    Raises:
        OSError: the name is unknown.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in infos]


async def connected_socket(host: str, port: int) -> socket.socket:
    """Return a connected socket to the first address of a host that accepts.

    Raises:
        OSError: no address accepts.
    """
    failure: OSError = OSError(f"{host} has no address")
    for family, address in await resolved(host, port):
        try:
            return await connected_to(family, address)
        except OSError as error:
            failure = error
    raise failure


async def connected_to(family: int, address: Any) -> socket.socket:
    """Return a connected socket.

    Raises:
        OSError: the address does not accept; the socket is closed.

    Cancellation: the socket is closed.
    """
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, address)
    except BaseException:
        connecting.close()
        raise
    return connecting


async def received(connected: socket.socket, num_bytes: int) -> bytes:
    """Return the next ``num_bytes``, and read no further.

    Raises:
        ConnectionResetError: the other side closed the connection first.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        part = await loop.sock_recv(connected, num_bytes - len(data))
        if not part:
            raise ConnectionResetError(CLOSED)
        data += part
    return data


async def first_message(connected: socket.socket, codec: Codec[Any, R]) -> R:
    """Return the first message of the other side, in a frame without a MAC; read no more.

    Raises:
        ProtocolError: it is too long, or malformed.
        ConnectionResetError: the other side closed the connection first.
    """
    length = int.from_bytes(await received(connected, LENGTH_BYTES), "little")
    return await _message(connected, length, codec)


async def _message(connected: socket.socket, length: int, codec: Codec[Any, R]) -> R:
    if length > codec.max_message_bytes:
        raise too_long(length, codec)
    return decoded(codec, memoryview(await received(connected, length)))


async def send_with_descriptor(connected: socket.socket, frame: bytes, descriptor: int) -> None:
    """Send a first, short frame on a Unix socket, and a descriptor with its first byte.

    Raises:
        OSError: the other side has closed the connection, or the kernel takes no part of the frame.
    """
    sent = socket.send_fds(connected, [frame], [descriptor])
    await asyncio.get_running_loop().sock_sendall(connected, frame[sent:])


async def first_message_with_descriptor(
    connected: socket.socket, codec: Codec[Any, R]
) -> tuple[R, int | None]:
    """Return the first message of the other side of a Unix socket, and the descriptor with it.

    The caller closes the descriptor.

    Raises:
        ProtocolError: as ``first_message``. A descriptor is closed.
        ConnectionResetError: the other side closed the connection first.

    Cancellation: a descriptor is closed.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connected, readable.set_result, None)
    readable.add_done_callback(lambda _: loop.remove_reader(connected))
    await readable
    await asyncio.sleep(0)  # uvloop stops watching a descriptor one pass later
    begin, descriptors, _, _ = socket.recv_fds(connected, LENGTH_BYTES, 1)
    try:
        begin += await received(connected, LENGTH_BYTES - len(begin)) if begin else b""
        if not begin:
            raise ConnectionResetError(CLOSED)
        message = await _message(connected, int.from_bytes(begin, "little"), codec)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors[0] if descriptors else None
