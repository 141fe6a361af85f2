"""Brute-force oracle of missed blocks: remembers each block that a core ever held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv._native import Core

    Prefix = tuple[int, ...]
    Key = tuple[str, Prefix]
    Miss = tuple[str, object]  # cause and its fact

OTHER_WEIGHTS = -1  # instead of the lease that evicted a block


class MissOracle:
    """Compares the blocks of the core before and after each call, and keeps what it has lost."""

    def __init__(self, core: Core, block_tokens: int) -> None:
        self._core = core
        self._block_tokens = block_tokens
        self._cached: set[Key] = set()
        self._lost: dict[Key, int] = {}  # lease that evicted the block last
        self._first_tokens: dict[str, set[int]] = {}
        self._promised: dict[int, tuple[str, Prefix, int]] = {}

    def note(self, demand: int) -> None:
        """Note which blocks a call has added and evicted for the lease ``demand``."""
        now = {
            (context, tuple(np.frombuffer(prefix, np.int32).tolist()))
            for context, prefix, *_ in self._core.blocks()
        }
        for key in self._cached - now:
            self._lost[key] = demand
        self._cached = now

    def change_weights(self) -> None:
        """Note that a call has dropped all blocks, because the weights have changed."""
        self._lost = dict.fromkeys([*self._cached, *self._lost], OTHER_WEIGHTS)
        self._cached = set()
        self._promised = {}

    def promise(self, lease: int, context: str, tokens: Sequence[int], cached: int) -> None:
        """Note that a lease computes the rest of its prompt behind ``cached`` blocks."""
        self._promised[lease] = (context, tuple(tokens), cached)

    def end(self, lease: int) -> None:
        """Note that a lease computes nothing more."""
        self._promised.pop(lease, None)

    def _prefix(self, tokens: Sequence[int], blocks: int) -> Prefix:
        return tuple(tokens[: blocks * self._block_tokens])

    def _known(self, context: str) -> set[Prefix]:
        return {prefix for known, prefix in self._cached | set(self._lost) if known == context}

    def _longest(self, context: str, tokens: Sequence[int], limit: int) -> int:
        known = self._known(context)
        return max((n for n in range(1, limit + 1) if self._prefix(tokens, n) in known), default=0)

    def causes(self, context: str, tokens: Sequence[int], cached: int) -> list[Miss]:
        """Return cause and fact of each block from ``cached`` to the hit limit."""
        limit = (len(tokens) - 1) // self._block_tokens
        pending, owned = 0, set()
        for lease, (other, prompt, frontier) in self._promised.items():
            most = min(len(prompt) // self._block_tokens, limit)
            same = [
                n
                for n in range(frontier, most + 1)
                if other == context and self._prefix(prompt, n) == self._prefix(tokens, n)
            ]
            if frontier == cached and same and max(same) - cached >= max(pending, 1):
                owned = owned if max(same) - cached == pending else set()
                pending = max(same) - cached
                owned.add(lease)
        known = max(self._longest(context, tokens, limit), cached)
        contexts = {other for other, _ in self._cached | set(self._lost)} - {context}
        elsewhere = max((self._longest(other, tokens, limit) for other in contexts), default=0)
        causes: list[Miss] = [("pending", owned)] * pending
        for block in range(cached + pending, limit):
            if block < known:
                demand = self._lost[context, self._prefix(tokens, block + 1)]
                is_other = demand == OTHER_WEIGHTS
                causes.append(("other_weights", None) if is_other else ("evicted", demand))
            elif block < elsewhere:
                causes.append(("other_context", None))
            else:
                rest = self._divergence(context, tokens, known) if block == known else None
                if causes and causes[-1][0] in ("diverged", "never_seen"):
                    rest = causes[-1][1]
                causes.append(("diverged" if rest else "never_seen", rest))
        return causes

    def _divergence(self, context: str, tokens: Sequence[int], known: int) -> object:
        """Return the longest common prefix, in tokens, with the blocks known behind ``known``."""
        start, end = known * self._block_tokens, (known + 1) * self._block_tokens
        common = [
            next(i for i in range(start, end) if prefix[i] != tokens[i])
            for prefix in self._known(context)
            if len(prefix) == end and prefix[:start] == tuple(tokens[:start])
        ]
        longest = max(common, default=0)
        return longest or None
