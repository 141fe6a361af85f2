"""OpenStore: the parts of a disk store between ``open`` and ``aclose``."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec

from aiokv.base.statistics import StoreStatistics
from aiokv.errors import StoreError
from aiokv.stores.disk.committer import Committer
from aiokv.stores.disk.layouts import find_layout
from aiokv.stores.disk.lock import DirectoryLock
from aiokv.stores.disk.recovery import log_damage, recover
from aiokv.stores.disk.room import NO_ROOM, Room
from aiokv.stores.disk.transfers import SlotTransfers
from aiokv.stores.labels import MAX_LABELS, usage
from aiokv.stores.threads import StoreThreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory
    from aiokv.stores.disk.layouts import OtherLayouts
    from aiokv.stores.disk.recovery import Recovered
    from aiokv.stores.disk.volume import Volume


class OpenStore:
    """A locked directory, its table, and the tasks and threads that use its files.

    Attributes:
        table: which key is in which slot.
        transfers: reads and writes of slots.
        read_errors: blocks that could not be read.
        write_errors: blocks that could not be written.
    """

    def __init__(
        self,
        volume: Volume,
        others: OtherLayouts,
        recovered: Recovered,
        transfers: SlotTransfers,
        writers: tuple[Committer, Room] | None,
        slot_bytes: int,
        capacity_bytes: int,
        resources: AsyncExitStack,
        threads: StoreThreads,
    ) -> None:
        self.table = recovered.table
        self.transfers = transfers
        self.read_errors = 0
        self.write_errors = 0
        self._path = volume.path
        self._others = others
        self._damage = recovered.damage
        self._writers = writers
        self._slot_bytes = slot_bytes
        self._capacity_bytes = capacity_bytes
        self._resources = resources
        self._threads = threads
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def open(
        cls,
        directory: Volume,
        memory: StoreMemory,
        *,
        capacity_bytes: int,
        min_free_bytes: int,
        fsync_seconds: float,
        counters: NDArray[np.uint8] | None = None,
    ) -> OpenStore:
        """Recover a store, or begin a new one. The table counts its keys in ``counters``, if given.

        Raises:
            ConfigError, OSError: see ``DiskStore.open``.

        Cancellation: nothing is left open.
        """
        async with AsyncExitStack() as resources:
            threads = StoreThreads("disk", 2)  # for the journal, and for the growth of the files
            resources.push_async_callback(threads.aclose)

            def prepare() -> tuple[Volume, OtherLayouts, Recovered]:
                directory.make()
                resources.callback(DirectoryLock(directory.path).release)
                volume, others = find_layout(directory, memory)
                recovered = _recover(volume, others, memory, capacity_bytes)
                if counters is not None:
                    recovered.table.publish(counters)
                resources.callback(recovered.segments.close)
                if recovered.journal is not None:
                    resources.callback(recovered.journal.close)
                    others.shrink(capacity_bytes - recovered.table.limit * memory.pitch_bytes)
                return volume, others, recovered

            volume, others, recovered = await threads.run(lambda _: prepare())
            log_damage(volume, recovered.damage)
            io = volume.open_io()
            resources.push_async_callback(io.aclose)
            io.register_buffer(memory.address, memory.num_bytes)
            writers = None
            if recovered.journal is not None:
                committer = Committer(
                    volume, recovered, recovered.journal, io, threads, settle_seconds=fsync_seconds
                )
                resources.push_async_callback(committer.aclose)
                await committer.start()
                if committer.settlements > 0:  # then no record of slots above the capacity is left
                    capacity = recovered.table.capacity
                    await threads.run(lambda _: recovered.segments.shrink(capacity))
                room = Room(
                    volume,
                    recovered.table,
                    recovered.segments,
                    committer,
                    threads,
                    others,
                    slot_bytes=memory.pitch_bytes,
                    min_free_bytes=min_free_bytes,
                )
                writers = committer, room
            transfers = SlotTransfers(io, recovered.segments, memory)
            return cls(
                volume,
                others,
                recovered,
                transfers,
                writers,
                memory.pitch_bytes,
                capacity_bytes,
                resources.pop_all(),
                threads,
            )
        raise AssertionError("unreachable")

    def writers(self) -> tuple[Committer, Room]:
        """Return the parts that write.

        Raises:
            StoreError: the directory is not writable.
        """
        if self._writers is None:
            raise StoreError(f"the directory {str(self._path)!r} is not writable")
        return self._writers

    async def purge_others(self, label: bytes) -> int:
        """Remove the blocks of a label from the layouts and groups that are not open; return their
        number.

        Raises:
            StoreError: a file cannot be read or written.
        """
        try:
            return await self._threads.run(lambda _: self._others.purge(self._path, label))
        except OSError as error:
            raise StoreError(f"disk:{self._path}: purge: {error}") from error

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Let ``aclose`` wait for the body."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def statistics(self) -> StoreStatistics:
        """Return counters and sizes."""
        details = {
            "free_slots": self.table.available,
            "unsettled_slots": self.table.unsettled,
            "allocated_bytes": self.table.limit * self._slot_bytes,
            "other_layouts_bytes": self._others.num_bytes,
            "index_bytes": self.table.num_bytes,
            "read_errors": self.read_errors,
            "write_errors": self.write_errors,
            **msgspec.structs.asdict(self._damage),
        }
        evicted = 0
        if self._writers is not None:
            committer, room = self._writers
            evicted = room.evicted_blocks
            details |= {
                "journal_records": committer.journal_records,
                "journal_writes": committer.commits,
                "journal_flushes": committer.settlements,
                "compactions": committer.compactions,
            }
        return StoreStatistics(
            blocks=self.table.stored,
            used_bytes=self.table.stored * self._slot_bytes,
            capacity_bytes=self._capacity_bytes,
            labels=usage(self.table.label_counts(MAX_LABELS), self.table.stored),
            evicted_blocks=evicted,
            quarantined_blocks=self.table.quarantined,
            details=details,
        )

    async def aclose(self) -> None:
        """Wait for operations in flight, flush, and close everything."""
        await self._idle.wait()
        await self._resources.aclose()


def _recover(
    volume: Volume, others: OtherLayouts, memory: StoreMemory, capacity_bytes: int
) -> Recovered:
    """Recover a layout, or begin it; other layouts give way to its files on a full disk."""
    while True:
        try:
            volume.make()
            return recover(volume, memory, capacity_bytes, write=volume.is_writable())
        except OSError as error:
            if error.errno not in NO_ROOM or not others.remove_segment():
                raise
