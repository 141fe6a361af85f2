"""Waiting for work that cannot be interrupted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


async def all_ended(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all futures have ended, whatever their outcome.

    Cancellation: is raised when all have ended.
    """
    cancelled: asyncio.CancelledError | None = None
    waiting = set(futures)
    pending = {future for future in waiting if not future.done()}
    while pending:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = {future for future in pending if not future.done()}
    for future in waiting:
        if not future.cancelled():
            future.exception()  # marks it as retrieved
    if cancelled is not None:
        raise cancelled
