"""Asyncio event-driven KV-cache engine for LLM serving.

``CacheEngine`` is what a serving loop awaits; ``aiokv/README.md`` is the map of the rest.
"""

from aiokv.config import CacheConfig, WindowGroup
from aiokv.engine import CacheEngine, ComputeBatch
from aiokv.errors import (
    AiokvError,
    AllocateTimeout,
    BrokenEngineError,
    CapacityError,
    ClosedError,
    ConfigError,
    ControlTimeout,
    DeviceError,
    InternalError,
    LayoutError,
    LeaseError,
    RankLost,
    RequestTooLarge,
    TransferError,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.lease import Lease
from aiokv.types import Hit, Item, Statistics
from aiokv.usage import Usage
from aiokv.worker.regions import Regions, num_blocks_for

__version__ = "0.1.0"

__all__ = [
    "AiokvError",
    "AllocateTimeout",
    "BrokenEngineError",
    "CacheConfig",
    "CacheEngine",
    "CapacityError",
    "ClosedError",
    "ComputeBatch",
    "ConfigError",
    "ControlTimeout",
    "DeviceError",
    "Hit",
    "InternalError",
    "Item",
    "LayoutError",
    "Lease",
    "LeaseError",
    "RankLost",
    "Regions",
    "RequestTooLarge",
    "Statistics",
    "TransferError",
    "UnreleasedLeaseWarning",
    "Usage",
    "UsageError",
    "WindowGroup",
    "WouldBlock",
    "num_blocks_for",
]
