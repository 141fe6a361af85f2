"""Durations and sizes as text, in a unit that suits them."""

from __future__ import annotations

from typing import Final

_BYTE_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: ``1.24 s``, ``320 ms``, ``85.0 µs``."""
    for unit, unit_seconds in _UNITS:
        value = seconds / unit_seconds
        if value >= 0.9995 or (value > 0 and unit == "ns"):
            decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{decimals}f} {unit}"
    return "0 s"


def format_bytes(num_bytes: int) -> str:
    """Return a size in a binary unit: ``512 bytes``, ``9.75 MiB``, ``1,024 PiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    value = float(num_bytes)
    for unit in _BYTE_UNITS:
        value /= 1024
        if value < 1023.995 or unit == _BYTE_UNITS[-1]:
            break
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f} {unit}"
