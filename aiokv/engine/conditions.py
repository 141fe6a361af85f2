"""Conditions: coroutines that wait for a condition on leases, blocks or steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Conditions:
    """Conditions that coroutines wait for; the dispatcher tests them after each transition.

    Attributes:
        waiters: each condition and the future of its coroutine; empty when no coroutine waits.
    """

    def __init__(self) -> None:
        self.waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._testing = False

    def test(self) -> None:
        """Wake the coroutines whose condition holds. A condition may call transitions itself."""
        if self._testing:
            return
        self._testing = True
        try:
            for condition, waiter in list(self.waiters):
                if not waiter.done() and condition():
                    waiter.set_result(None)
        finally:
            self._testing = False

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition()`` holds; return False when ``timeout`` seconds passed first.

        Cancellation: nothing changed.
        """
        if condition():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self.waiters.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return condition()
        finally:
            self.waiters.remove(entry)
        return True
