"""aiokv.connectors.fastdeploy: aiokv behind FastDeploy's cache managers."""

from aiokv.connectors.fastdeploy.manager import CacheManager
from aiokv.connectors.fastdeploy.metadata import (
    BatchRequest,
    CacheLevel,
    CacheSwapMetadata,
    MatchResult,
)
from aiokv.connectors.fastdeploy.metrics import CacheMetrics
from aiokv.connectors.fastdeploy.worker import (
    CacheController,
    LayerDoneCounter,
    LayerSwapTimeoutError,
)

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
]
