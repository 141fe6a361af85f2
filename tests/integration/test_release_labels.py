"""``Lease.release(returns=)``: checks, recorded traces, and replays of labelled traces."""

from __future__ import annotations

import json

import msgspec
import pytest

import aiokv
from aiokv.errors import UsageError
from aiokv.testing import record, replay_transitions
from aiokv.trace.format import TraceError, read_trace
from aiokv.trace.replay import workload_of
from tests.harness.trace_families import generate_family
from tests.integration.test_replay import run_replay
from tests.property.test_eviction_labels import true_labels

CONFIG = aiokv.CacheConfig(device_blocks=8, block_tokens=16)


@pytest.mark.parametrize(
    ("label", "message"),
    [("a" * 65, "returns has 65 characters; at most 64"), (7, "returns is 7; it must be a str")],
)
@pytest.mark.asyncio
async def test_a_wrong_label_is_refused_and_the_lease_stays(label, message):
    async with aiokv.CacheEngine(CONFIG) as engine:
        lease = await engine.match(range(16))
        await lease.allocate(16)
        with pytest.raises(UsageError, match=message):
            lease.release(returns=label)
        assert lease.state is aiokv.LeaseState.GRANTED
        lease.release(returns="a" * 64)
        lease.release(returns="again")  # idempotent


@pytest.mark.asyncio
async def test_a_recorded_trace_has_the_labels_of_its_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    async with aiokv.CacheEngine(CONFIG) as engine, engine.record_trace(path):
        for label in ("tool_use", ""):
            lease = await engine.match(range(32))
            await lease.allocate(32)
            lease.commit(32)
            lease.release(returns=label)
    assert [request.returns for request in read_trace(path)] == ["tool_use", ""]
    assert ["returns" in json.loads(line) for line in path.read_text().splitlines()] == [
        True,
        False,
    ]


def test_a_label_of_a_trace_that_is_too_long_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}
    path.write_text(json.dumps(line | {"returns": "a" * 65}))
    with pytest.raises(TraceError, match="returns"):
        read_trace(path)


def test_a_replay_reads_the_labels_of_the_trace():
    requests = generate_family("flood", 2_500, seed=203)
    labels = true_labels(requests)
    labelled = [
        msgspec.structs.replace(request, returns=label)
        for request, label in zip(requests, labels, strict=True)
    ]
    hits = [
        run_replay(workload_of("flood", part), device_blocks=2_400, block_tokens=128, **options)
        for part, options in (
            (requests, {}),
            (labelled, {}),
            (labelled, {"speed": 1e9, "concurrency": 1}),
        )
    ]
    without, plain, timed = (report.hit_tokens["total"] for report in hits)
    assert plain > 1.12 * without
    assert timed > 1.1 * without


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.asyncio
async def test_transitions_with_labels_are_recorded_and_replayed(policy):
    config = aiokv.CacheConfig(device_blocks=8, block_tokens=16, eviction_policy=policy)
    engine = aiokv.CacheEngine(config)
    with record(engine) as recording:
        async with engine:
            for i in range(60):
                lease = await engine.match([i % 7] * 64)
                await lease.allocate(64)
                lease.commit(64)
                lease.release(returns=("", "a", "b")[i % 3])
    names = [each.args for each in recording.log.transitions if each.name == "release"]
    assert [args[-1] for args in names[:3]] == ["", "a", "b"]
    assert replay_transitions(recording.log) == len(recording.log.transitions)
