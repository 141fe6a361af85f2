"""Tensors of another process, mapped by CUDA IPC: registered, read and written in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import DeviceError, UsageError
from aiokv.frameworks.ipc import open_shared, share
from tests.gpu.share_child import BLOCKS, WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TOKENS = 4


class Child:
    """The process that owns the tensors."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.share_child"],
            cwd=ROOT,
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.shared = [bytes.fromhex(self._line()) for _ in range(2)]

    def fill(self, value: int) -> int:
        """Fill the first tensor, and return the sum of the second one."""
        assert self._process.stdin is not None
        print(value, file=self._process.stdin, flush=True)
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the process has ended"
        return line

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


def as_array(tensor: Any) -> Any:
    import cupy

    return cupy.asarray(tensor)


@pytest.mark.timeout(120)
def test_both_processes_see_the_same_bytes(child: Child) -> None:
    import cupy

    with open_shared(child.shared[0]) as whole, open_shared(child.shared[1]) as strided:
        first, second = as_array(whole), as_array(strided)
        assert first.shape == (BLOCKS, WIDTH)
        assert int(first[0, 0]) == BLOCKS * WIDTH
        assert int(second[1, 0]) == 2 * BLOCKS * WIDTH + WIDTH
        second[:] = 3
        cupy.cuda.Device().synchronize()
        assert child.fill(7) == 3 * BLOCKS * (WIDTH // 2)
        assert (first == 7).all()
        with pytest.raises(UsageError, match="belongs to this process"):
            open_shared(share(cupy.zeros(4)))
        del first, second


@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_an_engine_copies_blocks_of_the_other_process(child: Child) -> None:
    tokens = list(range(4 * TOKENS + 1))
    with open_shared(child.shared[0]) as whole:
        regions = Regions(num_layers=1)
        regions.add("kv", layers=[whole])
        config = CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=BLOCKS)
        async with CacheEngine(config, regions, device="cuda") as engine:
            child.fill(11)
            async with engine.match(tokens) as lease:
                await lease.allocate(len(tokens))
                lease.commit(len(tokens))
            engine.step()
            await engine.drain()
            await engine.evict(BLOCKS)
            child.fill(99)
            async with engine.match(tokens) as lease:
                await lease.allocate(len(tokens))
                await lease.layers.wait_all()
                assert lease.cached_tokens == 4 * TOKENS
                loaded = as_array(whole)[lease.block_table[:4].tolist()]
                assert (loaded == 11).all()
                del loaded
            engine.step()


@pytest.mark.timeout(120)
def test_memory_that_cuda_cannot_share_is_refused() -> None:
    import cupy

    pool = cupy.cuda.MemoryAsyncPool()
    with cupy.cuda.using_allocator(pool.malloc):
        tensor = cupy.zeros(1024)
    with pytest.raises(DeviceError, match="cudaMalloc"):
        share(tensor)
