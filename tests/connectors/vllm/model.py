"""A model whose KV depends on the whole prefix, and whose next token on every byte of its KV.

The KV of a position is computed from the KV of the position before it, read from the cache. So a
wrong block changes all that follows, and the next token.

The layers form groups, each of a kind of KINDS: the next token depends on all positions, on those
of the last window, or on a state only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LAYERS: Final = 2
VOCABULARY: Final = 50
WINDOW: Final = 10  # positions, the present one included
KINDS: Final = ("full", "window", "state")
_MASK: Final = (1 << 30) - 1


def next_kv(before: int, token: int, layer: int, adapter: int) -> int:
    """Return the KV of a position in one layer."""
    return (before * 1_000_003 + token * 7_919 + layer * 31 + adapter * 101 + 1) & _MASK


def next_token(groups: Sequence[NDArray[np.int64]]) -> int:
    """Return the token behind positions with this KV, ``[layers, positions]`` per group."""
    total = 0
    for kv in groups:
        weights = np.arange(1, kv.shape[1] + 1, dtype=np.int64)
        total += int((kv % 1_009 * weights).sum())
    return total % VOCABULARY


def first_seen(kind: str, num_tokens: int) -> int:
    """Return the first of ``num_tokens`` positions on which the next token depends."""
    return {"full": 0, "window": max(num_tokens - WINDOW, 0), "state": num_tokens - 1}[kind]


def kv_of(tokens: Sequence[int], adapter: int, group: int = 0) -> NDArray[np.int64]:
    """Return the KV of a prompt in the layers of a group, computed without a cache."""
    kv = np.zeros((LAYERS, len(tokens)), np.int64)
    for layer in range(LAYERS):
        value = 0
        for position, token in enumerate(tokens):
            value = next_kv(value, token, group * LAYERS + layer, adapter)
            kv[layer, position] = value
    return kv


def generate(
    prompt: Sequence[int], adapter: int, num_tokens: int, kinds: Sequence[str] = ("full",)
) -> list[int]:
    """Return the tokens that the model generates without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(
            next_token(
                [
                    kv_of(tokens, adapter, group)[:, first_seen(kind, len(tokens)) :]
                    for group, kind in enumerate(kinds)
                ]
            )
        )
    return tokens[len(prompt) :]
