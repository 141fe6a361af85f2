"""DiskStore: blocks in files of a local disk."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from aiokv.base import checks
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, Store, medium_name
from aiokv.stores.disk.layouts import purge_closed
from aiokv.stores.disk.opened import OpenStore
from aiokv.stores.disk.room import NO_ROOM
from aiokv.stores.disk.transfers import SHORT, error_text
from aiokv.stores.disk.volume import Volume
from aiokv.stores.options import parse_bytes, store_path, url_options, url_path
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory

_KEYS_PER_PASS: Final = 65_536  # slots that are scanned per pass of the loop


class DiskStore(Store):
    """Blocks in segment files of one directory, for one process at a time. Snapshots of recurrent
    state are in a directory below it, ``host_state``, with files of their own.

    Blocks of several sizes have files side by side: after an update of the model that changes the
    size of a block, the store begins empty, and it finds the earlier blocks when the earlier model
    is back. The files of the other sizes count towards ``bytes``. When the store needs their space,
    it removes them, 1 GiB or 1/64 of ``bytes`` at a time, beginning with those used longest ago.

    A saved block survives the end of the process, ``kill -9`` included. After a power cut, blocks
    that were saved within the last ``fsync_seconds``, or during the flush that follows, may be
    missing; with 0, none is, and each save waits for the disk. A block is never found with the
    bytes of another one: see :mod:`aiokv.stores.disk.committer`.

    Blocks are not encrypted. The files are readable by their owner and group; a prompt can be
    reconstructed from its blocks.

    Args:
        path: directory, created when it is absent; each rank needs one of its own.
        bytes: most bytes of all blocks, as a number or as ``"400GiB"``. The least recently used
            ones are evicted; loads are not recorded, so that a restart may forget their order.
            Blocks and snapshots have shares of it in the proportion of their host memory. The
            journal and its replacement take up to 256 bytes per block and 4 MiB beside it.
        min_free_bytes: the store stops growing when the file system has less space left, and
            evicts instead.
        fsync_seconds: seconds after which saves are flushed to the medium; 0 to flush before a save
            ends, infinity to flush only when slots are reused and when the store is closed.
        ttl_seconds: blocks that were saved longer ago are not found; None for no limit. The age is
            measured with the clock of the system. Blocks that were saved while this clock was ahead
            are not found once it is right.
        volume: file operations of the directory; tests replace them.

    Raises:
        ConfigError: an argument is out of range.
    """

    kind: str = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bytes: int | str,  # noqa: A002 - the name in all stores
        min_free_bytes: int | str = "1GiB",
        fsync_seconds: float = 1.0,
        ttl_seconds: float | None = None,
        volume: Volume | None = None,
    ) -> None:
        folder = store_path(path)
        self.url = f"disk:{folder}"
        self.max_concurrent = 8
        self._capacity_bytes = parse_bytes(bytes)
        self._min_free_bytes = 0 if min_free_bytes in (0, "0") else parse_bytes(min_free_bytes)
        self._fsync_seconds = checks.seconds(
            "fsync_seconds", fsync_seconds, error=ConfigError, minimum=0
        )
        self._ttl_seconds = (
            math.inf
            if ttl_seconds is None
            else checks.seconds("ttl_seconds", ttl_seconds, error=ConfigError, minimum=0)
        )
        self._volume = Volume(folder) if volume is None else volume
        self.state_folder = self._volume.path
        self._counters: NDArray[np.uint8] | None = None
        self._open: OpenStore | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of ``disk:/nvme/kv?bytes=400GiB&fsync_seconds=0``.

        Raises:
            ConfigError: the URL has a host, no path or no ``bytes``, or an option is unknown or out
                of range.
        """
        example = "disk:/nvme/kv?bytes=400GiB"
        path = url_path(url, example)
        options = url_options(
            url,
            {
                "bytes": parse_bytes,
                "min_free_bytes": str,
                "fsync_seconds": float,
                "ttl_seconds": float,
            },
        )
        if "bytes" not in options:
            raise ConfigError(
                f"{url!r} has no bytes, the limit of the store", hint=f"write {example}"
            )
        return cls(path, **options)

    def for_group(self, group: str) -> DiskStore:
        """Return the store of a directory below this one; see :class:`Store`."""
        name = medium_name(group)
        return DiskStore(
            self._volume.path / name,
            bytes=self._capacity_bytes,
            min_free_bytes=self._min_free_bytes,
            fsync_seconds=self._fsync_seconds,
            ttl_seconds=None if math.isinf(self._ttl_seconds) else self._ttl_seconds,
            volume=self._volume.below(name),
        )

    def publish_keys(self, counters: NDArray[np.uint8]) -> None:
        """Count the stored keys in ``counters`` while the store is open; see
        ``_native.SlotTable.publish``. Call before ``open``."""
        self._counters = counters

    async def open(self, memory: StoreMemory) -> None:
        """Lock the directory, replay its journal, and register the memory; see :class:`Store`.

        Raises:
            ConfigError: another process uses the directory, or ``bytes`` is smaller than one block.
            StoreError: the directory cannot be created, read or written.
        """
        capacity_bytes = int(self._capacity_bytes * memory.quota_share)
        if memory.quota_share < 1.0 and capacity_bytes < memory.pitch_bytes:
            raise ConfigError(
                f"bytes is {self._capacity_bytes}, of which the group {memory.group!r} gets "
                f"{capacity_bytes}; one block takes {memory.pitch_bytes} bytes",
                hint="give the disk store room for as many blocks as it should keep",
            )
        try:
            self._open = await OpenStore.open(
                self._volume,
                memory,
                capacity_bytes=capacity_bytes,
                min_free_bytes=self._min_free_bytes,
                fsync_seconds=self._fsync_seconds,
                counters=self._counters,
            )
        except OSError as error:
            raise StoreError(
                f"the disk store {str(self._volume.path)!r} cannot be opened: {error}",
                hint="check that the disk is mounted, works, has space and can be written",
            ) from error

    def may_have_any(self, keys: bytes) -> bool:
        """Return True if any key is stored; see :class:`Store`."""
        return bool(self._opened().table.contains(keys, *self._save_times()).any())

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether it is stored; see :class:`Store`. Does not suspend."""
        return self._opened().table.contains(keys, *self._save_times())

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read blocks; see :class:`Store`.

        A slot beyond the end of its file is ``WRONG``.

        Raises:
            StoreError: no block of those stored could be read.
        """
        opened = self._opened()
        opened.transfers.check_blocks(blocks, len(keys) // KEY_BYTES)
        slots = opened.table.pin(keys, *self._save_times())
        found = np.flatnonzero(slots >= 0)
        results = np.full(len(slots), Result.MISSING, np.uint8)
        with opened.operation():
            try:
                errors = await opened.transfers.read(slots[found], blocks[found])
            finally:
                opened.table.unpin(slots[found])
        results[found] = np.select(
            [errors == 0, errors == SHORT], [Result.DONE, Result.WRONG], Result.FAILED
        )
        opened.read_errors += int((errors != 0).sum())
        self._raise_if_all_failed("read", results, errors)
        return results

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Write blocks, then their records; see :class:`Store`.

        Raises:
            StoreError: the directory is not writable, or the disk failed.
        """
        opened = self._opened()
        opened.transfers.check_blocks(blocks, len(keys) // KEY_BYTES)
        results = np.full(len(blocks), Result.PRESENT, np.uint8)
        wanted = np.flatnonzero(~opened.table.contains(keys, *self._save_times()))
        if len(wanted) == 0:
            return results
        committer, room = opened.writers()
        # Sorted, so that neighbours get neighbouring slots.
        wanted = wanted[np.argsort(blocks[wanted])]
        with opened.operation():
            slots = await room.reserve(len(wanted))
            results[wanted[len(slots) :]] = Result.REFUSED
            wanted = wanted[: len(slots)]
            try:
                errors = await opened.transfers.write(slots, blocks[wanted])
            except BaseException:
                opened.table.release(slots)
                raise
            written = errors == 0
            opened.table.release(slots[~written])
            no_room = np.isin(errors, NO_ROOM)
            results[wanted] = np.where(
                written, Result.DONE, np.where(no_room, Result.REFUSED, Result.FAILED)
            )
            opened.write_errors += int((~written).sum())
            self._raise_if_all_failed("write", results, errors)
            if written.any():
                chosen = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[wanted[written]]
                await committer.add(chosen.tobytes(), slots[written])
        return results

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove blocks; see :class:`Store`.

        Raises:
            StoreError: the directory is not writable, or the disk failed. The blocks are missing
                until the store is opened again.
        """
        opened = self._opened()
        opened.table.remove(keys)
        committer, _ = opened.writers()
        with opened.operation():
            await committer.write_removals()  # includes keys that were evicted just before
        return np.full(len(keys) // KEY_BYTES, Result.DONE, np.uint8)

    async def quarantine(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove blocks whose bytes were wrong, and never use their slots again; see
        :class:`Store`. ``aiokv store gc`` releases the slots.

        Raises:
            StoreError: as :meth:`remove` does.
        """
        opened = self._opened()
        opened.table.quarantine(keys)
        committer, _ = opened.writers()
        with opened.operation():
            await committer.write_removals()
        return np.full(len(keys) // KEY_BYTES, Result.DONE, np.uint8)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the keys of the layout in use; see :class:`Store`."""
        table = self._opened().table
        for first in range(0, table.high_water, _KEYS_PER_PASS):
            if found := table.list_keys(first, _KEYS_PER_PASS, label):
                yield found
            await asyncio.sleep(0)

    async def purge(self, label: bytes) -> int:
        """Remove the blocks of a label from all layouts and groups of the directory; see
        :class:`Store`. A power cut does not bring them back.

        The bytes stay in their slots until these are used again, or until ``aiokv store gc``.

        Raises:
            StoreError: as :meth:`remove` does.
        """
        removed = await super().purge(label)
        opened = self._opened()
        committer, _ = opened.writers()
        with opened.operation():
            await committer.settle()
            return removed + await opened.purge_others(label)

    def purge_closed(self, label: bytes) -> int:
        """Remove the blocks of a label from the layouts and groups of the directory that are not
        open; return their number. Blocks; any thread. The store itself need not be open.

        Raises:
            OSError: a file cannot be read or written; a second call removes the rest.
        """
        return purge_closed(self._volume.path, label)

    async def probe(self) -> None:
        """Read one page of the segments; see :class:`Store`. A store without slots is not read.

        Raises:
            StoreError: the disk failed, or a segment is too short.
        """
        opened = self._opened()
        with opened.operation():
            error = await opened.transfers.read_a_page()
        if error:
            raise StoreError(f"{self.url} cannot read: {error_text(error)}")

    def statistics(self) -> StoreStatistics:
        """Return counters; see :class:`Store`."""
        if self._open is None:
            return StoreStatistics(capacity_bytes=self._capacity_bytes)
        return self._open.statistics()

    async def aclose(self) -> None:
        """End operations in flight, flush and close; see :class:`Store`.

        Cancellation: takes effect when the store is closed.
        """
        if self._open is not None:
            opened, self._open = self._open, None
            self._closing = asyncio.ensure_future(opened.aclose())
        if self._closing is not None:
            await all_ended([self._closing])
            self._closing.result()  # raises the error of the close, if any

    def _opened(self) -> OpenStore:
        if self._open is None:
            raise StoreError(f"{self.url} is not open")
        return self._open

    def _save_times(self) -> tuple[int, ...]:
        """Return the Unix times of the oldest and the newest saves that are found; () for all.

        A save with a later time was made while the clock was ahead: its age is unknown.
        """
        if math.isinf(self._ttl_seconds):
            return ()
        now = time.time()
        return max(0, int(now - self._ttl_seconds)), int(now)

    def _raise_if_all_failed(
        self, verb: str, results: NDArray[np.uint8], errors: NDArray[np.int32]
    ) -> None:
        failed = errors[errors > 0]
        has_some = np.isin(results, (Result.DONE, Result.PRESENT)).any()
        if len(failed) and not has_some and (results == Result.FAILED).any():
            raise StoreError(f"{self.url} cannot {verb}: {error_text(int(failed[0]))}")
