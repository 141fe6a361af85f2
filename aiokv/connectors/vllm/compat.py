"""Differences between the versions of vLLM, in one place.

Other modules of the connector import only what all served versions have. What some versions lack is
found here by its presence, not by the number of the version.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from aiokv.base.logs import Log
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import CacheConfig, ModelConfig, ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

log = Log(__name__)

OLDEST: Final = (0, 22)
TESTED: Final = ("0.22.1", "0.27.1", "0.32.0")
"""Versions that ``make test-vllm VLLM=...`` runs."""


def _release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; those of the newest one for a build of a clone."""
    release = re.match(r"\d+(\.\d+)*", version)
    if release is None or "dev" in version:  # without tags, it is 0.1.dev1
        return _release_of(TESTED[-1])
    return tuple(int(number) for number in release[0].split("."))


def check_version(version: str = vllm.__version__) -> None:
    """Log the version of vLLM, and whether the connector was tested with it.

    Raises:
        ConfigError: the version is older than OLDEST.
    """
    if _release_of(version) < OLDEST:
        raise ConfigError(
            f"vLLM is {version}; AiokvConnector serves {OLDEST[0]}.{OLDEST[1]} and newer",
            hint=f"install vLLM {TESTED[-1]}",
        )
    release = re.match(r"[\d.]*\d", version)
    is_tested = release is not None and release[0] in TESTED
    log.info("vllm.version", version=version, tested=is_tested)


def calculates_kv_scales(config: CacheConfig) -> bool:
    """Return True if each start computes other scales of KV; vLLM 0.28 removed this option."""
    return bool(getattr(config, "calculate_kv_scales", False))


def announces_sleep() -> bool:
    """Return True if vLLM resets its connector before it unmaps the KV cache, as since 0.33."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Return the number of layers per stage of pipeline parallelism."""
    num_layers = model.get_total_num_hidden_layers()
    size = parallel.pipeline_parallel_size
    ranges = (get_pp_indices(num_layers, stage, size) for stage in range(size))
    return [end - first for first, end in ranges]


def fits_one_node(parallel: ParallelConfig) -> bool:
    """Return False if Ray's placement group has no node for all ranks.

    Without a placement group, which Ray makes before vLLM makes the connector, return True.
    """
    group = parallel.placement_group
    if group is None:
        return True
    from ray.util import placement_group_table

    nodes = Counter(placement_group_table(group)["bundles_to_node_id"].values())
    return max(nodes.values()) >= int(parallel.world_size)


def placed_pages(config: KVCacheConfig) -> dict[str, int]:
    """Return the bytes per block of layers, as vLLM has placed them in memory.

    The sizes are right where the layers of a group differ in them: a page is then one run of
    memory. Layers of other layouts may be missing.
    """
    pages: dict[str, int] = {}
    for tensor in config.kv_cache_tensors:
        block_stride = getattr(tensor, "block_stride", 0)
        if hasattr(tensor, "layer_stride"):  # since 0.29; the larger one is of several pages
            pages |= dict.fromkeys(tensor.layers, min(tensor.layer_stride, block_stride))
        elif not block_stride:
            pages |= dict.fromkeys(tensor.shared_by, tensor.size // config.num_blocks)
    return pages


def is_non_causal(spec: KVCacheSpec) -> bool:
    """Return True for layers whose KV depends on later tokens; vLLM has them since 0.27."""
    return bool(getattr(spec, "non_causal", False))


def hit_sources(num_tokens: int, num_fetched: int, *, from_disk: bool) -> dict[Any, int]:
    """Return loaded tokens by vLLM's name of their source; vLLM has asked for it since 0.32.

    Args:
        num_tokens: tokens that a request loads.
        num_fetched: those of them that a store had.
        from_disk: True if all stores are on a file system.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    store = CacheHitSource.DISK if from_disk else CacheHitSource.EXTERNAL_UNSPECIFIED
    counts = {CacheHitSource.HOST: num_tokens - num_fetched, store: num_fetched}
    return {source: count for source, count in counts.items() if count}


CAN_FAIL_REQUESTS: Final = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""True if vLLM computes a request again whose load has failed, with any number of groups (0.30)."""


CAN_LOAD_STATES: Final = "kv_connector_block_state" in {
    field.name for field in fields(SchedulerOutput)
}
"""True if vLLM says which blocks have recurrent state at the end of a block (0.32). Under random
loads, 0.27.1 computed wrong tokens behind states that were loaded.
"""

CAN_EXTEND_HITS: Final = hasattr(SingleTypeKVCacheManager, "add_local_computed_blocks")
"""True if vLLM takes the blocks of its own hit in all groups before it allocates blocks to load
(0.27). Older versions may allocate the same block for two groups of a request (vLLM's issue 33775).
"""


def tokens_in_flight(request: Request) -> int:
    """Return the positions of steps that were scheduled and have not ended.

    Since 0.27, vLLM frees no block of a window that such a step reads.

    Returns:
        0 for older versions, which do not count them.
    """
    return int(getattr(request, "num_in_flight_tokens", 0))


def boundary_states(output: SchedulerOutput) -> dict[str, list[tuple[int, int, int]]]:
    """Return the blocks with recurrent state at the end of a block, by request; vLLM 0.32 has them.

    Returns:
        Index of the group, block, and number of positions behind which it has the state.
    """
    state = getattr(output, "kv_connector_block_state", None)
    return {} if state is None else state.boundary_state_offloads


def leave_unzeroed(output: SchedulerOutput, block_ids: Collection[int]) -> None:
    """Keep the workers from zeroing blocks that a load writes.

    vLLM zeroes new blocks of models with recurrent state, at the beginning of a step that may run
    beside the load. Newer versions leave these blocks out themselves.
    """
    if block_ids and output.new_block_ids_to_zero:
        output.new_block_ids_to_zero = [
            block for block in output.new_block_ids_to_zero if block not in block_ids
        ]
