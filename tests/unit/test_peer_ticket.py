"""Tickets: a blob from another process is read completely, or refused with a typed error."""

from __future__ import annotations

import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import PeerError, UsageError
from aiokv.peers import ticket as tickets
from aiokv.peers.ticket import Endpoint, Ticket, decode, encode, ticket_key

KEY = ticket_key(b"0123456789abcdef")


def sealed(value: object) -> bytes:
    """Return a ticket with any content, and with a right MAC."""
    body = msgspec.msgpack.encode(value)
    return body + hmac.digest(KEY, body, "sha256")


def make(**changes: object) -> Ticket:
    values = {
        "ticket_id": bytes(range(16)),
        "generation": b"g" * 16,
        "model": "llama",
        "weights_version": "7",
        "prompt_digest": b"d" * 32,
        "first_position": 16,
        "num_tokens": 100,
        "timeout_seconds": 10.0,
        "block_tokens": 16,
        "transport": "tcp",
        "endpoints": [Endpoint("10.0.0.5", 7000, 0, 2, b"a"), Endpoint("10.0.0.5", 7001, 1, 2)],
    }
    return Ticket(**{**values, **changes})  # type: ignore[arg-type]


def test_ticket_is_read_as_it_was_made():
    ticket = make()
    blob = encode(ticket, KEY)
    assert decode(blob, KEY) == ticket
    assert decode(bytearray(blob), KEY) == decode(memoryview(blob), KEY) == ticket
    assert msgspec.msgpack.decode(blob[: -tickets.MAC_BYTES])[0] == tickets.VERSION
    assert len(blob) < 232


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ticket_id": b"short"}, "length >= 16"),
        ({"generation": b"l" * 17}, "length <= 16"),
        ({"prompt_digest": b""}, "length >= 32"),
        ({"model": "m" * 1025}, "length <= 1024"),
        ({"first_position": -1}, ">= 0"),
        ({"first_position": 100}, "first_position is 100; it must be less than num_tokens, 100"),
        ({"num_tokens": 0}, ">= 1"),
        ({"num_tokens": 2**31}, "<= 2147483647"),
        ({"timeout_seconds": 0.0}, "> 0"),
        ({"timeout_seconds": float("nan")}, "float"),
        ({"timeout_seconds": float("inf")}, "<= 86400"),
        ({"block_tokens": 0}, ">= 1"),
        ({"transport": ""}, "length >= 1"),
        ({"endpoints": []}, "length >= 1"),
        ({"endpoints": [Endpoint("", 1)]}, "length >= 1"),
        ({"endpoints": [Endpoint("h", 0)]}, ">= 1"),
        ({"endpoints": [Endpoint("h", 65536)]}, "<= 65535"),
        ({"endpoints": [Endpoint("h", 1, 1, 2), Endpoint("h", 1, 0, 2)]}, "one per rank"),
        ({"endpoints": [Endpoint("h", 1, 0, 2)]}, "one per rank"),
        ({"endpoints": [Endpoint("h", 1, 0, 1, bytes(16385))]}, "length <= 16384"),
        ({"endpoints": [Endpoint("h", 1, i, 5, bytes(16384)) for i in range(5)]}, "65536"),
        ({"transport": "nixl"}, "another transport than 'nixl'"),
        ({"version": 2}, "version 2; this aiokv reads version 1"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    ticket = make(**changes)
    with pytest.raises(UsageError, match=message):
        encode(ticket, KEY)
    with pytest.raises(UsageError, match=message):
        decode(sealed(ticket), KEY)


def test_ticket_of_another_version_is_told_from_a_malformed_one():
    with pytest.raises(UsageError, match=r"version 9; this aiokv reads version 1.*same version"):
        decode(sealed([9, "another", "shape"]), KEY)


@pytest.mark.parametrize(
    "blob", [None, "text", 7, [1], b"", b"\xc1", b"\x91\x01", b"\x91" * 60_000]
)
def test_what_is_no_ticket_is_refused(blob):
    with pytest.raises(UsageError, match=r"^ticket "):
        decode(blob, KEY)


def test_blob_with_more_bytes_behind_it_is_refused():
    with pytest.raises(UsageError, match="malformed"):
        decode(encode(make(), KEY)[: -tickets.MAC_BYTES] + b"\x00" * 33, KEY)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_usage_errors(blob):
    with pytest.raises(UsageError):
        decode(blob, KEY)


@given(st.data())
def test_changed_ticket_is_refused(data):
    blob = encode(make(), KEY)
    changed = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    if changed != blob:
        with pytest.raises((UsageError, PeerError)):
            decode(changed, KEY)


def test_ticket_of_another_secret_is_refused():
    with pytest.raises(PeerError, match="another secret made it"):
        decode(encode(make(), ticket_key(b"another secret of engines")), KEY)


def test_key_of_tickets_does_not_show_the_secret():
    secret = b"0123456789abcdef"
    assert secret not in ticket_key(secret)
    assert ticket_key(secret) != ticket_key(secret + b"!")
