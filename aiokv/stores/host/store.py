"""HostStore: blocks in memory that the engines of one host share."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from aiokv import _native
from aiokv.base import checks
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, Store, selected
from aiokv.stores.host.link import attach, visiting
from aiokv.stores.host.messages import PRESENT, Load, Lookup, Publish, Purge, Remove, Save
from aiokv.stores.options import store_path, url_options, url_path
from aiokv.stores.threads import StoreThreads
from aiokv.wire.unix import check_length

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.stores.base import SharedFilter, StoreMemory
    from aiokv.stores.host.link import Link
    from aiokv.stores.host.shared_memory import SharedMemory

    Copy = Callable[[bytes, NDArray[np.int32], StoreMemory, NDArray[np.int32]], NDArray[np.uint8]]

_COPY_BYTES: Final = 1 << 20  # that a thread copies between two checks for a cancellation


class HostStore(Store):
    """Blocks in shared memory of the process ``aiokv store serve``.

    All engines of a host that attach to one service share its blocks. The blocks survive the end
    of an engine, ``kill -9`` included, but not the end of the service, unless the service has a
    disk store below. An engine goes on without a service that has ended, and attaches again when
    the service is back.

    The service and the engines must run as the same user. Nothing is encrypted: each process of
    this user can read and write the blocks.

    Args:
        path: Unix socket of the service.
        threads: threads that copy objects between shared memory and the blocks of the engine.

    Raises:
        ConfigError: an argument is out of range, or the path is too long for a socket.
    """

    kind: str = "host"
    verifies_loads: bool = True

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 4) -> None:
        self._path = Path(store_path(path))
        check_length(self._path)
        checks.integer("threads", threads, minimum=1, error=ConfigError)
        self.url = f"host://{self._path}"
        self.max_concurrent = 8
        self._num_threads = threads
        self._memory: StoreMemory | None = None
        self._threads: StoreThreads | None = None
        self._attachment: tuple[Link, SharedMemory] | None = None
        self._attaching = asyncio.Lock()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of ``host:///run/aiokv/host.sock?threads=8``.

        Raises:
            ConfigError: the URL has a host or no path, or an option is unknown or out of range.
        """
        path = url_path(url, "host:///run/aiokv/host.sock")
        options: dict[str, Callable[[str], Any]] = {"threads": int}
        return cls(path, **url_options(url, options))

    def for_group(self, group: str) -> HostStore:
        """Return a store of the same service; see :class:`Store`."""
        return HostStore(self._path, threads=self._num_threads)

    async def open(self, memory: StoreMemory) -> None:
        """Start the threads. The store attaches to the service when it is used; see
        :class:`Store`."""
        self._threads = StoreThreads("host", self._num_threads)
        self._memory = memory

    def may_have_any(self, keys: bytes) -> bool:
        """Return False if the service has none of the keys, also not below, by the filter in its
        memory; see :class:`Store`.

        Keys that the service has reported as stored are found, unless it has ended since.
        """
        if self._attachment is None or self._attachment[0].has_ended:
            return True  # a lookup attaches
        return _native.may_have_any(self._attachment[1].counters, keys)

    def shared_filter(self) -> SharedFilter | None:
        """Return the filter of the service while the store is attached; see :class:`Store`."""
        if self._attachment is None or self._attachment[0].has_ended:
            return None
        return self._attachment[1].shared_filter

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the service has it; see :class:`Store`.

        Raises:
            StoreError: the service cannot be reached, or has ended.
        """
        _, link, _ = await self._attached()
        found = await link.ask(Lookup(number=link.next_number(), keys=keys))
        return np.frombuffer(found, np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy objects from shared memory, and verify the copies; see :class:`Store`.

        Raises:
            StoreError: as :meth:`lookup`.
        """
        memory, link, shared = await self._attached()
        number = link.next_number()
        slots = np.frombuffer(await link.ask(Load(number=number, keys=keys)), np.int32)
        found = np.flatnonzero(slots >= 0)
        results = np.full(len(slots), Result.MISSING, np.uint8)
        try:
            results[found] = await self._copied(
                shared.load, selected(keys, found), slots[found], memory, blocks[found]
            )
        finally:
            link.release(number)
        return results

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy objects to shared memory; see :class:`Store`. An object without the right trailer
        is ``FAILED``.

        Raises:
            StoreError: as :meth:`lookup`.
        """
        memory, link, shared = await self._attached()
        number = link.next_number()
        slots = np.frombuffer(await link.ask(Save(number=number, keys=keys)), np.int32)
        results = np.where(slots == PRESENT, Result.PRESENT, Result.REFUSED).astype(np.uint8)
        wanted = np.flatnonzero(slots >= 0)
        try:
            copied = await self._copied(
                shared.save, selected(keys, wanted), slots[wanted], memory, blocks[wanted]
            )
        except BaseException:
            link.release(number)
            raise
        written = copied == Result.DONE
        await link.ask(Publish(number=number, written=written.tobytes()))
        results[wanted] = np.where(written, Result.DONE, Result.FAILED)
        return results

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects, also from the store below the service; see :class:`Store`.

        Raises:
            StoreError: as :meth:`lookup`.
        """
        _, link, _ = await self._attached()
        removed = await link.ask(Remove(number=link.next_number(), keys=keys))
        return np.frombuffer(removed, np.uint8)

    async def purge(self, label: bytes) -> int:
        """Remove the objects of a label of all engines of the host, also from the store below the
        service; see :class:`Store`.

        Raises:
            StoreError: as :meth:`lookup`.
        """
        async with visiting(self._path) as (link, _):
            removed = await link.ask(Purge(number=link.next_number(), label=label))
        return int.from_bytes(removed, "little")

    def statistics(self) -> StoreStatistics:
        """Return counts of the last reply of the service; see :class:`Store`."""
        if self._attachment is None:
            return StoreStatistics()
        counts = self._attachment[0].counts
        return StoreStatistics(
            blocks=counts.blocks,
            used_bytes=counts.used_bytes,
            evicted_blocks=counts.evicted_blocks,
            labels=self._attachment[0].labels,
            details={
                "engines": counts.engines,
                "saved_below": counts.saved_below,
                "loaded_below": counts.loaded_below,
                "dropped_below": counts.dropped_below,
            },
        )

    async def aclose(self) -> None:
        """End operations in flight and detach. Idempotent."""
        if self._threads is not None:
            await self._threads.aclose()
        async with self._attaching:
            self._memory = None
            if self._attachment is not None:
                self._attachment[0].close()
                self._attachment = None
        await asyncio.sleep(0)  # then the socket is closed

    async def _attached(self) -> tuple[StoreMemory, Link, SharedMemory]:
        """Return the memory of the engine, a link to the service, and its memory."""
        async with self._attaching:
            if self._memory is None:
                raise StoreError(f"{self.url} is not open")
            if self._attachment is None or self._attachment[0].has_ended:
                self._attachment = await attach(self._path, self._memory)
            return self._memory, *self._attachment

    async def _copied(
        self,
        copy: Copy,
        keys: bytes,
        slots: NDArray[np.int32],
        memory: StoreMemory,
        blocks: NDArray[np.int32],
    ) -> NDArray[np.uint8]:
        """Copy objects in threads, and return their results."""
        results = np.full(len(slots), Result.FAILED, np.uint8)
        step = max(1, _COPY_BYTES // memory.pitch_bytes)
        firsts = itertools.count(0, step)  # the threads take turns

        def run(unwanted: threading.Event) -> None:
            while not unwanted.is_set() and (first := next(firsts)) < len(slots):
                part = slice(first, first + step)
                part_keys = keys[first * KEY_BYTES : (first + step) * KEY_BYTES]
                results[part] = copy(part_keys, slots[part], memory, blocks[part])

        if len(slots) and self._threads is not None:
            await self._threads.run_copies(run, min(self._num_threads, -(-len(slots) // step)))
        return results
