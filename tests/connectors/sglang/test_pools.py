"""HiCacheAiokv with SGLang's host pools of hybrid models, and with its controller for them."""

from __future__ import annotations

import random
import types
import warnings
from queue import Queue
from typing import Any

import pytest

from aiokv.errors import ConfigError, UsageError
from tests.connectors.test_sglang import (  # skips these tests without SGLang
    GIB,
    KEYS,
    LAYERS,
    PAGE,
    TOKENS,
    attached,
    config,
    host_pool,
    indices,
    mla_pool,
    torch,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
        HybridCacheController,
        PrefetchOperation,
        StorageOperation,
    )
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.utils import get_storage_hash_str

SLOTS = 16  # pages of each pool, and recurrent states
CPU = torch.device("cpu")


def state_pool(layout: str = "page_first") -> Any:
    """Return a pool of recurrent states: a page is a state of all layers."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, SLOTS, 2, 8, 4),
        conv=(torch.zeros(LAYERS, SLOTS, 12, 3, dtype=torch.bfloat16),),
    )
    with host_memory_budget_scope(GIB):
        return MambaPoolHost(info, 1.0, 0, device_capacity=SLOTS, pin_memory=False, layout=layout)


def indexer_pool(layout: str = "page_first") -> Any:
    """Return the pool of the keys of an indexer, beside a pool of MLA."""
    keys = [torch.zeros(SLOTS, PAGE * 20, dtype=torch.uint8) for _ in range(LAYERS)]
    device_pool = types.SimpleNamespace(
        store_dtype=torch.uint8, start_layer=0, end_layer=LAYERS, layer_num=LAYERS, device="cpu",
        layer_shard_enabled=False, index_k_with_scale_buffer=keys,
    )  # fmt: skip
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device_pool,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=20, dtype=torch.uint8),
        host_pool_builder=None,
    )
    with host_memory_budget_scope(GIB):
        return DSAIndexerPoolHost(decl, mla_pool(layout), pin_memory=False)


def compressed_pool(layout: str = "page_first") -> Any:
    """Return a pool of DeepSeek V4, whose KV pool has indices only."""
    rows = [torch.zeros(SLOTS, 96, dtype=torch.uint8) for _ in range(LAYERS)]
    with host_memory_budget_scope(GIB):
        return DeepSeekV4PagedHostPool("c4", rows, 96, SLOTS, PAGE, layout=layout, pin_memory=False)


FAMILIES: dict[str, tuple[Any, str, Any]] = {
    "windows": (host_pool, "swa", lambda layout: host_pool(layout, heads=1)),
    "state": (host_pool, "mamba", state_pool),
    "indexer": (mla_pool, "indexer", indexer_pool),
    "draft": (host_pool, "draft", lambda layout: host_pool(layout, heads=4)),
    "compressed": (
        lambda layout: LogicalHostPool(TOKENS, PAGE, layout), "deepseek_v4_c4", compressed_pool
    ),
}  # fmt: skip
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def filled(pool: Any, seed: int) -> Any:
    """Fill the pages of a pool with random bytes, by SGLang's own methods."""
    generator = torch.Generator().manual_seed(seed)
    for page in range(SLOTS):
        content = pool.get_dummy_flat_data_page()
        raw = torch.randint(0, 256, (content.nbytes,), dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(page * pool.page_size, raw.view(content.dtype))
    return pool


def content_of(pool: Any, page: int) -> bytes:
    """Return the bytes of a page, by SGLang's own methods."""
    content = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(content.contiguous().view(torch.uint8).numpy().tobytes())


def transfer(name: str, pool: Any, pages: tuple[int, ...], keys: list[str]) -> Any:
    places = [torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages]
    return PoolTransfer(name=PoolName(name), host_indices=torch.cat(places), keys=keys)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("store", ["disk:{}?bytes=4MiB", "directory:{}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_of_all_pools_come_back_after_a_restart(tmp_path, family, store, layout):
    settings = config([store.format(tmp_path)], aiokv=FP8)
    make_kv, name, make_side = FAMILIES[family]
    kv, side = make_kv(layout), filled(make_side(layout), 1)
    expected = [content_of(side, page) for page in (3, 1, 7)]
    with attached(settings, kv, **{name: side}) as backend:
        assert backend.batch_set_v1(KEYS[:3], indices(3, 1, 7)) == [True] * 3
        saved = backend.batch_set_v2([transfer(name, side, (3, 1, 7), KEYS[:3])])
        assert saved == {name: [True] * 3}
    filled(side, 2)
    before = [content_of(side, page) for page in range(SLOTS)]
    with attached(settings, kv, **{name: side}) as backend:
        hit = backend.batch_exists_v2(KEYS[:4], [PoolTransfer(name=PoolName(name))])
        assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (3, [1, 2, 3])
        assert hit.extra_pool_hit_pages[name] == 3
        loaded = backend.batch_get_v2([transfer(name, side, (2, 9, 4, 5), KEYS[:4])])
        assert loaded == {name: [True, True, True, False]}
        assert all(backend.batch_get_v1(KEYS[:3], indices(2, 9, 4)))
    assert [content_of(side, page) for page in (2, 9, 4)] == expected
    others = [page for page in range(SLOTS) if page not in (2, 9, 4)]
    assert [content_of(side, page) for page in others] == [before[page] for page in others]


def head_view(pool: Any, page: int) -> Any:
    """Return the elements of a page as a view: K and V, layers, tokens, heads, dimensions."""
    if pool.layout in ("layer_first", "page_first"):
        axis = 2 if pool.layout == "layer_first" else 1
        view = pool.kv_buffer.narrow(axis, page * PAGE, PAGE)
    else:
        view = pool.kv_buffer[:, page]
    orders = {
        "layer_first": (0, 1, 2, 3, 4), "page_first": (0, 2, 1, 3, 4),
        "page_first_direct": (0, 1, 2, 3, 4), "page_head": (0, 3, 2, 1, 4),
    }  # fmt: skip
    return view.permute(orders[pool.layout])


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_servers_of_other_tensor_parallel_sizes_find_the_pages(tmp_path, layout, first, second):
    heads = {"kv": 4, "swa": 8}
    whole = {
        name: head_view(filled(host_pool(layout, heads=number), number), 6)
        for name, number in heads.items()
    }

    def ranks(size: int) -> list[tuple[Any, dict[str, Any]]]:
        return [
            (
                config([f"directory:{tmp_path}"], tp_rank=rank, tp_size=size),
                {name: host_pool(layout, heads=heads[name] // size) for name in heads},
            )
            for rank in range(size)
        ]

    for rank, (settings, pools) in enumerate(ranks(first)):
        with attached(settings, pools["kv"], swa=pools["swa"]) as backend:
            for name, pool in pools.items():
                head_view(pool, 3).copy_(whole[name].chunk(first, dim=3)[rank])
            assert backend.batch_exists(KEYS[:1]) == 0  # a part of the heads is no page
            assert backend.batch_set_v1(KEYS[:1], indices(3)) == [True]
            swa = transfer("swa", pools["swa"], (3,), KEYS[:1])
            assert backend.batch_set_v2([swa]) == {"swa": [True]}
    for rank, (settings, pools) in enumerate(ranks(second)):
        with attached(settings, pools["kv"], swa=pools["swa"]) as backend:
            hit = backend.batch_exists_v2(KEYS[:2], [PoolTransfer(name=PoolName.SWA)])
            assert hit.kv_hit_pages == 1
            assert backend.batch_get_v1(KEYS[:1], indices(5)) == [True]
            swa = transfer("swa", pools["swa"], (5,), KEYS[:1])
            assert backend.batch_get_v2([swa]) == {"swa": [True]}
        for name, pool in pools.items():
            part = whole[name].chunk(second, dim=3)[rank]
            assert head_view(pool, 5).view(torch.int16).equal(part.view(torch.int16))


@pytest.mark.parametrize(
    "changes", [{"tp_lcm_size": 1}, {"tp_size": 16}, {"attn_cp_size": 2}, {"pp_size": 2}]
)
def test_pages_of_another_division_of_the_heads_are_missing(tmp_path, changes):
    stores = [f"directory:{tmp_path}"]
    with attached(config(stores), host_pool(heads=4)) as backend:
        assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]
    heads = 1 if "tp_size" in changes else 4  # with 16 ranks, four of them share a head
    with attached(config(stores, **changes), host_pool(heads=heads)) as backend:
        assert backend.batch_exists(KEYS[:1]) == 0
        assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]
        assert backend.batch_exists(KEYS[:1]) == 1


def test_common_multiple_of_the_tensor_parallel_sizes_sets_the_size_of_objects(tmp_path):
    stores = [f"directory:{tmp_path}"]
    pool = filled(host_pool(heads=12), 1)
    expected = head_view(pool, 0)
    with attached(config(stores, tp_lcm_size=6), pool) as backend:
        assert backend.batch_set_v1(KEYS[:1], indices(0)) == [True]
        assert backend.statistics()[0].saved_blocks == 6
    for size, rank in ((2, 1), (3, 2), (6, 4)):
        part = host_pool(heads=12 // size)
        settings = config(stores, tp_lcm_size=6, tp_size=size, tp_rank=rank)
        with attached(settings, part) as backend:
            assert backend.batch_get_v1(KEYS[:1], indices(3)) == [True]
        loaded = head_view(part, 3).view(torch.int16)
        assert loaded.equal(expected.chunk(size, dim=3)[rank].view(torch.int16))


def test_disk_stores_of_a_rank_keep_one_object_per_page(tmp_path):
    with attached(config([f"disk:{tmp_path}?bytes=4MiB"]), host_pool(heads=4)) as backend:
        assert backend.batch_set_v1(KEYS[:2], indices(0, 1)) == [True] * 2
        assert backend.statistics()[0].saved_blocks == 2


def test_page_without_one_of_its_heads_is_a_miss(tmp_path):
    pool = host_pool(heads=4)
    with attached(config([f"directory:{tmp_path}"]), pool) as backend:
        backend.batch_set_v1(KEYS[:2], indices(0, 1))
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]
        assert len(files) == 8  # two pages of four heads
    files[3].unlink()
    with attached(config([f"directory:{tmp_path}"]), pool) as backend:
        loaded = backend.batch_get_v1(KEYS[:2], indices(8, 9))
        assert backend.batch_exists(KEYS[:2]) == sum(loaded) < 2


def test_states_of_another_tensor_parallel_size_are_missing(tmp_path):
    sizes = (1, 2)
    hits = []
    for size in sizes:
        pools = (host_pool(heads=2 // size), state_pool())
        settings = config([f"directory:{tmp_path}"], tp_size=size)
        with attached(settings, pools[0], mamba=pools[1]) as backend:
            hits.append(backend.batch_exists_v2(KEYS[:1], [last_page(["0"])]).kv_hit_pages)
            backend.batch_set_v1(KEYS[:1], indices(0))
            backend.batch_set_v2([transfer("mamba", pools[1], (0,), KEYS[:1])])
            hits.append(backend.batch_exists_v2(KEYS[:1], [last_page(["0"])]).kv_hit_pages)
    assert hits == [0, 1, 0, 1]


def last_page(keys: list[str], name: PoolName = PoolName.MAMBA) -> Any:
    return PoolTransfer(name=name, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize("seed", range(20))
def test_hits_are_the_prefixes_that_all_pools_have(tmp_path, seed):
    draw = random.Random(seed)
    pools = {
        "kv": host_pool(),
        "swa": host_pool(heads=1),
        "mamba": state_pool(),
        "draft": host_pool(),
    }
    chances = {"kv": 0.97, "swa": 0.8, "mamba": 0.5, "draft": 0.95}
    present = {
        name: [page for page in range(SLOTS) if draw.random() < chances[name]] for name in pools
    }
    window = draw.choice([1, 2, 3])
    asked = [
        last_page(KEYS[:window], PoolName.SWA), last_page(KEYS[:1]),
        PoolTransfer(name=PoolName.DRAFT),
    ]  # fmt: skip
    with attached(config([f"directory:{tmp_path}"]), **pools_as_arguments(pools)) as backend:
        for name, pages in present.items():
            if pages:
                keys = [KEYS[page] for page in pages]
                backend.batch_set_v2([transfer(name, pools[name], tuple(pages), keys)])
        hit = backend.batch_exists_v2(KEYS, asked)

    def has(name: str, pages: range) -> bool:
        return all(page in present[name] for page in pages)

    expected = [
        end
        for end in range(1, SLOTS + 1)
        if has("kv", range(end)) and has("draft", range(end))
        and has("swa", range(max(0, end - window), end)) and has("mamba", range(end - 1, end))
    ]  # fmt: skip
    assert hit.restorable_prefix_pages == expected
    assert hit.kv_hit_pages == max(expected, default=0)


def pools_as_arguments(pools: dict[str, Any]) -> dict[str, Any]:
    return {"pool" if name == "kv" else name: pool for name, pool in pools.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_page_of_a_side_pool_is_a_miss(tmp_path, family):
    make_kv, name, make_side = FAMILIES[family]
    kv, side = make_kv("page_first"), filled(make_side("page_first"), 1)
    with attached(config([f"directory:{tmp_path}"], aiokv=FP8), kv, **{name: side}) as backend:
        backend.batch_set_v2([transfer(name, side, (0, 1, 2), KEYS[:3])])
        files = [
            path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 64
        ]
        for file in files:
            content = bytearray(file.read_bytes())
            content[20] ^= 1
            file.write_bytes(content)
        before = content_of(side, 9)
        loaded = backend.batch_get_v2([transfer(name, side, (9, 10, 11), KEYS[:3])])
        assert loaded == {name: [False] * 3}
        assert content_of(side, 9) == before
        assert sum(each.wrong_blocks for each in backend.statistics()) > 0


def controller(backend: Any, settings: Any, pools: dict[str, Any]) -> Any:
    """Return SGLang's controller of hybrid models with what its storage threads use."""
    made: Any = object.__new__(HybridCacheController)
    made.storage_backend = backend
    made.storage_config = settings
    made.storage_backend_type = "dynamic"
    made.mem_pool_host = HostPoolGroup(
        [
            PoolEntry(PoolName(name), pool, None, lambda layer: layer, name == "kv")
            for name, pool in pools.items()
        ]
    )
    made.storage_host_pool = pools["kv"]
    made.page_size = PAGE
    made.page_get_func = made._page_get_zero_copy
    made.page_set_func = made._page_set_zero_copy
    made.prefetch_sync_queue = Queue()
    return made


def pool_transfers(pages: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """Return the transfers beside the KV pages: a window of two pages, a state, and a draft."""
    window = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages[-2:]])
    return [
        last_page(KEYS[:2], PoolName.SWA), last_page(KEYS[:1]),
        PoolTransfer(name=PoolName.DRAFT, indices_from_pool=PoolName.KV),
    ], {"swa": window, "mamba": torch.tensor(pages[-1:])}  # fmt: skip


@pytest.mark.parametrize("missing", [None, "swa", "mamba", "draft"])
def test_the_controller_of_sglang_backs_up_and_prefetches_all_pools(tmp_path, missing):
    settings = config([f"disk:{tmp_path}?bytes=4MiB"])
    pools = {
        "kv": filled(host_pool(), 1), "swa": filled(host_pool(heads=1), 2),
        "mamba": filled(state_pool(), 3), "draft": filled(host_pool(), 4),
    }  # fmt: skip
    tokens = list(range(5 * PAGE))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE)[:3]
    expected = {
        name: [content_of(pool, page) for page in (3, 1, 7)] for name, pool in pools.items()
    }
    with attached(settings, **pools_as_arguments(pools)) as backend:
        made = controller(backend, settings, pools)
        transfers, places = pool_transfers([3, 1, 7])
        for each in transfers[:2]:
            each.host_indices = places[each.name]
            each.keys = hashes[-len(each.keys) :]
        backup = StorageOperation(
            indices(3, 1, 7), tokens, hash_value=hashes,
            pool_transfers=[each for each in transfers if each.name != missing],
        )  # fmt: skip
        made._page_backup(backup)
        assert backup.completed_tokens == 3 * PAGE
    for pool in pools.values():
        filled(pool, 9)
    with attached(settings, **pools_as_arguments(pools)) as backend:
        made = controller(backend, settings, pools)
        transfers, places = pool_transfers([2, 9, 4])
        handle = types.SimpleNamespace(rid="r1")
        prefetch = PrefetchOperation(handle, tokens, pool_transfers=transfers)
        prefetch.hash_value, hit_tokens = made._storage_hit_query(prefetch)
        if missing:
            assert hit_tokens == 0
            return
        assert (prefetch.hash_value, hit_tokens) == (hashes, 3 * PAGE)
        prefetch.host_indices = indices(2, 9, 4)
        for each in transfers[:2]:
            each.host_indices = places[each.name]
        made._page_transfer(prefetch)
        acks = [made.prefetch_sync_queue.get_nowait() for _ in range(2)]
        assert acks[0].completed_tokens == 3 * PAGE
        assert acks[1].pool_hits == {"swa": 2, "mamba": 1}
    for name, last in (("kv", 3), ("draft", 3), ("swa", 2), ("mamba", 1)):
        loaded = [content_of(pools[name], page) for page in (2, 9, 4)[-last:]]
        assert loaded == expected[name][-last:], name


def test_pool_that_is_registered_later_leaves_the_stored_pages_as_they_are(tmp_path):
    settings = config([f"disk:{tmp_path}?bytes=4MiB"])
    kv, draft = host_pool(), filled(host_pool(heads=1), 1)
    with attached(settings, kv) as backend:
        backend.batch_set_v1(KEYS[:2], indices(0, 1))
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        assert backend.batch_exists(KEYS[:3]) == 2
        asked = [PoolTransfer(name=PoolName.DRAFT)]
        assert backend.batch_exists_v2(KEYS[:2], asked).kv_hit_pages == 0
        backend.batch_set_v2([transfer("draft", draft, (0, 1), KEYS[:2])])
        assert backend.batch_exists_v2(KEYS[:2], asked).kv_hit_pages == 2


def test_draft_model_with_heads_beside_mla_is_refused_for_several_ranks(tmp_path):
    settings = config([f"directory:{tmp_path}"], is_mla_model=True, tp_size=2)
    with (
        pytest.raises(ConfigError, match="'draft' has other KV heads in each of the 2 ranks"),
        attached(settings, mla_pool(), draft=host_pool()),
    ):
        pass


def test_side_pool_without_pages_in_its_layout_is_refused(tmp_path):
    settings = config([f"directory:{tmp_path}"], aiokv=FP8)
    with (
        pytest.raises(ConfigError, match="'layer_first' of the host pool 'indexer' has no pages"),
        attached(settings, mla_pool("layer_first"), indexer=indexer_pool("layer_first")),
    ):
        pass


def test_unknown_pools_and_hit_policies_are_errors(tmp_path):
    with attached(config([f"directory:{tmp_path}"]), host_pool()) as backend:
        backend.batch_set_v1(KEYS[:1], indices(0))
        with pytest.raises(UsageError, match="the host pool 'swa' is not registered"):
            backend.batch_exists_v2(KEYS[:1], [PoolTransfer(name=PoolName.SWA)])
        groups = PoolTransfer(name=PoolName.KV, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        with pytest.raises(UsageError, match="unknown hit policy"):
            backend.batch_exists_v2(KEYS[:1], [groups])
