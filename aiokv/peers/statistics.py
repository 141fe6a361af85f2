"""Statistics of the blocks that an engine receives from other engines, and sends to them."""

from __future__ import annotations

import msgspec

from aiokv.peers.peer_transfers import RankPeerStatistics  # noqa: TC001  (msgspec)


class ReceivingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one receive.

    Attributes:
        wanted_tokens: positions that the ticket asks for.
        received_tokens: leading ones of them that have arrived, proven and committed.
        first_chunk_seconds: time from the ticket until the first positions had arrived; None
            before.
        seconds: time from the ticket until the receive has ended, or until now.
        wait_seconds: time that ``wait`` has taken so far, over all calls.
    """

    wanted_tokens: int
    received_tokens: int
    first_chunk_seconds: float | None
    seconds: float
    wait_seconds: float


class PeerCounts(msgspec.Struct, kw_only=True):
    """Counts of an engine since it was made; see :class:`PeerStatistics`."""

    receives: int = 0
    complete_receives: int = 0
    wanted_tokens: int = 0
    received_tokens: int = 0
    receive_wait_seconds: float = 0.0
    sends: int = 0
    complete_sends: int = 0
    refused_sends: int = 0
    delivered_tokens: int = 0


class PeerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Receives and sends of an engine since it was made.

    Attributes:
        receives: tickets that were made.
        receiving: receives that have not ended.
        complete_receives: receives whose positions have all arrived.
        wanted_tokens: positions that the tickets asked for.
        received_tokens: those of them that have arrived.
        receive_wait_seconds: time that requests have waited for blocks of other engines.
        sends: tickets that were opened at their receiver.
        sending: sends that have not ended.
        complete_sends: sends whose positions were all acknowledged.
        refused_sends: tickets that could not be sent: wrong, expired, or refused by the receiver.
        delivered_tokens: positions that receivers have acknowledged.
        ranks: parcels, slots and connections of each rank; one entry without ranks.
    """

    receives: int
    receiving: int
    complete_receives: int
    wanted_tokens: int
    received_tokens: int
    receive_wait_seconds: float
    sends: int
    sending: int
    complete_sends: int
    refused_sends: int
    delivered_tokens: int
    ranks: list[RankPeerStatistics]
