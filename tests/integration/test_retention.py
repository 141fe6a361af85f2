"""Retention, demotion, forgetting and shares of salts, through the engine."""

from __future__ import annotations

import inspect
import re

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.config.cache_config import EVICTION_POLICIES
from aiokv.errors import ClosedError, ConfigError, UsageError
from aiokv.observe.metrics import exposition
from aiokv.sync import SyncEngine
from aiokv.testing import record, replay_transitions, running_clock

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

BT = 4


def engine_of(device_blocks: int = 400, **settings: object) -> CacheEngine:
    return CacheEngine(CacheConfig(device_blocks=device_blocks, block_tokens=BT, **settings))


async def serve(engine: CacheEngine, tokens: list[int], salt: str = "") -> int:
    """Serve a request; return its cached tokens."""
    async with engine.match(tokens, salt=salt) as lease:
        await lease.allocate(len(tokens))
        cached = lease.cached_tokens
        with engine.computing([lease]):
            pass
        lease.commit(len(tokens))
    return cached


def document(number: int, tokens: int = 64) -> list[int]:
    return [10_000_000 + 1_000 * number + i for i in range(tokens)]


@pytest.mark.parametrize("means", ["share", "retain", "none"])
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
async def test_turns_keep_their_hits_beside_32_documents_per_turn(policy, means):
    shares = {"chat": 0.25} if means == "share" else {}
    chats = [[100_000 * chat + i for i in range(40)] for chat in range(1, 5)]
    hit = hittable = documents = 0
    async with engine_of(eviction_policy=policy, salt_shares=shares) as engine:
        for turn in range(8):
            for chat in chats:
                if turn:
                    hittable += len(chat) // BT * BT
                    chat.extend(range(chat[-1] + 1, chat[-1] + 9))
                hit += await serve(engine, chat, "chat")
                if means == "retain":
                    engine.retain(chat, seconds=60, salt="chat")
                for _ in range(32):
                    documents += 1
                    await serve(engine, document(documents), "batch")
        assert engine.check_invariants() == []
    assert hit == 0 if means == "none" else hit >= 0.95 * hittable > 0


async def test_a_retention_ends_and_a_higher_priority_outlasts_a_lower_one():
    clock = running_clock()
    async with engine_of(12) as engine:
        first, second = document(1, 17), document(2, 17)
        for tokens in (first, second):
            await serve(engine, tokens)
        assert engine.retain(first, seconds=20, priority=1) == 16
        assert engine.retain(second, seconds=20) == 16
        assert engine.retain(document(3), seconds=20) == 0
        assert engine.inspect.retained_blocks_by_salt() == {"": 8}
        await serve(engine, document(4, 24))  # needs two blocks of the lower priority
        assert engine.would_hit(first).total == 16
        assert engine.would_hit(second).total == 8
        await clock.advance(19.9)
        assert engine.inspect.retained_blocks_by_salt() == {"": 6}
        await clock.advance(20 / 8 + 0.2)
        assert engine.inspect.retained_blocks_by_salt() == {}
        await serve(engine, document(5, 40))
        assert engine.would_hit(first).total < 16
        assert engine.check_invariants() == []


async def test_retained_blocks_refuse_no_request():
    async with engine_of(8, salt_shares={"a": 1.0}) as engine:
        await serve(engine, document(1, 32), "a")
        engine.retain(document(1, 32), seconds=86_400, priority=3, salt="a")
        assert await serve(engine, document(2, 32), "b") == 0
        assert engine.would_hit(document(1, 32), salt="a").total == 0


@pytest.mark.parametrize("a", ["a", "größe", "価格"])
async def test_a_salt_uses_up_its_own_share_before_those_of_others(a):
    async with engine_of(8, salt_shares={a: 0.5, "b": 0.5}) as engine:
        for salt in (a, "b"):
            await serve(engine, document(1, 17), salt)
        for number, salt in ((2, "b"), (3, a), (4, "b"), (5, "b")):
            other = a if salt == "b" else "b"
            before = engine.would_hit(document(number - 1, 17), salt=other).total
            await serve(engine, document(number, 16), salt)
            assert engine.would_hit(document(number - 1, 17), salt=other).total == before
    async with engine_of(8, salt_shares={a: 0.5}) as engine:
        await serve(engine, document(1, 32), "b")  # uses the share of a, which a does not need
        assert engine.would_hit(document(1, 33), salt="b").total == 32
        await serve(engine, document(2, 16), a)
        await serve(engine, document(3, 16), "b")
        assert engine.would_hit(document(2, 17), salt=a).total == 16


async def test_only_blocks_that_nothing_else_shares_are_forgotten_or_demoted():
    async with engine_of(12) as engine:
        system = document(1, 8)
        one, two = [*system, *document(2, 9)], [*system, *document(3, 9)]
        for tokens in (one, two):
            await serve(engine, tokens)
        assert engine.forget(system) == 0
        assert engine.demote(one) == 8
        await serve(engine, document(4, 30))  # needs two blocks more than are free
        assert engine.would_hit(two).total == 16
        assert engine.would_hit(one).total == 8
        async with engine.match(two) as lease:
            await lease.allocate(17)
            assert engine.forget(two) == 0  # in use
        assert engine.forget(two, salt="other") == 0
        assert engine.forget(two) == 16
        assert engine.would_hit(two).total == 0
        assert engine.check_invariants() == []


async def update_weights(engine: CacheEngine, tokens: list[int]) -> None:
    async with engine.updating_weights():
        pass


CHANGES = {
    "retain": lambda engine, tokens: engine.retain(tokens, seconds=60),
    "retain a part": lambda engine, tokens: engine.retain(tokens[: 2 * BT], seconds=60),
    "demote": lambda engine, tokens: engine.demote(tokens),
    "forget": lambda engine, tokens: engine.forget(tokens),
    "evict": lambda engine, tokens: engine.evict(2),
    "reset": lambda engine, tokens: engine.reset(),
    "purge": lambda engine, tokens: engine.purge(""),
    "weights": update_weights,
}


@pytest.mark.parametrize("history", [0, 8])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_prompt_that_was_matched_and_not_granted_is_changed(change, history):
    """The match puts its blocks, which two leases have left one after the other, side by side."""
    tokens = list(range(5 * BT))
    async with engine_of(32, miss_history_blocks=history) as engine:
        await serve(engine, tokens)
        async with await engine.match(tokens[: 2 * BT + 1]) as shorter:
            await shorter.allocate(2 * BT + 1)
            async with await engine.match(tokens) as longer:
                await longer.allocate(5 * BT)
            await serve(engine, document(1))
        async with engine.match([*tokens, 1]):
            changed = CHANGES[change](engine, tokens)
            if inspect.isawaitable(changed):
                await changed
            assert engine.check_invariants() == []
        await serve(engine, document(2, 30 * BT))  # evicts most of them
        await serve(engine, tokens)
        assert engine.check_invariants() == []


async def test_a_use_ends_a_demotion():
    async with engine_of(8) as engine:
        for number in (1, 2):
            await serve(engine, document(number, 16))
        assert engine.demote(document(2, 16)) == 16
        assert await serve(engine, document(2, 17)) == 16
        await serve(engine, document(3, 12))
        assert engine.would_hit(document(2, 17)).total == 16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": -1}, "at least 0"),
        ({"seconds": 86_401}, "at most 86400"),
        ({"seconds": 1, "priority": 4}, "priority is 4"),
        ({"seconds": 1, "salt": 3}, "salt"),
    ],
)
async def test_bad_retentions_are_refused_with_value_and_limit(wrong, message):
    async with engine_of() as engine:
        with pytest.raises(UsageError, match=message):
            engine.retain([1, 2, 3], **wrong)
    with pytest.raises(ClosedError):
        engine.forget([1, 2, 3])
    with pytest.raises(ConfigError, match=r"sum of 1\.5"):
        CacheConfig(device_blocks=8, salt_shares={"a": 0.75, "b": 0.75})


async def test_retentions_are_replayed_and_measured():
    clock = running_clock()
    engine = engine_of(salt_shares={"a": 0.5})
    with record(engine) as recording:
        async with engine:
            for number in range(40):
                await serve(engine, document(number), "ab"[number % 2])
                engine.retain(document(number), seconds=3, salt="ab"[number % 2])
                await clock.advance(1)
            text = exposition(engine)
            assert re.search(r'aiokv_salt_retained_blocks{engine="default",salt="a"} [1-9]', text)
            engine.demote(document(39), salt="b")
            engine.forget(document(38), salt="a")
    names = {transition.name for transition in recording.log.transitions}
    assert names >= {f"retention.{verb}" for verb in ("retain", "end_at", "demote", "forget")}
    assert replay_transitions(recording.log) > 100


async def test_threads_retain_and_forget():
    with SyncEngine(CacheConfig(device_blocks=8, block_tokens=BT)) as engine:
        with engine.match(document(1, 9)) as lease:
            lease.allocate(9).result()
            lease.commit(9)
        assert engine.retain(document(1, 9), seconds=1) == 8
        assert engine.forget(document(1, 9)) == 8
