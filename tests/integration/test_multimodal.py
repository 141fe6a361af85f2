"""Multimodal items through the engine: shared blocks, compared with a naive model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv import CacheConfig, CacheEngine, Item, LeaseError, TransferError, UsageError
from tests.harness.cache import Cache

BLOCK_TOKENS = 4
PLACEHOLDER = 7


def config(**more: int) -> CacheConfig:
    return CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=4096, **more)


def prompt(length: int, items: list[Item]) -> np.ndarray:
    tokens = np.arange(100, 100 + length, dtype=np.int32)
    for item in items:
        tokens[item.offset : item.offset + item.length] = PLACEHOLDER
    return tokens


async def serve(engine: CacheEngine, tokens: np.ndarray, items: list[Item]) -> int:
    async with engine.match(tokens, items=items) as lease:
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        return lease.cached_tokens


def hit(engine: CacheEngine, tokens: np.ndarray, items: list[Item]) -> int:
    lease = engine.match(tokens, items=items)
    try:
        return lease.hit.total
    finally:
        lease.release()


@pytest.mark.asyncio
async def test_prompts_share_the_blocks_before_their_images() -> None:
    cat, dog = Item(b"cat", 9, 6), Item(b"dog", 9, 6)
    tokens = prompt(30, [cat])
    async with CacheEngine(config()) as engine:
        assert await serve(engine, tokens, [cat]) == 0
        assert hit(engine, tokens, [cat]) == 28
        assert hit(engine, tokens, [dog]) == 8
        assert hit(engine, tokens, []) == 8
        assert hit(engine, tokens, [Item(b"cat", 9, 5)]) == 8
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_chunk_that_ends_inside_an_image_is_not_hit_until_the_image_is_committed() -> None:
    """A chunked prefill commits inside the image; other requests hit only the blocks before it."""
    image = Item(b"cat", 6, 11)
    tokens = prompt(30, [image])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(len(tokens))
            for committed, expected in [(4, 4), (8, 4), (12, 4), (16, 4), (20, 20), (30, 28)]:
                lease.commit(committed)
                assert hit(engine, tokens, [image]) == expected
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_a_request_with_images_can_be_kept_out_of_the_cache() -> None:
    """For a model whose KV of images must not be shared, the caller says so per request."""
    image = Item(b"cat", 6, 5)
    tokens = prompt(20, [image])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens, items=[image], read=False, write=False) as lease:
            await lease.allocate(len(tokens))
            assert lease.commit(len(tokens)) == 0
        assert engine.statistics().device_cached == 0
        assert hit(engine, tokens, [image]) == 0
        await serve(engine, tokens, [image])
        assert hit(engine, tokens, [image]) == 16
        async with engine.match(tokens, items=[image], read=False) as lease:
            await lease.allocate(len(tokens))
            assert (lease.hit.total, lease.cached_tokens) == (0, 0)
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_generated_tokens_continue_a_prompt_with_images() -> None:
    image = Item(b"cat", 2, 5)
    tokens = prompt(10, [image])
    answer = np.arange(50, 57, dtype=np.int32)
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(len(tokens))
            engine.extend([lease], len(answer))
            lease.append(answer)
            lease.commit(17)
        longer = np.concatenate((tokens, answer, answer))
        assert hit(engine, longer, [image]) == 16
        assert (await engine.prefetch(longer, items=[image])).total == 16
        assert hit(engine, longer, [Item(b"dog", 2, 5)]) == 0
        assert engine.check_invariants() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item(b"cat", 28, 3), "ends behind the prompt of 30"),
        (Item(b"cat", -1, 3), "begins before position 0"),
        (Item(b"cat", 3, 0), "is empty"),
        (Item(b"", 3, 1), "has no hash"),
        (Item("cat", 3, 1), "must be bytes"),  # type: ignore[arg-type]
        (Item(b"cat", 3.0, 1), "offset is 3.0"),  # type: ignore[arg-type]
    ],
)
async def test_impossible_items_are_refused(item: Item, message: str) -> None:
    async with CacheEngine(config()) as engine:
        with pytest.raises(UsageError, match=message):
            engine.match(prompt(30, []), items=[item])
        assert engine.statistics().leases == 0


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, list[Item]]:
    """Draw a length and items with few hashes and places, so that they are often equal."""
    length = draw(st.integers(1, 40))
    items, position = [], 0
    for _ in range(draw(st.integers(0, 3))):
        offset = position + draw(st.integers(0, 4))
        size = draw(st.integers(1, 9))
        if offset + size > length:
            break
        items.append(Item(draw(st.sampled_from([b"a", b"b"])), offset, size))
        position = offset + size
    return length, items


class NaiveCache:
    """Every cached block, identified by the tokens and items of its prefix."""

    def __init__(self) -> None:
        self.blocks: set[tuple[object, ...]] = set()

    @staticmethod
    def keys(length: int, items: list[Item]) -> list[tuple[object, ...]]:
        tokens = prompt(length, items)
        stops = range(BLOCK_TOKENS, length + 1, BLOCK_TOKENS)
        return [
            (*tokens[:stop].tolist(), *(item for item in items if item.offset < stop))
            for stop in stops
        ]

    def hit(self, length: int, items: list[Item]) -> int:
        blocks = 0
        for key in self.keys(length, items)[: (length - 1) // BLOCK_TOKENS]:
            if key not in self.blocks:
                break
            blocks += 1
        while any(
            item.offset < blocks * BLOCK_TOKENS < item.offset + item.length for item in items
        ):
            blocks -= 1  # a block at a time: those before the item's first are the first to do
        return blocks * BLOCK_TOKENS


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=12))
def test_hits_equal_the_naive_cache(served: list[tuple[int, list[Item]]]) -> None:
    async def run() -> None:
        naive = NaiveCache()
        async with CacheEngine(config()) as engine:
            for length, items in served:
                cached = await serve(engine, prompt(length, items), items)
                assert cached == naive.hit(length, items)
                naive.blocks.update(naive.keys(length, items))
                assert engine.check_invariants() == []

    asyncio.run(run())


@pytest.mark.asyncio
async def test_text_appended_where_an_image_was_truncated_is_not_served_for_the_image() -> None:
    image = Item(b"cat", 8, 4)
    tokens = prompt(17, [image])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(17)
            lease.commit(8)
            lease.truncate(8)
            engine.extend([lease], 9)
            lease.append(tokens[8:])
            lease.commit(17)
        assert hit(engine, tokens, [image]) == 8
        assert hit(engine, tokens, []) == 16
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_truncation_inside_an_image_is_refused_and_changes_nothing() -> None:
    image = Item(b"cat", 6, 6)
    tokens = prompt(17, [image])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(17)
            lease.commit(4)
            with pytest.raises(LeaseError, match=r"item at positions 6 to 12.*truncate to 6 or"):
                lease.truncate(9)
            assert lease.num_tokens == 17
            lease.commit(17)
        assert hit(engine, tokens, [image]) == 16


@pytest.mark.asyncio
async def test_an_image_whose_onload_failed_is_computed_from_its_start() -> None:
    """Recomputation starts before the image, not at the failed block inside it."""
    image = Item(b"cat", 5, 10)
    tokens = prompt(21, [image])
    async with Cache(device_blocks=8, host_blocks=8) as cache:
        await serve(cache.engine, tokens, [image])
        await cache.finish()
        await cache.engine.evict(8)
        async with cache.engine.match(tokens, items=[image]) as lease:
            await lease.allocate(21)
            assert lease.cached_tokens == 20
            cache.device.onloads[0].fail_all(block=2)
            with pytest.raises(TransferError):
                await lease.layers.wait_all()
            assert lease.recompute_from() == 4
            assert lease.cached_tokens == 4
            lease.commit(21)
        assert hit(cache.engine, tokens, [image]) == 20
        await cache.finish()
