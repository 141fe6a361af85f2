"""The control plane: pausing, and changes that need the cache to stand still."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Admissions:
    """Whether leases are granted; several callers may hold them back at once."""

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self._holders = 0

    @property
    def paused(self) -> bool:
        return self._holders > 0

    def pause(self) -> None:
        self._holders += 1

    def resume(self) -> None:
        """One holder fewer.

        Raises:
            UsageError: nobody has paused.
        """
        if not self._holders:
            raise UsageError("resume() without pause()")
        self._holders -= 1
        if not self._holders:
            self._on_open()


class LeasesChanged:
    """Lets coroutines wait until a condition on the live leases holds."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def notify(self) -> None:
        for condition, waiter in self._waiters:
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """False when the deadline passed first.

        Cancellation: nothing changed.
        """
        if condition():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return condition()
        finally:
            self._waiters.remove(entry)
        return True
