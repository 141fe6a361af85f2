"""A Llama or Qwen checkpoint on disk becomes the weights that a model computes with."""

import json
import os
import sys

import numpy as np
import pytest

from aiokv.demo.weights import GroupedConfig, random_weights
from aiokv.errors import UsageError
from tests.models.demo.checkpoint import read_checkpoint

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
    boundaries = np.cumsum([config.heads, config.kv_heads]) * config.head_dim
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        for letter, part in zip("qkv", np.split(layer["qkv"], boundaries, axis=1), strict=True):
            tensors[f"{prefix}self_attn.{letter}_proj.weight"] = part.T
        if "qkv_bias" in layer:
            for letter, part in zip("qkv", np.split(layer["qkv_bias"], boundaries), strict=True):
                tensors[f"{prefix}self_attn.{letter}_proj.bias"] = part
        if "query_norm" in layer:
            tensors[f"{prefix}self_attn.q_norm.weight"] = layer["query_norm"]
            tensors[f"{prefix}self_attn.k_norm.weight"] = layer["key_norm"]
        gate, up = np.split(layer["gate_up"], 2, axis=1)
        tensors[f"{prefix}mlp.gate_proj.weight"] = gate.T
        tensors[f"{prefix}mlp.up_proj.weight"] = up.T
        tensors[f"{prefix}mlp.down_proj.weight"] = layer["down"].T
        tensors[f"{prefix}self_attn.o_proj.weight"] = layer["out"].T
        tensors[f"{prefix}input_layernorm.weight"] = layer["attention_norm"]
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer["ffn_norm"]
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
        assert layer.keys() == other.keys()
        for name, array in layer.items():
            np.testing.assert_array_equal(array, other[name])


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
    sizes = SIZES | {"tie_word_embeddings": True}
    write(tmp_path, sizes, [{name: narrow(tensor) for name, tensor in tensors.items()}])
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
        (SIZES | {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        (SIZES | {"attention_bias": True}, "attention_bias"),
        (SIZES | {"hidden_size": 18}, "has the shape"),
        (
            SIZES | {"model_type": "llama", "num_hidden_layers": 3},
            r"the tensor model\.layers\.2\.\S+ is missing",
        ),
        (SIZES | {"model_type": "llama", "num_hidden_layers": 10**9}, "is missing"),
        ({"model_type": "llama"}, "vocab_size"),
    ],
)
def test_unknown_model_kinds_and_options_are_refused(tmp_path, sizes, message):
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


def small_model(folder):
    config = GroupedConfig(
        vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, head_size=6, qk_norm=True
    )
    weights = random_weights(config)
    write(folder, SIZES, [stored(weights, config)])
    return folder / "model-0.safetensors"


def test_theta_of_rope_parameters_is_used(tmp_path):
    small_model(tmp_path)
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config, _ = read_checkpoint(tmp_path)
    assert config.rope_theta == 1e6


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model_type": 7}',
        b'{"model_type": ["llama"]}',
        b"[" * 100_000,
        b" " * (2 << 20),
        json.dumps(SIZES | {"rope_scaling": [1]}).encode(),
        json.dumps(SIZES | {"rope_theta": None, "rope_scaling": "x"}).encode(),
        json.dumps(SIZES | {"rope_theta": "1e4"}).encode(),
        json.dumps(SIZES | {"rope_theta": -1.0}).encode(),
        json.dumps(SIZES | {"vocab_size": 10**30}).encode(),
        json.dumps(SIZES | {"vocab_size": -40}).encode(),
        json.dumps(SIZES | {"hidden_size": 16.5}).encode(),
        json.dumps(SIZES | {"num_hidden_layers": 2**31 - 1}).encode(),
        json.dumps(SIZES | {"num_key_value_heads": 0}).encode(),
        json.dumps(SIZES | {"head_dim": 5}).encode(),
        json.dumps(SIZES).replace("1e-06", "1e999").encode(),
        json.dumps(SIZES).replace("1e-06", "NaN").encode(),
    ],
    ids=lambda text: text[:24].decode(errors="replace"),
)
def test_hostile_config_is_a_usage_error(tmp_path, text):
    small_model(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UsageError, match="cannot read the checkpoint"):
        read_checkpoint(tmp_path)


def with_header(path, change):
    """Rewrite the header of a safetensors file; its data stay as they are."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [-64, 0]},
        {"data_offsets": [0, -64]},
        {"data_offsets": [64, 0]},
        {"data_offsets": [2**63, 2**63 + 64]},
        {"data_offsets": [0, 64, 128]},
        {"data_offsets": [0.5, 64.5]},
        {"data_offsets": "0, 64"},
        {"data_offsets": None},
        {"shape": [2**62, 4]},
        {"shape": [-16]},
        {"shape": 16},
        {"shape": []},
        {"dtype": "F64"},
        {"dtype": "I32"},
        {"dtype": "F4"},
        {"dtype": "Q9"},
        {"dtype": 7},
        {},
    ],
    ids=str,
)
def test_hostile_header_entry_is_a_usage_error(tmp_path, change):
    path = small_model(tmp_path)
    if change:
        with_header(path, lambda header: header[NAME].update(change))
    else:
        with_header(path, lambda header: header[NAME].clear())
    with pytest.raises(UsageError, match="cannot read the checkpoint"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        (2**63).to_bytes(8, "little"),
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (100_000).to_bytes(8, "little") + b'{"a":' * 20_000,
    ],
    ids=lambda content: content[:10].hex(),
)
def test_invalid_safetensors_file_is_a_usage_error(tmp_path, content):
    small_model(tmp_path).write_bytes(content)
    with pytest.raises(UsageError, match=r"model-0\.safetensors: "):
        read_checkpoint(tmp_path)


def test_truncated_files_are_usage_errors(tmp_path):
    path = small_model(tmp_path)
    content = path.read_bytes()
    for length in {*range(0, len(content), 499), 1, 7, 8, 9, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(UsageError, match="cannot read the checkpoint"):
            read_checkpoint(tmp_path)


def test_flipped_bits_in_the_header_are_usage_errors_or_read_the_same_bytes(tmp_path):
    """A flip may rename an unused key or reorder nothing; it never moves a weight."""
    path = small_model(tmp_path)
    content = path.read_bytes()
    _, expected = read_checkpoint(tmp_path)
    length = int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for bit in rng.choice(8 * (8 + length), 400, replace=False):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        try:
            _, found = read_checkpoint(tmp_path)
        except UsageError:
            refused += 1
        else:
            assert_equal(found, expected)
    assert refused > 350


@pytest.mark.parametrize("name", ["config.json", "model-0.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "null"])
def test_non_regular_file_is_refused_without_blocking(tmp_path, name, kind):
    small_model(tmp_path)
    path = tmp_path / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(UsageError, match=f"{name} is missing or not a regular file"):
        read_checkpoint(tmp_path)


def test_untied_embeddings_without_an_lm_head_are_refused(tmp_path):
    path = small_model(tmp_path)
    with_header(path, lambda header: header.update(other=header.pop("lm_head.weight")))
    with pytest.raises(UsageError, match=r"the tensor lm_head\.weight is missing"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    path = small_model(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match=r"is in model-0\.safetensors and in model-1"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path, monkeypatch, package):
    config = GroupedConfig(
        vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, head_size=6, qk_norm=True
    )
    tensors = stored(random_weights(config), config)
    write(tmp_path, SIZES, [{name: upper_half(tensor) for name, tensor in tensors.items()}])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"needs the package {package}") as caught:
        read_checkpoint(tmp_path)
    assert "--group test" in caught.value.hint
