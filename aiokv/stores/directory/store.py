"""DirectoryStore: one file per block in a folder that several machines may share."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from aiokv.base.logs import Log
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import Result, Store, StoreMemory, split_keys
from aiokv.stores.directory.files import FileEntry, NoRoom, ObjectFiles, is_object
from aiokv.stores.directory.quota import DirectoryQuota
from aiokv.stores.options import parse_bytes, parse_flag, store_path, url_options, url_path
from aiokv.stores.threads import StoreThreads

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import AsyncIterator, Callable

    from numpy.typing import NDArray

_log: Final = Log(__name__)
_LOOKUP_THREADS: Final = 16


class DirectoryStore(Store):
    """Blocks as files of a folder, such as one on NFS, Lustre or CephFS.

    Any number of processes on any number of machines may use the folder at the same time: a file
    is written beside the others and renamed, so that a reader sees a whole block or none. Nothing
    is encrypted: the rights of the folder decide who reads and writes the blocks, and a prompt can
    be reconstructed from its blocks.

    Args:
        path: folder; created when it is absent, its parent is not.
        bytes: limit of the bytes of all files, as a number or as ``"400GiB"``; the least recently
            used files are removed (a load renews the time of a file at most once per hour). None
            for no limit. Each process lists the folder from time to time and counts its own writes
            in between, so the files may exceed the limit by what other processes write meanwhile.
        fsync: write each block through to the medium before it counts as saved. Without it, a
            power cut may lose or damage recent blocks; a damaged block is detected and not used.
        threads: number of threads that read and write; lookups have 16 threads of their own.

    Raises:
        ConfigError: an argument is out of range.
    """

    kind: str = "directory"
    max_lookup_keys: int = _LOOKUP_THREADS
    lookup_deadline_seconds: float = 0.5

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bytes: int | str | None = None,  # noqa: A002 - the name in all stores
        fsync: bool = False,
        threads: int = 4,
    ) -> None:
        self._path = store_path(path)
        if threads < 1:
            raise ConfigError(f"threads is {threads}; it must be at least 1")
        self.url = f"directory:{self._path}"
        self.max_concurrent = 4
        self._fsync = fsync
        self._num_threads = threads
        self._quota = DirectoryQuota(None if bytes is None else parse_bytes(bytes))
        self._wrong_lengths = 0
        self._refusal = ""  # last logged reason
        self._is_closing = False
        self._sweep: asyncio.Task[None] | None = None
        self._memory: StoreMemory | None = None
        self._files: ObjectFiles | None = None
        self._threads: StoreThreads | None = None
        self._lookup_threads: StoreThreads | None = None  # lookups do not wait behind loads

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of ``directory:/path?bytes=400GiB&fsync=true&threads=8``.

        Raises:
            ConfigError: the URL has a host or no path, or an option is unknown or out of range.
        """
        path = url_path(url, "directory:/mnt/shared/kv")
        options: dict[str, Callable[[str], Any]] = {
            "bytes": parse_bytes,
            "fsync": parse_flag,
            "threads": int,
        }
        return cls(path, **url_options(url, options))

    def for_group(self, group: str) -> DirectoryStore:
        """Return a store of the same folder and limit; see :class:`Store`."""
        return DirectoryStore(
            self._path, bytes=self._quota.limit, fsync=self._fsync, threads=self._num_threads
        )

    async def open(self, memory: StoreMemory) -> None:
        """Open the folder, and create it when it is absent; see :class:`Store`.

        Raises:
            ConfigError: ``bytes`` is smaller than one object.
            StoreError: the folder cannot be created or entered.
        """
        limit = self._quota.limit
        if limit is not None and limit < memory.object_bytes:
            raise ConfigError(f"bytes is {limit}; one object takes {memory.object_bytes} bytes")
        self._is_closing = False
        files = ObjectFiles(self._path, memory.object_bytes, fsync=self._fsync)
        threads = StoreThreads("directory", self._num_threads + 1)  # one lists the folder
        try:
            await threads.run(lambda _: files.open())
        except BaseException:
            await threads.aclose()
            files.close()
            raise
        self._memory, self._files, self._threads = memory, files, threads
        self._lookup_threads = StoreThreads("directory-lookup", _LOOKUP_THREADS)

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether a file of the right length exists; see :class:`Store`.

        Raises:
            StoreError: the folder cannot be reached.
        """
        files, memory = self._opened()

        def has(index: int) -> int:
            return files.size(names[index]) == memory.object_bytes

        names = _names(keys)
        threads = self._lookup_threads
        return (await _for_each(len(names), has, threads, _LOOKUP_THREADS)).astype(np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read files into host blocks; see :class:`Store`. A file of another length is ``WRONG``,
        and the next save of its key replaces it.

        Raises:
            StoreError: the folder cannot be reached, or a file cannot be read.
        """
        files, memory = self._opened()

        def read(index: int) -> int:
            size = files.read(names[index], memory.object(int(blocks[index])))
            if size == memory.object_bytes:
                return Result.DONE
            if size < 0:
                return Result.MISSING
            self._wrong_lengths += 1
            return Result.WRONG

        names = _names(keys)
        return await self._for_each(len(names), read)

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Write files from host blocks; see :class:`Store`. Existing files are kept.

        Raises:
            StoreError: the folder cannot be reached.
        """
        files, memory = self._opened()

        def write(index: int) -> int:
            if files.size(names[index]) == memory.object_bytes:
                return Result.PRESENT
            if not self._quota.admits(memory.object_bytes):
                return Result.REFUSED
            try:
                files.write(names[index], memory.object(int(blocks[index])))
            except NoRoom as error:
                self._refuse(str(error.__cause__))
                return Result.REFUSED
            self._refusal = ""
            self._quota.count(1, memory.object_bytes)
            return Result.DONE

        names = _names(keys)
        results = await self._for_each(len(names), write)
        self._start_sweep()
        return results

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove files; see :class:`Store`.

        Raises:
            StoreError: the folder cannot be reached.
        """
        files, _ = self._opened()

        def remove(index: int) -> int:
            size = files.size(names[index])
            if size >= 0:
                files.remove(names[index])
                self._quota.count(-1, -size)
            return Result.DONE

        names = _names(keys)
        return await self._for_each(len(names), remove)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the keys of the files of the folder; see :class:`Store`.

        Raises:
            StoreError: the folder cannot be reached.
        """
        files, _ = self._opened()
        if self._threads is None:
            return
        for number in range(256):
            folder = f"{number:02x}"
            entries = await self._threads.run(partial(_listed, files, folder))
            names = [entry.key for entry in entries if is_object(folder, entry.key)]
            if found := [name for name in names if name.endswith(label.hex())]:
                yield bytes.fromhex("".join(found))

    async def probe(self) -> None:
        """Read the folder, in the threads of loads; see :class:`Store`.

        Raises:
            StoreError: the folder cannot be reached, or its file cannot be read.
        """
        files, _ = self._opened()
        if self._threads is not None:
            await self._threads.run(lambda _: files.read_identity())

    def statistics(self) -> StoreStatistics:
        """Return counters; sizes are those of the last listing and of own writes since then."""
        quota = self._quota
        return StoreStatistics(
            blocks=quota.blocks,
            used_bytes=quota.used_bytes,
            capacity_bytes=-1 if quota.limit is None else quota.limit,
            evicted_blocks=quota.evicted_blocks,
            details={"wrong_lengths": self._wrong_lengths},
        )

    async def aclose(self) -> None:
        """End operations in flight and close the folder. Idempotent."""
        self._is_closing = True
        if self._threads is not None and self._lookup_threads is not None:
            await self._lookup_threads.aclose()
            await self._threads.aclose()
        if self._sweep is not None:
            await asyncio.wait([self._sweep])
        if self._files is not None:
            self._files.close()

    def _opened(self) -> tuple[ObjectFiles, StoreMemory]:
        if self._files is None or self._memory is None:
            raise StoreError(f"{self.url} is not open")
        return self._files, self._memory

    async def _for_each(self, count: int, act: Callable[[int], int]) -> NDArray[np.uint8]:
        """Call ``act(index)`` for each index, in the threads that move blocks."""
        return await _for_each(count, act, self._threads, self._num_threads)

    def _start_sweep(self) -> None:
        files, memory = self._opened()
        if self._sweep is None and self._quota.is_sweep_due(memory.object_bytes):
            self._sweep = asyncio.create_task(self._run_sweep(files, memory.object_bytes))

    async def _run_sweep(self, files: ObjectFiles, object_bytes: int) -> None:
        try:
            if self._threads is not None:
                await self._threads.run(
                    lambda unwanted: self._quota.sweep(files, object_bytes, unwanted)
                )
        except StoreError as error:
            if not self._is_closing:
                _log.warning("store.listing_failed", url=self.url, reason=str(error))
        finally:
            self._sweep = None

    def _refuse(self, reason: str) -> None:
        """Log why the folder takes no files, once for each reason in a row."""
        if reason != self._refusal:
            self._refusal = reason
            _log.warning("store.refused", url=self.url, reason=reason)


def _listed(files: ObjectFiles, folder: str, unwanted: threading.Event) -> list[FileEntry]:
    return files.listed(folder)


def _names(keys: bytes) -> list[str]:
    return [key.hex() for key in split_keys(keys)]


async def _for_each(
    count: int, act: Callable[[int], int], threads: StoreThreads | None, num_threads: int
) -> NDArray[np.uint8]:
    """Call ``act(index)`` for each index, in threads; return its results."""
    results = np.full(count, Result.FAILED, np.uint8)
    indices = itertools.count()  # the threads take turns

    def run(unwanted: threading.Event) -> None:
        while not unwanted.is_set() and (index := next(indices)) < count:
            results[index] = act(index)

    if count > 0 and threads is not None:
        await threads.run_copies(run, min(count, num_threads))
    return results
