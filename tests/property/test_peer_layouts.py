"""Blocks of one server become blocks of another, against tensors that have no blocks and no ranks.

For random models and servers, the fragments of all sources are cut and placed in a random order.
Each byte of the receiver's blocks that belongs to a position of the prompt is then that of the
whole tensor, and no other byte has changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.layout.mapping import BlockLayout, BlockMapping, covers, sources
from tests.models.peer_blocks import Region, Server, num_blocks, whole_tensors

RANKS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (3, 6), (6, 3), (1, 4), (8, 2), (2, 8)]
BLOCK_TOKENS = (1, 16, 32, 48, 64)
SENTINEL = 0xA5


@st.composite
def models(draw: st.DrawFn, num_ranks: tuple[int, int]) -> tuple[int, list[Region]]:
    num_layers = draw(st.integers(1, 4))
    largest = max(num_ranks)
    heads = st.sampled_from([None, largest, 2 * largest, math.gcd(*num_ranks), 1])
    regions = []
    for i in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from(["kv", "dim", "part"]), max_size=2, unique=True))
        layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
        regions.append(
            Region(
                name=f"region {i}",
                dtype=draw(st.sampled_from(["u1", "u2", "u4", "u8"])),
                fixed=tuple((name, draw(st.sampled_from([1, 2, 3, 16]))) for name in names),
                heads=draw(heads),
                row_tokens=draw(st.sampled_from([1, 1, 1, 2, 8])),
                layers=tuple(sorted(layers)),
            )
        )
    return num_layers, regions


@st.composite
def servers(
    draw: st.DrawFn, num_layers: int, regions: list[Region], num_ranks: int, block_tokens: int
) -> Server:
    orders, inner, rows = {}, {}, set()
    for region in regions:
        axes = list(region.axes)
        num_rows = block_tokens // region.row_tokens if region.row_tokens else 0
        if region.row_tokens and draw(st.booleans()):
            axes.append("tokens")
            inner[region.name] = draw(
                st.sampled_from([n for n in (1, 2, 4, 16) if num_rows % n == 0])
            )
        orders[region.name] = tuple(draw(st.permutations(axes)))
        if draw(st.booleans()):
            rows.add(region.name)
    return Server(
        block_tokens=block_tokens,
        num_ranks=num_ranks,
        num_layers=num_layers,
        regions=draw(st.permutations(regions)),
        orders=orders,
        inner_tokens=inner,
        rows=frozenset(rows),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Server, Server, int, int, int]:
    ranks = draw(st.sampled_from(RANKS))
    tokens = draw(st.tuples(st.sampled_from(BLOCK_TOKENS), st.sampled_from(BLOCK_TOKENS)))
    num_layers, regions = draw(models(ranks))
    least = math.gcd(*tokens)
    for i, region in enumerate(regions):
        step = math.gcd(region.row_tokens, least)
        if tokens[0] == tokens[1] and draw(st.integers(0, 3)) == 0:
            step = 0
        regions[i] = Region(
            region.name, region.dtype, region.fixed, region.heads, step, region.layers
        )
    sender = draw(servers(num_layers, regions, ranks[0], tokens[0]))
    receiver = draw(servers(num_layers, regions, ranks[1], tokens[1]))
    num_tokens = draw(st.integers(1, 150))
    first = draw(st.integers(0, num_tokens - 1)) // tokens[1] * tokens[1]
    return sender, receiver, num_tokens, first, draw(st.integers(0, 2**32))


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def move(
    sender: Server,
    receiver: Server,
    rank: int,
    tensors: dict[tuple[int, str], np.ndarray],
    positions: range,
    rng: np.random.Generator,
) -> dict[int, np.ndarray]:
    """Return the receiver rank's host blocks after all fragments, in a random order."""
    senders = [sender.layout(r, tensors) for r in range(sender.num_ranks)]
    own = receiver.layout(rank, tensors)
    chosen = sources(senders, own)
    assert covers([senders[r] for r in chosen], own)
    first_block = positions.start // receiver.block_tokens
    blocks = {
        index: np.full(own.pool().payload_bytes, SENTINEL, np.uint8)
        for index in range(first_block, num_blocks(positions.stop, receiver.block_tokens))
    }
    addresses = {index: address(block) for index, block in blocks.items()}
    fragments = []
    for source in chosen:
        mapping = BlockMapping(senders[source], own)
        needed = {i for index in blocks for i in mapping.sender_blocks(index)}
        for i in needed & set(range(num_blocks(positions.stop, sender.block_tokens))):
            assert set(mapping.receiver_blocks(i)) & set(blocks)
            block = sender.host_block(source, i, tensors, 0x77)
            fragment = np.full(mapping.fragment_bytes + 8, SENTINEL, np.uint8)
            mapping.cut(address(block), address(fragment))
            assert (fragment[mapping.fragment_bytes :] == SENTINEL).all()
            if mapping.is_identity or mapping.fragment_is_block:
                assert np.array_equal(fragment[: mapping.fragment_bytes], block)
            fragments.append((mapping, i, fragment))
    rng.shuffle(fragments)
    for mapping, i, fragment in fragments:
        mapping.place(address(fragment), i, addresses)
        if mapping.is_identity:
            assert np.array_equal(fragment[: mapping.fragment_bytes], blocks[i])
    return blocks


@settings(deadline=None)
@given(cases())
def test_every_position_arrives_and_nothing_else_changes(
    case: tuple[Server, Server, int, int, int],
) -> None:
    sender, receiver, num_tokens, first, seed = case
    padded = math.lcm(8, sender.block_tokens, receiver.block_tokens) * 8 + num_tokens
    tensors = whole_tensors(sender.regions, padded, seed)
    rng = np.random.default_rng(seed)
    for rank in range(receiver.num_ranks):
        blocks = move(sender, receiver, rank, tensors, range(first, num_tokens), rng)
        sent_until = num_blocks(num_tokens, sender.block_tokens) * sender.block_tokens
        for index, block in blocks.items():
            expected = receiver.host_block(rank, index, tensors, SENTINEL)
            written = receiver.known_bytes(rank, index, tensors, range(sent_until))
            if not receiver.layout(rank, tensors).pool().payload_bytes:
                continue
            padding_kept = block[~written] == SENTINEL
            assert np.array_equal(block[written], expected[written])
            assert padding_kept.all() or _is_copied_whole(sender, receiver, rank, tensors)


def _is_copied_whole(sender: Server, receiver: Server, rank: int, tensors: Any) -> bool:
    """An identical block is copied with the bytes between its pieces."""
    if sender.num_ranks != receiver.num_ranks:
        return any(
            BlockMapping(sender.layout(r, tensors), receiver.layout(rank, tensors)).is_identity
            for r in range(sender.num_ranks)
        )
    return BlockMapping(sender.layout(rank, tensors), receiver.layout(rank, tensors)).is_identity


@settings(deadline=None)
@given(cases())
def test_an_encoded_layout_is_decoded_to_the_same(
    case: tuple[Server, Server, int, int, int],
) -> None:
    sender, _, _, _, seed = case
    tensors = whole_tensors(sender.regions, 2 * sender.block_tokens, seed)
    for rank in range(sender.num_ranks):
        layout = sender.layout(rank, tensors)
        blob = layout.encode()
        assert BlockLayout.decode(blob) == layout
        assert BlockLayout.decode(blob).encode() == blob
        assert layout.pool().payload_bytes == sender.rank_regions(rank, tensors).payload_bytes
