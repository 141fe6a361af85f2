"""Connections in time: pings, peers that are silent, slow or do not read."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from aiokv.testing import running_clock, spin
from aiokv.testing.loops import run_until_idle
from aiokv.wire.connection import WireLimits
from aiokv.wire.messages import Ping, encode
from tests.peers.wires import DONE, WANT, RawSocket, Recorder, connected, landed, listening

if TYPE_CHECKING:
    import socket

PINGS = WireLimits().ping_seconds


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
