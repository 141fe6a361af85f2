"""Model of a block pool without the bitmap: a set of free ids."""

from __future__ import annotations


class PoolModel:
    """Set of the free ids below ``capacity``; all others are used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = set(range(capacity))

    def take(self, ids: list[int]) -> None:
        """Record that the pool allocated these ids."""
        assert len(set(ids)) == len(ids), f"{ids} holds an id twice"
        assert self.free.issuperset(ids), f"{ids} were not all free"
        self.free -= set(ids)

    def take_runs(self, count: int) -> list[int]:
        """Return the lowest run that holds all, else the longest (lowest of equals), and so on."""
        taken: list[int] = []
        while len(taken) < count:
            found = self._runs()
            wanted = count - len(taken)
            run = next((r for r in found if len(r) >= wanted), None) or max(found, key=len)
            taken += run[:wanted]
            self.free -= set(run[:wanted])
        return taken

    def _runs(self) -> list[list[int]]:
        """Return free ids, the lowest first."""
        found: list[list[int]] = []
        for i in sorted(self.free):
            if found and found[-1][-1] == i - 1:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def give_back(self, ids: list[int]) -> None:
        assert self.free.isdisjoint(ids), f"{ids} were free already"
        assert all(0 <= i < self.capacity for i in ids), f"{ids} are not of this pool"
        self.free |= set(ids)

    def can_resize(self, capacity: int) -> bool:
        return all(i in self.free for i in range(capacity, self.capacity))

    def resize(self, capacity: int) -> None:
        self.free = {i for i in self.free if i < capacity} | set(range(self.capacity, capacity))
        self.capacity = capacity


def runs(ids: list[int]) -> list[int]:
    """Return the lengths of the runs of consecutive ids, in the given order."""
    lengths = [0]
    for before, now in zip([None, *ids], ids, strict=False):
        if before is not None and now != before + 1:
            lengths.append(0)
        lengths[-1] += 1
    return lengths if ids else []
