"""Replays on several engines behind a router: ``aiokv replay --engines N``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uvloop

from aiokv import cli
from aiokv.errors import UsageError
from aiokv.trace.fleet import FleetOptions, replay_fleet
from aiokv.trace.replay import ReplayOptions, load_workload, replay, workload_of
from tests.harness.traces import find_trace

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"


def no_stages(stage, total):
    return lambda count: None


@pytest.fixture(scope="module")
def small():
    return load_workload(str(SMALL))


def run_fleet(workload, engines, device_blocks=2_000, **fleet):
    options = ReplayOptions(device_blocks=device_blocks)
    return uvloop.run(
        replay_fleet(workload, options, FleetOptions(engines=engines, **fleet), no_stages)
    )


def test_one_engine_behind_a_router_hits_what_it_hits_alone(small):
    report = run_fleet(small, 1, routers=("prefix",))
    alone = uvloop.run(replay(small, ReplayOptions(device_blocks=2_000), no_stages))
    assert report.routers[0].hit_tokens == alone.hit_tokens["total"] > 0
    assert report.routers[0].computed_tokens == [
        report.prompt_tokens - report.routers[0].hit_tokens
    ]


def test_routing_by_prefix_hits_more_than_round_robin(small):
    prefix, in_turn = run_fleet(small, 4).routers
    assert (prefix.router, in_turn.router) == ("prefix", "round-robin")
    assert prefix.hit_tokens > 1.2 * in_turn.hit_tokens > 0
    assert len(prefix.computed_tokens) == 4


def test_slow_engines_share_the_work_more_evenly(small):
    """A backlog of minutes outweighs every prefix."""
    slow, fast = (
        run_fleet(small, 4, routers=("prefix",), tokens_per_second=speed).routers[0]
        for speed in (100.0, 1e6)
    )
    assert slow.imbalance < 1.1 < fast.imbalance


def test_asking_the_engines_changes_no_hits(small):
    """Round robin ignores the answers, so that its hits show whether asking refreshed a prefix."""
    router = run_fleet(small, 2, routers=("round-robin",)).routers[0]
    expected = 0
    for first in (0, 1):
        half = workload_of("half", small.requests[first::2])
        report = uvloop.run(replay(half, ReplayOptions(device_blocks=2_000), no_stages))
        expected += report.hit_tokens["total"]
    assert router.hit_tokens == expected


def test_public_trace_is_hit_more_often_behind_the_prefix_router():
    path = find_trace()
    if path is None:
        pytest.skip("the public conversation trace is not here (name it in AIOKV_TRACE)")
    workload = load_workload(str(path), 2_000)
    prefix, in_turn = run_fleet(workload, 4, device_blocks=32_000).routers
    assert prefix.hit_tokens > 1.5 * in_turn.hit_tokens


def test_replay_command_compares_the_routers(small, tmp_path, capsys):
    result = tmp_path / "fleet.json"
    flags = ["--engines", "2", "--device-blocks", "2000", "--json", str(result)]
    assert cli.main(["replay", str(SMALL), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(result.read_text())
    assert [point["router"] for point in report["routers"]] == ["prefix", "round-robin"]
    for point in report["routers"]:
        shown = f"hit tokens, {point['router']}: {point['hit_tokens']:,}"
        assert any(line.startswith(shown) for line in lines)
    assert report["config"]["engines"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--write-policy", "all"],
        ["--eviction-policy", "all"],
        ["--disk-blocks", "9", "--host-blocks", "9"],
        ["--capacities", "100"],
        ["--plot", "hits.svg"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_for_one_engine_are_refused_with_several(flags, capsys):
    assert cli.main(["replay", str(SMALL), "--engines", "2", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_host_tier_is_refused_with_several_engines(small):
    options = ReplayOptions(device_blocks=100, host_blocks=100)
    with pytest.raises(UsageError, match="without host tier"):
        uvloop.run(replay_fleet(small, options, FleetOptions(engines=2), no_stages))
