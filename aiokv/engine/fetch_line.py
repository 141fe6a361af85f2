"""FetchLine: queue of the fetches for waiting requests, in order of arrival.

All fetches share the bandwidth of the stores. The first fetches end sooner if the later ones wait,
and the wait of a request can be estimated from the fetches before it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

AT_A_TIME: Final = 2  # while one fetch begins its next part, the other keeps the store busy


class Place:
    """Place of one request in the queue.

    Attributes:
        work: expected seconds that the rest of the fetch takes without other fetches, as of
            ``since``.
        since: time of the estimate ``work``; None before the turn of the request.
        turn: is done when the request may fetch.
    """

    def __init__(self, work: float) -> None:
        self.work = work
        self.since: float | None = None
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FetchLine:
    """Queue of the requests that fetch blocks or wait to fetch them.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fetching: set[Place] = set()
        self._waiting: dict[Place, None] = {}  # in order of arrival

    @property
    def is_empty(self) -> bool:
        """True if no request has a place."""
        return not self._fetching and not self._waiting

    @property
    def seconds(self) -> float:
        """Expected seconds until all fetches in the queue have ended."""
        now = self._clock()
        total = sum(place.work for place in self._waiting)
        for place in self._fetching:
            assert place.since is not None
            total += max(place.work - (now - place.since) / len(self._fetching), 0.0)
        return total

    @property
    def num_fetching(self) -> int:
        """Number of requests that fetch now."""
        return len(self._fetching)

    def enter(self, work: float) -> Place:
        """Add a request at the end. The caller must call ``leave`` later.

        Args:
            work: expected seconds that the fetch takes without other fetches.
        """
        place = Place(work)
        self._waiting[place] = None
        self._give_turns()
        return place

    def note(self, place: Place, work: float) -> None:
        """Set the expected seconds that the rest of a running fetch takes."""
        place.work, place.since = work, self._clock()

    def leave(self, place: Place) -> None:
        """Remove a request from the queue. Idempotent."""
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
