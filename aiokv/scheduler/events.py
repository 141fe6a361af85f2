"""BlockEvents: the blocks of the tiers, and each change, for one subscriber."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from aiokv._native import BlockEvent, EventStream, Medium

if TYPE_CHECKING:
    from aiokv._native import Core

Change: TypeAlias = Literal["stored", "removed", "cleared"]
Place: TypeAlias = Literal["device", "host", "store"]


class BlockRun(NamedTuple):
    """A change of some blocks on one tier, or in the stores.

    Attributes:
        change: ``"stored"`` for consecutive blocks of a prompt whose copies have become valid,
            ``"removed"`` for blocks, in any order, whose copies are gone or can no longer be
            matched, ``"cleared"`` when no tier has any block.
        place: the tier, or ``"store"`` for blocks that a store has.
        parent: digest of the block before the first block; None if there is none.
        digests: 32 bytes per block.
        tokens: int32 token ids; empty unless ``change`` is ``"stored"``.
        context: namespace of the prompt.
        items: item key of each block; empty if no item touches any of the blocks.
    """

    change: Change
    place: Place
    parent: bytes | None
    digests: bytes
    tokens: bytes
    context: str
    items: list[bytes]


class BlockEvents:
    """Stream of changes: first the blocks that the tiers hold, then each change.

    A block is reported after the blocks before it in its prompt. When more than
    ``max_queued_blocks`` blocks have changed since the last ``take``, the stream drops the changes
    and begins again with ``"cleared"``; likewise after a purge, if it reports the stores.

    Args:
        core: native state of the cache.
        max_queued_blocks: limit of the changes that wait for ``take``, in blocks.
        with_stores: report which blocks of the tiers a store has, too, when a save or a fetch of
            theirs has ended; ``"removed"`` is not reported for them.
    """

    __slots__ = ("_stream",)

    def __init__(self, core: Core, max_queued_blocks: int, *, with_stores: bool = False) -> None:
        self._stream = EventStream(core, max_queued_blocks, with_stores)

    @property
    def is_due(self) -> bool:
        """False when all blocks and changes were taken."""
        return self._stream.is_due

    def take(self, max_blocks: int) -> list[BlockRun]:
        """Return the next changes, of about ``max_blocks`` blocks; perhaps none."""
        return [
            BlockRun(_CHANGES[run[0]], _PLACES[run[1]], *run[2:])
            for run in self._stream.drain(max_blocks)
        ]

    def repeat(self) -> None:
        """Report the blocks that the tiers hold once more."""
        self._stream.repeat()

    @property
    def dropped_blocks(self) -> int:
        """Blocks whose changes were dropped, because too many waited for ``take``."""
        return self._stream.dropped_blocks

    @property
    def restarts(self) -> int:
        """Number of times that changes were dropped."""
        return self._stream.restarts


_CHANGES: Final[dict[BlockEvent, Change]] = {
    BlockEvent.STORED: "stored",
    BlockEvent.REMOVED: "removed",
    BlockEvent.CLEARED: "cleared",
}
_PLACES: Final[dict[Medium, Place]] = {
    Medium.DEVICE: "device",
    Medium.HOST: "host",
    Medium.STORE: "store",
}
