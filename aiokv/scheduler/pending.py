"""PendingBlocks: leases that wait for blocks which another lease is going to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.scheduler.line import PriorityLine
from aiokv.scheduler.waits import Endings, Entry, check_entries

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiokv._native import Core
    from aiokv.errors import AiokvError
    from aiokv.scheduler.effects import Outbox


class Waiter(Entry):
    """Lease that waits for blocks that the lease ``owner`` computes."""

    __slots__ = ("owner",)

    def __init__(self, lease_id: int, owner: int) -> None:
        super().__init__(lease_id)
        self.owner = owner


class PendingBlocks:
    """Lets prompts with equal prefixes that arrive together compute the prefix once.

    Only a lease that holds no blocks waits, and with a deadline, so there is no circular wait. Each
    owner has one line, ordered by the number of blocks that the owner has to index before a waiter
    can continue: progress of the owner wakes only the waiters whose blocks are indexed. When the
    owner stops computing (release, preemption, failure), all its waiters match again.

    Attributes:
        waiters: all leases that wait, by lease id.
    """

    def __init__(self, core: Core, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox
        self._lines: dict[int, PriorityLine[Waiter]] = {}  # by the owner's lease id
        self.waiters: dict[int, Waiter] = {}
        # By transfer: owners that index blocks after its end.
        self._onloads: dict[int, set[int]] = {}
        self._endings: Endings[Waiter] = Endings()
        self._closed = False

    def join(self, lease_id: int) -> bool:
        """Wait for the lease that computes the blocks after the match.

        Returns:
            False when no lease computes them: the lease does not wait.
        """
        owner, num_blocks = (0, 0) if self._closed else self._core.pending(lease_id)
        if not owner:
            return False
        for transfer_id in self._core.onloads(owner):
            self._onloads.setdefault(transfer_id, set()).add(owner)
        entry = self.waiters[lease_id] = Waiter(lease_id, owner)
        line = self._lines.setdefault(owner, PriorityLine())
        entry.enter(line, self._core.indexed_blocks(owner) + num_blocks)
        return True

    def leave(self, lease_id: int) -> None:
        """Stop waiting. Idempotent."""
        if entry := self.waiters.get(lease_id):
            entry.leave()
            line = self._lines.get(entry.owner)
            if line is not None and not line:
                del self._lines[entry.owner]
            del self.waiters[lease_id]

    def _resume(self, entry: Waiter, error: AiokvError | None = None) -> None:
        self._outbox.effects.resumed.append((entry.lease_id, error))
        self.leave(entry.lease_id)

    def advanced(self, owner: int) -> None:
        """Wake the waiters whose blocks the owner has indexed."""
        if line := self._lines.get(owner):
            self._endings.add([line], self._resume, up_to=self._core.indexed_blocks(owner))

    def reported(self, transfer_id: int) -> None:
        """Wake the waiters for blocks that the end of a transfer has indexed."""
        for owner in self._onloads.get(transfer_id, ()):
            self.advanced(owner)
        self._onloads.pop(transfer_id, None)

    def withdrawn(self, owner: int) -> None:
        """Wake all waiters for an owner, which may no longer compute the blocks."""
        if line := self._lines.get(owner):
            self._endings.add([line], self._resume)
        self._lines.pop(owner, None)

    def all_withdrawn(self) -> None:
        """Wake all waiters: any owner may no longer compute its blocks."""
        self._endings.add(self._lines.values(), self._resume)
        self._lines = {}

    def fail(self, lease_id: int, error: AiokvError) -> None:
        """End the wait of a lease with an error, if the lease waits."""
        if entry := self.waiters.get(lease_id):
            self._resume(entry, error)

    def close(self) -> None:
        """End all waits; from now on no lease can wait."""
        self._closed = True
        self.all_withdrawn()

    def end_one(self) -> bool:
        """End one due wait; return False when no wait is due."""
        return self._endings.end_one()

    def check(self, live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            live: ids of the leases that are not released.
        """
        lines = [*self._lines.values(), *self._endings.lines()]
        found = check_entries("pending blocks", self.waiters, lines, live)
        found += [
            f"pending blocks: waiters for lease {owner:#x}, which is released"
            for owner in self._lines
            if owner not in live
        ]
        if self._closed and self._lines:
            found.append("pending blocks: waiters are left after close")
        return found
