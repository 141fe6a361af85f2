"""Compute in flight on a GPU: blocks stay with the kernels that write them."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.testing import run_until_idle

from .test_engine import BLOCK, check, make, write
from .test_ordering import new_stream, record, spin

__all__ = ["spin"]  # a fixture

pytestmark = pytest.mark.asyncio

BLOCKS = 4  # of the device, and of a prompt and the token that follows it


def prompt(number: int) -> np.ndarray:
    return (np.arange((BLOCKS - 1) * BLOCK + 1) + 10_000 * number).astype(np.int32)


async def serve(engine, tensors, tokens, seed, stream):
    """One request in the order of the README; returns the tokens that it hit."""
    async with engine.match(tokens) as lease:
        await lease.allocate(len(tokens), timeout=10)
        await lease.layers.wait_all(timeout=10)
        cached_blocks = lease.cached_tokens // BLOCK
        check(tensors, lease.block_table, seed, cached_blocks)
        with engine.computing([lease]):
            write(tensors, lease.block_table, seed, stream)
        lease.commit(len(tokens))
        engine.step(record(stream))
        return cached_blocks * BLOCK


async def test_sequential_requests_on_a_full_device_hit_the_host():
    """Each lease is released after the step that computed it; the next lease gets its blocks."""
    engine, _, tensors = make(device_blocks=BLOCKS)
    stream = new_stream()
    async with engine:
        hits = []
        for n in range(8):
            hits.append(await serve(engine, tensors, prompt(n % 2), n % 2, stream))
            await engine.drain()
        assert hits[:2] == [0, 0]
        assert hits[2:] == [(BLOCKS - 1) * BLOCK] * 6
        assert engine.check_invariants() == []


@pytest.mark.parametrize("ends_with", ["event", "step"])
async def test_kernel_of_a_released_request_does_not_overwrite_an_onload(spin, ends_with):
    engine, _, tensors = make(device_blocks=BLOCKS)
    stream = new_stream()
    async with engine:
        await serve(engine, tensors, prompt(0), 0, stream)
        await engine.drain()
        await engine.evict(BLOCKS)
        lease = engine.match(prompt(1))
        await lease.allocate(len(prompt(1)))
        engine.step()  # the kernels below are launched behind this
        with engine.computing([lease]) as batch:
            spin(stream)
            write(tensors, lease.block_table, 7, stream)
            event = record(stream)
            if ends_with == "event":
                batch.ends_with(event)
        lease.release()
        if ends_with == "step":
            engine.step(event)
        assert not event.done, "the kernels were over before anything could go wrong"
        other = engine.match(prompt(0))
        await other.allocate(len(prompt(0)), timeout=10)
        assert other.cached_tokens == (BLOCKS - 1) * BLOCK
        await other.layers.wait_all(timeout=10)
        assert event.done
        check(tensors, other.block_table, 0, BLOCKS - 1)
        other.release()
        engine.step()
        await run_until_idle(lambda: not engine.statistics().releasing_leases)
        assert engine.check_invariants() == []


async def test_grant_does_not_wait_for_layers_of_the_step_that_its_task_closes():
    """Without a name, a released lease belongs to the step that is open then: the hit shrinks."""
    engine, _, tensors = make(device_blocks=BLOCKS)
    stream = new_stream()
    async with engine:
        for n in range(6):
            async with engine.match(prompt(n % 2)) as lease:
                await lease.allocate(len(prompt(0)), timeout=10)
                await lease.layers.wait_all(timeout=10)
                check(tensors, lease.block_table, n % 2, lease.cached_tokens // BLOCK)
                write(tensors, lease.block_table, n % 2, stream)
                lease.commit(len(prompt(0)))
                engine.step(record(stream))
        engine.step(record(stream))
        await engine.drain()
