"""BorderSearch: where a hit should end when it needs a snapshot, by cost and by failures."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.engine.borders import BorderSearch
from aiokv.scheduler.reader import Borders
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.store_set import StoreAnswer

BLOCK_TOKENS = 10
NEVER = float("inf")


def borders(count, *, hit=2, cached=2, first=None, may_end=None) -> Borders:
    return Borders(
        hit=hit,
        cached=cached,
        first=hit if first is None else first,
        digests=bytes(range(count)) * KEY_BYTES if count else b"",
        may_end=np.ones(count, np.bool_) if may_end is None else np.array(may_end, np.bool_),
    )


def answer(*seconds) -> StoreAnswer:
    return StoreAnswer(len(seconds), np.array(seconds, np.float64))


def search_of(seconds, snapshots, **blocks) -> BorderSearch:
    """Return a search whose blocks take these seconds, each with all before it."""
    search = BorderSearch(borders(len(snapshots), **blocks), BLOCK_TOKENS)
    search.note(answer(*seconds), np.array(snapshots, np.float64))
    return search


def test_last_border_that_can_be_reached():
    assert search_of([1, 2, 3], [NEVER, 1, NEVER]).best(0.0) == 4
    assert search_of([1], [NEVER, 1, 1]).best(0.0) == 0
    assert search_of([1, 2, 3], [1, 1, 1], may_end=[True, False, False]).best(0.0) == 3


@pytest.mark.parametrize(
    ("snapshots", "best"),
    [
        ([0.5, NEVER, 1.0], 5),
        ([0.5, NEVER, 3.5], 3),  # the blocks behind it are computed sooner
        ([2.0, NEVER, 5.0], 0),  # nothing is gained
    ],
)
def test_time_of_snapshots_counts(snapshots, best):
    """A block takes 1 s to fetch, and 2 s to compute."""
    search = search_of([1.0, 2.0, 3.0], snapshots)
    assert search.best(BLOCK_TOKENS / 2.0) == best


def test_blocks_in_a_tier_cost_nothing():
    search = BorderSearch(borders(4, cached=4), BLOCK_TOKENS)
    assert search.missing_digests == search.digests[2 * KEY_BYTES :]
    search.note(answer(9.0), np.full(4, 1.5))
    assert search.best(BLOCK_TOKENS / 1.0) == 4
    search.note_blocks(5, is_end=False)
    assert search.best(BLOCK_TOKENS / 1.0) == 5


def test_search_goes_on_while_all_blocks_are_found():
    search = BorderSearch(borders(2), BLOCK_TOKENS)
    assert search.note(answer(1.0, 2.0), np.full(2, NEVER))
    search.go_on(borders(2, first=4))
    assert search.asked == 2
    assert not search.note(answer(1.0), np.array([NEVER, 1.0]))
    assert search.best(0.0) == 0
    assert not search.digests


def test_search_ends_when_the_hit_has_changed():
    search = BorderSearch(borders(2), BLOCK_TOKENS)
    assert search.note(answer(1.0, 2.0), np.array([1.0, NEVER]))
    search.go_on(borders(2, hit=3))
    assert not search.digests
    assert search.best(0.0) == 3


def test_failures_leave_earlier_borders():
    search = search_of([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    search.note_failure(5)
    assert search.best(0.0) == 4
    search.note_blocks(3, is_end=True)
    assert search.best(0.0) == 3
    search.note_failure(3)
    assert search.best(0.0) == 0
