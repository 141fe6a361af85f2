"""DeviceFragmentWork: proves fragments in slots in the memory of a device, by its kernels."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import InternalError
from aiokv.peers.slot_access import SlotAccess, report_error
from aiokv.stores.base import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.arrivals import Fragment as Received
    from aiokv.peers.departures import Fragment as Sent
    from aiokv.peers.slot_access import Sealed, Verified
    from aiokv.peers.transport import PeerMemory
    from aiokv.worker.device.base import DeviceSlots, Verification
    from aiokv.worker.poller import EventPoller


class DeviceFragmentWork(SlotAccess):
    """Work on slots in the memory of a device.

    The copies from device blocks seal the slots, and those to device blocks verify them again, with
    the keys that this object returns.

    Args:
        slots: slots of the device; allocated until ``finish`` has returned.
        poller: see :class:`SlotAccess`.
    """

    def __init__(self, slots: DeviceSlots, poller: EventPoller) -> None:
        super().__init__(poller)
        self._slots = slots
        self._keys: dict[int, bytes] = {}  # by landing slot: key of the last verified fragment

    def landing_keys(self, slots: Sequence[int]) -> bytes:
        """See :meth:`SlotAccess.landing_keys`."""
        return b"".join(self._keys[slot] for slot in slots)

    def outgoing_keys(self, fragments: Sequence[Sent[Any]]) -> bytes:
        """See :meth:`SlotAccess.outgoing_keys`."""
        return b"".join(fragment.key for fragment in fragments)

    def _begin_verification(
        self, memory: PeerMemory, fragments: list[Received], then: Verified
    ) -> None:
        slots = [fragment.slot for fragment in fragments]
        self._keys |= {fragment.slot: fragment.key for fragment in fragments}
        told = partial(then, fragments)
        try:
            verification = self._slots.verify(np.array(slots, np.int32), self.landing_keys(slots))
        except Exception as error:
            report_error(error)
            self.soon(partial(told, [False] * len(fragments)))
            return
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(end)
        self._poller.watch(
            verification.layer_events[-1],
            "peer verify",
            partial(self._verified, end, verification, len(fragments), told),
        )

    def _verified(
        self,
        end: asyncio.Future[None],
        verification: Verification,
        num_fragments: int,
        then: Callable[[list[bool]], None],
        error: BaseException | None,
    ) -> None:
        """Note the end of a verification."""
        results = b"" if error is not None else verification.results
        are_right = [result == Result.DONE for result in results] or [False] * num_fragments
        self._running.discard(end)
        end.set_result(None)
        then(are_right)

    def place(
        self,
        memory: PeerMemory,
        fragments: Sequence[Received],
        addresses: Sequence[dict[int, int]],
        then: Callable[[bool], None],
    ) -> None:
        """Refuse: slots in the memory of a device have fragments of one layout.

        Raises:
            InternalError: fragments of other layouts are refused before they are sent.
        """
        raise InternalError("slots in the memory of a device have fragments of one layout only")

    def seal(self, memory: PeerMemory, fragments: Sequence[Sent[Any]], then: Sealed) -> None:
        """Call ``then``: the copy to the slots has sealed them."""
        self.soon(partial(then, list(fragments), True))
