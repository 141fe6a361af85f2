"""Proof: work in a thread counts as an access until the thread has ended."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from aiokv.stores import proof
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import Result
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.unit.store_memory import Arena, digests, ids

pytestmark = pytest.mark.asyncio

KEYS = digests(range(2))


@pytest.fixture
def arena():
    arena = Arena(num_blocks=4)
    arena.write(range(4), range(4))
    return arena


@pytest.mark.parametrize("name", ["seal", "verify"])
async def test_thread_of_a_cancelled_call_is_an_access_until_its_end(monkeypatch, arena, name):
    may_end = threading.Event()
    monkeypatch.setattr(proof, "INLINE_BYTES", 0)
    monkeypatch.setattr(
        proof, f"{name}_blocks", lambda *args, **named: may_end.wait(PATIENCE_SECONDS)
    )
    blocks, accesses = proof.Proof(arena.memory), Accesses()
    call = asyncio.create_task(getattr(blocks, name)(KEYS, ids(0, 1), accesses))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    try:
        (work,) = accesses.in_flight
    finally:
        may_end.set()
    assert await work is True
    assert accesses.in_flight == []
    blocks.close()


@pytest.mark.parametrize("inline", [False, True])
async def test_sealed_blocks_are_verified_in_threads_and_on_the_loop(monkeypatch, arena, inline):
    num_bytes = 2 * arena.memory.payload_bytes
    monkeypatch.setattr(proof, "INLINE_BYTES", num_bytes + inline)
    blocks, accesses = proof.Proof(arena.memory), Accesses()
    added = []
    monkeypatch.setattr(accesses, "add", added.append)
    await blocks.seal(KEYS, ids(0, 1), accesses)
    assert (await blocks.verify(KEYS, ids(0, 1), accesses)).tolist() == [Result.DONE] * 2
    assert (await blocks.verify(KEYS, ids(1, 0))).tolist() == [Result.WRONG] * 2
    assert len(added) == (0 if inline else 2)
    blocks.close()


async def test_close_waits_for_the_threads(monkeypatch, arena):
    monkeypatch.setattr(proof, "INLINE_BYTES", 0)
    ended = []

    def work(*args, **named):
        ended.append(threading.current_thread().name)
        return np.zeros(2, np.uint8)

    monkeypatch.setattr(proof, "verify_blocks", work)
    blocks = proof.Proof(arena.memory)
    call = asyncio.create_task(blocks.verify(KEYS, ids(0, 1)))
    await asyncio.sleep(0)
    blocks.close()
    assert [name.startswith("aiokv-proof") for name in ended] == [True]
    await call
    blocks.close()
