"""Options of peers: addresses, secrets and sizes."""

from __future__ import annotations

import pytest

from aiokv.errors import ConfigError
from aiokv.peers.options import Peers, split_address

SECRET = "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("10.0.0.5:7000", ("10.0.0.5", 7000)),
        ("decode-3.cluster.local:0", ("decode-3.cluster.local", 0)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_address_is_split(text, address):
    assert split_address("listen", text) == address
    assert Peers(secret=SECRET, listen=text).listen_address == address


@pytest.mark.parametrize(
    "text",
    ["", ":7000", "host:", "host:http", "host:-1", "[::1", "[::1]7000", "[host]:1", "a b", "tcp://h",
     "1:2:3", "höst", 7000, b"host", "host:123456"],
)  # fmt: skip
def test_malformed_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"listen is .*; it must be 'host', 'host:port'"):
        Peers(secret=SECRET, listen=text)


def test_port_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"listen is 'host:65536'; its port must be between"):
        Peers(secret=SECRET, listen="host:65536")


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "0.0.0.0:7000", "::", "[::]:7000", "0", "0x0:1", "::ffff:0.0.0.0", "*"]
)
def test_wildcard_needs_an_advertised_address(text):
    with pytest.raises(ConfigError, match=r"listen is .*all interfaces.*set advertise"):
        Peers(secret=SECRET, listen=text)
    with pytest.raises(ConfigError, match=r"advertise is .*all interfaces"):
        Peers(secret=SECRET, listen="10.0.0.5", advertise=text)
    peers = Peers(secret=SECRET, listen=text, advertise="10.0.0.5")
    assert peers.advertised(7001) == ("10.0.0.5", 7001)


def test_advertised_address_replaces_the_address_to_listen_at():
    assert Peers(secret=SECRET, listen="10.0.0.5:0").advertised(7001) == ("10.0.0.5", 7001)
    behind_nat = Peers(secret=SECRET, listen="10.0.0.5:7000", advertise="kv.example:80")
    assert behind_nat.advertised(7000) == ("kv.example", 80)
    assert behind_nat.listen_address == ("10.0.0.5", 7000)


def test_engine_that_only_sends_has_no_address():
    peers = Peers(secret=SECRET)
    assert peers.listen_address is None
    with pytest.raises(ConfigError, match="listen is None"):
        peers.advertised(7000)
    with pytest.raises(ConfigError, match="advertise is given, but listen is None"):
        Peers(secret=SECRET, advertise="10.0.0.5")


@pytest.mark.parametrize(
    "secret", ["short", b"fifteen bytes!!", b"", "x" * 4097, None, 7, "\ud800" * 9]
)
def test_unusable_secret_is_refused_without_showing_it(secret):
    with pytest.raises(ConfigError, match=r"^secret ") as caught:
        Peers(secret=secret, listen="10.0.0.5")
    if secret and isinstance(secret, str | bytes):
        assert str(secret) not in str(caught.value)


def test_repr_does_not_show_the_secret():
    peers = Peers(secret="correct horse battery", listen="10.0.0.5")
    assert "correct" not in repr(peers)
    assert peers.key == b"correct horse battery"
    assert Peers(secret=b"\xff" * 16).key == b"\xff" * 16


@pytest.mark.parametrize("name", ["ring_bytes", "outgoing_bytes"])
@pytest.mark.parametrize("size", [0, -1, "many", "", None, True, 1.5])
def test_wrong_size_is_refused(name, size):
    with pytest.raises(ConfigError, match=f"{name} is .*number of bytes"):
        Peers(secret=SECRET, **{name: size})


def test_sizes_are_numbers_with_units():
    peers = Peers(secret=SECRET, ring_bytes="1.5MiB", outgoing_bytes=4096)
    assert (peers.ring_bytes, peers.outgoing_bytes) == (3 << 19, 4096)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_blocks": 0}, "chunk_blocks is 0; it must be between 1 and 4096"),
        ({"chunk_blocks": 4097}, "chunk_blocks is 4097"),
        ({"chunk_blocks": 1.0}, "chunk_blocks is 1.0; it must be an integer"),
        ({"layer_ranges": 0}, "layer_ranges is 0; it must be between 1 and 64"),
        ({"layer_ranges": 65}, "layer_ranges is 65"),
        (
            {"layer_ranges": 2, "transport": "cuda_ipc"},
            "layer_ranges is 2; the transport 'cuda_ipc' moves whole blocks",
        ),
        ({"transport": "rdma"}, "transport is 'rdma'; it must be one of 'tcp', 'nixl', 'mooncake'"),
        ({"port": 7}, "'port' is unknown"),
    ],
)
def test_wrong_option_is_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        Peers(secret=SECRET, **option)
