"""Reads a local Llama or Qwen checkpoint: ``config.json`` and safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from aiokv.demo.grouped import GroupedConfig, GroupedLayerWeights
from aiokv.demo.weights import Weights
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aiokv.demo.model import Array

_DTYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit


def read_checkpoint(folder: Path) -> tuple[GroupedConfig, Weights[GroupedLayerWeights]]:
    """Sizes and weights of the model in ``folder``; every weight is made float32.

    Raises:
        UsageError: a file is missing or malformed, or the model is of another kind.
    """
    try:
        sizes = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        config = _config(sizes)
        tensors = _Tensors(folder)
        return config, _weights(config, tensors, tied=bool(sizes.get("tie_word_embeddings")))
    except (OSError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise UsageError(f"cannot read the checkpoint {folder}: {error}") from error


def _config(sizes: Mapping[str, Any]) -> GroupedConfig:
    kind = sizes.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise UsageError(f"model_type is {kind!r}; llama, qwen2 and qwen3 are known")
    scaling = sizes.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type")) != "default":
        raise UsageError(f"rope_scaling {scaling} is not known")
    if kind != "qwen2" and sizes.get("attention_bias"):
        raise UsageError("attention_bias (of all four projections) is not known")
    return GroupedConfig(
        vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes.get("num_key_value_heads", sizes["num_attention_heads"]),
        ffn=sizes["intermediate_size"],
        head_size=sizes.get("head_dim"),
        rope_theta=float(sizes.get("rope_theta", 10_000.0)),
        norm_epsilon=float(sizes.get("rms_norm_eps", 1e-6)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


class _Tensors:
    """The tensors of all safetensors files of a folder, by name; read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{folder} has no *.safetensors file")
        for path in files:
            self._read_header(path)

    def _read_header(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"{path.name} has a header of {length} bytes")
            header = msgspec.json.decode(file.read(length), type=dict[str, Any])
        for name, entry in header.items():
            if name != "__metadata__":
                self._entries[name] = (path, 8 + length, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, *shape: int) -> Array:
        path, data_start, entry = self._entries[name]
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"{name} has the shape {entry['shape']}, not {list(shape)}")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the dtype {entry['dtype']}")
        begin, _ = entry["data_offsets"]
        stored: np.memmap[Any, Any] = np.memmap(
            path, dtype=_DTYPES[entry["dtype"]], mode="r", offset=data_start + begin, shape=shape
        )
        if entry["dtype"] == "BF16":  # the upper half of a float32
            widened: Array = (stored.astype(np.uint32) << 16).view(np.float32)
            return widened
        return stored.astype(np.float32)

    def matrix(self, name: str, inputs: int, outputs: int) -> Array:
        """As ``[in, out]``; files have ``[out, in]``."""
        return np.ascontiguousarray(self.read(name, outputs, inputs).T)


def _weights(
    config: GroupedConfig, tensors: _Tensors, *, tied: bool
) -> Weights[GroupedLayerWeights]:
    embedding = tensors.read("model.embed_tokens.weight", config.vocab, config.hidden)
    if tied or "lm_head.weight" not in tensors:
        unembedding = np.ascontiguousarray(embedding.T)
    else:
        unembedding = tensors.matrix("lm_head.weight", config.hidden, config.vocab)
    return Weights(
        embedding=embedding,
        layers=[
            _layer(config, tensors, f"model.layers.{number}.") for number in range(config.layers)
        ],
        final_norm=tensors.read("model.norm.weight", config.hidden),
        unembedding=unembedding,
    )


def _layer(config: GroupedConfig, tensors: _Tensors, prefix: str) -> GroupedLayerWeights:
    hidden, head_dim = config.hidden, config.head_dim
    outputs = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    projections = [
        tensors.matrix(f"{prefix}self_attn.{letter}_proj.weight", hidden, heads * head_dim)
        for letter, heads in outputs.items()
    ]
    biases = [
        tensors.read(f"{prefix}self_attn.{letter}_proj.bias", heads * head_dim)
        for letter, heads in outputs.items()
        if config.qkv_bias
    ]
    halves = [
        tensors.matrix(f"{prefix}mlp.{half}_proj.weight", hidden, config.ffn)
        for half in ("gate", "up")
    ]
    mixed = config.heads * head_dim
    return GroupedLayerWeights(
        attention_norm=tensors.read(f"{prefix}input_layernorm.weight", hidden),
        qkv=np.concatenate(projections, axis=1),
        out=tensors.matrix(f"{prefix}self_attn.o_proj.weight", mixed, hidden),
        ffn_norm=tensors.read(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=np.concatenate(halves, axis=1),
        down=tensors.matrix(f"{prefix}mlp.down_proj.weight", config.ffn, hidden),
        qkv_bias=np.concatenate(biases) if biases else None,
        query_norm=_head_norm(config, tensors, f"{prefix}self_attn.q_norm.weight"),
        key_norm=_head_norm(config, tensors, f"{prefix}self_attn.k_norm.weight"),
    )


def _head_norm(config: GroupedConfig, tensors: _Tensors, name: str) -> Array | None:
    return tensors.read(name, config.head_dim) if config.qk_norm else None
