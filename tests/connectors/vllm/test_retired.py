"""RetiredLeases: which blocks vLLM's pool of blocks reuses soon."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from aiokv.connectors.vllm.blocks import VllmBlocks
from aiokv.connectors.vllm.retired import RetiredLeases

NUM_BLOCKS = 41  # one of them is vLLM's null block


class Blocks:
    """vLLM's pool, and the retired leases on its blocks. A lease is any object here."""

    def __init__(self, *, step_blocks: int = 4, host_blocks: int | None = 0) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=4)
        blocks = VllmBlocks()
        blocks.bind(self.pool)
        self.retired = RetiredLeases(blocks, step_blocks, host_blocks)

    def take(self, count: int) -> list[int]:
        """Give free blocks to a request."""
        ids = [block.block_id for block in self.pool.get_new_blocks(count)]
        self.retired.note_given(ids)
        return ids

    def share(self, ids: list[int]) -> None:
        """Let one more request use blocks."""
        self.pool.touch([self.pool.blocks[block_id] for block_id in ids])

    def free(self, ids: list[int]) -> None:
        """End a request, as vLLM does: its last block is reused first."""
        for block_id in ids:
            block = self.pool.blocks[block_id]
            if block.block_hash is None:
                block._block_hash = f"{block_id}".encode()
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(ids))

    def retire(self, lease: Any, ids: list[int]) -> list[int]:
        """End a request with a lease."""
        self.free(ids)
        self.retired.add(lease, ids)
        return ids

    def should_retire(self) -> bool:
        return self.retired.should_retire

    def keeps(self) -> bool:
        return self.retired.keeps

    def ending(self) -> list[tuple[Any, int, int]]:
        return [(lease, kept, valid) for lease, _, kept, valid in self.retired.take_ending()]

    def until_ending(self) -> list[tuple[Any, int, int]]:
        """Give blocks to requests, one by one, until leases end."""
        while not (ending := self.ending()):
            self.take(1)
        return ending


def test_leases_end_before_vllm_reuses_their_first_block() -> None:
    blocks = Blocks()
    first, second = (blocks.retire(name, blocks.take(5)) for name in ("a", "b"))
    assert blocks.until_ending() == [("a", 0, 5)]
    assert all(blocks.pool.blocks[block_id].ref_cnt == 0 for block_id in first)
    assert blocks.until_ending() == [("b", 0, 5)]
    assert all(blocks.pool.blocks[block_id].ref_cnt == 0 for block_id in second)
    assert blocks.retired.take_all() == []


def test_a_lease_of_which_blocks_have_another_use_has_only_the_blocks_before_them() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.take(NUM_BLOCKS - 1 - 3)  # at once
    assert blocks.pool.blocks[ids[2]].ref_cnt == 0
    assert blocks.ending() == [("a", 0, 3)]
    assert blocks.ending() == []


def test_all_allocations_before_a_lease_ends_are_noted() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.take(NUM_BLOCKS - 1 - 3)
    blocks.take(1)
    assert blocks.pool.blocks[ids[1]].ref_cnt == 0
    assert blocks.ending() == [("a", 0, 2)]


def test_blocks_that_newer_leases_share_are_kept() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.share(ids[:2])
    longer = ids[:2] + blocks.take(2)
    blocks.retire("b", longer)
    assert blocks.until_ending() == [("a", 2, 5)]
    assert blocks.until_ending() == [("b", 0, 4)]


def test_blocks_that_running_requests_share_are_kept() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.share(ids[:3])
    assert blocks.until_ending() == [("a", 3, 5)]


def test_a_lease_with_the_blocks_of_a_newer_one_ends_without_copies() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.share(ids)
    blocks.retire("b", ids)
    assert blocks.ending() == [("a", 5, 5)]
    assert blocks.until_ending() == [("b", 0, 5)]


def test_the_lease_of_an_earlier_turn_ends_without_copies() -> None:
    """Otherwise each turn of a conversation would keep the tokens of all turns before it."""
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(5))
    blocks.share(ids)
    blocks.retire("b", ids + blocks.take(2))
    assert blocks.ending() == [("a", 5, 5)]
    assert blocks.until_ending() == [("b", 0, 7)]


def test_a_lease_that_was_not_retired_is_removed() -> None:
    blocks = Blocks()
    ids = blocks.retire("a", blocks.take(2))
    blocks.retired.remove("a", ids)
    blocks.retire("b", blocks.take(2))
    other = blocks.retire("c", blocks.take(2))
    blocks.retired.remove("d", other)
    assert blocks.retired.take_all() == ["b", "c"]
    for _ in range(NUM_BLOCKS - 1):
        blocks.take(1)
        assert blocks.ending() == []


def test_large_allocations_let_leases_end_earlier() -> None:
    left = {}
    for size in (1, 6):
        blocks = Blocks(step_blocks=1)
        ids = blocks.retire("a", blocks.take(2))
        while not blocks.ending():
            blocks.take(size)
        left[size] = blocks.pool.get_num_free_blocks()
        assert blocks.pool.blocks[ids[-1]].ref_cnt == 0
    assert left[6] > left[1]


def test_no_lease_is_retired_while_blocks_are_reused_at_once() -> None:
    blocks = Blocks()
    assert blocks.should_retire()
    assert blocks.keeps()
    blocks.take(NUM_BLOCKS - 1 - 5)
    assert not blocks.should_retire()
    assert blocks.keeps()
    blocks.take(2)
    assert not blocks.keeps()


def test_leases_are_retired_after_host_memory_was_full() -> None:
    blocks = Blocks(host_blocks=10)
    assert not blocks.should_retire()
    blocks.retired.note_saved(9)
    assert not blocks.should_retire()
    blocks.retired.note_saved(1)
    assert blocks.should_retire()
    assert not Blocks(host_blocks=None).should_retire()


def test_without_a_prefix_cache_no_lease_is_retired() -> None:
    pool = BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=4)
    blocks = VllmBlocks()
    blocks.bind(pool)
    assert not RetiredLeases(blocks, 4, 0).should_retire
