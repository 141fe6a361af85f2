"""The demo's transformer compared with a naive one, and batch-invariant results."""

import dataclasses

import numpy as np
import pytest

from aiokv.demo.batch import Batch, Span
from aiokv.demo.row_tiles import RowTiles, largest_alike_tile
from aiokv.demo.transformer import NumpyTransformer, attention
from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.errors import ConfigError
from tests.models.transformer import (
    assert_a_corrupted_block_shows,
    assert_bits_do_not_depend_on_the_batch,
    naive_logits,
    random_tokens,
    run,
)

BLOCK_TOKENS = 16
CONFIG = GroupedConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)


@pytest.fixture(scope="module")
def model():
    return NumpyTransformer(CONFIG, random_weights(CONFIG), max_context_tokens=256)


@pytest.mark.parametrize(
    "more", [{}, {"head_size": 12}, {"qkv_bias": True}, {"qk_norm": True}], ids=str
)
def test_logits_equal_the_naive_model(more):
    config = dataclasses.replace(CONFIG, **more)
    model = NumpyTransformer(config, random_weights(config), max_context_tokens=256)
    tokens = random_tokens(CONFIG, 100, seed=3)
    cache = model.new_cache(device_blocks=16, block_tokens=BLOCK_TOKENS)
    table = np.random.default_rng(4).permutation(16)[:7]
    found = run(model, cache, [(tokens, 0, table)])
    np.testing.assert_allclose(found, naive_logits(config, tokens), rtol=0, atol=4e-4)


@pytest.mark.parametrize("block_tokens", [1, 16, 24])
@pytest.mark.parametrize("cuts", [[0, 1, 13, 37, 64, 65, 100], range(101)], ids=["chunks", "each"])
def test_bits_do_not_depend_on_chunks_batch_or_blocks(model, block_tokens, cuts):
    assert_bits_do_not_depend_on_the_batch(model, block_tokens, cuts)


def test_cached_prefix_is_read_and_a_corrupted_one_changes_the_output(model):
    assert_a_corrupted_block_shows(model)


def test_huge_values_at_masked_positions_do_not_change_attention():
    rng = np.random.default_rng(10)
    queries = rng.standard_normal((12, 4, 16), dtype=np.float32)
    keys, values = rng.standard_normal((2, 128, 2, 16), dtype=np.float32)
    hidden = np.arange(128) > np.arange(100, 112)[:, np.newaxis]
    expected = attention(queries, keys, values, hidden)
    keys[112:] = values[112:] = 1e30
    np.testing.assert_array_equal(attention(queries, keys, values, hidden), expected)


def test_layers_are_announced_in_order_before_they_are_read(model):
    cache = model.new_cache(device_blocks=2, block_tokens=BLOCK_TOKENS)
    seen = []
    batch = Batch(
        np.zeros(3, np.int32), np.arange(3, dtype=np.int32), [Span(0, 3, 0, np.zeros(1, np.int32))]
    )
    model.forward(batch, cache, seen.append)
    assert seen == list(range(CONFIG.layers))


def test_tiles_compute_a_product():
    rng = np.random.default_rng(9)
    weights = random_weights(CONFIG)
    tiles, weight = RowTiles.for_weights(weights), weights.layers[0]["qkv"]
    x = rng.standard_normal((tiles.padded(11), CONFIG.hidden), dtype=np.float32)
    np.testing.assert_allclose(tiles.matmul(x, weight), x @ weight, rtol=1e-4, atol=1e-4)


def test_a_product_that_depends_on_the_place_of_a_row_gets_tiles_of_one_row():
    def depends_on_the_place(x, weight):
        return x @ weight + np.arange(len(x), dtype=np.float32)[:, np.newaxis]

    assert largest_alike_tile(random_weights(CONFIG), depends_on_the_place, (8, 4, 2, 1)) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"head_size": 7}, "head_size"),
        ({"hidden": 36}, "hidden"),
        ({"kv_heads": 3}, "kv_heads"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        GroupedConfig(**sizes)
