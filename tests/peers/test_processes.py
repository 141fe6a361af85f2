"""Engines in two processes, of which one is killed, stopped, restarted, or has no room.

After each failure the other engine has the right bytes in all positions, holds nothing, and keeps
its invariants.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from aiokv import AiokvError, ConfigError, PeerError, UsageError
from aiokv.errors import LayoutError
from aiokv.stores.base import TRAILER_BYTES
from tests.peers.engines import SECRET, Side, prompt
from tests.peers.processes import Child, Nursery
from tests.peers.proxy import Proxy, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv import Lease
    from tests.peers.proxy import Fault

pytestmark = pytest.mark.asyncio

KILLS = 50 if os.environ.get("AIOKV_DEEP") else 5  # of each side, on each loop
LENGTH = 301
REQUESTS = 6
PATIENCE = 60.0  # seconds; what ends at a deadline or at once ends long before
TICKET_SECONDS = 1.0  # a ticket that the killed server has not opened ends then


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def options(**changed: Any) -> dict[str, Any]:
    """Return options of a side that has room for all requests."""
    return {"device_blocks": 1024, "host_blocks": 0, "ring_blocks": 16, **changed}


async def in_time(work: Any) -> Any:
    """Await some work, which must not take long."""
    async with asyncio.timeout(PATIENCE):
        return await work


async def received(d: Side, p: Child, seed: int, length: int = LENGTH) -> str | None:
    """Receive a prompt from another process, compute what is missing; return the failure."""
    tokens = prompt(length, seed)
    async with await d.granted(tokens) as lease:
        async with lease.receive(timeout=TICKET_SECONDS) as receiving:
            sent = p.send(seed, length, receiving.ticket)
            first = await in_time(receiving.wait())
        d.finish(lease, tokens, first)
        assert (first == length) == (receiving.failure is None)
        del sent
        return receiving.failure


async def sent(p: Side, d: Child, seed: int) -> str | None:
    """Send a prompt to another process; return the failure."""
    ticket, _ = d.receive(seed, LENGTH)
    try:
        _, failure = await in_time(p.prefill(prompt(LENGTH, seed), await ticket))
    except PeerError as error:
        return str(error)
    except ConnectionError:  # killed before it has made the ticket
        return "no ticket"
    return failure


def reasons(logs: list[Any], event: str) -> list[str]:
    """Return the reasons of a kind of log line, each line of another ticket."""
    lines = [line for line in logs if line["event"] == event]
    assert len({line["ticket"] for line in lines}) == len(lines), "a reason is logged twice"
    return [line["reason"] for line in lines]


# --- killed -------------------------------------------------------------------------------------


async def test_prefill_server_is_killed_at_a_random_instant(nursery):
    rng = random.Random(1)
    failures = 0
    async with Side(**options()) as d:
        for number in range(KILLS):
            async with nursery.child(**options(listen=None)) as p:
                seeds = range(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS)
                receives = [asyncio.create_task(received(d, p, seed)) for seed in seeds]
                await asyncio.sleep(rng.uniform(0.0, 0.03))
                with structlog.testing.capture_logs() as logs:
                    await p.killed()
                    ends = await asyncio.gather(*receives)
                failed = sorted(end for end in ends if end is not None)
                assert sorted(reasons(logs, "receive.ended")) <= failed
                failures += len(failed)
            await d.at_rest()
        await d.at_rest(empty=True)
    assert failures, "no receive was cut: the prompts are too short"


async def test_decode_server_is_killed_at_a_random_instant(nursery):
    rng = random.Random(2)
    failures = 0
    async with Side(**options(listen=None)) as p:
        for number in range(KILLS):
            async with nursery.child(**options()) as d:
                seeds = range(1 + number * REQUESTS, 1 + (number + 1) * REQUESTS)
                sends = [asyncio.create_task(sent(p, d, seed)) for seed in seeds]
                await asyncio.sleep(rng.uniform(0.0, 0.03))
                await d.killed()
                ends = await asyncio.gather(*sends)
                failures += sum(end is not None for end in ends)
            await p.at_rest()
        await p.at_rest(empty=True)
    assert failures, "no send was cut: the prompts are too short"
