"""Cancellations of receiver ranks, whose connections to the sender are not ordered."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.base.plan import SEND, TransferPlan, id_bytes
from aiokv.peers.departures import ReceiverRank
from aiokv.peers.messages import Cancel, Credit, Proven, SlotCredit
from aiokv.peers.sender import Sender
from aiokv.peers.ticket import Endpoint, Ticket

from .world import EQUAL

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = [0, 1]
ENDED = "the receiver gave up: all positions have arrived"


class Port:
    """Work of a sender, done by ``run``."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.reports: list[Any] = []
        self.ends: list[str] = []
        self.logic = Sender[str](self, num_slots=8, rank=0, block_tokens=4)

    def send(self, connection: str, message: Any) -> None: ...

    def is_open(self, plan: TransferPlan) -> bool:
        return False

    def fill(self, fill: Any) -> None:
        self.jobs.append(lambda: self.logic.admit(fill) and self.logic.filled(fill, None))

    def seal(self, fragments: Any) -> None:
        self.jobs.append(lambda: self.logic.sealed(fragments))

    def write(self, connection: str, fragments: Any) -> None:
        self.jobs.append(lambda: self.logic.written(fragments))

    def sent(self, send: Any) -> None:
        self.reports.append(send)

    def ended(self, ticket_id: bytes, reason: str) -> None:
        self.ends.append(reason)

    def run(self) -> None:
        while self.jobs:
            self.jobs.popleft()()


@pytest.fixture
def port() -> Port:
    """A sender whose two blocks were written to two receiver ranks."""
    port = Port()
    ticket = Ticket(
        ticket_id=bytes(15) + b"t",
        generation=bytes(16),
        model="m",
        weights_version="w",
        prompt_digest=bytes(32),
        first_position=0,
        num_tokens=8,
        timeout_seconds=10.0,
        block_tokens=4,
        transport="tcp",
        endpoints=[Endpoint("h", 1), Endpoint("h", 2)],
    )
    targets = {rank: ReceiverRank(name, [EQUAL]) for rank, name in enumerate(("first", "second"))}
    port.logic.add_ticket(ticket, 100.0, targets)
    plan = TransferPlan(
        transfer_id=1,
        route=SEND,
        source_blocks=id_bytes([5, 6]),
        target_blocks=id_bytes(BLOCKS),
        peer=ticket.ticket_id,
    )
    port.logic.submit(plan)
    for name in ("first", "second"):
        slots = [SlotCredit(slot, 1) for slot in range(2)]
        port.logic.on_message(name, Credit(slots=slots))
    port.run()
    assert not port.reports
    return port


def prove(port: Port, connection: str) -> None:
    (ticket_id,) = port.logic.ticket_ids
    port.logic.on_message(connection, Proven(ticket_id=ticket_id, sender_blocks=BLOCKS))
    port.run()


def cancel(port: Port, connection: str) -> None:
    (ticket_id,) = port.logic.ticket_ids
    message = Cancel(ticket_id=ticket_id, reason="all positions have arrived")
    port.logic.on_message(connection, message)
    port.run()


def test_acknowledgement_behind_the_cancellation_of_another_rank_counts(port: Port) -> None:
    prove(port, "first")
    cancel(port, "first")
    assert not port.ends
    prove(port, "second")
    (send,) = port.reports
    assert send.failure is None
    assert send.leading_blocks == len(BLOCKS)
    cancel(port, "second")
    assert port.ends == [ENDED]
    assert send.failure is None


def test_cancellation_of_a_rank_without_its_blocks_ends_the_send(port: Port) -> None:
    prove(port, "second")
    cancel(port, "first")
    (send,) = port.reports
    assert send.failure is not None
    assert port.ends == [ENDED]


def test_cancellations_of_all_ranks_end_the_send(port: Port) -> None:
    prove(port, "first")
    cancel(port, "first")
    cancel(port, "second")
    (send,) = port.reports
    assert send.failure is not None
    assert port.ends == [ENDED]
