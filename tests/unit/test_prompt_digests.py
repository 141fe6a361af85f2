"""Digests of prompts, by which peers compare them."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.errors import LeaseError
from aiokv.scheduler.scheduler import CacheScheduler
from tests.unit.peer_cache import Cache


def digest_of(context: str, tokens: np.ndarray, items: list[tuple[bytes, int, int]]) -> bytes:
    """Return the digest of a prompt, as digest.hpp defines it."""
    text = context.encode()
    data = b"aiokv prompt 1\0" + struct.pack("<I", len(text)) + text
    data += struct.pack("<Q", len(tokens)) + tokens.astype("<i4").tobytes()
    key = b"".join(
        struct.pack("<q", len(name)) + name + struct.pack("<qq", offset, length)
        for name, offset, length in items
        if offset < len(tokens)
    )
    return hashlib.sha256(data + (struct.pack("<I", len(key)) + key if key else b"")).digest()


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 37, 70])
def test_digest_of_a_prompt_is_the_same_for_any_block_tokens(block_tokens: int, num_tokens: int):
    items = [(b"\1\2", 2, 5), (b"cat", 9, 30), (b"dog", 39, 1), (b"dog", 60, 10)]
    tokens = np.arange(70, dtype=np.int32) - 7
    scheduler = CacheScheduler(CacheConfig(block_tokens=block_tokens, device_blocks=80))
    lease_id, _ = scheduler.match(tokens, "tenant", items=items)
    plain, _ = scheduler.match(tokens, "tenant")

    digest = scheduler.read.digest(lease_id, num_tokens)

    assert digest == digest_of("tenant", tokens[:num_tokens], items)
    assert scheduler.read.digest(plain, num_tokens) == digest_of("tenant", tokens[:num_tokens], [])


def test_digest_covers_appended_tokens_and_refuses_unknown_ones():
    cache = Cache()
    lease_id = cache.granted(6)
    assert cache.apply(cache.scheduler.extend([lease_id], 2))
    for num_tokens in (-1, 0, 7):
        with pytest.raises(LeaseError, match="must be between 1 and the 6 positions"):
            cache.read.digest(lease_id, num_tokens)
    cache.apply(cache.scheduler.append(lease_id, np.array([8], np.int32)))
    tokens = np.array([0, 1, 2, 3, 4, 5, 8], np.int32)
    assert cache.read.digest(lease_id, 7) == digest_of("", tokens, [])
