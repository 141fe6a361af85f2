"""SlotAccess: access to the bytes of fragments in slots, in threads, kernels or on the loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.arrivals import Fragment as Received
    from aiokv.peers.departures import Fragment as Sent
    from aiokv.peers.transport import PeerMemory
    from aiokv.worker.poller import EventPoller

    Verified: TypeAlias = Callable[[list[Received], list[bool]], None]
    Sealed: TypeAlias = Callable[[list[Sent[Any]], bool], None]


class SlotAccess(ABC):
    """Verifies and places received fragments, cuts and seals fragments to be sent.

    Each call returns at once. Its continuation ``then`` is called in a later callback of the loop.

    Args:
        poller: open; calls the continuations.
    """

    def __init__(self, poller: EventPoller) -> None:
        self._poller = poller
        self._running: set[asyncio.Future[Any]] = set()  # work that accesses slots
        self._unverified: list[Received] = []

    async def finish(self) -> None:
        """Wait until no work accesses a slot.

        Cancellation: stops waiting.
        """
        if self._running:
            await asyncio.wait(list(self._running))

    def close(self) -> None:  # noqa: B027 - most work needs no end
        """Wait until no thread accesses a slot, and end the threads. Idempotent."""

    def landing_keys(self, slots: Sequence[int]) -> bytes:
        """Return the expected keys of verified landing slots, 32 bytes each.

        Empty when the copy need not verify the slots again.
        """
        return b""

    def outgoing_keys(self, fragments: Sequence[Sent[Any]]) -> bytes:
        """Return the keys with which a copy to outgoing slots seals fragments, 32 bytes each.

        Empty if ``seal`` seals them instead.
        """
        return b""

    def verify(self, memory: PeerMemory, fragments: Sequence[Received], then: Verified) -> None:
        """Verify fragments, together with the others of this pass of the loop.

        Args:
            memory: landing slots.
            fragments: fragments of any layouts.
            then: gets fragments, and for each True if its bytes are right.
        """
        if not self._unverified:
            self.soon(partial(self._verify_all, memory, then))
        self._unverified += fragments

    def _verify_all(self, memory: PeerMemory, then: Verified) -> None:
        """Begin to verify all fragments."""
        fragments, self._unverified = self._unverified, []
        self._begin_verification(memory, fragments, then)

    @abstractmethod
    def _begin_verification(
        self, memory: PeerMemory, fragments: list[Received], then: Verified
    ) -> None:
        """Begin to verify fragments."""

    @abstractmethod
    def place(
        self,
        memory: PeerMemory,
        fragments: Sequence[Received],
        addresses: Sequence[dict[int, int]],
        then: Callable[[bool], None],
    ) -> None:
        """Place fragments in host blocks.

        Args:
            memory: landing slots.
            fragments: fragments of other layouts.
            addresses: addresses of the host blocks of each fragment, by block.
            then: gets False if an error has left blocks incomplete.
        """

    @abstractmethod
    def seal(self, memory: PeerMemory, fragments: Sequence[Sent[Any]], then: Sealed) -> None:
        """Cut fragments out of their ``block_slot``, if they have one, and write their trailers.

        Args:
            memory: outgoing slots.
            fragments: for any receivers.
            then: gets fragments, and False if an error has left them without trailers.
        """

    def soon(self, action: Callable[[], object]) -> None:
        """Call ``action()`` in a later callback of the loop, unless the poller is closed."""
        if not self._poller.closed:
            self._poller.soon(action)


def report_error(error: BaseException) -> None:
    """Give an error in the access to slots to the loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "aiokv: work on the fragments of peers raised", "exception": error}
    )
