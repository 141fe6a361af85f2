"""AcceptedConnections: interrupts in the end of a connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiokv.peers import accepted as module
from aiokv.peers.accepted import AcceptedConnections
from aiokv.peers.messages import PROTOCOL_VERSION, Open
from aiokv.testing import run_until_idle

pytestmark = pytest.mark.asyncio


class Transport:
    """A one-sided transport that records the fences."""

    one_sided = True
    name = "fake"

    def __init__(self) -> None:
        self.fences: list[tuple[object, bool]] = []

    async def accept(self, connection: object, metadata: bytes) -> bytes:
        return b"metadata"

    async def fence(self, connection: object, *, may_write: bool) -> None:
        self.fences.append((connection, may_write))


class Accepted:
    """A connection that has no socket."""

    reason = ""
    remote = "here"

    def start(self, handler: object) -> None:
        """Do nothing."""


async def test_interrupted_end_of_a_connection_frees_its_slots(monkeypatch):
    fenced: list[object] = []
    receiver: Any = SimpleNamespace(
        on_message=lambda connection, message: None,
        on_closed=lambda connection, reason: True,
        fenced=fenced.append,
    )
    guard: Any = SimpleNamespace(surely=lambda action: action(), guarded=lambda action: action())
    transport: Any = Transport()
    connection: Any = Accepted()
    connections = AcceptedConnections(transport, guard)
    landing: Any = None
    connections.serve(receiver, landing)
    connections.add(connection)
    opening = Open(
        protocol=PROTOCOL_VERSION,
        ticket_id=bytes(16),
        generation=bytes(16),
        sender_rank=0,
        receiver_rank=0,
        sender_block_tokens=4,
        layout=b"",
        transport="fake",
    )
    connections.on_message(connection, opening)
    await run_until_idle(lambda: bool(connections.metadata(connection)))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=interrupt))
        with pytest.raises(KeyboardInterrupt):
            connections.on_closed(connection, "the peer closed the connection")
    for _ in range(2):  # the repetition, and one that was not needed
        connections.on_closed(connection, "the peer closed the connection")
    await run_until_idle(lambda: connections.is_idle)
    assert transport.fences == [(connection, True)]
    assert fenced == [connection]
    assert asyncio.all_tasks() == {asyncio.current_task()}
