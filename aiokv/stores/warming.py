"""Warming: copies the blocks that one host service has used last to a store of another server."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from aiokv.errors import ConfigError, UsageError
from aiokv.layout.host_block import pitch_bytes
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory, selected
from aiokv.stores.host.link import visiting
from aiokv.stores.host.messages import MAX_MESSAGE_BYTES, Newest
from aiokv.stores.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from aiokv.stores.base import Store

MAX_BLOCKS: Final = MAX_MESSAGE_BYTES // KEY_BYTES // 2
_STAGING_BYTES: Final = 64 << 20
_LARGEST_BYTES: Final = 1 << 40


class HotBlock(NamedTuple):
    """A block that was used lately.

    Attributes:
        key: its key in all stores.
        payload_bytes: bytes of the block.
    """

    key: bytes
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.key.hex()} {self.payload_bytes}"

    @classmethod
    def parse(cls, line: str) -> HotBlock:
        """Return the block of a line, as ``str`` writes it.

        Raises:
            UsageError: the line has no key and size.
        """
        key, _, size = line.strip().partition(" ")
        try:
            block = cls(bytes.fromhex(key), int(size))
        except ValueError:
            block = cls(b"", 0)
        if len(block.key) != KEY_BYTES or not 0 < block.payload_bytes <= _LARGEST_BYTES:
            raise UsageError(
                f"the line {line.strip()[:100]!r} is not the key and the bytes of a block",
                hint="pass the output of `aiokv store hot`",
            )
        return block


class Warming(msgspec.Struct, kw_only=True):
    """Result of a warming; ``aiokv store warm --json`` writes it.

    Attributes:
        copied_blocks: blocks that were copied.
        present_blocks: blocks that the target had.
        missing_blocks: blocks that the source does not have, or whose bytes were wrong.
        refused_blocks: blocks that the target did not take.
    """

    copied_blocks: int = 0
    present_blocks: int = 0
    missing_blocks: int = 0
    refused_blocks: int = 0


async def hot_blocks(path: Path, count: int) -> list[HotBlock]:
    """Return the blocks that a host service has used last, the last one used first.

    Args:
        path: Unix socket of the service.
        count: most blocks of each size, at most ``MAX_BLOCKS``.

    Raises:
        StoreError: no service listens there.
    """
    blocks = []
    async with visiting(path) as (link, report):
        for size in report.sizes:
            request = Newest(
                number=link.next_number(),
                payload_bytes=size.payload_bytes,
                pitch_bytes=size.pitch_bytes,
                count=count,
            )
            keys = await link.ask(request)
            blocks += [
                HotBlock(keys[i : i + KEY_BYTES], size.payload_bytes)
                for i in range(0, len(keys), KEY_BYTES)
            ]
    return blocks


async def warm(
    source: Store, target: Store, blocks: Iterable[HotBlock], advance: Callable[[int], None]
) -> Warming:
    """Copy blocks that the target lacks, and verify them.

    The hottest block is copied last: it is then the last one that the target evicts.

    Args:
        source: has the blocks; not open.
        target: gets the blocks; not open.
        blocks: the hottest ones first.
        advance: called with the number of blocks that were done.

    Raises:
        ConfigError: a store is configured wrongly, or the source finds blocks by prompts only.
        StoreError: a store cannot be reached, or failed. The blocks that were copied before stay.

    Cancellation: likewise.
    """
    if source.finds_prefixes:
        raise ConfigError(
            f"the blocks of {source.url} are in bundles, which are found by their prompts only",
            hint="use a source of another kind, such as redis:// or mooncake://",
        )
    by_size: dict[int, list[bytes]] = defaultdict(list)
    for block in blocks:
        by_size[block.payload_bytes].append(block.key)
    result = Warming()
    for payload_bytes, keys in by_size.items():
        pitch = pitch_bytes(payload_bytes, with_stores=True)
        num_blocks = max(1, min(len(keys), _STAGING_BYTES // pitch))
        memory = StoreMemory.allocate(num_blocks, payload_bytes, pitch)
        proof = Proof(memory)
        try:
            await source.open(memory)
            await target.open(memory)
            coldest_first = keys[::-1]
            for i in range(0, len(keys), num_blocks):
                part = coldest_first[i : i + num_blocks]
                await _copy(source, target, proof, part, result)
                advance(len(part))
        finally:
            await source.aclose()
            await target.aclose()
            proof.close()
    return result


async def _copy(
    source: Store, target: Store, proof: Proof, keys: Sequence[bytes], result: Warming
) -> None:
    lacking = ~await target.lookup(b"".join(keys))
    result.present_blocks += int(np.count_nonzero(~lacking))
    wanted = selected(b"".join(keys), lacking)
    ids: NDArray[np.int32] = np.arange(len(wanted) // KEY_BYTES, dtype=np.int32)
    loaded = await source.load(wanted, ids) == Result.DONE
    if not source.verifies_loads:
        loaded[loaded] = await proof.verify(selected(wanted, loaded), ids[loaded]) == Result.DONE
    result.missing_blocks += int(np.count_nonzero(~loaded))
    saved = await target.save(selected(wanted, loaded), ids[loaded])
    copied = int(np.isin(saved, (Result.DONE, Result.PRESENT)).sum())
    result.copied_blocks += copied
    result.refused_blocks += len(saved) - copied
