"""Limits on the memory and work that a peer can cause before, at and after its Hello."""

from __future__ import annotations

import gc
import struct
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv import RankLost
from aiokv.ranks import Rank, membership
from aiokv.ranks.channel import Channel, frame_of
from aiokv.ranks.connection import MAX_HELLO_BYTES, Connection
from aiokv.ranks.messages import (
    MAX_LAYERS,
    PROTOCOL_VERSION,
    Hello,
    Layout,
    Ready,
    decode_from_rank,
    encode,
    layout_of,
)
from aiokv.testing import run_until_idle, running_clock
from tests.ranks.loopback import Ranked
from tests.ranks.test_protocol import Peer, regions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

A = [1, 2, 3, 4, 5, 6, 7]
DEEP = b"\x91" * 60_000 + b"\x00"  # a list in a list in a list, ...


def hello(rank: int = 0, protocol: int = PROTOCOL_VERSION) -> bytes:
    layout = layout_of(regions_of(8, 8))
    return frame_of(encode(Hello(protocol=protocol, rank=rank, layout=layout)))


@contextmanager
def connections() -> Iterator[list[Connection]]:
    """Yield the connections that the manager accepts meanwhile."""
    accepted: list[Connection] = []
    init = Connection.__init__

    def recorded(connection: Connection, *args: Any) -> None:
        init(connection, *args)
        accepted.append(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "__init__", recorded)
        yield accepted


# --- before the Hello -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_frame_longer_than_a_hello_is_refused_by_its_length(tmp_path):
    async with Ranked(tmp_path) as ranked:
        with connections() as accepted:
            peer = await Peer().connect(ranked)
            peer.channel.send(struct.pack("<I", MAX_HELLO_BYTES + 1))
            await peer.ended()
        assert f"the limit is {MAX_HELLO_BYTES}" in accepted[0].channel._reason


@pytest.mark.asyncio
async def test_a_connection_without_hello_holds_no_more_than_a_hello(tmp_path):
    async with Ranked(tmp_path) as ranked:
        with connections() as accepted:
            peer = await Peer().connect(ranked)
            peer.channel.send(struct.pack("<I", MAX_HELLO_BYTES) + bytes(MAX_HELLO_BYTES - 1))
            await run_until_idle(lambda: accepted and accepted[0].channel._buffer != b"")
            assert len(accepted[0].channel._buffer) <= MAX_HELLO_BYTES + 4
            peer.channel.cut("enough")
            await run_until_idle(lambda: ranked.group._membership._unauthenticated == {})


@pytest.mark.asyncio
async def test_no_other_message_is_decoded_before_hello(tmp_path, monkeypatch):
    async with Ranked(tmp_path) as ranked:
        decoded: list[bytes] = []
        with monkeypatch.context() as patch:  # the ranks answer when the engine closes
            patch.setattr("aiokv.ranks.connection.decode_from_rank", decoded.append)
            peer = await Peer().connect(ranked)
            peer.channel.send(frame_of(encode(Ready(generation=1))) * 2)
            await peer.ended()
        assert decoded == []


@pytest.mark.asyncio
@pytest.mark.clock
async def test_connection_without_hello_is_cut_at_the_deadline(tmp_path):
    async with Ranked(tmp_path) as ranked:
        with connections() as accepted:
            peer = await Peer().connect(ranked)
            peer.channel.send(hello()[:-1])
            await run_until_idle(lambda: accepted and accepted[0].channel._buffer != b"")
            await running_clock().advance(ranked.group.timeouts.hello - 1)
            assert peer.closed == []
            await running_clock().advance(1)
            await peer.ended()
        assert accepted[0].channel._reason == "it sent no Hello within 10.0 s"


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
        assert [bool(peer.closed) for peer in peers] == [True] * 2 + [False] * limit
        for peer in peers:
            peer.channel.cut("enough")
        await run_until_idle(lambda: ranked.group._membership._unauthenticated == {})


def _seen(ranked: Ranked, peers: list[Peer]) -> int:
    """Return the number of open connections on both sides."""
    return max(
        len(ranked.group._membership._unauthenticated), sum(not peer.closed for peer in peers)
    )


@pytest.mark.asyncio
async def test_a_hello_with_absurd_sizes_is_refused(tmp_path):
    for layers, fingerprint in ((MAX_LAYERS + 1, b""), (-1, b""), (2, bytes(65))):
        layout = Layout(num_layers=layers, num_blocks=8, block_bytes=16, fingerprint=fingerprint)
        with pytest.raises(msgspec.ValidationError):
            decode_from_rank(encode(Hello(protocol=PROTOCOL_VERSION, rank=0, layout=layout)))


# --- a refused connection -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_refused_connection_is_not_read_further(tmp_path, monkeypatch):
    hellos = []
    admit = membership.Membership.admit

    def counted(group: membership.Membership, channel: Channel, hello: Hello) -> Any:
        hellos.append(hello)
        return admit(group, channel, hello)

    async with Ranked(tmp_path) as ranked:
        monkeypatch.setattr(membership.Membership, "admit", counted)
        ranked.shards[1].worker._channel.cut("killed")  # its rank is free
        await run_until_idle(lambda: ranked.group._membership.ranks[1].channel is None)
        with connections() as accepted:
            peer = await Peer().connect(ranked)
            peer.channel.send(hello(1, protocol=0) + hello(1) + bytes(100_000))
            await peer.ended()
            await run_until_idle(lambda: ranked.group._membership._unauthenticated == {})
        assert len(hellos) == len(peer.received) == 1
        assert b"protocol 0" in peer.received[0]
        assert ranked.group._membership.ranks[1].channel is None
        assert accepted[0].channel._buffer == b""
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


# --- nesting --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_message_nested_too_deeply_loses_its_rank_only(tmp_path):
    async with Ranked(tmp_path) as ranked:
        ranked.shards[1].worker._channel.send(frame_of(DEEP))
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


def test_a_decoder_that_runs_out_of_stack_cuts_the_channel():
    def too_deep(frame: bytes) -> None:
        raise RecursionError

    ends: list[str] = []
    channel = Channel(too_deep, ends.append)
    channel.data_received(frame_of(b"x"))
    channel.connection_lost(None)
    assert ends == ["protocol: the message is nested too deeply"]


# --- memory of closed connections -----------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["hangs_up", "garbage", "refused"])
async def test_a_closed_connection_is_freed_without_the_garbage_collector(tmp_path, end):
    async with Ranked(tmp_path) as ranked:
        gc.collect()
        gc.disable()
        try:
            with connections() as accepted:
                peer = await Peer().connect(ranked)
                await run_until_idle(lambda: accepted != [])
                connection = weakref.ref(accepted[0])
                channel = weakref.ref(accepted.pop().channel)
            if end == "hangs_up":
                peer.channel.send(hello()[:-1])
                peer.channel.close()
            else:
                peer.channel.send(DEEP if end == "garbage" else hello(protocol=0))
            await peer.ended()
            await run_until_idle(lambda: ranked.group._membership._unauthenticated == {})
            await run_until_idle(lambda: connection() is None)
            assert channel() is None or channel()._buffer == b""
            assert not gc.isenabled()
        finally:
            gc.enable()


@pytest.mark.asyncio
async def test_a_lost_rank_s_half_received_frame_is_freed_with_its_connection(tmp_path):
    async with Ranked(tmp_path) as ranked:
        channel = ranked.group._membership.ranks[1].channel
        ranked.shards[1].worker._channel.send(struct.pack("<I", 1 << 20) + bytes(1 << 19))
        await run_until_idle(lambda: len(channel._buffer) > 1 << 18)
        await ranked.lose(1)
        assert channel._buffer == b""
        await ranked.restart(1)


@pytest.mark.asyncio
async def test_a_channel_closed_before_it_is_connected_ends_then(tmp_path):
    async with Ranked(tmp_path) as ranked:
        peer = Peer()
        peer.channel.close()
        await peer.connect(ranked)
        await peer.ended()
        with pytest.raises(RankLost, match="rank 0 is connected already"):
            await Rank(ranked.group.path, 0, regions_of(8, 8)).__aenter__()
