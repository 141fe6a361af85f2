"""Model directories for vLLM: a configuration of the given shape, without weights or tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
}
_BYTES_PER_VALUE = 2  # bfloat16
# "8b" is the shape of Llama 3 8B: 128 KiB of KV per token.
SHAPES = {
    "8b": {
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
    "small": {
        "hidden_size": 1_024,
        "intermediate_size": 2_816,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 32_000,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4_096,
    },
}


def write_model(shape: str, directory: Path) -> None:
    """Write ``config.json`` of a shape of ``SHAPES`` into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps(_COMMON | SHAPES[shape], indent=2)
    (directory / "config.json").write_text(config, encoding="utf-8")


def block_bytes(shape: str, block_tokens: int) -> int:
    """Return the bytes of KV that a block of ``block_tokens`` has in all layers."""
    sizes = SHAPES[shape]
    keys_and_values = 2 * sizes["num_key_value_heads"] * sizes["head_dim"]
    return block_tokens * sizes["num_hidden_layers"] * keys_and_values * _BYTES_PER_VALUE
