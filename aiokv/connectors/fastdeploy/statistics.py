"""Statistics of the cache by the names of FastDeploy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.connectors.fastdeploy.blocks import RequestBlocks
    from aiokv.statistics import CacheStatistics


def stats(blocks: RequestBlocks) -> dict[str, Any]:
    """Return counts of both tiers, of the index and of the transfers."""
    counts = blocks.engine.cache_statistics()
    device_free = blocks.free_device_blocks
    return {
        "initialized": True,
        "num_gpu_blocks": counts.attention.device.blocks,
        "num_cpu_blocks": counts.attention.host.blocks,
        "block_size": blocks.engine.config.block_tokens,
        "device_pool": _pool(counts.attention.device.blocks, device_free),
        "host_pool": _pool(counts.attention.host.blocks, counts.attention.host.free),
        "radix_tree": {
            "node_count": counts.nodes,
            "evictable_device_count": counts.evictable_blocks,
            "cached_device_count": counts.attention.device.cached,
            "cached_host_count": counts.attention.host.cached,
        },
        "num_free_device_blocks": device_free,
        "num_free_host_blocks": counts.attention.host.free,
        "swap_in_blocks": counts.attention.onloaded_blocks,
        "swap_out_blocks": counts.attention.offloaded_blocks,
        "failed_blocks": counts.failed_blocks,
        "preemptions": counts.preemptions,
    }


def memory_usage(blocks: RequestBlocks) -> dict[str, Any]:
    """Return total, used and free blocks of both tiers."""
    counts = blocks.engine.cache_statistics()
    return {
        "device": _usage(counts.attention.device.blocks, blocks.free_device_blocks),
        "host": _usage(counts.attention.host.blocks, counts.attention.host.free),
    }


def gauges(counts: CacheStatistics, device_free: int) -> dict[str, float]:
    """Return the pool sizes by the names of FastDeploy's gauges."""
    return {
        "max_gpu_block_num": counts.attention.device.blocks,
        "max_cpu_block_num": counts.attention.host.blocks,
        "free_gpu_block_num": device_free,
        "available_gpu_block_num": device_free + counts.evictable_blocks,
        "available_gpu_resource": device_free / counts.attention.device.blocks,
    }


def _pool(num_blocks: int, free: int) -> dict[str, int]:
    return {"num_blocks": num_blocks, "available": free, "used": num_blocks - free}


def _usage(num_blocks: int, free: int) -> dict[str, float]:
    used = num_blocks - free
    return {
        "total_blocks": num_blocks,
        "used_blocks": used,
        "free_blocks": free,
        "usage_percent": 100 * used / num_blocks if num_blocks else 0.0,
    }
