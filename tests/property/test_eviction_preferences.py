"""Shares, retentions and demotions: cached blocks and victims equal those of a naive model."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np

from aiokv.config.cache_config import CacheConfig
from aiokv.scheduler.plans import new_core
from tests.models.preferences import Preferences

CONTEXTS = {"": "", "1:a": "a", "1:b": "b", "1:clora": "c"}


def test_cached_blocks_equal_those_of_the_model():
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += walk(seed)
    # A single walk may do little of one kind; all of them together do at least twice as much.
    assert seen["matched"] > 1_000
    assert min(seen["retained"], seen["demote"], seen["forget"]) > 200
    assert seen["inexact"] < 240, "in few of the 24,000 steps, retained parents are not counted"


def walk(seed: int) -> Counter[str]:
    rng = Random(seed)
    capacity, bt = rng.randint(10, 30), 2
    shares = rng.choice([{}, {"a": 0.3}, {"a": 0.5, "b": 0.5}, {"": 0.2, "c": 0.4}])
    core = new_core(
        CacheConfig(
            device_blocks=capacity, block_tokens=bt, eviction_policy="lru", salt_shares=shares
        )
    )
    model = Preferences(
        bt, capacity, {c: int(shares[s] * capacity) for c, s in CONTEXTS.items() if s in shares}
    )
    verbs = ["request"] * 8 + ["match", "match", "release", "forget"]
    if rng.random() < 0.7:
        verbs += ["retain", "retain", "demote", "end"]
    now = 0
    seen: Counter[str] = Counter()
    matched: list[int] = []  # leases without a grant
    context, tokens = "", [1]
    for _ in range(400):
        if rng.random() < 0.8:
            context = rng.choice(list(CONTEXTS))
            tokens = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 14))]
        array = np.array(tokens, np.int32)
        verb = rng.choice(verbs)
        if verb == "request":
            lease, hit, _ = core.match(array, context)
            assert core.allocate(lease, len(tokens)) == 1
            core.commit(lease, len(tokens), 0)
            core.release(lease, 0)
            assert model.request(context, tokens) == hit
        elif verb == "match":
            lease, hit, _ = core.match(array, context)
            matched.append(lease)
            assert model.match(context, tokens) == hit
            seen["matched"] += hit
        elif verb == "release":
            if matched:
                core.release(matched.pop(rng.randrange(len(matched))), 0)
        elif verb == "retain":
            priority, end = rng.randrange(3), now + rng.randint(1, 6)
            blocks = core.retain(array, context, [], priority, end)
            assert model.retain(context, tokens, priority, end) == blocks
            seen["retained"] += blocks
        elif verb == "end":
            now += rng.randint(1, 3)
            core.end_retentions(now)
            model.end(now)
        else:
            blocks = getattr(core, verb)(array, context, [])
            assert getattr(model, verb)(context, tokens) == blocks
            seen[verb] += blocks
        cached = {(c, tuple(np.frombuffer(t, np.int32).tolist())) for c, t, *_ in core.blocks()}
        assert cached == model.cached
        kept = Counter(c for c, t in model.level if model.level[c, t] > (1,))
        counted = core.retained_blocks()  # without parents whose children are evicted later
        assert Counter(counted) <= kept
        seen["inexact"] += counted != kept
        assert core.violations() == []
    return seen


def test_a_matched_prompt_beyond_its_share_is_retained_whole():
    """The match waits to be noted, and then divides the blocks beyond the share from the others."""
    core = new_core(CacheConfig(device_blocks=20, block_tokens=2, salt_shares={"a": 3 / 20}))
    tokens = np.arange(15, dtype=np.int32)
    for end in (15, 7):
        lease = core.match(tokens[:end], "1:a")[0]
        core.allocate(lease, end)
        core.commit(lease, end, 0)
        if end == 15:
            core.release(lease, 0)
    core.match(tokens, "1:a")  # the first 3 blocks, which the share guarantees, are in use
    assert core.retain(tokens, "1:a", [], 0, 1) == 7
    core.release(lease, 0)
    assert core.retained_blocks() == {"1:a": 7}
    assert core.violations() == []


def test_levels_of_ended_retentions_are_used_again():
    core = new_core(CacheConfig(device_blocks=8, block_tokens=2))
    tokens = np.arange(9, dtype=np.int32)
    lease = core.match(tokens, "")[0]
    core.allocate(lease, 9)
    core.commit(lease, 9, 0)
    core.retain(tokens, "", [], 0, 1)  # in use, while its level ends and is used again
    for end in range(2, 5_000):
        core.retain(tokens[:2], "", [], 0, end)
        core.end_retentions(end - 1)
    core.release(lease, 0)
    assert core.retained_blocks() == {"": 1}
    assert core.violations() == []
