"""The Mooncake trace format: accepted lines, refused lines, and tokens by hash id."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aiokv.trace.format import (
    HASH_BLOCK_TOKENS,
    MAX_HASH_ID,
    TraceError,
    TraceRequest,
    expand_tokens,
    read_trace,
)
from tests.harness.synthetic_trace import generate_trace

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"
GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def with_changes(**changes: object) -> str:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value != "drop"})


def test_line_of_a_trace_is_read(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD))
    assert read_trace(path) == [
        TraceRequest(timestamp_ms=5, input_tokens=600, output_tokens=7, hash_ids=[3, 9])
    ]


def test_unknown_keys_and_blank_lines_are_skipped(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", "", with_changes(model="x"), "  ", with_changes(), "")
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "malformed"),
        ('{"timestamp": 1', "truncated"),
        ("[1, 2]", "Expected `object`"),
        (with_changes(timestamp="drop"), "missing required field `timestamp`"),
        (with_changes(input_length="drop"), "missing required field `input_length`"),
        (with_changes(output_length="drop"), "missing required field `output_length`"),
        (with_changes(hash_ids="drop"), "missing required field `hash_ids`"),
        (with_changes(timestamp="5"), r"Expected `float`, got `str` - at `\$.timestamp`"),
        (with_changes(timestamp=-1), r">= 0.* at `\$.timestamp`"),
        (with_changes(input_length=600.5), r"Expected `int`, got `float` - at `\$.input_length`"),
        (with_changes(input_length=0, hash_ids=[]), r">= 1 - at `\$.input_length`"),
        (with_changes(input_length=-600), r">= 1 - at `\$.input_length`"),
        (with_changes(output_length=-1), r">= 0 - at `\$.output_length`"),
        (with_changes(hash_ids=3), r"Expected `array`, got `int` - at `\$.hash_ids`"),
        (with_changes(hash_ids=[3, -1]), r">= 0 - at `\$.hash_ids\[\d+\]`"),
        (with_changes(hash_ids=[3, MAX_HASH_ID + 1]), r"<= 4194303 - at `\$.hash_ids\[\d+\]`"),
        (with_changes(hash_ids=[3]), "input_length 600 needs 2 hash_ids of 512 tokens, got 1"),
        (with_changes(hash_ids=[1, 2, 3]), "needs 2 hash_ids of 512 tokens, got 3"),
        (with_changes(input_length=512), "needs 1 hash_ids of 512 tokens, got 2"),
    ],
)
def test_malformed_line_names_file_and_line(tmp_path, line, reason):
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD), "", line, json.dumps(GOOD))
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert (caught.value.path, caught.value.line) == (str(path), 3)


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": "\xff\xfe"}\n')
    with pytest.raises(TraceError, match=":1: "):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="holds no request") as caught:
        read_trace(path)
    assert caught.value.line == 0


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_limit_does_not_read_further(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD), json.dumps(GOOD), "broken")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError, match=":3: "):
        read_trace(path, limit=3)


def test_expansion_is_one_int32_array_cut_to_the_prompt():
    request = TraceRequest(timestamp_ms=0, input_tokens=700, output_tokens=1, hash_ids=[0, 5])
    tokens = expand_tokens(request)
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [*range(512), *range(5 * 512, 5 * 512 + 188)]


def test_expansion_reaches_the_end_of_int32():
    request = TraceRequest(
        timestamp_ms=0, input_tokens=512, output_tokens=1, hash_ids=[MAX_HASH_ID]
    )
    assert expand_tokens(request)[-1] == 2**31 - 1


def test_different_ids_share_no_token():
    ids = [0, 1, 2, 1000, MAX_HASH_ID]
    request = TraceRequest(
        timestamp_ms=0, input_tokens=len(ids) * 512, output_tokens=1, hash_ids=ids
    )
    assert np.unique(expand_tokens(request)).size == len(ids) * HASH_BLOCK_TOKENS


def test_write_and_read_back(tmp_path):
    requests = generate_trace(20, seed=3)
    lines = [msgspec.json.encode(request) for request in requests]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(lines))
    assert read_trace(tmp_path / "t.jsonl") == requests


def test_shipped_trace_is_the_generated_one():
    assert SMALL.stat().st_size <= 200_000
    assert read_trace(SMALL) == generate_trace()


def test_generated_trace_shares_prefixes_and_grows_conversations():
    requests = generate_trace(100, seed=1)
    firsts = {request.hash_ids[0] for request in requests}
    assert len(firsts) == 3
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for request in requests:
        full = request.input_tokens // HASH_BLOCK_TOKENS
        prefixes = {tuple(request.hash_ids[: n + 1]) for n in range(full)}
        reused += len(prefixes & seen)
        seen |= prefixes
    assert reused > 100
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)


def test_compressed_trace_is_read_whatever_its_name(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(SMALL.read_bytes()))
    assert read_trace(path) == read_trace(SMALL)
    assert read_trace(path, limit=3) == read_trace(SMALL, limit=3)


def test_compressed_trace_of_a_killed_writer_is_read_up_to_its_last_whole_line(tmp_path, caplog):
    data = gzip.compress(SMALL.read_bytes())
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    read = read_trace(path)
    assert 50 < len(read) < 350
    assert read == read_trace(SMALL)[: len(read)]
    assert f"trace.end_missing path={str(path)!r}" in caplog.text


def test_damaged_compressed_trace_is_refused(tmp_path):
    data = bytearray(gzip.compress(SMALL.read_bytes()))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz"):
        read_trace(path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_standard_input_is_read(monkeypatch, compress):
    data = compress(SMALL.read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_trace("-") == read_trace(SMALL)


def test_requests_are_read_in_order_of_arrival(tmp_path):
    lines = [with_changes(timestamp=time) for time in (7, 3, 7, 0)]
    path = write_lines(tmp_path / "t.jsonl", *lines)
    assert [request.timestamp_ms for request in read_trace(path)] == [0, 3, 7, 7]
