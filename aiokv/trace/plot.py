"""A chart of hit rate over memory, as PNG or SVG."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.units import format_bytes
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from aiokv.trace.report import CapacityPoint, SweptTier

PLOT_SUFFIXES: Final = (".svg", ".png")
_TIERS: Final = ("device", "host", "disk")
_COLORS: Final = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d")
_MAX_SERIES: Final = len(_COLORS)
_INK, _GRID = "#374151", "#e5e7eb"
_RC: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.parse_math": False,  # a name may contain $
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "aiokv",  # equal charts are equal files
}


def check_plotting() -> None:
    """Check, before the work starts, that charts can be drawn.

    Raises:
        UsageError: matplotlib cannot be imported.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib, which cannot be imported: {error}",
            hint="pip install 'aiokv[plot]'",
        ) from error
    del matplotlib


def draw_hit_rates(
    points: Sequence[CapacityPoint], tier: SweptTier, title: str, suffix: str
) -> bytes:
    """Return the chart of :func:`hit_rate_figure` as a file.

    Args:
        points: as there; so are ``tier`` and ``title``.
        tier: tier on the x axis.
        title: title above the chart.
        suffix: ``".svg"`` or ``".png"``.

    Raises:
        UsageError: there are more lines than can be told apart.
    """
    from matplotlib import rc_context

    with rc_context(_RC):
        out = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {"Software": "aiokv"}
        figure = hit_rate_figure(points, tier, title)
        figure.savefig(out, format=suffix[1:], dpi=150, metadata=metadata)
    return out.getvalue()


def hit_rate_figure(points: Sequence[CapacityPoint], tier: SweptTier, title: str) -> Figure:
    """Draw the share of the prompt tokens that are cached, over the memory of one tier.

    There is a line per size of the other tiers, with its knee marked. A single line is drawn with
    the hits of each tier below it.

    Args:
        points: one or more points, in any order.
        tier: tier whose sizes are on the x axis, which is logarithmic.
        title: title above the chart.

    Raises:
        UsageError: there are more lines than can be told apart.
    """
    from matplotlib.figure import Figure

    series = _series(points, tier)
    if len(series) > _MAX_SERIES:
        raise UsageError(
            f"--plot can draw {_MAX_SERIES} lines, not {len(series)}",
            hint="sweep fewer sizes of the other tiers",
        )
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for (label, line), color in zip(series.items(), _COLORS, strict=False):
        _draw_line(axes, line, tier, label, color)
    has_tiers = len(series) == 1 and _draw_tiers(axes, next(iter(series.values())), tier)
    _format_axes(axes, points, tier, title)
    if len(series) > 1 or has_tiers:
        axes.legend(frameon=False, loc="upper left")
    return figure


def _series(points: Sequence[CapacityPoint], tier: SweptTier) -> dict[str, list[CapacityPoint]]:
    """Return the points of each line, by the sizes of the other tiers."""
    others = [other for other in _TIERS if other != tier]
    swept = [other for other in others if len({p.num_bytes(other) for p in points}) > 1]
    series: dict[str, list[CapacityPoint]] = {}
    for point in sorted(points, key=lambda p: [p.num_bytes(name) for name in (*others, tier)]):
        sizes = [f"{name} {_size(point.num_bytes(name))}" for name in swept]
        series.setdefault(", ".join(sizes) or "all tiers", []).append(point)
    return series


def _draw_line(
    axes: Any, line: Sequence[CapacityPoint], tier: SweptTier, label: str, color: str
) -> None:
    xs = [point.num_bytes(tier) for point in line]
    ys = [100 * point.hit_rate for point in line]
    axes.plot(xs, ys, marker="o", markersize=5, linewidth=2, color=color, label=label)
    for point, x, y in zip(line, xs, ys, strict=True):
        if not point.is_knee:
            continue
        axes.scatter([x], [y], s=120, facecolors="none", edgecolors=color)
        axes.annotate(
            f"knee {_size(x)}: {y:.0f} %",
            (x, y),
            xytext=(8, -14),
            textcoords="offset points",
            color=color,
            fontweight="bold",
        )


def _draw_tiers(axes: Any, line: Sequence[CapacityPoint], tier: SweptTier) -> bool:
    """Draw the hits of each tier, if there are several; return True then."""
    tiers = [name for name in _TIERS if any(point.hit_tokens.get(name) for point in line)]
    if len(tiers) < 2:
        return False
    xs = [point.num_bytes(tier) for point in line]
    for name, color in zip(tiers, _COLORS[1:], strict=False):
        ys = [100 * point.hit_tokens[name] / point.prompt_tokens for point in line]
        axes.plot(xs, ys, linewidth=1.2, linestyle="--", color=color, label=f"on {name}")
    return True


def _format_axes(axes: Any, points: Sequence[CapacityPoint], tier: SweptTier, title: str) -> None:
    sizes = sorted({point.num_bytes(tier) for point in points})
    smallest = min((size for size in sizes if size), default=1)
    if len(sizes) > 1 and sizes[0] == 0:  # linear up to the smallest size, so that 0 has a place
        axes.set_xscale("symlog", linthresh=smallest, linscale=0.3)
    elif len(sizes) > 1:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [_size(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", rotation=30 if len(sizes) > 8 else 0, length=0)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20), [f"{percent} %" for percent in range(0, 101, 20)])
    axes.set_xlabel(f"{tier} memory for KV")
    axes.set_ylabel("prompt tokens found in the cache")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _size(num_bytes: int) -> str:
    return "none" if num_bytes == 0 else re.sub(r"\.0+ ", " ", format_bytes(num_bytes))
