"""CPU time of a decode step, of token lists, and of calls that hold the loop behind long prompts.

* ``decode_us``: a step of 64 and of 256 requests with 512 computed positions, whose tokens come as
  an int32 array: ``engine.advance``, an empty ``engine.computing`` block and ``engine.step``;
  ``single_verbs``: the same step by ``extend``, and ``append`` and ``commit`` of each lease;
  ``in_a_thread``: ``advance``, ``computing`` and ``step`` in one crossing of ``aiokv.sync``,
  CPU time of both threads.
* ``tokens_us``: ``match`` of 100,000 tokens as a list and as arrays, and ``append`` of one token.
* ``held_ms``: the calls for a new prompt of 10^6 tokens, ``would_hit`` of it when it is cached, the
  longest pass of the loop in a later ``prefetch`` of it, and the opening of an engine of 10^7
  blocks; ``open_elapsed``: the duration of the opening, in which threads allocate memory.
* ``others_us``: the same step of vLLM's ``KVCacheManager`` and of SGLang's radix cache, where
  these packages are installed; see :mod:`bench.step_baselines`.

Medians of CPU time of the calling thread, but for ``mean``, which includes the few steps that
complete blocks.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import types
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.sync import SyncEngine
from bench import step_baselines

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from aiokv import Lease

PROMPT_TOKENS: Final = 512
BLOCK_TOKENS: Final = 16
LEASES: Final = (64, 256)
HELD: Final = ("match", "allocate", "commit", "step", "release", "would_hit")
HELD_ROUNDS: Final = 5

cpu_ns = time.thread_time_ns


def run(quick: bool) -> dict[str, Any]:
    steps = 100 if quick else 1_000
    return {
        "decode_us": {
            f"{leases}_leases": {
                **asyncio.run(_decode(leases, steps)),
                "in_a_thread": _decode_in_a_thread(leases, steps),
            }
            for leases in LEASES
        },
        "others_us": step_baselines.measure(LEASES, PROMPT_TOKENS, BLOCK_TOKENS, steps),
        "tokens_us": asyncio.run(_tokens(10_000 if quick else 100_000)),
        "held_ms": asyncio.run(_held(10**5 if quick else 10**6, 10**5 if quick else 10**7)),
    }


def _config(leases: int, steps: int) -> CacheConfig:
    blocks = leases * ((PROMPT_TOKENS + 2 * steps) // BLOCK_TOKENS + 2)
    return CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=blocks)


def _prompt(number: int) -> np.ndarray:
    return np.arange(PROMPT_TOKENS, dtype=np.int32) + np.int32(number * PROMPT_TOKENS)


async def _decode(num_leases: int, steps: int) -> dict[str, float]:
    async with CacheEngine(_config(num_leases, steps)) as engine:
        leases: list[Lease] = []
        for number in range(num_leases):
            lease = await engine.match(_prompt(number)).allocate(PROMPT_TOKENS)
            lease.commit(PROMPT_TOKENS)
            leases.append(lease)
        batch = engine.batch(leases)
        samples: dict[str, list[float]] = {}
        for number in range(steps):
            tokens = np.full(num_leases, number, np.int32)
            times = [cpu_ns()]
            with engine.computing(batch) as computed:
                pass
            times.append(cpu_ns())
            engine.advance(computed, tokens)
            times.append(cpu_ns())
            engine.step()
            times.append(cpu_ns())
            await asyncio.sleep(0)
            computing, advance, step = np.diff(times) / 1e3
            for name, value in (
                ("advance", advance),
                ("computing", computing),
                ("step", step),
                ("all", advance + computing + step),
            ):
                samples.setdefault(name, []).append(float(value))
        for number in range(steps):
            began = cpu_ns()
            _single_verbs(engine, leases, number)
            samples.setdefault("single_verbs", []).append((cpu_ns() - began) / 1e3)
            await asyncio.sleep(0)
        for lease in leases:
            lease.release()
        found = {name: statistics.median(values) for name, values in samples.items()}
        return found | {"mean": statistics.fmean(samples["all"])}


def _single_verbs(engine: CacheEngine, leases: list[Lease], token: int) -> None:
    engine.extend(leases, 1)
    for lease in leases:
        lease.append([token])
    with engine.computing(leases):
        pass
    for lease in leases:
        lease.commit(lease.num_tokens)
    engine.step()


def _decode_in_a_thread(num_leases: int, steps: int) -> float:
    samples = []
    with SyncEngine(_config(num_leases, steps)) as engine:
        batch = engine.batch()
        for number in range(num_leases):
            lease = engine.match(_prompt(number))
            lease.allocate(PROMPT_TOKENS).result()
            lease.commit(PROMPT_TOKENS)
            batch.add(lease)
        tokens = np.zeros(num_leases, np.int32)
        for _ in range(steps):
            began = time.process_time_ns()
            with engine.calls() as calls:
                computing = calls.begin_computing(batch)
                calls.end_computing(computing)
                calls.advance(computing, tokens)
                calls.step()
            samples.append((time.process_time_ns() - began) / 1e3)
        with engine.calls() as calls:
            for lease in batch:
                calls.release(lease)
    return statistics.median(samples)


async def _tokens(length: int) -> dict[str, float]:
    numbers = np.arange(length, dtype=np.int32)
    kinds: dict[str, Any] = {
        "int32": numbers,
        "int64": numbers.astype(np.int64),
        "array": array("i", numbers.tolist()),
        "list": numbers.tolist(),
    }
    async with CacheEngine(CacheConfig(device_blocks=length // BLOCK_TOKENS + 10_000)) as engine:

        def match(tokens: Any) -> None:
            engine.match(tokens).release()

        found = {
            f"match_{kind}": _median_us(lambda t=tokens: match(t), 15)  # type: ignore[misc]
            for kind, tokens in kinds.items()
        }
        lease = await engine.match([1]).allocate(1)
        engine.extend([lease], 100_000)
        calls = 1_000

        def append() -> None:
            for _ in range(calls):
                lease.append([7])

        found["append_one"] = _median_us(append, 15) / calls
        lease.release()
    return found


def _median_us(function: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        began = cpu_ns()
        function()
        samples.append((cpu_ns() - began) / 1e3)
    return statistics.median(samples)


@types.coroutine
def _timed(work: Coroutine[Any, Any, object], passes: list[int]) -> Generator[Any, Any, None]:
    """Run a coroutine, and append the CPU time of each of its passes of the loop, in ns."""
    value = None
    while True:
        began = cpu_ns()
        try:
            awaited = work.send(value)
        except StopIteration:
            return
        finally:
            passes.append(cpu_ns() - began)
        value = yield awaited


async def _held(prompt_tokens: int, device_blocks: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for first in range(0, HELD_ROUNDS * prompt_tokens, prompt_tokens):
        await _held_by_a_prompt(np.arange(first, first + prompt_tokens, dtype=np.int32), samples)
    for _ in range(HELD_ROUNDS):
        began = cpu_ns(), time.perf_counter()
        engine = CacheEngine(CacheConfig(device_blocks=device_blocks))
        await engine.__aenter__()
        samples.setdefault("open", []).append((cpu_ns() - began[0]) / 1e6)
        samples.setdefault("open_elapsed", []).append((time.perf_counter() - began[1]) * 1e3)
        await engine.aclose()
    return {name: statistics.median(values) for name, values in samples.items()}


async def _held_by_a_prompt(prompt: np.ndarray, samples: dict[str, list[float]]) -> None:
    def note(name: str, ns: int) -> None:
        samples.setdefault(name, []).append(ns / 1e6)

    blocks = len(prompt) // BLOCK_TOKENS + 16
    async with CacheEngine(CacheConfig(device_blocks=blocks, host_blocks=blocks)) as engine:
        times = [cpu_ns()]
        lease = engine.match(prompt)
        times.append(cpu_ns())
        await lease.allocate(len(prompt))
        times.append(cpu_ns())
        lease.commit(len(prompt))
        times.append(cpu_ns())
        engine.step()
        times.append(cpu_ns())
        lease.release()
        times.append(cpu_ns())
        engine.would_hit(prompt)
        times.append(cpu_ns())
        for name, ns in zip(HELD, np.diff(times), strict=True):
            note(name, int(ns))
        await engine.drain()
        await engine.evict(blocks)
        passes: list[int] = []
        await _timed(engine.prefetch(prompt), passes)
        note("prefetch", max(passes))
