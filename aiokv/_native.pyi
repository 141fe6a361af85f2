"""Native core of aiokv: prefix index, block pools, block copies."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Event:
    """A point in a stream's order. Thread-safe."""

    def __init__(self) -> None: ...

    @property
    def done(self) -> bool:
        """Recorded and finished, also when it failed."""

    @property
    def recorded(self) -> bool: ...

    @property
    def generation(self) -> int:
        """How often it was recorded."""

    @property
    def error(self) -> str | None:
        """Text of the failure; None while not done and on success."""

    @property
    def finished_seconds(self) -> float | None:
        """time.monotonic() at its end; None while not done."""

    def synchronize(self) -> None:
        """Block until it is done."""

class Stream:
    """A thread that does its work first in, first out."""

    def __init__(self, name: str) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def depth(self) -> int:
        """Works and records not finished yet."""

    def record(self, event: Event) -> None:
        """Make `event` done when all work so far is."""

    def wait_event(self, event: Event) -> None:
        """Let later work start after the event; it must have been recorded."""

    def synchronize(self) -> None:
        """Block until all work so far is done."""

    def close(self) -> None:
        """Do what is queued, then join the thread."""

    def abort(self) -> None:
        """Fail what is queued, then join the thread."""

class BlockMap:
    """Where every block of both tiers lies. Borrows the memory."""

    def __init__(self, num_layers: int, pieces: Sequence[tuple[int, int, int, int, int]], host_base: int, host_stride: int, host_blocks: int, device_blocks: int) -> None: ...

    def check_ids(self, host_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], device_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, onload: bool) -> None:
        """
        Raise UsageError on bad ranges, unequal or empty lists, and duplicate destinations.
        """

class CopyJob:
    """One transfer in flight. Thread-safe."""

    @property
    def layer_events(self) -> list[Event]: ...

    @property
    def error(self) -> tuple[int, str] | None:
        """(first bad block, reason), or None."""

class TimerFd:
    """A one-shot monotonic timer as a file descriptor."""

    def __init__(self) -> None: ...

    def fileno(self) -> int: ...

    def arm(self, delay_seconds: float) -> None:
        """Expire once, that long from now; replaces an earlier arming."""

    def disarm(self) -> None: ...

    def drain(self) -> None:
        """Take note of the expiry, so that select() waits again."""

    def close(self) -> None: ...

def copy_blocks(stream: Stream, block_map: BlockMap, host_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], device_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, onload: bool, after: Event | None, owner: object) -> CopyJob:
    """
    Queue a copy and return at once. Raises as check_ids() does, before the first byte.
    """
