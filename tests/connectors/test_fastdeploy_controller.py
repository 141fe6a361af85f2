"""``CacheController`` in a worker: tensors by layer and role, batches, and the end."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.connectors.fastdeploy import (
    BatchRequest,
    CacheController,
    CacheManager,
    CacheSwapMetadata,
    LayerDoneCounter,
)
from aiokv.connectors.fastdeploy.caches import cache_name, regions_of
from aiokv.errors import (
    ConfigError,
    ControlTimeout,
    LayoutError,
    LeaseError,
    TransferError,
    UsageError,
)
from aiokv.ranks import RankGroup
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_server import (
    BLOCK,
    LAYERS,
    Backend,
    Request,
    Server,
    Status,
    fd_config,
    next_token,
)
from tests.harness.patience import STORE_OPTIONS

if TYPE_CHECKING:
    from pathlib import Path


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


class Shapes:
    """Attention backend that only names the shapes of its tensors, as those of FastDeploy do."""

    def __init__(self, *shapes: list[int]) -> None:
        self.shapes = shapes

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return tuple([max_num_blocks, *shape] if shape else [] for shape in self.shapes)


KEY = [2, BLOCK, 8]


@pytest.mark.parametrize(
    ("shapes", "quantization", "expected"),
    [
        ((KEY, KEY), None, {"key": (KEY, "float16"), "value": (KEY, "float16")}),
        ((KEY, []), None, {"key": (KEY, "float16")}),
        ((KEY, [], [BLOCK, 5]), None, {"key": (KEY, "uint8"), "indexer": ([BLOCK, 5], "uint8")}),
        ((KEY, KEY), "int4_zp", {"key": (KEY, "uint8"), "value": (KEY, "uint8")}),
        (
            (KEY, KEY),
            "block_wise_fp8",
            {
                "key": (KEY, "uint8"),
                "value": (KEY, "uint8"),
                "key_scale": (KEY[:2], "float32"),
                "value_scale": (KEY[:2], "float32"),
            },
        ),
        (
            (KEY, []),
            "block_wise_fp8",
            {"key": (KEY, "uint8"), "key_scale": (KEY[:2], "float32")},
        ),
    ],
    ids=["plain", "mla", "dsa", "int4", "fp8", "mla_fp8"],
)
def test_tensors_are_created_in_the_shapes_of_the_attention_backend(
    monkeypatch, shapes, quantization, expected
):
    paddle = SimpleNamespace(
        full=lambda shape, fill_value, dtype: np.full(shape, fill_value, dtype),
        get_default_dtype=lambda: "float32",
    )
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    config = fd_config(8)
    config.model_config.dtype = "float16"
    config.quant_config = SimpleNamespace(kv_cache_quant_type=quantization)
    controller = CacheController(config, source=object())
    created = controller.initialize_kv_cache(Shapes(*shapes), 8)
    found = [(list(tensor.shape), str(tensor.dtype)) for tensor in created]
    assert found == [([8, *shape], dtype) for shape, dtype in expected.values()] * LAYERS
    assert list(controller.get_kv_caches())[: len(expected)] == [
        cache_name(role, 0, 0, 0) for role in expected
    ]


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
    with pytest.raises(UsageError, match=f"at most {LAYERS}|between 0 and {LAYERS}"):
        counter.wait_for_layer(LAYERS + 1)
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


class Serving:
    """A manager and the controller of one worker, which computes the number 7 everywhere."""

    def __init__(self, folder: Path, stores: tuple[str, ...] = ()) -> None:
        config = fd_config(8, 16, write_policy="write_through")
        self.group = RankGroup(1, path=folder / "ranks", has_stores=bool(stores))
        options = {"model": "test"} if stores else {}
        self.manager = CacheManager(config, ranks=self.group, waits_for_onloads=False, **options)
        self.controller = CacheController(config, path=folder / "ranks", stores=stores)
        self.tensors = self.controller.initialize_kv_cache(Backend(), 8)
        self.num_served = 0

    def serve(self, sends_step: bool = True) -> tuple[int, bool]:
        """Serve one prompt; return its cached blocks, and True if their content is right."""
        self.num_served += 1
        request = Request(f"r{self.num_served}", list(range(3 * BLOCK)))
        self.manager.match_prefix(request)
        cached = request.match_result.total_matched_blocks
        request.block_tables = list(request.match_result.device_block_ids)
        request.block_tables += self.manager.allocate_device_blocks(request, 3 - cached)
        assert len(request.block_tables) == 3
        request.num_computed_tokens = 3 * BLOCK
        batch = BatchRequest()
        batch.add_request(request)
        self.send(self.manager.issue_pending_backup_to_batch_request(), batch)
        counter = self.controller.swap_layer_done_counter
        if counter is not None:
            counter.wait_all(30.0)
        is_right = all(
            (tensor[block] == 7).all()
            for tensor in self.tensors
            for block in request.block_tables[:cached]
        )
        for tensor in self.tensors:
            tensor[request.block_tables[cached:]] = 7
        self.manager.request_finish(request)
        if sends_step:
            self.send(self.manager.issue_pending_backup_to_batch_request(), BatchRequest())
        return cached, is_right

    def wait_until_left(self) -> None:
        """Wait until the manager knows that the worker has freed its tensors."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.group.failure is None:
            assert time.monotonic() < deadline

    def send(self, step: CacheSwapMetadata | None, batch: BatchRequest) -> None:
        if step is not None:
            batch.append_evict_metadata([step])
        self.controller.submit_swap_tasks(batch.cache_evict_metadata, batch.cache_swap_metadata)


@pytest.fixture
def serving(tmp_path):
    with opened(Serving(tmp_path)) as serving:
        yield serving


@contextmanager
def opened(serving: Serving):
    try:
        serving.manager.open()
        yield serving
        engine = serving.manager.engine
        assert engine.call(engine.cache.check_invariants) == []
    finally:
        serving.manager.close()
        serving.controller.stop()


@pytest.mark.parametrize(("tags", "cached"), [(["device"], 2), (["device", "host"], 0)])
def test_workers_replace_their_tensors_while_the_manager_sleeps(serving, tags, cached):
    manager, controller = serving.manager, serving.controller
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]
    running = Request("running", list(range(500, 500 + 3 * BLOCK)))
    manager.match_prefix(running)
    assert len(manager.allocate_device_blocks(running, 3)) == 3
    with pytest.raises(UsageError, match="sleep"):
        controller.initialize_kv_cache(Backend(), 8)
    serving.send(manager.end_requests(), BatchRequest())
    manager.sleep(tags)
    assert manager.num_free_device_blocks == 8
    manager.request_finish(running)
    early = Request("early", list(range(3 * BLOCK)))
    manager.match_prefix(early)
    assert early.match_result.total_matched_blocks == 0
    assert not manager.can_allocate_device_blocks(1)
    assert manager.allocate_device_blocks(early, 1) == []
    manager.request_finish(early)
    controller.free_gpu_cache()
    controller.free_gpu_cache()
    assert controller.get_kv_caches() == {}
    with pytest.raises(UsageError, match="rank 0: wake_up: regions is None"):
        manager.wakeup()
    serving.tensors = controller.initialize_kv_cache(Backend(), 8)
    manager.wakeup()
    assert [serving.serve(), serving.serve()] == [(cached, True), (2, True)]


def test_a_wakeup_needs_tensors_of_the_same_layout(serving):
    serving.serve()
    serving.send(serving.manager.end_requests(), BatchRequest())
    serving.manager.sleep()
    serving.controller.free_gpu_cache()
    serving.controller.initialize_kv_cache(Backend(), 4)
    with pytest.raises(UsageError, match="rank 0: wake_up: the tensors of regions hold 4 blocks"):
        serving.manager.wakeup()
    serving.tensors = serving.controller.initialize_kv_cache(Backend(), 8)
    serving.manager.wakeup()
    assert serving.serve() == (0, True)


def test_an_update_of_the_weights_drops_all_blocks(serving):
    manager = serving.manager
    serving.send(manager.end_requests(), BatchRequest())  # without requests
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]
    serving.send(manager.end_requests(), BatchRequest())
    with manager.updating_weights(version="2"):
        assert not manager.can_allocate_device_blocks(1)
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]


def test_sleep_names_the_step_that_the_workers_have_not_closed(serving):
    serving.serve()
    step = serving.manager.end_requests()
    with pytest.raises(ControlTimeout, match="step"):
        serving.manager.sleep(timeout=0.0)
    serving.send(step, BatchRequest())
    serving.manager.sleep()
    serving.controller.free_gpu_cache()


@pytest.mark.parametrize("sends_step", [True, False])
def test_fastdeploy_puts_workers_to_sleep_with_its_own_requests(serving, sends_step):
    """``common_engine`` resets the cache, and the workers free and create their tensors."""
    manager, controller = serving.manager, serving.controller
    assert [serving.serve(), serving.serve(sends_step)] == [(0, True), (2, True)]
    running = Request("running", list(range(500, 500 + 3 * BLOCK)))
    manager.match_prefix(running)
    assert len(manager.allocate_device_blocks(running, 3)) == 3
    assert manager.reset_cache(), "a copy waits for a step that the workers have not closed"
    assert manager.num_free_device_blocks == manager.num_gpu_blocks
    manager.request_finish(running)
    assert manager.reset_cache()
    controller.free_gpu_cache()
    serving.wait_until_left()
    assert manager.reset_cache(), "nothing is cached"
    assert manager.issue_pending_backup_to_batch_request() is None
    assert controller.get_kv_caches() == {}
    serving.tensors = controller.initialize_kv_cache(Backend(), 8)
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]


def test_workers_that_free_their_tensors_take_the_blocks_of_running_requests(serving):
    """As in ``/clear_load_weight``, of which the scheduler learns nothing."""
    manager, controller = serving.manager, serving.controller
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]
    running = Request("running", list(range(500, 500 + 2 * BLOCK)))
    manager.match_prefix(running)
    running.block_tables = manager.allocate_device_blocks(running, 2)
    controller.free_gpu_cache()
    serving.wait_until_left()
    serving.tensors = controller.initialize_kv_cache(Backend(), 8)
    assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]
    assert manager.failed_requests() == ["running"]
    with pytest.raises(LeaseError, match="'running' has lost its blocks"):
        manager.allocate_device_blocks(running, 1)
    manager.request_finish(running)
    manager.match_prefix(running)
    assert len(manager.allocate_device_blocks(running, 3)) == 3


def test_blocks_of_stores_are_not_found_after_workers_have_freed_their_tensors(tmp_path):
    """FastDeploy frees tensors for new weights, and does not tell the manager."""
    store = f"disk:{tmp_path}/kv?bytes=4MiB&{STORE_OPTIONS}"
    with opened(Serving(tmp_path, (store,))) as serving:
        manager, controller = serving.manager, serving.controller
        engine = manager.engine
        found = Request("found", list(range(3 * BLOCK)))
        assert serving.serve() == (0, True)
        engine.call(engine.cache.drain, timeout=PATIENCE_SECONDS)
        engine.call(engine.cache.reset, timeout=PATIENCE_SECONDS)
        assert manager.prefetch_storage(found).result(PATIENCE_SECONDS).total == 2 * BLOCK
        controller.free_gpu_cache()
        serving.wait_until_left()
        assert manager.prefetch_storage(found) is None, "no request waits for workers that left"
        serving.tensors = controller.initialize_kv_cache(Backend(), 8)
        assert manager.can_allocate_device_blocks(1)
        assert manager.prefetch_storage(found).result(PATIENCE_SECONDS).total == 0
        assert [serving.serve(), serving.serve()] == [(0, True), (2, True)]


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
    with Server(6, 12, device, "layers", write_policy="write_through") as server:
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
    assert counter.wait_for_layer(1, timeout=0.0)
    assert counter.wait_all(timeout=0.0)
    counter.gpu_wait(0, None)
    counter.raise_for_error()
    with pytest.raises(UsageError, match="layer_idx is -1"):
        counter.gpu_wait(-1, None)


def test_preemption_does_not_cancel_an_onload_that_a_batch_waits_for():
    """The workers may get to the batch after the scheduler has preempted its request."""
    device = ScriptedDevice()
    with Server(6, 12, device, "layers", write_policy="write_through") as server:
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
