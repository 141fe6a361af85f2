"""Peers: transfers between the blocks of leases and other engines."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import TYPE_CHECKING

from aiokv.errors import UsageError
from aiokv.scheduler.effects import Moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv._native import Core
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import Plans


class Peers:
    """Begins the receives and sends of one cache, cancels them, and reports their ends.

    Args:
        core: state of the leases.
        plans: plans of the transfers.
        outbox: effects of the current transition.
        groups: names of the window groups.
    """

    def __init__(self, core: Core, plans: Plans, outbox: Outbox, groups: Sequence[str]) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._groups = groups
        self._begun: deque[int] = deque()  # begun in the core, not submitted yet

    def receive(self, lease_id: int, ticket_id: bytes, first_block: int, num_blocks: int) -> int:
        """Begin to receive blocks of a lease; return the transfer."""
        return self._begin(self._core.receive, lease_id, ticket_id, first_block, num_blocks)

    def send(
        self,
        lease_id: int,
        ticket_id: bytes,
        first_block: int,
        num_blocks: int,
        first_range: int,
        end_range: int,
    ) -> int:
        """Begin to send computed blocks of a lease; return the transfer."""
        return self._begin(
            self._core.send, lease_id, ticket_id, first_block, num_blocks, first_range, end_range
        )

    def send_early(
        self,
        lease_id: int,
        ticket_id: bytes,
        first_block: int,
        num_blocks: int,
        first_range: int,
        end_range: int,
        mark: int,
        step: int,
    ) -> int:
        """Begin to send layers of blocks that a lease computes; return the transfer."""
        blocks = first_block, num_blocks
        ranges = first_range, end_range
        return self._begin(self._core.send_early, lease_id, ticket_id, *blocks, *ranges, mark, step)

    def receive_state(self, lease_id: int, ticket_id: bytes, num_tokens: int) -> int:
        """Begin to receive the state after received positions; return the transfer."""
        return self._begin(self._core.receive_state, lease_id, ticket_id, num_tokens)

    def send_state(self, lease_id: int, ticket_id: bytes, num_tokens: int) -> int:
        """Begin to send the state after the computed positions; return the transfer."""
        return self._begin(self._core.send_state, lease_id, ticket_id, num_tokens)

    def receive_window(
        self, lease_id: int, ticket_id: bytes, group: str, num_tokens: int, step: int
    ) -> int:
        """Begin to receive the window behind received positions; return the transfer.

        Raises:
            UsageError: the group is unknown.
        """
        number = self._number(group)
        return self._begin(self._core.receive_window, lease_id, ticket_id, number, num_tokens, step)

    def send_window(self, lease_id: int, ticket_id: bytes, group: str, num_tokens: int) -> int:
        """Begin to send the window behind the computed positions; return the transfer.

        Raises:
            UsageError: the group is unknown.
        """
        number = self._number(group)
        return self._begin(self._core.send_window, lease_id, ticket_id, number, num_tokens)

    def _number(self, group: str) -> int:
        if group not in self._groups:
            raise UsageError(
                f"group is {group!r}; it must be a name in CacheConfig.windows, which has "
                f"{list(self._groups)}"
            )
        return self._groups.index(group)

    def _begin(self, begin: Callable[..., int], *args: int | bytes) -> int:
        # `extend` calls the core without Python code in between, where a signal handler could
        # raise and lose the id of a transfer that has begun.
        self._begun.extend(starmap(begin, (args,)))
        transfer_id = self._begun[-1]
        while self._begun:
            self._outbox.effects.submit.append(self._plans.peer(self._begun[0], self._groups))
            self._begun.popleft()
        return transfer_id

    def cancel_abandoned(self) -> None:
        """Cancel the transfers that no caller waits for any more."""
        if self._core.has_peer_transfers and (
            abandoned := self._core.take_abandoned_peer_transfers()
        ):
            self._outbox.effects.cancel.extend(abandoned)

    def note_ends(self) -> list[int]:
        """Report the transfers that have ended since the last call.

        Returns:
            The leases of which these ends have committed positions.
        """
        ends = self._core.take_peer_ends()
        for transfer_id, lease_id, blocks, _ in ends:
            self._outbox.effects.moved.append(Moved(transfer_id, lease_id, blocks))
        return [lease_id for _, lease_id, _, commits in ends if commits]
