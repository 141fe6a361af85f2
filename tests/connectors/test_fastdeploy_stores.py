"""FastDeploy's requests with stores: what is fetched for them, and which stores it names."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from aiokv.connectors import prefills
from aiokv.connectors.fastdeploy import CacheController, CacheManager
from aiokv.connectors.fastdeploy.stores import model_name, stores_of
from aiokv.engine.engine import CacheEngine
from aiokv.errors import ConfigError
from aiokv.ranks import RankGroup
from aiokv.stores import StoreUse
from aiokv.testing import ScriptedStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.connectors.fastdeploy_requests import opened, prompt
from tests.connectors.fastdeploy_server import (
    BLOCK,
    Request,
    Server,
    fd_config,
    regions_of,
    tensors,
)


def stored(store: ScriptedStore, **options) -> dict:
    use = StoreUse(store, deadline_seconds=10 * PATIENCE_SECONDS)
    return {"stores": [use], "model": "test", "store_policy": "write_through", **options}


def serve(store: ScriptedStore, kind: str = "v1", **options) -> list[Request]:
    """Serve three prompts with an engine whose memory is empty."""
    requests = [Request(f"r{i}", prompt(i, 3, more=1), 2) for i in range(3)]
    cache_options = stored(store, **options)
    with Server(
        24, 24, kind=kind, cache_options=cache_options, write_policy="write_through"
    ) as server:
        server.scheduler.add(*requests)
        server.scheduler.run()
        server.manager.engine.call(store.end_script)
        server.drain()
    return requests


@pytest.mark.parametrize("kind", ["v1", "v0"])
def test_requests_hit_what_an_earlier_server_has_stored(kind):
    store = ScriptedStore()
    first = serve(store, kind)
    assert [request.num_cached_tokens for request in first] == [0, 0, 0]
    again = serve(store, kind, store_wait_seconds=PATIENCE_SECONDS)
    assert [request.num_cached_tokens for request in again] == [3 * BLOCK] * 3
    assert [request.tokens for request in again] == [request.tokens for request in first]


def test_request_waits_for_stores_until_the_deadline_only():
    store = ScriptedStore()
    serve(store)
    store.hold("load")
    late = serve(store, store_wait_seconds=0.01)
    assert [request.num_cached_tokens for request in late] == [0, 0, 0]


def test_request_does_not_wait_for_blocks_that_the_model_computes_sooner():
    store = ScriptedStore()
    serve(store)
    store.hold("load")
    options = stored(
        store,
        prefill_tokens_per_second=1e9,
        store_wait_seconds=10 * PATIENCE_SECONDS,
        regions=regions_of(tensors(24)),
    )
    with opened(24, 24, options) as manager:
        request = Request("r0", prompt(0, 3, more=1), 2)
        assert manager.prefetch_storage(request).result(PATIENCE_SECONDS).total == 0
        manager.engine.call(store.end_script)


def test_failing_store_delays_no_request():
    store = ScriptedStore()
    serve(store)
    store.fail("lookup")
    assert [request.num_cached_tokens for request in serve(store)] == [0, 0, 0]


def test_request_that_shares_no_block_fetches_none():
    store = ScriptedStore()
    options = stored(store, regions=regions_of(tensors(8)))
    with opened(8, 8, options) as manager:
        image = Request("image", prompt(1, 3), multimodal_inputs={"images": ["pixels"]})
        assert manager.prefetch_storage(image) is None
        empty = Request("empty", [])
        manager.begin_fetch(empty)
        assert empty.async_process_futures == []
        assert store.calls["lookup"] == 0


def test_times_of_batches_reach_the_engine(monkeypatch):
    """The speed of the model decides what is fetched."""
    noted: list[int] = []
    monkeypatch.setattr(prefills, "LEAST_TOKENS", 8)
    monkeypatch.setattr(
        CacheEngine, "note_prefill", lambda _, tokens, seconds: noted.append(tokens)
    )
    with Server(32, 32, batch_tokens=24) as server:
        server.scheduler.add(Request("a", prompt(1, 10, more=2), 3))
        server.scheduler.run()
        assert noted == [42], "two batches, whose first has no token at its end"
        server.scheduler.add(Request("b", prompt(1, 10, more=2), 3))
        server.scheduler.run()
    assert noted == [42], "the second prompt was cached but for 2 tokens"


# --- FastDeploy's configuration -------------------------------------------------------------------


def config(backend: str | None) -> SimpleNamespace:
    config = fd_config(8, 8)
    config.cache_config.kvcache_storage_backend = backend
    return config


def test_file_backend_is_a_directory(monkeypatch, tmp_path):
    assert stores_of(config(None)) == ()
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    assert stores_of(config("file")) == (f"directory:{tmp_path}",)
    named = config("file")
    named.model_config.model = "/models/ernie"
    with CacheManager_of(named) as manager:
        assert manager.engine.config.model == model_name(named)
        assert [store.url for store in manager.engine.statistics().stores] == [
            f"directory:{tmp_path}"
        ]


class CacheManager_of:
    def __init__(self, config: SimpleNamespace) -> None:
        self.manager = CacheManager(config, regions=regions_of(tensors(8)))

    def __enter__(self) -> CacheManager:
        return self.manager

    def __exit__(self, *exc: object) -> None:
        self.manager.close()


def test_mooncake_backend_has_the_settings_of_fastdeploy(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="its master is not known"):
        stores_of(config("mooncake"))
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "10.0.0.1:50051")
    assert stores_of(config("mooncake")) == ("mooncake://10.0.0.1:50051?protocol=rdma",)
    file = tmp_path / "mooncake.json"
    settings = {
        "master_server_addr": "10.0.0.2:50051",
        "protocol": "tcp",
        "global_segment_size": 1024,
        "metadata_server": "http://10.0.0.2:8080/metadata",
    }
    file.write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    (url,) = stores_of(config("mooncake"))
    assert url == (
        "mooncake://10.0.0.2:50051?protocol=tcp"
        "&metadata_server=http%3A%2F%2F10.0.0.2%3A8080%2Fmetadata&segment_bytes=1024"
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        stores_of(config("mooncake"))


def test_attention_store_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'attention_store', which aiokv cannot read"):
        CacheManager(config("attention_store"))
    with pytest.raises(ConfigError, match="attention_store"):
        CacheController(config("attention_store"), path=tmp_path / "ranks")


def test_ranks_need_the_stores_of_the_configuration(tmp_path):
    group = RankGroup(1, path=tmp_path / "ranks")
    with pytest.raises(ConfigError, match="'file', but the RankGroup has no stores"):
        CacheManager(config("file"), ranks=group)


def test_name_of_the_model_differs_where_its_kv_differs():
    assert model_name(config(None)) is None
    names = set()
    for model, dtype, quantization, cache in (
        ("a", "bfloat16", None, None),
        ("b", "bfloat16", None, None),
        ("a", "float16", None, None),
        ("a", "bfloat16", {"quantization": "wint4"}, None),
        ("a", "bfloat16", None, "block_wise_fp8"),
    ):
        named = config(None)
        named.model_config = SimpleNamespace(model=model, dtype=dtype, quantization=quantization)
        named.quant_config = SimpleNamespace(kv_cache_quant_type=cache)
        names.add(model_name(named))
        assert model_name(named) == model_name(named)
    assert len(names) == 5
