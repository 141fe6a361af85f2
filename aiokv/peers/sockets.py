"""Sockets of connections before they are authenticated: addresses, connecting, reading."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from aiokv.peers.handshake import GREETING_BYTES, PROOF_BYTES, Handshake, HandshakeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CLOSED: Final = "the other side closed the connection during the handshake"


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` after ``seconds``.

    In two halves: between the halves, a loop that was blocked reads its sockets.
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


def means_any(address: str) -> bool:
    """Return True if a socket that is bound to the address accepts on all addresses."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_unspecified


async def resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return families and addresses of a host; an address is its own, without a thread.

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
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"{host} has no address")
    for family, address in await resolved(host, port):
        connecting = socket.socket(family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            await loop.sock_connect(connecting, address)
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
        else:
            return connecting
    raise failure


async def prove_as_client(connected: socket.socket, handshake: Handshake) -> None:
    """Exchange greetings and proofs with a listener.

    Raises:
        HandshakeError: it closed the connection, or does not know the secret.
        OSError: the connection failed.
    """
    loop = asyncio.get_running_loop()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    has_proven = False
    try:
        await loop.sock_sendall(connected, handshake.greeting)
        handshake.read_greeting(await received(connected, GREETING_BYTES))
        await loop.sock_sendall(connected, handshake.proof())
        has_proven = True
        proof = await received(connected, PROOF_BYTES)
    except ConnectionError:
        cause = "its process has ended, or it is no peer"
        if has_proven:  # only then a listener knows whether the secret is right
            cause = "it has another secret, or too many connections, or its process has ended"
        raise HandshakeError(f"{_CLOSED}: {cause}", may_be_secret=has_proven) from None
    handshake.check_proof(proof)


async def received(connected: socket.socket, num_bytes: int) -> bytes:
    """Return the next ``num_bytes``, and read no more than these.

    Raises:
        ConnectionResetError: the other side closed the connection before.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        part = await loop.sock_recv(connected, num_bytes - len(data))
        if not part:
            raise ConnectionResetError(_CLOSED)
        data += part
    return data
