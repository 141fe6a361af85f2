"""Waiting for blocks that another lease has promised to compute."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv._native import Core


class PendingBlocks:
    """Equal prompts that arrive together compute their prefix once.

    Only a lease that holds nothing waits, with a deadline, so nobody waits in a circle. Any move of
    the owner (commit, release, failure) wakes its waiters, who look again.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}  # by the owner's lease id
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    async def wait(self, lease_id: int, timeout: float | None) -> None:
        """Return when nobody computes more of the prefix, or after ``timeout`` seconds.

        Cancellation: the lease has stopped waiting, and nothing else changed.
        """
        try:
            async with asyncio.timeout(timeout):
                while not self._closed and (owner := self._core.pending(lease_id)[0]) != 0:
                    await self._next_move(owner)
        except TimeoutError:
            return  # computing it again is never wrong

    async def _next_move(self, owner: int) -> None:
        move: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(owner, []).append(move)
        try:
            await move
        finally:
            waiters = self._waiters.get(owner)
            if waiters is not None and move in waiters:
                waiters.remove(move)
                if not waiters:
                    del self._waiters[owner]

    def wake(self, owner: int) -> None:
        """The owner has moved."""
        for move in self._waiters.pop(owner, ()):
            if not move.done():
                move.set_result(None)

    def wake_all(self) -> None:
        for owner in list(self._waiters):
            self.wake(owner)

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        self.wake_all()
