"""Block groups: kinds of blocks with one retention rule, such as attention or recurrent state.

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
_LAYERS: Final = f"{ATTENTION} "  # prefix of the names of ranges of layers
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


def whole_group(group: str) -> str:
    """Return the group of a range of layers; any other group as it is."""
    return ATTENTION if group.startswith(_LAYERS) else group


def retention_of(group: str) -> Retention:
    """Return the retention of a group; a name that is not reserved names a window group."""
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
        head_blocks: number of blocks that a hit needs at the start of a prompt: the sink of a
            window.
        tail_blocks: number of blocks that a hit needs at its end: those inside a window, or 1 slot
            of recurrent state.
    """

    name: str
    number: int
    head_blocks: int
    tail_blocks: int
