"""Outputs of vLLM with aiokv under load, each compared with that without a connector, on a GPU.

``python -m bench.vllm_equal_load --save FILE`` starts a server per mode, all at a time on one GPU.
Each answers the same requests, by 1, 4 and 16 clients: documents of Zipf popularity with short
questions. The device cache has no room for the prompts of 16 clients, so that hits are loaded,
evicted and saved again, and requests are preempted.

With ``VLLM_BATCH_INVARIANT``, vLLM computes the same bits whatever runs beside a request, if its
norms are not those of its own kernels, which sum in an order that depends on the size of the batch.
Prompts are computed in chunks of one block of 256 tokens, and hits are multiples of it: each block
is computed with the same split with and without a hit. So the tokens of an answer depend on its
prompt alone. Another server without a connector answers each prompt alone, without a hit.

Per mode: ``requests``; ``different``, those whose tokens are not those of that server;
``cached_tokens``; ``external_hit_tokens``, which the connector has loaded; ``preemptions``;
``failed_blocks``, whose load has failed. ``none`` shows that vLLM itself is invariant. In
``aiokv-damaged-disk``, bytes of the store are overwritten after the second phase. ``damaged`` is a
control: answers to hits of that server in which every second block is wrong have to differ.

A server that has not answered within ``--seconds`` writes the stacks of all its threads, and is
compared by the phases that have ended; ``is_complete`` is false then.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import harness
from bench.vllm.load import ask, run_load
from bench.vllm.model import SHAPES, block_bytes, write_model
from bench.vllm.servers import Settings, engine_options, environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

DAMAGED_DISK: Final = "aiokv-damaged-disk"
MODES: Final = (
    "none",
    "aiokv",
    "aiokv-async",
    "aiokv-layers",
    "aiokv-layers-sync",
    "aiokv-disk",
    DAMAGED_DISK,
)
_REFERENCE: Final = "reference"
_PHASES: Final = ((1, 0.06), (4, 0.24), (16, 0.7))  # clients, and their share of the requests
_NUM_DOCUMENTS: Final = 48
_DOCUMENT_TOKENS: Final = (300, 1_900)
_QUESTIONS: Final = 3  # per document
_QUESTION_TOKENS: Final = (1, 64)
_OUTPUT_TOKENS: Final = 16
_CONTROLS: Final = 16
_DAMAGED_BYTES_APART: Final = 1 << 20
_BLOCK_TOKENS: Final = 256
_MAX_TOKENS: Final = 2_048
_DEVICE_BLOCKS: Final = 72  # 16 requests have up to 128, the documents about 200
_REFERENCE_BLOCKS: Final = 1_024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modes", nargs="*", default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument(
        "--requests", type=int, default=1_000, help="per mode; default: %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=1_800, help="limit per mode; default: %(default)s"
    )
    parser.add_argument("--shape", default="small", choices=SHAPES, help="default: %(default)s")
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        mode, folder = args.cell
        asyncio.run(_run_cell(mode, Path(folder), args))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(args.shape, folder / "model")
        servers = [_start(mode, folder, args) for mode in (*args.modes, _REFERENCE)]
        codes = [server.wait() for server in servers]
        if codes.pop():
            return 1
        files = [folder / f"{mode}.json" for mode in args.modes]
        answers = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
        reference = json.loads((folder / f"{_REFERENCE}.json").read_text())
    results = _compare(answers, reference) | {"machine": harness.machine()}
    print(json.dumps(results, indent=2))
    if args.save:
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    wrong = sum(mode["different"] for mode in results["modes"].values())
    return 1 if wrong or any(codes) or results["damaged"]["equal"] else 0


def _start(mode: str, folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a server in a process of its own."""
    command = [sys.executable, "-m", "bench.vllm_equal_load", "--cell", mode, str(folder)]
    command += ["--requests", str(args.requests), "--shape", args.shape]
    command += ["--seconds", str(args.seconds)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _compare(answers: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    expected = reference["answers"]
    modes = {}
    for mode, one in answers.items():
        modes[mode] = {name: value for name, value in one.items() if name != "answers"} | {
            "requests": len(one["answers"]),
            "different": sum(expected[number] != digest for number, digest in one["answers"]),
        }
    damaged = reference["damaged"]
    equal = sum(expected[number] == digest for number, digest in damaged)
    return {"modes": modes, "damaged": {"requests": len(damaged), "equal": equal}}


async def _run_cell(mode: str, folder: Path, args: argparse.Namespace) -> None:
    is_reference = mode == _REFERENCE
    sizes = block_bytes(args.shape, _BLOCK_TOKENS)
    disk = folder / f"{mode}.store"
    settings = Settings(
        model=str(folder / "model"),
        block_bytes=sizes,
        device_blocks=_REFERENCE_BLOCKS if is_reference else _DEVICE_BLOCKS,
        host_gib=4 * _DEVICE_BLOCKS * sizes / 2**30,
        small_host_gib=_DEVICE_BLOCKS * sizes / 2**30,
        disk=str(disk),
        disk_gib=8,
        max_model_tokens=_MAX_TOKENS,
        gpu_share=0.1,
        batch_invariant=True,
        graph_sizes=(),
    )
    os.environ |= environment(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    server = {_REFERENCE: "none", DAMAGED_DISK: "aiokv-disk"}.get(mode, mode)
    options = engine_options(server, settings) | {
        "block_size": _BLOCK_TOKENS,
        "long_prefill_token_threshold": _BLOCK_TOKENS,
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    result = folder / f"{mode}.json"
    try:
        async with asyncio.timeout(args.seconds):
            await engine.collective_rpc("seed_weights", args=(1,))
            prompts = _prompts(SHAPES[args.shape]["vocab_size"])
            if is_reference:
                result.write_text(json.dumps(await _reference(engine, prompts)))
            else:
                damaged = disk if mode == DAMAGED_DISK else None
                async for phase in _load(engine, prompts, args.requests, damaged):
                    figures = {name: value for name, value in phase.items() if name != "answers"}
                    print(mode, len(phase["answers"]), figures, file=sys.stderr, flush=True)
                    result.write_text(json.dumps(phase))
    except TimeoutError:
        _write_stacks(mode)
        raise
    finally:
        engine.shutdown()


def _write_stacks(mode: str) -> None:
    """Write the stacks of this process and of vLLM's engine, whose worker handles the signal."""
    print(f"{mode}: not done in time; stacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2)  # for the other processes to write theirs


def _prompts(vocabulary: int) -> list[list[int]]:
    """Return the questions of each document, one document after the other."""
    rng = random.Random(1)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(2, vocabulary) for _ in range(rng.randint(*bounds))]

    documents = [tokens(_DOCUMENT_TOKENS) for _ in range(_NUM_DOCUMENTS)]
    return [
        document + tokens(_QUESTION_TOKENS) for document in documents for _ in range(_QUESTIONS)
    ]


async def _load(
    engine: Any, prompts: Sequence[list[int]], requests: int, damaged: Path | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the results of all phases so far, after each one."""
    rng = random.Random(2)
    weights = [1 / (place + 1) for place in range(_NUM_DOCUMENTS)]
    answers: list[tuple[int, str]] = []
    cached_tokens = 0
    began = time.perf_counter()
    for clients, share in _PHASES:
        if damaged is not None and clients == _PHASES[-1][0]:
            _overwrite_bytes(damaged)
        documents = rng.choices(range(_NUM_DOCUMENTS), weights, k=round(requests * share))
        asked = [document * _QUESTIONS + rng.randrange(_QUESTIONS) for document in documents]
        result = await run_load(
            engine, [prompts[number] for number in asked], _sampling(), clients=clients
        )
        cached_tokens += sum(answer.cached_tokens for answer in result.answers)
        answers += [
            (number, answer.digest) for number, answer in zip(asked, result.answers, strict=True)
        ]
        yield {
            "is_complete": clients == _PHASES[-1][0],
            "seconds": round(time.perf_counter() - began, 1),
            "cached_tokens": cached_tokens,
            "external_hit_tokens": _counter("vllm:external_prefix_cache_hits_total"),
            "preemptions": _counter("vllm:num_preemptions_total"),
            "failed_blocks": _counter("vllm:aiokv_failed_blocks_total"),
            "answers": answers,
        }


def _overwrite_bytes(folder: Path) -> None:
    """Overwrite a byte in each MiB of the files of a disk store."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > _DAMAGED_BYTES_APART:
            with path.open("r+b") as file:
                for place in range(
                    _DAMAGED_BYTES_APART // 2, path.stat().st_size, _DAMAGED_BYTES_APART
                ):
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 0xFF]))


async def _reference(engine: Any, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Answer each prompt without a hit, one at a time, and some with a hit on wrong KV."""

    async def answer(number: int, salt: str) -> str:
        prompt = {"prompt_token_ids": prompts[number], "cache_salt": salt}
        found = await ask(engine, prompt, _sampling())
        return found.digest

    answers = [await answer(number, str(number)) for number in range(len(prompts))]
    is_long = [len(prompt) >= 4 * _BLOCK_TOKENS for prompt in prompts]
    controls = [number for number in range(len(prompts)) if is_long[number]][::_QUESTIONS]
    controls = controls[:_CONTROLS]
    for number in controls:
        await answer(number, "control")
    await engine.collective_rpc("damage_blocks", args=(2,))
    damaged = [(number, await answer(number, "control")) for number in controls]
    return {"answers": answers, "damaged": damaged}


def _sampling(output_tokens: int = _OUTPUT_TOKENS) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )


def _counter(name: str) -> int:
    """Return the value of one of vLLM's counters."""
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(int(sample.value) for sample in samples if sample.name == name)


if __name__ == "__main__":
    sys.exit(main())
