"""How many device blocks the leases of one salt hold, and who waits for fewer."""

from __future__ import annotations

import asyncio
from collections import deque

from aiokv.errors import AiokvError, RequestTooLarge


class SaltQuota:
    """First come, first served within a salt; salts do not wait for each other.

    Args:
        limit_blocks: per salt; None for no limit.
    """

    def __init__(self, limit_blocks: int | None) -> None:
        self.limit_blocks = limit_blocks
        self._held: dict[str, int] = {}
        self._by_lease: dict[int, tuple[str, int]] = {}
        self._waiting: dict[str, deque[tuple[int, int, asyncio.Future[None]]]] = {}

    def try_take(self, lease_id: int, salt: str, num_blocks: int) -> bool:
        """Count the blocks to the salt; False when it has too many, or others wait.

        Raises:
            RequestTooLarge: more than the limit.
        """
        if self.limit_blocks is None or lease_id in self._by_lease:
            return True
        if num_blocks > self.limit_blocks:
            raise RequestTooLarge(
                f"{num_blocks} blocks for one lease; salt_quota_blocks is {self.limit_blocks}"
            )
        if self._waiting.get(salt) or not self.fits(salt, num_blocks):
            return False
        self.count(lease_id, salt, num_blocks)
        return True

    async def take(self, lease_id: int, salt: str, num_blocks: int) -> None:
        """As try_take, waiting.

        Cancellation: nothing is counted.
        """
        if self.try_take(lease_id, salt, num_blocks):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (lease_id, num_blocks, turn)
        self._waiting.setdefault(salt, deque()).append(entry)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                turn.exception()  # seen, even if a cancellation came first
                self.give_back(lease_id)
            raise
        finally:
            queue = self._waiting.get(salt)
            if queue is not None and entry in queue:
                queue.remove(entry)
                self._serve(salt)

    def give_back(self, lease_id: int) -> None:
        """Idempotent."""
        salt, num_blocks = self._by_lease.pop(lease_id, ("", 0))
        if num_blocks:
            self._held[salt] -= num_blocks
            if not self._held[salt]:
                del self._held[salt]
            self._serve(salt)

    def hand_over(self, lease_id: int, keeper: int) -> None:
        """Another lease holds the blocks now."""
        if lease_id in self._by_lease:
            self._by_lease[keeper] = self._by_lease.pop(lease_id)

    def held(self, salt: str) -> int:
        """Blocks that are counted to the salt."""
        return self._held.get(salt, 0)

    def held_by_salt(self) -> dict[str, int]:
        return dict(self._held)

    def entries(self) -> list[tuple[str, int, int]]:
        """(salt, lease id, blocks) of everybody who waits, by salt, first in line first."""
        return [
            (salt, lease_id, num_blocks)
            for salt, queue in self._waiting.items()
            for lease_id, num_blocks, _ in queue
        ]

    def fits(self, salt: str, num_blocks: int) -> bool:
        return (
            self.limit_blocks is None or self._held.get(salt, 0) + num_blocks <= self.limit_blocks
        )

    def count(self, lease_id: int, salt: str, num_blocks: int) -> None:
        """Count the blocks to the salt, whether they fit or not."""
        if self.limit_blocks is None:
            return
        self._by_lease[lease_id] = (salt, num_blocks)
        self._held[salt] = self._held.get(salt, 0) + num_blocks

    def recount(self, lease_id: int, num_blocks: int) -> None:
        """A lease has grown or shrunk: decoding is not held up, others wait."""
        salt, counted = self._by_lease.get(lease_id, ("", 0))
        if counted:
            self._by_lease[lease_id] = (salt, num_blocks)
            self._held[salt] += num_blocks - counted
            self._serve(salt)

    def fail_all(self, error: AiokvError) -> None:
        """Send everybody home with ``error``."""
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for _, _, turn in queue:
                if not turn.done():
                    turn.set_exception(error)

    def _serve(self, salt: str) -> None:
        queue = self._waiting.get(salt)
        while queue and self.fits(salt, queue[0][1]):
            lease_id, num_blocks, turn = queue.popleft()
            if not turn.done():
                self.count(lease_id, salt, num_blocks)
                turn.set_result(None)
        if queue is not None and not queue:
            del self._waiting[salt]
