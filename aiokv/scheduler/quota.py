"""SaltQuota: limits the device blocks per salt; requests beyond the limit wait."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count, islice
from typing import TYPE_CHECKING

from aiokv.errors import RequestTooLarge
from aiokv.scheduler.line import PriorityLine
from aiokv.scheduler.sharded import SHARDS, Sharded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aiokv.scheduler.admission import WaitingRequest


class SaltQuota:
    """Device blocks that the leases of each salt hold, and the requests that wait for the quota.

    Requests of one salt are served in order of arrival; salts do not wait for each other.

    Args:
        limit_blocks: blocks per salt; None for no limit, in which case no method has an effect.

    Attributes:
        sequence: numbers of the arrivals, in all lines of requests.
    """

    def __init__(self, limit_blocks: int | None) -> None:
        self.limit_blocks = limit_blocks
        self._held: dict[str, int] = {}
        self._by_lease: Sharded[tuple[str, int]] = Sharded()
        # Only salts with waiting requests.
        self._lines: dict[str, PriorityLine[WaitingRequest]] = {}
        self.sequence = count()
        self._due: OrderedDict[str, None] = OrderedDict()  # salts whose requests may fit now

    # --- blocks ---------------------------------------------------------------------------------

    def check_request(self, num_blocks: int) -> None:
        """Check that the quota can hold a request.

        Raises:
            RequestTooLarge: ``num_blocks`` exceeds the quota of a salt.
        """
        if self.limit_blocks is not None and num_blocks > self.limit_blocks:
            raise RequestTooLarge(
                f"the lease needs {num_blocks} blocks, but CacheConfig.salt_quota_blocks is "
                f"{self.limit_blocks}",
                hint="shorten the request, or raise CacheConfig.salt_quota_blocks",
            )

    def fits(self, salt: str, num_blocks: int) -> bool:
        """Return True if the leases of the salt may hold ``num_blocks`` more."""
        return self.limit_blocks is None or self.held(salt) + num_blocks <= self.limit_blocks

    def admits(self, salt: str, num_blocks: int) -> bool:
        """Return True if the blocks fit and no request of the salt waits."""
        return not self._lines.get(salt) and self.fits(salt, num_blocks)

    def room(self, salt: str) -> int | None:
        """Return the blocks that ``admits`` would admit at most; None for no limit."""
        if self.limit_blocks is None:
            return None
        return 0 if self._lines.get(salt) else max(self.limit_blocks - self.held(salt), 0)

    def passes(self, salt: str, num_blocks: int, arrival: int) -> bool:
        """Return True if the blocks fit and no earlier request of the salt waits.

        Args:
            salt: salt of a request that has a place in line.
            num_blocks: blocks of the request.
            arrival: number that the request has drawn from ``sequence``.
        """
        line = self._lines.get(salt)
        first = line.first() if line else None
        is_first = first is None or arrival < first.ticket[1]
        return is_first and self.fits(salt, num_blocks)

    def count(self, lease_id: int, salt: str, num_blocks: int) -> None:
        """Count the blocks of a lease for the salt, even beyond the limit."""
        if self.limit_blocks is not None:
            self._by_lease[lease_id] = (salt, num_blocks)
            self._add(salt, num_blocks)

    def recount(self, lease_id: int, num_blocks: int) -> None:
        """Update the count of a lease that has grown or shrunk.

        A growing lease may exceed the limit; other requests of the salt then wait.
        """
        entry = self._by_lease.get(lease_id)
        if entry is not None:
            salt, counted = entry
            self._by_lease[lease_id] = (salt, num_blocks)
            self._add(salt, num_blocks - counted)
            self._may_fit(salt)

    def give_back(self, lease_id: int) -> None:
        """Stop counting the blocks of a lease. Idempotent."""
        entry = self._by_lease.shards[lease_id % SHARDS].pop(lease_id, None)
        if entry is not None:
            salt, num_blocks = entry
            self._add(salt, -num_blocks)
            self._may_fit(salt)

    def _add(self, salt: str, num_blocks: int) -> None:
        held = self.held(salt) + num_blocks
        if held:
            self._held[salt] = held
        else:
            self._held.pop(salt, None)

    def hand_over(self, lease_id: int, keeper: int) -> None:
        """Count the blocks of a lease for the lease ``keeper``, which holds them now."""
        if lease_id in self._by_lease:
            self._by_lease[keeper] = self._by_lease.pop(lease_id)

    def held(self, salt: str) -> int:
        """Return the number of blocks that are counted for the salt."""
        return self._held.get(salt, 0)

    def held_by_salt(self) -> dict[str, int]:
        """Return the number of counted blocks per salt, without salts that have none."""
        return dict(self._held)

    # --- requests -------------------------------------------------------------------------------

    def join(self, request: WaitingRequest, arrival: int | None = None) -> None:
        """Let a request wait until its blocks fit.

        Args:
            request: the request.
            arrival: number that ``sequence`` gave to its earlier place in line; None for the last
                place.
        """
        line = self._lines.get(request.salt)
        if line is None:
            line = self._lines[request.salt] = PriorityLine(self.sequence)
        if arrival is None:
            request.enter(line, 0)
        else:
            request.enter_at(line, (0, arrival))

    def left(self, salt: str) -> None:
        """Record that a request of the salt has left its line, so that the next one may fit."""
        self._may_fit(salt)

    def _may_fit(self, salt: str) -> None:
        if salt in self._lines:
            self._due[salt] = None

    @property
    def is_due(self) -> bool:
        """True if ``next_fitting`` has salts to check."""
        return bool(self._due)

    def next_fitting(self) -> WaitingRequest | None:
        """Return the first request whose blocks fit; count it and remove it from its line."""
        while self._due:
            salt = next(iter(self._due))
            line = self._lines.get(salt)
            request = line.first() if line else None
            if request is not None and self.fits(salt, request.num_blocks):
                self.count(request.lease_id, salt, request.num_blocks)
                request.leave()
                return request
            if line is not None and not line:
                del self._lines[salt]
            del self._due[salt]
        return None

    def take_lines(self) -> list[PriorityLine[WaitingRequest]]:
        """Remove and return all lines."""
        lines, self._lines = list(self._lines.values()), {}
        self._due.clear()
        return lines

    @property
    def lines(self) -> Collection[PriorityLine[WaitingRequest]]:
        """Lines of all salts with waiting requests."""
        return self._lines.values()

    def requests(self, limit: int | None = None) -> list[WaitingRequest]:
        """Return the first ``limit`` waiting requests, or all, by salt and in line order."""
        waiting = (request for line in self._lines.values() for request in line.in_order(limit))
        return list(islice(waiting, limit))

    def check(self, holders: Mapping[int, int], live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            holders: number of blocks of each granted lease, by lease id.
            live: ids of the leases that are not released.
        """
        if self.limit_blocks is None:
            return []
        found = []
        sums: dict[str, int] = {}
        for lease_id, (salt, num_blocks) in self._by_lease.items():
            sums[salt] = sums.get(salt, 0) + num_blocks
            if lease_id not in live:
                found.append(f"quota: {num_blocks} blocks of released lease {lease_id:#x} count")
        if {salt: held for salt, held in sums.items() if held} != self._held:
            found.append(f"quota: salts count {self._held}, the sums over leases are {sums}")
        for lease_id, num_blocks in holders.items():
            _, counted = self._by_lease.get(lease_id, ("", 0))
            if counted != num_blocks:
                found.append(
                    f"quota: lease {lease_id:#x} holds {num_blocks} blocks, {counted} count"
                )
        return found
