"""The loop of steps of the HTTP server, under a load that needs more blocks than exist."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.demo import http_server
from aiokv.testing import ScriptedDevice
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("error::aiokv.errors.UncoveredCommitWarning"),
]

LAYERS, BLOCK_TOKENS, DEVICE_BLOCKS, MAX_RUNNING = 2, 4, 96, 16


class SummingModel:
    """A model whose next token depends on the KV of all positions."""

    def __init__(self) -> None:
        self.kv = [np.zeros((DEVICE_BLOCKS, BLOCK_TOKENS), np.int64) for _ in range(LAYERS)]

    def step(self, rows: list[http_server.Row], layers: aiokv.LayerView) -> list[int]:
        sums = [0] * len(rows)
        for layer, kv in enumerate(self.kv):
            layers.host_wait(layer)
            for row, (tokens, first, table) in enumerate(rows):
                positions = np.arange(first, len(tokens))
                kv[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = tokens[first:]
                seen = kv[table].ravel()[: len(tokens)]
                sums[row] += int(seen @ np.arange(1, len(tokens) + 1)) * (layer + 1)
        return [total % 1000 for total in sums]


def answer_without_cache(prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        kv = int(np.array(tokens) @ np.arange(1, len(tokens) + 1))
        tokens.append(sum(kv * (layer + 1) for layer in range(LAYERS)) % 1000)
    return tokens[len(prompt) :]


def requests(count: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Return (prompt, max_tokens) of requests with four common beginnings."""
    rng = random.Random(seed)
    systems = [[rng.randrange(1000) for _ in range(24)] for _ in range(4)]
    return [
        (
            systems[number % 4] + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))],
            rng.randrange(8, 60),
        )
        for number in range(count)
    ]


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch,
    *,
    host_blocks: int = 256,
    reserve_blocks: int = MAX_RUNNING,
    device: ScriptedDevice | None = None,
) -> AsyncIterator[Any]:
    monkeypatch.setattr(http_server, "MAX_RUNNING", MAX_RUNNING)
    monkeypatch.setattr(http_server, "PROMPT_CHUNK", 32)
    model = SummingModel()
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=model.kv)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=DEVICE_BLOCKS,
        host_blocks=host_blocks,
        reserve_blocks=reserve_blocks,
        strict=True,
    )
    served = SimpleNamespace(step=model.step, swaps=0, drops=0)
    preempt = aiokv.Lease.preempt

    async def count(lease: aiokv.Lease, *, swap: bool = False) -> None:
        served.swaps += swap
        served.drops += not swap
        await preempt(lease, swap=swap)

    monkeypatch.setattr(aiokv.Lease, "preempt", count)
    async with aiokv.CacheEngine(config, regions, device) as engine:
        served.engine = engine
        scheduler = http_server.Scheduler(engine, lambda *args: served.step(*args))

        async def complete(prompt: list[int], max_tokens: int) -> list[int]:
            async with scheduler.admit(prompt, max_tokens) as request:
                return [token async for token in scheduler.tokens(request)]

        served.complete = complete
        steps = asyncio.create_task(scheduler.run())
        yield served
        steps.cancel()
        await asyncio.wait([steps])
        assert engine.statistics().leases == 0
        assert engine.check_invariants() == []


@pytest.mark.slow
@pytest.mark.parametrize("host_blocks", [256, 8])
async def test_answers_under_load_are_those_without_a_cache(monkeypatch, host_blocks):
    load = requests(120)
    async with serving(monkeypatch, host_blocks=host_blocks) as served:
        answers = await asyncio.gather(*(served.complete(*asked) for asked in load))
        assert answers == [answer_without_cache(*asked) for asked in load]
        assert 0 < served.swaps <= 60  # with a reserve of one block more than 100
        assert (served.drops > 0) == (host_blocks == 8)
        assert served.engine.statistics().hit_device_tokens > 0


async def test_preempted_requests_leave_the_blocks_that_a_running_one_waits_for(monkeypatch):
    """Otherwise two of them take turns to get the blocks of the other, and no step is computed."""
    quarter = DEVICE_BLOCKS // 4 * BLOCK_TOKENS
    # The first one needs a block for its first token, and the others do not. All but the last one
    # fit.
    lengths = (2 * quarter, quarter - 2, quarter - 2, quarter - 2)
    load = [([number] * length, 8) for number, length in enumerate(lengths)]
    async with serving(monkeypatch, reserve_blocks=0) as served, asyncio.timeout(PATIENCE_SECONDS):
        preempt = aiokv.Lease.preempt

        async def slow(lease: aiokv.Lease, **options: bool) -> None:
            await preempt(lease, **options)
            for _ in range(5):  # the blocks are granted to waiting requests meanwhile
                await asyncio.sleep(0)

        monkeypatch.setattr(aiokv.Lease, "preempt", slow)
        answers = await asyncio.gather(*(served.complete(*asked) for asked in load))
        assert answers == [answer_without_cache(*asked) for asked in load]
        assert served.swaps <= 6


async def test_clients_that_leave_change_no_other_answer(monkeypatch):
    load, rng = requests(90, seed=2), random.Random(2)
    async with serving(monkeypatch) as served:
        tasks = [asyncio.create_task(served.complete(*asked)) for asked in load]
        leaving = {number for number in range(len(tasks)) if number % 3 == 0}
        model, waiting = served.step, list(leaving)

        def compute(*args):
            if waiting and rng.random() < 0.5:  # in the thread, in the middle of a step
                task = tasks[waiting.pop()]
                task.get_loop().call_soon_threadsafe(task.cancel)
            return model(*args)

        served.step = compute
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert served.swaps
    left = [number for number, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert left
    assert set(left) <= leaving
    assert all(isinstance(answers[number], asyncio.CancelledError) for number in left)
    for number in set(range(len(load))) - set(left):
        assert answers[number] == answer_without_cache(*load[number])


async def test_failed_onloads_are_computed_again(monkeypatch):
    load, device = requests(60, seed=3), ScriptedDevice()
    for copy in range(0, 400, 3):
        device.fail("onload", copy=copy, layer=copy % LAYERS)
    async with serving(monkeypatch, device=device) as served:
        answers = await asyncio.gather(*(served.complete(*asked) for asked in load))
        assert answers == [answer_without_cache(*asked) for asked in load]
        assert any(end.failed for end in device.ends)


async def test_failed_step_fails_its_requests_each_with_an_error_of_its_own(monkeypatch, caplog):
    async with serving(monkeypatch) as served:
        model, failing = served.step, []

        def compute(rows, layers):
            if len(rows) == 6 and not failing:
                failing.append(len(rows))
                raise ArithmeticError("a failure of the model")
            return model(rows, layers)

        served.step = compute
        load = requests(8, seed=4)
        answers = await asyncio.gather(
            *(served.complete(*asked) for asked in load), return_exceptions=True
        )
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(failed) == len(set(map(id, failed))) == 6
    assert [type(error) for error in failed] == [http_server.StepError] * 6
    assert [r.getMessage() for r in caplog.records if r.exc_info] == ["a step of 6 requests failed"]
