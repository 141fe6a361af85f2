"""I8: closing refuses new work, names owners of held leases, and frees no memory under a copy."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import ClosedError
from aiokv.testing import spin
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


async def test_closing_fails_waiters_and_waits_for_leases():
    engine = CacheEngine(CacheConfig(device_blocks=2, block_tokens=2))
    await engine.__aenter__()
    holder, waiter = engine.match([1]), engine.match([2])
    await holder.allocate(2)
    task = asyncio.create_task(waiter.allocate(4))
    await spin(2)
    closing = [asyncio.create_task(engine.aclose()) for _ in range(2)]
    await spin(2)
    with pytest.raises(ClosedError):
        await task
    with pytest.raises(ClosedError):
        engine.match([3])
    engine.extend([holder], 1)  # granted leases may finish
    holder.commit(2)
    engine.step()
    assert not any(task.done() for task in closing)
    waiter.release()
    holder.release()
    await asyncio.gather(*closing)
    await engine.aclose()
    with pytest.raises(ClosedError):
        engine.match([3])


async def test_close_names_the_owners_of_leases_still_held(caplog):
    engine = CacheEngine(CacheConfig(device_blocks=2))
    async with engine:
        lease = engine.match([1], owner="req-7")
        await engine.aclose(0)
    assert "engine.leases_held" in caplog.text
    assert any("req-7" in str(record.__dict__) for record in caplog.records)
    lease.release()


async def test_memory_is_kept_until_all_copies_end():
    served = Served()
    await served.engine.__aenter__()
    await served.to_host(A)
    lease = served.engine.match(A)
    await lease.allocate(7)
    lease.release()
    closing = asyncio.create_task(served.engine.aclose())
    await spin(5)
    assert not closing.done()
    assert not served.device.closed
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not served.device.closed
    served.device.complete_all()
    await served.engine.aclose()
    assert served.device.closed
