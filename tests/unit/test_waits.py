"""Parts of the waiting lines: entries, and waits of whole lines that end one per call."""

from __future__ import annotations

from aiokv.scheduler.line import PriorityLine
from aiokv.scheduler.waits import Endings, Entry, check_entries


def entries_of(line: PriorityLine[Entry], *ranks: int) -> list[Entry]:
    made = []
    for lease_id, rank in enumerate(ranks, start=1):
        made.append(Entry(lease_id))
        made[-1].enter(line, rank)
    return made


class Ended:
    """Part of the scheduler that ends waits and records their order."""

    def __init__(self) -> None:
        self.lease_ids: list[int] = []

    def __call__(self, entry: Entry) -> None:
        self.lease_ids.append(entry.lease_id)
        entry.leave()


def test_entries_end_one_per_call_in_order_of_rank_up_to_the_given_one():
    line: PriorityLine[Entry] = PriorityLine()
    entries_of(line, 3, 1, 2)
    endings: Endings[Entry] = Endings()
    ended = Ended()
    endings.add([line], ended, up_to=2)
    for expected in ([2], [2, 3]):
        assert endings.end_one()
        assert ended.lease_ids == expected
    while endings.end_one():
        pass
    assert ended.lease_ids == [2, 3]
    assert len(line) == 1
    assert not endings
    endings.add([line], ended)
    while endings.end_one():
        pass
    assert ended.lease_ids == [2, 3, 1]


def test_removed_entry_is_not_ended():
    line: PriorityLine[Entry] = PriorityLine()
    entries = entries_of(line, 0, 0, 0)
    endings: Endings[Entry] = Endings()
    ended = Ended()
    endings.add([line], ended)
    assert endings.end_one()
    entries[1].leave()
    entries[1].leave()  # idempotent
    while endings.end_one():
        pass
    assert ended.lease_ids == [1, 3]
    assert endings.lines() == []


def test_all_lines_and_all_ends_are_served():
    first: PriorityLine[Entry] = PriorityLine()
    second: PriorityLine[Entry] = PriorityLine()
    third: PriorityLine[Entry] = PriorityLine()
    for line in (first, second, third):
        entries_of(line, 0, 0)
    endings: Endings[Entry] = Endings()
    ended, ended_later = Ended(), Ended()
    endings.add([first, second], ended)
    endings.add([third], ended_later)
    assert {id(line) for line in endings.lines()} == {id(first), id(second), id(third)}
    while endings.end_one():
        pass
    assert ended.lease_ids == [1, 2, 1, 2]
    assert ended_later.lease_ids == [1, 2]


def test_check_accepts_entries_in_one_line_each():
    line: PriorityLine[Entry] = PriorityLine()
    entries = {entry.lease_id: entry for entry in entries_of(line, 0, 1)}
    assert check_entries("line", entries, [line, line], {1, 2}) == []


def test_check_reports_an_entry_whose_lease_is_released():
    line: PriorityLine[Entry] = PriorityLine()
    entries = {entry.lease_id: entry for entry in entries_of(line, 0, 1)}
    assert check_entries("line", entries, [line], {1}) == [
        "line: lease 0x2 waits, but it is released"
    ]


def test_check_reports_an_entry_of_no_waiting_lease():
    line: PriorityLine[Entry] = PriorityLine()
    entries_of(line, 0)
    assert check_entries("line", {}, [line], {1}) == [
        "line: an entry of lease 0x1 belongs to no waiting lease"
    ]


def test_check_reports_a_waiting_lease_in_no_line():
    line: PriorityLine[Entry] = PriorityLine()
    (entry,) = entries_of(line, 0)
    entry.leave()
    assert check_entries("line", {1: entry}, [line], {1}) == [
        "line: lease 0x1 waits in no line, and nothing will wake it"
    ]
