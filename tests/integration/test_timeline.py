"""Timelines: each event is valid, tracks do not overlap, and durations are those of the records."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiokv import CacheConfig, CacheEngine, cli
from aiokv.engine.timeline import timeline_of
from aiokv.errors import ClosedError, UsageError
from aiokv.statistics import TransferSpan
from aiokv.testing import running_clock, spin
from tests.harness.served import Served, computed, resumed, swapped_out

A = [1, 2, 3, 4, 5, 6, 7]
B = [11, 12, 13, 14, 15, 16, 17]

FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "name", "cat", "pid", "tid", "ts", "s", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
}


def check(trace: dict[str, Any]) -> None:
    """Check a trace against the format of Chrome's trace events."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = json.loads(json.dumps(trace["traceEvents"], allow_nan=False))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({(pid, name) for (pid, _), name in named.items()}) == len(named)
    lanes = defaultdict(list)
    for event in events:
        assert set(event) == FIELDS[event["ph"]]
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in named
        if event["ph"] == "C":
            assert event["args"]["count"] >= 0
    for spans in lanes.values():
        for (_, end), (begin, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end <= begin + 1e-6, "events of one track overlap"
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    last = {e["name"]: e["args"]["count"] for e in events if e["ph"] == "C"}
    assert not any(last.values()), "a counter does not return to 0"


def seconds_by(trace: dict[str, Any], process: int) -> dict[str, float]:
    """Return the sums of durations by category."""
    sums: dict[str, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == process:
            sums[event["cat"]] += event["dur"] / 1e6
    return sums


@pytest.mark.asyncio
async def test_events_are_valid_and_their_durations_are_those_of_the_records():
    async with Served(device_blocks=8) as served:
        await served.to_host(A)
        await served.to_host(B)
        with served.engine.inspect.observing() as seen:
            first = served.engine.match(A, owner="first")
            second = served.engine.match(B, owner="second")
            await first.allocate(7)
            await second.allocate(7)
            third = served.engine.match([21, 22, 23], owner="third")
            waiting = asyncio.ensure_future(third.allocate(3))
            await spin(2)
            served.device.complete_all()
            await served.settle()
            with served.engine.computing([first, second]):
                await spin(2)
            first.release()
            await waiting
            served.compute(third, [21, 22, 23])
            third.commit(3)
            await served.complete_offloads()
            third.release()
            second.release()
        trace = seen.timeline()
        check(trace)
        check(json.loads(msgspec.json.encode(trace)))
        moved: dict[str, float] = defaultdict(float)
        for span in seen.transfers:
            assert span.started_at is not None
            moved[span.route] += span.ended_at - span.started_at
        assert seconds_by(trace, 1) == pytest.approx(moved, abs=1e-6)
        assert {"onload", "offload"} == set(moved)
        phases: dict[str, float] = defaultdict(float)
        for phase in seen.phases:
            phases[phase.phase] += phase.ended_at - phase.began_at
        both = seconds_by(trace, 2) | seconds_by(trace, 3)
        assert both == pytest.approx(phases, abs=1e-6)
        assert set(both) == {"capacity", "granted", "onload"}
        (batch,) = [e for e in trace["traceEvents"] if e.get("cat") == "batch"]
        assert (batch["name"], batch["args"]["leases"]) == ("2 leases", 2)
        names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
        # Two onloads were in the device at the same time; the third lease has a track of its own.
        assert {"onload", "onload 2", "offload", "lease 1", "lease 2", "lease 3"} <= set(names)
        assert trace["otherData"]["displaced_records"] == 0


@pytest.mark.asyncio
async def test_the_phases_of_one_lease_share_a_track():
    async with Served() as served:
        with served.engine.inspect.observing() as seen:
            lease = await computed(served, A, owner="r1")
            await served.complete_offloads()
            await lease.preempt()
            await lease.resume(7)
            served.compute(lease, A, lease.cached_tokens)
            lease.commit(7)
            await swapped_out(served, lease)
            await resumed(served, lease, 7)
            lease.release()
            async with served.engine.match(A, owner="r2") as later:
                await later.allocate(7)
        trace = seen.timeline()
        check(trace)
        grants = [e for e in trace["traceEvents"] if e.get("cat") == "granted"]
        assert [e["name"] for e in grants] == ["r1: granted"] * 3 + ["r2: granted"]
        assert {e["tid"] for e in grants} == {1}
        assert [e["args"]["outcome"] for e in grants] == [
            "preempted", "swapped", "released", "released",
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_what_is_in_progress_is_cut_at_both_ends():
    async with Served() as served:
        await served.to_host(A)
        lease = served.engine.match(A, owner="r1")
        await lease.allocate(7)
        with served.engine.inspect.observing() as seen:
            await spin(2)
        served.device.complete_all()
        await served.settle()
        trace = seen.timeline()
        check(trace)
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert {e["cat"]: e["args"]["outcome"] for e in spans} == {
            "onload": "open", "granted": "open",
        }  # fmt: skip
        assert {e["ts"] for e in spans if e["cat"] == "onload"} == {0.0}
        lease.release()


def span(transfer_id: int, queued: float, started: float | None, ended: float, **fields: Any):
    return TransferSpan(
        transfer_id=transfer_id,
        route="onload",
        group="attention",
        blocks=1,
        num_bytes=2_000_000,
        queued_at=queued,
        started_at=started,
        ended_at=ended,
        **{"outcome": "done", **fields},
    )


def test_times_lanes_and_counters_of_a_route():
    records = [
        span(1, 10.0, 10.5, 11.0),
        span(2, 10.0, 10.5, 12.0),
        span(3, 10.0, 11.0, 13.0, outcome="failed", reason="a bad page"),
        span(4, 10.0, None, 10.25, outcome="cancelled"),
    ]
    trace = timeline_of(records, 10.0, {})
    check(trace)
    events = trace["traceEvents"]
    spans = {e["args"]["transfer_id"]: e for e in events if e["ph"] == "X"}
    assert [(spans[i]["ts"], spans[i]["dur"], spans[i]["tid"]) for i in (1, 2, 3)] == [
        (5e5, 5e5, 1), (5e5, 15e5, 2), (1e6, 2e6, 1),
    ]  # fmt: skip
    assert spans[1]["args"]["queued_seconds"] == 0.5
    assert spans[1]["args"]["gigabytes_per_second"] == 0.004
    assert spans[3]["args"]["reason"] == "a bad page"
    (cancelled,) = [e for e in events if e["ph"] == "i"]
    assert (cancelled["ts"], cancelled["args"]["outcome"]) == (25e4, "cancelled")
    counts = [(e["ts"], e["args"]["count"]) for e in events if e["ph"] == "C"]
    assert counts == [(0.0, 4), (25e4, 3), (5e5, 1), (1e6, 0)]


def test_many_records_take_few_tracks_when_they_follow_each_other():
    trace = timeline_of([span(i, i, i, i + 1) for i in range(500)], 0.0, {})
    check(trace)
    assert Counter(e["name"] for e in trace["traceEvents"])["thread_name"] == 1


@pytest.mark.asyncio
@pytest.mark.clock
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
async def test_engine_writes_the_timeline_of_the_next_seconds(tmp_path, suffix):
    path = tmp_path / f"timeline{suffix}"
    async with Served(manual=False) as served:
        task = asyncio.ensure_future(served.engine.inspect.timeline(2.5, path))
        await spin(2)
        await served.serve(A)
        await served.engine.drain()
        await running_clock().advance(2.4)
        assert not task.done()
        await running_clock().advance(0.2)
        trace = await task
        assert not served.engine.inspect.parts.observers.active
        await served.serve(B)  # not seen
    check(trace)
    assert len([e for e in trace["traceEvents"] if e.get("cat") == "granted"]) == 1
    data = path.read_bytes()
    written = json.loads(gzip.decompress(data) if suffix == ".json.gz" else data)
    assert written == trace


@pytest.mark.asyncio
@pytest.mark.clock
async def test_a_cancelled_timeline_writes_nothing(tmp_path):
    path = tmp_path / "timeline.json"
    async with Served(manual=False) as served:
        task = asyncio.ensure_future(served.engine.inspect.timeline(10, path))
        await spin(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not served.engine.inspect.parts.observers.active
        assert not path.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [0, -1, 3601, "1", None, float("nan")])
async def test_wrong_durations_are_refused(seconds):
    async with CacheEngine(CacheConfig(device_blocks=8)) as engine:
        with pytest.raises(UsageError, match="seconds is"):
            await engine.inspect.timeline(seconds)
    with pytest.raises(ClosedError):
        await engine.inspect.timeline(1)


@pytest.mark.asyncio
async def test_a_path_that_cannot_be_written_is_refused_before_the_recording(tmp_path):
    async with CacheEngine(CacheConfig(device_blocks=8)) as engine:
        with pytest.raises(UsageError, match="is not a folder"):
            await engine.inspect.timeline(3600, tmp_path / "no" / "timeline.json")
        with pytest.raises(UsageError, match="it is a folder"):
            await engine.inspect.timeline(3600, tmp_path)


SMALL = str(Path(__file__).parents[1] / "data" / "small.jsonl")


@pytest.mark.parametrize(
    ("flags", "categories"),
    [
        ((), {"granted"}),
        (
            ("--host-blocks", "4000", "--concurrency", "4", "--execute", "--execute-mib", "16"),
            {"granted", "onload", "offload"},
        ),
    ],
)
def test_replay_writes_the_timeline_of_its_engine(tmp_path, capsys, flags, categories):
    path = tmp_path / "out.json"
    assert (
        cli.main(["replay", SMALL, "--device-blocks", "2000", *flags, "--timeline", str(path)]) == 0
    )
    capsys.readouterr()
    trace = json.loads(path.read_bytes())
    check(trace)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    # With copies in flight, a request may wait for capacity.
    assert {e["cat"] for e in events} - {"capacity"} == categories
    granted = [e for e in events if e["cat"] == "granted"]
    assert len(granted) == 400 - trace["otherData"]["displaced_records"]
    assert sum(e["args"]["cached_tokens"] for e in granted) > 0


@pytest.mark.parametrize("flags", [("--write-policy", "all"), ("--engines", "2")])
def test_replays_on_several_engines_have_no_timeline(tmp_path, capsys, flags):
    path = tmp_path / "out.json"
    assert cli.main(["replay", SMALL, *flags, "--timeline", str(path)]) == 2
    assert "--timeline" in capsys.readouterr().err
    assert not path.exists()
