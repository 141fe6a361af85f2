"""Averages of rates, with bounds on extreme ones."""

from __future__ import annotations

import pytest

from aiokv.base.rates import EXTREME_FACTOR, bounded_mean


def test_mean_is_weighted():
    assert bounded_mean([(2.0, 3.0)]) == 2.0
    assert bounded_mean([(1.0, 3.0), (2.0, 1.0)]) == pytest.approx(1.25)


@pytest.mark.parametrize("extreme", [1e-9, 1e9])
def test_extreme_tenth_counts_as_the_next_rate(extreme):
    assert bounded_mean([*[(2.0, 1.0)] * 10, (extreme, 1.0)]) == pytest.approx(2.0, rel=0.3)
    assert bounded_mean([*[(2.0, 1.0)] * 10, (extreme, 0.5)]) == 2.0


def test_rate_is_bounded_by_the_median():
    rates = [(1.0, 1.0), (1.0, 1.0), (100.0, 1.0)]
    assert bounded_mean(rates) == pytest.approx((2.0 + EXTREME_FACTOR) / 3)
    rates = [(1.0, 1.0), (1.0, 1.0), (0.01, 1.0)]
    assert bounded_mean(rates) == pytest.approx((2.0 + 1 / EXTREME_FACTOR) / 3)
