"""Models that vLLM cannot compute behind a cached prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm import envs
from vllm.platforms import current_platform

from aiokv.connectors.vllm import compat
from aiokv.connectors.vllm.groups import specs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Models whose KV of generated tokens depends on more than the tokens before them.
_WINDOWED_OUTPUT: Final = ("UnlimitedOCRForCausalLM",)


def why_prefixes_are_forbidden(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> str | None:
    """Return the reason for which no request may start behind a cached prefix; None without one.

    vLLM turns its own prefix cache off for such a model. But the user may turn it off, too, so that
    only the connector caches. So this function tests each reason of vLLM, not the switch alone.
    """
    model = vllm_config.model_config
    is_off = not vllm_config.cache_config.enable_prefix_caching
    if not model.is_prefix_caching_supported and (is_off or model.runner_type == "pooling"):
        return (
            "the pooler needs all positions of a prompt in one step"
            if model.runner_type == "pooling"
            else "this release of vLLM does not support prefix caching for the model"
        )
    if (
        model.use_mla
        and current_platform.is_cpu()
        and not vllm_config.scheduler_config.enable_chunked_prefill
    ):
        return "MLA on this CPU ignores a cached prefix"
    if model.architecture in _WINDOWED_OUTPUT:
        return f"{model.architecture} computes the KV of generated tokens with a window"
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group))
    if any(compat.is_non_causal(spec) for spec in specs):
        return "the model has attention layers that are not causal"
    if is_off and envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and vLLM's prefix caching is off"
    return None
