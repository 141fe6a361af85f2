"""WriteBudget: the admission of a store whose writes are limited.

A block that is used again is worth a write more than one that is used once. While enough of the
budget is left, each block is admitted at its first offer; the rest is for blocks that are offered a
second time. The scheduler offers a block when it is computed, and a refused one again at its next
use.

The budget limits any 24 hours, not a rate: what a quiet night leaves is there for the day.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import struct
import time
import zlib
from collections import deque
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
REUSED_SHARE: Final = 1 / 8  # of the budget, for blocks that are offered a second time
_DAY_SECONDS: Final = 86_400.0
_PARTS: Final = 48  # of a window: a part of a day is half an hour
_KEPT_SHARE: Final = 1 / 64  # of the budget, that may be spent between two writes of the file
_HEAD: Final = struct.Struct(f"<16sd{_PARTS + 1}d")  # format, Unix time, shares of the parts
_FORMAT: Final = b"aiokv offers 2\0\0"

_log: Final = Log(__name__)


class _Window:
    """The limit of the bytes of any ``seconds``.

    The window has ``_PARTS`` parts, and the one that has begun. Bytes count until ``seconds`` after
    the end of their part.

    Attributes:
        seconds: as given.
        size: bytes that any ``seconds`` may have.
        parts: bytes of each part, the newest one last.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.seconds = seconds
        self.size = limit_bytes
        self.parts = deque([0.0] * (_PARTS + 1), _PARTS + 1)
        self._part_seconds = seconds / _PARTS
        self._ends_at: float | None = None  # end of the newest part, by the clock of the caller

    @property
    def left(self) -> float:
        """Bytes that may be written now; below 0 after the last block."""
        return self.size - sum(self.parts)

    def move(self, now: float) -> None:
        """Begin the parts until ``now``."""
        if self._ends_at is None:
            self._ends_at = now + self._part_seconds
        if now >= self._ends_at:
            num_parts = 1 + int((now - self._ends_at) / self._part_seconds)
            self._ends_at += num_parts * self._part_seconds
            self.skip(num_parts)

    def skip(self, num_parts: int) -> None:
        """Begin parts without bytes."""
        self.parts.extend([0.0] * min(num_parts, len(self.parts)))

    def add(self, num_bytes: int) -> None:
        """Count bytes as written now."""
        self.parts[-1] += num_bytes

    def refund(self, num_bytes: float, admitted_at: float) -> None:
        """Uncount bytes in the part of their admission, and in earlier ones if it has fewer."""
        if self._ends_at is None:
            return
        # The tolerance is for the rounding of times: a part begins at the time of an admission.
        num_parts = math.ceil((self._ends_at - admitted_at) / self._part_seconds - 1e-6)
        num_newer = max(0, num_parts - 1)
        for part in range(len(self.parts) - 1 - num_newer, -1, -1):
            uncounted = min(num_bytes, self.parts[part])
            self.parts[part] -= uncounted
            num_bytes -= uncounted


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
        self._windows = [_Window(limit, seconds) for limit, seconds in limits]
        days = (window for window in self._windows if window.seconds == _DAY_SECONDS)
        self._day = next(days, None)
        self._offers = _native.ReuseSketch(REMEMBERED_OFFERS, 1)
        self._path = path
        self._clock = clock
        self._is_restored = False
        self._unkept_bytes = 0  # admitted since the file was written
        self._unkept_offers = 0
        self._has_reserve = False
        self._keeping: asyncio.Task[None] | None = None

    @property
    def left(self) -> float:
        """Share of the budget that is left, from 0 to 1, of the limit that is nearest."""
        return max(0.0, min(window.left / window.size for window in self._windows))

    def admit(self, keys: bytes, object_bytes: int, now: float) -> NDArray[np.bool_]:
        """Count an offer of each key, and return which of them may be written, ``[N]``.

        What is not written is to be given back by ``refund``.

        Args:
            keys: distinct keys.
            object_bytes: bytes that one object takes on the medium.
            now: time of the loop.
        """
        for window in self._windows:
            window.move(now)
        admitted = self._offers.count(keys) > 0
        admitted |= np.cumsum(~admitted) <= self._fitting(object_bytes, REUSED_SHARE)
        admitted &= np.cumsum(admitted) <= self._fitting(object_bytes, 0.0)
        num_bytes = int(np.count_nonzero(admitted)) * object_bytes
        for window in self._windows:
            window.add(num_bytes)
        self._unkept_bytes += num_bytes
        self._unkept_offers += len(admitted)
        if self._is_due() and not (self._keeping and not self._keeping.done()):
            self._keeping = asyncio.get_running_loop().create_task(self._keep(_KEPT_SHARE * 2))
        return np.asarray(admitted)

    def _fitting(self, object_bytes: int, reserve: float) -> float:
        """Return the number of objects after which only a share of a budget is left."""
        lefts = (window.left - reserve * window.size for window in self._windows)
        return -(-min(lefts) // object_bytes)

    def refund(self, num_bytes: int, admitted_at: float) -> None:
        """Give back bytes that were admitted at a time of the loop and not written."""
        for window in self._windows:
            window.refund(num_bytes, admitted_at)

    def _is_due(self) -> bool:
        limit = math.inf if self._day is None else _KEPT_SHARE * self._day.size
        is_old = self._unkept_offers > REMEMBERED_OFFERS // 16
        return self._path is not None and (is_old or self._unkept_bytes > limit)

    # --- restarts ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Restore what an earlier process has kept, at the first call.

        Without a file, the whole budget may be spent. After a damaged file, nothing is written for
        a day.
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
        for window in self._windows:
            window.add(window.size)
        body = kept[:-CHECKSUM_BYTES]
        if len(kept) < _HEAD.size or checksum(body) != kept[-CHECKSUM_BYTES:]:
            return False
        name, written_at, *shares = _HEAD.unpack_from(body)
        if name != _FORMAT:
            return False
        self._offers.restore(zlib.decompress(body[_HEAD.size :]))
        for window in self._windows:
            window.parts.extend(share * window.size for share in shares)
            window.skip(int(max(0.0, self._clock() - written_at) / window.seconds * _PARTS))
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
            reserve: share of the budget that may be spent until the next write. After a crash, it
                counts as spent.
        """
        if self._path is None:
            return
        self._unkept_bytes = self._unkept_offers = 0
        self._has_reserve = reserve > 0
        window = self._day or self._windows[0]
        shares = [part / window.size for part in window.parts]
        shares[-1] += reserve
        head = _HEAD.pack(_FORMAT, self._clock(), *shares)
        counters, path = self._offers.counters(), self._path
        try:
            num_bytes = await asyncio.to_thread(_write, path, head, counters)
            for window in self._windows:
                window.add(num_bytes)
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
