"""FreedBlocks: blocks that steps or transfers still use."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

pytest.importorskip("vllm")

from aiokv.connectors.vllm.blocks import FreedBlocks


def test_blocks_are_used_until_their_step_has_ended() -> None:
    freed = FreedBlocks()
    freed.add([1, 2], 3, None)
    for used in ([1], [2, 9], iter([2])):
        assert freed.are_used(used)
    assert not freed.are_used([3])
    assert freed.used_by_transfers([1]) == []
    freed.note_ended(2)
    assert freed.are_used([1])
    freed.note_ended(3)
    assert not freed.are_used([1, 2])
    freed.add([4], 3, None)
    assert not freed.are_used([4])
    freed.note_ended(1)  # of an earlier step
    freed.add([4], 3, None)
    assert not freed.are_used([4])


def test_blocks_are_used_until_their_transfers_are_idle() -> None:
    freed, idle, other = FreedBlocks(), Future[None](), Future[None]()
    freed.add([1, 2], 0, idle)
    freed.add([2, 3], 0, other)
    assert freed.used_by_transfers([1, 7]) == [idle]
    assert freed.used_by_transfers([2]) == [idle, other]
    assert freed.used_by_transfers([7]) == []
    assert freed.are_used([1])
    assert freed.step_with([1, 2]) == 0
    idle.set_result(None)
    assert freed.used_by_transfers([2]) == [other]
    assert not freed.are_used([1])


def test_step_and_transfers_of_one_block_are_told_apart() -> None:
    freed, idle = FreedBlocks(), Future[None]()
    freed.add([1], 2, idle)
    freed.note_ended(2)
    assert freed.are_used([1])
    assert freed.step_with([1]) == 0
    freed.add([2], 4, idle)
    idle.set_result(None)
    assert not freed.are_used([1])
    assert freed.are_used([2])
    assert freed.used_by_transfers([2]) == []


def test_last_step_that_uses_one_of_the_blocks_is_found() -> None:
    freed = FreedBlocks()
    freed.add([1], 2, None)
    freed.add([1, 2], 4, None)
    freed.add([3], 5, None)
    assert freed.step_with([1]) == freed.step_with([1, 2]) == 4
    assert freed.step_with([3, 1]) == 5
    assert freed.step_with([7]) == 0
    freed.note_ended(4)
    assert freed.step_with([1]) == 0
    assert freed.step_with([1, 3]) == 5
