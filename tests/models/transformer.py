"""The demo's transformer, naively: every position at once in float64, no cache, no blocks."""

import numpy as np

from aiokv.demo.batch import Batch, Span
from aiokv.demo.weights import random_weights


def naive_logits(config, tokens):
    """Every position at once in float64: one head after the other, no cache, no blocks."""
    length, half = len(tokens), config.head_dim // 2
    parameters = random_weights(config)
    x = parameters.embedding[tokens].astype(np.float64)

    def norm(values):
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + config.norm_epsilon)

    def turn(head):
        turned = np.empty_like(head)
        for position in range(length):
            for pair in range(half):
                angle = position * config.rope_theta ** (-pair / half)
                a, b = head[position, pair], head[position, pair + half]
                turned[position, pair] = a * np.cos(angle) - b * np.sin(angle)
                turned[position, pair + half] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    for layer in parameters.layers:
        projected = norm(x) * layer["attention_norm"] @ layer["qkv"]
        if config.qkv_bias:
            projected = projected + layer["qkv_bias"]
        parts = np.split(projected, config.heads + 2 * config.kv_heads, axis=1)
        group = config.heads // config.kv_heads
        mixed = []
        for head in range(config.heads):
            query, key = parts[head], parts[config.heads + head // group]
            if config.qk_norm:
                query, key = norm(query) * layer["query_norm"], norm(key) * layer["key_norm"]
            query, key = turn(query), turn(key)
            value = parts[config.heads + config.kv_heads + head // group]
            scores = query @ key.T / np.sqrt(config.head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(mixed, axis=1) @ layer["out"]
        gate, up = np.split(norm(x) @ layer["gate_up"], 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]
    return norm(x) @ parameters.unembedding


def run(model, cache, parts):
    """One forward pass; ``parts`` is ``[(tokens, first_position, table)]``."""
    spans, row = [], 0
    for tokens, first, table in parts:
        spans.append(Span(row, row + len(tokens), first, np.asarray(table, dtype=np.int32)))
        row += len(tokens)
    batch = Batch(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate(
            [np.arange(first, first + len(tokens)) for tokens, first, _ in parts]
        ).astype(np.int32),
        spans=spans,
    )
    return model.forward(batch, cache)
