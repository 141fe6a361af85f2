"""The knee of a curve of hits over memory: where more memory begins to buy few more hits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_DISTANCE: Final = 0.05  # above the straight line, as a share of the height of the curve


def knee_of(sizes: Sequence[float], hits: Sequence[float]) -> int | None:
    """Return the index of the point that lies highest above the line from first to last.

    Args:
        sizes: increasing sizes, on a linear scale: twice the memory costs twice as much.
        hits: hits of each size.

    Returns:
        None for fewer than three points, and for a curve without a bend.
    """
    if len(sizes) < 3 or hits[-1] <= hits[0]:
        return None
    distances = [
        (y - hits[0]) / (hits[-1] - hits[0]) - (x - sizes[0]) / (sizes[-1] - sizes[0])
        for x, y in zip(sizes, hits, strict=True)
    ]
    best = max(range(len(sizes)), key=distances.__getitem__)
    return best if distances[best] >= MIN_DISTANCE else None
