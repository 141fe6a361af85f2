"""``make profile``: cProfile of the plain replay loop, written to ``profile.pstats``.

Figures under the profiler show where time is spent; do not quote them.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
from pathlib import Path

from aiokv import CacheConfig, CacheEngine
from aiokv.trace.loops import plain_loop, prompt_chunks
from aiokv.trace.replay import load_workload
from bench.harness import ROOT, find_trace


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, default=find_trace() or _small_trace())
    parser.add_argument("--device-blocks", type=int, default=320_000)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "profile.pstats")
    args = parser.parse_args()
    workload = load_workload(str(args.trace), args.limit)
    fitting = workload.fitting(args.device_blocks * 16)
    profiler = cProfile.Profile()

    async def loop() -> None:
        config = CacheConfig(block_tokens=16, device_blocks=args.device_blocks)
        async with CacheEngine(config) as engine:
            for prompts in prompt_chunks(fitting.requests):
                profiler.enable()
                await plain_loop(engine, prompts)
                profiler.disable()

    asyncio.run(loop())
    profiler.dump_stats(args.out)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
    print(f"written to {args.out}")


def _small_trace() -> Path:
    return ROOT / "tests" / "data" / "small.jsonl"


if __name__ == "__main__":
    main()
