"""Blocks of vLLM that something still uses after vLLM has freed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.base.logs import Log

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool

log = Log(__name__)


class VllmBlocks:
    """vLLM's pool of blocks, which the scheduler binds after it has made the connector.

    Attributes:
        pool: the pool.
        has_order: True if vLLM has a prefix cache, and a queue of free blocks to look at.
    """

    pool: BlockPool

    def __init__(self) -> None:
        self._cached: object = None
        self.has_order = False

    def bind(self, pool: BlockPool) -> None:
        """Note the pool."""
        self.pool = pool
        self._cached = self._map()
        queue = getattr(pool, "free_block_queue", None)
        self.has_order = getattr(pool, "enable_caching", False) and hasattr(
            queue, "fake_free_list_head"
        )
        if self._cached is None:
            log.warning("vllm.resets_unseen")

    def take_reset(self) -> bool:
        """Return True once after vLLM has emptied its prefix cache."""
        cached = self._map()
        was_reset = cached is not self._cached
        self._cached = cached
        return was_reset

    def _map(self) -> object:
        """Return vLLM's map of its cached blocks, which it replaces when it empties the cache."""
        return getattr(self.pool, "cached_block_hash_to_block", None)

    @property
    def num_free(self) -> int:
        """Number of blocks that vLLM can give to requests."""
        return int(self.pool.get_num_free_blocks())

    @property
    def size(self) -> int:
        """Number of all blocks."""
        return len(self.pool.blocks)

    def is_used(self, block_id: int) -> bool:
        """Return True if a request has the block."""
        return bool(self.pool.blocks[block_id].ref_cnt > 0)

    def next_to_reuse(self, count: int) -> list[int]:
        """Return the first ``count`` free blocks, or all, in the order in which vLLM uses them."""
        block: Any = self.pool.free_block_queue.fake_free_list_head
        ids: list[int] = []
        for _ in range(min(count, self.num_free)):
            block = block.next_free_block
            ids.append(block.block_id)
        return ids

    def evict(self, block_ids: set[int]) -> None:
        """Remove blocks from vLLM's prefix cache."""
        self.pool.evict_blocks(block_ids)


class Idle(Protocol):
    """Transfers that use blocks."""

    def done(self) -> bool:
        """Return True if no transfer uses the blocks any more."""
        ...

    def result(self, timeout: float) -> None:
        """Block the calling thread until ``done``; raise ``TimeoutError`` if that takes longer."""
        ...


@dataclass(frozen=True, slots=True)
class _Use:
    block_ids: Sequence[int]
    step: int  # this step uses the blocks until it ends
    idle: Idle | None

    def is_over(self, ended_step: int) -> bool:
        return self.step <= ended_step and (self.idle is None or self.idle.done())


class FreedBlocks:
    """Blocks that vLLM has freed while a step computed with them or a transfer read or wrote them.

    vLLM may use a freed block for another request at once. Its own steps are ordered by the stream
    of the GPU. A load runs beside this stream, and a save too.
    """

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._num_blocks = 0
        self._ended_step = 0

    def add(self, block_ids: Sequence[int], step: int, idle: Idle | None) -> None:
        """Note freed blocks.

        Args:
            block_ids: the blocks.
            step: the last step that computes with them.
            idle: transfers that read or write them; None if there are none.
        """
        use = _Use(block_ids, step, idle)
        if use.block_ids and not use.is_over(self._ended_step):
            self._uses.append(use)
            self._num_blocks += len(use.block_ids)

    @property
    def ended_step(self) -> int:
        """The last step that has ended."""
        return self._ended_step

    @property
    def num_blocks(self) -> int:
        """Number of blocks in use when a step or a transfer last ended, or more."""
        return self._num_blocks

    def note_ended(self, step: int) -> None:
        """Note that all steps up to ``step`` have ended."""
        if step > self._ended_step:
            self._ended_step = step
        if self._uses:
            self._uses = [use for use in self._uses if not use.is_over(self._ended_step)]
            self._num_blocks = sum(len(use.block_ids) for use in self._uses)

    @property
    def block_ids(self) -> set[int]:
        """The blocks that were in use when a step or a transfer last ended."""
        return {block_id for use in self._uses for block_id in use.block_ids}

    def used_by_transfers(self, block_ids: Iterable[int]) -> list[Idle]:
        """Return the transfers to wait for before any of these blocks is written."""
        idles = (use.idle for use in self._uses_of(block_ids))
        return [idle for idle in idles if idle is not None and not idle.done()]

    def step_with(self, block_ids: Iterable[int]) -> int:
        """Return the last step that uses one of these blocks and has not ended; 0 for none."""
        steps = (use.step for use in self._uses_of(block_ids))
        return max((step for step in steps if step > self._ended_step), default=0)

    def are_used(self, block_ids: Iterable[int]) -> bool:
        """Return True while a step or a transfer uses one of these blocks."""
        return any(not use.is_over(self._ended_step) for use in self._uses_of(block_ids))

    def _uses_of(self, block_ids: Iterable[int]) -> list[_Use]:
        if not self._uses:
            return []
        wanted = set(block_ids)
        return [use for use in self._uses if not wanted.isdisjoint(use.block_ids)]
