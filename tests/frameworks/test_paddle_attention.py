"""Attention in Paddle: a row depends only on its own query and its visible context."""

import numpy as np
import pytest

# odd sizes: the rows of a batch begin at different places of a cache line
HEADS, KV_HEADS, HEAD_DIM, TOKENS, ROWS, LATENT = 6, 2, 10, 128, 12, 30
FIRST_POSITION = 100


def random(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def hidden_tokens(first, rows):
    positions = np.arange(first, first + rows)
    return np.arange(TOKENS) > positions[:, np.newaxis]


@pytest.fixture
def grouped(paddle):
    """Grouped-query attention over numpy arrays ``[tokens, heads, dim]``."""
    from tests.models.demo.on_paddle.grouped_attention import attend

    def run(queries, cached, hidden):
        keys, values = cached[:, :KV_HEADS], cached[:, KV_HEADS:]
        arrays = (queries, np.ascontiguousarray(keys), np.ascontiguousarray(values), hidden)
        return attend(*map(paddle.to_tensor, arrays)).numpy()

    rng = np.random.default_rng(1)
    return run, random(rng, ROWS, HEADS, HEAD_DIM), random(rng, TOKENS, 2 * KV_HEADS, HEAD_DIM)


@pytest.fixture
def latent(paddle):
    """Latent attention over a numpy array ``[tokens, cached_dim]``."""
    from tests.models.demo.on_paddle.latent_attention import attend

    def run(queries, cached, hidden):
        return attend(*map(paddle.to_tensor, (queries, cached, hidden)), values=16).numpy()

    rng = np.random.default_rng(2)
    return run, random(rng, ROWS, HEADS, LATENT), random(rng, TOKENS, LATENT)


@pytest.fixture(params=["grouped", "latent"])
def attention(request):
    return request.getfixturevalue(request.param)


def test_huge_values_at_masked_positions_change_no_bit(attention):
    run, queries, cached = attention
    hidden = hidden_tokens(FIRST_POSITION, ROWS)
    expected = run(queries, cached, hidden)
    cached[FIRST_POSITION + ROWS :] = 1e30
    np.testing.assert_array_equal(run(queries, cached, hidden), expected)


def test_single_row_equals_the_same_row_in_a_batch(attention):
    run, queries, cached = attention
    hidden = hidden_tokens(FIRST_POSITION, ROWS)
    together = run(queries, cached, hidden)
    for row in range(ROWS):
        alone = run(queries[row : row + 1], cached, hidden[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])
