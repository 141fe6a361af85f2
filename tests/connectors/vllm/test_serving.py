"""Requests with the connector generate what the model generates without a cache."""

from __future__ import annotations

import functools
import gc
import random
import stat
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from transformers import PretrainedConfig
from vllm.config import CacheConfig, CUDAGraphMode
from vllm.distributed import kv_events
from vllm.distributed.kv_events import BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from aiokv import CacheEngine, Lease
from aiokv.connectors import prefills
from aiokv.connectors.vllm import (
    AiokvConnector,
    compat,
    connector,
    link,
    opening,
    prefixes,
    scheduler,
    sources,
    worker,
)
from aiokv.connectors.vllm.blocks import FreedBlocks, VllmBlocks
from aiokv.connectors.vllm.cache import HostCache
from aiokv.connectors.vllm.connector import check_config
from aiokv.connectors.vllm.options import Options
from aiokv.connectors.vllm.requests import Parameters
from aiokv.connectors.vllm.retired import RetiredLeases
from aiokv.connectors.vllm.statistics import ConnectorStatistics
from aiokv.connectors.vllm.worker import WorkerHalf
from aiokv.engine.leases import Leases
from aiokv.errors import BrokenEngineError, ConfigError, TransferError
from aiokv.events import schema
from aiokv.sync import SyncEngine, SyncLayers
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.manual import ManualEvent
from tests.connectors.vllm.configs import BLOCK_TOKENS, kv_cache_config, vllm_config
from tests.connectors.vllm.model import VOCABULARY, generate
from tests.connectors.vllm.runner import LAYER_NAMES, LAYOUTS
from tests.connectors.vllm.server import Server
from tests.connectors.vllm.test_random_serving import use_device
from tests.harness.flaky import ChaosDevice, FlakyDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from aiokv.worker.arena import HostArena

    MakeServer = Callable[..., Server]
    HoldEngine = Callable[[Server], tuple[threading.Event, Future[bool]]]

HOST = {"cpu_bytes_to_use": 1 << 20, "follow_resets": False}


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    servers: list[Server] = []

    def make(
        extra: dict[str, Any] | None = None,
        layout: str = "flash",
        seed: int = 0,
        change: Callable[[Any], None] = lambda config: None,
        **options: Any,
    ) -> Server:
        config = vllm_config(extra=HOST | (extra or {}), **options)
        change(config)
        server = Server(
            config, random.Random(seed), layout, num_drafts=options.get("num_drafts", 0)
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def flood(server: Server, num: int = 3, length: int = 60) -> None:
    """Push everything else out of vLLM's own cache."""
    for i in range(num):
        tokens = prompt(1_000 + i, length)
        server.add(f"flood{server.num_steps}-{i}", tokens, 1)
    server.run()


def evict_all(server: Server) -> None:
    """Empty vLLM's own cache, after all saves have ended."""
    server.run()
    flood(server)
    server.drain()
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()


def evicted_prompt(server: Server, num_tokens: int) -> list[int]:
    """Serve a prompt as request "a"; of vLLM's own cache and host memory, only the latter has it.

    Returns:
        The prompt of 41 tokens: its 10 full blocks, 40 tokens, can be hit.
    """
    tokens = prompt(1, 41)
    server.add("a", tokens, num_tokens)
    evict_all(server)
    return tokens


def num_leases(server: Server) -> int:
    """Return the number of leases, after all calls of the connector so far."""
    engine = server.connector.engine
    return int(engine.call(engine.statistics).leases)


def serve_and_check(server: Server, name: str, tokens: list[int], num_tokens: int) -> Request:
    """Serve a prompt; it generates what the model generates without a cache."""
    request = server.add(name, tokens, num_tokens)
    server.run()
    assert server.outputs[name] == generate(tokens, 0, num_tokens)
    return request


def test_host_memory_adds_to_vllms_cache(make_server: MakeServer) -> None:
    """The prompts fit in both caches together, and in neither of them."""
    server = make_server({"cpu_bytes_to_use": 32 * 256}, num_blocks=33)
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
    wishes = _wishing(2, returns="tool_use", write=False)
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


def _wishing(num_tokens: int = 1, **wishes: Any) -> SamplingParams:
    """Return options of a request with parameters for the connector."""
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"do_remote_prefill": False, "aiokv": wishes}},
    )


def test_request_that_does_not_read_loads_nothing_and_is_saved(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    request = server.add("b", longer, 1, sampling_params=_wishing(read=False))
    evict_all(server)
    assert server.loaded(request) == 0
    again = serve_and_check(server, "c", longer, 1)
    assert server.loaded(again) == 60


def test_request_that_does_not_write_loads_and_is_not_saved(make_server: MakeServer) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    longer = tokens + prompt(2, 20)
    request = server.add("b", longer, 4, sampling_params=_wishing(4, write=False))
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
    request = server.add("b", longer, 4, sampling_params=_wishing(4, max_load_tokens=limit))
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
    request = server.add("b", tokens, 2, sampling_params=_wishing(2, max_load_tokens=9))
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
    request = server.add("b", tokens, 1, sampling_params=_wishing(load_priority=7))
    server.run()
    assert server.loaded(request) == 40
    assert priorities == [7]


def test_label_of_a_request_is_that_of_its_release(
    make_server: MakeServer, labels: list[str]
) -> None:
    server = make_server()
    server.add("a", prompt(1, 20), 2, sampling_params=_wishing(2, returns="tool_use"))
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


@pytest.fixture
def hold_engine() -> Iterator[HoldEngine]:
    """Let the engine's thread wait for an event; return the event, and the future of the wait."""
    gates: list[threading.Event] = []

    def hold(server: Server) -> tuple[threading.Event, Future[bool]]:
        gate = threading.Event()
        gates.append(gate)
        return gate, server.connector.engine.submit(gate.wait, PATIENCE_SECONDS)

    yield hold
    for gate in gates:
        gate.set()


def compute_prompt(server: Server, request: Request) -> None:
    """Run steps until a request has its first token."""
    while not request.num_output_tokens:
        server.step()


def test_steps_do_not_wait_for_their_commits(
    make_server: MakeServer, hold_engine: HoldEngine
) -> None:
    server, tokens = make_server(), prompt(1, 41)
    compute_prompt(server, server.add("a", tokens, 12))
    server.step()  # posts the commit of the prompt
    gate, held = hold_engine(server)
    for _ in range(4):  # the second one completes a block of 4 positions
        server.step()
    assert not held.done()
    gate.set()
    evict_all(server)
    assert server.outputs["a"] == generate(tokens, 0, 12)
    again = serve_and_check(server, "b", tokens + server.outputs["a"], 1)
    assert server.loaded(again) == 52  # of 52 computed positions


def test_a_wait_for_calls_is_not_cut_short_by_a_step_without_calls(
    make_server: MakeServer, hold_engine: HoldEngine
) -> None:
    server = make_server()
    engine = server.connector.engine
    gate, _ = hold_engine(server)
    cache, posted = HostCache(engine), engine.calls()
    posted.add(bool)
    cache.post(posted)
    cache.hold(engine.calls())
    threading.Timer(0.01, gate.set).start()
    cache.wait_posted()
    assert posted.done


def test_blocks_are_not_written_before_the_engine_has_released_them(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    hold_engine: HoldEngine,
) -> None:
    server, tokens = make_server(num_blocks=16), prompt(1, 41)
    request = server.add("a", tokens, 3)
    compute_prompt(server, request)
    server.step()  # posts the commit of the prompt
    gate, _ = hold_engine(server)
    server.step()  # the last one of "a", whose blocks vLLM frees
    assert request.is_finished()
    waits: list[int] = []
    wait_posted = HostCache.wait_posted

    def wait(cache: HostCache) -> None:
        waits.append(len(server.outputs.get("b", ())))
        gate.set()
        wait_posted(cache)

    monkeypatch.setattr(HostCache, "wait_posted", wait)
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    other = prompt(2, 57)  # needs all blocks
    server.add("b", other, 2, sampling_params=_wishing(2, read=False, write=False))
    server.run()
    assert waits[:1] == [0]  # before the first step of "b"
    assert server.outputs["b"] == generate(other, 0, 2)
    again = serve_and_check(server, "c", tokens, 1)
    assert server.loaded(again) == 40


@pytest.mark.parametrize("names_blocks", [True, False])
def test_saves_end_before_another_connector_loads_into_their_blocks(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, names_blocks: bool
) -> None:
    chaos = ChaosDevice(random.Random(1), refuse_share=0.0, fail_share=0.0)
    use_device(chaos, monkeypatch)
    server, tokens = make_server(), prompt(1, 41)
    request = server.add("a", tokens, 1)
    while not request.is_finished():
        server.step()  # the commit of the last step is held
    ids = list(range(1, 41)) if names_blocks else []
    blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
    other = server.add("b", prompt(2, 41), 1)
    server.connector.update_state_after_alloc(other, blocks, 0)
    stopped = threading.Event()

    def move() -> None:
        while not stopped.wait(0.001):
            chaos.move(4)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        server.connector.build_connector_meta(SchedulerOutput.make_empty())
        for cache in server.runners[0].caches:  # the load of the other connector
            for block_id in range(1, 41):
                cache.zero(block_id)
        server.abort("b")
        evict_all(server)
        again = serve_and_check(server, "again", tokens, 2)
        assert server.loaded(again) == 40
    finally:
        server.close()
        stopped.set()
        mover.join()


def test_aborted_load_frees_its_blocks_when_it_has_ended(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    ended: list[bool] = []
    for name in ("is_done", "has_arrived"):
        monkeypatch.setattr(SyncLayers, name, property(lambda layers: bool(ended)))
    tokens = evicted_prompt(server, 1)
    request = server.add("b", tokens, 1)
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        server.step()
    server.abort("b")
    server.step()
    assert "b" in server.scheduler.requests, "blocks that a load writes to were freed"
    ended.append(True)
    server.run()
    assert server.outputs["b"] == []
    pool = server.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_step_does_not_wait_for_a_load_behind_another(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "FRONT_SECONDS", 0.0)
    monkeypatch.setattr(SyncLayers, "is_done", False)  # for the scheduler half
    server = make_server({"load": "layerwise"}, num_blocks=64)
    prompts = [prompt(seed, 41) for seed in (1, 2)]
    for seed, tokens in enumerate(prompts):
        server.add(f"before{seed}", tokens, 1)
    evict_all(server)
    first, second = (server.add(f"r{i}", tokens, 2) for i, tokens in enumerate(prompts))
    server.step()
    assert first.status == RequestStatus.RUNNING
    assert second.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    monkeypatch.undo()
    server.run()
    for i, (request, tokens) in enumerate(zip((first, second), prompts, strict=True)):
        assert server.outputs[f"r{i}"] == generate(tokens, 0, 2)
        assert server.loaded(request) == 40


def test_step_does_not_wait_for_a_load_behind_one_that_has_not_begun(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(
        {"load": "layerwise", "step_wait_seconds": 0.0, "admission": "arrival"}, num_blocks=64
    )
    prompts = [prompt(seed, 41) for seed in (1, 2)]
    for seed, tokens in enumerate(prompts):
        server.add(f"before{seed}", tokens, 1)
    evict_all(server)
    monkeypatch.setattr(link, "FRONT_SECONDS", 0.0)
    monkeypatch.setattr(FreedBlocks, "are_used", lambda freed, block_ids: True)
    other = server.add("other", prompt(3, 9), 2)
    first = server.add("r0", prompts[0], 2)  # its load does not suit a step with other requests
    while other.request_id in server.scheduler.requests:
        server.step()
    second = server.add("r1", prompts[1], 2)  # its load would suit a step of its own
    server.step()
    engine = server.connector.engine
    assert engine.cache.statistics().attention.onloaded_blocks == 0
    assert second.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    monkeypatch.undo()
    server.run()
    for i, (request, tokens) in enumerate(zip((first, second), prompts, strict=True)):
        assert server.outputs[f"r{i}"] == generate(tokens, 0, 2)
        assert server.loaded(request) == 40


def test_step_with_other_requests_does_not_wait_for_a_long_load(make_server: MakeServer) -> None:
    server = make_server({"load": "layerwise", "step_wait_seconds": 0.0}, num_blocks=64)
    tokens = evicted_prompt(server, 1)
    server.add("other", prompt(2, 9), 30)
    server.step()
    behind = server.add("behind", tokens, 1)
    server.step()
    assert behind.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    server.run()
    assert server.loaded(behind) == 40
    evict_all(server)
    alone = server.add("alone", tokens, 1)
    server.step()
    assert alone.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert server.loaded(alone) == 40


def test_long_load_does_not_hold_a_step_that_begins_another_request(
    make_server: MakeServer,
) -> None:
    server = make_server(
        {"load": "layerwise", "step_wait_seconds": 0.0, "admission": "arrival"}, num_blocks=64
    )
    tokens = evicted_prompt(server, 1)
    server.add("other", prompt(2, 9), 2)
    behind = server.add("behind", tokens, 1)
    server.step()
    assert behind.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    server.run()
    assert server.loaded(behind) == 40


@pytest.fixture
def async_server(make_server: MakeServer) -> Server:
    """A server with asynchronous scheduling; only its host memory has the prompt(1, 41).

    The prompt needs 11 of 13 blocks, so a load of it writes to blocks that were freed just before.
    """
    server = make_server({"load": "layerwise"}, num_blocks=14, async_scheduling=True)
    # Newer versions free blocks only when the step in flight has ended. The connector does not
    # depend on it.
    server.scheduler.defer_block_free = False
    server.add("a", prompt(1, 41), 1)
    server.run()
    server.drain()
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    return server


@pytest.fixture
def waits(async_server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the scheduler half has waited for; a wait computes the steps in flight."""
    steps: list[int] = []

    def compute(cache: HostCache, step: int) -> None:
        steps.append(step)
        async_server.compute_in_flight()

    monkeypatch.setattr(HostCache, "wait_computed", compute)
    return steps


def test_load_of_a_step_waits_for_the_step_that_writes_freed_blocks(
    async_server: Server, waits: list[int]
) -> None:
    server, tokens = async_server, prompt(1, 41)
    server.add("aborted", prompt(2, 17), 20)
    for _ in range(3):
        server.step()
    server.abort("aborted")
    again = server.add("b", tokens, 3)
    server.run()
    assert len(waits) == 1
    assert server.loaded(again) == 40
    assert server.outputs["b"] == generate(tokens, 0, 3)


def scheduled_steps(server: Server) -> list[Any]:
    """Return a list to which the server adds the steps that it schedules."""
    outputs: list[Any] = []
    schedule = server.scheduler.schedule

    def note() -> Any:
        outputs.append(schedule())
        return outputs[-1]

    server.scheduler.schedule = note
    return outputs


def test_with_auto_a_request_joins_the_step_of_its_match(make_server: MakeServer) -> None:
    server = make_server(async_scheduling=True)
    tokens = evicted_prompt(server, 1)
    steps = scheduled_steps(server)
    request = server.add("b", tokens, 3)
    server.run()
    assert steps[0].num_scheduled_tokens == {"b": 1}
    assert steps[0].kv_connector_metadata.waits == ["b"]
    assert server.loaded(request) == 40
    assert server.outputs["b"] == generate(tokens, 0, 3)


def test_with_auto_a_request_joins_no_step_that_would_wait_for_freed_blocks(
    make_server: MakeServer,
) -> None:
    server = make_server(num_blocks=14, async_scheduling=True)
    server.scheduler.defer_block_free = False
    tokens = prompt(1, 41)
    server.add("a", tokens, 1)
    server.run()
    server.drain()
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()
    server.add("aborted", prompt(2, 17), 20)
    for _ in range(3):
        server.step()
    server.abort("aborted")
    steps = scheduled_steps(server)
    request = server.add("b", tokens, 3)
    server.run()
    assert steps[0].num_scheduled_tokens == {}
    assert server.loaded(request) == 40
    assert server.outputs["b"] == generate(tokens, 0, 3)


def test_with_auto_a_load_that_cannot_begin_in_its_step_ends_the_server(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has scheduled the step, which would compute with blocks of unknown content."""
    server = make_server(async_scheduling=True)
    tokens = evicted_prompt(server, 1)

    def refuse(*args: Any, **options: Any) -> None:
        raise TransferError("refused")

    monkeypatch.setattr(Lease, "assign", refuse)
    server.add("b", tokens, 3)
    with pytest.raises(TransferError, match="the load of request b could not begin"):
        server.run()


def test_load_of_a_step_waits_for_the_step_that_writes_blocks_of_a_preempted_request(
    async_server: Server, waits: list[int]
) -> None:
    server, tokens = async_server, prompt(1, 41)
    request = server.add("b", tokens, 8)
    for _ in range(3):
        server.step()
    # A reset preempts between two schedules: the next one loads while the step is in flight.
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    assert waits == []
    server.run()
    assert len(waits) == 1
    engine = server.connector.engine
    assert engine.cache.statistics().attention.onloaded_blocks == 20  # 10 before the reset
    assert server.outputs["b"] == generate(tokens, 0, 8)


def test_events_of_steps_that_save_nothing_are_forgotten(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: weakref.WeakSet[ManualEvent] = weakref.WeakSet()

    def record(device: str) -> ManualEvent:
        event = ManualEvent()
        events.add(event)
        return event

    monkeypatch.setattr(worker, "_record_event", record)
    server = make_server()
    server.add("a", prompt(1, 1), 2)
    server.run()
    gc.collect()
    assert len(events) == 0


def test_preempted_request_loads_its_own_blocks(make_server: MakeServer) -> None:
    server = make_server(num_blocks=24)
    tokens = [prompt(i, 30) for i in range(3)]
    requests = [server.add(f"r{i}", tokens[i], 30) for i in range(3)]
    server.run()
    assert any(request.num_preemptions for request in requests)
    for i in range(3):
        assert server.outputs[f"r{i}"] == generate(tokens[i], 0, 30)


def test_request_that_a_reset_has_preempted_is_left_at_the_next_step(
    make_server: MakeServer,
) -> None:
    """vLLM 0.22 does not list these requests, and gives their blocks to others at once."""
    server, wishes = make_server(), {"kv_transfer_params": {"aiokv": {"read": False}}}
    for name in "ab":
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, extra_args=wishes)
        server.add(name, prompt(ord(name), 41), 8, sampling_params=sampling)
    server.step()
    server.step()
    assert num_leases(server) == 2
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
    server.scheduler.max_num_scheduled_tokens = 8  # the next step has room for one of them
    server.step()
    server.drain()
    assert num_leases(server) == 1
    server.run()
    for name in "ab":
        assert server.outputs[name] == generate(prompt(ord(name), 41), 0, 8)


def test_blocks_of_requests_that_decode_are_saved_together(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(num_blocks=64)
    commit, close = Lease.commit_blocks, CacheEngine.step
    saved: list[list[int]] = [[]]  # blocks of each request, by save

    def note(lease: Lease, block_ids: list[int], *args: Any, **options: Any) -> int:
        saved[-1].append(len(block_ids))
        return commit(lease, block_ids, *args, **options)

    def end(engine: CacheEngine, *args: Any) -> Any:
        saved.append([])
        return close(engine, *args)

    monkeypatch.setattr(Lease, "commit_blocks", note)
    monkeypatch.setattr(CacheEngine, "step", end)
    server.add("a", prompt(1, 10), 80)
    server.add("b", prompt(2, 13), 80)
    server.run()
    server.connector.engine.call(int)  # behind the posted calls
    # The prompts; in step 56, up to positions 65 and 68; at the end, all but the last position.
    assert [sorted(blocks) for blocks in saved if blocks] == [[2, 3], [14, 14], [6, 6]]


class BrokenDevice(FlakyDevice):
    """A device whose onloads fail once ``is_broken`` is set."""

    is_broken = False
    arena: HostArena

    def attach(self, regions: Any, arena: HostArena, *args: Any) -> None:
        self.arena = arena
        super().attach(regions, arena, *args)

    def copy(self, route: Any, source_ids: Any, target_ids: Any, *args: Any) -> Any:
        self.faults.first_bad = self._first_bad if route.source == "host" else _never
        return super().copy(route, source_ids, target_ids, *args)

    def _first_bad(self, num_blocks: int, *, at_least: int = 0) -> int | None:
        return at_least if self.is_broken and num_blocks > at_least else None


def _never(num_blocks: int, *, at_least: int = 0) -> None:
    return None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> BrokenDevice:
    device = BrokenDevice(random.Random(0), refuse_share=0.0, fail_share=0.0)

    def make(config: Any, regions: Any, _: str, **options: Any) -> SyncEngine:
        return SyncEngine(config, regions, device, **options)

    monkeypatch.setattr(opening, "SyncEngine", make)
    return device


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_failed_load_is_computed_again(
    make_server: MakeServer, broken: BrokenDevice, load: str
) -> None:
    server = make_server({"load": load})
    tokens = evicted_prompt(server, 4)
    broken.is_broken = True
    serve_and_check(server, "b", tokens, 4)
    assert not server.errors
    broken.is_broken = False
    evict_all(server)
    serve_and_check(server, "c", tokens, 4)


def test_blocks_of_a_failed_load_of_a_step_are_not_used_by_a_request_with_the_same_prompt(
    make_server: MakeServer, broken: BrokenDevice
) -> None:
    server = make_server({"load": "layerwise"})
    tokens = evicted_prompt(server, 4)
    broken.is_broken = True
    server.add("first", tokens, 4)
    server.add("second", tokens, 4)
    server.step()  # vLLM's cache has the blocks of the load before it has failed
    server.abort("first")  # it does not compute them again
    server.run()
    assert server.outputs["second"] == generate(tokens, 0, 4)
    broken.is_broken = False
    evict_all(server)
    serve_and_check(server, "third", tokens, 4)


def test_load_of_an_engine_that_has_failed_is_computed_again(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 4)

    def fail(layers: SyncLayers) -> None:
        monkeypatch.undo()
        raise BrokenEngineError("the thread of the engine has failed")

    monkeypatch.setattr(SyncLayers, "raise_for_error", fail)
    serve_and_check(server, "b", tokens, 4)
    assert server.statistics.reduce()["failed_blocks"] == 10


def test_failed_load_of_a_step_ends_a_server_with_asynchronous_scheduling(
    make_server: MakeServer, broken: BrokenDevice
) -> None:
    server = make_server({"load": "layerwise"}, async_scheduling=True)
    tokens = evicted_prompt(server, 4)
    broken.is_broken = True
    server.add("b", tokens, 4)
    with pytest.raises(TransferError, match="loads of 10 blocks have failed"):
        server.run()
    assert server.outputs["b"] == []


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


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_corrupt_block_is_computed_again(
    make_server: MakeServer, broken: BrokenDevice, load: str
) -> None:
    server = make_server({"load": load, "verify": "checksum"})
    tokens = evicted_prompt(server, 4)
    server.drain()
    broken.arena.blocks[:, 17] ^= 1
    serve_and_check(server, "b", tokens, 4)
    assert server.statistics.reduce()["failed_blocks"] > 0


def test_failed_load_fails_the_request_with_policy_fail(
    make_server: MakeServer, broken: BrokenDevice
) -> None:
    server = make_server(failure_policy="fail")
    tokens = evicted_prompt(server, 4)
    broken.is_broken = True
    server.add("b", tokens, 4)
    server.run()
    assert server.errors == {"b"}


def test_blocks_of_a_failed_load_leave_the_prefix_cache(
    make_server: MakeServer, broken: BrokenDevice
) -> None:
    server = make_server({"load": "layerwise"})
    tokens = evicted_prompt(server, 4)
    broken.is_broken = True
    server.add("b", tokens, 4)
    server.step()
    broken.is_broken = False
    (request,) = server.scheduler.running
    assert request.num_computed_tokens == 0
    server.scheduler.running.clear()  # preempted before the blocks are computed again
    server.scheduler._preempt_request(request, 0.0)
    server.scheduler.prev_step_scheduled_req_ids.clear()
    server.add("c", tokens, 4)
    server.run()
    for name in ("b", "c"):
        assert server.outputs[name] == generate(tokens, 0, 4)


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


def test_server_goes_on_without_a_lost_rank(make_server: MakeServer) -> None:
    server = make_server(num_ranks=2)
    tokens = evicted_prompt(server, 4)
    running = server.add("running", prompt(2, 30), 20)
    server.step()
    server.runners[1].connector.shutdown()
    request = serve_and_check(server, "b", tokens, 4)
    assert server.outputs["running"] == generate(prompt(2, 30), 0, 20)
    flood(server)
    assert server.scheduler.kv_cache_manager.reset_prefix_cache()  # no save is left to wait for
    request = serve_and_check(server, "c", tokens, 4)
    assert server.loaded(request) == server.loaded(running) == 0
    assert server.connector.get_kv_connector_stats().reduce()["usable"] == 0


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


def test_replayed_graph_waits_for_all_layers(make_server: MakeServer) -> None:
    server = make_server({"load": "layerwise"})
    tokens = evicted_prompt(server, 4)
    server.runners[0].graph_mode = CUDAGraphMode.FULL  # wait_for_layer_load is not called
    serve_and_check(server, "b", tokens, 4)


def test_requests_with_loaded_blocks_do_not_block_one_another(make_server: MakeServer) -> None:
    server = make_server(num_blocks=32)
    tokens = [prompt(0, 32), prompt(1, 56)]
    for i, known in enumerate(tokens):
        server.add(f"first{i}", known, 1)
        evict_all(server)
    # The first needs 19 of 31 blocks, the second 17 of the 23 that the first load leaves. With both
    # loads in place, 9 blocks are left, and the first request needs 11.
    longer = [tokens[0] + prompt(10, 44), tokens[1] + prompt(11, 10)]
    for i, known in enumerate(longer):
        server.add(f"r{i}", known, 2)
    server.run(2_000)
    for i, known in enumerate(longer):
        assert server.outputs[f"r{i}"] == generate(known, 0, 2)


def test_a_load_begins_in_the_step_that_gives_a_loaded_request_its_other_blocks(
    make_server: MakeServer,
) -> None:
    """The blocks that the request has got since are not counted as missing any more."""
    server = make_server({"load": "async"}, num_blocks=24)
    tokens = [prompt(0, 32), prompt(1, 32)]
    for i, known in enumerate(tokens):
        server.add(f"first{i}", known, 1)
        evict_all(server)
    # The first needs 12 of 23 blocks, of which the load has 8. That leaves 11 for the second one,
    # which needs 10.
    first = server.add("a", tokens[0] + prompt(10, 13), 4)
    while "a" not in server.scheduler.finished_recving_kv_req_ids:
        server.step()
    second = server.add("b", tokens[1] + prompt(11, 4), 1)
    server.step()
    assert first.status == RequestStatus.RUNNING
    assert second.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    server.run()
    assert server.outputs["a"] == generate(first.prompt_token_ids, 0, 4)
    assert server.loaded(second) == 32


def test_abort_of_a_load_that_has_not_begun(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    tokens = evicted_prompt(server, 1)
    monkeypatch.setattr(FreedBlocks, "are_used", lambda freed, block_ids: True)
    request = server.add("b", tokens, 1)
    server.step()
    server.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    server.abort("b")
    server.run(100)
    assert "b" not in server.scheduler.requests


def _occupied(server: Server, tokens: list[int]) -> tuple[Request, Request]:
    """Return a running request, and one with ``tokens`` that vLLM has no room for."""
    running = server.add("running", prompt(5, 60), 24)
    while not running.num_output_tokens:
        server.step()
    waiting = server.add("waiting", tokens, 2)
    server.step()
    assert waiting.status == RequestStatus.WAITING
    return running, waiting


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The owners of the leases that were matched."""
    owners: list[str] = []
    match = CacheEngine.match

    def note(engine: CacheEngine, tokens: Any, **options: Any) -> Lease:
        owners.append(options["owner"])
        return match(engine, tokens, **options)

    monkeypatch.setattr(CacheEngine, "match", note)
    return owners


def test_request_that_vllm_has_no_room_for_is_matched_once(
    make_server: MakeServer, matches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24)
    tokens = evicted_prompt(server, 1)
    _, waiting = _occupied(server, tokens)
    server.add("behind", prompt(6, 9), 1)
    while waiting.status == RequestStatus.WAITING:
        server.step()
        held = len([o for o in matches if o == "waiting"])
    assert held == 2  # again when vLLM had room
    server.run()
    assert server.loaded(waiting) == 40
    assert server.outputs["waiting"] == generate(tokens, 0, 2)
    assert num_leases(server) == 0


def test_waiting_request_is_matched_anew_after_a_while(
    make_server: MakeServer, matches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 0.0)
    server = make_server(num_blocks=24)
    _occupied(server, evicted_prompt(server, 1))
    for _ in range(3):
        server.step()
    assert matches.count("waiting") == 4
    server.run()


def test_blocks_that_are_saved_while_a_request_waits_are_loaded(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24, prefix_caching=False)
    tokens = prompt(5, 60)
    running, waiting = _occupied(server, tokens)  # the prompt of the running request
    server.drain()
    while running.request_id in server.scheduler.requests:
        assert waiting.status == RequestStatus.WAITING
        server.step()
    server.run()
    assert server.loaded(waiting) == 56
    assert server.outputs["waiting"] == generate(tokens, 0, 2)


def test_waiting_request_loads_nothing_that_was_saved_before_a_reset(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24)
    tokens = evicted_prompt(server, 1)
    _, waiting = _occupied(server, tokens)
    assert server.connector.reset_cache()
    server.run()
    assert server.loaded(waiting) == 0
    assert server.outputs["waiting"] == generate(tokens, 0, 2)
    evict_all(server)
    assert server.loaded(serve_and_check(server, "again", tokens, 2)) == 40  # saved again


def test_request_that_vllm_no_longer_asks_for_keeps_no_blocks(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24)
    tokens = evicted_prompt(server, 1)
    _, waiting = _occupied(server, tokens)
    leases = num_leases(server)
    server.scheduler.waiting.remove_request(waiting)  # as behind a request of higher priority
    server.step()
    server.step()
    assert num_leases(server) == leases - 1
    server.scheduler.waiting.prepend_request(waiting)
    server.run()
    assert server.loaded(waiting) == 40


def test_blocks_that_vllm_allocates_after_the_message_are_loaded(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 defers the loads of a step until the step before has ended."""
    server = make_server()
    tokens = evicted_prompt(server, 1)
    half = server.connector
    deferred: list[Any] = []
    allocated = type(half).update_state_after_alloc

    def defer(connector: Any, request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            deferred.append((request, blocks, num_external))
        else:
            allocated(connector, request, blocks, num_external)

    monkeypatch.setattr(type(half), "update_state_after_alloc", defer)
    server.add("other", prompt(2, 9), 12)
    request = server.add("b", tokens, 4)
    for _ in range(3):
        server.step()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = deferred
    allocated(half, *load)
    server.run()
    assert server.loaded(request) == 40
    assert server.outputs["b"] == generate(tokens, 0, 4)


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


def test_reset_forgets_host_memory(make_server: MakeServer) -> None:
    server = make_server()
    tokens = prompt(1, 41)
    server.add("a", tokens, 8)
    for _ in range(6):
        server.step()
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    running = server.scheduler.requests["a"]
    assert running.num_computed_tokens == 0
    server.run()
    assert server.outputs["a"] == generate(tokens, 0, 8)
    evict_all(server)
    assert server.connector.reset_cache()
    request = server.add("b", tokens, 2)
    server.run()
    assert server.loaded(request) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_of_before_a_sleep_is_loaded_after_it(
    make_server: MakeServer, tmp_path: Path, num_ranks: int
) -> None:
    """The calls of vLLM 0.33: a reset with the connector, then the workers unmap their tensors."""
    extra = {"stores": [f"disk:{tmp_path}/{{rank}}?bytes=16MiB"], "store_wait_seconds": 60.0}
    server = make_server(extra, num_ranks=num_ranks)
    tokens = evicted_prompt(server, 1)
    server.drain()
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for runner in server.runners:
        assert runner.connector is not None
        runner.connector.unregister_kv_caches()
        for cache in runner.caches:
            cache.tensor.fill_(-7)  # what the memory has after it was mapped again is undefined
    request = serve_and_check(server, "awake", tokens, 1)
    assert server.loaded(request) == 0
    evict_all(server)
    assert server.loaded(serve_and_check(server, "again", tokens, 1)) == 40


@pytest.mark.parametrize("follows", [True, False])
def test_blocks_are_forgotten_when_vllm_empties_its_cache(
    make_server: MakeServer, follows: bool
) -> None:
    """vLLM empties it before an update of the weights, and does not tell its connector."""
    server = make_server({"follow_resets": follows})
    tokens = prompt(1, 41)
    server.add("a", tokens, 1)
    server.run()
    flood(server)
    request = server.add("b", tokens, 2)
    server.run()
    assert server.loaded(request) == 40
    server.run()
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
    for name, loaded in (("c", 0 if follows else 40), ("d", 40)):
        request = server.add(name, tokens, 2)
        server.run()
        assert server.loaded(request) == loaded
        assert server.outputs[name] == generate(tokens, 0, 2)
        flood(server)


def test_cache_that_cannot_forget_is_used_no_more(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server({"follow_resets": True})
    tokens = prompt(1, 41)
    server.add("a", tokens, 1)
    evict_all(server)
    monkeypatch.setattr(HostCache, "reset", lambda cache, timeout: False)
    for name in ("b", "c"):
        request = server.add(name, tokens, 2)
        server.run()
        assert server.loaded(request) == 0
        assert server.outputs[name] == generate(tokens, 0, 2)
        flood(server)
    assert server.connector.get_kv_connector_stats().reduce()["usable"] == 0


def test_release_of_vllm_that_does_not_show_resets_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = VllmBlocks()
    pool.bind(SimpleNamespace())
    assert not pool.take_reset()
    assert "resets_unseen" in caplog.text


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


def test_reset_hides_blocks_of_stores(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    tokens = evicted_prompt(server, 1)
    assert server.connector.reset_cache()
    request = server.add("b", tokens, 2)
    server.run()
    assert server.loaded(request) == 0
    assert server.outputs["b"] == generate(tokens, 0, 2)


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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_gb": 1}, "unknown key 'host_gb'"),
        ({}, "exactly one of them must be set"),
        ({"host_gib": 1, "cpu_bytes_to_use": 1}, "exactly one of them must be set"),
        ({"host_gib": -1}, "host_gib is -1"),
        ({"host_gib": "64"}, "host_gib is '64', a text without a unit"),
        ({"host_gib": "64GB/s"}, "host_gib is '64GB/s'; it must be a size"),
        ({"cpu_bytes_to_use": "all"}, "cpu_bytes_to_use is 'all'; it must be a size"),
        ({"host_gib": 1, "load": "sync"}, "load is 'sync'"),
        ({"host_gib": 1, "write_policy": "write_back"}, "write_policy is 'write_back'"),
        ({"host_gib": 1, "stores": "disk:/x"}, "stores is 'disk:/x'"),
    ],
)
def test_wrong_setting_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(extra)


@pytest.mark.parametrize(
    "extra", [{"host_gib": 1.5}, {"host_gib": "1.5GiB"}, {"cpu_bytes_to_use": "1536 MiB"}]
)
def test_sizes_may_have_units(extra: dict[str, Any]) -> None:
    assert Options.parse(extra).host_bytes == 1_536 << 20


def test_more_host_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 7 << 30)
    options = Options.parse({"host_gib": 8})
    with pytest.raises(ConfigError, match=r"host memory is 8\.00 GiB; .* has 7\.00 GiB available"):
        opening.cache_config(vllm_config(extra=HOST), kv_cache_config("flash", 40), options)


def _check(config: Any, groups: int = 1, spec: Any = None, **extra: Any) -> None:
    cache = kv_cache_config("flash", 40, spec)
    cache.kv_cache_groups *= groups
    check_config(config, cache, Options.parse({"host_gib": 1} | extra))


def test_socket_directory_that_other_users_can_access_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = Options.parse({"host_gib": 1})
    folder = Path(options.default_socket_path("engine")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"another owner, or a mode other than 0700"):
        options.default_socket_path("engine")


def _engine(index: int, **extra: Any) -> tuple[VllmConfig, Options]:
    """Return the configuration of one of two engines, as vLLM makes it for a dense model."""
    config = vllm_config(extra=HOST)
    config.parallel_config.data_parallel_index = index
    config.kv_transfer_config.engine_id = f"engine_dp{index}"
    return config, Options.parse({"host_gib": 1} | extra)


def test_engines_of_data_parallelism_have_paths_of_their_own() -> None:
    engines = [
        _engine(i, stores=["disk:/kv/{dp}-{rank}?bytes=1GiB"], socket="/s/{dp}") for i in (0, 1)
    ]
    assert [opening.stores_of(*engine, 3) for engine in engines] == [
        ["disk:/kv/0-3?bytes=1GiB"],
        ["disk:/kv/1-3?bytes=1GiB"],
    ]
    assert [opening.socket_path(*engine) for engine in engines] == ["/s/0", "/s/1"]
    defaults = {opening.socket_path(*_engine(i)) for i in (0, 1)}
    assert len(defaults) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_path_of_several_engines_of_data_parallelism_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match="stores has 'disk:/kv' for several engines"):
        opening.stores_of(*_engine(index, stores=["disk:/kv"]), 0)
    with pytest.raises(ConfigError, match="socket has '/s' for several engines"):
        opening.socket_path(*_engine(index, socket="/s"))
    assert opening.stores_of(*_engine(index, stores=["directory:/kv"]), 0) == ["directory:/kv"]


def _model_name(hf_config: dict[str, Any] | None = None, **fields: Any) -> str | None:
    config = vllm_config(extra=HOST)
    if hf_config is not None:
        config.model_config.hf_config = PretrainedConfig(**hf_config)
    for name, value in fields.items():
        setattr(config.model_config, name, value)
    cache = kv_cache_config("flash", 40)
    return opening.cache_config(config, cache, Options.parse(HOST)).model


def test_stored_blocks_are_found_with_the_same_model_only() -> None:
    """Blocks in a store outlive the server, whose options may change the KV of a prompt."""
    plain = {"rope_parameters": {"rope_theta": 10_000.0}, "torch_dtype": torch.bfloat16}
    name = _model_name(plain)
    moved = {
        "transformers_version": "6.0",
        "_name_or_path": "/copy",
        **dict(reversed(plain.items())),
    }
    assert _model_name(moved) == name
    odd = [{**plain, "heads": set(names), "object": object()} for names in ("abcdef", "fedcba")]
    assert _model_name(odd[0]) == _model_name(odd[1]) != name
    stretched = {**plain, "rope_parameters": {"rope_theta": 1_000_000.0}}
    others = [
        _model_name(stretched),
        _model_name(plain, quantization="fp8"),
        _model_name(plain, revision="main"),
        _model_name(plain, dtype="float16"),
    ]
    assert len({name, *others}) == 5


def test_unequal_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(extra=HOST, num_stages=2)
    _check(config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", f"{len(LAYER_NAMES)},0")
    with pytest.raises(ConfigError, match=rf"stages of \[{len(LAYER_NAMES)}, 0\] layers"):
        _check(config)


@pytest.mark.parametrize(
    ("nodes", "is_served"),
    [(["a", "a"], True), (["a", "b"], False), (["b", "a", "b"], True)],
    ids=str,
)
def test_ranks_of_ray_on_several_nodes_are_refused(
    nodes: list[str], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    ray = SimpleNamespace(placement_group_table=lambda group: table)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=ray))
    monkeypatch.setitem(sys.modules, "ray.util", ray)
    config = vllm_config(extra=HOST, num_ranks=2)
    config.parallel_config.distributed_executor_backend = "ray"
    _check(config)  # there is no placement group
    config.parallel_config.placement_group = SimpleNamespace()
    if is_served:
        _check(config)
    else:
        with pytest.raises(ConfigError, match="Ray has placed the 2 ranks on several nodes"):
            _check(config)


def test_configuration_that_is_not_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(vllm_config(extra=HOST))
    window = SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.int32, sliding_window=16
    )
    _check(vllm_config(extra=HOST), spec=window)
    with pytest.raises(ConfigError, match="no layer of full attention"):
        _check(vllm_config(extra=HOST), spec=window, load="layerwise")
    _check(vllm_config(extra=HOST), groups=2)
    config = vllm_config(extra=HOST, async_scheduling=True)
    _check(config, load="layerwise")
    for extra in ({"in_process": False}, {"verify": "checksum"}):
        with pytest.raises(ConfigError, match="asynchronous scheduling"):
            _check(config, load="layerwise", **extra)
    config = vllm_config(extra=HOST)
    config.parallel_config.pipeline_parallel_size = 2
    _check(config)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        _check(config, load="layerwise")
    config = vllm_config(extra=HOST)
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match="nnodes is 2; AiokvConnector serves 1 only"):
        _check(config)
    config = vllm_config(extra=HOST)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ConfigError, match="external_launcher"):
        _check(config)
    if hasattr(CacheConfig, "calculate_kv_scales"):  # until 0.27
        config = vllm_config(extra=HOST)
        config.cache_config.calculate_kv_scales = True
        _check(config)
        with pytest.raises(ConfigError, match="calculate_kv_scales is set"):
            _check(config, stores=["disk:/x"])
    config = vllm_config(extra=HOST)
    config.model_config.enable_sleep_mode = True
    if not compat.announces_sleep():
        with pytest.raises(ConfigError, match="enable_sleep_mode"):
            _check(config)
    monkeypatch.setattr(compat, "announces_sleep", lambda: True)
    _check(config)
