"""KV events of an engine, for subscribers in its process."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.engine.contexts import split_context
from aiokv.errors import UsageError
from aiokv.events.schema import (
    CPU,
    GPU,
    HASH_KINDS,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.events.schema import BlockHash, HashKind, KVEvent
    from aiokv.scheduler.events import BlockEvents, BlockRun

log = Log(__name__)

BATCH_BLOCKS: Final = 1024
MIN_QUEUED_BLOCKS: Final = 1024
_DIGEST_BYTES: Final = 32
_MEDIA: Final = {"device": GPU, "host": CPU, "store": STORAGE}


class KVEvents:
    """Subscription to the KV events of an engine; made by ``CacheEngine.kv_events``.

    ``async with`` begins it, and ``async for`` yields batches: first the blocks that the tiers
    hold, then each change. When the engine is closed, the last batch has ``AllBlocksCleared``, and
    the iteration ends. One task at a time may iterate.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        hashes: HashKind,
        max_queued_blocks: int,
        data_parallel_rank: int | None,
        stores: bool,
    ) -> None:
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._conditions = parts.dispatcher.conditions
        self._block_size = parts.config.block_tokens
        self._as_int64 = hashes == "int64"
        self._max_queued_blocks = max_queued_blocks
        self._with_stores = stores
        self._rank = data_parallel_rank
        self._stream: BlockEvents | None = None
        self._ended = False  # the last batch was taken, or `async with` has ended
        self._iterates = False
        self._dropped_blocks = 0  # final count, set when the subscription has ended
        self._restarts = 0  # number of restarts that were logged

    async def __aenter__(self) -> Self:
        self._lifetime.check_open()
        if self._stream is not None or self._ended:
            raise UsageError(
                "this subscription was entered before; it can be entered once",
                hint="call kv_events again",
            )
        self._stream = self._read.block_events(
            self._max_queued_blocks, with_stores=self._with_stores
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._end()
        self._conditions.test()

    def _end(self) -> None:
        if self._stream is not None:
            self._dropped_blocks, self._restarts = self.dropped_blocks, self.restarts
        self._ended = True
        self._stream = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KVEventBatch:
        """Wait for the next batch.

        Raises:
            UsageError: the subscription was not entered, or another task iterates.

        Cancellation: no event is lost.
        """
        if self._stream is None and not self._ended:
            raise UsageError("KVEvents must be entered with 'async with' before use")
        if self._iterates:
            raise UsageError("another task iterates over these events")
        self._iterates = True
        try:
            if self._is_due():
                await asyncio.sleep(0)  # let other tasks run during a long snapshot
            while (batch := self.take()) is None:
                if self._ended:
                    raise StopAsyncIteration
                await self._conditions.wait_for(self._is_due, None)
            return batch
        finally:
            self._iterates = False

    def _is_due(self) -> bool:
        if self._stream is None:
            return self._ended
        return self._stream.is_due or not self._lifetime.is_running

    def take(self) -> KVEventBatch | None:
        """Return the next batch without waiting; None if there is nothing to report now."""
        stream = self._stream
        if stream is None:
            return None
        if not self._lifetime.is_running:
            self._end()
            return self._batch([AllBlocksCleared()])
        if stream.restarts != self._restarts:
            self._restarts = stream.restarts
            log.warning("events.dropped", dropped_blocks=stream.dropped_blocks)
        events: list[KVEvent] = []
        while stream.is_due and not events:
            events = [self._event(run) for run in stream.take(BATCH_BLOCKS)]
        return self._batch(events) if events else None

    def repeat(self) -> None:
        """Report all blocks of the tiers again, for receivers that joined later.

        Changes of blocks are reported meanwhile, too. A receiver that has all blocks already gets
        them a second time.

        Raises:
            UsageError: the subscription is not entered.
        """
        if self._stream is None:
            raise UsageError("KVEvents must be entered with 'async with' before use")
        self._stream.repeat()
        self._conditions.test()

    @property
    def has_ended(self) -> bool:
        """True if the last batch was taken, or the subscription was left."""
        return self._ended

    @property
    def is_current(self) -> bool:
        """True if the batches taken so far describe exactly the blocks that the tiers hold."""
        return self._stream is not None and not self._is_due()

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks whose changes were dropped, because the subscriber was too slow.

        After a drop, the next batch begins with ``AllBlocksCleared``, and the blocks that the tiers
        hold follow.
        """
        return self._dropped_blocks if self._stream is None else self._stream.dropped_blocks

    @property
    def restarts(self) -> int:
        """Number of times that changes were dropped."""
        return self._restarts if self._stream is None else self._stream.restarts

    def _batch(self, events: list[KVEvent]) -> KVEventBatch:
        return KVEventBatch(time.time(), events, self._rank)

    def _event(self, run: BlockRun) -> KVEvent:
        if run.change == "cleared":
            return AllBlocksCleared()
        medium = _MEDIA[run.place]
        if run.change == "removed":
            return BlockRemoved(block_hashes=self._hashes(run.digests), medium=medium)
        salt, adapter = split_context(run.context)
        return BlockStored(
            block_hashes=self._hashes(run.digests),
            parent_block_hash=None if run.parent is None else self._hashes(run.parent)[0],
            token_ids=np.frombuffer(run.tokens, np.int32).tolist(),
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=adapter or None,
            extra_keys=_extra_keys(run, salt, adapter),
        )

    def _hashes(self, digests: bytes) -> list[BlockHash]:
        if self._as_int64:
            words: list[BlockHash] = np.frombuffer(digests, ">u8")[3::4].tolist()
            return words
        return [
            digests[begin : begin + _DIGEST_BYTES]
            for begin in range(0, len(digests), _DIGEST_BYTES)
        ]


class Events:
    """Makes the subscriptions of an engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def subscribe(
        self,
        hashes: HashKind,
        max_queued_blocks: int,
        data_parallel_rank: int | None,
        *,
        stores: bool,
    ) -> KVEvents:
        """Return a subscription; see ``CacheEngine.kv_events``."""
        checks.choice("hashes", hashes, HASH_KINDS)
        if data_parallel_rank is not None:
            data_parallel_rank = checks.integer("data_parallel_rank", data_parallel_rank, minimum=0)
        return KVEvents(
            self._parts,
            hashes=hashes,
            max_queued_blocks=checks.integer(
                "max_queued_blocks",
                max_queued_blocks,
                minimum=MIN_QUEUED_BLOCKS,
                maximum=checks.MAX_INT32,
            ),
            data_parallel_rank=data_parallel_rank,
            stores=checks.flag("stores", stores),
        )


def _extra_keys(run: BlockRun, salt: str, adapter: str) -> list[tuple[object, ...] | None] | None:
    """Return the parts of the key of each block other than its tokens; None if no block has any."""
    if not (salt or adapter or run.items):
        return None
    num_blocks = len(run.digests) // _DIGEST_BYTES
    keys: list[tuple[object, ...] | None] = []
    for index in range(num_blocks):
        key: list[object] = [adapter] if adapter else []
        if run.items:
            key += _items_of(run.items[index])
        if salt and index == 0 and run.parent is None:
            key.append(salt)
        keys.append(tuple(key) or None)
    return keys if any(keys) else None


def _items_of(key: bytes) -> list[tuple[str, int]]:
    """Return the (content hash in hex, offset in the block) of each item of an item key."""
    items, place = [], 0
    while place < len(key):
        (length,) = struct.unpack_from("<q", key, place)
        content = key[place + 8 : place + 8 + length]
        offset, _ = struct.unpack_from("<qq", key, place + 8 + length)
        items.append((content.hex(), offset))
        place += length + 24
    return items
