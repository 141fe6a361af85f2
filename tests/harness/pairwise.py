"""A selection of the parameters of a test that keeps each pair of values."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def pairwise(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return few of the rows that have the same pairs of values as all of them.

    Most errors need one value or two, so a test of these rows finds nearly what a test of the
    full product finds. Rows that are not given are never returned: leave out what cannot be.

    Args:
        rows: values of the parameters, e.g. ``itertools.product(lengths, steps, models)``; each
            value must have a ``repr`` of its own.

    Returns:
        Rows in the order in which they were given. For each two columns, each pair of values
        that is in some of ``rows`` is in one of these.
    """
    given = list(rows)
    pairs = [_pairs(row) for row in given]
    missing: set[tuple[int, str, int, str]] = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(given)), key=lambda i: len(pairs[i] & missing))  # the first of equals
        missing -= pairs[best]
        chosen.append(best)
    return [given[i] for i in sorted(chosen)]


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, str, int, str]]:
    """Return each pair of values of a row, with the numbers of their columns."""
    cells = [(column, repr(value)) for column, value in enumerate(row)]
    return {(*first, *second) for first, second in combinations(cells, 2)}
