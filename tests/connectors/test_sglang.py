"""HiCacheAiokv with SGLang's classes: its factory, configuration and host pools, on the CPU.

``make test-sglang`` installs SGLang and runs these tests.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError, UsageError
from tests.stores.servers_redis import needs_server, running_server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    HINT = "SGLang is not installed; run `make test-sglang`"
    torch = pytest.importorskip("torch", reason=HINT)
    pytest.importorskip("sglang.srt.mem_cache.pool_host.mha", reason=HINT, exc_type=ImportError)
    from sglang.srt.managers.cache_controller import (
        HiCacheController,
        PrefetchOperation,
        StorageOperation,
    )
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.connectors.sglang import HiCacheAiokv

GIB = 1 << 30  # SGLang wants 10 GiB to be free without a budget
LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 8, 4, 64
KEYS = [f"{number:064x}" for number in range(16)]


def pointers(tensors: tuple[Any, ...]) -> Any:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def host_pool(layout: str = "page_first", dtype: Any = None, heads: int = HEADS) -> Any:
    """Return a host pool of SGLang without a GPU, with different bytes in each page."""
    dtype = dtype or torch.bfloat16
    k, v = (
        tuple(torch.zeros(TOKENS, heads, DIM, dtype=dtype) for _ in range(LAYERS)) for _ in "kv"
    )
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(GIB):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=TOKENS,
        )
    return fill(pool)


def mla_pool(layout: str = "page_first") -> Any:
    rows = tuple(torch.zeros(TOKENS, 1, 12, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        kv_cache_dim=12,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(GIB):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
            host_token_capacity=TOKENS,
        )
    return fill(pool)


def fill(pool: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(1, 100, pool.kv_buffer.shape, generator=generator)
    pool.kv_buffer.copy_(content.to(pool.kv_buffer.dtype))
    return pool


def config(stores: list[str], **changes: Any) -> Any:
    """Return the configuration of one rank; its stores have deadlines that a busy machine keeps."""
    patient = [f"{u}{'&' if '?' in u else '?'}deadline=60&lookup_deadline=60" for u in stores]
    aiokv = {"model": "llama@1", "stores": patient} | changes.pop("aiokv", {})
    extra = {
        "backend_name": "aiokv",
        "module_path": "aiokv.connectors.sglang",
        "class_name": "HiCacheAiokv",
        "interface_v1": changes.pop("interface_v1", 1),
        "aiokv": aiokv,
    }
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "llama", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**(values | changes))


@contextmanager
def attached(storage_config: Any, pool: Any, **side_pools: Any) -> Iterator[HiCacheAiokv]:
    """Make the backend as SGLang's controller does when it attaches one."""
    backend: Any = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    try:
        backend.register_mem_pool_host(pool)
        for name, each in {"kv": pool, **side_pools}.items():
            backend.register_mem_host_pool_v2(each, name)
        backend.on_host_pools_registered()
        yield backend
    finally:
        backend.close()


def indices(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_of(pool: Any, page: int) -> Any:
    return pool.get_data_page(page * PAGE).clone()


def test_the_backend_is_a_storage_of_sglang(tmp_path):
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        assert isinstance(backend, HiCacheStorage)
        assert not type(backend).__abstractmethods__


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_of_each_layout_come_back_after_a_restart(tmp_path, layout):
    stores = [f"disk:{tmp_path}?bytes=4MiB"]
    pool = host_pool(layout)
    expected = [page_of(pool, page) for page in (3, 1, 7)]
    with attached(config(stores), pool) as backend:
        assert backend.batch_set_v1(KEYS[:3], indices(3, 1, 7)) == [True] * 3
        assert backend.batch_exists(KEYS) == 3
    pool.kv_buffer.zero_()
    with attached(config(stores), pool) as backend:
        assert backend.batch_exists(KEYS[:3]) == 3
        assert (backend.exists(KEYS[2]), backend.exists(KEYS[3])) == (True, False)
        assert backend.batch_get_v1(KEYS[:4], indices(2, 9, 4, 5)) == [True, True, True, False]
    assert all(torch.equal(page_of(pool, p), e) for p, e in zip((2, 9, 4), expected, strict=True))
    assert not any(page_of(pool, page).any() for page in (0, 1, 3, 5))


def test_a_call_without_pages_moves_nothing(tmp_path):
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        nothing = torch.zeros(0, dtype=torch.int64)
        assert backend.batch_get_v1([], nothing) == []
        assert backend.batch_set_v1([], nothing) == []
        assert backend.batch_exists([]) == 0
        for call in (backend.batch_get_v1, backend.batch_set_v1):
            with pytest.raises(UsageError, match="0 host indices for 1 pages; a page has 4"):
                call(KEYS[:1], nothing)
            with pytest.raises(UsageError, match="4 host indices for 2 pages; a page has 4"):
                call(KEYS[:2], indices(3))


def test_parts_of_other_sizes_than_at_the_start_are_refused(tmp_path, monkeypatch):
    pool = host_pool()
    with attached(config([f"directory:{tmp_path}"]), pool) as backend:
        addresses, sizes = pool.get_page_buffer_meta(indices(0))
        doubled = (addresses, [2 * size for size in sizes])
        monkeypatch.setattr(pool, "get_page_buffer_meta", lambda _: doubled)
        for call in (backend.batch_get_v1, backend.batch_set_v1):
            with pytest.raises(UsageError, match="the parts of each page must have"):
                call(KEYS[:1], indices(0))


def controller(backend: HiCacheAiokv, pool: Any) -> Any:
    """Return SGLang's controller with what its storage threads use, without a device."""
    made: Any = object.__new__(HiCacheController)
    made.storage_backend = backend
    made.storage_host_pool = pool
    made.page_size = PAGE
    made.page_get_func = made._page_get_zero_copy
    made.page_set_func = made._page_set_zero_copy
    made.prefetch_sync_queue = Queue()
    return made


def test_the_controller_of_sglang_backs_up_and_prefetches(tmp_path):
    pool = host_pool()
    expected = [page_of(pool, page) for page in (3, 1, 7)]
    tokens = list(range(5 * PAGE))
    with attached(config([f"disk:{tmp_path}?bytes=4MiB"]), pool) as backend:
        made = controller(backend, pool)
        hashes = made._storage_hit_query(PrefetchOperation("r0", tokens))
        assert hashes == ([], 0)
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        backup = StorageOperation(indices(3, 1, 7), tokens, hash_value=hashes[:3])
        made._page_backup(backup)
        assert backup.completed_tokens == 3 * PAGE
        pool.kv_buffer.zero_()
        prefetch = PrefetchOperation("r1", tokens)
        prefetch.hash_value, hit_tokens = made._storage_hit_query(prefetch)
        assert (prefetch.hash_value, hit_tokens) == (hashes[:3], 3 * PAGE)
        prefetch.host_indices = indices(2, 9, 4)
        assert made._page_transfer(prefetch) == 3
    assert all(torch.equal(page_of(pool, p), e) for p, e in zip((2, 9, 4), expected, strict=True))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_mla_are_saved_by_one_rank_and_loaded_by_all(tmp_path, layout):
    stores = [f"directory:{tmp_path}"]
    pool = mla_pool(layout)
    expected = page_of(pool, 2)
    first, second = (
        config(stores, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)
    )
    with attached(second, pool) as backend:
        assert backend.batch_set_v1(KEYS[:1], indices(2)) == [True]  # the first rank saves it
        assert not backend.exists(KEYS[0])
    with attached(first, pool) as backend:
        assert backend.batch_set_v1(KEYS[:1], indices(2)) == [True]
    pool.kv_buffer.zero_()
    with attached(second, pool) as backend:
        assert backend.batch_get_v1(KEYS[:1], indices(5)) == [True]
    assert torch.equal(page_of(pool, 5), expected)


def test_pages_as_tensors_are_refused(tmp_path):
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        for call in (backend.get, backend.set, backend.batch_get, backend.batch_set):
            with pytest.raises(UsageError, match="pages in host pools only"):
                call(KEYS[:1], [torch.zeros(8)])


def other(name: str) -> tuple[Any, Any]:
    """Return a change of the configuration, and a pool, whose pages must be others."""
    match name:
        case "model":
            return {"aiokv": {"model": "llama@2"}}, host_pool()
        case "weights":
            return {"aiokv": {"weights_version": "2"}}, host_pool()
        case "rank":
            return {"tp_rank": 1, "tp_size": 2}, host_pool()
        case "size":
            return {"tp_size": 2}, host_pool()
        case "stage":
            return {"pp_rank": 1, "pp_size": 2}, host_pool()
        case "layout":
            return {}, host_pool("page_first_direct")
        case "dtype":
            return {}, host_pool(dtype=torch.float16)
        case "bytes":
            return {"aiokv": {"kv_cache_dtype": "fp8_e5m2"}}, host_pool(dtype=torch.uint8)
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    ["model", "weights", "rank", "size", "stage", "layout", "dtype", "bytes"],
)
def test_pages_of_other_models_ranks_and_layouts_are_missing(tmp_path, name):
    stores = [f"directory:{tmp_path}"]
    pool = host_pool()
    if name == "bytes":
        pool = host_pool(dtype=torch.uint8)
    fp8 = {"aiokv": {"kv_cache_dtype": "fp8_e4m3"}} if name == "bytes" else {}
    with attached(config(stores, **fp8), pool) as backend:
        backend.batch_set_v1(KEYS[:1], indices(0))
    changes, other_pool = other(name)
    with attached(config(stores, **changes), other_pool) as backend:
        assert backend.batch_exists(KEYS[:1]) == 0
        assert backend.batch_get_v1(KEYS[:1], indices(0)) == [False]
    with attached(config(stores, **fp8), pool) as backend:
        assert backend.batch_exists(KEYS[:1]) == 1


def test_pages_of_another_served_name_are_found(tmp_path):
    stores = [f"directory:{tmp_path}"]
    with attached(config(stores, model_name="chat"), host_pool()) as backend:
        backend.batch_set_v1(KEYS[:1], indices(0))
    with attached(config(stores, model_name="chat-large"), host_pool()) as backend:
        assert backend.batch_exists(KEYS[:1]) == 1


def test_variables_that_change_the_order_of_bytes_make_other_pages(tmp_path, monkeypatch):
    stores = [f"directory:{tmp_path}"]
    with attached(config(stores), host_pool()) as backend:
        backend.batch_set_v1(KEYS[:1], indices(0))
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with attached(config(stores), host_pool()) as backend:
        assert backend.batch_exists(KEYS[:1]) == 0


@needs_server
def test_killed_server_is_a_miss(tmp_path):
    pool = host_pool()
    with (
        running_server(tmp_path / "redis") as server,
        attached(config([server.url]), pool) as backend,
    ):
        assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True] * 2
        server.kill()
        assert backend.batch_exists(KEYS[:2]) == 0
        assert backend.batch_get_v1(KEYS[:2], indices(4, 5)) == [False] * 2
        assert backend.batch_set_v1(KEYS[2:4], indices(2, 3)) == [False] * 2


def test_corrupt_object_is_a_miss(tmp_path):
    pool = host_pool()
    with attached(config([f"directory:{tmp_path}"]), pool) as backend:
        backend.batch_set_v1(KEYS[:1], indices(0))
        object_bytes = page_of(pool, 0).nbytes // HEADS
        file = next(p for p in tmp_path.rglob("*") if p.stat().st_size == object_bytes + 64)
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
        assert backend.batch_get_v1(KEYS[:1], indices(3)) == [False]
        assert backend.statistics()[0].wrong_blocks == 1


def test_metrics_count_pages_and_gibibytes_per_second(tmp_path):
    with attached(
        config([f"directory:{tmp_path}"], enable_storage_metrics=True), host_pool()
    ) as backend:
        backend.batch_set_v1(KEYS[:3], indices(0, 1, 2))
        backend.batch_get_v1(KEYS[:2], indices(4, 5))
        metrics = backend.get_stats()
        assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [2])
        assert min(*metrics.backup_bandwidth, *metrics.prefetch_bandwidth) > 0
        assert backend.get_stats().backup_pgs == []
        assert backend.statistics()[0].saved_blocks == 3 * HEADS  # one object per head
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        assert backend.get_stats() is None


def test_clearing_is_refused(tmp_path):
    with (
        attached(config([f"directory:{tmp_path}"]), host_pool()) as backend,
        pytest.raises(UsageError, match="aiokv does not clear a store"),
    ):
        backend.clear()


def test_disk_stores_of_ranks_have_paths_of_their_own(tmp_path):
    stores = [f"disk:{tmp_path}/{{rank}}?bytes=1MiB"]
    with attached(config(stores, tp_rank=1, tp_size=2, dp_rank=3), host_pool()):
        assert (tmp_path / "dp3-pp0-cp0-tp1").is_dir()


@pytest.mark.parametrize(
    ("changes", "pool", "message"),
    [
        ({"aiokv": {"store": []}}, host_pool, "unknown field `store`"),
        ({"aiokv": {"model": ""}}, host_pool, "model or stores is empty"),
        ({"interface_v1": 0}, host_pool, '"interface_v1" is not set'),
        ({"aiokv": {"model": 3}}, host_pool, "Expected `str`, got `int`"),
        ({"aiokv": {"stores": ["ftp:/x"]}}, host_pool, "the scheme 'ftp'"),
        ({"is_mla_model": True, "tp_size": 2}, mla_pool, "all ranks load what one rank saves"),
        ({"tp_size": 2}, host_pool, "a disk store belongs to one rank, and there are 2 ranks"),
        ({}, lambda: host_pool(dtype=torch.uint8), "kv_cache_dtype is missing"),
        ({}, lambda: host_pool("page_unified"), "the layout 'page_unified' of the host pool"),
    ],
)
def test_wrong_configurations_are_refused_with_what_to_do(tmp_path, changes, pool, message):
    wrong = config([f"disk:{tmp_path}?bytes=1MiB"], **changes)
    with pytest.raises(ConfigError, match=message), attached(wrong, pool()):
        pass


def test_release_without_adapters_in_its_hashes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("aiokv.connectors.sglang.version", lambda name: "0.5.19")
    with (
        pytest.raises(ConfigError, match=r"SGLang 0\.5\.19 hashes only the tokens.*is 0\.5\.20"),
        attached(config([f"directory:{tmp_path}"]), host_pool()),
    ):
        pass


def test_release_built_from_sources_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr("aiokv.connectors.sglang.version", lambda name: "0.0.0.dev1+g1234")
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        assert not backend.exists(KEYS[0])


def test_pages_need_a_host_pool(tmp_path):
    backend: Any = StorageBackendFactory.create_backend(
        "dynamic", config([f"directory:{tmp_path}"]), None
    )
    with pytest.raises(UsageError, match="the host pool 'kv' is not registered"):
        backend.batch_exists(KEYS)
    assert backend.statistics() == []
    backend.close()
