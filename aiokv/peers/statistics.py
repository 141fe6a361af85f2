"""Statistics of the blocks that an engine receives from other engines, and sends to them."""

from __future__ import annotations

import msgspec


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
