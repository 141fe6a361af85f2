"""Quotas: device blocks that the leases of one salt hold, and leases that wait for them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from aiokv.engine.lines import InPasses, Waiter, Wakeups, check_waiters
from aiokv.engine.sharded import SHARDS, Sharded
from aiokv.errors import RequestTooLarge
from aiokv.scheduler.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from aiokv.errors import AiokvError


class _Waiter(Waiter):
    __slots__ = ("num_blocks",)

    def __init__(self, lease_id: int, num_blocks: int, line: Admission[Any]) -> None:
        super().__init__(lease_id, line, 0)
        self.num_blocks = num_blocks


class SaltQuota:
    """First come, first served within a salt; salts do not wait for each other.

    Args:
        limit_blocks: per salt; None for no limit.
    """

    def __init__(self, limit_blocks: int | None) -> None:
        self.limit_blocks = limit_blocks
        self._held: dict[str, int] = {}
        self._by_lease: Sharded[tuple[str, int]] = Sharded()
        self._lines: dict[str, Admission[_Waiter]] = {}  # salts with waiters only
        self._waiters: dict[int, _Waiter] = {}  # by lease id
        self._to_serve: OrderedDict[str, None] = OrderedDict()
        self._serving = InPasses(self._serve_one)
        self._wakeups = Wakeups()

    def check_request(self, num_blocks: int) -> None:
        """Raise RequestTooLarge if one lease may never hold so many blocks."""
        if self.limit_blocks is not None and num_blocks > self.limit_blocks:
            raise RequestTooLarge(
                f"the lease needs {num_blocks} blocks, but salt_quota_blocks is {self.limit_blocks}"
            )

    def can_take(self, salt: str, num_blocks: int) -> bool:
        """Return whether the blocks fit now, and no lease of the salt waits."""
        return not self._lines.get(salt) and self.fits(salt, num_blocks)

    def try_take(self, lease_id: int, salt: str, num_blocks: int) -> bool:
        """Count the blocks to the salt; False when it has too many, or others wait.

        Raises:
            RequestTooLarge: more than the limit.
        """
        self.check_request(num_blocks)
        if not self.can_take(salt, num_blocks):
            return False
        self.count(lease_id, salt, num_blocks)
        return True

    async def take(self, lease_id: int, salt: str, num_blocks: int) -> None:
        """As try_take, waiting.

        Cancellation: nothing is counted.
        """
        if self.try_take(lease_id, salt, num_blocks):
            return
        line = self._lines.setdefault(salt, Admission())
        waiter = self._waiters[lease_id] = _Waiter(lease_id, num_blocks, line)
        try:
            await waiter.wait()
        except BaseException:
            self.give_back(lease_id)  # the grant came before the cancellation
            raise
        finally:
            del self._waiters[lease_id]
            waiter.leave()
            self._serve(salt)

    def give_back(self, lease_id: int) -> None:
        """Idempotent."""
        salt, num_blocks = self._by_lease.shards[lease_id % SHARDS].pop(lease_id, ("", 0))
        if num_blocks:
            self._held[salt] -= num_blocks
            if not self._held[salt]:
                del self._held[salt]
            self._serve(salt)

    def hand_over(self, lease_id: int, keeper: int) -> None:
        """Count the blocks of a lease for another one, which holds them now."""
        if lease_id in self._by_lease:
            self._by_lease[keeper] = self._by_lease.pop(lease_id)

    def held(self, salt: str) -> int:
        """Blocks that are counted to the salt."""
        return self._held.get(salt, 0)

    def held_by_salt(self) -> dict[str, int]:
        return dict(self._held)

    def entries(self) -> list[tuple[str, int, int]]:
        """Return (salt, lease id, blocks) of all waiters, by salt, first in line first."""
        return [
            (salt, waiter.lease_id, waiter.num_blocks)
            for salt, line in self._lines.items()
            for waiter in line.in_order()
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

    def drop(self, lease_id: int, failure: AiokvError) -> None:
        """Fail the waiter of a lease, if it has one; its task serves the next waiter."""
        if waiter := self._waiters.get(lease_id):
            waiter.end(failure)

    def fail_all(self, failure: Callable[[], AiokvError]) -> None:
        """Fail all waiters, each with an error of its own."""
        lines, self._lines = self._lines, {}
        self._wakeups.end_all(lines.values(), failure=failure)

    def _serve(self, salt: str) -> None:
        """Grant to the waiters of a salt, in order, as long as their blocks fit."""
        if salt in self._lines:
            self._to_serve[salt] = None
            self._serving.start()

    def _serve_one(self) -> bool:
        if not self._to_serve:
            return False
        salt = next(iter(self._to_serve))
        line = self._lines.get(salt)
        waiter = line.first() if line else None
        if waiter is None or not (waiter.is_cancelled or self.fits(salt, waiter.num_blocks)):
            del self._to_serve[salt]
            if line is not None and not line:
                del self._lines[salt]
            return True
        if not waiter.is_cancelled:
            self.count(waiter.lease_id, salt, waiter.num_blocks)
        waiter.end()
        return True

    def check(self, holders: Mapping[int, int], live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            holders: blocks of each granted lease, by lease id.
            live: ids of the leases that are not released.
        """
        found = check_waiters(
            "quota line", self._waiters, self._lines.values(), self._wakeups.lines(), live
        )
        if self.limit_blocks is None:
            return found
        sums: dict[str, int] = {}
        for lease_id, (salt, num_blocks) in self._by_lease.items():
            sums[salt] = sums.get(salt, 0) + num_blocks
            if lease_id not in live:
                found.append(f"quota: {num_blocks} blocks of released lease {lease_id:#x} count")
        if sums != self._held:
            found.append(f"quota: salts count {self._held}, the sums over leases are {sums}")
        for lease_id, num_blocks in holders.items():
            _, counted = self._by_lease.get(lease_id, ("", 0))
            if counted != num_blocks:
                found.append(
                    f"quota: lease {lease_id:#x} holds {num_blocks} blocks, {counted} count"
                )
        return found
