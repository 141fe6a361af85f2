"""Flow: transfers of one ticket that end in any order, whole or in part."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.engine.flow import MAX_IN_FLIGHT, Flow
from aiokv.errors import LeaseError

BLOCK_TOKENS = 4


class Exchange:
    """The part of an exchange that a flow uses."""

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS
        self.loop: Any = SimpleNamespace(time=lambda: 7.0)
        self.submitted: list[int] = []
        self.ended: list[Flow] = []

    def submit(self, flow: Flow, transfer_id: int, effects: object) -> None:
        self.submitted.append(transfer_id)

    def end(self, flow: Flow) -> None:
        self.ended.append(flow)


def new_flow(first_block: int = 3) -> tuple[Flow, Exchange, list[tuple[int, int]]]:
    """Return a flow, its exchange, and the (first block, blocks) of its transfers."""
    exchange: Any = Exchange()
    ticket: Any = SimpleNamespace(ticket_id=b"t" * 16, first_position=12, num_tokens=80)
    lease: Any = SimpleNamespace(id=5)
    flow = Flow(exchange, lease, ticket, first_block, lambda: False, receives=True)
    return flow, exchange, []


def begin(flow: Flow, begun: list[tuple[int, int]], end: int, chunk: int) -> None:
    def transition(lease_id: int, ticket_id: bytes, num_tokens: int, *, first_block: int) -> Any:
        assert (lease_id, ticket_id) == (5, b"t" * 16)
        begun.append((first_block, num_tokens // BLOCK_TOKENS - first_block))
        return 100 + len(begun), object()

    flow.begin(transition, end, chunk)


def begin_window(flow: Flow) -> None:
    """Begin transfer 7 of a window, of 4 blocks."""
    plans = [SimpleNamespace(transfer_id=n, num_blocks=blocks) for n, blocks in ((7, 4), (8, 9))]
    effects: Any = SimpleNamespace(submit=plans)
    flow.begin_group(lambda *args: (7, effects), "local", 8)


def test_side_has_moved_when_all_its_blocks_have():
    flow, exchange, _ = new_flow()
    begin_window(flow)
    begin_window(flow)
    assert exchange.submitted == [7]
    flow.moved(7, 4, "")
    assert flow.moved_groups == {"local"}
    assert not flow.is_broken
    begin_window(flow)
    assert exchange.submitted == [7]


def test_side_that_has_moved_in_part_breaks_the_flow():
    flow, _, _ = new_flow()
    begin_window(flow)
    flow.moved(7, 3, "a fragment was wrong")
    assert flow.moved_groups == set()
    assert flow.is_broken
    assert flow.reason == "a fragment was wrong"


def test_side_does_not_begin_after_the_end():
    flow, exchange, _ = new_flow()
    flow.end("cancelled")
    begin_window(flow)
    assert exchange.submitted == []


def test_transfers_cover_the_blocks_once():
    flow, exchange, begun = new_flow()
    begin(flow, begun, 8, 2)
    begin(flow, begun, 8, 2)
    begin(flow, begun, 9, 2)
    assert begun == [(3, 2), (5, 2), (7, 1), (8, 1)]
    assert exchange.submitted == flow.transfer_ids == [101, 102, 103, 104]
    assert not flow.at_rest


def test_transfers_in_flight_are_limited():
    flow, exchange, begun = new_flow(0)
    begin(flow, begun, 1000, 2)
    assert len(begun) == MAX_IN_FLIGHT
    flow.moved(exchange.submitted[5], 2, "")  # out of order
    begin(flow, begun, 1000, 2)
    assert len(begun) == MAX_IN_FLIGHT + 1
    while not flow.at_rest:
        flow.moved(next(i for i in flow.transfer_ids if i != exchange.submitted[5]), 2, "")
        begin(flow, begun, 1000, 2)
        assert flow.in_flight <= MAX_IN_FLIGHT
    assert begun == [(first, 2) for first in range(0, 1000, 2)]
    assert flow.moved_block == 1000


def test_refused_transfer_is_not_in_flight():
    flow, exchange, _ = new_flow()

    def refuse(*args: object, first_block: int) -> Any:
        raise LeaseError("refused")

    with pytest.raises(LeaseError):
        flow.begin(refuse, 8, 2)
    assert flow.at_rest
    assert exchange.submitted == []


@given(st.data())
def test_blocks_count_up_to_the_first_that_has_not_moved(data):
    flow, _, begun = new_flow(0)
    chunk = data.draw(st.integers(1, 4))
    begin(flow, begun, 12, chunk)
    moved = [data.draw(st.integers(0, blocks)) for _, blocks in begun]
    order = data.draw(st.permutations(range(len(begun))))
    for count, index in enumerate(order, 1):
        for _ in range(data.draw(st.integers(1, 2))):  # idempotent
            flow.moved(101 + index, moved[index], f"reason {index}")
        known = list(itertools.takewhile(order[:count].__contains__, range(len(begun))))
        whole = itertools.takewhile(lambda i: moved[i] == begun[i][1], known)
        whole_chunks = len(list(whole))
        expected = (
            sum(moved[: whole_chunks + 1]) if known[whole_chunks:] else sum(moved[:whole_chunks])
        )
        assert flow.moved_block == expected
        assert flow.is_broken == bool(known[whole_chunks:])
        assert flow.at_rest == (count == len(begun))
    broken = [f"reason {i}" for i in order if moved[i] < begun[i][1]]
    assert flow.reason == (broken[0] if broken else "")


def test_first_reason_of_the_end_is_kept():
    flow, exchange, begun = new_flow()
    begin(flow, begun, 8, 2)
    flow.end("first")
    flow.end("second")
    flow.end()
    assert flow.failure == "first"
    assert flow.ended_at == 7.0
    assert set(exchange.ended) == {flow}
    begin(flow, begun, 20, 2)
    assert len(begun) == 3
    assert "ended: first" in repr(flow)
    assert not flow.at_rest
    flow.forget()
    assert flow.at_rest


def test_unknown_transfers_change_nothing():
    flow, _, begun = new_flow()
    begin(flow, begun, 8, 2)
    flow.moved(99, 0, "unknown")
    assert not flow.is_broken
    assert flow.reason == ""


def test_end_of_the_ticket_ends_the_flow_when_no_transfer_is_in_flight():
    flow, exchange, _ = new_flow()
    flow.enter()
    flow.note_ticket_end("the ticket has ended")
    assert (exchange.ended, flow.failure) == ([flow], "the ticket has ended")
    flow, exchange, _ = new_flow()
    flow.enter()
    begin_window(flow)
    flow.note_ticket_end("the ticket has ended")
    assert exchange.ended == []
    flow.moved(7, 4, "")
    flow.proceed()
    assert (exchange.ended, flow.failure) == ([flow], "the ticket has ended")
