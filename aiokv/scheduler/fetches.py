"""Fetches: begins the fetches from the stores to the host tier, and lets leases join them."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.plan import Priority
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import Plans


class Fetches:
    """Fetches in flight, and their priorities."""

    def __init__(self, core: Core, plans: Plans, outbox: Outbox) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._begun: deque[int] = deque()  # begun in the core, not submitted yet
        self._priorities: dict[int, Priority] = {}  # of the fetches in flight

    def begin(self, lease_id: int, num_blocks: int, priority: Priority) -> int:
        """Begin to fetch the next missing blocks of a lease, or join the fetch that brings them.

        A fetch that the lease joins gets at least this priority.

        Returns:
            The transfer; 0 when there is nothing to fetch, or no host room can be made.
        """
        return self._begin(self._core.begin_fetch, (lease_id, num_blocks), priority)

    def begin_auxiliary(
        self, lease_id: int, num_blocks: int, group: int, priority: Priority
    ) -> int:
        """Begin to fetch what a hit of the first blocks lacks in a group, or join such a fetch.

        Returns:
            As ``begin``.
        """
        return self._begin(
            self._core.begin_auxiliary_fetch, (lease_id, group, num_blocks), priority
        )

    def _begin(
        self, begin: Callable[..., int], arguments: tuple[int, ...], priority: Priority
    ) -> int:
        # `extend` calls the core without Python code in between, where a signal handler could
        # raise and lose the id of a fetch that has begun.
        self._begun.extend(starmap(begin, (arguments,)))
        transfer_id = self._begun[-1]
        while self._begun:
            self._submit(self._begun[0], priority)
            self._begun.popleft()
        return transfer_id

    def _submit(self, transfer_id: int, priority: Priority) -> None:
        known = self._priorities.get(transfer_id)
        if not transfer_id or (known is not None and known <= priority):
            return
        effects = self._outbox.effects
        if known is None:
            effects.submit.append(self._plans.fetch(transfer_id, priority))
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
