"""Configuration objects of vLLM, of whatever version is installed, for a small model."""

from __future__ import annotations

import functools
import json
import tempfile
import uuid
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.connectors.vllm.model import WINDOW
from tests.connectors.vllm.runner import (
    DIM,
    HEADS,
    INDEX_DIM,
    LAYER_NAMES,
    index_name,
    layer_names,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

BLOCK_TOKENS: Final = 4
MAX_MODEL_LEN: Final = 512

_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": len(LAYER_NAMES),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


@functools.cache
def _model_folder(num_layers: int) -> Path:
    folder = tempfile.TemporaryDirectory(prefix="model-")
    _folders.append(folder)  # until the process ends
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(_LLAMA | {"num_hidden_layers": num_layers}))
    return path


_folders: list[tempfile.TemporaryDirectory[str]] = []


def model_config() -> ModelConfig:
    """Return the configuration of a Llama without weights and tokenizer."""
    return ModelConfig(
        model=str(_model_folder(len(LAYER_NAMES))),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
    )


def tensors_of(names: Sequence[str], spec: KVCacheSpec, num_blocks: int) -> list[KVCacheTensor]:
    """Return the place of layers of several groups that share a tensor."""
    size = spec.page_size_bytes * num_blocks
    if "shared_by" in {field.name for field in fields(KVCacheTensor)}:  # before 0.29
        return [KVCacheTensor(size=size, shared_by=list(names))]
    return [
        KVCacheTensor(
            size=size, layers=[name], layer_stride=size, block_stride=spec.page_size_bytes
        )
        for name in names
    ]


def spec_of(kind: str, spec: AttentionSpec) -> KVCacheSpec:
    """Return the description of a layer of a kind of KINDS, whose pages are those of ``spec``."""
    if kind == "full":
        return spec
    if kind == "window":
        return SlidingWindowSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            sliding_window=WINDOW,
        )
    return MambaSpec(
        block_size=spec.block_size,
        shapes=((spec.page_size_bytes // 4,),),
        dtypes=(torch.int32,),
        mamba_cache_mode="align",
    )


def kv_cache_config(
    layout: str,
    num_blocks: int,
    spec: AttentionSpec | None = None,
    names: Sequence[str] = LAYER_NAMES,
    kinds: Sequence[str] = ("full",),
) -> KVCacheConfig:
    """Return the configuration of vLLM for the tensors of a runner.

    Args:
        layout: name of LAYOUTS.
        num_blocks: device blocks.
        spec: description of a layer of full attention; None for that of the layout.
        names: names of the layers of the first group.
        kinds: kinds of the groups, of KINDS.
    """
    if layout == "indexed":
        return indexed_config(num_blocks, names)
    if spec is None and layout == "latent":
        spec = MLAAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=2 * HEADS * DIM, dtype=torch.int32
        )
    elif spec is None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.int32
        )
    groups = [
        (layer_names(i) if i else list(names), spec_of(kind, spec)) for i, kind in enumerate(kinds)
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            tensor
            for sharing in zip(*(layers for layers, _ in groups), strict=True)
            for tensor in tensors_of(sharing, spec, num_blocks)
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, one) for layers, one in groups],
    )


def indexed_config(
    num_blocks: int, names: Sequence[str] = LAYER_NAMES, order: str = "LBNHC"
) -> KVCacheConfig:
    """Return vLLM's configuration of sparse latent attention: a group with pages of two sizes.

    Args:
        num_blocks: device blocks.
        names: names of the layers of attention, each behind that of its index keys.
        order: name of the order in memory, since vLLM 0.29.
    """
    specs: dict[str, KVCacheSpec] = {
        name: MLAAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=size,
            dtype=torch.int32,
            cache_dtype_str=cache_dtype,
        )
        for layer in names
        for name, size, cache_dtype in (
            (index_name(layer), INDEX_DIM, None),
            (layer, 2 * HEADS * DIM, "auto"),
        )
    }
    config = vllm_config(extra=None, num_blocks=num_blocks)
    if hasattr(config.cache_config, "get_resolved_kv_cache_layout"):
        config.cache_config.kv_cache_layout = order
    size = sum(spec.page_size_bytes for spec in specs.values())
    return get_kv_cache_config_from_groups(
        config, get_kv_cache_groups(config, specs), num_blocks * size
    )


def vllm_config(
    *,
    extra: dict[str, Any] | None,
    num_ranks: int = 1,
    num_stages: int = 1,
    num_blocks: int = 40,
    max_seqs: int = 8,
    max_tokens_per_step: int = 24,
    prefix_caching: bool = True,
    async_scheduling: bool = False,
    failure_policy: str = "recompute",
    num_drafts: int = 0,
    draft_method: str = "ngram",
    kv_events: bool = False,
    kinds: Sequence[str] = ("full",),
    connector: str = "AiokvConnector",
) -> VllmConfig:
    """Return the configuration of a server.

    Args:
        extra: ``kv_connector_extra_config``; None for no connector.
        num_ranks: ranks of tensor parallelism.
        num_stages: stages of pipeline parallelism.
        num_blocks: device blocks.
        max_seqs: running requests.
        max_tokens_per_step: tokens per step.
        prefix_caching: vLLM's own prefix cache.
        async_scheduling: whether a step is scheduled while the previous one is computed.
        failure_policy: ``kv_load_failure_policy``.
        num_drafts: drafts per step.
        draft_method: ``"ngram"``, or ``"eagle"`` for a draft model with KV.
        kv_events: whether vLLM publishes KV events.
        kinds: kinds of the groups, of KINDS.
        connector: its name.
    """
    model = model_config()
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages)
    drafts = None
    if num_drafts or draft_method == "eagle":
        drafts = SpeculativeConfig(
            method=draft_method,
            model=str(_model_folder(1)) if draft_method == "eagle" else None,
            num_speculative_tokens=max(num_drafts, 1),
            prompt_lookup_max=2 if draft_method == "ngram" else None,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    transfer = None
    if extra is not None:
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="aiokv.connectors.vllm"
            if connector == "AiokvConnector"
            else None,
            kv_role="kv_both",
            engine_id=uuid.uuid4().hex,
            kv_load_failure_policy=failure_policy,
            kv_connector_extra_config=extra,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching),
        parallel_config=parallel,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_tokens_per_step,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
            disable_hybrid_kv_cache_manager=kinds == ("full",),
        ),
        speculative_config=drafts,
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if kv_events
        else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    if "state" in kinds:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = BLOCK_TOKENS
    if drafts is not None:
        drafts.num_speculative_tokens = num_drafts  # 0: the draft model only has KV
    # The platform of a CPU changes these. The runners of the tests serve what a GPU does.
    config.scheduler_config.async_scheduling = async_scheduling
    parallel.distributed_executor_backend = "uni" if num_ranks * num_stages == 1 else "mp"
    return config
