"""Receiver: tickets that more than one sender opens, and calls that an interrupt repeats."""

from __future__ import annotations

import pytest

from aiokv.peers.messages import Done, Landed, Refused
from tests.peers.world import EQUAL, FRAGMENT_BYTES, GROUPS, RANGES, SPLIT, World


def incoming(world, ticket):
    return world.receiver.logic._tickets[ticket.ticket_id]


def test_rank_that_has_ended_is_not_replaced_while_its_fragments_are_placed():
    """The blocks of another sender may have other positions than those in the assemblies."""
    world = World(0, landing=8, mapping=SPLIT)
    receiver = world.receiver.logic
    first = world.senders[0]
    ticket = world.expect(1)
    world.receive(ticket, [0])
    for sender in world.senders:
        world.open(sender, ticket)
    world.run()
    for sender in world.senders:
        world.send(sender, ticket, [0, 1])
    while not receiver.counts().fragments or not incoming(world, ticket).in_hand:
        assert world.step()
    receiver.on_message(first.wire, Done(ticket_id=ticket.ticket_id))
    assert receiver.counts().tickets == 1, "other fragments are in hand"
    world.open(first, ticket)
    opening, _ = first.wire.to_receiver.pop()
    receiver.on_message(first.wire, opening)
    answer = first.wire.to_sender.pop()
    assert isinstance(answer, Refused)
    assert "has, or had, the ticket" in answer.reason
    world.finish()


def test_repeated_verification_does_not_lose_a_fragment_that_came_meanwhile():
    world = World(0, landing=4)
    sender = world.senders[0]
    ticket = world.expect(1)
    received = world.receive(ticket, [0])
    world.open(sender, ticket)
    world.run()
    world.send(sender, ticket, [0])
    verifications = []
    take = world.receiver.logic.verified

    def verified(fragments, are_right):
        verifications.append(fragments)
        take(fragments, [False] if len(verifications) == 1 else are_right)

    world.receiver.logic.verified = verified
    while not verifications:
        assert world.step()
    while not incoming(world, ticket).in_hand:
        assert world.step()
    take(verifications[0], [False])  # again, after an interrupt
    world.check()
    world.run()
    assert world.reports[received] == (1, None)
    world.finish()


def test_block_that_is_not_in_the_ticket_ends_the_ticket():
    """Otherwise a sender could let the receiver remember any number of blocks."""
    blocks = {(0, 0): False, (0, 1): True, (0, 2): True, (0, 3): False, (0, 1 << 30): False}
    blocks |= {(1, 0): True, (1, 2): True, (1, 3): False, (1, 12): False}  # 0: a state
    blocks |= {(GROUPS, 1): True, (GROUPS, 0): False, (GROUPS, 3): False}  # a range of layers
    for (group, block), is_inside in {**blocks, (GROUPS + RANGES, 1): False}.items():
        world = World(0, landing=4)
        sender = world.senders[0]
        ticket = world.expect(3, first=1)
        world.open(sender, ticket)
        world.run()
        receiver, ring = world.receiver.logic, world.receiver.logic._ring
        ring.want(sender.wire, 1)
        ((_, (credit,)),) = ring.grant()
        landed = Landed(
            ticket_id=ticket.ticket_id,
            group=group,
            sender_block=block,
            slot=credit.slot,
            slot_generation=credit.generation,
            fragment_bytes=FRAGMENT_BYTES - 1,
        )
        assert receiver.begin_fragment(sender.wire, landed) == "land"
        receiver.end_fragment(sender.wire, landed)
        assert bool(receiver.counts().tickets) == is_inside
        assert receiver.free_slots == 4


def test_parked_fragments_outlast_the_end_of_their_sender():
    """A plan may ask for them later: a window is planned when all blocks have arrived."""
    world = World(0, landing=8)
    sender = world.senders[0]
    ticket = world.expect(2)
    received = world.receive(ticket, [0, 1])
    world.open(sender, ticket)
    world.run()
    sent = [world.send(sender, ticket, [0, 1]), world.send(sender, ticket, [1], group=2)]
    world.run()
    sender.logic.close_ticket(ticket.ticket_id, "all was sent")
    world.run()
    assert [world.reports[transfer_id] for transfer_id in sent] == [(2, None), (1, None)]
    assert world.reports[received] == (2, None)
    assert world.receiver.logic.counts().tickets == 1

    window = world.receive(ticket, [1], group=2)
    world.run()
    assert world.reports[window] == (1, None)
    assert world.receiver.logic.counts().tickets == 0  # nothing more can come
    late = world.receive(ticket, [1], group=1)
    world.run()
    assert world.reports[late][1].reason.startswith("the ticket has ended")
    world.finish()


def test_plan_behind_the_end_of_the_sender_fails_at_once():
    world = World(0, landing=8)
    sender = world.senders[0]
    ticket = world.expect(2)
    world.open(sender, ticket)
    world.run()
    world.send(sender, ticket, [0])
    world.run()
    sender.logic.close_ticket(ticket.ticket_id, "the lease was released")
    world.run()
    received = world.receive(ticket, [0, 1])  # block 0 is parked
    world.run()
    leading, failure = world.reports[received]
    assert (leading, failure.reason) == (1, "the sender ended: the lease was released")
    world.finish()


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (2, 0)])
def test_engines_of_different_layouts_do_not_share_a_ticket(ranks):
    """The blocks of one are whole, those of the other are put together: some would be lost."""
    world = World(0, landing=8, senders=3, mapping=SPLIT)
    receiver = world.receiver.logic
    world.mappings = {0: EQUAL, 1: SPLIT, 2: EQUAL}
    ticket = world.expect(1)
    for rank in ranks:
        sender = world.senders[rank]
        world.open(sender, ticket)
        opening, _ = sender.wire.to_receiver.pop()
        receiver.on_message(sender.wire, opening)
    first, second = (world.senders[rank].wire.to_sender.pop() for rank in ranks)
    assert not isinstance(first, Refused)
    assert isinstance(second, Refused)
    assert "of another engine" in second.reason
    assert receiver.counts().tickets == 1


def test_fragments_in_hand_of_a_ticket_that_has_ended_take_their_slots_until_they_are_verified():
    """Otherwise the unplanned fragments of other tickets could take all landing slots."""
    world = World(0, landing=4)
    verify, in_hand = world.receiver.verify, []
    world.receiver.verify = in_hand.extend  # a thread that is slow
    for sender in world.senders:
        ticket = world.expect(2)
        world.open(sender, ticket)
        world.run()
        world.send(sender, ticket, [0, 1])
        world.run()
        assert len(in_hand) == 2
        world.receiver.logic.close_ticket(ticket.ticket_id, "closed")
    world.receiver.verify = verify
    verify(in_hand)
    world.finish()
