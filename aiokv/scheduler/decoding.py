"""Decoding: a step of a batch, with the follow-ups of what it names, commits and extends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core
    from aiokv.base.types import StepTokens
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.clock import StepClock
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.quota import SaltQuota
    from aiokv.scheduler.saver import Saver


class Decoding:
    """Advances the leases of a batch; see ``CacheScheduler.advance_batch``.

    Args:
        config: sizes and rules of the cache.
        core: state of the leases.
        outbox: effects of the current transition.
        clock: numbers of the steps.
        saver: saves blocks before they are evicted, and those that are computed.
        quota: blocks per salt.
        pending: leases that wait for blocks of other leases.
    """

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        outbox: Outbox,
        clock: StepClock,
        saver: Saver,
        quota: SaltQuota,
        pending: PendingBlocks,
    ) -> None:
        self._core = core
        self._outbox = outbox
        self._clock = clock
        self._saver = saver
        self._quota = quota
        self._pending = pending
        self._block_tokens = config.block_tokens
        # With external blocks, checksums are recorded when saves are queued.
        self._records_checksums = config.verify == "checksum" and not config.external_device

    def advance(
        self, lease_ids: NDArray[np.int64], step_tokens: StepTokens, draft_tokens: int
    ) -> list[int]:
        """Advance the leases for which there is room; return the rows of the others."""
        rows = self._attempt(lease_ids, step_tokens, draft_tokens)
        if rows and self._saver.saves_before_extend:

            def advance_rest() -> bool:
                nonlocal rows
                rest = step_tokens.of_rows(rows)
                refused = self._attempt(lease_ids[rows], rest, draft_tokens)
                rows = [rows[row] for row in refused]
                return not rows

            blocks_per_lease = -(-(step_tokens.width + draft_tokens) // self._block_tokens)
            self._saver.try_after_saving(advance_rest, len(rows) * blocks_per_lease)
        if self._core.wants_backups():
            self._saver.want()
        return rows

    def _attempt(
        self, lease_ids: NDArray[np.int64], step_tokens: StepTokens, draft_tokens: int
    ) -> list[int]:
        core = self._core
        published, refused, grown, computed = core.advance(
            lease_ids, *step_tokens, draft_tokens, self._clock.open
        )
        if self._records_checksums and len(computed):
            self._outbox.effects.computed.append(computed)
        if published and not self._clock.tracked:
            self._saver.want()
        if self._quota.limit_blocks is not None:
            for lease_id in lease_ids[grown].tolist():
                held = -(-core.num_tokens(lease_id) // self._block_tokens)
                self._quota.recount(lease_id, held)
        if self._pending.waiters:
            for lease_id in lease_ids.tolist():
                self._pending.advanced(lease_id)
        return refused
