"""Verbs of ``CacheManager`` one by one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheLevel,
    CacheManager,
    CacheMetrics,
    CacheSwapMetadata,
    blocks,
)
from aiokv.connectors.fastdeploy import manager as manager_module
from aiokv.errors import ClosedError, ConfigError, ControlTimeout, UsageError, WouldBlock
from aiokv.sync import Calls
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_server import (
    BLOCK,
    Request,
    Status,
    fd_config,
    regions_of,
    tensors,
)
from tests.harness.patience import STORE_OPTIONS


@contextmanager
def opened(device_blocks: int, host_blocks: int = 0, options: dict | None = None, **fields):
    manager = CacheManager(fd_config(device_blocks, host_blocks, **fields), **(options or {}))
    try:
        yield manager
        engine = manager.engine
        assert engine.call(engine.cache.check_invariants) == []
    finally:
        manager.close()


def prompt(seed: int, num_blocks: int, more: int = 0) -> list[int]:
    return [seed * 1_000 + i for i in range(num_blocks * BLOCK + more)]


def start(manager: CacheManager, request: Request, num_blocks: int | None = None) -> list[int]:
    """Match a request and take the blocks of its prompt, as the scheduler does."""
    manager.match_prefix(request, True)
    if request.match_result is not None:
        request.block_tables = list(request.match_result.device_block_ids)
    if num_blocks is None:
        num_blocks = -(-request.num_total_tokens // BLOCK) - len(request.block_tables)
    ids = manager.allocate_device_blocks(request, num_blocks)
    request.block_tables += ids
    request.num_computed_tokens = request.num_total_tokens
    return ids


def finish(manager: CacheManager, request: Request) -> None:
    request.status = Status.FINISHED
    manager.request_finish(request)
    request.block_tables = []


def serve(manager: CacheManager, name: str, tokens: list[int]) -> Request:
    """Compute a prompt and end the request: its full blocks are cached."""
    request = Request(name, tokens)
    start(manager, request)
    manager.issue_pending_backup_to_batch_request()
    finish(manager, request)
    return request


# --- room -----------------------------------------------------------------------------------------


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


def test_room_that_was_promised_can_be_taken_although_blocks_must_be_saved_first():
    """Without the wait for saves, the scheduler would preempt a request for nothing."""
    with opened(8, 16, write_policy="write_back") as manager:
        serve(manager, "a", prompt(1, 8))
        assert manager.num_free_device_blocks == 0
        request = Request("b", prompt(2, 8))
        manager.match_prefix(request)
        assert manager.can_allocate_device_blocks(8)
        assert len(manager.allocate_device_blocks(request, 8)) == 8
        assert manager.engine.statistics().attention.offloaded_blocks == 8
        finish(manager, request)


def test_room_is_promised_until_the_schedule_ends(monkeypatch):
    monkeypatch.setattr(blocks, "PROMISE_SECONDS", 0.0)
    with opened(4) as manager:
        request = Request("a", prompt(1, 4))
        manager.match_prefix(request)
        with manager.engine.match([0], read=False, write=False) as other:
            assert manager.can_allocate_device_blocks(2)
            other.allocate(3 * BLOCK).result()
            with pytest.raises(WouldBlock, match="no room for 2 blocks"):
                manager.allocate_device_blocks(request, 2)
            manager.issue_pending_backup_to_batch_request()
            assert manager.allocate_device_blocks(request, 2) == []
        assert len(manager.allocate_device_blocks(request, 2)) == 2


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


def test_b4_3_all_blocks_of_a_tier_are_freed_at_once():
    with opened(8, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        start(manager, Request("b", prompt(2, 2)))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.num_free_host_blocks == 5
        assert manager.can_allocate_host_blocks(8)
        assert not manager.can_allocate_host_blocks(9)
        assert manager.free_all_device_blocks() == 5
        assert manager.num_free_device_blocks == 8
        assert manager.free_all_host_blocks() == 3
        assert manager.num_free_host_blocks == 8


def test_blocks_taken_in_advance_are_free_once_after_all_are_freed():
    with opened(6, decode_blocks=2) as manager:
        request = Request("a", prompt(1, 1))
        start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids.append(1)
        manager.issue_pending_backup_to_batch_request()
        assert manager.blocks.spare_blocks == 2
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


# --- prefixes -------------------------------------------------------------------------------------


def test_b4_7_and_b4_8_finished_blocks_are_found():
    with opened(100) as manager:
        first = Request("a", prompt(1, 3))
        manager.match_prefix(first)
        assert first.match_result.total_matched_blocks == 0
        ids = start(manager, first)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, first)
        assert manager.num_free_device_blocks == 97
        second = Request("b", prompt(1, 3) + prompt(9, 1))
        manager.match_prefix(second)
        assert second.match_result.device_block_ids == ids
        assert second.match_result.matched_device_nums == 3
        third = Request("c", prompt(1, 2) + prompt(8, 1, 1))
        assert len(start(manager, third)) == 2
        assert third.match_result.device_block_ids == ids[:2]


def test_whole_prompt_leaves_its_last_block_to_compute():
    with opened(16) as manager:
        serve(manager, "a", prompt(1, 3))
        again = Request("b", prompt(1, 3))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 2
        longer = Request("c", prompt(1, 3, more=1))
        manager.match_prefix(longer)
        assert longer.match_result.total_matched_blocks == 3


def test_b4_9_matched_blocks_are_held_until_the_request_ends():
    with opened(4) as manager:
        serve(manager, "a", prompt(1, 2))
        request = Request("b", prompt(1, 2, more=1))
        manager.match_prefix(request)
        assert manager.can_allocate_device_blocks(2)
        assert not manager.can_allocate_device_blocks(3)
        manager.request_finish(request)
        assert manager.can_allocate_device_blocks(4)


def test_b4_10_full_device_serves_a_new_request_by_eviction():
    with opened(100) as manager:
        for i in range(10):
            serve(manager, f"r{i}", prompt(i, 10))
        assert manager.num_free_device_blocks == 0
        assert manager.get_stats()["radix_tree"]["evictable_device_count"] == 100
        request = Request("new", prompt(50, 3))
        assert len(start(manager, request)) == 3


def test_b4_11_without_prefix_caching_nothing_is_found():
    with opened(16, prefix_caching=False) as manager:
        request = Request("a", prompt(1, 3))
        manager.match_prefix(request)
        assert request.match_result is None
        start(manager, request)
        finish(manager, request)
        assert manager.num_free_device_blocks == 16


def test_b4_12_without_host_blocks_eviction_drops():
    with opened(4) as manager:
        assert not manager.enable_host_cache
        serve(manager, "a", prompt(1, 4))
        serve(manager, "b", prompt(2, 4))
        again = Request("c", prompt(1, 4, more=1))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 0
        assert manager.issue_pending_backup_to_batch_request() is None


def test_host_blocks_are_announced_to_the_workers():
    with opened(4, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        serve(manager, "b", prompt(2, 4))
        again = Request("c", prompt(1, 3, more=1))
        manager.match_prefix(again)
        found = again.match_result
        assert (found.matched_device_nums, found.matched_host_nums) == (0, 3)
        assert len(found.device_block_ids) == 3
        (metadata,) = again.cache_swap_metadata
        assert metadata.dst_block_ids == found.device_block_ids
        assert (metadata.src_type, metadata.dst_type) == (CacheLevel.HOST, CacheLevel.DEVICE)
        manager.request_finish(again)
        assert again.cache_swap_metadata == [], "no batch waits for the onload any more"


def test_host_hit_without_room_is_matched_on_the_device_only():
    with opened(4, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 4))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        running = Request("b", prompt(2, 3))
        start(manager, running)
        again = Request("c", prompt(1, 4, more=1))
        manager.match_prefix(again)
        found = again.match_result
        assert (found.matched_device_nums, found.matched_host_nums) == (1, 0)
        assert again.cache_swap_metadata == []


@pytest.mark.parametrize(("used", "matched"), [(3, 1), (4, 0)])
def test_host_hit_ends_where_no_block_may_be_written_before_the_next_step(used, matched):
    device = ScriptedDevice()
    device.computes_in_stream = True
    options = {"regions": regions_of(tensors(4)), "device": device}
    with opened(4, 8, options, write_policy="write_through") as manager:
        engine = manager.engine
        serve(manager, "a", prompt(1, 3, more=1))
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)
        manager.free_all_device_blocks()
        with engine.match([0], read=False, write=False) as other:
            other.allocate(used * BLOCK).result()  # given back in the step that is open
        again = Request("c", prompt(1, 3, more=1))
        manager.match_prefix(again, True)
        result = again.match_result
        assert (result.matched_device_nums, result.matched_host_nums) == (0, matched)
        assert len(result.device_block_ids) == matched
        assert manager.can_allocate_device_blocks(4 - matched)
        assert len(manager.allocate_device_blocks(again, 4 - matched)) == 4 - matched
        finish(manager, again)


def test_ended_request_gives_its_blocks_back_after_its_onload(monkeypatch):
    """Its onload is not cancelled: a batch may wait for it."""
    device = ScriptedDevice()
    gate = device.hold("onload", copy=0, layer=1)
    options = {"regions": regions_of(tensors(8)), "device": device}
    with opened(8, 8, options, write_policy="write_through") as manager:
        engine = manager.engine
        serve(manager, "a", prompt(1, 3, more=1))
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)
        manager.free_all_device_blocks()
        again = Request("b", prompt(1, 3, more=1))
        start(manager, again)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, again)
        manager.issue_pending_backup_to_batch_request()
        assert engine.statistics().leases == 1
        assert not manager.can_allocate_device_blocks(8)
        gate.open()
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert engine.would_hit(prompt(1, 3, more=1)).device_tokens == 3 * BLOCK
        manager.issue_pending_backup_to_batch_request()
        assert engine.statistics().leases == 0
        counts = count_crossings(monkeypatch)
        manager.issue_pending_backup_to_batch_request()
        assert counts == []


def test_only_requests_with_a_failed_onload_have_failed():
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=1, block=1)
    options = {"regions": regions_of(tensors(8)), "device": device}
    with opened(8, 8, options, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3, more=1))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        manager.free_all_device_blocks()
        start(manager, Request("healthy", prompt(2, 1)))
        start(manager, Request("failed", prompt(1, 3, more=1)))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.failed_requests() == ["failed"]
        manager.reset_cache()
        assert manager.failed_requests() == []


def test_b4_13_request_without_a_full_block_matches_nothing():
    with opened(4) as manager:
        serve(manager, "a", [1, 2])
        request = Request("b", [1, 2])
        manager.match_prefix(request)
        assert request.match_result.total_matched_blocks == 0
        assert request.match_result.device_block_ids == []


def test_blocks_that_become_cached_after_the_match_are_not_shared_unseen():
    """The scheduler computes all positions after the match: they must be blocks of its own."""
    with opened(16) as manager:
        late = Request("late", prompt(1, 2))
        manager.match_prefix(late)
        assert late.match_result.total_matched_blocks == 0
        other = serve(manager, "other", prompt(1, 2))
        found = Request("found", prompt(1, 2, more=1))
        manager.match_prefix(found)
        cached = found.match_result.device_block_ids
        assert len(cached) == 2, other
        ids = manager.allocate_device_blocks(late, 2)
        assert not set(ids) & set(cached)


def test_outputs_are_shared_up_to_the_last_token():
    with opened(16) as manager:
        request = Request("a", prompt(1, 1, more=2))
        start(manager, request, 4)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids += [7, 8, 9]  # 9 tokens; the KV of the last one is missing
        finish(manager, request)
        again = Request("b", [*request.tokens, 1, 1, 1, 1])
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 2
        manager.request_finish(again)


def test_outputs_are_private_without_output_caching():
    config = fd_config(16)
    config.cache_config.enable_output_caching = False
    manager = CacheManager(config)
    try:
        request = Request("a", prompt(1, 1, more=2))
        start(manager, request, 4)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids += [7, 8, 9]
        finish(manager, request)
        again = Request("b", [*request.tokens, 1, 1, 1, 1])
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 1
    finally:
        manager.close()


def test_draft_tokens_keep_the_end_of_the_outputs_private():
    with opened(16, speculative=2) as manager:
        request = Request("a", prompt(1, 1, more=2))
        start(manager, request, 4)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids += [7, 8, 9]  # 6 of 9 tokens are certain
        finish(manager, request)
        again = Request("b", [*request.tokens, 1, 1, 1, 1])
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 1


def test_request_that_was_not_computed_leaves_nothing_behind():
    """Preempted in the very ``schedule()`` that took its blocks: no worker has seen them."""
    with opened(16) as manager:
        request = Request("a", prompt(1, 3))
        start(manager, request)
        request.num_computed_tokens = 0
        request.status = Status.PREEMPTED
        manager.request_finish(request)
        again = Request("b", prompt(1, 3, more=1))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 0


def test_blocks_of_a_scheduled_chunk_are_found_by_the_next_schedule_only():
    with opened(16) as manager:
        first = Request("a", prompt(1, 3))
        start(manager, first)
        same = Request("b", prompt(1, 3, more=1))
        manager.match_prefix(same)
        assert same.match_result.total_matched_blocks == 0, "both would compute in one batch"
        manager.request_finish(same)
        manager.issue_pending_backup_to_batch_request()
        manager.match_prefix(same)
        assert same.match_result.total_matched_blocks == 3


def test_blocks_of_a_second_table_keep_later_blocks_private():
    """``extend_block_tables``: the blocks of one allocation are not at their place in the table."""
    with opened(16) as manager:
        request = Request("a", prompt(1, 1))
        start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        second_table = manager.allocate_device_blocks(request, 2)
        request.block_tables += manager.allocate_device_blocks(request, 2)
        request.output_token_ids += list(range(100, 109))
        assert not set(second_table) & set(request.block_tables)
        finish(manager, request)
        manager.recycle_gpu_blocks(second_table, request.request_id)
        assert manager.num_free_device_blocks == 15
        again = Request("b", [*request.tokens, 1])
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 1


# --- multimodal requests --------------------------------------------------------------------------


def images(*positions: tuple[str, int, int]) -> dict:
    return {
        "images": ["pixels"],
        "mm_positions": [SimpleNamespace(offset=p[1], length=p[2]) for p in positions],
        "mm_hashes": [p[0] for p in positions],
    }


def test_b5_9_different_images_share_the_blocks_before_them():
    with opened(32) as manager:
        tokens = prompt(1, 2) + [5] * 6 + prompt(2, 1)
        first = Request("a", tokens, multimodal_inputs=images(("cat", 8, 6)))
        start(manager, first)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, first)
        other = Request("b", tokens, multimodal_inputs=images(("dog", 8, 6)))
        manager.match_prefix(other)
        assert other.match_result.total_matched_blocks == 2
        same = Request("c", [*tokens, 1], multimodal_inputs=images(("cat", 8, 6)))
        manager.match_prefix(same)
        assert same.match_result.total_matched_blocks == 4


@pytest.mark.parametrize(("disable_chunked_mm_input", "matched"), [(False, 3), (True, 2)])
def test_b12_4_match_ends_inside_an_image_only_if_the_model_splits_images(
    disable_chunked_mm_input, matched
):
    config = fd_config(32)
    config.cache_config.disable_chunked_mm_input = disable_chunked_mm_input
    manager = CacheManager(config)
    try:
        tokens = prompt(1, 2) + [5] * 6
        first = Request("a", tokens, multimodal_inputs=images(("cat", 8, 6)))
        start(manager, first)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, first)
        again = Request("b", [*tokens, 1, 2], multimodal_inputs=images(("cat", 8, 6)))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == matched
    finally:
        manager.close()


def test_blocks_of_stores_are_brought_to_host_memory_on_request(tmp_path):
    options = {"stores": [f"disk:{tmp_path}/kv?bytes=4MiB&{STORE_OPTIONS}"], "model": "test"}
    tokens = prompt(1, 3, more=1)
    for expected in (0, 3):
        layers = tensors(4)
        regions = regions_of(layers)
        with opened(4, 8, options | {"regions": regions}, write_policy="write_through") as manager:
            request = Request("a", tokens)
            assert (
                manager.prefetch_storage(request).result(PATIENCE_SECONDS).total == expected * BLOCK
            )
            manager.match_prefix(request, skip_storage=False)
            assert request.match_result.total_matched_blocks == expected
            request.block_tables = list(request.match_result.device_block_ids)
            request.block_tables += manager.allocate_device_blocks(request, 4 - expected)
            request.num_computed_tokens = len(tokens)
            manager.issue_pending_backup_to_batch_request()
            finish(manager, request)
            manager.write_cache_to_storage(request)
            manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)


def test_unshared_request_that_is_matched_again_gives_its_blocks_back():
    with opened(8) as manager:
        request = Request("a", prompt(1, 2), multimodal_inputs={"images": ["pixels"]})
        start(manager, request)
        manager.match_prefix(request)
        assert manager.num_free_device_blocks == 8


@pytest.mark.parametrize("is_slow", [False, True])
def test_blocks_of_stores_are_not_found_after_a_reset(tmp_path, monkeypatch, is_slow):
    """FastDeploy resets the cache when the weights change: stored blocks have the old ones."""
    options = {"stores": [f"disk:{tmp_path}/kv?bytes=4MiB"], "model": "test"}
    regions = regions_of(tensors(4))
    with opened(4, 8, options | {"regions": regions}, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3, more=1))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        if is_slow:

            def updating_weights(timeout, version):
                raise ControlTimeout("transfers did not end")

            with monkeypatch.context() as patch:
                patch.setattr(manager.engine.cache, "updating_weights", updating_weights)
                assert not manager.reset_cache()
            again = Request("b", prompt(1, 3, more=1))
            manager.match_prefix(again)
            assert again.match_result.total_matched_blocks == 0
            manager.request_finish(again)
        assert manager.reset_cache()
        prefetched = manager.prefetch_storage(Request("c", prompt(1, 3, more=1)))
        assert prefetched.result(PATIENCE_SECONDS).total == 0


@pytest.mark.parametrize(
    "inputs",
    [
        {"images": ["pixels"]},
        {"image_feature_urls": ["bos://x"], "mm_positions": [], "mm_hashes": []},
        images(("cat", 2, 6), ("dog", 4, 6)),
        images(("cat", 2, 600)),
        {**images(("cat", 2, 6)), "mm_hashes": []},
    ],
    ids=["no_hashes", "empty_hashes", "overlap", "outside", "lengths"],
)
def test_images_that_cannot_be_told_apart_are_not_shared(inputs):
    with opened(32) as manager:
        tokens = prompt(1, 3)
        first = Request("a", tokens, multimodal_inputs=inputs)
        assert len(start(manager, first)) == 3
        manager.issue_pending_backup_to_batch_request()
        finish(manager, first)
        for again in (
            Request("b", [*tokens, 1], multimodal_inputs=inputs),
            Request("c", [*tokens, 1]),
        ):
            manager.match_prefix(again)
            assert again.match_result.total_matched_blocks == 0


@pytest.mark.parametrize(
    "inputs",
    [
        {"mm_positions": [{"offset": 2, "length": 4}], "mm_hashes": ["cat"]},
        {"mm_positions": [SimpleNamespace(offset=2, length=None)], "mm_hashes": ["cat"]},
        {"mm_positions": [SimpleNamespace(offset="two", length=4)], "mm_hashes": ["cat"]},
        ["cat"],
    ],
    ids=["dict", "none", "text", "list"],
)
def test_images_of_an_unknown_form_are_not_shared_and_harm_no_other_request(inputs, caplog):
    """The match of such a request also commits the others: their tokens must be named in order."""
    with opened(32) as manager:
        decoding = Request("a", prompt(1, 1))
        start(manager, decoding, 8)
        manager.issue_pending_backup_to_batch_request()
        decoding.output_token_ids += [10, 11, 12, 13, 14]
        strange = Request("b", prompt(2, 3), multimodal_inputs=inputs)
        assert len(start(manager, strange)) == 3
        assert "request_not_shared" in caplog.text
        decoding.output_token_ids += [20, 21, 22, 23]
        for request in (decoding, strange):
            finish(manager, request)
        for tokens, num_blocks in (
            ([*decoding.tokens, 1], 3),
            ([*prompt(1, 1), 14, 20, 21, 22, 1], 1),  # not the tokens behind the prompt
            (prompt(2, 3, more=1), 0),
        ):
            again = Request("c", tokens)
            manager.match_prefix(again)
            assert again.match_result.total_matched_blocks == num_blocks
            manager.request_finish(again)


def test_outputs_that_are_no_tokens_end_the_sharing_of_their_request():
    with opened(32) as manager:
        request = Request("a", prompt(1, 1))
        start(manager, request, 8)
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids += [10, 11, 2**31, 13, 14]
        manager.cache_output_blocks(request, BLOCK)
        request.output_token_ids += [20, 21, 22, 23]
        finish(manager, request)
        for wrong in ([14, 20, 21, 22], [20, 21, 22, 23], [10, 11, 12, 13]):
            again = Request("b", [*prompt(1, 1), *wrong, 1])
            manager.match_prefix(again)
            assert again.match_result.total_matched_blocks == 1
            manager.request_finish(again)


def test_empty_multimodal_inputs_are_text():
    with opened(32) as manager:
        first = Request("a", prompt(1, 3), multimodal_inputs={"mm_positions": [], "mm_hashes": []})
        start(manager, first)
        manager.issue_pending_backup_to_batch_request()
        finish(manager, first)
        again = Request("b", prompt(1, 3, more=1))
        manager.match_prefix(again)
        assert again.match_result.total_matched_blocks == 3


# --- statistics and other names -------------------------------------------------------------------


def test_b4_14_other_names_and_numbers_agree():
    with opened(10) as manager:
        start(manager, Request("a", prompt(1, 4)))
        assert len(manager.gpu_free_block_list) == manager.num_free_device_blocks == 6
        assert manager.available_gpu_resource == 0.6
        ids = manager.allocate_gpu_blocks(Request("b", [1]), 2)
        assert len(ids) == 2


def test_b4_16_statistics_and_memory_usage():
    with opened(10, 20) as manager:
        start(manager, Request("a", prompt(1, 4)))
        stats, usage = manager.get_stats(), manager.get_memory_usage()
        assert stats["device_pool"] == {"num_blocks": 10, "available": 6, "used": 4}
        assert stats["host_pool"] == {"num_blocks": 20, "available": 20, "used": 0}
        assert stats["num_free_device_blocks"] == 6
        assert usage["device"]["usage_percent"] == 40.0
        assert usage["host"]["used_blocks"] == 0
        gauges = manager.gauges()
        assert gauges["free_gpu_block_num"] == 6
        assert gauges["max_cpu_block_num"] == 20


def test_b12_5_metrics_count_hits_by_tier():
    with opened(16) as manager:
        serve(manager, "a", prompt(1, 3))
        serve(manager, "b", prompt(1, 3) + prompt(2, 1))
        assert manager.metrics.hit_req_ratio == 0.5
        assert manager.metrics.total_gpu_matched_token_num == 12
        assert manager.gauges()["hit_token_rate"] == 12 / 28
    assert CacheMetrics().hit_token_ratio == 0.0


def test_b4_18_there_is_no_queue_of_backups():
    with opened(8, 8, write_policy="write_through") as manager:
        assert manager.get_pending_backup_count() == 0
        serve(manager, "a", prompt(1, 3))
        manager.check_and_add_pending_backup()
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.get_pending_backup_count() == 0
        assert manager.num_free_host_blocks == 5


def test_b2_9_mapping_needs_success():
    metadata = CacheSwapMetadata(src_block_ids=[1, 2], dst_block_ids=[5, 6])
    assert metadata.mapping == {}
    metadata.success = True
    assert metadata.mapping == {1: 5, 2: 6}
    assert metadata.is_success()


def test_b14_3_batches_merge_their_metadata_in_order():
    batch = BatchRequest()
    batch.append_swap_metadata([CacheSwapMetadata(dst_block_ids=[1], hash_values=["onload:1"])])
    other = BatchRequest()
    request = Request("a", [1])
    request.cache_swap_metadata = [CacheSwapMetadata(dst_block_ids=[2], hash_values=["onload:2"])]
    request.cache_evict_metadata = [CacheSwapMetadata(hash_values=["step:4"])]
    other.add_request(request)
    batch.extend([other, BatchRequest()])
    assert batch.cache_swap_metadata.dst_block_ids == [1, 2]
    assert batch.cache_swap_metadata.hash_values == ["onload:1", "onload:2"]
    assert batch.cache_evict_metadata.hash_values == ["step:4"]
    assert (request.cache_swap_metadata, request.cache_evict_metadata) == ([], [])
    assert (len(batch), list(batch), batch[0]) == (1, [request], request)
    assert batch.has_pending_work
    assert not BatchRequest().has_pending_work


def test_b14_2_batches_are_pickled_without_the_state_of_the_cache():
    with opened(16) as manager:
        serve(manager, "a", prompt(1, 3))
        request = Request("b", prompt(1, 3, more=1))
        start(manager, request)
        batch = BatchRequest()
        batch.add_request(request)
        copy = pickle.loads(pickle.dumps(batch))
        assert copy[0].block_tables == request.block_tables


# --- crossings ------------------------------------------------------------------------------------


def count_crossings(monkeypatch) -> list[int]:
    """Count ``Calls.run`` with at least one call."""
    counts: list[int] = []
    run = Calls.run

    def counting(calls: Calls, **options):
        if len(calls):
            counts.append(len(calls))
        return run(calls, **options)

    monkeypatch.setattr(Calls, "run", counting)
    return counts


def test_step_of_64_decoding_requests_crosses_once(monkeypatch):
    with opened(4_096, decode_blocks=1) as manager:
        requests = [Request(f"r{i}", prompt(i, 2, more=2), 1_000) for i in range(64)]
        for request in requests:
            start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        for request in requests:
            request.output_token_ids.append(1)
        manager.issue_pending_backup_to_batch_request()
        counts = count_crossings(monkeypatch)
        taken = 0
        for step in range(40):
            counts.clear()
            for request in requests:
                request.output_token_ids.append(step)
                request.num_computed_tokens = request.num_total_tokens - 1
                if len(request.block_tables) * BLOCK - request.num_total_tokens <= 0:
                    assert manager.can_allocate_gpu_blocks(1)
                    ids = manager.allocate_gpu_blocks(request, 1)
                    assert len(ids) == 1
                    request.block_tables += ids
                    taken += 1
            manager.issue_pending_backup_to_batch_request()
            manager.check_and_add_pending_backup()
            assert len(counts) == 1, counts
        assert taken == 64 * 10
        tables = [manager.engine.statistics().attention.device.leased]
        assert tables[0] <= 64 * 14


def test_idle_scheduler_does_not_cross(monkeypatch):
    with opened(16) as manager:
        serve(manager, "a", prompt(1, 2))
        counts = count_crossings(monkeypatch)
        for _ in range(3):
            assert manager.issue_pending_backup_to_batch_request() is None
        assert counts == []


def test_step_of_64_new_requests_crosses_twice_per_request(monkeypatch):
    with opened(4_096, batch_tokens=4_096) as manager:
        counts = count_crossings(monkeypatch)
        requests = [Request(f"r{i}", prompt(i, 2, more=2)) for i in range(64)]
        manager.open()
        manager.issue_pending_backup_to_batch_request()
        counts.clear()
        for request in requests:
            manager.match_prefix(request)
            assert manager.can_allocate_gpu_blocks(3)
            request.block_tables = manager.allocate_gpu_blocks(request, 3)
        manager.issue_pending_backup_to_batch_request()
        assert len(counts) == 2 * 64 + 1


# --- wrong use ------------------------------------------------------------------------------------


def test_configuration_without_a_field_is_refused():
    config = fd_config(8)
    del config.cache_config.block_size
    with pytest.raises(ConfigError, match="block_size"):
        CacheManager(config)
    with pytest.raises(ConfigError, match="write_policy"):
        CacheManager(fd_config(8, write_policy="sometimes"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", "sixteen"),
        ("total_block_num", None),
        ("num_cpu_blocks", None),
        ("num_cpu_blocks", 1.5),
        ("write_through_threshold", "often"),
        ("enc_dec_block_num", -1),
        ("prealloc_dec_block_slot_num_threshold", "many"),
    ],
)
def test_configuration_with_a_wrong_number_is_refused(field, value):
    config = fd_config(8)
    setattr(config.cache_config, field, value)
    with pytest.raises(ConfigError, match=f"{field} is {value!r}"):
        CacheManager(config)


@pytest.mark.parametrize("config", [None, SimpleNamespace()])
def test_configuration_without_a_cache_is_refused(config):
    with pytest.raises(ConfigError, match=r"lacks a field: .*cache_config"):
        CacheManager(config)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefill_and_decode_roles_are_refused(role):
    config = fd_config(8)
    config.scheduler_config = SimpleNamespace(splitwise_role=role)
    with pytest.raises(ConfigError, match=f"splitwise_role is '{role}'"):
        CacheManager(config)


def test_verbs_after_close_are_refused():
    with opened(8) as manager:
        request = Request("a", prompt(1, 2))
        start(manager, request)
    manager.close()
    assert not manager.is_initialized()
    for call in (lambda: manager.match_prefix(request), lambda: manager.can_allocate_gpu_blocks(1)):
        with pytest.raises(ClosedError, match="the cache manager is closed"):
            call()
    assert manager.num_free_device_blocks == 8


def test_requests_may_end_after_close():
    """FastDeploy's threads finish requests while another thread closes the manager."""
    with opened(8) as manager:
        request = Request("a", prompt(1, 2))
        start(manager, request)
    manager.request_finish(request)
    manager.cache_output_blocks(request, BLOCK)
    assert manager.failed_requests() == []


def test_without_stores_nothing_is_prefetched():
    with opened(8) as manager:
        assert not manager.prefetch_storage(Request("a", prompt(1, 2)))


def test_finish_of_an_unknown_request_does_nothing():
    with opened(8) as manager:
        manager.request_finish(Request("a", [1]))
        manager.cache_output_blocks(Request("a", [1]), BLOCK)
        assert manager.num_free_device_blocks == 8


@pytest.mark.parametrize("tokens", [[], [2**31], ["a"]])
def test_prompts_that_are_no_tokens_are_refused(tokens):
    with opened(8) as manager:
        with pytest.raises(UsageError):
            manager.match_prefix(Request("a", tokens))
        assert manager.num_free_device_blocks == 8


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


LOG = """
import logging
from types import SimpleNamespace
handler = logging.StreamHandler()
logging.getLogger("fastdeploy").addHandler(handler)
logging.getLogger("fastdeploy").propagate = False
from aiokv.connectors.fastdeploy import CacheController, CacheManager
cache = SimpleNamespace(
    block_size=16, total_block_num=8, num_cpu_blocks=8, enable_prefix_caching=True,
    write_policy="write_through_selective", write_through_threshold=1,
)
model = SimpleNamespace(num_hidden_layers=1, dtype="float16")
config = SimpleNamespace(cache_config=cache, model_config=model)
"""


@pytest.mark.parametrize("made", ["CacheManager(config)", "CacheController(config, path='/x')"])
def test_log_of_fastdeploy_has_lines_of_aiokv(made):
    line = "logging.getLogger('aiokv.stores').warning('store.unavailable')"
    process = subprocess.run(
        [sys.executable, "-c", f"{LOG}\n{made}\n{line}"], capture_output=True, text=True, check=True
    )
    assert "store.unavailable" in process.stderr
