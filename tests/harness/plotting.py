"""Fonts of matplotlib: it opens their files with the first chart, and never closes them."""

from __future__ import annotations

from functools import cache

from aiokv.trace.plot import draw_hit_rates
from aiokv.trace.report import CapacityPoint


@cache
def load_fonts() -> None:
    """Draw a chart of each kind, so that the tests that draw further ones open no file."""
    points = [
        CapacityPoint(
            device_blocks=blocks,
            block_bytes=1,
            prompt_tokens=9,
            hit_tokens={},
            hit_rate=rate,
            is_knee=True,
        )
        for blocks, rate in ((1, 0.5), (2, 0.9))
    ]
    for suffix in (".svg", ".png"):
        draw_hit_rates(points, "device", "fonts", suffix)
