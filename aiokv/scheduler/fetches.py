"""Fetches: begins the fetches from the stores to the host tier, and lets leases join them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.groups import ATTENTION
from aiokv.base.plan import FETCH
from aiokv.scheduler.groups import block_groups
from aiokv.scheduler.guarded import guarded

if TYPE_CHECKING:
    from aiokv._native import Core
    from aiokv.base.plan import Priority
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.effects import Effects, Outbox
    from aiokv.scheduler.guarded import TransitionErrors
    from aiokv.scheduler.plans import PlanMaker
    from aiokv.scheduler.store_saver import StoreSaver


class Fetches:
    """Fetches in flight, and their priorities."""

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        plans: PlanMaker,
        outbox: Outbox,
        errors: TransitionErrors,
        store_saver: StoreSaver,
    ) -> None:
        self.errors = errors
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._store_saver = store_saver
        self._groups = block_groups(config)
        self._priorities: dict[int, Priority] = {}  # priorities of the fetches in flight

    # --- transitions ----------------------------------------------------------------------------

    @guarded
    def begin(
        self,
        lease_id: int,
        num_blocks: int,
        priority: Priority,
        replaced: int = 0,
        group: str = ATTENTION,
    ) -> tuple[int, Effects]:
        """Begin to fetch blocks of a group for a lease.

        Of ``"attention"``, up to ``num_blocks`` blocks that follow the cached prefix of the lease.
        Of another group, the copies that a hit of ``num_blocks`` cached blocks lacks.

        A lease joins the fetch in flight that brings its first missing block or copy. What has
        arrived is cached on the host, even if the lease has ended. Host blocks, or copies of the
        group, are evicted to make room.

        Args:
            lease_id: a matched lease.
            num_blocks: of ``"attention"``, number of blocks of ``read.missing`` that a store has;
                else number of blocks of its prompt, all of which are cached.
            priority: priority of the transfer. If the lease joins a transfer of lower priority,
                that transfer gets this priority.
            replaced: of ``"attention"``, a late fetch, which this lease and later ones do not join:
                its blocks are fetched again. Whichever fetch brings a block first is used. 0 for
                none.
            group: ``"attention"``, or the name of a group from ``read.groups``.

        Returns:
            The transfer; 0 when there is nothing to fetch, no host room can be made, admission is
            paused, or a tier is asleep; of another group, also when the blocks are not cached.
        """
        if not self._store_saver.is_active:
            return 0, self._outbox.pending
        if group == ATTENTION:
            transfer_id = self._core.begin_fetch(lease_id, num_blocks, replaced)
        else:
            number = self._groups[group].number
            transfer_id = self._core.begin_auxiliary_fetch(lease_id, number, num_blocks)
        self._submit(transfer_id, priority)
        return transfer_id, self._outbox.pending

    @guarded
    def note_lacking(self, lease_id: int) -> tuple[None, Effects]:
        """Note that no store has the first block of ``read.missing``, for KV events."""
        self._core.note_lacking(lease_id)
        return None, self._outbox.pending

    # --- parts of transitions -------------------------------------------------------------------

    def _submit(self, transfer_id: int, priority: Priority) -> None:
        known = self._priorities.get(transfer_id)
        if not transfer_id or (known is not None and known <= priority):
            return
        effects = self._outbox.effects
        if known is None:
            effects.submit.append(self._plans.store(transfer_id, FETCH, priority))
        else:
            effects.urge.append((transfer_id, priority))
        self._priorities[transfer_id] = priority

    def ended(self, transfer_id: int) -> None:
        """Note that a transfer has ended. Idempotent."""
        self._priorities.pop(transfer_id, None)

    def check(self) -> list[str]:
        """Return a description of each fetch that has ended and still has a priority."""
        return [
            f"fetches: transfer {transfer_id} has ended, and leases may join it"
            for transfer_id in self._priorities
            if not self._core.is_in_flight(transfer_id)
        ]
