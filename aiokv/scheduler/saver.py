"""Saver: begins the backups of the write policy, and the offloads that make room for a grant."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiokv.base.plan import OFFLOAD, Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import PlanMaker

T = TypeVar("T")


class Saver:
    """Begins the offloads of one cache.

    Attributes:
        has_host: True if there is a host tier.
        stopped: True when no offload may begin: the engine is closing, or a tier is asleep.
        saves_first: True when a grant waits until the blocks that it evicts are saved, while the
            host tier has room.
        saves_before_extend: True when ``extend`` fails rather than evict a block unsaved.
    """

    def __init__(self, config: CacheConfig, core: Core, plans: PlanMaker, outbox: Outbox) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self.has_host = config.host_blocks > 0
        self.saves_first = self.has_host and config.write_policy != "none"
        self.saves_before_extend = self.has_host and config.write_policy == "write_back"
        self.stopped = False
        self._is_wanted = False  # whether `collect` was requested and not yet called

    @property
    def drops_unsaved(self) -> bool:
        """True if ``try_after_saving`` drops blocks for which the host tier has no room."""
        return self.saves_first and not self.stopped

    @property
    def is_active(self) -> bool:
        """True if offloads may begin."""
        return self.has_host and not self.stopped

    def want(self) -> None:
        """Request a call of ``collect`` at the end of this pass of the loop."""
        if self.has_host and not self.stopped and not self._is_wanted:
            self._outbox.request_collect()
            self._is_wanted = True

    def collect(self) -> bool:
        """Begin the backups of the write policy; return False if there are none.

        One call begins a bounded number, so that a long prompt does not hold the loop. The next
        pass of the loop begins the rest.
        """
        self._is_wanted = False
        if not self.is_active:
            return False
        begun = self._plans.take_backups()
        for transfer_id in begun:
            self._submit(transfer_id)
        if begun and self._core.has_queued_backups():
            self.want()
        return bool(begun)

    def _submit(self, transfer_id: int) -> None:
        self._outbox.effects.submit.append(self._plans.copy(transfer_id, OFFLOAD, Priority.BACKUP))

    def make_clean(self, num_blocks: int) -> int:
        """Begin to save the blocks that must be saved before ``num_blocks`` can be evicted.

        Returns:
            The transfer that saves them; 0 when there are none, or all are already being saved.
        """
        if not self.is_active:
            return 0
        transfer_id = self._core.take_write_backs(num_blocks)
        if transfer_id:
            self._submit(transfer_id)
        return transfer_id

    def save_oldest(self, num_blocks: int) -> int:
        """Begin to save the blocks that ``num_blocks`` evictions would lose.

        Returns:
            The transfer, as ``make_clean``.
        """
        if not self.saves_first:
            return 0
        return self.make_clean(self._core.room()[0] + num_blocks)

    def try_after_saving(self, attempt: Callable[[], T], num_blocks: int) -> T | None:
        """Save, or drop unsaved, the blocks that keep ``num_blocks`` from being free; then try.

        The block at the front of the eviction queue is not always evicted first: a parent is
        evicted after its children. So while the host tier has no room, another attempt follows each
        attempt that evicted a block, and an attempt that evicted none is repeated with more blocks
        of the queue.

        Returns:
            The result of ``attempt``; None while blocks are being saved: try again when they are
            saved.
        """
        while True:
            if self.make_clean(num_blocks):
                return None
            evicted_blocks = self._core.statistics().attention.device.evicted_blocks
            result = attempt()
            if result or not self._core.must_look_further():
                return result
            if self._core.statistics().attention.device.evicted_blocks > evicted_blocks:
                continue
            if num_blocks >= self._core.device_blocks:
                return result
            num_blocks = min(2 * num_blocks, self._core.device_blocks)
