"""Routers: which server gets a prompt."""

from __future__ import annotations

import pytest

from aiokv.errors import UsageError
from aiokv.trace.router import PrefixRouter, RoundRobin, new_router


def test_round_robin_gives_each_server_the_next_prompt():
    router = RoundRobin()
    assert [router.choose([0, 90, 0], 100, 0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_prefix_router_chooses_the_server_that_holds_most():
    router = PrefixRouter(3, tokens_per_second=1_000)
    assert router.choose([0, 64, 32], 100, now=0.0) == 1


def test_prefix_router_leaves_a_server_whose_backlog_costs_more_than_the_prefix_saves():
    router = PrefixRouter(2, tokens_per_second=1_000)
    assert router.choose([80, 0], 1_000, now=0.0) == 0  # 920 tokens of backlog
    assert router.choose([80, 0], 100, now=0.0) == 1  # 100 tokens sooner than 920 + 20
    assert router.choose([80, 0], 100, now=0.0) == 1  # 200 tokens sooner than 940


def test_prefix_router_returns_when_the_backlog_is_computed():
    router = PrefixRouter(2, tokens_per_second=1_000)
    assert router.choose([80, 0], 1_000, now=0.0) == 0
    assert router.choose([80, 0], 100, now=0.83) == 1  # 90 + 20 tokens against 100
    assert router.choose([80, 0], 100, now=0.85) == 0  # 70 + 20 tokens against 80 + 100


def test_prefix_router_gives_equal_servers_prompts_in_turn():
    router = PrefixRouter(3, tokens_per_second=1.0)
    assert [router.choose([0, 0, 0], 10, 0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_among_idle_servers_the_one_that_has_computed_least_gets_the_prompt():
    router = PrefixRouter(2, tokens_per_second=1e9)
    assert [router.choose([0, 0], 100, now=float(n)) for n in range(4)] == [0, 1, 0, 1]


def test_clock_that_goes_back_computes_no_backlog():
    router = PrefixRouter(2, tokens_per_second=1_000)
    assert router.choose([0, 0], 100, now=5.0) == 0
    assert router.choose([0, 0], 100, now=4.0) == 1
    assert router.choose([50, 0], 100, now=5.0) == 0  # 100 + 50 against 100 + 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1.0), "num_servers is 0"), ((2, 0.0), "tokens_per_second is 0.0")],
)
def test_prefix_router_without_servers_or_speed_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        PrefixRouter(*arguments)


def test_prefix_router_refuses_numbers_of_other_servers():
    with pytest.raises(UsageError, match="held_tokens has 1 numbers; there are 2 servers"):
        PrefixRouter(2, 1.0).choose([0], 10, 0.0)


def test_routers_are_made_by_name():
    assert isinstance(new_router("round-robin", 2, 1.0), RoundRobin)
    assert isinstance(new_router("prefix", 2, 1.0), PrefixRouter)
