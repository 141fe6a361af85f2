"""A Llama or Qwen checkpoint on disk becomes the weights that a model computes with."""

import json

import numpy as np
import pytest

from aiokv.demo.checkpoint import read_checkpoint
from aiokv.demo.grouped import GroupedConfig, random_weights
from aiokv.errors import UsageError

SIZES = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
}
CODES = {"float32": "F32", "float16": "F16", "uint16": "BF16"}


def stored(weights, config):
    """The names and shapes of a checkpoint."""
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.unembedding.T,
    }
    borders = np.cumsum([config.heads, config.kv_heads]) * config.head_dim
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        for letter, part in zip("qkv", np.split(layer.qkv, borders, axis=1), strict=True):
            tensors[f"{prefix}self_attn.{letter}_proj.weight"] = part.T
        if layer.qkv_bias is not None:
            for letter, part in zip("qkv", np.split(layer.qkv_bias, borders), strict=True):
                tensors[f"{prefix}self_attn.{letter}_proj.bias"] = part
        if layer.query_norm is not None:
            tensors[f"{prefix}self_attn.q_norm.weight"] = layer.query_norm
            tensors[f"{prefix}self_attn.k_norm.weight"] = layer.key_norm
        gate, up = np.split(layer.gate_up, 2, axis=1)
        tensors[f"{prefix}mlp.gate_proj.weight"] = gate.T
        tensors[f"{prefix}mlp.up_proj.weight"] = up.T
        tensors[f"{prefix}mlp.down_proj.weight"] = layer.down.T
        tensors[f"{prefix}self_attn.o_proj.weight"] = layer.out.T
        tensors[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer.ffn_norm
    return tensors


def write(folder, sizes, files):
    (folder / "config.json").write_text(json.dumps(sizes))
    for number, tensors in enumerate(files):
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name, tensor in tensors.items():
            begin, data = len(data), data + np.ascontiguousarray(tensor).tobytes()
            header[name] = {
                "dtype": CODES[tensor.dtype.name],
                "shape": tensor.shape,
                "data_offsets": [begin, len(data)],
            }
        encoded = json.dumps(header).encode()
        path = folder / f"model-{number}.safetensors"
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def upper_half(tensor):
    return (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype(np.uint16)


def assert_equal(found, expected):
    np.testing.assert_array_equal(found.embedding, expected.embedding)
    np.testing.assert_array_equal(found.unembedding, expected.unembedding)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for name in layer.__slots__:
            mine, theirs = getattr(layer, name), getattr(other, name)
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})],
)
def test_weights_are_read_back(tmp_path, kind, more):
    expected = GroupedConfig(
        vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, head_size=6,
        rope_theta=5e5, norm_epsilon=1e-6, **more,
    )  # fmt: skip
    weights = random_weights(expected)
    tensors = stored(weights, expected)
    names = sorted(tensors)
    files = [{name: tensors[name] for name in names[part::2]} for part in range(2)]
    write(tmp_path, SIZES | {"model_type": kind}, files)
    config, found = read_checkpoint(tmp_path)
    assert config == expected
    assert_equal(found, weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_formats_are_widened_and_tied_embeddings_used_twice(tmp_path, dtype):
    config = GroupedConfig(
        vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, head_size=6, qk_norm=True
    )
    tensors = stored(random_weights(config), config)
    del tensors["lm_head.weight"]
    narrow = upper_half if dtype == "bfloat16" else lambda tensor: tensor.astype(np.float16)
    write(tmp_path, SIZES, [{name: narrow(tensor) for name, tensor in tensors.items()}])
    _, found = read_checkpoint(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_allclose(found.embedding, embedding, rtol=2**-7)
    assert not np.array_equal(found.embedding, embedding)
    np.testing.assert_array_equal(found.unembedding, found.embedding.T)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (SIZES | {"model_type": "mamba"}, "mamba"),
        (SIZES | {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        (SIZES | {"attention_bias": True}, "attention_bias"),
        (SIZES | {"hidden_size": 18}, "has the shape"),
        ({"model_type": "llama"}, "vocab_size"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, sizes, message):
    config = GroupedConfig(vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, head_size=6)
    write(tmp_path, sizes, [stored(random_weights(config), config)])
    with pytest.raises(UsageError, match=message):
        read_checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        read_checkpoint(tmp_path)
