"""Servers to compare: vLLM without offload, with its own, with LMCache, and with aiokv."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_GIB = 1 << 30
BLOCK_TOKENS = 16


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all servers have in common.

    Attributes:
        model: directory of the model's configuration.
        block_bytes: KV of a block of 16 tokens.
        device_blocks: blocks in the device cache.
        host_gib: size of the host tier.
        small_host_gib: size of the host tier where a disk follows it.
        disk: directory of the disk store.
        disk_gib: its quota.
        max_model_tokens: longest prompt and its output.
        gpu_share: part of the GPU's memory that must be free at the start.
        batch_invariant: equal outputs whatever runs beside a request, at a lower speed.
        graph_sizes: batch sizes whose decode steps run as CUDA graphs; none: all steps are eager.
        record: path of the file for the calls of the connector, see ``bench.vllm.recorded``; empty
            for no record.
        profile: directory for traces of vLLM's profiler; empty for no traces.
    """

    model: str
    block_bytes: int
    device_blocks: int
    host_gib: float
    small_host_gib: float
    disk: str
    disk_gib: int
    max_model_tokens: int
    gpu_share: float = 0.9
    batch_invariant: bool = False
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8)
    record: str = ""
    profile: str = ""


def _no_offload(settings: Settings) -> dict[str, Any]:
    return {}


def _vllm(settings: Settings) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": int(settings.host_gib * _GIB)},
    }


def _vllm_simple(settings: Settings) -> dict[str, Any]:
    return {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": int(settings.host_gib * _GIB)},
    }


def _lmcache(settings: Settings) -> dict[str, Any]:
    return _lmcache_connector(settings.host_gib)


def _lmcache_disk(settings: Settings) -> dict[str, Any]:
    return _lmcache_connector(
        settings.small_host_gib,
        local_disk=f"file://{settings.disk}/",
        max_local_disk_size=float(settings.disk_gib),
    )


def _lmcache_connector(host_gib: float, **options: Any) -> dict[str, Any]:
    options |= {"local_cpu": True, "max_local_cpu_size": host_gib}
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {f"lmcache.{name}": each for name, each in options.items()},
    }


def _aiokv(settings: Settings) -> dict[str, Any]:
    return _aiokv_connector(host_gib=settings.host_gib)


def _aiokv_async(settings: Settings) -> dict[str, Any]:
    return _aiokv_connector(host_gib=settings.host_gib, load="async")


def _aiokv_layers(settings: Settings) -> dict[str, Any]:
    return _aiokv_connector(host_gib=settings.host_gib, load="layerwise")


def _aiokv_disk(settings: Settings) -> dict[str, Any]:
    store = f"disk:{settings.disk}?bytes={settings.disk_gib}GiB"
    return _aiokv_connector(host_gib=settings.small_host_gib, stores=[store])


def _aiokv_connector(**options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "AiokvConnector",
        "kv_connector_module_path": "aiokv.connectors.vllm",
        "kv_load_failure_policy": "recompute",
        # The benches empty the device cache, so that prompts hit host memory.
        "kv_connector_extra_config": {"follow_resets": False, **options},
    }


SERVERS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "none": _no_offload,
    "vllm": _vllm,
    "vllm-simple": _vllm_simple,
    "lmcache": _lmcache,
    "lmcache-disk": _lmcache_disk,
    "aiokv": _aiokv,
    "aiokv-async": _aiokv_async,
    "aiokv-layers": _aiokv_layers,
    "aiokv-layers-sync": _aiokv_layers,
    "aiokv-disk": _aiokv_disk,
}

RECORDED = {
    "OffloadingConnector": "RecordedOffloading",
    "AiokvConnector": "RecordedAiokv",
}
"""Classes of ``bench.vllm.recorded`` by the connector that they record."""


def engine_options(server: str, settings: Settings) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``AsyncEngineArgs`` for one of ``SERVERS``."""
    eager = not settings.graph_sizes
    options: dict[str, Any] = {
        "model": settings.model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "worker_extension_cls": "bench.vllm.weights.BenchWorker",
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8_192,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": settings.device_blocks * settings.block_bytes,
        "gpu_memory_utilization": settings.gpu_share,
        "enable_prefix_caching": True,
        "enforce_eager": eager,
    }
    if not eager:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(settings.graph_sizes),
        }
    if server == "aiokv-layers-sync":
        options["async_scheduling"] = False
    transfer = SERVERS[server](settings)
    if transfer:
        recorded = RECORDED.get(transfer["kv_connector"]) if settings.record else None
        if recorded is not None:
            transfer |= {
                "kv_connector": recorded,
                "kv_connector_module_path": "bench.vllm.recorded",
            }
        options["kv_transfer_config"] = {"kv_role": "kv_both", **transfer}
    if settings.profile:
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": settings.profile,
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    return options


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables of a server's process."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # Kernels for FP8, which a bfloat16 model does not use.
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if settings.record:
        variables["BENCH_VLLM_RECORD"] = settings.record
    if settings.batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return variables
