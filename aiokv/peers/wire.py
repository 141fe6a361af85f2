"""TCP connections between a sending and a receiving rank, which share a secret.

The client proves that it knows the secret first; see :mod:`aiokv.peers.handshake`.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from aiokv.base.checks import integer, shown, text
from aiokv.errors import ConfigError, PeerError
from aiokv.peers.handshake import GREETING_BYTES, PROOF_BYTES, Handshake, check_secret
from aiokv.peers.messages import Landed, Message, decode
from aiokv.wire import connection as wire
from aiokv.wire.connection import WireLimits
from aiokv.wire.frames import FragmentHandler
from aiokv.wire.listener import BACKLOG, Listener
from aiokv.wire.messages import Codec, encode
from aiokv.wire.sockets import (
    CLOSED,
    HandshakeError,
    connected_socket,
    deadline,
    means_any,
    place,
    received,
    resolved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MESSAGE_BYTES: Final = 256 << 10
CODEC: Final[Codec[Message, Message]] = Codec(
    encode=encode, decode=decode, max_message_bytes=MAX_MESSAGE_BYTES, head=Landed
)

Connection = wire.Connection[Message, Message]


class PeerHandler(wire.Handler[Message], FragmentHandler[Landed], Protocol):
    """Owner of one end of a connection of peers.

    A ``Landed`` is a message only if no bytes follow it, from a one-sided transport.
    """


async def connect(
    host: str,
    port: int,
    secret: bytes,
    *,
    timeout: float,
    limits: WireLimits = WireLimits(),  # noqa: B008  (frozen)
) -> Connection:
    """Connect to a listener, and authenticate both sides.

    Args:
        host: name or address.
        port: TCP port.
        secret: secret that both sides share.
        timeout: seconds for name, connection and handshake together.
        limits: limits of the connection.

    Raises:
        PeerError: the other side cannot be reached, is not a peer, or has another secret. Nothing
            is left behind.
        ConfigError: the secret is too short.

    Cancellation: nothing is left behind.
    """
    handshake = Handshake(secret, "client")
    remote = place(host, port)
    try:
        async with deadline(timeout):
            connected = await connected_socket(host, port)
            try:
                await _prove_as_client(connected, handshake)
            except BaseException:
                connected.close()
                raise
    except TimeoutError:
        raise PeerError(f"{remote} did not answer within {timeout} s") from None
    except HandshakeError as error:
        hint = "give all engines the same Peers(secret=...)" if error.may_be_secret else ""
        raise PeerError(f"{remote}: {error}", hint=hint) from None
    except (OSError, OverflowError, UnicodeError) as error:
        raise PeerError(f"cannot connect to {remote}: {error}") from error
    return _watched(connected, remote, handshake, limits)


def _watched(
    connected: socket.socket, remote: str, handshake: Handshake, limits: WireLimits
) -> Connection:
    connection = Connection(connected, remote, CODEC, handshake.keys())
    connection.watch(limits)
    return connection


async def _prove_as_client(connected: socket.socket, handshake: Handshake) -> None:
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
        if has_proven:  # a listener checks the secret only after the client's proof
            cause = "it has another secret, or too many connections, or its process has ended"
        raise HandshakeError(f"{CLOSED}: {cause}", may_be_secret=has_proven) from None
    handshake.check_proof(proof)


async def _admit(
    secret: bytes,
    limits: WireLimits,
    listener: Listener[Connection],
    accepted: socket.socket,
    remote: str,
) -> Connection:
    """Authenticate both sides of a socket that was accepted; see ``Listener``."""
    loop = asyncio.get_running_loop()
    handshake = Handshake(secret, "server")
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake.read_greeting(await received(accepted, GREETING_BYTES))
    await loop.sock_sendall(accepted, handshake.greeting)
    handshake.check_proof(await received(accepted, PROOF_BYTES))
    with listener.room():
        await loop.sock_sendall(accepted, handshake.proof())
    return _watched(accepted, remote, handshake, limits)


async def listen(
    host: str,
    port: int,
    secret: bytes,
    on_connection: Callable[[Connection], None],
    *,
    limits: WireLimits = WireLimits(),  # noqa: B008  (frozen)
    any_address: bool = False,
) -> Listener[Connection]:
    """Listen at one address.

    Args:
        host: name or address of this machine.
        port: TCP port; 0 for one that the system chooses.
        secret: secret that both sides share.
        on_connection: gets each authenticated connection, and calls its ``start`` at once.
        limits: limits of the listener and of its connections.
        any_address: allow an address such as ``0.0.0.0``, which means all addresses.

    Raises:
        ConfigError: the secret is too short, the host is empty or cannot be resolved or means all
            addresses, or the port is in use. Nothing is left behind.

    Cancellation: nothing is left behind.
    """
    check_secret(secret)
    if not text("host", host, ConfigError):
        raise ConfigError(f"host is {shown(host)}; it must be a name or an address")
    integer("port", port, minimum=0, maximum=65535, error=ConfigError)
    try:
        family, address = (await resolved(host, port))[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at {place(host, port)}: {error}") from error
    if not any_address and means_any(address[0]):
        raise ConfigError(
            f"cannot listen at {place(host, port)}: {address[0]} means all addresses",
            hint="name the address that the other engines connect to",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        admit = partial(_admit, secret, limits)
        return Listener(listening, place(host, port), admit, on_connection, limits)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen at {place(host, port)}: {error}",
            hint="choose another port, or port 0",
        ) from error
