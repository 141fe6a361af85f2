"""``aiokv explain``: causes of a trace of agent-like sessions, against a brute-force oracle."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.cli import main
from aiokv.trace.format import stream_trace

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 512


def agent_requests(seed: int, sessions: int = 24, turns: int = 12) -> list[dict[str, Any]]:
    """Return sessions whose prompts continue one another, with shared tools and sub-agents."""
    rng = random.Random(seed)
    ids = iter(range(100, 1_000_000))
    tools = [[next(ids) for _ in range(rng.randrange(2, 7))] for _ in range(3)]
    prompts = [list(rng.choice(tools)) for _ in range(sessions)]
    left = [turns] * sessions
    requests = []
    while open_sessions := [i for i, n in enumerate(left) if n]:
        session = rng.choice(open_sessions[:6])  # six at a time
        left[session] -= 1
        prompt = prompts[session]
        prompt += [next(ids) for _ in range(rng.randrange(1, 5))]
        hash_ids = list(prompt)
        if rng.random() < 0.1:  # a sub-agent begins with a part of the session
            hash_ids = [*prompt[: rng.randrange(1, len(prompt))], next(ids)]
        elif rng.random() < 0.1:  # the history of the session is compacted
            del prompt[rng.randrange(2, len(prompt)) :]
        tokens = len(hash_ids) * BLOCK - rng.randrange(BLOCK)
        requests.append(
            {
                "timestamp": 1000 * len(requests),
                "input_length": tokens,
                "output_length": 1,
                "hash_ids": hash_ids,
            }
        )
    return requests


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def run(trace: Path, path: Path, *options: object) -> dict[str, Any]:
    arguments = ["explain", trace, "--block-tokens", BLOCK, "--json", path, *options]
    assert main([str(each) for each in arguments]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def oracle(requests: list[dict[str, Any]], hit_blocks: int) -> dict[str, int]:
    """Return the missed blocks by cause: those of known prefixes that were not hit are evicted."""
    known: set[tuple[int, ...]] = set()
    parents: set[tuple[int, ...]] = set()
    counts = dict.fromkeys(("evicted", "diverged", "never_seen"), 0)
    for request in requests:
        ids = request["hash_ids"]
        limit = (request["input_length"] - 1) // BLOCK
        depth = next((n for n in range(limit, 0, -1) if tuple(ids[:n]) in known), 0)
        # Blocks with other ids have no token in common, so a prompt does not diverge from them
        # before its first block.
        rest = "diverged" if depth and tuple(ids[:depth]) in parents else "never_seen"
        counts["evicted"] += depth
        counts[rest] += limit - depth
        for n in range(request["input_length"] // BLOCK):
            known.add(tuple(ids[: n + 1]))
            parents.add(tuple(ids[:n]))
    counts["evicted"] -= hit_blocks
    return counts


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("host_blocks", [0, 40])
def test_causes_equal_the_oracle(tmp_path: Path, policy: str, host_blocks: int) -> None:
    for seed in range(4):
        requests = agent_requests(seed)
        trace = write(tmp_path / "trace.jsonl", requests)
        options = ["--device-blocks", 90, "--host-blocks", host_blocks, "--eviction-policy", policy]
        report = run(trace, tmp_path / "r.json", *options, "--miss-history-blocks", 1_000_000)
        expected = oracle(requests, report["hit_tokens"] // BLOCK)
        missed = {cause: n // BLOCK for cause, n in report["missed_tokens"].items() if n}
        assert missed == {cause: n for cause, n in expected.items() if n}
        assert min(expected.values()) > 0
        assert report["requests"] == len(requests)


def test_largest_misses_are_listed_in_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    requests = agent_requests(7)
    trace = write(tmp_path / "trace.jsonl", requests)
    report = run(trace, tmp_path / "r.json", "--device-blocks", 90, "--largest", 5)
    missed = [sum(each["missed_tokens"].values()) for each in report["largest"]]
    assert len(missed) == 5
    assert missed == sorted(missed, reverse=True)
    everything = run(trace, tmp_path / "r.json", "--device-blocks", 90, "--largest", 10_000)
    assert everything["largest"][:5] == report["largest"]
    assert sum(sum(each["missed_tokens"].values()) for each in everything["largest"]) == sum(
        everything["missed_tokens"].values()
    )
    first = report["largest"][0]
    assert requests[first["number"] - 1]["input_length"] == first["prompt_tokens"]
    assert f"request {first['number']:,} at " in capsys.readouterr().out


def test_trace_of_prompts_that_do_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trace = write(tmp_path / "trace.jsonl", agent_requests(1))
    assert main(["explain", str(trace), "--device-blocks", "2"]) == 2
    assert "fits the device's capacity of 32 tokens" in capsys.readouterr().err


def test_trace_is_streamed(tmp_path: Path) -> None:
    lines = write(tmp_path / "trace.jsonl", agent_requests(1)[:3])
    lines.write_text(lines.read_text() + "broken\n")
    requests = stream_trace(lines)
    assert [next(requests).timestamp_ms for _ in range(3)] == [0, 1000, 2000]
