"""Arrivals: fragments, the blocks that they become, and the plans that wait for these. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiokv.peers.messages import block_key, bytes_with_trailer, split_key
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aiokv.base.plan import TransferPlan


class ArrivalMapping(Protocol):
    """Map one sender rank's fragments to blocks of this rank; see ``aiokv.layout.mapping``."""

    is_identity: bool
    fragment_bytes: int

    def receiver_blocks(self, sender_block: int) -> range:
        """Return the blocks of the receiver that have tokens of a block of the sender."""

    def sender_blocks(self, receiver_block: int) -> range:
        """Return the blocks of the sender that have tokens of a block of the receiver."""


class SenderBlocks(NamedTuple):
    """The blocks of a sender rank.

    Attributes:
        mappings: to the blocks of this rank, by group: of the pools, then of ranges of layers.
        layout: for ``Receiver``'s ``covers``.
        block_tokens: positions per block of the sender.
    """

    mappings: Sequence[ArrivalMapping]
    layout: Any
    block_tokens: int

    @property
    def is_identity(self) -> bool:
        """True if each fragment of every group is a whole block of the receiver, unchanged.

        Otherwise, several ranks may each send a part of a block, or the whole block.
        """
        return all(mapping.is_identity for mapping in self.mappings)

    def fragment_bytes(self, group: int) -> int:
        """Return the bytes of a fragment of a group with its trailer."""
        return bytes_with_trailer(self.mappings[group].fragment_bytes)


class Fragment(NamedTuple):
    """A fragment in a landing slot, which belongs to it.

    Attributes:
        ticket_id: id of its ticket.
        sender_rank: rank that sent it.
        sender_block: its block, in blocks of the sender.
        group: group of the block.
        slot: landing slot.
        num_bytes: payload and trailer.
        key: key that its trailer must have.
        mapping: to the blocks of this rank; None if the slot is the block.
    """

    ticket_id: bytes
    sender_rank: int
    sender_block: int
    group: int
    slot: int
    num_bytes: int
    key: bytes
    mapping: ArrivalMapping | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Rank of the sender, and its block among those of all groups."""
        return self.sender_rank, block_key(self.group, self.sender_block)


class Receive:
    """A plan in flight that receives blocks of one group.

    Attributes:
        plan: its blocks belong to it until ``ReceiverPort.received``.
        group: group of its blocks.
        positions: index in the plan of each of its blocks, by ``block_key``.
        missing: its blocks that are not in the device.
        parts: ranges of layers that are in the device, of blocks of which others are missing.
        copies: copies into its blocks that are in flight.
        failure: set when it was given up: no further copy begins.
        is_touched: a copy may have written its blocks.
    """

    def __init__(self, plan: TransferPlan, group: int) -> None:
        self.plan = plan
        self.group = group
        blocks = plan.source_ids.tolist()
        self.positions = {block_key(group, block): i for i, block in enumerate(blocks)}
        self.device_ids: list[int] = plan.target_ids.tolist()
        self.missing = set(self.positions)
        self.parts: dict[int, set[int]] = {}
        self.copies: set[LandingCopy] = set()
        self.failure: CopyError | None = None
        self.is_touched = False

    @property
    def leading_blocks(self) -> int:
        """Number of leading blocks of the plan that are in the device."""
        return min((self.positions[block] for block in self.missing), default=len(self.positions))

    def note_copied(self, fragments: Iterable[int], num_ranges: int) -> None:
        """Note that fragments, by ``block_key``, are in the device.

        Args:
            fragments: whole blocks, or ranges of their layers.
            num_ranges: ranges that make up a block; 0 if the fragments are whole blocks.
        """
        if not num_ranges:
            self.missing.difference_update(fragments)
            return
        for fragment in fragments:
            block = block_key(self.group, split_key(fragment)[1])
            parts = self.parts.setdefault(block, set())
            parts.add(fragment)
            if len(parts) == num_ranges:
                self.missing.discard(block)
                del self.parts[block]

    def give_up(self, reason: str) -> None:
        """Let no further copy begin. The first reason is kept."""
        if self.failure is None and self.missing:
            self.failure = CopyError(0, reason)

    @property
    def at_rest(self) -> bool:
        """True if no transfer accesses its blocks, and none will."""
        return not self.copies and (self.failure is not None or not self.missing)


class LandingCopy:
    """A copy from slots to device blocks of a plan.

    Attributes:
        receive: the plan.
        group: group of the fragments in the slots.
        blocks: by ``block_key``.
        slots: slots that are read; taken when they are freed.
        num_ranges: ranges of layers that make up a block; 0 for whole blocks.
        is_assembled: they are assembly slots, and no landing slots.
        is_taken_back: it was cancelled before the device had it.
        copy_id: for the port.
    """

    def __init__(
        self,
        receive: Receive,
        blocks: list[int],
        slots: list[int],
        *,
        num_ranges: int = 0,
        is_assembled: bool = False,
    ) -> None:
        self.receive = receive
        self.group = split_key(blocks[0])[0]
        self.num_ranges = num_ranges
        self.blocks = blocks
        self.slots = slots
        self.is_assembled = is_assembled
        self.is_taken_back = False
        self.copy_id = 0

    @property
    def device_ids(self) -> list[int]:
        """Device block of each slot."""
        receive, group = self.receive, self.receive.group
        keys = (block_key(group, split_key(block)[1]) for block in self.blocks)
        return [receive.device_ids[receive.positions[key]] for key in keys]


class SlotCopies:
    """Copies of blocks that have arrived together: one per plan and group of their fragments.

    Args:
        is_assembled: their slots are assembly slots.
    """

    def __init__(self, *, is_assembled: bool = False) -> None:
        self._is_assembled = is_assembled
        self._copies: dict[tuple[int, int], LandingCopy] = {}

    def add(self, receive: Receive, block: int, slot: int, num_ranges: int = 0) -> None:
        """Add a block of a plan, or a range of its layers, by ``block_key``.

        See ``LandingCopy`` for the parameters.
        """
        key = receive.plan.transfer_id, split_key(block)[0]
        copy = self._copies.get(key)
        if copy is None:
            self._copies[key] = LandingCopy(
                receive, [block], [slot], num_ranges=num_ranges, is_assembled=self._is_assembled
            )
        else:
            copy.blocks.append(block)
            copy.slots.append(slot)

    def __iter__(self) -> Iterator[LandingCopy]:
        return iter(self._copies.values())
