"""Names of marks, and the marks of tickets that have not ended."""

from __future__ import annotations

import pytest

from aiokv.errors import UsageError
from aiokv.worker.layer_marks import LayerMarks, layer_mark, split_layer_mark

TICKET, OTHER = b"t" * 16, b"o" * 16


def test_name_of_a_mark_has_its_ticket_and_number():
    for mark in (1, 255, 256, 1 << 40):
        assert split_layer_mark(layer_mark(TICKET, mark)) == (TICKET, mark)


@pytest.mark.parametrize("name", ["t" * 24, b"", TICKET, layer_mark(TICKET, 1) + b"x", None, 7])
def test_other_names_are_refused(name):
    with pytest.raises(UsageError, match=r"Sending\.layers_done"):
        split_layer_mark(name)


def test_marks_are_known_until_their_ticket_has_ended():
    marks, event = LayerMarks(), object()
    assert not marks.has(TICKET, 1)
    marks.note(TICKET, 1, event)
    marks.note(TICKET, 2, None)
    marks.note(OTHER, 1, None)
    assert marks.event(TICKET, 1) is event
    assert marks.event(TICKET, 2) is marks.event(OTHER, 1) is None
    assert [marks.has(TICKET, mark) for mark in range(4)] == [False, True, True, False]
    marks.forget(TICKET)
    marks.forget(TICKET)
    assert not marks.has(TICKET, 1)
    assert marks.has(OTHER, 1)
