"""Waiting for blocks that another lease has promised to compute."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.engine.lines import Waiter, Wakeups, check_waiters
from aiokv.errors import LeaseError
from aiokv.scheduler.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiokv._native import Core
    from aiokv.errors import AiokvError


class PendingBlocks:
    """Equal prompts that arrive together compute their prefix once.

    Only a lease that holds nothing waits, with a deadline, so there is no circular wait. There is
    one line per owner, ordered by the number of blocks that the owner has to index before a waiter
    can go on: progress of the owner wakes only the waiters whose blocks are indexed. When the owner
    stops computing (release, preemption, failure), all its waiters match again.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lines: dict[int, Admission[Waiter]] = {}  # by the owner's lease id
        self._waiters: dict[int, Waiter] = {}  # by lease id
        self._onloads: dict[int, set[int]] = {}  # transfer -> owners that index after its end
        self._wakeups = Wakeups()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, lease_id: int, timeout: float | None) -> None:
        """Return when no lease computes more of the prefix, or after ``timeout`` seconds.

        Raises:
            LeaseError: the lease waits already, or was released while it waited.

        Cancellation: the lease has stopped waiting, and nothing else changed.
        """
        if lease_id in self._waiters:
            raise LeaseError("the lease waits for pending blocks already, in another task")
        try:
            async with asyncio.timeout(timeout):
                while not self._closed:
                    owner, num_blocks = self._core.pending(lease_id)
                    if not owner:
                        return
                    await self._indexed(lease_id, owner, num_blocks)
        except TimeoutError:
            return  # computing it again is never wrong

    async def _indexed(self, lease_id: int, owner: int, num_blocks: int) -> None:
        """Wait until the owner has indexed ``num_blocks`` more blocks, or will not."""
        for transfer_id in self._core.onloads(owner):
            self._onloads.setdefault(transfer_id, set()).add(owner)
        line = self._lines.setdefault(owner, Admission())
        waiter = Waiter(lease_id, line, self._core.indexed_blocks(owner) + num_blocks)
        self._waiters[lease_id] = waiter
        try:
            await waiter.wait()
        finally:
            del self._waiters[lease_id]
            waiter.leave()
            if not line and self._lines.get(owner) is line:
                del self._lines[owner]

    def advanced(self, owner: int) -> None:
        """Wake waiters whose blocks the owner has indexed."""
        if line := self._lines.get(owner):
            self._wakeups.end_all([line], up_to=self._core.indexed_blocks(owner))

    def reported(self, transfer_id: int) -> None:
        """Wake waiters for blocks that were indexed with the end of a transfer."""
        for owner in self._onloads.pop(transfer_id, ()):
            self.advanced(owner)

    def wake(self, owner: int) -> None:
        """Wake all waiters for an owner, which may have withdrawn its promise."""
        if line := self._lines.pop(owner, None):
            self._wakeups.end_all([line])

    def wake_all(self) -> None:
        lines, self._lines = self._lines, {}
        self._wakeups.end_all(lines.values())

    def drop(self, lease_id: int, failure: AiokvError) -> None:
        """Fail the waiter of a lease, if it has one."""
        if waiter := self._waiters.get(lease_id):
            waiter.end(failure)

    def close(self) -> None:
        """End all waits; later ones return at once."""
        self._closed = True
        self.wake_all()

    def check(self, live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            live: ids of the leases that are not released.
        """
        found = check_waiters(
            "pending blocks", self._waiters, self._lines.values(), self._wakeups.lines(), live
        )
        found += [
            f"pending blocks: waiters for lease {owner:#x}, which is released"
            for owner in self._lines
            if owner not in live
        ]
        if self._closed and self._lines:
            found.append("pending blocks: waiters are left after close")
        return found
