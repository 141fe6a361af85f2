"""SlotMap: the node that has a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import StoreError
from aiokv.stores.redis.options import Address, redis_py

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SLOTS: Final = 16384


class SlotMap:
    """Addresses of the masters by slot; of a server without cluster, one address for all keys.

    Args:
        seed: the node that replied; it has all keys when there are no slots.
        slots: reply to ``CLUSTER SLOTS``; None for a server that is not part of a cluster.

    Attributes:
        is_cluster: False for a single server.
        masters: addresses of all nodes that have slots.

    Raises:
        StoreError: the nodes of the cluster have no slots yet, or the reply is malformed.
    """

    def __init__(self, seed: Address, slots: list[Any] | None) -> None:
        self.is_cluster = slots is not None
        self._seed = seed
        self._addresses: list[Address | None] = []
        self._slot_of: Callable[[bytes], int] = lambda name: 0
        if slots is None:
            self._addresses = [seed]
        else:
            self._slot_of = redis_py().crc.key_slot
            self._addresses = _by_slot(seed, slots)
        self.masters = tuple(dict.fromkeys(a for a in self._addresses if a is not None))
        if not self.masters:
            raise StoreError(f"redis store: {seed} is a node of a cluster that has no slots")

    def node(self, name: bytes) -> Address:
        """Return the master that has a key.

        For a slot without a master, the answer is any node: its reply is the error.
        """
        return self._addresses[self._slot_of(name)] or self._seed


def _by_slot(seed: Address, slots: list[Any]) -> list[Address | None]:
    addresses: list[Address | None] = [None] * NUM_SLOTS
    left = NUM_SLOTS
    try:
        for first, last, (host, port, *_), *_replicas in slots:
            left -= last + 1 - first
            if left < 0 or not 0 <= first <= last < NUM_SLOTS:
                raise ValueError(f"slots {first} to {last} do not exist, or were listed before")
            # A node that does not know its own name sends an empty one.
            known = host.decode() if host and host != b"?" else seed.host
            addresses[first : last + 1] = [Address(known, port)] * (last + 1 - first)
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(
            f"redis store: {seed} replied a malformed list to CLUSTER SLOTS: {error}"
        ) from error
    return addresses
