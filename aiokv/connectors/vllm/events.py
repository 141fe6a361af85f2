"""KV events of host memory and of the stores, for vLLM's publisher."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events as vllm_events
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from aiokv.events import schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from aiokv.events.schema import KVEvent
    from aiokv.sync import SyncEngine


class EventCollector:
    """Collects the changes of the blocks in host memory until vLLM takes them. Blocks of the stores
    are reported to versions of vLLM that have a medium for them.

    The events are those of the main group, which has a block wherever a prefix is cached.

    Args:
        engine: an open engine.
        kv_cache_config: vLLM's groups.
        main: place of the main group among them; None if it has no blocks of vLLM.
    """

    def __init__(
        self, engine: SyncEngine, kv_cache_config: KVCacheConfig, main: int | None
    ) -> None:
        self._engine = engine
        self._group = main
        self._kind = None
        if main is not None:
            spec = kv_cache_config.kv_cache_groups[main].kv_cache_spec
            self._kind = get_kv_cache_spec_kind(spec).value
        self._events: deque[KVEvent] = deque()
        collect: Callable[[], Any] = self._collect
        self._task = engine.submit(collect)

    async def _collect(self) -> None:
        stores = hasattr(vllm_events, "MEDIUM_STORAGE")
        async with self._engine.cache.kv_events(stores=stores) as events:
            async for batch in events:
                self._events.extend(batch.events)

    def take(self) -> list[vllm_events.KVCacheEvent]:
        """Return the events since the last call, as records of vLLM."""
        taken = []
        while self._events:
            taken.append(self._record_of(self._events.popleft()))
        return taken

    def close(self) -> None:
        """Collect no more events."""
        self._task.cancel()

    def _record_of(self, event: KVEvent) -> vllm_events.KVCacheEvent:
        if isinstance(event, schema.BlockStored):
            return vllm_events.BlockStored(
                block_hashes=list(event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=event.medium,
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
                group_idx=self._group,
                kv_cache_spec_kind=self._kind,
            )
        if isinstance(event, schema.BlockRemoved):
            return vllm_events.BlockRemoved(
                block_hashes=list(event.block_hashes), medium=event.medium, group_idx=self._group
            )
        return vllm_events.AllBlocksCleared()
