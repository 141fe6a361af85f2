"""FlakyIo: file I/O whose requests fail, end early or wait, as a script says.

io = FlakyIo(DiskIo())
io.fail("write", errno.ENOSPC, times=1)   # the next request of a write
io.cut("read", 4096)                      # all requests of reads end after 4096 bytes
io.cut("write", 4096, error=errno.EIO)    # torn, and reported as an error
io.cut("write", 4096, acknowledge=True)   # torn, and reported as written, as before a power cut
gate = io.hold("flush")                   # flushes wait until gate.open()
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from aiokv.testing.rules import Gate

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.stores.disk.io import DiskIo

Operation = Literal["read", "write", "flush"]

_WHOLE: Final = 1  # the result of a request whose whole length is reported


class IoRequest(NamedTuple):
    """One request, for the ``covers`` of a fault.

    Attributes:
        fd: file descriptor.
        offset: first byte in the file; 0 for a flush.
        length: number of bytes; 0 for a flush.
    """

    fd: int
    offset: int
    length: int


class _Fault:
    """A rule that changes the next ``times`` requests of an operation that it covers.

    Attributes:
        num_bytes: bytes of a request that are moved.
    """

    def __init__(
        self,
        operation: Operation,
        times: int | None,
        covers: Callable[[IoRequest], bool] | None,
        num_bytes: int,
        result: int | None,
    ) -> None:
        self.num_bytes = num_bytes
        self._result = result
        self._operation = operation
        self._times = times
        self._covers = covers

    def result(self, request: IoRequest, moved: int) -> int:
        """Return the result of a request of which ``moved`` bytes were moved."""
        if moved < 0 or self._result is None:
            return moved
        return request.length if self._result == _WHOLE else self._result

    def take(self, operation: Operation, request: IoRequest) -> bool:
        """Return whether the fault changes this request; if so, count the request."""
        if operation != self._operation or self._times == 0:
            return False
        if self._covers is not None and not self._covers(request):
            return False
        if self._times is not None:
            self._times -= 1
        return True


class FlakyIo:
    """A :class:`~aiokv.stores.disk.io.DiskIo` with faults. Each request has one fault at most.

    Args:
        io: moves the bytes. ``aclose`` closes it.

    Attributes:
        faults: requests that a fault has changed.
        held: calls that wait for a gate.
    """

    def __init__(self, io: DiskIo) -> None:
        self._io = io
        self._rules: list[_Fault] = []
        self._gates: dict[Operation, Gate] = {}
        self.faults = 0
        self.held = 0

    @property
    def backend(self) -> str:
        return self._io.backend

    def fail(
        self,
        operation: Operation,
        error: int = errno.EIO,
        *,
        times: int | None = None,
        covers: Callable[[IoRequest], bool] | None = None,
    ) -> None:
        """Let requests fail; no byte is moved.

        Args:
            operation: which requests.
            error: errno of the result.
            times: number of requests; None: all from now on.
            covers: chooses requests; ``times`` counts only these.
        """
        self._rules.append(_Fault(operation, times, covers, 0, -error))

    def cut(
        self,
        operation: Literal["read", "write"],
        num_bytes: int,
        *,
        error: int = 0,
        acknowledge: bool = False,
        times: int | None = None,
        covers: Callable[[IoRequest], bool] | None = None,
    ) -> None:
        """Let requests move no more than their first bytes.

        Args:
            operation: which requests.
            num_bytes: bytes that are moved; a multiple of 4096 for files open with O_DIRECT.
            error: errno of the result; 0: the result is the number of moved bytes.
            acknowledge: report the whole length, as a disk does that loses its write cache.
            times: as in :meth:`fail`.
            covers: likewise.
        """
        result = _WHOLE if acknowledge else -error if error else None
        self._rules.append(_Fault(operation, times, covers, num_bytes, result))

    def hold(self, operation: Operation) -> Gate:
        """Let calls of an operation wait, before their first request, until the gate is opened."""
        gate = self._gates[operation] = Gate()
        return gate

    def heal(self) -> None:
        """Remove all faults and open all gates."""
        self._rules.clear()
        for gate in self._gates.values():
            gate.open()
        self._gates.clear()

    def register_buffer(self, address: int, num_bytes: int) -> None:
        """See :meth:`DiskIo.register_buffer`."""
        self._io.register_buffer(address, num_bytes)

    async def read(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """See :meth:`DiskIo.read`."""
        return await self._move("read", fd, addresses, lengths, offsets)

    async def write(
        self,
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """See :meth:`DiskIo.write`."""
        return await self._move("write", fd, addresses, lengths, offsets)

    async def flush(self, fd: int) -> int:
        """See :meth:`DiskIo.flush`."""
        await self._pass_gate("flush")
        request = IoRequest(fd, 0, 0)
        fault = self._fault("flush", request)
        return await self._io.flush(fd) if fault is None else fault.result(request, 0)

    async def aclose(self) -> None:
        """Open all gates, and close the wrapped I/O."""
        self.heal()
        await self._io.aclose()

    async def _move(
        self,
        operation: Literal["read", "write"],
        fd: int,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        await self._pass_gate(operation)
        requests = [
            IoRequest(fd, offset, length)
            for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]
        faults = [self._fault(operation, request) for request in requests]
        allowed = [
            request.length if fault is None else min(request.length, fault.num_bytes)
            for request, fault in zip(requests, faults, strict=True)
        ]
        call = self._io.read if operation == "read" else self._io.write
        results = await call(fd, addresses, np.array(allowed, np.uint32), offsets)
        for i, fault in enumerate(faults):
            if fault is not None:
                results[i] = fault.result(requests[i], int(results[i]))
        return results

    def _fault(self, operation: Operation, request: IoRequest) -> _Fault | None:
        for rule in self._rules:
            if rule.take(operation, request):
                self.faults += 1
                return rule
        return None

    async def _pass_gate(self, operation: Operation) -> None:
        gate = self._gates.get(operation)
        if gate is None:
            return
        self.held += 1
        try:
            await gate.wait()
        finally:
            self.held -= 1
