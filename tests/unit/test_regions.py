"""Regions: any per-layer tensors, their layout on the host, and refused tensors."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv.errors import ClosedError, ConfigError, LayoutError, UsageError
from aiokv.layout.regions import Regions, num_blocks_for
from aiokv.worker.arena import HUGE_PAGE_BYTES, HostArena


def zeros(*shape: int, dtype: str = "u1") -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


def test_each_region_has_its_own_bytes_per_block() -> None:
    """Keys, values and scales are all counted, whatever their dtype."""
    regions = Regions(num_layers=2)
    regions.add("k", layers=[zeros(8, 4, 16, dtype="f2")] * 2)
    regions.add("v", layers=[zeros(8, 4, 8, dtype="f2")] * 2)
    regions.add("scale", layers=[zeros(8, 4, dtype="f4")] * 2)
    assert regions.layer_bytes(0) == 128 + 64 + 16
    assert regions.block_bytes == 2 * regions.layer_bytes(0)
    assert regions.num_blocks == 8
    assert regions.names == ("k", "v", "scale")


def test_a_region_may_exist_in_some_layers_only() -> None:
    """Extra layers (MTP, indexer) are regions too."""
    regions = Regions(num_layers=3)
    regions.add("k", layers=[zeros(4, 10)] * 3)
    regions.add("index", layers=[zeros(4, 6)], layer_indices=[1])
    assert [regions.layer_bytes(layer) for layer in range(3)] == [10, 16, 10]
    assert [piece.region for piece in regions.layer_pieces(1)] == ["k", "index"]
    with pytest.raises(LayoutError, match="layer 0 has no region 'index'"):
        regions.host_offset(0, "index")


def test_pieces_are_aligned_and_disjoint_in_the_host_block() -> None:
    regions = Regions(num_layers=2)
    regions.add("k", layers=[zeros(4, 100)] * 2)
    regions.add("v", layers=[zeros(4, 7)] * 2)
    pieces = list(regions.pieces())
    assert [piece.host_offset_bytes for piece in pieces] == [0, 128, 192, 320]
    assert regions.host_offset(1, "k") == 192
    assert regions.payload_bytes == 384
    assert regions.block_bytes == 214


def test_blocks_may_have_any_stride() -> None:
    both = zeros(6, 2, 32)  # [B, K/V, ...]: keys and values interleaved block by block
    regions = Regions(num_layers=1)
    regions.add("k", layers=[both[:, 0]])
    regions.add("v", layers=[both[:, 1]])
    k, v = regions.layer_pieces(0)
    assert (k.stride_bytes, k.block_bytes) == (64, 32)
    assert v.pointer == k.pointer + 32
    v.view()[3] = 9
    assert both[3, 1].tolist() == [9] * 32
    assert both.sum() == 9 * 32


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (zeros(4, 8, 6).transpose(0, 2, 1), r"axis 1 of shape \(4, 6, 8\) has a stride of 1"),
        (zeros(4, 8)[:, ::2], "axis 1"),
        (zeros(4, 8)[::-1], "8 bytes are -8 bytes apart"),
        (np.lib.stride_tricks.as_strided(zeros(64), (4, 8), (4, 1)), "4 bytes apart and overlap"),
        (zeros(0, 8), "no blocks"),
        (np.zeros(()), "no blocks"),
        ([1, 2, 3], "list has neither"),
    ],
)
def test_tensor_that_cannot_be_copied_by_block_is_refused(tensor: object, message: str) -> None:
    regions = Regions(num_layers=1)
    with pytest.raises(LayoutError, match=message):
        regions.add("k", layers=[tensor])
    assert regions.names == ()
    assert regions.num_blocks is None


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1), (2, 0, 1)])
def test_permuted_tensor_is_refused_with_the_permutation_that_undoes_it(axes: tuple[int]) -> None:
    tensor = np.zeros((4, 6, 8), np.float32).transpose(axes)
    with pytest.raises(LayoutError, match="the tensor is permuted") as caught:
        Regions(num_layers=1).add("k", layers=[tensor])
    order = re.search(r"tensor\.permute\((.*?)\)", str(caught.value))
    assert order is not None
    fixed = tensor.transpose(*map(int, order[1].split(", ")))
    assert fixed.shape == (4, 6, 8)
    Regions(num_layers=1).add("k", layers=[fixed])


def test_tensor_with_gaps_in_its_blocks_is_not_called_permuted() -> None:
    with pytest.raises(LayoutError, match="not C-contiguous") as caught:
        Regions(num_layers=1).add("k", layers=[np.zeros((4, 6, 8), np.float32)[:, ::2]])
    assert caught.value.hint == ""


def test_a_read_only_array_is_refused() -> None:
    array = zeros(4, 8)
    array.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        Regions(num_layers=1).add("k", layers=[array])


def test_numbers_that_contradict_each_other_are_refused() -> None:
    """A missing or external tensor is an error, never a silent no-op."""
    regions = Regions(num_layers=2)
    with pytest.raises(LayoutError, match="1 tensors for 2 layers"):
        regions.add("k", layers=[zeros(4, 8)])
    with pytest.raises(LayoutError, match="5 blocks; the other tensors have 4"):
        regions.add("k", layers=[zeros(4, 8), zeros(5, 8)])
    with pytest.raises(LayoutError, match="must be distinct and in"):
        regions.add("k", layers=[zeros(4, 8)] * 2, layer_indices=[0, 2])
    assert regions.block_bytes == 0
    regions.add("k", layers=[zeros(4, 8)] * 2)
    with pytest.raises(LayoutError, match="registered already"):
        regions.add("k", layers=[zeros(4, 8)] * 2)
    with pytest.raises(LayoutError, match="num_layers is -1; it must be at least 0"):
        Regions(num_layers=-1)
    assert list(Regions(num_layers=0).pieces()) == []


def test_state_tensors_of_other_numbers_of_slots_are_refused() -> None:
    regions = Regions(num_layers=2)
    regions.add_state("conv", layers=[zeros(4, 8)] * 2)
    with pytest.raises(
        LayoutError, match="layer 1 has 5 state slots; the other state tensors have 4"
    ):
        regions.add_state("ssm", layers=[zeros(4, 8), zeros(5, 8)])
    with pytest.raises(LayoutError, match="layer 0 has 3 state slots; the other"):
        regions.add_state("ssm", layers=[zeros(3, 8)] * 2)
    assert regions.names == ("conv",)
    regions.add_state("ssm", layers=[zeros(4, 16)], layer_indices=[1])
    assert (regions.num_state_slots, regions.state_slot_bytes) == (4, 8 + 8 + 16)
    slots = regions.state_blocks()
    assert (slots.num_blocks, slots.block_bytes, slots.num_layers) == (4, 8 + 8 + 16, 2)
    assert slots.payload_bytes == 3 * 64, "each piece is aligned"
    assert [piece.pointer for piece in slots.pieces()] == [
        piece.pointer
        for piece in sorted(regions.state_pieces, key=lambda piece: (piece.layer, piece.region))
    ]


def test_dlpack_and_array_interface_are_used_without_a_copy() -> None:
    class OnlyDLPack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    class OnlyInterface:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array
            self.__array_interface__ = array.__array_interface__

    first, second = zeros(4, 8, dtype="f4"), zeros(4, 8, dtype="f4")
    regions = Regions(num_layers=2)
    regions.add("k", layers=[OnlyDLPack(first), OnlyInterface(second)])
    assert [piece.pointer for piece in regions.pieces()] == [first.ctypes.data, second.ctypes.data]
    for piece in regions.pieces():
        piece.view()[2] = 1
    assert first[2].tobytes() == second[2].tobytes() == b"\x01" * 32


def test_registry_keeps_the_tensors_alive() -> None:
    regions = Regions(num_layers=1)
    regions.add("k", layers=[np.full((4, 1000), 7, dtype="u1")])
    (piece,) = regions.pieces()
    assert ctypes.string_at(piece.pointer, 4000) == b"\x07" * 4000


def test_tensors_on_a_gpu_have_no_cpu_view() -> None:
    interface = {
        "shape": (4, 8),
        "typestr": "|u1",
        "data": (4096, False),
        "strides": None,
        "version": 3,
    }
    on_gpu = SimpleNamespace(__cuda_array_interface__=interface)
    regions = Regions(num_layers=1)
    regions.add("k", layers=[on_gpu])
    assert regions.devices == {"cuda"}
    with pytest.raises(LayoutError, match="on cuda"):
        next(regions.pieces()).view()


def test_num_blocks_for() -> None:
    regions = Regions(num_layers=2)
    regions.add("k", layers=[zeros(4, 100)] * 2)
    assert num_blocks_for(256 * 10 + 255, regions) == 10
    assert num_blocks_for(1000, 300) == 3
    assert num_blocks_for(0, 300) == num_blocks_for(-5, 300) == 0
    with pytest.raises(LayoutError, match="0 bytes"):
        num_blocks_for(1000, Regions(num_layers=2))


def test_arena_is_block_first_aligned_zeroed_and_freed() -> None:
    arena = HostArena(num_blocks=5, pitch_bytes=192)
    assert arena.pointer % HUGE_PAGE_BYTES == 0
    assert arena.blocks.shape == (5, 192)
    assert arena.blocks.ctypes.data == arena.pointer
    assert not arena.blocks.any()
    view = arena.blocks[2]
    view[:] = 3
    assert ctypes.string_at(arena.pointer + 2 * 192, 192) == b"\x03" * 192
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        _ = arena.blocks
    assert view.tolist() == [3] * 192  # a view still exists: freed later


def test_arena_without_blocks_or_with_too_many() -> None:
    """A host tier of zero blocks is accepted."""
    HostArena(num_blocks=0, pitch_bytes=192).close()
    HostArena(num_blocks=7, pitch_bytes=0).close()
    with pytest.raises(ConfigError, match="host_blocks") as caught:
        HostArena(num_blocks=2**40, pitch_bytes=2**20)
    assert isinstance(caught.value, UsageError)


def test_axes_and_heads_stay_with_the_pieces() -> None:
    regions = Regions(num_layers=2)
    axes = ("tokens", "heads", "dim")
    regions.add("k", layers=[zeros(4, 16, 2, 8)] * 2, axes=list(axes), heads=(2, np.int64(8)))
    regions.add("scale", layers=[zeros(4, 16)], layer_indices=[1])
    regions.add("rows", layers=[zeros(12, 16, 8)] * 2, rows_per_block=3, axes=axes)
    regions.add_state("ssm", layers=[zeros(3, 2, 5)] * 2, axes=("heads", "dim"), heads=(0, 4))
    found = {(p.layer, p.region): (p.axes, p.heads) for p in regions.all_pieces()}
    assert found[1, "k"] == (axes, (2, 8))
    assert found[1, "scale"] == (None, None)
    assert found[0, "rows"] == (axes, None)
    assert found[1, "ssm"] == (("heads", "dim"), (0, 4))
    bare = regions.without_tensors()
    assert {(p.layer, p.region): (p.axes, p.heads) for p in bare.all_pieces()} == found
    assert {p.axes for p in regions.state_blocks().pieces()} == {("heads", "dim")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": "tokens"}, "axes is 'tokens'; it must be a sequence of names"),
        ({"axes": 3}, "axes is 3; it must be a sequence of names"),
        ({"axes": ("tokens", "dim")}, r"names 2 dimensions .* but a block has the shape \(6, 2, 8"),
        ({"axes": ("a", "b", "a")}, "'a' occurs too often"),
        ({"axes": ("tokens",) * 3}, "'tokens' occurs too often"),
        ({"axes": ("tokens", "heads", 4)}, "a name of axes is 4; it must be a str"),
        ({"axes": ("tokens", "heads", "")}, "a name of 0 characters"),
        ({"axes": ("tokens", "heads", "d" * 65)}, "a name of 65 characters"),
        ({"axes": ("tokens", "heads", "\udc00")}, "not valid Unicode"),
        ({"axes": [f"axis {i}" for i in range(9)]}, "axes has 9 names; at most 8"),
        ({"heads": (0, 2)}, r"heads is \(0, 2\), but axes is None"),
        ({"axes": ("a", "b", "c"), "heads": (0, 2)}, "heads is .0, 2., but axes is"),
        ({"axes": ("tokens", "heads", "dim"), "heads": 3}, "it must be .first head, total heads"),
        ({"axes": ("tokens", "heads", "dim"), "heads": (1, 2, 3)}, "it must be .first head"),
        ({"axes": ("tokens", "heads", "dim"), "heads": (-1, 4)}, "the first head is -1"),
        ({"axes": ("tokens", "heads", "dim"), "heads": (0, 0)}, "the total of heads is 0"),
        ({"axes": ("tokens", "heads", "dim"), "heads": (0, 1.5)}, "the total of heads is 1.5"),
        ({"axes": ("tokens", "heads", "dim"), "heads": (3, 4)}, "2 heads from head 3 on exceed"),
    ],
)
def test_axes_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    regions = Regions(num_layers=1)
    with pytest.raises(LayoutError, match=message):
        regions.add("k", layers=[zeros(4, 6, 2, 8)], **options)
    if "tokens" not in str(options):
        with pytest.raises(LayoutError, match=message):
            regions.add_state("s", layers=[zeros(4, 6, 2, 8)], **options)
    assert regions.names == ()


def test_state_has_no_axis_of_tokens() -> None:
    regions = Regions(num_layers=1)
    with pytest.raises(LayoutError, match="recurrent state has no axis 'tokens'"):
        regions.add_state("s", layers=[zeros(4, 6)], axes=("tokens",))
    assert regions.names == ()


def test_other_axes_are_another_layout() -> None:
    def regions_of(**options: object) -> Regions:
        regions = Regions(num_layers=1)
        regions.add("k", layers=[zeros(4, 6, 2)], **options)
        return regions

    axes = ("tokens", "heads")
    before = regions_of(axes=axes, heads=(0, 4))
    before.check_layout(regions_of(axes=axes, heads=(0, 4)))
    for options in ({}, {"axes": axes}, {"axes": axes[::-1]}, {"axes": axes, "heads": (2, 4)}):
        with pytest.raises(LayoutError, match=r"region 'k', layer 0: axes .* as before"):
            before.check_layout(regions_of(**options))
