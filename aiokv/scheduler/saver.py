"""Saver: offloads that the write policy wants, and those that make room for a grant."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from aiokv.plan import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.config import CacheConfig
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import Plans

T = TypeVar("T")


class Saver:
    """Begins the offloads of one cache.

    Attributes:
        stopped: no offload begins: the engine is closing, or a tier is asleep.
        saves_first: no block is evicted that was not saved, as far as the host tier has room.
    """

    def __init__(self, config: CacheConfig, core: Core, plans: Plans, outbox: Outbox) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._has_host = config.host_blocks > 0
        self._begun: deque[int] = deque()  # in the core, without a plan so far
        self.saves_first = self._has_host and config.write_policy == "write_back"
        self.stopped = False

    @property
    def is_active(self) -> bool:
        """True when offloads may begin."""
        return self._has_host and not self.stopped

    def want(self) -> None:
        """Ask for ``collect`` at the end of this pass of the loop."""
        if self._has_host and not self.stopped:
            self._outbox.effects.collect = True

    def collect(self) -> bool:
        """Begin what the write policy wants saved now; return False when that is nothing."""
        if not self.is_active:
            return False
        self._plans.take_backups(self._begun)
        submitted = False
        while self._begun:
            if transfer_id := self._begun[0]:
                self._submit(transfer_id)
                submitted = True
            self._begun.popleft()
        return submitted

    def _submit(self, transfer_id: int) -> None:
        self._outbox.effects.submit.append(self._plans.offload(transfer_id, Priority.BACKUP))

    def make_clean(self, num_blocks: int) -> int:
        """Save what must be saved before ``num_blocks`` can be evicted.

        Returns:
            The transfer that does; 0 when there is nothing to save, or all is being saved already.
        """
        if not self.is_active:
            return 0
        transfer_id = self._core.take_write_backs(num_blocks)
        if transfer_id:
            self._submit(transfer_id)
        return transfer_id

    def save_oldest(self, num_blocks: int) -> int:
        """Save what ``num_blocks`` evictions would lose; return as ``make_clean``."""
        if not self.saves_first:
            return 0
        return self.make_clean(self._core.room()[0] + num_blocks)

    def try_after_saving(self, attempt: Callable[[], T], num_blocks: int) -> T | None:
        """Save, or drop unsaved, the blocks that keep ``num_blocks`` from being free; then try.

        The front of the eviction queue is not always evicted first: a parent waits for its
        children, and comes to the front when they have been evicted. So where the host has no room,
        another try follows each try that evicted a block, and a try that evicted none is repeated
        further along the queue.

        Returns:
            What ``attempt`` returns; None while blocks are being saved: try again when they are
            saved.
        """
        while True:
            if self.make_clean(num_blocks):
                return None
            evicted_blocks = self._core.statistics().evicted_device_blocks
            result = attempt()
            if result or not self._core.must_look_further():
                return result
            if self._core.statistics().evicted_device_blocks > evicted_blocks:
                continue
            if num_blocks >= self._core.device_blocks:
                return result
            num_blocks = min(2 * num_blocks, self._core.device_blocks)
