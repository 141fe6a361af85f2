"""Requests with the connector generate what the model generates without a cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.connectors.vllm.model import VOCABULARY, generate
from tests.connectors.vllm.runner import LAYOUTS
from tests.connectors.vllm.server import Server, vllm_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakeServer = Callable[..., Server]

HOST = {"cpu_bytes_to_use": 1 << 20}


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    servers: list[Server] = []

    def make(
        extra: dict[str, Any] | None = None, layout: str = "flash", seed: int = 0, **options: Any
    ) -> Server:
        config = vllm_config(extra=HOST | (extra or {}), **options)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_evicted_prompt_is_loaded(make_server: MakeServer, layout: str, load: str) -> None:
    server = make_server({"load": load}, layout)
    tokens = prompt(1, 41)
    server.add("a", tokens, 6)
    server.run()
    flood(server)
    request = server.add("b", tokens, 6)
    server.run()
    assert server.outputs["b"] == server.outputs["a"] == generate(tokens, 0, 6)
    assert server.loaded(request) == 40
