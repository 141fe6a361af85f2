"""How much memory a cache needs: record the traffic of a server, and replay it with other sizes.

The trace has lengths and the equality of blocks, but no text. ``aiokv replay`` serves it with the
real index and without a model, and marks the size beyond which more memory adds few hits. With
``--model config.json``, sizes may be bytes, such as 40GiB. Without a file name, there is no plot.

Install: pip install '.[plot]'
Run:     python examples/replay_tour.py hits.svg
Output:
    400 requests recorded; hits with 1,024 blocks: 42.9%
       500 blocks  32.7% ################
     1,000 blocks  42.6% #####################
     2,000 blocks  56.6% ############################
     4,000 blocks  73.4% #####################################  <- knee
     8,000 blocks  84.1% ##########################################
    16,000 blocks  84.1% ##########################################
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import aiokv

REQUESTS, DOCUMENTS, DOCUMENT_TOKENS, DEVICE_BLOCKS = 400, 60, 2048, 1024
SIZES = "500,1000,2000,4000,8000,16000"  # blocks


async def record(trace: Path) -> float:
    """Serve questions about documents, some of which are asked about often; return the hit rate."""
    rng = np.random.default_rng(3)
    documents = rng.integers(50_000, size=(DOCUMENTS, DOCUMENT_TOKENS))
    config = aiokv.CacheConfig(block_tokens=16, device_blocks=DEVICE_BLOCKS)
    hits = total = 0
    async with aiokv.CacheEngine(config) as engine, engine.record_trace(trace):
        for number in rng.zipf(1.3, size=REQUESTS) % DOCUMENTS:
            prompt = np.concatenate([documents[number], rng.integers(50_000, size=40)])
            async with engine.match(prompt) as lease:
                await lease.allocate(len(prompt))
                with engine.computing([lease]):
                    pass  # the model computes
                lease.commit(len(prompt))
                hits, total = hits + lease.cached_tokens, total + len(prompt)
    return hits / total


def replay(trace: Path, plot: Path | None) -> None:
    """Replay the trace with caches of several sizes, and draw the hit rates."""
    result = trace.with_name("hits.json")
    command = [sys.executable, "-P", "-m", "aiokv", "replay", str(trace), "--capacities", SIZES]
    command += ["--json", str(result), *(["--plot", str(plot)] if plot else [])]
    subprocess.run(command, check=True, capture_output=True)
    for point in json.loads(result.read_text())["capacities"]:
        bar = "#" * round(50 * point["hit_rate"])
        knee = "  <- knee" if point["is_knee"] else ""
        print(f"{point['device_blocks']:6,} blocks {point['hit_rate']:6.1%} {bar}{knee}")


def main(plot: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl.gz")
        rate = asyncio.run(record(trace))
        print(f"{REQUESTS} requests recorded; hits with {DEVICE_BLOCKS:,} blocks: {rate:.1%}")
        replay(trace, plot)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
