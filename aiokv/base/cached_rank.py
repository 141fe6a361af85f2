"""Rank of a waiting request by the share of its prompt that is cached."""

from __future__ import annotations

from typing import Final

_SHARES: Final = 10  # steps of a cached share
_SIZES: Final = 32  # powers of two of tokens to compute
_RANKS: Final = (_SHARES + 1) * _SIZES + 1  # ranks per priority; the first one is for overdue


def cached_rank(
    priority: int, cached_tokens: int, prompt_tokens: int, *, is_overdue: bool = False
) -> int:
    """Return the rank of a waiting request: requests with lower ranks go first.

    Within a priority, overdue requests go first; then the requests with the largest cached share,
    in tenths; among these the requests with the fewest tokens to compute, in powers of two.
    """
    if is_overdue:
        return priority * _RANKS
    share = cached_tokens * _SHARES // max(prompt_tokens, 1)
    size = (prompt_tokens - cached_tokens).bit_length()  # at most 31: positions are int32
    return priority * _RANKS + 1 + (_SHARES - share) * _SIZES + size
