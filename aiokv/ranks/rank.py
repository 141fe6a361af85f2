"""Rank: one rank's worker, in the process that owns its tensors.

    manager ─► TransferBatch ─► CacheController ─► device
            ◄─ Reports, one per pass ◄─ arrived layers, ended transfers, the last finished step

The model runner of the process waits for transfers with ``layers()``, and closes each step with its
own event: the blocks that a step has computed on this rank move when that event is done.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from aiokv.base.checks import Unique, arguments, integer, sequence
from aiokv.base.checks import timeout as timeout_of
from aiokv.base.groups import ATTENTION
from aiokv.base.logs import Log
from aiokv.base.plan import FETCH, TransferReport
from aiokv.base.state_guard import StateGuard
from aiokv.errors import (
    AiokvError,
    BrokenEngineError,
    ClosedError,
    ConfigError,
    LayoutError,
    RankLost,
    UsageError,
)
from aiokv.layout.regions import Regions
from aiokv.peers.options import Peers, check_peers
from aiokv.peers.ticket import decode as decode_ticket
from aiokv.ranks.counters import Counters
from aiokv.ranks.messages import (
    PROTOCOL_VERSION,
    RANK_CODEC,
    AskStatistics,
    Begin,
    Broken,
    ChangeWeights,
    CloseTicket,
    Expect,
    FromManager,
    Hello,
    Left,
    Lookup,
    ManagerConnection,
    OpenTicket,
    Purge,
    RankCounts,
    Ready,
    Refuse,
    Reply,
    Sleep,
    TicketEnded,
    TransferBatch,
    WakeUp,
    layout_of,
)
from aiokv.ranks.openings import Openings
from aiokv.ranks.outbox import Outbox
from aiokv.ranks.rank_state import MAX_RANKS, check_positive
from aiokv.stores.pools import StorePools
from aiokv.stores.urls import stores_from
from aiokv.wire.connection import Callbacks
from aiokv.wire.sockets import HandshakeError, check_user, connected_to
from aiokv.wire.unix import check_length, checked_path
from aiokv.worker.base import WorkerStart
from aiokv.worker.controller import CacheController
from aiokv.worker.device.base import as_event
from aiokv.worker.device.cpu import device_blocks
from aiokv.worker.device.names import named_device
from aiokv.worker.layer_marks import split_layer_mark
from aiokv.worker.layer_waits import LayerWaits
from aiokv.worker.layers import ALL, LayerDoneCounter
from aiokv.worker.poller import EventPoller
from aiokv.worker.views import LayerView, done_view

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.base.statistics import GuardStatistics, RankPeerStatistics, WorkerStatistics
    from aiokv.base.types import Tier
    from aiokv.ranks.messages import FromManager, FromRank
    from aiokv.stores.base import Store
    from aiokv.stores.identity import StoreIdentity
    from aiokv.stores.use import StoreUse
    from aiokv.worker.device.base import Device, Event

log = Log(__name__)

RETRY_SECONDS: Final = 0.05
HANG_UP_SECONDS: Final = 5.0  # time to send the last reports
_NOT_ENTERED: Final = "Rank must be entered with 'async with' before use"


@arguments()
class Rank(Unique):
    """One rank of a group; ``async with`` connects, and returns when the group has begun.

    Args:
        path: the socket of the :class:`RankGroup`.
        rank: 0 <= rank < num_ranks.
        regions: this rank's tensors; layers, regions and bytes per block are equal on all ranks.
        device: device of the tensors, as for ``CacheEngine``; ``"cpu"`` by default.
        stores: stores of this rank's shard of the blocks, as for ``CacheEngine``. All ranks of a
            group have stores (``RankGroup(has_stores=True)``), or none.
        peers: how this rank exchanges its shard of the blocks with other engines; as for stores,
            all ranks of a group have peers (``RankGroup(has_peers=True)``), or none. Each rank
            listens at an address of its own, or they choose different ports.
        connect_timeout: seconds to wait for the group to listen.

    Its loop must not be blocked: run the model in a thread.

    Raises:
        ConfigError: an argument is of the wrong type or out of range.

    Attributes:
        regions: the tensors; without memory while the device tier sleeps. Set it to new tensors of
            the same layout before ``engine.wake_up``.
        is_asleep: True while the device tier sleeps: the rank has no tensors, or new ones that it
            does not use yet.
        connected: True after the first connection to the group, also when it has ended.
        layer_waits: durations of the waits of this rank's runner for layers.
    """

    def __init__(
        self,
        path: Path | str,
        rank: int,
        regions: Regions,
        device: Device | str | None = None,
        *,
        stores: Sequence[Store | StoreUse | str] = (),
        peers: Peers | None = None,
        connect_timeout: float = 60.0,
    ) -> None:
        rank = integer("rank", rank, minimum=0, maximum=MAX_RANKS - 1, error=ConfigError)
        if not isinstance(regions, Regions):
            raise ConfigError(f"regions is {regions!r}; it must be the Regions of this rank")
        check_peers(peers)
        check_positive("connect_timeout", connect_timeout)
        self.rank = rank
        self._path = str(checked_path(path))
        self.regions = regions
        self._bare: Regions | None = None  # replaces the regions while their tensors sleep
        self.is_asleep = False
        self._connect_timeout = connect_timeout
        self._device = named_device(device)
        self._stores = stores_from(stores)
        self._peers = peers
        self._openings = Openings()
        self._controller = self._new_controller()
        self._guard = StateGuard()
        self._guard.open(self._give_up)
        self._poller = EventPoller(self._guard)
        self._outbox = Outbox(self._send, lambda: self._controller.steps.clock.finished)
        self._counters = Counters()
        self.layer_waits = LayerWaits()
        self._connection: ManagerConnection | None = None
        self._opened = False  # whether the controller is open
        self._step_waiter: asyncio.Future[None] | None = None
        self.connected = False
        self._entered = False
        self._task: asyncio.Task[None] | None = None  # newest task of _tasks
        self._identity: StoreIdentity | None = None  # the manager's present identity
        self._tasks: set[asyncio.Task[None]] = set()

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect, and wait until all ranks have connected.

        Raises:
            RankLost: the group refused this rank, or ended.
            ConfigError: the path is too long for a socket.
            TimeoutError: no group listened within ``connect_timeout``.
            UsageError: it was entered before.

        Cancellation: the connection is closed.
        """
        if self._entered:
            raise UsageError(
                "the Rank was entered already; it can be entered once", hint="make another Rank"
            )
        self._entered = True
        loop = asyncio.get_running_loop()
        self._controller = self._new_controller()  # a new one, because tensors may have been set
        self._poller.open(loop)
        self._ended: asyncio.Future[str] = loop.create_future()  # why the group ended
        self._begun: asyncio.Future[None] = loop.create_future()
        self._disconnected: asyncio.Future[None] = loop.create_future()
        try:
            await self._connect()
            layout = layout_of(self.regions, with_stores=bool(self._stores))
            self._send(
                Hello(
                    protocol=PROTOCOL_VERSION,
                    rank=self.rank,
                    layout=layout,
                    has_stores=bool(self._stores),
                    has_peers=self._peers is not None,
                )
            )
            await asyncio.wait((self._begun, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._begun.done():
                raise RankLost(f"rank {self.rank}: {self._ended.result()}", rank=self.rank)
        except BaseException:
            try:
                await self.aclose()
            except BaseException:  # after a second cancellation: aclose() is not called again
                self._poller.close()
                if self._connection is not None:
                    self._connection.abort("the rank was cancelled")
                raise
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def closed(self) -> str:
        """Wait until the group ends; return the reason. Leave ``async with`` then.

        Raises:
            UsageError: the rank was not entered.

        Cancellation: nothing changed.
        """
        self._check_entered()
        return await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """Finish and report moving transfers, disconnect, free the memory. Idempotent.

        Cancellation: call it again.
        """
        if not self._entered:
            return
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._controller.aclose()
        self._outbox.flush()
        if self._outbox.generation:  # a generation has begun with this rank
            self._send(Left())
        self._counters.clear("the rank is closed")
        self._poller.close()
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait((self._disconnected,), timeout=HANG_UP_SECONDS)
            self._connection.abort("the manager does not read")

    def _new_controller(self) -> CacheController:
        stores = StorePools(self._stores) if self._stores else None
        return CacheController(self.regions, self._device, stores=stores, peers=self._peers)

    async def _connect(self) -> None:
        check_length(Path(self._path))
        try:
            async with asyncio.timeout(self._connect_timeout):
                connected = await self._connected_socket()
        except TimeoutError:
            raise TimeoutError(
                f"rank {self.rank}: no group listens at {self._path} after "
                f"{self._connect_timeout} s (connect_timeout)"
            ) from None
        self.connected = True
        try:
            check_user(connected)
        except HandshakeError as error:
            connected.close()
            raise RankLost(f"rank {self.rank}: {error}", rank=self.rank) from None
        self._connection = ManagerConnection(connected, self._path, RANK_CODEC)
        self._connection.start(Callbacks(self._on_message, self._on_closed))

    async def _connected_socket(self) -> socket.socket:
        """Wait until the group listens; return a socket that is connected to it."""
        while True:
            try:
                return await connected_to(socket.AF_UNIX, self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(RETRY_SECONDS)

    # --- for the model runner -------------------------------------------------------------------

    async def layers(self, transfer_ids: Iterable[int], timeout: float | None = None) -> LayerView:
        """Return a view of the transfers of ``lease.layers.transfer_ids`` on this rank.

        Waits until their plans have arrived, not for their bytes: await those with
        ``view.wait(layer)`` here or ``view.gpu_wait(layer, stream)`` in any thread.

        Raises:
            UsageError: a transfer ended so long ago that its counter was dropped.
            ClosedError: the group has ended, or restarts: the plans will not arrive.
            TimeoutError: the plans have not arrived within ``timeout``.
            UsageError: an argument is of the wrong type, or the rank was not entered.

        Cancellation: nothing changed.
        """
        self._check_entered()
        timeout = timeout_of(timeout)
        wanted = [
            integer("transfer_ids", transfer_id)
            for transfer_id in sequence("transfer_ids", transfer_ids)
        ]
        if self._ended.done():
            raise ClosedError(f"the group has ended: {self._ended.result()}")
        async with asyncio.timeout(timeout):
            counters = [await self._counters.get(transfer_id) for transfer_id in wanted]
        if not counters:
            return done_view(self.regions.num_layers)
        return LayerView(counters, waits=self.layer_waits)

    def find_transfer(self, transfer_id: int) -> tuple[TransferPlan, LayerDoneCounter] | None:
        """Return the plan and the layer counter of a transfer, of any route. Any thread.

        Returns:
            None before the plan has arrived, and when the transfer was forgotten.
        """
        return self._counters.find(transfer_id)

    def is_at_rest(self, transfer_id: int) -> bool:
        """Return True when no byte of a transfer moves any more on this rank. Any thread.

        Returns:
            True after the end of the transfer, also of one that failed or was forgotten. False
            before its plan has arrived.
        """
        found = self._counters.find(transfer_id)
        if found is not None:
            return found[1].at_rest
        return self._counters.is_forgotten(transfer_id)

    def give_up_waits(self) -> None:
        """Release the threads that wait for transfers: the loop has ended, and reports no end.

        Threads get a ``TransferError``. Without effect after ``aclose``, which ends all transfers.
        """
        self._counters.abandon("the loop of the rank has ended")

    def step(self, step: int, event: Event | None = None) -> None:
        """Close the steps up to ``step`` on this rank, which has submitted all their work.

        Args:
            step: the engine's ``open_step`` at the time the work was sent; numbers may be skipped.
            event: recorded after the work; None when it has finished.

        Raises:
            UsageError: the step was closed before; an argument is of the wrong type; the device
                cannot wait for such an event; or the rank was not entered. Nothing changed.
        """
        number = integer("step", step, minimum=1)
        self._entered_controller().steps.close(number, as_event("event", event))

    def layers_done(self, mark: bytes, event: Event | None = None) -> None:
        """Let the layers that ``Sending.layers_done`` has named be sent by this rank.

        Without this call, they are sent when the step is closed.

        Args:
            mark: what ``Sending.layers_done`` has returned. Without effect when its send has ended.
            event: recorded after the work that computes the layers; None when it has finished.

        Raises:
            UsageError: ``mark`` is nothing of the kind, the device cannot wait for such an event,
                or the rank was not entered. Nothing changed.
        """
        ticket_id, number = split_layer_mark(mark)
        self._entered_controller().tickets.layers_done(ticket_id, number, as_event("event", event))

    def statistics(self) -> WorkerStatistics:
        """Return the counts of this rank's transfers.

        Raises:
            UsageError: the rank was not entered.
        """
        return self._entered_controller().statistics()

    def store_statistics(self) -> list[GuardStatistics]:
        """Return the use and the state of each store of this rank.

        Raises:
            UsageError: the rank was not entered.
        """
        return self._entered_controller().stores.statistics()

    def peer_statistics(self) -> list[RankPeerStatistics]:
        """Return the use of peers of this rank; empty without peers.

        Raises:
            UsageError: the rank was not entered.
        """
        return self._entered_controller().tickets.statistics()

    def _entered_controller(self) -> CacheController:
        if not self._opened:
            raise UsageError(_NOT_ENTERED)
        if self._guard.failure is not None:
            raise BrokenEngineError(
                f"rank {self.rank} is broken: {type(self._guard.failure).__name__} has ended a "
                "change of its state",
                hint="close the rank, and start its process again",
            ) from self._guard.failure
        return self._controller

    def _check_entered(self) -> None:
        if not self._entered:
            raise UsageError(_NOT_ENTERED)

    # --- from the manager -----------------------------------------------------------------------

    def _on_message(self, message: FromManager) -> None:
        try:
            self._take(message)
        except BaseException as error:
            self._guard.note(error)
            raise

    def _take(self, message: FromManager) -> None:
        if isinstance(message, TransferBatch):
            self._on_batch(message)
        elif isinstance(message, AskStatistics):
            state = self._controller.inspect()
            self._send(
                RankCounts(
                    worker=self._controller.statistics(),
                    poller=self._poller.statistics(),
                    stores=state.stores,
                    peers=[msgspec.structs.replace(peers, rank=self.rank) for peers in state.peers],
                    unpinned_bytes=state.unpinned_bytes,
                    filters=self._controller.stores.shared_filters(),
                )
            )
        elif isinstance(message, Begin):
            self._identity = message.identity
            self._run(self._begin(message, self._task))
        elif isinstance(message, Sleep | WakeUp):
            self._run(self._change_tiers(message, self._task))
        elif isinstance(message, Lookup):
            self._spawn(self._look_up(message))
        elif isinstance(message, Purge):
            self._spawn(self._purge(message))
        elif isinstance(message, Expect):
            self._expect(message)
        elif isinstance(message, OpenTicket):
            self._open_ticket(message)
        elif isinstance(message, CloseTicket):
            self._close_ticket(message.ticket_id, message.reason)
        elif isinstance(message, ChangeWeights):
            self._change_weights(message.version)
        elif isinstance(message, Refuse):
            self._end(f"refused: {message.reason}")
        else:
            self._end("the group is closing")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _change_weights(self, version: str) -> None:
        """Use other keys from now on, even if no generation has begun yet."""
        if self._identity is not None:
            self._identity = msgspec.structs.replace(self._identity, weights_version=version)
        self._controller.change_weights(version)

    @contextmanager
    def _replying(
        self, number: int, refusals: type[Exception] = AiokvError
    ) -> Iterator[list[float]]:
        """Send the reply to a request, with the error of these classes that the block raises.

        Yields:
            The seconds of the reply, empty at first.
        """
        seconds: list[float] = []
        try:
            yield seconds
        except refusals as error:
            kind = type(error).__name__
            self._send(Reply(number=number, error=_reason_of(error), kind=kind))
        else:
            self._send(Reply(number=number, seconds=seconds))

    def _expect(self, message: Expect) -> None:
        with self._replying(message.number):
            self._controller.tickets.expect(message.ticket, message.seconds, message.open_seconds)

    def _open_ticket(self, message: OpenTicket) -> None:
        opening = self._spawn(self._open_at_receivers(message))
        with suppress(AiokvError):  # if rank 0 has another secret, the task reports the error
            key = self._controller.tickets.ticket_key
            self._openings.add(decode_ticket(message.ticket, key).ticket_id, opening)

    async def _open_at_receivers(self, message: OpenTicket) -> None:
        with self._replying(message.number):
            await self._controller.tickets.open_ticket(message.ticket, message.layouts)

    def _close_ticket(self, ticket_id: bytes, reason: str) -> None:
        self._openings.cancel(ticket_id)
        self._controller.tickets.close_ticket(ticket_id, reason)

    async def _look_up(self, lookup: Lookup) -> None:
        stores = self._controller.stores
        # Without a reply, the manager would wait.
        with self._replying(lookup.number, Exception) as seconds:
            if lookup.group == ATTENTION:
                seconds += (await stores.lookup(lookup.digests)).seconds.tolist()
            else:
                found = await stores.find(lookup.group, lookup.digests)
                seconds += [found.latency_seconds, *found.seconds.tolist()]

    async def _purge(self, purge: Purge) -> None:
        try:
            removed = await self._controller.stores.purge(purge.label)
        except Exception as error:  # without a reply, the manager would wait
            self._send(Reply(number=purge.number, error=_reason_of(error)))
        else:
            self._send(Reply(number=purge.number, removed=removed))

    def _on_closed(self, reason: str) -> None:
        self._disconnected.set_result(None)
        self._end(reason)

    def _give_up(self, error: BaseException) -> None:
        """Leave the group: ``error`` has left the state of the rank unknown."""
        reason = f"rank {self.rank} is broken by {error!r}"
        log.error("rank.broken", rank=self.rank, reason=repr(error))
        self._controller.give_up()
        if self._connection is not None:
            self._connection.abort(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
        self._counters.clear(f"the group has ended: {reason}")

    async def _begin(self, begin: Begin, previous: asyncio.Task[None] | None) -> None:
        """Start a generation: send Ready when no transfer of an earlier one moves."""
        if previous is not None:
            previous.cancel()
            await asyncio.wait((previous,))
        self._outbox.begin(0)
        self._counters.clear("the group restarts")
        try:
            if not self._opened:
                await self._open(begin)
            elif self._identity is not None:
                self._controller.change_weights(self._identity.weights_version)
            await self._controller.abandon()
            await self._steps_finished()
            await self._controller.sleep(frozenset(begin.asleep))
            self.is_asleep = "device" in begin.asleep
        except Exception as error:  # of any class, because the manager gets it as the reason
            log.error("rank.cannot_begin", rank=self.rank, exc_info=error)
            self._send(Broken(reason=_reason_of(error)))
            return
        steps, tickets = self._controller.steps, self._controller.tickets
        if steps.clock.is_open(begin.closed_step):
            steps.close(begin.closed_step, None)
        self._outbox.begin(begin.generation)
        self._send(
            Ready(
                generation=begin.generation,
                endpoints=tickets.endpoints,
                peer_layout=tickets.layout,
                ticket_key=tickets.ticket_key,
                layer_ends=tickets.layer_ends,
                unpinned_bytes=self._controller.inspect().unpinned_bytes,
            )
        )
        if not self._begun.done():
            self._begun.set_result(None)

    async def _change_tiers(
        self, request: Sleep | WakeUp, previous: asyncio.Task[None] | None
    ) -> None:
        if previous is not None:
            await asyncio.wait((previous,))
        with self._replying(request.number, Exception):  # the user's regions may raise anything
            if not self._opened:
                raise UsageError("it has no generation yet")
            await self._sleep_or_wake(request)

    async def _sleep_or_wake(self, request: Sleep | WakeUp) -> None:
        controller, tiers = self._controller, frozenset(request.tiers)
        if isinstance(request, Sleep):
            if "device" in tiers and not self.is_asleep:
                # Drop the tensors before the await: a restart may cancel it, and must not bind the
                # old tensors.
                self._bare = self.regions = self.regions.without_tensors()
            await controller.sleep(tiers)
            self.is_asleep = "device" in controller.memory.asleep
        else:
            await self._wake_up(tiers, request.device_blocks)

    async def _wake_up(self, tiers: frozenset[Tier], device_blocks: int) -> None:
        memory = self._controller.memory
        regions = None if self.regions is self._bare else self.regions
        if "device" in tiers and regions is not None:
            _check_blocks(regions, device_blocks)
        try:
            await self._controller.wake_up(tiers, regions)
        finally:
            self.is_asleep = "device" in memory.asleep

    async def _open(self, begin: Begin) -> None:
        identity = self._identity
        if identity is not None:
            identity = msgspec.structs.replace(identity, rank=self.rank)
        await self._controller.open(
            WorkerStart(
                device_blocks=0,  # the manager has checked them
                host_blocks=begin.host_blocks,
                poller=self._poller,
                on_report=self._on_report,
                on_step=self._on_step,
                identity=identity,
                windows=begin.windows,
                on_ticket_end=lambda ticket_id, reason: self._send(
                    TicketEnded(ticket_id=ticket_id, reason=reason)
                ),
            )
        )
        self._opened = True

    def _on_batch(self, batch: TransferBatch) -> None:
        if batch.generation != self._outbox.generation or not self._opened:
            return
        for plan in batch.plans:
            self._submit(plan)
        for transfer_id, priority in batch.priorities:
            self._controller.plans.raise_priority(transfer_id, priority)
        for transfer_id in batch.cancels:
            if self._controller.plans.cancel(transfer_id) == "at once":
                self._on_report(TransferReport(transfer_id=transfer_id, outcome="cancelled"))

    def _submit(self, plan: TransferPlan) -> None:
        transfer_id = plan.transfer_id
        counter = self._controller.plans.take(plan)
        counter.add_callback(lambda layer: self._outbox.note_layer(transfer_id, layer))
        self._counters.add(plan, counter)
        if plan.route == FETCH:
            self._spawn(self._report_if_overdue(counter))

    async def _report_if_overdue(self, counter: LayerDoneCounter) -> None:
        """Report the early end of a fetch, when a store has exceeded its deadline."""
        await counter.settled(ALL)
        failure = counter.failure
        if counter.given_up and failure is not None:
            self._outbox.note_overdue(
                TransferReport(
                    transfer_id=counter.transfer_id,
                    outcome="failed",
                    first_bad_block=failure.first_bad_block,
                    reason=failure.reason,
                )
            )

    # --- to the manager -------------------------------------------------------------------------

    def _on_report(self, report: TransferReport) -> None:
        self._outbox.note_end(report)
        self._counters.note_end(report.transfer_id)
        failure = self._controller.failure
        if report.outcome == "failed" and failure is not None:
            self._outbox.flush()
            self._send(Broken(reason=str(failure)))

    def _on_step(self, step: int, error: BaseException | None) -> None:
        if error is not None:
            self._send(Broken(reason=f"step {step}: {error}"))
            return
        self._outbox.note_step()
        if self._step_waiter is not None and not self._step_waiter.done():
            self._step_waiter.set_result(None)

    async def _steps_finished(self) -> None:
        """Wait for the events of all steps that were closed."""
        clock = self._controller.steps.clock
        while clock.finished < clock.closed:
            self._step_waiter = asyncio.get_running_loop().create_future()
            await self._step_waiter

    def _send(self, message: FromRank) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def __repr__(self) -> str:
        return f"<Rank {self.rank} at {self._path}, {self._state()}>"

    def _state(self) -> str:
        return f"generation {self._outbox.generation}" if self.connected else "not connected"


def _check_blocks(regions: Regions, least: int) -> None:
    """Raises:
    LayoutError: the tensors hold fewer blocks than the engine may name.
    """
    if (blocks := device_blocks(regions)) < least:
        raise LayoutError(
            f"wake_up: the tensors of regions hold {blocks} blocks; they must hold at least the "
            f"{least} blocks of the ranks before",
            hint="set Rank.regions to larger tensors",
        )


def _reason_of(error: Exception) -> str:
    """Return the text for the manager; never empty."""
    return str(error) if isinstance(error, AiokvError) else f"{type(error).__name__}: {error}"
