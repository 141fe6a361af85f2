"""Pins: leases that keep cached prefixes on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.scheduler.guarded import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core
    from aiokv.scheduler.admission import Admission
    from aiokv.scheduler.effects import Done, Effects, Grant, Outbox
    from aiokv.scheduler.granting import Granting
    from aiokv.scheduler.guarded import TransitionErrors
    from aiokv.scheduler.releases import Releases


class Pins:
    """Begins and ends the pins of one cache.

    Args:
        core: state of the leases.
        outbox: effects of the current transition.
        errors: notes the exceptions of transitions.
        releases: releases the leases of pins that end.
        admission: requests that go before the prefixes.
        granting: adds blocks to leases.
        settle: ends a transition that may have freed blocks, and returns the effects.

    Attributes:
        num_until_used: number of pins that end when another lease hits all their blocks.
    """

    def __init__(
        self,
        core: Core,
        outbox: Outbox,
        errors: TransitionErrors,
        releases: Releases,
        admission: Admission,
        granting: Granting,
        settle: Callable[[], Effects],
    ) -> None:
        self.errors = errors
        self._core = core
        self._outbox = outbox
        self._releases = releases
        self._admission = admission
        self._granting = granting
        self._settle = settle
        self._until_used: dict[int, bool] = {}  # by lease id
        self.num_until_used = 0

    def __len__(self) -> int:
        return len(self._until_used)

    # --- transitions ----------------------------------------------------------------------------

    @guarded
    def prolong(self, lease_id: int, tokens: NDArray[np.int32]) -> tuple[Grant | None, Effects]:
        """Add the cached blocks of the next tokens to a granted lease that computes nothing.

        The blocks that the lease has already stay in place, whatever is evicted between two calls.

        Args:
            lease_id: the lease, whose blocks have all of its tokens so far. It has no items, and no
                quota counts its blocks. The model has no group besides attention.
            tokens: ``[N]`` int32; a part of a block at the end is ignored.

        Returns:
            The grant, with all onloads of the lease in flight; None when none of the tokens is
            cached, when there is no room for those that are, and when other requests go first.
        """
        grant = None
        if not self._admission.must_wait(lease_id, None):
            grant = self._granting.prolong(lease_id, tokens)
        return grant, self._outbox.pending

    @guarded
    def await_use(self, lease_id: int) -> Done:
        """Let the pin of this granted lease end when another lease has hit all its blocks."""
        self._core.await_use(lease_id)
        return None, self._outbox.pending

    @guarded
    def pin(self, lease_id: int, *, until_used: bool) -> tuple[tuple[int, str], Effects]:
        """Pin the blocks of a granted lease whose onloads have ended.

        Returns:
            (tokens, reason): the number of tokens on the device, and an empty string. If the pin
            has already ended and its lease was released, ``reason`` says why.
        """
        if not self._core.is_current(lease_id):
            self._releases.release(lease_id)
            return (0, "its blocks are no longer cached"), self._settle()
        tokens = self._core.cached_tokens(lease_id)
        if until_used and not self._core.awaits_use(lease_id):
            self._releases.release(lease_id)
            return (tokens, "a lease used it"), self._settle()
        self._until_used[lease_id] = until_used
        self.num_until_used += until_used
        return (tokens, ""), self._outbox.pending

    @guarded
    def unpin(self, lease_id: int, reason: str) -> Done:
        """End a pin and release its lease. Idempotent."""
        self._end(lease_id, reason)
        return None, self._settle()

    # --- parts of transitions -------------------------------------------------------------------

    def end_used(self) -> bool:
        """End the pins that another lease has used; return False when there is none."""
        used = [lease_id for lease_id in self._core.take_used() if self._until_used.get(lease_id)]
        for lease_id in used:
            self._end(lease_id, "a lease used it")
        return bool(used)

    def end_all(self, reason: str) -> None:
        """End all pins."""
        for lease_id in list(self._until_used):
            self._end(lease_id, reason)

    def end_lost(self, reason: str) -> None:
        """End the pins whose blocks cannot be hit any more."""
        for lease_id in list(self._until_used):
            if not self._core.is_current(lease_id):
                self._end(lease_id, reason)

    def _end(self, lease_id: int, reason: str) -> None:
        until_used = self._until_used.pop(lease_id, None)
        if until_used is None:
            return
        self.num_until_used -= until_used
        self._outbox.effects.unpinned.append((lease_id, reason))
        self._releases.release(lease_id)

    def check(self) -> list[str]:
        """Return a description of each pin whose blocks cannot be hit."""
        return [
            f"pin {lease_id:#x} holds blocks that no match can find"
            for lease_id in self._until_used
            if not self._core.is_current(lease_id)
        ]
