"""ParcelWork: reads and writes the bytes of parcels in their slots: in threads, or on the loop if
they are few."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv import _native
from aiokv.stores.base import TRAILER_BYTES, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.receiver import Parcel as Received
    from aiokv.peers.sender import Parcel as Sent
    from aiokv.peers.transport import PeerMemory
    from aiokv.worker.poller import EventPoller

INLINE_BYTES: Final = 256 << 10  # fewer bytes are read on the loop, which is faster than a thread


class ParcelWork:
    """Verifies and places received parcels, cuts and seals parcels to be sent.

    Args:
        poller: open; calls the continuations, again after an interrupt.
    """

    def __init__(self, poller: EventPoller) -> None:
        self._poller = poller
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="aiokv-peers")
        self._threads: set[asyncio.Future[Any]] = set()
        self._unfinished: set[object] = set()  # work whose continuation has not returned
        self._unverified: list[Received] = []

    @property
    def is_idle(self) -> bool:
        """True when nothing is in progress, and no continuation is left to be called."""
        return not self._threads and not self._unfinished and not self._unverified

    async def finish(self) -> None:
        """Wait until no thread accesses a slot.

        Cancellation: stops waiting.
        """
        if self._threads:
            await asyncio.wait(list(self._threads))

    def close(self) -> None:
        """Wait until no thread accesses a slot, and end the threads. Idempotent."""
        self._executor.shutdown()

    def verify(
        self,
        memory: PeerMemory,
        parcels: Sequence[Received],
        then: Callable[[list[Received], list[bool]], None],
    ) -> None:
        """Verify parcels, together with the others of this pass of the loop.

        Args:
            memory: landing slots.
            parcels: of any layouts.
            then: gets parcels, and for each True if its bytes are right.
        """
        if not self._unverified:
            self._soon(partial(self._verify_all, memory, then))
        self._unverified += parcels

    def _verify_all(
        self, memory: PeerMemory, then: Callable[[list[Received], list[bool]], None]
    ) -> None:
        parcels, self._unverified = self._unverified, []
        for num_bytes in {parcel.num_bytes for parcel in parcels}:
            equal = [parcel for parcel in parcels if parcel.num_bytes == num_bytes]
            slots, keys = [p.slot for p in equal], [p.key for p in equal]
            self._run(
                partial(_verify, memory, slots, keys, num_bytes),
                len(equal) * num_bytes,
                partial(_tell_verified, then, equal),
            )

    def place(
        self,
        memory: PeerMemory,
        parcels: Sequence[Received],
        addresses: Sequence[dict[int, int]],
        then: Callable[[bool], None],
    ) -> None:
        """Place parcels in host blocks.

        Args:
            memory: landing slots.
            parcels: of other layouts.
            addresses: of the host blocks of each parcel, by block.
            then: gets False if an error has left blocks incomplete.
        """
        calls = []
        for parcel, targets in zip(parcels, addresses, strict=True):
            mapping: Any = parcel.mapping
            address = memory.address + parcel.slot * memory.slot_bytes
            calls.append(partial(mapping.place, address, parcel.sender_block, targets))
        num_bytes = sum(parcel.num_bytes for parcel in parcels)
        self._run(partial(_call_all, calls), num_bytes, lambda done: then(bool(done)))

    def seal(
        self,
        memory: PeerMemory,
        parcels: Sequence[Sent[Any]],
        then: Callable[[list[Sent[Any]], bool], None],
    ) -> None:
        """Cut parcels out of their ``block_slot``, if they have one, and write their trailers.

        Args:
            memory: outgoing slots.
            parcels: for any receivers.
            then: gets parcels, and False if an error has left them without trailers.
        """
        for mapping in {parcel.mapping for parcel in parcels}:
            equal = [parcel for parcel in parcels if parcel.mapping is mapping]
            slots = [-1 if parcel.slot is None else parcel.slot for parcel in equal]
            blocks = [parcel.block_slot for parcel in equal if parcel.block_slot is not None]
            keys = [parcel.key for parcel in equal]
            num_bytes = equal[0].num_bytes
            self._run(
                partial(_cut_and_seal, memory, mapping, blocks, slots, keys, num_bytes),
                len(equal) * num_bytes,
                partial(_tell_sealed, then, equal),
            )

    def _run(self, call: Callable[[], Any], num_bytes: int, then: Callable[[Any], None]) -> None:
        """Call ``then`` with the result of ``call``, None if it raised, and never in this call."""
        token = object()
        self._unfinished.add(token)
        if num_bytes < INLINE_BYTES:
            self._soon(partial(self._continue, token, then, call()))
            return
        thread = asyncio.get_running_loop().run_in_executor(self._executor, call)
        self._threads.add(thread)
        thread.add_done_callback(partial(self._thread_done, token, then))

    def _thread_done(
        self, token: object, then: Callable[[Any], None], thread: asyncio.Future[Any]
    ) -> None:
        self._threads.discard(thread)
        result = None
        if not thread.cancelled() and (error := thread.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "aiokv: a thread of the peers raised", "exception": error}
            )
        elif not thread.cancelled():
            result = thread.result()
        self._poller.surely(partial(self._continue, token, then, result))

    def _continue(self, token: object, then: Callable[[Any], None], result: Any) -> None:
        then(result)
        self._unfinished.discard(token)

    def _soon(self, action: Callable[[], object]) -> None:
        if not self._poller.closed:
            self._poller.soon(action)


def _verify(memory: PeerMemory, slots: list[int], keys: list[bytes], num_bytes: int) -> list[bool]:
    results = _native.verify_blocks(
        memory.address,
        memory.slot_bytes,
        num_bytes - TRAILER_BYTES,
        np.array(slots, np.int32),
        b"".join(keys),
        num_blocks=memory.num_slots,
    )
    return [result == Result.DONE for result in results.tolist()]


def _cut_and_seal(
    memory: PeerMemory,
    mapping: Any,
    blocks: list[int],
    slots: list[int],
    keys: list[bytes],
    num_bytes: int,
) -> bool:
    """Cut parcels out of ``blocks``, unless there are none, and write trailers."""
    if blocks:
        addresses = [
            [memory.address + slot * memory.slot_bytes for slot in which]
            for which in (blocks, slots)
        ]
        mapping.cut(*addresses)
    _native.seal_blocks(
        memory.address,
        memory.slot_bytes,
        num_bytes - TRAILER_BYTES,
        np.array(slots, np.int32),
        b"".join(keys),
        num_blocks=memory.num_slots,
    )
    return True


def _call_all(calls: Sequence[Callable[[], object]]) -> bool:
    for call in calls:
        call()
    return True


def _tell_verified(
    then: Callable[[list[Received], list[bool]], None],
    parcels: list[Received],
    results: list[bool] | None,
) -> None:
    then(parcels, [False] * len(parcels) if results is None else results)


def _tell_sealed(
    then: Callable[[list[Sent[Any]], bool], None], parcels: list[Sent[Any]], is_done: bool | None
) -> None:
    then(parcels, bool(is_done))
