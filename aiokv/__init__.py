"""Asyncio event-driven KV-cache engine for LLM serving.

``CacheEngine`` is what a serving loop awaits; ``aiokv/README.md`` is the map of the rest.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("aiokv._native") is None:  # Python runs in a clone in which nothing was built
    raise ImportError(
        f"the compiled module aiokv._native is missing from {__path__[0]}. In a clone, run "
        "'make setup' and use .venv/bin/python; after 'pip install .', run Python in another folder"
    )

from aiokv import devices as devices
from aiokv import errors as errors
from aiokv import statistics as statistics
from aiokv.base.types import Hit, Item, LeaseState
from aiokv.base.usage import Usage
from aiokv.config.cache_config import CacheConfig, WindowGroup
from aiokv.engine import CacheEngine, ComputeBatch
from aiokv.engine.batch import Batch
from aiokv.engine.events import KVEvents
from aiokv.engine.lease import Lease
from aiokv.engine.pins import Pin
from aiokv.engine.receiving import Receiving
from aiokv.engine.recording import TraceRecording
from aiokv.engine.sending import Sending
from aiokv.layout.regions import Regions, num_blocks_for
from aiokv.peers.options import Peers
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.device.cuda import CudaDevice
from aiokv.worker.views import LayerView

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CacheConfig",
    "CacheEngine",
    "ComputeBatch",
    "CpuDevice",
    "CudaDevice",
    "Hit",
    "Item",
    "KVEvents",
    "LayerView",
    "Lease",
    "LeaseState",
    "Peers",
    "Pin",
    "Receiving",
    "Regions",
    "Sending",
    "TraceRecording",
    "Usage",
    "WindowGroup",
    "num_blocks_for",
]
