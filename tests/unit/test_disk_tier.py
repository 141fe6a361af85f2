"""The simulated disk tier of a replay, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.trace.disk_tier import DiskOptions, DiskTier

BLOCK = 4


def tier(blocks=100, **options) -> DiskTier:
    return DiskTier(DiskOptions(blocks=blocks, **options), block_tokens=BLOCK)


def prompt(*blocks, more=1):
    """A prompt of whole blocks, each of one repeated token, and ``more`` further tokens."""
    return np.array([token for token in blocks for _ in range(BLOCK)] + [0] * more, np.int32)


def counts(disk):
    return (disk.saved_blocks, disk.loaded_blocks, disk.evicted_blocks)


def test_committed_blocks_are_found_behind_the_cached_prefix():
    disk = tier()
    assert disk.serve(prompt(1, 2, 3, 4), 0) == 0
    assert disk.serve(prompt(1, 2, 3, 4), BLOCK) == 3 * BLOCK
    assert disk.hit_tokens == 3 * BLOCK
    assert counts(disk) == (4, 3, 0)
    assert len(disk) == 4


def test_blocks_depend_on_their_prefix():
    disk = tier()
    disk.serve(prompt(1, 2, 3), 0)
    assert disk.serve(prompt(9, 2, 3), 0) == 0
    assert disk.serve(prompt(1, 9, 3), 0) == BLOCK


def test_last_token_is_always_computed():
    disk = tier()
    disk.serve(prompt(1, 2, more=0), 0)
    assert disk.serve(prompt(1, 2, more=0), 0) == BLOCK
    assert disk.serve(prompt(1, 2, more=1), 0) == 2 * BLOCK


def test_least_recently_used_block_is_evicted_and_deeper_blocks_first():
    disk = tier(blocks=3)
    disk.serve(prompt(1, 2), 0)
    disk.serve(prompt(3), 0)
    disk.serve(prompt(1, more=1), 0)  # a load: block 1 is used later than block 3
    disk.serve(prompt(4), 0)  # evicts block 2 behind block 1
    disk.serve(prompt(5), 0)  # evicts block 3
    assert counts(disk)[2] == 2
    assert [disk.serve(prompt(*blocks), 0) for blocks in [(1, 2)]] == [BLOCK]
    assert disk.serve(prompt(4), 0) == 0  # the save of block 2 has evicted it


def test_loaded_blocks_are_evicted_from_the_deepest_on():
    disk = tier(blocks=2)
    disk.serve(prompt(1, 2), 0)
    disk.serve(prompt(1, 2), 0)
    disk.serve(prompt(3), 0)
    assert disk.serve(prompt(1, 2), 0) == BLOCK


def test_hits_end_at_the_first_missing_block():
    disk = tier(blocks=2)
    disk.serve(prompt(1, 2, 3), 0)  # keeps 1 and 2
    assert disk.serve(prompt(1, 2, 3), 0) == 2 * BLOCK


def test_blocks_on_the_device_are_neither_used_nor_saved_again():
    disk = tier(blocks=2)
    disk.serve(prompt(1), 0)
    disk.serve(prompt(2), 0)
    disk.serve(prompt(1), BLOCK)
    assert counts(disk) == (2, 0, 0)
    disk.serve(prompt(3), 0)
    assert disk.serve(prompt(1), 0) == 0  # block 1 was the least recently used


def test_nth_use_saves_blocks():
    disk = tier(policy="nth_use:3")
    disk.serve(prompt(1), 0)
    disk.serve(prompt(1), BLOCK)
    assert len(disk) == 0
    disk.serve(prompt(1), BLOCK)
    disk.serve(prompt(1), BLOCK)
    assert counts(disk) == (1, 0, 0)
    assert disk.serve(prompt(1), 0) == BLOCK


def test_computing_a_block_again_is_its_first_use():
    disk = tier(policy="nth_use:2")
    disk.serve(prompt(1), 0)
    disk.serve(prompt(1), 0)
    assert len(disk) == 0
    disk.serve(prompt(1), BLOCK)
    assert len(disk) == 1


@pytest.mark.parametrize("tokens", [0, 1, BLOCK - 1])
def test_prompt_without_a_whole_block_saves_nothing(tokens):
    disk = tier()
    assert disk.serve(np.zeros(tokens, np.int32), 0) == 0
    assert counts(disk) == (0, 0, 0)
