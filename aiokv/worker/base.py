"""Worker: the interface of the part that moves the bytes.

A :class:`~aiokv.worker.controller.CacheController` in this process, or a
:class:`~aiokv.ranks.group.RankGroup` with one controller per rank, each in its own process.

A :class:`Worker` opens, sleeps and closes. Its parts have one small interface each: :class:`Plans`,
:class:`Steps`, :class:`StoreLookups` and :class:`Tickets`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from aiokv.base.plan import FETCH, RECEIVE, STATE_CLONE, GroupRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan, TransferReport
    from aiokv.base.statistics import (
        GuardStatistics,
        RankPeerStatistics,
        RankStatistics,
        WorkerStatistics,
    )
    from aiokv.base.types import Tier
    from aiokv.config.cache_config import WindowGroup
    from aiokv.errors import RankLost
    from aiokv.layout.regions import Regions
    from aiokv.peers.ticket import Endpoint
    from aiokv.stores.identity import StoreIdentity
    from aiokv.stores.store_set import Found, StoreAnswer
    from aiokv.worker.device.base import Event
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.poller import EventPoller

Cancelled = Literal["at once", "asked", "too late"]

UNLIMITED_BLOCKS: Final = 2**31 - 1  # device blocks while no tensors are known


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Optional parts of :class:`Worker` that a worker supports.

    The engine compares its configuration with these when it is made, and never asks for the class
    of a worker.

    Attributes:
        routes: routes of plans that ``take`` accepts, by retention of their group.
        checksums: ``record_checksums`` may be called, and onloads are verified with them.
        owns_tensors: the device tensors are in this process, and ``wake_up`` takes new ones.
        restart: ``restart`` repairs the worker after ``on_lost``.
    """

    routes: frozenset[GroupRoute]
    checksums: bool
    owns_tensors: bool
    restart: bool

    @property
    def recurrent_state(self) -> bool:
        """The worker moves slots of recurrent state."""
        return STATE_CLONE in self.routes

    @property
    def stores(self) -> bool:
        """The worker has stores: it looks up, fetches and saves blocks."""
        return ("all", FETCH) in self.routes

    @property
    def peers(self) -> bool:
        """The worker has peers: it receives blocks from other engines, or sends them."""
        return ("all", RECEIVE) in self.routes


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a worker and of the tensors that it moves.

    Attributes:
        capabilities: optional parts that the worker supports; constant.
        computes_in_stream: a step may still have to be computed after ``commit``: transfers wait
            for its event.
        num_layers: layers of the model; 0 before they are known.
        device_blocks: blocks that the tensors hold; ``UNLIMITED_BLOCKS`` without tensors or before
            ``open``.
        device_name: device of the tensors, such as ``"cuda:0"``, or the number of ranks.
        block_bytes: bytes of a device block, over all layers and ranks; 0 before they are known.
        pitch_bytes: bytes that a block takes in host memory, likewise.
    """

    capabilities: Capabilities
    computes_in_stream: bool
    num_layers: int
    device_blocks: int
    device_name: str
    block_bytes: int
    pitch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """State of the parts of a worker. With ranks: as of their last answers to heartbeats.

    Attributes:
        stores: statistics of each store, in the configured order, of each rank in turn.
        peers: use of peers of each rank; empty without peers.
        ranks: state of each rank; empty without ranks, and before ``open``.
        unpinned_bytes: host memory that the device has not page-locked yet; 0 where it need not.
    """

    stores: list[GuardStatistics]
    peers: list[RankPeerStatistics]
    ranks: list[RankStatistics]
    unpinned_bytes: int


class Plans(Protocol):
    """Plans of a worker. Each is reported exactly once, unless it was cancelled ``"at once"``."""

    def take(self, plan: TransferPlan) -> LayerDoneCounter:
        """Take a plan; its blocks belong to the transfer until its report.

        A plan that the worker refuses is reported as failed in a later callback of the loop: one
        with no blocks, unequal lists, ids out of range, a duplicate destination, a transfer id that
        is in use, or a route that is not in ``capabilities.routes``; and any plan when the worker
        is closing, asleep, or not open.
        """

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that no device has yet.

        Returns:
            ``"at once"``: it is cancelled, its waiters get their error, and no report follows;
            ``"asked"``: other processes have been asked, and the report says how it ended;
            ``"too late"``: the device moves it, or it has ended.
        """

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Change the priority of a plan that waits, as if it had been submitted with this one.

        Without effect on a plan that a device has, on unknown ids, and when ``priority`` is not
        lower than the plan's.
        """

    async def drain(self) -> None:
        """Wait until every plan submitted so far, and since, has been reported.

        Cancellation: stops waiting; the transfers go on.
        """


class Steps(Protocol):
    """Work of the model on the device: its steps, copies in its order, and checksums."""

    def check_event(self, event: Event | None) -> None:
        """Raise unless ``close`` can take the event; None always can. Changes nothing.

        Raises:
            UsageError: ``event`` is not an event, is of another device, or was never recorded; or
                each rank closes steps with its own events.
        """

    def close(self, step: int, event: Event | None) -> None:
        """Close all steps up to ``step``: plans after them start when ``event`` is done.

        Args:
            step: greater than any closed before.
            event: recorded after the steps' work; None when that has finished.

        Raises:
            UsageError: the step was closed before, or ``check_event`` refuses the event. The step
                stays open; nothing changed.
            DeviceError: the event of a step whose checksums are recorded has failed. The step
                stays open; the next call may close it with a later one.
        """

    def clone(self, plan: TransferPlan, stream: Any = None) -> None:
        """Execute a plan within the device, in the order of a compute stream; no report follows.

        Args:
            plan: a clone of the group ``"attention"`` or ``"state"``; nothing to do without blocks.
            stream: the compute stream (cupy, PyTorch or Paddle). On the cpu the copy is done on
                return.

        Raises:
            UsageError: tensors on a GPU and no stream, or a route that the worker cannot clone.
                Nothing changed.
        """

    def record_checksums(self, block_ids: NDArray[np.int32], step: int) -> None:
        """Record that device blocks hold what they are meant to hold when ``step`` has finished.

        Args:
            block_ids: ``[N]`` int32.
            step: the open step that computes them; they are read when ``close`` closes it. 0
                when they are computed already: they are read now.

        Raises:
            UsageError: the worker was made without checksums.
        """


class StoreLookups(Protocol):
    """Questions to the stores of a worker; a worker without stores finds nothing."""

    def may_have(self, digest: bytes) -> bool:
        """Return False if all stores are known not to have a block of full attention, without a
        lookup, which then would find nothing."""

    def is_lacking(self, digest: bytes) -> bool:
        """Return True if no store has a block of full attention, also none that is only saved
        to; False if this is not known. Call only after ``may_have`` was False."""

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Return how many leading blocks the stores have, and how long fetching them takes.

        Returns at the latest when the lookup deadline of each store has passed.

        Args:
            digests: digests of consecutive blocks, 32 bytes each.

        Cancellation: nothing changed.
        """

    async def find(self, group: str, digests: bytes) -> Found:
        """Return which objects of a group the stores have, and how long fetching each takes.

        Returns at the latest when the lookup deadline of each store has passed.

        Args:
            group: name of the group.
            digests: digests of any blocks, 32 bytes each.

        Cancellation: nothing changed.
        """

    async def purge(self, label: bytes) -> int:
        """Remove the objects of all groups whose keys end with a label from all stores, on each
        rank; return their number.

        Args:
            label: see ``aiokv.stores.labels``.

        Raises:
            StoreError: a store was not purged; the others were.

        Cancellation: some objects may have been removed.
        """


class Tickets(Protocol):
    """Tickets of peers, which a worker receives or sends."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """Address at which each rank listens, by rank; empty before ``open``, and for a worker
        that only sends or has no peers."""

    @property
    def ticket_key(self) -> bytes:
        """Key that signs tickets: see ``aiokv.peers.ticket``.

        Empty before ``open``, and without peers.
        """

    @property
    def layer_ends(self) -> list[int]:
        """End of each range of layers in which blocks can be sent, ascending.

        Empty before ``open``, without peers, and when blocks are sent as a whole.

        Raises:
            PeerError: the ranks have different ranges.
        """

    def expect(self, ticket: bytes, seconds: float, open_seconds: float) -> None:
        """Let senders open a ticket of this engine for some seconds; ``expected`` follows.

        Senders may open the ticket until ``close_ticket``, or until ``seconds`` have passed. Then
        its plans end, and the worker forgets the ticket. On a rank where no sender has opened it
        within ``open_seconds``, its plans end after that time.

        Args:
            ticket: the encoded ticket.
            seconds: time from now on, in seconds.
            open_seconds: time from now on for the first sender to open the ticket, in seconds.

        Raises:
            UsageError: the ticket is malformed, or the worker has no endpoints.
            PeerError: the ticket was made with another secret.
            ClosedError: the worker is closing, or is not open.
        """

    async def expected(self, ticket_id: bytes, seconds: float) -> None:
        """Wait until senders can open a ticket; called once after ``expect``, before its plans.

        A sender may connect as soon as it has the ticket, so it must not get the ticket before.

        Args:
            ticket_id: id of the ticket.
            seconds: after which ``PeerError`` is raised.

        Raises:
            PeerError: the ranks of the worker have different secrets, or do not answer in time.
            ClosedError: the worker closes.

        After an error nothing is left behind.

        Cancellation: nothing is left behind.
        """

    async def open_ticket(self, ticket: bytes) -> None:
        """Connect to the receiver of a ticket, and let it accept; called before the SEND plans.

        The ticket ends at ``close_ticket``, or when its ``timeout_seconds`` have passed: then its
        plans end.

        Args:
            ticket: ticket of another engine, encoded.

        Raises:
            UsageError: the ticket is malformed, or is open; or the worker has no peers, or sleeps.
            PeerError: the ticket was made with another secret; the receiver cannot be reached, or
                refuses it.
            LayoutError: its blocks cannot be sent to the receiver; names both sides.
            ClosedError: the worker is closing, or is not open.

        After an error nothing is left behind.

        Cancellation: nothing is left behind.
        """

    def layers_done(self, ticket_id: bytes, mark: int, event: Event | None) -> None:
        """Let the plans of a mark start when ``event`` is done; called before they are submitted.

        A mark names a point in the work of the open step, behind which some layers of the blocks of
        the plans are computed. With ranks, ``Rank.layers_done`` notes it in each process.

        Args:
            ticket_id: id of an open ticket; without effect for any other.
            mark: number of the point; used once.
            event: recorded after the work; None when it has finished.

        Raises:
            UsageError: ``check_event`` refuses the event. Nothing changed.
            ClosedError: the worker is not open.
        """

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket that was expected or opened: its plans end when nothing of them moves.

        Idempotent; without effect on an unknown ticket.

        Args:
            ticket_id: id of the ticket.
            reason: for the failure that the other engine shows.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """Sizes, the poller and the callbacks that a worker is opened with.

    Attributes:
        device_blocks: blocks that the tensors must hold at least.
        host_blocks: capacity of the host tier; its memory is reserved by ``Worker.open``.
        poller: open, of the running loop; stays the caller's, who closes it after ``aclose``.
        on_report: gets exactly one report per plan, in a callback of the loop, never inside a call.
        on_step: called with the number of a closed step when that and all earlier ones have
            finished, or with the error of its event. Idempotent.
        on_lost: called when a part of the worker is gone; no transfer can succeed until
            ``restart``. A worker without ranks never calls it.
        identity: origin of the blocks, for their keys in the stores, and for peers; required with
            either.
        windows: ``CacheConfig.windows``; memory for their ``host_blocks`` is reserved, too.
        on_ticket_end: called with the id of a ticket that was opened, and the reason, when it has
            ended: no plan of it can succeed any more. Reports of its plans may follow. Idempotent.
    """

    device_blocks: int
    host_blocks: int
    poller: EventPoller
    on_report: Callable[[TransferReport], None]
    on_step: Callable[[int, BaseException | None], None]
    on_lost: Callable[[RankLost], None] = lambda lost: None
    identity: StoreIdentity | None = None
    windows: Mapping[str, WindowGroup] = field(default_factory=dict)
    on_ticket_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None


class Worker(Protocol):
    """Executes plans; never decides. Used on one loop.

    Constructed without a loop and without memory; ``open`` takes both. Attributes and statistics
    can be read at any time: before ``open`` they say that nothing has happened, after ``aclose``
    they keep their last values.

    The worker reports through the callbacks of its :class:`WorkerStart`.
    """

    @property
    def facts(self) -> WorkerFacts:
        """Properties of the worker and of its tensors, as they are known now."""

    @property
    def failure(self) -> BaseException | None:
        """The error after which no transfer can succeed; ``restart`` clears it."""

    @property
    def plans(self) -> Plans:
        """Plans in flight."""

    @property
    def steps(self) -> Steps:
        """Steps of the model."""

    @property
    def stores(self) -> StoreLookups:
        """Lookups in the stores."""

    @property
    def tickets(self) -> Tickets:
        """Tickets of peers."""

    async def open(self, start: WorkerStart) -> None:
        """Take host memory, open the stores, and bind the worker to the running loop. Called once.

        Raises:
            UsageError: opened before; or another open worker of this process has the device or a
                tensor. Nothing changed.
            ConfigError: the tensors hold fewer blocks, or there is no memory. Nothing changed.
            RankLost: a rank is missing; nothing is left behind.
            AiokvError: as ``StoreSet.open``, or the address for peers cannot be listened at;
                nothing is left behind.

        Cancellation: nothing is left behind.
        """

    async def restart(self) -> None:
        """Bring lost ranks back; nothing that was cached is valid afterwards.

        Raises:
            UsageError: nothing is lost, or the worker lacks the ``restart`` capability.
            RankLost: not all ranks came back; still lost.

        Cancellation: still lost; call it again.
        """

    def change_weights(self, version: str) -> None:
        """Find, save and send blocks of another version of the weights from now on.

        Fetches in flight bring no block. No save is in flight.

        Args:
            version: version of the weights; blocks of an earlier version are found again with it.
        """

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the memory of these tiers; no transfer is in flight. Idempotent.

        Cancellation: call it again, or ``wake_up``; memory may still be allocated.
        """

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Reallocate the memory of these tiers; the others stay as they are.

        Binds ``regions`` in any case: the state that cancelled calls have left does not matter.

        Args:
            tiers: tiers that the engine counts as asleep.
            regions: the device tier's new tensors, where they are in this process.

        Raises:
            LayoutError: the layout of the tensors differs from the old one. Still asleep.
            ConfigError: no memory for the host tier. Still asleep.

        Cancellation: the worker does not keep ``regions``; with ranks, each rank may have bound its
        tensors. Host memory may be allocated. Call it again, or ``sleep``.
        """

    async def aclose(self) -> None:
        """Cancel waiting plans, wait for moving ones, free the memory. Idempotent.

        Cancellation: call it again.
        """

    def give_up(self) -> None:
        """Wait for no more reports: an exception has left the state of the engine unknown.

        ``drain`` returns, and ``aclose`` frees the memory when the device moves no more bytes.
        """

    def close_without_loop(self) -> None:
        """Close after the loop was closed: no callback runs, nothing is reported. Idempotent."""

    def statistics(self) -> WorkerStatistics:
        """Return counts since the worker was created, and its present plans. Any thread."""

    def inspect(self) -> WorkerState:
        """Return the state of stores, peers, ranks and host memory."""
