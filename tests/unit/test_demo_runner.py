"""The demo's runner: layers start as they arrive, failures reach the loop, the thread ends."""

import asyncio
import threading

import numpy as np
import pytest

from aiokv.demo.batch import Batch, Span
from aiokv.demo.ledger import digest_rows
from aiokv.demo.requests import Request, Sequence
from aiokv.demo.runner import ModelRunner
from aiokv.demo.transformer import NumpyTransformer
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.errors import TransferError
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.models.demo.images import image

CONFIG = GroupedConfig(vocab=32, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24)


class Arrival:
    """A layer view whose layers the test lets arrive."""

    def __init__(self):
        self.reached = [threading.Event() for _ in range(CONFIG.layers)]
        self.arrived = [threading.Event() for _ in range(CONFIG.layers)]
        self.failure = None

    def gpu_wait(self, layer, stream):
        self.reached[layer].set()
        stream.wait_event(self)
        assert self.arrived[layer].wait(PATIENCE_SECONDS)

    def synchronize(self):
        """The event that the stream is made to wait for: done at once."""

    def raise_for_error(self):
        if self.failure is not None:
            raise self.failure


@pytest.fixture(scope="module")
def model():
    return NumpyTransformer(CONFIG, random_weights(CONFIG), max_context_tokens=16)


def compute(runner, *step):
    return asyncio.wrap_future(runner.submit(*step))


def one_block():
    tokens = np.arange(4, dtype=np.int32)
    return Batch(tokens, tokens, [Span(0, 4, 0, np.zeros(1, np.int32))])


@pytest.mark.asyncio
async def test_layer_is_computed_while_the_next_one_is_loading(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    with ModelRunner(model, cache) as runner:
        step = asyncio.wrap_future(runner.submit(one_block(), [arrival]))
        assert not await asyncio.to_thread(arrival.reached[1].wait, 0)
        arrival.arrived[0].set()
        assert await asyncio.to_thread(arrival.reached[1].wait, PATIENCE_SECONDS)
        assert cache.keys[0].any()
        assert not cache.keys[1].any()
        assert not step.done()
        arrival.arrived[1].set()
        output = await step
    assert len(output.next_tokens) == 1
    assert len(output.digests) == 4
    assert 0 < output.layer_wait_seconds < output.compute_seconds


@pytest.mark.asyncio
async def test_failed_onload_fails_its_step_and_not_the_next_one(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    for layer in arrival.arrived:
        layer.set()
    arrival.failure = TransferError("lost")
    with ModelRunner(model, cache) as runner:
        with pytest.raises(TransferError, match="lost"):
            await compute(runner, one_block(), [arrival])
        assert (await compute(runner, one_block())).next_tokens


@pytest.mark.asyncio
async def test_a_cancelled_step_ends_before_the_runner_does(model):
    cache = model.new_cache(device_blocks=1, block_tokens=4)
    arrival = Arrival()
    with ModelRunner(model, cache) as runner:
        step = asyncio.wrap_future(runner.submit(one_block(), [arrival]))
        assert await asyncio.to_thread(arrival.reached[0].wait, PATIENCE_SECONDS)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        for layer in arrival.arrived:
            layer.set()
    assert cache.keys[1].any()


@pytest.mark.asyncio
async def test_blocks_are_read_back_after_the_pass(model):
    cache = model.new_cache(device_blocks=3, block_tokens=4)
    blocks = [np.array([0, 2], np.int32), np.zeros(0, np.int32), np.array([1], np.int32)]
    empty = digest_rows(cache.read_blocks(np.zeros(1, np.int32)))[0]
    with ModelRunner(model, cache) as runner:
        output = await compute(runner, one_block(), (), blocks)
        (written, other), none, (third,) = output.block_digests
        assert none == []
        assert written != empty
        assert other == third == empty
        assert digest_rows(cache.read_blocks(blocks[2])) == [third]


@pytest.mark.asyncio
async def test_first_and_last_step_check_all_blocks_and_others_their_completed_blocks():
    request = Request("r", list(range(14)), prompt_length=14, stop_length=18)
    sequence = Sequence(request, lease=None, first_position=8)
    assert sequence.blocks_to_check(3, block_tokens=4) == range(2)
    sequence.checked, sequence.computed = True, 11
    assert sequence.blocks_to_check(3, block_tokens=4) == range(2, 3)
    request.tokens += [14, 15, 16]
    sequence.computed = 16
    assert sequence.blocks_to_check(1, block_tokens=4) == range(4)


def test_prefix_keys_name_tokens_and_images_up_to_their_block():
    def keys(tokens, items=()):
        request = Request("r", tokens, prompt_length=1, stop_length=99, items=items)
        return [request.prefix_key(block, 2) for block in reversed(range(len(tokens) // 2))][::-1]

    plain = keys([1, 2, 3, 4, 5, 6])
    assert len(set(plain)) == 3
    assert keys([1, 2, 3, 4]) == plain[:2]
    changed = keys([1, 2, 3, 9, 5, 6])
    assert changed[0] == plain[0]
    assert not {*changed[1:]} & {*plain}
    shown = keys([1, 2, 3, 4, 5, 6], (image(1, 2),))
    assert shown[0] == plain[0]
    assert shown[1:] != keys([1, 2, 3, 4, 5, 6], (image(2, 2),))[1:]
