"""Multimodal items through the engine: shared blocks, compared with a naive model."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv import CacheConfig, CacheEngine, Item
from aiokv.errors import LeaseError, TransferError, UsageError
from tests.harness.cache import Cache

BLOCK_TOKENS = 4
PLACEHOLDER = 7


def config(**more: Any) -> CacheConfig:
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
        assert engine.statistics().attention.device.cached == 0
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

    def __init__(self, *, splits_items: bool = False) -> None:
        self.blocks: set[tuple[object, ...]] = set()
        self.splits_items = splits_items

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
        while not self.splits_items and any(
            item.offset < blocks * BLOCK_TOKENS < item.offset + item.length for item in items
        ):
            blocks -= 1  # a block at a time: those before the item's first are the first to do
        return blocks * BLOCK_TOKENS


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=12), st.booleans())
def test_hits_equal_the_naive_cache(served: list[tuple[int, list[Item]]], splits: bool) -> None:
    async def run() -> None:
        naive = NaiveCache(splits_items=splits)
        async with CacheEngine(config(item_hits="partial" if splits else "whole")) as engine:
            for length, items in served:
                cached = await serve(engine, prompt(length, items), items)
                assert cached == naive.hit(length, items)
                naive.blocks.update(naive.keys(length, items))
                assert engine.check_invariants() == []

    asyncio.run(run())


async def serve_in_turns(
    engine: CacheEngine, tokens: np.ndarray, items: list[Item], cuts: list[int]
) -> tuple[int, bytes]:
    """Serve a prompt whose later turns begin at ``cuts``, and fork it in between."""
    bounds = [*cuts, len(tokens)]
    async with engine.match(tokens[: bounds[0]], items=before(items, bounds[0])) as lease:
        await lease.allocate(len(tokens))
        lease.commit(bounds[0])
        for first, end in itertools.pairwise(bounds):
            turn = [item for item in items if first <= item.offset < end]
            lease.append(tokens[first:end], items=turn)
            lease.commit(end)
        return lease.cached_tokens, engine.inspect.parts.scheduler.read.digest(
            lease.id, len(tokens)
        )


def before(items: list[Item], end: int) -> list[Item]:
    return [item for item in items if item.offset < end]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(requests(), st.lists(st.integers(1, 39), max_size=3)), min_size=1, max_size=10
    )
)
def test_items_of_later_turns_are_those_of_one_prompt(
    served: list[tuple[tuple[int, list[Item]], list[int]]],
) -> None:
    """Hits and digests equal those of the naive cache, wherever the turns begin."""

    async def run() -> None:
        naive = NaiveCache()
        async with CacheEngine(config()) as engine:
            for (length, items), drawn in served:
                tokens = prompt(length, items)
                inside = {
                    position
                    for item in items
                    for position in range(item.offset + 1, item.offset + item.length)
                }
                cuts = sorted({cut for cut in drawn if cut < length} - inside) or [length]
                cached, digest = await serve_in_turns(
                    engine, tokens, items, cuts if cuts != [length] else []
                )
                first = cuts[0]
                assert cached == naive.hit(first, before(items, first))
                naive.blocks.update(naive.keys(length, items))
                assert hit(engine, tokens, items) == naive.hit(length, items)
                whole = engine.match(tokens, items=items)
                assert digest == engine.inspect.parts.scheduler.read.digest(whole.id, length)
                whole.release()
                assert engine.check_invariants() == []

    asyncio.run(run())


@pytest.mark.asyncio
async def test_image_of_a_later_turn_is_hit_by_no_other_image() -> None:
    cat, dog = Item(b"cat", 10, 6), Item(b"dog", 10, 6)
    tokens = prompt(24, [cat])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens[:9]) as lease:
            await lease.allocate(24)
            lease.commit(9)
            lease.append(tokens[9:], items=[cat])
            lease.commit(24)
            fork = lease.fork()
        engine.extend([fork], 4)
        fork.append([1, 2, 3, 4])
        fork.commit(28)
        fork.release()
        longer = np.concatenate((tokens, np.array([1, 2, 3, 4, 5], np.int32)))
        assert hit(engine, longer, [cat]) == 28
        for others in ([dog], [], [Item(b"cat", 10, 5)], [Item(b"cat", 11, 5)]):
            assert hit(engine, longer, others) == 8
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_forks_append_images_of_their_own_and_share_a_block_with_an_earlier_one() -> None:
    first, cat, dog = Item(b"first", 2, 4), Item(b"cat", 7, 6), Item(b"dog", 7, 6)
    tokens = prompt(20, [first, cat])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens[:7], items=[first]) as lease:
            await lease.allocate(20)
            lease.commit(7)
            fork = lease.fork()
            for each, image in ((lease, cat), (fork, dog)):
                each.append(tokens[7:], items=[image])
                each.commit(20)
            fork.release()
        longer = np.concatenate((tokens, tokens[:1]))
        assert hit(engine, longer, [first, cat]) == 20
        assert hit(engine, longer, [first, dog]) == 20
        assert hit(engine, longer, [first]) == 0, "a hit of one block would cut the first image"
        assert hit(engine, longer, [cat]) == 0
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_truncated_image_of_a_later_turn_is_replaced_by_another_one() -> None:
    cat, dog = Item(b"cat", 9, 5), Item(b"dog", 9, 5)
    tokens = prompt(20, [cat])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens[:8]) as lease:
            await lease.allocate(20)
            lease.commit(8)
            lease.append(tokens[8:], items=[cat])
            with pytest.raises(LeaseError, match="item at positions 9 to 14"):
                lease.truncate(12)
            lease.truncate(9)
            engine.extend([lease], 11)
            lease.append(tokens[9:], items=[dog])
            lease.commit(20)
            await lease.preempt()
            await lease.resume(20)
            assert lease.cached_tokens == 16, "the image is part of the prompt of the resumed lease"
        longer = np.concatenate((tokens, tokens[:1]))
        assert hit(engine, longer, [dog]) == 20
        assert hit(engine, longer, [cat]) == 8
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_promised_image_of_a_later_turn_is_pending_for_equal_prompts_only() -> None:
    cat, dog = Item(b"cat", 9, 5), Item(b"dog", 9, 5)
    tokens = prompt(21, [cat])
    async with CacheEngine(config()) as engine, engine.match(tokens[:8]) as lease:
        await lease.allocate(21)
        lease.append(tokens[8:], items=[cat])
        for items, pending in (([cat], 20), ([dog], 8), ([], 8)):
            async with engine.match(tokens, items=items) as other:
                assert other.pending_tokens == pending


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Item(b"cat", 7, 3)], "begins before position 8, the first of the appended tokens"),
        ([Item(b"cat", 0, 3)], "begins before position 8, the first of the appended tokens"),
        ([Item(b"cat", 10, 7)], "ends behind the appended tokens, which end at position 16"),
        (
            [Item(b"cat", 9, 3), Item(b"dog", 11, 2)],
            "begins before position 12: items are",
        ),
        ([Item(b"cat", 9, 0)], "is empty"),
        ([Item(b"", 9, 1)], "has no hash"),
        ([("cat", 9, 1)], "must be bytes"),
        ([7], "must be an Item"),
    ],
)
async def test_impossible_items_of_a_later_turn_are_refused(
    items: list[Item], message: str
) -> None:
    tokens = prompt(24, [])
    async with CacheEngine(config()) as engine:
        async with engine.match(tokens[:8]) as lease:
            await lease.allocate(24)
            with pytest.raises(UsageError, match=message):
                lease.append(tokens[8:16], items=items)
            with pytest.raises(LeaseError, match="17 tokens at position 8 exceed"):
                lease.append(tokens[:17], items=[Item(b"cat", 9, 1)])
            lease.append(tokens[8:])
            lease.commit(24)
        assert hit(engine, tokens, []) == 20


@pytest.mark.asyncio
async def test_hit_may_end_inside_an_image_where_the_configuration_allows_it() -> None:
    image = Item(b"cat", 6, 11)
    tokens = prompt(30, [image])
    async with CacheEngine(config(item_hits="partial")) as engine:
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(len(tokens))
            for committed in (4, 8, 12, 16, 20):
                lease.commit(committed)
                assert hit(engine, tokens, [image]) == committed
                assert engine.would_hit(tokens, items=[image]).total == committed
                assert hit(engine, tokens, [Item(b"dog", 6, 11)]) == 4
            with pytest.raises(LeaseError, match="shared"):
                lease.truncate(9)
        async with engine.match(tokens, items=[image]) as lease:
            await lease.allocate(14)
            assert lease.cached_tokens == 12, "within the allocated positions"
            engine.extend([lease], 16)
            lease.truncate(17)
            assert lease.commit(17) == 0, "the blocks of the image are cached already"
        assert engine.check_invariants() == []


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
@pytest.mark.parametrize("item_hits", ["whole", "partial"])
async def test_an_image_whose_onload_failed_is_computed_from_its_start(item_hits: str) -> None:
    """Recomputation starts before the image, not at the failed block inside it.

    It starts at the failed block where hits may end inside an image.
    """
    image = Item(b"cat", 5, 10)
    tokens = prompt(21, [image])
    async with Cache(device_blocks=8, host_blocks=8, item_hits=item_hits) as cache:
        await serve(cache.engine, tokens, [image])
        await cache.finish()
        await cache.engine.evict(8)
        async with cache.engine.match(tokens, items=[image]) as lease:
            await lease.allocate(21)
            assert lease.cached_tokens == 20
            cache.device.onloads[0].fail_all(block=2)
            with pytest.raises(TransferError):
                await lease.layers.wait_all()
            first = 8 if item_hits == "partial" else 4
            assert lease.recompute_from() == first
            assert lease.cached_tokens == first
            lease.commit(21)
        assert hit(cache.engine, tokens, [image]) == 20
        await cache.finish()
