"""Reader of a local Llama or Qwen checkpoint: ``config.json`` and safetensors files."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from aiokv.demo.weights import GroupedConfig, Weights
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.demo.weights import Array

_KINDS: Final = ("llama", "qwen2", "qwen3")
_DTYPES: Final = ("F32", "F16", "BF16")
_MAX_CONFIG_BYTES: Final = 1 << 20  # published models have a few KiB

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class _Kind(msgspec.Struct):
    """The key of ``config.json`` that names the kind of model."""

    model_type: str


class _Rope(msgspec.Struct):
    """``rope_scaling`` or ``rope_parameters`` of ``config.json``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _PositiveFloat | None = None


class _Sizes(msgspec.Struct):
    """``config.json`` of a known kind of model."""

    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    intermediate_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rope_theta: _PositiveFloat | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    rms_norm_eps: _PositiveFloat = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False


def read_checkpoint(folder: Path) -> tuple[GroupedConfig, Weights]:
    """Read sizes and weights of the model in ``folder``; every weight is made float32.

    Raises:
        UsageError: a file is missing or malformed, the model is of another kind, or the
            ``safetensors`` package is not installed.
    """
    safetensors = _import_safetensors()
    try:
        config, tied = _read_config(folder / "config.json")
        with contextlib.ExitStack() as files:
            tensors = _Tensors(folder, files, safetensors)
            return config, _weights(config, tensors, tied=tied)
    except UsageError as error:
        message = f"cannot read the checkpoint {folder}: {error.args[0]}"
        raise UsageError(message, hint=error.hint) from error
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read the checkpoint {folder}: {error}") from error


def _import_safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise UsageError(
            f"reading a checkpoint needs the package safetensors: {error}",
            hint="pip install --group test",
        ) from error
    return safetensors


def _read_config(path: Path) -> tuple[GroupedConfig, bool]:
    """Sizes of the model, and True if it embeds and unembeds with the same matrix."""
    _check_regular(path)
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise UsageError(f"{path.name} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        kind = msgspec.json.decode(text, type=_Kind).model_type
        if kind not in _KINDS:
            raise UsageError(f"model_type is {kind!r}; it must be one of {', '.join(_KINDS)}")
        sizes = msgspec.json.decode(text, type=_Sizes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path.name}: {error}") from error
    return _config(kind, sizes), sizes.tie_word_embeddings


def _config(kind: str, sizes: _Sizes) -> GroupedConfig:
    theta = sizes.rope_theta
    for key in ("rope_scaling", "rope_parameters"):
        rope: _Rope = getattr(sizes, key) or _Rope()
        rope_type = rope.rope_type or rope.type or "default"
        if rope_type != "default":
            raise UsageError(f"{key} has the type {rope_type!r}; only 'default' is supported")
        theta = theta or rope.rope_theta
    if kind != "qwen2" and sizes.attention_bias:
        raise UsageError("attention_bias is true; biases of all four projections are not supported")
    return GroupedConfig(
        vocab=sizes.vocab_size,
        hidden=sizes.hidden_size,
        layers=sizes.num_hidden_layers,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads or sizes.num_attention_heads,
        ffn=sizes.intermediate_size,
        head_size=sizes.head_dim,
        rope_theta=theta or 10_000.0,
        norm_epsilon=sizes.rms_norm_eps,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


class _Tensors:
    """The tensors of all safetensors files of a folder, by name; read when asked for.

    Args:
        folder: holds one or more files ``*.safetensors``.
        files: closes them.
        safetensors: the package. It checks each header against the size of its file.
    """

    def __init__(self, folder: Path, files: contextlib.ExitStack, safetensors: Any) -> None:
        self._files: dict[str, tuple[str, Any]] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UsageError(f"{folder} has no *.safetensors file")
        for path in paths:
            _check_regular(path)
            try:
                file = files.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (OSError, ValueError, safetensors.SafetensorError) as error:
                raise UsageError(f"{path.name}: {error}") from error
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._files:
                    raise UsageError(f"{name} is in {self._files[name][0]} and in {path.name}")
                self._files[name] = (path.name, file)

    def read(self, name: str, *shape: int) -> Array:
        """Return a tensor as float32.

        Raises:
            UsageError: the tensor is missing, or has another shape or an unknown number format.
        """
        if name not in self._files:
            raise UsageError(f"the tensor {name} is missing")
        _, file = self._files[name]
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise UsageError(f"{name} has the shape {stored.get_shape()}, not {list(shape)}")
        dtype = stored.get_dtype()
        if dtype not in _DTYPES:
            raise UsageError(
                f"{name} has the dtype {dtype}; it must be one of {', '.join(_DTYPES)}"
            )
        if dtype == "BF16":
            _register_bfloat16()
        found: Array = file.get_tensor(name).astype(np.float32)
        return found

    def matrix(self, name: str, inputs: int, outputs: int) -> Array:
        """Return a matrix as ``[in, out]``; files have ``[out, in]``."""
        return np.ascontiguousarray(self.read(name, outputs, inputs).T)


def _check_regular(path: Path) -> None:
    """Refuse a missing file, and one that is not regular: opening a FIFO would block."""
    if not path.is_file():
        raise UsageError(f"{path.name} is missing or not a regular file")


def _register_bfloat16() -> None:
    """Let numpy know bfloat16, which the safetensors package needs to return such a tensor."""
    try:
        import ml_dtypes  # noqa: F401 (registers the dtype)
    except ImportError as error:
        raise UsageError(
            f"reading bfloat16 weights needs the package ml_dtypes: {error}",
            hint="pip install --group test",
        ) from error


def _weights(config: GroupedConfig, tensors: _Tensors, *, tied: bool) -> Weights:
    embedding = tensors.read("model.embed_tokens.weight", config.vocab, config.hidden)
    if tied:
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


def _layer(config: GroupedConfig, tensors: _Tensors, prefix: str) -> dict[str, Array]:
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
    layer = {
        "attention_norm": tensors.read(f"{prefix}input_layernorm.weight", hidden),
        "qkv": np.concatenate(projections, axis=1),
        "out": tensors.matrix(f"{prefix}self_attn.o_proj.weight", mixed, hidden),
        "ffn_norm": tensors.read(f"{prefix}post_attention_layernorm.weight", hidden),
        "gate_up": np.concatenate(halves, axis=1),
        "down": tensors.matrix(f"{prefix}mlp.down_proj.weight", config.ffn, hidden),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = np.concatenate(biases)
    if config.qk_norm:
        layer["query_norm"] = tensors.read(f"{prefix}self_attn.q_norm.weight", head_dim)
        layer["key_norm"] = tensors.read(f"{prefix}self_attn.k_norm.weight", head_dim)
    return layer
