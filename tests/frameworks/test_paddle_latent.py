"""Multi-head latent attention in Paddle: against the naive one, and equal bits from every tier."""

import dataclasses
import json

import numpy as np
import pytest

from aiokv.errors import ConfigError, UsageError
from tests.models.demo.command import main
from tests.models.demo.latent import LatentConfig, random_weights
from tests.models.demo.loading import load_model
from tests.models.latent_transformer import naive_latent_logits
from tests.models.transformer import (
    assert_a_corrupted_block_shows,
    assert_bits_do_not_depend_on_the_batch,
    random_tokens,
    run,
)

CONFIG = LatentConfig(
    vocab=64,
    hidden=32,
    layers=2,
    heads=3,
    ffn=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
ODD = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10}
TOLERANCE = {"float32": 4e-4, "bfloat16": 0.1, "int8": 0.3, "fp8": 0.6}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}

WORK = ["--conversations", "6", "--turns", "3", "--system-prompts", "2"]
WORK += ["--system-tokens", "32", "--user-tokens", "12", "--answer-tokens", "6"]
CACHE = ["--block-tokens", "4", "--device-blocks", "256", "--pressure-blocks", "60"]
CACHE += ["--host-blocks", "256", "--max-running", "3", "--chunk-tokens", "8"]
MODEL = ["--attention", "mla", "--layers", "2", "--hidden", "32", "--heads", "2"]
PADDLE = ["--framework", "paddle"]


def load(kv_format="float32", **more):
    config = dataclasses.replace(CONFIG, **more)
    return load_model(
        "paddle", config, random_weights(config), max_context_tokens=256, kv_format=kv_format
    )


@pytest.mark.parametrize(
    ("kv_format", "more"),
    [(name, {}) for name in TOLERANCE] + [("float32", {"heads": 1}), ("float32", ODD)],
    ids=str,
)
@pytest.mark.usefixtures("paddle")
def test_logits_equal_the_naive_model(kv_format, more):
    model = load(kv_format, **more)
    tokens = random_tokens(CONFIG, 100, seed=3)
    cache = model.new_cache(device_blocks=16, block_tokens=16)
    found = run(model, cache, [(tokens, 0, np.random.default_rng(4).permutation(16)[:7])])
    expected = naive_latent_logits(model.config, random_weights(model.config), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[kv_format])


@pytest.mark.parametrize(("kv_format", "size"), ELEMENT_BYTES.items())
@pytest.mark.usefixtures("paddle")
def test_one_latent_per_token_is_cached_and_no_values(kv_format, size):
    block_tokens = 16
    regions = load(kv_format).new_cache(8, block_tokens).regions()
    scale_bytes = 4 if size == 1 else 0
    cached = CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim
    assert regions.names == (("latent", "latent_scale") if scale_bytes else ("latent",))
    for layer in range(CONFIG.layers):
        assert regions.layer_bytes(layer) == block_tokens * (cached * size + scale_bytes)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("kv_format", "block_tokens"), [("float32", 24), ("bfloat16", 16)])
@pytest.mark.usefixtures("paddle")
def test_bits_do_not_depend_on_chunks_batch_or_blocks(kv_format, block_tokens, heads):
    model = load(kv_format, heads=heads)
    assert_bits_do_not_depend_on_the_batch(
        model, block_tokens, [0, 1, 13, 37, 64, 65, 80, 81, 82, 100]
    )


@pytest.mark.usefixtures("paddle")
def test_corrupted_block_changes_the_output():
    assert_a_corrupted_block_shows(load("bfloat16"))


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16"])
@pytest.mark.usefixtures("paddle")
def test_the_demo_computes_equal_bits(kv_format, tmp_path):
    path = tmp_path / "demo.json"
    flags = [*PADDLE, *MODEL, *WORK, *CACHE, "--kv-format", kv_format, "--json", str(path)]
    assert main([*flags]) == 0
    found = json.loads(path.read_text())
    assert found["logits_equal"] is True
    assert found["tokens_equal"] is True
    assert f"latents as {kv_format}" in found["model"]
    _, device, both = found["runs"]
    assert device["reused_tokens"]["device"] > 0
    assert both["reused_tokens"]["host"] > 0
    for run_result in (device, both):
        assert run_result["compared"]["rows_compared"] >= run_result["generated_tokens"]
    assert main([*flags, "--corrupt"]) == 1
    assert json.loads(path.read_text())["runs"][2]["corrupted"]


def test_latent_attention_on_numpy_is_refused(capsys):
    with pytest.raises(UsageError, match="grouped-query attention only"):
        load_model("numpy", CONFIG, random_weights(CONFIG), max_context_tokens=64)
    assert main([*MODEL]) == 2
    assert "--framework paddle" in capsys.readouterr().err


def test_attention_option_with_a_checkpoint_is_refused(tmp_path, capsys):
    assert main([*PADDLE, *MODEL, "--checkpoint", str(tmp_path)]) == 2
    assert "not mla" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"kv_lora_rank": 0}, {"qk_rope_head_dim": 5}, {"layers": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        LatentConfig(**sizes)
