"""The demo's runner: layers start as they arrive, failures reach the loop, the thread ends."""

import asyncio
import threading

import numpy as np
import pytest

from aiokv.demo.grouped import GroupedConfig, random_weights
from aiokv.demo.model import Batch
from aiokv.demo.on_numpy.transformer import NumpyTransformer
from aiokv.demo.paging import Span
from aiokv.demo.runner import ModelRunner
from aiokv.errors import TransferError

pytestmark = pytest.mark.asyncio

CONFIG = GroupedConfig(vocab=32, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24)
SECONDS = 10.0  # before a test that hangs fails


class Arrival:
    """A layer view whose layers the test lets arrive."""

    def __init__(self):
        self.reached = [threading.Event() for _ in range(CONFIG.layers)]
        self.arrived = [threading.Event() for _ in range(CONFIG.layers)]
        self.failure = None

    def gpu_wait(self, layer, stream):
        self.reached[layer].set()
        stream.wait_event(self)
        assert self.arrived[layer].wait(SECONDS)

    def synchronize(self):
        """The event that the stream is made to wait for: done at once."""

    def raise_for_error(self):
        if self.failure is not None:
            raise self.failure


@pytest.fixture(scope="module")
def model():
    return NumpyTransformer(CONFIG, random_weights(CONFIG), max_context_tokens=16)


def one_block():
    tokens = np.arange(4, dtype=np.int32)
    return Batch(tokens, tokens, [Span(0, 4, 0, np.zeros(1, np.int32))])


async def test_a_layer_is_computed_while_the_next_one_is_on_its_way(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    with ModelRunner(model, cache) as runner:
        step = asyncio.ensure_future(runner.run(one_block(), [arrival]))
        assert not await asyncio.to_thread(arrival.reached[1].wait, 0)
        arrival.arrived[0].set()
        assert await asyncio.to_thread(arrival.reached[1].wait, SECONDS)
        assert cache.keys[0].any()
        assert not cache.keys[1].any()
        assert not step.done()
        arrival.arrived[1].set()
        output = await step
    assert len(output.next_tokens) == 1
    assert len(output.digests) == 4
    assert 0 < output.layer_wait_seconds < output.compute_seconds


async def test_what_did_not_arrive_fails_the_step_and_not_the_next(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    for layer in arrival.arrived:
        layer.set()
    arrival.failure = TransferError("lost")
    with ModelRunner(model, cache) as runner:
        with pytest.raises(TransferError, match="lost"):
            await runner.run(one_block(), [arrival])
        assert (await runner.run(one_block())).next_tokens


async def test_a_cancelled_step_ends_before_the_runner_does(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    with ModelRunner(model, cache) as runner:
        step = asyncio.ensure_future(runner.run(one_block(), [arrival]))
        assert await asyncio.to_thread(arrival.reached[0].wait, SECONDS)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        for layer in arrival.arrived:
            layer.set()
    assert cache.keys[1].any()
