"""aiokv.connectors.fastdeploy: aiokv behind FastDeploy's cache managers."""

from aiokv.connectors.fastdeploy.controller import CacheController
from aiokv.connectors.fastdeploy.layers import LayerDoneCounter, LayerSwapTimeoutError
from aiokv.connectors.fastdeploy.manager import CacheManager
from aiokv.connectors.fastdeploy.metadata import (
    BatchRequest,
    CacheLevel,
    CacheSwapMetadata,
    MatchResult,
)
from aiokv.connectors.fastdeploy.metrics import CacheMetrics
from aiokv.connectors.fastdeploy.prefix import PrefixCacheManager

__all__ = [
    "BatchRequest",
    "CacheController",
    "CacheLevel",
    "CacheManager",
    "CacheMetrics",
    "CacheSwapMetadata",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "MatchResult",
    "PrefixCacheManager",
]
