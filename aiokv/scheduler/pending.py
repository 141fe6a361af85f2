"""Leases that wait for blocks which another lease has promised to compute."""

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
    """A lease that waits for blocks of ``owner``."""

    __slots__ = ("owner",)

    def __init__(self, lease_id: int, owner: int) -> None:
        super().__init__(lease_id)
        self.owner = owner


class PendingBlocks:
    """Equal prompts that arrive together compute their prefix once.

    Only a lease that holds nothing waits, with a deadline, so there is no circular wait. There is
    one line per owner, ordered by the number of blocks that the owner has to index before a waiter
    can go on: progress of the owner wakes only the waiters whose blocks are indexed. When the owner
    stops computing (release, preemption, failure), all its waiters match again.

    Attributes:
        waiters: all that wait, by lease id.
    """

    def __init__(self, core: Core, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox
        self._lines: dict[int, PriorityLine[Waiter]] = {}  # by the owner's lease id
        self.waiters: dict[int, Waiter] = {}
        self._onloads: dict[int, set[int]] = {}  # transfer -> owners that index after its end
        self._endings: Endings[Waiter] = Endings()
        self._closed = False

    def join(self, lease_id: int) -> bool:
        """Wait for the lease that computes what follows the match.

        Returns:
            False when no lease does, and there is nothing to wait for.
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
        """Wake waiters whose blocks the owner has indexed."""
        if line := self._lines.get(owner):
            self._endings.add([line], self._resume, up_to=self._core.indexed_blocks(owner))

    def reported(self, transfer_id: int) -> None:
        """Wake waiters for blocks that were indexed with the end of a transfer."""
        for owner in self._onloads.get(transfer_id, ()):
            self.advanced(owner)
        self._onloads.pop(transfer_id, None)

    def withdrawn(self, owner: int) -> None:
        """Wake all waiters for an owner, which may have withdrawn its promise."""
        if line := self._lines.get(owner):
            self._endings.add([line], self._resume)
        self._lines.pop(owner, None)

    def all_withdrawn(self) -> None:
        """Wake all waiters: any owner may have withdrawn its promise."""
        self._endings.add(self._lines.values(), self._resume)
        self._lines = {}

    def fail(self, lease_id: int, error: AiokvError) -> None:
        """End the wait of a lease with an error, if it waits."""
        if entry := self.waiters.get(lease_id):
            self._resume(entry, error)

    def close(self) -> None:
        """End all waits; nothing waits any more."""
        self._closed = True
        self.all_withdrawn()

    def end_one(self) -> bool:
        """End one wait that is due; return False when none is."""
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
