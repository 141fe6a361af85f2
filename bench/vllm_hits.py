"""Share of prompt tokens that vLLM's prefix cache and host memory have, in one process, no model.

``.venv-vllm-0.22.1/bin/python -m bench.vllm_hits``, of ``make test-vllm``, asks 600 questions about
48 documents of 1,000 to 24,000 tokens, 353,000 together, with Zipf popularity, after one request
per document. Each has 32 to 511 tokens that no other prompt has, and 64 generated tokens. The KV
cache on the device has 98,304 tokens (12 GiB of KV of Llama 3 8B), host memory 131,072 (16 GiB).

By number of clients: ``device``: vLLM alone. ``larger``: vLLM alone with as many blocks as the
larger of both has; its hits are those of a host memory that mirrors the device. ``offloading``:
with vLLM's own ``OffloadingConnector``, whose transfers end at once. ``both``: with
``AiokvConnector``. ``sum``: vLLM alone with the blocks of both.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench import harness
from bench.vllm_scheduler import BLOCK_TOKENS, IDLE_SECONDS, Server

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE_BLOCKS: Final = 98_304 // BLOCK_TOKENS
HOST_BLOCKS: Final = 131_072 // BLOCK_TOKENS
DOCUMENTS: Final = 48
REQUESTS: Final = 600
CLIENTS: Final = (1, 4, 16)
GENERATED: Final = 64


def run(quick: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    lengths = np.geomspace(1_000, 24_000, DOCUMENTS, dtype=int).tolist()
    documents = [rng.integers(0, 50_000, length).tolist() for length in lengths]
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    count = 20 if quick else REQUESTS
    chosen = rng.choice(DOCUMENTS, count, p=popularity / popularity.sum())
    questions = [
        documents[place] + rng.integers(0, 50_000, rng.integers(32, 511, endpoint=True)).tolist()
        for place in chosen
    ]
    servers: dict[str, tuple[int, str]] = {
        "device": (DEVICE_BLOCKS, ""),
        "larger": (max(DEVICE_BLOCKS, HOST_BLOCKS), ""),
        "offloading": (DEVICE_BLOCKS, "OffloadingConnector"),
        "both": (DEVICE_BLOCKS, "AiokvConnector"),
        "sum": (DEVICE_BLOCKS + HOST_BLOCKS, ""),
    }
    return {
        f"hit_share_{clients}_clients": {
            name: _hit_share(*server, documents, questions, clients)
            for name, server in servers.items()
        }
        for clients in (CLIENTS[:1] if quick else CLIENTS)
    }


def _hit_share(
    device_blocks: int,
    connector: str,
    documents: Sequence[list[int]],
    questions: Sequence[list[int]],
    clients: int,
) -> float:
    server = Server(device_blocks, connector, host_blocks=HOST_BLOCKS)
    try:
        _serve(server, documents, 2)
        cached = server.cached_tokens
        _serve(server, questions, clients)
        cached = server.cached_tokens - cached
    finally:
        server.close()
    return cached / sum(map(len, questions))


def _serve(server: Server, prompts: Sequence[list[int]], clients: int) -> None:
    waiting = iter(prompts)
    for prompt in waiting:
        while len(server.scheduler.requests) >= clients:
            if not server.step():
                time.sleep(IDLE_SECONDS)
        server.add(prompt, GENERATED)
    server.run()


def main() -> int:
    results = run("--quick" in sys.argv[1:])
    measured = harness.Run(machine=harness.machine(), benches={"vllm_hits": results})
    harness.save_each(measured, measured.benches)
    for name, value in harness.flatten(results).items():
        print(f"{name:40} {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
