"""Connections before authentication: proofs of the secret, limits, deadlines."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from aiokv.errors import ConfigError, PeerError
from aiokv.peers.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES, Handshake
from aiokv.peers.wire import connect
from aiokv.testing import running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from tests.peers.wires import HOST, SECRET, RawSocket, listening

# --- authentication -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_another_secret_is_refused_without_a_proof_of_the_server(accepted, caplog):
    listener = await listening(accepted)
    with pytest.raises(PeerError, match="it has another secret") as refused:
        await connect(HOST, listener.address[1], b"another secret....", timeout=PATIENCE_SECONDS)
    assert "Peers(secret=...)" in refused.value.hint
    await run_until_idle(lambda: listener.refused == 1)
    raw = await RawSocket.to(listener.address[1])
    handshake = Handshake(b"another secret....", "client")
    await raw.send(handshake.greeting)
    handshake.read_greeting(await raw.receive(GREETING_BYTES))
    await raw.send(handshake.proof())
    assert await raw.receive_all() == b""
    raw.close()
    await listener.aclose()
    assert accepted == []
    assert "wire.refused" in caplog.text
    for text in (caplog.text, str(refused.value), repr(listener)):
        assert "another secret...." not in text
        assert SECRET.decode() not in text


async def one_server(answer: bytes, listening: socket.socket) -> bytes:
    """Accept one connection, read its greeting, send ``answer``, and return what follows."""
    accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
    raw = RawSocket(accepted)
    await raw.receive(GREETING_BYTES)
    await raw.send(answer)
    raw.socket.shutdown(socket.SHUT_WR)
    rest = await raw.receive_all()
    raw.close()
    return rest


@pytest.fixture
def impostor():
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        yield listening


@pytest.mark.asyncio
async def test_server_that_does_not_know_the_secret_is_refused(impostor):
    server = Handshake(b"another secret....", "server")
    answering = asyncio.create_task(one_server(server.greeting + bytes(PROOF_BYTES), impostor))
    with pytest.raises(PeerError, match="does not know the secret"):
        await connect(HOST, impostor.getsockname()[1], SECRET, timeout=PATIENCE_SECONDS)
    assert len(await answering) == PROOF_BYTES


@pytest.mark.asyncio
async def test_server_that_reflects_the_challenge_and_the_proof_is_refused(impostor):
    async def reflect() -> None:
        accepted, _ = await asyncio.get_running_loop().sock_accept(impostor)
        raw = RawSocket(accepted)
        await raw.send(await raw.receive(GREETING_BYTES))
        await raw.send(await raw.receive(PROOF_BYTES))
        await raw.receive_all()
        raw.close()

    reflecting = asyncio.create_task(reflect())
    with pytest.raises(PeerError, match="does not know the secret"):
        await connect(HOST, impostor.getsockname()[1], SECRET, timeout=PATIENCE_SECONDS)
    await reflecting


@pytest.mark.asyncio
async def test_connection_of_the_client_to_itself_through_the_server_is_refused(accepted):
    """A client that returns each byte of the server to it does not get in."""
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    await raw.send(MAGIC + bytes(32))
    await raw.send(await raw.receive(GREETING_BYTES))
    assert await raw.receive_all() == b""
    raw.close()
    await listener.aclose()
    assert accepted == []


@pytest.mark.asyncio
async def test_server_closes_after_each_cut_of_the_handshake(accepted):
    listener = await listening(accepted)
    for cut in range(GREETING_BYTES + PROOF_BYTES):
        raw = await RawSocket.to(listener.address[1])
        handshake = Handshake(SECRET, "client")
        await raw.send(handshake.greeting[:cut])
        if cut > GREETING_BYTES:
            handshake.read_greeting(await raw.receive(GREETING_BYTES))
            await raw.send(handshake.proof()[: cut - GREETING_BYTES])
        raw.close()
        await run_until_idle(lambda done=cut + 1: listener.refused == done)
    await run_until_idle(lambda: listener.handshakes == 0)
    await listener.aclose()
    assert accepted == []


@pytest.mark.asyncio
async def test_client_fails_after_each_cut_of_the_handshake(impostor):
    server = Handshake(SECRET, "server")
    for cut in range(GREETING_BYTES + PROOF_BYTES):
        answer = (server.greeting + bytes(PROOF_BYTES))[:cut]
        answering = asyncio.create_task(one_server(answer, impostor))
        with pytest.raises(PeerError, match="closed the connection during the handshake") as lost:
            await connect(HOST, impostor.getsockname()[1], SECRET, timeout=PATIENCE_SECONDS)
        knows_secret = cut >= GREETING_BYTES  # a process that was killed blames no secret
        assert ("secret" in str(lost.value)) == knows_secret
        await answering


@pytest.mark.asyncio
async def test_http_client_gets_no_reply(accepted):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    await raw.send(b"GET / HTTP/1.1\r\nHost: a.example.org\r\nAccept: */*\r\n\r\n")
    assert await raw.receive_all() == b""
    raw.close()
    await listener.aclose()
    assert listener.refused == 1


@pytest.mark.asyncio
async def test_open_fails_where_nothing_listens(impostor):
    port = impostor.getsockname()[1]
    impostor.close()
    with pytest.raises(PeerError, match=f"cannot connect to 127.0.0.1:{port}: "):
        await connect(HOST, port, SECRET, timeout=PATIENCE_SECONDS)
    with pytest.raises(PeerError, match="cannot connect to 127\\.0\\.0\\.1:70000"):
        await connect(HOST, 70_000, SECRET, timeout=PATIENCE_SECONDS)
    with pytest.raises(ConfigError, match="secret has 5 bytes"):
        await connect(HOST, port, b"short", timeout=PATIENCE_SECONDS)


@pytest.mark.clock
@pytest.mark.asyncio
async def test_server_that_accepts_and_sends_nothing_is_given_up(impostor):
    opening = asyncio.create_task(connect(HOST, impostor.getsockname()[1], SECRET, timeout=7))
    raw, _ = await asyncio.get_running_loop().sock_accept(impostor)
    clock = running_clock()
    await clock.advance(6.9)
    assert not opening.done()
    await clock.advance(0.2)
    with pytest.raises(PeerError, match="did not answer within 7 s"):
        await opening
    raw.close()


@pytest.mark.asyncio
async def test_cancelled_open_leaves_nothing(impostor):
    opening = asyncio.create_task(
        connect(HOST, impostor.getsockname()[1], SECRET, timeout=PATIENCE_SECONDS)
    )
    raw, _ = await asyncio.get_running_loop().sock_accept(impostor)
    await spin(5)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    raw.close()


# --- limits before authentication -----------------------------------------------------------------


@pytest.mark.clock
@pytest.mark.asyncio
async def test_client_that_sends_nothing_is_closed_at_the_deadline(accepted):
    listener = await listening(accepted, handshake_seconds=5.0)
    for sent in (b"", MAGIC, MAGIC + bytes(32)):
        raw = await RawSocket.to(listener.address[1])
        await raw.send(sent)
        await run_until_idle(lambda: listener.handshakes == 1)
        await spin(20)
        clock = running_clock()
        refused = listener.refused
        await clock.advance(4.9)
        assert listener.refused == refused
        await clock.advance(0.2)
        assert listener.refused == refused + 1
        raw.close()
    await listener.aclose()
    assert accepted == []


@pytest.mark.clock
@pytest.mark.asyncio
async def test_blocked_loop_ends_no_handshake(accepted):
    """The deadline passes while the loop is blocked; the proof of the client is in the kernel."""
    listener = await listening(accepted, handshake_seconds=5.0)
    raw = await RawSocket.to(listener.address[1])
    handshake = Handshake(SECRET, "client")
    await raw.send(handshake.greeting)
    handshake.read_greeting(await raw.receive(GREETING_BYTES))
    await spin(20)
    raw.socket.send(handshake.proof())
    clock = running_clock()
    clock.now += 100.0  # the loop was blocked
    await clock.advance(0)
    await run_until_idle(lambda: bool(accepted))
    assert listener.refused == 0
    accepted[0].abort("the test ended")
    raw.close()
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_clients_that_trickle_have_no_longer_deadline(accepted):
    listener = await listening(accepted, handshake_seconds=5.0)
    raw = await RawSocket.to(listener.address[1])
    clock = running_clock()
    for byte in MAGIC + bytes(1):  # 4.5 s
        await raw.send(bytes([byte]))
        await spin(5)
        await clock.advance(0.5)
    assert listener.refused == 0
    await clock.advance(0.6)
    assert listener.refused == 1
    raw.close()
    await listener.aclose()


@pytest.mark.asyncio
async def test_unauthenticated_connections_are_limited_and_do_not_keep_peers_out(accepted):
    listener = await listening(accepted, max_unauthenticated=3)
    raws = [await RawSocket.to(listener.address[1]) for _ in range(10)]
    await run_until_idle(lambda: listener.refused == 7)
    assert listener.handshakes == 3
    client = await connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS)
    await run_until_idle(lambda: len(accepted) == 1)
    assert listener.handshakes == 2
    for end in (client, *accepted):
        end.abort("the test ended")
    for raw in raws:
        raw.close()
    await listener.aclose()


@pytest.mark.asyncio
async def test_socket_accepted_just_before_the_end_is_closed(accepted):
    listener = await listening(accepted)
    with socket.create_connection((HOST, listener.address[1])) as raw:
        await run_until_idle(lambda: listener.handshakes == 1)
        await listener.aclose()  # before the first step of the handshake
        raw.settimeout(10)
        assert raw.recv(1) == b""


@pytest.mark.asyncio
async def test_authenticated_connections_are_limited(accepted):
    listener = await listening(accepted, max_connections=2)
    clients = [
        await connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS) for _ in range(2)
    ]
    await run_until_idle(lambda: len(accepted) == 2)
    assert listener.connections == 2
    with pytest.raises(PeerError, match="too many connections"):
        await connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS)
    accepted[0].abort("done")
    clients.append(await connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS))
    await run_until_idle(lambda: len(accepted) == 3)
    for end in (*clients, *accepted):
        end.abort("the test ended")
    await listener.aclose()


@pytest.mark.asyncio
async def test_clients_that_prove_at_the_same_time_do_not_exceed_the_limit(accepted, monkeypatch):
    class SlowSends:
        """The loop of the listener; proofs wait."""

        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.loop = loop
            self.waiting = 0
            self.gate = asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.loop, name)

        async def sock_sendall(self, connected: Any, data: bytes) -> None:
            if len(data) == PROOF_BYTES and connected.getsockname() == listener.address:
                self.waiting += 1
                await self.gate.wait()
            await self.loop.sock_sendall(connected, data)

    listener = await listening(accepted, max_connections=2)
    slow: Any = SlowSends(asyncio.get_running_loop())
    patched = SimpleNamespace(get_running_loop=lambda: slow)
    monkeypatch.setattr("aiokv.peers.wire.asyncio", patched)
    opening = [
        asyncio.create_task(connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS))
        for _ in range(4)
    ]
    await run_until_idle(lambda: slow.waiting + listener.refused == 4)
    slow.gate.set()
    ends = await asyncio.gather(*opening, return_exceptions=True)
    await run_until_idle(lambda: listener.handshakes == 0)
    assert (len(accepted), listener.refused) == (2, 2)
    assert sum(isinstance(end, PeerError) for end in ends) == 2
    for end in (*ends, *accepted):
        if not isinstance(end, BaseException):
            end.abort("the test ended")
    await listener.aclose()


@pytest.mark.asyncio
async def test_refusals_are_logged_but_not_each_one(accepted, caplog):
    listener = await listening(accepted)
    with caplog.at_level(logging.WARNING, "aiokv"):
        for _ in range(5):
            raw = await RawSocket.to(listener.address[1])
            raw.close()
        await run_until_idle(lambda: listener.refused == 5)
    assert caplog.text.count("wire.refused") == 1
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_listener_without_descriptors_tries_again(accepted, monkeypatch, caplog):
    listener = await listening(accepted)
    accept = listener._socket.accept
    failures = [OSError(24, "Too many open files")]

    class Failing:
        def accept(self):
            if failures:
                raise failures.pop()
            return accept()

        def __getattr__(self, name):
            return getattr(real, name)

    real = listener._socket
    monkeypatch.setattr(listener, "_socket", Failing())
    opening = asyncio.create_task(
        connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS)
    )
    await run_until_idle(lambda: not failures)
    assert "Too many open files" in caplog.text
    await spin(20)
    assert not opening.done()
    await running_clock().advance(1.1)
    client = await opening
    await run_until_idle(lambda: bool(accepted))
    for end in (client, *accepted):
        end.abort("the test ended")
    monkeypatch.setattr(listener, "_socket", real)
    await listener.aclose()
