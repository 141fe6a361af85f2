"""Openings: the tasks of a rank that connect to the receivers of tickets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Openings:
    """Running tasks by the id of their ticket.

    A task that was cancelled may end later than the next one of its ticket begins.
    """

    def __init__(self) -> None:
        self._tasks: dict[bytes, set[asyncio.Task[None]]] = {}

    def add(self, ticket_id: bytes, task: asyncio.Task[None]) -> None:
        """Note a task that opens a ticket, until it ends or is cancelled."""
        self._tasks.setdefault(ticket_id, set()).add(task)
        task.add_done_callback(partial(self._discard, ticket_id))

    def cancel(self, ticket_id: bytes) -> None:
        """Cancel the tasks that open a ticket. Idempotent."""
        for task in self._tasks.pop(ticket_id, ()):
            task.cancel()

    def _discard(self, ticket_id: bytes, task: asyncio.Task[None]) -> None:
        tasks = self._tasks.get(ticket_id, set())
        tasks.discard(task)
        if not tasks:
            self._tasks.pop(ticket_id, None)
