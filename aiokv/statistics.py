"""Statistics of an engine, and records of transfers, leases and batches."""

from aiokv.base.misses import MissedRange
from aiokv.base.statistics import (
    BlockGroupStatistics,
    CacheStatistics,
    DurationHistogram,
    GroupTransferStatistics,
    LayerWaitStatistics,
    PeerStatistics,
    PollerStatistics,
    RequestStatistics,
    RouteStatistics,
    Statistics,
    TierStatistics,
    WorkerStatistics,
)
from aiokv.base.types import GroupHit, Health, HotPrefixes, LeaseInfo, PrefixInfo
from aiokv.engine.inspection import Inspection
from aiokv.engine.observation import Observation
from aiokv.engine.observers import BatchSpan, LeasePhase, TransferSpan
from aiokv.engine.trace_writer import RecordingStatistics
from aiokv.peers.statistics import ReceivingStatistics

__all__ = [
    "BatchSpan",
    "BlockGroupStatistics",
    "CacheStatistics",
    "DurationHistogram",
    "GroupHit",
    "GroupTransferStatistics",
    "Health",
    "HotPrefixes",
    "Inspection",
    "LayerWaitStatistics",
    "LeaseInfo",
    "LeasePhase",
    "MissedRange",
    "Observation",
    "PeerStatistics",
    "PollerStatistics",
    "PrefixInfo",
    "ReceivingStatistics",
    "RecordingStatistics",
    "RequestStatistics",
    "RouteStatistics",
    "Statistics",
    "TierStatistics",
    "TransferSpan",
    "WorkerStatistics",
]
