"""Averages of measured rates, with bounds on extreme measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXTREME_TENTHS: Final = 1  # share of the weight, in tenths, at each end whose rates are bounded
EXTREME_FACTOR: Final = 4.0  # greatest ratio of a measured rate to the median


def bounded_mean(rates: Iterable[tuple[float, float]]) -> float:
    """Return the weighted mean of rates, with bounds on extreme ones (a winsorized mean).

    The lowest and the highest tenth of the weight count with the rate of the next measurement
    towards the median, and no rate counts as more than ``EXTREME_FACTOR`` times lower or higher
    than the median. So a single extreme measurement has hardly an effect.

    Args:
        rates: ``(rate, weight)`` of at least one measurement; no weight is negative, and at least
            one is above 0.
    """
    ascending = sorted(rates)
    descending = ascending[::-1]
    median = _reached(ascending, 5)
    lower = max(_reached(descending, 10 - EXTREME_TENTHS), median / EXTREME_FACTOR)
    upper = min(_reached(ascending, 10 - EXTREME_TENTHS), median * EXTREME_FACTOR)
    total = sum(weight for _, weight in ascending)
    return sum(weight * min(max(rate, lower), upper) for rate, weight in ascending) / total


def _reached(rates: Sequence[tuple[float, float]], tenths: int) -> float:
    """Return the rate of the measurement at which ``tenths`` of the weight are reached."""
    total = sum(weight for _, weight in rates)
    reached = 0.0
    for rate, weight in rates:
        reached += weight
        if 10 * reached >= tenths * total:
            return rate
    raise AssertionError("the last measurement reaches the whole weight")
