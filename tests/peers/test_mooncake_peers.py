"""The transport mooncake between two processes, and between two engines, over TCP."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiokv import Peers
from aiokv.errors import ConfigError
from aiokv.peers.mooncake import MooncakeBackend, import_engine
from aiokv.peers.one_sided import OneSidedTransport
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import SECRET, Side, prompt, two_engines
from tests.peers.installed import why_absent
from tests.peers.transport_child import Slots
from tests.peers.transport_processes import TransportProcesses

# On one loop: to destroy an endpoint takes a second.
needs_mooncake = pytest.mark.skipif(bool(why_absent("mooncake")), reason=why_absent("mooncake"))


@needs_mooncake
@pytest.mark.loop("uvloop")
class TestMooncake(TransportProcesses):
    transport = "mooncake"


@needs_mooncake
@pytest.mark.loop("asyncio")
@pytest.mark.parametrize("length", [5, 131])
@pytest.mark.asyncio
async def test_prompt_arrives_whole(length):
    tokens = prompt(length)
    sides = Side(listen=None, transport="mooncake"), Side(transport="mooncake")
    async with two_engines(*sides) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            assert await receiving.wait() == length
        assert await prefill == (length, None)
        d.check(lease, tokens)


@pytest.mark.asyncio
async def test_device_that_does_not_exist_is_a_config_error():
    options = {"protocol": "rdma", "devices": "no_such_device"}
    transport = OneSidedTransport(MooncakeBackend("127.0.0.1", options))
    with pytest.raises(ConfigError, match="needs the RDMA device no_such_device"):
        await transport.open(Slots().memory, Slots(0).memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"protocol": "udp"}, "is 'udp'; it must be one of 'tcp'"), ({"port": "1"}, "has 'port'")],
)
def test_wrong_option_is_a_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        MooncakeBackend("127.0.0.1", options)


@pytest.mark.parametrize(
    ("transport", "options", "message"),
    [
        ("tcp", {"a": "b"}, "the transport 'tcp' has no options"),
        ("nixl", {"a": 1}, "must be a dict of str to str"),
        ("nixl", "a", "must be a dict of str to str"),
    ],
)
def test_wrong_transport_options_are_a_config_error(transport, options, message):
    with pytest.raises(ConfigError, match=message):
        Peers(secret=SECRET, transport=transport, transport_options=options)


def test_missing_package_is_a_config_error_that_names_the_extra(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "mooncake":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="needs the package mooncake-transfer-engine") as caught:
        import_engine()
    assert "aiokv[mooncake-cpu]" in caught.value.hint
