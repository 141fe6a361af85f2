"""Turns of fetches: a request that waits too long for its turn computes, and is counted."""

from __future__ import annotations

import asyncio
import math

import pytest

from aiokv.engine.fetch_line import AT_A_TIME
from aiokv.testing import ScriptedStore, run_until_idle, running_clock, spin
from tests.harness.cache import prompt
from tests.integration.test_stores import cache, filled

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

LONG = [prompt(seed, 40) for seed in range(1, AT_A_TIME + 1)]
SHORT = prompt(9, 2)


async def test_request_whose_turn_comes_too_late_computes_and_is_counted():
    objects = await filled(*LONG, SHORT, device_blocks=200, host_blocks=200)
    store = ScriptedStore(objects=objects)
    async with cache(
        store, device_blocks=200, host_blocks=200, prefill_tokens_per_second=400.0
    ) as c:
        gates = [store.hold("load", call=call) for call in range(AT_A_TIME)]
        first = [asyncio.create_task(c.serve(tokens, wait_store=math.inf)) for tokens in LONG]
        await run_until_idle(lambda: c.statistics.fetches == AT_A_TIME)
        last = asyncio.create_task(c.serve(SHORT, wait_store=math.inf))
        await spin(50)
        assert not last.done()
        await running_clock().advance(0.04)  # 1.5 times the 20 ms that computing takes
        assert last.done()
        assert not any(task.done() for task in first)
        lease = await last
        assert lease.cached_tokens == 0
        lease.release()
        assert c.engine.statistics().requests.late_fetches == 1
        for gate in gates:
            gate.open()
        await run_until_idle(lambda: all(task.done() for task in first))
        for task in first:
            (await task).release()
