"""Memory of one side and sending of fragments, for all benches of peers."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv._native import seal_blocks
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.messages import MAX_LISTED, Credit, Done, Landed, SlotCredit, Want, fragment_key
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.peers.messages import Message
    from aiokv.peers.wire import Connection

SIZES = {"128_kib": 128 << 10, "1_mib": 1 << 20, "4_mib": 4 << 20}  # sizes of fragments
INLINE_BYTES = 256 << 10  # smaller fragments are processed on the loop, faster than in a thread
BATCH_BYTES = 8 << 20  # bytes that the sender seals at once
SECRET = b"a secret of the bench of peers"
TICKET = bytes(16)
GENERATION = bytes(range(16))


class Slots:
    """Memory of one side.

    Args:
        fragment_bytes: size of a slot.
        num_slots: number of slots; 0 for a side that only sends or only receives.
    """

    def __init__(self, fragment_bytes: int, num_slots: int) -> None:
        self.arena = HostArena(num_blocks=max(num_slots, 1), pitch_bytes=fragment_bytes)
        random = np.random.default_rng(0)
        self.arena.blocks[:] = random.integers(0, 256, fragment_bytes, np.uint8)
        self.memory = PeerMemory(
            address=self.arena.pointer,
            num_slots=num_slots,
            slot_bytes=fragment_bytes,
            view=self.arena.blocks.reshape(-1).data,
        )
        self.threads = ThreadPoolExecutor(1)

    async def proof(
        self, function: Callable[..., Any], slots: Sequence[int], blocks: Sequence[int]
    ) -> Any:
        """Seal or verify the fragments of blocks in slots."""
        memory = self.memory
        payload_bytes = memory.slot_bytes - TRAILER_BYTES
        numbers = np.array(slots, np.int32)
        keys = b"".join(fragment_key(TICKET, GENERATION, 0, block, 0) for block in blocks)

        def call() -> Any:
            return function(
                memory.address,
                memory.slot_bytes,
                payload_bytes,
                numbers,
                keys,
                num_blocks=memory.num_slots,
            )

        if len(slots) * payload_bytes < INLINE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    def close(self) -> None:
        """End the thread."""
        self.threads.shutdown()


class Sending:
    """Sender of fragments on one connection; the connection's handler forwards the messages."""

    def __init__(self) -> None:
        self._credits: deque[SlotCredit] = deque()
        self._given = asyncio.Event()
        self._done: asyncio.Future[None] | None = None  # the send in progress

    def on_message(self, message: Message) -> None:
        """Process credits and the end of a send."""
        if isinstance(message, Credit):
            self._credits.extend(message.slots)
            self._given.set()
        elif isinstance(message, Done) and self._done is not None:
            self._done.set_result(None)

    def fail(self, reason: str) -> None:
        """Fail the send in progress, if there is one."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason))

    async def credit(self) -> None:
        """Wait until there is a credit."""
        while not self._credits:
            self._given.clear()
            await self._given.wait()

    async def send(
        self, connection: Connection, link: Any, slots: Slots, count: int, *, max_writes: int
    ) -> None:
        """Send ``count`` fragments, and wait until the receiver has acknowledged them.

        Args:
            connection: carries the messages.
            link: writes the fragments.
            slots: outgoing slots, for more than ``max_writes`` batches.
            count: number of fragments.
            max_writes: number of batches that are written while the next one is sealed.
        """
        self._done = asyncio.get_running_loop().create_future()
        for begin in range(0, count, MAX_LISTED):
            connection.send(Want(ticket_id=TICKET, fragments=min(MAX_LISTED, count - begin)))
        memory = slots.memory
        batch = max(1, BATCH_BYTES // memory.slot_bytes)
        used_slots = memory.num_slots // batch * batch
        writes: deque[asyncio.Task[None]] = deque()
        for begin in range(0, count, batch):
            blocks = range(begin, min(begin + batch, count))
            if len(writes) == max_writes:  # these slots are still being read
                await writes.popleft()
            places = [block % used_slots for block in blocks]
            await slots.proof(seal_blocks, places, blocks)
            writes.append(asyncio.ensure_future(self._write(link, blocks, places, memory)))
        for write in writes:
            await write
        await self._done

    async def _write(
        self, link: Any, blocks: Sequence[int], places: Sequence[int], memory: PeerMemory
    ) -> None:
        waiting = deque(zip(blocks, places, strict=True))
        while waiting:
            await self.credit()
            fragments = []
            while waiting and self._credits:
                block, place = waiting.popleft()
                slot, generation = self._credits.popleft()
                landed = Landed(
                    ticket_id=TICKET,
                    sender_block=block,
                    slot=slot,
                    slot_generation=generation,
                    fragment_bytes=memory.slot_bytes,
                )
                fragments.append(Outgoing(place, landed))
            await link.write(fragments)
