"""Descriptions of blocks: content, canonical encoding, and malformed bytes."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from aiokv.errors import ConfigError, LayoutError, UsageError
from aiokv.layout.block_layout import MAX_ENCODED_BYTES, BlockLayout, PieceLayout
from aiokv.layout.regions import Regions

AXES = ("tokens", "heads", "dim")


def regions_of(num_layers: int = 3, *, heads: tuple[int, int] | None = None) -> Regions:
    regions = Regions(num_layers=num_layers)
    for name in ("k", "v"):
        layers = [np.zeros((4, 16, 2, 8), "f2")] * num_layers
        regions.add(name, layers=layers, axes=AXES, heads=heads, dtypes=["bfloat16"] * num_layers)
    return regions


def test_a_layout_describes_the_pieces_of_each_layer() -> None:
    regions = regions_of()
    regions.add("scale", layers=[np.zeros((4, 16), "f4")], layer_indices=[1], axes=("tokens",))
    regions.add_state("ssm", layers=[np.zeros((3, 5), "u1")] * 3)
    layout = BlockLayout.of(regions, 32, 1, 4, windows={"local": regions_of(1)})
    k = PieceLayout("k", "bfloat16", 2, (16, 2, 8), AXES, (2, 8))
    v = PieceLayout("v", "bfloat16", 2, (16, 2, 8), AXES, (2, 8))
    scale = PieceLayout("scale", "float32", 4, (16,), ("tokens",), None)
    assert list(layout.pool().layers()) == [(k, v), (k, v, scale), (k, v)]
    assert layout.pool().runs == ((0, 1), (1, 1), (0, 1))
    assert layout.pool().payload_bytes == regions.payload_bytes
    assert layout.pool_names == ("blocks", "state", "window local")
    assert layout.pool("state").payload_bytes == 3 * 64
    assert layout.pool("window local").num_layers == 1
    assert (layout.block_tokens, layout.rank, layout.num_ranks) == (32, 1, 4)
    assert BlockLayout.decode(layout.encode()) == layout
    with pytest.raises(UsageError, match="pool is 'state '; the layout has 'blocks', 'state', 'wi"):
        layout.pool("state ")


def test_equal_layers_take_no_additional_bytes() -> None:
    one, many = (BlockLayout.of(regions_of(n), 16).encode() for n in (1, 100))
    assert len(one) == len(many) < 100


def test_heads_are_equal_shares_by_default() -> None:
    by_default = BlockLayout.of(regions_of(), 16, 3, 4)
    assert by_default == BlockLayout.of(regions_of(heads=(6, 8)), 16, 3, 4)
    assert by_default != BlockLayout.of(regions_of(heads=(6, 9)), 16, 3, 4)


def test_a_cache_of_no_bytes_has_a_layout() -> None:
    layout = BlockLayout.of(Regions(num_layers=0), 16)
    assert (layout.pool().num_layers, layout.pool().payload_bytes) == (0, 0)
    assert BlockLayout.decode(layout.encode()) == layout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ConfigError, "block_tokens is 0; it must be between 1"),
        ((2**31,), ConfigError, "block_tokens is 2147483648"),
        ((16, 2, 2), ConfigError, "rank is 2; it must be between 0 and 1"),
        ((16, 0, 0), ConfigError, "num_ranks is 0"),
        ((24,), LayoutError, "'tokens' has 16 rows, but block_tokens is 24"),
        ((8,), LayoutError, "'tokens' has 16 rows, but block_tokens is 8"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    arguments: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BlockLayout.of(regions_of(), *arguments)


@pytest.mark.slow
def test_a_description_that_is_too_long_is_refused() -> None:
    regions = Regions(num_layers=800)
    for layer in range(800):
        block = np.zeros((1, layer + 1), "u1")
        regions.add(f"region {layer}", layers=[block], layer_indices=[layer])
    with pytest.raises(LayoutError, match=r"takes .* bytes; at most 16384"):
        BlockLayout.of(regions, 16)


def test_too_many_regions_or_windows_are_refused() -> None:
    regions = Regions(num_layers=1)
    for i in range(64):
        regions.add(f"region {i}", layers=[np.zeros((1, 4), "u1")])
    empty = Regions(num_layers=0)
    windows = {f"{i:02}": empty for i in range(16)}
    assert len(BlockLayout.of(regions, 16, windows=windows).pools) == 17
    with pytest.raises(LayoutError, match="at most 16 groups of sliding-window layers"):
        BlockLayout.of(regions, 16, windows=windows | {"16": empty})
    regions.add("region 64", layers=[np.zeros((1, 4), "u1")])
    with pytest.raises(LayoutError, match="blocks has 65 regions in a layer; expected at most 64"):
        BlockLayout.of(regions, 16)


def test_names_are_valid_unicode() -> None:
    for name, window in (("\udc00", "w"), ("k", "\udc00")):
        regions = Regions(num_layers=1)
        regions.add(name, layers=[np.zeros((1, 4), "u1")])
        with pytest.raises(LayoutError, match="not valid Unicode"):
            BlockLayout.of(regions, 16, windows={window: regions})


def content() -> list:
    """Return a layout with one thing of each sort, as msgpack has it."""
    regions = regions_of()
    regions.add("scale", layers=[np.zeros((4, 16), "f4")], layer_indices=[1], axes=("tokens",))
    regions.add_state("ssm", layers=[np.zeros((3, 5), "u1")] * 3)
    windows = {"a": regions_of(1), "b": regions_of(1)}
    return msgspec.msgpack.decode(BlockLayout.of(regions, 16, 1, 2, windows=windows).encode())


def kinds(layout: list) -> list:
    return layout[4][0][1][0]


def runs(layout: list) -> list:
    return layout[4][0][1][1]


def first_piece(layout: list) -> list:
    return kinds(layout)[0][0]


def change(path: tuple[int, ...], value: object):
    def apply(layout: list) -> None:
        for step in path[:-1]:
            layout = layout[step]
        layout[path[-1]] = value

    return apply


PIECE = (4, 0, 1, 0, 0, 0)  # region, dtype, item bytes, shape, axes, heads


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change((0,), 2), "version 2; this server has version 1"),
        (change((1,), 0), "not a layout"),
        (change((1,), 2**63), "not a layout"),
        (change((1,), 24), "'tokens' has 16 rows, but block_tokens is 24"),
        (change((2,), 2), "rank 2 of 2 ranks"),
        (change((3,), "2"), "not a layout"),
        (change((4,), []), "the pools are"),
        (lambda layout: layout[4].pop(0), "the pools are"),
        (lambda layout: layout[4].insert(1, layout[4][1]), "the pools are"),
        (lambda layout: layout[4].reverse(), "the pools are"),
        (change((4, 2, 0), "window c"), "the pools are"),
        (change((4, 1, 0), "states"), "the pools are"),
        (lambda layout: layout[4].append(layout[4][2]), "the pools are"),
        (lambda layout: layout[4].extend([layout[4][2]] * 20), "not a layout"),
        (lambda layout: layout.append(0), "the canonical encoding"),
        (lambda layout: first_piece(layout).append(0), "the canonical encoding"),
        (lambda layout: runs(layout).append([9, 1]), "numbered by their first use"),
        (lambda layout: runs(layout).pop(0), "numbered by their first use"),
        (lambda layout: kinds(layout).append(kinds(layout)[0]), "numbered by their first use"),
        (lambda layout: kinds(layout).append([]), "numbered by their first use"),
        (
            lambda layout: runs(layout).append(runs(layout)[-1]),
            "blocks has two adjacent runs of the same kind",
        ),
        (lambda layout: runs(layout).append([1, 2**31 - 1]), "layers; at most 4096"),
        (lambda layout: runs(layout).append([1, 0]), "not a layout"),
        (lambda layout: kinds(layout)[0].append(first_piece(layout)), "with different names"),
        (change((*PIECE, 0), "r" * 257), "not a layout"),
        (change((*PIECE, 2), 0), "not a layout"),
        (change((*PIECE, 2), 2**40), "bytes per block; at most"),
        (change((*PIECE, 3), [16, 2, 0]), "not a layout"),
        (change((*PIECE, 3), [16, 2, 2**40]), "bytes per block; at most"),
        (change((*PIECE, 3), [1] * 33), "not a layout"),
        (change((*PIECE, 3), [16, 2]), "of the shape .16, 2."),
        (change((*PIECE, 4), ["tokens", "heads", "heads"]), "occurs too often"),
        (change((*PIECE, 4), ["tokens", "heads", ""]), "a name of 0 characters"),
        (change((*PIECE, 4), ["tokens", "head", "dim"]), r"heads is \(2, 4\), and axes is"),
        (change((*PIECE, 4), ["x"] * 9), "not a layout"),
        (change((*PIECE, 4), None), r"heads is \(2, 4\), and axes is None"),
        (change((*PIECE, 5), None), "heads is None, and axes is"),
        (change((*PIECE, 5), [3, 4]), "2 heads from head 3 on exceed the total of 4"),
        (change((*PIECE, 5), [0, 2**31]), "not a layout"),
        (change((4, 1, 1, 0, 0, 0, 4), ["tokens"]), "recurrent state has an axis 'tokens'"),
    ],
)
def test_content_that_contradicts_itself_is_refused(damage, message: str) -> None:
    layout = content()
    assert BlockLayout.decode(msgspec.msgpack.encode(layout))
    damage(layout)
    with pytest.raises(UsageError, match=message) as caught:
        BlockLayout.decode(msgspec.msgpack.encode(layout))
    assert type(caught.value) is UsageError


def test_too_many_pieces_are_refused() -> None:
    layout = content()
    runs(layout)[0][1] = 4000
    assert BlockLayout.decode(msgspec.msgpack.encode(layout)).pool().num_layers == 4002
    layout[4][1][1][1][0][1] = 4096
    layout[4][2][1][1][0][1] = 4096
    with pytest.raises(UsageError, match="20295 pieces; at most 16384"):
        BlockLayout.decode(msgspec.msgpack.encode(layout))


def test_blocks_of_too_many_bytes_are_refused() -> None:
    layout = content()
    first_piece(layout)[3] = [16, 2, 2**34]
    first_piece(layout)[2] = 1
    runs(layout)[0][1] = 3
    with pytest.raises(UsageError, match=r"blocks has .* bytes per block; at most 1099511627776"):
        BlockLayout.decode(msgspec.msgpack.encode(layout))


def test_other_encodings_of_the_same_content_are_refused() -> None:
    blob = BlockLayout.of(regions_of(), 16).encode()
    assert blob[:3] == b"\x95\x01\x10"
    for other in (b"\xdc\x00\x05" + blob[1:], b"\x95\xcc\x01" + blob[2:]):
        with pytest.raises(UsageError, match="the canonical encoding"):
            BlockLayout.decode(other)


def test_truncated_bytes_are_refused() -> None:
    blob = msgspec.msgpack.encode(content())
    for end in range(len(blob)):
        with pytest.raises(UsageError):
            BlockLayout.decode(blob[:end])
    with pytest.raises(UsageError):
        BlockLayout.decode(blob + b"\x00")
    with pytest.raises(UsageError, match="a layout has at most 16384 bytes"):
        BlockLayout.decode(b"\x00" * (MAX_ENCODED_BYTES + 1))


def test_changed_bytes_are_refused_or_another_layout() -> None:
    """Never another exception; and no bytes have two meanings."""
    blob = msgspec.msgpack.encode(content())
    rng = random.Random(1)
    accepted = 0
    for i in range(len(blob)):
        for value in rng.sample(range(256), 40):
            changed = blob[:i] + bytes([value]) + blob[i + 1 :]
            try:
                layout = BlockLayout.decode(changed)
            except UsageError:
                continue
            accepted += 1
            assert layout.encode() == changed
    assert accepted, "a changed letter of a name is another layout"


def test_random_bytes_take_little_memory() -> None:
    rng = random.Random(2)
    arrays = b"\x95\x01\x10\x00\x01\xdd\xff\xff\xff\xff"  # announces 2**32 - 1 pools
    strings = b"\x95\x01\x10\x00\x01\x91\x92\xdb\xff\xff\xff\xff"
    nested = b"\x91" * MAX_ENCODED_BYTES
    blobs = [rng.randbytes(rng.randrange(MAX_ENCODED_BYTES)) for _ in range(200)]
    blobs += [arrays, strings, nested, b"\x95" + nested[1:], b"\xc1", b""]
    tracemalloc.start()
    try:
        for blob in blobs:
            with pytest.raises(UsageError):
                BlockLayout.decode(blob)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("blob", [memoryview(b"\x95"), bytearray(b"\x95")])
def test_any_buffer_can_be_decoded(blob: object) -> None:
    with pytest.raises(UsageError, match="not a layout"):
        BlockLayout.decode(blob)
