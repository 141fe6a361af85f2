"""Granting: gives a lease its blocks, and begins the onloads of its cached host blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.base.plan import ONLOAD, Priority
from aiokv.scheduler.effects import Grant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import PlanMaker
    from aiokv.scheduler.saver import Saver

_NO_ROOM, _READY, _LOADING = range(3)  # returned by Core.allocate


class Granting:
    """Grants of leases, and the onloads in flight that leases wait for.

    Attributes:
        onloads: onloads in flight, and the priority of each.
        lost: leases whose blocks were lost with a rank, and the reason; removed by the next grant.
    """

    def __init__(
        self, config: CacheConfig, core: Core, plans: PlanMaker, saver: Saver, outbox: Outbox
    ) -> None:
        self._core = core
        self._plans = plans
        self._saver = saver
        self._outbox = outbox
        self._block_tokens = config.block_tokens
        self._max_leases = config.max_running_leases
        self.onloads: dict[int, int] = {}
        self.lost: dict[int, str] = {}

    def is_full(self, lease_id: int) -> bool:
        """Return True if ``CacheConfig.max_running_leases`` leases compute, and this one would."""
        return self.is_at_limit and self._core.computes(lease_id)

    @property
    def is_at_limit(self) -> bool:
        """True if ``CacheConfig.max_running_leases`` allows no further lease."""
        return self._max_leases is not None and self._core.computing_leases >= self._max_leases

    def attempt(
        self,
        lease_id: int,
        num_tokens: int,
        onload_priority: Priority = Priority.DEMAND,
        reserve_blocks: int | None = None,
    ) -> Grant | None:
        """Grant the lease if there is room; return None otherwise.

        Args:
            lease_id: a matched or preempted lease.
            num_tokens: absolute number of positions.
            onload_priority: priority of the onload that the grant begins.
            reserve_blocks: blocks that the grant leaves to ``extend``; None for the configured
                number.

        Raises:
            LeaseError: the lease is granted already, or ``num_tokens`` is out of range.
            RequestTooLarge: the device can never hold ``num_tokens`` positions.
        """
        core = self._core
        if self._max_leases is not None and self.is_full(lease_id):
            core.check_request(lease_id, num_tokens, reserve_blocks)
            return None
        granted: int | None = core.allocate(lease_id, num_tokens, reserve_blocks)
        if granted == _NO_ROOM and self._saver.saves_first:
            granted = self._saver.try_after_saving(
                lambda: core.allocate(lease_id, num_tokens, reserve_blocks),
                -(-num_tokens // self._block_tokens),
            )
        if granted and self.lost:
            self.lost.pop(lease_id, None)
        if granted == _READY and not self._saver.has_host:
            return READY
        return self._granted(lease_id, granted, onload_priority)

    def prolong(self, lease_id: int, tokens: NDArray[np.int32]) -> Grant | None:
        """Add the cached blocks of the next tokens to a lease; see ``Pins.prolong``."""
        core = self._core
        granted: int | None = core.prolong(lease_id, tokens)
        if granted == _NO_ROOM and self._saver.saves_first:
            granted = self._saver.try_after_saving(
                lambda: core.prolong(lease_id, tokens), len(tokens) // self._block_tokens
            )
        return self._granted(lease_id, granted, Priority.PREFETCH)

    def _granted(self, lease_id: int, granted: int | None, priority: Priority) -> Grant | None:
        if not granted:
            return None
        if self._saver.has_host and self._core.wants_backups():
            self._saver.want()
        return READY if granted == _READY else self.loading(lease_id, priority)

    def loading(self, lease_id: int, priority: int = Priority.DEMAND) -> Grant:
        """Submit the onload that a grant has begun.

        An onload that the grant has joined, such as a prefetch, gets at least this priority.
        """
        joined = tuple(self._core.onloads(lease_id))
        for transfer_id in joined:
            known = self.onloads.get(transfer_id)
            if known is None:
                self._outbox.effects.submit.append(self._plans.copy(transfer_id, ONLOAD, priority))
                self.onloads[transfer_id] = priority
            elif priority < known:
                self._outbox.effects.urge.append((transfer_id, priority))
                self.onloads[transfer_id] = priority
        return Grant(lease_id, joined)

    def ended(self, transfer_id: int) -> None:
        """Note that a transfer has ended. Idempotent."""
        self.onloads.pop(transfer_id, None)

    def cancel_abandoned(self) -> None:
        """Cancel onloads that no lease needs any more."""
        if abandoned := self._core.take_abandoned():
            self._outbox.effects.cancel.extend(abandoned)


READY: Final = Grant(0, ())
"""Grant of all leases whose cached blocks are on the device."""
