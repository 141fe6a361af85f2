"""Accesses: the operations of stores and threads that use the host blocks of one plan."""

from __future__ import annotations

import asyncio
from typing import Any


class Accesses:
    """Operations that read or write the host blocks of a plan.

    The task of a plan may be cancelled before its operations have ended. The blocks belong to the
    plan until no operation is ``in_flight``.
    """

    def __init__(self) -> None:
        self._operations: set[asyncio.Future[Any]] = set()

    def add(self, operation: asyncio.Future[Any]) -> None:
        """Add an operation that has begun. It must not access a block after it is done."""
        self._operations.add(operation)
        operation.add_done_callback(self._operations.discard)

    @property
    def in_flight(self) -> list[asyncio.Future[Any]]:
        """Operations that may still access the blocks."""
        return [operation for operation in self._operations if not operation.done()]

    def cancel(self) -> None:
        """Cancel the operations of stores. Work in a thread cannot be cancelled."""
        for operation in self.in_flight:
            if isinstance(operation, asyncio.Task):
                operation.cancel()
