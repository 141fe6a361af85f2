"""Durations and sizes as text."""

from __future__ import annotations

import pytest

from aiokv.base.percentiles import percentile
from aiokv.base.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4e-10, "0.40 ns"),
        (85e-9, "85.0 ns"),
        (85e-6, "85.0 µs"),
        (9.99e-6, "9.99 µs"),
        (4.912e-3, "4.91 ms"),
        (0.32, "320 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1.2419, "1.24 s"),
        (59.96, "60.0 s"),
        (12_345.6, "12,346 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (10_048, "9.81 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (99 << 20, "99.0 MiB"),
        (400 << 30, "400 GiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_sizes_have_a_binary_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_percentile_is_nearest_rank():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [percentile(values, p) for p in (1, 50, 90, 100)] == [1.0, 3.0, 5.0, 5.0]
