"""Asyncio event-driven KV-cache engine for LLM serving.

``CacheEngine`` is what a serving loop awaits; ``aiokv/README.md`` is the map of the rest.
"""

from aiokv.base.statistics import (
    BlockGroupStatistics,
    CacheStatistics,
    DurationHistogram,
    LayerWaitStatistics,
    PeerStatistics,
    PollerStatistics,
    RequestStatistics,
    RouteStatistics,
    Statistics,
    TierStatistics,
    WorkerStatistics,
)
from aiokv.base.types import Health, Hit, HotPrefixes, Item, LeaseInfo, LeaseState, PrefixInfo
from aiokv.base.usage import Usage
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.engine import CacheEngine, ComputeBatch
from aiokv.engine.events import KVEvents
from aiokv.engine.lease import Lease
from aiokv.engine.observation import Observation
from aiokv.engine.observers import BatchSpan, LeasePhase, TransferSpan
from aiokv.engine.pins import Pin
from aiokv.engine.receiving import Receiving
from aiokv.engine.recording import TraceRecording
from aiokv.engine.sending import Sending
from aiokv.engine.trace_writer import RecordingStatistics
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
    PeerError,
    RankLost,
    RequestTooLarge,
    StoreError,
    TransferError,
    TransferTimeout,
    UncoveredCommitWarning,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.layout.regions import Regions, num_blocks_for
from aiokv.peers.options import Peers
from aiokv.peers.statistics import ReceivingStatistics
from aiokv.worker.device.base import Device, Event, Stream
from aiokv.worker.device.cpu import CpuDevice, CpuEvent, CpuStream
from aiokv.worker.device.cuda import CudaDevice, CudaOptions
from aiokv.worker.views import LayerView

__version__ = "0.1.0"

__all__ = [
    "AiokvError",
    "AllocateTimeout",
    "BatchSpan",
    "BlockGroupStatistics",
    "BrokenEngineError",
    "CacheConfig",
    "CacheEngine",
    "CacheStatistics",
    "CapacityError",
    "ClosedError",
    "ComputeBatch",
    "ConfigError",
    "ControlTimeout",
    "CpuDevice",
    "CpuEvent",
    "CpuStream",
    "CudaDevice",
    "CudaOptions",
    "Device",
    "DeviceError",
    "DurationHistogram",
    "Event",
    "Health",
    "Hit",
    "HotPrefixes",
    "InternalError",
    "Item",
    "KVEvents",
    "LayerView",
    "LayerWaitStatistics",
    "LayoutError",
    "Lease",
    "LeaseError",
    "LeaseInfo",
    "LeasePhase",
    "LeaseState",
    "Observation",
    "PeerError",
    "PeerStatistics",
    "Peers",
    "Pin",
    "PollerStatistics",
    "PrefixInfo",
    "RankLost",
    "Receiving",
    "ReceivingStatistics",
    "RecordingStatistics",
    "Regions",
    "RequestStatistics",
    "RequestTooLarge",
    "RouteStatistics",
    "Sending",
    "Statistics",
    "StoreError",
    "Stream",
    "TierStatistics",
    "TraceRecording",
    "TransferError",
    "TransferSpan",
    "TransferTimeout",
    "UncoveredCommitWarning",
    "UnreleasedLeaseWarning",
    "Usage",
    "UsageError",
    "WindowGroup",
    "WorkerStatistics",
    "WouldBlock",
    "num_blocks_for",
]
