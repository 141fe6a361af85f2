"""Replays end to end: counts, modes, and the output and errors of ``aiokv replay``."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from aiokv import cli
from aiokv.errors import InternalError, UsageError
from aiokv.trace.disk_tier import DiskOptions
from aiokv.trace.format import EXAMPLE, TraceRequest
from aiokv.trace.min_oracle import min_hit_tokens
from aiokv.trace.payload import Payload
from aiokv.trace.replay import (
    ReplayOptions,
    Workload,
    load_workload,
    replay,
    sweep_capacities,
    workload_of,
)
from tests.harness.plotting import load_fonts
from tests.harness.synthetic_trace import example_lines
from tests.harness.traces import find_trace, trace_prompts
from tests.models.demo.trace import trace_workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"
BLOCK_TOKENS = 16


def no_stages(stage, total):
    return lambda count: None


def run_replay(workload, **options):
    return uvloop.run(replay(workload, ReplayOptions(**options), no_stages))


@pytest.fixture(scope="module")
def small() -> Workload:
    return load_workload(str(SMALL))


def prompts_of(workload: Workload) -> list[NDArray[np.int32]]:
    return trace_prompts(workload.requests)


def longest_prompt(workload: Workload) -> int:
    return max(request.input_tokens for request in workload.requests)


def hit_tokens_without_eviction(workload: Workload) -> int:
    """Return the hits of an unlimited cache: the longest known prefix in whole blocks."""
    known: set[bytes] = set()
    hits = 0
    for tokens in prompts_of(workload):
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        prefixes = [hash(tokens[:end].tobytes()) for end in ends]
        usable = prefixes[: (len(tokens) - 1) // BLOCK_TOKENS]
        hits += BLOCK_TOKENS * next(
            (i for i, prefix in enumerate(usable) if prefix not in known), len(usable)
        )
        known.update(prefixes)
    return hits


@pytest.mark.timeout(60)
def test_host_much_smaller_than_the_device_delays_no_allocation(small):
    """Unsaved parents of evicted blocks come to the front of the queue one by one."""
    run = run_replay(small, device_blocks=1_000, host_blocks=100, write_policy="write_back")
    assert run.requests == len(small.requests)


def test_cache_of_unlimited_size_hits_every_known_prefix(small):
    report = run_replay(small, device_blocks=100_000)
    assert report.hit_tokens["total"] == hit_tokens_without_eviction(small)
    assert report.hit_tokens == {"device": report.hit_tokens["total"], "host": 0} | {
        "total": report.hit_tokens["total"]
    }
    assert report.evicted_blocks == 0
    assert report.requests == len(small.requests) == 400
    assert report.prompt_tokens == sum(map(len, prompts_of(small)))
    assert report.requests_per_second == pytest.approx(400 / report.index_seconds)


def test_unlimited_disk_below_small_tiers_hits_every_known_prefix(small):
    report = run_replay(
        small, device_blocks=1_500, host_blocks=1_000, disk=DiskOptions(blocks=100_000)
    )
    without = run_replay(small, device_blocks=1_500, host_blocks=1_000)
    assert report.hit_tokens["total"] == hit_tokens_without_eviction(small)
    assert report.hit_tokens["device"] == without.hit_tokens["device"]
    assert report.hit_tokens["host"] == without.hit_tokens["host"]
    assert report.hit_tokens["disk"] > 0
    assert "disk" not in without.hit_tokens
    assert without.disk is None
    assert report.disk is not None
    assert report.disk.loaded_blocks * BLOCK_TOKENS == report.hit_tokens["disk"]
    assert report.disk.loaded_bytes == report.disk.loaded_blocks * (2 << 20)
    assert report.disk.saved_blocks == report.disk.blocks
    assert report.disk.evicted_blocks == 0


def test_smaller_disks_hit_less_and_keep_their_capacity(small):
    reports = [
        run_replay(small, device_blocks=1_500, host_blocks=1_000, disk=DiskOptions(blocks=blocks))
        for blocks in (2_000, 4_000, 8_000)
    ]
    hits = [report.hit_tokens["disk"] for report in reports]
    assert 0 < hits[0] < hits[1] < hits[2]
    assert [report.disk.blocks for report in reports] == [2_000, 4_000, 8_000]
    assert all(r.disk.saved_blocks - r.disk.evicted_blocks == r.disk.blocks for r in reports)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_blocks": 0}, "disk_blocks is 9, but host_blocks is 0"),
        ({"write_policy": "write_back"}, "disk_blocks is 9 with the write policy 'write_back'"),
        ({"execute": True}, "disk_blocks is 9 with execute"),
    ],
    ids=str,
)
def test_disk_that_cannot_be_simulated_is_refused(small, options, message):
    with pytest.raises(UsageError, match=message):
        run_replay(small, **{"host_blocks": 100, "disk": DiskOptions(blocks=9)} | options)


def test_timed_pass_covers_every_operation(small):
    latency = run_replay(small, device_blocks=2_000).latency_us
    assert set(latency) == {"match", "allocate", "commit", "release"}
    for times in latency.values():
        assert times.count == 400
        assert 0 < times.p50 <= times.p90 <= times.p99 <= times.max


def test_window_of_one_equals_the_hits_of_the_plain_loop(small):
    """The general loop, driven with real bytes, is the same sequence of decisions."""
    plain = run_replay(small, device_blocks=2_000)
    executed = run_replay(small, device_blocks=2_000, execute=True, execute_bytes=1 << 20)
    assert executed.hit_tokens == plain.hit_tokens
    assert executed.evicted_blocks == plain.evicted_blocks > 0
    assert executed.execute is not None
    assert executed.execute.verified_blocks * BLOCK_TOKENS == plain.hit_tokens["total"]


def test_host_tier_serves_blocks_evicted_from_the_device(small):
    device_only = run_replay(small, device_blocks=1_000)
    tiered = run_replay(
        small, device_blocks=1_000, host_blocks=50_000, execute=True, execute_bytes=2 << 20
    )
    assert tiered.hit_tokens["host"] > 0
    assert tiered.hit_tokens["total"] > device_only.hit_tokens["total"]
    assert tiered.failed_onloads == 0
    assert tiered.execute is not None
    assert tiered.execute.verified_blocks * BLOCK_TOKENS == tiered.hit_tokens["total"]


def test_blocks_on_both_tiers_count_once_in_the_memory_per_block(small):
    memory = run_replay(small, device_blocks=4_000, host_blocks=2_000).memory
    blocks = {
        tokens[:end].tobytes()
        for tokens in prompts_of(small)
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    }
    one_tier = run_replay(small, device_blocks=len(blocks) + 1_000).memory
    assert one_tier.cached_blocks == len(blocks)
    assert 4_000 < memory.cached_blocks < 6_000
    assert memory.index_bytes_per_block == memory.index_bytes / memory.cached_blocks


def test_concurrent_leases_hold_their_blocks(small):
    """Eight concurrent leases leave fewer blocks for unused prefixes."""
    report = run_replay(small, device_blocks=2_500, concurrency=8)
    assert report.requests == 400
    assert report.hit_tokens["total"] <= run_replay(small, device_blocks=2_500).hit_tokens["total"]


def test_a_window_that_does_not_fit_shrinks(small):
    longest = -(-longest_prompt(small) // BLOCK_TOKENS)
    report = run_replay(small, device_blocks=longest, concurrency=64)
    assert (report.requests, report.rejected_requests) == (400, 0)


def test_replay_by_timestamps_admits_each_request_once(small):
    """100 s of trace in 0.1 s; every request is admitted once, and waits are measured."""
    report = run_replay(small, device_blocks=20_000, concurrency=32, speed=1000.0)
    assert report.requests == 400
    assert report.latency_us["admission"].count == 400
    assert report.wall_seconds >= small.arrival_seconds(small.requests[-1]) / 1000


def test_requests_larger_than_the_device_are_left_out(small):
    longest = -(-longest_prompt(small) // BLOCK_TOKENS)
    report = run_replay(small, device_blocks=longest - 1, latencies=False)
    assert report.rejected_requests >= 1
    assert report.requests + report.rejected_requests == 400
    with pytest.raises(UsageError, match="none of the 400 requests"):
        run_replay(small, device_blocks=1)


@pytest.fixture
def long_trace(tmp_path):
    """A request of 1.07 billion tokens, in 4 MB."""
    path = tmp_path / "long.jsonl"
    ids = 2**21
    line = {"timestamp": 0, "input_length": 512 * ids, "output_length": 1, "hash_ids": [0] * ids}
    path.write_text(json.dumps(line, separators=(",", ":")) + "\n")
    return path


def peak_mib(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_a_request_larger_than_the_device_is_refused_before_it_is_expanded(long_trace, capsys):
    assert peak_mib(lambda: run_cli(long_trace)) < 64
    assert "none of the 1 requests" in capsys.readouterr().err
    small_one = {"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    with long_trace.open("a") as file:
        file.write(json.dumps(small_one) + "\n")
    assert peak_mib(lambda: run_cli(long_trace, "--capacities", "50,60")) < 64
    assert "requests larger than the device: 1" in capsys.readouterr().out


def test_demo_expands_only_the_served_part_of_a_request(long_trace):
    def serve():
        workload = trace_workload(
            long_trace, requests=1, block_tokens=16, max_context_tokens=64, vocab=512, seed=0
        )
        assert workload.max_context_tokens == 64

    assert peak_mib(serve) < 64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"concurrency": 4},
        {"speed": 1e9, "host_blocks": 4_096},
        {"latencies": False, "eviction_policy": "lru"},
    ],
    ids=["plain", "window", "timed", "one-pass"],
)
def test_replay_holds_a_fraction_of_the_prompts(options):
    """The expanded prompts take 250 MiB; requests that wait for a slot hold none of them."""
    requests = [
        TraceRequest(
            timestamp_ms=index, input_tokens=1 << 17, output_tokens=1, hash_ids=list(range(256))
        )
        for index in range(500)
    ]
    workload = workload_of("t", requests)
    options = {"device_blocks": 1 << 16} | options
    assert peak_mib(lambda: run_replay(workload, **options)) < 32


def test_min_holds_memory_for_the_kept_blocks_only():
    """Half a million uses of 1,000 blocks; one heap entry of each would take 70 MiB."""
    request = TraceRequest(
        timestamp_ms=0, input_tokens=512_000, output_tokens=1, hash_ids=list(range(1_000))
    )
    assert peak_mib(lambda: min_hit_tokens([request] * 500, 2_000)) < 16


def test_left_out_requests_count_in_the_rates_of_a_sweep(small):
    longest = longest_prompt(small)
    device_blocks = longest // BLOCK_TOKENS - 1
    report = run_replay(small, device_blocks=device_blocks, latencies=False)
    assert report.rejected_requests >= 1
    assert report.requests + report.rejected_requests == 400
    (point,) = uvloop.run(sweep_capacities(small, ReplayOptions(), [device_blocks], no_stages))
    assert point.prompt_tokens == small.prompt_tokens > report.prompt_tokens
    assert point.hit_rate == report.hit_tokens["total"] / small.prompt_tokens


def test_sweep_grows_with_capacity(small):
    points = uvloop.run(sweep_capacities(small, ReplayOptions(), [500, 2_000, 30_000], no_stages))
    rates = [point.hit_rate for point in points]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_wrong_bytes_are_detected(small, monkeypatch):
    """Negative control of ``--execute``: one word written wrong fails the replay."""
    write = Payload.write_computed

    def write_and_corrupt(self, lease, tokens, block_tokens):
        write(self, lease, tokens, block_tokens)
        self._tensors[1][lease.block_table[0], 0] ^= 1

    monkeypatch.setattr(Payload, "write_computed", write_and_corrupt)
    with pytest.raises(InternalError, match="does not hold the bytes"):
        run_replay(small, device_blocks=20_000, execute=True, execute_bytes=1 << 20)


# ---- the public trace


@pytest.fixture(scope="module")
def public() -> Workload:
    path = find_trace()
    if path is None:
        pytest.skip("the public conversation trace is not here (name it in AIOKV_TRACE)")
    return load_workload(str(path))


@pytest.mark.parametrize(
    ("device_blocks", "hit_tokens"), [(32_000, 6_609_792), (320_000, 31_454_352)]
)
def test_hits_equal_vllm_on_the_public_trace(public, device_blocks, hit_tokens):
    """Exactly the hit tokens of vLLM 0.33's block pool, sequential, 16-token blocks."""
    report = run_replay(public, device_blocks=device_blocks, latencies=False, eviction_policy="lru")
    assert report.hit_tokens["total"] == hit_tokens
    assert (report.requests, report.prompt_tokens) == (12_031, 144_793_823)


# ---- the command


@pytest.fixture(scope="module", autouse=True)
def fonts():
    load_fonts()


def run_cli(*argv) -> int:
    return cli.main(["replay", *map(str, argv)])


def test_command_writes_json_and_plot(tmp_path, capsys):
    status = run_cli(
        SMALL, "--limit", 150, "--device-blocks", 3_000, "--json", tmp_path / "r.json",
        "--plot", tmp_path / "r.svg", "--capacities", "500,1000,5000",
    )  # fmt: skip
    assert status == 0
    output = capsys.readouterr()
    assert "hit tokens, total: " in output.out
    assert "aiokv: replay, 3,000 blocks: 150 requests" in output.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["requests"] == 150
    assert result["hit_tokens"]["total"] == result["hit_tokens"]["device"]
    assert {"prompt_tokens", "evicted_blocks", "index_seconds", "requests_per_second"} <= set(
        result
    )
    assert [point["device_blocks"] for point in result["capacities"]] == [500, 1000, 5000]
    root = ET.parse(tmp_path / "r.svg").getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1,000 MiB", "1.95 GiB", "9.77 GiB", "device memory for KV", "100 %"} <= set(texts)
    rates = [point["hit_rate"] for point in result["capacities"]]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize("name", ["r.png", "R.PNG"])
def test_command_draws_a_png(tmp_path, capsys, name):
    path = tmp_path / name
    assert run_cli("example", "--limit", 50, "--plot", path, "--capacities", "1GiB,2GiB") == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_command_sweeps_host_and_disk_sizes_in_bytes_of_a_model(tmp_path, capsys):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))  # 4 KiB per token
    status = run_cli(
        "example", "--limit", 300, "--model", model, "--device-blocks", 500,
        "--host-capacities", "0,256MiB,1GiB", "--disk-capacities", "4096",
        "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert status == 2, "a disk needs a host tier"
    assert "disk_blocks is 4096, but host_blocks is 0" in capsys.readouterr().err
    status = run_cli(
        "example", "--limit", 300, "--model", model, "--device-blocks", 500,
        "--host-capacities", "1GiB,256MiB", "--disk-capacities", "0,4096",
        "--json", tmp_path / "r.json", "--plot", tmp_path / "r.svg",
    )  # fmt: skip
    assert status == 0
    points = json.loads((tmp_path / "r.json").read_text())["capacities"]
    sizes = [(p["device_blocks"], p["host_blocks"], p["disk_blocks"]) for p in points]
    assert sizes == [(500, 4096, 0), (500, 4096, 4096), (500, 16384, 0), (500, 16384, 4096)]
    assert {p["block_bytes"] for p in points} == {1 << 16}
    rates = [p["hit_rate"] for p in points]
    assert rates[0] < rates[1]
    assert rates[0] < rates[2] <= rates[3]
    printed = capsys.readouterr().out
    assert "hit tokens with 500 device blocks (31.2 MiB), 4,096 host blocks (256 MiB): " in printed


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
    "intermediate_size": 4096,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--capacities", "1MiB"], "--capacities has 1.00 MiB, which is less than a block of 2.00"),
        (["--bytes-per-token", "1MiB", "--host-capacities", "8MiB"], "a block of 16.0 MiB"),
        (["--model", "/nowhere/config.json"], "/nowhere/config.json"),
    ],
)
def test_command_refuses_sizes_before_the_replay(flags, message, capsys):
    assert run_cli("example", *flags) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_command_replays_the_example_and_standard_input(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_cli("example", "--limit", 40) == 0
    example = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EXAMPLE.read_bytes())))
    assert run_cli("-", "--limit", 40) == 0
    assert counts(capsys.readouterr().out) == counts(example)
    (tmp_path / "example").write_bytes(SMALL.read_bytes())
    assert run_cli("example", "--limit", 40) == 0
    assert counts(capsys.readouterr().out) != counts(example), "a file goes first"


def counts(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(("prompt", "hit tokens"))]


def test_example_is_what_its_generator_makes():
    assert gzip.decompress(EXAMPLE.read_bytes()) == example_lines()


def test_default_plot_of_the_example_has_a_knee(tmp_path, capsys):
    assert run_cli("example", "--plot", tmp_path / "r.svg") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("hit tokens with ") for line in lines) == 8
    assert any(line.startswith("knee of the curve: ") for line in lines)
    rates = [line.split("(")[-1] for line in lines if line.startswith("hit tokens with ")]
    assert len(set(rates)) > 5, "the curve is not flat"


def test_time_and_memory_of_the_replay_itself_are_printed_on_request(capsys):
    own = ("index CPU time: ", "match p50 / p99 / max: ", "index memory: ")
    assert run_cli(SMALL, "--limit", 20) == 0
    assert not any(name in capsys.readouterr().out for name in own)
    assert run_cli(SMALL, "--limit", 20, "--verbose") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in own)


def test_missing_matplotlib_is_told_before_the_replay(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert run_cli(SMALL, "--plot", "r.svg") == 2
    output = capsys.readouterr()
    assert "hint: pip install 'aiokv[plot]'" in output.err
    assert output.out == ""


def test_the_three_write_policies_are_compared_over_real_bytes(tmp_path, capsys):
    status = run_cli(
        SMALL, "--limit", 150, "--concurrency", 8, "--device-blocks", 800, "--host-blocks", 20_000,
        "--write-policy", "all", "--execute", "--execute-mib", 1, "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert status == 0
    assert "write_back: hits " in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    points = {point["write_policy"]: point for point in result["write_policies"]}
    assert list(points) == ["write_through", "nth_use:2", "write_back"]
    for point in points.values():
        traffic = point["traffic"]
        assert point["hit_tokens"]["host"] > 0
        assert traffic["onloaded_bytes"] == traffic["onloaded_blocks"] * traffic["block_bytes"] > 0
        assert traffic["block_bytes"] == point["execute"]["block_bytes"]
        assert point["execute"]["verified_blocks"] * BLOCK_TOKENS == point["hit_tokens"]["total"]
        assert point["failed_onloads"] == 0
    saved = {name: point["traffic"]["offloaded_blocks"] for name, point in points.items()}
    # The host has room for all early copies: a full one takes copies before evictions alone.
    assert saved["nth_use:2"] < saved["write_through"]
    assert result["traffic"] == points["write_through"]["traffic"]


def test_the_eviction_policies_are_compared_with_each_other_and_with_min(tmp_path, capsys):
    status = run_cli(
        SMALL, "--device-blocks", 1_600, "--eviction-policy", "all", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert status == 0
    assert "adaptive: hits " in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    points = {point["eviction_policy"]: point for point in result["eviction_policies"]}
    assert list(points) == ["lru", "adaptive"]
    for point in points.values():
        assert point["hit_tokens"]["device"] > 0
        assert 0.1 < point["device_share_of_min"] < 1.1  # MIN ignores the remainder of 512 tokens
    assert result["hit_tokens"] == points["adaptive"]["hit_tokens"]
    assert run_cli(SMALL, "--eviction-policy", "all", "--write-policy", "all") != 0


def test_bytes_moved_are_nominal_without_real_ones(small):
    report = run_replay(
        small, device_blocks=1_000, host_blocks=9_000, write_policy="write_back", block_bytes=100
    )
    assert report.traffic.offloaded_bytes == 100 * report.traffic.offloaded_blocks > 0
    none = run_replay(small, device_blocks=1_000, host_blocks=9_000, write_policy="none")
    assert none.traffic.moved_bytes == 0
    assert none.hit_tokens["host"] == 0


def test_command_reports_the_disk_tier(tmp_path, capsys):
    flags = ["--device-blocks", "1500", "--host-blocks", "1000", "--disk-blocks", "8000"]
    result = tmp_path / "result.json"
    policy = ["--disk-policy", "nth_use:1"]
    assert cli.main(["replay", str(SMALL), *flags, *policy, "--json", str(result)]) == 0
    report = json.loads(result.read_bytes())
    disk, output = report["disk"], capsys.readouterr().out
    assert report["config"]["disk"] == {"blocks": 8000, "policy": "nth_use:1"}
    assert f"hit tokens, disk: {report['hit_tokens']['disk']:,} (" in output
    assert f"saved on disk: {disk['saved_blocks']:,} blocks, " in output
    assert f"loaded from disk: {disk['loaded_blocks']:,} blocks, " in output
    assert f"evicted disk blocks: {disk['evicted_blocks']:,}" in output


def test_command_refuses_a_disk_with_all_write_policies(capsys):
    flags = ["--host-blocks", "100", "--disk-blocks", "8", "--write-policy", "all"]
    assert cli.main(["replay", str(SMALL), *flags]) == 2
    assert "--disk-blocks is 8 with --write-policy all" in capsys.readouterr().err


def test_command_names_file_and_line_of_a_malformed_trace(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(SMALL.read_text().splitlines()[0] + "\n{}\n")
    assert run_cli(path) == 2
    message = f"aiokv: error: {path}:2: Object missing required field `timestamp`\n"
    assert capsys.readouterr().err == message


def test_command_refuses_a_missing_trace(tmp_path, capsys):
    assert run_cli(tmp_path / "absent.jsonl") == 2
    assert "absent.jsonl: No such file or directory" in capsys.readouterr().err


def test_command_refuses_a_missing_output_folder(tmp_path, capsys):
    assert run_cli(SMALL, "--json", tmp_path / "absent" / "r.json") == 2
    assert "is not a folder" in capsys.readouterr().err
    assert run_cli(SMALL, "--json", tmp_path) == 2
    assert "it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["r.pdf", "r", "r.svg.gz", "r.jpeg"])
def test_command_refuses_a_plot_with_another_suffix(tmp_path, capsys, name):
    assert run_cli(SMALL, "--plot", tmp_path / name) == 2
    output = capsys.readouterr()
    assert "is not supported; it must be .svg or .png" in output.err
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_command_prints_a_result_that_cannot_be_written(capsys):
    assert run_cli(SMALL, "--json", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "requests: " in printed.out
    assert "cannot write /dev/full: No space left" in printed.err


def test_command_hints_when_nothing_fits(capsys):
    assert run_cli(SMALL, "--device-blocks", 1) == 2
    assert "hint: raise device_blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--device-blocks", "0"],
        ["--device-blocks", "many"],
        ["--host-blocks", "-1"],
        ["--block-tokens", "0"],
        ["--concurrency", "1.5"],
        ["--speed", "0"],
        ["--speed", "nan"],
        ["--limit", "0"],
        ["--capacities", "1000,,2000"],
        ["--capacities", "0"],
        ["--capacities", "4 parsecs"],
        ["--host-capacities", "-1"],
        ["--model", "config.json", "--bytes-per-token", "4KiB"],
    ],
)
def test_command_refuses_bad_values(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli(SMALL, *flags)
    assert caught.value.code == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err
