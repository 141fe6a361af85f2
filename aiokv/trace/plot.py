"""A line chart of hit rate against capacity, as a self-contained SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.trace.report import CapacityPoint

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 40, 56, 64
_LABEL_WIDTH = 72
_COLORS = {"device": "#2563eb", "host": "#ea580c", "total": "#111827"}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#374151}.title{font-weight:600;font-size:15px}"
    ".grid{stroke:#e5e7eb}.axis{stroke:#6b7280}.line{fill:none;stroke-width:2}"
)


def hit_rate_svg(points: Sequence[CapacityPoint], title: str) -> str:
    """Draw one line per tier and one for their total; the x axis is logarithmic.

    Args:
        points: one or more points, in any order.
        title: title above the chart.

    Returns:
        The SVG document.
    """
    points = sorted(points, key=lambda point: point.device_blocks)
    x = _XScale([point.device_blocks for point in points])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_grid(points, x),
    ]
    tiers = [tier for tier in points[0].hit_tokens if any(p.hit_tokens[tier] for p in points)]
    if tiers == ["device", "total"] or not tiers:
        tiers = ["total"]
    for index, tier in enumerate(tiers):
        parts += _series(tier, index, points, x)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


class _XScale:
    """Logarithmic scale from blocks to pixels; a single capacity is drawn in the middle."""

    def __init__(self, values: Sequence[int]) -> None:
        self._low = math.log(min(values))
        self._span = math.log(max(values)) - self._low

    def __call__(self, blocks: int) -> float:
        share = (math.log(blocks) - self._low) / self._span if self._span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(rate: float) -> float:
    return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)


def _grid(points: Sequence[CapacityPoint], x: _XScale) -> list[str]:
    bottom, right = _y(0), _WIDTH - _RIGHT
    parts = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        label = f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
        parts.append(label)
    free_from = 0.0
    for point in points:
        at = x(point.device_blocks)
        if at >= free_from:
            free_from = at + _LABEL_WIDTH
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">'
                f"{point.device_blocks:,}</text>"
            )
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 16}" text-anchor="middle">device blocks</text>'
        f'<text x="{_LEFT - 8}" y="{_TOP - 12}" text-anchor="end">hit rate</text>'
    )
    return parts


def _series(tier: str, index: int, points: Sequence[CapacityPoint], x: _XScale) -> list[str]:
    color = _COLORS.get(tier, "#059669")
    rates = [point.hit_tokens[tier] / point.prompt_tokens for point in points]
    places = [(x(point.device_blocks), _y(rate)) for point, rate in zip(points, rates, strict=True)]
    line = " ".join(f"{at:.1f},{y:.1f}" for at, y in places)
    parts = [f'<polyline class="line" stroke="{color}" points="{line}"/>']
    for point, rate, (at, y) in zip(points, rates, places, strict=True):
        hit_tokens, blocks = point.hit_tokens[tier], point.device_blocks
        tip = f"{tier}: {hit_tokens:,} tokens ({rate:.1%}) with {blocks:,} blocks"
        parts.append(
            f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{tip}</title></circle>'
        )
    legend = _LEFT + 16 + 110 * index
    parts.append(f'<rect x="{legend}" y="36" width="14" height="4" fill="{color}"/>')
    parts.append(f'<text x="{legend + 20}" y="42">{escape(tier)}</text>')
    return parts
