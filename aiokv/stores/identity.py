"""StoreIdentity: the part of a fingerprint that does not come from the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.base.groups import ATTENTION
from aiokv.config.cache_config import WindowGroup  # noqa: TC001  (msgspec needs it)
from aiokv.stores.fingerprint import fingerprint

if TYPE_CHECKING:
    from aiokv.layout.regions import Regions


class StoreIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of the blocks of one rank; blocks of different identities never share a key.

    Attributes:
        model: ``CacheConfig.model``.
        weights_version: version of the weights that compute the blocks now.
        block_tokens: ``CacheConfig.block_tokens``.
        windows: ``CacheConfig.windows``.
        rank: number of the rank.
        num_ranks: number of ranks.
    """

    model: str
    weights_version: str
    block_tokens: int
    windows: dict[str, WindowGroup] = {}
    rank: int = 0
    num_ranks: int = 1

    def fingerprint(self, regions: Regions, group: str = ATTENTION) -> bytes:
        """Return the fingerprint of the objects of a group of these tensors, 32 bytes."""
        return fingerprint(
            regions,
            model=self.model,
            weights_version=self.weights_version,
            block_tokens=self.block_tokens,
            rank=self.rank,
            num_ranks=self.num_ranks,
            windows=self.windows,
            group=group,
        )
