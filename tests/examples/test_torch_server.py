"""The torch server: clients that leave, and a model that raises."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

import aiokv
from tests.examples.files import loaded

pytest.importorskip("torch", reason="torch is not installed: make test-vllm")
pytestmark = pytest.mark.asyncio
PROMPTS = [[*range(1, 100), client] for client in range(12)]


@asynccontextmanager
async def serving(compute=None):
    """Serve the model with ``compute`` in the place of its step; yield the server."""
    module = loaded("torch_server")
    model = module.Model()
    regions = aiokv.Regions(num_layers=module.LAYERS)
    regions.add("kv", layers=model.kv)
    config = aiokv.CacheConfig(
        block_tokens=module.BLOCK_TOKENS, device_blocks=module.DEVICE_BLOCKS, strict=True
    )
    if compute is not None:
        original = model.step
        model.step = lambda rows, layers: compute(original, rows, layers)
    async with aiokv.CacheEngine(config, regions) as engine:
        server = module.Server(engine, model)
        steps = asyncio.create_task(server.run())
        yield server
        steps.cancel()
        await asyncio.wait([steps])
        assert server.running == []
        assert engine.statistics().leases == 0
        assert engine.check_invariants() == []


async def test_clients_that_leave_change_no_other_answer():
    module, tasks, leaving = loaded("torch_server"), [], []

    def compute(step, rows, layers):
        if leaving:  # in the thread, in the middle of a step
            task = leaving.pop()
            task.get_loop().call_soon_threadsafe(task.cancel)
        return step(rows, layers)

    async with serving(compute) as server:
        tasks = [asyncio.create_task(server.generate(prompt, 8)) for prompt in PROMPTS]
        leaving += tasks[::3]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)
    for number, answer in enumerate(answers):
        if number % 3:
            assert answer == module.answer_without_cache(module.Model(), PROMPTS[number], 8)


async def test_a_step_that_fails_ends_its_requests_only():
    module, failing = loaded("torch_server"), [True]

    def compute(step, rows, layers):
        if failing:
            failing.pop()
            raise ArithmeticError("a failure of the model")
        return step(rows, layers)

    async with serving(compute) as server:
        with pytest.raises(RuntimeError, match="a failure of the model"):
            await server.generate(PROMPTS[0], 4)
        answer = await server.generate(PROMPTS[0], 4)
    assert answer == module.answer_without_cache(module.Model(), PROMPTS[0], 4)
