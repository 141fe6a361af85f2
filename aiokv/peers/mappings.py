"""Mappings: which ranks of other engines have blocks that one rank can send or receive. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.errors import LayoutError, UsageError
from aiokv.peers.layout import BlockLayout, Mapping, covers, sources
from aiokv.peers.receiver import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.peers.messages import Open
    from aiokv.peers.ticket import Endpoint, Ticket

MIN_CUT_SLOTS: Final = 2  # a block, and the parcel that is cut out of it
MAX_MAPPINGS: Final = 256


class Mappings:
    """Mappings from and to the blocks of one rank, made once per pair of layouts.

    Args:
        own: layout of the rank.
        outgoing_slots: slots for sending.
        only_equal: refuse layouts whose parcels are no whole blocks.
    """

    def __init__(self, own: BlockLayout, outgoing_slots: int, *, only_equal: bool = False) -> None:
        self._own = own
        self._only_equal = only_equal
        self._outgoing_slots = outgoing_slots
        self._mappings: dict[tuple[bytes, bytes], Mapping] = {}

    def receivers(self, ticket: Ticket, layouts: Sequence[bytes]) -> list[tuple[Endpoint, Mapping]]:
        """Return the receiver ranks that this rank sends to.

        Args:
            ticket: of another engine.
            layouts: of all ranks of this engine, encoded; empty for an engine of one rank.

        Raises:
            LayoutError: the blocks cannot be mapped; or there are too few outgoing slots.
        """
        senders = [BlockLayout.decode(blob) for blob in layouts] or [self._own]
        receivers = []
        for endpoint in ticket.endpoints:
            receiver = BlockLayout.decode(endpoint.layout)
            if self._own.rank not in sources(senders, receiver):
                continue
            mapping = self._mapping(self._own, receiver)
            if not mapping.parcel_is_block and self._outgoing_slots < MIN_CUT_SLOTS:
                raise LayoutError(
                    f"the engine has {self._outgoing_slots} outgoing slots; blocks of another "
                    f"layout need {MIN_CUT_SLOTS}",
                    hint="raise Peers.outgoing_bytes",
                )
            receivers.append((endpoint, mapping))
        return receivers

    def source(self, message: Open) -> Source:
        """Return the blocks of a sender.

        Raises:
            LayoutError: they cannot be mapped to the blocks of this rank.
        """
        try:
            layout = BlockLayout.decode(message.layout)
        except UsageError as error:
            raise LayoutError(str(error)) from None
        if (layout.rank, layout.block_tokens) != (message.sender_rank, message.sender_block_tokens):
            raise LayoutError(
                f"the layout of the sender is of rank {layout.rank} with {layout.block_tokens} "
                f"tokens per block; it says that it is rank {message.sender_rank} with "
                f"{message.sender_block_tokens}"
            )
        return Source(self._mapping(layout, self._own), layout, layout.block_tokens)

    def covers(self, layouts: list[BlockLayout]) -> bool:
        """Return True when ranks of these layouts together have all heads of this rank."""
        return covers(layouts, self._own)

    def _mapping(self, sender: BlockLayout, receiver: BlockLayout) -> Mapping:
        """Raises:
        LayoutError: the layouts cannot be mapped.
        """
        key = (sender.encode(), receiver.encode())
        mapping = self._mappings.get(key)
        if mapping is None:
            while len(self._mappings) >= MAX_MAPPINGS:
                del self._mappings[next(iter(self._mappings))]
            mapping = self._mappings[key] = Mapping(sender, receiver)
        if self._only_equal and not mapping.is_identity:
            raise LayoutError(
                "the blocks of the sender and of the receiver have different layouts, which the "
                "transport 'cuda_ipc' does not convert",
                hint="use Peers(transport='tcp') on both servers",
            )
        return mapping
