"""The serving loop over a device that loses blocks: recomputed, never served wrong (I4)."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

import aiokv
from aiokv.base.plan import ONLOAD
from aiokv.demo.runner import ModelRunner
from aiokv.demo.serving import Server, ServingConfig
from aiokv.demo.transformer import NumpyTransformer
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.demo.workload import ChatSizes, chat_workload
from aiokv.worker.device.base import CopyError
from aiokv.worker.device.cpu import CpuDevice

pytestmark = pytest.mark.asyncio

MODEL = GroupedConfig(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, ffn=48)
SIZES = ChatSizes(
    conversations=6, turns=3, system_prompts=2, system_tokens=32, user_tokens=12, answer_tokens=6
)
BLOCK_TOKENS, HOST_BLOCKS = 4, 256


class LosingCopy:
    """Copy that wrote wrong bytes from ``first_bad_block`` on and reports the failure."""

    def __init__(self, copy, first_bad_block):
        self._copy = copy
        self._first_bad_block = first_bad_block

    def __getattr__(self, name):
        return getattr(self._copy, name)

    def error(self):
        return CopyError(self._first_bad_block, "lost by the test")


class LosingDevice(CpuDevice):
    """Device that loses the second half of every other onload."""

    def __init__(self):
        super().__init__()
        self.onloads = 0

    def copy(self, route, source_ids, target_ids, *args):
        self.onloads += route == ONLOAD
        if route != ONLOAD or self.onloads % 2:
            return super().copy(route, source_ids, target_ids, *args)
        first_bad_block = len(source_ids) // 2
        wrong = np.where(
            np.arange(len(source_ids)) < first_bad_block, source_ids, (source_ids + 1) % HOST_BLOCKS
        )
        return LosingCopy(
            super().copy(route, wrong.astype(np.int32), target_ids, *args), first_bad_block
        )


class SilentDevice(CpuDevice):
    """Device that reads the last block of each onload from a wrong host block, without an error."""

    def copy(self, route, source_ids, target_ids, *args):
        source_ids = source_ids.copy()
        if route == ONLOAD:
            source_ids[-1] = (source_ids[-1] + 1) % HOST_BLOCKS
        return super().copy(route, source_ids, target_ids, *args)


async def serve(model, workload, *, device_blocks, host_blocks, reuse, device=None, disconnect=0.0):
    cache = model.new_cache(device_blocks, BLOCK_TOKENS)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, host_blocks=host_blocks
    )
    serving = ServingConfig(max_running=3, chunk_tokens=8, reuse=reuse, disconnect=disconnect)
    async with aiokv.CacheEngine(config, cache.regions(), device) as engine:
        with ModelRunner(model, cache) as runner:
            server = Server(engine, runner, serving)
            await server.serve(workload)
        await engine.drain()
        assert engine.check_invariants() == []
        assert engine.statistics().leases == 0
    return server


async def test_failed_onloads_are_recomputed():
    workload = chat_workload(SIZES, vocab=MODEL.vocab, seed=0)
    model = NumpyTransformer(
        MODEL, random_weights(MODEL), max_context_tokens=workload.max_context_tokens
    )
    reference = await serve(model, workload, device_blocks=256, host_blocks=0, reuse=False)
    device = LosingDevice()
    server = await serve(
        model, workload, device_blocks=60, host_blocks=HOST_BLOCKS, reuse=True, device=device
    )
    assert device.onloads >= 2
    assert server.statistics.failed_onloads > 0
    assert server.ledger.compare(reference.ledger).equal


async def test_silently_wrong_onloads_are_reported_as_wrong_bytes():
    workload = chat_workload(SIZES, vocab=MODEL.vocab, seed=0)
    model = NumpyTransformer(
        MODEL, random_weights(MODEL), max_context_tokens=workload.max_context_tokens
    )
    reference = await serve(model, workload, device_blocks=256, host_blocks=0, reuse=False)
    server = await serve(
        model,
        workload,
        device_blocks=60,
        host_blocks=HOST_BLOCKS,
        reuse=True,
        device=SilentDevice(),
    )
    compared = server.ledger.compare(reference.ledger)
    assert compared.rows_different > 0
    assert compared.blocks_wrong > 0


class HeldRunner(ModelRunner):
    """Runner that reports its third step when the test allows it."""

    def __init__(self, model, cache):
        super().__init__(model, cache)
        self.steps = 0
        self.reached = asyncio.Event()
        self.work = self.held = None

    def submit(self, *args):
        self.steps += 1
        work = super().submit(*args)
        if self.steps != 3:
            return work
        self.work, self.held = work, Future()
        self.held.set_running_or_notify_cancel()
        self.reached.set()
        return self.held

    def report(self):
        self.held.set_result(self.work.result())


@pytest.fixture
def small_model():
    return NumpyTransformer(MODEL, random_weights(MODEL), max_context_tokens=128)


@pytest.mark.parametrize("passes", range(6))
async def test_a_step_that_ends_after_the_cancellation_is_dropped(small_model, passes):
    workload = chat_workload(SIZES, vocab=MODEL.vocab, seed=0)
    cache = small_model.new_cache(256, BLOCK_TOKENS)
    config = aiokv.CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=256)
    async with aiokv.CacheEngine(config, cache.regions()) as engine:
        with HeldRunner(small_model, cache) as runner:
            serving = asyncio.create_task(Server(engine, runner, ServingConfig()).serve(workload))
            await runner.reached.wait()
            serving.cancel()
            for _ in range(passes):
                await asyncio.sleep(0)
            runner.report()
            with pytest.raises(asyncio.CancelledError):
                await serving
        assert engine.statistics().leases == 0
        assert engine.check_invariants() == []


async def test_blocks_of_a_cancelled_step_are_kept_until_its_thread_has_left_it(small_model):
    workload = chat_workload(SIZES, vocab=MODEL.vocab, seed=0)
    cache = small_model.new_cache(256, BLOCK_TOKENS)
    config = aiokv.CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=256)
    async with aiokv.CacheEngine(config, cache.regions()) as engine:
        with HeldRunner(small_model, cache) as runner:
            serving = asyncio.create_task(Server(engine, runner, ServingConfig()).serve(workload))
            await runner.reached.wait()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            kept = engine.statistics()
            assert kept.attention.device.free + kept.evictable_blocks < 256
            ended = asyncio.Event()
            runner.held.add_done_callback(lambda _: engine_loop.call_soon_threadsafe(ended.set))
            engine_loop = asyncio.get_running_loop()
            runner.report()
            await ended.wait()
            freed = engine.statistics()
            assert freed.attention.device.free + freed.evictable_blocks == 256
            assert engine.check_invariants() == []


async def test_disconnected_requests_are_sent_again_and_change_no_output(small_model):
    workload = chat_workload(SIZES, vocab=MODEL.vocab, seed=0)
    reference = await serve(small_model, workload, device_blocks=256, host_blocks=0, reuse=False)
    server = await serve(
        small_model,
        workload,
        device_blocks=60,
        host_blocks=HOST_BLOCKS,
        reuse=True,
        disconnect=1.0,
    )
    assert server.statistics.disconnections > 0
    assert server.statistics.requests == workload.requests
    assert server.ledger.compare(reference.ledger).equal
