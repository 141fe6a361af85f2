"""Messages between manager and ranks: msgspec structs as MessagePack, never pickle.

::

    rank                             manager
    Hello(layout, version) ────────►
          ◄───────────────────────── Begin(generation, host blocks, identity)   or Refuse(why)
    Ready(generation) ─────────────►                     all are ready: plans may be sent
          ◄───────────────────────── TransferBatch, the same bytes to all ranks
    Reports ───────────────────────►                     ends, layers, fetches that are overdue
          ◄───────────────────────── Sleep, WakeUp
          ◄───────────────────────── Lookup(digests), Purge(label), ChangeWeights(version): with
                                     stores only
          ◄───────────────────────── Expect, OpenTicket, CloseTicket: with peers only
    Reply ─────────────────────────►                     to requests, which have numbers
          ◄───────────────────────── AskStatistics
    TicketEnded ───────────────────►                     a ticket that the rank sends
    RankCounts ────────────────────►                     answers AskStatistics
          ◄───────────────────────── Close
    Left ──────────────────────────►                     its process closes the rank

A *generation* is the time between two restarts. Ready(g) also means that no transfer of an earlier
generation moves; Reports of an earlier generation are ignored.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from aiokv.base.groups import ATTENTION
from aiokv.base.plan import TransferPlan, TransferReport  # noqa: TC001
from aiokv.base.statistics import (
    GuardStatistics,  # noqa: TC001
    PollerStatistics,  # noqa: TC001
    RankPeerStatistics,  # noqa: TC001
    WorkerStatistics,  # noqa: TC001
)
from aiokv.base.types import Tier  # noqa: TC001
from aiokv.config.cache_config import WindowGroup  # noqa: TC001  (msgspec needs it)
from aiokv.layout.host_block import pitch_bytes
from aiokv.peers.ticket import Endpoint  # noqa: TC001
from aiokv.stores.base import StoreFilters  # noqa: TC001
from aiokv.stores.identity import StoreIdentity  # noqa: TC001
from aiokv.wire.connection import Connection
from aiokv.wire.messages import Codec, Ping, Pong, encode
from aiokv.worker.device.cpu import device_blocks

if TYPE_CHECKING:
    from aiokv.layout.regions import Regions

PROTOCOL_VERSION: Final = 14
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_HELLO_BYTES: Final = 1024
MAX_LAYERS: Final = 1 << 16  # the manager keeps a counter per layer and transfer


class _Message(
    msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True
):
    """Positional on the wire, behind a tag that names the message."""


# --- from a rank ----------------------------------------------------------------------------------


class Layout(_Message, frozen=True):
    """Layout of a rank's blocks; equal on all ranks of a group, except for ``num_blocks``.

    Attributes:
        num_layers: layers of the model.
        num_blocks: device blocks of the rank's tensors.
        block_bytes: bytes of one block of each group on the device, over all layers and regions.
        pitch_bytes: bytes that one block takes in host memory.
        fingerprint: digest of number, name and bytes of all regions of all layers.
        window_blocks: blocks of the tensors of each window group.
    """

    num_layers: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
    num_blocks: int
    block_bytes: dict[str, int]
    pitch_bytes: int
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=64)]
    window_blocks: dict[str, int] = {}


class Hello(_Message, frozen=True, tag="hello"):
    """The first message on a connection.

    Attributes:
        has_stores: the rank has stores for its shard of the blocks.
        has_peers: the rank exchanges its shard of the blocks with other engines.
    """

    protocol: int
    rank: int
    layout: Layout
    has_stores: bool = False
    has_peers: bool = False


class Ready(_Message, frozen=True, tag="ready"):
    """Host memory is allocated, and no transfer of an earlier generation moves.

    Attributes:
        endpoints: where the rank listens for senders; empty without peers, and for a rank that only
            sends.
        peer_layout: layout of its blocks, for peers; empty without peers.
        layer_ends: end of each range of layers in which it sends blocks; empty without ranges.
        ticket_key: key of tickets, which does not reveal the secret; empty without peers.
        unpinned_bytes: host memory that the rank's device has not page-locked yet.
    """

    generation: int
    endpoints: list[Endpoint] = []
    peer_layout: bytes = b""
    ticket_key: bytes = b""
    unpinned_bytes: int = 0
    layer_ends: list[int] = []


class Reports(_Message, frozen=True, tag="reports"):
    """Events of one pass of the rank's loop.

    Attributes:
        arrived: (transfer id, layers that have arrived since) of transfers that go on.
        ended: one report per plan, in the order of their ends.
        finished_step: this step and all before it have finished on the rank.
        overdue: early ends of fetches: a store has exceeded its deadline, and still accesses the
            blocks. The report in ``ended`` follows when it has stopped.
    """

    generation: int
    arrived: list[tuple[int, list[int]]]
    ended: list[TransferReport]
    finished_step: int
    overdue: list[TransferReport] = []


class Reply(_Message, frozen=True, tag="reply"):
    """Reply to ``Sleep``, ``WakeUp``, ``Lookup``, ``Purge``, ``Expect`` or ``OpenTicket``.

    Attributes:
        number: number of the request.
        error: empty when the rank has done it; for ``OpenTicket``, when the receivers have accepted
            the ticket.
        kind: name of the class of the error.
        seconds: of a lookup, the expected time to fetch the first i + 1 blocks, one number per
            block of the run; of an auxiliary pool, ``Found.latency_seconds``, then
            ``Found.seconds``.
        removed: of a purge, the number of objects that were removed.
    """

    number: int
    error: str = ""
    kind: str = ""
    seconds: list[float] = []
    removed: int = 0


class TicketEnded(_Message, frozen=True, tag="ticket_ended"):
    """A ticket that this rank sends has ended; the reports of its plans may follow."""

    ticket_id: bytes
    reason: str


class RankCounts(_Message, frozen=True, tag="counts"):
    """Answer to ``AskStatistics``.

    Attributes:
        worker: counts of the rank's transfers.
        poller: statistics of its event poller.
        stores: statistics of each store of the rank, in the configured order.
        peers: its use of peers; empty without peers.
        unpinned_bytes: see ``Ready``.
        filters: what tells which blocks its stores do not have; None without filters.
    """

    worker: WorkerStatistics
    poller: PollerStatistics
    stores: list[GuardStatistics] = []
    peers: list[RankPeerStatistics] = []
    unpinned_bytes: int = 0
    filters: StoreFilters | None = None


class Broken(_Message, frozen=True, tag="broken"):
    """The rank's device has failed."""

    reason: str


class Left(_Message, frozen=True, tag="left"):
    """The process of the rank closes the rank: the end of the connection is not a failure."""


# --- from the manager -----------------------------------------------------------------------------


class Begin(_Message, frozen=True, tag="begin"):
    """Start a generation: cancel waiting plans, wait for moving ones, then send Ready.

    Attributes:
        closed_step: all steps up to this one have finished.
        asleep: tiers without memory.
        identity: origin of the blocks, for their keys in the stores; ``rank`` is the receiver's.
        windows: window groups with blocks in host memory.
    """

    generation: int
    host_blocks: int
    closed_step: int
    asleep: list[Tier]
    identity: StoreIdentity | None = None
    windows: dict[str, WindowGroup] = {}


class Refuse(_Message, frozen=True, tag="refuse"):
    """The connection ends; the same Hello would be refused again."""

    reason: str


class TransferBatch(_Message, frozen=True, tag="batch"):
    """All plans of one pass of the manager's loop.

    Attributes:
        plans: plans of all requests, in the order of submission.
        cancels: transfer ids; processed after the plans.
        priorities: (transfer id, priority) of plans that are more urgent now; processed likewise.
    """

    generation: int
    plans: list[TransferPlan]
    cancels: list[int]
    priorities: list[tuple[int, int]] = []


class Sleep(_Message, frozen=True, tag="sleep"):
    """Free the memory of these tiers; no transfer is in flight."""

    number: int
    tiers: list[Tier]


class WakeUp(_Message, frozen=True, tag="wake_up"):
    """Reallocate the memory of these tiers.

    Attributes:
        device_blocks: the least that the tensors must hold.
    """

    number: int
    tiers: list[Tier]
    device_blocks: int = 0


class Lookup(_Message, frozen=True, tag="lookup"):
    """Ask the stores of the rank for blocks.

    Attributes:
        digests: 32 bytes per block, of consecutive blocks.
        group: group whose copies of the blocks are asked for.
    """

    number: int
    digests: bytes
    group: str = ATTENTION


class Purge(_Message, frozen=True, tag="purge"):
    """Remove the objects whose keys end with a label from the stores of the rank."""

    number: int
    label: bytes


class Expect(_Message, frozen=True, tag="expect"):
    """Let senders open a ticket, see ``Tickets.expect``.

    Attributes:
        ticket: the encoded ticket.
    """

    number: int
    ticket: bytes
    seconds: float
    open_seconds: float


class OpenTicket(_Message, frozen=True, tag="open_ticket"):
    """Connect to the receivers of a ticket, and let them accept it.

    Attributes:
        ticket: the encoded ticket.
        layouts: ``Ready.peer_layout`` of all ranks, by rank.
    """

    number: int
    ticket: bytes
    layouts: list[bytes]


class CloseTicket(_Message, frozen=True, tag="close_ticket"):
    """End a ticket, and the plans that were sent before; the reason is for the other engine."""

    ticket_id: bytes
    reason: str


class ChangeWeights(_Message, frozen=True, tag="change_weights"):
    """Use keys of this version of the weights, from the next message on."""

    version: str


class AskStatistics(_Message, frozen=True, tag="ask_statistics"):
    """Ask for the counts of a rank; sent at each heartbeat."""


class Close(_Message, frozen=True, tag="close"):
    """Finish moving transfers, free the memory, and end the connection."""


FromConnectedRank = Ready | Reports | Reply | TicketEnded | RankCounts | Broken | Left | Ping | Pong
FromRank = Hello | FromConnectedRank
FromManager = (
    Begin
    | Refuse
    | TransferBatch
    | Sleep
    | WakeUp
    | Lookup
    | Purge
    | Expect
    | OpenTicket
    | CloseTicket
    | ChangeWeights
    | AskStatistics
    | Close
    | Ping
    | Pong
)

decode_hello: Final = msgspec.msgpack.Decoder(Hello).decode
decode_from_rank: Final = msgspec.msgpack.Decoder(FromConnectedRank).decode
decode_from_manager: Final = msgspec.msgpack.Decoder(FromManager).decode

HELLO_CODEC: Final[Codec[Hello, Hello]] = Codec(
    encode=encode, decode=decode_hello, max_message_bytes=MAX_HELLO_BYTES
)
MANAGER_CODEC: Final[Codec[FromManager, FromConnectedRank]] = Codec(
    encode=encode, decode=decode_from_rank, max_message_bytes=MAX_MESSAGE_BYTES
)
RANK_CODEC: Final[Codec[FromRank, FromManager]] = Codec(
    encode=encode, decode=decode_from_manager, max_message_bytes=MAX_MESSAGE_BYTES
)
RankConnection = Connection[FromManager, FromConnectedRank]  # the manager's end
ManagerConnection = Connection[FromRank, FromManager]  # the rank's end


def layout_of(regions: Regions, *, with_stores: bool = False) -> Layout:
    """Return the layout of a rank's regions.

    Args:
        regions: the tensors of the rank.
        with_stores: True if the rank has stores, whose host blocks are larger.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"aiokv layout {regions.num_layers}".encode())
    groups = {
        group: regions.group_blocks(group)
        for group in (ATTENTION, *sorted(regions.num_window_blocks))
    }
    for group, blocks in groups.items():
        digest.update(f"\ngroup {group}".encode())
        for piece in blocks.pieces():
            digest.update(f"\n{piece.layer} {piece.block_bytes} {piece.region}".encode())
    return Layout(
        num_layers=regions.num_layers,
        num_blocks=device_blocks(regions),
        block_bytes={group: blocks.block_bytes for group, blocks in groups.items()},
        pitch_bytes=pitch_bytes(regions.payload_bytes, with_stores=with_stores),
        fingerprint=digest.digest(),
        window_blocks=regions.num_window_blocks,
    )
