"""Defects of prompts that are identified by hashes; the index compares token ids instead."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from aiokv import Item
from tests.drill.drill import BLOCK_TOKENS, Drill, prompt

A = prompt(1, 4)
ONE = 7001
SAME = [ONE] * 17

DECISIONS = """
import asyncio, numpy as np
from aiokv import CacheConfig, CacheEngine
async def main():
    async with CacheEngine(CacheConfig(block_tokens=4, device_blocks=20, host_blocks=20)) as engine:
        for i in range(60):
            tokens = np.arange(3 + i % 23) * (1 + i % 3)
            async with engine.match(tokens, salt=f"tenant {i % 4}", adapter="x" * (i % 2)) as lease:
                await lease.allocate(len(tokens))
                lease.commit(len(tokens))
                print(lease.hit, lease.block_table.tolist())
asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_equal_token_ids_match_whatever_their_integer_type():
    """Defect: The key is a digest of a pickle, which differs by integer type and by shared
    objects.
    """
    async with Drill(device_blocks=16, host_blocks=0) as drill:
        await drill.fill(A, np.array(SAME, np.int32))
        padded = np.zeros((len(A), 2), np.int32)
        padded[:, 0] = A
        for tokens in (
            A.tolist(),
            tuple(A.tolist()),
            [np.int64(t) for t in A],
            A.astype(np.int64),
            A.astype(np.uint16),
            padded[:, 0],
        ):
            assert drill.hit(tokens) == (4, 0)
        assert drill.hit(SAME) == drill.hit([int(str(ONE)) for _ in SAME]) == (4, 0)


def test_decisions_are_equal_in_every_process():
    """Defect: Digests differ between processes, so ranks and restarted processes miss cached
    blocks.
    """
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", DECISIONS], env=environment, capture_output=True, check=True
        )
        said.add(run.stdout)
    assert len(said) == 1
    assert b"device_tokens=4" in said.pop()


@pytest.mark.asyncio
async def test_tenants_and_adapters_share_no_blocks():
    """Defect: The key has no tenant and no adapter: a tenant can probe the prompts of another
    tenant.
    """
    async with Drill(device_blocks=64, host_blocks=0) as drill:
        pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("1:a", ""), ("a", ":1")]
        for number, (salt, adapter) in enumerate(pairs):
            lease = drill.engine.match(A, salt=salt, adapter=adapter)
            assert lease.hit.total == 0, f"{pairs[number]} sees what others computed"
            await lease.allocate(len(A))
            lease.commit(len(A))
            lease.release()
        for salt, adapter in pairs:
            lease = drill.engine.match(A, salt=salt, adapter=adapter)
            assert lease.hit.device_tokens == 4 * BLOCK_TOKENS
            lease.release()


@pytest.mark.asyncio
async def test_image_at_another_offset_is_not_a_hit():
    """Defect: The key has the image, but not its offset: the same image elsewhere is a hit."""
    async with Drill(device_blocks=32, host_blocks=0) as drill:
        image = Item(b"cat", 5, 2)
        lease = drill.engine.match(SAME, items=[image])
        await lease.allocate(len(SAME))
        lease.commit(len(SAME))
        lease.release()
        for items, blocks in (
            ([image], 4),
            ([Item(b"cat", 4, 2)], 1),
            ([Item(b"cat", 5, 3)], 1),
            ([Item(b"dog", 5, 2)], 1),
            ([], 1),
        ):
            lease = drill.engine.match(SAME, items=items)
            assert lease.hit.device_tokens == blocks * BLOCK_TOKENS, items
            lease.release()
