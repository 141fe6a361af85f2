"""The demo's transformer, naively: every position at once in float64, no cache, no blocks."""

import itertools

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


def random_tokens(config, count, seed):
    return np.random.default_rng(seed).integers(0, config.vocab, count, dtype=np.int32)


def assert_bits_do_not_depend_on_the_batch(model, block_tokens, cuts):
    """Compare a prompt computed at once with one computed in chunks beside another: equal bits."""
    tokens, other = (random_tokens(model.config, cuts[-1], seed) for seed in (5, 6))
    blocks = -(-cuts[-1] // block_tokens)
    ids = np.random.default_rng(7).permutation(2 * blocks)
    table, other_table = ids[:blocks], ids[blocks:]
    whole = run(model, model.new_cache(2 * blocks, block_tokens), [(tokens, 0, table)])
    cache = model.new_cache(2 * blocks, block_tokens)
    for start, stop in itertools.pairwise(cuts):
        before = (other[start:stop], start, other_table)
        found = run(model, cache, [before, (tokens[start:stop], start, table)])
        np.testing.assert_array_equal(found[stop - start :], whole[start:stop])


def assert_a_corrupted_block_shows(model):
    """Check that a cached prefix gives equal bits, and different ones after a corruption."""
    tokens = random_tokens(model.config, 70, seed=8)
    cache = model.new_cache(device_blocks=8, block_tokens=16)
    before = [piece.pointer for piece in cache.regions().pieces()]
    whole = run(model, cache, [(tokens, 0, range(5))])
    again = run(model, cache, [(tokens[48:], 48, [0, 1, 2, 6, 7])])
    np.testing.assert_array_equal(again, whole[48:])
    cache.corrupt(1)
    wrong = run(model, cache, [(tokens[48:], 48, [0, 1, 2, 6, 7])])
    assert not (wrong == whole[48:]).all(axis=1).any(), "a row read the block and did not change"
    assert [piece.pointer for piece in cache.regions().pieces()] == before
