"""KV events as a receiver sees them: vLLM's documented records, and the receiver's view.

The records have the fields that vLLM documents (``vllm/distributed/kv_events.py``), in both
layouts that it has used: events as maps (0.24 and later) and as arrays (before).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.scheduler.reader import CacheReader

Block = tuple[str | None, str | None, bytes]  # salt, adapter, all tokens up to its end


def _records(*, array_like: bool) -> dict[str, Any]:
    """Return the record types of one layout."""
    event = {"tag": True, "array_like": array_like, "omit_defaults": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
            ("group_idx", int | None, None),
            ("kv_cache_spec_kind", str | None, None),
            ("kv_cache_spec_sliding_window", int | None, None),
        ],
        **event,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [
            ("block_hashes", list[bytes | int]),
            ("medium", str | None),
            ("group_idx", int | None, None),
        ],
        **event,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], **event)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [
            ("ts", float),
            ("events", list[stored | removed | cleared]),  # type: ignore[valid-type]
            ("data_parallel_rank", int | None, None),
        ],
        array_like=True,
        omit_defaults=True,
    )
    return {"stored": stored, "removed": removed, "cleared": cleared, "batch": batch}


RECORDS = {"map": _records(array_like=False), "array": _records(array_like=True)}


def decode(payload: bytes, layout: str = "map") -> Any:
    """Decode a batch with vLLM's records."""
    return msgspec.msgpack.decode(payload, type=RECORDS[layout]["batch"])


class View:
    """Blocks per medium, as the events tell.

    Attributes:
        media: hashes of the blocks by medium.
        blocks: content of each block that is on a medium, by hash.
        clears: number of ``AllBlocksCleared``.
    """

    def __init__(self) -> None:
        self.media: defaultdict[str, set[Any]] = defaultdict(set)
        self.blocks: dict[Any, Block] = {}
        self.clears = 0

    def apply(self, batch: Any) -> None:
        for event in batch.events:
            getattr(self, type(event).__name__)(event)

    def BlockStored(self, event: Any) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        tokens = np.array(event.token_ids, np.int32).tobytes()
        salt, prefix = None, b""
        if event.parent_block_hash is not None:
            salt, adapter, prefix = self.blocks[event.parent_block_hash]  # reported before
            assert adapter == event.lora_name
        elif event.extra_keys and (keys := event.extra_keys[0]):
            own = [key for key in keys if isinstance(key, str)]  # not items
            salt = own[-1] if own[1 if event.lora_name else 0 :] else None
        for index, block_hash in enumerate(event.block_hashes):
            prefix += tokens[4 * size * index : 4 * size * (index + 1)]
            block = (salt, event.lora_name, prefix)
            assert self.blocks.setdefault(block_hash, block) == block
            self.media[event.medium].add(block_hash)

    def BlockRemoved(self, event: Any) -> None:
        for block_hash in event.block_hashes:
            self.media[event.medium].discard(block_hash)
            if not any(block_hash in hashes for hashes in self.media.values()):
                self.blocks.pop(block_hash, None)

    def AllBlocksCleared(self, event: Any) -> None:
        self.clears += 1
        self.blocks.clear()
        for hashes in self.media.values():
            hashes.clear()

    def contents(self) -> dict[str, Counter[Block]]:
        """Return the blocks of each tier; blocks that differ only in their items are equal."""
        return {
            medium: Counter(self.blocks[block_hash] for block_hash in self.media[medium])
            for medium in ("GPU", "CPU")
        }


def contents_of(blocks: Iterable[Any]) -> dict[str, Counter[Block]]:
    """Return the blocks of each medium, as the index has them.

    Args:
        blocks: of ``CacheReader.cached_blocks``.
    """
    found: dict[str, Counter[Block]] = {"GPU": Counter(), "CPU": Counter()}
    for context, prefix, _, _, flags, *_ in blocks:
        length, _, names = context.partition(":")
        split = int(length or 0)
        block = (names[:split] or None, names[split:] or None, prefix)
        for medium, flag in (("GPU", 1), ("CPU", 4)):
            found[medium][block] += bool(flags & flag)
    return {medium: +counts for medium, counts in found.items()}


def index_of(read: CacheReader) -> dict[str, Counter[Block]]:
    """Return the blocks that the tiers of an engine hold, by medium."""
    return contents_of(read.cached_blocks())
