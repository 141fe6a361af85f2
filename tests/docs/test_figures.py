"""The figures of README.md equal those of ``bench/results``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs/reference/measured.md").read_text()

# The run and the name of the server in ``vllm-h100-host-hits.json``.
NO_OFFLOAD, VLLM, LMCACHE = ("run 1", "none"), ("run 2", "vllm"), ("run 2", "lmcache")
AIOKV, LAYERWISE = ("run 2", "aiokv"), ("run 2", "aiokv-layers-sync")


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def cells_of(page: str, beginning: str) -> list[str]:
    """Return the cells of the row of a table that begins so, without bold marks."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip().replace("**", "") for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("new_tokens", [256, 1_536])
def test_rates_and_first_tokens_of_prompts_in_host_memory(new_tokens, clients):
    measured = results("vllm-h100-host-hits")
    beginning = rf"\| {new_tokens:,}( \(\d\d % hits\))?, {clients}\b"
    (row,) = [line for line in MEASURED.splitlines() if re.match(beginning, line)]
    found = re.findall(r"([\d.]+), (\d+) ms", row)
    servers = [NO_OFFLOAD, VLLM, LMCACHE, AIOKV, LAYERWISE]
    expected = []
    for run, server in servers:
        load = measured[run][server]["load"][f"host_hits_{new_tokens}_new_{clients}_clients"]
        rate, first_token = load["requests_per_second"], load["first_token_ms"]["p50"]
        expected.append((f"{rate:.1f}", f"{first_token:.0f}"))
    assert found == expected


def long_answers(clients: int, server: str) -> dict[str, Any]:
    run = "run 2" if server in ("vllm", "lmcache") else "run 1"
    return results("vllm-h100-long-answers")[run][server]["load"][f"long_answers_{clients}_clients"]


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_answers_of_64_tokens(clients):
    loads = [
        long_answers(clients, server)
        for server in ("vllm", "lmcache", "aiokv", "aiokv-layers", "aiokv-layers-sync")
    ]
    assert cells_of(MEASURED, f"64 output tokens, {clients} client")[1:] == [
        f"{load['requests_per_second']:.3g}/s, {load['first_token_ms']['p50']:.0f} ms"
        for load in loads
    ]


def documents(clients: int, server: str) -> dict[str, Any]:
    return results("vllm-h100-documents")["servers"][server][f"documents_{clients}_clients"]


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_questions_about_documents(clients):
    full = []
    for server in ("none", "vllm", "aiokv", "aiokv-async"):
        load = documents(clients, server)
        rate = f"{load['requests_per_second']:#.3g}/s"
        p50, p90, p99 = (f"{load['first_token_ms'][p]:.0f}" for p in ("p50", "p90", "p99"))
        gap = load["gap_ms"]["p99"]
        full.append(f"{rate}; {p50}, {p90}, {p99} ms; {gap:.{int(gap < 10)}f} ms")
    assert cells_of(MEASURED, f"{clients} | {full[0]}")[1:] == full


def joined(clients: int, server: str) -> dict[str, Any]:
    measured = results("vllm-h100-documents-join")["servers"]
    return measured[server][f"documents_{clients}_clients"]


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_questions_about_documents_whose_loads_join_steps(clients):
    cells = []
    for server in ("aiokv", "vllm", "aiokv-before"):
        load = joined(clients, server)
        p50, p90, p99 = (f"{load['first_token_ms'][p]:.0f}" for p in ("p50", "p90", "p99"))
        gap = load["gap_ms"]["p99"]
        gap = f"{gap:.{int(gap < 10)}f} ms"
        cells.append(f"{load['requests_per_second']:#.3g}/s; {p50}, {p90}, {p99} ms; {gap}")
    assert cells_of(MEASURED, f"{clients} | {cells[0]}")[1:] == cells


def test_requests_about_documents_that_arrive_together():
    near = []
    for server in ("aiokv", "vllm"):
        times = np.array(joined(4, server)["submitted_of_each"])
        apart = np.abs(times[:, None] - times)
        near.append(float((apart <= 0.06).sum(axis=1).mean()) - 1)
    text = " ".join(MEASURED.split())
    assert f"{near[0]:.1f} of the 3 other requests" in text
    assert f"and {near[1]:.1f} with `vllm`, whose longer loads" in text


def test_first_tokens_of_documents_that_are_loaded():
    loads = results("vllm-h100-documents-join")["loads_of_one_client"]
    shown = []
    for is_load in (True, False):
        for server in ("aiokv", "vllm"):
            times = np.array(joined(1, server)["first_token_ms_of_each"])
            times = times[np.isin(np.arange(len(times)), loads) == is_load]
            shown.append(f"{np.median(times):.0f} and {np.percentile(times, 90):.0f} ms")
    text = " ".join(MEASURED.split())
    assert f"are {shown[0]} with `aiokv`, and {shown[1]} with `vllm`" in text
    assert f"of the other 30, {shown[2]}, and {shown[3]}." in text


def test_default_settings_relative_to_the_offload_of_vllm():
    rates, first_tokens = [], []
    for clients in (1, 4, 16):
        own, vllm = documents(clients, "aiokv"), documents(clients, "vllm")
        rates.append(own["requests_per_second"] / vllm["requests_per_second"])
        first_tokens.append(own["first_token_ms"]["p50"] / vllm["first_token_ms"]["p50"])
    text = " ".join(MEASURED.split())
    for ratios in (rates, first_tokens):
        assert "{:.2f}, {:.2f} and {:.2f} times".format(*ratios) in text


H200 = results("vllm-h200")
LARGE, SHORT = H200["all in host memory"], H200["short host memory"]
LARGE_LOADS = {f"{n} client{'s' * (n > 1)}": f"documents_{n}_clients" for n in (1, 4, 16, 32)}
DISK = H200["short host memory and a disk"]
SHORT_LOADS = {f"short host memory, {n} clients": f"documents_{n}_clients" for n in (16, 32)}
SHORT_LOADS["short host memory, 32 agents"] = "agents"
MANY_AGENTS = H200["64 agents"]


def rate(load: dict[str, Any]) -> float:
    return load["requests_per_second"]


def of_load(load: dict[str, Any] | None, *, whole: bool, hits: bool = False) -> str:
    if load is None:
        return "not run"
    rate, first_token = f"{load['requests_per_second']:#.3g}/s", load["first_token_ms"]
    p50, p90, p99 = (f"{first_token.get(p, 0):.0f}" for p in ("p50", "p90", "p99"))
    if not whole:
        return f"{rate}, {p50} and {p90} ms"
    if "gap_ms" not in load:  # a cell that had not ended
        return f"{rate}; {p50}, –, {p99} ms"  # noqa: RUF001
    gap = load["gap_ms"]["p99"]
    shown = f"{rate}; {p50}, {p90}, {p99} ms; {gap:.{int(gap < 10)}f} ms"
    share = load["cached_tokens"] / load["prompt_tokens"]
    return f"{shown}; {share:.0%} hits".replace("%", " %") if hits else shown


def test_all_in_host_memory_on_an_h200():
    more = {
        "24 agents": "agents",
        "nothing hits, 4 clients": "no_hits",
        "256 tokens, 8 per second": "documents_8_per_second_256_tokens",
    }
    servers = ("none", "vllm", "lmcache", "aiokv", "none, 80 GiB on the device")
    for name, load in (LARGE_LOADS | more).items():
        expected = [of_load(LARGE[server].get(load), whole=True) for server in servers]
        assert cells_of(MEASURED, f"{name} | {expected[0]}")[1:] == expected
    later = [
        H200["256 tokens"].get(s, {}).get("documents_6_per_second_256_tokens") for s in servers
    ]
    expected = [of_load(load, whole=True) for load in later]
    assert cells_of(MEASURED, "256 tokens, 6 per second")[1:] == expected


def test_hits_on_the_device_of_an_h200():
    def of_each(clients: int) -> list[str]:
        loads = [
            LARGE[s][f"documents_{clients}_clients"] for s in ("none", "vllm", "lmcache", "aiokv")
        ]
        return [f"{load['device_hits_first_token_p50_ms']:.0f}" for load in loads]

    text = " ".join(MEASURED.split())
    one, four = of_each(1), of_each(4)
    assert (
        "p50 is {} ms in *no offload*, {} ms in *vllm*, {} ms in *lmcache* and {} ms".format(*one)
        in text
    )
    assert "with 4 clients {}, {}, {} and {} ms".format(*four) in text


def test_short_host_memory_on_an_h200():
    tables = [(SHORT, name, load) for name, load in SHORT_LOADS.items()]
    for table, name, load in [*tables, (MANY_AGENTS, "short host memory, 64 agents", "agents")]:
        servers = ("vllm", "lmcache", "aiokv")
        expected = [
            of_load(table.get(server, {}).get(load), whole=True, hits=True) for server in servers
        ]
        assert cells_of(MEASURED, name)[1:] == expected
    ratio = rate(MANY_AGENTS["aiokv"]["agents"]) / rate(MANY_AGENTS["vllm"]["agents"])
    assert f"`aiokv` served {ratio:.2f} times the requests of `vllm`." in MEASURED.replace(
        "\n", " "
    )


def test_short_host_memory_and_a_disk_on_an_h200():
    loads = [f"documents_{clients}_clients" for clients in (4, 16)]
    for clients, load in zip((4, 16), loads, strict=True):
        servers = ("aiokv", "aiokv-disk", "lmcache-disk", "aiokv-disk, another machine")
        expected = [of_load(DISK[server][load], whole=True, hits=True) for server in servers]
        assert cells_of(MEASURED, f"with a disk, {clients} clients")[1:] == expected
    own = [rate(DISK["aiokv-disk"][load]) for load in loads]
    others = [rate(DISK["lmcache-disk"][load]) for load in loads]
    without = [rate(DISK["aiokv"][load]) for load in loads]
    again = rate(DISK["aiokv-disk, another machine"][loads[1]]) / without[1]
    ratios = [a / b for a, b in zip(own, others, strict=True)]
    costs = [a / b for a, b in zip(own, without, strict=True)]
    text = " ".join(MEASURED.split())
    assert "served {:.2f} and {:.2f} times the requests of `lmcache-disk`".format(*ratios) in text
    assert "costs: {:.2f} and {:.2f} times the requests without a disk".format(*costs) in text
    assert f"on the other machine {again:.2f} times with 16 clients" in text


def test_servers_on_an_h200_in_the_readme():
    tables = [(LARGE, name, load) for name, load in LARGE_LOADS.items() if name != "1 client"]
    tables += [(SHORT, name, load) for name, load in SHORT_LOADS.items()]
    for table, name, load in tables:
        servers = ("vllm", "lmcache", "aiokv")
        expected = [of_load(table[server][load], whole=False) for server in servers]
        assert cells_of(README, name)[1:] == expected


def test_servers_on_an_h200_relative_to_the_offload_of_vllm():
    def hits(load: dict[str, Any]) -> float:
        return load["cached_tokens"] / load["prompt_tokens"]

    def ratios(table: dict[str, Any], loads: Any, value: Any) -> list[float]:
        return [value(table["aiokv"][load]) / value(table["vllm"][load]) for load in loads]

    large = ratios(LARGE, LARGE_LOADS.values(), rate)
    documents = ["documents_16_clients", "documents_32_clients"]
    short, hit = ratios(SHORT, documents, rate), ratios(SHORT, documents, hits)
    (agents,) = ratios(SHORT, ["agents"], rate)
    (p50,) = ratios(SHORT, ["agents"], lambda load: load["first_token_ms"]["p50"])
    (p99,) = ratios(SHORT, ["agents"], lambda load: load["first_token_ms"]["p99"])
    day_before = H200["the day before"]
    before = ratios(day_before["documents"], list(LARGE_LOADS.values())[1:], rate)
    (before_agents,) = ratios(day_before["agents"], ["agents"], rate)
    text = " ".join(MEASURED.split())
    assert "served {:.2f}, {:.2f} and {:.2f} times the requests of `vllm`".format(*before) in text
    assert f"{before_agents:.2f} times with agents." in text
    assert "served {:.2f}, {:.2f}, {:.2f} and {:.2f} times".format(*large) in text
    assert "served {:.2f} and {:.2f} times the requests".format(*short) in text
    assert "hit {:.2f} and {:.2f} times as many prompt tokens".format(*hit) in text
    assert f"with agents it served {agents:.2f} times, with a p50 of {p50:.2f} of its time" in text
    assert f"a p99 of {p99:.2f}" in text
    text = " ".join(README.split())
    assert f"served {min(large[1:]):.2f} to {max(large[1:]):.2f} times the requests" in text
    assert f"all documents, {min(short):.2f} to {max(short):.2f} times where it is short" in text
    assert f"{agents:.2f} times with agents" in text
    assert f"a p50 of {p50:.2f} and a p99 of {p99:.2f} of its time" in text
    assert f"{min(before):.2f} to {max(before):.2f} and {before_agents:.2f} times" in text
    assert f"{min(hit):.2f} to {max(hit):.2f} times as many on the H200" in text


def test_start_and_equal_outputs_on_an_h200():
    start = H200["start"]
    own, none = start["aiokv"], start["none"]
    text = " ".join(MEASURED.split())
    assert (
        f"started in {own['start_seconds']} s with `aiokv` and in {none['start_seconds']} s" in text
    )
    rates = [each["no_hits"]["requests_per_second"] for each in (own, none)]
    assert "{:.2f} and {:.2f} prompts per second were computed".format(*rates) in text
    passes = H200["equal outputs"]["aiokv"]
    assert f"Of {passes['reloaded']['compared']} prompts whose blocks were loaded" in text
    assert passes["reloaded"]["different"] == 0
    assert passes["damaged"]["different"] == passes["damaged"]["compared"]


def test_outputs_under_load_are_equal():
    measured = results("vllm-h100-equal-load")
    modes = measured["modes"].values()
    assert not any(mode["different"] for mode in modes)
    assert all(mode["is_complete"] for mode in modes)
    for page in (README, MEASURED):
        assert f"{sum(mode['requests'] for mode in modes):,} outputs" in page
    assert f"none of {measured['damaged']['requests']} outputs" in MEASURED


AGENTS = {
    "no offload |": "none",
    "vLLM's own `OffloadingConnector` |": "offloading",
    'aiokv, `"admission": "arrival"` |': "arrival",
    'aiokv, default: `"cached_first"`, 2 s |': "cached_first",
    "aiokv, 5 s |": "cached_first_5s",
    "aiokv, 20 s |": "cached_first_20s",
}


def test_agents_that_wait_for_vllm():
    measured = results("vllm_agents")["benches"]["vllm_agents"]
    for beginning, name in AGENTS.items():
        names = ("p50", "p90", "p99")
        seconds = [measured[name][f"first_token_{each}_seconds"] for each in names]
        shown = [measured[name]["requests_per_second"], measured[name]["hit_share"], *seconds]
        assert cells_of(MEASURED, beginning)[1:] == [f"{value:.2f}" for value in shown]
    own, default = measured["offloading"], measured["cached_first"]
    p50 = default["first_token_p50_seconds"] / own["first_token_p50_seconds"]
    rate = default["requests_per_second"] / own["requests_per_second"]
    for page in (MEASURED, (ROOT / "docs/guide/agents.md").read_text()):
        text = " ".join(page.split())
        assert f"first token in {p50:.2f} of the time" in text
        assert f"{rate:.2f} times as many are served" in text


def test_hit_tokens_relative_to_lru():
    trace = results("index-xeon")["benches"]["index"]["trace"]
    ratios = []
    for blocks in (32_000, 320_000):
        adaptive, lru = trace[f"{blocks}_blocks.adaptive"], trace[f"{blocks}_blocks.lru"]
        ratios.append(f"{adaptive['hit_tokens'] / lru['hit_tokens']:.2f}")
    assert cells_of(README, "Hit tokens on")[1] == " / ".join(ratios)


def test_hit_tokens_relative_to_the_optimum():
    trace = results("index-xeon")["benches"]["policy"]["trace"]
    del trace["100_blocks"]
    for policy in ("lru", "adaptive"):
        ratios = [f"{blocks[f'{policy}_min_ratio']:.3f}"[1:] for blocks in trace.values()]
        assert cells_of(MEASURED, f"{policy} |")[1:] == ratios


def test_hit_tokens_of_many_capacities():
    sweeps = results("policy_sweep")["benches"]["policy_sweep"].values()
    ratios = [row["lru_ratio"] or 1.0 for sweep in sweeps for row in sweep["rows"]]
    enough = sum(ratio >= 0.99 for ratio in ratios)
    section = " ".join(MEASURED[MEASURED.index("A larger cache hits more") :].split())
    assert all(len(sweep["rows"]) >= 24 for sweep in sweeps)
    assert min(sweep["least_smaller_ratio"] for sweep in sweeps) >= 0.99
    assert f"{enough} of {len(ratios)} have at least 0.99" in section
    assert f"the least is {min(ratios):.3f}" in section


def test_copies_relative_to_a_contiguous_memcpy():
    gpu = results("gpu-h100")["benches"]["gpu"]
    transfers = [v for name, v in gpu["transfers"].items() if name.endswith(".random")]
    ratios = [v[f"{direction}_ratio"] for v in transfers for direction in ("onload", "offload")]
    plain = gpu["transfers"]["128_kib.random"]["onload_contiguous_gbps"]
    each = [v["onload_memcpy_each_gbps"] / plain for v in gpu["baselines"].values()]
    assert cells_of(README, "Onload and offload")[1] == (
        f"{min(ratios):.2f}-{max(ratios):.2f} of a contiguous `cudaMemcpyAsync`; "
        f"one memcpy per block: {min(each):.2f}-{max(each):.2f}"
    )


def test_time_from_the_end_of_a_copy_until_its_coroutine():
    wakeup = results("gpu-h100")["benches"]["gpu"]["wakeup"]["uvloop_16_mib"]
    expected = f"{wakeup['p50_us']:.1f} / {wakeup['p99_us']:.0f} µs"
    assert cells_of(README, "Time from the end of a copy")[1] == expected


def test_pages_of_sglang_relative_to_its_own_backend():
    measured = results("sglang_storage")["benches"]["sglang_storage"]
    rows = {"load, page cache": "load", "load again": "cached_load", "save": "save"}
    for beginning, metric in rows.items():
        expected = [f"{measured['file'][f'{metric}_gbps']:.2f}"]
        for name in ("aiokv_directory", "aiokv_disk"):
            figures = measured[name]
            ratio = figures[f"{metric}_ratio_to_file"]
            expected.append(f"{figures[f'{metric}_gbps']:.2f} ({ratio:.2f})")
        assert cells_of(MEASURED, beginning)[1:] == expected
    disk = measured["aiokv_disk"]
    ratios = f"{disk['load_ratio_to_file']:.2f} / {disk['save_ratio_to_file']:.2f}"
    assert cells_of(README, "SGLang's pages")[1] == ratios


def test_requests_per_cpu_second_of_the_index():
    trace = results("index-xeon")["benches"]["index"]["trace"]
    rates = [v["requests_per_second"] for v in trace.values()]
    low, high = min(rates) // 1_000 * 1_000, max(rates) // 1_000 * 1_000
    assert cells_of(README, "Index through the API")[1] == f"{low:,.0f} to {high:,.0f}"


def test_cpu_time_of_the_index_relative_to_one_with_a_node_per_block():
    measured = results("index_ratio")["benches"]["index_ratio"]
    section = MEASURED[MEASURED.index("revision fa750fe takes") :]
    names = {f"| {blocks:,} |": f"{blocks}_blocks" for blocks in (32_000, 320_000, 1_600_000)}
    for beginning, name in {**names, "| 32,000, prompts that fork": "forks"}.items():
        shown = [
            f"{measured[key]['ratio']:.2f} ({measured[key]['native_ratio']:.2f})"
            for key in (f"{name}.lru", f"{name}.adaptive")
        ]
        assert cells_of(section, beginning.removeprefix("| "))[1:] == shown


def test_time_of_a_reset():
    milliseconds = results("reset")["benches"]["reset"]["ms_of_10000000_blocks"]
    sentence = f"of ten million cached blocks that nothing uses takes {milliseconds:.1f} ms"
    assert sentence in " ".join(MEASURED.split())


def test_speed_of_the_disk_store_relative_to_a_plain_loop():
    disk = results("stores-xeon")["benches"]["disk"]
    sizes = [v for name, v in disk.items() if name.endswith("_kib")]
    parts = []
    for operation in ("load", "save"):
        ratios = [v[operation]["ratio"] for v in sizes]
        parts.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
    assert cells_of(README, "Speed of the disk store")[1] == " / ".join(parts)


@pytest.mark.parametrize("operation", ["load", "save"])
def test_speed_of_the_shared_memory_of_a_host(operation):
    sizes = results("host_store")["benches"]["host_store"].values()
    section = MEASURED[MEASURED.index("### Shared memory of a host") :]
    expected = [
        ", ".join(f"{size[f'{operation}_{ratio}']:.2f}" for size in sizes)
        for ratio in ("ratio", "cpu_ratio")
    ]
    assert cells_of(section, f"`HostStore`, {operation}s")[1:] == expected
    assert min(size[f"{operation}_ratio"] for size in sizes) >= 0.8
    assert min(size[f"{operation}_cpu_ratio"] for size in sizes) >= 0.8


def test_fetches_and_computed_prompts_by_the_bandwidth_of_the_disk():
    measured = results("fetch_or_compute")["benches"]["fetch_or_compute"]
    section = MEASURED[MEASURED.index("### Fetch or compute") :]
    tables = section[: section.index("\n## ")].split("| bandwidth of the disk ")[1:]
    for model, table in zip(("", "uneven", "hybrid"), tables, strict=True):
        rows = re.findall(r"^\| ([\d.]+) \| (.*) \|$", table, re.MULTILINE)
        assert len(rows) > 4
        for gbps, row in rows:
            if model:
                load = measured[f"{model}_{gbps}_gbps"]
                expected = [_figures(load), f"{100 * load['fetched']:.0f} %"]
            else:
                names = (f"disk_{gbps}_gbps", f"any_price_{gbps}_gbps")
                expected = [_figures(measured[name]) for name in names]
            assert row.split(" | ") == expected


def _figures(load: dict[str, float]) -> str:
    return f"{load['requests_per_second']:.2f}/s, {load['first_token_p50_ms']:.0f} ms"


def test_times_of_crossings_and_of_the_fastdeploy_connector():
    crossing = results("sync")["benches"]["sync"]
    fastdeploy = results("fastdeploy")["benches"]["fastdeploy"]
    expected = {
        "`aiokv.sync`: one call": crossing["crossing_us"]["calls_1"],
        "the 64 calls of a step": crossing["crossing_us"]["calls_64"],
        "the same 64 calls": crossing["same_calls_on_the_loop_us"],
        "64 calls, beside": crossing["crossing_us"]["beside_python"],
        "FastDeploy connector: a `schedule()`": fastdeploy["decode_step_us"],
        "FastDeploy connector: match": fastdeploy["new_request_us"],
        "FastDeploy connector: the end": fastdeploy["finish_us"],
    }
    for beginning, times in expected.items():
        assert cells_of(MEASURED, beginning)[1:3] == [_time(times["p50"]), _time(times["p99"])]


def test_times_of_schedule_with_the_managers_of_fastdeploy_and_aiokv():
    measured = results("fastdeploy_scheduler")["benches"]["fastdeploy_scheduler"]
    selective = "host_blocks_write_through_selective"
    expected = {
        "64 requests, device blocks only": f"64_seats_0_{selective}",
        "256 requests, device blocks only": f"256_seats_0_{selective}",
        "64 requests, with host memory |": f"64_seats_2000_{selective}",
        "64 requests, with host memory, `write_back`": "64_seats_2000_host_blocks_write_back",
        "up to 64 requests, device blocks only": f"64_seats_0_{selective}_reserve",
        "up to 64 requests, with host memory": f"64_seats_2000_{selective}_reserve",
    }
    for beginning, name in expected.items():
        for cell, manager in zip(
            cells_of(MEASURED, beginning)[1:], ("fastdeploy", "aiokv"), strict=True
        ):
            times = [f"{measured[name][manager][key]:,.0f}" for key in ("mean", "p50", "p99")]
            assert cell == " / ".join(times) + " µs"


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 1_000 else f"{microseconds / 1e3:.0f} ms"


def test_times_of_a_decode_step_and_of_long_prompts():
    steps = results("steps")["benches"]["steps"]
    leases = ("64_leases", "256_leases")
    decode = steps["decode_us"]
    rows = {
        "`engine.advance` with": [decode[n]["advance"] for n in leases],
        "`engine.computing` of": [decode[n]["computing"] for n in leases],
        "`engine.step` |": [decode[n]["step"] for n in leases],
        "the three together": [decode[n]["all"] for n in leases],
        "the three in one crossing": [decode[n]["in_a_thread"] for n in leases],
        "the same step by `extend`": [decode[n]["single_verbs"] for n in leases],
    }
    means = [decode[n]["mean"] for n in leases]
    for name, server in (("vLLM", "vllm"), ("SGLang", "sglang")):
        other = results(f"steps-{server}")["benches"]["steps"]["others_us"][server]
        rows[f"{name} {other['version']}"] = [other[n]["all"] for n in leases]
        if server == "vllm":  # completes blocks in some of the steps, as aiokv does
            means += [other[n]["mean"] for n in leases]
    for beginning, times in rows.items():
        assert cells_of(MEASURED, beginning)[1:] == [f"{time:,.0f}" for time in times]
    tokens, held = steps["tokens_us"], steps["held_ms"]
    passes = results("steps-passes")["benches"]["steps"]["held_ms"]
    section = MEASURED[MEASURED.index("## A decode step") : MEASURED.index("## Index\n")]
    text = " ".join(section[section.index("SGLang's slots") :].split())
    figures = re.findall(r"[\d,.]+ (?:and [\d,.]+ )?[µm]s", text)
    assert figures == [
        "{:,.0f} and {:,.0f} µs".format(*means[:2]),
        "{:,.0f} and {:,.0f} µs".format(*means[2:]),
        *(f"{tokens[f'match_{kind}']:.0f} µs" for kind in ("int32", "int64", "list")),
        f"{tokens['append_one']:.1f} µs",
        *(f"{held[name]:.1f} ms" for name in ("match", "allocate", "commit", "step")),
        *(f"{passes[name]:.1f} ms" for name in ("prefetch", "match")),
        f"{held['open']:.0f} ms",
    ]


def test_the_http_server_to_copy_has_as_many_lines_as_the_pages_say():
    lines = len((ROOT / "aiokv/demo/http_server.py").read_text().splitlines())
    pages = [README, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    named = [n for page in pages for n in re.findall(r"(\d+) lines to copy|of (\d+) lines", page)]
    assert {int(a or b) for a, b in named} == {lines}


def hits_where_host_memory_is_short(name: str) -> dict[str, float]:
    return results("vllm_hits")["benches"]["vllm_hits"][f"hit_share_{name}_clients"]


@pytest.mark.parametrize(
    ("start", "name"),
    [("1 ", "1"), ("4 ", "4"), ("16 ", "16"), ("4, ", "recorded_4"), ("16, ", "recorded_16")],
)
def test_hits_where_host_memory_is_short(start, name):
    hits = hits_where_host_memory_is_short(name)
    section = MEASURED[MEASURED.index("### Hits where host memory is short") :]
    shares = [f"{hits[name]:.3f}" for name in ("device", "offloading", "both", "store", "sum")]
    shares.insert(3, f"\N{MULTIPLICATION SIGN}{hits['both'] / hits['offloading']:.2f}")
    assert cells_of(section[: section.index("vLLM's own connector copies")], start)[1:] == shares


def test_the_hits_that_can_be_reached_where_host_memory_is_short():
    hits = [hits_where_host_memory_is_short(f"recorded_{clients}") for clients in (4, 16)]
    most = [f"{each['sum'] / each['offloading']:.2f}" for each in hits]
    assert f"would have {most[0]} and {most[1]} times the hits" in MEASURED


def test_the_readme_has_the_ratios_of_hits_where_host_memory_is_short():
    shares = [hits_where_host_memory_is_short(clients) for clients in ("1", "4", "16")]
    ratios = sorted(hits["both"] / hits["offloading"] for hits in shares)
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as many prompt tokens" in README


@pytest.mark.parametrize(("start", "name"), [("vLLM alone", "none"), ("aiokv", "aiokv")])
def test_memory_over_many_requests(start, name):
    measured = results("vllm_long_run")["benches"]["vllm_long_run"][name]
    shown = [f"{measured['rss_mib'][thousands - 1]:.0f}" for thousands in (1, 5, 10, 20)]
    section = MEASURED[MEASURED.index("### Memory over many requests") :]
    shown.append(f"{measured['growth_mib_per_1000']:.2f}")
    assert cells_of(section[: section.index("### CPU time")], start)[1:] == shown


def test_hits_with_the_length_of_the_answer_as_a_label():
    measured = results("output_labels")["benches"]["output_labels"]
    short = [measured[f"agent-a.{blocks}_blocks"] for blocks in (500, 1_000, 2_000)]
    gains = [each["gain"] for each in short]
    at_random = max(each["shuffled_gain"] for each in short)
    text = " ".join((ROOT / "docs/guide/agents.md").read_text().split())
    assert f"have {min(gains):.2f} to {max(gains):.2f} times the hits" in text
    assert f"at most {at_random:.2f} times" in text


def test_cpu_time_of_the_history_of_misses():
    cases = results("miss_history")["benches"]["miss_history"].values()
    page = (ROOT / "docs/operate/tuning.md").read_text()
    for history in ("none", "quarter", "full"):
        costs = [case[f"{history}.cost"] for case in cases]
        assert f"{min(costs):.2f} to {max(costs):.2f} times" in page


def test_cpu_time_in_vllms_scheduler():
    scenarios = [("request_us", "miss"), ("request_us", "hit")]
    scenarios += [("step_us", "256"), ("waiting_us", "100000"), ("waiting_us", "32_prompts")]

    def shown(name: str, scenario: tuple[str, str], keys: tuple[str, ...]) -> list[str]:
        measured = results(name)["benches"]["vllm_scheduler"][scenario[0]][scenario[1]]
        # Differences that are too small to be measured may be negative.
        return [f"{max(measured[key], 0):,.0f} µs" for key in keys]

    starts = (
        "a new prompt of 1,024",
        "the same, all blocks",
        "a decode step of 256",
        "a prompt of 100,",
        "32 prompts of 10,000",
    )
    keys = ("vllm", "added", "offloading", "engine")
    for start, scenario in zip(starts, scenarios, strict=True):
        both = [shown(f"vllm_scheduler{name}", scenario, keys) for name in ("", "-0.32.0")]
        assert cells_of(MEASURED, start)[1:] == [cell for cells in both for cell in cells]
    both = [
        results(f"vllm_scheduler{name}")["benches"]["vllm_scheduler"]["call_us"]
        for name in ("", "-0.32.0")
    ]
    for method in both[0]:
        times = [f"{measured[method]:.0f} µs" for measured in both]
        assert cells_of(MEASURED, f"`{method}`")[2:] == times
    starts = ("prompt of 1,024", "prompt in host memory", "decode step of 256", "waiting prompt")
    keys = ("vllm", "added", "engine")
    for start, scenario in zip(starts, scenarios[:4], strict=True):
        assert cells_of(MEASURED, start)[1:] == shown("vllm_scheduler-h100", scenario, keys)


@pytest.mark.parametrize(("name", "kib"), [("128 KiB", 128), ("2 MiB", 2_048)])
def test_requests_to_an_object_store(name, kib):
    measured = results("s3_requests")["benches"]["s3_requests"][f"object_{kib}_kib"]
    (cells,) = [
        line.strip("| ").split(" | ")
        for line in MEASURED.splitlines()
        if re.fullmatch(rf"\| {name}( \| [\d.]+){{4}} \|", line)
    ]
    names = ("lookup", "load", "save", "all")
    assert cells[1:] == [f"{measured[f'{what}_share_of_requests']:.2g}" for what in names]
    assert measured["all_share_of_requests"] <= 0.1


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("0.75 of that", "budget_0.75"),
        ("0.5 of that", "budget_0.5"),
        ("0.25 of that", "budget_0.25"),
        ("no budget, blocks that are computed a second time", "computed_again"),
        ("no budget, blocks that the disk will be asked for", "foresight"),
    ],
)
@pytest.mark.parametrize(
    ("load", "trace"), [("agents", "agent-a"), ("conversations", "conversation")]
)
def test_hits_with_a_write_budget(load, trace, row, name):
    measured = results("write_budget")["benches"]["write_budget"][trace][name]
    cells = [f"{measured[f'{what}_ratio']:.2f}" for what in ("hit", "disk_hit", "written")]
    if "fullest_day_ratio" in measured:
        cells.append(f"{measured['fullest_day_ratio']:.2f}")
    assert [cell for cell in cells_of(MEASURED, f"{load}: {row}")[1:] if cell] == cells


@pytest.mark.parametrize("tokens", [1_024, 32_768])
def test_prompts_that_no_store_has(tokens):
    measured = results("store_misses")["benches"]["store_misses"][f"{tokens}_tokens"]
    names = ("no_store", "disk", "followed", "remembered", "host", "ranks", "asked")
    assert cells_of(MEASURED, f"a new one of {tokens:,} tokens")[1:] == [
        f"{measured[name]['wait_us']:,.0f} µs" for name in names
    ]
    assert all(measured[name]["added_us"] <= 100 for name in names[1:-1])
