"""Metrics: each field of each record of statistics is exposed, as valid Prometheus text."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aiokv import CacheConfig, CacheEngine
from aiokv._native import Histogram
from aiokv.base.statistics import DurationHistogram
from aiokv.errors import ConfigError, UsageError
from aiokv.observe import prometheus
from aiokv.observe.exposition import Family, Sample, labelled, merged, text_of
from aiokv.observe.metrics import exposition, families
from aiokv.observe.prometheus import EngineCollector
from tests.harness.filled import engine_with, filled_records

if TYPE_CHECKING:
    from collections.abc import Iterator


def numbers_of(value: Any) -> Iterator[tuple[str, float]]:
    """Yield the path and the value of each number of a record."""
    if isinstance(value, DurationHistogram):
        first, second = value.counts
        value = [first, first + second, value.sum_seconds]
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, part in value.items():
            for path, number in numbers_of(part):
                yield f"{name}.{path}".rstrip("."), number
    elif not isinstance(value, str):
        yield "", value


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of an exposition by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_field_of_each_record_of_statistics_is_in_a_metric():
    records = filled_records()
    methods = {name for name in dir(CacheEngine) if name.endswith("statistics")}
    assert set(records) == methods | {"device_blocks_by_salt"}
    samples = parsed(exposition(engine_with(records)))
    shown = set(samples.values()) | {
        float(rank) for _, labels in samples for name, rank in labels if name == "rank" and rank
    }
    expected = dict(numbers_of(records))
    assert len(expected) > 250
    assert {path for path, number in expected.items() if number not in shown} == set()


async def ran() -> CacheEngine:
    """Return a closed engine that has served requests over both tiers."""
    engine = CacheEngine(CacheConfig(device_blocks=4, host_blocks=8, block_tokens=4))
    async with engine:
        for prompt in (0, 1, 2, 0):
            async with engine.match(np.arange(9) + 100 * prompt) as lease:
                await lease.allocate(9)
                await lease.layers.wait_all()
                lease.commit(9)
            engine.step()
            await engine.drain()
    return engine


@pytest.mark.asyncio
async def test_the_text_has_the_samples_of_the_collector():
    engine = await ran()
    text = exposition(engine)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    assert parsed(text) == parsed(generate_latest(registry).decode())
    assert len(parsed(text)) > 200


@pytest.mark.asyncio
async def test_families_are_named_and_typed_as_prometheus_wants():
    engine = await ran()
    found = families(engine)
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert family.name.startswith("aiokv_")
        assert family.help.endswith(".")
        assert (family.kind == "counter") == family.name.endswith("_total")
        labels = [(s.suffix, frozenset(s.labels.items())) for s in family.samples]
        assert len(labels) == len(set(labels)), family.name
    lines = exposition(engine).splitlines()
    types = [line.split()[2:] for line in lines if line.startswith("# TYPE")]
    assert types == [[family.name, family.kind] for family in found]
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert helps == [family.name for family in found]


@pytest.mark.asyncio
async def test_metrics_count_what_a_run_has_done():
    samples = parsed(exposition(await ran()))

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset({"engine": "default", **labels}.items())]

    assert value("aiokv_prompt_tokens_total") == 4 * 9
    assert value("aiokv_grants_total") == 4
    assert value("aiokv_hit_tokens_total", tier="device") == 0
    assert value("aiokv_hit_tokens_total", tier="host") == 8
    assert value("aiokv_copied_blocks_total", group="attention", direction="offload") == 6
    assert value("aiokv_copied_blocks_total", group="attention", direction="onload") == 2
    assert value("aiokv_transfers_total", group="attention", route="onload", outcome="done") == 1
    assert value("aiokv_capacity_blocks", group="attention", tier="device") == 4
    states = ("free", "cached", "leased", "in_flight")
    assert (
        sum(
            value("aiokv_blocks", group="attention", tier="device", state=state) for state in states
        )
        == 4
    )


@pytest.mark.asyncio
async def test_engines_are_told_apart_by_their_name():
    engines = {"first": await ran(), "second": CacheEngine(CacheConfig(device_blocks=8))}
    text = exposition(engines)
    assert text.count("# TYPE aiokv_grants_total ") == 1
    samples = parsed(text)
    grants = {
        name: samples["aiokv_grants_total", frozenset({("engine", name)})] for name in engines
    }
    assert grants == {"first": 4, "second": 0}
    registry = CollectorRegistry()
    registry.register(EngineCollector(engines, {"model": "m"}))
    with_model = {(name, labels - {("model", "m")}) for name, labels in samples}
    collected = parsed(generate_latest(registry).decode())
    assert {(name, labels - {("model", "m")}) for name, labels in collected} == with_model
    assert all(("model", "m") in labels for _, labels in collected)


def test_labels_and_helps_are_escaped():
    text = 'a "b" \\ c\nd'
    family = Family("f", "gauge", text, [Sample("", {"label": text}, 0.5)])
    (found,) = text_string_to_metric_families(text_of([family]))
    assert found.samples[0].labels == {"label": text}
    assert found.documentation.replace('\\"', '"') == text
    assert text_of([family]).count("\n") == 3


def test_families_of_one_name_are_merged_without_changing_them():
    first = Family("f", "gauge", "F.", [Sample("", {"x": "1"}, 1)])
    second = Family("f", "gauge", "F.", [Sample("", {"x": "2"}, 2)])
    (both,) = merged([first, second])
    assert [sample.value for sample in both.samples] == [1, 2]
    assert (len(first.samples), len(second.samples)) == (1, 1)
    (more,) = labelled([both], {"y": "3"})
    assert more.samples[0].labels == {"y": "3", "x": "1"}
    assert both.samples[0].labels == {"x": "1"}


# --- other threads --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_scrape_in_another_thread_reads_on_the_loop_of_the_engine():
    async with CacheEngine(CacheConfig(device_blocks=8)) as engine:
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        text = await asyncio.to_thread(generate_latest, registry)
        assert parsed(text.decode())["aiokv_grants_total", frozenset({("engine", "default")})] == 0
        with pytest.raises(UsageError, match="thread"):
            await asyncio.to_thread(exposition, engine)


@pytest.mark.asyncio
async def test_a_scrape_while_the_loop_is_blocked_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prometheus, "SCRAPE_SECONDS", 0.01)
    async with CacheEngine(CacheConfig(device_blocks=8)) as engine:
        errors: list[BaseException] = []

        def scrape() -> None:
            try:
                list(EngineCollector(engine).collect())
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=scrape)
        thread.start()
        thread.join()  # blocks the loop
        assert "did not run for 0.01 s" in str(errors[0])
        await asyncio.sleep(0)  # the cancelled read does nothing


def test_without_prometheus_client_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delitem(sys.modules, "aiokv.observe.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'aiokv\[metrics\]'"):
        __import__("aiokv.observe.prometheus")


# --- histograms -----------------------------------------------------------------------------------


def test_a_duration_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed():
    bounds = Histogram.bounds_seconds()
    assert (bounds[0], bounds[-1]) == (2.0**-20, 4096.0)
    assert bounds == [2.0**e for e in range(-20, 13)]
    cases = [
        (0.0, 0), (-1.0, 0), (float("nan"), 0), (1e-9, 0), (0.25, bounds.index(0.25)),
        (0.25 + 1e-9, bounds.index(0.5)), (3.0, bounds.index(4.0)), (4096.0, len(bounds) - 1),
        (4096.1, len(bounds)), (float("inf"), len(bounds)),
    ]  # fmt: skip
    for seconds, bucket in cases:
        histogram = Histogram()
        histogram.add(seconds)
        expected = [0] * (len(bounds) + 1)
        expected[bucket] = 1
        assert histogram.counts == expected, seconds


def test_the_sum_of_a_histogram_is_exact_to_the_nanosecond():
    histogram = Histogram()
    for _ in range(1000):
        histogram.add(0.1)
    histogram.add(1e-9)
    assert histogram.sum_seconds == 100.000000001
    assert DurationHistogram.of(histogram).count == 1001


@pytest.mark.asyncio
async def test_the_buckets_of_a_histogram_are_cumulative():
    engine = await ran()
    samples = parsed(exposition(engine))
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "aiokv_hold_seconds_bucket"
    }
    values = [buckets[bound] for bound in sorted(buckets, key=float)]
    assert values == sorted(values)
    assert values[-1] == buckets["+Inf"] == 4
    assert samples["aiokv_hold_seconds_count", frozenset({("engine", "default")})] == 4
    total = samples["aiokv_hold_seconds_sum", frozenset({("engine", "default")})]
    assert total == engine.statistics().requests.hold.sum_seconds
