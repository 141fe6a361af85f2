"""Connections: authentication and its limits, order, liveness, and every way to end."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError, InternalError, PeerError, UsageError
from aiokv.peers.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES, Handshake
from aiokv.peers.messages import Cancel, Done, Want
from aiokv.peers.wire import Connection, connect, listen
from aiokv.testing import running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from aiokv.wire.connection import WireLimits
from aiokv.wire.frames import FrameWriter
from aiokv.wire.messages import Ping, Pong, encode
from aiokv.wire.sockets import place
from tests.peers.wires import HOST, SECRET, TICKET, RawSocket, Recorder, connected, landed

if TYPE_CHECKING:
    from aiokv.wire.listener import Listener

WANT = Want(ticket_id=TICKET, fragments=1)
DONE = Done(ticket_id=TICKET)
PINGS = WireLimits().ping_seconds


@pytest.fixture
def accepted():
    return []


async def listening(accepted: list[Connection], **limits: object) -> Listener:
    return await listen(HOST, 0, SECRET, accepted.append, limits=WireLimits(**limits))


# --- messages and fragments -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_messages_and_fragments_arrive_in_the_order_of_the_calls():
    async with connected() as pair:
        pair.start()
        fragment = bytes(range(256)) * 1000
        pair.client.send(WANT)
        writes = pair.client.write([(landed(len(fragment)), memoryview(fragment))])
        pair.client.send(DONE)
        assert await writes.ended is None
        await run_until_idle(lambda: len(pair.at_server.messages) == 2)
        assert pair.at_server.messages == [WANT, DONE]
        assert pair.at_server.fragments == [(landed(len(fragment)), fragment)]
        pair.server.send(Cancel(ticket_id=TICKET, reason="enough"))
        await run_until_idle(lambda: bool(pair.at_client.messages))
        assert pair.at_client.messages == [Cancel(ticket_id=TICKET, reason="enough")]
        assert pair.client.sent_bytes == pair.server.received_bytes > len(fragment)
        assert pair.server.sent_bytes == pair.client.received_bytes > 0


@pytest.mark.asyncio
async def test_messages_that_arrive_before_the_start_wait():
    async with connected() as pair:
        pair.client.start(pair.at_client)
        pair.client.send(WANT)
        await spin(20)
        assert pair.at_server.messages == []
        pair.server.start(pair.at_server)
        await run_until_idle(lambda: pair.at_server.messages == [WANT])


@pytest.mark.asyncio
async def test_fragments_larger_than_the_kernels_buffers_arrive_while_both_sides_write():
    async with connected() as pair:
        pair.shrink_buffers()
        pair.start()
        size = 3 << 20
        there, back = bytes([7]) * size, bytes([9]) * size
        one = pair.client.write([(landed(size, slot), memoryview(there)) for slot in range(3)])
        other = pair.server.write([(landed(size, slot), memoryview(back)) for slot in range(3)])
        assert await one.ended is None
        assert await other.ended is None
        await run_until_idle(
            lambda: len(pair.at_server.fragments) == len(pair.at_client.fragments) == 3
        )
        assert {data for _, data in pair.at_server.fragments} == {there}
        assert {data for _, data in pair.at_client.fragments} == {back}


@pytest.mark.asyncio
async def test_discarded_fragment_is_skipped():
    async with connected() as pair:
        pair.start()
        pair.at_server.discards = True
        pair.client.write([(landed(1 << 20), memoryview(bytes(1 << 20)))])
        pair.client.send(DONE)
        await run_until_idle(lambda: bool(pair.at_server.messages))
        assert pair.at_server.messages == [DONE]
        assert pair.at_server.fragments == []


@pytest.mark.asyncio
async def test_withdrawn_fragments_are_not_sent():
    async with connected() as pair:
        pair.start()
        fragment = memoryview(bytes(1000))
        first = pair.client.write([(landed(1000, slot), fragment) for slot in (0, 1)])
        second = pair.client.write([(landed(1000, slot), fragment) for slot in (2, 3)])
        assert [message.slot for message in first.withdraw()] == [0, 1]
        assert first.withdraw() == []
        assert first.ended.result() is None
        assert await second.ended is None
        assert second.withdraw() == []
        await run_until_idle(lambda: len(pair.at_server.fragments) == 2)
        assert [message.slot for message, _ in pair.at_server.fragments] == [2, 3]


@pytest.mark.asyncio
async def test_fragment_whose_write_has_begun_is_sent_whole():
    async with connected() as pair:
        pair.shrink_buffers()
        pair.client.start(pair.at_client)
        fragment = memoryview(bytes(4 << 20))
        writes = pair.client.write([(landed(len(fragment), slot), fragment) for slot in range(3)])
        await run_until_idle(lambda: pair.client.sent_bytes > 0)
        assert [message.slot for message in writes.withdraw()] == [1, 2]
        assert not writes.ended.done()
        pair.client.send(DONE)
        pair.server.start(pair.at_server)
        assert await writes.ended is None
        await run_until_idle(lambda: bool(pair.at_server.messages))
        assert [message.slot for message, _ in pair.at_server.fragments] == [0]


@pytest.mark.asyncio
async def test_memory_of_another_length_than_its_fragment_is_a_bug():
    async with connected() as pair:
        with pytest.raises(InternalError, match="99 bytes for a fragment of 100"):
            pair.client.write([(landed(100), memoryview(bytes(99)))])
        assert await pair.client.write([]).ended is None


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


# --- the address ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_port_in_use_is_refused(accepted):
    listener = await listening(accepted)
    with pytest.raises(
        ConfigError, match=f"cannot listen at 127.0.0.1:{listener.address[1]}: "
    ) as e:
        await listen(HOST, listener.address[1], SECRET, accepted.append)
    assert "port 0" in e.value.hint
    port = listener.address[1]
    await listener.aclose()
    again = await listen(HOST, port, SECRET, accepted.append)
    await again.aclose()


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "0:0::0", "::ffff:0.0.0.0", "0x0"])
@pytest.mark.asyncio
async def test_address_that_means_all_addresses_is_refused_unless_allowed(host, accepted):
    with pytest.raises(ConfigError, match="means all addresses"):
        await listen(host, 0, SECRET, accepted.append)


@pytest.mark.asyncio
async def test_any_address_is_possible_where_it_is_allowed(accepted):
    listener = await listen("0.0.0.0", 0, SECRET, accepted.append, any_address=True)
    assert listener.address[0] == "0.0.0.0"
    await listener.aclose()


@pytest.mark.asyncio
async def test_listener_is_bound_to_the_named_address_only(accepted):
    listener = await listen("127.0.0.1", 0, SECRET, accepted.append)
    with pytest.raises(PeerError, match="cannot connect"):
        await connect("127.0.0.2", listener.address[1], SECRET, timeout=PATIENCE_SECONDS)
    await listener.aclose()


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("", 0, "host is ''"),
        (None, 0, "host is None"),
        (b"127.0.0.1", 0, "host is"),
        ("no.such.host.invalid", 0, "cannot listen at no.such.host.invalid:0"),
        ("192.0.2.1", 0, "cannot listen at 192.0.2.1:0"),
        (HOST, -1, "port is -1"),
        (HOST, 65536, "port is 65536"),
        (HOST, "7", "port is '7'"),
    ],
)
@pytest.mark.asyncio
async def test_bad_addresses_are_refused(host, port, message, accepted):
    with pytest.raises(ConfigError, match=message):
        await listen(host, port, SECRET, accepted.append)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize(
    "limits",
    [
        {"handshake_seconds": 0},
        {"ping_seconds": -1.0},
        {"silent_pings": 0},
        {"max_connections": 0},
        {"max_unauthenticated": 1.5},
    ],
    ids=str,
)
def test_limits_are_checked(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        WireLimits(**limits)


def test_addresses_of_ipv6_have_brackets():
    assert place("::1", 5) == "[::1]:5"
    assert place("host", 5) == "host:5"


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_connection_that_is_cut_at_each_byte_of_a_frame_delivers_nothing(accepted):
    listener = await listening(accepted)
    length = len(FrameWriter(bytes(32)).frame(encode(WANT)))
    for cut in range(length + 1):
        raw = await RawSocket.to(listener.address[1])
        writer = await raw.shake_hands()
        await run_until_idle(lambda: bool(accepted))
        recorder = Recorder()
        accepted.pop().start(recorder)
        await raw.send(writer.frame(encode(WANT))[:cut])
        raw.close()
        await run_until_idle(lambda r=recorder: bool(r.closed))
        assert recorder.messages == ([WANT] if cut == length else [])
        assert recorder.closed == ["the other side closed the connection"]
    await listener.aclose()


@pytest.mark.parametrize("sent", [0, 1, 99, 5000, 20_000 - 1])
@pytest.mark.asyncio
async def test_connection_that_is_cut_within_a_fragment_does_not_deliver_it(accepted, sent):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    await raw.send(writer.frame(encode(landed(20_000)), has_fragment=True) + bytes(sent))
    raw.close()
    await run_until_idle(lambda: bool(recorder.closed))
    assert len(recorder.places) == 1
    assert recorder.fragments == []
    await listener.aclose()


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda w: w.frame(encode(WANT)) * 2, "protocol: a frame with a wrong MAC"),
        (lambda w: w.frame(encode(WANT))[:-1] + b"\x09", "protocol: a frame with a wrong MAC"),
        (
            lambda w: [w.frame(encode(DONE)), w.frame(encode(WANT))][1],
            "protocol: a frame with a wrong MAC",
        ),
        (lambda w: b"\xff" * 40, "protocol: a message of 2147483647 bytes"),
        (lambda w: b"GET / HTTP/1.1\r\n\r\n" + bytes(9), "protocol: a message of"),
    ],
    ids=["replayed", "changed", "reordered", "oversized", "external"],
)
@pytest.mark.asyncio
async def test_peer_that_violates_the_protocol_is_cut(accepted, attack, reason):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    await raw.send(attack(writer))
    await run_until_idle(lambda: bool(recorder.closed))
    assert recorder.closed[0].startswith(reason)
    assert recorder.messages in ([], [WANT])
    assert accepted[0].reason == recorder.closed[0]
    await raw.receive_all()
    raw.close()
    await listener.aclose()


@pytest.mark.asyncio
async def test_abort_ends_both_sides_and_reports_the_first_reason_once():
    async with connected() as pair:
        pair.start()
        pair.client.abort("first")
        pair.client.abort("second")
        assert pair.at_client.closed == []
        assert await pair.client.closed() == "first"
        await run_until_idle(lambda: bool(pair.at_server.closed))
        assert pair.at_client.closed == ["first"]
        assert pair.at_server.closed == ["the other side closed the connection"]
        pair.client.send(WANT)
        failed = pair.client.write([(landed(100), memoryview(bytes(100)))])
        assert str(failed.ended.result()) == "first"
        assert "ended: first" in repr(pair.client)


@pytest.mark.asyncio
async def test_abort_while_a_fragment_arrives_stops_its_writes():
    async with connected() as pair:
        pair.shrink_buffers()
        pair.start()
        fragment = bytes([1]) * (4 << 20)
        writes = pair.client.write([(landed(len(fragment)), memoryview(fragment))])
        await run_until_idle(lambda: pair.server.received_bytes > 10_000)
        pair.server.abort("given up")
        place = bytes(pair.at_server.places[0][1])
        assert 0 < place.count(1) < len(fragment)
        assert isinstance(await writes.ended, PeerError)
        await spin(20)
        assert bytes(pair.at_server.places[0][1]) == place
        assert pair.at_server.fragments == []


@pytest.mark.parametrize("callback", ["at_message", "at_place", "at_fragment"])
@pytest.mark.asyncio
async def test_abort_within_a_callback_delivers_nothing_more(callback):
    async with connected() as pair:
        setattr(pair.at_server, callback, lambda _: pair.server.abort("enough"))
        pair.start()
        pair.client.send(WANT)
        pair.client.write([(landed(100), memoryview(bytes(100)))])
        pair.client.send(DONE)
        await run_until_idle(lambda: bool(pair.at_server.closed))
        assert DONE not in pair.at_server.messages
        assert len(pair.at_server.fragments) == (callback == "at_fragment")


@pytest.mark.parametrize("callback", ["at_message", "at_place", "at_fragment"])
@pytest.mark.asyncio
async def test_error_of_a_callback_cuts_the_connection_and_reaches_the_loop(callback, loop_errors):
    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug of the handler")

    async with connected() as pair:
        setattr(pair.at_server, callback, fail)
        pair.start()
        pair.client.send(WANT)
        pair.client.write([(landed(100), memoryview(bytes(100)))])
        await run_until_idle(lambda: bool(pair.at_server.closed))
        assert "a bug of the handler" in pair.at_server.closed[0]
        assert isinstance(loop_errors[0]["exception"], ZeroDivisionError)
        loop_errors.clear()


@pytest.mark.asyncio
async def test_error_of_on_connection_cuts_the_connection_and_reaches_the_loop(loop_errors):
    def fail(connection: Connection) -> None:
        failed.append(connection)
        raise ZeroDivisionError("a bug of the owner")

    failed: list[Connection] = []
    listener = await listen(HOST, 0, SECRET, fail)
    client = await connect(HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS)
    recorder = Recorder()
    client.start(recorder)
    await run_until_idle(lambda: bool(recorder.closed))
    assert "a bug of the owner" in failed[0].reason
    assert isinstance(loop_errors[0]["exception"], ZeroDivisionError)
    loop_errors.clear()
    await listener.aclose()


@pytest.mark.asyncio
async def test_close_sends_what_is_queued_first():
    async with connected() as pair:
        pair.shrink_buffers()
        pair.start()
        fragment = memoryview(bytes(2 << 20))
        writes = pair.client.write([(landed(len(fragment)), fragment)])
        pair.client.send(DONE)
        pair.client.close()
        pair.client.send(WANT)
        late = pair.client.write([(landed(len(fragment)), fragment)])
        assert isinstance(late.ended.result(), PeerError)
        assert await pair.client.closed() == "closed"
        assert writes.ended.result() is None
        await run_until_idle(lambda: bool(pair.at_server.closed))
        assert pair.at_server.messages == [DONE]
        assert len(pair.at_server.fragments) == 1


@pytest.mark.asyncio
async def test_connection_that_ended_before_its_start_is_reported():
    async with connected() as pair:
        pair.server.abort("early")
        pair.server.start(pair.at_server)
        await spin(2)
        assert pair.at_server.closed == ["early"]


@pytest.mark.asyncio
async def test_handler_of_an_ended_connection_is_freed_without_the_garbage_collector():
    async with connected() as pair:
        handler = Recorder()
        handler.connection = pair.client  # a cycle, as in an owner
        pair.client.start(handler)
        freed = weakref.ref(handler)
        pair.client.abort("")
        assert pair.client.reason == "aborted"
        del handler
        await spin(3)
        assert freed() is None


@pytest.mark.asyncio
async def test_closed_listener_ends_handshakes_and_keeps_connections():
    async with connected() as pair:
        pair.start()
        raw = await RawSocket.to(pair.listener.address[1])
        await run_until_idle(lambda: pair.listener.handshakes == 1)
        await pair.listener.aclose()
        await pair.listener.aclose()
        assert pair.listener.handshakes == 0
        assert await raw.receive_all() == b""
        raw.close()
        pair.client.send(WANT)
        await run_until_idle(lambda: pair.at_server.messages == [WANT])
        with pytest.raises(PeerError, match="cannot connect"):
            await connect(HOST, pair.listener.address[1], SECRET, timeout=PATIENCE_SECONDS)


@pytest.mark.asyncio
async def test_connections_cannot_be_copied_or_pickled():
    async with connected() as pair:
        for owner in (pair.client, pair.listener):
            with pytest.raises(UsageError, match="cannot be copied or pickled"):
                pickle.dumps(owner)


# --- liveness -------------------------------------------------------------------------------------


@pytest.mark.clock
@pytest.mark.asyncio
async def test_idle_connection_stays_open_and_sends_few_pings():
    async with connected() as pair:
        pair.start()
        clock = running_clock()
        for _ in range(50):
            await clock.advance(PINGS)
        assert pair.client.reason == pair.server.reason == ""
        assert pair.at_client.messages == pair.at_server.messages == []
        assert 0 < pair.client.sent_bytes <= 50 * 2 * 32


@pytest.mark.parametrize("sent", [[], [WANT]], ids=["never", "no longer"])
@pytest.mark.clock
@pytest.mark.asyncio
async def test_peer_that_sends_nothing_is_given_up_at_the_deadline(accepted, sent):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    clock = running_clock()
    for message in sent:
        await raw.send(writer.frame(encode(message)))
        await run_until_idle(lambda: bool(recorder.messages))
        await clock.advance(PINGS)
    await clock.advance(3 * PINGS - 0.1)
    assert recorder.closed == []
    await clock.advance(0.2)
    assert recorder.closed == ["the other side sent nothing for 6.0 s"]
    raw.close()
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_peer_that_sends_single_bytes_is_not_silent(accepted):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    clock = running_clock()
    for byte in writer.frame(encode(WANT)):
        received = accepted[0].received_bytes
        await raw.send(bytes([byte]))
        await run_until_idle(lambda r=received: accepted[0].received_bytes > r)
        await clock.advance(PINGS)
    assert recorder.messages == [WANT]
    assert recorder.closed == []
    accepted[0].abort("the test ended")
    raw.close()
    await listener.aclose()


@pytest.mark.parametrize("discards", [False, True])
@pytest.mark.clock
@pytest.mark.asyncio
async def test_fragment_that_arrives_slowly_is_read_and_its_peer_is_not_silent(accepted, discards):
    """The kernel wakes the loop only for more bytes than arrive within an interval."""
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    recorder.discards = discards
    accepted[0].start(recorder)
    clock = running_clock()
    size = 2 << 20
    await raw.send(writer.frame(encode(landed(size)), has_fragment=True))
    for _ in range(20):
        await raw.send(bytes(1000))
        await clock.advance(PINGS)
    assert recorder.closed == []
    await raw.send(bytes(size - 20_000) + writer.frame(encode(WANT)))
    await run_until_idle(lambda: recorder.messages == [WANT])
    assert len(recorder.fragments) == (not discards)
    await raw.send(writer.frame(encode(DONE)))  # few bytes wake the loop again
    await run_until_idle(lambda: recorder.messages == [WANT, DONE])
    accepted[0].abort("the test ended")
    raw.close()
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_peer_that_never_reads_is_given_up_and_the_memory_is_released(accepted):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    size = 32 << 20
    writes = accepted[0].write([(landed(size), memoryview(bytes(size)))])
    clock = running_clock()
    for _ in range(30):  # it sends, but does not read
        received = accepted[0].received_bytes
        await raw.send(writer.frame(encode(Ping())))
        await run_until_idle(lambda r=received: accepted[0].received_bytes > r)
        await spin(50)
        await clock.advance(PINGS)
        if recorder.closed:
            break
    assert recorder.closed == ["the other side read nothing for 6.0 s"]
    assert str(writes.ended.result()) == recorder.closed[0]
    raw.close()
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_close_does_not_wait_for_a_peer_that_never_reads(accepted):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    accepted[0].start(Recorder())
    size = 32 << 20
    accepted[0].write([(landed(size), memoryview(bytes(size)))])
    accepted[0].close()
    closing = asyncio.create_task(accepted[0].closed())
    await spin(200)
    for _ in range(5):
        await running_clock().advance(PINGS)
    assert "for 6.0 s" in await closing
    raw.close()
    await listener.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_peer_that_reads_slowly_is_not_given_up():
    """A Ping waits behind the fragments in the peer's kernel; the reader is alive all the same."""
    async with connected() as pair:
        pair.shrink_buffers()
        pair.client.start(pair.at_client)
        size = 64 << 20
        writes = pair.client.write([(landed(size), memoryview(bytes(size)))])
        clock = running_clock()
        raw = pair.server._socket
        for _ in range(20):
            sent = pair.client.sent_bytes
            await run_until_idle(lambda s=sent: _read(raw) or pair.client.sent_bytes > s)
            await clock.advance(PINGS)
        assert pair.client.reason == ""
        assert not writes.ended.done()


def _read(raw: socket.socket) -> bool:
    with suppress(BlockingIOError):
        raw.recv(8192)
    return False


@pytest.mark.clock
@pytest.mark.asyncio
async def test_blocked_loop_cuts_no_connection():
    """All timers of a blocked loop expire at once; the bytes of the peer wait in the kernel."""
    async with connected() as pair:
        pair.start()
        clock = running_clock()
        await clock.advance(PINGS * 1.5)
        for _ in range(5):
            clock.now += 100.0  # the loop was blocked
            await clock.advance(0)
        assert pair.client.reason == pair.server.reason == ""


@pytest.mark.asyncio
async def test_ping_is_answered_before_queued_fragments(accepted):
    listener = await listening(accepted)
    raw = await RawSocket.to(listener.address[1])
    writer = await raw.shake_hands()
    await run_until_idle(lambda: bool(accepted))
    recorder = Recorder()
    accepted[0].start(recorder)
    await raw.send(
        writer.frame(encode(Ping())) + writer.frame(encode(Pong())) + writer.frame(encode(WANT))
    )
    await run_until_idle(lambda: recorder.messages == [WANT])
    await run_until_idle(lambda: accepted[0].sent_bytes > 0)
    assert len(await raw.receive(20)) == 20
    accepted[0].abort("the test ended")
    raw.close()
    await listener.aclose()


@pytest.mark.asyncio
async def test_messages_to_a_peer_that_does_not_read_are_limited():
    async with connected() as pair:
        pair.client.start(pair.at_client)
        for _ in range(65_536):
            pair.client.send(WANT)
        assert not pair.client.reason
        pair.client.send(WANT)
        await spin(2)
        assert pair.at_client.closed == ["the other side did not read 65536 messages"]
