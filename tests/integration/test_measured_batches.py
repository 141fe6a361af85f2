"""Which batches and tokens of an engine measure the speed of the model."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.engine.speed import PrefillSpeed
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

pytestmark = pytest.mark.asyncio

A, B = prompt(1, 5), prompt(2, 5)  # five blocks and a token each


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of the measured batches."""
    tokens: list[int] = []
    monkeypatch.setattr(PrefillSpeed, "note", lambda _, count, seconds: tokens.append(count))
    return tokens


def in_stream() -> ManualDevice:
    device = ManualDevice()
    device.computes_in_stream = True
    return device


async def test_generated_tokens_do_not_count(noted):
    async with Cache(device_blocks=16) as cache:
        leases = [cache.engine.match(tokens) for tokens in (A, B)]
        for lease in leases:
            await lease.allocate(len(A))
        with cache.engine.computing(leases):
            pass
        for lease in leases:
            lease.commit(len(A))
        for position in range(len(A), len(A) + 2 * BLOCK_TOKENS):
            cache.engine.extend(leases, 1)
            with cache.engine.computing(leases):
                pass
            for lease in leases:
                lease.append(np.array([position], np.int32))
                lease.commit(position + 1)
        with cache.engine.computing(leases):
            pass
        assert noted == [2 * len(A)] + [0] * (2 * BLOCK_TOKENS)
        for lease in leases:
            lease.release()


async def test_positions_of_blocks_that_are_cached_meanwhile_count(noted):
    async with Cache(device_blocks=16) as cache:
        leases = [cache.engine.match(A) for _ in range(2)]
        for lease in leases:
            await lease.allocate(len(A))
        with cache.engine.computing(leases):
            pass
        for lease in leases:
            lease.commit(len(A))  # the index keeps the blocks of the first lease
        with cache.engine.computing(leases):
            pass
        assert noted == [2 * len(A)]
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("computes_in_stream", [False, True])
async def test_batch_with_an_onload_in_flight_is_not_measured(noted, computes_in_stream):
    async with Cache(device_blocks=16, write_policy="write_through") as cache:
        cache.device.computes_in_stream = computes_in_stream
        await cache.fill(A)
        cache.engine.step()
        await cache.finish()
        await cache.engine.evict(16)
        for is_in_flight in (True, False):
            lease = cache.engine.match(A)
            assert lease.try_allocate(len(A))
            if not is_in_flight:
                await cache.finish()
            with cache.engine.computing([lease]):
                await cache.finish()
            lease.commit(len(A))
            cache.engine.step()
            lease.release()
            await cache.finish()
            await cache.engine.evict(16)
        with cache.engine.computing([]):
            pass
        assert noted == [len(A) - 5 * BLOCK_TOKENS]


async def test_step_in_a_stream_is_measured_at_the_end_of_its_event(noted):
    async with Cache(device=in_stream(), device_blocks=16) as cache:
        lease = cache.engine.match(A)
        await lease.allocate(len(A))
        with cache.engine.computing([lease]):
            pass
        lease.commit(len(A))
        event = ManualEvent()
        cache.engine.step(event)
        with cache.engine.computing([lease]):
            pass
        await spin()
        assert noted == []
        event.complete()
        await run_until_idle(lambda: bool(noted))
        assert noted == [len(A)]
        lease.release()
        cache.engine.step()
