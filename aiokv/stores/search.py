"""Searches: the keys to request from stores that need one request per key.

Such a store takes a limited number of keys at a time (``Store.max_lookup_keys``), so the lookup of
a long prompt has several rounds. When the deadline cuts off a round, the earlier ones count.

    prompt   | x x x x x x x x x x x x x x x x - - - - - - - - |   x: stored
    round 1  | ^           ^           ^           ^         ^ |   the end lies between two keys,
    round 2  |                          ^  ^  ^  ^             |   and the next round divides them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_KEYS: Final = np.zeros(0, np.intp)


class Search(Protocol):
    """Rounds of one lookup. The keys are numbered from 0 to N - 1."""

    def next_keys(self) -> NDArray[np.intp]:
        """Return the keys of the next round, ascending; empty at the end."""

    def note(self, keys: NDArray[np.intp], found: NDArray[np.bool_]) -> None:
        """Note the answers of a round, ``[stores, len(keys)]``."""

    def holders(self) -> NDArray[np.bool_]:
        """Return which stores have which keys, as far as it is known, ``[stores, N]``."""


class PrefixSearch(Search):
    """Search for the end of the unbroken run of keys that stores have together.

    The first round asks for the first key, the last one, and keys between them at equal distances.
    Each further round divides the interval between the last key of the run and the first key
    behind it. So one round finds a prompt of which nothing or all is stored, and few rounds find
    any other end.

    The stores are assumed to have all keys between two keys of the run: engines save the blocks of
    a prompt from its beginning. A key that is missing all the same is noticed by the load, and the
    hit ends before it. A store is assumed to have a key if it has one of the nearest keys that it
    was asked for.

    Args:
        num_stores: number of stores.
        held: ``[N]`` bool, keys that need not be asked for, because a store that comes before
            these stores has them.
        known: ``[N]`` bool, keys that any other store has.
        width: keys per round, at least 1.
    """

    def __init__(
        self, num_stores: int, held: NDArray[np.bool_], known: NDArray[np.bool_], width: int
    ) -> None:
        self._unheld = np.flatnonzero(~held)
        self._unknown = np.flatnonzero(~known)
        self._width = width
        self._asked = NO_KEYS
        self._found = np.zeros((num_stores, 0), np.bool_)
        self._num_keys = len(known)
        self._last = -1  # last key of the requested run
        self._end = len(known)  # first key that no store has; end of the search interval

    def next_keys(self) -> NDArray[np.intp]:
        """See :class:`Search`."""
        if not len(self._asked):
            return _spread(self._unheld, self._width, ends=True)
        return _spread(self._interval(), self._width, ends=False)

    def _interval(self) -> NDArray[np.intp]:
        """Return the keys that the end of the run may still be at."""
        return self._unknown[(self._unknown > self._last) & (self._unknown < self._end)]

    def note(self, keys: NDArray[np.intp], found: NDArray[np.bool_]) -> None:
        """See :class:`Search`."""
        asked = np.concatenate([self._asked, keys])
        order = np.argsort(asked)
        self._asked = asked[order]
        self._found = np.concatenate([self._found, found], axis=1)[:, order]
        relevant = np.isin(self._asked, self._unknown)
        unknown, is_found = self._asked[relevant], self._found[:, relevant].any(axis=0)
        missing = np.flatnonzero(~is_found)
        run = unknown[: missing[0]] if len(missing) else unknown
        self._last = int(run[-1]) if len(run) else -1
        self._end = int(unknown[missing[0]]) if len(missing) else self._num_keys

    def holders(self) -> NDArray[np.bool_]:
        """See :class:`Search`. Keys that were not asked for in time count as missing."""
        # Stores that may hold each key.
        holders = np.ones((len(self._found), self._num_keys), np.bool_)
        holders[:, self._unheld] = False
        if len(self._asked):
            above = np.searchsorted(self._asked, self._unheld).clip(max=len(self._asked) - 1)
            below = (np.searchsorted(self._asked, self._unheld, "right") - 1).clip(min=0)
            holders[:, self._unheld] = self._found[:, above] | self._found[:, below]
        holders[:, self._interval()] = False
        return holders


class KeySearch(Search):
    """Search for any of the keys, from the last one on: the end of a prompt counts most.

    Args:
        num_stores: number of stores.
        held: ``[N]`` bool, keys that need not be asked for.
        width: keys per round, at least 1.
    """

    def __init__(self, num_stores: int, held: NDArray[np.bool_], width: int) -> None:
        self._left = np.flatnonzero(~held)
        self._width = width
        self._holders = np.repeat(held[np.newaxis], num_stores, axis=0)

    def next_keys(self) -> NDArray[np.intp]:
        """See :class:`Search`."""
        return self._left[-self._width :]

    def note(self, keys: NDArray[np.intp], found: NDArray[np.bool_]) -> None:
        """See :class:`Search`."""
        self._holders[:, keys] = found
        self._left = self._left[: -len(keys)]

    def holders(self) -> NDArray[np.bool_]:
        """See :class:`Search`. Keys that were not asked for in time count as missing."""
        return self._holders


def _spread(keys: NDArray[np.intp], count: int, *, ends: bool) -> NDArray[np.intp]:
    """Return at most ``count`` keys at equal distances, with or without the first and last one."""
    if len(keys) <= count:
        return keys
    if ends:
        return keys[np.linspace(0, len(keys) - 1, count).round().astype(np.intp)]
    return keys[np.arange(1, count + 1) * (len(keys) + 1) // (count + 1) - 1]
