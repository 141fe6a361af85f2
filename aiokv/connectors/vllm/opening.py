"""Makes the halves of the connector from the configuration of vLLM."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.memory import available_bytes
from aiokv.base.units import format_bytes
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.connectors.vllm import tensors_here
from aiokv.connectors.vllm.cache import HostCache
from aiokv.connectors.vllm.events import EventCollector
from aiokv.connectors.vllm.groups import KVGroups, page_bytes_of
from aiokv.connectors.vllm.sources import EngineSource, RankSource
from aiokv.connectors.vllm.tensors import LayerTensors, first_tensor
from aiokv.connectors.vllm.worker import WorkerHalf
from aiokv.errors import ConfigError
from aiokv.layout.host_block import pitch_bytes
from aiokv.ranks import RankGroup
from aiokv.sync import RankThread, SyncEngine

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from aiokv.base.groups import Retention
    from aiokv.connectors.vllm.options import Options
    from aiokv.connectors.vllm.worker import Source


HOST_SHARES: Final[dict[Retention, float]] = {"all": 1.0, "window": 1.0, "last": 0.25}
"""Blocks of a side group in host memory per block of the main group.

A state is saved where a step ends, at most once per block, and most often once per prompt.
"""

NUMBERS_SHARE: Final = 4.0
"""Blocks of a main group without content per block of a window in host memory.

A hit needs the blocks of one window, so host memory can know longer prefixes than it has blocks.
"""


def open_cache(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
) -> HostCache:
    """Open the engine of a scheduler half.

    It uses the tensors of a worker in this process if there is one, and otherwise waits until all
    workers have connected.

    Raises:
        ConfigError: a setting is wrong, or host memory is less than one block.
        RankLost: a worker did not connect.
    """
    engine_id = engine_id_of(vllm_config)
    num_ranks = vllm_config.parallel_config.world_size
    config = cache_config(vllm_config, kv_cache_config, options)
    tensors = tensors_here.take(engine_id) if is_in_process(vllm_config, options) else None
    if tensors is not None:
        engine = SyncEngine(
            config,
            tensors.layers.regions,
            tensors.layers.device,
            stores=stores_of(vllm_config, options, 0),
        )
        engine.open()
    else:
        path = socket_path(vllm_config, options)
        ranks = RankGroup(num_ranks, path=path, has_stores=bool(options.stores))
        engine = SyncEngine(config, ranks=ranks)
        engine.open()
        # All workers have connected, and none connects again. vLLM kills its processes when it is
        # stopped, so the file would remain.
        Path(path).unlink(missing_ok=True)
    events = vllm_config.kv_events_config
    collector = (
        EventCollector(engine, kv_cache_config, KVGroups.of(kv_cache_config).main)
        if events is not None and events.enable_kv_cache_events
        else None
    )
    return HostCache(engine, tensors, collector)


def cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
) -> CacheConfig:
    """Return the configuration of the engine.

    Raises:
        ConfigError: a setting is wrong, or host memory is less than one block.
    """
    groups = KVGroups.of(kv_cache_config)
    num_ranks = vllm_config.parallel_config.world_size
    if options.host_bytes > (available := available_bytes()):
        raise ConfigError(
            f"host memory is {format_bytes(options.host_bytes)}; this machine, or the control "
            f"group of this process, has {format_bytes(available)} available",
            hint="set host_gib or cpu_bytes_to_use to less, and leave some memory for vLLM",
        )
    with_stores = bool(options.stores)
    main_share = NUMBERS_SHARE if groups.main is None else 1.0
    block_bytes = sum(
        pitch_bytes(one_block, with_stores=with_stores) * share
        for one_block, share in (
            (groups.block_bytes, main_share),
            *((side.block_bytes, HOST_SHARES[side.retention]) for side in groups.sides),
        )
    )
    host_blocks = int(options.host_bytes // (block_bytes * num_ranks))
    if host_blocks == 0:
        raise ConfigError(
            f"host memory of {options.host_bytes} bytes is less than one block, which has "
            f"{block_bytes * num_ranks:.0f} bytes over all ranks and groups",
            hint="set host_gib or cpu_bytes_to_use to more",
        )
    return CacheConfig(
        external_device=True,
        device_blocks=groups.main_blocks,
        block_tokens=groups.block_tokens,
        host_blocks=int(host_blocks * main_share),
        windows={
            side.name: WindowGroup(
                retention=side.retention,
                window_tokens=side.window_tokens,
                device_blocks=kv_cache_config.num_blocks,
                host_blocks=max(int(host_blocks * HOST_SHARES[side.retention]), 1),
            )
            for side in groups.sides
        },
        write_policy=options.write_policy,
        eviction_policy=options.eviction_policy,
        min_onload_tokens=options.min_load_tokens,
        verify=options.verify,
        model=_model_name(vllm_config) if options.model is None else options.model,
        weights_version=options.weights_version,
        prefill_tokens_per_second=options.prefill_tokens_per_second,
        store_policy=options.store_policy,
    )


def _model_name(vllm_config: VllmConfig) -> str:
    """Return a name that differs where the bytes of equal prompts do.

    ``--hf-overrides`` and ``--quantization`` change them under the same name of the model.
    """
    model = vllm_config.model_config
    facts = _facts(model.hf_config.to_dict())
    parts = (
        model.model,
        model.revision,
        model.dtype,
        vllm_config.cache_config.cache_dtype,
        model.quantization,
        hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
    )
    return " ".join(str(part) for part in parts)


def _facts(value: Any) -> Any:
    """Return the fields of a configuration that describe the model, in a fixed order."""
    if isinstance(value, dict):
        return [
            (str(key), _facts(value[key]))
            for key in sorted(value, key=str)
            if not str(key).startswith("_") and key != "transformers_version"
        ]
    if isinstance(value, list | tuple):
        return [_facts(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(one) for one in value)
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text  # an address differs at each start


def worker_half(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: Options,
    kv_caches: dict[str, torch.Tensor],
) -> WorkerHalf:
    """Return the worker half over the tensors of a worker; connect to the engine if need be.

    Raises:
        ConfigError: the layout of a tensor is unknown, or a setting is wrong.
    """
    pages = page_bytes_of(kv_cache_config)
    sizes = {
        first_tensor(kv_caches[name]).data_ptr(): size
        for name, size in pages.items()
        if name in kv_caches
    }
    for name, tensor in kv_caches.items():  # layers that share the tensor of another one
        size = sizes.get(first_tensor(tensor).data_ptr())
        if size is not None:
            pages.setdefault(name, size)
    groups = KVGroups.of(kv_cache_config)
    layers = LayerTensors(kv_caches, pages, kv_cache_config.num_blocks, groups)
    engine_id = engine_id_of(vllm_config)
    rank = vllm_config.parallel_config.rank
    source: Source
    if is_in_process(vllm_config, options):
        source = EngineSource(tensors_here.offer(engine_id, layers))
    else:
        thread = RankThread(
            socket_path(vllm_config, options),
            rank,
            layers.regions,
            layers.device,
            stores=stores_of(vllm_config, options, rank),
        )
        thread.start()
        source = RankSource(thread, layers.device)
    return WorkerHalf(
        layers,
        source,
        options.transfer_timeout_seconds,
        is_async=schedules_ahead(vllm_config),
        has_sides=bool(groups.sides),
    )


def is_in_process(vllm_config: VllmConfig, options: Options) -> bool:
    """Return True if the only worker runs in the process of the scheduler, without a socket."""
    parallel = vllm_config.parallel_config
    return (
        options.in_process
        and parallel.world_size == 1
        and parallel.distributed_executor_backend in (None, "uni")
    )


def schedules_ahead(vllm_config: VllmConfig) -> bool:
    """Return True if vLLM schedules a step before the output of the step before is known."""
    return bool(
        vllm_config.scheduler_config.async_scheduling
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    )


def steps_wait(vllm_config: VllmConfig, groups: KVGroups, options: Options) -> bool:
    """Return True if a step may wait for a load of which no failure can be recovered any more.

    A load that fails then ends the server. So steps wait only where that is the failure of the
    device: not for blocks that are verified, or that other processes copy. Without asynchronous
    scheduling, vLLM would compute a request again whose load has failed, and keeps doing so.
    """
    return (
        options.load == "auto"
        and options.verify == "off"
        and not groups.sides
        and bool(vllm_config.scheduler_config.async_scheduling)
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and is_in_process(vllm_config, options)
    )


def drafts_with_layers(vllm_config: VllmConfig) -> bool:
    """Return True if drafts come from a model whose layers are in the KV cache."""
    drafts = vllm_config.speculative_config
    return drafts is not None and drafts.method not in ("ngram", "ngram_gpu", "suffix")


def stores_of(vllm_config: VllmConfig, options: Options, rank: int) -> list[str]:
    """Return the URLs of the stores of one rank.

    Raises:
        ConfigError: several ranks, or several engines of data parallelism, would have the same
            folder.
    """
    num_ranks = vllm_config.parallel_config.world_size
    for url in options.stores:
        if url.startswith("disk:"):
            if num_ranks > 1 and "{rank}" not in url:
                raise ConfigError(
                    f"stores has {url!r} for {num_ranks} ranks, which need folders of their own",
                    hint='write {rank} for the number of the rank: "disk:/var/cache/aiokv/{rank}"',
                )
            _check_data_parallel(vllm_config, "stores", url)
    return [
        url.replace("{rank}", str(rank)).replace("{dp}", _data_parallel_rank(vllm_config))
        for url in options.stores
    ]


def socket_path(vllm_config: VllmConfig, options: Options) -> str:
    """Return the path of the socket of this engine; the same for its scheduler and workers.

    Raises:
        ConfigError: engines of data parallelism would have the same path, or the directory of the
            default path is not private.
    """
    if options.socket is None:
        return options.default_socket_path(engine_id_of(vllm_config))
    _check_data_parallel(vllm_config, "socket", options.socket)
    return options.socket.replace("{dp}", _data_parallel_rank(vllm_config))


def _check_data_parallel(vllm_config: VllmConfig, key: str, value: str) -> None:
    parallel = vllm_config.parallel_config
    # An engine of a dense model has a data parallel size of 1; its id has the suffix.
    is_one_of_several = (
        parallel.data_parallel_size > 1
        or parallel.data_parallel_index > 0
        or re.search(r"_dp\d+$", engine_id_of(vllm_config))
    )
    if is_one_of_several and "{dp}" not in value:
        raise ConfigError(
            f"{key} has {value!r} for several engines of data parallelism, which need paths of "
            "their own",
            hint='write {dp} for the number of the engine: "disk:/var/cache/aiokv/{dp}-{rank}"',
        )


def _data_parallel_rank(vllm_config: VllmConfig) -> str:
    return str(vllm_config.parallel_config.data_parallel_index)


def block_bytes_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes per block, summed over all ranks."""
    pages = page_bytes_of(kv_cache_config)
    num_ranks: int = vllm_config.parallel_config.world_size
    return sum(pages.values()) * num_ranks


def engine_id_of(vllm_config: VllmConfig) -> str:
    """Return the id that scheduler and workers of one engine of vLLM share."""
    config = vllm_config.kv_transfer_config
    assert config is not None
    return str(config.engine_id)
