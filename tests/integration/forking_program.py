"""A program that forks inside an engine, or ends without closing it: run by a test."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import ClosedError
from aiokv.testing import spin
from tests.harness.leftovers import running_threads

if TYPE_CHECKING:
    from aiokv import Lease

PROMPT = np.arange(17, dtype=np.int32)


def make_engine() -> CacheEngine:
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8) for _ in range(2)])
    config = CacheConfig(device_blocks=8, host_blocks=16, block_tokens=4, drain_timeout_seconds=0.0)
    return CacheEngine(config, regions)


async def serve(engine: CacheEngine) -> int:
    async with engine.match(PROMPT) as lease:
        await lease.allocate(17)
        await lease.layers.wait_all()
        lease.commit(17)
        return lease.cached_tokens


def is_refused(call) -> bool:
    try:
        call()
    except ClosedError as error:
        return "process" in str(error)
    return False


async def fork() -> int:
    """Unwind through the engine in the child; use it on in the parent. Returns the exit status."""
    async with make_engine() as engine:
        await serve(engine)
        await engine.drain()
        await engine.evict(8)
        async with engine.match(PROMPT, owner="held") as held:
            await held.allocate(17)  # its onload runs
            pin = await engine.pin(PROMPT)
            computed = await engine.match([1]).allocate(1)
            batch = engine.computing([computed])
            batch.__enter__()
            computed.release()
            waiting = asyncio.ensure_future(engine.match([1]).allocate(16))
            quiet = asyncio.ensure_future(engine.quiesce())
            await spin(2)
            child = os.fork()
            if child == 0:
                batch.__exit__(None, None, None)
                assert all(map(is_refused, (held.fork, engine.step, engine.pause)))
                assert engine.check_invariants() == []
                pin.release()
                assert pin.released
                return 0  # the waiting tasks are cancelled by the end of the loop
            # Not in a thread: the end of the child's loop closes the parent's wake-up pipe.
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222
            assert status == 0, f"the child ended with status {status}"
            batch.__exit__(None, None, None)
            quiet.cancel()
            pin.release()
        (await waiting).release()
        return 0


async def leave_open(engine: CacheEngine) -> Lease:
    await engine.__aenter__()
    await serve(engine)
    return await engine.match(PROMPT, owner="left").allocate(17)


def end_without_closing(run) -> int:
    before = running_threads()
    engine = make_engine()
    lease = run(leave_open(engine))
    assert engine.check_invariants() == []
    assert [held["owner"] for held in engine.inspect.dump()["leases"]] == ["left"]
    for _ in range(2):
        run(engine.aclose())  # in another loop
    lease.release()
    assert not running_threads() - before

    left = make_engine()
    run(left.__aenter__())
    del left
    gc.collect()
    assert not running_threads() - before
    return 0


def main() -> int:
    mode, loop = sys.argv[1:]
    run = uvloop.run if loop == "uvloop" else asyncio.run
    return run(fork()) if mode == "fork" else end_without_closing(run)


if __name__ == "__main__":
    sys.exit(main())
