"""The Paddle transformer compared with the naive one, and batch-invariant results."""

import dataclasses
import json

import numpy as np
import pytest

from aiokv.demo.weights import GroupedConfig, random_weights
from tests.models.demo.command import main
from tests.models.demo.loading import load_model
from tests.models.transformer import (
    assert_a_corrupted_block_shows,
    assert_bits_do_not_depend_on_the_batch,
    naive_logits,
    random_tokens,
    run,
)

CONFIG = GroupedConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)
CUTS = [0, 1, 13, 37, 64, 65, 80, 81, 82, 100]
TOLERANCE = {"float32": 4e-4, "bfloat16": 0.1, "int8": 0.2, "fp8": 0.6}

WORK = ["--conversations", "6", "--turns", "3", "--system-prompts", "2"]
WORK += ["--system-tokens", "32", "--user-tokens", "12", "--answer-tokens", "6"]
CACHE = ["--block-tokens", "4", "--device-blocks", "256", "--pressure-blocks", "60"]
CACHE += ["--host-blocks", "256", "--max-running", "3", "--chunk-tokens", "8"]
MODEL = ["--framework", "paddle", "--layers", "2", "--hidden", "32", "--heads", "2"]


def load(paddle, kv_format="float32", **more):
    config = dataclasses.replace(CONFIG, **more)
    return load_model(
        "paddle", config, random_weights(config), max_context_tokens=256, kv_format=kv_format
    )


@pytest.mark.parametrize(
    ("kv_format", "more"),
    [(name, {}) for name in TOLERANCE]
    + [("float32", {"head_size": 12}), ("float32", {"qkv_bias": True, "qk_norm": True})],
    ids=str,
)
def test_logits_equal_the_naive_model(paddle, kv_format, more):
    model = load(paddle, kv_format, **more)
    tokens = random_tokens(CONFIG, 100, seed=3)
    cache = model.new_cache(device_blocks=16, block_tokens=16)
    found = run(model, cache, [(tokens, 0, np.random.default_rng(4).permutation(16)[:7])])
    expected = naive_logits(model.config, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[kv_format])


@pytest.mark.parametrize("kv_format", list(TOLERANCE))
@pytest.mark.parametrize("block_tokens", [16, 24])
def test_bits_do_not_depend_on_chunks_batch_or_blocks(paddle, kv_format, block_tokens):
    model = load(paddle, kv_format)
    assert_bits_do_not_depend_on_the_batch(model, block_tokens, CUTS)


@pytest.mark.parametrize("kv_format", list(TOLERANCE))
def test_corrupted_block_changes_the_output(paddle, kv_format):
    assert_a_corrupted_block_shows(load(paddle, kv_format))


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_computing_does_not_move_the_cache(paddle, kv_format):
    """The regions are borrowed: a cache tensor that Paddle replaced would no longer be moved."""
    model = load(paddle, kv_format)
    cache = model.new_cache(device_blocks=8, block_tokens=16)
    before = [piece.pointer for piece in cache.regions().pieces()]
    run(model, cache, [(random_tokens(CONFIG, 70, seed=9), 0, range(5))])
    cache.corrupt(2)
    assert [piece.pointer for piece in cache.regions().pieces()] == before
    assert all(piece.view()[2].any() for piece in cache.regions().pieces())


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8"])
def test_the_demo_computes_equal_bits(paddle, kv_format, tmp_path):
    path = tmp_path / "demo.json"
    flags = [*MODEL, *WORK, *CACHE, "--kv-format", kv_format, "--json", str(path)]
    assert main([*flags]) == 0
    found = json.loads(path.read_text())
    assert found["logits_equal"] is True
    assert found["tokens_equal"] is True
    assert f"K and V as {kv_format}" in found["model"]
    both = found["runs"][2]
    assert both["reused_tokens"]["host"] > 0
    assert both["compared"]["rows_compared"] >= both["generated_tokens"]
    assert main([*flags, "--corrupt"]) == 1


def test_the_demo_serves_images(paddle):
    assert main([*MODEL, *WORK, *CACHE, "--images", "3"]) == 0
