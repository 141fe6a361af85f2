"""Bundles of consecutive blocks: their bytes, their ends, and the search for them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from aiokv.stores.bundles import MAX_HEADER_BYTES, Bundle, BundleIndex, Cuts, PrefixWalk

OBJECT_BYTES = 1064


def keys_of(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


@pytest.mark.parametrize("count", [1, 2, 128])
def test_a_bundle_is_read_as_it_was_written(count: int):
    bundle = Bundle(keys_of(*range(count)), OBJECT_BYTES)
    content = bundle.header + bytes(count * OBJECT_BYTES)
    assert len(content) == bundle.num_bytes
    assert bundle.offset(count - 1) + OBJECT_BYTES == len(content)
    assert Bundle.parse(bundle.keys[0], content[:MAX_HEADER_BYTES], len(content)) == bundle


@pytest.mark.parametrize("damage", ["key", "count", "cut", "longer", "name"])
def test_a_damaged_bundle_has_no_known_blocks(damage: str):
    bundle = Bundle(keys_of(1, 2, 3), OBJECT_BYTES)
    content = bytearray(bundle.header + bytes(3 * OBJECT_BYTES))
    first = bundle.keys[0]
    if damage == "key":
        content[40] ^= 1
    elif damage == "count":
        content[16] ^= 1
    elif damage == "cut":
        del content[-1]
    elif damage == "longer":
        content.append(0)
    else:
        (first,) = keys_of(2)
    found = Bundle.parse(first, bytes(content), len(content))
    assert found == Bundle([first], len(content))


def test_ends_depend_on_the_keys_alone():
    keys = keys_of(*range(1_000))
    cuts = Cuts(2 << 20)  # mean 16, longest 32
    follows = np.ones(1_000, np.bool_)
    runs = cuts.runs(keys, follows)
    assert [first for first, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == 1_000
    lengths = [end - first for first, end in runs]
    assert max(lengths) <= 32
    assert 1_000 / len(runs) > 10
    later = cuts.runs(keys[runs[3][0] :], follows[runs[3][0] :])  # a save that begins later
    assert [first + runs[3][0] for first, _ in later] == [first for first, _ in runs[3:]]


def test_blocks_of_two_prompts_are_never_in_one_bundle():
    follows = np.array([True, True, False, True, False, False])
    runs = Cuts(1 << 10).runs(keys_of(1, 2, 3, 4, 5, 6), follows)
    assert {2, 4, 5} <= {first for first, _ in runs}


def test_large_objects_are_not_bundled():
    runs = Cuts(100 << 20).runs(keys_of(1, 2, 3), np.ones(3, np.bool_))
    assert runs == [(0, 1), (1, 2), (2, 3)]


def test_the_index_forgets_the_oldest_bundles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aiokv.stores.bundles._REMEMBERED_BLOCKS", 6)
    index = BundleIndex(0)
    keys = keys_of(*range(9))
    for first in (0, 3, 6):
        index.add(Bundle(keys[first : first + 3], OBJECT_BYTES))
    assert [index.find(key) is not None for key in keys] == [False] * 3 + [True] * 6
    index.add(Bundle([keys[3], *keys[7:]], OBJECT_BYTES))  # replaces 3, and has 7 and 8, too
    index.drop(keys[6])
    assert [index.find(key) is not None for key in keys[3:]] == [True, False, False, False] + [
        True
    ] * 2
    index.drop_label(keys[3][-5:])
    assert all(index.find(key) is None for key in keys)


def walked(keys: list[bytes], stored: list[Bundle], cuts: Cuts) -> tuple[int, list[int]]:
    """Return the end that a walk finds, and the number of requests of each round."""
    by_name = {bundle.keys[0]: bundle for bundle in stored}
    index, rounds = BundleIndex(0), []
    walk = PrefixWalk(keys, index, cuts, 64)
    while asked := walk.next_keys():
        rounds.append(len(asked))
        for name in asked:
            if name in by_name:
                index.add(by_name[name])
    return walk.end, rounds


def test_a_new_prompt_costs_one_request():
    assert walked(keys_of(*range(1_280)), [], Cuts(OBJECT_BYTES)) == (0, [1])


@pytest.mark.parametrize("end", [1, 5, 64, 640, 1_279, 1_280])
def test_the_end_of_a_stored_prefix_is_found_in_few_rounds(end: int):
    keys, cuts = keys_of(*range(1_280)), Cuts(OBJECT_BYTES)
    runs = cuts.runs(keys[:end], np.ones(end, np.bool_))
    stored = [Bundle(keys[first:last], OBJECT_BYTES) for first, last in runs]
    found, rounds = walked(keys, stored, cuts)
    assert found == end
    assert len(rounds) <= 4
    assert sum(rounds) <= 2 * len(runs) + 16


def test_turns_and_single_blocks_behind_one_another_are_found():
    keys, cuts = keys_of(*range(400)), Cuts(OBJECT_BYTES)
    stored, begin = [], 0
    for length in (100, 30, *[1] * 40, 80):  # a turn, another one, generated blocks, a turn
        part = keys[begin : begin + length]
        for first, last in cuts.runs(part, np.ones(length, np.bool_)):
            stored.append(Bundle(part[first:last], OBJECT_BYTES))
        begin += length
    found, rounds = walked(keys, stored, cuts)
    assert found == begin
    assert len(rounds) <= 16


def test_prompts_that_part_within_a_bundle_share_its_first_blocks():
    keys, cuts = keys_of(*range(20)), Cuts(64 << 20)
    other = keys[:3] + keys_of(*range(100, 110))
    cuts = Cuts(OBJECT_BYTES)
    stored = [Bundle(other, OBJECT_BYTES), Bundle(keys[3:], OBJECT_BYTES)]
    assert walked(keys, stored, cuts)[0] == 20
    assert walked(keys, stored[:1], cuts)[0] == 3
