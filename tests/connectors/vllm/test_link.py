"""Link: loads that a step waits for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from aiokv.connectors.vllm.link import LoadQueue

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


@dataclass
class Load:
    is_done: bool = False


def make_link(rate: Callable[[], float] = lambda: 1_000.0 * MIB, wait: float = 0.05) -> LoadQueue:
    """Return a link of 1,000 blocks per second, or 1 per millisecond."""
    return LoadQueue(MIB, rate, wait)


def test_a_step_waits_for_a_load_on_an_idle_link() -> None:
    assert make_link().suits_step(1_000_000, deferred_blocks=0, has_others=False)


@pytest.mark.parametrize(("front", "suits"), [(2, True), (3, False)])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_step_does_not_wait_behind_queued_loads(
    front: int, suits: bool, is_deferred: bool
) -> None:
    link = make_link()
    if not is_deferred:
        link.add(Load(), front)
    deferred = front if is_deferred else 0
    assert link.suits_step(1, deferred_blocks=deferred, has_others=False) is suits


def test_ended_loads_do_not_count_as_queued() -> None:
    link, load = make_link(), Load()
    link.add(load, 100)
    assert not link.suits_step(1, deferred_blocks=0, has_others=False)
    load.is_done = True
    assert link.suits_step(1, deferred_blocks=0, has_others=False)


def test_a_load_begins_behind_the_last_one_that_has_not_ended() -> None:
    link = LoadQueue(MIB, lambda: 1_000.0 * MIB, 0.05, lambda: 1.0)
    first, last = Load(), Load()
    for load in (first, last):
        link.add(load, 100)
    assert link.seconds_of(10) == pytest.approx(0.21)
    last.is_done = True
    assert link.seconds_of(10) == pytest.approx(0.11)


def test_an_ended_load_is_not_kept_while_later_ones_go_on() -> None:
    link, load = make_link(), Load()
    ended = weakref.ref(load)
    link.add(load, 1)
    link.add(Load(), 1)
    load.is_done = True
    del load
    link.add(Load(), 1)
    assert ended() is None


@pytest.mark.parametrize(("blocks", "suits"), [(50, True), (51, False)])
def test_a_step_with_other_requests_does_not_wait_for_a_long_load(blocks: int, suits: bool) -> None:
    assert make_link().suits_step(blocks, deferred_blocks=0, has_others=True) is suits
    assert make_link().suits_step(blocks, deferred_blocks=0, has_others=False)


def test_a_step_with_other_requests_never_waits_if_the_limit_is_zero() -> None:
    assert not make_link(wait=0.0).suits_step(1, deferred_blocks=0, has_others=True)


def test_unmeasured_link_is_assumed_to_have_20_gb_per_second() -> None:
    link = make_link(lambda: 0.0)
    assert link.suits_step(953, deferred_blocks=0, has_others=True)  # 1 GB in 50 ms
    assert not link.suits_step(954, deferred_blocks=0, has_others=True)
