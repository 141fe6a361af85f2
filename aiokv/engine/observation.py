"""Observations: the newest records of an engine, and timelines of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.engine.observers import LeasePhase, TransferSpan
from aiokv.engine.timeline import check_path, timeline_of, write_timeline
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from contextvars import Context
    from pathlib import Path

    from aiokv.engine.observers import BatchSpan, Observers, Record

DEFAULT_LIMIT: Final = 65_536  # records per kind: about 20 MiB
MAX_SECONDS: Final = 3_600.0  # longest timeline


class Observation(Unique):
    """The newest records of an engine, inside a ``with`` block; see ``Inspection.observing``.

    Attributes:
        transfers: transfers that have ended, in order of their ends.
        phases: phases of leases that have ended, in order of their ends.
        batches: batches that have ended, in order of their ends.
        seen: number of records so far, including those that are no longer kept.
    """

    def __init__(self, observers: Observers, limit: int) -> None:
        limit = checks.integer("limit", limit, minimum=1, maximum=checks.MAX_INT32)
        self._observers = observers
        self._began_at = 0.0
        self._began_unix_seconds = 0.0
        self._was_entered = False
        self._left: list[Record] | None = None  # records in progress at the end of the block
        self.transfers: deque[TransferSpan] = deque(maxlen=limit)
        self.phases: deque[LeasePhase] = deque(maxlen=limit)
        self.batches: deque[BatchSpan] = deque(maxlen=limit)
        self.seen = 0

    def __enter__(self) -> Self:
        if self._was_entered:
            raise UsageError(
                "this Observation was entered already; it can be entered once",
                hint="call engine.inspect.observing() again",
            )
        self._observers.add(self._note)
        self._was_entered = True
        self._began_at, self._began_unix_seconds = time.monotonic(), time.time()
        return self

    def __exit__(self, *exc: object) -> None:
        self._observers.flush()
        self._left = self._observers.unfinished()
        self._observers.remove(self._note)

    def unfinished(self) -> list[Record]:
        """Return records of unfinished work, with the outcome ``"open"`` and the end now.

        After the block: what was in progress at its end.
        """
        return self._observers.unfinished() if self._left is None else list(self._left)

    def timeline(self) -> dict[str, Any]:
        """Return the records as a trace for ui.perfetto.dev or chrome://tracing.

        ``json.dump`` writes it. Building it takes about 30 us per record; after the block it can
        be done in a thread.

        Returns:
            A dict in the format of Chrome's trace events. Times are microseconds since the start
            of the block; records that began earlier are shown from there.
        """
        kept = len(self.transfers) + len(self.phases) + len(self.batches)
        return timeline_of(
            [*self.transfers, *self.phases, *self.batches, *self.unfinished()],
            self._began_at,
            {
                "source": "aiokv",
                "began_unix_seconds": self._began_unix_seconds,
                "displaced_records": self.seen - kept,
            },
        )

    def _note(self, record: Record, context: Context | None) -> None:
        self.seen += 1
        if isinstance(record, TransferSpan):
            self.transfers.append(record)
        elif isinstance(record, LeasePhase):
            self.phases.append(record)
        else:
            self.batches.append(record)

    def __repr__(self) -> str:
        return (
            f"<Observation of {len(self.transfers)} transfers, {len(self.phases)} phases, "
            f"{len(self.batches)} batches>"
        )


async def record_timeline(
    observers: Observers, seconds: float, path: Path | str | None
) -> dict[str, Any]:
    """See ``Inspection.timeline``."""
    seconds = checks.positive("seconds", seconds)
    if seconds > MAX_SECONDS:
        raise UsageError(f"timeline: seconds is {seconds}; it must be at most {MAX_SECONDS:.0f}")
    if path is not None:
        check_path(path)
    with Observation(observers, DEFAULT_LIMIT) as seen:
        await asyncio.sleep(seconds)
    trace = await asyncio.to_thread(seen.timeline)  # seconds, for many records
    if path is not None:
        await asyncio.to_thread(write_timeline, path, trace)
    return trace
