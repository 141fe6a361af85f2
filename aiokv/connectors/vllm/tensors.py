"""Regions from the KV cache tensors of vLLM, whatever their layout.

A backend chooses the axes of its tensors and their order in memory: ``[2, blocks, ...]``
(FlashAttention), ``[blocks, 2, ...]`` (FlashInfer, Triton), ``[blocks, tokens, dim]`` (MLA), each
with tokens or heads first, and with kernel blocks that are smaller than those of the scheduler.
What they share: the bytes of a block are one run of a layer's memory, or one run for K and one for
V. The distance of the runs is the size of a page, so strides are enough to find them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from aiokv.errors import ConfigError
from aiokv.layout.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
        tensors = {name: _first(kv_caches[name]) for name in names}
        group_of = {name: i for i, layers in enumerate(groups.layers) for name in layers}
        first_of: dict[tuple[int, int], str] = {}  # by group and address
        for name in names:
            group = group_of.get(name, groups.main)
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
        sides = {side.index: side.name for side in groups.sides}
        for (group, layout), pieces in layouts.items():
            layers, indices = [rows for _, rows in pieces], [layer for layer, _ in pieces]
            if group == groups.main:
                self.regions.add(layout, layers=layers, layer_indices=indices)
            else:
                self.regions.add_window(sides[group], layout, layers=layers, layer_indices=indices)
        self.device = str(tensors[names[0]].device) if names else "cpu"


def _first(tensor: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
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
    element = tensor.element_size()
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size == 0 or size % num_blocks:
            continue
        row_bytes = stride * element * (size // num_blocks)  # all kernel blocks of one block
        if row_bytes == page_bytes and tensor.stride(axis) == max(strides):
            return [(_layout("kv", tensor), _rows(tensor, 0, num_blocks, row_bytes))]
        if row_bytes * 2 != page_bytes:
            continue
        for half, (count, distance) in enumerate(zip(sizes, strides, strict=True)):
            if half != axis and count == 2 and distance * element == row_bytes * num_blocks:
                return [
                    (
                        _layout(kind, tensor),
                        _rows(tensor, i * row_bytes * num_blocks, num_blocks, row_bytes),
                    )
                    for i, kind in enumerate(("k", "v"))
                ]
    raise ConfigError(
        f"layer {name!r}: the tensor of shape {sizes} and strides {strides} has no axis of "
        f"{num_blocks} blocks of {page_bytes} bytes",
        hint="this attention backend is not supported; choose another with --attention-backend",
    )


def _rows(tensor: torch.Tensor, offset: int, num_blocks: int, row_bytes: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size() + offset
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    rows.set_(storage, start, (num_blocks, row_bytes), (row_bytes, 1))
    return rows


def _layout(kind: str, tensor: torch.Tensor) -> str:
    """Return a name of the order of the bytes; part of the key of a block in stores."""
    order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis))
    shape = "x".join(str(size) for size in tensor.shape[-3:])
    axes = "".join(str(axis) for axis in order)
    return f"{kind}.{str(tensor.dtype).removeprefix('torch.')}.{shape}.{axes}"


def _order(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def page_bytes_of(groups: Iterable[Any]) -> dict[str, int]:
    """Return the bytes per block of each layer of vLLM's KV cache groups."""
    pages = {}
    for group in groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            pages[name] = specs.get(name, group.kv_cache_spec).page_size_bytes
    return pages
