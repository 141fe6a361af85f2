"""What the scheduler asks of the worker, and what the worker answers.

Plain data (msgspec structs, no pickle), so that a worker can live in another process. Block ids are
little-endian int32 in ``bytes``: one object a plan, viewed as arrays without a copy on either side.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ID_DTYPE = np.dtype("<i4")

Direction = Literal["onload", "offload", "state"]
Outcome = Literal["done", "failed", "cancelled"]


class Priority(IntEnum):
    """Order in which waiting transfers of one direction are submitted; lower goes first."""

    DEMAND = 0
    JOINED = 1
    PREFETCH = 2
    BACKUP = 3


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Copy ``device_blocks[i]`` from or to ``host_blocks[i]``, all layers of every region.

    Attributes:
        transfer_id: chosen by the scheduler, unique for the life of the engine.
        direction: ``"onload"`` writes the device blocks, ``"offload"`` the host blocks;
            ``"state"`` is that of a :class:`StatePlan`.
        device_blocks: int32 ids as bytes, in path order.
        host_blocks: int32 ids as bytes, as many.
        priority: see :class:`Priority`.
        after_step: the step whose work must be finished on the device before the first byte
            moves; 0 when there is nothing to wait for.
    """

    transfer_id: int
    direction: Direction
    device_blocks: bytes
    host_blocks: bytes
    priority: int = Priority.DEMAND
    after_step: int = 0

    @property
    def is_onload(self) -> bool:
        return self.direction == "onload"

    @property
    def num_blocks(self) -> int:
        return len(self.device_blocks) // ID_DTYPE.itemsize

    @property
    def device_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.device_blocks, dtype=ID_DTYPE)

    @property
    def host_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.host_blocks, dtype=ID_DTYPE)


class StatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Make slots of recurrent state ready, on the device, in all layers that have any.

    Attributes:
        transfer_id: of the same sequence as those of :class:`TransferPlan`.
        source_slots: int32 ids as bytes; -1 for zeros.
        target_slots: int32 ids as bytes, as many; none is a source.
        priority: see :class:`Priority`.
        after_step: as of :class:`TransferPlan`.
    """

    transfer_id: int
    source_slots: bytes
    target_slots: bytes
    priority: int = Priority.DEMAND
    after_step: int = 0

    @property
    def direction(self) -> Direction:
        return "state"

    @property
    def source_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.source_slots, dtype=ID_DTYPE)

    @property
    def target_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.target_slots, dtype=ID_DTYPE)


Plan = TransferPlan | StatePlan


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a transfer ended. Sent exactly once for each plan, never from inside ``submit``.

    Attributes:
        transfer_id: the plan's.
        outcome: ``"done"``: every byte is proven. ``"failed"``: blocks before
            ``first_bad_block`` are proven, the others are not. ``"cancelled"``: no block is.
        first_bad_block: index into the plan's blocks.
        reason: text of the first failure.
    """

    transfer_id: int
    outcome: Outcome
    first_bad_block: int = 0
    reason: str = ""
