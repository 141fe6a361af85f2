"""Searches: the end of a stored prefix is found with few keys."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.stores.search import KeySearch, PrefixSearch, Search


def flags(length: int, keys: object) -> np.ndarray:
    """Return ``[length]`` bool that are True for the keys."""
    found = np.zeros(length, np.bool_)
    found[np.array(list(keys), np.intp)] = True
    return found


def rounds(search: Search, stored: np.ndarray, limit: int = 1_000) -> list[np.ndarray]:
    """Answer the rounds of a search, at most ``limit``, from ``[stores, N]``; return their keys."""
    asked: list[np.ndarray] = []
    while len(asked) < limit and len(keys := search.next_keys()):
        assert (np.diff(keys) > 0).all()
        asked.append(keys)
        search.note(keys, stored[:, keys])
    return asked


def run_of(found: np.ndarray) -> int:
    """Return the number of leading keys that a store has."""
    anywhere = found.any(axis=0)
    return len(anywhere) if anywhere.all() else int(anywhere.argmin())


def prefix_search(stored: np.ndarray, width: int = 4) -> PrefixSearch:
    none = np.zeros(stored.shape[1], np.bool_)
    return PrefixSearch(len(stored), none, none, width)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 64])
def test_each_end_of_a_prefix_is_found(width):
    for length in (1, 2, 3, 5, 63, 64, 65, 66, 200):
        for end in range(length + 1):
            stored = flags(length, range(end))[np.newaxis]
            search = prefix_search(stored, width=width)
            asked = rounds(search, stored)
            assert run_of(search.holders()) == end
            assert not search.holders()[0, end:].any()
            assert all(len(keys) <= width for keys in asked)
            every = np.concatenate(asked)
            assert len(set(every.tolist())) == len(every), "a key is asked for once"


@pytest.mark.parametrize(("end", "most_rounds"), [(0, 1), (1280, 1), (1279, 2), (700, 2)])
def test_few_rounds_find_the_end_of_a_long_prompt(end, most_rounds):
    stored = flags(1280, range(end))[np.newaxis]
    assert len(rounds(prefix_search(stored, width=64), stored)) <= most_rounds


def test_number_of_rounds_grows_with_the_logarithm_of_the_length():
    most = max(
        len(rounds(prefix_search(stored, width=4), stored))
        for stored in (flags(2048, range(end))[np.newaxis] for end in range(0, 2049, 7))
    )
    assert most <= 6


def test_keys_that_another_store_has_are_not_asked_for_again():
    stored = flags(100, range(40, 70))[np.newaxis]
    known = flags(100, range(40))
    search = PrefixSearch(1, known, known, 4)
    asked = np.concatenate(rounds(search, stored))
    assert asked.min() == 40
    found = search.holders()
    assert found[0, :70].all()
    assert not found[0, 70:].any()


def test_run_of_two_stores_together_is_found_whichever_store_has_its_begin():
    for old, new in ((range(500), range(500, 900)), (range(500, 900), range(500))):
        stored = np.stack([flags(1000, old), flags(1000, new)])
        search = prefix_search(stored)
        rounds(search, stored)
        holders = search.holders()
        assert run_of(holders) == 900
        assert (holders & stored)[:, :900].any(axis=0).all(), "a key has no store that has it"


def test_stores_that_share_a_prompt_key_by_key_are_searched_together():
    stored = np.stack([flags(64, range(0, 40, 2)), flags(64, range(1, 40, 2))])
    search = prefix_search(stored, width=64)
    rounds(search, stored)
    assert (search.holders() == stored).all()


def test_later_store_that_has_all_keys_lets_one_round_sample_the_first_ones():
    known = flags(1000, range(1000))
    stored = flags(1000, range(600))[np.newaxis]
    search = PrefixSearch(1, np.zeros(1000, np.bool_), known, 8)
    assert len(rounds(search, stored)) == 1
    assert search.holders()[0, :600].all()
    assert not search.holders()[0, 800:].any()


def test_missing_key_inside_the_run_ends_it_or_is_left_to_the_load():
    stored = flags(1000, set(range(1000)) - {333})[np.newaxis]
    search = prefix_search(stored, width=4)  # asks for 0, 333, 666 and 999
    rounds(search, stored)
    assert run_of(search.holders()) == 333
    stored = flags(1000, set(range(1000)) - {334})[np.newaxis]
    search = prefix_search(stored, width=4)
    rounds(search, stored)
    assert run_of(search.holders()) == 1000


def test_search_that_is_cut_off_keeps_what_it_has_found():
    stored = flags(1000, range(900))[np.newaxis]
    ends = []
    for limit in range(6):
        search = prefix_search(stored, width=4)
        rounds(search, stored, limit)
        ends.append(run_of(search.holders()))
    assert ends[0] == 0
    assert ends[1] == 667
    assert ends == sorted(ends)
    assert ends[-1] == 900


def test_objects_are_asked_for_from_the_last_one_on():
    stored = flags(10, [1, 4, 8])[np.newaxis]
    held = flags(10, [9])
    search = KeySearch(1, held, 4)
    assert [keys.tolist() for keys in rounds(search, stored)] == [[5, 6, 7, 8], [1, 2, 3, 4], [0]]
    assert np.flatnonzero(search.holders()[0]).tolist() == [1, 4, 8, 9]


def test_objects_of_rounds_that_were_not_answered_are_missing():
    stored = flags(10, [1, 4, 8])[np.newaxis]
    search = KeySearch(1, np.zeros(10, np.bool_), 4)
    rounds(search, stored, 1)
    assert np.flatnonzero(search.holders()[0]).tolist() == [8]
