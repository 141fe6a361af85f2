"""BoundarySearch: where a hit should end that needs copies in other pools, by cost and failures."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.base.groups import BlockGroup
from aiokv.engine.boundaries import BoundarySearch
from aiokv.engine.comparison import Comparison
from aiokv.scheduler.reader import Boundaries
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.store_set import Found, StoreAnswer

BLOCK_TOKENS = 10
NEVER = float("inf")
STATE = BlockGroup("state", -1, 0, 1)
WINDOW = BlockGroup("local", 0, 0, 2)
SINK = BlockGroup("sink", 0, 3, 1)


def boundaries(count, *, hit=2, cached=2, first=None, may_end=None) -> Boundaries:
    return Boundaries(
        hit=hit,
        cached=cached,
        first=hit if first is None else first,
        digests=bytes(range(count)) * KEY_BYTES,
        may_end=np.ones(count, np.bool_) if may_end is None else np.array(may_end, np.bool_),
    )


def answer(*seconds) -> StoreAnswer:
    return StoreAnswer(len(seconds), np.array(seconds, np.float64))


def copies(*seconds, latency=0.0) -> Found:
    return Found(np.array(seconds, np.float64), latency)


def search_of(seconds, found, *, group=STATE, latency=0.0, **blocks) -> BoundarySearch:
    """Return a search whose blocks take these seconds, each with all before it."""
    search = BoundarySearch(boundaries(len(found), **blocks), [group], BLOCK_TOKENS)
    search.note(answer(*seconds), [copies(*found, latency=latency)])
    return search


def test_last_boundary_that_can_be_reached():
    assert search_of([1, 2, 3], [NEVER, 1, NEVER]).best(None) == 4
    assert search_of([1], [NEVER, 1, 1]).best(None) == 0
    assert search_of([1, 2, 3], [1, 1, 1], may_end=[True, False, False]).best(None) == 3


def test_whole_window_is_needed_but_what_the_hit_has():
    assert search_of([1, 2, 3], [1, 1, NEVER], group=WINDOW).best(None) == 4
    assert search_of([1, 2, 3], [NEVER, 1, 1], group=WINDOW).best(None) == 5
    assert search_of([1, 2, 3], [1, NEVER, 1], group=WINDOW).best(None) == 3


def test_sink_is_needed_but_what_the_hit_has():
    """The sink has 3 blocks, of which the hit has 2."""
    assert search_of([1, 2, 3], [1, NEVER, 1], group=SINK).best(None) == 5
    assert search_of([1, 2, 3], [NEVER, 1, 1], group=SINK).best(None) == 0
    assert search_of([1, 2, 3], [NEVER, 1, 1], group=SINK, hit=3, cached=3).best(None) == 6


def computing(seconds: float) -> Comparison:
    """Return a comparison for a model that computes a block in ``seconds``."""
    return Comparison(BLOCK_TOKENS / seconds, BLOCK_TOKENS, lambda: 0.0)


def test_all_pools_are_needed():
    search = BoundarySearch(boundaries(3), [STATE, WINDOW], BLOCK_TOKENS)
    search.note(answer(1, 2, 3), [copies(1, 1, NEVER), copies(1, 1, 1)])
    assert search.best(None) == 4
    search.note_cached("state", np.array([False, False, True]))
    assert search.best(None) == 5


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
    assert search.best(computing(2.0)) == best


@pytest.mark.parametrize(("latency", "best"), [(2.5, 5), (3.5, 0)])
def test_latency_counts_once_per_fetch(latency, best):
    search = search_of([1.0, 2.0, 3.0], [0.0] * 3, group=WINDOW, latency=latency)
    assert search.best(computing(2.0)) == best


def test_what_a_tier_has_costs_nothing():
    search = BoundarySearch(boundaries(4, cached=4), [STATE], BLOCK_TOKENS)
    assert search.missing_digests == search.digests[2 * KEY_BYTES :]
    search.note(answer(9.0), [copies(*[1.5] * 4, latency=0.1)])
    assert search.best(computing(1.0)) == 4
    search.note_blocks(5, is_end=False)
    assert search.best(computing(1.0)) == 5
    search.note_cached("state", np.array([True]))
    assert search.best(computing(0.55)) == 3


def test_search_goes_on_while_all_blocks_are_found():
    search = BoundarySearch(boundaries(2), [STATE], BLOCK_TOKENS)
    assert search.note(answer(1.0, 2.0), [copies(NEVER, NEVER)])
    search.go_on(boundaries(2, first=4))
    assert search.asked == 2
    assert not search.note(answer(1.0), [copies(NEVER, 1.0)])
    assert search.best(None) == 0
    assert not search.digests


def test_search_ends_when_the_hit_has_changed():
    search = BoundarySearch(boundaries(2), [STATE], BLOCK_TOKENS)
    assert search.note(answer(1.0, 2.0), [copies(1.0, NEVER)])
    search.go_on(boundaries(2, hit=3))
    assert not search.digests
    assert search.best(None) == 3


def test_failures_leave_earlier_boundaries():
    search = search_of([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    search.note_failure(5)
    assert search.best(None) == 4
    search.note_blocks(3, is_end=True)
    assert search.best(None) == 3
    search.note_failure(3)
    assert search.best(None) == 0


def test_failed_copies_count_for_all_windows_that_need_them():
    search = search_of([1.0, 2.0, 3.0, 4.0], [0.0] * 4, group=WINDOW)
    search.note_cached("local", np.array([True, True, False, False]))
    search.note_failure(5)
    assert search.best(None) == 4, "the boundary behind it needs the copy of block 4, too"


def test_fetches_before_this_one_count():
    search = search_of([1.0, 2.0, 3.0], [1.0] * 3)
    assert search.best(computing(2.0), 1.9) == 5
    assert search.best(computing(2.0), 2.1) == 0


def test_slow_part_raises_the_expected_times_of_blocks_and_copies():
    search = search_of([1.0, 2.0, 3.0], [1.0] * 3)
    assert search.block_seconds(2, 5).tolist() == [1.0, 2.0, 3.0]
    assert (search.seconds(5), search.copy_seconds(5)) == (4.0, 1.0)
    search.note_part(2, 3, expected=1.0, elapsed=1.5)
    assert search.block_seconds(3, 5).tolist() == [1.5, 3.0]
    assert (search.seconds(5), search.copy_seconds(5)) == (4.5, 1.5)
    search.note_part(3, 3, expected=1.5, elapsed=3.0)  # late: no block has arrived
    assert search.copy_seconds(5) == 3.0


def test_fast_part_lowers_nothing_and_costs_nothing_more():
    search = search_of([1.0, 2.0, 3.0], [1.0] * 3)
    search.note_part(2, 4, expected=2.0, elapsed=0.1)
    assert search.block_seconds(4, 5).tolist() == [1.0]
    assert (search.seconds(4), search.seconds(5)) == (1.0, 2.0)
    search.note_part(4, 9, expected=1.0, elapsed=1.0)  # another lease has brought more blocks
    assert search.block_seconds(9, 5).tolist() == []


def test_first_part_measures_a_store_for_the_other_blocks():
    search = search_of([0.0, 0.0, 0.0], [0.0] * 3)
    search.note_part(2, 3, expected=0.0, elapsed=1.5)
    assert search.block_seconds(3, 5).tolist() == [1.5, 3.0]
