"""The transport nixl between two processes, over shared memory and over TCP."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from aiokv.errors import ConfigError
from aiokv.peers.nixl import NixlBackend, import_bindings
from aiokv.peers.one_sided import OneSidedTransport
from aiokv.peers.transport import PeerMemory
from tests.peers.installed import why_absent
from tests.peers.transport_child import Slots, transport_of
from tests.peers.transport_processes import TransportProcesses

needs_nixl = pytest.mark.skipif(bool(why_absent("nixl")), reason=why_absent("nixl"))


@needs_nixl
class TestNixl(TransportProcesses):
    transport = "nixl"
    environments: ClassVar = {"shared memory": {}, "tcp": {"UCX_TLS": "tcp"}}


@needs_nixl
@pytest.mark.asyncio
async def test_memory_that_cannot_be_registered_is_a_config_error():
    memory = PeerMemory(address=1 << 46, num_slots=4, slot_bytes=1 << 20, device=0)
    with pytest.raises(ConfigError, match="memory of GPU 0"):
        await transport_of("nixl").open(memory, Slots(0).memory)


@needs_nixl
@pytest.mark.parametrize(
    ("options", "message"),
    [({"no_such": "x"}, "has 'no_such'; UCX has the"), ({"device_list": "nodev"}, "start UCX")],
)
@pytest.mark.asyncio
async def test_wrong_option_is_a_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        await OneSidedTransport(NixlBackend(options)).open(Slots().memory, Slots(0).memory)


def test_missing_package_is_a_config_error_that_names_the_extra(monkeypatch):
    for name in list(sys.modules):
        if name.startswith("nixl"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="needs the package nixl") as caught:
        import_bindings()
    assert "aiokv[nixl]" in caught.value.hint
