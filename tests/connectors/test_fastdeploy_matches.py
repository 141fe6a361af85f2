"""Verbs of ``CacheManager`` for prefixes, of text and of images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import (
    CacheLevel,
    CacheManager,
)
from aiokv.errors import ControlTimeout
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
    Status,
    fd_config,
    regions_of,
    tensors,
)
from tests.harness.patience import STORE_OPTIONS

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
