"""CallGuard: calls of the peers of a worker that an interrupt must not lose."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from aiokv.worker.interrupts import call_surely

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.peers.wire import Connection
    from aiokv.worker.poller import EventPoller

T = TypeVar("T")


class CallGuard:
    """Calls actions, and ends all connections when an interrupt ends one of the actions.

    Args:
        connections: returns all connections of the worker.
    """

    def __init__(self, connections: Callable[[], Iterable[Connection]]) -> None:
        self._connections = connections
        self._poller: EventPoller | None = None

    def open(self, poller: EventPoller) -> None:
        """Let ``poller`` call what an interrupt has ended. Before, ``surely`` does nothing."""
        self._poller = poller

    def surely(self, action: Callable[[], object]) -> None:
        """Call ``action()`` now, and again after an interrupt. It is idempotent."""
        if self._poller is not None:
            self._poller.surely(partial(self.guarded, action))

    def guarded(self, action: Callable[[], T]) -> T:
        """Return ``action()``. An interrupt in it ends all connections: it may have lost credits,
        so that later tickets on these connections would wait for ever.
        """
        return call_surely(action, self.soon, self._abort_all)

    def soon(self, action: Callable[[], object]) -> None:
        """Call ``action()`` in a callback of the loop."""
        if self._poller is not None and not self._poller.closed:
            self._poller.soon(action)

    def _abort_all(self) -> None:
        """End all connections. Idempotent."""
        for connection in self._connections():
            connection.abort("an interrupt")
