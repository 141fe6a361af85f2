"""Regions from the KV cache tensors of vLLM, whatever their layout.

A backend chooses the axes of its tensors and their order in memory: ``[2, blocks, ...]``
(FlashAttention), ``[blocks, 2, ...]`` (FlashInfer, Triton), ``[blocks, tokens, dim]`` (MLA), each
with tokens or heads first, and with kernel blocks that are smaller than those of the scheduler.
What they share: the bytes of a block are one run of memory per layer, or a few: one for K and one
for V, or one per head. The strides are enough to find the runs. Blocks of other layers may lie
between those of a layer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from aiokv.connectors.vllm.groups import NUMBER_BYTES
from aiokv.errors import ConfigError
from aiokv.layout.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.connectors.vllm.groups import KVGroups


class LayerTensors:
    """The tensors of a worker as regions, and the layers by the names of vLLM.

    Attributes:
        regions: one region per layout; each layer of vLLM is a layer of it.
        layer_of: index of a layer by the name of vLLM; layers that share a tensor share an index.
        device: ``"cpu"`` or ``"cuda:0"``.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
        page_bytes: Mapping[str, int],
        num_blocks: int,
        groups: KVGroups,
    ) -> None:
        """Find the runs of the blocks.

        Args:
            kv_caches: tensors by the names of the layers; those of recurrent state in a list, whose
                first one begins at the page.
            page_bytes: bytes per block of each layer.
            num_blocks: blocks of each tensor, as the scheduler numbers them.
            groups: the groups of the layers. Layers of several groups share tensors.

        Raises:
            ConfigError: the blocks of a layer are no runs of memory.
        """
        names = sorted(kv_caches, key=_order)
        self.layer_of: dict[str, int] = {}
        tensors = {name: first_tensor(kv_caches[name]) for name in names}
        group_of = {name: i for i, layers in enumerate(groups.layers) for name in layers}
        first_of: dict[tuple[int, int], str] = {}  # by group and address
        for name in names:
            group = group_of.get(name, groups.main or 0)
            owner = first_of.setdefault((group, tensors[name].data_ptr()), name)
            self.layer_of[name] = (
                self.layer_of[owner] if owner in self.layer_of else len(first_of) - 1
            )
        layouts: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
        for (group, _), name in first_of.items():
            for layout, rows in block_rows(name, tensors[name], page_bytes[name], num_blocks):
                key = group, groups.layout_prefix(group) + layout
                layouts.setdefault(key, []).append((self.layer_of[name], rows))
        self.regions = Regions(num_layers=len(first_of))
        self.device = str(tensors[names[0]].device) if names else "cpu"
        if groups.main is None:
            shape = groups.main_blocks, NUMBER_BYTES
            numbers = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.regions.add("numbers", layers=[numbers], layer_indices=[0])
        sides = {side.index: side.name for side in groups.sides}
        for (group, layout), pieces in layouts.items():
            layers, indices = [rows for _, rows in pieces], [layer for layer, _ in pieces]
            if group == groups.main:
                self.regions.add(layout, layers=layers, layer_indices=indices)
            else:
                self.regions.add_window(sides[group], layout, layers=layers, layer_indices=indices)


def first_tensor(tensor: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor at the beginning of the pages of a layer."""
    return tensor if isinstance(tensor, torch.Tensor) else tensor[0]


def block_rows(
    name: str, tensor: torch.Tensor, page_bytes: int, num_blocks: int
) -> list[tuple[str, torch.Tensor]]:
    """Return the runs of a layer's blocks as tensors of bytes ``[num_blocks, bytes]``.

    Returns:
        Pairs of a name of the layout, which differs where the order of the bytes in a block does,
        and the bytes.

    Raises:
        ConfigError: the blocks are no runs of memory.
    """
    for axis, size in enumerate(tensor.shape):
        if size == 0 or size % num_blocks:
            continue
        run_bytes, pitch_bytes, starts = _runs(tensor, axis, num_blocks)
        if len(starts) == 1 and run_bytes < pitch_bytes == page_bytes:
            run_bytes = page_bytes  # with the padding of the page
        if run_bytes <= pitch_bytes and run_bytes * len(starts) == page_bytes:
            kinds = _KINDS.get(len(starts)) or [f"part{i}" for i in range(len(starts))]
            return [
                (
                    _layout(kind, tensor),
                    _rows(tensor, start, (num_blocks, run_bytes), pitch_bytes),
                )
                for kind, start in zip(kinds, starts, strict=True)
            ]
    raise ConfigError(
        f"layer {name!r}: the tensor of shape {tuple(tensor.shape)} and strides "
        f"{tuple(tensor.stride())} has no axis of {num_blocks} blocks of {page_bytes} bytes",
        hint="this attention backend is not supported; choose another with --attention-backend",
    )


_KINDS: Final = {1: ["kv"], 2: ["k", "v"]}  # by the number of runs of a block


def _runs(tensor: torch.Tensor, axis: int, num_blocks: int) -> tuple[int, int, list[int]]:
    """Return the runs of memory of a block along an axis of blocks, or of parts of blocks.

    Returns:
        Bytes per run, bytes from a block to the next, and the offsets of the runs of block 0.
    """
    element = tensor.element_size()
    parts = tensor.shape[axis] // num_blocks
    pitch = tensor.stride(axis) * element * parts
    axes = [
        (tensor.stride(other) * element, size)
        for other, size in enumerate(tensor.shape)
        if other != axis and size > 1
    ]
    run, starts = element, [0]
    for stride, size in sorted([*axes, (pitch // parts, parts)]):
        if stride == run:
            run *= size
        elif size > 1:
            starts = [i * stride + start for i in range(size) for start in starts]
    return run, pitch, starts


def _rows(
    tensor: torch.Tensor, start: int, shape: tuple[int, int], pitch_bytes: int
) -> torch.Tensor:
    storage = tensor.untyped_storage()
    start += tensor.storage_offset() * tensor.element_size()
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    rows.set_(storage, start, shape, (pitch_bytes, 1))
    return rows


def _layout(kind: str, tensor: torch.Tensor) -> str:
    """Return a name of the order of the bytes; part of the key of a block in stores."""
    order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis))
    shape = "x".join(str(size) for size in tensor.shape[-3:])
    axes = "".join(str(axis) for axis in order)
    return f"{kind}.{str(tensor.dtype).removeprefix('torch.')}.{shape}.{axes}"


def _order(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", name)), name
