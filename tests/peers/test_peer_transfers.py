"""Plans between two workers over TCP: bytes, ends, and what is left (I3, I4, I11)."""

from __future__ import annotations

import dataclasses

import pytest

from aiokv.base.plan import RECEIVE, SEND
from aiokv.errors import ConfigError, LayoutError, PeerError, UsageError
from aiokv.peers.ticket import encode
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice

from .workers import KEY, PeerWorker, two_workers

pytestmark = pytest.mark.asyncio


async def test_blocks_arrive_with_equal_bytes_and_both_plans_are_done():
    async with two_workers() as (p, d):
        ticket = d.expect(6)
        first, second = (
            d.receive(ticket, [0, 1, 2], [5, 9, 2]),
            d.receive(ticket, [3, 4, 5], [1, 0, 7]),
        )
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = p.send(ticket, range(6), [11, 12, 13, 14, 15, 16])
        assert await p.ended(sent) == [("done", 0)]
        assert await d.ended(first, second) == [("done", 0), ("done", 0)]
        assert d.blocks([5, 9, 2, 1, 0, 7]) == p.blocks([11, 12, 13, 14, 15, 16])
        p.controller.tickets.close_ticket(ticket.ticket_id, "closed")
        d.controller.tickets.close_ticket(ticket.ticket_id, "closed")
        await run_until_idle(lambda: d.free_slots == 8)
        statistics = d.controller.statistics().attention.receive
        assert (statistics.done, statistics.submitted) == (2, 0)
        assert p.controller.statistics().attention.send.done == 1


async def test_more_blocks_than_slots_and_more_plans_than_one():
    async with two_workers(PeerWorker(seed=1, slots=2), PeerWorker(seed=2, slots=2)) as (p, d):
        ticket = d.expect(24)
        received = [d.receive(ticket, range(i, i + 4), range(i, i + 4)) for i in range(0, 24, 4)]
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = [p.send(ticket, range(i, i + 3), range(i + 8, i + 11)) for i in range(0, 24, 3)]
        assert await p.ended(*sent) == [("done", 0)] * 8
        assert await d.ended(*received) == [("done", 0)] * 6
        assert d.blocks(range(24)) == p.blocks(range(8, 32))


async def test_fragments_that_come_before_their_plan_wait_in_their_slots():
    async with two_workers() as (p, d):
        ticket = d.expect(2)
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = p.send(ticket, [0, 1], [3, 4])
        assert await p.ended(sent) == [("done", 0)]
        received = d.receive(ticket, [0, 1], [6, 7])
        assert await d.ended(received) == [("done", 0)]
        assert d.blocks([6, 7]) == p.blocks([3, 4])


async def test_send_waits_for_its_step():
    async with two_workers() as (p, d):
        ticket = d.expect(1)
        received = d.receive(ticket, [0], [6])
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = p.send(ticket, [0], [3], after_step=1)
        await spin(50)
        assert p.outcome(sent) is None
        p.regions.layer_pieces(0)[0].view()[3] = 99  # computed by the step
        p.controller.steps.close(1, None)
        assert await p.ended(sent) == [("done", 0)]
        assert await d.ended(received) == [("done", 0)]
        assert d.block(6) == p.block(3)


@pytest.mark.clock
async def test_ticket_that_no_sender_uses_ends_at_its_deadline():

    async with PeerWorker() as d:
        ticket = d.expect(2, seconds=5.0)
        received = d.receive(ticket, [0, 1], [6, 7])
        before = d.blocks([6, 7])
        await running_clock().advance(4.0)
        await spin(10)
        assert d.outcome(received) is None
        await running_clock().advance(2.0)
        assert await d.ended(received) == [("failed", 0)]
        assert d.blocks([6, 7]) == before
        assert d.controller.tickets.statistics()[0].received.tickets == 0
        assert d.controller.tickets.statistics()[0].received.expired == 1


async def test_cancelled_receive_writes_no_block_although_fragments_arrive():
    """I11: the copy that had begun ends before the report; later fragments are dropped."""
    device = ManualDevice()
    async with two_workers(receiver=PeerWorker(device, seed=2)) as (p, d):
        ticket = d.expect(4)
        received = d.receive(ticket, range(4), [6, 7, 8, 9])
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        p.send(ticket, [0, 1], [3, 4])
        await run_until_idle(lambda: len(device.copies_of(RECEIVE)) > 0)
        assert d.controller.plans.cancel(received) == "asked"
        p.send(ticket, [2, 3], [5, 6])
        await spin(100)
        assert d.outcome(received) is None  # a copy is in flight
        untouched = d.blocks([8, 9])
        device.complete_all()
        await run_until_idle(
            lambda: d.outcome(received) is not None or bool(device.copies_of(RECEIVE))
        )
        device.complete_all()
        assert (await d.ended(received))[0] is not None
        after = d.blocks([6, 7, 8, 9])
        await spin(200)
        assert not device.copies_of(RECEIVE)
        assert d.blocks([6, 7, 8, 9]) == after
        assert d.blocks([8, 9]) == untouched


async def test_send_is_reported_after_its_device_copies_have_ended():
    device = ManualDevice()
    async with two_workers(PeerWorker(device, seed=1)) as (p, d):
        ticket = d.expect(2)
        d.receive(ticket, [0, 1], [6, 7])
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = p.send(ticket, [0, 1], [3, 4])
        await run_until_idle(lambda: len(device.copies_of(SEND)) > 0)
        p.controller.tickets.close_ticket(ticket.ticket_id, "closed")
        await spin(50)
        assert p.outcome(sent) is None
        device.complete_all()
        assert await p.ended(sent) == [("failed", 0)]


async def test_closing_receiver_ends_the_plans_of_the_sender():
    async with PeerWorker(seed=1) as p:
        async with PeerWorker(seed=2) as d:
            ticket = d.expect(4)
            received = d.receive(ticket, range(4), range(4))
            await p.controller.tickets.open_ticket(encode(ticket, KEY))
            sent = p.send(ticket, [0, 1], [3, 4])
            assert await p.ended(sent) == [("done", 0)]
            late = p.send(ticket, [2], [5], after_step=1)
        assert d.outcome(received) == ("failed", 2)
        assert await p.ended(late) == [("failed", 0)]


async def test_closing_sender_ends_the_plans_of_the_receiver():
    async with PeerWorker(seed=2) as d:
        async with PeerWorker(seed=1) as p:
            ticket = d.expect(4)
            received = d.receive(ticket, range(4), range(4))
            await p.controller.tickets.open_ticket(encode(ticket, KEY))
            sent = p.send(ticket, [0, 1], [3, 4])
            assert await p.ended(sent) == [("done", 0)]
        assert await d.ended(received) == [("failed", 2)]
        assert d.free_slots == 8


@pytest.mark.parametrize("problem", ["unknown", "generation", "twice", "width"])
async def test_open_ticket_that_is_refused_leaves_nothing_behind(problem):
    sender = PeerWorker(seed=1, width=38 if problem == "width" else 37)
    async with two_workers(sender) as (p, d), PeerWorker(seed=3) as other:
        ticket = d.ticket(2) if problem == "unknown" else d.expect(2)
        if problem == "generation":
            import msgspec

            ticket = msgspec.structs.replace(ticket, generation=bytes(16))
        if problem == "twice":
            await other.controller.tickets.open_ticket(encode(ticket, KEY))
        error = LayoutError if problem == "width" else PeerError
        with pytest.raises(error):
            await p.controller.tickets.open_ticket(encode(ticket, KEY))
        assert p.controller.tickets.statistics()[0].sent.tickets == 0
        refused = p.send(ticket, [0], [1])
        assert await p.ended(refused) == [("failed", 0)]


async def test_open_ticket_twice_by_one_worker_is_refused():
    async with two_workers() as (p, d):
        ticket = d.expect(2)
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        with pytest.raises(UsageError, match="being sent already"):
            await p.controller.tickets.open_ticket(encode(ticket, KEY))


async def test_receiver_that_is_gone_is_a_peer_error():
    async with PeerWorker(seed=1) as p:
        async with PeerWorker(seed=2) as d:
            ticket = d.ticket(1)
        with pytest.raises(PeerError, match="cannot connect"):
            await p.controller.tickets.open_ticket(encode(ticket, KEY))


async def test_1000_tickets_on_a_ring_of_8_slots_all_end():
    async with two_workers() as (p, d):
        plans = []
        for i in range(1000):
            ticket = d.expect(2)
            ids = [2 * i % 32, (2 * i + 1) % 32]
            received = d.receive(ticket, [0, 1], ids)
            await p.controller.tickets.open_ticket(encode(ticket, KEY))
            plans.append((received, p.send(ticket, [0, 1], ids), ticket))
        assert set(await p.ended(*(sent for _, sent, _ in plans))) == {("done", 0)}
        assert set(await d.ended(*(received for received, _, _ in plans))) == {("done", 0)}
        for _, _, ticket in plans:
            p.controller.tickets.close_ticket(ticket.ticket_id, "closed")
            d.controller.tickets.close_ticket(ticket.ticket_id, "closed")
        await run_until_idle(lambda: d.free_slots == 8)
        assert d.blocks(range(32)) == p.blocks(range(32))
        received, sent = d.controller.tickets.statistics()[0], p.controller.tickets.statistics()[0]
        assert received.received.tickets == sent.sent.tickets == 0
        assert sent.sent.fragments == received.received.fragments == 2000


@pytest.mark.parametrize("tiers", [{"device"}, {"host"}, {"device", "host"}])
async def test_blocks_move_again_after_sleep(tiers):
    async with two_workers() as (p, d):
        for number in range(2):
            ticket = d.expect(2)
            received = d.receive(ticket, [0, 1], [6 + number, 8 + number])
            await p.controller.tickets.open_ticket(encode(ticket, KEY))
            sent = p.send(ticket, [0, 1], [3, 4])
            assert await p.ended(sent) == await d.ended(received) == [("done", 0)]
            assert d.blocks([6 + number, 8 + number]) == p.blocks([3, 4])
            for worker in (p, d):
                regions = worker.controller.memory.regions
                await worker.controller.sleep(frozenset(tiers))
                await worker.controller.wake_up(
                    frozenset(tiers), regions if "device" in tiers else None
                )


@pytest.mark.clock
async def test_ticket_that_a_sender_has_opened_ends_at_its_deadline_on_both_sides():
    clock = running_clock()
    async with two_workers() as (p, d):
        ticket = d.expect(2, seconds=5.0, timeout_seconds=5.0)
        received = d.receive(ticket, [0, 1], [6, 7])
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = p.send(ticket, [0, 1], [3, 4], after_step=1)  # the step is never closed
        await clock.advance(4.0)
        assert d.outcome(received) is None
        assert p.outcome(sent) is None
        await clock.advance(2.0)
        assert await d.ended(received) == [("failed", 0)]
        assert await p.ended(sent) == [("failed", 0)]
        await run_until_idle(lambda: d.free_slots == 8)
        await clock.advance(100.0)  # the connection is idle now
        await run_until_idle(lambda: p.controller.tickets.statistics()[0].connections == 0)
        assert p.controller.tickets.statistics()[0].sent.tickets == 0
        assert d.controller.tickets.statistics()[0].received.tickets == 0


async def test_ring_that_is_smaller_than_a_block_is_refused():
    worker = PeerWorker()
    worker.controller = CacheController(
        worker.regions, CpuDevice(), peers=dataclasses.replace(worker.peers, ring_bytes=64)
    )
    with pytest.raises(ConfigError, match="ring_bytes is 64; a block takes"):
        await worker.__aenter__()
    await worker.controller.aclose()
    worker.poller.close()


async def test_changed_bytes_are_found_and_sent_again(monkeypatch):
    """A bit of the first fragment changes in the landing slot, before it is verified."""
    async with two_workers() as (p, d):
        ticket = d.expect(2)
        received = d.receive(ticket, [0, 1], [6, 7])
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        blocks = d.controller.memory.peer_arena.blocks
        receiver = d.controller.tickets._receiver
        end_fragment, changed = receiver.end_fragment, []

        def damage(connection, landed):
            if not changed:
                changed.append(landed)
                blocks[landed.slot, 5] ^= 1
            end_fragment(connection, landed)

        monkeypatch.setattr(receiver, "end_fragment", damage)
        sent = p.send(ticket, [0, 1], [3, 4])
        assert await p.ended(sent) == await d.ended(received) == [("done", 0)]
        assert d.blocks([6, 7]) == p.blocks([3, 4])
        assert d.controller.tickets.statistics()[0].received.wrong == 1
        assert p.controller.tickets.statistics()[0].sent.retries == 1
