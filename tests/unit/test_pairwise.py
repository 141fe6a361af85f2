"""`pairwise`: few rows with the same pairs of values."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

from tests.harness.pairwise import pairwise


def pairs(rows):
    """Return each pair of values of each two columns."""
    return {(a, row[a], b, row[b]) for row in rows for a, b in combinations(range(len(row)), 2)}


def test_each_pair_of_values_stays_and_most_rows_go():
    rows = list(product([1, 4, 5, 30, 131], [1, 7, 1000], "ab", "xyz"))
    chosen = pairwise(rows)
    assert pairs(chosen) == pairs(rows)
    assert len(chosen) <= 18  # of 90; 15 pairs of the first two parameters
    assert chosen == sorted(chosen, key=rows.index)


def test_rows_that_are_not_given_are_not_returned():
    ranks, blocks = [(1, 1), (1, 2), (2, 1), (4, 2)], [(16, 16), (64, 16), (48, 64)]
    rows = [first + second for first, second in product(ranks, blocks)]
    chosen = pairwise(rows)
    assert set(chosen) < set(rows)
    assert {row[:2] for row in chosen} == set(ranks)
    assert {row[2:] for row in chosen} == set(blocks)
    assert pairs(chosen) == pairs(rows)


def test_two_columns_keep_their_product():
    rows = list(product(range(3), range(4)))
    assert pairwise(rows) == rows


def test_random_rows_keep_their_pairs():
    for seed in range(20):
        random = Random(seed)
        columns = random.randint(2, 5)
        rows = [tuple(random.randrange(4) for _ in range(columns)) for _ in range(40)]
        chosen = pairwise(rows)
        assert pairs(chosen) == pairs(rows)
        assert len(set(chosen)) == len(chosen)


def test_no_rows():
    assert pairwise([]) == []
