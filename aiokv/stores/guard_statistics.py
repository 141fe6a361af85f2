"""GuardStatistics: counts, durations and states of one store behind its guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from aiokv.stores.base import Result

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from aiokv.base.statistics import GuardStatistics


class GuardCounts:
    """Counters of :class:`GuardStatistics`."""

    def __init__(self) -> None:
        self.lookups = 0
        self.spared_lookups = 0
        self.lookup_keys = 0
        self.found_keys = 0
        self.loaded_blocks = 0
        self.saved_blocks = 0
        self.present_blocks = 0
        self.missing_blocks = 0
        self.wrong_blocks = 0
        self.refused_blocks = 0
        self.failed_blocks = 0
        self.timeouts = 0
        self.rejected = 0
        self.busy = 0

    def note(self, operation: Literal["load", "save"], results: NDArray[np.uint8]) -> None:
        """Count the results of a load or a save."""
        done = int(np.count_nonzero(results == Result.DONE))
        if operation == "load":
            self.loaded_blocks += done
        else:
            self.saved_blocks += done
        self.present_blocks += int(np.count_nonzero(results == Result.PRESENT))
        self.missing_blocks += int(np.count_nonzero(results == Result.MISSING))
        self.wrong_blocks += int(np.count_nonzero(results == Result.WRONG))
        self.refused_blocks += int(np.count_nonzero(results == Result.REFUSED))
        self.failed_blocks += int(np.count_nonzero(results == Result.FAILED))


def unavailable_stores(stores: Iterable[GuardStatistics]) -> list[str]:
    """Return the URLs of stores whose breaker is not closed, or that are not open yet."""
    return sorted({store.url for store in stores if not store.is_available})
