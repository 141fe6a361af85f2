"""Transport: moves fragments from outgoing slots of a sender into landing slots of a receiver.

The messages of a ticket are the same for all transports. A transport decides only how the bytes
of a fragment reach the slot that the receiver has given credit for.

::

                      tcp                              one-sided (RDMA)
    Open, Accepted    metadata is empty                metadata names the agent and its memory
    fragment            Landed, then its bytes, on the   the transport writes into the slot of the
                      control connection               receiver; then Landed
    receiver          the connection reads the bytes   the bytes are in the slot when Landed arrives
                      into the slot
    lost connection   the slot can be reused at once   ``fence``, then the slot can be reused

``accept`` and ``fence`` belong to the receiver, ``connect`` and ``Link`` to the sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.peers.messages import Landed
    from aiokv.peers.wire import Connection


class PeerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of an arena for fragments. Slot ``i`` begins at ``address + i * slot_bytes``.

    Attributes:
        address: address of slot 0.
        num_slots: number of slots.
        slot_bytes: distance between slots; the most bytes of a fragment with its trailer.
        view: all slots as one writable buffer; None in the memory of a GPU.
        device: ordinal of the GPU that has the memory; None in host memory.
        owner: object that keeps the memory allocated, beside ``view``.
    """

    address: int
    num_slots: int
    slot_bytes: int
    view: memoryview | None = None
    device: int | None = None
    owner: object = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def check(self, slot: int, num_bytes: int) -> None:
        """Check that a slot exists and has room for ``num_bytes``.

        Raises:
            InternalError: there is no such slot, or it is smaller.
        """
        if not 0 <= slot < self.num_slots or not 0 < num_bytes <= self.slot_bytes:
            raise InternalError(
                f"{num_bytes} bytes of slot {slot}: the memory has {self.num_slots} slots of "
                f"{self.slot_bytes} bytes"
            )

    def slot(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first ``num_bytes`` of a slot, not copied.

        Raises:
            InternalError: there is no such slot, it is smaller, or the memory is in a GPU.
        """
        self.check(slot, num_bytes)
        if self.view is None:
            raise InternalError(f"slot {slot} is in the memory of GPU {self.device}")
        begin = slot * self.slot_bytes
        return self.view[begin : begin + num_bytes]


class Outgoing(NamedTuple):
    """A fragment to write.

    Attributes:
        slot: outgoing slot that has the payload and, behind it, the trailer.
        landed: names the block, the landing slot, and the bytes to write.
    """

    slot: int
    landed: Landed


class Link(Protocol):
    """Way of the fragments of one sender rank to one receiver rank. Used on one loop.

    A link closes itself after its connection has ended.
    """

    async def write(self, fragments: Sequence[Outgoing]) -> None:
        """Write fragments into the landing slots of their credits, each followed by its ``Landed``.

        Returns when the transport no longer reads the outgoing slots; whether the fragments are
        right, the receiver tells later with ``Proven`` or ``Wrong``. Concurrent calls are executed
        in the order of the calls.

        Raises:
            PeerError: the connection ended, or a write failed. The outgoing slots are not read any
                more. Which fragments have arrived is unknown.

        Cancellation: the call ends when the outgoing slots are not read any more. Fragments whose
            write had not begun are not written, and their credits go back with ``Return``.
        """

    async def aclose(self) -> None:
        """Give up the way, not the connection; no ``write`` is in progress. Idempotent."""


class Transport(Protocol):
    """Both ends of the links of one rank. Used on one loop, from ``open`` to ``aclose``.

    Attributes:
        name: ``"tcp"``, ``"nixl"``, ``"mooncake"`` or ``"cuda_ipc"``.
        one_sided: a peer writes into landing slots without the receiver's part: after a lost
            connection, slots with credits are quarantined until ``fence`` has returned. ``accept``
            is called, and awaited, before a sender gets a credit.
    """

    name: str
    one_sided: bool

    async def open(self, landing: PeerMemory, outgoing: PeerMemory) -> None:
        """Register the memory of the slots, and start what the transport needs.

        Args:
            landing: slots that peers write into; none if the engine only sends.
            outgoing: slots that ``Link.write`` reads.

        Raises:
            ConfigError: a package, a device or a permission is missing, or the memory cannot be
                registered; the message names it. Nothing is left behind.

        Cancellation: nothing is left behind.
        """

    def metadata(self) -> bytes:
        """Return the bytes that a receiver needs for ``accept``, at most 64 KiB."""

    async def accept(self, connection: Connection, metadata: bytes) -> bytes:
        """Prepare to receive from the sender of a connection, once per connection.

        Args:
            connection: the control connection, which is open; ``fence`` is called after its end.
            metadata: metadata of the sender, from its ``Open``.

        Returns:
            The bytes that the sender needs for ``connect``, at most 64 KiB.

        Raises:
            PeerError: the transport cannot receive from this sender.

        Cancellation: call ``fence``.
        """

    async def connect(self, connection: Connection, metadata: bytes) -> Link:
        """Return a link to the receiver that has accepted a ticket.

        Args:
            connection: the control connection, which carries ``Landed``.
            metadata: metadata of the receiver, from its ``Accepted``.

        Raises:
            PeerError: the receiver cannot be reached, or its metadata is malformed.

        Cancellation: nothing is left behind.
        """

    async def fence(self, connection: Connection, *, may_write: bool) -> None:
        """Return when no write of a sender can reach the landing slots any more.

        Called after the connection of the sender has ended, before its quarantined slots are used
        again. Returns at once for a transport that is not one-sided.

        Args:
            connection: connection of the sender.
            may_write: the sender had credits, so that its writes may be in progress.

        Raises:
            PeerError: writes cannot be excluded: the slots stay in quarantine.

        Cancellation: call it again, or ``aclose``.
        """

    async def aclose(self) -> None:
        """Give up all links, and release the memory. Idempotent.

        After the return, neither the transport nor a peer accesses the slots. Operations that do
        not end within some seconds are logged, and their memory is never freed.

        Cancellation: call it again.
        """
