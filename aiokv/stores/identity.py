"""Fingerprint of a cache: model, weights, layout and rank of its blocks in a store.

The key of a block is the hash of a fingerprint and of the block's digest, so a cache finds only
blocks of the same fingerprint. The fingerprint is the beginning of the SHA-256 of a text, one fact
per line, and the labels of the model and its weights (see :mod:`aiokv.stores.labels`)::

    aiokv blocks 2
    model 11 "llama-3-70b"
    ...
    layer 0 region 1 "k" dtype 8 "bfloat16" shape 2x16x8x64 bytes 32768 at 0

The length of each name in UTF-8 bytes stands before it, so that no name can imitate further lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base import checks
from aiokv.base.groups import ATTENTION
from aiokv.config.cache_config import WindowGroup  # noqa: TC001  (msgspec needs it)
from aiokv.errors import ConfigError
from aiokv.stores.base import medium_name
from aiokv.stores.labels import fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.layout.arrays import Piece
    from aiokv.layout.regions import Regions

# Increase when the meaning of the bytes of a block changes: older blocks are then missing.
FORMAT_VERSION: Final = 2


class StoreIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of the blocks of one rank; blocks of different identities never share a key.

    Attributes:
        model: ``CacheConfig.model``: name of the model, with its revision.
        weights_version: version of the weights that compute the blocks now; may be empty.
        block_tokens: ``CacheConfig.block_tokens``.
        windows: ``CacheConfig.windows``; windows and sinks count, numbers of blocks do not.
        rank: number of the rank.
        num_ranks: number of ranks.
    """

    model: str
    weights_version: str
    block_tokens: int
    windows: dict[str, WindowGroup] = {}
    rank: int = 0
    num_ranks: int = 1

    def fingerprint(self, regions: Regions, group: str = ATTENTION) -> bytes:
        """Return the fingerprint of the objects of a group of these tensors, 32 bytes.

        Args:
            regions: the rank's tensors. Layers, names, element types, the shape of a block, and
                places in a host block are part of the fingerprint; addresses, strides and numbers
                of blocks are not. The order of the axes counts: register tensors in the shape that
                the attention kernel reads, not as plain bytes. Axes and heads count where they were
                given (``Regions.add(axes=, heads=)``), since one shape can have two orders of axes;
                a region without them has the fingerprint that it always had. So a cache whose
                regions get axes does not find the blocks that it stored before.
            group: group of the objects. Its line names the group by its ``medium_name``.

        Raises:
            ConfigError: ``model`` is empty, or a number is out of range.
            UsageError: a name is not valid Unicode.
        """
        text = self.describe(regions, group).encode()
        return fingerprint_of(text, self.model, self.weights_version)

    def describe(self, regions: Regions, group: str = ATTENTION) -> str:
        """Return the text whose hash is the fingerprint; arguments and errors as there."""
        if not checks.text("model", self.model):
            raise ConfigError(
                "model is empty; with stores it must name the model",
                hint="set CacheConfig.model to the model's name and revision: blocks of two models "
                "without names could not be told apart",
            )
        rank, num_ranks = self.rank, self.num_ranks
        checks.integer("block_tokens", self.block_tokens, minimum=1, error=ConfigError)
        checks.integer("num_ranks", num_ranks, minimum=1, error=ConfigError)
        checks.integer("rank", rank, minimum=0, maximum=num_ranks - 1, error=ConfigError)
        lines = [
            f"aiokv blocks {FORMAT_VERSION}",
            f"model {_quoted('model', self.model)}",
            f"weights {_quoted('weights_version', self.weights_version)}",
            f"block_tokens {self.block_tokens}",
            f"rank {rank} of {num_ranks}",
            f"layers {regions.num_layers}",
            *_region_lines(regions),
        ]
        for name, window in sorted(self.windows.items()):
            quoted = _quoted("the name of a window", name)
            needed = f"{window.window_tokens} sink {window.sink_tokens}"
            lines.append(
                f"window {quoted} {needed if window.retention == 'window' else window.retention}"
            )
        if group != ATTENTION:
            lines.append(f"pool {_quoted('group', medium_name(group))}")
            lines += _group_lines(regions, group)
        return "".join(f"{line}\n" for line in lines)


def _region_lines(regions: Regions) -> Iterator[str]:
    for piece in regions.pieces():
        yield f"layer {piece.layer} region {_array(piece)} at {piece.host_offset_bytes}"
    for piece in regions.state_pieces:
        yield f"layer {piece.layer} state {_array(piece)}"


def _group_lines(regions: Regions, group: str) -> Iterator[str]:
    """Yield the places of the tensors of a group in one of its blocks."""
    for piece in regions.group_blocks(group).pieces():
        yield f"layer {piece.layer} slot {_array(piece)} at {piece.host_offset_bytes}"


def _array(piece: Piece) -> str:
    name, dtype = _quoted("the name of a region", piece.region), _quoted("dtype", piece.dtype)
    shape = "x".join(map(str, piece.shape)) or "1"
    axes = ""
    if piece.axes is not None:
        axes = " axes " + " ".join(_quoted("the name of an axis", axis) for axis in piece.axes)
    if piece.heads is not None:
        first, total = piece.heads
        axes += f" heads {first} of {total}"
    return f"{name} dtype {dtype} shape {shape} bytes {piece.block_bytes}{axes}"


def _quoted(what: str, name: str) -> str:
    return f'{len(checks.text(what, name).encode())} "{name}"'
