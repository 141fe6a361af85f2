"""Verbs of ``CacheManager`` one by one: statistics, crossings, wrong use."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheController,
    CacheManager,
    CacheMetrics,
    CacheSwapMetadata,
)
from aiokv.connectors.fastdeploy.metrics import PUBLISH_CALLS
from aiokv.errors import ClosedError, ConfigError, UsageError
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_requests import count_crossings, opened, prompt, serve, start
from tests.connectors.fastdeploy_server import (
    BLOCK,
    Backend,
    Request,
    fd_config,
)

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


def test_hit_rates_reach_the_gauges_of_fastdeploy(monkeypatch):
    sets: list[tuple[str, float]] = []

    class Gauge:
        def __init__(self, name: str) -> None:
            self.set = lambda value: sets.append((name, value))

    class Metrics:
        def __getattr__(self, name: str) -> Gauge:
            return Gauge(name)

    metrics = SimpleNamespace(main_process_metrics=Metrics())
    monkeypatch.setitem(sys.modules, "fastdeploy.metrics.metrics", metrics)
    with opened(8) as manager:
        manager.issue_pending_backup_to_batch_request()
        assert sets == []
        serve(manager, "a", prompt(1, 2))
        serve(manager, "b", prompt(1, 2))
        for _ in range(PUBLISH_CALLS):
            manager.issue_pending_backup_to_batch_request()
        published = len(sets)
        assert dict(sets) == {
            "hit_req_rate": 0.5,
            "hit_token_rate": 0.25,
            "gpu_hit_token_rate": 0.25,
            "cpu_hit_token_rate": 0.0,
        }
        for _ in range(PUBLISH_CALLS):
            manager.issue_pending_backup_to_batch_request()
        assert len(sets) == published


def test_manager_and_worker_find_the_same_socket(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = fd_config(8)
    with pytest.raises(ConfigError, match="local_engine_worker_queue_port"):
        CacheManager.for_workers(config, 1)
    config.parallel_config = SimpleNamespace(local_engine_worker_queue_port=6_001)
    paddle = SimpleNamespace(is_compiled_with_cuda=lambda: False)
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    manager = CacheManager.for_workers(config, 1, reserve_blocks=1)
    controller = CacheController.for_worker(config, 0, 0)
    controller.initialize_kv_cache(Backend(), 8)
    try:
        manager.open()
        assert manager.engine.config.reserve_blocks == 1
        controller.wait_ready(PATIENCE_SECONDS)
        (socket,) = tmp_path.glob("*/*.sock")
        assert socket.parent.stat().st_mode & 0o777 == 0o700
    finally:
        manager.close()
        controller.stop()
    config.nnode = 2
    with pytest.raises(ConfigError, match="nnode is 2"):
        CacheManager.for_workers(config, 16)


def test_b4_18_there_is_no_queue_of_backups():
    with opened(8, 8, write_policy="write_through") as manager:
        serve(manager, "a", prompt(1, 3))
        manager.check_and_add_pending_backup()
        manager.engine.call(manager.engine.cache.drain, timeout=PATIENCE_SECONDS)
        assert manager.num_free_host_blocks == 5


def test_b2_9_mapping_needs_success():
    metadata = CacheSwapMetadata(src_block_ids=[1, 2], dst_block_ids=[5, 6])
    assert metadata.mapping == {}
    metadata.success = True
    assert metadata.mapping == {1: 5, 2: 6}


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


def test_step_of_64_decoding_requests_crosses_once_if_blocks_change(monkeypatch):
    with opened(4_096, decode_blocks=1) as manager:
        requests = [Request(f"r{i}", prompt(i, 2, more=2), 1_000) for i in range(64)]
        for request in requests:
            start(manager, request)
        manager.issue_pending_backup_to_batch_request()
        for request in requests:
            request.output_token_ids.append(1)
        manager.issue_pending_backup_to_batch_request()
        counts = count_crossings(monkeypatch)
        taken = quiet = 0
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
            assert len(counts) <= 1, counts
            quiet += not counts
        assert taken == 64 * 10
        assert quiet >= 20, "a block has 4 positions: two steps of four take or commit blocks"
        tables = [manager.engine.statistics().attention.device.leased]
        assert tables[0] <= 64 * 14


def test_idle_scheduler_does_not_cross(monkeypatch):
    with opened(16) as manager:
        serve(manager, "a", prompt(1, 2))
        counts = count_crossings(monkeypatch)
        for _ in range(3):
            assert manager.issue_pending_backup_to_batch_request() is None
        assert counts == []


def test_step_of_64_new_requests_crosses_once_per_request(monkeypatch):
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
        assert len(counts) == 64, "a match takes the blocks that the scheduler asks for next"


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


def test_unknown_role_is_refused():
    config = fd_config(8)
    config.scheduler_config = SimpleNamespace(splitwise_role="both")
    with pytest.raises(ConfigError, match="splitwise_role is 'both'"):
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
