"""SlotTransfers: move blocks between host memory and slots."""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.errors import UsageError
from aiokv.stores.disk.io import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory
    from aiokv.stores.disk.io import DiskIo
    from aiokv.stores.disk.segments import Segments

    Move = Callable[
        [int, NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64]],
        Awaitable[NDArray[np.int32]],
    ]

MERGED_BYTES: Final = 4 << 20  # neighbours are moved together up to this size

SHORT: Final = -1  # the file ends within the slot

# Never freed, because a read that hangs may access it.
_PAGE: Final = mmap.mmap(-1, DIRECT_ALIGNMENT)
_PAGE_ADDRESS: Final = np.frombuffer(_PAGE, np.uint8).ctypes.data


class SlotTransfers:
    """Batches of blocks as requests of the I/O, one per run of neighbouring blocks and slots."""

    def __init__(self, io: DiskIo, segments: Segments, memory: StoreMemory) -> None:
        self._io = io
        self._segments = segments
        self._address = memory.address
        self._num_blocks = memory.num_blocks
        self._slot_bytes = memory.pitch_bytes
        self._segment_slots = segments.segment_slots
        self._run_slots = max(1, MERGED_BYTES // memory.pitch_bytes)
        self._next_page_slot = 0

    async def read(self, slots: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Read slots to blocks; return ``[N]`` int32: 0, an errno, or ``SHORT``.

        Cancellation: the coroutine ends when the blocks are no longer accessed.
        """
        return await self._move(self._io.read, slots, blocks)

    async def write(self, slots: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Write blocks to slots; otherwise as :meth:`read`."""
        errors = await self._move(self._io.write, slots, blocks)
        self._segments.dirty.update((slots // self._segment_slots).tolist())
        return errors

    async def read_a_page(self) -> int:
        """Read the first page of a slot, each time of another one, and discard it.

        One bad place of the medium fails only the calls that read it.

        Returns:
            0, an errno, or ``SHORT``; 0 when there is no slot.

        Cancellation: ends when the disk has answered.
        """
        if self._segments.slots == 0:
            return 0
        slot = self._next_page_slot % self._segments.slots
        self._next_page_slot = slot + 1
        fd = self._segments.fd(slot // self._segment_slots)
        if fd < 0:
            return SHORT
        (moved,) = await self._io.read(
            fd,
            np.array([_PAGE_ADDRESS], np.uint64),
            np.array([DIRECT_ALIGNMENT], np.uint32),
            np.array([slot % self._segment_slots * self._slot_bytes], np.uint64),
        )
        return -int(moved) if moved < 0 else 0 if moved == DIRECT_ALIGNMENT else SHORT

    def check_blocks(self, blocks: NDArray[np.int32], num_keys: int) -> None:
        """Check the host blocks of a load or a save.

        Raises:
            UsageError: a block does not exist, or there is not one block per key.
        """
        if len(blocks) != num_keys:
            raise UsageError(
                f"{num_keys} keys for {len(blocks)} host blocks; there must be one per key"
            )
        if num_keys and not (blocks.min() >= 0 and blocks.max() < self._num_blocks):
            raise UsageError(
                f"host blocks are from {blocks.min()} to {blocks.max()}; they must be from 0 to "
                f"{self._num_blocks - 1}"
            )

    async def _move(
        self, move: Move, slots: NDArray[np.int32], blocks: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order].astype(np.int64)
        sorted_blocks = blocks[order].astype(np.int64)
        segments = sorted_slots // self._segment_slots
        boundaries = np.flatnonzero(np.diff(segments)) + 1
        parts = np.split(np.arange(len(order)), boundaries) if len(order) else []
        ended = await asyncio.gather(
            *(
                self._move_in_segment(
                    move, int(segments[part[0]]), sorted_slots[part], sorted_blocks[part]
                )
                for part in parts
            ),
            return_exceptions=True,
        )
        errors = np.zeros(len(slots), np.int32)
        for part, result in zip(parts, ended, strict=True):
            if isinstance(result, BaseException):
                raise result
            errors[order[part]] = result
        return errors

    async def _move_in_segment(
        self, move: Move, segment: int, slots: NDArray[np.int64], blocks: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        fd = self._segments.fd(segment)
        if fd < 0:
            return np.full(len(slots), SHORT, np.int32)
        first = self._run_starts(slots, blocks)
        lengths = np.diff(np.append(first, len(slots))) * self._slot_bytes
        moved = await move(
            fd,
            (self._address + blocks[first] * self._slot_bytes).astype(np.uint64),
            lengths.astype(np.uint32),
            (slots[first] % self._segment_slots * self._slot_bytes).astype(np.uint64),
        )
        return self._errors(moved, first, len(slots))

    def _run_starts(self, slots: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each request begins: runs of neighbours, cut at ``MERGED_BYTES``."""
        continues = (np.diff(slots) == 1) & (np.diff(blocks) == 1)
        index = np.arange(len(slots))
        starts = np.concatenate(([True], ~continues))
        run_start = np.maximum.accumulate(np.where(starts, index, 0))
        return np.flatnonzero((index - run_start) % self._run_slots == 0)

    def _errors(
        self, moved: NDArray[np.int32], first: NDArray[np.int64], count: int
    ) -> NDArray[np.int32]:
        """Return the error of each slot from the result of each request."""
        request = np.searchsorted(first, np.arange(count), side="right") - 1
        wanted = (np.arange(count) - first[request] + 1) * self._slot_bytes
        result = moved[request].astype(np.int64)
        return np.where(result < 0, -result, np.where(result < wanted, SHORT, 0)).astype(np.int32)


def error_text(code: int) -> str:
    """Return a name for an error of a transfer."""
    return "the file is too short" if code == SHORT else errno.errorcode.get(code, str(code))
