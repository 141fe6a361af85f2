"""GuardStatistics: counts, durations and states of one store behind its guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from aiokv.stores.base import Result, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class GuardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one store since its engine was made.

    Attributes:
        kind: ``Store.kind``.
        url: ``Store.url``.
        rank: rank that has the store; None without ranks.
        pool: ``"host"`` for blocks, ``"host_state"`` for snapshots of recurrent state, and
            ``"host_window:"`` with the name of a window group for its blocks; the counts of blocks
            are about what the pool has.
        reading: ``"closed"`` while lookups and loads pass, ``"open"`` or ``"probing"`` while the
            store counts as unavailable, ``"off"`` for a store that is not read.
        saving: likewise for saves.
        failure: reason why the store could not be opened yet; empty when it is open, and while it
            is closed because host memory is asleep.
        opened: number of times that the store became unavailable.
        lookups: calls, several per lookup of a long prompt with ``Store.max_lookup_keys``;
            ``lookup_keys`` the keys asked for, of which ``found_keys`` were found.
        loaded_blocks: blocks that were loaded and verified.
        saved_blocks: blocks that the store has written.
        present_blocks: blocks that were to be saved, and that the store already had.
        missing_blocks: blocks that a load did not find.
        wrong_blocks: blocks whose bytes were wrong; they were quarantined.
        refused_blocks: blocks that the store did not take.
        failed_blocks: blocks of operations that failed, were rejected, or got no slot.
        loaded_bytes: payload of ``loaded_blocks``.
        saved_bytes: payload of ``saved_blocks``.
        timeouts: operations that exceeded their deadline.
        rejected: calls that were not made because the store was unavailable.
        busy: operations that got no slot before their deadline.
        running: operations that the store executes now, ``overdue`` of them beyond their deadline.
        lookup_seconds: average duration of the newest calls of ``lookups``, over all pools of the
            store; so are the following ones. Extreme durations are bounded, and old ones fade.
        load_seconds: likewise, of loads of less than 256 KiB.
        load_bytes_per_second: likewise, of larger loads, verification included.
        save_seconds: as ``load_seconds``, of saves that have written blocks.
        save_bytes_per_second: as ``load_bytes_per_second``, of the blocks that were written.
        store: counters of the store itself; unknown ones while it is closed.
    """

    kind: str
    url: str
    reading: str
    saving: str
    opened: int
    lookups: int
    lookup_keys: int
    found_keys: int
    loaded_blocks: int
    saved_blocks: int
    present_blocks: int
    missing_blocks: int
    wrong_blocks: int
    refused_blocks: int
    failed_blocks: int
    loaded_bytes: int
    saved_bytes: int
    timeouts: int
    rejected: int
    busy: int
    running: int
    overdue: int
    lookup_seconds: float
    load_seconds: float
    load_bytes_per_second: float
    save_seconds: float
    save_bytes_per_second: float
    store: StoreStatistics
    rank: int | None = None
    pool: str = "host"
    failure: str = ""


class GuardCounts:
    """Counters of :class:`GuardStatistics`."""

    def __init__(self) -> None:
        self.lookups = 0
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
    return sorted({s.url for s in stores if not {s.reading, s.saving} <= {"closed", "off"}})
