"""Conversion of token ids, and value types."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv import Hit
from aiokv.base.types import as_tokens
from aiokv.errors import UsageError


def test_an_int32_array_is_not_copied():
    tokens = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_tokens(tokens), tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([0, 1, 0, 2, 0, 3], dtype=np.int32)[1::2],
    ],
)
def test_integer_sequences_become_contiguous_int32(tokens):
    array = as_tokens(tokens)
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2**31], "2147483648 at position 1"),
        (np.array([-(2**31) - 1]), "at position 0"),
        ([[1, 2], [3, 4]], "one dimension"),
        ([1.5, 2.0], "integers"),
        ([[1], [2, 3]], "flat"),
        (["a"], "integers"),
    ],
)
def test_refuses_values_that_are_not_token_ids(tokens, message):
    with pytest.raises(UsageError, match=message):
        as_tokens(tokens)


def test_hit_total():
    assert Hit(device_tokens=32, host_tokens=16).total == 48
