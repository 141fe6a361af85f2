"""KV events: changes of the blocks in the tiers of an engine, in the schema of vLLM.

``CacheEngine.kv_events`` yields them in the process; :class:`ZmqPublisher` publishes them to
routers that read vLLM's events.
"""

from aiokv.events.publisher import PublisherStatistics, ZmqPublisher
from aiokv.events.schema import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "KVEvent",
    "KVEventBatch",
    "PublisherStatistics",
    "ZmqPublisher",
]
