"""CacheController: executes transfer plans and reports their ends. It never decides.

Plans go to the part that executes their route: DeviceTransfers, WorkerStores or PeerTransfers.
Blocks named by a plan belong to it until its report (I3).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.base.plan import CLONE, PEER_ROUTES, STATE, TransferPlan, TransferReport
from aiokv.errors import ClosedError, ConfigError, DeviceError, UsageError
from aiokv.peers.peer_transfers import PeerTransfers
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.store_set import NOTHING, Found
from aiokv.worker.base import Capabilities
from aiokv.worker.blocks import clone_rows
from aiokv.worker.checksums import Checksums
from aiokv.worker.device_transfers import DeviceTransfers
from aiokv.worker.lanes import worker_statistics
from aiokv.worker.memory import WorkerMemory
from aiokv.worker.poller import EventPoller
from aiokv.worker.settling import ReportWaiters
from aiokv.worker.stores import WorkerStores
from aiokv.worker.transfers import StepGate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.base.plan import StorePool
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
    from aiokv.peers.options import Peers
    from aiokv.peers.ticket import Endpoint
    from aiokv.stores.identity import StoreIdentity
    from aiokv.stores.pools import StorePools
    from aiokv.stores.store_set import StoreAnswer
    from aiokv.worker.base import Cancelled
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.layers import LayerDoneCounter

_DEVICE: Final[frozenset[Tier]] = frozenset(("device",))


class CacheController:
    """Worker of one process: owns the host memory and the device. Used on one loop.

    Args:
        regions: the device tensors, borrowed until ``aclose()`` has returned.
        device: attached by ``open()``, closed by ``aclose()``.
        checksums: record the checksums of computed blocks, and verify each onload after its last
            byte; its layers are announced only then.
        stores: opened and closed with the controller; None without stores.
        host_state_slots: slots of recurrent state in host memory.
        peers: how other engines are reached; None without peers.
    """

    def __init__(
        self,
        regions: Regions,
        device: Device,
        *,
        checksums: bool = False,
        stores: StorePools | None = None,
        host_state_slots: int = 0,
        peers: Peers | None = None,
    ) -> None:
        self._device = device
        self._checksums = Checksums(regions) if checksums else None
        self._uncomputed: list[NDArray[np.int32]] = []  # recorded when the open step is closed
        self._poller = EventPoller()  # until open() gives the loop's
        self._opened = False
        self._on_step: Callable[[int, BaseException | None], None] = _ignore_step
        self._gate = StepGate()
        self._report_waiters = ReportWaiters()
        self._closing = False
        self._closed = False
        self._turn = (
            asyncio.Lock()
        )  # of sleep, wake_up and aclose, which suspend between their parts
        self.memory = WorkerMemory(
            regions,
            device,
            self._checksums,
            has_stores=stores is not None,
            host_state_slots=host_state_slots,
            peer_slots=None if peers is None else self._peer_slots,
            peer_slots_on_device=peers is not None and peers.slots_on_device,
            peer_layers=self._peer_layers,
        )
        self._transfers = DeviceTransfers(
            device, self.memory, self._gate, self._checksums, self._report_waiters.note_report
        )
        self._peers = PeerTransfers(
            peers, lambda: self.memory, self._transfers, self._report_waiters.note_report
        )
        self._stores = WorkerStores(
            stores,
            self.memory,
            self._report_waiters.note_report,
            has_states=host_state_slots > 0,
        )
        self.capabilities = Capabilities(
            routes=(device.routes - PEER_ROUTES) | self._stores.routes | self._peers.routes,
            clone_routes=frozenset((CLONE, STATE)),
            checksums=True,
            step_events=True,
            owns_tensors=True,
            restart=False,
        )

    async def open(
        self,
        *,
        device_blocks: int,
        host_blocks: int,
        poller: EventPoller,
        on_report: Callable[[TransferReport], None],
        on_step: Callable[[int, BaseException | None], None],
        on_lost: Callable[[RankLost], None],
        identity: StoreIdentity | None = None,
        windows: Mapping[str, WindowGroup] | None = None,
        on_ticket_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None,
    ) -> None:
        """Take host memory and the device, and open the stores; see :meth:`Worker.open`.

        Does not suspend without stores.

        ``on_lost`` is never called: a controller has no ranks.
        """
        if self._opened or self._closing:
            raise UsageError("the cache controller was opened already; it can be opened once")
        if device_blocks > self.device_blocks:
            raise ConfigError(
                f"device_blocks is {device_blocks}, but the registered tensors hold only "
                f"{self.device_blocks} blocks",
                hint="register larger tensors, or lower CacheConfig.device_blocks",
            )
        self._check_windows(windows or {})
        self.memory.open(
            host_blocks, {name: group.host_blocks for name, group in (windows or {}).items()}
        )
        try:
            await self._stores.open(identity, poller, on_report)
            try:
                await self._peers.open(identity, poller, on_report, on_ticket_end)
            except BaseException:
                await self._stores.aclose()
                raise
        except BaseException:
            self.memory.close()
            raise
        self._poller, self._on_step = poller, on_step
        self._transfers.open(poller, on_report)
        self._opened = True

    def _check_windows(self, windows: Mapping[str, WindowGroup]) -> None:
        """Raise ``ConfigError`` unless peers can exchange the blocks of all window groups."""
        regions = self.memory.regions
        missing = sorted(windows.keys() - regions.num_window_blocks.keys())
        if self._peers.exist and missing and regions.num_blocks is not None:
            raise ConfigError(
                f"the window groups {missing} have no registered tensors, but the engine has peers",
                hint="register the tensors of the groups with Regions.add_window",
            )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.memory.regions.num_layers

    @property
    def device_blocks(self) -> int:
        """Blocks that the tensors hold; ``UNLIMITED_BLOCKS`` without tensors."""
        return self.memory.device_blocks

    @property
    def device_name(self) -> str:
        """Device of the tensors."""
        return self._device.name

    @property
    def block_bytes(self) -> int:
        """Bytes of a device block, over all layers; 0 without tensors."""
        return self.memory.regions.block_bytes

    @property
    def computes_in_stream(self) -> bool:
        """True when the device computes behind the host's back: steps need events."""
        return self._device.computes_in_stream

    @property
    def failure(self) -> BaseException | None:
        """The device's error, after which no transfer can succeed."""
        failure: BaseException | None = getattr(self._device, "failure", None)
        return failure

    @property
    def lost(self) -> RankLost | None:
        """None: there are no ranks."""
        return None

    @property
    def silent_ranks(self) -> list[int]:
        """Empty: there are no ranks."""
        return []

    @property
    def unpinned_bytes(self) -> int:
        """Host memory that the device has not page-locked yet."""
        unpinned: int = getattr(self._device, "unpinned_bytes", 0)
        return unpinned

    async def restart(self) -> None:
        """Raise: a controller cannot be repaired.

        Raises:
            UsageError: always.
        """
        raise UsageError("restart: the engine has no ranks", hint="start the process again")

    def describe(self) -> list[dict[str, object]]:
        """Return an empty list: there are no ranks."""
        return []

    # --- plans ------------------------------------------------------------------------------

    def submit(self, plan: TransferPlan) -> LayerDoneCounter:
        """Take a plan; see :meth:`Worker.submit`."""
        if self._closing:
            raise ClosedError("the cache controller is closing")
        self._check_open()
        if self.memory.asleep:
            raise UsageError(
                f"transfer {plan.transfer_id}: the tiers {sorted(self.memory.asleep)} are asleep",
                hint="await engine.wake_up() first",
            )
        if self.counter(plan.transfer_id) is not None:
            raise UsageError(f"transfer {plan.transfer_id} is in flight already")
        num_bytes = self.memory.check(plan)
        if plan.route in self._stores.routes:
            if self._checksums is not None:
                self._checksums.begin(plan)
            return self._stores.transfers.submit(plan, num_bytes)
        if plan.route in self._peers.routes:
            return self._peers.submit(plan, num_bytes)
        return self._transfers.submit(plan, num_bytes)

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        return (
            self._transfers.counter(transfer_id)
            or self._stores.transfers.counter(transfer_id)
            or self._peers.counter(transfer_id)
        )

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that the device does not have yet.

        Returns:
            ``"at once"``: no report follows, ``gpu_wait`` raises from now on, and waiting
            coroutines get their error in the next pass of the loop. ``"too late"``: the device has
            the plan, and its end will be reported; or the id is unknown, because the report came
            before the cancellation. ``"asked"``: a plan of a peer was given up, and its end will be
            reported when its copies have ended.
        """
        for part in (self._transfers, self._peers):
            if part.counter(transfer_id) is not None:
                return part.cancel(transfer_id)
        return self._stores.transfers.cancel(transfer_id)

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Reorder a plan that still waits; see :meth:`Worker.raise_priority`."""
        self._transfers.raise_priority(transfer_id, priority)

    def check_event(self, event: Event | None) -> None:
        """Raise unless ``close_step`` can take the event. Cheap; changes nothing.

        Raises:
            UsageError: ``event`` is not an event, is of another device, or was never recorded.
        """
        if event is not None:
            self._device.check_event(event)

    def close_step(self, step: int, event: Event | None) -> None:
        """Close all steps up to ``step``; see :meth:`Worker.close_step`."""
        self._check_open()
        self.check_event(event)
        self._gate.check(step)
        self._record_computed(event)
        self._gate.close(step, event)
        self._poller.surely(partial(self._follow_step, step, event))

    def _follow_step(self, step: int, event: Event | None) -> None:
        """Queue the transfers that the step held, and watch its event."""
        self._transfers.step_closed()
        self._peers.step_closed()
        if event is None:
            self._on_step(step, None)
        else:
            self._poller.watch(event, "steps", partial(self._step_finished, step))

    def _step_finished(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self._gate.finish(step)
        if not isinstance(error, ClosedError):  # the poller was closed
            self._on_step(step, error)

    def clone(self, plan: TransferPlan, stream: Any = None) -> None:
        """Copy blocks or state slots within the device; see :meth:`Worker.clone`."""
        regions = self.memory.regions
        if plan.route == CLONE:
            pieces = list(regions.pieces())
        elif plan.route == STATE:
            pieces = list(regions.state_pieces)
        else:
            raise UsageError(f"clone: the route is {plan.route}; it must be {CLONE} or {STATE}")
        clone_rows(pieces, plan.source_ids, plan.target_ids, stream)

    def record_checksums(self, block_ids: NDArray[np.int32], step: int) -> None:
        """Record the bytes of computed blocks; see :meth:`Worker.record_checksums`."""
        if self._checksums is None:
            raise UsageError(
                "record_checksums: the worker was made without checksums",
                hint="set CacheConfig.verify to 'checksum'",
            )
        if self._gate.is_open(step):
            self._uncomputed.append(block_ids)
        else:
            self._checksums.record(block_ids)

    def _record_computed(self, event: Event | None) -> None:
        """Read the blocks of the step that is being closed, when they have been computed."""
        if self._checksums is None or not self._uncomputed or self.failure is not None:
            return
        if event is not None:
            try:
                event.synchronize()
            except Exception as error:  # CuPy's class of errors needs the driver
                raise DeviceError(f"close_step: the event of the step failed: {error}") from error
        self._checksums.record(np.concatenate(self._uncomputed))
        self._uncomputed.clear()

    # --- stores -----------------------------------------------------------------------------

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Ask the stores for blocks; see :meth:`Worker.lookup`."""
        return NOTHING if self._closing else await self._stores.lookup(digests)

    async def find(self, pool: StorePool, digests: bytes) -> Found:
        """Ask the stores for objects of a pool; see :meth:`Worker.find`."""
        if self._closing or not self._opened:
            return Found.nothing(len(digests) // KEY_BYTES)
        return await self._stores.find(pool, digests)

    def change_weights(self, version: str) -> None:
        """Use other keys and tickets from now on; see :meth:`Worker.change_weights`."""
        self._stores.change_weights(version)
        self._peers.change_weights(version)

    def store_statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store; see :meth:`Worker.store_statistics`."""
        return self._stores.statistics()

    # --- peers ------------------------------------------------------------------------------

    @property
    def endpoints(self) -> list[Endpoint]:
        """Address at which this worker listens for senders; see :attr:`Worker.endpoints`."""
        return self._peers.endpoints

    def expect(self, ticket: bytes, seconds: float, open_seconds: float) -> None:
        """Let senders open a ticket; see :meth:`Worker.expect`."""
        self._peers.expect(ticket, seconds, open_seconds)

    async def expected(self, ticket_id: bytes, seconds: float) -> None:
        """Return at once: ``expect`` has had its effect."""

    async def open_ticket(self, ticket: bytes, layouts: Sequence[bytes] = ()) -> None:
        """Connect to the receivers of a ticket; see :meth:`Worker.open_ticket`.

        Args:
            ticket: encoded.
            layouts: :attr:`peer_layout` of all ranks of this engine, by rank; empty for one rank.
        """
        await self._peers.open_ticket(ticket, layouts)

    @property
    def ticket_key(self) -> bytes:
        """Key of tickets; see :attr:`Worker.ticket_key`."""
        return self._peers.ticket_key

    @property
    def peer_layout(self) -> bytes:
        """Layout of the blocks of this rank, for peers; empty without peers and before ``open``."""
        return self._peers.layout

    @property
    def layer_ends(self) -> list[int]:
        """End of each range of layers in which blocks are sent; see :attr:`Worker.layer_ends`."""
        return self._peers.layer_ends

    def layers_done(self, ticket_id: bytes, mark: int, event: Event | None) -> None:
        """Note that layers of blocks are computed; see :meth:`Worker.layers_done`."""
        self._check_open()
        self.check_event(event)
        self._peers.layers_done(ticket_id, mark, event)

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket; see :meth:`Worker.close_ticket`."""
        self._peers.close_ticket(ticket_id, reason)

    def rank_statistics(self) -> list[RankStatistics]:
        """Return an empty list: there are no ranks."""
        return []

    def peer_statistics(self) -> list[RankPeerStatistics]:
        """Return the use of peers; see :meth:`Worker.peer_statistics`."""
        return self._peers.statistics()

    def peer_violations(self) -> list[str]:
        """Return a description of each violated invariant of slots and tickets."""
        return self._peers.violations()

    def _peer_slots(self, regions: Regions) -> tuple[int, int]:
        return self._peers.slots(regions)

    def _peer_layers(self, regions: Regions) -> list[tuple[int, int]]:
        return self._peers.layer_ranges(regions)

    # --- sleep ------------------------------------------------------------------------------

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the memory of these tiers; see :meth:`WorkerMemory.sleep`.

        Nothing can be submitted until all tiers are awake. The stores are closed while the host
        tier is asleep, the peers while any tier is. Does not suspend without stores and peers.

        Raises:
            UsageError: a transfer is in flight. Nothing changed.

        Cancellation: call it again, or ``wake_up``; memory may still be allocated.
        """
        async with self._turn:
            if in_flight := self._in_flight():
                raise UsageError(
                    f"sleep: {len(in_flight)} transfers are in flight", hint="drain() first"
                )
            if self._closing:
                return
            if tiers:
                await self._peers.sleep()
            self.memory.sleep(tiers & _DEVICE)  # a store may close slowly
            if self._stores.exist and "host" in tiers:
                await self._stores.sleep()
            self.memory.sleep(tiers)

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Reallocate the memory, and open the stores again; see :meth:`Worker.wake_up`.

        Does nothing once ``aclose`` was called. Does not suspend without stores and peers.
        """
        async with self._turn:
            if self._closing:
                return
            # The caller counts these tiers as asleep. An earlier call that was cancelled, here or
            # on another rank, may have left peers open and other tensors bound.
            await self._peers.sleep()
            self.memory.sleep(tiers & _DEVICE)
            self.memory.wake_up(tiers, regions)
            try:
                await self._stores.wake_up()
                await self._peers.wake_up()
            except BaseException:
                self.memory.sleep(tiers & _DEVICE)
                raise

    # --- end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every plan submitted so far, and since, has been reported.

        This includes plans whose step is open: another task has to close the step.

        Cancellation: stops waiting; the transfers go on.
        """
        while in_flight := self._in_flight():
            await self._report_waiters.wait(in_flight)

    def _in_flight(self) -> list[int]:
        """Return the ids of the plans that were not reported yet."""
        return [
            *self._transfers.in_flight,
            *self._stores.transfers.in_flight,
            *self._peers.in_flight,
        ]

    async def abandon(self) -> None:
        """Cancel and report waiting plans, end all tickets; wait for what the device has.

        Cancellation: waiting plans are cancelled; the transfers go on.
        """
        self._peers.give_up("the worker gives up its plans")
        self._transfers.give_up()
        await self.drain()

    async def aclose(self) -> None:
        """Cancel waiting plans, wait for moving ones, join the device's threads, free the arena.

        A ``wake_up`` under way ends first: otherwise it would open stores behind their end. Memory
        is never freed under a copy. Idempotent.

        Cancellation: memory is kept; call it again.
        """
        self._closing = True
        async with self._turn:
            await self._stores.aclose()
            await self.abandon()
            await self._peers.aclose()
            if not self._closed:
                self.memory.close()
                self._closed = True

    def close_without_loop(self) -> None:
        """As aclose(), after the loop was closed: the device finishes its transfers, and nothing
        is reported. Idempotent."""
        self._closing = True
        if not self._closed:
            self._closed = True
            self._stores.close_without_loop()
            self._peers.close_without_loop()
            self.memory.close()

    def statistics(self) -> WorkerStatistics:
        """Return the counts of each route. Any thread."""
        routes = self._transfers.lane_statistics()
        others = self._stores.lane_statistics() | self._peers.lane_statistics()
        return worker_statistics(len(self._gate), routes | others, self._transfers.corrupt)

    def _check_open(self) -> None:
        """Check that the controller is open.

        Raises:
            ClosedError: the controller is not open, or its poller is closed.
        """
        if not self._opened:
            raise ClosedError("the cache controller is not open")
        if self._poller.closed:
            raise ClosedError("the cache controller is closed")


def _ignore_step(step: int, error: BaseException | None) -> None:
    """Take the place of ``on_step`` before ``open``."""
