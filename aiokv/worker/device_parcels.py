"""DeviceParcelWork: proves parcels in slots in the memory of a device, by its kernels."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import InternalError
from aiokv.stores.base import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.receiver import Parcel as Received
    from aiokv.peers.sender import Parcel as Sent
    from aiokv.peers.transport import PeerMemory
    from aiokv.worker.device.base import DeviceSlots, Verification
    from aiokv.worker.poller import EventPoller


class DeviceParcelWork:
    """As :class:`ParcelWork`, for slots in the memory of a device.

    The copies from device blocks seal the slots, and those to device blocks verify them again:
    ``keys`` returns what they need.

    Args:
        slots: of the device; allocated until ``finish`` has returned.
        poller: open; calls the continuations, again after an interrupt.
    """

    def __init__(self, slots: DeviceSlots, poller: EventPoller) -> None:
        self._slots = slots
        self._poller = poller
        self._keys: dict[int, bytes] = {}  # of the parcel that was verified last, by landing slot
        self._unverified: list[Received] = []
        self._verifying: set[asyncio.Future[None]] = set()
        self._unfinished: set[object] = set()  # work whose continuation has not returned

    @property
    def is_idle(self) -> bool:
        """True when nothing is in progress, and no continuation is left to be called."""
        return not self._verifying and not self._unfinished and not self._unverified

    async def finish(self) -> None:
        """Wait until no verification accesses a slot.

        Cancellation: stops waiting.
        """
        if self._verifying:
            await asyncio.wait(list(self._verifying))

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def keys(self, slots: Sequence[int]) -> bytes:
        """Return the keys of verified landing slots, 32 bytes each."""
        return b"".join(self._keys[slot] for slot in slots)

    def verify(
        self,
        memory: PeerMemory,
        parcels: Sequence[Received],
        then: Callable[[list[Received], list[bool]], None],
    ) -> None:
        """Verify parcels, together with the others of this pass of the loop.

        Args:
            memory: landing slots, the first ones of the device's slots.
            parcels: of the layout of this rank.
            then: gets parcels, and for each True if its bytes are right.
        """
        if not self._unverified:
            self._soon(partial(self._verify_all, then))
        self._unverified += parcels

    def _verify_all(self, then: Callable[[list[Received], list[bool]], None]) -> None:
        parcels, self._unverified = self._unverified, []
        if not parcels:
            return
        ids = np.array([parcel.slot for parcel in parcels], np.int32)
        self._keys |= {parcel.slot: parcel.key for parcel in parcels}
        verification = self._slots.verify(ids, self.keys(ids.tolist()))
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verifying.add(end)
        event = verification.layer_events[-1]
        self._poller.watch(
            event, "peer verify", partial(self._verified, end, verification, parcels, then)
        )

    def _verified(
        self,
        end: asyncio.Future[None],
        verification: Verification,
        parcels: list[Received],
        then: Callable[[list[Received], list[bool]], None],
        error: BaseException | None,
    ) -> None:
        """Note the end of a verification. Idempotent, as ``then``."""
        results = b"" if error is not None else verification.results
        are_right = [result == Result.DONE for result in results] or [False] * len(parcels)
        self._verifying.discard(end)
        if not end.done():
            end.set_result(None)
        then(parcels, are_right)

    def place(
        self,
        memory: PeerMemory,
        parcels: Sequence[Received],
        addresses: Sequence[dict[int, int]],
        then: Callable[[bool], None],
    ) -> None:
        """Raises:
        InternalError: parcels of other layouts are refused before they are sent.
        """
        raise InternalError("slots in the memory of a device have parcels of one layout only")

    def seal(
        self,
        memory: PeerMemory,
        parcels: Sequence[Sent[Any]],
        then: Callable[[list[Sent[Any]], bool], None],
    ) -> None:
        """Call ``then``: the copy to the slots has sealed them."""
        token = object()
        self._unfinished.add(token)
        self._soon(partial(self._sealed, token, list(parcels), then))

    def _sealed(
        self,
        token: object,
        parcels: list[Sent[Any]],
        then: Callable[[list[Sent[Any]], bool], None],
    ) -> None:
        then(parcels, True)
        self._unfinished.discard(token)

    def _soon(self, action: Callable[[], object]) -> None:
        if not self._poller.closed:
            self._poller.soon(action)
