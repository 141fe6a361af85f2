"""Committer: writes the journal in groups, and makes it durable.

A cycle of the committer writes all records that have gathered: removals first, then the adds of
saves whose data is written. After the write, which ``kill -9`` cannot undo, the adds can be found
and their saves end. A cycle *settles* when it also

1. flushes the data of all segments that were written,
2. writes a record which says so behind the adds, and
3. flushes the journal.

Only then can slots be reused that lost their key: a power cut cannot bring the old record back. The
replay ignores adds of an earlier boot that no settled cycle has covered.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv import _native
from aiokv.base.logs import Log
from aiokv.errors import StoreError
from aiokv.stores.disk.journal import Journal
from aiokv.stores.disk.layout import segment_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.stores.disk.io import DiskIo
    from aiokv.stores.disk.recovery import Recovered
    from aiokv.stores.disk.volume import Volume
    from aiokv.stores.threads import StoreThreads

MIN_RECORDS = 16_384  # a journal with fewer records is not compacted
_RETRY_SECONDS: Final = 1.0  # least pause after a failure
_SNAPSHOT_RECORDS: Final = 1_024  # records encoded per pass: about 0.1 ms
_SETTLED_AT_ONCE: Final = 16_384  # slots settled per pass: about 0.3 ms
_SNAPSHOT_WRITE_BYTES: Final = 1 << 20

_log: Final = Log(__name__)


class _Add(msgspec.Struct, frozen=True):
    """Blocks whose data is written; ``ended`` gets None, or the exception of the cycle."""

    keys: bytes
    slots: NDArray[np.int32]
    ended: asyncio.Future[None]


class Committer:
    """Owner of the journal while the store is open. Its task runs until ``aclose``.

    Args:
        settle_seconds: most time between a write of the journal and the cycle that settles it; 0
            to settle in each cycle, before saves end.

    Attributes:
        commits: cycles that wrote records.
        settlements: cycles that settled.
        compactions: journals that were replaced.
    """

    def __init__(
        self,
        volume: Volume,
        recovered: Recovered,
        journal: Journal,
        io: DiskIo,
        threads: StoreThreads,
        *,
        settle_seconds: float,
    ) -> None:
        self.commits = 0
        self.settlements = 0
        self.compactions = 0
        self._volume = volume
        self._table = recovered.table
        self._segments = recovered.segments
        self._journal = journal
        self._io = io
        self._threads = threads
        self._settle_seconds = settle_seconds
        self._loop = asyncio.get_running_loop()
        self._adds: list[_Add] = []
        self._unwritten = _native.session_record(volume.boot())  # precedes all other records
        self._settle_waiters: list[asyncio.Future[None]] = []
        self._write_waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._wanted = asyncio.Event()
        self._closing = False
        self._failure = ""  # last failure, until a cycle succeeds
        self._rewrite = recovered.damage.needs_new_journal
        self._next_compaction = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the recovered state durable, and start the task, which retries after failures."""
        try:
            await self._cycle(settles=True)
        except Exception as error:
            self._log_failure(error)
        self._task = self._loop.create_task(self._run(), name="aiokv-disk-committer")

    async def add(self, keys: bytes, slots: NDArray[np.int32]) -> None:
        """Record keys whose data is in reserved slots. The slots belong to the committer.

        Raises:
            StoreError: the records could not be written; the keys are not stored.

        Cancellation: the keys will be stored, unless that fails.
        """
        add = _Add(keys, slots, self._loop.create_future())
        self._adds.append(add)
        await self._ended(add.ended)

    async def write_removals(self) -> None:
        """Wait until the keys that the table has removed are recorded.

        Raises:
            StoreError: the records could not be written yet.
        """
        self._write_waiters.append(waiter := self._loop.create_future())
        await self._ended(waiter)

    async def settle(self) -> None:
        """Make all records durable, so that slots of removed keys become free.

        Raises:
            StoreError: a flush or a write failed.
        """
        self._settle_waiters.append(waiter := self._loop.create_future())
        await self._ended(waiter)

    def settle_soon(self) -> None:
        """Settle in the next cycle, without waiting."""
        waiter = self._loop.create_future()
        waiter.add_done_callback(_ignore)
        self._settle_waiters.append(waiter)
        self._wanted.set()

    @property
    def journal_records(self) -> int:
        """Records in the journal."""
        return self._journal.position

    async def aclose(self) -> None:
        """Settle, end the task and close the journal.

        Cancellation: takes effect at the end.
        """
        self._closing = True
        self._wanted.set()
        cancelled: asyncio.CancelledError | None = None
        while self._task is not None and not self._task.done():
            try:
                await asyncio.wait([self._task])
            except asyncio.CancelledError as error:
                cancelled = error
        if self._timer is not None:
            self._timer.cancel()
        self._journal.close()
        if cancelled is not None:
            raise cancelled

    async def _ended(self, waiter: asyncio.Future[None]) -> None:
        if self._closing:
            waiter.cancel()
            raise StoreError("the disk store is closed")
        self._wanted.set()
        await waiter

    async def _run(self) -> None:
        last = False
        while not last:
            await self._wanted.wait()
            self._wanted.clear()
            last = self._closing
            try:
                await self._cycle(settles=last or self._settles_next())
                if not last and self._is_compaction_due():
                    await self._compact()
            except Exception as error:  # the next cycle repeats what failed
                self._next_compaction = self._journal.position + MIN_RECORDS
                self._log_failure(error)
                if not last:
                    self._settle_later(at_least=_RETRY_SECONDS)

    async def _cycle(self, *, settles: bool) -> None:
        """Write the records that have gathered; their waiters end.

        Raises:
            Exception: a flush or a write failed; the waiters have got a ``StoreError``.
        """
        adds, self._adds = self._adds, []
        waiters, self._write_waiters = self._write_waiters, []
        if settles:
            waiters += self._settle_waiters
            self._settle_waiters = []
        removals = self._unwritten + self._table.take_records()
        unsettled_total = self._table.unsettled_total
        now = int(time.time())
        records = removals + b"".join(_native.add_records(add.keys, add.slots, now) for add in adds)
        try:
            if settles:
                await self._flush_data()
                records += _native.synced_record()
                if self._rewrite:
                    await self._compact()
            if records:
                await self._threads.run(lambda _: self._write(records, settles=settles))
        except Exception as error:
            self._unwritten = removals
            self._fail(adds, waiters, error)
            raise
        self._unwritten = b""
        self._failure = ""
        self.commits += 1
        for add in adds:
            self._table.commit(add.keys, add.slots, now)
        if settles:
            self.settlements += 1
            while not self._table.settle(unsettled_total, _SETTLED_AT_ONCE):  # noqa: ASYNC110
                await asyncio.sleep(0)
        else:
            self._settle_later()
        for waiter in (*(add.ended for add in adds), *waiters):
            if not waiter.done():
                waiter.set_result(None)

    def _write(self, records: bytes, *, settles: bool) -> None:
        """Append and flush, in the thread."""
        self._journal.append(records)
        if settles:
            try:
                self._journal.sync()
            except OSError:
                # The kernel may have dropped what it could not write: only a new file is safe.
                self._rewrite = True
                raise

    def _fail(
        self, adds: list[_Add], waiters: list[asyncio.Future[None]], error: Exception
    ) -> None:
        for add in adds:
            self._table.discard(add.keys, add.slots)
        for waiter in (*(add.ended for add in adds), *waiters):
            if not waiter.done():
                failure = StoreError(f"the disk store {str(self._volume.path)!r} failed: {error}")
                failure.__cause__ = error
                waiter.set_exception(failure)

    async def _flush_data(self) -> None:
        """Make data that was written before durable.

        Raises:
            OSError: a flush failed; the segments are flushed again next time.
        """
        dirty = sorted(self._segments.dirty)
        self._segments.dirty.clear()
        flushed = await asyncio.gather(*(self._io.flush(self._segments.fd(n)) for n in dirty))
        failed = [(n, -code) for n, code in zip(dirty, flushed, strict=True) if code != 0]
        if failed:
            self._segments.dirty.update(n for n, _ in failed)
            number, code = failed[0]
            raise OSError(code, f"{os.strerror(code)} in a flush of {segment_name(number)}")
        await self._threads.run(lambda _: self._segments.sync_names())

    def _log_failure(self, error: Exception) -> None:
        """Log the first of several equal failures."""
        if str(error) != self._failure:
            self._failure = str(error)
            _log.warning("disk.journal_failed", path=str(self._volume.path), error=str(error))

    def _settle_later(self, at_least: float = 0.0) -> None:
        if self._timer is None and not math.isinf(self._settle_seconds):
            delay = max(self._settle_seconds, at_least)
            self._timer = self._loop.call_later(delay, self._settle_now)

    def _settle_now(self) -> None:
        self._timer = None
        self.settle_soon()

    def _settles_next(self) -> bool:
        # Until the first settlement, records of the previous process may not be durable.
        return (
            self._settle_seconds == 0
            or bool(self._settle_waiters)
            or self._rewrite
            or self.settlements == 0
        )

    def _is_compaction_due(self) -> bool:
        stored = self._table.stored + self._table.quarantined
        due = max(MIN_RECORDS, 2 * stored, self._next_compaction)
        return self._journal.position > due

    async def _compact(self) -> None:
        """Replace the journal by one without records of removed keys. Loads go on meanwhile.

        The records that have gathered, and removals meanwhile, are written afterwards.

        Raises:
            OSError: a flush or a write failed; the old journal is used further on.
        """
        await self._flush_data()
        header = self._journal.header.renewed()
        new = await self._threads.run(lambda _: Journal.create(self._volume, header))
        try:
            await self._write_snapshot(new)
            await self._threads.run(lambda _: new.replace())
        except BaseException:
            await self._threads.run(lambda _: new.discard())
            raise
        old, self._journal = self._journal, new
        self._rewrite = False
        self._next_compaction = 0
        self.compactions += 1
        await self._threads.run(lambda _: old.close())  # slow: the file system frees its blocks

    async def _write_snapshot(self, new: Journal) -> None:
        async def write(records: bytes) -> None:
            await self._threads.run(lambda _: new.append(records))

        synced = _native.synced_record()
        records = _native.session_record(self._volume.boot())
        self._table.begin_snapshot()
        while piece := self._table.snapshot(_SNAPSHOT_RECORDS):
            records += piece
            if len(records) >= _SNAPSHOT_WRITE_BYTES:
                await write(records + synced)
                records = b""
            else:
                await asyncio.sleep(0)
        await write(records + synced)


def _ignore(waiter: asyncio.Future[None]) -> None:
    """Retrieve the exception of a settlement that nothing waits for; the cycle has logged it."""
    if not waiter.cancelled():
        waiter.exception()
