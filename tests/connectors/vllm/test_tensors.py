"""Runs of memory that the blocks of a layer have, for the layouts of vLLM's KV cache."""

from __future__ import annotations

import pytest
import torch

from aiokv.connectors.vllm.groups import KVGroups
from aiokv.connectors.vllm.tensors import LayerTensors, block_rows
from aiokv.errors import ConfigError
from tests.connectors.vllm.runner import LAYOUTS, make_kv_cache

BLOCKS, LAYERS, HEADS, TOKENS, DIM = 5, 3, 2, 4, 8
PAGE = HEADS * TOKENS * DIM * 4

# Layouts of vLLM 0.29 and newer, by their names: the order in memory of layers, blocks, heads,
# tokens and content. The tensor of a layer is a view [blocks, heads, tokens, content].
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def layers_of(order: str) -> list[torch.Tensor]:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": DIM}
    memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.int32)
    return list(memory.permute([order.index(axis) for axis in "LBHNC"]))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_a_block_are_its_bytes_in_each_layout(order: str) -> None:
    views = layers_of(order)
    rows = [block_rows(f"layer.{i}", view, PAGE, BLOCKS) for i, view in enumerate(views)]
    for i, view in enumerate(views):
        view.copy_(torch.arange(BLOCKS)[:, None, None, None] * 10 + i)
    for i, pieces in enumerate(rows):
        assert sum(piece.shape[1] for _, piece in pieces) == PAGE
        for _, piece in pieces:
            values = piece.contiguous().view(torch.int32)
            expected = (torch.arange(BLOCKS)[:, None] * 10 + i).expand_as(values)
            assert torch.equal(values, expected.int())
    starts = [piece[0].data_ptr() for pieces in rows for _, piece in pieces]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_of_each_layout_are_regions(order: str) -> None:
    views = {f"model.layers.{i}.attn": view for i, view in enumerate(layers_of(order))}
    groups = KVGroups(
        main=0,
        sides=(),
        num_blocks=BLOCKS,
        block_bytes=LAYERS * PAGE,
        block_tokens=16,
        layers=(tuple(views),),
    )
    layers = LayerTensors(views, dict.fromkeys(views, PAGE), BLOCKS, groups)
    assert list(layers.layer_of.values()) == [0, 1, 2]
    assert layers.regions.num_layers == LAYERS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_the_scheduler_may_be_several_of_the_kernel(layout: str) -> None:
    page = 2 * 2 * TOKENS * 2 * 4
    tensor = make_kv_cache(layout, BLOCKS, TOKENS)
    pieces = block_rows("layer", tensor, page, BLOCKS)
    assert [name.split(".")[0] for name, _ in pieces] == (
        ["k", "v"] if layout.startswith("flash") else ["kv"]
    )
    for _, rows in pieces:
        rows.copy_(torch.arange(BLOCKS, dtype=torch.uint8)[:, None])
    numbers = tensor.view(torch.uint8)
    assert sorted(set(numbers.flatten().tolist())) == list(range(BLOCKS))


def test_blocks_keep_the_padding_of_their_page() -> None:
    memory = torch.zeros((BLOCKS, PAGE // 4 + 16), dtype=torch.int32)
    view = memory[:, : PAGE // 4].view(BLOCKS, HEADS, TOKENS, DIM)
    ((_, rows),) = block_rows("layer", view, PAGE + 64, BLOCKS)
    assert rows.shape == (BLOCKS, PAGE + 64)


def test_blocks_that_are_no_runs_are_refused() -> None:
    tensor = torch.zeros((BLOCKS, TOKENS, 2 * DIM), dtype=torch.int32)[:, :, ::2]
    with pytest.raises(ConfigError, match="no axis of 5 blocks of 256 bytes"):
        block_rows("layer", tensor, 256, BLOCKS)
