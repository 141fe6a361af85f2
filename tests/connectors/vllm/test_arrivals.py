"""Arrivals: when vLLM is told that a load has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from aiokv.connectors.vllm.arrivals import Arrivals, StepPace
from aiokv.connectors.vllm.link import LoadQueue
from aiokv.connectors.vllm.requests import CachedRequest, Onload

MIB = 1 << 20
STEP = 0.010
STEP_WAIT = 0.050


@dataclass
class Load:
    has_arrived: bool = False
    has_failed: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_arrived or self.has_failed


@dataclass
class Server:
    """Requests with loads, over a link of one block per millisecond, at a time of its own."""

    steps_wait: bool = True
    now: float = 0.0
    loading: dict[str, CachedRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link = LoadQueue(MIB, lambda: 1_000.0 * MIB, STEP_WAIT, lambda: self.now)
        self.pace = StepPace(lambda: self.now)
        self.arrivals = Arrivals(
            self.link, self.pace, steps_wait=self.steps_wait, clock=lambda: self.now
        )
        self.pace.begin(1, 0)
        self.now += STEP
        self.pace.end(1, None)

    def load(self, name: str, num_blocks: int) -> Load:
        """Begin a load."""
        load, request = Load(), SimpleNamespace(request_id=name)
        onload = Onload(0, num_blocks, in_step=False, started=True, layers=load)  # type: ignore[arg-type]
        self.loading[name] = CachedRequest(request, name, 0, 0, None, onload=onload)  # type: ignore[arg-type]
        self.link.add(load, num_blocks)
        return load

    def told(self, reported: set[str] | None = None, computing: int = 0) -> Any:
        """Return the loads that vLLM takes as ended."""
        told = sum(cached.onload.is_told for cached in self.loading.values() if cached.onload)
        return self.arrivals.add_to(reported, self.loading, computing + told)


def test_a_load_that_has_arrived_is_told_before_its_report_and_once() -> None:
    server = Server(steps_wait=False)
    load = server.load("a", 10)
    assert server.told() is None
    load.has_arrived = True
    assert server.told() == {"a"}
    assert server.arrivals.take_waits() == []
    assert "a" in server.arrivals.unreported
    assert server.told() is None
    assert server.told({"a", "of another connector"}) == {"of another connector"}
    assert "a" not in server.arrivals.unreported


def test_a_load_that_was_reported_is_not_told_again() -> None:
    server = Server()
    load = server.load("a", 10)
    load.has_arrived = True
    assert server.told({"a"}) == {"a"}
    assert server.told() is None
    assert "a" not in server.arrivals.unreported


def test_a_failed_load_is_left_to_its_report() -> None:
    server = Server()
    load = server.load("a", 10)
    load.has_failed = True
    assert server.told() is None
    assert server.told({"a"}) == {"a"}


def test_a_request_alone_begins_with_a_step_that_waits() -> None:
    server = Server()
    server.load("a", 10_000)
    assert server.told() is None  # a new request would wait for this step
    server.now += 10.0 - STEP_WAIT + 1e-6  # rounding
    assert server.told() == {"a"}
    assert server.arrivals.take_waits() == [server.loading["a"]]
    assert server.arrivals.take_waits() == []


@pytest.mark.parametrize(
    ("num_blocks", "computing", "is_told"),
    # While other requests compute, the last 10 blocks are copied beside the first layers.
    [(20, 1, True), (21, 1, False), (12, 4, True), (13, 4, False)],
)
def test_a_step_with_others_waits_where_the_sum_of_delays_is_less(
    num_blocks: int, computing: int, is_told: bool
) -> None:
    server = Server()
    server.load("a", num_blocks)
    server.now += 1e-6  # rounding
    assert (server.told(computing=computing) is not None) is is_told


def test_the_step_in_flight_hides_a_part_of_the_load() -> None:
    server = Server()
    server.load("a", 30)
    assert server.told(computing=1) is None
    server.pace.begin(2, 0)
    server.now += 1e-6
    assert server.told(computing=1) == {"a"}


def test_a_load_behind_another_does_not_delay_the_request_of_the_first() -> None:
    server = Server()
    server.load("a", 30)
    server.load("b", 30)
    assert server.told() == {"a"}


def test_a_short_load_joins_the_step_that_is_scheduled() -> None:
    server = Server()
    assert server.arrivals.suits_step(50, 0)
    assert not server.arrivals.suits_step(51, 0)  # a new request would wait for this step
    assert server.arrivals.suits_step(20, 1)
    assert not server.arrivals.suits_step(21, 1)
    server.load("a", 10)
    assert server.arrivals.suits_step(10, 1)
    assert not server.arrivals.suits_step(11, 1)  # it is copied behind the other one


def test_a_request_that_joins_a_step_is_not_told_by_its_report() -> None:
    server = Server()
    load = server.load("a", 10)
    server.arrivals.join(server.loading["a"])
    assert "a" in server.arrivals.unreported
    assert server.arrivals.take_waits() == [server.loading["a"]]
    load.has_arrived = True
    assert server.told({"a"}) is None
    assert "a" not in server.arrivals.unreported


def test_the_prompt_of_a_step_in_flight_counts() -> None:
    server = Server()
    server.pace.begin(2, 2_000)
    server.now += 0.2
    server.pace.end(2, (2_000, 0.2))
    server.pace.begin(3, 1_000)
    assert server.pace.seconds_left == pytest.approx(0.1)
    server.now += 0.04
    assert server.pace.seconds_left == pytest.approx(0.06)
