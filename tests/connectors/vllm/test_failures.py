"""Failed loads, damaged blocks and lost ranks: requests generate the same, or fail."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.connectors.vllm import opening
from aiokv.errors import BrokenEngineError, TransferError
from aiokv.sync import SyncEngine, SyncLayers
from tests.connectors.vllm.model import generate
from tests.connectors.vllm.serving import evict_all, evicted_prompt, flood, prompt, serve_and_check
from tests.harness.flaky import FlakyDevice

if TYPE_CHECKING:
    from aiokv.worker.arena import HostArena
    from tests.connectors.vllm.serving import MakeServer


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
