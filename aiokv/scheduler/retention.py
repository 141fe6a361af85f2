"""Retention: which cached blocks the application prefers to keep, or to lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.scheduler.guarded import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core
    from aiokv.scheduler.effects import Done, Effects, Outbox
    from aiokv.scheduler.guarded import TransitionErrors


class Retention:
    """Transitions that change the order of eviction of cached prompts.

    Args:
        core: state of the blocks.
        outbox: effects of the current transition.
        errors: notes the exceptions of transitions.
        settle: ends a transition that may have freed blocks, and returns the effects.
    """

    def __init__(
        self, core: Core, outbox: Outbox, errors: TransitionErrors, settle: Callable[[], Effects]
    ) -> None:
        self.errors = errors
        self._core = core
        self._outbox = outbox
        self._settle = settle

    @guarded
    def retain(
        self,
        tokens: NDArray[np.int32],
        context: str,
        items: Sequence[tuple[bytes, int, int]],
        priority: int,
        end: int,
    ) -> tuple[int, Effects]:
        """Evict the cached blocks of a prompt after others, until ``end_at(end)`` is called.

        Returns:
            The number of these blocks.
        """
        return self._core.retain(tokens, context, items, priority, end), self._outbox.pending

    @guarded
    def end_at(self, now: int) -> Done:
        """End the retentions whose end is ``now`` or before."""
        self._core.end_retentions(now)
        return None, self._outbox.pending

    @guarded
    def demote(
        self, tokens: NDArray[np.int32], context: str, items: Sequence[tuple[bytes, int, int]]
    ) -> tuple[int, Effects]:
        """Evict the last blocks of a prompt, which nothing else shares, before others.

        Returns:
            The number of these blocks.
        """
        return self._core.demote(tokens, context, items), self._outbox.pending

    @guarded
    def forget(
        self, tokens: NDArray[np.int32], context: str, items: Sequence[tuple[bytes, int, int]]
    ) -> tuple[int, Effects]:
        """Drop the last blocks of a prompt, which nothing else shares.

        Returns:
            The number of these blocks.
        """
        return self._core.forget(tokens, context, items), self._settle()
