"""Verbs of ``PrefixCacheManager`` one by one; B12 rows name behaviours of FastDeploy."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from aiokv.connectors.fastdeploy import PrefixCacheManager
from aiokv.errors import ConfigError, UsageError, WouldBlock
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


@contextmanager
def opened(device_blocks: int, host_blocks: int = 0, options: dict | None = None, **fields):
    config = fd_config(device_blocks, host_blocks, **fields)
    manager = PrefixCacheManager(config, 1, "mixed", 0, **(options or {}))
    try:
        yield manager
        assert manager.engine.call(manager.engine.cache.check_invariants) == []
    finally:
        manager.close()


def prompt(seed: int, num_blocks: int, more: int = 0) -> list[int]:
    return [seed * 1_000 + i for i in range(num_blocks * BLOCK + more)]


def serve(manager: PrefixCacheManager, name: str, tokens: list[int]) -> list[int]:
    request = Request(name, tokens)
    ids, num_tokens, _ = manager.request_match_blocks(request, BLOCK)
    more = manager.get_required_block_num(len(tokens) - num_tokens, BLOCK)
    request.block_tables = ids + manager.allocate_gpu_blocks(more, name)
    request.num_computed_tokens = len(tokens)
    manager.update_cache_blocks(request, BLOCK, len(tokens))
    assert request.num_cached_blocks == len(tokens) // BLOCK
    manager.issue_pending_backup_to_batch_request()
    request.status = Status.FINISHED
    table = request.block_tables
    manager.release_block_ids_async(request).result(0.0)
    manager.recycle_gpu_blocks(table[request.num_cached_blocks :], name)
    return table


def test_b12_1_required_blocks():
    with opened(8) as manager:
        assert [manager.get_required_block_num(n, 4) for n in (0, 7, 8)] == [0, 2, 2]


def test_b12_5_match_tells_ids_tokens_and_tiers():
    with opened(4, 8, write_policy="write_through") as manager:
        table = serve(manager, "a", prompt(1, 3, more=1))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        again = Request("b", prompt(1, 3, more=2))
        ids, num_tokens, figures = manager.request_match_blocks(again, BLOCK)
        assert (ids, num_tokens) == (table[:3], 12)
        assert figures["gpu_match_token_num"] == 12
        assert figures["match_gpu_block_ids"] == ids
        assert again.num_cached_blocks == 3
        manager.release_block_ids(again)
        serve(manager, "c", prompt(2, 4))
        ids, num_tokens, figures = manager.request_match_blocks(again, BLOCK)
        assert num_tokens == 12
        assert figures["cpu_match_token_num"] == 12
        assert figures["gpu_recv_block_ids"] == ids
        assert figures["cpu_cache_prepare_time"] >= 0.0
        assert manager.metrics.total_cpu_matched_token_num == 12
        assert manager.metrics.req_count == 4


def test_failed_onload_shortens_the_match():
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=0, block=0)
    regions = regions_of(tensors(4))
    options = {"regions": regions, "device": device}
    with opened(4, 8, options, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3, more=1))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        serve(manager, "b", prompt(2, 4))
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        again = Request("c", prompt(1, 3, more=2))
        ids, num_tokens, _ = manager.request_match_blocks(again, BLOCK)
        assert (ids, num_tokens) == ([], 0)
        assert len(manager.allocate_gpu_blocks(4, "c")) == 4


def test_blocks_by_number_of_an_unknown_request_are_never_shared():
    with opened(8) as manager:
        ids = manager.allocate_gpu_blocks(3, "a")
        assert len(set(ids)) == 3
        assert len(manager.gpu_free_block_list) == 5
        assert manager.available_gpu_resource == 5 / 8
        manager.recycle_gpu_blocks(ids[2], "a")
        assert len(manager.gpu_free_block_list) == 6
        manager.recycle_gpu_blocks(ids[:2])
        assert len(manager.gpu_free_block_list) == 8
        manager.recycle_gpu_blocks(ids, "a")  # given back already
        assert len(manager.gpu_free_block_list) == 8


def test_recycling_other_blocks_than_the_last_is_refused():
    with opened(8) as manager:
        ids = manager.allocate_gpu_blocks(3, "a")
        for wrong in (ids[:1], [7], [*ids, 7]):
            with pytest.raises(UsageError, match="cannot give blocks"):
                manager.recycle_gpu_blocks(wrong, "a")
        assert len(manager.gpu_free_block_list) == 5


def test_room_with_and_without_eviction():
    with opened(8) as manager:
        serve(manager, "a", prompt(1, 6))
        assert manager.can_allocate_gpu_blocks(8)
        assert manager.can_allocate_gpu_blocks(2, try_free_gpu_blocks=False)
        assert not manager.can_allocate_gpu_blocks(3, try_free_gpu_blocks=False)
        with pytest.raises(WouldBlock):
            manager.allocate_gpu_blocks(9, "b")


def test_match_and_blocks_of_a_request_in_one_call():
    with opened(8) as manager:
        serve(manager, "a", prompt(1, 3))
        request = Request("b", prompt(1, 2, more=3))
        common, unique, hits = manager.request_block_ids(request, BLOCK, 4)
        assert (len(common), len(unique)) == (2, 2)
        assert hits == {"gpu_cache_blocks": 2, "cpu_cache_blocks": 0}
        large = Request("c", prompt(1, 9))
        with pytest.raises(WouldBlock):
            manager.request_block_ids(large, BLOCK, 4)
        manager.release_block_ids(request)
        assert manager.can_allocate_gpu_blocks(8)


def test_b12_16_outputs_are_shared_by_the_next_match():
    with opened(16) as manager:
        request = Request("a", prompt(1, 1, more=2))
        request.block_tables = manager.request_match_blocks(request, BLOCK)[0]
        request.block_tables += manager.allocate_gpu_blocks(3, "a")
        request.num_computed_tokens = 6
        manager.issue_pending_backup_to_batch_request()
        request.output_token_ids += [7, 8, 9]
        again = Request("b", [*request.tokens, 1])
        assert manager.engine.would_hit(again.tokens).total == 0
        assert manager.request_match_blocks(again, BLOCK)[1] == 8


def test_reset_and_launch():
    with opened(8) as manager:
        assert manager.launch_cache_manager(cache_config=manager.cache_config) == []
        assert manager.cache.is_initialized()
        serve(manager, "a", prompt(1, 3))
        assert manager.update_cache_config(fd_config(12).cache_config)
        assert (manager.num_gpu_blocks, manager.num_cpu_blocks) == (12, 0)
        manager.reset()
        assert len(manager.gpu_free_block_list) == 12


def test_other_roles_are_refused():
    with pytest.raises(ConfigError, match="splitwise_role is 'prefill'"):
        PrefixCacheManager(fd_config(8), 1, "prefill")
