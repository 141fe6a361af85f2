"""Peers: transfers between the blocks of leases and other engines."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import TYPE_CHECKING

from aiokv.scheduler.effects import Moved

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.plans import Plans


class Peers:
    """Begins the receives and sends of one cache, cancels them, and reports their ends."""

    def __init__(self, core: Core, plans: Plans, outbox: Outbox) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._begun: deque[int] = deque()  # begun in the core, not submitted yet

    def receive(self, lease_id: int, ticket_id: bytes, first_block: int, num_blocks: int) -> int:
        """Begin to receive blocks of a lease; return the transfer."""
        return self._begin(self._core.receive, lease_id, ticket_id, first_block, num_blocks)

    def send(self, lease_id: int, ticket_id: bytes, first_block: int, num_blocks: int) -> int:
        """Begin to send computed blocks of a lease; return the transfer."""
        return self._begin(self._core.send, lease_id, ticket_id, first_block, num_blocks)

    def receive_state(self, lease_id: int, ticket_id: bytes, num_tokens: int) -> int:
        """Begin to receive the state after received positions; return the transfer."""
        return self._begin(self._core.receive_state, lease_id, ticket_id, num_tokens)

    def send_state(self, lease_id: int, ticket_id: bytes, num_tokens: int) -> int:
        """Begin to send the state after the computed positions; return the transfer."""
        return self._begin(self._core.send_state, lease_id, ticket_id, num_tokens)

    def _begin(self, begin: Callable[..., int], *args: int | bytes) -> int:
        # `extend` calls the core without Python code in between, where a signal handler could
        # raise and lose the id of a transfer that has begun.
        self._begun.extend(starmap(begin, (args,)))
        transfer_id = self._begun[-1]
        while self._begun:
            self._outbox.effects.submit.append(self._plans.peer(self._begun[0]))
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
