"""Causes of missed blocks equal those of an oracle that forgets nothing, on random walks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from aiokv._native import Core
from tests.models.missed_blocks import MissOracle

if TYPE_CHECKING:
    from tests.models.missed_blocks import Miss

BLOCK = 3
CAUSES = {"never_seen", "diverged", "evicted", "other_weights", "other_context", "pending"}


def _prompt(rng: random.Random, earlier: list[list[int]]) -> list[int]:
    """Return a part of an earlier prompt with other tokens behind it."""
    prefix = rng.choice(earlier) if earlier and rng.random() < 0.9 else []
    prefix = prefix[: rng.randrange(len(prefix) + 1)]
    rest = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    return (prefix + rest)[: 10 * BLOCK]


def _reported(core: Core, lease: int) -> list[Miss]:
    causes: list[Miss] = []
    for first, end, cause, _, _, _, other, _, differs in core.missed(lease):
        assert first == core.cached_tokens(lease) // BLOCK + len(causes)
        fact: object = None
        if cause == "diverged":
            assert differs is not None
            fact = differs[0]
        elif cause in ("evicted", "pending"):
            fact = other
        causes += [(cause, fact)] * (end - first)
    return causes


def _same(reported: list[Miss], expected: list[Miss]) -> bool:
    return len(reported) == len(expected) and all(
        cause == known and (other in fact if isinstance(fact, set) else other == fact)
        for (cause, other), (known, fact) in zip(reported, expected, strict=True)
    )


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_causes_of_random_walks_equal_the_oracle(policy: str) -> None:
    seen = set()
    for seed in range(60):
        rng = random.Random(seed)
        core = Core(block_tokens=BLOCK, device_blocks=24, eviction=policy, history_blocks=100_000)
        oracle = MissOracle(core, BLOCK)
        earlier: list[list[int]] = []
        held: list[tuple[int, int]] = []
        for _ in range(120):
            if rng.random() < 0.03:
                core.reset(new_weights=True)
                oracle.change_weights()
                assert core.violations() == []
                continue
            if held and (len(held) > 2 or rng.random() < 0.4):
                lease, n = held.pop(rng.randrange(len(held)))
                core.commit(lease, n, 0)
                oracle.end(lease)
                core.release(lease, 0)
                oracle.note(0)
                continue
            tokens = _prompt(rng, earlier)
            earlier.append(tokens)
            context = rng.choice(["", "", "", "a", "b"])
            lease, _, _ = core.match(tokens, context)
            if core.allocate(lease, len(tokens)) == 0:
                core.release(lease, 0)
                oracle.note(0)
                continue
            oracle.note(lease)
            cached = core.cached_tokens(lease) // BLOCK
            expected = oracle.causes(context, tokens, cached)
            reported = _reported(core, lease)
            assert _same(reported, expected), (seed, tokens, reported, expected)
            seen |= {cause for cause, _ in reported}
            oracle.promise(lease, context, tokens, cached)
            held.append((lease, len(tokens)))
            assert core.violations() == []
        assert sum(core.statistics().missed_tokens_by_cause.values()) > 0
    assert seen == CAUSES


@pytest.mark.parametrize("limit", [1, 5, 30])
def test_short_history_keeps_its_limit_and_the_hits(limit: int) -> None:
    rng = random.Random(limit)
    cores = [
        Core(block_tokens=BLOCK, device_blocks=24, history_blocks=blocks) for blocks in (0, limit)
    ]
    earlier: list[list[int]] = []
    for _ in range(2_000):
        tokens = _prompt(rng, earlier[-40:])
        earlier.append(tokens)
        hits = []
        for core in cores:
            lease, device, _ = core.match(tokens, rng.choice([""]))
            core.allocate(lease, len(tokens))
            core.commit(lease, len(tokens), 0)
            core.release(lease, 0)
            hits.append(device)
            assert core.violations() == []
        assert hits[0] == hits[1]
    assert cores[0].statistics().missed_tokens_by_cause["evicted"] == 0
    assert cores[1].statistics().missed_tokens_by_cause["evicted"] > 0
