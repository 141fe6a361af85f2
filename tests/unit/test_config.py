"""Bad values are refused with the field's name and the number."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from aiokv import CacheConfig, Regions, WindowGroup
from aiokv._native import Core
from aiokv.errors import ConfigError
from aiokv.scheduler.plans import new_core


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_blocks", 0),
        ("device_blocks", 2**30),
        ("device_blocks", True),
        ("device_blocks", 8.0),
        ("block_tokens", 0),
        ("host_blocks", -1),
        ("leave_tokens", 0),
        ("reserve_blocks", 8),
        ("miss_history_blocks", -1),
        ("miss_history_blocks", 2**30),
        ("write_policy", "write_sometimes"),
        ("write_policy", "nth_use"),
        ("write_policy", "nth_use:0"),
        ("write_policy", "nth_use:2.5"),
        ("write_policy", "nth_use:9999999999"),
        ("low_watermark_blocks", -1),
        ("item_hits", "some"),
        ("min_onload_tokens", -1),
        ("drain_timeout_seconds", -0.5),
        ("verify", "always"),
        ("salt_quota_blocks", 0),
        ("salt_shares", 0.5),
        ("salt_shares", {"chat": 0.0}),
        ("salt_shares", {"chat": 0.7, "batch": 0.4}),
        ("salt_shares", {3: 0.4}),
        ("salt_shares", {str(i): 1e-4 for i in range(4_096)}),
        ("model", None),
        ("model", "\ud800"),
        ("weights_version", 3),
        ("store_policy", "sometimes"),
        ("store_policy", "none"),
        ("store_policy", "nth_use:-1"),
        ("store_queue_blocks", 0),
        ("prefill_tokens_per_second", 0),
        ("prefill_tokens_per_second", float("inf")),
        ("prefill_tokens_per_second", float("nan")),
        ("prefill_tokens_per_second", "1000"),
        ("device_blocks", "8"),
        ("device_blocks", None),
        ("device_blocks", float("nan")),
        ("block_tokens", True),
        ("host_blocks", 4.0),
        ("low_watermark_blocks", 1.0),
        ("write_policy", None),
        ("write_policy", ["none"]),
        ("verify", 1),
        ("eviction_policy", 0),
        ("drain_timeout_seconds", "5"),
        ("drain_timeout_seconds", None),
        ("drain_timeout_seconds", True),
        ("drain_timeout_seconds", float("nan")),
        ("windows", None),
        ("windows", [1]),
        ("windows", {"local": 5}),
        ("windows", {3: WindowGroup(window_tokens=1, device_blocks=1)}),
    ],
)
def test_refuses_bad_values_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        CacheConfig(**{"device_blocks": 8, field: value})


def test_an_infinite_drain_timeout_is_accepted():
    assert CacheConfig(device_blocks=8, drain_timeout_seconds=math.inf)


@pytest.mark.parametrize("field", ["device_bytes", "host_bytes"])
@pytest.mark.parametrize("value", ["1000", 1000.0, True])
def test_for_regions_refuses_bytes_that_are_no_integers(field, value):
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((4, 8), np.int8)])
    with pytest.raises(ConfigError, match=field):
        CacheConfig.for_regions(regions, **{field: value})


def test_config_is_frozen():
    config = CacheConfig(device_blocks=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device_blocks = 9


def test_write_policy_has_a_default_and_saves_nothing_without_a_host_tier():
    config = CacheConfig(device_blocks=8)
    assert config.write_policy == "write_through"
    core = new_core(config)
    lease_id, *_ = core.match(np.arange(33, dtype=np.int32))
    core.allocate(lease_id, 33)
    assert core.commit(lease_id, 33) == 2
    assert not core.wants_backups()
    core.release(lease_id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_tokens", 0),
        ("device_blocks", 0),
        ("step_tokens", 0),
        ("sink_tokens", -1),
        ("sink_tokens", True),
        ("sink_tokens", 2**30),
    ],
)
def test_refuses_bad_values_of_a_window_group_by_name(field: str, value: object):
    with pytest.raises(ConfigError, match=field):
        WindowGroup(**{"window_tokens": 8, "device_blocks": 8, field: value})
    assert WindowGroup(window_tokens=1, device_blocks=1, step_tokens=1).sink_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("device_blocks", 0),
        ("device_blocks", 2**30 + 1),
        ("host_blocks", 2**30 + 1),
        ("leave_tokens", 0),
        ("state_slots", 2**30 + 1),
        ("host_state_slots", 2**30 + 1),
        ("reserve_blocks", 8),
        ("reserve_blocks", 9),
    ],
)
def test_the_core_refuses_bad_values_by_name_too(field: str, value: int):
    with pytest.raises(ConfigError, match=field):
        Core(**{"block_tokens": 4, "device_blocks": 8, field: value})


def test_derived_values():
    config = CacheConfig(device_blocks=640, block_tokens=16, min_onload_tokens=33)
    assert config.watermark_blocks == 20
    assert CacheConfig(device_blocks=1_600_000).watermark_blocks == 8_192
    assert config.min_onload_blocks == 3
    assert CacheConfig(device_blocks=8, low_watermark_blocks=100).watermark_blocks == 8


@pytest.mark.parametrize("name", ["attention", "state", "attention 0:2"])
def test_window_group_has_the_name_of_no_other_group(name: str) -> None:
    group = WindowGroup(window_tokens=8, device_blocks=8)
    with pytest.raises(ConfigError, match=f"windows: group name '{name}' is reserved"):
        CacheConfig(device_blocks=8, block_tokens=4, windows={name: group})
    CacheConfig(device_blocks=8, block_tokens=4, windows={"attention_8": group})
