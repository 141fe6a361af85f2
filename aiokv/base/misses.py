"""Why blocks of a prompt were not hit."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

MissCause = Literal[
    "never_seen",
    "diverged",
    "evicted",
    "other_weights",
    "other_context",
    "other_items",
    "pending",
    "in_store",
    "unusable",
]
StoreMiss = Literal["declined", "late", "failed"]
# Blocks of a prompt up to the last one that a store has, and why they were not all fetched.
LeftInStore: TypeAlias = tuple[int, StoreMiss]
NOTHING_LEFT: LeftInStore = (0, "failed")
# See Core.missed.
MissTuple: TypeAlias = tuple[
    int, int, str, float | None, str, bool, int, str | None, tuple[int, int, int] | None
]


class MissedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of a prompt that a grant did not hit, for one cause.

    Fields that do not belong to the cause are None.

    Attributes:
        first_token: position of the first token of the blocks.
        num_tokens: tokens of the blocks.
        cause: ``"never_seen"``: no known prefix continues here. ``"diverged"``: known prefixes
            continue with other tokens. ``"evicted"``: the blocks were cached, and evicted since.
            ``"other_weights"``: the blocks were cached before the last ``updating_weights``.
            ``"other_context"``: the same tokens are or were cached for another salt or adapter.
            ``"other_items"``: the first of the blocks was cached with other multimodal items.
            ``"pending"``: another lease was computing the blocks. ``"in_store"``: a store has the
            blocks, and they were not fetched. ``"unusable"``: the blocks are cached, but no hit can
            end behind them, such as a host hit below ``CacheConfig.min_onload_tokens``.
        evicted_seconds: seconds from the eviction of the first block to the call.
        eviction_cause: ``"capacity"``, ``"request"`` (a call of ``evict``), ``"resize"``,
            ``"sleep"`` or ``"failure"`` (a copy failed).
        tier: tier that had the last copy, ``"device"`` or ``"host"``.
        lease_id: id of the lease that needed the room of the evicted blocks, or that computes the
            pending ones. None if no lease needed it.
        store: why the blocks were not fetched from the store. ``"declined"``: computing them was
            expected to be sooner, or host memory had no room. ``"late"``: the wait ended before
            they arrived. ``"failed"``: the store did not deliver them.
        salt: salt of the other context; None if that context is closed.
        adapter: adapter of the other context; None if that context is closed.
        diverged_at: first position whose token differs from those of all known prefixes. None if
            these prefixes have been forgotten since the grant.
        token: token of the prompt at ``diverged_at``.
        known_token: token of the longest known prefix at ``diverged_at``.
    """

    first_token: int
    num_tokens: int
    cause: MissCause
    evicted_seconds: float | None = None
    eviction_cause: str | None = None
    tier: Literal["device", "host"] | None = None
    lease_id: int | None = None
    store: StoreMiss | None = None
    salt: str | None = None
    adapter: str | None = None
    diverged_at: int | None = None
    token: int | None = None
    known_token: int | None = None

    def known_fields(self) -> dict[str, object]:
        """Return the fields that belong to the cause."""
        return {
            name: value for name, value in msgspec.to_builtins(self).items() if value is not None
        }
