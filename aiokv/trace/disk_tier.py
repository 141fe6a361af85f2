"""A simulated disk tier below the host tier of a replay: which prompt tokens a disk would add.

The tier is a set of block digests with a capacity; no bytes move, and nothing takes time. It has
the rules of a store: blocks behind the cached prefix of a request are looked up, and the unbroken
run of blocks that are found is loaded. A load or a save is a use; the least recently used block is
evicted. Of one request, deeper blocks are evicted first.

Blocks are told apart by 64 bits of their digests: in a trace of ten million different blocks, two
of them are mistaken for each other with a chance of 3 in a million.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from aiokv import _native
from aiokv.config.save_policy import SaveMoment, SavePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DISK_POLICIES: Final[tuple[SaveMoment, ...]] = ("write_through", "nth_use")


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Size and rules of the simulated disk tier; the rules are those of ``CacheConfig.store_*``.

    Attributes:
        blocks: capacity of the tier.
        policy: when a block is saved: ``"write_through"`` or ``"nth_use:N"``.
    """

    blocks: int
    policy: str = "write_through"


class DiskTier:
    """Digests of the blocks on disk, in order of their last use.

    Attributes:
        hit_tokens: prompt tokens that were found on disk, and not on the device or in host memory.
        loaded_blocks: blocks that were found and loaded.
        saved_blocks: blocks that were written.
        evicted_blocks: blocks that were evicted to make room.
    """

    def __init__(self, options: DiskOptions, *, block_tokens: int) -> None:
        self._capacity = options.blocks
        self._saved_at_use = SavePolicy.parse("policy", options.policy, DISK_POLICIES).uses
        self._block_tokens = block_tokens
        self._root = _native.root_digest(block_tokens, "")
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._unsaved: dict[int, int] = {}  # number of uses of computed blocks that were not saved
        self.hit_tokens = 0
        self.loaded_blocks = 0
        self.saved_blocks = 0
        self.evicted_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def serve(self, tokens: NDArray[np.int32], cached_tokens: int) -> int:
        """Look up the blocks of a prompt behind its cached prefix, then save its other blocks.

        Args:
            tokens: the prompt, all of which is computed.
            cached_tokens: tokens found on the device and in host memory.

        Returns:
            Tokens found on disk. The last token of a prompt is always computed.
        """
        digests = self._digests(tokens)
        first = cached_tokens // self._block_tokens
        usable = digests[first : (len(tokens) - 1) // self._block_tokens]
        found = next((i for i, key in enumerate(usable) if key not in self._blocks), len(usable))
        for digest in reversed(usable[:found]):
            self._blocks.move_to_end(digest)
        self.loaded_blocks += found
        self.hit_tokens += found * self._block_tokens
        self._save(digests, first + found)
        return found * self._block_tokens

    def _digests(self, tokens: NDArray[np.int32]) -> list[int]:
        digests = _native.block_digests(self._root, tokens, self._block_tokens)
        words: list[int] = np.frombuffer(digests, np.uint64)[:: len(self._root) // 8].tolist()
        return words

    def _save(self, digests: Sequence[int], computed: int) -> None:
        """Save the due blocks. Blocks from index ``computed`` on were not cached."""
        for digest in digests[computed:]:
            self._unsaved[digest] = 0
        for digest in reversed(digests):
            uses = self._unsaved.get(digest)
            if uses is None:
                continue
            self._unsaved[digest] = uses + 1
            if uses + 1 >= self._saved_at_use:
                self._put(digest)
                del self._unsaved[digest]

    def _put(self, digest: int) -> None:
        """Have the block on disk from now on; a block that is there was used."""
        if digest in self._blocks:
            self._blocks.move_to_end(digest)
            return
        self._blocks[digest] = None
        self.saved_blocks += 1
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
            self.evicted_blocks += 1
