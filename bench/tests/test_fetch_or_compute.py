"""A simulated server with a store is not slower than one without, at any tested bandwidth."""

from __future__ import annotations

import pytest

from bench.fetch_or_compute import SESSIONS, Server, conversations, measure

PROMPTS = conversations(SESSIONS)
NOISE = 0.97


@pytest.fixture(scope="module")
def without_store() -> float:
    return measure(Server(has_host=False), PROMPTS)["requests_per_second"]


@pytest.mark.parametrize(
    "server",
    [
        Server(gbps=0.05),
        Server(gbps=3.0),
        Server(gbps=4.0, latency_seconds=0.05),
        Server(gbps=20.0, changes=((30, 0.2),)),
    ],
    ids=["very slow", "slow", "late", "fast, then slow"],
)
def test_store_never_makes_a_server_slower(server, without_store):
    assert measure(server, PROMPTS)["requests_per_second"] > NOISE * without_store


def test_fast_store_makes_a_server_faster(without_store):
    assert measure(Server(gbps=20.0), PROMPTS)["requests_per_second"] > 1.5 * without_store


def test_fetching_at_any_price_makes_a_server_slower(without_store):
    """This shows that the tests above detect wrong decisions."""
    server = Server(gbps=3.0, knows_speed=False)
    assert measure(server, PROMPTS)["requests_per_second"] < NOISE * without_store


def test_store_that_is_faster_than_the_average_step_makes_a_server_faster():
    """The store is slower than three of four steps of this model."""
    without = measure(Server(has_host=False, is_uneven=True), PROMPTS)["requests_per_second"]
    server = Server(gbps=6.0, is_uneven=True)
    assert measure(server, PROMPTS)["requests_per_second"] > 1.3 * without


@pytest.mark.parametrize(("gbps", "least"), [(3.0, NOISE), (6.0, 1.3)])
def test_store_makes_a_server_of_a_hybrid_model_no_slower(gbps, least, without_store):
    """Snapshots cost this model no computing, so without a store it is as fast as the other one."""
    server = Server(gbps=gbps, is_hybrid=True)
    assert measure(server, PROMPTS)["requests_per_second"] > least * without_store
