"""Durations as text, in a unit that suits their size."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: ``1.24 s``, ``320 ms``, ``85.0 µs``."""
    for unit, unit_seconds in _UNITS:
        value = seconds / unit_seconds
        if value >= 0.9995 or (value > 0 and unit == "ns"):
            decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{decimals}f} {unit}"
    return "0 s"
