"""Loads and saves beside the steps of vLLM, and requests that wait for room."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from aiokv import CacheEngine, Lease
from aiokv.connectors.vllm import link, scheduler, worker
from aiokv.connectors.vllm.blocks import FreedBlocks
from aiokv.connectors.vllm.cache import HostCache
from aiokv.errors import TransferError
from aiokv.sync import SyncLayers
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.manual import ManualEvent
from tests.connectors.vllm.model import generate
from tests.connectors.vllm.serving import (
    evict_all,
    evicted_prompt,
    num_leases,
    occupied,
    prompt,
    serve_and_check,
    wishing,
)
from tests.connectors.vllm.test_random_serving import use_device
from tests.harness.flaky import ChaosDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from vllm.v1.request import Request

    from tests.connectors.vllm.server import Server
    from tests.connectors.vllm.serving import MakeServer

    HoldEngine = Callable[[Server], tuple[threading.Event, Future[bool]]]


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
    server.add("b", other, 2, sampling_params=wishing(2, read=False, write=False))
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
    _, waiting = occupied(server, tokens)
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
    occupied(server, evicted_prompt(server, 1))
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
    running, waiting = occupied(server, tokens)  # the prompt of the running request
    server.drain()
    while running.request_id in server.scheduler.requests:
        assert waiting.status == RequestStatus.WAITING
        server.step()
    server.run()
    assert server.loaded(waiting) == 56
    assert server.outputs["waiting"] == generate(tokens, 0, 2)


def test_request_that_vllm_no_longer_asks_for_keeps_no_blocks(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24)
    tokens = evicted_prompt(server, 1)
    _, waiting = occupied(server, tokens)
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
