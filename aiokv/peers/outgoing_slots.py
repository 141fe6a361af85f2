"""OutgoingSlots: slots that fragments are copied to, sealed in and written from. Pure.

A fragment that is cut out of a block takes two slots: one for the block, until the fragment is
sealed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.peers.departures import Fragment


class OutgoingSlots:
    """The outgoing slots of one rank.

    Args:
        num_slots: number of slots.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Per receiver, so that a stalled one leaves slots for the others.
        self._most = max(num_slots // 2, 1)
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that no fragment has."""
        return len(self._free)

    def has_room(self, fragment: Fragment[Any]) -> bool:
        """Return True if there are enough slots for a fragment that has none."""
        return len(self._free) >= fragment.num_slots and fragment.queue.slots < self._most

    def take(self, fragment: Fragment[Any]) -> None:
        """Give a fragment its slots. Requires ``has_room``."""
        fragment.slot = self._free.pop()
        if fragment.num_slots == 2:
            fragment.block_slot = self._free.pop()
        fragment.queue.slots += fragment.num_slots

    def free(self, fragment: Fragment[Any]) -> None:
        """Free the slots of a fragment, unless they are in use. Idempotent."""
        if fragment.busy or fragment.slot is None:
            return
        self.free_block(fragment)
        slot, fragment.slot = fragment.slot, None
        fragment.queue.slots -= 1
        self._free.append(slot)

    def free_block(self, fragment: Fragment[Any]) -> None:
        """Free the slot of the block that a fragment was cut out of. Idempotent."""
        if fragment.block_slot is not None:
            slot, fragment.block_slot = fragment.block_slot, None
            fragment.queue.slots -= 1
            self._free.append(slot)

    def violations(self, num_used: int) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            num_used: slots that fragments of connections have; those of connections that have ended
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
