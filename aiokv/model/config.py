"""Hugging Face model configurations (``config.json``), read as :class:`ModelShape`.

A field whose absence has a meaning gets the default of the model's class in transformers. A model
that stores something unknown is refused: a wrong size is worse than none.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.model.shape import ELEMENT_BYTES, LayerShape, ModelShape, StateShape

CONFIG_FILE: Final = "config.json"

# Sub-configurations of multimodal models that describe the language model.
_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config")

# Defaults of the configuration classes whose files leave these fields out.
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "gemma3n_text": {
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
}
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
}
# Fields that change the stored bytes in ways that this module does not know.
_UNKNOWN_FIELDS: Final = (
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "hybrid_layer_pattern",
    "linear_attn_config",
    "swa_num_key_value_heads",
    "use_cla",
)
_RECURRENT_TYPES: Final = ("mamba", "mamba2", "rwkv", "falcon_mamba", "jamba", "zamba", "zamba2")

_FULL: Final = ("full_attention", "attention", "global_attention")
_SLIDING: Final = ("sliding_attention", "chunked_attention")
_LINEAR: Final = "linear_attention"
_MAMBA: Final = "mamba"
_NO_CACHE: Final = "none"

# Characters of ``hybrid_override_pattern`` (Nemotron-H).
_PATTERN_KINDS: Final = {"*": "attention", "M": _MAMBA, "-": _NO_CACHE, "E": _NO_CACHE}


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Fields of the language model of a configuration, and the source for error messages."""

    values: Mapping[str, Any]
    source: str

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", "unknown"))

    def get(self, name: str) -> Any:
        """Return a field, the field of another name for the same, or its default; or None."""
        for alias in (name, *_ALIASES.get(name, ())):
            value = self.values.get(alias)
            if value is not None:
                return value
        return _DEFAULTS.get(self.model_type, {}).get(name)

    def integer(self, name: str, *, minimum: int = 1) -> int:
        """Return a field that must be there.

        Raises:
            ConfigError: the field is missing, is not an integer, or is below ``minimum``.
        """
        value = self.get(name)
        if value is None:
            raise ConfigError(
                f"{self.source} has no {name}",
                hint="pass the config.json of a language model, with all of its fields",
            )
        return checks.integer(f"{self.source}: {name}", value, minimum=minimum, error=ConfigError)

    def optional(self, name: str) -> int | None:
        """Return a field, or None if it is missing, null or 0.

        Raises:
            ConfigError: the field is not an integer, or is negative.
        """
        if self.get(name) is None:
            return None
        value = self.integer(name, minimum=0)
        return value or None

    def error(self, text: str) -> ConfigError:
        """Return the error of a model that cannot be sized."""
        return ConfigError(
            f"{self.source}: {text}",
            hint="compute the sizes from the tensors: num_blocks_for, CacheConfig.for_regions",
        )


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigFields:
    """Read a configuration; see :meth:`ModelShape.from_config`.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    if isinstance(config, Mapping):
        return _language_model(config, "the configuration")
    path = config_path(config)
    try:
        decoded = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"{path} is not a JSON object, but a {type(decoded).__name__}")
    return _language_model(decoded, str(path))


def config_path(model: object) -> Path:
    """Return the path of the ``config.json`` of a model on this machine.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise ConfigError(
            f"model is {checks.shown(model)}; it must be the path of a config.json or its folder"
        )
    path = Path(model)
    if path.is_dir():
        path = path / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"the folder {path.parent} has no {CONFIG_FILE}")
        return path
    if path.exists():
        return path
    cached = _cached(os.fspath(model))
    if cached is None:
        raise ConfigError(
            f"{path} does not exist, and the local cache of Hugging Face has no model of this name",
            hint=f"pass the path of a {CONFIG_FILE}, or download it: "
            f"hf download {path} {CONFIG_FILE}",
        )
    return cached


def _cached(name: str) -> Path | None:
    """Return the newest ``config.json`` of a model in the cache of huggingface_hub."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in snapshots.glob(f"*/{CONFIG_FILE}") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _language_model(config: Mapping[str, Any], source: str) -> ConfigFields:
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            outer = ("torch_dtype", "dtype", "quantization_config")
            inherited = {key: config[key] for key in outer if config.get(key) is not None}
            return _language_model({**inherited, **inner}, f"{source}, {name}")
    return ConfigFields(config, source)


def shape_of(fields: ConfigFields) -> ModelShape:
    """Return the shape of a model.

    Raises:
        ConfigError: a field is missing or out of range, or the model stores something unknown.
    """
    _check_known(fields)
    notes: list[str] = []
    kinds = _layer_kinds(fields)
    window = _window(fields, kinds, notes)
    layers = []
    for number, kind in enumerate(kinds):
        if kind in _FULL or kind in _SLIDING:
            layers.append(_layer(fields, number, window if kind in _SLIDING else None))
    if not layers:
        raise fields.error("no layer has attention, so there is no KV to cache")
    states = _states(fields, kinds)
    return ModelShape.of_layers(
        layers,
        name=fields.model_type,
        dtype=_dtype(fields, notes),
        states=tuple(Counter(states).items()),
        query_heads=fields.integer("num_attention_heads"),
        max_tokens=fields.optional("max_position_embeddings"),
        kv_dtype=_kv_dtype(fields, notes),
        notes=tuple(notes),
    )


def _check_known(fields: ConfigFields) -> None:
    if fields.get("is_encoder_decoder"):
        raise fields.error("encoder-decoder models are not supported")
    if fields.model_type in _RECURRENT_TYPES:
        raise fields.error(f"the model_type {fields.model_type!r} is not supported")
    for name in _UNKNOWN_FIELDS:
        if fields.values.get(name):
            raise fields.error(f"{name} changes what the model stores in a way that is not known")


def _dtype(fields: ConfigFields, notes: list[str]) -> str:
    dtype = fields.values.get("torch_dtype") or fields.values.get("dtype")
    if dtype is None:
        notes.append("the configuration names no dtype: bfloat16 is assumed")
        return "bfloat16"
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise fields.error(f"the dtype is {name!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
    return name


def _kv_dtype(fields: ConfigFields, notes: list[str]) -> str | None:
    """Return the dtype that a quantized checkpoint asks for (compressed-tensors, ModelOpt)."""
    quantization = fields.values.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    scheme = quantization.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    kind = str(quantization.get("kv_cache_quant_algo", ""))
    if bits != 8 and kind.lower() != "fp8":
        return None
    notes.append("quantization_config asks for KV in fp8")
    return "fp8"


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """Return the kind of each layer that does not share the cache of another layer."""
    num_layers = fields.integer("num_hidden_layers")
    given = fields.get("layer_types") or _pattern_kinds(fields)
    if given is not None:
        kinds = [str(kind) for kind in given]
        known = (*_FULL, *_SLIDING, _LINEAR, _MAMBA, _NO_CACHE)
        for kind in kinds:
            if kind not in known:
                raise fields.error(f"the layer type {kind!r} is not known")
        if len(kinds) != num_layers:
            raise fields.error(f"{len(kinds)} layer types for {num_layers} layers")
    else:
        kinds = _computed_kinds(fields, num_layers)
    shared = fields.optional("num_kv_shared_layers") or 0  # the last layers use KV of earlier ones
    return kinds[: num_layers - shared]


def _pattern_kinds(fields: ConfigFields) -> list[str] | None:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    unknown = sorted(set(pattern) - set(_PATTERN_KINDS))
    if unknown:
        raise fields.error(f"hybrid_override_pattern has the unknown layers {unknown}")
    return [_PATTERN_KINDS[character] for character in pattern]


def _computed_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return the kinds of the layers of a configuration without ``layer_types``."""
    if (attention := fields.get("attn_layer_indices")) is not None:
        return [_FULL[0] if layer in attention else _MAMBA for layer in range(num_layers)]
    if (interval := fields.optional("full_attention_interval")) is not None:
        return _every(interval, num_layers, _LINEAR)
    if fields.optional("attention_chunk_size") is not None:
        rotary = fields.get("no_rope_layers")
        if isinstance(rotary, Sequence) and len(rotary) == num_layers:
            return [_SLIDING[1] if flag else _FULL[0] for flag in rotary]
        return _every(fields.optional("no_rope_layer_interval") or 4, num_layers, _SLIDING[1])
    if fields.optional("sliding_window") is None or not _uses_window(fields):
        return [_FULL[0]] * num_layers
    pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern")
    if isinstance(pattern, str):  # such as "LLLG": local, local, local, global
        letters = (pattern[layer % len(pattern)] for layer in range(num_layers))
        return [_SLIDING[0] if letter == "L" else _FULL[0] for letter in letters]
    if isinstance(pattern, int) and pattern > 0:
        return _every(pattern, num_layers, _SLIDING[0])
    first = fields.get("max_window_layers") if fields.model_type.startswith("qwen") else 0
    return [_SLIDING[0] if layer >= (first or 0) else _FULL[0] for layer in range(num_layers)]


def _uses_window(fields: ConfigFields) -> bool:
    """Return False if the model ignores ``sliding_window``, as Qwen does by default."""
    default = not fields.model_type.startswith("qwen")
    return bool(fields.values.get("use_sliding_window", default))


def _every(interval: int, num_layers: int, other: str) -> list[str]:
    """Return full attention for each ``interval``-th layer."""
    return [other if (layer + 1) % interval else _FULL[0] for layer in range(num_layers)]


def _window(fields: ConfigFields, kinds: Sequence[str], notes: list[str]) -> int | None:
    """Return the window of the layers that have one; None where it saves nothing."""
    if not any(kind in _SLIDING for kind in kinds):
        return None
    is_chunked = _SLIDING[1] in kinds
    name = "attention_chunk_size" if is_chunked else "sliding_window"
    tokens = fields.integer(name)
    if is_chunked:
        notes.append(
            f"chunked attention over {tokens:,} tokens is sized as a sliding window of that size"
        )
    longest = fields.optional("max_position_embeddings")
    if longest is not None and tokens >= longest:
        return None
    if not any(kind in _FULL for kind in kinds):
        notes.append(
            f"all layers have a sliding window of {tokens:,} tokens; they are sized like full "
            "attention, so that the blocks of whole prompts can be reused"
        )
        return None
    return tokens


def _layer(fields: ConfigFields, number: int, window_tokens: int | None) -> LayerShape:
    rank = fields.optional("kv_lora_rank")
    if rank is not None:
        return LayerShape(
            kv_heads=1,
            key_elements=rank,
            value_elements=fields.integer("qk_rope_head_dim", minimum=0),
            is_latent=True,
            window_tokens=window_tokens,
            index_elements=fields.optional("index_head_dim") or 0,
        )
    query_heads = fields.integer("num_attention_heads")
    head_dim = fields.optional("head_dim")
    if head_dim is None:
        head_dim = fields.integer("hidden_size") // query_heads
    return LayerShape(
        kv_heads=_kv_heads(fields, number, query_heads),
        key_elements=head_dim,
        value_elements=fields.optional("v_head_dim") or head_dim,
        window_tokens=window_tokens,
    )


def _kv_heads(fields: ConfigFields, number: int, query_heads: int) -> int:
    heads = fields.get("num_key_value_heads")
    if isinstance(heads, list):  # one number per layer
        if number >= len(heads):
            raise fields.error(f"num_key_value_heads has {len(heads)} numbers")
        return checks.integer(
            f"{fields.source}: num_key_value_heads[{number}]",
            heads[number],
            minimum=1,
            error=ConfigError,
        )
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1  # Falcon: num_kv_heads is used only by the new architecture
    if fields.get("multi_query_attention") is False:
        return query_heads
    return query_heads if heads is None else fields.integer("num_key_value_heads")


def _states(fields: ConfigFields, kinds: Sequence[str]) -> list[StateShape]:
    makers = {_LINEAR: _delta_net_state, _MAMBA: _mamba2_state}
    return [makers[kind](fields) for kind in kinds if kind in makers]


def _delta_net_state(fields: ConfigFields) -> StateShape:
    """Return the state of a gated delta net (Qwen3-Next)."""
    key_heads = fields.integer("linear_num_key_heads")
    value_heads = fields.integer("linear_num_value_heads")
    key_dim = fields.integer("linear_key_head_dim")
    value_dim = fields.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateShape(
        conv_elements=channels * (fields.integer("linear_conv_kernel_dim") - 1),
        recurrent_elements=value_heads * key_dim * value_dim,
        heads=value_heads,
        recurrent_dtype=_state_dtype(fields),
    )


def _mamba2_state(fields: ConfigFields) -> StateShape:
    """Return the state of a Mamba-2 layer (Granite 4, Bamba, Nemotron-H)."""

    def either(name: str, other: str) -> int:
        return fields.integer(name if fields.get(name) is not None else other)

    heads = either("mamba_n_heads", "mamba_num_heads")
    head_dim = either("mamba_d_head", "mamba_head_dim")
    state_size = either("mamba_d_state", "ssm_state_size")
    groups = either("mamba_n_groups", "n_groups")
    kernel = either("mamba_d_conv", "conv_kernel")
    channels = heads * head_dim + 2 * groups * state_size
    return StateShape(
        conv_elements=channels * (kernel - 1),
        recurrent_elements=heads * head_dim * state_size,
        heads=heads,
        recurrent_dtype=_state_dtype(fields),
    )


def _state_dtype(fields: ConfigFields) -> str:
    dtype = str(fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or "auto")
    if dtype != "auto" and dtype not in ELEMENT_BYTES:
        raise fields.error(f"mamba_ssm_dtype is {dtype!r}, which is not known")
    return dtype
