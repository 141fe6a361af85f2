"""StoreIdentity: the part of a fingerprint that the tensors do not tell."""

from __future__ import annotations

import msgspec


class StoreIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of the blocks of one rank; blocks of different identities never share a key.

    Attributes:
        model: ``CacheConfig.model``.
        weights_version: version of the weights that compute the blocks now.
        block_tokens: ``CacheConfig.block_tokens``.
        rank: number of the rank.
        num_ranks: number of ranks.
    """

    model: str
    weights_version: str
    block_tokens: int
    rank: int = 0
    num_ranks: int = 1
