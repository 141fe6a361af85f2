"""Ticket transfers: transfers of one ticket that end in any order, whole or in part."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.engine.ticket_transfers import MAX_IN_FLIGHT, TicketTransfers
from aiokv.errors import LeaseError

BLOCK_TOKENS = 4


class PeerTickets:
    """The part of the engine's tickets that transfers use."""

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS
        self.loop: Any = SimpleNamespace(time=lambda: 7.0)
        self.submitted: list[int] = []
        self.ended: list[TicketTransfers] = []

    def submit(self, transfers: TicketTransfers, transfer_id: int, effects: object) -> None:
        self.submitted.append(transfer_id)

    def end(self, transfers: TicketTransfers) -> None:
        self.ended.append(transfers)


def new_transfers(
    first_block: int = 3,
) -> tuple[TicketTransfers, PeerTickets, list[tuple[int, int]]]:
    """Return transfers, the tickets of the engine, and an empty list of (first block, blocks)."""
    peer_tickets: Any = PeerTickets()
    ticket: Any = SimpleNamespace(ticket_id=b"t" * 16, first_position=12, num_tokens=80)
    lease: Any = SimpleNamespace(id=5)
    transfers = TicketTransfers(
        peer_tickets, lease, ticket, first_block, lambda: False, receives=True
    )
    return transfers, peer_tickets, []


def begin(transfers: TicketTransfers, begun: list[tuple[int, int]], end: int, chunk: int) -> None:
    def transition(lease_id: int, ticket_id: bytes, num_tokens: int, *, first_block: int) -> Any:
        assert (lease_id, ticket_id) == (5, b"t" * 16)
        begun.append((first_block, num_tokens // BLOCK_TOKENS - first_block))
        return 100 + len(begun), object()

    transfers.begin(transition, end, chunk)


def begin_window(transfers: TicketTransfers) -> None:
    """Begin transfer 7 of a window, of 4 blocks."""
    plans = [SimpleNamespace(transfer_id=n, num_blocks=blocks) for n, blocks in ((7, 4), (8, 9))]
    effects: Any = SimpleNamespace(submit=plans)
    transfers.begin_group(lambda *args: (7, effects), "local", 8)


def test_side_has_moved_when_all_its_blocks_have():
    transfers, peer_tickets, _ = new_transfers()
    begin_window(transfers)
    begin_window(transfers)
    assert peer_tickets.submitted == [7]
    transfers.moved(7, 4, "")
    assert transfers.moved_groups == {"local"}
    assert not transfers.is_broken
    begin_window(transfers)
    assert peer_tickets.submitted == [7]


def test_side_that_has_moved_in_part_breaks_the_ticket():
    transfers, _, _ = new_transfers()
    begin_window(transfers)
    transfers.moved(7, 3, "a fragment was wrong")
    assert transfers.moved_groups == set()
    assert transfers.is_broken
    assert transfers.reason == "a fragment was wrong"


def test_side_does_not_begin_after_the_end():
    transfers, peer_tickets, _ = new_transfers()
    transfers.end("cancelled")
    begin_window(transfers)
    assert peer_tickets.submitted == []


def test_transfers_cover_the_blocks_once():
    transfers, peer_tickets, begun = new_transfers()
    begin(transfers, begun, 8, 2)
    begin(transfers, begun, 8, 2)
    begin(transfers, begun, 9, 2)
    assert begun == [(3, 2), (5, 2), (7, 1), (8, 1)]
    assert peer_tickets.submitted == transfers.transfer_ids == [101, 102, 103, 104]
    assert not transfers.at_rest


def test_transfers_in_flight_are_limited():
    transfers, peer_tickets, begun = new_transfers(0)
    begin(transfers, begun, 1000, 2)
    assert len(begun) == MAX_IN_FLIGHT
    transfers.moved(peer_tickets.submitted[5], 2, "")  # out of order
    begin(transfers, begun, 1000, 2)
    assert len(begun) == MAX_IN_FLIGHT + 1
    while not transfers.at_rest:
        transfers.moved(
            next(i for i in transfers.transfer_ids if i != peer_tickets.submitted[5]), 2, ""
        )
        begin(transfers, begun, 1000, 2)
        assert transfers.in_flight <= MAX_IN_FLIGHT
    assert begun == [(first, 2) for first in range(0, 1000, 2)]
    assert transfers.moved_block == 1000


def test_refused_transfer_is_not_in_flight():
    transfers, peer_tickets, _ = new_transfers()

    def refuse(*args: object, first_block: int) -> Any:
        raise LeaseError("refused")

    with pytest.raises(LeaseError):
        transfers.begin(refuse, 8, 2)
    assert transfers.at_rest
    assert peer_tickets.submitted == []


@given(st.data())
def test_blocks_count_up_to_the_first_that_has_not_moved(data):
    transfers, _, begun = new_transfers(0)
    chunk = data.draw(st.integers(1, 4))
    begin(transfers, begun, 12, chunk)
    moved = [data.draw(st.integers(0, blocks)) for _, blocks in begun]
    order = data.draw(st.permutations(range(len(begun))))
    for count, index in enumerate(order, 1):
        for _ in range(data.draw(st.integers(1, 2))):  # idempotent
            transfers.moved(101 + index, moved[index], f"reason {index}")
        known = list(itertools.takewhile(order[:count].__contains__, range(len(begun))))
        whole = itertools.takewhile(lambda i: moved[i] == begun[i][1], known)
        whole_chunks = len(list(whole))
        expected = (
            sum(moved[: whole_chunks + 1]) if known[whole_chunks:] else sum(moved[:whole_chunks])
        )
        assert transfers.moved_block == expected
        assert transfers.is_broken == bool(known[whole_chunks:])
        assert transfers.at_rest == (count == len(begun))
    broken = [f"reason {i}" for i in order if moved[i] < begun[i][1]]
    assert transfers.reason == (broken[0] if broken else "")


def test_first_reason_of_the_end_is_kept():
    transfers, peer_tickets, begun = new_transfers()
    begin(transfers, begun, 8, 2)
    transfers.end("first")
    transfers.end("second")
    transfers.end()
    assert transfers.failure == "first"
    assert transfers.ended_at == 7.0
    assert set(peer_tickets.ended) == {transfers}
    begin(transfers, begun, 20, 2)
    assert len(begun) == 3
    assert "ended: first" in repr(transfers)
    assert not transfers.at_rest
    transfers.forget()
    assert transfers.at_rest


def test_unknown_transfers_change_nothing():
    transfers, _, begun = new_transfers()
    begin(transfers, begun, 8, 2)
    transfers.moved(99, 0, "unknown")
    assert not transfers.is_broken
    assert transfers.reason == ""


def test_end_of_the_ticket_ends_the_receive_when_no_transfer_is_in_flight():
    transfers, peer_tickets, _ = new_transfers()
    transfers.enter()
    transfers.note_ticket_end("the ticket has ended")
    assert (peer_tickets.ended, transfers.failure) == ([transfers], "the ticket has ended")
    transfers, peer_tickets, _ = new_transfers()
    transfers.enter()
    begin_window(transfers)
    transfers.note_ticket_end("the ticket has ended")
    assert peer_tickets.ended == []
    transfers.moved(7, 4, "")
    transfers.proceed()
    assert (peer_tickets.ended, transfers.failure) == ([transfers], "the ticket has ended")
