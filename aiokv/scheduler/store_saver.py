"""StoreSaver: begins the saves of host blocks to the stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.plan import SAVE, Priority
from aiokv.scheduler.guarded import guarded

if TYPE_CHECKING:
    from aiokv._native import Core
    from aiokv.scheduler.effects import Effects, Outbox
    from aiokv.scheduler.gate import Gate
    from aiokv.scheduler.guarded import TransitionErrors
    from aiokv.scheduler.plans import PlanMaker


class StoreSaver:
    """Begins the saves of one cache; nothing waits for them.

    No save begins while the gate is closed: what closes it may wait for the transfers in flight.
    An engine that closes saves its blocks also while it is paused.

    Attributes:
        stopped: True when no save may begin: the engine has saved its blocks, or a tier is asleep.
        is_closing: the engine closes.
    """

    def __init__(
        self,
        core: Core,
        gate: Gate,
        plans: PlanMaker,
        outbox: Outbox,
        errors: TransitionErrors,
        has_stores: bool,
    ) -> None:
        self.errors = errors
        self._has_stores = has_stores
        self._core = core
        self._gate = gate
        self._plans = plans
        self._outbox = outbox
        self.stopped = False
        self.is_closing = False

    @property
    def is_active(self) -> bool:
        """True if saves and fetches may begin."""
        is_shut = self._gate.held if self.is_closing else self._gate.closed
        return self._has_stores and not self.stopped and not is_shut

    def want(self) -> None:
        """Request a call of ``collect`` if blocks may have to be saved."""
        if self._core.wants_saves() and self.is_active:
            self._outbox.request_collect()

    @guarded
    def collect(self, *, by_holder: bool = False) -> tuple[bool, Effects]:
        """Begin one save of the blocks that are due; return False if there are none.

        A transition of the scheduler. ``Effects.collect`` requests it, too.

        Args:
            by_holder: True if the caller has one hold of the gate, which then forbids no save. With
                another hold or a pause, the weights may be changing.
        """
        if self.is_active or (by_holder and not self.stopped and self._gate.has_one_hold):
            transfer_id = self._core.take_saves()
            if transfer_id:
                plan = self._plans.store(transfer_id, SAVE, Priority.BACKUP)
                self._outbox.effects.submit.append(plan)
                self.want()
                return True, self._outbox.pending
        return False, self._outbox.pending
