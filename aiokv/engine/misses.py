"""Records of missed blocks, from the tuples of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiokv.base.misses import MissCause, MissedRange, StoreMiss
from aiokv.engine.contexts import split_context

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.base.misses import MissTuple


def missed_ranges(tuples: Iterable[MissTuple], block_tokens: int) -> tuple[MissedRange, ...]:
    """Return a record per tuple of ``Core.missed``, in the same order."""
    ranges = []
    for first, end, cause, seconds, reason, on_host, lease_id, context, differs in tuples:
        salt, adapter = (None, None) if context is None else split_context(context)
        position, token, known_token = differs or (None, None, None)
        ranges.append(
            MissedRange(
                first_token=first * block_tokens,
                num_tokens=(end - first) * block_tokens,
                cause=cast("MissCause", cause),
                evicted_seconds=seconds,
                eviction_cause=reason if cause == "evicted" else None,
                tier=("host" if on_host else "device") if cause == "evicted" else None,
                lease_id=lease_id or None,
                store=cast("StoreMiss", reason) if cause == "in_store" else None,
                salt=salt,
                adapter=adapter,
                diverged_at=position,
                token=token,
                known_token=known_token,
            )
        )
    return tuple(ranges)
