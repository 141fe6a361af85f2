"""LayerMarks: the points in the work of a device behind which layers of blocks are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.base.checks import shown
from aiokv.errors import UsageError
from aiokv.peers.messages import ID_BYTES

if TYPE_CHECKING:
    from aiokv.worker.device.base import Event

_MARK_BYTES: Final = 8


class LayerMarks:
    """Marks of the tickets that are being sent: numbers that plans name (``TransferPlan.mark``)."""

    def __init__(self) -> None:
        self._events: dict[bytes, dict[int, Event | None]] = {}  # by ticket and mark

    def note(self, ticket_id: bytes, mark: int, event: Event | None) -> None:
        """Note a mark whose work was submitted. Idempotent.

        Args:
            ticket_id: id of an open ticket; ``forget`` follows.
            mark: mark of the ticket.
            event: recorded after the work; None when it has finished.
        """
        self._events.setdefault(ticket_id, {})[mark] = event

    def has(self, ticket_id: bytes, mark: int) -> bool:
        """Return True if the mark was noted; False for 0, which is none."""
        return mark in self._events.get(ticket_id, ())

    def event(self, ticket_id: bytes, mark: int) -> Event | None:
        """Return the event of a mark that was noted."""
        return self._events[ticket_id][mark]

    def forget(self, ticket_id: bytes) -> None:
        """Forget the marks of a ticket that has ended. Idempotent."""
        self._events.pop(ticket_id, None)


def layer_mark(ticket_id: bytes, mark: int) -> bytes:
    """Return the name of a mark outside the engine."""
    return ticket_id + mark.to_bytes(_MARK_BYTES, "little")


def split_layer_mark(name: object) -> tuple[bytes, int]:
    """Return the ticket and the number of a mark.

    Raises:
        UsageError: it is not the name of a mark.
    """
    if not isinstance(name, bytes) or len(name) != ID_BYTES + _MARK_BYTES:
        raise UsageError(f"mark is {shown(name)}; it must be what Sending.layers_done has returned")
    return name[:ID_BYTES], int.from_bytes(name[ID_BYTES:], "little")
