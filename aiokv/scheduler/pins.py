"""PinnedLeases: leases that keep cached prefixes on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv._native import Core


class PinnedLeases:
    """Leases of the pins, by id.

    Attributes:
        num_until_used: number of pins that end when another lease hits all their blocks.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._until_used: dict[int, bool] = {}
        self.num_until_used = 0

    def __len__(self) -> int:
        return len(self._until_used)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._until_used

    def add(self, lease_id: int, *, until_used: bool) -> None:
        """Pin the blocks of a granted lease."""
        self._until_used[lease_id] = until_used
        self.num_until_used += until_used

    def remove(self, lease_id: int) -> bool:
        """Remove the pin of a lease; return False if the lease has no pin."""
        until_used = self._until_used.pop(lease_id, None)
        self.num_until_used -= until_used is True
        return until_used is not None

    def take_used(self) -> list[int]:
        """Return the pins that end because another lease has hit all their blocks."""
        return [lease_id for lease_id in self._core.take_used() if self._until_used.get(lease_id)]

    def all(self) -> list[int]:
        """Return the lease ids of all pins."""
        return list(self._until_used)

    def check(self) -> list[str]:
        """Return a description of each pin whose blocks cannot be hit."""
        return [
            f"pin {lease_id:#x} holds blocks that no match can find"
            for lease_id in self._until_used
            if not self._core.is_current(lease_id)
        ]
