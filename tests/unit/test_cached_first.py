"""Admission by cached shares: the order, its bound, and what waiting requests will hit."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig
from aiokv.errors import RequestTooLarge
from aiokv.scheduler.cached_first import MATCHES_PER_ATTEMPT
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.scheduler.waits import PER_CALL
from aiokv.testing import spin
from aiokv.testing.clock import clocked_loop, running_clock
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

_prompts = count(1)


def scheduler_of(device_blocks: int = 64, **config: Any) -> CacheScheduler:
    config = {"admission": "cached_first", "max_running_leases": 1, **config}
    return CacheScheduler(
        CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, **config)
    )


def prompt_of(family: int, cached: int, own: int = 1) -> np.ndarray:
    """Return ``cached`` blocks of a family of prompts, and ``own`` blocks of no other prompt."""
    shared = np.arange(cached * BLOCK_TOKENS, dtype=np.int32) + 100_000 * family
    rest = np.arange(own * BLOCK_TOKENS, dtype=np.int32) + 10_000_000 + 1_000 * next(_prompts)
    return np.concatenate([shared, rest])


def cache(scheduler: CacheScheduler, family: int, blocks: int) -> None:
    """Leave the first blocks of a family in the cache."""
    tokens = prompt_of(family, blocks)[: blocks * BLOCK_TOKENS]
    lease_id = scheduler.match(tokens)[0]
    assert scheduler.allocate(lease_id, len(tokens), 0)[0] is not None
    scheduler.commit(lease_id, len(tokens))
    scheduler.release(lease_id)


def running(scheduler: CacheScheduler, blocks: int = 1, **options: Any) -> int:
    tokens = prompt_of(0, 0, blocks)
    lease_id = scheduler.match(tokens, **options)[0]
    assert scheduler.allocate(lease_id, len(tokens), 0)[0] is not None
    return lease_id


def waiting(
    scheduler: CacheScheduler, tokens: np.ndarray, priority: int = 0, **options: Any
) -> int:
    lease_id = scheduler.match(tokens, **options)[0]
    assert scheduler.allocate(lease_id, len(tokens), priority)[0] is None
    return lease_id


def served(scheduler: CacheScheduler, holder: int) -> list[int]:
    """Release the running lease and then each one that is granted; return the order."""
    order = []
    while True:
        _, effects = scheduler.release(holder)
        granted = [grant.lease_id for grant in effects.granted]
        effects.clear()
        scheduler.applied()
        if not granted:
            return order
        (holder,) = granted
        order.append(holder)


@pytest.mark.parametrize("admission", ["arrival", "cached_first"])
def test_largest_cached_share_is_granted_first(admission):
    scheduler = scheduler_of(admission=admission)
    cache(scheduler, 1, 8)
    holder = running(scheduler)
    cold, half, most = (
        waiting(scheduler, prompt_of(1, cached, 10 - cached)) for cached in (0, 5, 8)
    )
    expected = [cold, half, most] if admission == "arrival" else [most, half, cold]
    assert served(scheduler, holder) == expected
    assert scheduler.violations() == []


def test_equal_shares_keep_the_order_of_arrival():
    scheduler = scheduler_of()
    cache(scheduler, 1, 8)
    holder = running(scheduler)
    cold = [waiting(scheduler, prompt_of(1, 0, 9)) for _ in range(3)]
    hot = [waiting(scheduler, prompt_of(1, 8, 1)) for _ in range(3)]
    assert served(scheduler, holder) == hot + cold


def test_fewest_tokens_to_compute_go_first_among_equal_shares():
    scheduler = scheduler_of()
    holder = running(scheduler)
    long, short = waiting(scheduler, prompt_of(1, 0, 32)), waiting(scheduler, prompt_of(2, 0, 4))
    assert served(scheduler, holder) == [short, long]


def test_priority_goes_before_the_cached_share():
    scheduler = scheduler_of()
    cache(scheduler, 1, 8)
    holder = running(scheduler)
    hot = waiting(scheduler, prompt_of(1, 8))
    cold = waiting(scheduler, prompt_of(1, 0), priority=-1)
    assert served(scheduler, holder) == [cold, hot]


def test_quota_goes_before_the_cached_share():
    scheduler = scheduler_of(max_running_leases=None, salt_quota_blocks=12)
    cache(scheduler, 1, 8)
    holder = running(scheduler, 10, salt="a")
    cold = waiting(scheduler, prompt_of(1, 0, 9), salt="a")
    hot = waiting(scheduler, prompt_of(1, 8), salt="a")
    assert served(scheduler, holder) == [cold, hot]


def test_overdue_requests_go_first_in_the_order_of_arrival():
    scheduler = scheduler_of()
    cache(scheduler, 1, 8)
    holder = running(scheduler)
    first, second = waiting(scheduler, prompt_of(2, 0)), waiting(scheduler, prompt_of(2, 0))
    hot = waiting(scheduler, prompt_of(1, 8))
    for lease_id in (second, first, first):
        scheduler.end_overtaking(lease_id)
    assert served(scheduler, holder) == [first, second, hot]
    assert scheduler.read.statistics().overdue_requests == 2


def test_request_becomes_overdue_while_it_waits_for_its_quota():
    scheduler = scheduler_of(max_running_leases=None, salt_quota_blocks=12, device_blocks=12)
    holder = running(scheduler, 12, salt="a")
    cold = waiting(scheduler, prompt_of(2, 0, 3), salt="a")
    scheduler.end_overtaking(cold)
    short = waiting(scheduler, prompt_of(3, 0, 1), salt="b")
    _, effects = scheduler.release(holder)
    assert [grant.lease_id for grant in effects.granted] == [cold, short]


def test_new_request_with_a_larger_share_is_granted_at_once_unless_one_is_overdue():
    scheduler = scheduler_of(12, max_running_leases=None)
    cache(scheduler, 1, 4)
    running(scheduler, 4)
    cold = waiting(scheduler, prompt_of(2, 0, 9))
    tokens = prompt_of(1, 4)
    hot = scheduler.match(tokens)[0]
    assert scheduler.allocate(hot, len(tokens), 0)[0] is not None
    scheduler.end_overtaking(cold)
    waiting(scheduler, prompt_of(1, 4))
    assert scheduler.violations() == []


def test_share_that_has_grown_since_the_match_counts():
    scheduler = scheduler_of()
    shared = prompt_of(1, 8)
    holder = scheduler.match(shared)[0]
    scheduler.allocate(holder, len(shared), 0)
    cold, sibling = waiting(scheduler, prompt_of(2, 0, 9)), waiting(scheduler, prompt_of(1, 8))
    scheduler.commit(holder, len(shared))
    assert served(scheduler, holder) == [sibling, cold]


def test_share_that_has_shrunk_since_the_match_counts():
    scheduler = scheduler_of()
    cache(scheduler, 1, 8)
    holder = running(scheduler)
    evicted, cold = waiting(scheduler, prompt_of(1, 8, 4)), waiting(scheduler, prompt_of(2, 0, 2))
    scheduler.evict(64, "device")
    assert served(scheduler, holder) == [cold, evicted]


def test_hit_of_a_waiting_request_is_evicted_after_other_blocks():
    """The hit is the oldest in the cache, and a request of a lower number needs room."""
    scheduler = scheduler_of(20, eviction_policy="lru")
    cache(scheduler, 1, 8)
    hot_tokens = prompt_of(1, 8)
    holder = running(scheduler)
    hot = waiting(scheduler, hot_tokens)
    urgent = [waiting(scheduler, prompt_of(2, 0, 8), priority=-1) for _ in range(4)]
    order = []
    while holder:
        tokens = scheduler.read.num_tokens(holder)
        scheduler.commit(holder, tokens)
        _, effects = scheduler.release(holder)
        granted = [grant.lease_id for grant in effects.granted]
        effects.clear()
        scheduler.applied()
        holder = granted[0] if granted else 0
        order += granted
        if holder == hot:
            assert scheduler.read.cached_tokens(hot) == 8 * BLOCK_TOKENS
    assert order == [*urgent, hot]


def test_cancelled_requests_leave_the_line_and_the_rotation():
    scheduler = scheduler_of()
    holder = running(scheduler)
    requests = [waiting(scheduler, prompt_of(1, 0)) for _ in range(3 * MATCHES_PER_ATTEMPT)]
    for lease_id in requests[1:]:
        scheduler.stop_waiting(lease_id)
        scheduler.release(lease_id)
        scheduler.end_overtaking(lease_id)
    assert served(scheduler, holder) == requests[:1]
    assert scheduler.violations() == []


def test_close_refuses_all_requests():
    scheduler = scheduler_of()
    holder = running(scheduler)
    requests = [waiting(scheduler, prompt_of(1, 0)) for _ in range(3)]
    _, effects = scheduler.close()
    assert sorted(lease_id for lease_id, _ in effects.refused) == sorted(requests)
    scheduler.release(holder)
    assert scheduler.violations() == []


def test_requests_that_a_failure_ends_do_not_enter_the_new_line():
    scheduler = scheduler_of()
    tokens = prompt_of(1, 8)
    holder = scheduler.match(tokens)[0]
    scheduler.allocate(holder, len(tokens), 0)
    ended = [waiting(scheduler, prompt_of(1, 8)) for _ in range(3 * PER_CALL)]
    _, effects = scheduler.fail("a rank was lost")
    later = waiting(scheduler, prompt_of(1, 0))
    scheduler.commit(holder, len(tokens))  # the shares of the ended requests grow
    scheduler.release(holder)
    refused, granted, advances = [], [], True
    while advances:
        refused += [lease_id for lease_id, _ in effects.refused]
        granted += [grant.lease_id for grant in effects.granted]
        advances = effects.advance
        effects.clear()
        scheduler.applied()
        _, effects = scheduler.advance()
    assert (refused, granted) == (ended, [later])
    assert scheduler.violations() == []


class Counting:
    """Core that counts the prompts that are matched again."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.matches = 0

    def rematch(self, lease_id: int) -> Any:
        self.matches += 1
        return self.core.rematch(lease_id)


def test_attempt_matches_a_bounded_number_of_prompts():
    scheduler = scheduler_of(256)
    holder = running(scheduler)
    requests = [waiting(scheduler, prompt_of(1, 0)) for _ in range(400)]
    core = Counting(scheduler._core)
    scheduler._admission._shares._core = core
    _, effects = scheduler.release(holder)
    assert [grant.lease_id for grant in effects.granted] == requests[:1]
    assert 0 < core.matches <= 3 * MATCHES_PER_ATTEMPT


def naive_key(scheduler: CacheScheduler, request: dict[str, Any]) -> tuple[int, ...]:
    tokens = request["tokens"]
    hit = scheduler.read.would_hit(tokens, "", [])
    cached = hit.device_tokens + hit.host_tokens
    share = cached * 10 // len(tokens)
    size = (len(tokens) - cached).bit_length()
    order = (0, 0, 0) if request["overdue"] else (1, -share, size)
    return (request["priority"], *order, request["arrival"])


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_are_granted_in_the_order_of_a_naive_oracle(seed):
    """The oracle matches all prompts again before each grant, and sorts them."""
    rng = random.Random(seed)
    scheduler = scheduler_of(24, eviction_policy="lru")
    line: dict[int, dict[str, Any]] = {}
    holder = running(scheduler)
    for arrival in range(300):
        action = rng.random()
        if action < 0.5 and len(line) < MATCHES_PER_ATTEMPT:
            tokens = prompt_of(rng.randrange(4), rng.randrange(9), rng.randrange(1, 6))
            priority = rng.choice([0, 0, 0, 1])
            line[waiting(scheduler, tokens, priority)] = {
                "tokens": tokens,
                "priority": priority,
                "arrival": arrival,
                "overdue": False,
            }
        elif action < 0.6 and line:
            overdue = rng.choice(list(line))
            scheduler.end_overtaking(overdue)
            line[overdue]["overdue"] = True
        elif action < 0.65 and line:
            cancelled = rng.choice(list(line))
            scheduler.stop_waiting(cancelled)
            scheduler.release(cancelled)
            del line[cancelled]
        elif line:
            scheduler.commit(holder, scheduler.read.num_tokens(holder))
            expected = min(line, key=lambda lease_id: naive_key(scheduler, line[lease_id]))
            _, effects = scheduler.release(holder)
            (granted,) = [grant.lease_id for grant in effects.granted]
            effects.clear()
            scheduler.applied()
            assert granted == expected
            holder = granted
            del line[granted]
        assert scheduler.violations() == []


# --- the limit of running leases ------------------------------------------------------------------


def test_running_leases_are_limited_and_pins_do_not_count():
    scheduler = scheduler_of(max_running_leases=2, admission="arrival")
    cache(scheduler, 1, 4)
    pinned = scheduler.match(prompt_of(1, 4), holds="prompt")[0]
    assert scheduler.try_allocate(pinned, 4 * BLOCK_TOKENS)[0] is not None
    holders = [running(scheduler), running(scheduler)]
    tokens = prompt_of(2, 0)
    lease_id = scheduler.match(tokens)[0]
    assert not scheduler.can_allocate(lease_id, len(tokens))
    assert scheduler.try_allocate(lease_id, len(tokens))[0] is None
    assert scheduler.allocatable_blocks("", None, 100) == 0
    with pytest.raises(RequestTooLarge):
        scheduler.try_allocate(lease_id, 1_000_000)
    reason, hint = scheduler.read.explain_wait("", len(tokens), "")
    assert reason == "2 leases hold blocks, and CacheConfig.max_running_leases is 2"
    assert "max_running_leases" in hint
    second_pin = scheduler.match(prompt_of(1, 4), holds="prompt")[0]
    assert scheduler.try_allocate(second_pin, 4 * BLOCK_TOKENS)[0] is not None
    scheduler.release(holders[0])
    assert scheduler.can_allocate(lease_id, len(tokens))
    assert scheduler.try_allocate(lease_id, len(tokens))[0] is not None


# --- the engine's timer ---------------------------------------------------------------------------


def test_request_is_overtaken_until_the_bound_has_passed():
    async def run() -> None:
        async with Cache(
            device_blocks=20,
            host_blocks=0,
            admission="cached_first",
            max_overtake_seconds=60.0,
            max_running_leases=1,
        ) as cache:
            clock = running_clock()
            await cache.fill(prompt(1, 8))
            holder = await cache.serve(prompt(9, 1))
            order: list[str] = []

            async def request(name: str, tokens: np.ndarray) -> None:
                async with cache.engine.match(tokens) as lease:
                    await lease.allocate(len(tokens))
                    order.append(name)
                    await asyncio.sleep(10)

            tasks = [asyncio.ensure_future(request("cold", prompt(2, 8)))]
            await spin(3)
            for number in range(8):
                tasks.append(asyncio.ensure_future(request(f"hot {number}", prompt(1, 8))))
                await spin(3)
            holder.release()
            await clock.advance(200)
            await asyncio.gather(*tasks)
            # Six requests of 10 s go before it; then 60 s have passed.
            assert order.index("cold") == 6
            assert cache.statistics.overdue_requests >= 1
            assert clock.timers == 0

    with asyncio.Runner(loop_factory=clocked_loop()) as runner:
        runner.run(run())
