"""Methods of the engine on a GPU: waits for step events, transfers, and faults."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from aiokv.errors import ClosedError, TransferError

from .test_engine import BLOCK, LAYERS, TOKENS, check, compute, make, write
from .test_ordering import new_stream, record, spin

__all__ = ["spin"]  # a fixture

pytestmark = pytest.mark.asyncio


def prompt(number: int = 0, length: int = TOKENS) -> np.ndarray:
    return (np.arange(length) + 10_000 * number).astype(np.int32)


def wipe(tensors) -> None:
    """Evict all computed blocks from the device."""
    import cupy

    for layers in tensors.values():
        for tensor in layers:
            tensor.fill(-1)
    cupy.cuda.Device().synchronize()


async def read_back(engine, tensors, tokens, seed, stream, blocks=TOKENS // BLOCK):
    """Onload a prompt, check every byte after the stream's waits, and return the hit."""
    lease = await engine.match(np.append(tokens, np.int32(1)))
    await lease.allocate(len(tokens) + 1)
    hit = lease.hit
    for layer in range(LAYERS):
        lease.layers.gpu_wait(layer, stream)
    stream.synchronize()
    lease.layers.raise_for_error()
    check(tensors, lease.block_table, seed, blocks)
    await lease.layers.wait_all()
    lease.release()
    engine.step()
    return hit


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_a_backup_waits_for_the_event_of_its_step(spin, policy):
    """The blocks are written behind a slow kernel; the backup starts at once and copies them."""
    engine, _, tensors = make(write_policy=policy)
    stream, tokens = new_stream(), prompt()
    async with engine:
        lease = await engine.match(tokens)
        await lease.allocate(TOKENS)
        write(tensors, lease.block_table, 3, stream)  # compiles, too
        stream.synchronize()
        spin(stream)
        write(tensors, lease.block_table, 7, stream)
        lease.commit(TOKENS)
        lease.release()
        event = record(stream)
        engine.step(event)
        assert not event.done, "the step was over before the backup could have gone wrong"
        await engine.evict(32)
        await engine.drain()
        assert event.done
        await engine.evict(32)
        wipe(tensors)
        hit = await read_back(engine, tensors, tokens, 7, stream)
        assert hit.host_tokens == TOKENS
        assert engine.check_invariants() == []


async def test_freed_blocks_are_not_overwritten_before_the_step_that_reads_them(spin):
    """A slow step reads a released table whose ids are already targets of another onload."""
    engine, _, tensors = make(device_blocks=12)
    stream, first, second = new_stream(), prompt(1), prompt(2)
    async with engine:
        await compute(engine, tensors, first, 7, stream)
        await engine.evict(12)
        await compute(engine, tensors, second, 20, stream)
        lease = await engine.match(second)
        await lease.allocate(TOKENS)
        shared = lease.block_table[:-1]
        with stream:
            tensors["k"][0][shared]  # compiles
        stream.synchronize()
        spin(stream)
        with stream:
            seen = tensors["k"][0][shared]
        lease.release()
        event = record(stream)
        engine.step(event)
        again = await engine.match(first)  # its ids are the released ones
        await again.allocate(TOKENS)
        assert again.cached_tokens == TOKENS - BLOCK
        await again.layers.wait_all()
        stream.synchronize()
        found = seen.get()
        for place in range(len(shared)):
            assert (found[place] == 20 + place).all()
        check(tensors, again.block_table, 7, TOKENS // BLOCK - 1)
        again.release()
        engine.step()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_prompts_return_from_the_host_under_memory_pressure(policy):
    """Prompts of four times the device's capacity are offloaded and onloaded."""
    engine, _, tensors = make(
        device_blocks=24, host_blocks=128, write_policy=policy, verify="checksum"
    )
    stream = new_stream()
    async with engine:
        for number in range(8):
            await compute(engine, tensors, prompt(number), 10 * number, stream)
        hits = [
            await read_back(engine, tensors, prompt(number), 10 * number, stream)
            for number in range(8)
        ]
        assert sum(hit.host_tokens for hit in hits) >= 6 * TOKENS
        assert all(hit.total == TOKENS for hit in hits)
        assert engine.statistics().worker.attention.onload.failed == 0
        assert engine.check_invariants() == []


async def test_swap_includes_the_partial_block(spin):
    """The tail is computed by the open step; the swap waits for it, and resume brings it back."""
    engine, _, tensors = make(verify="checksum")
    stream, length = new_stream(), TOKENS - 5
    async with engine:
        lease = await engine.match(prompt(0, length))
        await lease.allocate(length)
        blocks = len(lease.block_table)
        write(tensors, lease.block_table, 3, stream)
        stream.synchronize()
        spin(stream)
        write(tensors, lease.block_table, 7, stream)
        lease.commit(length)
        swap = asyncio.ensure_future(lease.preempt(swap=True))
        await asyncio.sleep(0)
        assert not swap.done()
        engine.step(record(stream))
        await swap
        await engine.evict(32)  # full blocks also stay on the device until they are evicted
        wipe(tensors)
        await lease.resume(length)
        assert lease.cached_tokens == length
        for layer in range(LAYERS):
            lease.layers.gpu_wait(layer, stream)
        await lease.layers.wait_all()
        check(tensors, lease.block_table, 7, blocks)
        lease.release()
        engine.step(record(stream))
        assert engine.check_invariants() == []


async def test_a_fork_copies_the_tail_in_the_compute_stream(spin):
    engine, _, tensors = make()
    stream, length = new_stream(), TOKENS - 5
    async with engine:
        lease = await engine.match(prompt(0, length))
        await lease.allocate(length)
        blocks = len(lease.block_table)
        write(tensors, lease.block_table, 3, stream)
        lease.commit(length)
        lease.fork(stream=stream).release()  # compiles
        stream.synchronize()
        spin(stream)
        write(tensors, lease.block_table, 7, stream)
        child = lease.fork(stream=stream)
        assert not stream.done, "the copy is behind the step's work"
        assert child.block_table[:-1].tolist() == lease.block_table[:-1].tolist()
        assert child.block_table[-1] != lease.block_table[-1]
        with stream:
            tensors["k"][0][int(lease.block_table[-1])] = 0  # behind the copy
        stream.synchronize()
        check(tensors, child.block_table, 7, blocks)
        child.release()
        lease.release()
        engine.step(record(stream))
        await engine.drain()


async def test_a_checksum_finds_a_changed_host_block():
    engine, _, tensors = make(verify="checksum")
    stream, tokens = new_stream(), prompt()
    async with engine:
        await compute(engine, tensors, tokens, 7, stream)
        await engine.evict(32)
        arena = engine.inspect.parts.worker.memory.arena
        arena.blocks[:, 5] ^= 1
        lease = await engine.match(np.append(tokens, np.int32(1)))
        await lease.allocate(TOKENS + 1)
        with pytest.raises(TransferError, match="checksum"):
            await lease.layers.wait_all()
        await engine.drain()
        assert lease.recompute_from() == 0
        lease.release()
        engine.step()


@pytest.mark.parametrize("moment", ["onload", "backup"])
async def test_close_under_load_waits_for_transfers(spin, moment):
    """The engine closes with transfers in flight behind a slow step; no memory is freed early."""
    engine, device, tensors = make(drain_timeout_seconds=0.0)
    stream, tokens = new_stream(), prompt()
    await engine.__aenter__()
    if moment == "onload":
        await compute(engine, tensors, tokens, 7, stream)
        await engine.evict(32)
    lease = await engine.match(tokens)
    spin(stream)
    await lease.allocate(TOKENS)
    if moment == "backup":
        write(tensors, lease.block_table, 7, stream)
        lease.commit(TOKENS)
    event = record(stream)
    engine.step(event)
    await engine.aclose()
    assert device._engines == {}
    with pytest.raises(ClosedError):
        await engine.match(tokens)
    lease.release()
    stream.synchronize()


BROKEN = r"""
import asyncio, os
import cupy, numpy as np
from aiokv.errors import AiokvError, BrokenEngineError, TransferError
from tests.gpu.test_engine import TOKENS, compute, make
from tests.gpu.test_engine_gpu import prompt

async def main():
    engine, device, tensors = make(device_blocks=48)
    stream = cupy.cuda.Stream(non_blocking=True)
    await engine.__aenter__()
    await compute(engine, tensors, prompt(), 7, stream)
    await engine.evict(48)
    hungry = await engine.match(prompt(1, 16 * 20))
    await hungry.allocate(16 * 20)
    waiting = await engine.match(prompt(2, 16 * 40))
    fault = cupy.RawKernel('extern "C" __global__ void fault(char* at) { *at = 1; }', "fault")
    fault((1,), (1,), (np.uint64(8),))
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    lease = await engine.match(np.append(prompt(), np.int32(1)))
    try:
        await lease.allocate(TOKENS + 1)
        line = asyncio.ensure_future(waiting.allocate(16 * 40))
        await lease.layers.wait_all()
    except (TransferError, BrokenEngineError) as error:
        print("waiter:", type(error).__name__, flush=True)
    try:
        await asyncio.wait_for(line, 20)
    except BrokenEngineError as error:
        print("line: BrokenEngineError", flush=True)
    try:
        await engine.match(prompt(3))
    except BrokenEngineError as error:
        assert "cudaErrorIllegalAddress" in str(error.__cause__), repr(error.__cause__)
        print("later: BrokenEngineError", flush=True)
    os._exit(0)  # CuPy cannot clean up in a lost context

asyncio.run(main())
"""


async def test_device_fault_fails_all_waiters_of_the_engine():
    """Run in a separate process, because the fault breaks its CUDA context."""
    process = await asyncio.to_thread(
        lambda: subprocess.run(
            [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=100, check=False
        )
    )
    said = process.stdout + process.stderr
    assert "waiter: " in process.stdout, said
    assert "line: BrokenEngineError" in process.stdout, said
    assert "later: BrokenEngineError" in process.stdout, said
