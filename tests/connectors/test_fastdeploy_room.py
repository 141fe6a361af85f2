"""Verbs of ``CacheManager`` for room and blocks."""

from __future__ import annotations

import pytest

from aiokv.connectors.fastdeploy import (
    blocks,
)
from aiokv.connectors.fastdeploy import manager as manager_module
from aiokv.errors import UsageError, WouldBlock
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_requests import (
    count_crossings,
    finish,
    opened,
    prompt,
    serve,
    start,
)
from tests.connectors.fastdeploy_server import (
    BLOCK,
    Request,
    fd_config,
    regions_of,
    tensors,
)


def test_b4_1_blocks_are_taken_once_and_given_back():
    with opened(100, prefix_caching=False) as manager:
        request = Request("a", prompt(1, 5))
        ids = manager.allocate_device_blocks(request, 5)
        assert len(set(ids)) == 5
        assert set(ids) <= set(range(100))
        assert manager.num_free_device_blocks == 95
        more = manager.allocate_device_blocks(request, 3)
        assert not set(ids) & set(more)
        manager.request_finish(request)
        assert manager.num_free_device_blocks == 100
        assert manager.allocate_device_blocks(Request("b", [1]), 101) == []
        assert manager.num_free_device_blocks == 100
        assert len(manager.allocate_device_blocks(Request("c", [1]), 100)) == 100
        assert manager.allocate_device_blocks(Request("d", [1]), 1) == []


def test_b1_2_zero_blocks_take_nothing():
    with opened(4) as manager:
        request = Request("a", prompt(1, 2))
        assert manager.allocate_device_blocks(request, 0) == []
        assert manager.num_free_device_blocks == 4
        assert manager.can_allocate_device_blocks(0)
        assert manager.can_allocate_device_blocks(-1)


@pytest.mark.parametrize("count", [0, -1, -3])
def test_fewer_than_one_block_leaves_the_table_as_it_is(count):
    """FastDeploy computes a negative number for a request that has more blocks than it needs."""
    with opened(8) as manager:
        request = Request("a", prompt(1, 2))
        start(manager, request)
        assert manager.allocate_device_blocks(request, count) == []
        request.block_tables += manager.allocate_device_blocks(request, 1)
        assert len(set(request.block_tables)) == 3


@pytest.mark.parametrize("count", [1.0, "1", None, True])
def test_a_number_of_blocks_that_is_no_integer_is_refused(count):
    with opened(8) as manager:
        request = Request("a", prompt(1, 2))
        start(manager, request)
        for verb in (
            manager.can_allocate_device_blocks,
            lambda count: manager.allocate_device_blocks(request, count),
        ):
            with pytest.raises(UsageError, match="num_blocks is"):
                verb(count)
        assert manager.num_free_device_blocks == 6
        assert not manager.can_allocate_device_blocks(2**40)
        assert manager.allocate_device_blocks(request, 2**40) == []


def test_b4_6_room_is_exact_with_and_without_eviction():
    with opened(10) as manager:
        assert manager.can_allocate_device_blocks(10)
        assert not manager.can_allocate_device_blocks(11)
        serve(manager, "a", prompt(1, 6))
        assert manager.num_free_device_blocks == 4
        assert manager.can_allocate_gpu_blocks(10)
        running = Request("b", prompt(2, 4))
        start(manager, running)
        assert manager.can_allocate_device_blocks(6)
        assert not manager.can_allocate_device_blocks(7)


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_blocks_that_must_be_saved_first_are_room_for_a_later_schedule(policy):
    """The scheduler is not blocked by saves, and the first question begins them."""
    device = ScriptedDevice()
    gate = device.hold("offload")
    options = {"regions": regions_of(tensors(8)), "device": device, "low_watermark_blocks": 0}
    with opened(8, 16, options, write_policy=policy, threshold=2) as manager:
        serve(manager, "a", prompt(1, 8))
        assert manager.num_free_device_blocks == 0
        request = Request("b", prompt(2, 8))
        manager.match_prefix(request)
        assert not manager.can_allocate_device_blocks(8)
        assert manager.allocate_device_blocks(request, 8) == []
        assert manager.engine.cache_statistics().attention.host.in_flight == 8
        gate.open()
        manager.engine.call(manager.engine.cache.drain)
        assert manager.can_allocate_device_blocks(8)
        assert len(manager.allocate_device_blocks(request, 8)) == 8
        assert manager.engine.statistics().attention.offloaded_blocks == 8
        finish(manager, request)


def test_room_is_promised_until_the_schedule_ends(monkeypatch):
    monkeypatch.setattr(blocks, "PROMISE_SECONDS", 0.0)
    with opened(4) as manager:
        request = Request("a", prompt(1, 4))
        with manager.engine.match([0], read=False, write=False) as other:
            assert manager.can_allocate_device_blocks(2)
            other.allocate(3 * BLOCK).result()
            with pytest.raises(WouldBlock, match="no room for 2 blocks"):
                manager.allocate_device_blocks(request, 2)
            manager.issue_pending_backup_to_batch_request()
            assert manager.allocate_device_blocks(request, 2) == []
        assert len(manager.allocate_device_blocks(request, 2)) == 2


def test_spare_blocks_of_another_request_complete_those_of_a_request():
    with opened(40, batch_tokens=16, decode_blocks=2) as manager:
        other, request = Request("a", prompt(1, 1)), Request("b", prompt(2, 2))
        manager.match_prefix(other)
        manager.match_prefix(request)  # both get blocks that the scheduler has not taken
        free = manager.engine.free_device_blocks
        spare = manager.num_free_device_blocks - free
        assert spare == 1 + 2 + 2 + 2
        with manager.engine.match([0], read=False, write=False) as lease:
            assert lease.try_allocate((free - 2) * BLOCK)
            ids = manager.allocate_device_blocks(request, 4 + 5)
            assert len(set(ids)) == 9
            assert manager.num_free_device_blocks == 0
        finish(manager, request)
        finish(manager, other)
        assert manager.num_free_device_blocks == 40


def refuse(manager, request: Request, num_blocks: int, *, ends_batch: bool = True) -> int:
    """Match a request, and refuse it for lack of room; return its cached blocks."""
    manager.match_prefix(request)
    assert not manager.can_allocate_device_blocks(num_blocks)
    matched = request.match_result.total_matched_blocks
    manager.request_finish(request)
    if ends_batch:
        manager.issue_pending_backup_to_batch_request()
    return matched


def test_a_request_without_room_is_matched_again_without_a_crossing(monkeypatch):
    with opened(12, batch_tokens=16) as manager:
        serve(manager, "a", prompt(1, 2))
        running = Request("b", prompt(2, 4))
        start(manager, running)
        manager.issue_pending_backup_to_batch_request()
        running.output_token_ids.append(1)
        manager.issue_pending_backup_to_batch_request()
        waiting = Request("c", prompt(1, 5))
        assert refuse(manager, waiting, 9) == 2
        counts = count_crossings(monkeypatch)
        for _ in range(3):
            assert refuse(manager, waiting, 9) == 2
        assert counts == []
        assert manager.num_free_device_blocks == 6
        ids = manager.allocate_device_blocks(running, 6)
        assert len(ids) == 6, "the blocks of the waiting request were taken back"
        finish(manager, running)
        start(manager, waiting)
        assert len(set(waiting.block_tables)) == 5


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_without_room_leaves_its_blocks_if_it_is_not_matched_again(comes_back):
    with opened(12, batch_tokens=16) as manager:
        serve(manager, "a", prompt(1, 2))
        waiting = Request("c", prompt(1, 5))
        refuse(manager, waiting, 13)
        assert manager.engine.statistics().attention.device.leased > 0
        if comes_back:
            manager.match_prefix(waiting)
        manager.request_finish(waiting)  # aborted
        if comes_back:
            manager.issue_pending_backup_to_batch_request()
            manager.issue_pending_backup_to_batch_request()
        assert manager.engine.statistics().attention.device.leased == 0
        refuse(manager, waiting, 13)
        for _ in range(2):
            manager.issue_pending_backup_to_batch_request()
        assert manager.engine.statistics().attention.device.leased == 0


@pytest.mark.parametrize("other_is_matched", [False, True])
def test_a_request_without_room_hits_what_is_computed_meanwhile(other_is_matched):
    with opened(16, batch_tokens=16) as manager:
        waiting = Request("a", prompt(1, 4))
        running = Request("b", [*prompt(1, 3), *prompt(3, 1)])
        assert refuse(manager, waiting, 17, ends_batch=False) == 0
        start(manager, running)
        assert len(set(running.block_tables)) == 4
        manager.issue_pending_backup_to_batch_request()
        if other_is_matched:  # this match commits the blocks of the batch
            other = Request("c", prompt(2, 1))
            start(manager, other)
            finish(manager, other)
        assert refuse(manager, waiting, 17) == 3
        finish(manager, running)


def test_a_request_under_write_back_crosses_once_for_its_blocks(monkeypatch):
    with opened(64, 16, write_policy="write_back", batch_tokens=16) as manager:
        manager.open()
        counts = count_crossings(monkeypatch)
        request = Request("a", prompt(1, 3))
        manager.match_prefix(request)
        assert manager.can_allocate_device_blocks(3)
        assert len(manager.allocate_device_blocks(request, 3)) == 3
        assert len(counts) == 1
        finish(manager, request)


def test_a_new_request_with_host_memory_crosses_once_per_schedule(monkeypatch):
    with opened(64, 64, write_policy="write_through", batch_tokens=16) as manager:
        manager.open()
        counts = count_crossings(monkeypatch)
        steps = []
        for number in range(4):
            counts.clear()
            request = Request(str(number), prompt(number, 3))
            manager.match_prefix(request)
            assert manager.can_allocate_device_blocks(3)
            request.block_tables = manager.allocate_device_blocks(request, 3)
            request.num_computed_tokens = 3 * BLOCK
            manager.issue_pending_backup_to_batch_request()
            steps.append(manager.blocks.last_step)
            assert len(counts) == 1 + number % 2, "every second batch closes the step"
        assert steps == [0, 1, 1, 2]
        manager.issue_pending_backup_to_batch_request()
        assert manager.blocks.last_step == 3
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.engine.statistics().attention.offloaded_blocks == 4 * 3


def test_room_under_write_back_is_made_when_it_is_promised():
    """Later, a free block of host memory would let evicted blocks wait for their saves."""
    with opened(8, 0, write_policy="write_back") as manager:
        serve(manager, "a", prompt(1, 8))
        assert manager.num_free_device_blocks == 0
        assert manager.can_allocate_device_blocks(3)
        assert manager.num_free_device_blocks >= 3
        assert not manager.can_allocate_device_blocks(9)


def test_room_counts_what_requests_hold_in_advance():
    with opened(6, decode_blocks=2) as manager:
        request = Request("a", prompt(1, 1))
        start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids.append(1)
        request.num_computed_tokens = request.num_total_tokens - 1
        manager.issue_pending_backup_to_batch_request()
        blocks = manager.engine.statistics()
        assert blocks.attention.device.free == 3, "two blocks were taken in advance"
        assert manager.num_free_device_blocks == 5
        assert manager.can_allocate_device_blocks(5), "blocks taken in advance are given back"
        other = Request("b", prompt(2, 5))
        manager.match_prefix(other)
        assert len(manager.allocate_device_blocks(other, 5)) == 5
        assert manager.allocate_device_blocks(request, 1) == []


def test_b4_5_resize_grows_and_refuses_to_cut_used_blocks():
    with opened(8) as manager:
        request = Request("a", prompt(1, 6))
        start(manager, request)
        assert manager.resize_device_pool(12)
        assert manager.num_gpu_blocks == 12
        assert manager.can_allocate_device_blocks(6)
        assert not manager.resize_device_pool(3)
        assert manager.num_gpu_blocks == 12
        assert manager.can_allocate_device_blocks(6)
        finish(manager, request)


def test_room_that_was_known_before_a_resize_is_asked_for_again():
    with opened(8) as manager:
        assert manager.can_allocate_device_blocks(6)
        assert manager.resize_device_pool(4)
        assert not manager.can_allocate_device_blocks(6)
        assert manager.can_allocate_device_blocks(4)


def test_b4_15_profile_run_replaces_the_number_of_blocks_before_the_engine_opens():
    with opened(8) as manager:
        assert not manager.is_initialized()
        assert manager.update_cache_config(fd_config(20).cache_config)
        assert not manager.is_initialized()
        assert manager.num_gpu_blocks == manager.num_free_device_blocks == 20
        assert not manager.is_initialized()
        manager.open()
        manager.open()
        assert manager.is_initialized()
        assert manager.num_free_device_blocks == 20
        assert manager.update_cache_config(fd_config(24).cache_config)
        assert manager.num_free_device_blocks == 24


def test_b4_3_all_device_blocks_are_freed_at_once():
    with opened(8, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        start(manager, Request("b", prompt(2, 2)))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.num_free_host_blocks == 5
        assert manager.free_all_device_blocks() == 5
        assert manager.num_free_device_blocks == 8


def test_blocks_taken_in_advance_are_free_once_after_all_are_freed():
    with opened(6, decode_blocks=2) as manager:
        request = Request("a", prompt(1, 1))
        start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids.append(1)
        manager.issue_pending_backup_to_batch_request()
        assert manager.engine.free_device_blocks == 3
        assert manager.num_free_device_blocks == 5, "two were taken in advance"
        manager.free_all_device_blocks()
        assert manager.num_free_device_blocks == 6


def test_b4_4_reset_empties_both_tiers():
    with opened(8, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        held = Request("b", prompt(2, 2))
        start(manager, held)
        assert manager.reset_cache()
        assert (manager.num_free_device_blocks, manager.num_free_host_blocks) == (8, 8)
        again = Request("c", prompt(1, 3))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 0
        manager.request_finish(held)  # its blocks are gone already
        assert manager.num_free_device_blocks == 8


def test_reset_tells_when_a_transfer_did_not_end_in_time(monkeypatch):
    monkeypatch.setattr(manager_module, "CONTROL_SECONDS", 0.0)
    device = ScriptedDevice()
    gate = device.hold("offload")
    options = {"regions": regions_of(tensors(4)), "device": device}
    with opened(4, 8, options, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        assert not manager.reset_cache()
        again = Request("b", prompt(1, 3, more=1))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 0
        gate.open()
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.reset_cache()


def test_room_is_exact_after_a_commit_that_keeps_other_blocks_cached():
    """Blocks with the same tokens are cached once, and then belong to the first request, too."""
    with opened(8) as manager:
        first, second = Request("a", prompt(1, 2)), Request("b", prompt(1, 2))
        start(manager, first, 3)
        start(manager, second, 2)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, second)
        assert manager.can_allocate_device_blocks(5)
        third = Request("c", prompt(2, 1))
        manager.match_prefix(third)  # commits the blocks of the first request
        assert not manager.can_allocate_device_blocks(4)
        assert manager.can_allocate_device_blocks(3)
        assert len(manager.allocate_device_blocks(third, 3)) == 3
