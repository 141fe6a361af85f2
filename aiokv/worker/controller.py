"""CacheController: executes transfer plans and reports their ends. It never decides.

Plans go to the part that executes their route: DeviceTransfers, WorkerStores or PeerTransfers.
Blocks named by a plan belong to it until its report (I3).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.plan import PEER_ROUTES, TransferPlan, group_routes
from aiokv.errors import ClosedError, ConfigError, UsageError
from aiokv.peers.peer_transfers import PeerTransfers
from aiokv.worker.base import Capabilities, WorkerFacts, WorkerState
from aiokv.worker.checksums import Checksums
from aiokv.worker.device_transfers import DeviceTransfers
from aiokv.worker.lanes import worker_statistics
from aiokv.worker.memory import WorkerMemory
from aiokv.worker.plan_table import PlanTable
from aiokv.worker.steps import WorkerSteps
from aiokv.worker.stores import WorkerStores
from aiokv.worker.transfers import StepGate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.base.statistics import WorkerStatistics
    from aiokv.base.types import Tier
    from aiokv.config.cache_config import WindowGroup
    from aiokv.layout.regions import Regions
    from aiokv.peers.options import Peers
    from aiokv.stores.pools import StorePools
    from aiokv.worker.base import WorkerStart
    from aiokv.worker.device.base import Device
    from aiokv.worker.plan_table import Executor

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

    Attributes:
        memory: device tensors and host memory.
        plans: plans in flight.
        steps: steps of the model.
        stores: stores of this worker; without any, there are no routes, and lookups find nothing.
        tickets: peers of this worker; without any, there are no routes.
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
        self._opened = False
        self.steps = WorkerSteps(device, lambda: self.memory, self._checksums)
        self._gate = StepGate(self.steps.clock)
        self.plans = PlanTable(self._check_plan, lambda: self.memory.regions.num_layers)
        self._closing = False
        self._closed = False
        self._turn = asyncio.Lock()  # held by sleep, wake_up and aclose, because they suspend
        self.memory = WorkerMemory(
            regions,
            device,
            self._checksums,
            has_stores=stores is not None,
            host_state_slots=host_state_slots,
            peer_slots=None if peers is None else lambda regions: self.tickets.slots(regions),
            peer_slots_on_device=peers is not None and peers.slots_on_device,
            peer_layers=lambda regions: self.tickets.layer_ranges(regions),
        )
        self._transfers = DeviceTransfers(
            device, self.memory, self.plans, self._gate, self.steps.events, self._checksums
        )
        self.tickets = PeerTransfers(
            peers, lambda: self.memory, self._transfers, self.steps, self.plans
        )
        self.stores = WorkerStores(
            stores,
            self.memory,
            self.plans,
            self._checksums,
            has_states=host_state_slots > 0,
        )
        self._capabilities = Capabilities(
            routes=(device.routes - group_routes(*PEER_ROUTES))
            | self.stores.routes
            | self.tickets.routes,
            checksums=True,
            owns_tensors=True,
            restart=False,
        )

    async def open(self, start: WorkerStart) -> None:
        """Take host memory and the device, and open the stores; see :meth:`Worker.open`.

        Does not suspend without stores.
        """
        if self._opened or self._closing:
            raise UsageError("the cache controller was opened already; it can be opened once")
        if start.device_blocks > (blocks := self.memory.device_blocks):
            raise ConfigError(
                f"device_blocks is {start.device_blocks}, but the registered tensors hold only "
                f"{blocks} blocks",
                hint="register larger tensors, or lower CacheConfig.device_blocks",
            )
        self._check_windows(start.windows)
        self.memory.open(
            start.host_blocks, {name: group.host_blocks for name, group in start.windows.items()}
        )
        try:
            await self.stores.open(start.identity)
            try:
                await self.tickets.open(start.identity, start.poller, start.on_ticket_end)
            except BaseException:
                await self.stores.aclose()
                raise
        except BaseException:
            self.memory.close()
            raise
        self.steps.open(start.poller, self._follow_step, start.on_step)
        self._transfers.open(start.poller)
        self.plans.open(start.poller, start.on_report)
        self._opened = True

    def _check_windows(self, windows: Mapping[str, WindowGroup]) -> None:
        """Raise ``ConfigError`` unless peers can exchange the blocks of all window groups."""
        regions = self.memory.regions
        missing = sorted(windows.keys() - regions.num_window_blocks.keys())
        if self.tickets.exist and missing and regions.num_blocks is not None:
            raise ConfigError(
                f"the window groups {missing} have no registered tensors, but the engine has peers",
                hint="register the tensors of the groups with Regions.add_window",
            )

    @property
    def facts(self) -> WorkerFacts:
        """Properties of the worker and of its tensors."""
        regions = self.memory.regions
        return WorkerFacts(
            capabilities=self._capabilities,
            computes_in_stream=self._device.computes_in_stream,
            num_layers=regions.num_layers,
            device_blocks=self.memory.device_blocks,
            device_name=self._device.name,
            block_bytes=regions.block_bytes,
            pitch_bytes=self.memory.pitch_bytes(),
        )

    @property
    def failure(self) -> BaseException | None:
        """The device's error, after which no transfer can succeed."""
        failure: BaseException | None = getattr(self._device, "failure", None)
        return failure

    async def restart(self) -> None:
        """Raise: a controller cannot be repaired.

        Raises:
            UsageError: always.
        """
        raise UsageError("restart: the engine has no ranks", hint="start the process again")

    # --- plans ------------------------------------------------------------------------------

    def _check_plan(self, plan: TransferPlan) -> tuple[Executor[Any], int]:
        """Return the executor of a plan, and the bytes that it moves; see ``PlanTable.submit``."""
        if self._closing:
            raise ClosedError("the cache controller is closing")
        self.steps.open_poller()
        if self.memory.asleep:
            raise UsageError(
                f"transfer {plan.transfer_id}: the tiers {sorted(self.memory.asleep)} are asleep",
                hint="await engine.wake_up() first",
            )
        num_bytes = self.memory.check(plan)
        if plan.group_route in self.stores.routes:
            return self.stores.transfers, num_bytes
        if plan.group_route in self.tickets.routes:
            return self.tickets.plans, num_bytes
        return self._transfers, num_bytes

    def _follow_step(self) -> None:
        """Start the transfers that closed steps held."""
        self._transfers.step_closed()
        self.tickets.step_closed()

    def change_weights(self, version: str) -> None:
        """Use other keys and tickets from now on; see :meth:`Worker.change_weights`."""
        self.stores.change_weights(version)
        self.tickets.change_weights(version)

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
            if self.plans:
                raise UsageError(
                    f"sleep: {len(self.plans)} transfers are in flight", hint="drain() first"
                )
            if self._closing:
                return
            if tiers:
                await self.tickets.sleep()
            # Free this memory first, because a store may close slowly.
            self.memory.sleep(tiers & _DEVICE)
            if self.stores.exist and "host" in tiers:
                await self.stores.sleep()
            self.memory.sleep(tiers)

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Reallocate the memory, and open the stores again; see :meth:`Worker.wake_up`.

        Does nothing once ``aclose`` was called. Does not suspend without stores and peers.
        """
        async with self._turn:
            if self._closing:
                return
            # The caller counts these tiers as asleep. A cancelled earlier call, here or on another
            # rank, may have left peers open and other tensors bound.
            await self.tickets.sleep()
            self.memory.sleep(tiers & _DEVICE)
            self.memory.wake_up(tiers, regions)
            try:
                await self.stores.wake_up()
                await self.tickets.wake_up()
            except BaseException:
                self.memory.sleep(tiers & _DEVICE)
                raise

    # --- end --------------------------------------------------------------------------------

    async def abandon(self) -> None:
        """Cancel and report waiting plans, end all tickets, and wait for submitted plans.

        Cancellation: waiting plans are cancelled; the transfers go on.
        """
        if not self.plans.is_given_up:
            self.tickets.give_up("the worker gives up its plans")
            self.plans.cancel_waiting(self._transfers)
            await self.plans.drain()

    async def aclose(self) -> None:
        """Cancel waiting plans, wait for moving ones, join the device's threads, free the arena.

        A ``wake_up`` under way ends first: otherwise it would open stores behind their end. Memory
        is never freed under a copy. Idempotent.

        Cancellation: memory is kept; call it again.
        """
        self._closing = True
        self.stores.end_lookups()
        async with self._turn:
            await self.stores.aclose()
            await self.abandon()
            await self.tickets.aclose()
            if not self._closed:
                self.memory.close()
                self._closed = True

    def give_up(self) -> None:
        """Wait for no more reports; see :meth:`Worker.give_up`."""
        self.plans.give_up()

    def close_without_loop(self) -> None:
        """As aclose(), after the loop was closed: the device finishes its transfers, and nothing
        is reported. Idempotent."""
        self._closing = True
        if not self._closed:
            self._closed = True
            self.stores.close_without_loop()
            self.tickets.close_without_loop()
            self.memory.close()

    def statistics(self) -> WorkerStatistics:
        """Return the counts of each group and route. Any thread."""
        # The device also counts copies of peers, which are parts of the plans of `tickets`.
        executors = (self._transfers, self.stores.transfers, self.tickets.plans)
        return worker_statistics(
            self.memory.regions.groups,
            [executor.counts for executor in executors],
            held=len(self._gate),
            corrupt=self._transfers.corrupt,
            block_sizes=self.memory.block_sizes,
        )

    def inspect(self) -> WorkerState:
        """Return the state of stores, peers and host memory."""
        return WorkerState(
            stores=self.stores.statistics(),
            peers=self.tickets.statistics(),
            ranks=[],
            unpinned_bytes=getattr(self._device, "unpinned_bytes", 0),
        )
