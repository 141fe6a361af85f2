"""Limits on the memory and work that a peer can cause before, at and after its Hello."""

from __future__ import annotations

import gc
import struct
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv.base.groups import ATTENTION
from aiokv.errors import RankLost
from aiokv.ranks import Rank, membership
from aiokv.ranks.messages import (
    MAX_HELLO_BYTES,
    MAX_LAYERS,
    PROTOCOL_VERSION,
    Hello,
    Layout,
    Ready,
    decode_from_rank,
    decode_hello,
    layout_of,
)
from aiokv.testing import run_until_idle, running_clock
from aiokv.wire import sockets
from aiokv.wire.frames import FrameReader, ProtocolError
from aiokv.wire.listener import Listener
from aiokv.wire.messages import Codec, encode
from tests.ranks.loopback import Ranked
from tests.ranks.raw import Peer, frame_of, send_raw
from tests.ranks.test_protocol import regions_of

if TYPE_CHECKING:
    import socket

A = [1, 2, 3, 4, 5, 6, 7]
DEEP = b"\x91" * 60_000 + b"\x00"  # a list in a list in a list, ...


def hello(rank: int = 0, protocol: int = PROTOCOL_VERSION) -> bytes:
    layout = layout_of(regions_of(8, 8))
    return frame_of(encode(Hello(protocol=protocol, rank=rank, layout=layout)))


def handshakes(ranked: Ranked) -> int:
    """Return the number of connections without a Hello."""
    return ranked.group._membership._socket.handshakes


@pytest.fixture
def refusals(monkeypatch) -> list[str]:
    """Return the reasons of refused connections."""
    reasons: list[str] = []
    monkeypatch.setattr(
        Listener, "_log_refusal", lambda listener, remote, reason: reasons.append(reason)
    )
    return reasons


@pytest.fixture
def accepted(monkeypatch) -> list[weakref.ref[socket.socket]]:
    """Return the sockets that managers accept."""
    sockets: list[weakref.ref[socket.socket]] = []
    begin = Listener._begin_handshake

    def recorded(listener: Listener[Any], connected: socket.socket) -> None:
        sockets.append(weakref.ref(connected))
        begin(listener, connected)

    monkeypatch.setattr(Listener, "_begin_handshake", recorded)
    return sockets


# --- before the Hello -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_frame_longer_than_a_hello_is_refused_by_its_length(tmp_path, refusals):
    async with Ranked(tmp_path) as ranked:
        peer = await Peer().connect(ranked)
        peer.send(struct.pack("<I", MAX_HELLO_BYTES + 1))
        await peer.ended()
        (reason,) = refusals
        assert f"the limit is {MAX_HELLO_BYTES}" in reason


@pytest.mark.asyncio
async def test_a_connection_without_hello_holds_no_more_than_a_hello(tmp_path, monkeypatch):
    read: list[int] = []
    received = sockets.received

    async def counted(connected: socket.socket, num_bytes: int) -> bytes:
        read.append(num_bytes)
        return await received(connected, num_bytes)

    monkeypatch.setattr(sockets, "received", counted)
    async with Ranked(tmp_path) as ranked:
        read.clear()
        peer = await Peer().connect(ranked)
        peer.send(struct.pack("<I", MAX_HELLO_BYTES) + bytes(MAX_HELLO_BYTES - 1))
        await run_until_idle(lambda: len(read) == 2)
        assert read == [4, MAX_HELLO_BYTES]
        assert handshakes(ranked) == 1
        peer.hang_up()
        await run_until_idle(lambda: handshakes(ranked) == 0)


@pytest.mark.asyncio
async def test_no_other_message_is_accepted_before_hello(tmp_path, refusals):
    async with Ranked(tmp_path) as ranked:
        peer = await Peer().connect(ranked)
        peer.send(frame_of(encode(Ready(generation=1))) * 2)
        await peer.ended()
        (reason,) = refusals
        assert reason.startswith("a malformed message: ")


@pytest.mark.asyncio
async def test_a_second_hello_loses_its_rank(tmp_path):
    async with Ranked(tmp_path) as ranked:
        send_raw(ranked.shards[1].worker._connection, hello(1))
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert "rank 1 is lost: protocol: a malformed message" in str(ranked.group.failure)
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


@pytest.mark.asyncio
@pytest.mark.clock
async def test_connection_without_hello_is_cut_at_the_deadline(tmp_path, refusals):
    async with Ranked(tmp_path) as ranked:
        peer = await Peer().connect(ranked)
        peer.send(hello()[:-1])
        await run_until_idle(lambda: handshakes(ranked) == 1)
        await running_clock().advance(ranked.group.timeouts.hello - 1)
        assert not peer.closed
        await running_clock().advance(1)
        await peer.ended()
        assert refusals == ["the handshake did not end within 10.0 s"]


@pytest.mark.asyncio
@pytest.mark.clock
async def test_rank_has_no_hello_deadline_after_hello(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await running_clock().advance(2 * ranked.group.timeouts.hello)
        assert await ranked.serve(A) == 0
        assert ranked.group.failure is None


@pytest.mark.asyncio
async def test_too_many_connections_without_hello_cut_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "SPARE_CONNECTIONS", 3)
    async with Ranked(tmp_path) as ranked:
        limit = ranked.group.num_ranks + 3
        peers = []
        for _ in range(limit + 2):
            peers.append(await Peer().connect(ranked))
            await run_until_idle(lambda s=peers: _seen(ranked, s) <= limit)
        await peers[0].ended()
        await peers[1].ended()
        assert [peer.closed for peer in peers] == [True] * 2 + [False] * limit
        for peer in peers:
            peer.hang_up()
        await run_until_idle(lambda: handshakes(ranked) == 0)


def _seen(ranked: Ranked, peers: list[Peer]) -> int:
    """Return the number of open connections on both sides."""
    return max(handshakes(ranked), sum(not peer.closed for peer in peers))


@pytest.mark.asyncio
async def test_a_hello_with_absurd_sizes_is_refused(tmp_path):
    for layers, fingerprint in ((MAX_LAYERS + 1, b""), (-1, b""), (2, bytes(65))):
        layout = Layout(
            num_layers=layers,
            num_blocks=8,
            block_bytes={ATTENTION: 16},
            pitch_bytes=64,
            fingerprint=fingerprint,
        )
        with pytest.raises(msgspec.ValidationError):
            decode_hello(encode(Hello(protocol=PROTOCOL_VERSION, rank=0, layout=layout)))


# --- a refused connection -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_refused_connection_is_not_read_further(tmp_path, monkeypatch):
    hellos = []
    admit = membership.Membership.admit

    def counted(group: membership.Membership, hello: Hello) -> Any:
        hellos.append(hello)
        return admit(group, hello)

    async with Ranked(tmp_path) as ranked:
        monkeypatch.setattr(membership.Membership, "admit", counted)
        ranked.shards[1].worker._connection.abort("killed")  # its rank is free
        await run_until_idle(lambda: ranked.group._membership.ranks[1].connection is None)
        peer = await Peer().connect(ranked)
        peer.send(hello(1, protocol=0) + hello(1) + bytes(100_000))
        await peer.ended()
        await run_until_idle(lambda: handshakes(ranked) == 0)
        assert len(hellos) == len(peer.received) == 1
        assert b"protocol 0" in peer.received[0]
        assert ranked.group._membership.ranks[1].connection is None
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


# --- nesting --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_message_nested_too_deeply_loses_its_rank_only(tmp_path):
    async with Ranked(tmp_path) as ranked:
        send_raw(ranked.shards[1].worker._connection, frame_of(DEEP))
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert "rank 1 is lost: protocol" in str(ranked.group.failure)
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


@pytest.mark.parametrize("depth", [3, 60_000])
def test_message_with_unknown_fields_is_refused(depth):
    """Unknown fields would be skipped at any nesting depth, so they are refused."""
    message = encode(Ready(generation=1))
    num_fields = message[0] - 0x90  # of a short array of msgpack
    more = bytes([message[0] + 1]) + message[1:] + b"\x91" * depth + b"\x00"
    with pytest.raises(msgspec.ValidationError, match=f"of at most length {num_fields - 1}"):
        decode_from_rank(more)


def test_a_decoder_that_runs_out_of_stack_ends_the_connection():
    def too_deep(message: memoryview) -> None:
        raise RecursionError

    codec: Codec[Any, None] = Codec(encode=encode, decode=too_deep, max_message_bytes=100)
    reader = FrameReader(codec, None, lambda message: pytest.fail("unexpected message"))
    frame = frame_of(b"x")
    reader.buffers()[0][: len(frame)] = frame
    with pytest.raises(ProtocolError, match="a message that is nested too deeply"):
        reader.received(len(frame))


# --- memory of closed connections -----------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["hangs_up", "garbage", "refused"])
async def test_a_closed_connection_is_freed_without_the_garbage_collector(tmp_path, end, accepted):
    async with Ranked(tmp_path) as ranked:
        gc.collect()
        gc.disable()
        try:
            accepted.clear()
            peer = await Peer().connect(ranked)
            await run_until_idle(lambda: accepted != [])
            if end == "hangs_up":
                peer.send(hello()[:-1])
                peer.hang_up()
            else:
                peer.send(DEEP if end == "garbage" else hello(protocol=0))
            await peer.ended()
            await run_until_idle(lambda: handshakes(ranked) == 0)
            await run_until_idle(lambda: accepted[0]() is None)
            assert not gc.isenabled()
        finally:
            gc.enable()


@pytest.mark.asyncio
async def test_a_lost_rank_s_half_received_frame_is_freed_with_its_connection(tmp_path):
    async with Ranked(tmp_path) as ranked:
        connection = ranked.group._membership.ranks[1].connection
        before = connection.received_bytes
        rank = ranked.shards[1].worker._connection
        send_raw(rank, struct.pack("<I", 1 << 20) + bytes(1 << 16))
        await run_until_idle(lambda: connection.received_bytes - before > 1 << 16)
        reader = weakref.ref(connection._reader)
        await ranked.lose(1)
        assert reader() is None
        await ranked.restart(1)


@pytest.mark.asyncio
async def test_a_connection_that_is_closed_at_once_is_no_rank(tmp_path):
    async with Ranked(tmp_path) as ranked:
        peer = await Peer().connect(ranked)
        peer.hang_up()
        await peer.ended()
        with pytest.raises(RankLost, match="rank 0 is connected already"):
            await Rank(ranked.group.path, 0, regions_of(8, 8)).__aenter__()
