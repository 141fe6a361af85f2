"""SlotPools: the memory of the service, divided among slots of several sizes.

Engines with blocks of one size share a :class:`SlotPool`. All pools together stay within the limit
of the service. Memory that no pool has taken goes to the first that needs it. When there is none, a
pool takes memory from those that have more than their share, and then evicts its own objects. A
pool without engines has no share.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv._native import KEY_COUNTERS_PER_KEY, SlotTable
from aiokv.stores.base import KEY_BYTES, selected
from aiokv.stores.host.messages import NO_SLOT, PRESENT, Counts
from aiokv.stores.host.shared_memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

_MAX_SLOTS: Final = (1 << 31) - 1
_ALL: Final = 1 << 62


class SlotPool:
    """Slots of one size, and the keys of the objects in them.

    Attributes:
        memory: the slots.
        descriptor: descriptor of the memory.
        num_slots: number of slots; at most ``held_bytes`` of them exist.
        payload_bytes: payload of an object.
        pitch_bytes: distance between slots.
        table: keys, pins and recency.
    """

    def __init__(
        self, capacity_bytes: int, below_bytes: int, payload_bytes: int, pitch_bytes: int
    ) -> None:
        self.num_slots = min(capacity_bytes // pitch_bytes, _MAX_SLOTS)
        num_keys = self.num_slots + min(below_bytes // pitch_bytes, _MAX_SLOTS)
        self.memory, self.descriptor = SharedMemory.create(
            self.num_slots, payload_bytes, pitch_bytes, KEY_COUNTERS_PER_KEY * num_keys
        )
        self.payload_bytes = payload_bytes
        self.pitch_bytes = pitch_bytes
        self.table = SlotTable(self.num_slots)
        self.table.publish(self.memory.counters)
        self._shares: dict[Hashable, float] = {}
        self._given: list[int] = []  # reserved slots whose memory other pools have
        self._exists = np.zeros(self.num_slots, np.bool_)  # pages of a slot exist
        self._evicted_blocks = 0

    @property
    def share(self) -> float:
        """Largest share of an attached engine."""
        return max(self._shares.values(), default=0.0)

    @property
    def held_bytes(self) -> int:
        """Memory of the slots that the pool may use."""
        return (self.table.limit - len(self._given)) * self.pitch_bytes

    @property
    def counts(self) -> Counts:
        """Counts, without those of the store below."""
        return Counts(
            payload_bytes=self.payload_bytes,
            pitch_bytes=self.pitch_bytes,
            engines=len(self._shares),
            blocks=self.table.stored,
            used_bytes=self.held_bytes,
            evicted_blocks=self._evicted_blocks,
        )

    def attach(self, engine: Hashable, share: float) -> None:
        """Note the share of an engine."""
        self._shares[engine] = share

    def detach(self, engine: Hashable) -> None:
        """Forget an engine."""
        self._shares.pop(engine, None)

    def take_new(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the slots whose pages do not exist yet; the caller touches them."""
        new = slots[~self._exists[slots]]
        self._exists[new] = True
        return new

    def commit(self, keys: bytes, slots: NDArray[np.int32]) -> bytes:
        """Store keys whose objects are in reserved slots; return those that are new."""
        new = ~self.table.contains(keys)
        self.table.release(slots[~new])
        stored = selected(keys, new)
        self.table.commit(stored, slots[new], 0)
        return stored

    def unpin(self, slots: NDArray[np.int32]) -> None:
        """Undo ``table.pin``."""
        self.table.unpin(slots)
        self._settle()

    def remove(self, keys: bytes) -> None:
        """Remove keys."""
        self.table.remove(keys)
        self._settle()

    def purge(self, label: bytes) -> int:
        """Remove the keys with a label; return their number."""
        keys = self.table.list_keys(0, self.table.high_water, label)
        self.remove(keys)
        return len(keys) // KEY_BYTES

    def evict(self, count: int) -> None:
        """Remove the objects that were used longest ago, at most ``count``."""
        self._evicted_blocks += self.table.evict(count)
        self._settle()

    def grow(self, count: int) -> int:
        """Use at most ``count`` more slots; return their number."""
        back = self._given[:count]
        del self._given[:count]
        self.table.release(np.array(back, np.int32))
        new = min(count - len(back), self.num_slots - self.table.limit)
        self.table.grow(new)
        return len(back) + new

    def give(self, num_bytes: int) -> int:
        """Return memory to the kernel, if possible ``num_bytes``; return the number of bytes."""
        count = -(-num_bytes // self.pitch_bytes)
        self.evict(max(0, count - self.table.available))
        slots = self.table.reserve(count)
        self.memory.drop(slots)
        self._exists[slots] = False
        self._given += slots.tolist()
        return len(slots) * self.pitch_bytes

    def _settle(self) -> None:
        self.table.take_records()  # memory has no journal
        self.table.settle(self.table.unsettled_total, _ALL)

    def close(self) -> None:
        """Close the descriptor; engines keep their mappings."""
        os.close(self.descriptor)


class SlotPools:
    """The pools of the service.

    Args:
        capacity_bytes: limit of the memory of all pools.
        below_bytes: limit of the store below; 0 without one.

    Attributes:
        capacity_bytes: as given.
        pools: by payload and pitch.
    """

    def __init__(self, capacity_bytes: int, below_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self._below_bytes = below_bytes
        self.pools: dict[tuple[int, int], SlotPool] = {}

    def pool(self, payload_bytes: int, pitch_bytes: int) -> SlotPool:
        """Return the pool of a size.

        Raises:
            StoreError: its memory cannot be mapped.
        """
        size = payload_bytes, pitch_bytes
        if size not in self.pools:
            self.pools[size] = SlotPool(self.capacity_bytes, self._below_bytes, *size)
        return self.pools[size]

    def wanted(self, pool: SlotPool, keys: bytes) -> NDArray[np.int32]:
        """Reserve slots for the keys of a batch that are not stored, as far as there is room.

        Returns:
            ``[N]`` slots, ``PRESENT`` or ``NO_SLOT``.
        """
        results = np.full(len(keys) // KEY_BYTES, PRESENT, np.int32)
        wanted = np.flatnonzero(~pool.table.contains(keys))
        slots = self.reserve(pool, len(wanted))
        results[wanted] = NO_SLOT
        results[wanted[: len(slots)]] = slots
        return results

    def reserve(self, pool: SlotPool, count: int) -> NDArray[np.int32]:
        """Reserve up to ``count`` slots, for which other objects are evicted."""
        count = min(count, pool.num_slots)
        missing = count - pool.table.available
        if missing > 0:
            self._take_from_others(pool, missing * pool.pitch_bytes - self._free_bytes)
            missing -= pool.grow(min(missing, self._free_bytes // pool.pitch_bytes))
        if missing > 0:
            pool.evict(missing)
        return pool.table.reserve(count)

    @property
    def _free_bytes(self) -> int:
        return self.capacity_bytes - sum(pool.held_bytes for pool in self.pools.values())

    def _take_from_others(self, taker: SlotPool, num_bytes: int) -> None:
        """Take memory for ``taker``, up to its share, from the pools that exceed theirs."""
        num_bytes = min(num_bytes, self._share_bytes(taker) - taker.held_bytes - self._free_bytes)
        for pool in self.pools.values():
            if num_bytes <= 0:
                return
            excess = pool.held_bytes - self._share_bytes(pool)
            if pool is not taker and excess > 0:
                num_bytes -= pool.give(min(num_bytes, excess))

    def _share_bytes(self, pool: SlotPool) -> int:
        total = sum(other.share for other in self.pools.values())
        return int(self.capacity_bytes * pool.share / total) if total else 0

    def close(self) -> None:
        """Close the descriptors of all pools."""
        for pool in self.pools.values():
            pool.close()
