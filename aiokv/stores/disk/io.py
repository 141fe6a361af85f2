"""DiskIo: reads and writes of files as coroutines.

io = DiskIo()
io.register_buffer(memory.address, memory.num_bytes)
results = await io.read(fd, addresses, lengths, offsets)   # int32[N]: bytes or -errno
await io.aclose()

Requests go to a native queue, which announces the end of each call through an eventfd on the loop.
The queue has one thread that uses io_uring, and one that allocates the pages of each registered
buffer; where the kernel or a sandbox refuses io_uring, up to 8 threads with blocking calls.
``AIOKV_IO=threads`` or ``AIOKV_IO=io_uring`` forces one of them.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv import _native
from aiokv.base.logs import Log
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRIES: Final = 64  # requests in the kernel at a time; further ones wait in the native queue
DIRECT_ALIGNMENT: Final = 4096  # O_DIRECT requires it of address, length and offset
CALL_REQUESTS: Final = 4096  # most requests per native call, so that it ends soon
BACKEND_VARIABLE: Final = "AIOKV_IO"

_INDEX_BITS: Final = 32  # a tag is the number of the batch, then the index of the request

_log = Log(__name__)


class _Batch:
    """The requests of one call.

    Attributes:
        number: number of the call.
        results: ``[N]`` int32, written as requests end.
        waiter: future of the coroutine that waits for the batch.
    """

    def __init__(self, number: int, num_requests: int) -> None:
        self.number = number
        self.results: NDArray[np.int32] = np.zeros(num_requests, np.int32)
        self.waiter: asyncio.Future[None] | None = None
        self._ended: NDArray[np.bool_] = np.zeros(num_requests, np.bool_)

    @property
    def tags(self) -> NDArray[np.uint64]:
        first = self.number << _INDEX_BITS
        return np.arange(first, first + len(self.results), dtype=np.uint64)

    @property
    def done(self) -> bool:
        return bool(self._ended.all())

    def end(self, indices: NDArray[np.uint64], results: NDArray[np.int32]) -> None:
        """Take results; idempotent."""
        self.results[indices] = results
        self._ended[indices] = True

    def wake(self) -> None:
        """Resume the coroutine; idempotent."""
        if self.waiter is not None and not self.waiter.done():
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
        self._registrations: dict[int, int] = {}  # bytes, by batch
        self._closing = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._queue.fd, self._reap)

    @property
    def backend(self) -> str:
        return self._queue.backend

    @property
    def pending(self) -> int:
        """Requests in flight: their memory may be accessed."""
        return self._queue.pending

    def register_buffer(self, address: int, num_bytes: int) -> None:
        """Let the kernel map memory once for all later requests, which makes them faster.

        Returns at once. The memory is registered in pieces as its pages are allocated; reads and
        writes do not wait for it. A refusal of the kernel is logged. Needs Linux 5.13.

        Args:
            address: address of the first byte.
            num_bytes: number of bytes. They must stay mapped until ``aclose``.

        Raises:
            UsageError: ``aclose`` was called.
        """
        batch = self._batch(1)
        self._registrations[batch.number] = num_bytes
        self._batches[batch.number] = batch
        self._queue.register_buffer(address, num_bytes, int(batch.tags[0]))

    async def read(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """Read ``lengths[i]`` bytes at ``offsets[i]`` of the file to memory ``addresses[i]``.

        Requests run at the same time, ``CALL_REQUESTS`` after one another in a longer call. Reads
        that wait are started before writes that wait.

        Returns:
            ``[N]`` int32: bytes read (fewer than requested: the file ended), or -errno.

        Raises:
            LayoutError: the file is open with O_DIRECT, and an address, length or offset is not a
                multiple of ``DIRECT_ALIGNMENT``; or a request is too long. Nothing is read, except
                for the first requests of a call with more than ``CALL_REQUESTS``.
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

        Called on another loop, because the loop of this object has ended, it blocks instead.

        Cancellation: the queue is closed all the same, when the kernel accesses no memory.
        """
        if asyncio.get_running_loop() is not self._loop:
            self._close_without_loop()
            return
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
        num_requests = len(addresses)
        if num_requests > CALL_REQUESTS:
            if not num_requests == len(lengths) == len(offsets):
                raise UsageError(
                    f"{num_requests} addresses, {len(lengths)} lengths and {len(offsets)} offsets; "
                    "their numbers must be equal"
                )
            parts = [slice(i, i + CALL_REQUESTS) for i in range(0, num_requests, CALL_REQUESTS)]
            return np.concatenate(
                [
                    await self._move(write, fd, addresses[part], lengths[part], offsets[part])
                    for part in parts
                ]
            )
        batch = self._batch(num_requests)
        self._queue.submit(fd, write, addresses, lengths, offsets, batch.tags)
        return await self._end(batch)

    def _batch(self, num_requests: int) -> _Batch:
        if self._closing:
            raise UsageError("DiskIo is closed")
        return _Batch(next(self._numbers), num_requests)

    async def _end(self, batch: _Batch) -> NDArray[np.int32]:
        """Wait for all requests of a batch, also when the coroutine is cancelled."""
        if not batch.done:
            self._batches[batch.number] = batch
        cancelled: asyncio.CancelledError | None = None
        while not batch.done:
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
        """Hand results to their batches; called by the loop when the eventfd is readable.

        An interrupt (Ctrl-C) may raise anywhere in here. The eventfd stays readable until the
        results are removed, so the loop calls this again.
        """
        tags, results = self._queue.peek()
        numbers, indices = np.divmod(tags, np.uint64(1 << _INDEX_BITS))
        for number in set(numbers.tolist()):  # np.unique imports numpy.ma, which takes 10 ms
            batch = self._batches.get(number)
            if batch is None:
                continue  # it ended before the interrupt
            of_batch = numbers == number
            batch.end(indices[of_batch], results[of_batch])
            if batch.done:
                batch.wake()
                self._report_registration(batch)
                del self._batches[number]
        self._queue.pop(len(tags))
        if self._closing:
            self._close_when_idle()

    def _report_registration(self, batch: _Batch) -> None:
        num_bytes = self._registrations.pop(batch.number, 0)
        error = -int(batch.results[0])
        if num_bytes == 0 or error in (0, errno.ECANCELED):
            return
        _log.warning(
            "disk.buffer_not_registered",
            num_bytes=num_bytes,
            reason=os.strerror(error),
            hint="raise RLIMIT_MEMLOCK (ulimit -l): reads and writes then use less CPU time",
        )

    def _close_without_loop(self) -> None:
        self._closing = True
        self._batches.clear()
        if self._queue.fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._queue.fd)
        self._queue.close()

    def _close_when_idle(self) -> None:
        if not self._batches and not self._closed.done():
            self._loop.remove_reader(self._queue.fd)
            # uvloop removes a reader in its next pass. Until then, the descriptor must stay open.
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
