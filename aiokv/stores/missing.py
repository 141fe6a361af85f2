"""MissingKeys: keys that a store is known not to have, so that no request waits for a lookup.

    note_missing ─► the answers of lookups, each for seconds
    follow ───────► the keys of the store, then each key that it gets: a filter of all of them

What is known may be old, so a block may count as missing that the store has got since: the model
computes it. No block is ever used because of what is known here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.stores.base import KEY_BYTES, selected, split_keys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from numpy.typing import NDArray

REMEMBERED_KEYS: Final = 16_384  # 3 MiB
FIRST_LAYER_KEYS: Final = 1 << 19
MAX_LAYERS: Final = 6
MAX_KEYS: Final = FIRST_LAYER_KEYS * ((1 << MAX_LAYERS) - 1)
_BITS_PER_KEY: Final = 16
_HASHES: Final = 5  # of 4 bytes each, from the part of a key that is a hash of its block
_ONE_KEY: Final = struct.Struct(f"={_HASHES}I")


class KeyFilter:
    """A Bloom filter: finds each key that was added, and at most 1 % of the other keys.

    A layer has 16 bits per key that it has room for, and each key sets five of them, so 0.14 % of
    other keys are found in a full layer. Each layer has twice the room of the layer before it.
    Six layers have room for ``MAX_KEYS`` keys, 33 million, and take 63 MiB.

    Attributes:
        num_keys: number of keys that were added; a key counts once.
        is_full: there was no room for all keys.
    """

    def __init__(self) -> None:
        self.num_keys = 0
        self.is_full = False
        self._room = 0  # of the last layer
        self._layers: list[NDArray[np.uint8]] = []
        self._views: list[memoryview] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the filter."""
        return sum(bits.nbytes for bits in self._layers)

    def has(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys were probably added, ``[N]``."""
        if len(keys) != KEY_BYTES:
            return self._has(_hashes(keys))
        hashes = _ONE_KEY.unpack_from(keys)  # several times faster for one key
        for bits in self._views:
            mask = 8 * len(bits) - 1
            places = [part & mask for part in hashes]
            if all(bits[place >> 3] >> (place & 7) & 1 for place in places):
                return np.ones(1, np.bool_)
        return np.zeros(1, np.bool_)

    def add(self, keys: bytes) -> None:
        """Add keys, or set ``is_full``."""
        hashes = _hashes(keys)[~self.has(keys)]
        while len(hashes):
            if not self._room and not self._grow():
                self.is_full = True
                return
            part, hashes = hashes[: self._room], hashes[self._room :]
            bits = self._layers[-1]
            places = _places(part, bits)
            np.bitwise_or.at(bits, places >> 3, np.uint8(1) << (places & 7).astype(np.uint8))
            self._room -= len(part)
            self.num_keys += len(part)

    def _has(self, hashes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        found = np.zeros(len(hashes), np.bool_)
        for bits in self._layers:
            places = _places(hashes, bits)
            found |= (bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).all(axis=1)
        return found

    def _grow(self) -> bool:
        """Add a layer; return False if there are ``MAX_LAYERS``."""
        layer = len(self._layers)
        if layer == MAX_LAYERS:
            return False
        self._room = FIRST_LAYER_KEYS << layer
        bits = np.zeros(self._room * _BITS_PER_KEY // 8, np.uint8)
        self._layers.append(bits)
        self._views.append(bits.data)
        return True


def _hashes(keys: bytes) -> NDArray[np.uint32]:
    words = np.frombuffer(keys, np.uint32).reshape(-1, KEY_BYTES // 4)
    return words[:, :_HASHES]


def _places(hashes: NDArray[np.uint32], bits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the bits of a layer that keys set, ``[N, _HASHES]``."""
    return hashes & np.uint32(8 * bits.nbytes - 1)


class MissingKeys:
    """Keys that one store is known not to have, of all groups. Used on one loop.

    Args:
        seconds: time for which the answer of a lookup is remembered; 0 for not at all.

    Attributes:
        num_stored: number of times that keys were noted as stored.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[bytes, float] = {}  # in the order of the times
        self._filter: KeyFilter | None = None  # of all keys of the store
        self._filling: KeyFilter | None = None
        self.num_stored = 0

    @property
    def filter_keys(self) -> int:
        """Keys of the filter; 0 while there is no filter of all keys."""
        return 0 if self._filter is None else self._filter.num_keys

    def may_have_any(self, keys: bytes, now: float) -> bool:
        """Return False if the store is known to have none of the keys."""
        if self._filter is not None:
            keys = selected(keys, self._filter.has(keys))
        if not self._until:
            return bool(keys)
        return any(self._until.get(key, now) <= now for key in split_keys(keys))

    def note_missing(self, key: bytes, now: float) -> None:
        """Remember that the store has answered that it does not have a key."""
        if self._seconds:
            self._until.pop(key, None)
            self._until[key] = now + self._seconds
            if len(self._until) > REMEMBERED_KEYS:
                del self._until[next(iter(self._until))]

    def note_stored(self, keys: bytes) -> None:
        """Note that the store has got keys."""
        self.num_stored += 1
        for key in split_keys(keys) if self._until else ():
            self._until.pop(key, None)
        if self._filling is not None:
            self._filling.add(keys)
            if self._filling.is_full:
                self._filter = None

    async def follow(self, changes: AsyncGenerator[bytes | None]) -> bool:
        """Keep a filter of all keys.

        It ends when the store has got about twice as many keys as it had at the beginning, because
        removed keys stay in the filter.

        Args:
            changes: see ``Store.follow_keys``.

        Returns:
            False if the store has too many keys for a filter.

        Raises:
            Exception: an error of ``changes``. There is no filter then.

        Cancellation: there is no filter.
        """
        filling = self._filling = KeyFilter()
        is_whole, most = False, MAX_KEYS
        try:
            async for keys in changes:
                if keys is not None:
                    self.note_stored(keys)
                else:
                    self._filter, is_whole = filling, True
                    most = 2 * filling.num_keys + FIRST_LAYER_KEYS
                if filling.is_full or filling.num_keys > most:
                    break
        finally:
            self._filter = self._filling = None
            await changes.aclose()
        return is_whole
