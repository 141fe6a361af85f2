"""Room: free slots for saves, by growth of the files or by eviction."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.base.logs import Log
from aiokv.base.units import format_bytes
from aiokv.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv._native import SlotTable
    from aiokv.stores.disk.committer import Committer
    from aiokv.stores.disk.layouts import OtherLayouts
    from aiokv.stores.disk.segments import Segments
    from aiokv.stores.disk.volume import Volume
    from aiokv.stores.threads import StoreThreads

log = Log(__name__)

_GROWTH_BYTES: Final = 256 << 20  # growth at a time, if it is 1/16 of the store
_EVICTED_AT_ONCE: Final = 1_024  # most blocks per pass: about 0.5 ms
_MAX_SPARE_SLOTS: Final = 4_096
_SPARE_BYTES: Final = 256 << 20  # bytes written per flush of a full store, if 1/16 of it
_JOURNAL_BYTES: Final = 4 << 20  # for a journal that is not compacted yet, and its successor
_JOURNAL_BYTES_PER_SLOT: Final = 256
_TRIES: Final = 8  # other saves may take the slots that were freed for one

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Room:
    """Reserves slots.

    A full store keeps a few slots free ahead of the next saves, so that these need not wait until
    the removal of a key is durable.

    Args:
        others: their segments are removed when the store needs the space to grow.
        min_free_bytes: bytes of the file system that growth of the store leaves free.

    Attributes:
        evicted_blocks: keys that were removed to make room.
    """

    def __init__(
        self,
        volume: Volume,
        table: SlotTable,
        segments: Segments,
        committer: Committer,
        threads: StoreThreads,
        others: OtherLayouts,
        *,
        slot_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self.evicted_blocks = 0
        self._volume = volume
        self._table = table
        self._segments = segments
        self._committer = committer
        self._threads = threads
        self._others = others
        self._slot_bytes = slot_bytes
        self._asked_free_bytes = min_free_bytes
        self._min_free_bytes = max(
            min_free_bytes, _JOURNAL_BYTES + table.capacity * _JOURNAL_BYTES_PER_SLOT
        )
        self._is_full = False  # True if the files cannot grow
        self._has_logged_full = False
        self._lock = asyncio.Lock()

    async def reserve(self, count: int) -> NDArray[np.int32]:
        """Take ``count`` slots, or as many as there can be.

        Raises:
            StoreError: the disk failed.

        Cancellation: no slot is taken.
        """
        if self._committer.settlements == 0:  # free slots may have a key again after a power cut
            await self._committer.settle()
        slots = self._table.reserve(count)
        if len(slots) < count:
            try:
                async with self._lock:
                    for _ in range(_TRIES):
                        missing = count - len(slots)
                        if missing == 0 or not await self._make_free(missing):
                            break
                        slots = np.concatenate([slots, self._table.reserve(missing)])
            except BaseException:
                self._table.release(slots)
                raise
        elif self._is_full and self._table.available + self._table.unsettled < self._spare_slots:
            self.evicted_blocks += self._table.evict(min(self._spare_slots, _EVICTED_AT_ONCE))
            self._committer.settle_soon()
        return slots

    @property
    def _spare_slots(self) -> int:
        """Number of slots that a full store keeps free: a share of the slots in its files."""
        slots = self._table.limit
        share = max(slots // 256, min(slots // 16, _SPARE_BYTES // self._slot_bytes))
        return min(_MAX_SPARE_SLOTS, share)

    async def _make_free(self, missing: int) -> bool:
        """Make up to ``missing`` slots free; return False if there can be none."""
        if self._table.available > 0:
            return True
        return await self._grow(missing) or await self._evict(missing)

    async def _grow(self, missing: int) -> bool:
        room = self._table.capacity - self._table.limit
        if room <= 0:
            self._is_full = True
            return False
        chunk = min(_GROWTH_BYTES // self._slot_bytes, self._table.capacity // 16)
        wanted = min(room, max(missing, chunk))
        try:
            grown = await self._threads.run(lambda _: self._extend(wanted))
        except OSError as error:
            raise StoreError(
                f"the disk store {str(self._volume.path)!r} cannot grow: {error}"
            ) from error
        self._table.grow(grown)
        self._is_full = grown == 0
        if self._is_full and not self._has_logged_full:
            self._has_logged_full = True
            log.warning(
                "disk.cannot_grow",
                path=str(self._volume.path),
                slots=self._table.limit,
                capacity_slots=self._table.capacity,
                min_free_bytes=self._min_free_bytes,
                reason=await self._threads.run(lambda _: self._reason_of_no_growth()),
            )
        return grown > 0

    def _reason_of_no_growth(self) -> str:
        if self._volume.free_bytes() - self._asked_free_bytes < self._slot_bytes:
            return "the file system has no more space; the store keeps the slots it has"
        return (
            f"the store keeps {format_bytes(self._min_free_bytes)} free for the journal of as many "
            "slots as its option bytes allows; use a smaller one"
        )

    def _extend(self, wanted: int) -> int:
        """Extend the files by up to ``wanted`` slots, in the thread; return the number."""
        while not (grown := self._extend_within_space(wanted)) and self._others.remove_segment():
            pass
        return grown

    def _extend_within_space(self, wanted: int) -> int:
        """Extend the files, as far as the file system and the other layouts leave space."""
        free = self._volume.free_bytes() - self._min_free_bytes
        allowed = (self._table.capacity - self._table.limit) * self._slot_bytes
        spare = min(free, allowed - self._others.num_bytes)
        wanted = min(wanted, spare // self._slot_bytes)
        while wanted > 0:
            try:
                return self._segments.extend(wanted)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                wanted //= 2
        return 0

    async def _evict(self, missing: int) -> bool:
        left = missing + self._spare_slots - self._table.unsettled
        while left > 0:
            evicted = self._table.evict(min(left, _EVICTED_AT_ONCE))
            self.evicted_blocks += evicted
            left -= evicted
            if evicted == 0:
                break
            await asyncio.sleep(0)
        if self._table.unsettled == 0:
            return self._table.available > 0
        await self._committer.settle()
        return True
