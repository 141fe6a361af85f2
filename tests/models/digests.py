"""Digests of blocks by ``hashlib``, from the documented encoding."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.cached_blocks import Item, Key


def root_digest(block_tokens: int, context: str) -> bytes:
    """Return the digest of the empty prefix of a context."""
    text = context.encode()
    sizes = struct.pack("<II", block_tokens, len(text))
    return hashlib.sha256(b"aiokv root 1\0" + sizes + text).digest()


def block_digests(
    block_tokens: int, context: str, tokens: Sequence[int], items: Sequence[Item] = ()
) -> list[bytes]:
    """Return the digests of the full blocks of a prompt."""
    digest = root_digest(block_tokens, context)
    found = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        end = begin + block_tokens
        encoded = digest + np.asarray(tokens[begin:end], "<i4").tobytes()
        touching = [item for item in items if item[1] < end and item[1] + item[2] > begin]
        if touching:
            key = b"".join(
                struct.pack("<q", len(content)) + content + struct.pack("<qq", offset - begin, size)
                for content, offset, size in touching
            )
            encoded += struct.pack("<I", len(key)) + key
        digest = hashlib.sha256(encoded).digest()
        found.append(digest)
    return found


def digest_of(block_tokens: int, key: Key) -> bytes:
    """Return the digest of the block with this key."""
    context, tokens, items = key
    return block_digests(block_tokens, context, tokens, items)[-1]
