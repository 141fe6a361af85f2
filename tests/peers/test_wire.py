"""Connections: messages and fragments, the address, every way to end."""

from __future__ import annotations

import asyncio
import pickle
import weakref

import pytest

from aiokv.errors import ConfigError, InternalError, PeerError, UsageError
from aiokv.peers.messages import Cancel
from aiokv.peers.wire import Connection, connect, listen
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from aiokv.wire.connection import WireLimits
from aiokv.wire.frames import FrameWriter
from aiokv.wire.messages import Ping, Pong, encode
from aiokv.wire.sockets import place
from tests.peers.wires import (
    DONE,
    HOST,
    SECRET,
    TICKET,
    WANT,
    RawSocket,
    Recorder,
    connected,
    landed,
    listening,
)

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
