"""Asyncio event-driven KV-cache engine for LLM serving.

``CacheEngine`` is what a serving loop awaits; ``aiokv/README.md`` is the map of the rest.
"""

from aiokv.base.types import (
    DurationHistogram,
    Health,
    Hit,
    HotPrefixes,
    Item,
    LeaseInfo,
    LeaseState,
    PrefixInfo,
    RequestStatistics,
    Statistics,
    WindowStatistics,
)
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
from aiokv.peers.statistics import PeerStatistics, ReceivingStatistics
from aiokv.worker.device.base import Device, Event, Stream
from aiokv.worker.device.cpu import CpuDevice, CpuEvent, CpuStream
from aiokv.worker.device.cuda import CudaDevice, CudaOptions
from aiokv.worker.lanes import LaneStatistics, WorkerStatistics
from aiokv.worker.layer_waits import LayerWaitStatistics
from aiokv.worker.poller import PollerStatistics
from aiokv.worker.views import LayerView

__version__ = "0.1.0"

__all__ = [
    "AiokvError",
    "AllocateTimeout",
    "BatchSpan",
    "BrokenEngineError",
    "CacheConfig",
    "CacheEngine",
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
    "LaneStatistics",
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
    "Sending",
    "Statistics",
    "StoreError",
    "Stream",
    "TraceRecording",
    "TransferError",
    "TransferSpan",
    "TransferTimeout",
    "UncoveredCommitWarning",
    "UnreleasedLeaseWarning",
    "Usage",
    "UsageError",
    "WindowGroup",
    "WindowStatistics",
    "WorkerStatistics",
    "WouldBlock",
    "num_blocks_for",
]
