"""Mappings of blocks between servers: who sends what, identities, state, windows, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.errors import LayoutError, UsageError
from aiokv.layout.mapping import BlockLayout, BlockMapping, covers, sources
from aiokv.layout.regions import Regions

AXES = ("tokens", "heads", "dim")


def layout(
    rank: int = 0,
    num_ranks: int = 1,
    *,
    shape: tuple[int, ...] = (16, 4, 8),
    axes: tuple[str, ...] | None = AXES,
    heads: tuple[int, int] | None = None,
    dtype: str = "f2",
    name: str = "k",
    num_layers: int = 2,
    block_tokens: int = 16,
    state: dict[str, Any] | None = None,
    **more: Any,
) -> BlockLayout:
    regions = Regions(num_layers=num_layers)
    layers = [np.zeros((2, *shape), dtype)] * num_layers
    regions.add(name, layers=layers, axes=axes, heads=heads)
    if state is not None:
        layers = [np.zeros((2, *state["shape"]), "f4")] * num_layers
        regions.add_state("ssm", layers=layers, axes=state.get("axes"), heads=state.get("heads"))
    return BlockLayout.of(regions, block_tokens, rank, num_ranks, **more)


def servers(num_ranks: int, heads: int | None, local: int | None = None) -> list[BlockLayout]:
    """Return the layouts of a server: each rank has ``local`` heads, or all have the latent."""
    if heads is None:
        return [
            layout(rank, num_ranks, shape=(16, 8), axes=("tokens", "dim"))
            for rank in range(num_ranks)
        ]
    own = max(heads // num_ranks, 1) if local is None else local
    return [
        layout(rank, num_ranks, shape=(16, own, 8), heads=(rank * heads // num_ranks, heads))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "heads", "expected"),
    [
        (1, 2, 8, [[0], [0]]),
        (2, 1, 8, [[0, 1]]),
        (2, 4, 8, [[0], [0], [1], [1]]),
        (4, 2, 8, [[0, 1], [2, 3]]),
        (3, 6, 12, [[0], [0], [1], [1], [2], [2]]),
        (2, 3, 6, [[0], [0, 1], [1]]),
        # Fewer heads than ranks: equal ranks send to different receivers.
        (8, 8, 4, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (8, 4, 4, [[0], [2], [4], [6]]),
        (4, 8, 4, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (8, 2, 4, [[0, 2], [4, 6]]),
        # A latent that all ranks have.
        (1, 4, None, [[0], [0], [0], [0]]),
        (4, 4, None, [[0], [1], [2], [3]]),
        (4, 2, None, [[0], [2]]),
        (2, 4, None, [[0], [0], [1], [1]]),
        (4, 1, None, [[0]]),
    ],
)
def test_sources_have_each_head_once(
    ours: int, theirs: int, heads: int | None, expected: list[list[int]]
) -> None:
    senders = servers(ours, heads)
    found = [sources(senders, receiver) for receiver in servers(theirs, heads)]
    assert found == expected
    for receiver, ranks in zip(servers(theirs, heads), found, strict=True):
        assert covers([senders[rank] for rank in ranks], receiver)
        assert not covers([senders[rank] for rank in ranks[1:]], receiver)


def test_sources_do_not_depend_on_the_order_of_the_layouts() -> None:
    assert sources(servers(4, 8)[::-1], servers(2, 8)[1]) == [2, 3]
    for senders in (servers(4, 8)[1:], servers(4, 8) + servers(4, 8)[:1], servers(4, 8)[:2], []):
        with pytest.raises(UsageError, match="pass one of each rank"):
            sources(senders, servers(2, 8)[0])


def test_ranks_that_a_receiver_does_not_need_change_nothing() -> None:
    senders = servers(8, 8)
    for receiver in servers(2, 8):
        assert covers(senders, receiver)
        assert covers(senders[::-1], receiver)
        assert not covers(senders[:2] + senders[6:], receiver)
    quarters = [layout(rank, 4, shape=(16, 2, 8), heads=(2 * rank, 8)) for rank in range(4)]
    assert sources(quarters, layout(0, 2, shape=(16, 6, 8), heads=(1, 8))) == [0, 1, 2, 3]


def test_heads_that_no_rank_has_are_named() -> None:
    senders = servers(2, 8)
    senders[1] = layout(1, 2, shape=(16, 3, 8), heads=(5, 8))
    assert sources(senders, servers(4, 8)[0]) == [0]
    with pytest.raises(
        LayoutError,
        match=r"no rank of the sender has head 4 of region 'k' in layer 0, which the "
        r"receiver \(rank 2 of 4\) has",
    ):
        sources(senders, servers(4, 8)[2])


def test_equal_layouts_are_the_identity() -> None:
    mapping = BlockMapping(layout(1, 2), layout(1, 2))
    assert mapping.is_identity
    assert mapping.fragment_is_block
    assert mapping.fragment_bytes == layout().pool().payload_bytes == 2 * 1024
    block = np.random.default_rng(1).integers(0, 255, mapping.fragment_bytes, np.uint8)
    fragment, placed = np.zeros_like(block), np.zeros_like(block)
    mapping.cut(block.ctypes.data, fragment.ctypes.data)
    mapping.place(fragment.ctypes.data, 7, {7: placed.ctypes.data})
    assert np.array_equal(block, fragment)
    assert np.array_equal(block, placed)


@pytest.mark.parametrize(
    ("sender", "receiver", "is_block"),
    [
        (layout(), layout(shape=(4, 16, 8), axes=("heads", "tokens", "dim")), True),
        (layout(), layout(shape=(32, 4, 8), block_tokens=32), True),
        (layout(), layout(shape=(16, 2, 8), heads=(0, 4)), False),
        (layout(shape=(16, 2, 8), heads=(0, 4)), layout(), True),
    ],
)
def test_other_layouts_are_not_the_identity(
    sender: BlockLayout, receiver: BlockLayout, is_block: bool
) -> None:
    mapping = BlockMapping(sender, receiver)
    assert not mapping.is_identity
    assert mapping.fragment_is_block is is_block


def test_another_order_of_regions_is_not_the_identity() -> None:
    def both(names: str) -> BlockLayout:
        regions = Regions(num_layers=1)
        for name in names:
            regions.add(name, layers=[np.zeros((2, 16, 4), "f2")], axes=("tokens", "dim"))
        return BlockLayout.of(regions, 16)

    assert BlockMapping(both("kv"), both("kv")).is_identity
    swapped = BlockMapping(both("kv"), both("vk"))
    assert not swapped.is_identity
    assert swapped.fragment_is_block
    block, placed = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    swapped.place(block.ctypes.data, 0, {0: placed.ctypes.data})
    assert np.array_equal(placed, np.roll(block, 128))


def test_bytes_between_pieces_of_a_fragment_are_zero() -> None:
    sender, receiver = (
        layout(shape=(16, 4, 3), dtype="u1"),
        layout(1, 2, shape=(16, 2, 3), dtype="u1"),
    )
    mapping = BlockMapping(sender, receiver)
    assert mapping.fragment_bytes == 2 * 128
    block, fragment = np.full(2 * 192, 5, np.uint8), np.full(2 * 128, 9, np.uint8)
    mapping.cut([block.ctypes.data], [fragment.ctypes.data])
    assert fragment.reshape(2, 128).tolist() == [[5] * 96 + [0] * 32] * 2


def test_ranks_without_common_heads_have_empty_fragments() -> None:
    mapping = BlockMapping(servers(2, 8)[0], servers(2, 8)[1])
    assert mapping.fragment_bytes == 0
    assert not mapping.is_identity
    mapping.cut(0, 0)
    mapping.place(0, 0, {0: 0})


def test_blocks_of_no_bytes_are_mapped() -> None:
    def empty(block_tokens: int) -> BlockLayout:
        return BlockLayout.of(Regions(num_layers=0), block_tokens)

    assert BlockMapping(empty(16), empty(16)).is_identity
    assert not BlockMapping(empty(16), empty(32)).is_identity
    assert sources([empty(16)], empty(32)) == []


def test_overlapping_blocks() -> None:
    mapping = BlockMapping(
        layout(shape=(48, 4, 8), block_tokens=48), layout(shape=(32, 4, 8), block_tokens=32)
    )
    assert [list(mapping.receiver_blocks(i)) for i in range(3)] == [[0, 1], [1, 2], [3, 4]]
    assert [list(mapping.sender_blocks(i)) for i in range(4)] == [[0], [0, 1], [1], [2]]


def test_only_wanted_blocks_are_written() -> None:
    mapping = BlockMapping(layout(shape=(32, 4, 8), block_tokens=32), layout())
    fragment = np.ones(mapping.fragment_bytes, np.uint8)
    kept = np.zeros((2, layout().pool().payload_bytes), np.uint8)
    mapping.place(fragment.ctypes.data, 1, {3: kept[1].ctypes.data})
    assert kept.sum(axis=1).tolist() == [0, kept.shape[1]]


def test_other_numbers_of_addresses_are_refused() -> None:
    mapping = BlockMapping(layout(), layout())
    with pytest.raises(UsageError, match="cut: 2 blocks and 1 fragments"):
        mapping.cut([0, 0], [0])
    with pytest.raises(UsageError, match="place: 1 fragments and 2 sender blocks"):
        mapping.place([0], [0, 1], {})
    mapping.cut([], [])
    mapping.place([], [], {})
    mapping.place(np.int64(0), np.int64(3), {})


@pytest.mark.parametrize(
    ("sender", "receiver", "message"),
    [
        (
            layout(1, 2),
            layout(3, 4, dtype="f4", shape=(16, 2, 8)),
            (
                r"peers: dtype of region 'k' in layer 0: the sender \(rank 1 of 2\) has "
                r"\('float16', 2\), the receiver \(rank 3 of 4\) has \('float32', 4\)"
            ),
        ),
        (
            layout(),
            layout(dtype="i2"),
            "the sender .* has .'float16', 2., the receiver .* .'int16'",
        ),
        (
            layout(),
            layout(num_layers=3),
            "layers of blocks: the sender .* has 2, the receiver .* 3",
        ),
        (
            layout(),
            layout(name="v"),
            r"regions in layer 0: .* has \['k'\], the receiver .* \['v'\]",
        ),
        (
            layout(),
            layout(shape=(16, 4, 6)),
            (
                r"lengths of the axes of region 'k' in layer 0: .* has {'dim': 8, 'heads': 'any', "
                r"'tokens': 'any'}, the receiver .* has {'dim': 6, "
            ),
        ),
        (layout(), layout(axes=("tokens", "heads", "width")), "lengths of the axes .*'width': 8"),
        (
            layout(),
            layout(heads=(0, 8)),
            (
                r"all heads of region 'k' in layer 0: the sender .* has 4, the receiver .* has 8 "
                r"\(hint: pass heads= to Regions.add where several ranks have the same heads\)"
            ),
        ),
        (
            layout(0, 2),
            layout(),
            "all heads of region 'k' in layer 0: the sender .* 8, the rec.* 4",
        ),
        (layout(), layout(axes=None), "axes of region 'k' in layer 0: .* has None .hint: name the"),
        (
            layout(axes=None),
            layout(axes=None, shape=(16, 8, 4)),
            r"shape of region 'k' in layer 0: .* has \(16, 4, 8\), the receiver .* \(16, 8, 4\)",
        ),
        (
            layout(axes=None),
            layout(1, 2, axes=None),
            "number of ranks .region 'k' in layer 0 has no axes.: .* has 1, the rec.* has 2",
        ),
        (
            layout(axes=None),
            layout(axes=None, block_tokens=32),
            "block_tokens .region 'k' in layer 0 has no axis 'tokens'.: .* 16, .* has 32",
        ),
        (
            layout(axes=("a", "b", "c")),
            layout(axes=("a", "b", "c"), block_tokens=32),
            "block_tokens .region 'k' .* has 16, the receiver .* 32 .hint: use the same",
        ),
        (
            layout(),
            layout(block_tokens=32),
            "positions per row of region 'k' in layer 0: .* has 1, the receiver .* has 2",
        ),
        (
            layout(),
            layout(state={"shape": (4,)}),
            r"pools: the sender .* has \('blocks',\), the receiver .* has \('blocks', 'state'\)",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    sender: BlockLayout, receiver: BlockLayout, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        BlockMapping(sender, receiver)
    with pytest.raises(LayoutError, match=message):
        covers([sender], receiver)


def test_a_difference_in_a_later_layer_is_named() -> None:
    def odd(dtype: str) -> BlockLayout:
        regions = Regions(num_layers=3)
        layers = [np.zeros((2, 16), kind) for kind in ("f2", "f2", dtype)]
        regions.add("k", layers=layers, axes=("tokens",))
        return BlockLayout.of(regions, 16)

    with pytest.raises(LayoutError, match="dtype of region 'k' in layer 2"):
        BlockMapping(odd("f2"), odd("f4"))


def test_blocks_without_axes_go_to_the_same_rank() -> None:
    ours = [layout(rank, 2, axes=None) for rank in range(2)]
    assert [sources(ours, receiver) for receiver in ours] == [[0], [1]]
    assert BlockMapping(ours[1], ours[1]).is_identity
    assert BlockMapping(ours[0], ours[1]).fragment_bytes == 0


def with_state(rank: int = 0, num_ranks: int = 1, **state: Any) -> BlockLayout:
    heads = 4 // num_ranks
    return layout(rank, num_ranks, shape=(16, heads, 8), state=state)


def test_state_of_equal_layouts_is_the_identity() -> None:
    for axes in (None, ("heads", "dim")):
        ours = with_state(1, 2, shape=(2, 3), axes=axes)
        mapping = BlockMapping(ours, ours, "state")
        assert mapping.is_identity
        assert mapping.fragment_bytes == 2 * 64
        assert sources([with_state(0, 2, shape=(2, 3), axes=axes), ours], ours) == [1]


def test_heads_of_state_are_divided_among_ranks() -> None:
    axes = ("heads", "dim")
    whole = with_state(shape=(4, 3), axes=axes)
    halves = [with_state(rank, 2, shape=(2, 3), axes=axes) for rank in range(2)]
    slot = np.zeros((2, 16), np.float32)
    slot[:, :12] = np.arange(24).reshape(2, 12)
    placed = np.zeros_like(slot)
    for half in halves:
        cut, placing = BlockMapping(whole, half, "state"), BlockMapping(half, whole, "state")
        own = np.zeros((2, 16), np.float32)
        fragment = np.zeros(cut.fragment_bytes, np.uint8)
        cut.cut(slot.ctypes.data, fragment.ctypes.data)
        cut.place(fragment.ctypes.data, 0, {0: own.ctypes.data})
        first = 6 * half.rank
        assert np.array_equal(own[:, :6], slot[:, first : first + 6])
        placing.cut(own.ctypes.data, fragment.ctypes.data)
        placing.place(fragment.ctypes.data, 0, {0: placed.ctypes.data})
    assert np.array_equal(placed, slot)


def test_a_slot_of_state_is_one_block_on_both_sides() -> None:
    ours = layout(state={"shape": (3,)})
    theirs = layout(shape=(32, 4, 8), block_tokens=32, state={"shape": (3,)})
    mapping = BlockMapping(ours, theirs, "state")
    assert mapping.is_identity
    assert list(mapping.receiver_blocks(5)) == list(mapping.sender_blocks(5)) == [5]


def test_state_without_axes_is_not_divided() -> None:
    with pytest.raises(LayoutError, match="shape of region 'ssm' in layer 0 of state"):
        BlockMapping(with_state(shape=(4, 3)), with_state(0, 2, shape=(2, 3)), "state")
    with pytest.raises(
        LayoutError, match=r"number of ranks .region 'ssm' in layer 0 of state has no"
    ):
        sources([with_state(shape=(4, 3))], with_state(0, 2, shape=(4, 3)))


def test_blocks_of_windows_are_mapped_as_other_blocks() -> None:
    def windowed(block_tokens: int) -> BlockLayout:
        local = Regions(num_layers=1)
        local.add("k", layers=[np.zeros((2, block_tokens, 4), "u1")], axes=("tokens", "dim"))
        shape = (block_tokens, 4, 8)
        return layout(shape=shape, block_tokens=block_tokens, windows={"local": local})

    mapping = BlockMapping(windowed(16), windowed(32), "window local")
    assert mapping.fragment_bytes == 64
    fragment, kept = np.arange(64, dtype=np.uint8), np.full(128, 255, np.uint8)
    mapping.place(fragment.ctypes.data, 3, {1: kept.ctypes.data})
    assert kept.tolist() == [255] * 64 + list(range(64))
    with pytest.raises(UsageError, match="the layout has 'blocks', 'window local'"):
        BlockMapping(windowed(16), windowed(32), "window other")
