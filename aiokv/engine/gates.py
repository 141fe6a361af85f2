"""The control plane: pausing, and changes that need the cache to stand still."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Admissions:
    """Decides whether leases are granted. Any of the pauses and holds below stops that.

    Pauses belong to the user of the engine. Holds belong to the engine itself (sleep, an update of
    the weights, a quiesce under way), and no call of the user ends them.

    Attributes:
        paused: nothing is granted.
    """

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self._pauses = 0
        self._holds = 0
        self.paused = False

    def pause(self) -> None:
        self._pauses += 1
        self.paused = True

    def resume(self) -> None:
        """End one pause.

        Raises:
            UsageError: there is none. Nothing changed.
        """
        if not self._pauses:
            raise UsageError(
                "resume: called without pause() or a quiesce() that has returned",
                hint="wake_up() ends sleep(); updating_weights() ends with its block"
                if self._holds
                else "",
            )
        self._pauses -= 1
        self._open_if_free()

    def hold(self) -> None:
        """Grant nothing until ``let_go`` was called once per ``hold``."""
        self._holds += 1
        self.paused = True

    def let_go(self) -> None:
        """End one hold."""
        self._holds -= 1
        self._open_if_free()

    def hand_over(self) -> None:
        """Turn one hold into a pause, which ``resume`` ends."""
        self._holds -= 1
        self._pauses += 1

    def _open_if_free(self) -> None:
        self.paused = self._pauses + self._holds > 0
        if not self.paused:
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
