"""Server and prompts of the tests of requests with the connector."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from tests.connectors.vllm.configs import vllm_config
from tests.connectors.vllm.model import VOCABULARY, generate
from tests.connectors.vllm.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.request import Request

    MakeServer = Callable[..., Server]


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
        of_model = {name: options[name] for name in ("num_drafts", "kinds") if name in options}
        server = Server(config, random.Random(seed), layout, **of_model)
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


def wishing(num_tokens: int = 1, **wishes: Any) -> SamplingParams:
    """Return options of a request with parameters for the connector."""
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"do_remote_prefill": False, "aiokv": wishes}},
    )


def occupied(server: Server, tokens: list[int]) -> tuple[Request, Request]:
    """Return a running request, and one with ``tokens`` that vLLM has no room for."""
    running = server.add("running", prompt(5, 60), 24)
    while not running.num_output_tokens:
        server.step()
    waiting = server.add("waiting", tokens, 2)
    server.step()
    assert waiting.status == RequestStatus.WAITING
    return running, waiting
