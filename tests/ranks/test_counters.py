"""The table of a rank's transfers: what is remembered, and for how long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiokv.base.plan import ONLOAD, TransferPlan, id_bytes
from aiokv.errors import ClosedError, TransferError, UsageError
from aiokv.ranks import counters as module
from aiokv.ranks.counters import Counters
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.thread_waits import Deadline
from aiokv.worker.views import LayerView

pytestmark = pytest.mark.asyncio


def arrive(counters: Counters, transfer_id: int) -> LayerDoneCounter:
    plan = TransferPlan(
        transfer_id=transfer_id,
        route=ONLOAD,
        source_blocks=id_bytes([1]),
        target_blocks=id_bytes([2]),
    )
    counter = LayerDoneCounter(1, transfer_id=transfer_id)
    counters.add(plan, counter)
    return counter


def end(counters: Counters, counter: LayerDoneCounter) -> None:
    counter.mark_layer_done(0)
    counters.note_end(counter.transfer_id)


async def test_a_plan_that_arrives_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "KEPT_COUNTERS", 1)
    counters = Counters()
    end(counters, arrive(counters, 9))
    waiting = asyncio.create_task(counters.get(8))
    await asyncio.sleep(0)
    assert not counters.is_forgotten(8), "8 is lower than 9, and has not arrived"
    counter = arrive(counters, 8)
    assert await waiting is counter
    end(counters, counter)
    assert counters.find(8) is not None
    assert counters.find(9) is None
    assert counters.is_forgotten(9)
    assert not counters.is_forgotten(8)
    with pytest.raises(UsageError, match="ended long ago"):
        await counters.get(9)


async def test_a_restart_forgets_ended_transfers_and_keeps_those_that_move():
    counters = Counters()
    ended, moving = arrive(counters, 1), arrive(counters, 2)
    end(counters, ended)
    waiting = asyncio.create_task(counters.get(3))
    await asyncio.sleep(0)
    counters.clear("the group restarts")
    with pytest.raises(ClosedError, match="restarts"):
        await waiting
    assert counters.is_forgotten(1)
    assert counters.find(2) is not None
    assert not counters.is_forgotten(2), "its bytes still move"
    end(counters, moving)
    counters.clear("the group restarts")
    assert counters.is_forgotten(2)


async def test_threads_are_released_when_the_loop_of_the_rank_has_ended():
    counters = Counters()
    ended, moving = arrive(counters, 1), arrive(counters, 2)
    end(counters, ended)
    with ThreadPoolExecutor(2) as threads:
        waits = [
            threads.submit(moving.rest, Deadline(None)),
            threads.submit(LayerView([moving]).host_wait, 0),
        ]
        counters.abandon("the loop has ended")
        for wait in waits:
            with pytest.raises(TransferError, match="the loop has ended"):
                wait.result(PATIENCE_SECONDS)
    assert not moving.at_rest, "its bytes may still move"
    ended.raise_for_error()
