"""One server in this process: start it, run its loads, write the results as JSON.

``python -m bench.vllm.cell SPEC RESULT``: ``SPEC`` is a file that ``python -m bench.vllm`` writes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bench.vllm.load import run_load
from bench.vllm.model import SHAPES, write_model
from bench.vllm.servers import Settings, engine_options, environment
from bench.vllm.workload import Prompt, load_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.vllm.load import LoadResult
    from bench.vllm.workload import Workload

WEIGHTS_SEED = 1
# One block of 32 gets wrong KV, to show that the comparison of outputs notices it.
_DAMAGE_EVERY = 32
_RESET_TIMEOUT_SECONDS = 30.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One server and its loads.

    Attributes:
        server: name in ``bench.vllm.servers.SERVERS``.
        kind: ``load`` measures; ``equality`` compares outputs.
        shape: name in ``bench.vllm.model.SHAPES``.
        workload: file of the workload.
        settings: of the server.
        clients: prompts in flight.
        max_output_tokens: length of each answer.
        limit: prompts of each load to take; None: all.
    """

    server: str
    kind: Literal["load", "equality"]
    shape: str
    workload: str
    settings: Settings
    clients: int
    max_output_tokens: int
    limit: int | None = None


def main(argv: Sequence[str]) -> int:
    spec, result = argv
    cell = msgspec.json.decode(Path(spec).read_bytes(), type=Cell)
    # vLLM reads the environment when it is imported.
    os.environ.update(environment(cell.settings))
    figures = asyncio.run(_run(cell))
    Path(result).write_bytes(msgspec.json.encode(figures))
    return 0


async def _run(cell: Cell) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    write_model(cell.shape, Path(cell.settings.model))
    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_options(cell.server, cell.settings))
    )
    try:
        await engine.collective_rpc("seed_weights", args=(WEIGHTS_SEED,))
        bench = _Bench(cell, engine, load_workload(Path(cell.workload)))
        bench.note(f"started in {time.perf_counter() - started:.1f} s")
        figures = {"start_seconds": round(time.perf_counter() - started, 1)}
        if cell.kind == "load":
            return figures | await bench.measure()
        return figures | await bench.compare()
    finally:
        engine.shutdown()


class _Bench:
    """Loads of one cell on its engine."""

    def __init__(self, cell: Cell, engine: Any, workload: Workload) -> None:
        self._cell = cell
        self._engine = engine
        self._workload = workload

    def note(self, text: str) -> None:
        print(f"{self._cell.server}: {text}", file=sys.stderr, flush=True)

    async def measure(self) -> dict[str, Any]:
        """Run the loads that are timed."""
        workload = self._workload
        longest = max(workload.unique, key=lambda prompt: prompt.num_tokens)
        await self._load("warm-up", [_other(longest, id_) for id_ in range(4)])
        await self._load("opening", workload.opening)
        return {
            "multi_turn": await self._load("multi-turn", workload.turns),
            "one_client": await self._load("one client", workload.turns[-20:], clients=1),
            "no_hits": await self._load("no hits", workload.unique),
        }

    async def compare(self) -> dict[str, Any]:
        """Answer prompts one at a time, first computed, then from the cache behind the device."""
        prompts = self._workload.equality
        await self._load("warm-up", [_other(prompts[0], 0)], clients=1)
        figures = {"computed": await self._load("computed", prompts, clients=1)}
        await self._reset_device_cache()
        figures["reloaded"] = await self._load("reloaded", prompts, clients=1)
        if self._cell.server == "none":
            figures["device_hits"] = await self._load("device hits", prompts, clients=1)
            await self._engine.collective_rpc("damage_blocks", args=(_DAMAGE_EVERY,))
            figures["damaged"] = await self._load("damaged", prompts, clients=1)
        return figures

    async def _reset_device_cache(self) -> None:
        """Forget the device cache; vLLM refuses while a save still reads its blocks."""
        deadline = time.perf_counter() + _RESET_TIMEOUT_SECONDS
        while not await self._engine.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise TimeoutError(
                    f"the device cache is still in use after {_RESET_TIMEOUT_SECONDS} s"
                )
            await asyncio.sleep(0.05)

    async def _load(
        self, name: str, prompts: Sequence[Prompt], *, clients: int | None = None
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self._cell.max_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        vocab = SHAPES[self._cell.shape]["vocab_size"]
        tokens = [prompt.token_ids(vocab) for prompt in prompts[: self._cell.limit]]
        before = _counters()
        result: LoadResult = await run_load(
            self._engine, tokens, sampling, clients=clients or self._cell.clients
        )
        figures = result.summary()
        after = _counters()
        for key in ("device_hit_tokens", "external_hit_tokens"):
            figures[key] = after[key] - before[key]
        first = figures["first_token_ms"]
        self.note(
            f"{name}: {figures['requests']} requests, {figures['seconds']:.1f} s, "
            f"{figures['requests_per_second']:.2f}/s, first token p50 {first['p50']:.0f} ms, "
            f"p99 {first['p99']:.0f} ms, cached {figures['cached_tokens']} of "
            f"{figures['prompt_tokens']} tokens (external {figures['external_hit_tokens']})"
        )
        return figures


def _other(prompt: Prompt, seed: int) -> Prompt:
    """Return a prompt of the same length whose blocks are in no workload."""
    first = 1_000_000_000 + seed * 100_000
    return Prompt(prompt.num_tokens, [first + place for place in range(len(prompt.hash_ids))])


def _counters() -> dict[str, int]:
    """Return vLLM's counters of hit tokens."""
    from prometheus_client import REGISTRY

    names = {
        "vllm:prefix_cache_hits_total": "device_hit_tokens",
        "vllm:external_prefix_cache_hits_total": "external_hit_tokens",
    }
    totals = dict.fromkeys(names.values(), 0)
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name in names:
                totals[names[sample.name]] += int(sample.value)
    return totals


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
