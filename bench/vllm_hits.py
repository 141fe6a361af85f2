"""Share of prompt tokens that vLLM's prefix cache and host memory have, in one process, no model.

``.venv-vllm-0.22.1/bin/python -m bench.vllm_hits``, of ``make test-vllm``, asks 600 questions about
48 documents of 1,000 to 24,000 tokens, 353,000 together, with Zipf popularity, after one request
per document. Each has 32 to 511 tokens that no other prompt has, and 64 generated tokens. The KV
cache on the device has 98,304 tokens (12 GiB of KV of Llama 3 8B), host memory 131,072 (16 GiB).

``hit_share_recorded_...`` has the questions that ``python -m bench.vllm --loads documents
--document-clients 4 16`` sends to a GPU: 128 of 4 clients, then 320 of 16.

By number of clients: ``device``: vLLM alone. ``larger``: vLLM alone with as many blocks as the
larger of both has; its hits are those of a host memory that mirrors the device. ``offloading``:
with vLLM's own ``OffloadingConnector``, whose transfers end at once. ``both``: with
``AiokvConnector``, in the order of arrival: no time passes here that limits another order.
``store``: the same with a disk store that is written and never read. ``sum``: vLLM alone with the
blocks of both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench import harness
from bench.vllm.cell import DOCUMENT_REQUESTS, DocumentQuestions, long_documents
from bench.vllm_scheduler import BLOCK_TOKENS, IDLE_SECONDS, Server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEVICE_BLOCKS: Final = 98_304 // BLOCK_TOKENS
HOST_BLOCKS: Final = 131_072 // BLOCK_TOKENS
DOCUMENTS: Final = 48
REQUESTS: Final = 600
CLIENTS: Final = (1, 4, 16)
GENERATED: Final = 64
VOCABULARY: Final = 50_000
PAGE_BYTES: Final = 4_096  # with a disk store, each block begins at a page
RECORDED_CLIENTS: Final = (4, 16)
SERVERS: Final[dict[str, tuple[int, str]]] = {
    "device": (DEVICE_BLOCKS, ""),
    "larger": (max(DEVICE_BLOCKS, HOST_BLOCKS), ""),
    "offloading": (DEVICE_BLOCKS, "OffloadingConnector"),
    "both": (DEVICE_BLOCKS, "AiokvConnector"),
    "store": (DEVICE_BLOCKS, "AiokvConnector"),
    "sum": (DEVICE_BLOCKS + HOST_BLOCKS, ""),
}


def run(quick: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    lengths = np.geomspace(1_000, 24_000, DOCUMENTS, dtype=int).tolist()
    documents = [_tokens(rng, length) for length in lengths]
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    count = 20 if quick else REQUESTS
    chosen = rng.choice(DOCUMENTS, count, p=popularity / popularity.sum())
    questions = [
        documents[place] + _tokens(rng, int(rng.integers(32, 511, endpoint=True)))
        for place in chosen
    ]
    results = {
        f"hit_share_{clients}_clients": {
            name: _hit_shares(name, documents, {clients: questions})[clients] for name in SERVERS
        }
        for clients in (CLIENTS[:1] if quick else CLIENTS)
    }
    if not quick:
        shares = {name: _recorded_hit_shares(name) for name in SERVERS}
        for clients in RECORDED_CLIENTS:
            results[f"hit_share_recorded_{clients}_clients"] = {
                name: share[clients] for name, share in shares.items()
            }
    return results


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCABULARY, count).tolist()
    return tokens


def _recorded_hit_shares(name: str) -> dict[int, float]:
    documents = long_documents()
    questions = DocumentQuestions(documents)
    loads = {
        clients: [question.token_ids(VOCABULARY) for question in questions.take(count)]
        for clients, count in DOCUMENT_REQUESTS.items()
    }
    return _hit_shares(
        name,
        [document.token_ids(VOCABULARY) for document in documents],
        {clients: loads[clients] for clients in RECORDED_CLIENTS},
    )


def _hit_shares(
    name: str,
    documents: Sequence[list[int]],
    loads: Mapping[int, Sequence[list[int]]],
) -> dict[int, float]:
    """Return the shares of the prompt tokens of each load that hit, by number of clients."""
    device_blocks, connector = SERVERS[name]
    extra: dict[str, Any] = {"admission": "arrival"} if connector == "AiokvConnector" else {}
    shares = {}
    with tempfile.TemporaryDirectory() as directory:
        if name == "store":
            extra["stores"] = [f"disk:{directory}/kv?bytes=4GiB"]
            extra["store_wait_seconds"] = 0.0
            extra["cpu_bytes_to_use"] = HOST_BLOCKS * PAGE_BYTES
        server = Server(device_blocks, connector, host_blocks=HOST_BLOCKS, extra=extra)
        try:
            _serve(server, documents, 2)
            for clients, questions in loads.items():
                cached = server.cached_tokens
                _serve(server, questions, clients)
                shares[clients] = (server.cached_tokens - cached) / sum(map(len, questions))
        finally:
            server.close()
    return shares


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
