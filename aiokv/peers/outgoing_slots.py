"""OutgoingSlots: slots that parcels are copied to, sealed in and written from. Pure.

A parcel that is cut out of a block takes two slots: one for the block, until the parcel is sealed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.peers.departures import Parcel


class OutgoingSlots:
    """The outgoing slots of one rank.

    Args:
        num_slots: number of slots.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._most = max(num_slots // 2, 1)  # a receiver that stalls leaves slots for the others
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that no parcel has."""
        return len(self._free)

    def has_room(self, parcel: Parcel[Any]) -> bool:
        """Return True if a parcel without a slot may take the slots that it needs."""
        return len(self._free) >= parcel.num_slots and parcel.queue.slots < self._most

    def take(self, parcel: Parcel[Any]) -> None:
        """Give a parcel the slots that it needs, for which there is room."""
        parcel.slot = self._free.pop()
        if parcel.num_slots == 2:
            parcel.block_slot = self._free.pop()
        parcel.queue.slots += parcel.num_slots

    def free(self, parcel: Parcel[Any]) -> None:
        """Free the slots of a parcel, unless they are in use. Idempotent."""
        if parcel.busy or parcel.slot is None:
            return
        self.free_block(parcel)
        slot, parcel.slot = parcel.slot, None
        parcel.queue.slots -= 1
        self._free.append(slot)

    def free_block(self, parcel: Parcel[Any]) -> None:
        """Free the slot of the block that a parcel was cut out of. Idempotent."""
        if parcel.block_slot is not None:
            slot, parcel.block_slot = parcel.block_slot, None
            parcel.queue.slots -= 1
            self._free.append(slot)

    def violations(self, num_used: int) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            num_used: slots that parcels of connections have; those of connections that have ended
                may be in use, too.
        """
        free, problems = self._free, []
        if len(set(free)) != len(free):
            problems.append(f"outgoing slots are free twice: {sorted(free)}")
        if num_used + len(free) > self.num_slots:
            problems.append(
                f"{num_used} outgoing slots used and {len(free)} free of {self.num_slots}"
            )
        return problems
