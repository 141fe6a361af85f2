"""AssemblySlots: slots in which blocks are put together from fragments of other layouts. Pure.

::

            begin               placed by all ranks           copied
    free ─────────► an Assembly ───────────────────► SlotCopy ───────► free
     ▲                  │ drop
     └──────────────────┘ when no thread writes the slot any more

Conservation: free slots + slots of assemblies + slots of copies == num_slots.
"""

from __future__ import annotations


class Assembly:
    """A block that fragments are being placed in.

    Attributes:
        slot: assembly slot; -1 after it was freed.
        placed: fragments that it has, by rank and block of the sender.
        placing: fragments that a thread is writing to it.
        is_dropped: its plan was given up; the slot is freed when no thread writes it.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.placed: set[tuple[int, int]] = set()
        self.placing = 0
        self.is_dropped = False


class AssemblySlots:
    """The assembly slots of one rank.

    Args:
        num_slots: number of slots.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that no block has, and no thread writes."""
        return len(self._free)

    def begin(self) -> Assembly:
        """Begin the assembly of a block in a free slot. Requires a free slot."""
        return Assembly(self._free.pop())

    def end_write(self, assembly: Assembly, place: tuple[int, int]) -> None:
        """Note that a thread has written a fragment, by rank and block of the sender."""
        assembly.placing -= 1
        assembly.placed.add(place)
        if assembly.is_dropped:
            self.drop(assembly)

    def drop(self, assembly: Assembly) -> None:
        """Free the slot of an assembly as soon as no thread writes it. Idempotent."""
        assembly.is_dropped = True
        if not assembly.placing and assembly.slot >= 0:
            slot, assembly.slot = assembly.slot, -1
            self._free.append(slot)

    def free(self, slot: int) -> None:
        """Free the slot of a block that was copied."""
        self._free.append(slot)

    def violations(self, num_used: int) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            num_used: slots of assemblies and of copies.
        """
        free = self._free
        if len(set(free)) == len(free) and len(free) + num_used == self.num_slots:
            return []
        used = f"{num_used} assembly slots are used and {len(free)} free"
        return [f"{used}, of {self.num_slots}: {sorted(free)}"]
