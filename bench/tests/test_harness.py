"""The bench harness: which way is better, and what counts as worse."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

import bench.__main__ as bench_main
from bench import harness


def make_run(**metrics: float) -> harness.Run:
    return harness.Run(machine={"revision": "abc"}, benches={"one": {"group": metrics}})


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("index.trace.requests_per_second", "higher"),
        ("transfer.onload_gb_per_second", "higher"),
        ("transfer.memcpy_ratio", "higher"),
        ("index.deep.hit_ns_per_block", "lower"),
        ("shutdown.uvloop.aclose_p50_ms", "lower"),
        ("wakeup.asyncio.wake_us.p50", "lower"),
        ("wakeup.asyncio.wake_us.p99", None),
        ("shutdown.uvloop.aclose_max_ms", None),
        ("index.trace.hit_tokens", None),
        ("cancel_storm.asyncio.cancel_us_per_waiter", "lower"),
    ],
)
def test_unit_determines_the_better_direction(metric, expected):
    assert harness.better(metric) == expected


def test_flatten_keeps_numbers_only():
    results = {"a": {"b": 1, "c": {"d": 2.5}}, "note": "text", "ok": True}
    assert harness.flatten(results) == {"a.b": 1, "a.c.d": 2.5}


def test_compare_ignores_differences_within_noise():
    old = make_run(requests_per_second=1000, wait_us=10.0, wait_p99_us=10.0, gone_us=1.0)
    new = make_run(requests_per_second=790, wait_us=12.4, wait_p99_us=99.0, added_us=1.0)
    changes = {change.metric: change for change in harness.compare(old, new, noise=0.25)}
    assert {metric for metric, change in changes.items() if change.worse} == {
        "one.group.requests_per_second"
    }
    assert changes["one.group.wait_us"].ratio == pytest.approx(1.24)
    assert len(changes) == 3
    assert not any(change.worse for change in harness.compare(new, old, noise=0.25))


def test_saved_runs_load_again(tmp_path):
    run = make_run(wait_us=3.5)
    harness.save(run, tmp_path / "deep" / "run.json")
    assert harness.load(tmp_path / "deep" / "run.json") == run
    assert json.loads((tmp_path / "deep" / "run.json").read_text())["machine"]["revision"] == "abc"


def test_machine_record_has_hardware_and_build_fields():
    machine = harness.machine()
    assert {"cpu", "cores", "kernel", "python", "uvloop", "compiler", "revision"} <= set(machine)
    assert all(machine.values())


@pytest.fixture
def fake_bench(monkeypatch, tmp_path):
    """Register a bench named ``fake``; results go to the test's folder."""
    module = SimpleNamespace(run=lambda quick: {"wait_us": 5.0 if quick else 20.0})
    monkeypatch.setitem(sys.modules, "bench.fake", module)
    monkeypatch.setattr(bench_main, "BENCHES", ("fake",))
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    return tmp_path


def test_command_prints_a_table_and_writes_json(fake_bench, capsys):
    assert bench_main.main(["fake", "--quick", "--save", str(fake_bench / "run.json")]) == 0
    output = capsys.readouterr().out
    assert "wait_us" in output
    assert "cores" in output
    assert harness.load(fake_bench / "results" / "fake.json").benches == {"fake": {"wait_us": 5.0}}
    assert harness.load(fake_bench / "run.json").benches == {"fake": {"wait_us": 5.0}}


def test_command_exits_1_when_worse_than_an_earlier_run(fake_bench, capsys):
    earlier = str(fake_bench / "run.json")
    bench_main.main(["fake", "--quick", "--save", earlier])
    assert bench_main.main(["fake", "--quick", "--compare", earlier]) == 0
    assert bench_main.main(["fake", "--compare", earlier]) == 1
    assert "worse" in capsys.readouterr().out
    assert bench_main.main(["fake", "--compare", earlier, "--noise", "4"]) == 0


def test_command_refuses_an_unknown_bench(capsys):
    with pytest.raises(SystemExit) as caught:
        bench_main.main(["no-such-bench"])
    assert caught.value.code == 2
    assert "unknown bench: no-such-bench" in capsys.readouterr().err
