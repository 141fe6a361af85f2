"""FetchLine: fetches for waiting requests, in order of arrival, a few at a time.

All fetches share the bandwidth of the stores. One after the other, each ends as early as it can,
and a request knows how long the fetches before it take.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

AT_A_TIME: Final = 2  # while one of them begins its next part, the other keeps the store busy


class Place:
    """The place of one request in line.

    Attributes:
        work: expected seconds of its fetch, alone on the stores, that are left since ``since``.
        since: time of ``work``; None before its turn.
    """

    def __init__(self, work: float) -> None:
        self.work = work
        self.since: float | None = None
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FetchLine:
    """Requests whose blocks are fetched, or will be.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fetching: set[Place] = set()
        self._waiting: dict[Place, None] = {}  # in order

    @property
    def is_empty(self) -> bool:
        """True when no request has a place."""
        return not self._fetching and not self._waiting

    @property
    def seconds(self) -> float:
        """Expected time until all fetches of the line have ended."""
        now = self._clock()
        total = sum(place.work for place in self._waiting)
        for place in self._fetching:
            assert place.since is not None
            total += max(place.work - (now - place.since) / len(self._fetching), 0.0)
        return total

    @property
    def num_fetching(self) -> int:
        """Number of requests that share the stores now."""
        return len(self._fetching)

    def enter(self, work: float) -> Place:
        """Take a place. ``leave`` must follow.

        Args:
            work: expected seconds of the fetch, alone on the stores.
        """
        place = Place(work)
        self._waiting[place] = None
        self._give_turns()
        return place

    def note(self, place: Place, work: float) -> None:
        """Note the seconds that are left of a fetch whose turn it is."""
        place.work, place.since = work, self._clock()

    def leave(self, place: Place) -> None:
        """Give the place back. Idempotent."""
        self._waiting.pop(place, None)
        self._fetching.discard(place)
        self._give_turns()

    def _give_turns(self) -> None:
        while self._waiting and len(self._fetching) < AT_A_TIME:
            place = next(iter(self._waiting))
            del self._waiting[place]
            self._fetching.add(place)
            self.note(place, place.work)
            if not place.turn.done():
                place.turn.set_result(None)
