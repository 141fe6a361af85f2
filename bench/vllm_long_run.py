"""Memory of a process with vLLM's scheduler and a worker of aiokv over many requests, no model.

``.venv-vllm-0.32.0/bin/python -m bench.vllm_long_run``, of ``make test-vllm``, serves 20,000
requests, 16 at a time: prompts of 1,000 to 3,000 tokens, of which all but 80 are those of one of
400 documents with Zipf popularity, and 16 generated tokens. A third of the documents fits into
vLLM's cache, a third into host memory, and half into the disk store, so that all three evict.

``none``: vLLM alone. ``aiokv``: with ``AiokvConnector`` and a disk store, whose copies are real.

* ``rss_mib``: resident memory after each 1,000 requests.
* ``growth_mib_per_1000``: slope of a line through the second half of ``rss_mib``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import harness
from bench.vllm_scheduler import BLOCK_BYTES, BLOCK_TOKENS, IDLE_SECONDS, Server

REQUESTS: Final = 20_000
SAMPLE: Final = 1_000  # requests between two samples of the memory
CLIENTS: Final = 16
DOCUMENTS: Final = 400
DOCUMENT_TOKENS: Final = 1_000, 3_000
QUESTION_TOKENS: Final = 80
GENERATED: Final = 16
VOCABULARY: Final = 50_000
TIER_BLOCKS: Final = DOCUMENTS * sum(DOCUMENT_TOKENS) // 2 // BLOCK_TOKENS // 3


def rss_mib() -> float:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def serve(connector: str, extra: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Serve all requests, and return the figures."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(*DOCUMENT_TOKENS, DOCUMENTS)
    documents = [rng.integers(0, VOCABULARY, length) for length in lengths]
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    popularity /= popularity.sum()
    samples: list[float] = []
    server = Server(TIER_BLOCKS, connector, host_blocks=TIER_BLOCKS, extra=extra)
    try:
        for number in range(1, num_requests + 1):
            while len(server.scheduler.requests) >= CLIENTS:
                if not server.step():
                    time.sleep(IDLE_SECONDS)
            document = documents[rng.choice(DOCUMENTS, p=popularity)]
            question = rng.integers(0, VOCABULARY, QUESTION_TOKENS)
            server.add(np.concatenate([document, question]).tolist(), GENERATED)
            if number % SAMPLE == 0:
                samples.append(rss_mib())
                print(
                    f"{connector or 'none'}: {number} requests, {samples[-1]:.1f} MiB", flush=True
                )
        server.run()
    finally:
        server.close()
    late = samples[len(samples) // 2 :]
    slope = np.polyfit(np.arange(len(late)), late, 1)[0] if len(late) > 1 else 0.0
    return {"rss_mib": samples, "growth_mib_per_1000": float(slope)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_long_run")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="default: %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = (
            f"disk:{folder}?bytes={TIER_BLOCKS * 3 // 2 * max(BLOCK_BYTES, 4096)}&min_free_bytes=0"
        )
        results = {
            "none": serve("", {}, args.requests),
            "aiokv": serve("AiokvConnector", {"stores": [url]}, args.requests),
        }
    measured = harness.Run(machine=harness.machine(), benches={"vllm_long_run": results})
    harness.save_each(measured, measured.benches)
    for name, figures in results.items():
        print(f"{name}: {figures['growth_mib_per_1000']:.2f} MiB per 1,000 requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
