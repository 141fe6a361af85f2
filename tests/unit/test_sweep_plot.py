"""Knees of curves, and the lines of the chart of a sweep."""

from __future__ import annotations

import pytest

from aiokv.errors import UsageError
from aiokv.trace.knee import knee_of
from aiokv.trace.plot import draw_hit_rates, hit_rate_figure
from aiokv.trace.replay import swept_tier
from aiokv.trace.report import CapacityPoint
from tests.harness.plotting import load_fonts


@pytest.fixture(scope="module", autouse=True)
def fonts():
    load_fonts()


@pytest.mark.parametrize(
    ("sizes", "hits", "knee"),
    [
        ([1, 2, 4, 8], [10, 60, 70, 72], 1),
        ([1, 2, 4, 8], [10, 20, 65, 70], 2),
        ([1, 2, 3, 4], [10, 20, 30, 40], None),  # a straight line
        ([1, 2, 3, 4], [0, 0, 0, 40], None),  # bends the other way
        ([1, 2, 3], [5, 5, 5], None),
        ([1, 2, 3], [5, 4, 3], None),
        ([1, 2], [0, 9], None),
        ([], [], None),
    ],
)
def test_knee(sizes, hits, knee):
    assert knee_of(sizes, hits) == knee


def point(device: int, host: int = 0, rate: float = 0.5, *, knee: bool = False) -> CapacityPoint:
    return CapacityPoint(
        device_blocks=device,
        host_blocks=host,
        block_bytes=1 << 20,
        prompt_tokens=1000,
        hit_tokens={"device": int(600 * rate), "host": int(400 * rate) if host else 0},
        hit_rate=rate,
        is_knee=knee,
    )


def test_one_line_has_the_hits_of_each_tier():
    points = [point(100, 400, 0.5, knee=True), point(100, 0, 0.1), point(100, 1600, 0.6)]
    assert swept_tier(points) == "host"
    (axes,) = hit_rate_figure(points, "host", "title").axes
    total, device, host = axes.get_lines()
    assert total.get_xydata().tolist() == [[0, 10], [400 << 20, 50], [1600 << 20, 60]]
    assert device.get_ydata().tolist() == [6, 30, 36]
    assert host.get_ydata().tolist() == [0, 20, 24]
    assert [text.get_text() for text in axes.texts] == ["knee 400 MiB: 50 %"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "400 MiB", "1.56 GiB"]
    assert axes.get_legend() is not None


def test_several_sizes_of_another_tier_are_several_lines():
    points = [point(d, h, (d + h) / 4000) for d in (100, 200) for h in (0, 400, 1600)]
    (axes,) = hit_rate_figure(points, "host", "title").axes
    assert [line.get_label() for line in axes.get_lines()] == ["device 100 MiB", "device 200 MiB"]


def test_one_point_can_be_drawn():
    (axes,) = hit_rate_figure([point(100)], "device", "title").axes
    assert len(axes.get_lines()) == 1


def test_equal_charts_are_equal_files_and_special_characters_stay():
    points = [point(100), point(200)]
    first, second = (draw_hit_rates(points, "device", "a <b> & $c_$", ".svg") for _ in range(2))
    assert first == second
    assert b"a &lt;b&gt; &amp; $c_$" in first


def test_too_many_lines_are_refused():
    points = [point(d, h) for d in range(1, 10) for h in range(10)]
    with pytest.raises(UsageError, match="can draw 7 lines, not 9"):
        draw_hit_rates(points, "host", "title", ".png")
