"""DeviceTransfers: the executor of plans and copies on a device.

    submit ─► held (step open) ─► queue by priority ─► at most 2 in the device ─► end

A transfer ends when the device's events prove that the bytes have arrived (I4).
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiokv.base.plan import ONLOAD, TransferPlan, id_bytes
from aiokv.worker.device.base import CopyError, blocks_of, host_pool
from aiokv.worker.lanes import Lane, RouteTable
from aiokv.worker.plan_table import Executor, PlanEntry
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from aiokv.base.plan import Route
    from aiokv.worker.base import Cancelled
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Copy, Device, Event
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.plan_table import PlanTable
    from aiokv.worker.steps import StepEvents
    from aiokv.worker.transfers import StepGate

MAX_SUBMITTED: Final = 2  # per group and route: one transfer moves, one is ready behind it


class _Work:
    """Work of the device for a plan.

    Attributes:
        lane: lane of its group and route.
        after: event that the first byte waits for, in place of that of the plan's step; None for
            none.
        unproven: layer -> time of its arrival, of layers whose checksums are not verified yet.
    """

    __slots__ = ("after", "lane", "unproven")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.after: Event | None = None
        self.unproven: dict[int, float | None] = {}


_Entry: TypeAlias = PlanEntry[_Work]


class DeviceTransfers(Executor[_Work]):
    """Plans of the device's routes, and the copies that are parts of plans of peers.

    Args:
        device: executes the copies.
        memory: has the tensors.
        plans: plans of the worker.
        gate: plans whose step is open; the caller closes steps.
        events: events of closed steps.
        checksums: verifies each onload after its last byte; None without.

    Attributes:
        corrupt: onloads that moved wrong bytes.
    """

    def __init__(
        self,
        device: Device,
        memory: WorkerMemory,
        plans: PlanTable,
        gate: StepGate,
        events: StepEvents,
        checksums: Checksums | None,
    ) -> None:
        self.corrupt = 0
        self._device = device
        self._memory = memory
        self._plans = plans
        self._gate = gate
        self._events = events
        self._checksums = checksums
        self._poller = EventPoller()  # replaced by the loop's poller in open()
        self._lanes = RouteTable(Lane)
        self._copy_ids = count(-1, -1)  # ids of copies that are parts of a plan

    def open(self, poller: EventPoller) -> None:
        """Use the poller of the loop from now on."""
        self._poller = poller

    @property
    def counts(self) -> RouteTable[Lane]:
        """Lane of each group and route."""
        return self._lanes

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._memory.regions.num_layers

    # --- plans ------------------------------------------------------------------------------

    def new_work(self, entry: _Entry) -> _Work:
        """Return the work of a plan, with its lane."""
        return _Work(self._lanes.of(entry.plan))

    def submit(self, entry: _Entry) -> None:
        """Hold a plan until its step is closed, or queue it."""
        lane = entry.work.lane
        if not self._gate.hold(entry):
            lane.queue.push(entry)
            self._pump(lane)

    def cancel(self, entry: _Entry) -> Cancelled:
        """Cancel a plan that the device does not have; see :meth:`Executor.cancel`."""
        if entry.state != "waiting":
            return "too late"
        self._gate.remove(entry)
        entry.work.lane.queue.remove(entry)
        return "at once"

    def raise_priority(self, entry: _Entry) -> None:
        """Reorder a queued plan; one that is held is queued with its new priority."""
        entry.work.lane.queue.raise_priority(entry)

    def expedite(self, entry: _Entry) -> bool:
        """Give a queued plan to the device; return False if its step is open."""
        lane = entry.work.lane
        if entry in lane.queue:
            self._start(lane, entry)
        return entry.state != "waiting"

    def step_closed(self) -> None:
        """Queue the plans that a step held."""
        freed = self._gate.free()
        for entry in freed:
            entry.work.lane.queue.push(entry)
        for lane in self._lanes.values():
            self._pump(lane)

    # --- copies of peers --------------------------------------------------------------------

    def copy(
        self,
        route: Route,
        group: str,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        after: int | Event | None,
        on_end: Callable[[CopyError | None], None],
        keys: bytes = b"",
    ) -> int:
        """Copy between blocks on the device and slots of the peer arena, as part of a plan.

        Args:
            route: from or to a peer.
            group: group of the blocks, or a range of layers.
            source_ids: device blocks or slots.
            target_ids: likewise, as many.
            after: the step or the event that the copy waits for; None for neither.
            on_end: gets the failure, or None, in a callback of the loop.
            keys: 32 bytes per slot in the memory of the device, which the copy seals or verifies;
                empty for slots in host memory.

        Returns:
            The id of the copy, for ``cancel_copy``.
        """
        plan = TransferPlan(
            transfer_id=next(self._copy_ids),
            route=route,
            source_blocks=id_bytes(source_ids),
            target_blocks=id_bytes(target_ids),
            after_step=after if isinstance(after, int) else 0,
            group=group,
            digests=keys,
        )
        regions = blocks_of(self._memory.regions, host_pool(route, group))
        num_bytes = regions.block_bytes * plan.num_blocks
        entry = self._plans.add(plan, self, regions.num_layers, num_bytes, on_end)
        entry.work.after = None if isinstance(after, int) else after
        self.submit(entry)
        return plan.transfer_id

    def cancel_copy(self, copy_id: int) -> Cancelled:
        """Cancel a copy that the device does not have; its ``on_end`` follows."""
        return self._plans.cancel(copy_id)

    # --- one plan ---------------------------------------------------------------------------

    def _pump(self, lane: Lane) -> None:
        while lane.submitted < MAX_SUBMITTED and (entry := lane.queue.first()) is not None:
            self._start(lane, entry)

    def _start(self, lane: Lane, entry: _Entry) -> None:
        """Give a queued plan to the device."""
        lane.queue.remove(entry)
        lane.submitted += 1
        self._plans.begin(entry)
        try:
            copy = self._copy(entry)
            events = copy.layer_events
        except Exception as error:  # reported like any other failure of the copy
            failure = CopyError(0, str(error) or type(error).__name__)
            entry.counter.refuse(failure)
            self._drop(lane, entry, failure)
            return
        entry.counter.attach(copy, is_verified=self._verifies(entry.plan))
        if events:
            self._watch(lane, entry, events)
        else:
            self._drop(lane, entry, None)

    def _verifies(self, plan: TransferPlan) -> bool:
        return self._checksums is not None and plan.route == ONLOAD

    def _copy(self, entry: _Entry) -> Copy:
        plan, after = entry.plan, entry.work.after
        if after is None:
            after = self._events.event_for(plan.after_step)
        if self._checksums is not None:
            self._checksums.begin(plan)
        ids = plan.source_ids, plan.target_ids
        if plan.digests:
            device: Any = self._device  # a device with peers' slots in its memory
            copy: Copy = device.copy(plan.route, *ids, after, plan.group, keys=plan.digests)
            return copy
        return self._device.copy(plan.route, *ids, after, plan.group)

    def _watch(self, lane: Lane, entry: _Entry, events: Sequence[Event]) -> None:
        """Watch each distinct event of a copy; layers that share one arrive together."""
        seconds = lane.expected_seconds(entry.num_bytes)
        in_order = self._device.in_order
        first = 0
        for layer, event in enumerate(events):
            if layer + 1 < len(events) and events[layer + 1] is event:
                continue
            order = (entry.plan.route, entry.plan.group)
            key: Hashable = order if in_order else (*order, id(event))
            layers = range(first, layer + 1)
            share = (len(layers) if in_order else layer + 1) / len(events)
            self._poller.watch(
                event,
                key,
                partial(self._on_event, entry, layers, event),
                None if seconds is None else seconds * share,
            )
            first = layer + 1

    def _on_event(
        self, entry: _Entry, layers: range, event: Event, error: BaseException | None
    ) -> None:
        """Take note that an event of a copy is done; an ``error`` of its device fails it all."""
        if entry.state == "ended":
            return
        if error is not None:
            self._end(entry, CopyError(0, str(error)))
        else:
            self._layers_done(entry, layers, event)

    def _layers_done(self, entry: _Entry, layers: range, event: Event) -> None:
        finished_seconds: float | None = getattr(event, "finished_seconds", None)
        counter, plan = entry.counter, entry.plan
        arrived = dict.fromkeys(layers, finished_seconds)
        if self._checksums is not None and self._verifies(plan):
            unproven = entry.work.unproven
            unproven |= arrived
            if len(unproven) < counter.num_layers:
                return
            arrived = unproven
            copy_failure = counter.failure
            failure = self._checksums.verify(plan, copy_failure)
            if failure is not None:
                self.corrupt += failure is not copy_failure
                self._end(entry, failure, finished_seconds)
                return
        for layer, at in arrived.items():
            counter.mark_layer_done(layer, at)
        if counter.all_arrived:
            self._end(entry, counter.failure, finished_seconds)

    def _end(
        self, entry: _Entry, failure: CopyError | None, finished_seconds: float | None = None
    ) -> None:
        """End a plan within this callback; the next one starts before the report is sent."""
        lane = entry.work.lane
        lane.submitted -= 1
        started = entry.counter.started_seconds
        if failure is None and started is not None:
            finished = time.monotonic() if finished_seconds is None else finished_seconds
            lane.note_moved(entry.num_bytes, started, finished)
        self._plans.end(entry, failure)
        self._pump(lane)
        self._plans.send_report(entry)

    def _drop(self, lane: Lane, entry: _Entry, failure: CopyError | None) -> None:
        """End a plan for which the device moves no byte."""
        lane.submitted -= 1
        self._plans.end(entry, failure)
        self._plans.report_soon(entry)
