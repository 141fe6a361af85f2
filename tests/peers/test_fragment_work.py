"""Work on slots: few bytes on the loop, many in a thread; errors."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import DeviceError
from aiokv.peers.arrivals import Fragment
from aiokv.peers.device_fragments import DeviceFragmentWork
from aiokv.peers.fragment_work import INLINE_BYTES, FragmentWork
from aiokv.peers.transport import PeerMemory
from aiokv.testing import run_until_idle, spin
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.asyncio

MEMORY = PeerMemory(address=0, num_slots=1, slot_bytes=1 << 20, view=memoryview(b""))


class Placing:
    """Mapping whose ``place`` is a function of the test."""

    is_identity = fragment_is_block = False

    def __init__(self, place: Callable[[], object]) -> None:
        self._place = place

    def place(self, address: int, block: int, targets: dict[int, int]) -> None:
        self._place()


def fragment(num_bytes: int, place: Callable[[], object]) -> Fragment:
    mapping: Any = Placing(place)
    return Fragment(
        ticket_id=bytes(16),
        sender_rank=0,
        sender_block=0,
        group=0,
        slot=0,
        num_bytes=num_bytes,
        key=bytes(32),
        mapping=mapping,
    )


@asynccontextmanager
async def working() -> AsyncIterator[FragmentWork]:
    poller = EventPoller()
    poller.open(asyncio.get_running_loop())
    work = FragmentWork(poller)
    yield work
    work.close()
    poller.close()


@pytest.mark.parametrize(
    ("num_bytes", "is_inline"), [(INLINE_BYTES - 1, True), (INLINE_BYTES, False)]
)
async def test_few_bytes_are_read_on_the_loop(num_bytes, is_inline):
    threads: list[threading.Thread] = []
    ends: list[bool] = []
    async with working() as work:
        read = fragment(num_bytes, lambda: threads.append(threading.current_thread()))
        work.place(MEMORY, [read], [{}], ends.append)
        assert ends == []
        await run_until_idle(lambda: ends == [True])
    assert (threads == [threading.current_thread()]) == is_inline


async def test_finish_waits_for_threads():
    gate = threading.Event()
    ends: list[bool] = []
    async with working() as work:
        work.place(MEMORY, [fragment(INLINE_BYTES, gate.wait)], [{}], ends.append)
        finishing = asyncio.create_task(work.finish())
        await spin(20)
        assert not finishing.done()
        gate.set()
        await finishing
        await run_until_idle(lambda: ends == [True])
        await work.finish()


async def test_error_of_a_thread_reaches_the_loop_and_its_continuation(loop_errors):
    ends: list[bool] = []

    def fail() -> None:
        raise ValueError("no room")

    async with working() as work:
        work.place(MEMORY, [fragment(INLINE_BYTES, fail)], [{}], ends.append)
        await run_until_idle(lambda: ends == [False])
        (error,) = loop_errors
        assert str(error["exception"]) == "no room"
        loop_errors.clear()
        work.place(MEMORY, [fragment(INLINE_BYTES, lambda: None)], [{}], ends.append)
        await run_until_idle(lambda: ends == [False, True])


async def test_error_on_the_loop_reaches_the_loop_and_its_continuation(loop_errors):
    ends: list[bool] = []

    def fail() -> None:
        raise ValueError("no room")

    async with working() as work:
        work.place(MEMORY, [fragment(1, fail)], [{}], ends.append)
        await run_until_idle(lambda: ends == [False])
        (error,) = loop_errors
        assert str(error["exception"]) == "no room"
        loop_errors.clear()


async def test_device_that_cannot_verify_leaves_no_fragment_waiting(loop_errors):
    class Broken:
        def verify(self, slots: Any, keys: bytes) -> Any:
            raise DeviceError("the GPU is lost")

    slots: Any = Broken()
    poller = EventPoller()
    poller.open(asyncio.get_running_loop())
    work = DeviceFragmentWork(slots, poller)
    told: list[tuple[list[Fragment], list[bool]]] = []
    received = fragment(1, print)
    work.verify(MEMORY, [received], lambda *arguments: told.append(arguments))
    await run_until_idle(lambda: told == [([received], [False])])
    assert [str(error["exception"]) for error in loop_errors] == ["the GPU is lost"]
    loop_errors.clear()
    poller.close()
