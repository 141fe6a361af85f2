"""Exports of ``aiokv``: introspection, conversion, and errors of wrong calls."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import aiokv
import aiokv.events
import aiokv.model.shape
import aiokv.model.sizing
import aiokv.ranks
import aiokv.stores
import aiokv.testing
from aiokv import (
    CacheConfig,
    CacheEngine,
    CpuDevice,
    CudaDevice,
    Hit,
    Item,
    Peers,
    Regions,
    Usage,
    WindowGroup,
)
from aiokv.devices import CudaOptions
from aiokv.errors import ConfigError, UsageError
from aiokv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from aiokv.model.shape import ModelShape
from aiokv.model.sizing import CacheSizes, Memory, cache_sizes
from aiokv.ranks import RankGroup, RankTimeouts
from aiokv.statistics import LeasePhase, Statistics, TransferSpan
from aiokv.testing import ManualDevice
from aiokv.worker.device.names import named_device
from tests.unit import model_configs

PUBLIC = {
    name: getattr(module, name)
    for module in (aiokv, aiokv.devices, aiokv.events, aiokv.ranks, aiokv.statistics)
    for name in module.__all__
}


def is_record(value: Any) -> bool:
    return isinstance(value, type) and (
        dataclasses.is_dataclass(value)
        or issubclass(value, msgspec.Struct)
        or (issubclass(value, tuple) and hasattr(value, "_fields"))
    )


RECORDS = [
    value
    for value in PUBLIC.values()
    if is_record(value) and value is not Peers  # has a secret, which no conversion shows
]
# Records of other public modules; some hold objects, such as a store or a device.
MORE_RECORDS = [
    value
    for module in (aiokv.stores, aiokv.testing)
    for value in map(module.__getattribute__, sorted(set(module.__all__) & set(vars(module))))
    if is_record(value)
] + [
    value
    for module in (aiokv.model.shape, aiokv.model.sizing)
    for value in vars(module).values()
    if is_record(value) and value.__module__ == module.__name__
]
SAMPLES: dict[type, dict[str, Any]] = {
    CacheConfig: {
        "device_blocks": 8,
        "windows": {"local": {"window_tokens": 4, "device_blocks": 4}},
    },
    WindowGroup: {"window_tokens": 4, "device_blocks": 4},
    Item: {"content_hash": "aGFzaA==", "offset": 0, "length": 2},
    LeasePhase: {
        "lease_id": 1,
        "owner": "r1",
        "phase": "granted",
        "began_at": 1.0,
        "ended_at": 2.0,
        "outcome": "released",
    },
    TransferSpan: {
        "transfer_id": 1,
        "route": "onload",
        "group": "attention",
        "blocks": 1,
        "num_bytes": 1,
        "queued_at": 1.0,
        "started_at": None,
        "ended_at": 2.0,
        "outcome": "done",
    },
    BlockStored: {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    },
    BlockRemoved: {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"},
    AllBlocksCleared: {"type": "AllBlocksCleared"},
}


def test_names_are_sorted_and_exist():
    for module in (aiokv, aiokv.devices, aiokv.statistics):
        assert module.__all__ == sorted(module.__all__)
    assert {"CpuDevice", "CudaDevice", "LayerView", "Pin"} <= set(aiokv.__all__)
    assert len(aiokv.__all__) <= 21
    assert {"CudaOptions", "Event", "Stream"} <= set(aiokv.devices.__all__)
    assert {"PollerStatistics", "Statistics"} <= set(aiokv.statistics.__all__)
    assert {CacheConfig, CudaOptions, Hit, Item, RankTimeouts, Statistics, Usage} <= set(RECORDS)
    names = {record.__name__ for record in MORE_RECORDS}
    assert {"StoreUse", "StoreStatistics", "End", "ModelShape", "CacheSizes"} <= names


def test_types_of_fields_can_be_resolved():
    for record in (*RECORDS, Peers, *MORE_RECORDS):
        fields = getattr(record, "__struct_fields__", getattr(record, "_fields", None))
        names = [f.name for f in dataclasses.fields(record)] if fields is None else fields
        assert set(names) <= set(typing.get_type_hints(record)), record


def sample(record: type) -> Any:
    """Return plain values that construct an instance."""
    if record in SAMPLES:
        return SAMPLES[record]
    plain: dict[str, Any] = {}
    required = [f for f in msgspec.inspect.type_info(record).fields if f.required]  # type: ignore[attr-defined]
    for field in required:
        hint = typing.get_type_hints(record)[field.name]
        plain[field.name] = sample(hint) if hint in RECORDS else sample_value(hint)
    return plain


def sample_value(hint: Any) -> Any:
    """Return a plain value of a type that is no record."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    kinds: dict[Any, Any] = {list: [], dict: {}, str: "", bool: False}
    return kinds.get(typing.get_origin(hint) or hint, 1)


def test_records_are_made_from_plain_values_and_back():
    for record in RECORDS:
        values = sample(record)
        is_array = issubclass(record, tuple | KVEventBatch)
        made = msgspec.convert(list(values.values()) if is_array else values, record)
        assert isinstance(made, record)
        assert msgspec.convert(msgspec.to_builtins(made), record) == made


@pytest.mark.parametrize("config", [model_configs.DEEPSEEK_V3, model_configs.GEMMA_3_4B])
def test_shapes_and_sizes_are_made_from_plain_values_and_back(config):
    shape = ModelShape.from_config(config)
    assert msgspec.convert(msgspec.to_builtins(shape), ModelShape) == shape
    sizes = cache_sizes(shape, Memory(gpu_bytes=2**33))
    assert msgspec.convert(msgspec.to_builtins(sizes), CacheSizes) == sizes


def test_msgspec_reports_the_field_that_is_out_of_range():
    with pytest.raises(msgspec.ValidationError, match="device_blocks is 0"):
        msgspec.convert({"device_blocks": 0}, CacheConfig)


def test_no_public_constructor_or_method_hides_its_parameters():
    for name, value in PUBLIC.items():
        if not isinstance(value, type) or issubclass(value, BaseException) or value in RECORDS:
            continue
        for method_name, method in inspect.getmembers(value, inspect.isfunction):
            if method_name.startswith("_") and method_name != "__init__":
                continue
            if not getattr(method, "__module__", "").startswith("aiokv."):
                continue  # of a base class that is not aiokv's
            if (name, method_name) == ("ComputeBatch", "run"):
                continue  # passes them on to the caller's function
            kinds = {p.kind for p in inspect.signature(method).parameters.values()}
            assert inspect.Parameter.VAR_POSITIONAL not in kinds, f"{name}.{method_name}"
            assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{name}.{method_name}"


def test_the_signature_of_the_engine_is_real():
    assert list(inspect.signature(CacheEngine).parameters) == [
        "config", "regions", "device", "ranks", "stores", "peers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheEngine({"device_blocks": 8}), r"config is \{'device_.*': 8\}.*CacheConfig"),
        (lambda: CacheEngine(), "CacheEngine: missing.*'config'"),
        (
            lambda: CacheEngine(CacheConfig(device_blocks=8), devise="cpu"),
            r"CacheEngine: 'devise' is unknown \(hint: did you mean 'device'\?\)",
        ),
        (lambda: CacheEngine(CacheConfig(device_blocks=8), [1]), r"regions is \[1\]"),
        (lambda: CacheEngine(CacheConfig(device_blocks=8), ranks=2), "ranks is 2.*RankGroup"),
        (lambda: CacheConfig(), "missing.*'device_blocks'"),
        (lambda: CacheConfig(devise_blocks=8), "'devise_blocks' is unknown.*mean 'device_blocks'"),
        (lambda: CacheConfig(8), "positional"),
        (lambda: WindowGroup(window_tokens=1), "'device_blocks'"),
        (lambda: CudaOptions(slots=3), "'slots' is unknown.*num_slots"),
        (lambda: RankTimeouts(begin=3), "'begin' is unknown.*start"),
        (lambda: RankGroup("2", entry="a:b"), "num_ranks is '2'"),
        (lambda: CudaOptions(path="fast"), "path is 'fast'; it must be one of"),
        (lambda: CudaOptions(num_slots=0), "num_slots is 0"),
        (lambda: CudaOptions(timing=1), "timing is 1"),
        (lambda: RankTimeouts(start="60"), "RankTimeouts.start is '60'"),
        (lambda: RankTimeouts(start=float("nan")), "RankTimeouts.start is nan"),
        (lambda: RankTimeouts(start=0), "RankTimeouts.start is 0; it must be"),
    ],
)  # fmt: skip
def test_bad_arguments_of_constructors_are_config_errors(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:0 ", "CPU", "", 0, CpuDevice, object()]
)
def test_an_unknown_device_is_refused_with_the_accepted_names(device):
    with pytest.raises(ConfigError, match=r"'cpu', 'cuda' .*'cuda:N'.*CpuDevice or CudaDevice"):
        CacheEngine(CacheConfig(device_blocks=8), device=device)


def test_devices_are_made_by_name(monkeypatch):
    made = []
    monkeypatch.setattr(
        "aiokv.worker.device.cuda.CudaDevice",
        lambda ordinal: made.append(ordinal) or ManualDevice(),
    )
    config = CacheConfig(device_blocks=8)
    assert isinstance(named_device(None), CpuDevice)
    assert isinstance(named_device("cpu"), CpuDevice)
    for name in ("cuda", "cuda:0", "cuda:12"):
        CacheEngine(config, Regions(num_layers=1), name)
    assert made == [None, 0, 12]


def test_gpu_name_without_cuda_raises_with_a_hint(monkeypatch):
    monkeypatch.setattr("aiokv.worker.device.cuda._cuda", None)
    with pytest.raises(ConfigError, match=r"built without CUDA.*nvcc"):
        CacheEngine(CacheConfig(device_blocks=8), device="cuda:0")


@pytest.mark.parametrize(
    ("count", "ordinal", "message"),
    [
        (2, 2, r"cuda:2 does not exist: this process can use 2 GPUs.*CUDA_VISIBLE_DEVICES"),
        (RuntimeError("cudaErrorNoDevice"), None, "no GPU can be used: cudaErrorNoDevice"),
    ],
)
def test_missing_gpu_is_a_config_error(monkeypatch, count, ordinal, message):
    def get_device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(getDeviceCount=get_device_count)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(id=0))
    monkeypatch.setattr("aiokv.worker.device.cuda._cuda", object())
    monkeypatch.setattr("aiokv.worker.device.cuda._import_cupy", lambda: SimpleNamespace(cuda=cuda))
    with pytest.raises(ConfigError, match=message):
        CudaDevice(ordinal)
    if ordinal is not None:
        assert CudaDevice(ordinal - 1).name == "cuda:1"
        assert CudaDevice().name == "cuda:0"


def test_a_cache_too_large_for_memory_is_a_config_error(monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("aiokv.engine.parts.CacheScheduler", fail)
    with pytest.raises(ConfigError, match=r"not enough memory.*device_blocks=8.*lower them"):
        CacheEngine(CacheConfig(device_blocks=8))


def test_a_config_error_is_a_usage_error_and_a_value_error():
    assert issubclass(ConfigError, UsageError)
    assert issubclass(ConfigError, ValueError)
