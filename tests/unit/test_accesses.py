"""Accesses: operations that use the host blocks of a plan, until they are done."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from aiokv.stores.accesses import Accesses

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


async def test_operations_are_in_flight_until_they_are_done_and_are_forgotten_then():
    accesses, may_end = Accesses(), asyncio.Event()
    task, work = asyncio.create_task(may_end.wait()), asyncio.Future()
    accesses.add(task)
    accesses.add(work)
    assert set(accesses.in_flight) == {task, work}
    work.set_result(None)
    assert accesses.in_flight == [task], "also before the callbacks of the future have run"
    may_end.set()
    await task
    await asyncio.sleep(0)
    done = weakref.ref(task)
    del task
    gc.collect()
    assert done() is None


async def test_cancel_ends_tasks_and_leaves_the_work_of_threads():
    accesses = Accesses()
    task, work = asyncio.create_task(asyncio.Event().wait()), asyncio.Future()
    accesses.add(task)
    accesses.add(work)
    accesses.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not work.done()
    assert accesses.in_flight == [work]
    work.set_result(None)
    assert accesses.in_flight == []
