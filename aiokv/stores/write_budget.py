"""WriteBudget: the admission of a store whose writes are limited.

A block that is used often is worth a write more than one that is used once. While most of the
budget is left, each block is admitted at its first offer; the less of it is left, the more offers
a block needs. The scheduler offers a block when it is computed, and a refused one again at its next
use.

A budget of N bytes per day is a token bucket: N/8 may be written at once, and 7/8 N per day flow
in. So no 24 hours have more than N bytes and one block, and a quiet hour is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv import _native
from aiokv.base.logs import Log
from aiokv.stores.checksum import CHECKSUM_BYTES, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

REMEMBERED_OFFERS: Final = 1 << 20  # 16 MiB of counters
BURST_SHARE: Final = 1 / 8
MOST_OFFERS: Final = 4  # that a block needs
_DAY_SECONDS: Final = 86_400.0
_KEPT_SHARE: Final = 1 / 8  # of a burst, that may be spent between two writes of the file
_HEAD: Final = struct.Struct("<16sdd")  # format, Unix time, share of the burst that is left
_FORMAT: Final = b"aiokv offers 1\0\0"

_log: Final = Log(__name__)


class _Bucket:
    """The limit of the bytes of any ``seconds``.

    Attributes:
        seconds: as given.
        size: bytes that may be written at once.
        left: bytes that may be written now; below 0 after the last block.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.seconds = seconds
        self.size = self.left = limit_bytes * BURST_SHARE
        self._rate = (limit_bytes - self.size) / seconds
        self._filled_at: float | None = None

    def fill(self, now: float) -> None:
        """Add what has flowed in until ``now``, by the clock of the caller."""
        if self._filled_at is not None:
            self.add(now - self._filled_at)
        self._filled_at = now

    def add(self, seconds: float) -> None:
        """Add what flows in within ``seconds``."""
        self.left = min(self.size, self.left + max(0.0, seconds) * self._rate)


class WriteBudget:
    """Admission of the blocks of one store, for all groups. Used on one loop.

    Args:
        limits: ``(bytes, seconds)``: the most bytes that any period of ``seconds`` may have.
        path: file that keeps the offers and the budget of a day over a restart; None for none.
        clock: Unix time.
    """

    def __init__(
        self,
        limits: Sequence[tuple[int, float]],
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._buckets = [_Bucket(limit, seconds) for limit, seconds in limits]
        self._offers = _native.ReuseSketch(REMEMBERED_OFFERS, MOST_OFFERS)
        self._path = path
        self._clock = clock
        self._is_restored = False
        self._unkept_bytes = 0  # admitted since the file was written
        self._unkept_offers = 0
        self._has_reserve = False
        self._keeping: asyncio.Task[None] | None = None

    @property
    def left(self) -> float:
        """Share of the burst that is left, from 0 to 1, of the limit that is nearest."""
        return max(0.0, min(bucket.left / bucket.size for bucket in self._buckets))

    @property
    def needed_offers(self) -> int:
        """Offers after which a block is admitted, 1 to ``MOST_OFFERS``."""
        return min(MOST_OFFERS, 1 + int((1 - self.left) * MOST_OFFERS))

    def admit(self, keys: bytes, object_bytes: int, now: float) -> NDArray[np.bool_]:
        """Count an offer of each key, and return which of them may be written, ``[N]``.

        What is not written is to be given back by ``refund``.

        Args:
            keys: distinct keys.
            object_bytes: bytes that one object takes on the medium.
            now: time of the loop.
        """
        for bucket in self._buckets:
            bucket.fill(now)
        counts = self._offers.count(keys)
        admitted = counts + 1 >= self.needed_offers
        fitting = min(-(-bucket.left // object_bytes) for bucket in self._buckets)
        admitted &= np.cumsum(admitted) <= fitting
        num_bytes = int(np.count_nonzero(admitted)) * object_bytes
        self.refund(-num_bytes)
        self._unkept_bytes += num_bytes
        self._unkept_offers += len(counts)
        if self._is_due() and not (self._keeping and not self._keeping.done()):
            self._keeping = asyncio.get_running_loop().create_task(self._keep(_KEPT_SHARE * 2))
        return np.asarray(admitted)

    def refund(self, num_bytes: int) -> None:
        """Give back bytes that were admitted and not written."""
        for bucket in self._buckets:
            bucket.left = min(bucket.size, bucket.left + num_bytes)

    def _is_due(self) -> bool:
        size = max(bucket.size for bucket in self._buckets)
        is_old = self._unkept_offers > REMEMBERED_OFFERS // 16
        return self._path is not None and (is_old or self._unkept_bytes > _KEPT_SHARE * size)

    # --- restarts ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Restore what an earlier process has kept, at the first call.

        Without a file, the whole burst may be spent. A damaged file counts as a budget that is
        spent.
        """
        if self._is_restored or self._path is None:
            return
        self._is_restored = True
        try:
            kept = await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("store.budget_not_read", path=str(self._path), reason=str(error))
            kept = b""
        if not self._restore(kept):
            _log.warning("store.budget_damaged", path=str(self._path))

    def _restore(self, kept: bytes) -> bool:
        for bucket in self._buckets:
            bucket.left = 0
        body = kept[:-CHECKSUM_BYTES]
        if len(kept) < _HEAD.size or checksum(body) != kept[-CHECKSUM_BYTES:]:
            return False
        name, written_at, left = _HEAD.unpack_from(body)
        if name != _FORMAT:
            return False
        self._offers.restore(zlib.decompress(body[_HEAD.size :]))
        for bucket in self._buckets:
            bucket.left = left * bucket.size
            bucket.add(self._clock() - written_at)
        return True

    async def aclose(self) -> None:
        """Write the file, if anything was offered since the last write.

        Cancellation: the file is written as a whole, or not at all.
        """
        if self._keeping is not None:
            await asyncio.wait({self._keeping})
        if self._unkept_offers or self._has_reserve:
            await self._keep(0.0)

    async def _keep(self, reserve: float) -> None:
        """Write the file.

        Args:
            reserve: share of the burst that may be spent until the next write. After a crash, it
                counts as spent.
        """
        if self._path is None:
            return
        self._unkept_bytes = self._unkept_offers = 0
        self._has_reserve = reserve > 0
        head = _HEAD.pack(_FORMAT, self._clock(), max(0.0, self.left - reserve))
        counters, path = self._offers.counters(), self._path
        try:
            self.refund(-await asyncio.to_thread(_write, path, head, counters))
        except OSError as error:
            _log.warning("store.budget_not_kept", path=str(path), reason=str(error))


def _write(path: Path, head: bytes, counters: bytes) -> int:
    """Replace the file as a whole; return its length."""
    body = head + zlib.compress(counters, 1)
    path.parent.mkdir(0o750, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb", opener=_private) as file:
            file.write(body + checksum(body))
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    return len(body) + CHECKSUM_BYTES


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)
