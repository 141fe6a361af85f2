"""The demo's transformer on a GPU: compared with the naive one, and batch-invariant results."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aiokv.demo.weights import GroupedConfig, random_weights
from tests.models.demo.command import main
from tests.models.transformer import (
    assert_bits_do_not_depend_on_the_batch,
    naive_logits,
    random_tokens,
    run,
)

CONFIG = GroupedConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)


def make(config=CONFIG):
    from tests.models.demo.on_cupy.transformer import CupyTransformer

    return CupyTransformer(config, random_weights(config), max_context_tokens=256)


@pytest.mark.parametrize(
    "more", [{}, {"head_size": 12}, {"qkv_bias": True}, {"qk_norm": True}], ids=str
)
def test_logits_equal_the_naive_model(more):
    config = dataclasses.replace(CONFIG, **more)
    model, tokens = make(config), random_tokens(CONFIG, 100, seed=3)
    cache = model.new_cache(device_blocks=16, block_tokens=16)
    table = np.random.default_rng(4).permutation(16)[:7]
    found = run(model, cache, [(tokens, 0, table)])
    np.testing.assert_allclose(found, naive_logits(config, tokens), rtol=0, atol=4e-4)


@pytest.mark.parametrize("block_tokens", [1, 16, 24])
def test_bits_do_not_depend_on_chunks_batch_or_blocks(block_tokens):
    assert_bits_do_not_depend_on_the_batch(make(), block_tokens, [0, 1, 13, 37, 64, 65, 100])


def test_read_blocks_equal_the_bytes_of_the_regions():
    model = make()
    cache = model.new_cache(device_blocks=8, block_tokens=16)
    run(model, cache, [(random_tokens(CONFIG, 100, seed=9), 0, range(1, 8))])
    blocks = np.array([5, 0, 3], np.int32)
    arrays = [array.get() for array in (*cache.keys, *cache.values)]
    expected = [array[blocks].reshape(3, -1).view(np.uint8) for array in arrays]
    np.testing.assert_array_equal(cache.read_blocks(blocks), np.concatenate(expected, axis=1))
    assert not cache.read_blocks(blocks)[1].any()


def test_demo_outputs_are_equal_and_the_negative_control_differs(tmp_path):
    out = tmp_path / "demo.json"
    sizes = ["--conversations", "8", "--turns", "3", "--pressure-blocks", "48"]
    assert main(["--device", "cuda", *sizes, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["tokens_equal"]
    assert result["logits_equal"]
    assert result["runs"][2]["onload"]["bytes"] > 0
    assert main(["--device", "cuda", "--corrupt"]) == 1
