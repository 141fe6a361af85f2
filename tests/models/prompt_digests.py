"""Digests of the blocks of a prompt, as the index names prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models import digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.cached_blocks import Item, Key


def block_digests(
    block_tokens: int, context: str, tokens: Sequence[int], items: Sequence[Item] = ()
) -> list[bytes]:
    """Return the digests of the full blocks of a prompt."""
    root = digests.root_digest(block_tokens, context)
    return digests.block_digests(root, list(tokens), block_tokens, items)


def digest_of(block_tokens: int, key: Key) -> bytes:
    """Return the digest of the block with this key."""
    context, tokens, items = key
    return block_digests(block_tokens, context, tokens, items)[-1]
