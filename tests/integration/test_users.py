"""Replays by users who wait for each answer: ``aiokv replay --users N``."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import msgspec
import pytest

from aiokv import cli
from aiokv.errors import UsageError
from aiokv.testing.clock import clocked_loop
from aiokv.trace.disk_tier import DiskOptions
from aiokv.trace.format import TraceRequest
from aiokv.trace.replay import ReplayOptions, workload_of
from aiokv.trace.users import UserOptions, replay_users, sessions_of

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"
BLOCK = 512


def no_stages(stage, total):
    return lambda count: None


def request(seconds, hash_ids, output_tokens=100):
    return TraceRequest(
        timestamp_ms=seconds * 1e3,
        input_tokens=len(hash_ids) * BLOCK,
        output_tokens=output_tokens,
        hash_ids=list(hash_ids),
    )


def agents(sessions=24, turns=12):
    """Sessions of growing prompts with a common first block."""
    rng = random.Random(1)
    found = []
    for number in range(sessions):
        seconds, blocks = rng.uniform(0, 100), 20
        for _ in range(turns):
            ids = [0, *(1_000 * (number + 1) + block for block in range(blocks))]
            found.append(request(seconds, ids))
            seconds, blocks = seconds + rng.uniform(3, 20), blocks + rng.randrange(4)
    return workload_of("agents", sorted(found, key=lambda each: each.timestamp_ms))


def run(workload, users=16, device_blocks=150, **options):
    of_users = {name: options.pop(name) for name in list(options) if name in FIELDS}
    replayed = ReplayOptions(block_tokens=BLOCK, device_blocks=device_blocks, **options)
    of_users = {"seconds": 1_800.0, "prefill_tokens_per_second": 5_000.0, **of_users}
    with asyncio.Runner(loop_factory=clocked_loop()) as runner:
        return runner.run(
            replay_users(workload, replayed, UserOptions(users=users, **of_users), no_stages)
        )


FIELDS = {field.name for field in msgspec.structs.fields(UserOptions)}


def test_cached_first_serves_more_agents_than_arrival_where_memory_is_short():
    arrival, cached = run(agents(), max_overtake_seconds=300.0).orders
    assert (arrival.admission, cached.admission) == ("arrival", "cached_first")
    assert cached.requests > 1.3 * arrival.requests > 0
    assert cached.hit_rate > arrival.hit_rate
    assert arrival.longest_overtaken_seconds == 0
    assert 0 < cached.longest_overtaken_seconds <= 300.0


def test_orders_serve_equally_many_where_all_fits():
    arrival, cached = run(agents(), users=4, device_blocks=4_000).orders
    assert cached.requests >= 0.99 * arrival.requests > 0


def test_bound_of_a_millisecond_lets_no_request_be_overtaken_longer():
    """A request may still be overtaken in the moment of its arrival."""
    assert run(agents(), max_overtake_seconds=0.001).orders[1].longest_overtaken_seconds <= 0.001


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_simulated_times_are_equal_in_each_run(host_blocks):
    options = {"users": 6, "seconds": 300.0, "host_blocks": host_blocks, "concurrency": 2}
    first, second = run(agents(8, 6), **options), run(agents(8, 6), **options)
    assert first == second
    assert first.orders[0].requests > 10


def test_slow_link_delays_hits_of_host_memory():
    """The device holds one prompt, so each session hits host memory."""
    options = {"users": 2, "device_blocks": 40, "host_blocks": 4_000, "admission": ("arrival",)}
    fast, slow = (
        run(agents(4, 6), link_bytes_per_second=speed, **options).orders[0] for speed in (1e12, 1e5)
    )
    assert fast.hit_rate > 0.5
    assert slow.requests < 0.7 * fast.requests


def test_users_begin_again_with_new_blocks_after_the_last_session():
    report = run(agents(2, 3), users=2, admission=("arrival",), device_blocks=4_000)
    assert report.orders[0].requests > 12
    shared = (20 * 5 + 6) / (21 * 6)  # one session in two begins with a cached first block
    assert report.orders[0].hit_rate < shared


def test_requests_are_divided_into_sessions():
    requests = [
        request(0, [0, 1, 2], 500),
        request(1, [0, 10, 11]),
        request(5, [0, 1, 2, 3]),
        request(6, [0, 20]),
        request(2_000, [0, 10, 11, 12]),
        request(2_001, [0, 1, 30, 31, 32]),
    ]
    users = UserOptions(users=1)
    sessions = sessions_of(requests, users)
    assert [[turn.request for turn in turns] for turns in sessions] == [
        [requests[0], requests[2], requests[5]],
        [requests[1], requests[4]],
        [requests[3]],
    ]
    assert [turn.pause for turn in sessions[0]] == [0.0, 4.0, 600.0]


@pytest.mark.parametrize(
    "options",
    [
        {"speed": 1.0},
        {"execute": True},
        {"disk": DiskOptions(blocks=9), "host_blocks": 9},
    ],
    ids=str,
)
def test_options_that_are_not_simulated_are_refused(options):
    with pytest.raises(UsageError, match="times of users are simulated"):
        run(agents(1, 1), **options)


def test_trace_without_a_request_that_fits_is_refused():
    with pytest.raises(UsageError, match="fits the device"):
        run(agents(1, 1), device_blocks=2)


def test_replay_command_prints_the_requests_of_both_orders(tmp_path, capsys):
    result = tmp_path / "users.json"
    flags = ["--users", "8", "--hours", "0.2", "--device-blocks", "2000", "--json", str(result)]
    assert cli.main(["replay", str(SMALL), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(result.read_text())
    assert [point["admission"] for point in report["orders"]] == ["arrival", "cached_first"]
    for point in report["orders"]:
        shown = f"{point['admission']}: {point['requests_per_hour']:,.0f} requests per hour"
        assert any(line.startswith(shown) for line in lines)
    assert report["config"]["users"] == 8


@pytest.mark.parametrize("flags", [["--eviction-policy", "all"], ["--capacities", "100"]])
def test_flags_that_compare_replays_are_refused_with_users(flags, capsys):
    assert cli.main(["replay", str(SMALL), "--users", "2", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
