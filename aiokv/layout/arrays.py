"""Address and block layout of tensors of any library."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv import _native
from aiokv.errors import ClosedError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_DLPACK_DEVICES: Final = {
    1: "cpu",
    2: "cuda",
    3: "cpu",  # pinned by CUDA
    11: "cpu",  # pinned by ROCm
    13: "cuda",  # managed
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One region in one layer.

    Attributes:
        layer: index of the layer.
        region: name of the region.
        pointer: address of device block 0.
        num_blocks: blocks of the tensor.
        stride_bytes: from one device block to the next.
        block_bytes: bytes of one block on the device.
        host_offset_bytes: offset of its bytes in a host block.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: name of the element type, such as ``"bfloat16"``.
        shape: axes of a block, outermost first, in elements.
        owner: keeps the memory alive.
        axes: names of the axes in ``shape``; None if the caller named none.
        heads: (first global head of this rank, heads of all ranks together); None for the rank's
            equal share, and without an axis of heads.
    """

    layer: int
    region: str
    pointer: int
    num_blocks: int
    stride_bytes: int
    block_bytes: int
    host_offset_bytes: int
    device: str
    dtype: str
    shape: tuple[int, ...]
    owner: Any
    axes: tuple[str, ...] | None = None
    heads: tuple[int, int] | None = None

    def view(self) -> NDArray[np.uint8]:
        """``[num_blocks, block_bytes]`` bytes of a tensor on the cpu, writable, not copied."""
        if self.device != "cpu":
            raise LayoutError(f"region {self.region!r} is on {self.device}, not on the cpu")
        return np.asarray(_Bytes(self))

    @property
    def interface(self) -> dict[str, Any]:
        """Array interface of the bytes, for numpy and CUDA libraries."""
        return {
            "version": 3,
            "data": (self.pointer, False),
            "shape": (self.num_blocks, self.block_bytes),
            "strides": (self.stride_bytes, 1),
            "typestr": "|u1",
        }


class _Bytes:
    """Memory of a piece for numpy; keeps its owner alive."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.__array_interface__ = piece.interface


@dataclass(frozen=True, slots=True)
class DescribedArray:
    """Address and block layout of a tensor of any library."""

    pointer: int
    num_blocks: int
    stride_bytes: int
    block_bytes: int
    device: str
    dtype: str
    shape: tuple[int, ...]
    owner: Any

    def grouped(self, rows_per_block: int, what: str) -> DescribedArray:
        """Return the layout with ``rows_per_block`` rows per block.

        Raises:
            LayoutError: there are gaps between rows, or the rows do not form whole blocks.
        """
        if rows_per_block == 1:
            return self
        if rows_per_block < 1 or self.num_blocks % rows_per_block:
            raise LayoutError(
                f"{what}: {self.num_blocks} rows are not a multiple of rows_per_block "
                f"({rows_per_block})"
            )
        if self.stride_bytes != self.block_bytes:
            raise LayoutError(
                f"{what}: rows of {self.block_bytes} bytes are {self.stride_bytes} bytes apart; "
                "with rows_per_block they must be contiguous"
            )
        return replace(
            self,
            num_blocks=self.num_blocks // rows_per_block,
            stride_bytes=self.stride_bytes * rows_per_block,
            block_bytes=self.block_bytes * rows_per_block,
            shape=(rows_per_block, *self.shape),
        )

    def piece(self, layer: int, region: str) -> Piece:
        """Return the array as a piece without a place on the host."""
        return Piece(
            layer=layer,
            region=region,
            pointer=self.pointer,
            num_blocks=self.num_blocks,
            stride_bytes=self.stride_bytes,
            block_bytes=self.block_bytes,
            host_offset_bytes=0,
            device=self.device,
            dtype=self.dtype,
            shape=self.shape,
            owner=self.owner,
        )


def describe(tensor: Any, what: str, dtype: str | None = None) -> DescribedArray:
    """Read a tensor's memory layout.

    Args:
        tensor: anything with an array interface or DLPack.
        what: the tensor's name in messages.
        dtype: name of the element type; None for the tensor's own.

    Raises:
        LayoutError: it exports no layout, has no blocks, or has gaps inside a block.
    """
    owner, interface, device = interface_of(tensor, what)
    shape = tuple(int(length) for length in interface["shape"])
    item_bytes = item_bytes_of(interface["typestr"], what)
    pointer, read_only = interface["data"]
    strides = interface.get("strides") or dense_strides(shape, item_bytes)
    if not shape or 0 in shape:
        raise LayoutError(f"{what}: shape {shape} has no blocks, or blocks of 0 bytes")
    if read_only and device == "cpu" and isinstance(tensor, np.ndarray):
        raise LayoutError(f"{what}: the array is read-only")
    dense = dense_strides(shape, item_bytes)
    for axis in range(1, len(shape)):
        if shape[axis] > 1 and strides[axis] != dense[axis]:
            raise LayoutError(
                f"{what}: a block is not C-contiguous: axis {axis} of shape {shape} has a stride "
                f"of {strides[axis]} bytes, not {dense[axis]}",
                hint=_order_hint(shape, strides, item_bytes),
            )
    block_bytes = item_bytes * int(np.prod(shape[1:], dtype=np.int64))
    stride_bytes = int(strides[0]) if shape[0] > 1 else block_bytes
    if stride_bytes < block_bytes:
        raise LayoutError(
            f"{what}: blocks of {block_bytes} bytes are {stride_bytes} bytes apart and overlap"
        )
    return DescribedArray(
        pointer=int(pointer),
        num_blocks=shape[0],
        stride_bytes=stride_bytes,
        block_bytes=block_bytes,
        device=device,
        dtype=dtype or dtype_name(tensor, interface["typestr"]),
        shape=shape[1:],
        owner=owner,
    )


def dtype_name(tensor: Any, typestr: str = "") -> str:
    """Return the name of an element type: ``"bfloat16"`` for numpy's and ``torch.bfloat16``.

    Args:
        tensor: tensor of any library.
        typestr: element type of its array interface, for tensors without ``dtype``.
    """
    name = str(getattr(tensor, "dtype", typestr))
    with_module = re.fullmatch(r"\w+\.(\w+)", name)
    return name if with_module is None else with_module[1]


def item_bytes_of(typestr: str, what: str) -> int:
    """Return the bytes per element of a ``typestr`` of the array interfaces.

    Raises:
        LayoutError: the elements are Python objects, texts or times.
    """
    plain = re.fullmatch(r"[<>|=][biufcVS](\d+)", typestr)
    if plain is None:
        raise LayoutError(
            f"{what}: elements of type {typestr!r} are not numbers",
            hint="pass tensors of numbers, or a view of the same memory as uint8",
        )
    return int(plain[1])


def interface_of(tensor: Any, what: str) -> tuple[Any, dict[str, Any], str]:
    """Return the owner of the memory, its array interface, and ``"cpu"`` or ``"cuda"``.

    Raises:
        LayoutError: the tensor exports no layout.
        ClosedError: the tensor is a ``MappedTensor`` that was closed.
    """
    for name, device in (("__cuda_array_interface__", "cuda"), ("__array_interface__", "cpu")):
        try:
            return tensor, getattr(tensor, name), device
        except ClosedError:
            raise
        except Exception:
            continue  # PyTorch raises other errors, too, such as for float8
    if not hasattr(tensor, "__dlpack__"):
        raise LayoutError(
            f"{what}: {type(tensor).__name__} has neither an array interface nor DLPack",
            hint="for tensors of Paddle, use aiokv.frameworks.paddle.add_region",
        )
    return _from_dlpack(tensor, what)


def _from_dlpack(tensor: Any, what: str) -> tuple[Any, dict[str, Any], str]:
    try:
        owner = _native.DlpackTensor(tensor.__dlpack__())
    except Exception as error:  # each library has its own exception classes
        raise LayoutError(
            f"{what}: {type(tensor).__name__} of {getattr(tensor, 'dtype', 'unknown dtype')} does "
            f"not export its memory through DLPack: {error}",
            hint="register a view of the same memory as integers of the same size, such as "
            "tensor.detach().view(torch.uint8)",
        ) from error
    pointer, shape, strides, item_bits, kind = owner.layout
    if kind not in _DLPACK_DEVICES:
        raise LayoutError(
            f"{what}: DLPack device type {kind} is neither a CPU nor a CUDA GPU",
        )
    if item_bits % 8:
        raise LayoutError(
            f"{what}: elements of {item_bits} bits are not whole bytes",
            hint="register a view of the same memory as uint8",
        )
    item_bytes = item_bits // 8
    interface = {
        "shape": tuple(shape),
        "typestr": f"|V{item_bytes}",
        "data": (pointer, False),
        "strides": tuple(stride * item_bytes for stride in strides),
    }
    return owner, interface, _DLPACK_DEVICES[kind]


def _order_hint(shape: tuple[int, ...], strides: Sequence[int], item_bytes: int) -> str:
    """Return how to undo a permutation of the axes; empty if the elements have gaps."""
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    in_memory = tuple(shape[axis] for axis in order)
    if tuple(strides[axis] for axis in order) != dense_strides(in_memory, item_bytes):
        return ""
    return (
        f"the tensor is permuted; register tensor.permute({', '.join(map(str, order))}) (NumPy: "
        f"transpose), of shape {in_memory}, if its first axis is that of the blocks"
    )


def dense_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides = [item_bytes]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))
