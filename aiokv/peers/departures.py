"""Departures: plans that send blocks, and the fragments that these become. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from aiokv.peers.messages import block_key, bytes_with_trailer, split_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.peers.messages import SlotCredit
    from aiokv.peers.send_queue import SendQueue
    from aiokv.worker.device.base import CopyError

C = TypeVar("C", bound="Hashable")  # a connection


class Fragment(Generic[C]):
    """A block on its way to one receiver rank.

    Attributes:
        send: its plan.
        block: block of the prompt, by ``block_key``.
        queue: queue of fragments to the receiver.
        key: key of its trailer.
        mapping: mapping of blocks of its group to fragments for the receiver.
        num_bytes: payload and trailer.
        num_slots: outgoing slots that it takes: one more if it is cut out of a block.
        slot: its outgoing slot; None before it has one, and after the slot was freed.
        block_slot: slot of the whole block that the fragment is cut out of; None if it is the
        block. credit: landing slot that it is written to.
        busy: a copy, a thread or the transport uses the slot.
        proven: the receiver has acknowledged it.
        dropped: nothing of it is sent any more.
    """

    def __init__(
        self, send: Send, block: int, queue: SendQueue[C], target: ReceiverRank[C], key: bytes
    ) -> None:
        self.send = send
        self.block = block
        self.queue = queue
        self.key = key
        self.mapping = target.mappings[self.group]
        self.num_bytes = target.fragment_bytes(self.group)
        self.num_slots = 1 if self.mapping.fragment_is_block else 2
        self.slot: int | None = None
        self.block_slot: int | None = None
        self.credit: SlotCredit | None = None
        self.tries = 0
        self.busy = False
        self.proven = False
        self.dropped = False
        self.again = False  # True: write it again after its present write
        self.deferred = False  # True: it has no outgoing slot, and waits for an Again

    @property
    def group(self) -> int:
        """Group of the block."""
        return split_key(self.block)[0]


class DepartureMapping(Protocol):
    """Mapping of this rank's blocks to fragments for one receiver; see ``aiokv.layout.mapping``."""

    fragment_is_block: bool
    fragment_bytes: int


class ReceiverRank(NamedTuple, Generic[C]):
    """A receiver rank of a ticket.

    Attributes:
        connection: to the rank.
        mappings: mappings of the blocks of this rank to fragments for the receiver, by group.
    """

    connection: C
    mappings: Sequence[DepartureMapping]

    def fragment_bytes(self, group: int) -> int:
        """Return the bytes of a fragment of a group with its trailer."""
        return bytes_with_trailer(self.mappings[group].fragment_bytes)

    @property
    def largest_fragment_bytes(self) -> int:
        """Bytes of the largest fragment of all groups."""
        return max(self.fragment_bytes(group) for group in range(len(self.mappings)))


class Send:
    """A plan in flight that sends blocks of one group, or ranges of their layers.

    Attributes:
        plan: its blocks belong to it until ``SenderPort.sent``.
        positions: index in the plan of each of its blocks, by ``block_key``, in all groups.
        fills: copies that read its device blocks.
        unproven: its blocks that are not acknowledged by all receivers, with the number of them.
        failure: set when it was given up.
    """

    def __init__(self, plan: TransferPlan, groups: Sequence[int]) -> None:
        self.plan = plan
        blocks = plan.target_ids.tolist()
        self.positions = {
            block_key(group, block): i for group in groups for i, block in enumerate(blocks)
        }
        self.device_ids: list[int] = plan.source_ids.tolist()
        self.fills: set[SlotFill] = set()
        self.unproven: dict[int, int] = {}
        self.failure: CopyError | None = None
        self.is_held = True

    @property
    def leading_blocks(self) -> int:
        """Number of leading blocks of the plan that were acknowledged."""
        return min((self.positions[block] for block in self.unproven), default=len(self.device_ids))

    def note_proven(self, block: int) -> None:
        """Note that one receiver has acknowledged a block, by ``block_key``."""
        self.unproven[block] -= 1
        if not self.unproven[block]:
            del self.unproven[block]

    @property
    def at_rest(self) -> bool:
        """True if no transfer reads its blocks, and none will."""
        return not self.fills and (self.failure is not None or not self.unproven)


class SlotFill:
    """A copy from device blocks of a plan to outgoing slots.

    Attributes:
        group: group of its blocks.
    """

    def __init__(self, send: Send, group: int, fragments: list[Fragment[Any]]) -> None:
        self.send = send
        self.group = group
        self.fragments = fragments
        self.copy_id = 0  # id of the copy in the port

    @property
    def device_ids(self) -> list[int]:
        """Device block of each slot."""
        send = self.send
        return [send.device_ids[send.positions[fragment.block]] for fragment in self.fragments]

    @property
    def slots(self) -> list[int]:
        """Outgoing slots that are written."""
        slots = [p.slot if p.block_slot is None else p.block_slot for p in self.fragments]
        return [-1 if slot is None else slot for slot in slots]
