"""Settings of the connector, and configurations of vLLM that it refuses."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.config import CacheConfig
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from aiokv.connectors.vllm import compat, opening
from aiokv.connectors.vllm.connector import check_config
from aiokv.connectors.vllm.options import Options
from aiokv.errors import ConfigError
from tests.connectors.vllm.configs import kv_cache_config, vllm_config
from tests.connectors.vllm.runner import LAYER_NAMES
from tests.connectors.vllm.serving import HOST

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_gb": 1}, "unknown key 'host_gb'"),
        ({}, "exactly one of them must be set"),
        ({"host_gib": 1, "cpu_bytes_to_use": 1}, "exactly one of them must be set"),
        ({"host_gib": -1}, "host_gib is -1"),
        ({"host_gib": "64"}, "host_gib is '64', a text without a unit"),
        ({"host_gib": "64GB/s"}, "host_gib is '64GB/s'; it must be a size"),
        ({"cpu_bytes_to_use": "all"}, "cpu_bytes_to_use is 'all'; it must be a size"),
        ({"host_gib": 1, "load": "sync"}, "load is 'sync'"),
        ({"host_gib": 1, "write_policy": "write_back"}, "write_policy is 'write_back'"),
        ({"host_gib": 1, "stores": "disk:/x"}, "stores is 'disk:/x'"),
    ],
)
def test_wrong_setting_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(extra)


@pytest.mark.parametrize(
    "extra", [{"host_gib": 1.5}, {"host_gib": "1.5GiB"}, {"cpu_bytes_to_use": "1536 MiB"}]
)
def test_sizes_may_have_units(extra: dict[str, Any]) -> None:
    assert Options.parse(extra).host_bytes == 1_536 << 20


def test_more_host_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 7 << 30)
    options = Options.parse({"host_gib": 8})
    with pytest.raises(ConfigError, match=r"host memory is 8\.00 GiB; .* has 7\.00 GiB available"):
        opening.cache_config(vllm_config(extra=HOST), kv_cache_config("flash", 40), options)


def _check(config: Any, groups: int = 1, spec: Any = None, **extra: Any) -> None:
    cache = kv_cache_config("flash", 40, spec)
    cache.kv_cache_groups *= groups
    check_config(config, cache, Options.parse({"host_gib": 1} | extra))


def test_socket_directory_that_other_users_can_access_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = Options.parse({"host_gib": 1})
    folder = Path(options.default_socket_path("engine")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"another owner, or a mode other than 0700"):
        options.default_socket_path("engine")


def _engine(index: int, **extra: Any) -> tuple[VllmConfig, Options]:
    """Return the configuration of one of two engines, as vLLM makes it for a dense model."""
    config = vllm_config(extra=HOST)
    config.parallel_config.data_parallel_index = index
    config.kv_transfer_config.engine_id = f"engine_dp{index}"
    return config, Options.parse({"host_gib": 1} | extra)


def test_engines_of_data_parallelism_have_paths_of_their_own() -> None:
    engines = [
        _engine(i, stores=["disk:/kv/{dp}-{rank}?bytes=1GiB"], socket="/s/{dp}") for i in (0, 1)
    ]
    assert [opening.stores_of(*engine, 3) for engine in engines] == [
        ["disk:/kv/0-3?bytes=1GiB"],
        ["disk:/kv/1-3?bytes=1GiB"],
    ]
    assert [opening.socket_path(*engine) for engine in engines] == ["/s/0", "/s/1"]
    defaults = {opening.socket_path(*_engine(i)) for i in (0, 1)}
    assert len(defaults) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_path_of_several_engines_of_data_parallelism_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match="stores has 'disk:/kv' for several engines"):
        opening.stores_of(*_engine(index, stores=["disk:/kv"]), 0)
    with pytest.raises(ConfigError, match="socket has '/s' for several engines"):
        opening.socket_path(*_engine(index, socket="/s"))
    assert opening.stores_of(*_engine(index, stores=["directory:/kv"]), 0) == ["directory:/kv"]


def _model_name(hf_config: dict[str, Any] | None = None, **fields: Any) -> str | None:
    config = vllm_config(extra=HOST)
    if hf_config is not None:
        config.model_config.hf_config = PretrainedConfig(**hf_config)
    for name, value in fields.items():
        setattr(config.model_config, name, value)
    cache = kv_cache_config("flash", 40)
    return opening.cache_config(config, cache, Options.parse(HOST)).model


def test_stored_blocks_are_found_with_the_same_model_only() -> None:
    """Blocks in a store outlive the server, whose options may change the KV of a prompt."""
    plain = {"rope_parameters": {"rope_theta": 10_000.0}, "torch_dtype": torch.bfloat16}
    name = _model_name(plain)
    moved = {
        "transformers_version": "6.0",
        "_name_or_path": "/copy",
        **dict(reversed(plain.items())),
    }
    assert _model_name(moved) == name
    odd = [{**plain, "heads": set(names), "object": object()} for names in ("abcdef", "fedcba")]
    assert _model_name(odd[0]) == _model_name(odd[1]) != name
    stretched = {**plain, "rope_parameters": {"rope_theta": 1_000_000.0}}
    others = [
        _model_name(stretched),
        _model_name(plain, quantization="fp8"),
        _model_name(plain, revision="main"),
        _model_name(plain, dtype="float16"),
    ]
    assert len({name, *others}) == 5


def test_unequal_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(extra=HOST, num_stages=2)
    _check(config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", f"{len(LAYER_NAMES)},0")
    with pytest.raises(ConfigError, match=rf"stages of \[{len(LAYER_NAMES)}, 0\] layers"):
        _check(config)


@pytest.mark.parametrize(
    ("nodes", "is_served"),
    [(["a", "a"], True), (["a", "b"], False), (["b", "a", "b"], True)],
    ids=str,
)
def test_ranks_of_ray_on_several_nodes_are_refused(
    nodes: list[str], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    ray = SimpleNamespace(placement_group_table=lambda group: table)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=ray))
    monkeypatch.setitem(sys.modules, "ray.util", ray)
    config = vllm_config(extra=HOST, num_ranks=2)
    config.parallel_config.distributed_executor_backend = "ray"
    _check(config)  # there is no placement group
    config.parallel_config.placement_group = SimpleNamespace()
    if is_served:
        _check(config)
    else:
        with pytest.raises(ConfigError, match="Ray has placed the 2 ranks on several nodes"):
            _check(config)


def test_configuration_that_is_not_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(vllm_config(extra=HOST))
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.int32, sliding_window=16
    )
    _check(vllm_config(extra=HOST), spec=window)
    with pytest.raises(ConfigError, match="no layer of full attention"):
        _check(vllm_config(extra=HOST), spec=window, load="layerwise")
    _check(vllm_config(extra=HOST), groups=2)
    config = vllm_config(extra=HOST, async_scheduling=True)
    _check(config, load="layerwise")
    for extra in ({"in_process": False}, {"verify": "checksum"}):
        with pytest.raises(ConfigError, match="asynchronous scheduling"):
            _check(config, load="layerwise", **extra)
    config = vllm_config(extra=HOST)
    config.parallel_config.pipeline_parallel_size = 2
    _check(config)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        _check(config, load="layerwise")
    config = vllm_config(extra=HOST)
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match="nnodes is 2; AiokvConnector serves 1 only"):
        _check(config)
    config = vllm_config(extra=HOST)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ConfigError, match="external_launcher"):
        _check(config)
    if hasattr(CacheConfig, "calculate_kv_scales"):  # until 0.27
        config = vllm_config(extra=HOST)
        config.cache_config.calculate_kv_scales = True
        _check(config)
        with pytest.raises(ConfigError, match="calculate_kv_scales is set"):
            _check(config, stores=["disk:/x"])
    config = vllm_config(extra=HOST)
    config.model_config.enable_sleep_mode = True
    if not compat.announces_sleep():
        with pytest.raises(ConfigError, match="enable_sleep_mode"):
            _check(config)
    monkeypatch.setattr(compat, "announces_sleep", lambda: True)
    _check(config)
