"""WriteQueue: messages and fragments that one end of a connection is to write."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aiokv.errors import PeerError
from aiokv.wire.frames import FrameWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    _Buffer = tuple[memoryview, "FragmentWrites[Any] | None"]


WRITE_BYTES: Final = 1 << 20  # limit per system call, which blocks the loop while it copies
_MAX_BUFFERS: Final = 64  # buffers per sendmsg

H = TypeVar("H")


class FragmentWrites(Generic[H]):
    """Fragments that were given to a connection in one call, keyed by the messages before them.

    Attributes:
        ended: done when the connection no longer reads the memory of the fragments: None if all
            that were not withdrawn are written, an error if the connection ended before.
    """

    def __init__(self, heads: Sequence[H]) -> None:
        self.ended: asyncio.Future[PeerError | None] = asyncio.get_running_loop().create_future()
        self._waiting = deque(heads)  # not begun, in order
        self._unwritten = len(self._waiting)
        self.withdrawn = False
        self._end_if_written()

    def withdraw(self) -> list[H]:
        """Begin no further writes; return the fragments that will not be written. Idempotent."""
        self.withdrawn = True
        unsent = list(self._waiting)
        self._waiting.clear()
        self._unwritten -= len(unsent)
        self._end_if_written()
        return unsent

    # --- for the connection -----------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the write of the next fragment begins."""
        self._waiting.popleft()

    def note_written(self) -> None:
        """Note that the connection no longer reads a fragment whose write had begun."""
        self._unwritten -= 1
        self._end_if_written()

    def fail(self, reason: str) -> None:
        """Note that the connection ended."""
        if not self.ended.done():
            self.ended.set_result(PeerError(reason))

    def _end_if_written(self) -> None:
        if not self._unwritten and not self.ended.done():
            self.ended.set_result(None)


class _Queued:
    """A message, with or without a fragment, that has no frame yet."""

    __slots__ = ("fragment", "message", "writes")

    def __init__(
        self,
        message: bytes,
        fragment: memoryview | None = None,
        writes: FragmentWrites[Any] | None = None,
    ) -> None:
        self.message = message
        self.fragment = fragment
        self.writes = writes


class WriteQueue:
    """Queue of what one end of a connection writes, in order.

    Args:
        key: key of the MACs; None for frames without a MAC.
    """

    def __init__(self, key: bytes | None) -> None:
        self._writer = FrameWriter(key)
        self._queue: deque[_Queued] = deque()  # messages that are not encoded into a frame yet
        self._active: deque[_Buffer] = deque()  # frames, fragments
        self._active_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._active or self._queue)

    @property
    def waiting(self) -> int:
        """Number of messages and fragments that have no frame yet."""
        return len(self._queue)

    def add(self, message: bytes) -> None:
        """Queue an encoded message."""
        self._queue.append(_Queued(message))

    def add_first(self, message: bytes) -> None:
        """Queue a message before those that have no frame yet."""
        self._queue.appendleft(_Queued(message))

    def add_fragments(
        self, fragments: Iterable[tuple[bytes, memoryview]], writes: FragmentWrites[Any]
    ) -> None:
        """Queue fragments, each behind its encoded message."""
        self._queue.extend(_Queued(message, fragment, writes) for message, fragment in fragments)

    def buffers(self) -> list[memoryview]:
        """Return the next bytes to write, at most ``WRITE_BYTES``, not copied."""
        while self._queue and self._active_bytes < WRITE_BYTES:
            queued = self._queue.popleft()
            writes = queued.writes
            if writes is None or queued.fragment is None:
                self._activate(memoryview(self._writer.frame(queued.message)), None)
            elif not writes.withdrawn:
                writes.begin()
                frame = self._writer.frame(queued.message, has_fragment=True)
                self._activate(memoryview(frame), None)
                self._activate(queued.fragment, writes)
        return _first_bytes(self._active, WRITE_BYTES)

    def _activate(self, buffer: memoryview, writes: FragmentWrites[Any] | None) -> None:
        self._active.append((buffer, writes))
        self._active_bytes += len(buffer)

    def drop_sent(self, sent: int) -> None:
        """Forget the first ``sent`` bytes: the kernel has them."""
        self._active_bytes -= sent
        while sent:
            buffer, writes = self._active[0]
            if sent < len(buffer):
                self._active[0] = (buffer[sent:], writes)
                return
            sent -= len(buffer)
            if writes is not None:
                writes.note_written()
            self._active.popleft()

    def fail(self, reason: str) -> None:
        """Drop everything: the connection has ended. Idempotent."""
        for _, writes in self._active:
            if writes is not None:
                writes.fail(reason)
        for queued in self._queue:
            if queued.writes is not None:
                queued.writes.fail(reason)
        self._active.clear()
        self._queue.clear()


def _first_bytes(buffers: Iterable[_Buffer], most: int) -> list[memoryview]:
    """Return the first ``most`` bytes of all buffers, not copied."""
    first: list[memoryview] = []
    for buffer, _ in buffers:
        first.append(buffer[:most])
        most -= len(first[-1])
        if not most or len(first) == _MAX_BUFFERS:
            break
    return first
