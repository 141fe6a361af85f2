"""FragmentWork: reads and writes the bytes of fragments in their slots: in threads, or on the loop
if they are few."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv import _native
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.slot_access import SlotAccess, report_error
from aiokv.stores.base import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.arrivals import Fragment as Received
    from aiokv.peers.departures import Fragment as Sent
    from aiokv.peers.slot_access import Sealed, Verified
    from aiokv.peers.transport import PeerMemory
    from aiokv.worker.poller import EventPoller

INLINE_BYTES: Final = 256 << 10  # fewer bytes are read on the loop, which is faster than a thread


class FragmentWork(SlotAccess):
    """Work on slots in host memory.

    Args:
        poller: see :class:`SlotAccess`.
    """

    def __init__(self, poller: EventPoller) -> None:
        super().__init__(poller)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="aiokv-peers")

    def close(self) -> None:
        """See :meth:`SlotAccess.close`."""
        self._executor.shutdown()

    def _begin_verification(
        self, memory: PeerMemory, fragments: list[Received], then: Verified
    ) -> None:
        for num_bytes in {fragment.num_bytes for fragment in fragments}:
            equal = [fragment for fragment in fragments if fragment.num_bytes == num_bytes]
            slots, keys = [p.slot for p in equal], [p.key for p in equal]
            self._run(
                partial(_verify, memory, slots, keys, num_bytes),
                len(equal) * num_bytes,
                partial(_tell_verified, then, equal),
            )

    def place(
        self,
        memory: PeerMemory,
        fragments: Sequence[Received],
        addresses: Sequence[dict[int, int]],
        then: Callable[[bool], None],
    ) -> None:
        """See :meth:`SlotAccess.place`."""
        calls = []
        for fragment, targets in zip(fragments, addresses, strict=True):
            mapping: Any = fragment.mapping
            address = memory.address + fragment.slot * memory.slot_bytes
            calls.append(partial(mapping.place, address, fragment.sender_block, targets))
        num_bytes = sum(fragment.num_bytes for fragment in fragments)
        self._run(partial(_call_all, calls), num_bytes, lambda done: then(bool(done)))

    def seal(self, memory: PeerMemory, fragments: Sequence[Sent[Any]], then: Sealed) -> None:
        """See :meth:`SlotAccess.seal`."""
        for mapping in {fragment.mapping for fragment in fragments}:
            equal = [fragment for fragment in fragments if fragment.mapping is mapping]
            slots = [-1 if fragment.slot is None else fragment.slot for fragment in equal]
            blocks = [fragment.block_slot for fragment in equal if fragment.block_slot is not None]
            keys = [fragment.key for fragment in equal]
            num_bytes = equal[0].num_bytes
            self._run(
                partial(_cut_and_seal, memory, mapping, blocks, slots, keys, num_bytes),
                len(equal) * num_bytes,
                partial(_tell_sealed, then, equal),
            )

    def _run(self, call: Callable[[], Any], num_bytes: int, then: Callable[[Any], None]) -> None:
        """Call ``then`` with the result of ``call``, None if it raised, and never in this call."""
        if num_bytes < INLINE_BYTES:
            self.soon(partial(then, _result_of(call)))
            return
        thread = asyncio.get_running_loop().run_in_executor(self._executor, call)
        self._running.add(thread)
        thread.add_done_callback(partial(self._thread_done, then))

    def _thread_done(self, then: Callable[[Any], None], thread: asyncio.Future[Any]) -> None:
        self._running.discard(thread)
        then(None if thread.cancelled() else _result_of(thread.result))


def _result_of(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``. If it raises, tell the loop and return None."""
    try:
        return call()
    except Exception as error:
        report_error(error)
        return None


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
    """Cut fragments out of ``blocks``, unless there are none, and write trailers."""
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


def _tell_verified(then: Verified, fragments: list[Received], results: list[bool] | None) -> None:
    then(fragments, [False] * len(fragments) if results is None else results)


def _tell_sealed(then: Sealed, fragments: list[Sent[Any]], is_done: bool | None) -> None:
    then(fragments, bool(is_done))
