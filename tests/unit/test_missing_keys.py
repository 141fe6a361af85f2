"""MissingKeys: what a store is known not to have, and the filter of all its keys."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from aiokv.stores import missing
from aiokv.stores.base import KEY_BYTES, split_keys
from aiokv.stores.missing import KeyFilter, MissingKeys

CASES = 100_000


def random_keys(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(count * KEY_BYTES)


@pytest.mark.parametrize("num_keys", [1, 900, 1024, 10_000, 63 << 10])
def test_filter_finds_what_was_added_and_at_most_1_percent_of_the_rest(monkeypatch, num_keys):
    monkeypatch.setattr(missing, "FIRST_LAYER_KEYS", 1 << 10)  # as full, with fewer keys
    keys = random_keys(num_keys, 1)
    added = KeyFilter()
    for first in range(0, len(keys), 1000 * KEY_BYTES):
        added.add(keys[first : first + 1000 * KEY_BYTES])
    assert added.has(keys).all()
    assert not added.is_full
    assert added.has(random_keys(CASES, 2)).mean() <= 0.01
    some = split_keys(keys)[:100] + split_keys(random_keys(900, 3))
    one_by_one = [bool(added.has(key)[0]) for key in some]
    assert one_by_one == added.has(b"".join(some)).tolist()
    assert 0.98 * num_keys <= added.num_keys <= num_keys
    assert added.num_bytes <= max(2 << 10, 6 * num_keys)


def test_filter_refuses_keys_beyond_its_memory(monkeypatch):
    monkeypatch.setattr(missing, "FIRST_LAYER_KEYS", 1 << 10)
    added = KeyFilter()
    added.add(random_keys(70 << 10, 1))
    assert added.is_full
    assert added.num_keys == 63 << 10
    assert added.num_bytes == 63 << 11


def test_filter_that_grows_copies_nothing(monkeypatch):
    monkeypatch.setattr(missing, "FIRST_LAYER_KEYS", 1 << 12)
    added = KeyFilter()
    keys = random_keys(35 << 12, 1)
    tracemalloc.start()
    try:
        for first in range(0, len(keys), 256 * KEY_BYTES):
            used, num_bytes = tracemalloc.get_traced_memory()[0], added.num_bytes
            tracemalloc.reset_peak()
            added.add(keys[first : first + 256 * KEY_BYTES])
            peak = tracemalloc.get_traced_memory()[1] - used
            assert peak <= added.num_bytes - num_bytes + (128 << 10)
    finally:
        tracemalloc.stop()
    assert added.num_bytes == 63 << 13  # six layers


def test_missing_keys_are_remembered_for_seconds_and_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(missing, "REMEMBERED_KEYS", 3)
    known = MissingKeys(5.0)
    keys = [random_keys(1, seed) for seed in range(4)]
    for second, key in enumerate(keys[:3]):
        known.note_missing(key, float(second))
    known.note_missing(keys[0], 3.0)  # now the newest
    assert not known.may_have_any(b"".join(keys[:3]), 4.0)
    assert known.may_have_any(keys[1], 6.0)
    assert not known.may_have_any(keys[0], 6.0)
    known.note_missing(keys[3], 4.0)
    assert known.may_have_any(keys[1], 4.0)  # the oldest one was forgotten
    known.note_stored(keys[2])
    assert known.may_have_any(keys[2], 4.0)
    assert not known.may_have_any(keys[0], 4.0)
