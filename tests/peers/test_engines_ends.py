"""Two engines: blocks that another lease takes; engines that close, break or sleep."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from contextlib import suppress
from typing import Any

import pytest

from aiokv import CacheConfig, CacheEngine, LeaseState, Peers
from aiokv.base.plan import RECEIVE, SEND
from aiokv.engine.receiving import Receiving
from aiokv.errors import (
    BrokenEngineError,
    ClosedError,
    DeviceError,
    LeaseError,
    PeerError,
    UsageError,
)
from aiokv.stores import DiskStore, StoreUse
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.memory import Memory
from tests.peers.engines import SECRET, Side, prompt, two_engines

pytestmark = pytest.mark.asyncio


# --- blocks that another lease takes --------------------------------------------------------------


@pytest.mark.parametrize("ends", ["release", "expire", "preempt", "deadline", "cancel"])
@pytest.mark.clock
async def test_no_late_byte_reaches_a_lease_that_takes_the_blocks(ends):
    """I11: the copies of the receive are in the device when its lease gives its blocks back."""
    tokens, others = prompt(40), prompt(40, 2)
    device = ManualDevice()
    decode = Side(device, device_blocks=10, host_blocks=0, ring_blocks=4)
    async with (
        two_engines(decode=decode) as (p, d),
        await p.granted(tokens) as source,
    ):
        lease = await d.granted(tokens)
        receiving = lease.receive(timeout=5.0)
        await receiving.__aenter__()
        async with p.engine.send(source, receiving.ticket):
            p.compute(source, tokens, 0, 40)
            await run_until_idle(lambda: len(device.copies_of(RECEIVE)) > 0)
            device.copies_of(RECEIVE)[0].complete(0)
            if ends == "preempt":
                await lease.preempt()
            elif ends == "expire":
                lease.expire_after(2.0)
                await running_clock().advance(2.1)
                assert lease.state is LeaseState.RELEASED
            elif ends == "deadline":
                waiting = asyncio.create_task(receiving.wait())
                await running_clock().advance(5.1)
                assert receiving.failure
                assert not waiting.done()  # a copy still writes a block of the lease
            elif ends == "cancel":
                left = asyncio.create_task(receiving.__aexit__(None, None, None))
                await spin(3)
                assert not left.done()  # a copy still writes a block of the lease
            if ends != "preempt":
                lease.release()
            taker = d.engine.match(others)
            assert not taker.try_allocate(40)
            taking = asyncio.create_task(taker.allocate(40))
            await run_until_idle(lambda: bool(d.engine.statistics().waiting))
            assert not taking.done()
            assert d.engine.check_invariants() == []
            await complete_during(taking, device)
            with d.engine.computing([taker]):
                d.compute(taker, others, 0, 40)
            await run_until_idle(lambda: not p.engine.statistics().peers.sending)
        await d.at_rest()
        d.check(taker, others)
        taker.release()
        await receiving.__aexit__(None, None, None)
        if ends == "cancel":
            await left
        if ends == "deadline":
            assert await waiting == 0
        lease.release()


async def test_blocks_that_arrive_for_an_ended_ticket_are_dropped():
    """The sender goes on after the receiver has given its blocks to another lease."""
    tokens, others = prompt(80), prompt(80, 2)
    decode = Side(device_blocks=20, host_blocks=0, ring_blocks=2)
    async with two_engines(decode=decode) as (p, d), await p.granted(tokens) as source:
        for _ in range(5):
            lease = await d.granted(tokens)
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                async with p.engine.send(source, receiving.ticket):
                    if not p.engine.statistics().published_blocks:
                        p.compute(source, tokens, 0, 80)
                    await receiving.wait(8)
                    lease.release()
                    async with await d.granted(others) as taker:
                        with d.engine.computing([taker]):
                            d.compute(taker, others, 0, 80)
                        await run_until_idle(lambda: not p.engine.statistics().peers.sending)
                        d.check(taker, others)
            await d.engine.reset()


# --- the engine closes, breaks or sleeps ---------------------------------------------------------


@pytest.mark.parametrize("slow", [False, True])
async def test_receiver_closes_with_transfers_in_flight(slow):
    tokens = prompt(40)
    device = ManualDevice() if slow else None
    async with Side(listen=None) as p, await p.granted(tokens) as source:
        d = Side(device)
        await d.engine.__aenter__()
        lease = await d.granted(tokens)
        receiving = lease.receive(timeout=PATIENCE_SECONDS)
        await receiving.__aenter__()
        async with p.engine.send(source, receiving.ticket) as sending:
            p.compute(source, tokens, 0, 18)
            if device is not None:
                await run_until_idle(lambda: bool(device.copies_of(RECEIVE)))
            waiting = asyncio.create_task(receiving.wait())
            await spin(3)
            closing = asyncio.create_task(d.engine.aclose(0.0))
            while not closing.done():
                if device is not None:
                    device.complete_all()
                await asyncio.sleep(0)
            await closing
            assert await waiting < 40
            assert receiving.failure == "the engine was closed"
            p.compute(source, tokens, 18, 40)
        assert sending.failure
        await receiving.__aexit__(None, None, None)
        lease.release()
        with pytest.raises(ClosedError):
            await Receiving(lease.record.leases.peer_tickets, lease, None, 1.0, 0.5).__aenter__()


@pytest.mark.parametrize("slow", [False, True])
async def test_sender_closes_with_transfers_in_flight(slow):
    tokens = prompt(40)
    device = ManualDevice() if slow else None
    async with (
        Side() as d,
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        p = Side(device, listen=None)
        await p.engine.__aenter__()
        source = await p.granted(tokens)
        sending = p.engine.send(source, receiving.ticket)
        await sending.__aenter__()
        p.compute(source, tokens, 0, 18)
        if device is not None:
            await run_until_idle(lambda: bool(device.copies_of(SEND)))
        leaving = asyncio.create_task(sending.__aexit__(None, None, None))
        await spin(3)
        closing = asyncio.create_task(p.engine.aclose(0.0))
        while not closing.done():
            if device is not None:
                device.complete_all()
            await asyncio.sleep(0)
        await closing
        await leaving
        source.release()
        assert sending.failure
        first = await receiving.wait()
        assert first < 40
        d.check(lease, tokens, first)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, first, 40)
        d.check(lease, tokens)


async def test_engine_closes_while_a_send_connects():
    tokens = prompt(40)
    async with (
        Side() as d,
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        p = Side(listen=None)
        await p.engine.__aenter__()
        source = await p.granted(tokens)
        entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
        await spin(2)
        await p.engine.aclose(0.0)
        with pytest.raises((ClosedError, PeerError)):
            await entering
        source.release()
        assert await receiving.wait(0) == 0


async def test_lease_released_while_a_send_connects():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            source = await p.granted(tokens)
            entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
            await spin(2)
            source.release()
            with pytest.raises(LeaseError):
                await entering
            assert p.engine.statistics().peers.sending == 0


async def test_cancelled_connect_leaves_nothing_behind():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(tokens) as source,
        ):
            for passes in range(12):
                sending = p.engine.send(source, receiving.ticket)
                entering = asyncio.create_task(sending.__aenter__())
                await spin(passes)
                if entering.done():
                    break
                entering.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await entering
                assert p.engine.statistics().peers.sending == 0
                await p.at_rest()


async def test_failed_onload_ends_the_receive_before_it_begins():
    tokens = prompt(29)
    device = ManualDevice()
    d = Side(device, write_policy="write_through")
    async with two_engines(decode=d) as (_p, _):
        await d.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: d.engine.statistics().attention.offloaded_blocks == 4)
        await d.engine.evict(64)
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert d.engine.statistics().receives == 0
                device.onloads[0].fail_all(block=2)
                assert await receiving.wait() == 8
                assert receiving.failure == "an onload of the lease has failed"
            assert lease.recompute_from() == 8
            with d.engine.computing([lease]):
                d.compute(lease, tokens, 8, 29)
            d.check(lease, tokens)


async def test_lease_neither_receives_nor_sends_during_an_update_of_the_weights():
    tokens = prompt(30)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        await p.granted(tokens) as source,
    ):
        p.compute(source, tokens, 0, 16)
        async with d.engine.updating_weights(version=""):
            with pytest.raises(LeaseError, match="reset"):
                await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        async with (
            await d.granted(tokens) as other,
            other.receive(timeout=PATIENCE_SECONDS) as receiving,
            p.engine.updating_weights(version=""),
        ):
            with pytest.raises(PeerError, match="here it is 'unnamed "):
                await p.engine.send(source, receiving.ticket).__aenter__()


async def test_failed_device_ends_the_receive():
    tokens = prompt(40)
    device: Any = ManualDevice()
    async with Side(listen=None) as p, await p.granted(tokens) as source:
        d = Side(device)
        await d.engine.__aenter__()
        lease = await d.granted(tokens)
        other = await d.granted(prompt(40, 2))
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            other.receive(timeout=PATIENCE_SECONDS) as second,
        ):
            async with p.engine.send(source, receiving.ticket) as sending:
                p.compute(source, tokens, 0, 18)
                await run_until_idle(lambda: bool(device.copies_of(RECEIVE)))
                device.failure = DeviceError("the device is broken")
                device.copies_of(RECEIVE)[0].fail_all()
                waiting = asyncio.create_task(receiving.wait())
                await complete_during(waiting, device)
                assert (await waiting, await second.wait()) == (0, 0)
                assert "the device is broken" in (second.failure or "")
                with pytest.raises(BrokenEngineError):
                    await other.receive(timeout=PATIENCE_SECONDS).__aenter__()
                device.complete_all()
            assert sending.failure
        lease.release()
        other.release()
        await complete_during(d.engine.aclose(0.0), device)


@pytest.mark.clock
async def test_ended_receives_and_sends_leave_no_timer():
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        before = running_clock().timers
        async with lease.receive(timeout=1000.0) as receiving:
            async with await p.granted(tokens) as source:
                async with p.engine.send(source, receiving.ticket):
                    assert running_clock().timers >= before + 2
                    p.compute(source, tokens, 0, 30)
            assert await receiving.wait() == 30
        await run_until_idle(lambda: p.is_at_rest() and d.is_at_rest())
        assert d.engine.check_invariants() == []


async def test_leaving_a_send_waits_for_the_onloads_of_its_lease():
    tokens = prompt(29)
    device = ManualDevice()
    p = Side(device, listen=None, write_policy="write_through")
    async with two_engines(p) as (_, d):
        await p.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: p.engine.statistics().attention.offloaded_blocks == 4)
        await p.engine.evict(64)
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                async with p.engine.send(source, receiving.ticket) as sending:
                    leaving = asyncio.create_task(sending.__aexit__(None, None, None))
                    await spin(5)
                    assert not leaving.done()
                    await complete_during(leaving, device)
                    assert sending.delivered_tokens == 16
                assert await receiving.wait() == 16
                d.check(lease, tokens, 16)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends", ["position", "deadline", "left"])
@pytest.mark.clock
async def test_wait_returns_when_no_onload_writes_the_lease_any_more(ends, fails):
    tokens = prompt(29)
    device = ManualDevice()
    d = Side(device, write_policy="write_through")
    async with two_engines(decode=d) as (_p, _):
        await d.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: d.engine.statistics().attention.offloaded_blocks == 4)
        await d.engine.evict(64)
        async with await d.granted(tokens) as lease:
            receiving = lease.receive(timeout=3.0)
            await receiving.__aenter__()
            position = 12 if ends == "position" else None
            waiting = asyncio.create_task(receiving.wait(position))
            if ends == "left":
                leaving = asyncio.create_task(receiving.__aexit__(None, None, None))
            elif ends == "deadline":
                await running_clock().advance(3.1)
            await spin(5)
            assert not waiting.done()
            assert ends != "left" or not leaving.done()
            if fails:
                device.onloads[0].fail_all(block=2)
            else:
                device.complete_all()
            assert await waiting == (8 if fails else 16)
            d.check(lease, tokens, 8 if fails else 16)
            await receiving.__aexit__(None, None, None)
            if ends == "left":
                await leaving
            assert not d.engine.check_invariants()


@pytest.mark.clock
async def test_send_whose_lease_ends_while_it_connects_leaves_nothing_behind():
    """At each pass of the loop; meanwhile and afterwards, the ticket is sent again."""
    tokens = prompt(40)
    for passes in range(100):
        async with two_engines() as (p, d), await d.granted(tokens) as lease:
            async with lease.receive(timeout=100.0) as receiving:
                source = await p.granted(tokens)
                entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
                await spin(passes)
                was_late = entering.done()
                source.release()
                again = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                await run_until_idle(lambda: entering.done() and again.done())  # noqa: B023
                if was_late:
                    await entering
                else:
                    with pytest.raises((LeaseError, PeerError)):
                        await entering
                with suppress(PeerError, UsageError):
                    await again
                (rank,) = p.engine.statistics().peers.ranks
                assert rank.sent.tickets == 0
                with suppress(PeerError):
                    await p.prefill(tokens, receiving.ticket)
                waiting = asyncio.create_task(receiving.wait())
                await run_until_idle(waiting.done)  # the receiver knows of the end
                d.finish(lease, tokens, await waiting)
            await run_until_idle(lambda: p.is_at_rest() and d.is_at_rest())
            await running_clock().advance(61.0)
            (rank,) = p.engine.statistics().peers.ranks
            assert rank.connections == 0, "a use of the connection was not ended"
        if was_late:
            return
    raise AssertionError("the send is never entered")


async def test_end_of_a_ticket_takes_no_time_per_slot():
    """Small blocks and the default sizes of the rings are hundreds of thousands of slots."""
    slots = 100_000
    sides = (
        Side(listen=None, ring_blocks=slots, device_blocks=8, host_blocks=0),
        Side(ring_blocks=slots, device_blocks=8, host_blocks=0),
    )
    async with two_engines(*sides) as (p, d):
        tokens = prompt(4)

        async def calls_of_one_ticket() -> int:
            """Return the number of events of the interpreter in a whole receive and send."""
            events = 0

            def count(*_: object) -> Any:
                nonlocal events
                events += 1
                return count

            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    sys.settrace(count)  # lines of frames that begin from here on
                    try:
                        assert await p.prefill(tokens, receiving.ticket) == (4, None)
                    finally:
                        sys.settrace(None)
                    assert await receiving.wait() == 4
            return events

        assert await calls_of_one_ticket() < slots / 2


async def test_stores_of_an_engine_with_peers_keep_their_limit(tmp_path):
    """The slots of peers are no pool of a store: none of its bytes is reserved for them."""
    sides = []
    for name, peers in (("a", None), ("b", Peers(secret=SECRET, listen="127.0.0.1"))):
        memory = Memory(16, 4)
        engine = CacheEngine(
            CacheConfig(model="m", device_blocks=16, block_tokens=4, host_blocks=8),
            memory.regions,
            stores=[StoreUse(DiskStore(tmp_path / name, bytes="1MiB", min_free_bytes=0))],
            peers=peers,
        )
        async with engine:
            sides.append(
                (
                    [store.store.capacity_bytes for store in engine.statistics().stores],
                    sorted(path.name for path in (tmp_path / name).iterdir()),
                )
            )
    assert sides[0] == sides[1]


async def test_receive_whose_lease_was_released_leaves_no_object():
    async with two_engines() as (_p, d):
        lease = await d.granted(prompt(40))
        receiving = await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        lease.release()
        await receiving.__aexit__(None, None, None)
        left = weakref.ref(receiving)
        del receiving, lease
        await d.at_rest()
        gc.collect()
        assert left() is None
