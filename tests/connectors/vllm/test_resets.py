"""Resets of vLLM, sleep and weight updates: no block of before is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from vllm.sampling_params import SamplingParams

from aiokv.connectors.vllm import scheduler
from aiokv.connectors.vllm.blocks import VllmBlocks
from aiokv.connectors.vllm.cache import HostCache
from tests.connectors.vllm.model import generate
from tests.connectors.vllm.serving import (
    evict_all,
    evicted_prompt,
    flood,
    num_leases,
    occupied,
    prompt,
    serve_and_check,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.connectors.vllm.serving import MakeServer


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


def test_waiting_request_loads_nothing_that_was_saved_before_a_reset(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "KEEP_SECONDS", 1e9)
    server = make_server(num_blocks=24)
    tokens = evicted_prompt(server, 1)
    _, waiting = occupied(server, tokens)
    assert server.connector.reset_cache()
    server.run()
    assert server.loaded(waiting) == 0
    assert server.outputs["waiting"] == generate(tokens, 0, 2)
    evict_all(server)
    assert server.loaded(serve_and_check(server, "again", tokens, 2)) == 40  # saved again


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


def test_reset_hides_blocks_of_stores(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server({"stores": [f"disk:{tmp_path}?bytes=64MiB"]})
    tokens = evicted_prompt(server, 1)
    assert server.connector.reset_cache()
    request = server.add("b", tokens, 2)
    server.run()
    assert server.loaded(request) == 0
    assert server.outputs["b"] == generate(tokens, 0, 2)
