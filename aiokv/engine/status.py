"""Status: the statistics and the health of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.base.statistics import Statistics
from aiokv.base.types import Health
from aiokv.stores.guard_statistics import unavailable_stores

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import PeerTickets
    from aiokv.engine.sleeping import Sleep


class Status:
    """Reads the statistics and the health of an engine from its parts."""

    def __init__(self, parts: Parts, sleep: Sleep, peer_tickets: PeerTickets) -> None:
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._requests = parts.requests
        self._worker = parts.worker
        self._poller = parts.poller
        self._layer_waits = parts.transfers.layer_waits
        self._sleep = sleep
        self._peer_tickets = peer_tickets

    def statistics(self) -> Statistics:
        """See ``CacheEngine.statistics``. Any thread."""
        state = self._worker.inspect()
        return Statistics(
            **msgspec.structs.asdict(self._read.statistics()),
            requests=self._requests.statistics(),
            worker=self._worker.statistics(),
            layer_waits=self._layer_waits.statistics(),
            poller=self._poller.statistics(),
            ranks=state.ranks,
            stores=state.stores,
            peers=self._peer_tickets.statistics(state.peers),
        )

    def health(self) -> Health:
        """See ``CacheEngine.health``."""
        self._lifetime.check_thread()
        failure, state = self._lifetime.failure, self._worker.inspect()
        return Health(
            phase=self._lifetime.phase_name,
            failure="" if failure is None else str(failure) or type(failure).__name__,
            asleep=sorted(self._sleep.asleep),
            is_paused=self._read.is_paused,
            unpinned_bytes=state.unpinned_bytes,
            unavailable_stores=unavailable_stores(state.stores),
        )
