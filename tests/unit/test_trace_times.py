"""Times in traces: milliseconds since the trace was begun."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np

from aiokv.engine.trace_writer import TraceEntry, TraceFile


def test_timestamps_are_milliseconds_since_the_file_was_made(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0)  # not that of other threads
    monkeypatch.setattr("aiokv.engine.trace_writer.time", clock)
    file = TraceFile(tmp_path / "trace.jsonl")
    for arrived_at in (99.0, 100.0, 105.5):  # the first arrived before recording began
        file.write(TraceEntry(arrived_at, np.arange(4, dtype=np.int32), 1, "", ()))
    file.close()
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["timestamp"] for line in lines] == [0, 0, 5500]
