"""A library of the test that writes into the memory of this process, when the test lets it."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError
from aiokv.peers.one_sided import EndpointError, WritePiece
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.transport import PeerMemory


class Gate:
    """A place where threads wait until the test opens it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def shut(self) -> None:
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self.reached.set()
        if not self._open.wait(PATIENCE_SECONDS):
            raise EndpointError("the test did not open the gate")


class FakeBackend:
    """See :class:`~aiokv.peers.one_sided.Backend`.

    Attributes:
        creating, writing, closing: gates of the calls.
        failures: errors of the next calls, by name of the call.
        after_write: called with the pieces when they were written.
        endpoints: all that were made.
    """

    name = "nixl"
    write_bytes = 4 << 20

    def __init__(self, *, is_reused: bool = False) -> None:
        self.is_reused = is_reused
        self.creating, self.writing, self.closing = Gate(), Gate(), Gate()
        self.failures: dict[str, Exception] = {}
        self.after_write: Callable[[Sequence[WritePiece]], object] = lambda pieces: None
        self.endpoints: list[FakeEndpoint] = []

    def load(self) -> None:
        self.fail("load")

    def create(self, memory: PeerMemory, *, receives: bool) -> FakeEndpoint:
        self.creating.wait()
        self.fail("create")
        self.endpoints.append(FakeEndpoint(self, memory, receives))
        return self.endpoints[-1]

    def fail(self, call: str) -> None:
        error = self.failures.pop(call, None)
        if error is not None:
            raise error

    def open_gates(self) -> None:
        for gate in (self.creating, self.writing, self.closing):
            gate.open()


class FakeEndpoint:
    """See :class:`~aiokv.peers.one_sided.Endpoint`."""

    def __init__(self, backend: FakeBackend, memory: PeerMemory, receives: bool) -> None:
        self.backend = backend
        self.memory = memory
        self.receives = receives
        self.connected_to: tuple[bytes, int | None] | None = None
        self.is_closed = False
        self.writes = 0

    def metadata(self) -> bytes:
        return b"fake"

    def connect(self, metadata: bytes, device: int | None) -> None:
        self.backend.fail("connect")
        self.connected_to = metadata, device

    def write(self, pieces: Sequence[WritePiece], unwanted: threading.Event) -> None:
        assert not self.is_closed
        self.writes += 1
        self.backend.writing.wait()
        self.backend.fail("write")
        for piece in pieces:
            ctypes.memmove(piece.target, piece.source, piece.num_bytes)
        self.backend.after_write(pieces)

    def close(self) -> None:
        self.backend.closing.wait()
        self.is_closed = True
        self.backend.fail("close")


MISSING = ConfigError("the package is missing", hint="install it")
