"""Frames: changed, repeated, reordered, truncated and oversized frames end the connection."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.errors import InternalError
from aiokv.peers.messages import (
    MAX_LAYOUT_BYTES,
    Accepted,
    Cancel,
    Credit,
    Done,
    Landed,
    Message,
    Open,
    Proven,
    Refused,
    Return,
    SlotCredit,
    Want,
    Wrong,
    fragment_key,
)
from aiokv.peers.wire import CODEC, MAX_MESSAGE_BYTES
from aiokv.wire.frames import (
    AHEAD_BYTES,
    HEADER_BYTES,
    READ_BYTES,
    FrameReader,
    FrameWriter,
    ProtocolError,
)
from aiokv.wire.messages import Ping, Pong, encode

KEY = bytes(range(32))
TICKET = b"a ticket, 16 b.."
MESSAGES: list[Message] = [
    Open(
        protocol=1,
        ticket_id=TICKET,
        generation=TICKET,
        sender_rank=1,
        receiver_rank=2,
        sender_block_tokens=16,
        layout=b"l" * MAX_LAYOUT_BYTES,
        transport="tcp",
        transport_metadata=b"m" * 100,
    ),
    Accepted(ticket_id=TICKET, slot_bytes=1 << 20),
    Refused(ticket_id=TICKET, kind="layout", reason="dtype"),
    Want(ticket_id=TICKET, fragments=3),
    Credit(slots=[SlotCredit(1, 2), SlotCredit(3, 4)]),
    Return(slots=[SlotCredit(1, 2)], unwanted=4),
    Landed(ticket_id=TICKET, sender_block=5, slot=6, slot_generation=7, fragment_bytes=100),
    Proven(ticket_id=TICKET, sender_blocks=[1, 2]),
    Wrong(ticket_id=TICKET, sender_blocks=[3], reason="checksum"),
    Cancel(ticket_id=TICKET, reason="deadline"),
    Done(ticket_id=TICKET),
    Ping(),
    Pong(),
]


def landed(fragment_bytes: int, slot: int = 0) -> Landed:
    return Landed(
        ticket_id=TICKET,
        sender_block=0,
        slot=slot,
        slot_generation=1,
        fragment_bytes=fragment_bytes,
    )


class Reading:
    """A FrameReader, and all that it delivered."""

    def __init__(self, key: bytes = KEY) -> None:
        self.messages: list[Message] = []
        self.fragments: list[bytes] = []
        self.places: dict[int, bytearray] = {}
        self.discards: set[int] = set()
        self.reader = FrameReader(CODEC, key, self.messages.append, self)

    def place(self, message: Landed) -> memoryview | None:
        if message.slot in self.discards:
            return None
        self.places[message.slot] = bytearray(message.fragment_bytes)
        return memoryview(self.places[message.slot])

    def on_fragment(self, message: Landed) -> None:
        self.messages.append(message)
        self.fragments.append(bytes(self.places[message.slot]))

    def feed(self, data: bytes, most: int = 1 << 30) -> None:
        """Read ``data`` as from a socket that has up to ``most`` bytes at a time."""
        while data:
            arrived, rest = data[:most], 0
            for buffer in self.reader.buffers():
                taken = arrived[rest : rest + len(buffer)]
                buffer[: len(taken)] = taken
                rest += len(taken)
            assert rest > 0
            self.reader.received(rest)
            data = data[rest:]


def frames(*messages: Message) -> list[bytes]:
    writer = FrameWriter(KEY)
    return [writer.frame(encode(message)) for message in messages]


@pytest.mark.parametrize("most", [1, 2, 19, 20, 21, 4095, 4096, 4097, 1 << 20])
def test_messages_arrive_in_order_however_they_are_cut(most):
    reading = Reading()
    reading.feed(b"".join(frames(*MESSAGES)), most)
    assert reading.messages == MESSAGES


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(MESSAGES),
            st.tuples(st.sampled_from((65, 100, 3000, 4096, 9000, 30_000)), st.booleans()),
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 10_000), min_size=5, max_size=50),
)
def test_fragments_and_messages_arrive_however_they_are_cut(items, cuts):
    writer, reading, stream, fragments, messages = FrameWriter(KEY), Reading(), b"", [], []
    for slot, item in enumerate(items):
        if isinstance(item, tuple):
            message = landed(item[0], slot)
            fragment = random.Random(slot).randbytes(item[0])
            stream += writer.frame(encode(message), has_fragment=True) + fragment
            if item[1]:
                reading.discards.add(slot)
                continue
            fragments.append(fragment)
        else:
            message = item
            stream += writer.frame(encode(message))
        messages.append(message)
    begin = 0
    for cut in cycle(cuts):
        if begin >= len(stream):
            break
        reading.feed(stream[begin : begin + cut])
        begin += cut
    assert reading.messages == messages
    assert reading.fragments == fragments


def test_bytes_of_a_fragment_are_read_into_its_place():
    reading = Reading()
    stream = FrameWriter(KEY).frame(encode(landed(1 << 20)), has_fragment=True)
    reading.feed(stream)
    (place, ahead) = reading.reader.buffers()
    assert len(place) == 1 << 20
    assert place.obj is reading.places[0]
    assert len(ahead) == AHEAD_BYTES


def test_one_read_is_limited():
    reading = Reading()
    reading.feed(FrameWriter(KEY).frame(encode(landed(5 * READ_BYTES)), has_fragment=True))
    assert sum(map(len, reading.reader.buffers())) == READ_BYTES
    reading.discards.add(1)
    reading.feed(bytes(5 * READ_BYTES))
    assert len(reading.fragments) == 1


def test_every_changed_bit_of_a_frame_is_noticed():
    first, second = frames(Want(ticket_id=TICKET, fragments=3), Done(ticket_id=TICKET))
    for bit in range(8 * len(first)):
        changed = bytearray(first)
        changed[bit // 8] ^= 1 << bit % 8
        reading = Reading()
        with pytest.raises(ProtocolError):
            # A longer length waits for bytes, which a MAC then covers.
            reading.feed(bytes(changed) + second + bytes(MAX_MESSAGE_BYTES))
        assert reading.messages == [], bit


def test_changed_flag_of_a_fragment_is_noticed():
    for has_fragment in (False, True):
        frame = bytearray(FrameWriter(KEY).frame(encode(landed(100)), has_fragment=has_fragment))
        frame[3] ^= 0x80
        reading = Reading()
        with pytest.raises(ProtocolError, match="wrong MAC"):
            reading.feed(bytes(frame) + bytes(100))
        assert reading.messages == []
        assert reading.places == {}


def test_repeated_frame_is_refused():
    first, second = frames(Ping(), Ping())
    reading = Reading()
    with pytest.raises(ProtocolError, match="wrong MAC"):
        reading.feed(first + first + second)
    assert reading.messages == [Ping()]


def test_reordered_and_left_out_frames_are_refused():
    first, second = frames(Ping(), Pong())
    for stream in (second, second + first):
        reading = Reading()
        with pytest.raises(ProtocolError, match="wrong MAC"):
            reading.feed(stream)
        assert reading.messages == []


def test_frame_of_another_connection_is_refused():
    reading = Reading(key=bytes(32))
    with pytest.raises(ProtocolError, match="wrong MAC"):
        reading.feed(frames(Ping())[0])


def test_truncated_frame_delivers_nothing():
    for message in MESSAGES[1:]:
        (frame,) = frames(message)
        for cut in range(len(frame)):
            reading = Reading()
            reading.feed(frame[:cut])
            assert reading.messages == []


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, (1 << 31) - 1])
@pytest.mark.parametrize("flag", [0, 1 << 31])
def test_oversized_length_is_refused_before_memory_is_taken(length, flag):
    reading = Reading()
    with pytest.raises(ProtocolError, match=f"{length} bytes; the limit is {MAX_MESSAGE_BYTES}"):
        reading.feed((length | flag).to_bytes(4, "little") + bytes(HEADER_BYTES - 4))
    assert sum(map(len, reading.reader.buffers())) < AHEAD_BYTES


def test_message_that_is_too_long_is_not_sent():
    long = Credit(slots=[SlotCredit(1 << 30, 1 << 61)] * 20_000)
    with pytest.raises(InternalError, match="the limit is"):
        CODEC.encoded(long)


def test_long_frame_is_followed_by_short_ones_in_the_small_buffer():
    reading = Reading()
    reading.feed(b"".join(frames(MESSAGES[0], Ping())))
    reading.feed(b"")
    assert reading.messages == [MESSAGES[0], Ping()]
    assert sum(map(len, reading.reader.buffers())) <= AHEAD_BYTES


def test_fragment_behind_another_message_is_refused():
    stream = FrameWriter(KEY).frame(encode(Ping()), has_fragment=True)
    with pytest.raises(ProtocolError, match="a fragment behind the message Ping"):
        Reading().feed(stream)


def test_place_of_the_wrong_length_is_a_bug():
    reading = Reading()
    reading.place = lambda message: memoryview(bytearray(99))
    reader = reading.reader
    frame = FrameWriter(KEY).frame(encode(landed(100)), has_fragment=True)
    reader.buffers()[0][: len(frame)] = frame
    with pytest.raises(InternalError, match="99 bytes for a fragment of 100"):
        reader.received(len(frame))


@pytest.mark.parametrize("fragment_bytes", [100, AHEAD_BYTES, 3 * AHEAD_BYTES])
def test_stopped_reader_writes_and_delivers_nothing(fragment_bytes):
    reading = Reading()
    writer = FrameWriter(KEY)
    reading.feed(writer.frame(encode(landed(fragment_bytes)), has_fragment=True) + b"x")
    reading.reader.stop()
    place = reading.places[0]
    reading.feed(b"y" * 10)
    assert bytes(place) == b"x" + bytes(fragment_bytes - 1)
    assert reading.messages == []


def test_reader_that_is_stopped_by_a_message_delivers_no_more():
    messages: list[Message] = []

    def stop(message: Message) -> None:
        messages.append(message)
        reader.stop()

    reader = FrameReader(CODEC, KEY, stop)
    stream = b"".join(frames(Ping(), Pong(), Done(ticket_id=TICKET)))
    reader.buffers()[0][: len(stream)] = stream
    reader.received(len(stream))
    assert messages == [Ping()]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        encode(["unknown"]),
        encode(["ping", 1]),
        encode(["want", TICKET, 0]),
        encode(["want", TICKET, 1 << 40]),
        encode(["want", TICKET[:-1], 1]),
        encode(["landed", TICKET, 0, 0, 1, 64]),  # no payload
        encode(["landed", TICKET, -1, 0, 1, 100]),
        encode(["landed", TICKET, 0, 0, 1, 1 << 40]),
        encode(["credit", []]),
        encode(["credit", [[0, 0]]]),
        encode(["credit", [[0, 1, 2]]]),
        encode(["cancel", TICKET, "r" * 2000]),
        encode(["refused", TICKET, "other", ""]),
        b"\x91" * 5000,
    ],
    ids=lambda body: body[:24].hex(),
)
def test_malformed_message_is_refused(body):
    frame = FrameWriter(KEY).frame(body)
    reading = Reading()
    with pytest.raises(ProtocolError, match="a m"):
        reading.feed(frame)
    assert reading.messages == []


def test_key_of_a_fragment_depends_on_each_part_of_its_place():
    place = (TICKET, bytes(16), 1, 2, 3, 4)
    keys = {fragment_key(*place)}
    for index, other in enumerate((bytes(16), TICKET, 9, 9, 9, 9)):
        keys.add(fragment_key(*place[:index], other, *place[index + 1 :]))
    keys.add(fragment_key(TICKET, bytes(16), 3, 2, 1, 4))
    assert len(keys) == 8
    assert {len(key) for key in keys} == {32}
