"""Bundles: consecutive blocks of a prompt in one object of an object store.

    header, keys of the blocks, checksum | object of block 0 | object of block 1 | ...

A bundle is named by the key of its first block. Where it ends, the keys decide: behind a key whose
hash is a multiple of the mean length (as in content-defined chunking), at the largest length, or at
the end of the save. So most names of the bundles of a prompt are known without a request, and a
search asks for several at a time. What a later turn of a conversation adds begins a bundle of its
own, which is found behind the last block of the one before it. Prompts that part within a bundle
share its first blocks: the keys in the bundle tell how many.

The bundle of a single block is its object alone.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from aiokv.stores.base import KEY_BYTES, split_keys
from aiokv.stores.checksum import CHECKSUM_BYTES, checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

BUNDLE_BYTES: Final = 32 << 20  # mean
_MEAN_BLOCKS: Final = 64  # at most
_LONGEST: Final = 2  # times the mean
_REMEMBERED_BLOCKS: Final = 1 << 16
_HEAD: Final = struct.Struct("<16sQQ")  # format, blocks, bytes of an object
_FORMAT: Final = b"aiokv bundle 1\0\0"
MAX_HEADER_BYTES: Final = _HEAD.size + _LONGEST * _MEAN_BLOCKS * KEY_BYTES + CHECKSUM_BYTES


class Bundle(NamedTuple):
    """The keys of a bundle, and the bytes of each object in it."""

    keys: list[bytes]
    object_bytes: int

    @property
    def header(self) -> bytes:
        """The bytes before the first object."""
        if len(self.keys) == 1:
            return b""
        head = _HEAD.pack(_FORMAT, len(self.keys), self.object_bytes) + b"".join(self.keys)
        return head + checksum(head)

    @property
    def num_bytes(self) -> int:
        """Length of the bundle."""
        return self.offset(len(self.keys))

    def offset(self, index: int) -> int:
        """Return the place of the object of a block."""
        count = len(self.keys)
        head = 0 if count == 1 else _HEAD.size + count * KEY_BYTES + CHECKSUM_BYTES
        return head + index * self.object_bytes

    @classmethod
    def parse(cls, first: bytes, head: bytes, num_bytes: int) -> Bundle:
        """Return the bundle of an object of the store.

        Args:
            first: key that the object is named by.
            head: its first ``MAX_HEADER_BYTES``.
            num_bytes: its length.

        Returns:
            The bundle; that of a single block, if the object has no valid header.
        """
        alone = cls([first], num_bytes)
        if not head.startswith(_FORMAT) or len(head) < _HEAD.size:
            return alone
        _, count, object_bytes = _HEAD.unpack_from(head)
        end = _HEAD.size + count * KEY_BYTES
        if checksum(head[:end]) != head[end : end + CHECKSUM_BYTES]:
            return alone
        bundle = cls(split_keys(head[_HEAD.size : end]), object_bytes)
        return bundle if bundle.num_bytes == num_bytes and bundle.keys[0] == first else alone


class Cuts:
    """Where bundles of objects of one size end."""

    def __init__(self, object_bytes: int) -> None:
        self._mean = min(_MEAN_BLOCKS, 1 << max(0, (BUNDLE_BYTES // object_bytes).bit_length() - 1))

    def ends_behind(self, key: bytes) -> bool:
        """Return True if a bundle ends behind this block."""
        return int.from_bytes(key[:4], "little") % self._mean == 0

    def runs(
        self, keys: Sequence[bytes], follows: Sequence[bool] | NDArray[np.bool_]
    ) -> list[tuple[int, int]]:
        """Return the first block and the end of each bundle of a save.

        Args:
            keys: one per block.
            follows: ``[N]``, True where the block before it in the save is its parent.
        """
        begins = [
            i for i in range(len(keys)) if i == 0 or not follows[i] or self.ends_behind(keys[i - 1])
        ]
        longest = _LONGEST * self._mean
        return [
            (first, min(first + longest, end))
            for begin, end in pairwise([*begins, len(keys)])
            for first in range(begin, end, longest)
        ]


class BundleIndex:
    """The bundles that the store has seen lately, by the keys of their blocks. A hint: objects may
    have been removed or replaced since.

    Args:
        num_blocks: number of host blocks; the blocks of twice as many are remembered.
    """

    def __init__(self, num_blocks: int) -> None:
        self._limit = max(_REMEMBERED_BLOCKS, 2 * num_blocks)
        self._bundles: dict[bytes, Bundle] = {}  # by first key, oldest first
        self._places: dict[bytes, tuple[bytes, int]] = {}  # by key: first key, index

    def add(self, bundle: Bundle) -> None:
        """Remember a bundle, in place of that of the same name."""
        first = bundle.keys[0]
        self.drop(first)
        self._bundles[first] = bundle
        self._places |= {key: (first, i) for i, key in enumerate(bundle.keys)}
        while len(self._places) > self._limit:
            self.drop(next(iter(self._bundles)))

    def drop(self, first: bytes) -> None:
        """Forget the bundle with this first key."""
        if (bundle := self._bundles.pop(first, None)) is not None:
            for i, key in enumerate(bundle.keys):
                if self._places.get(key) == (first, i):
                    del self._places[key]

    def find(self, key: bytes) -> tuple[Bundle, int] | None:
        """Return the bundle that has a block, and its index there."""
        if (place := self._places.get(key)) is None:
            return None
        return self._bundles[place[0]], place[1]

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return the first key and the end of each run of keys that are consecutive in a bundle."""
        places = [self._places.get(key) for key in keys]
        begins = [
            i
            for i, place in enumerate(places)
            if i == 0 or place is None or places[i - 1] != (place[0], place[1] - 1)
        ]
        return list(pairwise([*begins, len(keys)]))

    def drop_label(self, label: bytes) -> None:
        """Forget the bundles whose keys end with a label."""
        for first in [first for first in self._bundles if first.endswith(label)]:
            self.drop(first)


class PrefixWalk:
    """Search for the end of the stored prefix of a prompt. Each round asks for some bundles.

    The first round asks for the bundle of the first block alone: most new prompts have none. The
    next ones ask for that behind the last known block, and for those behind the next cuts, of which
    more with each round. A bundle of one block is often followed by others of one block, such as of
    generated tokens, which are asked for together.

    Args:
        keys: blocks of the prompt, in order.
        index: the known bundles.
        cuts: where bundles end.
        most: bundles per round.
    """

    def __init__(self, keys: Sequence[bytes], index: BundleIndex, cuts: Cuts, most: int) -> None:
        self._keys = keys
        self._index = index
        self._begins = [first for first, _ in cuts.runs(keys, [True] * len(keys))]
        self._most = most
        self._width = 1
        self._alone = 1
        self._asked: set[int] = set()
        self.end = 0

    def next_keys(self) -> list[bytes]:
        """Return the first keys of the bundles to ask for; none at the end of the search."""
        found = None
        while self.end < len(self._keys) and (place := self._index.find(self._keys[self.end])):
            found, self.end = place, self.end + 1
        if self.end == len(self._keys) or self.end in self._asked:
            return []
        is_alone = found is not None and len(found[0].keys) == 1
        self._alone = min(2 * self._alone, self._width) if is_alone else 1
        wanted = list(range(self.end, min(self.end + self._alone, len(self._keys))))
        wanted += [i for i in self._begins if i > wanted[-1] and i not in self._asked]
        wanted = [i for i in wanted[: self._width] if self._index.find(self._keys[i]) is None]
        self._width = min(self._most, 8 * self._width)
        self._asked.update(wanted)
        return [self._keys[i] for i in wanted]
