"""Bytes per token and block of public models, by hand from their configurations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aiokv import Regions
from aiokv.errors import ConfigError
from aiokv.model.shape import KV_DTYPES, ModelShape
from tests.unit import model_configs as configs


@pytest.mark.parametrize(
    ("config", "attention", "token_bytes"),
    [
        (configs.LLAMA_2_7B, "MHA", 2 * 32 * 128 * 2 * 32),
        (configs.LLAMA_3_8B, "GQA", 2 * 8 * 128 * 2 * 32),
        (configs.LLAMA_3_70B, "GQA", 2 * 8 * 128 * 2 * 80),
        (configs.QWEN_2_5_7B, "GQA", 2 * 4 * 128 * 2 * 28),
        (configs.QWEN_3_8B, "GQA", 2 * 8 * 128 * 2 * 36),
        (configs.QWEN_3_NEXT_80B, "GQA", 2 * 2 * 256 * 2 * 12),
        (configs.MIXTRAL_8X7B, "GQA", 2 * 8 * 128 * 2 * 32),
        (configs.MISTRAL_7B_V0_1, "GQA", 2 * 8 * 128 * 2 * 32),
        (configs.DEEPSEEK_V3, "MLA", (512 + 64) * 2 * 61),
        (configs.DEEPSEEK_V3_2, "MLA", ((512 + 64) * 2 + 132) * 61),
        (configs.GEMMA_2_9B, "GQA", 2 * 8 * 256 * 2 * 21),
        (configs.GEMMA_3_4B, "GQA", 2 * 4 * 256 * 2 * 5),
        (configs.GEMMA_3_27B, "GQA", 2 * 16 * 128 * 2 * 10),
        (configs.GPT_OSS_20B, "GQA", 2 * 8 * 64 * 2 * 12),
        (configs.LLAMA_4_SCOUT, "GQA", 2 * 8 * 128 * 2 * 12),
        (configs.FALCON_7B, "MQA", 2 * 1 * 64 * 2 * 32),
        (configs.GPT_2, "MHA", 2 * 12 * 64 * 2 * 12),
    ],
)
def test_bytes_per_token_of_public_models(config, attention, token_bytes):
    shape = ModelShape.from_config(config)
    assert shape.attention == attention
    assert shape.bytes_per_token() == token_bytes
    assert shape.bytes_per_block(16) == 16 * token_bytes
    assert shape.bytes_per_block(64) == 64 * token_bytes


@pytest.mark.parametrize(
    ("config", "windows", "token_bytes"),
    [
        (configs.GEMMA_2_9B, {"window_4096": 4096}, 2 * 8 * 256 * 2 * 21),
        (configs.GEMMA_3_4B, {"window_1024": 1024}, 2 * 4 * 256 * 2 * 29),
        (configs.GEMMA_3_27B, {"window_1024": 1024}, 2 * 16 * 128 * 2 * 52),
        (configs.GPT_OSS_20B, {"window_128": 128}, 2 * 8 * 64 * 2 * 12),
        (configs.LLAMA_4_SCOUT, {"window_8192": 8192}, 2 * 8 * 128 * 2 * 36),
    ],
)
def test_layers_with_a_sliding_window_are_a_group_of_their_own(config, windows, token_bytes):
    shape = ModelShape.from_config(config)
    assert shape.windows == windows
    (group,) = windows
    assert shape.bytes_per_token(group=group) == token_bytes
    assert shape.full_layers + shape.window_layers(group) == sum(n for _, n in shape.layers)


def test_layer_types_say_which_layers_slide():
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = configs.LLAMA_3_8B | {"num_hidden_layers": 4, "layer_types": types}
    shape = ModelShape.from_config(config | {"sliding_window": 512})
    assert (shape.full_layers, shape.window_layers("window_512")) == (2, 2)
    with pytest.raises(ConfigError, match="4 layer types for 5 layers"):
        ModelShape.from_config(config | {"num_hidden_layers": 5, "sliding_window": 512})
    with pytest.raises(ConfigError, match="has no sliding_window"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("pattern", "full"), [("LLLG", 8), (4, 8), (2, 16)], ids=["letters", "four", "two"]
)
def test_a_pattern_says_which_layers_slide(pattern, full):
    config = configs.LLAMA_3_8B | {"sliding_window": 512, "sliding_window_pattern": pattern}
    assert ModelShape.from_config(config).full_layers == full


def test_qwen_uses_windows_only_when_it_says_so():
    config = configs.QWEN_2_5_7B | {"sliding_window": 4096, "max_window_layers": 20}
    assert ModelShape.from_config(config).windows == {}
    shape = ModelShape.from_config(config | {"use_sliding_window": True})
    assert (shape.full_layers, shape.window_layers("window_4096")) == (20, 8)


def test_a_window_of_all_layers_is_sized_like_full_attention_and_says_so():
    shape = ModelShape.from_config(configs.MISTRAL_7B_V0_1)
    assert shape.windows == {}
    assert "4,096 tokens" in shape.notes[0]


def test_layers_that_share_kv_have_none_of_their_own():
    config = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}
    shape = ModelShape.from_config(config)
    assert sum(count for _, count in shape.layers) == 20
    assert (shape.full_layers, shape.window_layers("window_512")) == (4, 16)


def test_recurrent_state_of_a_gated_delta_net():
    shape = ModelShape.from_config(configs.QWEN_3_NEXT_80B)
    conv, recurrent = (2 * 16 * 128 + 32 * 128) * 3, 32 * 128 * 128
    assert shape.state_slot_bytes() == 36 * (conv + recurrent) * 2
    assert shape.state_slot_bytes(tensor_parallel=4) == 9 * (conv + recurrent) * 2
    wide = ModelShape.from_config(configs.QWEN_3_NEXT_80B | {"mamba_ssm_dtype": "float32"})
    assert wide.state_slot_bytes() == 36 * (conv * 2 + recurrent * 4)
    with pytest.raises(ConfigError, match="tensor_parallel is 3; it must divide the 32 heads"):
        shape.state_slot_bytes(tensor_parallel=3)


def test_recurrent_state_of_mamba_2():
    config = configs.LLAMA_3_8B | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    shape = ModelShape.from_config(config)
    conv, recurrent = (48 * 64 + 2 * 128) * 3, 48 * 64 * 128
    assert shape.state_slot_bytes() == 3 * (conv + recurrent) * 2
    assert shape.bytes_per_token() == 2 * 8 * 128 * 2
    letters = {key: value for key, value in config.items() if key != "layer_types"}
    nemotron = ModelShape.from_config(letters | {"hybrid_override_pattern": "M-*E"})
    assert nemotron.state_slot_bytes() == (conv + recurrent) * 2
    assert nemotron.full_layers == 1


def test_ranks_divide_heads_share_them_or_are_refused():
    shape = ModelShape.from_config(configs.LLAMA_3_8B)
    whole = shape.bytes_per_token()
    assert shape.bytes_per_token(tensor_parallel=4) == whole // 4
    assert shape.bytes_per_token(tensor_parallel=16) == whole // 8  # two ranks have each head
    with pytest.raises(ConfigError, match=r"tensor_parallel is 3 for 8 KV heads"):
        shape.bytes_per_token(tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 0; it must be at least 1"):
        shape.bytes_per_token(tensor_parallel=0)
    latent = ModelShape.from_config(configs.DEEPSEEK_V3)
    assert latent.bytes_per_token(tensor_parallel=8) == latent.bytes_per_token()


def test_dtypes_of_kv():
    shape = ModelShape.from_config(configs.LLAMA_3_8B)
    assert shape.bytes_per_token(kv_dtype="fp8") == shape.bytes_per_token() // 2
    assert shape.bytes_per_token(kv_dtype="float32") == shape.bytes_per_token() * 2
    with pytest.raises(ConfigError, match="kv_dtype is 'fp9'; it must be one of 'auto'"):
        shape.bytes_per_token(kv_dtype="fp9")
    with pytest.raises(ConfigError, match=r"fp8_ds_mla.*latent"):
        shape.bytes_per_token(kv_dtype="fp8_ds_mla")
    latent = ModelShape.from_config(configs.DEEPSEEK_V3)
    assert latent.bytes_per_token(kv_dtype="fp8_ds_mla") == 656 * 61
    assert {"auto", "fp8", "bfloat16"} <= set(KV_DTYPES)


@pytest.mark.parametrize(
    "quantization",
    [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}],
)
def test_a_checkpoint_that_asks_for_kv_in_fp8_gets_it(quantization):
    config = configs.LLAMA_3_8B | {"quantization_config": quantization}
    shape = ModelShape.from_config(config)
    assert shape.resolved_kv_dtype() == "fp8"
    assert shape.bytes_per_token() == 2 * 8 * 128 * 32
    assert shape.bytes_per_token(kv_dtype="bfloat16") == 2 * 8 * 128 * 2 * 32
    assert any("fp8" in note for note in shape.notes)


def test_keys_and_values_may_differ_and_layers_may_have_different_heads():
    config = configs.LLAMA_3_8B | {"head_dim": 192, "v_head_dim": 128}
    assert ModelShape.from_config(config).bytes_per_token() == 8 * (192 + 128) * 2 * 32
    by_layer = configs.LLAMA_3_8B | {"num_hidden_layers": 3, "num_kv_heads": [2, 4, 4]}
    del by_layer["num_key_value_heads"]
    assert ModelShape.from_config(by_layer).bytes_per_token() == 10 * 2 * 128 * 2


def test_sizes_are_those_of_registered_tensors():
    """Tensors of the shapes that a server allocates have the bytes that ModelShape says."""
    shape = ModelShape.from_config(configs.GPT_OSS_20B)
    regions = Regions(num_layers=shape.full_layers)
    for name in ("k", "v"):
        layers = [np.zeros((2, 16, 8, 64), np.float16) for _ in range(shape.full_layers)]
        regions.add(name, layers=layers)
    assert regions.block_bytes == shape.bytes_per_block(16)
    assert regions.payload_bytes == shape.host_bytes_per_block(16)


def test_host_blocks_include_alignment_and_trailers():
    shape = ModelShape.from_config(configs.DEEPSEEK_V3_2)
    aligned = -(-132 * 3 // 64) * 64 + (512 + 64) * 2 * 3
    assert shape.host_bytes_per_block(3) == 61 * aligned
    with_stores = shape.host_bytes_per_block(3, with_stores=True)
    assert with_stores == -(-(61 * aligned + 64) // 4096) * 4096


def test_files_and_folders_are_read(tmp_path):
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(configs.LLAMA_3_8B))
    expected = ModelShape.from_config(configs.LLAMA_3_8B)
    assert ModelShape.from_config(path) == ModelShape.from_config(str(path)) == expected
    assert ModelShape.from_config(path.parent) == expected


def test_a_model_is_found_in_the_cache_of_hugging_face(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(configs.LLAMA_3_8B))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert ModelShape.from_config("org/name") == ModelShape.from_config(configs.LLAMA_3_8B)
    with pytest.raises(ConfigError, match=r"org/other does not exist.*hf download org/other"):
        ModelShape.from_config("org/other")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelShape.from_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{'a': 1}")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: .*byte 1"):
        ModelShape.from_config(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="is not a JSON object, but a list"):
        ModelShape.from_config(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not JSON"):
        ModelShape.from_config(path)
    for nothing in ("", None, 5):
        with pytest.raises(ConfigError, match="must be the path of a config"):
            ModelShape.from_config(nothing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'; it must be an integer"),
        ({"num_key_value_heads": [8]}, "num_key_value_heads has 1 numbers"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'"),
        ({"layer_types": ["mystery"] * 32}, "layer type 'mystery' is not known"),
        ({"layer_types": ["none"] * 32}, "no layer has attention"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config changes"),
        ({"hybrid_override_pattern": "M?"}, r"unknown layers \['\?'\]"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(configs.LLAMA_3_8B | changes)


def test_assumptions_are_noted():
    assert ModelShape.from_config(configs.LLAMA_3_8B).notes == ()
    assert "bfloat16 is assumed" in ModelShape.from_config(configs.GPT_2).notes[0]
