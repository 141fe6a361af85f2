"""A model whose KV depends on the whole prefix, and whose next token on every byte of its KV.

The KV of a position is computed from the KV of the position before it, read from the cache. So a
wrong block changes all that follows, and the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LAYERS: Final = 2
VOCABULARY: Final = 50
_MASK: Final = (1 << 30) - 1


def next_kv(before: int, token: int, layer: int, adapter: int) -> int:
    """Return the KV of a position in one layer."""
    return (before * 1_000_003 + token * 7_919 + layer * 31 + adapter * 101 + 1) & _MASK


def next_token(kv: NDArray[np.int64]) -> int:
    """Return the token behind positions with this KV, ``[layers, positions]``."""
    weights = np.arange(1, kv.shape[1] + 1, dtype=np.int64)
    return int((kv % 1_009 * weights).sum() % VOCABULARY)


def kv_of(tokens: Sequence[int], adapter: int) -> NDArray[np.int64]:
    """Return the KV of a prompt, computed without a cache."""
    kv = np.zeros((LAYERS, len(tokens)), np.int64)
    for layer in range(LAYERS):
        value = 0
        for position, token in enumerate(tokens):
            value = next_kv(value, token, layer, adapter)
            kv[layer, position] = value
    return kv


def generate(prompt: Sequence[int], adapter: int, num_tokens: int) -> list[int]:
    """Return the tokens that the model generates without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(kv_of(tokens, adapter)))
    return tokens[len(prompt) :]
