"""Senders and a receiver without sockets, memory or loop: every message, copy and thread is a job
that a test runs in any order.

Memory holds values instead of bytes. A block of a prompt has the value ``(ticket id, block)`` in
each range of its layers. The test gives device blocks to "other leases" when their plan was
reported, and any later write to one of them is a violation of I11.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aiokv.base.plan import RECEIVE, SEND, TransferPlan, id_bytes
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.arrivals import SenderBlocks
from aiokv.peers.departures import ReceiverRank
from aiokv.peers.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Credit,
    Landed,
    Open,
    Refused,
    Return,
    Want,
    block_key,
    split_key,
)
from aiokv.peers.receiver import Receiver
from aiokv.peers.ring import LandingRing
from aiokv.peers.sender import Sender
from aiokv.peers.ticket import Endpoint, Ticket
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FRAGMENT_BYTES = 192
GENERATION = bytes(16)


class EqualBlocks:
    """Mapping of blocks that both sides have in common."""

    is_identity = fragment_is_block = True
    fragment_bytes = FRAGMENT_BYTES - TRAILER_BYTES

    def receiver_blocks(self, sender_block: int) -> range:
        return range(sender_block, sender_block + 1)

    sender_blocks = receiver_blocks


class SplitBlocks:
    """Mapping of two sender ranks, each of which has a half of the heads, to one receiver rank,
    whose blocks have twice as many tokens."""

    is_identity = fragment_is_block = False
    fragment_bytes = FRAGMENT_BYTES - TRAILER_BYTES

    def receiver_blocks(self, sender_block: int) -> range:
        return range(sender_block // 2, sender_block // 2 + 1)

    def sender_blocks(self, receiver_block: int) -> range:
        return range(2 * receiver_block, 2 * receiver_block + 2)


EQUAL = EqualBlocks()
SPLIT = SplitBlocks()


class Contents(NamedTuple):
    """Contents of a slot: the key of the trailer, the value, and True if the checksum is right."""

    key: bytes
    value: Any
    is_right: bool = True


GROUPS = 3  # of blocks, such as those of the prompt, of the state and of a window
RANGES = 3  # of layers of the blocks of the prompt: further groups


def group_of(plan: TransferPlan) -> int:
    """Return the group that a plan of the world names."""
    return int(plan.group)


def groups_of(plan: TransferPlan) -> list[int]:
    """Return the groups of a plan that sends: ranges of layers, or the one that it names."""
    if plan.end_range:
        return list(range(GROUPS + plan.first_range, GROUPS + plan.end_range))
    return [group_of(plan)]


def ranges_of(group: int) -> list[int]:
    """Return the ranges of layers that a fragment of a group has."""
    return [group - GROUPS] if group >= GROUPS else list(range(RANGES))


def whole_value(value: Any) -> Any:
    """Return the value of the block that a range of layers belongs to."""
    *names, key = value
    group, block = split_key(key)
    return (*names, block_key(0, block)) if group >= GROUPS else value


class Wire:
    """A connection: queues of messages in both directions; fragments take two deliveries."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.to_receiver: deque[tuple[Any, Contents | None]] = deque()
        self.to_sender: deque[Any] = deque()
        self.landing: tuple[Landed, Contents, bool] | None = None
        self.wanted = 0  # credits that the sender waits for
        self.is_cut = False
        self.told = [False, False]  # receiver and sender know the end

    def __repr__(self) -> str:
        return f"<Wire {self.name}>"


class Side:
    """Port of one receiver or sender; its jobs wait in ``world.jobs``."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def job(self, action: Callable[[], object]) -> None:
        self.world.jobs.append(action)


class ReceiverSide(Side):
    """Port of the receiver."""

    def __init__(self, world: World, num_slots: int) -> None:
        super().__init__(world, "receiver")
        self.slots: list[Contents | None] = [None] * num_slots
        # (rank, half of the tokens, range of layers) -> value; what an earlier block left stays
        # until overwritten.
        self.assembly: list[dict[tuple[int, int, int], Any]] = [{} for _ in range(num_slots)]
        self.ring: LandingRing[Wire] = LandingRing(num_slots)
        self.logic: Receiver[Wire] = Receiver(
            self,
            self.ring,
            rank=0,
            slot_bytes=FRAGMENT_BYTES,
            source=lambda message: world.source(message.sender_rank),
            covers=lambda ranks: world.mapping is EQUAL or set(ranks) == {0, 1},
            group=group_of,
            num_pools=GROUPS,
            num_assembly=num_slots,
        )

    def send(self, connection: Wire, message: Any) -> None:
        if not connection.is_cut:
            connection.to_sender.append(message)

    def verify(self, fragments: Sequence[Any]) -> None:
        def run() -> None:
            found = [self.slots[fragment.slot] for fragment in fragments]
            self.logic.verified(
                fragments,
                [
                    f is not None and f.is_right and f.key == p.key
                    for f, p in zip(found, fragments, strict=True)
                ],
            )

        self.job(run)

    def place(self, fragments: Sequence[Any], slots: Sequence[dict[int, int]]) -> None:
        def run() -> None:
            for fragment, targets in zip(fragments, slots, strict=True):
                contents = self.slots[fragment.slot]
                assert contents is not None
                assert contents.key == fragment.key
                half = fragment.sender_block % 2
                value = whole_value(contents.value)
                for slot in targets.values():
                    for layers in ranges_of(fragment.group):
                        self.assembly[slot][fragment.sender_rank, half, layers] = value
            self.logic.placed(fragments)

        self.job(run)

    def copy(self, copy: Any) -> None:
        if not self.logic.admit(copy):
            return
        receive, slots, targets = copy.receive, list(copy.slots), copy.device_ids
        assert receive.plan.transfer_id not in self.world.reports, "a copy after the report"
        fails = self.world.random.random() < self.world.copy_failures

        def run() -> None:
            good = self.world.random.randrange(len(slots)) if fails else len(slots)
            for slot, target in zip(slots[:good], targets[:good], strict=True):
                contents = self.slots[slot]
                if copy.is_assembled:
                    contents = Contents(b"", dict(self.assembly[slot]))
                self.world.write(target, contents, copy.group)
            self.logic.copied(copy, CopyError(good, "failed") if fails else None)

        self.job(run)

    def take_back(self, copy: Any) -> bool:
        """Do nothing: the device has all copies."""
        return False

    def received(self, receive: Any) -> None:
        self.world.report_receive(receive)


class SenderSide(Side):
    """Port of a sender."""

    def __init__(self, world: World, name: str, num_slots: int, rank: int = 0) -> None:
        super().__init__(world, name)
        self.rank = rank
        self.slots: list[Contents | None] = [None] * num_slots
        self.wire: Wire | None = None
        self.filling = 0
        self.closed_step = 0
        self.marks: set[int] = set()  # noted
        self.ended_tickets: dict[bytes, str] = {}
        self.logic: Sender[Wire] = Sender(
            self,
            num_slots=num_slots,
            rank=rank,
            block_tokens=4,
            groups=groups_of,
            last_range=GROUPS + RANGES - 1,
        )

    def value(self, ticket_id: bytes, block: int) -> Any:
        """Return the value of a block that this rank sends."""
        return (ticket_id, block) if self.world.mapping is EQUAL else (ticket_id, self.rank, block)

    def is_open(self, plan: TransferPlan) -> bool:
        return plan.after_step > self.closed_step and plan.mark not in self.marks

    def send(self, connection: Wire, message: Any) -> None:
        if connection.is_cut:
            return
        connection.to_receiver.append((message, None))
        if isinstance(message, Want):
            connection.wanted += message.fragments
        elif isinstance(message, Return):
            connection.wanted -= message.unwanted

    def fill(self, fill: Any) -> None:
        if not self.logic.admit(fill):
            return
        send, fragments, slots = fill.send, list(fill.fragments), fill.slots
        assert send.plan.transfer_id not in self.world.reports, "a copy after the report"
        fails = self.world.random.random() < self.world.copy_failures

        def run() -> None:
            assert send.plan.transfer_id not in self.world.reports, "I3: read after the report"
            for fragment, slot in zip(fragments, slots, strict=True):
                self.slots[slot] = Contents(b"", self.value(send.plan.peer, fragment.block))
            self.logic.filled(fill, CopyError(0, "failed") if fails else None)

        self.job(run)

    def seal(self, fragments: Sequence[Any]) -> None:
        slots = [(fragment.slot, fragment.block_slot) for fragment in fragments]

        def run() -> None:
            for fragment, (slot, block_slot) in zip(fragments, slots, strict=True):
                held = self.slots[slot if block_slot is None else block_slot]
                assert held is not None
                self.slots[slot] = Contents(fragment.key, held.value)
            self.logic.sealed(fragments)

        self.job(run)

    def write(self, connection: Wire, fragments: Sequence[Any]) -> None:
        batch = [(fragment, fragment.slot, fragment.credit) for fragment in fragments]

        def run() -> None:
            for fragment, slot, credit in batch:
                contents = self.slots[slot]
                assert contents is not None
                assert contents.key == fragment.key, "an outgoing slot was reused"
                if self.world.random.random() < self.world.corruptions:
                    contents = contents._replace(value="corrupt", is_right=False)
                landed = Landed(
                    ticket_id=fragment.send.plan.peer,
                    sender_block=split_key(fragment.block)[1],
                    slot=credit.slot,
                    slot_generation=credit.generation,
                    fragment_bytes=FRAGMENT_BYTES,
                    group=fragment.group,
                )
                if not connection.is_cut:
                    connection.to_receiver.append((landed, contents))
            self.logic.written(fragments)

        self.job(run)

    def sent(self, send: Any) -> None:
        self.world.report(send.plan.transfer_id, send.leading_blocks, send.failure)

    def ended(self, ticket_id: bytes, reason: str) -> None:
        self.ended_tickets[ticket_id] = reason


class World:
    """One receiver, some senders, and everything that is in flight between them."""

    def __init__(
        self,
        seed: int,
        *,
        senders: int = 2,
        landing: int = 4,
        outgoing: int = 4,
        mapping: Any = EQUAL,
        check_every: int = 1,
    ) -> None:
        self.mapping = mapping
        self.check_every = check_every  # steps of `run`
        self.mappings: dict[int, Any] = {}  # by sender rank, where another one is used
        self.random = random.Random(seed)
        self.copy_failures = 0.0
        self.corruptions = 0.0
        self.now = 0.0
        self.jobs: list[Callable[[], object]] = []
        self.reports: dict[int, tuple[int, CopyError | None]] = {}
        self.memory: dict[int, dict[int, Any]] = {}  # device blocks of the receiver, by range
        self.committed: set[tuple[bytes, int, int]] = set()  # ticket, rank and block of senders
        self.others: dict[int, Any] = {}  # blocks that were reported, with their values
        self.wires: list[Wire] = []
        self.receiver = ReceiverSide(self, landing)
        self.senders = [
            SenderSide(self, f"sender{i}", outgoing, 0 if mapping is EQUAL else i)
            for i in range(senders)
        ]
        self.tickets: dict[bytes, Ticket] = {}
        self.plans: dict[int, TransferPlan] = {}
        self._ids = count(1)
        self._blocks = count()

    def source(self, rank: int) -> SenderBlocks:
        """Return the blocks of a sender rank."""
        mapping = self.mappings.get(rank, self.mapping)
        return SenderBlocks((mapping,) * (GROUPS + RANGES), rank, 4)

    # --- memory and reports ---------------------------------------------------------------------

    def write(self, target: int, contents: Contents | None, group: int) -> None:
        assert target not in self.others, f"I11: block {target} was written after its report"
        assert contents is not None
        value = contents.value
        if group >= GROUPS:
            value = whole_value(value)
        self.memory.setdefault(target, {}).update(dict.fromkeys(ranges_of(group), value))

    def report(self, transfer_id: int, leading: int, failure: CopyError | None) -> None:
        assert transfer_id not in self.reports, "a plan was reported twice"
        plan = self.plans[transfer_id]
        assert (failure is None) == (leading == plan.num_blocks)
        self.reports[transfer_id] = (leading, failure)

    def report_receive(self, receive: Any) -> None:
        plan = receive.plan
        self.report(plan.transfer_id, receive.leading_blocks, receive.failure)
        blocks, targets = plan.source_ids.tolist(), plan.target_ids.tolist()
        for block, target in list(zip(blocks, targets, strict=True))[: receive.leading_blocks]:
            expected = self.expected(plan.peer, block, receive.group)
            assert self.memory[target] == dict.fromkeys(range(RANGES), expected), "I4: wrong bytes"
            if receive.group == 0:
                self.check_committed(plan.peer, block)
        self.others |= {target: self.memory.get(target) for target in targets}

    def check_committed(self, ticket_id: bytes, block: int) -> None:
        """Assert that the senders have committed all positions of a block of the receiver."""
        sent = [(0, block)]
        if self.mapping is SPLIT:
            sent = [(rank, 2 * block + half) for rank in (0, 1) for half in (0, 1)]
        for rank, each in sent:
            assert (ticket_id, rank, each) in self.committed, "I11: the block was not committed"

    def expected(self, ticket_id: bytes, block: int, group: int) -> Any:
        """Return the value of a block of the receiver."""
        if self.mapping is EQUAL:
            return (ticket_id, block_key(group, block))
        return {
            (rank, half, layers): (ticket_id, rank, block_key(group, 2 * block + half))
            for rank in (0, 1)
            for half in (0, 1)
            for layers in range(RANGES)
        }

    # --- what users do --------------------------------------------------------------------------

    def expect(self, num_blocks: int, seconds: float = 1000.0, first: int = 0) -> Ticket:
        ticket = Ticket(
            ticket_id=self.random.randbytes(16),
            generation=GENERATION,
            model="m",
            weights_version="w",
            prompt_digest=bytes(32),
            first_position=self.block_tokens * first,
            num_tokens=self.block_tokens * num_blocks,
            timeout_seconds=seconds,
            block_tokens=self.block_tokens,
            transport="tcp",
            endpoints=[Endpoint("h", 1)],
        )
        self.tickets[ticket.ticket_id] = ticket
        self.receiver.logic.expect(ticket, self.now + seconds)
        return ticket

    @property
    def block_tokens(self) -> int:
        """Positions per block of the receiver; the senders have 4."""
        return 4 if self.mapping is EQUAL else 8

    def receive(self, ticket: Ticket, blocks: Sequence[int], group: int = 0) -> int:
        plan = TransferPlan(
            transfer_id=next(self._ids),
            route=RECEIVE,
            source_blocks=id_bytes(list(blocks)),
            target_blocks=id_bytes([next(self._blocks) for _ in blocks]),
            peer=ticket.ticket_id,
            group=str(group),
        )
        self.plans[plan.transfer_id] = plan
        self.receiver.logic.submit(plan)
        return plan.transfer_id

    def send(
        self,
        sender: SenderSide,
        ticket: Ticket,
        blocks: Sequence[int],
        after_step: int = 0,
        group: int = 0,
        *,
        ranges: tuple[int, int] = (0, 0),
        mark: int = 0,
    ) -> int:
        """Send blocks.

        Args:
            sender: the rank.
            ticket: that is sent.
            blocks: of the prompt.
            after_step: that they wait for.
            group: of whole blocks.
            ranges: of their layers; (0, 0) for whole blocks.
            mark: of layers that are being computed; 0 for committed positions.
        """
        if not group and not mark:
            self.committed |= {(ticket.ticket_id, sender.rank, block) for block in blocks}
        plan = TransferPlan(
            transfer_id=next(self._ids),
            route=SEND,
            source_blocks=id_bytes(list(blocks)),
            target_blocks=id_bytes(list(blocks)),
            peer=ticket.ticket_id,
            after_step=after_step,
            group=str(group),
            first_range=ranges[0],
            end_range=ranges[1],
            mark=mark,
        )
        self.plans[plan.transfer_id] = plan
        sender.logic.submit(plan)
        return plan.transfer_id

    def open(self, sender: SenderSide, ticket: Ticket, **changes: Any) -> None:
        """Send Open; the sender takes the ticket when Accepted arrives."""
        if sender.wire is None or sender.wire.is_cut:
            sender.wire = Wire(f"{sender.name}.{len(self.wires)}")
            self.wires.append(sender.wire)
        message = Open(
            protocol=PROTOCOL_VERSION,
            ticket_id=ticket.ticket_id,
            generation=ticket.generation,
            sender_rank=sender.rank,
            receiver_rank=0,
            sender_block_tokens=4,
            layout=b"",
            transport="tcp",
        )
        sender.send(sender.wire, msgspec.structs.replace(message, **changes))

    def cut(self, wire: Wire) -> None:
        """End a connection; both sides hear of it later, and what was on its way is lost."""
        wire.is_cut = True
        wire.to_receiver.clear()
        wire.to_sender.clear()

    # --- what happens meanwhile -------------------------------------------------------------------

    def step(self) -> bool:
        """Run one job, or deliver one message, of those that can be next; False without any."""
        choices: list[Callable[[], None]] = [
            lambda i=i: self._run_job(i) for i in range(len(self.jobs))
        ]
        for wire in self.wires:
            if wire.landing is not None or wire.to_receiver:
                choices.append(lambda w=wire: self._deliver_to_receiver(w))
            if wire.to_sender:
                choices.append(lambda w=wire: self._deliver_to_sender(w))
            if wire.is_cut and not all(wire.told):
                choices.append(lambda w=wire: self._tell_end(w))
        if not choices:
            return False
        self.random.choice(choices)()
        return True

    def run_job_or_reply(self) -> None:
        """Run one job, or deliver one message that is not a fragment.

        Raises:
            IndexError: there is none.
        """
        for wire in self.wires:
            if wire.to_receiver and wire.to_receiver[0][1] is None:
                self._deliver_to_receiver(wire)
                return
            if wire.to_sender:
                self._deliver_to_sender(wire)
                return
        self._run_job(0)

    def deliver_fragment(self, wire: int) -> None:
        """Deliver the first half, or the second half, of the next fragment of a connection."""
        self._deliver_to_receiver(self.wires[wire])

    def run(self) -> None:
        """Run until nothing is left to do; then the receiver knows all wishes for credits."""
        for number in count(1):
            if number % self.check_every == 0:
                self.check()
            if not self.step():
                break
        self.check()
        wanted = sum(wire.wanted for wire in self.wires if not wire.is_cut)
        assert self.receiver.ring.statistics().wanted >= wanted

    def _run_job(self, index: int) -> None:
        self.jobs.pop(index)()

    def _deliver_to_receiver(self, wire: Wire) -> None:
        if wire.landing is not None:
            landed, contents, lands = wire.landing
            wire.landing = None
            if lands and not wire.told[0]:
                self.receiver.slots[landed.slot] = contents
                self.receiver.logic.end_fragment(wire, landed)
            return
        message, fragment = wire.to_receiver.popleft()
        if fragment is not None:
            lands = self.receiver.logic.begin_fragment(wire, message) == "land"
            if lands:
                self.receiver.slots[message.slot] = None  # half of the bytes are there
            wire.landing = (message, fragment, lands)
        else:
            self.receiver.logic.on_message(wire, message)

    def _deliver_to_sender(self, wire: Wire) -> None:
        message = wire.to_sender.popleft()
        sender = next(s for s in self.senders if wire.name.startswith(s.name + "."))
        if isinstance(message, Accepted):
            ticket = self.tickets[message.ticket_id]
            target = ReceiverRank(wire, (self.mapping,) * (GROUPS + RANGES))
            sender.logic.add_ticket(ticket, self.now + ticket.timeout_seconds, {0: target})
        elif not isinstance(message, Refused):
            if isinstance(message, Credit):
                wire.wanted = max(wire.wanted - len(message.slots), 0)
            sender.logic.on_message(wire, message)

    def _tell_end(self, wire: Wire) -> None:
        side = self.random.choice([i for i in (0, 1) if not wire.told[i]])
        wire.told[side] = True
        if side == 0:
            wire.landing = None
            self.receiver.logic.on_closed(wire, "cut")
        else:
            sender = next(s for s in self.senders if wire.name.startswith(s.name + "."))
            sender.logic.on_closed(wire, "cut")

    def check(self) -> None:
        """Assert the invariants, and that blocks of other leases were not written."""
        assert self.receiver.logic.violations() == []
        for sender in self.senders:
            assert sender.logic.violations() == []

    def check_stuck(self) -> None:
        """Assert that plans are in flight only for want of a plan, or of blocks, of the other side.

        Nothing is left to do. Blocks that are put together may also wait for room.
        """
        if self.mapping is not EQUAL:
            return
        wanted = {
            (plan.peer, plan.group, block)
            for plan in self.plans.values()
            if plan.route == RECEIVE
            for block in plan.source_ids.tolist()
        }
        for plan in self.plans.values():
            if plan.route == SEND and plan.transfer_id not in self.reports:
                sent = {(plan.peer, plan.group, block) for block in plan.source_ids.tolist()}
                assert sent - wanted, f"transfer {plan.transfer_id} waits for nothing"

    def finish(self) -> None:
        """End everything, and assert that nothing is left."""
        for sender in self.senders:
            sender.closed_step = 1 << 30
            sender.logic.release_held()
        self.run()
        self.check_stuck()
        self.now += 1e9
        self.receiver.logic.expire(self.now)
        for sender in self.senders:
            sender.logic.expire(self.now)
        self.run()
        assert self.reports.keys() == self.plans.keys()
        assert self.receiver.logic.is_quiet
        assert self.receiver.logic.counts().tickets == 0
        for sender in self.senders:
            assert sender.logic.is_quiet
            assert sender.logic.free_slots == len(sender.slots)
            assert len(sender.ended_tickets) == sender.logic.counts().opened
        for wire in self.wires:
            if not wire.is_cut:
                self.cut(wire)
        self.run()
        assert self.receiver.logic.free_slots == len(self.receiver.slots)
