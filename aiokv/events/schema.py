"""The records of KV events, with the names, fields and MessagePack encoding of vLLM.

A batch is an array ``[ts, events, data_parallel_rank]``. An event is a map of its fields by name,
with its class under ``type``; vLLM before 0.24 expects an array of its class and its fields.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
HashKind: TypeAlias = Literal["int64", "bytes"]
Layout: TypeAlias = Literal["map", "array"]

HASH_KINDS: Final[tuple[HashKind, ...]] = ("int64", "bytes")
LAYOUTS: Final[tuple[Layout, ...]] = ("map", "array")
GPU: Final = "GPU"  # the medium of the device tier, also where the device is a CPU
CPU: Final = "CPU"  # the medium of the host tier
STORAGE: Final = "STORAGE"  # the medium of all stores


class BlockStored(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag=True
):
    """Consecutive blocks of a prompt have become usable on a medium.

    Attributes:
        block_hashes: digest of each block: the last 8 bytes as an unsigned big-endian integer, or
            all 32 bytes. A digest depends on the tokens of the block and of all blocks before it,
            on salt, adapter and multimodal items, and is equal in all processes.
        parent_block_hash: digest of the block before the first block; None at the beginning of a
            prompt.
        token_ids: ``block_size`` tokens per block.
        block_size: tokens per block (``CacheConfig.block_tokens``).
        lora_id: always None: vLLM has replaced it with ``lora_name``.
        medium: ``"GPU"`` for the device tier, ``"CPU"`` for the host tier, ``"STORAGE"`` for the
            stores.
        lora_name: the ``adapter`` of the prompt; None without one.
        extra_keys: per block, a tuple of the parts of its key other than tokens, or None: the
            adapter, the (content hash in hex, offset in the block) of each multimodal item, and for
            the first block of a prompt its salt. None when no block has any.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag=True
):
    """Blocks are no longer usable on a medium; they may be on another one.

    Attributes:
        block_hashes: as in ``BlockStored``.
        medium: as in ``BlockStored``.
    """

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False, tag=True):
    """No earlier event counts; the blocks that are usable follow."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Events in order.

    Attributes:
        ts: time of the batch, in seconds since the epoch.
        events: one or more events.
        data_parallel_rank: as given to ``kv_events``.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class BatchEncoder:
    """Encodes batches as vLLM does.

    Args:
        layout: ``"map"`` for subscribers of vLLM 0.24 and later, ``"array"`` for earlier ones.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, batch: KVEventBatch) -> bytes:
        """Return the payload of a batch."""
        if self._layout == "map":
            return self._encode(batch)
        events = [(type(event).__name__, *msgspec.structs.astuple(event)) for event in batch.events]
        return self._encode((batch.ts, events, batch.data_parallel_rank))
