"""engine.would_hit: the hit that match would find, without a change to the cache."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit, Item
from aiokv.errors import ClosedError, UsageError


async def serve(engine: CacheEngine, tokens: list[int], **names: object) -> None:
    """Compute and commit a prompt."""
    async with engine.match(tokens, **names) as lease:  # type: ignore[arg-type]
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))


@pytest.mark.asyncio
async def test_would_hit_finds_what_match_finds():
    random = np.random.default_rng(5)
    config = CacheConfig(
        device_blocks=24, host_blocks=40, block_tokens=4, write_policy="write_through"
    )
    hits = set()
    async with CacheEngine(config) as engine:
        for _ in range(300):
            shared, length = int(random.integers(0, 20)), int(random.integers(1, 30))
            own = int(random.integers(1, 3)) * 100
            tokens = [i if i < shared else own + i for i in range(length)]
            offset = int(random.integers(0, length))
            item = Item(bytes([int(random.integers(1, 3))]), offset, 1 + (length - offset) // 3)
            names = {
                "salt": str(random.integers(0, 2)),
                "adapter": str(random.integers(0, 2)),
                "items": [item] if random.integers(0, 3) == 0 else [],
            }
            expected = engine.would_hit(tokens, **names)
            with_lease = engine.match(tokens, **names)
            assert with_lease.hit == expected
            with_lease.release()
            hits.add(expected)
            await serve(engine, tokens, **names)
            await engine.drain()
        assert engine.check_invariants() == []
    assert max(hit.device_tokens for hit in hits) >= 12
    assert max(hit.host_tokens for hit in hits) >= 8


@pytest.mark.asyncio
async def test_would_hit_changes_nothing():
    async with CacheEngine(CacheConfig(device_blocks=8, block_tokens=4)) as engine:
        await serve(engine, [1] * 9)
        await serve(engine, [2] * 9, salt="a")
        before = engine.inspect.dump()
        assert engine.would_hit([1] * 9) == Hit(8, 0)
        assert engine.would_hit([2] * 9, salt="a") == Hit(8, 0)
        assert engine.would_hit([2] * 9, salt="unknown") == Hit(0, 0)
        assert engine.would_hit([1] * 9, items=[Item(b"unknown", 5, 2)]) == Hit(4, 0)
        assert engine.inspect.dump() == before
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_would_hit_does_not_keep_a_prefix_from_eviction():
    async with CacheEngine(CacheConfig(device_blocks=4, block_tokens=4)) as engine:
        await serve(engine, [1] * 9)
        await serve(engine, [2] * 5)
        assert engine.would_hit([1] * 9) == Hit(8, 0)  # the least recently used blocks
        await serve(engine, [3] * 5)  # evicts one block of them
        assert engine.would_hit([1] * 9) == Hit(4, 0)
        assert engine.would_hit([2] * 5) == Hit(4, 0)


@pytest.mark.asyncio
async def test_wrong_arguments_are_refused():
    engine = CacheEngine(CacheConfig(device_blocks=4, block_tokens=4))
    with pytest.raises(UsageError, match="async with"):
        engine.would_hit([1])
    async with engine:
        for tokens, names, message in [
            ([], {}, "would_hit: the prompt has no tokens"),
            ([2**31], {}, "outside int32"),
            ([1], {"salt": 1}, "salt is 1"),
            ([1], {"adapter": b""}, "adapter is b''"),
            ([1], {"items": [Item(b"a", 1, 1)]}, "behind the prompt of 1 positions"),
        ]:
            with pytest.raises(UsageError, match=message):
                engine.would_hit(tokens, **names)  # type: ignore[arg-type]
        errors: list[BaseException] = []

        def call() -> None:
            try:
                engine.would_hit([1])
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert "outside the event loop" in str(errors[0])
    with pytest.raises(ClosedError):
        engine.would_hit([1])
