"""Statistics: fields with metrics, and changes between two readings."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.base.statistics import (
    CacheStatistics,
    GuardStatistics,
    Label,
    Metric,
    Statistics,
    StoreStatistics,
    mark_of,
    metric_of,
)
from aiokv.cli.top.figures import since
from tests.harness.filled import filled


def test_a_field_has_a_metric_or_a_label():
    assert metric_of(CacheStatistics, "grants") == Metric(
        "counter", "grants_total", "Leases that were granted; a resumed lease counts again."
    )
    assert mark_of(CacheStatistics, "groups") == Label("group")
    assert metric_of(CacheStatistics, "groups") is None
    assert mark_of(GuardStatistics, "failure") is None


def test_changes_are_those_of_counters():
    now = filled(StoreStatistics)
    before = msgspec.structs.replace(now, evicted_blocks=now.evicted_blocks - 7, blocks=3)
    assert since(now, before) == msgspec.structs.replace(now, evicted_blocks=7)


@pytest.mark.parametrize("stores", [[], ["one", "two"]])
def test_branches_that_are_new_have_all_their_counts(stores):
    now: Statistics = filled(Statistics)
    (store,) = now.stores
    before = msgspec.structs.replace(
        now,
        stores=[msgspec.structs.replace(store, url=url) for url in stores],
        groups={},
        dropped_by_cause={},
        grants=now.grants - 1,
    )
    changed = since(now, before)
    assert changed.stores == now.stores
    assert changed.groups == now.groups
    assert changed.dropped_by_cause == now.dropped_by_cause
    assert (changed.grants, changed.leases) == (1, now.leases)
    assert changed.requests.hold == now.requests.hold
    same = since(now, now)
    assert same.stores[0].loaded_blocks == same.groups["a"].device.evicted_blocks == 0
    assert same.stores[0].url == store.url
