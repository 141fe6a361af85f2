"""Recurrent state and windows of two engines on a GPU that move between them over TCP."""

from __future__ import annotations

import numpy as np
import pytest

import aiokv
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

BLOCK, DIM, SLOTS, BLOCKS = 4, 16, 4, 32
PROMPT = np.arange(42, dtype=np.int32)
WINDOW = aiokv.WindowGroup(window_tokens=11, device_blocks=BLOCKS, step_tokens=8, sink_tokens=3)


class Side:
    """An engine, and its tensors: blocks, a window group and recurrent state."""

    def __init__(self, seed: int) -> None:
        import cupy

        random = np.random.default_rng(seed)

        def tensor(*shape: int):
            return cupy.asarray(random.standard_normal(shape, np.float32))

        self.kv, self.window = tensor(BLOCKS, BLOCK, DIM), tensor(BLOCKS, BLOCK, DIM)
        self.state = tensor(SLOTS, 5, DIM)
        regions = aiokv.Regions(num_layers=3)
        axes = ("tokens", "dim")
        regions.add("kv", layers=[self.kv], layer_indices=[0], axes=axes)
        regions.add_window("near", "near", layers=[self.window], layer_indices=[1], axes=axes)
        regions.add_state("state", layers=[self.state], layer_indices=[2])
        config = aiokv.CacheConfig(
            block_tokens=BLOCK,
            device_blocks=BLOCKS,
            host_blocks=0,
            model="m",
            state_slots=SLOTS,
            windows={"near": WINDOW},
        )
        peers = aiokv.Peers(
            secret="0123456789abcdef",
            listen="127.0.0.1",
            ring_bytes=16 << 10,
            outgoing_bytes=8 << 10,
            chunk_blocks=2,
        )
        device = CudaDevice(options=CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20))
        self.engine = aiokv.CacheEngine(config, regions, device, peers=peers)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def compute(self, lease: aiokv.Lease, end: int) -> None:
        """Write positions up to ``end`` step by step, and the state behind each step."""
        import cupy

        first = lease.cached_tokens
        while first < end:
            stop = min(end, lease.max_extend_tokens, first + 8)
            with self.stream:
                for position in range(first, stop):
                    block, row = divmod(position, BLOCK)
                    self.kv[lease.block_table[block]][row] = float(position)
                    self.window[lease.window_table("near")[block]][row] = 0.5 + position
                self.state[lease.state_slot] = 1000.0 + stop
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
            lease.commit(stop, ready=event)
            first = stop

    def check(self, lease: aiokv.Lease, end: int) -> None:
        """Compare what the next position reads."""
        kv, window = self.kv.get(), self.window.get()
        seen = end - WINDOW.window_tokens + 1
        for position in range(end):
            block, row = divmod(position, BLOCK)
            assert (kv[lease.block_table[block], row] == position).all()
            if position < WINDOW.sink_tokens or position >= seen:
                found = window[lease.window_table("near")[block], row]
                assert (found == 0.5 + position).all()
        assert (self.state.get()[lease.state_slot] == 1000.0 + end).all()


@pytest.mark.asyncio
async def test_state_and_windows_on_the_gpu_arrive_with_equal_bytes():
    p, d = Side(seed=1), Side(seed=2)
    async with (
        p.engine,
        d.engine,
        d.engine.match(PROMPT) as lease,
        p.engine.match(PROMPT) as source,
    ):
        await lease.allocate(len(PROMPT))
        await source.allocate(len(PROMPT))
        await lease.layers.wait_all()
        await source.layers.wait_all()
        async with lease.receive(timeout=30.0) as receiving:
            async with p.engine.send(source, receiving.ticket) as sending:
                p.compute(source, len(PROMPT))
            assert sending.failure is None
            assert await receiving.wait() == len(PROMPT)
        d.check(lease, len(PROMPT))
        assert p.engine.check_invariants() == d.engine.check_invariants() == []
