"""Arrivals: when vLLM is told that a load has ended."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from aiokv.connectors.vllm.arrivals import Arrivals
from aiokv.connectors.vllm.requests import CachedRequest, Onload


@dataclass
class Layers:
    has_arrived: bool = False


def loading_of(layers: Layers) -> dict[str, CachedRequest]:
    """Return the request "a", which waits for a load."""
    request: Any = SimpleNamespace(request_id="a")
    transfers: Any = layers
    onload = Onload(0, 16, in_step=False, started=True, layers=transfers)
    wishes: Any = None
    return {"a": CachedRequest(request, 0, 0, wishes, onload=onload)}


def test_a_load_that_has_arrived_is_told_before_its_report_and_once() -> None:
    arrivals, layers = Arrivals(), Layers()
    loading = loading_of(layers)
    assert arrivals.add_to(None, loading) is None
    layers.has_arrived = True
    assert arrivals.add_to(None, loading) == {"a"}
    assert arrivals.is_unreported("a")
    assert arrivals.add_to(None, loading) is None
    assert arrivals.add_to({"a", "of another connector"}, loading) == {"of another connector"}
    assert not arrivals.is_unreported("a")


def test_a_load_that_was_reported_is_not_told_again() -> None:
    arrivals, loading = Arrivals(), loading_of(Layers(has_arrived=True))
    assert arrivals.add_to({"a"}, loading) == {"a"}
    assert arrivals.add_to(None, loading) is None
    assert not arrivals.is_unreported("a")


def test_a_load_that_has_not_arrived_is_left_to_its_report() -> None:
    arrivals, loading = Arrivals(), loading_of(Layers())
    assert arrivals.add_to(None, loading) is None
    assert arrivals.add_to({"a"}, loading) == {"a"}
