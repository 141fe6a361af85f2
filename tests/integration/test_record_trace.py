"""Recording of the requests of an engine: what a trace has, rotation, and failing disks."""

from __future__ import annotations

import errno
import gzip
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Item
from aiokv.engine import trace_writer
from aiokv.engine.trace_writer import HASH_BLOCK_TOKENS, TraceFile, TraceWriter
from aiokv.errors import ClosedError, UsageError
from aiokv.testing import spin
from aiokv.trace.format import expand_tokens, read_trace
from aiokv.trace.replay import ReplayOptions, replay, workload_of
from tests.harness.synthetic_trace import generate_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiokv.trace.format import TraceRequest


def config(**more: Any) -> CacheConfig:
    return CacheConfig(**{"block_tokens": 16, "device_blocks": 4000, **more})


def prompt(*parts: int, tail: int = 1) -> np.ndarray:
    """Return a prompt of 512 equal tokens per part, and some more tokens."""
    tokens = np.repeat(np.array([*parts, 7], np.int32), HASH_BLOCK_TOKENS)
    return tokens[: HASH_BLOCK_TOKENS * len(parts) + tail]


async def serve(engine: CacheEngine, tokens: np.ndarray, outputs: int = 1, **context: Any) -> None:
    async with engine.match(tokens, **context) as lease:
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        for _ in range(outputs - 1):
            engine.extend([lease], 1)
            lease.append([5])
            lease.commit(lease.num_tokens)
    engine.step()


def no_stages(stage: str, total: int) -> Callable[[int], None]:
    return lambda count: None


def ids(requests: list[TraceRequest]) -> list[list[int]]:
    return [request.hash_ids for request in requests]


@pytest.mark.asyncio
async def test_recorded_trace_replays_with_the_hits_of_the_original(tmp_path: Path):
    original = generate_trace(120, turn_tokens=1200)
    path = tmp_path / "trace.jsonl.gz"
    async with CacheEngine(config(device_blocks=2000)) as engine:
        async with engine.record_trace(path) as recording:
            for request in original:
                await serve(engine, expand_tokens(request), outputs=3)
        statistics = recording.statistics()
    assert (statistics.recorded_requests, statistics.files) == (120, 1)
    recorded = read_trace(path)
    assert [r.input_tokens for r in recorded] == [r.input_tokens for r in original]
    assert {r.output_tokens for r in recorded} == {3}
    assert sorted({i for r in recorded for i in r.hash_ids}) == list(
        range(len({i for r in original for i in r.hash_ids}))
    )
    options = ReplayOptions(device_blocks=2000, latencies=False)
    hits = [
        (await replay(workload_of("t", trace), options, no_stages)).hit_tokens
        for trace in (original, recorded)
    ]
    assert hits[0] == hits[1]
    assert hits[0]["total"] > 50_000


@pytest.mark.asyncio
async def test_lines_have_lengths_times_and_ids_only(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    async with CacheEngine(config()) as engine, engine.record_trace(path):
        await serve(engine, prompt(31_234, 31_235), salt="secret-tenant", adapter="secret-lora")
    text = path.read_text()
    assert json.loads(text).keys() == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert json.loads(text)["hash_ids"] == [0, 1, 2]
    for secret in ("secret", "31234", "31235"):
        assert secret not in text


@pytest.mark.asyncio
async def test_ids_depend_on_prefix_salt_adapter_and_items(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    image = prompt(1, 9, 9)
    async with CacheEngine(config()) as engine, engine.record_trace(path):
        await serve(engine, prompt(1, 2))
        await serve(engine, prompt(1, 2, 3))
        await serve(engine, prompt(3, 2))
        await serve(engine, prompt(1, 2), salt="a")
        await serve(engine, prompt(1, 2), adapter="a")
        for content in (b"cat", b"dog", b"cat"):
            await serve(engine, image, items=[Item(content, 600, 100)])
    assert ids(read_trace(path)) == [
        [0, 1, 2],
        [0, 1, 3, 4],
        [5, 6, 7],
        [8, 9, 10],
        [11, 12, 13],
        [0, 14, 15, 16],
        [0, 17, 18, 19],
        [0, 14, 15, 16],
    ]


@pytest.mark.asyncio
async def test_requests_that_computed_nothing_and_forks_are_left_out(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    async with CacheEngine(config()) as engine:
        recording = engine.record_trace(path)
        await recording.__aenter__()
        engine.match(prompt(1)).release()
        async with engine.match(prompt(2)) as lease:
            await lease.allocate(513)
        async with engine.match(prompt(3)) as lease:
            await lease.allocate(513)
            lease.commit(513)
            lease.fork().release()
        (await engine.pin(prompt(3))).release()
        lease = engine.match(prompt(4, 5))
        assert lease.try_allocate(1025)
        lease.commit(600)
        await recording.__aexit__(None, None, None)  # before the lease ends
        lease.release()
    assert recording.statistics().recorded_requests == 2
    assert [(r.input_tokens, r.output_tokens) for r in read_trace(path)] == [(513, 1), (1025, 0)]


@pytest.mark.asyncio
async def test_prompt_may_be_changed_after_match(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    tokens = prompt(1)
    async with CacheEngine(config()) as engine, engine.record_trace(path):
        for _ in range(2):
            async with engine.match(tokens) as lease:
                await lease.allocate(len(tokens))
                lease.commit(len(tokens))
                tokens += 1
            tokens -= 1
    assert ids(read_trace(path)) == [[0, 1], [0, 1]]


@pytest.mark.asyncio
async def test_interrupted_release_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(writer: TraceWriter, entry: object) -> None:
        raise KeyboardInterrupt

    async with CacheEngine(config()) as engine, engine.record_trace(tmp_path / "trace.jsonl"):
        lease = engine.match(prompt(1))
        await lease.allocate(513)
        lease.commit(513)
        with monkeypatch.context() as patch:
            patch.setattr(TraceWriter, "put", interrupt)
            with pytest.raises(KeyboardInterrupt):
                lease.release()
        lease.release()
        assert engine.inspect.leases() == []


@pytest.mark.asyncio
async def test_collected_lease_is_recorded(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    async with CacheEngine(config()) as engine, engine.record_trace(path):
        lease = engine.match(prompt(1))
        await lease.allocate(513)
        lease.commit(513)
        with pytest.warns(match="never released"):
            del lease
        await spin(2)
    assert len(read_trace(path)) == 1


def test_full_files_are_numbered_and_the_oldest_are_deleted(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"an": "older run"}\n'))
    writer = TraceWriter(path, max_file_bytes=1 << 30, max_files=3, max_ids=4)
    writer.start()
    for part in range(9):
        writer.put(entry(prompt(part)))
    writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "trace.000004.jsonl.gz",
        "trace.000005.jsonl.gz",
        "trace.jsonl.gz",
    ]
    assert writer.statistics().files == 5
    assert writer.statistics().recorded_requests == 9
    assert ids(read_trace(tmp_path / "trace.000005.jsonl.gz")) == [[0, 1], [2, 3]]
    assert ids(read_trace(path)) == [[0, 1]]


def test_files_are_full_by_their_bytes(tmp_path: Path):
    writer = TraceWriter(tmp_path / "trace.jsonl", max_file_bytes=1000, max_files=2)
    writer.start()
    for part in range(40):
        writer.put(entry(prompt(*range(part, part + 5))))
    writer.close()
    older, newest = sorted(tmp_path.iterdir())
    assert 1000 <= older.stat().st_size < 1100
    assert newest.stat().st_size < 1100
    assert ids(read_trace(newest))[0] == [0, 1, 2, 3, 4, 5]


def entry(tokens: np.ndarray, arrived_at: float = 0.0) -> Any:
    return trace_writer.TraceEntry(arrived_at, tokens, 1, "", ())


@pytest.mark.asyncio
async def test_full_disk_is_counted_and_logged_once_and_writing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(trace_writer, "RETRY_SECONDS", 0.0)
    path = tmp_path / "trace.jsonl"
    write, failing = TraceFile.write, threading.Event()

    def write_or_fail(self: TraceFile, one: Any) -> None:
        if failing.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, one)

    monkeypatch.setattr(TraceFile, "write", write_or_fail)
    async with CacheEngine(config()) as engine, engine.record_trace(path) as recording:
        failing.set()
        for part in range(5):
            await serve(engine, prompt(part))
        while recording.statistics().failed_requests < 5:
            await spin(1)
        failing.clear()
        await serve(engine, prompt(9))
    statistics = recording.statistics()
    assert (statistics.recorded_requests, statistics.failed_requests) == (1, 5)
    assert len(read_trace(path)) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "trace.write_failed" in caplog.text
    assert "No space left" in caplog.text


def test_writer_waits_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []

    def fail(self: TraceFile, one: Any) -> None:
        opened.append(one)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(TraceFile, "write", fail)
    writer = TraceWriter(tmp_path / "t.jsonl", max_file_bytes=1 << 16, max_files=2)
    writer.start()
    for part in range(5):
        writer.put(entry(prompt(part)))
    writer.close()
    assert len(opened) == 1
    assert writer.statistics().failed_requests == 5


@pytest.mark.asyncio
async def test_slow_writer_drops_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace_writer, "MAX_QUEUED_TOKENS", 2000)
    write, go_on = TraceFile.write, threading.Event()

    def write_late(self: TraceFile, one: Any) -> None:
        go_on.wait()
        write(self, one)

    monkeypatch.setattr(TraceFile, "write", write_late)
    path = tmp_path / "trace.jsonl"
    async with CacheEngine(config()) as engine, engine.record_trace(path) as recording:
        for part in range(20):
            await serve(engine, prompt(part))
        dropped = recording.statistics().dropped_requests
        assert dropped >= 15
        go_on.set()
    assert recording.statistics().recorded_requests == 20 - dropped == len(read_trace(path))


@pytest.mark.asyncio
async def test_idle_writer_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that is killed leaves the requests of all seconds but the last."""
    monkeypatch.setattr(trace_writer, "FLUSH_SECONDS", 0.0)
    path = tmp_path / "trace.jsonl.gz"
    async with CacheEngine(config()) as engine, engine.record_trace(path) as recording:
        for part in range(5):
            await serve(engine, prompt(part))
        while recording.statistics().recorded_requests < 5:
            await spin(1)
        assert len(read_trace(path)) == 5


@pytest.mark.asyncio
async def test_bad_paths_and_sizes_are_refused(tmp_path: Path):
    async with CacheEngine(config()) as engine:
        with pytest.raises(UsageError, match=r"cannot write .*absent.*No such file"):
            async with engine.record_trace(tmp_path / "absent" / "t.jsonl"):
                pass
        for wrong, message in (
            ((5,), "path is 5"),
            ((tmp_path / "t", 100), "max_file_bytes is 100.*at least 65536"),
            ((tmp_path / "t", 1 << 20, 0), "max_files is 0"),
        ):
            with pytest.raises(UsageError, match=message):
                engine.record_trace(
                    wrong[0],
                    **dict(zip(("max_file_bytes", "max_files"), wrong[1:], strict=False)),
                )
        async with engine.record_trace(tmp_path / "t.jsonl"):
            with pytest.raises(UsageError, match="another recording"):
                async with engine.record_trace(tmp_path / "u.jsonl"):
                    pass
        async with engine.record_trace(tmp_path / "u.jsonl"):
            await serve(engine, prompt(1))
        assert len(read_trace(tmp_path / "u.jsonl")) == 1
    with pytest.raises(ClosedError):
        async with engine.record_trace(tmp_path / "v.jsonl"):
            pass


@pytest.mark.asyncio
async def test_engine_may_be_closed_first(tmp_path: Path):
    engine = CacheEngine(config())
    async with engine:
        recording = engine.record_trace(tmp_path / "t.jsonl")
        await recording.__aenter__()
        await serve(engine, prompt(1))
    await recording.__aexit__(None, None, None)
    assert len(read_trace(tmp_path / "t.jsonl")) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
@pytest.mark.asyncio
async def test_a_path_that_is_no_regular_file_is_refused_and_stays(tmp_path: Path, kind: str):
    path = tmp_path / "trace.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull)
    async with CacheEngine(config()) as engine:
        with pytest.raises(UsageError, match="not a regular file"):
            await engine.record_trace(path).__aenter__()
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.asyncio
async def test_a_file_that_another_recording_writes_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    async with (
        CacheEngine(config()) as engine,
        CacheEngine(config()) as other,
        engine.record_trace(path) as recording,
    ):
        with pytest.raises(UsageError, match="another recording writes it"):
            await other.record_trace(path).__aenter__()
        await serve(engine, prompt(1))
    assert recording.statistics().recorded_requests == len(read_trace(path)) == 1
    async with CacheEngine(config()) as engine, engine.record_trace(path):
        pass  # it can be recorded again


@pytest.mark.asyncio
async def test_a_recording_is_entered_once(tmp_path: Path):
    async with CacheEngine(config()) as engine:
        async with engine.record_trace(tmp_path / "trace.jsonl") as recording:
            await serve(engine, prompt(1))
        with pytest.raises(UsageError, match="entered before"):
            await recording.__aenter__()
    assert len(read_trace(tmp_path / "trace.jsonl")) == 1


@pytest.mark.parametrize("path", ["", "a\0b", "/"])
@pytest.mark.asyncio
async def test_a_path_without_a_file_name_is_refused(path: str):
    async with CacheEngine(config()) as engine:
        with pytest.raises(UsageError, match="it must name a file"):
            engine.record_trace(path)


@pytest.mark.asyncio
async def test_requests_of_a_deleted_file_count_as_failed(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    async with CacheEngine(config()) as engine:
        async with engine.record_trace(path) as recording:
            await serve(engine, prompt(1))
            path.unlink()
        assert recording.statistics().recorded_requests == 0
        assert recording.statistics().failed_requests == 1


def test_entries_are_flushed_while_further_ones_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trace_writer, "FLUSH_SECONDS", 0.0)
    writer = TraceWriter(tmp_path / "trace.jsonl", max_file_bytes=1 << 20, max_files=1)
    recorded, write = [], TraceFile.write

    def counted(file: TraceFile, entry: trace_writer.TraceEntry) -> None:
        recorded.append(writer.statistics().recorded_requests)
        write(file, entry)

    monkeypatch.setattr(TraceFile, "write", counted)
    for _ in range(3):
        writer.put(trace_writer.TraceEntry(0.0, prompt(1), 1, "", ()))
    writer.start()
    writer.close()
    assert recorded == [0, 1, 2]
