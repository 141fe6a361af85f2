"""Handshake: only a side that knows the secret has the right proof and the right keys."""

from __future__ import annotations

import pytest

from aiokv.errors import ConfigError
from aiokv.peers.handshake import (
    GREETING_BYTES,
    MAGIC,
    PROOF_BYTES,
    Handshake,
    HandshakeError,
)

SECRET = b"sixteen bytes or more"


def greeted(of_client: bytes = SECRET, of_server: bytes = SECRET) -> tuple[Handshake, Handshake]:
    client, server = Handshake(of_client, "client"), Handshake(of_server, "server")
    server.read_greeting(client.greeting)
    client.read_greeting(server.greeting)
    return client, server


def test_both_sides_accept_each_other_and_derive_the_same_keys():
    client, server = greeted()
    server.check_proof(client.proof())
    client.check_proof(server.proof())
    assert client.keys().sending == server.keys().receiving
    assert client.keys().receiving == server.keys().sending
    assert client.keys().sending != client.keys().receiving
    assert len(client.greeting) == GREETING_BYTES
    assert len(client.proof()) == PROOF_BYTES


def test_each_connection_has_its_own_proofs_and_keys():
    first, second = greeted(), greeted()
    values = {side.proof() for pair in (first, second) for side in pair}
    values |= {key for pair in (first, second) for key in tuple(pair[0].keys())}
    assert len(values) == 8


@pytest.mark.parametrize("other", [SECRET + b"!", SECRET[:-1], b"another secret....."])
def test_another_secret_is_refused_by_either_side(other):
    for client, server in (greeted(of_client=other), greeted(of_server=other)):
        with pytest.raises(HandshakeError, match="does not know the secret"):
            server.check_proof(client.proof())
        with pytest.raises(HandshakeError, match="does not know the secret"):
            client.check_proof(server.proof())
        assert client.keys().sending != server.keys().receiving


def test_reflected_proof_is_refused():
    """An impostor returns the greeting and the proof of the victim to the victim."""
    for role in ("client", "server"):
        victim = Handshake(SECRET, role)
        victim.read_greeting(victim.greeting)
        with pytest.raises(HandshakeError, match="does not know the secret"):
            victim.check_proof(victim.proof())


def test_proof_from_a_second_connection_to_the_same_server_is_refused():
    """The attacker lets the server answer its own challenge, as a client would."""
    first, second = Handshake(SECRET, "server"), Handshake(SECRET, "server")
    second.read_greeting(first.greeting)  # the nonce of the first connection
    first.read_greeting(second.greeting)
    with pytest.raises(HandshakeError, match="does not know the secret"):
        first.check_proof(second.proof())


def test_proof_of_an_earlier_connection_is_refused():
    client, _ = greeted()
    old = client.proof()
    later = Handshake(SECRET, "server")
    later.read_greeting(client.greeting)  # replayed, like the proof
    with pytest.raises(HandshakeError, match="does not know the secret"):
        later.check_proof(old)


@pytest.mark.parametrize("bit", range(0, PROOF_BYTES * 8, 7))
def test_changed_proof_is_refused(bit):
    client, server = greeted()
    proof = bytearray(client.proof())
    proof[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeError, match="does not know the secret"):
        server.check_proof(bytes(proof))


@pytest.mark.parametrize("proof", [b"", bytes(PROOF_BYTES), bytes(PROOF_BYTES - 1)])
def test_proof_without_content_is_refused(proof):
    _, server = greeted()
    with pytest.raises(HandshakeError, match="does not know the secret"):
        server.check_proof(proof)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n1234",
        bytes(GREETING_BYTES),
        MAGIC[:-1] + b"2" + bytes(32),
        MAGIC + bytes(31),
        MAGIC + bytes(33),
        b"",
    ],
)
def test_another_protocol_is_refused(greeting):
    for role in ("client", "server"):
        with pytest.raises(HandshakeError, match="does not speak the protocol"):
            Handshake(SECRET, role).read_greeting(greeting)


@pytest.mark.parametrize(
    "secret", [b"", b"fifteen bytes..", "a str of 32 characters..........", None]
)
def test_secret_is_checked_and_not_shown(secret):
    with pytest.raises(ConfigError, match="secret") as refused:
        Handshake(secret, "client")
    assert "fifteen" not in str(refused.value)
    assert "characters" not in str(refused.value)


def test_keys_are_not_shown():
    client, _ = greeted()
    shown = repr(client.keys()) + repr(client)
    assert client.keys().sending.hex() not in shown
    assert "sixteen" not in shown
    assert repr(client.keys()) == "SessionKeys(...)"
