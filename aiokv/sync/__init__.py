"""aiokv.sync: an engine in a thread of its own, for servers whose schedulers are plain threads.

``SyncEngine`` runs a :class:`aiokv.CacheEngine` on an event loop in a thread. The calls of one
scheduler step cross to that thread together (:class:`Calls`). Calls that may wait return a future.
``RankThread`` does the same for a rank, in a worker process.
"""

from aiokv.sync.answers import Answer
from aiokv.sync.calls import Calls
from aiokv.sync.computing import SyncComputing
from aiokv.sync.engine import SyncEngine
from aiokv.sync.futures import EngineFuture
from aiokv.sync.layers import SyncLayers
from aiokv.sync.lease import SyncLease
from aiokv.sync.rank import RankThread
from aiokv.sync.rank_layers import RankLayers, TransferFailure
from aiokv.sync.transfers import SyncReceiving, SyncSending
from aiokv.sync.weights import SyncWeightsUpdate

__all__ = [
    "Answer",
    "Calls",
    "EngineFuture",
    "RankLayers",
    "RankThread",
    "SyncComputing",
    "SyncEngine",
    "SyncLayers",
    "SyncLease",
    "SyncReceiving",
    "SyncSending",
    "SyncWeightsUpdate",
    "TransferFailure",
]
