"""Random walks of the cache machine, longer than the runs that Hypothesis draws.

The same rules, drawn with weights that fill the cache, and that differ from walk to walk: some do
little but resize, others let most copies fail.
"""

from __future__ import annotations

import os
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.property.cache_simulation import POLICIES
from tests.property.test_core_state_machine import CacheMachine

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 250
M = TypeVar("M", bound=CacheMachine)


Rule = tuple[float, "Callable[[], Any]", "Callable[[], Any]"]  # weight, precondition, action


def begun(random: Random, machine: M) -> M:
    machine.begin(
        block_tokens=random.randint(1, 3),
        device_blocks=random.randint(3, 9),
        host_blocks=random.choice([0, 4, 12]),
        leave_tokens=random.randint(1, 2),
        reserve_blocks=random.randint(0, 2),
        min_onload_blocks=random.choice([0, 0, 0, 2]),
        policy=random.choice(POLICIES[1:]),
        threshold=random.randint(1, 3),
        low_watermark=random.choice([0, 0, 3, 6]),
        alphabet=random.randint(1, 3),
        with_items=random.random() < 0.4,
        event_blocks=random.choice([0, 1, 6, 100, 100]),
        splits_items=random.random() < 0.3,
    )
    return machine


def walk(
    seed: int,
    steps: int = STEPS,
    machine: type[M] = CacheMachine,  # type: ignore[assignment]
    more_rules: Callable[[M, Random], list[Rule]] = lambda machine, random: [],
) -> M:
    random = Random(seed)
    m = begun(random, machine())
    failing = random.choice((0.1, 0.3, 0.8))

    def number(limit: int = 7) -> int:
        return random.randint(0, limit)

    def prompt() -> list[int]:
        return [number(2) for _ in range(random.randint(1, 6))]

    def flag(share: float = 0.5) -> bool:
        return random.random() < share

    def shapes() -> list[tuple[int, int, int]]:
        return [(number(1), number(3), 1 + number(3)) for _ in range(number(2))]

    def match() -> None:
        m.match(prompt(), number(9), number(5) == 0, flag(0.9), flag(0.9), shapes())

    def settle_and_clear() -> None:
        """Clear a tier as ``sleep`` does, after all leases and transfers ended."""
        while m.callers:
            m.give_back(0, "release", False)
        while m.batches:
            m.end_batch(0, flag())
        while m.plans:
            if set(m.plans) - set(m.submitted):
                m.submit(number())
            else:
                m.complete(number(), flag(failing), number())
        m.forget(random.choice(["device", "host"]))

    rules: list[Rule] = [
        (6, lambda: True, lambda: m.serve(prompt(), number(9), flag(), flag())),
        (6, lambda: True, match),
        (5, m.waiting, lambda: m.allocate_once(number(), number(5) if flag(0.3) else 0)),
        (9, m.waiting, lambda: m.allocate(number(), random.randint(-9, 3) if flag(0.3) else 0)),
        (2, m.waiting, lambda: m.allocate_insisting(number())),
        (1, lambda: True, lambda: m.pin(prompt(), number(9), number(5) == 0)),
        (4, m.granted, lambda: m.compute_and_commit(number(), random.choice([1, 2, 99]), flag())),
        (3, lambda: m.callers, lambda: m.give_back(number(), "release", flag())),
        (1, lambda: m.callers, lambda: m.give_back(number(), "retract", flag())),
        (2, m.granted, lambda: m.append(number(), prompt()[:4], shapes())),
        (1, m.granted, lambda: m.truncate(number(), number(4))),
        (2, m.granted, lambda: m.extend(number(), random.choice([None, number()]), number(4))),
        (1, lambda: m.callers, lambda: m.bad_numbers(number(), random.choice([-1, 1 << 40]))),
        (2, lambda: True, m.flush_backups),
        (2, lambda: True, lambda: m.save_ahead(number(6))),
        (9, lambda: set(m.plans) - set(m.submitted), lambda: m.submit(number())),
        (9, lambda: m.submitted, lambda: m.complete(number(), flag(failing), number())),
        (1, lambda: set(m.plans) - set(m.submitted), lambda: m.cancel(number())),
        (1, lambda: True, m.take_abandoned),
        (3, lambda: True, lambda: m.evict(number(9), random.choice(["device", "device", "host"]))),
        (1, lambda: True, lambda: m.reset(number(9))),
        (2, lambda: True, lambda: m.resize(random.randint(-2, 4))),
        (1, lambda: True, lambda: m.shrink_at_rest(1 + number(5), number(1))),
        (1, lambda: True, lambda: m.forget(random.choice(["device", "host"]))),
        (0.3, lambda: True, settle_and_clear),
        (1, lambda: True, lambda: m.finish_step(number(1))),
        (2, m.granted, lambda: m.begin_batch(number(), random.choice([None, number()]))),
        (2, lambda: m.batches, lambda: m.end_batch(number(), flag())),
        (1, lambda: len(m.subscribers) < 3, lambda: m.subscribe(random.choice([1, 6, 100]))),
        (3, lambda: m.subscribers, lambda: m.take_events(number(), 1 + number(3), flag(0.2))),
        (3, lambda: m.subscribers, lambda: m.take_all_events(number(), flag(0.1))),
        *more_rules(m, random),
    ]
    weights = [weight * random.choice((0.2, 1, 1, 4)) for weight, _, _ in rules]
    for _ in range(steps):
        _, possible, act = random.choices(rules, weights)[0]
        if possible():
            act()
            m.invariants_hold()
            m.model_agrees()
            m.saving_runs_ahead()
            m.promises_are_known()
            m.no_wrong_kv_can_be_served()
    return m


def test_walks_report_changes_and_overflow() -> None:
    """Negative control: the walks above report blocks, and drop events of a full queue."""
    subscribers = [s for seed in range(60) for s in walk(seed).subscribers]
    assert sum(s.stored for s in subscribers) > 100
    assert sum(s.removed for s in subscribers) > 100
    assert sum(s.events.restarts for s in subscribers) > 10
    assert sum(s.events.dropped_blocks for s in subscribers) > 10


@pytest.mark.parametrize("seed", range(400 if os.environ.get("AIOKV_DEEP") else 40))
def test_random_walk(seed: int) -> None:
    machine = walk(seed)
    machine.teardown()


def test_walks_reach_onloads_failures_saves_and_evictions() -> None:
    """Negative control: the walks above onload, fail, save and evict."""
    statistics = [walk(seed).core.statistics() for seed in range(30)]
    for name in (
        "hit_device_tokens", "hit_host_tokens", "attention.onloaded_blocks",
        "attention.offloaded_blocks", "attention.device.evicted_blocks",
        "attention.host.evicted_blocks", "failed_blocks", "reclaimed_host_copies",
    ):  # fmt: skip
        assert sum(map(attrgetter(name), statistics)) > 0, name
