"""Acceptance: each reason for which a sender may not open a ticket."""

from __future__ import annotations

import re

import msgspec
import pytest

from aiokv.errors import LayoutError
from aiokv.peers.acceptance import Acceptance
from aiokv.peers.arrivals import SenderBlocks
from aiokv.peers.assembly import AssemblySlots
from aiokv.peers.incoming import IncomingTicket
from aiokv.peers.messages import PROTOCOL_VERSION, Open, Refused

from .world import EQUAL, FRAGMENT_BYTES, SPLIT, World

EQUAL_BLOCKS, SPLIT_BLOCKS = (SenderBlocks((mapping,), None, 4) for mapping in (EQUAL, SPLIT))


def acceptance(source=EQUAL_BLOCKS, *, slot_bytes=FRAGMENT_BYTES, num_assembly=2):
    def blocks(message):
        if source is None:
            raise LayoutError("x" * 2000)
        return source

    return Acceptance(
        rank=1, transport="tcp", slot_bytes=slot_bytes, num_assembly=num_assembly, source=blocks
    )


def opening(ticket, **changes):
    message = Open(
        protocol=PROTOCOL_VERSION,
        ticket_id=ticket.ticket_id,
        generation=ticket.generation,
        sender_rank=0,
        receiver_rank=1,
        sender_block_tokens=4,
        layout=b"",
        transport="tcp",
    )
    return msgspec.structs.replace(message, **changes)


@pytest.fixture
def incoming():
    return IncomingTicket(World(0).expect(1), 1.0, 1, AssemblySlots(2))


def test_sender_with_right_blocks_is_accepted(incoming):
    assert acceptance().check(opening(incoming.ticket), incoming) is EQUAL_BLOCKS
    assert acceptance(SPLIT_BLOCKS).check(opening(incoming.ticket), incoming) is SPLIT_BLOCKS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, f"the protocol is 99; it must be {PROTOCOL_VERSION}"),
        ({"generation": b"g" * 16}, "the ticket is of another generation of the engine"),
        ({"receiver_rank": 0}, "this is rank 1, not 0"),
        ({"transport": "nixl"}, "the transport is 'nixl'; here it is 'tcp'"),
    ],
)
def test_message_for_another_receiver_is_refused(incoming, changes, reason):
    reply = acceptance().check(opening(incoming.ticket, **changes), incoming)
    assert reply == Refused(ticket_id=incoming.ticket.ticket_id, kind="ticket", reason=reason)


def test_ticket_that_is_unknown_or_has_ended_is_refused(incoming):
    message = opening(incoming.ticket)
    unknown = acceptance().check(message, None)
    incoming.closed = "closed"
    assert unknown == acceptance().check(message, incoming)
    assert unknown.reason == "the ticket is unknown, or has ended"


@pytest.mark.parametrize("changes", [{"sources": {0: SPLIT_BLOCKS}}, {"done": "sent"}])
def test_second_sender_of_a_rank_is_refused(incoming, changes):
    for name, value in changes.items():
        setattr(incoming, name, value)
    reply = acceptance(SPLIT_BLOCKS).check(opening(incoming.ticket), incoming)
    assert (reply.kind, reply.reason) == ("ticket", "a sender of rank 0 has, or had, the ticket")


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        (acceptance(slot_bytes=FRAGMENT_BYTES - 1), "takes 192 bytes, a landing slot .* 191 bytes"),
        (acceptance(SPLIT_BLOCKS, num_assembly=1), "room for 1 blocks of .*; it needs 2"),
        (acceptance(None), "^x{1024}$"),
    ],
)
def test_blocks_that_cannot_be_received_are_refused(incoming, checks, reason):
    reply = checks.check(opening(incoming.ticket), incoming)
    assert reply.kind == "layout"
    assert re.search(reason, reply.reason)
