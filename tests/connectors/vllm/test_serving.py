"""Requests with the connector generate what the model generates without a cache."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed import kv_events
from vllm.distributed.kv_events import BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.outputs import KVConnectorOutput

from aiokv import CacheEngine, Lease
from aiokv.connectors import prefills
from aiokv.connectors.vllm import AiokvConnector, connector, prefixes, scheduler, sources
from aiokv.connectors.vllm.requests import Parameters
from aiokv.connectors.vllm.retired import RetiredLeases
from aiokv.connectors.vllm.statistics import ConnectorStatistics
from aiokv.connectors.vllm.worker import WorkerHalf
from aiokv.engine.leases import Leases
from aiokv.events import schema
from tests.connectors.vllm.configs import BLOCK_TOKENS, vllm_config
from tests.connectors.vllm.model import generate
from tests.connectors.vllm.runner import LAYER_NAMES, LAYOUTS
from tests.connectors.vllm.serving import (
    HOST,
    evict_all,
    evicted_prompt,
    flood,
    num_leases,
    prompt,
    serve_and_check,
    wishing,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from tests.connectors.vllm.serving import MakeServer


@pytest.mark.parametrize("has_store", [False, True])
def test_host_memory_adds_to_vllms_cache(
    make_server: MakeServer, tmp_path: Path, has_store: bool
) -> None:
    """The prompts fit in both caches together, and in neither of them. A store is not read here."""
    extra: dict[str, object] = {"cpu_bytes_to_use": 32 * 256}
    if has_store:
        stores = [f"disk:{tmp_path}?bytes=64MiB"]
        extra = {"cpu_bytes_to_use": 42 * 4096, "stores": stores, "store_wait_seconds": 0.0}
    server = make_server(extra, num_blocks=33)
    prompts = [prompt(seed, 41) for seed in range(5)]
    for turn in range(4):
        requests = []
        for n, tokens in enumerate(prompts):
            requests.append(serve_and_check(server, f"{turn}-{n}", tokens, 1))
            server.drain()
    assert [server.loaded(request) for request in requests] == [40] * 5


@pytest.mark.parametrize(("beside", "loaded"), [("", 40), ("blocks", 0), ("no blocks", 0)])
def test_blocks_that_another_connector_may_load_into_are_not_copied(
    make_server: MakeServer, beside: str, loaded: int
) -> None:
    """In a ``MultiConnector``, vLLM 0.22 does not tell which blocks these are."""
    server = make_server({"cpu_bytes_to_use": 32 * 256}, num_blocks=33)
    for seed in range(5):
        serve_and_check(server, f"fill {seed}", prompt(seed, 41), 1)
        server.drain()
    tokens = prompt(9, 41)
    request = serve_and_check(server, "a", tokens, 1)
    server.drain()
    assert num_leases(server) > 0
    pool = server.scheduler.kv_cache_manager.block_pool
    blocks = [block for block in pool.blocks if block.block_hash is not None]
    ids = [block.block_id for block in blocks] if beside == "blocks" else []
    half = server.connector._half_of_scheduler
    if beside:
        half.allocated(request, (ids,), 0)
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    flood(server, 9, 16)
    server.drain()
    assert server.loaded(serve_and_check(server, "again", tokens, 1)) == loaded
    if beside == "no blocks":
        assert num_leases(server) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_evicted_prompt_is_loaded(make_server: MakeServer, layout: str, load: str) -> None:
    server = make_server({"load": load}, layout)
    tokens = evicted_prompt(server, 6)
    request = server.add("b", tokens, 6)
    server.run()
    assert server.outputs["b"] == server.outputs["a"] == generate(tokens, 0, 6)
    assert server.loaded(request) == 40


def test_blocks_of_a_load_may_be_named_after_the_step_was_built(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 defers loads whose blocks a step in flight still reads."""
    server = make_server()
    tokens = evicted_prompt(server, 4)
    connector, late = server.connector, []
    allocated, build = connector.update_state_after_alloc, connector.build_connector_meta

    def build_first(output: Any) -> Any:
        message = build(output)
        while late:
            allocated(*late.pop(0))
        return message

    monkeypatch.setattr(connector, "update_state_after_alloc", lambda *args: late.append(args))
    monkeypatch.setattr(connector, "build_connector_meta", build_first)
    assert server.loaded(serve_and_check(server, "late", tokens, 4)) == 40


def test_each_turn_loads_all_turns_before(make_server: MakeServer) -> None:
    server = make_server()
    tokens = prompt(1, 30)
    for turn in range(4):
        request = server.add(f"turn{turn}", tokens, 6)
        evict_all(server)
        assert server.outputs[f"turn{turn}"] == generate(tokens, 0, 6)
        # The last token of the turn before was sampled, but not computed with.
        known = len(tokens) - 5 if turn else 0
        assert server.loaded(request) == max(known - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        tokens = tokens + server.outputs[f"turn{turn}"] + prompt(2 + turn, 4)


def test_all_blocks_of_a_long_output_are_loaded(make_server: MakeServer) -> None:
    server = make_server()
    tokens = prompt(1, 10)
    server.add("a", tokens, 40)
    evict_all(server)
    tokens = tokens + server.outputs["a"] + prompt(2, 4)
    request = server.add("b", tokens, 4)
    server.run()
    assert server.outputs["b"] == generate(tokens, 0, 4)
    assert server.loaded(request) == 49 // BLOCK_TOKENS * BLOCK_TOKENS


def test_hit_of_vllm_is_continued_by_host_memory(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    server.add("short", tokens[:17], 1)
    server.run()
    request = serve_and_check(server, "b", tokens, 2)
    assert server.loaded(request) == 40 - 16


def test_tenants_and_adapters_share_no_blocks(make_server: MakeServer) -> None:
    server = make_server()
    tokens = prompt(1, 41)
    server.add("plain", tokens, 2)
    evict_all(server)
    salted = server.add("salted", tokens, 2, salt="tenant")
    adapted = server.add("adapted", tokens, 2, adapter=1)
    server.run()
    assert server.loaded(salted) == server.loaded(adapted) == 0
    assert server.outputs["adapted"] == generate(tokens, 1, 2) != server.outputs["plain"]
    evict_all(server)
    again = server.add("again", tokens, 2, adapter=1)
    server.run()
    assert server.loaded(again) == 40
    assert server.outputs["again"] == generate(tokens, 1, 2)


def _image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=position
    )


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the leases that were released, in order."""
    labels: list[str] = []
    release = Leases.release

    def note(leases: Leases, record: Any, after: Any = None, returns: str = "") -> None:
        labels.append(returns)
        release(leases, record, after, returns)

    monkeypatch.setattr(Leases, "release", note)
    return labels


def test_label_of_a_request_whose_lease_cannot_be_retired(
    make_server: MakeServer, labels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    monkeypatch.setattr(RetiredLeases, "is_active", True)  # as after host memory was full
    wishes = wishing(2, returns="tool_use", write=False)
    request = server.add("b", tokens, 2, sampling_params=wishes)
    server.run()
    serve_and_check(server, "c", prompt(2, 20), 2)
    server.drain()
    assert server.loaded(request) == 40
    assert "tool_use" in labels


def test_no_block_is_saved_of_a_retired_lease_that_ends_inside_an_image(
    make_server: MakeServer,
) -> None:
    """vLLM has given the last blocks of the image to another request."""

    def compute_all(config: VllmConfig) -> None:
        config.scheduler_config.max_num_batched_tokens = 512

    server = make_server({"cpu_bytes_to_use": 10 * 256}, num_blocks=33, change=compute_all)
    server.scheduler.max_num_encoder_input_tokens = 64
    server.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    for i in range(5, 7):  # leases are retired after host memory was full
        serve_and_check(server, f"flood{i}", prompt(i, 45), 1)
        server.drain()
    tokens, features = prompt(1, 41), [_image("cat", 2, 36)]
    server.add("a", tokens, 1, mm_features=features)
    server.run()
    serve_and_check(server, "other", prompt(9, 4 * 26), 1)
    server.drain()
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    server.add("again", tokens, 1, mm_features=features)
    server.run()
    assert server.outputs["again"] == generate(tokens, 0, 1)


def test_hit_ends_before_a_different_image(make_server: MakeServer) -> None:
    server = make_server(prefix_caching=False)
    server.scheduler.max_num_encoder_input_tokens = 64
    server.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    tokens = prompt(1, 41)
    server.add("a", tokens, 1, mm_features=[_image("cat", 18, 6)])
    server.run()
    server.drain()
    same = server.add("same", tokens, 1, mm_features=[_image("cat", 18, 6)])
    other = server.add("other", tokens, 1, mm_features=[_image("dog", 18, 6)])
    server.run()
    assert server.loaded(same) == 40
    assert server.loaded(other) == 16


def test_prompt_logprobs_load_nothing(make_server: MakeServer) -> None:
    server = make_server(prefix_caching=False)
    tokens = prompt(1, 41)
    server.add("a", tokens, 1)
    server.run()
    options = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    request = server.add("b", tokens, 1, sampling_params=options)
    server.run()
    assert server.loaded(request) == 0


def test_embeddings_are_neither_loaded_nor_saved(make_server: MakeServer) -> None:
    server = make_server(prefix_caching=False)
    request = server.add("a", [0] * 20, 1, prompt_embeds=torch.zeros(20, 4))
    server.run()
    assert server.loaded(request) == 0
    assert server.connector.get_kv_connector_stats().data["saved_blocks"] == 0


def test_request_that_does_not_read_loads_nothing_and_is_saved(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    request = server.add("b", longer, 1, sampling_params=wishing(read=False))
    evict_all(server)
    assert server.loaded(request) == 0
    again = serve_and_check(server, "c", longer, 1)
    assert server.loaded(again) == 60


def test_request_that_does_not_write_loads_and_is_not_saved(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    request = server.add("b", longer, 4, sampling_params=wishing(4, write=False))
    evict_all(server)
    assert server.outputs["b"] == generate(longer, 0, 4)
    assert server.loaded(request) == 40
    again = serve_and_check(server, "c", longer, 1)
    assert server.loaded(again) == 40


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize(("limit", "loaded"), [(0, 0), (3, 0), (15, 12), (16, 16), (1000, 40)])
def test_request_loads_at_most_its_limit(
    make_server: MakeServer, load: str, limit: int, loaded: int
) -> None:
    server = make_server({"load": load})
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    request = server.add("b", longer, 4, sampling_params=wishing(4, max_load_tokens=limit))
    evict_all(server)
    assert server.outputs["b"] == generate(longer, 0, 4)
    assert server.loaded(request) == loaded
    again = serve_and_check(server, "c", longer, 1)
    assert server.loaded(again) == 60  # all was saved


def test_limit_counts_tokens_behind_the_hit_of_vllm(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    server.add("short", tokens[:17], 1)
    server.run()
    request = server.add("b", tokens, 2, sampling_params=wishing(2, max_load_tokens=9))
    server.run()
    assert server.outputs["b"] == generate(tokens, 0, 2)
    assert server.loaded(request) == 8


def test_load_has_the_priority_of_its_request(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []
    assign = Lease.assign

    def note(lease: Lease, block_ids: Any, **options: Any) -> None:
        priorities.append(options.get("priority", 0))
        assign(lease, block_ids, **options)

    server = make_server()
    tokens = evicted_prompt(server, 1)
    monkeypatch.setattr(Lease, "assign", note)
    request = server.add("b", tokens, 1, sampling_params=wishing(load_priority=7))
    server.run()
    assert server.loaded(request) == 40
    assert priorities == [7]


def test_label_of_a_request_is_that_of_its_release(
    make_server: MakeServer, labels: list[str]
) -> None:
    server = make_server()
    server.add("a", prompt(1, 20), 2, sampling_params=wishing(2, returns="tool_use"))
    server.run()
    for name in "bc":  # the match of "c" follows the release of "b"
        server.add(name, prompt(ord(name), 20), 2)
        server.run()
    server.connector.engine.call(int)  # behind the posted calls
    assert labels[:2] == ["tool_use", ""]


def test_action_of_kv_hints_has_the_settings_of_a_request() -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol", reason="vLLM 0.32 has KV hints")

    def hinted(kind: str, payload: object) -> Parameters:
        actions = [
            protocol.KvHintAction("1", "other", "1", {}),
            protocol.KvHintAction("2", kind, "1", payload),
        ]
        hints = protocol.KvHintsEnvelope("0.1", "m", actions)
        return Parameters.of(
            SimpleNamespace(kv_transfer_params=None, kv_hints=hints, request_id="r")
        )

    assert hinted("aiokv", {"returns": "tool_use"}).returns == "tool_use"
    assert hinted("kv.retain", {"returns": "tool_use"}) == Parameters()
    assert not hinted("aiokv", {"returns": 3}).read


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ([], "is []; it must be an object"),
        ({"reed": False}, "keys of read, write, max_load_tokens, load_priority, returns"),
        ({"write": "no"}, "write is 'no'"),
        ({"max_load_tokens": -1}, "max_load_tokens is -1"),
        ({"max_load_tokens": 1.5}, "max_load_tokens is 1.5"),
        ({"load_priority": None}, "load_priority is None"),
        ({"returns": 3}, "returns is 3"),
        ({"returns": "a" * 65}, "returns has 65 characters"),
    ],
)
def test_request_with_wrong_parameters_is_neither_loaded_nor_saved(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, wishes: Any, message: str
) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    options = SamplingParams(
        max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": {"aiokv": wishes}}
    )
    request = server.add("b", longer, 1, sampling_params=options)
    evict_all(server)
    assert server.loaded(request) == 0
    again = serve_and_check(server, "c", longer, 1)
    assert server.loaded(again) == 40
    assert message in caplog.text
    assert server.connector.get_kv_connector_stats().data["usable"] == 1


def test_preempted_requests_keep_their_output(make_server: MakeServer) -> None:
    assert make_server().connector.requires_kv_delivery is False


def _forbid(monkeypatch: pytest.MonkeyPatch, reason: str, config: Any) -> None:
    """Change a configuration as vLLM would for a model that needs all positions in one step."""
    model = config.model_config
    if reason == "pooler":
        monkeypatch.setattr(type(model), "is_prefix_caching_supported", False)
        model.runner_type = "pooling"
    elif reason == "MLA":
        monkeypatch.setattr(type(model), "use_mla", True)
        monkeypatch.setattr(prefixes, "current_platform", SimpleNamespace(is_cpu=lambda: True))
        config.scheduler_config.enable_chunked_prefill = False
        config.scheduler_config.max_num_batched_tokens = 64
    elif reason == "VLLM_BATCH_INVARIANT":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    else:
        monkeypatch.setattr(type(model), "architecture", reason)


@pytest.mark.parametrize(
    "reason", ["pooler", "MLA", "VLLM_BATCH_INVARIANT", "UnlimitedOCRForCausalLM"]
)
def test_no_hit_where_vllm_forbids_cached_prefixes(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    change = functools.partial(_forbid, monkeypatch, reason)
    server = make_server(prefix_caching=False, change=change)
    tokens = prompt(1, 41)
    for name in ("a", "b"):
        request = serve_and_check(server, name, tokens, 2)
        assert server.loaded(request) == 0
    lines = [r for r in caplog.records if "prefixes_forbidden" in r.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0].getMessage()
    assert server.connector.get_kv_connector_stats().data["saved_blocks"] == 0


def test_hits_are_loaded_when_the_user_turns_vllms_prefix_cache_off(
    make_server: MakeServer,
) -> None:
    server = make_server(prefix_caching=False)
    tokens = prompt(1, 41)
    for name, loaded in (("a", 0), ("b", 40)):
        request = serve_and_check(server, name, tokens, 2)
        assert server.loaded(request) == loaded
        server.drain()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_layers_of_a_draft_model_are_loaded_with_the_others(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    server = make_server(
        {"load": "layerwise"}, draft_method="eagle", async_scheduling=async_scheduling
    )
    calls: list[str] = []
    failed: set[int] = set()
    wait_layer, close_step = WorkerHalf.wait_layer, sources.EngineSource.close_step
    take_failed = WorkerHalf.take_failed

    def note_wait(half: WorkerHalf, name: str) -> None:
        calls.append(name)
        wait_layer(half, name)

    def note_close(source: sources.EngineSource, *step: Any) -> None:
        calls.append("close")
        close_step(source, *step)

    def note_failed(half: WorkerHalf) -> set[int]:
        blocks = take_failed(half)
        failed.update(blocks)
        return blocks

    monkeypatch.setattr(WorkerHalf, "wait_layer", note_wait)
    monkeypatch.setattr(WorkerHalf, "take_failed", note_failed)
    monkeypatch.setattr(sources.EngineSource, "close_step", note_close)
    tokens = evicted_prompt(server, 4)
    server.add("other", prompt(2, 9), 20)
    for _ in range(5):
        server.step()
    again = serve_and_check(server, "b", tokens, 4)
    assert server.loaded(again) == 40
    assert not failed
    before = [calls[i - 1] for i, call in enumerate(calls) if call == "close" and i]
    assert set(before) - {"close"} == {LAYER_NAMES[-1]}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_over_sockets(make_server: MakeServer, num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    server = make_server({"in_process": False, "socket": str(path)}, num_ranks=num_ranks)
    assert not path.exists(), "the socket file would remain after a kill"
    tokens = evicted_prompt(server, 4)
    request = serve_and_check(server, "b", tokens, 4)
    assert server.loaded(request) == 40


def test_stages_of_a_pipeline_load_their_own_layers(
    make_server: MakeServer, tmp_path: Path
) -> None:
    extra = {"stores": [f"disk:{tmp_path}/{{rank}}?bytes=64MiB"], "store_wait_seconds": 60.0}
    server = make_server(extra, num_stages=2)
    tokens = evicted_prompt(server, 8)
    assert server.loaded(serve_and_check(server, "b", tokens, 8)) == 40
    server.drain()
    server.close()
    restarted = make_server(extra, num_stages=2)
    assert restarted.loaded(serve_and_check(restarted, "c", tokens, 8)) == 40


def test_events_of_host_memory_reach_vllm(make_server: MakeServer) -> None:
    server = make_server(kv_events=True)
    events = []
    server.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: events.extend(batch.events), shutdown=lambda: None
    )
    tokens = evicted_prompt(server, 1)
    server.drain()
    server.add("b", tokens, 1)
    server.run()
    stored = [e for e in events if isinstance(e, BlockStored) and e.medium == "CPU"]
    assert tokens[:4] in [event.token_ids[:4] for event in stored]


def test_subscribers_of_this_vllm_decode_the_events(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Events through vLLM's publisher, and those of an engine with its own publisher."""
    server = make_server({"stores": [f"disk:{tmp_path / 'kv'}?bytes=64MiB"]}, kv_events=True)
    sent: list[Any] = []
    server.scheduler.kv_event_publisher = SimpleNamespace(publish=sent.append, shutdown=lambda: 0)
    serve_and_check(server, "a", prompt(1, 41), 1)
    server.drain()
    serve_and_check(server, "b", prompt(2, 5), 1)
    payloads = [msgspec.msgpack.encode(batch) for batch in sent]
    as_array = kv_events.KVCacheEvent.__struct_config__.array_like
    stored = schema.BlockStored(
        block_hashes=[1],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=4,
        lora_id=None,
        medium=schema.CPU,
        lora_name=None,
    )
    removed = schema.BlockRemoved(block_hashes=[1], medium=schema.CPU)
    in_store = msgspec.structs.replace(stored, medium=schema.STORAGE)
    own = schema.KVEventBatch(1.0, [stored, removed, in_store, schema.AllBlocksCleared()])
    payloads.append(schema.BatchEncoder("array" if as_array else "map").encode(own))
    decoded = [msgspec.msgpack.decode(data, type=kv_events.KVEventBatch) for data in payloads]
    kinds = [type(event).__name__ for event in decoded.pop().events]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockStored", "AllBlocksCleared"]
    events = [event for batch in decoded for event in batch.events]
    media = {"GPU", "CPU"}
    if hasattr(kv_events, "MEDIUM_STORAGE"):
        assert kv_events.MEDIUM_STORAGE == schema.STORAGE
        media.add(schema.STORAGE)
    assert {event.medium for event in events} == media
    for medium in media - {"GPU"}:
        (first, *_) = (event for event in events if event.medium == medium)
        assert first.token_ids == prompt(1, 41)[: len(first.token_ids)]


def test_metrics_are_registered_with_vllm() -> None:
    registry = CollectorRegistry()
    kinds = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    config = vllm_config(extra=HOST)
    metrics = AiokvConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe({"loaded_blocks": 3, "host_blocks": 7})
    metrics.observe({"loaded_blocks": 2, "host_blocks": 8})
    value = registry.get_sample_value
    assert value("vllm:aiokv_loaded_blocks_total", {"engine": "0"}) == 5
    assert value("vllm:aiokv_host_blocks", {"engine": "0"}) == 8


def test_reports_of_a_worker_have_an_interval(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server({"load": "layerwise"})
    tokens = evicted_prompt(server, 1)
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(connector, "REPORT_SECONDS", 1.0)
    worker_of = server.runners[0].connector
    assert worker_of.get_kv_connector_stats().data["loaded_blocks"] == 0
    assert worker_of.get_kv_connector_stats() is None
    before = server.statistics.reduce().get("loaded_blocks", 0)
    server.add("b", tokens, 1)
    server.run()
    assert server.statistics.reduce()["loaded_blocks"] == before + 10  # the first loads: at once
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    server.add("c", tokens, 8)
    while len(server.scheduler.requests["c"].output_token_ids) < 4:
        server.step()
    assert server.statistics.reduce()["loaded_blocks"] == before + 10
    server.run()
    assert server.statistics.reduce()["loaded_blocks"] == before + 20  # before a pause: at once
    clock.now += 1.0
    assert worker_of.get_kv_connector_stats().data["loaded_blocks"] == 0


def test_scheduler_half_reports_after_a_report_of_a_worker(make_server: MakeServer) -> None:
    half = make_server().connector
    reported = KVConnectorOutput(kv_connector_stats=ConnectorStatistics({"loaded_blocks": 0}))
    half.get_kv_connector_stats()
    for _ in range(2):  # vLLM asks in each step
        half.update_connector_output(KVConnectorOutput())
        assert half.get_kv_connector_stats() is None
    half.update_connector_output(reported)
    assert half.get_kv_connector_stats().data["usable"] == 1
    for _ in range(2):  # vLLM 0.22 asks before it tells of the step, only after reports of workers
        half.update_connector_output(KVConnectorOutput())
    assert half.get_kv_connector_stats().data["usable"] == 1
    half.update_connector_output(reported)
    assert half.get_kv_connector_stats().data["usable"] == 1


def test_store_survives_a_restart(make_server: MakeServer, tmp_path: Path) -> None:
    extra = {"stores": [f"disk:{tmp_path}?bytes=64MiB"], "cpu_bytes_to_use": 1 << 20}
    tokens = prompt(1, 41)
    first = make_server(extra)
    first.add("a", tokens, 4)
    first.run()
    first.drain()
    first.close()
    second = make_server(extra)
    request = second.add("b", tokens, 4)
    second.run()
    assert second.outputs["b"] == generate(tokens, 0, 4)
    assert second.loaded(request) == 40


def test_stores_get_blocks_that_vllms_cache_keeps(make_server: MakeServer, tmp_path: Path) -> None:
    """Host memory is full, and saves blocks that only vLLM has when their request ends."""
    stores = {"stores": [f"disk:{tmp_path}?bytes=64MiB"]}
    first = make_server(stores | {"cpu_bytes_to_use": 21 * 4096}, num_blocks=65)
    prompts = [prompt(seed, 41) for seed in range(5)]
    for name, tokens in enumerate(prompts):
        first.add(str(name), tokens, 4)
        first.run()
        first.drain()
    first.close()
    second = make_server(stores | {"cpu_bytes_to_use": 1 << 20, "store_wait_seconds": 60.0})
    requests = [second.add(f"again {name}", tokens, 4) for name, tokens in enumerate(prompts)]
    second.run()
    assert [second.loaded(request) for request in requests] == [40] * 5


@pytest.mark.parametrize(("delay", "loaded"), [(60.0, 0), (0.0, 40)])
def test_blocks_of_a_long_request_reach_the_stores_before_its_end(
    make_server: MakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    delay: float,
    loaded: int,
) -> None:
    monkeypatch.setattr("aiokv.connectors.vllm.saves._STORE_DELAY_SECONDS", delay)
    stores = {"stores": [f"disk:{tmp_path}?bytes=64MiB"]}
    first = make_server(stores | {"cpu_bytes_to_use": 21 * 4096}, num_blocks=65)
    for seed in range(3):  # fill host memory
        first.add(str(seed), prompt(seed, 41), 4)
        first.run()
        first.drain()
    first.add("long", prompt(9, 41), 80)
    for _ in range(40):
        first.step()
    assert "long" in first.scheduler.requests
    first.drain()
    first.close()
    second = make_server(stores | {"cpu_bytes_to_use": 1 << 20, "store_wait_seconds": 60.0})
    request = second.add("again", prompt(9, 41), 4)
    second.run()
    assert second.loaded(request) == loaded


def test_vllm_counts_hits_by_their_source(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="since vLLM 0.32")
    extra = {"stores": [f"disk:{tmp_path}?bytes=64MiB"], "store_wait_seconds": 60.0}
    first = make_server(extra)
    first.add("a", prompt(1, 41), 1)
    first.run()
    first.drain()
    first.close()
    server = make_server(extra)
    found: dict[str, dict[Any, int]] = {}
    of_request = server.connector.get_external_cache_hit_sources

    def note(request: Request, num_tokens: int) -> dict[Any, int]:
        return found.setdefault(request.request_id, of_request(request, num_tokens))

    monkeypatch.setattr(server.connector, "get_external_cache_hit_sources", note)
    for name in ("b", "c"):
        serve_and_check(server, name, prompt(1, 41), 1)
        evict_all(server)
    assert found["b"] == {sources.CacheHitSource.DISK: 40}
    assert found["c"] == {sources.CacheHitSource.HOST: 40}


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_speed_of_prefills_reaches_the_engine(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(prefills, "LEAST_TOKENS", 16)
    monkeypatch.setattr(
        CacheEngine, "note_prefill", lambda _, tokens, seconds: noted.append(tokens)
    )
    server = make_server({"load": load})
    server.add("a", prompt(1, 41), 3)
    server.run()
    server.connector.engine.call(int)  # behind the posted calls
    assert noted == [24, 17]  # a step has at most 24 tokens; decode steps are left out
    evict_all(server)
    noted.clear()
    request = server.add("b", [*prompt(1, 40), *prompt(2, 20)], 1)
    server.run()
    assert server.loaded(request) == 40
    server.connector.engine.call(int)
    assert noted == ([20] if load == "async" else [])  # this step has waited for its blocks


def test_generated_and_drafted_tokens_of_a_step_do_not_measure_the_model(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(prefills, "LEAST_TOKENS", 1)
    monkeypatch.setattr(
        CacheEngine, "note_prefill", lambda _, tokens, seconds: noted.append(tokens)
    )
    server = make_server(num_drafts=2)
    server.add("a", prompt(1, 21), 30)
    for _ in range(3):
        server.step()
    server.add("b", prompt(2, 12), 30)
    server.step()
    server.run()
    server.connector.engine.call(int)
    assert noted == [21, 12]


def test_request_without_stored_blocks_is_scheduled_in_the_same_step(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler, "DECISION_SECONDS", 60.0)
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    server.add("a", prompt(1, 20), 2)
    server.step()
    assert len(server.outputs["a"]) == 1


def test_all_requests_of_a_step_wait_together_for_decisions(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    monkeypatch.setattr(scheduler, "wait", lambda futures, timeout: waits.append(timeout))
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    for i in range(3):
        server.add(f"r{i}", prompt(i, 7), 2)
    server.step()
    assert waits == [scheduler.DECISION_SECONDS, 0.0, 0.0]
    server.run()
    server.add("next", prompt(3, 7), 2)
    server.step()
    assert waits[3:] == [scheduler.DECISION_SECONDS]
    server.run()


def test_queued_tokens_count_the_running_prompts(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    queued: list[int] = []
    allocate = Lease.allocate

    async def noting(lease: Lease, num_tokens: int, **options: Any) -> Lease:
        queued.append(options["queued_tokens"])
        return await allocate(lease, num_tokens, **options)

    monkeypatch.setattr(Lease, "allocate", noting)
    monkeypatch.setattr(scheduler, "DECISION_SECONDS", 60.0)
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    server.add("a", prompt(1, 61), 3)
    server.step()  # computes 24 tokens
    server.step()
    server.add("b", prompt(2, 30), 1)
    server.step()  # the last 13 of 61, and the first ones of "b"
    server.run()
    assert queued == [0, 61 - 48]


def test_vllm_receives_the_metrics_of_stores(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"], "cpu_bytes_to_use": 1 << 18})
    server.add("a", prompt(1, 41), 1)
    server.drain()
    evict_all(server)
    counts = server.statistics.reduce()
    assert counts["prefill_tokens_per_second"] == 0  # all steps were small
    assert {"store_wait_seconds", "declined_fetches", "late_fetches"} <= counts.keys()
    engine = server.connector.engine
    engine.call(engine.cache.note_prefill, 1_000, 1.0)
    server.add("b", prompt(2, 10), 1)
    server.run()
    assert server.statistics.reduce()["prefill_tokens_per_second"] == 1_000


def test_statistics_reach_vllm(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    server.add("b", tokens, 1)
    server.run()
    counts = server.statistics.reduce()
    assert counts["loaded_tokens"] == 40
    assert counts["loaded_blocks"] == 10
    assert counts["saved_blocks"] >= 10
    assert counts["usable"] == 1


def test_statistics_count_blocks_of_stores(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    server.add("a", prompt(1, 41), 1)
    evict_all(server)
    server.drain()
    server.add("b", prompt(1, 41), 1)  # this reports its load and the earlier saves
    server.run()
    counts = server.statistics.reduce()
    assert counts["stored_blocks"] >= 10
    assert counts["unstored_blocks"] == 0
