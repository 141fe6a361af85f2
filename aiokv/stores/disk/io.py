"""DiskIo: reads and writes of files as coroutines, without a thread where io_uring is permitted.

io = DiskIo()
io.register_buffer(memory.address, memory.num_bytes)
results = await io.read(fd, addresses, lengths, offsets)   # int32[N]: bytes or -errno
await io.aclose()

Requests go to a native queue, which announces their ends through an eventfd on the loop. The queue
uses io_uring; where the kernel or a sandbox refuses it, up to 8 threads with blocking calls.
``AIOKV_IO=threads`` or ``AIOKV_IO=io_uring`` forces one of them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from aiokv import _native
from aiokv.errors import UsageError
from aiokv.observe.logs import Log

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRIES: Final = 64  # requests in the kernel at a time; further ones wait in the native queue
DIRECT_ALIGNMENT: Final = 4096  # of address, length and offset, for a file open with O_DIRECT
BACKEND_VARIABLE: Final = "AIOKV_IO"

_INDEX_BITS: Final = 32  # a tag is the number of the batch, then the index of the request

_log = Log(__name__)


class BlockIo(Protocol):
    """Reads and writes of files: :class:`DiskIo`, or a wrapper that injects failures."""

    @property
    def backend(self) -> str:
        """``"io_uring"`` or ``"threads"``."""

    def register_buffer(self, address: int, num_bytes: int) -> None:
        """See :meth:`DiskIo.register_buffer`."""

    async def read(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """See :meth:`DiskIo.read`."""

    async def write(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """See :meth:`DiskIo.write`."""

    async def flush(self, fd: int) -> int:
        """See :meth:`DiskIo.flush`."""

    async def aclose(self) -> None:
        """See :meth:`DiskIo.aclose`."""


class _Batch:
    """The requests of one call.

    Attributes:
        number: number of the call.
        results: ``[N]`` int32, written as requests end.
        left: requests that have not ended.
        waiter: future of the coroutine that waits for the batch.
    """

    def __init__(self, number: int, num_requests: int) -> None:
        self.number = number
        self.results: NDArray[np.int32] = np.zeros(num_requests, np.int32)
        self.left = num_requests
        self.waiter: asyncio.Future[None] | None = None

    @property
    def tags(self) -> NDArray[np.uint64]:
        first = self.number << _INDEX_BITS
        return np.arange(first, first + len(self.results), dtype=np.uint64)

    def end(self, tags: NDArray[np.uint64], results: NDArray[np.int32]) -> None:
        self.results[tags & np.uint64((1 << _INDEX_BITS) - 1)] = results
        self.left -= len(results)
        if self.left == 0 and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class DiskIo:
    """File I/O on one loop, the running one. Not thread-safe; a forked child must not use it.

    Args:
        entries: requests in the kernel at a time, 1 to 4096.
        backend: ``"io_uring"``, ``"threads"``, or ``"auto"`` for the first of these that can be
            used. None: the environment variable ``AIOKV_IO``, else ``"auto"``.

    Raises:
        ConfigError: the backend is unknown, or io_uring is demanded and refused.

    Attributes:
        backend: ``"io_uring"`` or ``"threads"``.
    """

    def __init__(self, *, entries: int = ENTRIES, backend: str | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = _open_queue(entries, backend)
        self._numbers = itertools.count(1)
        self._batches: dict[int, _Batch] = {}
        self._closing = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._queue.fd, self._reap)

    @property
    def backend(self) -> str:
        return self._queue.backend

    def register_buffer(self, address: int, num_bytes: int) -> None:
        """Let the kernel map memory once for all requests; without it they only are slower.

        Args:
            address: address of the first byte.
            num_bytes: number of bytes. They must stay mapped until ``aclose``.

        Raises:
            UsageError: requests are in flight, or ``aclose`` was called.
        """
        error = self._queue.register_buffer(address, num_bytes)
        if error != 0:
            _log.warning(
                "disk.buffer_not_registered",
                num_bytes=num_bytes,
                error=os.strerror(error),
                hint="raise RLIMIT_MEMLOCK (ulimit -l) so that reads and writes use less CPU time",
            )

    async def read(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """Read ``lengths[i]`` bytes at ``offsets[i]`` of the file to memory ``addresses[i]``.

        Returns:
            ``[N]`` int32: bytes read (fewer than requested: the file ended), or -errno.

        Raises:
            LayoutError: the file is open with O_DIRECT, and an address, length or offset is not a
                multiple of ``DIRECT_ALIGNMENT``; or a request is too long. Nothing is read.
            UsageError: the arrays differ in length, or ``aclose`` was called.

        Cancellation: requests that have not started are dropped. The coroutine ends when the
            kernel no longer accesses the memory.
        """
        return await self._move(False, fd, addresses, lengths, offsets)

    async def write(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """Write ``lengths[i]`` bytes of memory ``addresses[i]`` to ``offsets[i]`` of the file.

        Returns:
            ``[N]`` int32: ``lengths[i]``, or -errno; then a part may have been written.

        Raises:
            LayoutError, UsageError: as :meth:`read` does.

        Cancellation: as in :meth:`read`.
        """
        return await self._move(True, fd, addresses, lengths, offsets)

    async def flush(self, fd: int) -> int:
        """Write the data of ended writes to the medium (``fdatasync``).

        Writes that have not ended when this is called may be left out.

        Returns:
            0, or -errno.

        Raises:
            UsageError: ``aclose`` was called.

        Cancellation: the coroutine ends with the request; the data may be on the medium or not.
        """
        batch = self._batch(1)
        self._queue.flush(fd, int(batch.tags[0]))
        return int((await self._end(batch))[0])

    async def aclose(self) -> None:
        """Drop requests that have not started, wait for the others, and close. Idempotent.

        Waiting coroutines get ``-ECANCELED`` for dropped requests.

        Cancellation: the queue is closed all the same, when the kernel accesses no memory.
        """
        if not self._closing:
            self._closing = True
            for batch in self._batches.values():
                self._queue.cancel(batch.tags)
            self._close_when_idle()
        cancelled: asyncio.CancelledError | None = None
        while not self._closed.done():
            try:
                await asyncio.shield(self._closed)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _move(
        self,
        write: bool,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        batch = self._batch(len(addresses))
        self._queue.submit(fd, write, addresses, lengths, offsets, batch.tags)
        return await self._end(batch)

    def _batch(self, num_requests: int) -> _Batch:
        if self._closing:
            raise UsageError("DiskIo is closed")
        return _Batch(next(self._numbers), num_requests)

    async def _end(self, batch: _Batch) -> NDArray[np.int32]:
        """Wait for all requests of a batch, also when the coroutine is cancelled."""
        if batch.left > 0:
            self._batches[batch.number] = batch
        cancelled: asyncio.CancelledError | None = None
        while batch.left > 0:
            batch.waiter = self._loop.create_future()
            try:
                await batch.waiter
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self._queue.cancel(batch.tags)
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return batch.results

    def _reap(self) -> None:
        """Hand results to their batches; called by the loop when the eventfd is readable."""
        tags, results = self._queue.reap()
        numbers = tags >> np.uint64(_INDEX_BITS)
        for number in set(numbers.tolist()):
            batch = self._batches[number]
            of_batch = numbers == number
            batch.end(tags[of_batch], results[of_batch])
            if batch.left == 0:
                del self._batches[number]
        if self._closing:
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._batches and not self._closed.done():
            self._loop.remove_reader(self._queue.fd)
            # uvloop takes a reader off in its next pass; until then the descriptor stays open.
            self._loop.call_soon(self._close)

    def _close(self) -> None:
        self._queue.close()
        if not self._closed.done():
            self._closed.set_result(None)


def _open_queue(entries: int, backend: str | None) -> _native.IoQueue:
    demanded = backend or os.environ.get(BACKEND_VARIABLE) or "auto"
    queue = _native.IoQueue(entries, demanded)
    if demanded == "auto" and queue.reason:
        _log_refusal(queue.reason)
    return queue


@functools.cache
def _log_refusal(reason: str) -> None:
    """Log that io_uring is not used, once per process and reason."""
    _log.warning("disk.io_uring_refused", reason=reason, backend="threads")
