"""The demo's transformer against a naive one, and the property its whole check rests on."""

import itertools

import numpy as np
import pytest

from aiokv.demo.paged_attention import Span
from aiokv.demo.row_tiles import RowTiles
from aiokv.demo.transformer import Batch, ModelConfig, Transformer
from aiokv.errors import ConfigError

BLOCK_TOKENS = 16
CONFIG = ModelConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, max_context_tokens=256)


def naive_logits(model, tokens):
    """Every position at once in float64: one head after the other, no cache, no blocks."""
    config = model.config
    length, half = len(tokens), config.head_dim // 2
    x = model.embedding[tokens].astype(np.float64)

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

    for layer in model.layers:
        projected = norm(x) @ layer.qkv
        parts = np.split(projected, config.heads + 2 * config.kv_heads, axis=1)
        group = config.heads // config.kv_heads
        mixed = []
        for head in range(config.heads):
            query = turn(parts[head])
            key = turn(parts[config.heads + head // group])
            value = parts[config.heads + config.kv_heads + head // group]
            scores = query @ key.T / np.sqrt(config.head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(mixed, axis=1) @ layer.out
        gate, up = np.split(norm(x) @ layer.gate_up, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
    return norm(x) @ model.unembedding


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


def random_tokens(count, seed):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, count, dtype=np.int32)


def test_logits_equal_the_naive_model(model):
    tokens = random_tokens(100, seed=3)
    cache = model.new_cache(device_blocks=16, block_tokens=BLOCK_TOKENS)
    table = np.random.default_rng(4).permutation(16)[:7]
    found = run(model, cache, [(tokens, 0, table)])
    np.testing.assert_allclose(found, naive_logits(model, tokens), rtol=0, atol=2e-4)


@pytest.mark.parametrize("block_tokens", [1, 16, 24])
def test_bits_do_not_depend_on_chunks_neighbours_or_blocks(model, block_tokens):
    """Whole prompt, odd chunks beside a neighbour, token by token: equal bits."""
    tokens, other = random_tokens(100, seed=5), random_tokens(100, seed=6)
    blocks = -(-100 // block_tokens)
    ids = np.random.default_rng(7).permutation(2 * blocks)
    table, other_table = ids[:blocks], ids[blocks:]

    cache = model.new_cache(2 * blocks, block_tokens)
    whole = run(model, cache, [(tokens, 0, table)])

    cache = model.new_cache(2 * blocks, block_tokens)
    cuts = [0, 1, 13, 37, 64, 65, 100]
    for start, stop in itertools.pairwise(cuts):
        before = (other[start:stop], start, other_table)
        found = run(model, cache, [before, (tokens[start:stop], start, table)])
        np.testing.assert_array_equal(found[stop - start :], whole[start:stop])

    cache = model.new_cache(2 * blocks, block_tokens)
    for position in range(100):
        parts = [
            (other[position : position + 1], position, other_table),
            (tokens[position : position + 1], position, table),
        ]
        np.testing.assert_array_equal(run(model, cache, parts)[1], whole[position])


def test_a_cached_prefix_is_read_and_a_corrupted_one_shows(model):
    tokens = random_tokens(70, seed=8)
    cache = model.new_cache(device_blocks=8, block_tokens=BLOCK_TOKENS)
    whole = run(model, cache, [(tokens, 0, range(5))])
    again = run(model, cache, [(tokens[48:], 48, [0, 1, 2, 6, 7])])
    np.testing.assert_array_equal(again, whole[48:])
    cache.corrupt(1)
    wrong = run(model, cache, [(tokens[48:], 48, [0, 1, 2, 6, 7])])
    assert not (wrong == whole[48:]).all(axis=1).any(), "a row read the block and did not change"


def test_layers_are_announced_in_order_before_they_are_read(model):
    cache = model.new_cache(device_blocks=2, block_tokens=BLOCK_TOKENS)
    seen = []
    batch = Batch(
        np.zeros(3, np.int32), np.arange(3, dtype=np.int32), [Span(0, 3, 0, np.zeros(1, np.int32))]
    )
    model.forward(batch, cache, seen.append)
    assert seen == list(range(CONFIG.layers))


def test_tiles_compute_a_product():
    rng = np.random.default_rng(9)
    weight = rng.standard_normal((24, 40), dtype=np.float32)
    tiles = RowTiles.for_shapes([weight.shape])
    x = rng.standard_normal((tiles.padded(11), 24), dtype=np.float32)
    np.testing.assert_allclose(tiles.matmul(x, weight), x @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"layers": 0}, "layers"), ({"hidden": 36}, "hidden"), ({"kv_heads": 3}, "kv_heads")],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**sizes)
