"""Timelines: records of an observation as a trace for ui.perfetto.dev or chrome://tracing.

The format is the JSON of Chrome's trace events. Complete events on one track must not overlap, so
records that overlap are spread over lanes: tracks of the same name with a number.

    transfers   a track per route: from the start on the device, store or peer to the end
    leases      a track per lease: its waits, and the times during which it held blocks
    arrivals    onloads, and waits for other engines, which overlap the grants of their leases
    batches     batches of the model

Counter tracks show the queued transfers by route, and the waiting leases by reason.
"""

from __future__ import annotations

import gzip
import heapq
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.base.groups import ATTENTION
from aiokv.engine.observers import BatchSpan, TransferSpan
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.engine.observers import LeasePhase, Record

_TRANSFERS: Final = 1
_LEASES: Final = 2
_ARRIVALS: Final = 3
_BATCHES: Final = 4
_PROCESSES: Final = {
    _TRANSFERS: "transfers",
    _LEASES: "leases",
    _ARRIVALS: "arrivals",
    _BATCHES: "batches",
}
_NAMES: Final = {
    "pending": "wait for pending blocks",
    "store": "wait for a store",
    "capacity": "wait for capacity",
    "peer": "wait for a peer",
    "onload": "onload",
    "granted": "granted",
}
_OVERLAPPING: Final = ("onload", "peer")  # phases within a grant


def timeline_of(
    records: Iterable[Record], began_at: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return records as a trace.

    Args:
        records: records that have ended, or are in progress.
        began_at: ``time.monotonic()`` of the start of the trace; earlier records are cut there.
        facts: shown with the trace.
    """
    return {
        "traceEvents": _Trace(began_at).events(records),
        "displayTimeUnit": "ms",
        "otherData": facts,
    }


def check_path(path: Path | str) -> None:
    """Check that a file can be written, before the work starts.

    Raises:
        UsageError: the folder of the file does not exist, or ``path`` is a folder.
    """
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise UsageError(f"timeline: cannot write {path}: {reason}")


def write_timeline(path: Path | str, trace: dict[str, Any]) -> None:
    """Write a timeline as JSON, compressed if ``path`` ends with ``.gz``.

    Raises:
        UsageError: the file cannot be written.
    """
    path = Path(path)
    data = msgspec.json.encode(trace)
    try:
        path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    except OSError as error:
        raise UsageError(f"timeline: cannot write {path}: {error.strerror or error}") from error


class _Tracks:
    """Tracks of one process: numbers and names."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.names: dict[int, str] = {}

    def add(self, name: str) -> int:
        tid = len(self.names) + 1
        self.names[tid] = name
        return tid


class _Trace:
    """Events of one trace, whose times are microseconds since ``began_at``."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._tracks = {pid: _Tracks(pid) for pid in _PROCESSES}
        self._events: list[dict[str, Any]] = []

    def events(self, records: Iterable[Record]) -> list[dict[str, Any]]:
        """Return the names of the tracks, then the events of all records in order of time."""
        transfers: dict[str, list[TransferSpan]] = defaultdict(list)
        leases: dict[int, list[LeasePhase]] = defaultdict(list)
        arrivals: dict[str, list[LeasePhase]] = defaultdict(list)
        batches: list[BatchSpan] = []
        for record in records:
            if isinstance(record, TransferSpan):
                transfers[_direction(record)].append(record)
            elif isinstance(record, BatchSpan):
                batches.append(record)
            elif record.phase in _OVERLAPPING:
                arrivals[record.phase].append(record)
            else:
                leases[record.lease_id].append(record)
        for route, spans in sorted(transfers.items()):
            self._add_route(route, spans)
        self._add_leases(leases)
        for name, phases in sorted(arrivals.items()):
            self._add_lanes(_ARRIVALS, _NAMES[name], [self._of_phase(p, p.owner) for p in phases])
        self._add_lanes(_BATCHES, "batches", [self._of_batch(batch) for batch in batches])
        return self._names() + sorted(self._events, key=lambda event: float(event["ts"]))

    # --- tracks ---------------------------------------------------------------------------------

    def _add_route(self, route: str, spans: Sequence[TransferSpan]) -> None:
        moving = [span for span in spans if span.started_at is not None]
        self._add_lanes(_TRANSFERS, route, [self._of_transfer(span) for span in moving])
        if waiting := [span for span in spans if span.started_at is None]:
            tid = self._tracks[_TRANSFERS].add(f"{route}, not begun")
            for span in waiting:
                event = {**self._of_transfer(span), "ph": "i", "s": "t", "tid": tid}
                del event["dur"]
                self._events.append(event)
        queued = [(span.queued_at, _start(span)) for span in spans]
        self._add_counter(_TRANSFERS, f"{route} queued", queued)

    def _add_leases(self, leases: dict[int, list[LeasePhase]]) -> None:
        """Add a track per lease; leases that follow one another share a track."""
        for phases in leases.values():
            phases.sort(key=lambda phase: (phase.began_at, phase.ended_at))
        ordered = sorted(leases.values(), key=lambda phases: phases[0].began_at)
        lanes = _Lanes()
        tids: dict[int, int] = {}
        for phases in ordered:
            end = max(phase.ended_at for phase in phases)
            lane = lanes.take(phases[0].began_at, end)
            if lane not in tids:
                tids[lane] = self._tracks[_LEASES].add(f"lease {lane + 1}")
            for phase in phases:
                name = f"{phase.owner}: {_NAMES[phase.phase]}"
                self._events.append({**self._of_phase(phase, name), "tid": tids[lane]})
        for kind in ("pending", "store", "capacity"):
            waits = [
                (phase.began_at, phase.ended_at)
                for phases in ordered
                for phase in phases
                if phase.phase == kind
            ]
            self._add_counter(_LEASES, f"leases that {_NAMES[kind]}", waits)

    def _add_lanes(self, pid: int, name: str, events: list[dict[str, Any]]) -> None:
        """Add complete events to as many tracks as they need so that none overlap."""
        lanes = _Lanes()
        tids: dict[int, int] = {}
        for event in sorted(events, key=lambda event: float(event["ts"])):
            lane = lanes.take(event["ts"], event["ts"] + event["dur"])
            if lane not in tids:
                suffix = f" {lane + 1}" if lane else ""
                tids[lane] = self._tracks[pid].add(f"{name}{suffix}")
            self._events.append({**event, "tid": tids[lane]})

    def _add_counter(self, pid: int, name: str, intervals: Sequence[tuple[float, float]]) -> None:
        """Add the number of intervals that overlap each time."""
        changes: dict[float, int] = defaultdict(int)
        for begin, end in intervals:
            changes[self._at(begin)] += 1
            changes[self._at(end)] -= 1
        count = 0
        for at, change in sorted(changes.items()):
            if change:
                count += change
                event = {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at}
                self._events.append({**event, "args": {"count": count}})

    def _names(self) -> list[dict[str, Any]]:
        names = []
        for pid, process in _PROCESSES.items():
            if not (tracks := self._tracks[pid].names):
                continue
            names.append(_metadata("process_name", pid, 0, {"name": f"aiokv {process}"}))
            names.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
            for tid, name in tracks.items():
                names.append(_metadata("thread_name", pid, tid, {"name": name}))
                names.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        return names

    # --- events ---------------------------------------------------------------------------------

    def _at(self, seconds: float) -> float:
        """Return a time in microseconds since the start of the trace, to the nanosecond."""
        return round(max(seconds - self._began_at, 0.0) * 1e6, 3)

    def _complete(
        self, pid: int, name: str, kind: str, begin: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        at = self._at(begin)
        return {
            "ph": "X",
            "name": name,
            "cat": kind,
            "pid": pid,
            "tid": 0,
            "ts": at,
            "dur": round(max(self._at(end) - at, 0.0), 3),
            "args": args,
        }

    def _of_transfer(self, span: TransferSpan) -> dict[str, Any]:
        begin = _start(span)
        seconds = span.ended_at - begin
        args: dict[str, Any] = {
            "transfer_id": span.transfer_id,
            "lease_id": span.lease_id,
            "blocks": span.blocks,
            "bytes": span.num_bytes,
            "outcome": span.outcome,
            "queued_seconds": begin - span.queued_at,
            "gigabytes_per_second": span.num_bytes / seconds / 1e9 if seconds > 0 else 0.0,
        }
        if span.reason:
            args["reason"] = span.reason
        direction = _direction(span)
        name = f"{direction} {span.blocks} blocks"
        return self._complete(_TRANSFERS, name, direction, begin, span.ended_at, args)

    def _of_phase(self, phase: LeasePhase, name: str) -> dict[str, Any]:
        args: dict[str, Any] = {
            "lease_id": phase.lease_id,
            "owner": phase.owner,
            "outcome": phase.outcome,
        }
        if phase.prompt_tokens:
            args |= {"prompt_tokens": phase.prompt_tokens, "cached_tokens": phase.cached_tokens}
        pid = _ARRIVALS if phase.phase in _OVERLAPPING else _LEASES
        return self._complete(pid, name, phase.phase, phase.began_at, phase.ended_at, args)

    def _of_batch(self, batch: BatchSpan) -> dict[str, Any]:
        args = {"batch_id": batch.batch_id, "leases": batch.leases, "is_open": batch.is_open}
        name = f"{batch.leases} leases"
        return self._complete(_BATCHES, name, "batch", batch.began_at, batch.ended_at, args)


class _Lanes:
    """Lanes whose intervals do not overlap; intervals come in order of their begins."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []  # heap of end and lane
        self._free: list[int] = []  # heap of lanes
        self._num_lanes = 0

    def take(self, begin: float, end: float) -> int:
        """Return the lowest lane that is free from ``begin`` on."""
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._num_lanes = self._num_lanes, self._num_lanes + 1
        heapq.heappush(self._busy, (end, lane))
        return lane


def _direction(span: TransferSpan) -> str:
    """Return the name of the track of a transfer."""
    return span.route if span.group == ATTENTION else f"{span.group} {span.route}"


def _start(span: TransferSpan) -> float:
    """Return the end of the time in the queue."""
    return span.ended_at if span.started_at is None else span.started_at


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0.0, "args": args}
