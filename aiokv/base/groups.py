"""Block groups: kinds of blocks that are kept, copied, saved, fetched, sent and evicted.

Each cache has the group ``"attention"``. A model with recurrent state has ``"state"``, whose blocks
are slots with the state at a block boundary. The other groups are those of
``CacheConfig.windows``, by their names.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Retention = Literal["all", "window", "last"]
"""The blocks of a group that a hit needs: ``"all"`` of its prefix, those of a sliding ``"window"``
at its end and of the sink at its beginning, or the ``"last"`` one."""

RETENTIONS: Final[tuple[Retention, ...]] = ("all", "window", "last")

ATTENTION: Final = "attention"
STATE: Final = "state"
_LAYERS: Final = f"{ATTENTION} "  # of the names of ranges of layers
_RETENTIONS: Final[dict[str, Retention]] = {ATTENTION: "all", STATE: "last"}


def layers_group(first: int, end: int) -> str:
    """Return the name of the layers ``first`` to ``end - 1`` of the blocks of full attention."""
    return f"{_LAYERS}{first}:{end}"


def layers_of(group: str) -> tuple[int, int] | None:
    """Return the first layer and the end of a range of layers; None for a whole group."""
    if not group.startswith(_LAYERS):
        return None
    first, _, end = group.removeprefix(_LAYERS).partition(":")
    return int(first), int(end)


def retention_of(group: str) -> Retention:
    """Return the retention of a group; each name that is not reserved is that of a window group."""
    retention = _RETENTIONS.get(group)
    if retention is not None:
        return retention
    return "all" if group.startswith(_LAYERS) else "window"


def is_reserved(name: str) -> bool:
    """Return True for a name that a window group must not have."""
    return name in _RETENTIONS or name.startswith(_LAYERS)


class BlockGroup(NamedTuple):
    """A group other than ``"attention"``, whose blocks a hit needs beside those of full attention.

    Attributes:
        name: name of the group.
        number: its number in the core.
        head_blocks: blocks at the beginning of a prompt that a hit needs: the sink of a window.
        tail_blocks: last blocks of the hit that it needs: those that a window reaches, or the slot
            of recurrent state.
    """

    name: str
    number: int
    head_blocks: int
    tail_blocks: int
