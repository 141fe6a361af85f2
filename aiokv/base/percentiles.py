"""Percentiles of samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of at least one sample, in ascending order."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
