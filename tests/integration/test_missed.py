"""``Lease.missed`` and the counters of missed tokens, through the public API."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv import CacheConfig, CacheEngine, WindowGroup
from aiokv.statistics import MissedRange
from aiokv.sync import SyncEngine

OPTIONS = {"device_blocks": 4, "block_tokens": 4, "strict": False}
PROMPT = list(range(13))
WINDOW = WindowGroup(window_tokens=4, device_blocks=8)


def make_engine(history: int = 16, **options: Any) -> CacheEngine:
    return CacheEngine(CacheConfig(miss_history_blocks=history, **OPTIONS, **options))


async def serve(engine: CacheEngine, tokens: list[int], salt: str = "") -> list[MissedRange]:
    async with await engine.match(tokens, salt=salt) as lease:
        await lease.allocate(len(tokens))
        missed = lease.missed
        lease.commit(len(tokens))
    return list(missed)


@pytest.mark.asyncio
async def test_evicted_blocks_name_the_lease_that_needed_the_room() -> None:
    async with make_engine() as engine:
        assert [m.cause for m in await serve(engine, PROMPT)] == ["never_seen"]
        other = await engine.match([50] * 13)
        await other.allocate(13)
        demand = other.id
        other.release()
        (missed,) = await serve(engine, PROMPT)
        counts = engine.statistics().missed_tokens_by_cause
    assert (missed.first_token, missed.num_tokens, missed.cause) == (0, 12, "evicted")
    assert (missed.tier, missed.eviction_cause, missed.lease_id) == ("device", "capacity", demand)
    assert missed.evicted_seconds is not None
    assert missed.evicted_seconds >= 0
    assert counts["evicted"] == 12
    assert counts["never_seen"] == 24


@pytest.mark.asyncio
async def test_eviction_by_request_has_no_lease() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        await engine.evict(1)
        (missed,) = await serve(engine, PROMPT)
    assert (missed.first_token, missed.num_tokens) == (8, 4)
    assert (missed.eviction_cause, missed.lease_id) == ("request", None)


@pytest.mark.asyncio
async def test_diverged_prompt_names_position_and_both_tokens() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        (missed,) = await serve(engine, [*PROMPT[:6], 99, *PROMPT[7:]])
    assert (missed.cause, missed.first_token, missed.num_tokens) == ("diverged", 4, 8)
    assert (missed.diverged_at, missed.token, missed.known_token) == (6, 99, 6)


@pytest.mark.asyncio
async def test_tokens_of_another_salt_name_the_salt() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT, salt="other")
        (missed,) = await serve(engine, PROMPT, salt="mine")
    assert (missed.cause, missed.salt, missed.adapter) == ("other_context", "other", "")


@pytest.mark.asyncio
async def test_block_that_another_lease_computes_is_pending() -> None:
    async with (
        make_engine() as engine,
        await engine.match(PROMPT[:5]) as owner,
        await engine.match([*PROMPT[:4], 9, 9]) as lease,
    ):
        await owner.allocate(5)
        await lease.allocate(6)
        (missed,) = lease.missed
        assert (missed.cause, missed.lease_id) == ("pending", owner.id)


@pytest.mark.asyncio
async def test_forgotten_tokens_were_evicted_by_request() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        engine.forget(PROMPT)
        (missed,) = await serve(engine, PROMPT)
    assert (missed.cause, missed.eviction_cause) == ("evicted", "request")


@pytest.mark.asyncio
async def test_purge_forgets_evicted_tokens() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT, salt="left")
        await engine.evict(2)
        await engine.purge("left")
        for salt in ("left", "other"):
            (missed,) = await serve(engine, PROMPT, salt=salt)
            assert missed.cause == "never_seen"
            await engine.reset()


@pytest.mark.asyncio
@pytest.mark.parametrize("windows", [{}, {"local": WINDOW}])  # with one, a reset visits each block
async def test_reset_forgets_evicted_tokens(windows: dict[str, WindowGroup]) -> None:
    async with make_engine(windows=windows) as engine, await engine.match([7, 7]) as open_lease:
        await open_lease.allocate(2)
        await serve(engine, PROMPT[:9])
        assert await engine.evict(2) == 2
        await engine.reset()
        (missed,) = await serve(engine, PROMPT[:9])
    assert missed.cause == "never_seen"


@pytest.mark.asyncio
async def test_without_history_nothing_is_explained() -> None:
    async with make_engine(history=0) as engine:
        assert await serve(engine, PROMPT) == []
        assert set(engine.statistics().missed_tokens_by_cause.values()) == {0}


def test_missed_in_a_thread() -> None:
    with SyncEngine(CacheConfig(miss_history_blocks=16, **OPTIONS)) as engine:
        lease = engine.match(PROMPT)
        lease.allocate(13).result()
        (missed,) = lease.missed
        lease.release()
    assert missed == MissedRange(first_token=0, num_tokens=12, cause="never_seen")
