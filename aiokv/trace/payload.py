"""Payload: real bytes of the blocks of a replay, and the check of cached blocks.

The bytes of a block are a function of all blocks of its prefix. So the check detects a block that
was copied to the wrong place, was not copied, or belongs to another prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv import Regions
from aiokv.errors import InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv import Lease

NUM_LAYERS = 2
REGION_NAMES = ("k", "v")
_TENSORS = NUM_LAYERS * len(REGION_NAMES)
_WORD_BYTES = 8
_MAX_TENSOR_BLOCK_BYTES = 16 << 10

# Odd multipliers (from splitmix64), so that similar tokens give different words.
_TOKEN_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_TENSOR_FACTOR = 0x94D049BB133111EB


class Payload:
    """Small ``k`` and ``v`` tensors of two layers, ``uint64 [device_blocks, words]`` each.

    Attributes:
        regions: tensors to register with the engine.
        written_blocks: number of blocks written as if a model had computed them.
        verified_blocks: number of cached blocks whose bytes were compared.
    """

    def __init__(self, *, device_blocks: int, host_blocks: int, budget_bytes: int) -> None:
        self.written_blocks = 0
        self.verified_blocks = 0
        words = budget_bytes // ((device_blocks + host_blocks) * _TENSORS * _WORD_BYTES)
        words = min(max(words, 1), _MAX_TENSOR_BLOCK_BYTES // _WORD_BYTES)
        shape = (device_blocks, words)
        self._tensors = [np.zeros(shape, dtype=np.uint64) for _ in range(_TENSORS)]
        self.regions = Regions(num_layers=NUM_LAYERS)
        for index, name in enumerate(REGION_NAMES):
            self.regions.add(name, layers=self._tensors[index :: len(REGION_NAMES)])

    @property
    def block_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._tensors)

    def verify_cached(self, lease: Lease, tokens: NDArray[np.int32], block_tokens: int) -> None:
        """Compare all bytes of the cached blocks of the lease.

        Raises:
            InternalError: a block does not hold the bytes that were written for its prefix.
        """
        cached = lease.cached_tokens // block_tokens
        ids = lease.block_table[:cached]
        words = _prefix_words(tokens, block_tokens, 0, cached)
        for index, tensor in enumerate(self._tensors):
            equal = (tensor[ids] == _tensor_words(words, index)[:, None]).all(axis=1)
            if not equal.all():
                block = int(equal.argmin())
                raise InternalError(
                    f"cached block {block} of {cached} (device block {ids[block]}, tensor {index}) "
                    f"does not hold the bytes that were computed for its prefix"
                )
        self.verified_blocks += cached

    def write_computed(self, lease: Lease, tokens: NDArray[np.int32], block_tokens: int) -> None:
        """Write the full blocks of the lease that were not cached."""
        cached = lease.cached_tokens // block_tokens
        full = len(tokens) // block_tokens
        ids = lease.block_table[cached:full]
        words = _prefix_words(tokens, block_tokens, cached, full)
        for index, tensor in enumerate(self._tensors):
            tensor[ids] = _tensor_words(words, index)[:, None]
        self.written_blocks += full - cached


def _prefix_words(
    tokens: NDArray[np.int32], block_tokens: int, first: int, last: int
) -> NDArray[np.uint64]:
    """Return one word per block ``first ... last - 1``, which depends on all blocks up to it."""
    heads = tokens[: last * block_tokens : block_tokens].astype(np.uint64)
    words: NDArray[np.uint64] = np.cumsum((heads + np.uint64(1)) * _TOKEN_FACTOR, dtype=np.uint64)
    return words[first:]


def _tensor_words(words: NDArray[np.uint64], tensor: int) -> NDArray[np.uint64]:
    return words ^ np.uint64((tensor + 1) * _TENSOR_FACTOR % 2**64)
