"""Speed of digests, keys and the checksum of trailers, on one core.

* ``digest``: nanoseconds per block of 16 tokens, of the digest and of the key, with the fastest
  implementation on this processor (``sha_instructions`` is 1 if it has them) and the portable one.
* ``hashlib``: the same digests from Python's ``hashlib``, one call per block.
* ``verify``: GB/s of ``verify_blocks`` over blocks in the cache (one block, again and again) and in
  memory (256 MiB), and beside it a plain sum over the same memory, which any check has to read.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import _native
from aiokv.layout.host_block import STORE_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = 16
BLOCK_BYTES = (128 << 10, 1 << 20, 4 << 20)


def run(quick: bool) -> dict[str, Any]:
    blocks = 10_000 if quick else 100_000
    arena_bytes = (32 if quick else 256) << 20
    return {
        "sha_instructions": int(_native.sha256_implementation() != "portable"),
        "digest": {
            name: _digest(blocks, portable)
            for name, portable in (("fastest", False), ("portable", True))
        },
        "hashlib": {"block_ns": _hashlib_ns(blocks // 10)},
        "verify": {f"{size >> 10}_KiB": _verify(size, arena_bytes) for size in BLOCK_BYTES},
    }


def _digest(blocks: int, portable: bool) -> dict[str, float]:
    root = _native.root_digest(BLOCK_TOKENS, "")
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32)
    digests = _native.block_digests(root, tokens, BLOCK_TOKENS)
    digest_seconds = _best_seconds(
        lambda: _native.block_digests(root, tokens, BLOCK_TOKENS, portable=portable)
    )
    key_seconds = _best_seconds(lambda: _native.derive_keys(root, digests, portable=portable))
    return {"block_ns": digest_seconds * 1e9 / blocks, "key_ns": key_seconds * 1e9 / blocks}


def _hashlib_ns(blocks: int) -> float:
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32).tobytes()
    size = 4 * BLOCK_TOKENS

    def digests() -> None:
        parent = bytes(32)
        for begin in range(0, len(tokens), size):
            parent = hashlib.sha256(parent + tokens[begin : begin + size]).digest()

    return _best_seconds(digests) * 1e9 / blocks


def _verify(payload_bytes: int, arena_bytes: int) -> dict[str, float]:
    num_blocks = max(arena_bytes // payload_bytes, 1)
    pitch_bytes = payload_bytes + STORE_ALIGNMENT_BYTES
    memory = np.ones((num_blocks, pitch_bytes), np.uint8)
    ids = np.arange(num_blocks, dtype=np.int32)
    keys = _native.derive_keys(bytes(32), bytes(32)) * num_blocks

    def check(blocks: int) -> None:
        results = _native.verify_blocks(
            memory.ctypes.data,
            pitch_bytes,
            payload_bytes,
            ids[:blocks],
            keys[: 32 * blocks],
            num_blocks=num_blocks,
        )
        assert not results.any()

    _native.seal_blocks(
        memory.ctypes.data, pitch_bytes, payload_bytes, ids, keys, num_blocks=num_blocks
    )
    words = memory.reshape(-1).view(np.uint64)
    return {
        "cache_gbps": payload_bytes / _best_seconds(lambda: check(1), repeats=50) / 1e9,
        "memory_gbps": num_blocks * payload_bytes / _best_seconds(lambda: check(num_blocks)) / 1e9,
        "plain_sum_gbps": memory.nbytes / _best_seconds(words.sum) / 1e9,
    }


def _best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of several runs: what the processor needs, without interruptions."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
