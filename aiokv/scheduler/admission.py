"""Admission: selects the waiting request that is granted next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import LeaseError
from aiokv.scheduler.cached_first import CachedFirst
from aiokv.scheduler.effects import Grant
from aiokv.scheduler.line import PriorityLine
from aiokv.scheduler.waits import PER_CALL, Endings, Entry, check_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aiokv._native import Core
    from aiokv.base.misses import LeftInStore
    from aiokv.config.cache_config import CacheConfig
    from aiokv.errors import AiokvError
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.gate import Gate
    from aiokv.scheduler.granting import Granting
    from aiokv.scheduler.guarded import TransitionErrors
    from aiokv.scheduler.line import Ticket
    from aiokv.scheduler.quota import SaltQuota


class WaitingRequest(Entry):
    """Lease without blocks that waits for its salt's quota, and then for capacity.

    Attributes:
        salt: salt whose quota counts the blocks.
        num_tokens: absolute number of positions.
        num_blocks: blocks of these positions.
        priority: lower numbers are granted first.
        reserve_blocks: blocks that the grant leaves to ``extend``; None for the configured number.
        takes_turn: True if an effect tells the lease that it is first, and the lease then calls
            ``take_turn``; for grants that cannot be taken back.
        told: True after that effect, until the lease has called ``take_turn``.
        cached_blocks: blocks of the hit at the last match, with ``CachedFirst``.
        is_overdue: True if no later request of its priority may go before it any more.
    """

    __slots__ = (
        "cached_blocks",
        "is_overdue",
        "num_blocks",
        "num_tokens",
        "priority",
        "reserve_blocks",
        "salt",
        "takes_turn",
        "told",
    )

    def __init__(
        self,
        lease_id: int,
        salt: str,
        num_tokens: int,
        num_blocks: int,
        priority: int,
        reserve_blocks: int | None = None,
    ) -> None:
        super().__init__(lease_id)
        self.salt = salt
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self.priority = priority
        self.reserve_blocks = reserve_blocks
        self.takes_turn = False
        self.told = False
        self.cached_blocks = 0
        self.is_overdue = False


class Admission:
    """Grants in order of priority, then of arrival or of cached shares (``CachedFirst``).

    Only the first request in line is tried. With ``CachedFirst``, a new request goes before waiting
    requests of its priority that are not overdue and have smaller shares.

    A request that waits for a store keeps the place of its arrival, and lets other requests pass.

    Attributes:
        requests: all requests that wait, for their quota or for capacity, by lease id.
        overdue_requests: requests that became overdue while they waited.
    """

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        gate: Gate,
        quota: SaltQuota,
        granting: Granting,
        outbox: Outbox,
        errors: TransitionErrors,
    ) -> None:
        self._errors = errors
        self._core = core
        self._gate = gate
        self._quota = quota
        self._granting = granting
        self._outbox = outbox
        self._line: PriorityLine[WaitingRequest] = PriorityLine(quota.sequence)
        self._store_waits: PriorityLine[WaitingRequest] = PriorityLine(quota.sequence)
        self.requests: dict[int, WaitingRequest] = {}
        self._endings: Endings[WaitingRequest] = Endings()
        self._block_tokens = config.block_tokens
        self._shares = self._new_shares() if config.admission == "cached_first" else None
        self.overdue_requests = 0

    def _new_shares(self) -> CachedFirst:
        return CachedFirst(self._core, self._block_tokens)

    def __len__(self) -> int:
        """Return the number of requests that wait for capacity."""
        return len(self._line)

    @property
    def waiting_for_store(self) -> int:
        """Number of requests that wait for a store."""
        return len(self._store_waits)

    @property
    def waiting_for_quota(self) -> int:
        """Number of requests that wait for the quota of their salt."""
        return len(self.requests) - len(self._line) - len(self._store_waits)

    def must_wait(self, lease_id: int, priority: int | None) -> bool:
        """Return True if the lease has to wait for other requests or for the gate.

        Args:
            lease_id: the lease.
            priority: priority of a request that may go before waiting requests of higher numbers;
                None for a request that goes before no waiting request.
        """
        if self._gate.closed or lease_id in self.requests:
            return True
        if not self._line or priority is None:
            return bool(self._line)
        if self._shares is None:
            return priority >= self._line.first_priority()
        first = self._shares.first(self._line)
        return first is not None and self._shares.rank_of(lease_id, priority) >= first.rank

    def join(self, request: WaitingRequest, *, counted: bool) -> None:
        """Let a request wait that could not be granted at once.

        Args:
            request: request of a lease that does not wait yet.
            counted: True if the quota has counted its blocks.
        """
        self.requests[request.lease_id] = request
        if counted:
            self._enter(request)
        else:
            self._quota.join(request)

    def join_store(self, request: WaitingRequest) -> None:
        """Let a request take its place, and wait for a store before it is served."""
        self.requests[request.lease_id] = request
        request.enter(self._store_waits, request.priority)

    def end_store_wait(self, lease_id: int, left: LeftInStore) -> None:
        """Serve a request in its place from now on. Idempotent.

        Args:
            lease_id: its lease.
            left: blocks that a store has, for ``Lease.missed``.
        """
        request = self.requests.get(lease_id)
        if request is None or not request.is_in(self._store_waits):
            return
        self._core.note_left_in_store(lease_id, *left)
        ticket = request.ticket
        request.leave()
        if self._quota.passes(request.salt, request.num_blocks, ticket[1]):
            self._quota.count(lease_id, request.salt, request.num_blocks)
            self._enter(request, ticket)
        else:
            self._quota.join(request, ticket[1])

    def _enter(self, request: WaitingRequest, ticket: Ticket | None = None) -> None:
        """Let a request wait for capacity, at the place of a ticket or at the last place."""
        # Once granted, a swapped table is split between the tiers, so taking the grant back would
        # lose it.
        request.takes_turn = self._core.is_swapped(request.lease_id)
        rank = request.priority if self._shares is None else self._shares.enter(request)
        if ticket is None:
            request.enter(self._line, rank)
        else:
            request.enter_at(self._line, (rank, ticket[1]))

    def end_overtaking(self, lease_id: int) -> bool:
        """Let a waiting request go before all later requests of its priority. Idempotent.

        Returns:
            True if the request is overdue from now on.
        """
        request = self.requests.get(lease_id)
        if request is None or self._shares is None or request.is_overdue:
            return False
        request.is_overdue = True
        self.overdue_requests += 1
        if request.is_in(self._line):
            self._shares.move(self._line, request)
        return True

    def take_turn(self, lease_id: int) -> Grant | None:
        """Grant a request after an effect has told that it is first in line.

        Returns:
            The grant; None when another request is first by now, or there is no room: the lease
            continues to wait.
        """
        request = self.requests.get(lease_id)
        if request is None:
            return None
        request.told = False
        if request is not self._line.first() or self._gate.closed:
            return None
        grant = self._attempt(request)
        if grant is not None:
            self._remove(request)
        return grant

    def _attempt(self, request: WaitingRequest) -> Grant | None:
        return self._granting.attempt(
            request.lease_id, request.num_tokens, reserve_blocks=request.reserve_blocks
        )

    def leave(self, lease_id: int) -> bool:
        """End the wait of a lease. Idempotent.

        Returns:
            True if another request may be granted now: the lease was first in line, or its blocks
            were counted by a quota.
        """
        request = self.requests.get(lease_id)
        if request is None:
            return False
        lets_others_pass = request is self._line.first() or self._quota.limit_blocks is not None
        self._remove(request)
        self._quota.give_back(lease_id)
        self._quota.left(request.salt)
        return lets_others_pass

    def _remove(self, request: WaitingRequest) -> None:
        request.leave()
        if self._shares is not None:
            self._shares.left(request)
        del self.requests[request.lease_id]

    def refuse(self, lease_id: int, error: AiokvError) -> None:
        """End the wait of a lease with an error, if it waits."""
        if request := self.requests.get(lease_id):
            self._refuse(request, error)

    def _refuse(self, request: WaitingRequest, error: AiokvError) -> None:
        self._outbox.effects.refused.append((request.lease_id, error))
        self.leave(request.lease_id)

    def refuse_all(self, error: Callable[[], AiokvError]) -> None:
        """End all waits, each with an error of its own."""
        lines = [self._line, *self._quota.take_lines()]
        if self._store_waits:
            lines.append(self._store_waits)
        self._line = PriorityLine(self._quota.sequence)
        self._store_waits = PriorityLine(self._quota.sequence)
        if self._shares is not None:
            self._shares = self._new_shares()
        self._endings.add(lines, lambda request: self._refuse(request, error()))

    def serve(self) -> bool:
        """Serve due requests, at most ``PER_CALL`` of each kind; return True if some are left."""
        is_left = False
        for serve_one in (self._endings.end_one, self._serve_quota, self._serve_first):
            for _ in range(PER_CALL):
                if not serve_one():
                    break
            else:
                is_left = True
        return is_left or self._quota.is_due  # a refused request has given its quota back

    def _serve_quota(self) -> bool:
        if not self._quota.is_due:
            return False
        request = self._quota.next_fitting()
        if request is not None:
            self._enter(request)
        return request is not None

    def _serve_first(self) -> bool:
        """Serve the first request; return True if the next request may be granted, too."""
        request = None if self._gate.closed else self._first()
        if request is None:
            return False
        if request.takes_turn:
            if not request.told:
                request.told = True
                self._outbox.effects.turns.append(request.lease_id)
            return False  # it stays first until it has taken its blocks or has left the line
        lease_id = request.lease_id
        try:
            grant = self._attempt(request)
        except Exception as error:  # for the waiting lease, not for the lease that made room
            self._errors.note(error)
            self._outbox.effects.refused.append((lease_id, error))
            self.leave(lease_id)
            return True
        if grant is None:
            return False
        self._outbox.effects.granted.append(Grant(lease_id, grant.onloads))
        self._remove(request)
        return True

    def _first(self) -> WaitingRequest | None:
        """Return the first request in line; None also if no request can be granted."""
        if self._shares is None or not self._line:
            return self._line.first()
        if self._granting.is_at_limit:
            return None
        free, evictable, _ = self._core.room()
        return self._shares.first_after_rotation(self._line, free + evictable)

    def entries(self, limit: int | None = None) -> list[WaitingRequest]:
        """Return the first ``limit`` requests that wait for capacity, or all, in line order."""
        return self._line.in_order(limit)

    def store_waits(self, limit: int | None = None) -> list[WaitingRequest]:
        """Return the first ``limit`` requests that wait for a store, or all, in line order."""
        return self._store_waits.in_order(limit)

    def check(self, live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            live: ids of the leases that are not released.
        """
        lines = [self._line, self._store_waits, *self._quota.lines, *self._endings.lines()]
        found = check_entries("capacity line", self.requests, lines, live)
        found += [
            f"capacity line: lease {lease_id:#x} waits, but it is granted"
            for lease_id in self.requests
            if lease_id in live and self._core.is_granted(lease_id)
        ]
        return found


def already_waits(owner: str) -> LeaseError:
    """Return the error of a lease that waits for capacity in another task."""
    return LeaseError(
        f"lease {owner!r} already waits for capacity in another task",
        hint="await its allocate, or cancel that task first",
    )
