"""The reference of metrics lists those that the engine has."""

from __future__ import annotations

from tests.docs.metrics_reference import PAGE, reference


def test_the_page_has_all_metrics():
    assert PAGE.read_text() == reference(), "run python -m tests.docs.metrics_reference"
