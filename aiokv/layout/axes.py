"""Names of the axes of a block, and the heads that a rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiokv.base import checks
from aiokv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.layout.arrays import Piece

TOKENS: Final = "tokens"
HEADS: Final = "heads"
MAX_AXES: Final = 8
MAX_NAME_CHARACTERS: Final = 64

_HINT: Final = (
    'axes name the dimensions of a block, outermost first, such as ("tokens", "heads", "dim"); '
    "with rows_per_block, the first one is the rows of the block"
)


def check_axes(what: str, axes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of axes as a tuple; ``"tokens"`` may occur twice, others once.

    Raises:
        LayoutError: not such names.
    """
    if axes is None:
        return None
    shown = checks.shown(axes)
    if isinstance(axes, str | bytes):
        raise LayoutError(f"{what}: axes is {shown}; it must be a sequence of names", hint=_HINT)
    try:
        names = tuple(axes)
    except TypeError:
        raise LayoutError(
            f"{what}: axes is {shown}; it must be a sequence of names", hint=_HINT
        ) from None
    if len(names) > MAX_AXES:
        raise LayoutError(f"{what}: axes has {len(names)} names; at most {MAX_AXES}")
    for name in names:
        checks.text(f"{what}: a name of axes", name, LayoutError)
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
            raise LayoutError(
                f"{what}: axes has a name of {len(name)} characters; it must have 1 to "
                f"{MAX_NAME_CHARACTERS}"
            )
        if names.count(name) > (2 if name == TOKENS else 1):
            raise LayoutError(f"{what}: axes is {names}; {name!r} occurs too often", hint=_HINT)
    return names


def check_heads(
    what: str, axes: tuple[str, ...] | None, heads: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return (first global head, total heads) as ints.

    Raises:
        LayoutError: not two such numbers, or no axis is named "heads".
    """
    if heads is None:
        return None
    if axes is None or HEADS not in axes:
        raise LayoutError(
            f"{what}: heads is {checks.shown(heads)}, but axes is {axes}",
            hint=f"name the axis of the heads {HEADS!r} in axes",
        )
    try:
        first, total = heads
    except (TypeError, ValueError):
        raise LayoutError(
            f"{what}: heads is {checks.shown(heads)}; it must be (first head, total heads)"
        ) from None
    return (
        checks.integer(f"{what}: the first head", first, minimum=0, error=LayoutError),
        checks.integer(
            f"{what}: the total of heads",
            total,
            minimum=1,
            maximum=checks.MAX_INT32,
            error=LayoutError,
        ),
    )


def with_axes(
    piece: Piece, axes: tuple[str, ...] | None, heads: tuple[int, int] | None, what: str
) -> Piece:
    """Return a piece with checked axes and heads.

    Raises:
        LayoutError: they do not fit the shape of the piece.
    """
    if axes is None:
        return piece
    if len(axes) != len(piece.shape):
        raise LayoutError(
            f"{what}: axes names {len(axes)} dimensions {axes}, but a block has the shape "
            f"{piece.shape}",
            hint=_HINT,
        )
    if heads is not None:
        first, total = heads
        own = piece.shape[axes.index(HEADS)]
        if first + own > total:
            raise LayoutError(
                f"{what}: {own} heads from head {first} on exceed the total of {total} heads",
                hint="heads is (first global head of this rank, heads of all ranks together)",
            )
    return replace(piece, axes=axes, heads=heads)
