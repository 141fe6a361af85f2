"""Recordings: the requests of an engine, for trace files."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiokv.base import checks
from aiokv.engine.trace_writer import TraceEntry, TraceWriter
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.engine.lifetime import Lifetime
    from aiokv.engine.trace_writer import RecordingStatistics
    from aiokv.scheduler.reader import CacheReader

MIN_FILE_BYTES: Final = 1 << 16


class _Prompt(NamedTuple):
    """A request that has not ended."""

    arrived_at: float
    tokens: NDArray[np.int32]
    context: str
    items: Sequence[tuple[bytes, int, int]]


class Recordings:
    """The recording in progress, and the prompts of the leases that it will write.

    Attributes:
        active: True while there is a recording; each hook is behind this boolean.
    """

    def __init__(self, read: CacheReader) -> None:
        self.active = False
        self._read = read
        self._writer: TraceWriter | None = None
        self._prompts: dict[int, _Prompt] = {}  # by lease

    def matched(
        self,
        lease_id: int,
        tokens: NDArray[np.int32],
        context: str,
        items: Sequence[tuple[bytes, int, int]],
    ) -> None:
        """Note a lease that was opened; the caller may change the array later."""
        self._prompts[lease_id] = _Prompt(time.monotonic(), tokens.copy(), context, items)

    def releases(self, lease_id: int, label: str = "") -> None:
        """Record the request of a lease that is about to be released.

        A lease that has computed nothing is left out: its prompt is not in the cache.

        Args:
            lease_id: the lease.
            label: see ``Lease.release``.
        """
        prompt = self._prompts.pop(lease_id, None)
        *_, computed_blocks = self._read.usage(lease_id)
        if prompt is None or self._writer is None or not computed_blocks:
            return
        behind_prompt = self._read.computed_tokens(lease_id) - len(prompt.tokens)
        # A request does not compute with the last token that it generates.
        self._writer.put(
            TraceEntry(
                arrived_at=prompt.arrived_at,
                tokens=prompt.tokens,
                output_tokens=max(0, behind_prompt + 1),
                context=prompt.context,
                items=prompt.items,
                label=label,
            )
        )

    def begin(self, writer: TraceWriter) -> None:
        """Begin to record.

        Raises:
            UsageError: the engine is being recorded, or the file cannot be written.
        """
        if self._writer is not None:
            raise UsageError(
                "record_trace: another recording of this engine is in progress",
                hint="end its `async with` block first",
            )
        writer.start()
        self._writer = writer
        self.active = True

    def end(self) -> None:
        """Record the leases that are open, and note no more."""
        for lease_id in list(self._prompts):
            self.releases(lease_id)
        self._writer = None
        self.active = False


class TraceRecording:
    """Recording of the requests of an engine; made by ``CacheEngine.record_trace``.

    ``async with`` begins it, and its end writes the rest and closes the file.
    """

    def __init__(self, recordings: Recordings, lifetime: Lifetime, writer: TraceWriter) -> None:
        self._recordings = recordings
        self._lifetime = lifetime
        self._writer = writer

    async def __aenter__(self) -> Self:
        self._lifetime.check_open()
        self._recordings.begin(self._writer)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End the recording.

        Cancellation: the writer continues in its thread, and closes the file.
        """
        if self._lifetime.is_running:
            self._recordings.end()
        await asyncio.to_thread(self._writer.close)

    def statistics(self) -> RecordingStatistics:
        """Return the counts since the start, perhaps without those of the last second."""
        return self._writer.statistics()


def writer_for(path: str | os.PathLike[str], max_file_bytes: int, max_files: int) -> TraceWriter:
    """Return a writer; see ``CacheEngine.record_trace``."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"record_trace: path is {checks.shown(path)}; it must be a path")
    text = checks.text("path", os.fspath(path)) if isinstance(path, str) else os.fspath(path)
    if not Path(path).name or "\0" in text:
        raise UsageError(f"record_trace: path is {checks.shown(path)}; it must name a file")
    return TraceWriter(
        Path(path),
        max_file_bytes=checks.integer("max_file_bytes", max_file_bytes, minimum=MIN_FILE_BYTES),
        max_files=checks.integer("max_files", max_files, minimum=1),
    )
