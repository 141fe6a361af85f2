"""States of tickets and fragments in random order: nothing wrong is reported, and all plans end."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from aiokv.base.plan import RECEIVE
from aiokv.peers.departures import ReceiverRank
from aiokv.peers.messages import Want

from .world import EQUAL, GROUPS, RANGES, SPLIT, World

# Steps of a walk per check of the invariants: checks take most of its time, and a violation lasts.
CHECK_EVERY = 1 if os.environ.get("AIOKV_DEEP") else 4


def walk(
    seed: int,
    *,
    steps: int = 500,
    copy_failures: float = 0.0,
    corruptions: float = 0.0,
    mapping: Any = EQUAL,
    layers: bool = False,
) -> World:
    least = 1 if mapping is EQUAL else 3
    world = World(
        seed,
        landing=least + seed % 5,
        outgoing=least + seed % 4,
        mapping=mapping,
        check_every=CHECK_EVERY,
    )
    world.copy_failures, world.corruptions = copy_failures, corruptions
    choose = world.random
    open_ranges: list[tuple[object, list[int]]] = []
    for number in range(steps):
        action = choose.randrange(48 if mapping is EQUAL else 96)
        tickets = list(world.tickets.values())[-6:]
        sender = choose.choice(world.senders)
        if action == 0 or not tickets:
            num_blocks = choose.randint(1, 6)
            ticket = world.expect(num_blocks, seconds=choose.choice([50.0, 1000.0]))
            cut = choose.randint(0, num_blocks)
            for part in (range(cut), range(cut, num_blocks)):
                if part and choose.random() < 0.9:
                    world.receive(ticket, part)
                    if choose.random() < 0.3:  # a window
                        world.receive(ticket, [part[-1]], group=choose.randrange(1, GROUPS))
                elif part:
                    open_ranges.append((ticket, list(part)))
            for each in [sender] if mapping is EQUAL else world.senders:
                world.open(each, ticket)
        elif action == 1:
            world.open(sender, choose.choice(tickets))  # again, or by a second sender
        elif action in (2, 3, 4):
            ticket = choose.choice(tickets)
            opened = [(s, t) for s in world.senders for t in s.logic.ticket_ids]
            if opened and choose.random() < 0.9:
                sender, ticket_id = choose.choice(opened)
                ticket = world.tickets[ticket_id]
            num_blocks = ticket.num_tokens // 4
            first = choose.randrange(num_blocks)
            blocks = range(first, choose.randint(first + 1, num_blocks))
            if mapping is SPLIT and choose.random() < 0.8:
                blocks = range(num_blocks)  # more than half of them would never be whole
            group = choose.choice([0, 0, 0, *range(GROUPS)])
            step = choose.choice([0, 0, 1])
            parts: list[tuple[tuple[int, int], int]] = [((0, 0), 0)]  # ranges of layers, mark
            if layers and not group:  # all layers, or some that are never committed
                cut = choose.randrange(RANGES)
                early = [((i, i + 1), choose.randint(1, 3)) for i in range(cut)]
                parts = [*early, ((cut, RANGES), 0)]
                if choose.random() < 0.3:
                    parts = parts[: choose.randint(1, cut + 1)]
            for each in [sender] if mapping is EQUAL else world.senders:
                for ranges, mark in parts:
                    after = 1 if mark else step
                    world.send(each, ticket, blocks, after, group, ranges=ranges, mark=mark)
        elif action == 5 and open_ranges:
            ticket, part = open_ranges.pop()
            world.receive(ticket, part)
        elif action == 6:
            transfer_id = choose.choice(list(world.plans) or [0])
            world.receiver.logic.cancel(transfer_id, "cancelled")
            for other in world.senders:
                other.logic.cancel(transfer_id, "cancelled")
        elif action == 7:
            world.receiver.logic.close_ticket(choose.choice(tickets).ticket_id, "closed")
        elif action == 8:
            sender.logic.close_ticket(choose.choice(tickets).ticket_id, "closed")
        elif action == 9 and choose.random() < 0.3 and sender.wire is not None:
            world.cut(sender.wire)
        elif action == 10:
            world.now += choose.choice([1.0, 30.0])
            world.receiver.logic.expire(world.now)
            sender.logic.expire(world.now)
        elif action == 11:
            sender.closed_step = choose.choice([0, 1])
            sender.marks.add(choose.randint(1, 3))
            sender.logic.release_held()
        else:
            world.step()
        if number % CHECK_EVERY == 0:
            world.check()
    world.finish()
    return world


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_walks_report_each_plan_once_with_right_blocks(first):
    worlds = [walk(seed) for seed in range(first, first + 50)]
    done = sum(f is None for world in worlds for _, f in world.reports.values())
    assert done > 50


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_walks_with_failed_copies_and_changed_bytes(first):
    worlds = [walk(seed, copy_failures=0.1, corruptions=0.1) for seed in range(first, first + 50)]
    assert sum(world.receiver.logic.counts().wrong for world in worlds) > 10


@pytest.mark.parametrize("failures", [0.0, 0.1])
@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_walks_of_blocks_that_are_put_together(first, failures):
    worlds = [
        walk(seed, mapping=SPLIT, copy_failures=failures, corruptions=failures)
        for seed in range(first, first + 50)
    ]
    received = [
        failure
        for world in worlds
        for transfer_id, (_, failure) in world.reports.items()
        if world.plans[transfer_id].route == RECEIVE
    ]
    assert received.count(None) > 5


@pytest.mark.parametrize("failures", [0.0, 0.03])
@pytest.mark.parametrize("mapping", [EQUAL, SPLIT], ids=["equal", "split"])
@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_walks_of_layers_that_may_never_be_committed(first, mapping, failures):
    worlds = [
        walk(seed, mapping=mapping, copy_failures=failures, corruptions=failures, layers=True)
        for seed in range(first, first + 50)
    ]
    received = [
        failure
        for world in worlds
        for transfer_id, (_, failure) in world.reports.items()
        if world.plans[transfer_id].route == RECEIVE
    ]
    assert received.count(None) > (5 if not failures else 1)


@pytest.mark.parametrize(("landing", "outgoing"), [(1, 1), (8, 2), (2, 8)])
def test_500_tickets_all_end_done(landing, outgoing):
    world = World(7, senders=3, landing=landing, outgoing=outgoing, check_every=50)
    for i in range(500):
        ticket = world.expect(2)
        world.receive(ticket, [0, 1])
        world.open(world.senders[i % 3], ticket)
        while world.step():
            if any(ticket.ticket_id in s.logic.ticket_ids for s in world.senders):
                break
        world.send(world.senders[i % 3], ticket, [0, 1])
    world.run()
    assert {failure for _, failure in world.reports.values()} == {None}
    world.finish()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("landing", "outgoing"), [(2, 2), (3, 8), (8, 3)])
def test_blocks_are_put_together_with_few_slots(seed, landing, outgoing):
    """Blocks of 40 tickets want the same assembly slots: fragments wait at their senders."""
    world = World(seed, landing=landing, outgoing=outgoing, mapping=SPLIT, check_every=20)
    tickets = [world.expect(3) for _ in range(40)]
    for ticket in tickets:
        world.receive(ticket, range(2))
        world.receive(ticket, range(2, 3))
        for sender in world.senders:
            world.open(sender, ticket)
    world.run()
    for sender in world.senders:
        for ticket in world.random.sample(tickets, len(tickets)):
            world.send(sender, ticket, range(6))
    world.run()
    assert {failure for _, failure in world.reports.values()} == {None}
    world.finish()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("landing", "outgoing"), [(1, 1), (2, 8), (3, 8), (6, 8), (8, 2)])
def test_layers_ahead_of_the_plans_leave_slots_for_the_others(landing, outgoing, seed):
    """Layers of all blocks of a prompt are sent at once; the receiver has few plans at a time."""
    world = World(seed, senders=1, landing=landing, outgoing=outgoing)
    (sender,) = world.senders
    num_blocks = 20
    ticket = world.expect(num_blocks)
    received = [world.receive(ticket, [block]) for block in range(2)]
    world.open(sender, ticket)
    world.run()
    sender.marks.add(1)
    world.send(sender, ticket, range(num_blocks), 1, ranges=(0, 1), mark=1)
    world.send(sender, ticket, range(num_blocks), ranges=(1, RANGES))
    while world.step():
        world.check()
        if received[-2] in world.reports and len(received) < num_blocks:
            received.append(world.receive(ticket, [len(received)]))
    assert [world.reports.get(each) for each in received] == [(1, None)] * num_blocks
    world.finish()


def test_fragment_that_is_sent_again_keeps_no_slot_that_others_wait_for():
    world = World(1, senders=1, landing=2, outgoing=1)
    ticket = world.expect(2)
    received = world.receive(ticket, [0, 1])
    world.open(world.senders[0], ticket)
    world.run()
    world.send(world.senders[0], ticket, [0, 1])
    world.corruptions = 1.0
    while not any(fragment is not None for _, fragment in world.wires[0].to_receiver):
        world.run_job_or_reply()
    world.corruptions = 0.0
    world.run()
    assert world.senders[0].logic.counts().retries == 1
    assert world.reports[received] == (2, None)
    world.finish()


def test_assembly_slot_of_a_cancelled_plan_is_not_reused_while_a_thread_writes_it():
    world = World(1, landing=3, mapping=SPLIT)
    receiver = world.receiver.logic
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    for sender in world.senders:
        world.open(sender, ticket)
    world.run()
    world.send(world.senders[0], ticket, [0])
    while receiver.free_assembly_slots == 3:
        world.step()
    assert len(world.jobs) == 1  # a thread places the fragment
    receiver.cancel(received, "cancelled")
    assert world.reports[received][1] is not None
    assert receiver.free_assembly_slots == 2
    world.run()
    assert receiver.free_assembly_slots == 3
    world.finish()


def test_fragment_of_another_ticket_never_verifies():
    """The fragments of two tickets for the same block change places: both are sent again."""
    world = World(1, senders=1, landing=2)
    tickets = [world.expect(1), world.expect(1)]
    received = [world.receive(ticket, [0]) for ticket in tickets]
    for ticket in tickets:
        world.open(world.senders[0], ticket)
    world.run()
    for ticket in tickets:
        world.send(world.senders[0], ticket, [0])
    queue = world.wires[0].to_receiver
    while sum(fragment is not None for _, fragment in queue) < 2:
        world.run_job_or_reply()
    (first, one), (second, other) = [entry for entry in queue if entry[1] is not None]
    queue.clear()
    queue.extend([(first, other), (second, one)])
    world.run()
    assert world.receiver.logic.counts().wrong == 2
    assert world.senders[0].logic.counts().retries == 2
    assert [world.reports[i] for i in received] == [(1, None), (1, None)]
    world.finish()


def test_wishes_of_a_ticket_that_has_ended_take_none_from_others():
    """The receiver closes a ticket while its sender asks for credits: those of the other ticket,
    on the same connection, still come."""
    world = World(1, senders=1, landing=1)
    (sender,) = world.senders
    ended, other = world.expect(4), world.expect(6)
    received = world.receive(other, range(6))
    for ticket in (ended, other):
        world.open(sender, ticket)
    world.run()
    world.send(sender, other, range(6))
    world.receiver.logic.close_ticket(ended.ticket_id, "closed")
    world.send(sender, ended, range(4))
    world.run()
    assert world.reports[received] == (6, None)
    world.finish()


def test_two_senders_for_one_ticket_are_not_mixed():
    world = World(1, senders=2)
    ticket = world.expect(1)
    for sender in world.senders:
        world.open(sender, ticket)
    world.run()
    assert world.receiver.logic.counts().refused == 1
    assert sum(ticket.ticket_id in sender.logic.ticket_ids for sender in world.senders) == 1
    world.finish()


def test_second_fragment_for_a_block_is_dropped():
    """A sender that sends a block twice: the block of the plan is written once."""
    world = World(1, senders=1)
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    world.open(world.senders[0], ticket)
    world.run()
    wire = world.wires[0]
    world.senders[0].logic.add_ticket(ticket, 1000.0, {0: ReceiverRank(wire, (EQUAL,))})
    world.send(world.senders[0], ticket, [0])
    world.run()
    assert world.reports[received] == (1, None)
    world.senders[0].logic.add_ticket(
        ticket, 1000.0, {0: ReceiverRank(wire, (EQUAL,))}
    )  # forgets that it was sent
    world.send(world.senders[0], ticket, [0])
    world.run()
    assert world.receiver.logic.counts().dropped > 0
    assert world.memory[0] == dict.fromkeys(range(RANGES), (ticket.ticket_id, 0))


def test_fragment_of_a_block_that_is_being_verified_is_dropped():
    world = World(1, senders=1)
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    world.open(world.senders[0], ticket)
    world.run()
    world.send(world.senders[0], ticket, [0])
    queue = world.wires[0].to_receiver
    while not any(fragment is not None for _, fragment in queue):
        world.run_job_or_reply()
    landed, contents = queue[0]
    receiver = world.receiver.logic
    receiver.on_message(world.wires[0], Want(ticket_id=ticket.ticket_id, fragments=1))
    credit = world.wires[0].to_sender.popleft().slots[0]
    again = msgspec.structs.replace(landed, slot=credit.slot, slot_generation=credit.generation)
    queue.append((again, contents))
    while queue or world.wires[0].landing:
        world.deliver_fragment(0)
    world.check()
    world.run()
    assert receiver.counts().dropped >= 1
    assert world.reports[received] == (1, None)
    world.finish()


def test_connection_that_is_cut_within_a_fragment_frees_its_slot():
    world = World(1, senders=1, landing=1)
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    world.open(world.senders[0], ticket)
    world.run()
    world.send(world.senders[0], ticket, [0])
    while world.wires[0].landing is None:
        assert world.step()
    assert world.receiver.slots[0] is None  # the fragment is not whole
    world.cut(world.wires[0])
    world.run()
    assert world.reports[received][1] is not None
    assert world.receiver.logic.free_slots == 1
    world.finish()


def test_ticket_is_not_taken_up_after_a_reconnect():
    world = World(1, senders=1)
    ticket = world.expect(2)
    received = world.receive(ticket, [0, 1])
    world.open(world.senders[0], ticket)
    world.run()
    world.send(world.senders[0], ticket, [0])
    world.run()
    world.cut(world.wires[0])
    world.run()
    assert world.reports[received][0] == 1
    world.open(world.senders[0], ticket)
    world.run()
    assert world.receiver.logic.counts().refused == 1
    world.finish()


def test_fragment_with_a_revoked_credit_is_discarded():
    world = World(1, senders=2, landing=1)
    first, second = world.senders
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    world.open(first, ticket)
    world.run()
    world.send(first, ticket, [0])
    while not any(fragment is not None for _, fragment in world.wires[0].to_receiver):
        assert world.step()
    message, _ = world.wires[0].to_receiver.popleft()
    world.cut(world.wires[0])
    world.run()
    other = world.expect(1)
    world.receive(other, [0])
    world.open(second, other)
    world.run()
    # The late fragment arrives on the new connection, and on the old one.
    for wire in world.wires:
        assert world.receiver.logic.begin_fragment(wire, message) == "discard"
    assert world.reports[received][1] is not None
    assert world.receiver.logic.counts().stale == 2
    world.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": bytes([1] * 16)},
        {"receiver_rank": 1},
        {"protocol": 0},
        {"transport": "nixl"},
        {"ticket_id": bytes(16)},
    ],
)
def test_open_for_another_receiver_is_refused(changes):
    world = World(1, senders=1)
    ticket = world.expect(1)
    world.open(world.senders[0], ticket, **changes)
    world.run()
    counts = world.receiver.logic.counts()
    assert (counts.refused, counts.opened) == (1, 0)
    world.finish()
