"""Device tensors whose bytes identify the tokens that they were computed from."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from aiokv import Regions

WORDS = 3  # per position, layer and region: blocks of few positions do not fill a cache line
_FACTORS = [np.uint64(f) for f in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)]


class WrongBytes(Exception):
    """Error: a block holds other bytes than those of its prefix."""


class Memory:
    """Tensors of one rank: an array ``[device_blocks, block_tokens, 3]`` per layer and region.

    The words of a position are a function of all tokens up to it, the tenant and the weights. So
    a block of another prefix, another tenant or older weights does not compare equal, nor a block
    that a copy has not written.

    Attributes:
        weights: number of weight updates so far.
        tensors: by layer, and in each layer by region.
        checked_blocks: blocks that were compared.
    """

    def __init__(
        self,
        device_blocks: int,
        block_tokens: int,
        *,
        layers: int = 2,
        names: tuple[str, ...] = ("k", "v"),
        rank: int = 0,
        axes: tuple[str, ...] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.layers = layers
        self.names = names
        self.rank = rank
        self._axes = axes
        self.weights = 0
        self.checked_blocks = 0
        self.take(device_blocks)

    def take(self, device_blocks: int) -> None:
        """Make new tensors; the bytes of the old ones are lost."""
        shape = (device_blocks, self.block_tokens, WORDS)
        self.tensors = [np.zeros(shape, np.uint64) for _ in range(self.layers * len(self.names))]
        self.regions = Regions(num_layers=self.layers)
        for number, name in enumerate(self.names):
            layers = self.tensors[number :: len(self.names)]
            self.regions.add(name, layers=layers, axes=self._axes)

    def position_words(
        self, tokens: Any, salt: str = "", weights: int | np.ndarray | None = None
    ) -> np.ndarray:
        """Return a word per token, uint64 ``[tokens]``.

        Args:
            tokens: from the first one of the prompt on.
            salt: tenant.
            weights: version that computes the tokens, or one per token; None for the present one.
                The word of a token depends on all versions up to it.
        """
        tokens = np.asarray(tokens).astype(np.uint64)
        present = self.weights if weights is None else weights
        version = np.broadcast_to(np.asarray(present).astype(np.uint64), tokens.shape)
        mixture = np.cumsum(version ^ version[:1], dtype=np.uint64) << np.uint64(32)
        positions = np.arange(1, len(tokens) + 1, dtype=np.uint64)
        mixed = (tokens + np.uint64(1)) * _FACTORS[0] ^ positions * _FACTORS[1]
        chain = np.cumsum(mixed * _FACTORS[2], dtype=np.uint64)
        tenant = np.uint64(zlib.crc32(salt.encode()) << 16)
        return (chain ^ tenant ^ version ^ mixture) << np.uint64(16)

    def words(
        self, tokens: Any, salt: str = "", weights: int | np.ndarray | None = None
    ) -> np.ndarray:
        """Return the words of the full blocks of a prompt, uint64 ``[blocks, block_tokens]``."""
        full = len(tokens) // self.block_tokens * self.block_tokens
        if isinstance(weights, np.ndarray):
            weights = weights[:full]
        words = self.position_words(tokens[:full], salt, weights)
        return words.reshape(-1, self.block_tokens)

    def write(self, ids: Any, words: np.ndarray, layers: range | None = None) -> None:
        """Write ``words``, one row per block or per ``(block, place)`` in ``ids``.

        Args:
            ids: see above.
            words: of the rows.
            layers: that are written; None for all.
        """
        for index, tensor in enumerate(self.tensors):
            if layers is None or index // len(self.names) in layers:
                tensor[ids] = self._bytes(index, words)

    def check(self, ids: Any, words: np.ndarray, reader: str = "") -> None:
        """Compare with ``words``; arguments as in :meth:`write`.

        Raises:
            WrongBytes: a block holds other bytes.
        """
        for index, tensor in enumerate(self.tensors):
            wrong = tensor[ids] != self._bytes(index, words)
            if wrong.any():
                first = int(wrong.reshape(len(words), -1).any(axis=1).argmax())
                raise WrongBytes(
                    f"{reader}: number {first} of {len(words)} in {ids} (rank {self.rank}, tensor "
                    f"{index}) does not hold the bytes of its prefix"
                )
        self.checked_blocks += len(words)

    def _bytes(self, index: int, words: np.ndarray) -> np.ndarray:
        return (words + np.uint64(self.rank << 8 | index))[..., np.newaxis]
