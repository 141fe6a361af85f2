"""``CacheController`` in a worker: tensors by layer and role, batches, and the end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv import ConfigError, LayoutError, TransferError, UsageError
from aiokv.connectors.fastdeploy import (
    CacheController,
    CacheManager,
    CacheSwapMetadata,
    LayerDoneCounter,
)
from aiokv.connectors.fastdeploy.caches import cache_name, regions_of
from aiokv.ranks import RankGroup
from aiokv.testing import ScriptedDevice
from tests.connectors.fastdeploy_server import (
    LAYERS,
    Backend,
    Request,
    Server,
    Status,
    fd_config,
    next_token,
)


def test_a_manager_or_a_path_is_required(tmp_path):
    for wrong in ({}, {"path": tmp_path / "ranks", "source": object()}):
        with pytest.raises(ConfigError, match="exactly one"):
            CacheController(fd_config(8), **wrong)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        CacheController(SimpleNamespace(model_config=SimpleNamespace()), source=object())


def test_tensors_have_the_names_of_fastdeploy():
    config = fd_config(8)
    config.parallel_config = SimpleNamespace(tensor_parallel_size=2)
    controller = CacheController(config, 3, 5, source=object())
    created = controller.initialize_kv_cache(Backend(), 8)
    assert len(created) == LAYERS
    assert list(controller.get_kv_caches()) == [
        "key_caches_0_rank1.device5",
        "key_caches_1_rank1.device5",
    ]
    controller.initialize_kv_cache(Backend(), 9)
    assert all(len(tensor) == 9 for tensor in controller.get_kv_caches().values())
    controller.free_gpu_cache()
    assert controller.get_kv_caches() == {}
    assert controller.get_stats() == {"initialized": True, "num_layers": LAYERS}
    with pytest.raises(ConfigError, match="cache role is 'query'"):
        cache_name("query", 0, 0, 0)


def test_layers_may_lack_a_role_and_draft_layers_may_have_more_blocks():
    """Scales of quantised caches, no value cache of MLA, extra layers of MTP."""
    key = np.zeros((8, 4, 16), np.uint8)
    scale = np.zeros((8, 4), np.float32)
    layers = [
        {"key": key, "value": None, "key_scale": scale},
        {"key": key, "value": None, "key_scale": scale, "indexer": np.zeros((8, 4), np.uint8)},
        {"key": np.zeros((10, 4, 16), np.uint8), "value": None, "key_scale": scale},
    ]
    regions = regions_of(layers)
    assert (regions.num_layers, regions.num_blocks) == (3, 8)
    assert list(regions.names) == ["key", "key_scale", "indexer"]
    with pytest.raises(LayoutError, match="7 blocks"):
        regions_of([*layers, {"key": np.zeros((7, 4, 16), np.uint8)}])
    with pytest.raises(LayoutError, match="no cache tensors"):
        regions_of([{"key": None}])


def test_rank_starts_with_the_last_layer(tmp_path):
    config = fd_config(8)
    config.speculative_config.num_extra_cache_layer = 1
    controller = CacheController(config, path=tmp_path / "ranks")
    controller.initialize_kv_cache(Backend(), 8)
    with pytest.raises(UsageError, match="no cache tensors are registered"):
        controller.submit_swap_tasks(None, CacheSwapMetadata(hash_values=["onload:1"]))
    assert controller.submit_swap_tasks(CacheSwapMetadata(hash_values=["step:1"]), None) is None
    controller.initialize_mtp_kv_cache(Backend(), 9, 1, LAYERS)
    counter = controller.submit_swap_tasks(None, CacheSwapMetadata(hash_values=["onload:1"]))
    assert counter.get_num_layers() == LAYERS + 1
    assert controller.reset_cache()
    assert controller.swap_layer_done_counter is None
    controller.initialize_kv_cache(Backend(), 8)  # after a profile run
    controller.stop()
    controller.stop()


def test_tensors_that_the_engine_uses_cannot_be_replaced(tmp_path):
    config = fd_config(8)
    manager = CacheManager(config, ranks=RankGroup(1, path=tmp_path / "ranks"))
    assert manager.num_free_device_blocks == len(manager.gpu_free_block_list) == 8
    assert manager.issue_pending_backup_to_batch_request() is None
    assert not manager.is_initialized(), "the workers need not be there yet"
    controller = CacheController(config, path=tmp_path / "ranks")
    controller.initialize_kv_cache(Backend(), 8)
    try:
        manager.open()
        controller.wait_ready(30.0)
        with pytest.raises(UsageError, match="uses the cache tensors already"):
            controller.initialize_kv_cache(Backend(), 8)
        assert controller.get_stats()["swap_in"].done == 0
    finally:
        manager.close()
        controller.free_gpu_cache()


def test_tensors_that_exist_are_registered(tmp_path):
    controller = CacheController(fd_config(8), path=tmp_path / "ranks")
    layers = [{"key": np.zeros((8, 4, 3), np.int64)} for _ in range(LAYERS)]
    controller.register_kv_cache(layers)
    names = ["key_caches_0_rank0.device0", "key_caches_1_rank0.device0"]
    assert list(controller.get_kv_caches()) == names
    assert controller.get_kv_caches()[names[1]] is layers[1]["key"]
    assert controller.get_stats() == {"initialized": True, "num_layers": LAYERS}
    assert count_rank_threads() == 1
    controller.free_gpu_cache()
    assert count_rank_threads() == 0
    assert controller.get_stats()["initialized"] is False


def count_rank_threads() -> int:
    return sum(thread.name == "aiokv-rank" for thread in threading.enumerate())


def test_counter_raises_the_error_of_an_onload():
    device = ScriptedDevice()
    device.fail("onload", copy=0, layer=1, block=1)
    with Server(6, 12, device, write_policy="write_through") as server:
        manager = server.manager
        tokens = [1_000 + i for i in range(13)]
        server.scheduler.add(Request("a", tokens, 1))
        server.scheduler.run()
        server.drain()
        manager.free_all_device_blocks()
        again = Request("b", tokens, 1)
        manager.match_prefix(again)
        counter = server.worker.controller.submit_swap_tasks(None, again.cache_swap_metadata[0])
        server.drain()
        with pytest.raises(TransferError):
            counter.raise_for_error()
        with pytest.raises(TransferError):
            counter.wait_all(timeout=None)
        manager.request_finish(again)


def test_counter_without_onloads_is_done():
    counter = LayerDoneCounter(2, [])
    assert counter.is_all_done()
    assert counter.wait_for_layer(1, timeout=0.0)
    assert counter.wait_all(timeout=0.0)
    assert counter.get_elapsed_time() >= 0.0
    counter.gpu_wait(0, None)
    counter.raise_for_error()
    with pytest.raises(UsageError, match="layer_idx is -1"):
        counter.gpu_wait(-1, None)


def test_preemption_does_not_cancel_an_onload_that_a_batch_waits_for():
    """The workers may get to the batch after the scheduler has preempted its request."""
    device = ScriptedDevice()
    with Server(6, 12, device, write_policy="write_through") as server:
        scheduler, manager = server.scheduler, server.manager
        tokens = [1_000 + i for i in range(13)]
        scheduler.add(Request("a", tokens, 1), Request("b", [5_000 + i for i in range(21)], 1))
        scheduler.run()
        server.drain()
        gate = device.hold("onload", copy=0, layer=1)
        again = Request("c", tokens, 1)
        scheduler.add(again)
        batch = scheduler.schedule()
        assert again.match_result.matched_host_nums == 3
        again.status = Status.PREEMPTED
        manager.request_finish(again)
        assert not manager.can_allocate_device_blocks(6), "the blocks are still written"
        gate.open()
        assert server.worker.run(batch) == [("c", next_token(tokens))]
        assert manager.can_allocate_device_blocks(6)
        assert manager.get_stats()["device_pool"]["used"] < 6
        scheduler.running.clear()
