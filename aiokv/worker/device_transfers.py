"""DeviceTransfers: plans that a device executes. Each ends with a report.

    submit ─► held (step open) ─► queue by priority ─► at most 2 in the device ─► report

A report is sent when the device's events prove that the bytes have arrived (I4), from a callback of
the loop.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.plan import ONLOAD, TransferPlan, TransferReport, id_bytes
from aiokv.worker.device.base import CopyError, blocks_of
from aiokv.worker.lanes import Lane
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.poller import EventPoller
from aiokv.worker.reports import deliver
from aiokv.worker.transfers import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from aiokv.base.plan import GroupRoute, Outcome, Route
    from aiokv.base.statistics import RouteStatistics
    from aiokv.worker.base import Cancelled
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Copy, Device, Event
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.steps import StepEvents
    from aiokv.worker.transfers import StepGate

_CANCELLED: Final = CopyError(0, "cancelled before it was submitted")
_WAITING: Final = ("held", "queued")  # states of a plan that was not given to the device
MAX_SUBMITTED: Final = 2  # per route: one transfer moves, one is ready behind it


class DeviceTransfers:
    """Plans of the device's routes, and the copies that are parts of plans of peers.

    Args:
        device: executes the copies.
        memory: has the tensors.
        gate: transfers whose step is open; the caller closes steps.
        events: of closed steps.
        checksums: verifies each onload after its last byte; None without.
        on_end: called with the id of each plan after its report.

    Attributes:
        corrupt: onloads that moved wrong bytes.
    """

    def __init__(
        self,
        device: Device,
        memory: WorkerMemory,
        gate: StepGate,
        events: StepEvents,
        checksums: Checksums | None,
        on_end: Callable[[int], None],
    ) -> None:
        self.corrupt = 0
        self._device = device
        self._memory = memory
        self._gate = gate
        self._events = events
        self._checksums = checksums
        self._on_end = on_end
        self._poller = EventPoller()  # until open() gives the loop's
        self._on_report: Callable[[TransferReport], None] = _ignore_report
        self._lanes = {route: Lane(route) for route in device.routes}
        self._transfers: dict[int, Transfer] = {}
        self._copy_ids = count(-1, -1)  # of copies that are part of a plan

    def open(self, poller: EventPoller, on_report: Callable[[TransferReport], None]) -> None:
        """Use the poller of the loop from now on."""
        self._poller, self._on_report = poller, on_report

    # --- plans ------------------------------------------------------------------------------

    def submit(self, plan: TransferPlan, num_bytes: int) -> LayerDoneCounter:
        """Take a plan that was checked."""
        counter = LayerDoneCounter(
            self._memory.regions.num_layers,
            transfer_id=plan.transfer_id,
            direction=plan.direction,
            num_bytes=num_bytes,
            expedite=lambda: self._expedite(plan.transfer_id),
        )
        self._begin(Transfer(plan, counter, num_bytes))
        return counter

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.counter

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of the plans that were not reported yet."""
        return self._transfers.keys()

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that the device does not have yet; see ``CacheController.cancel``."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state not in _WAITING:
            return "too late"
        transfer.reported = True  # the caller knows that it has ended
        self._take_back(transfer)
        return "at once"

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Reorder a plan that still waits; see :meth:`Worker.raise_priority`."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or priority >= transfer.priority:
            return
        transfer.priority = priority
        if transfer.state == "queued":
            self._lane_of(transfer).queue.raise_priority(transfer)

    def step_closed(self) -> None:
        """Queue the transfers that a step held."""
        for transfer in self._gate.free():
            if transfer.state == "held":
                self._lane_of(transfer).queue.push(transfer)
        for lane in self._lanes.values():
            self._pump(lane)

    def give_up(self) -> None:
        """Cancel, and report, the plans that the device does not have."""
        for transfer in list(self._transfers.values()):
            if transfer.state in _WAITING:
                self._take_back(transfer)

    def lane_statistics(self) -> dict[GroupRoute, RouteStatistics]:
        """Return the counts of each route. Any thread."""
        return {route: lane.statistics() for route, lane in self._lanes.items()}

    # --- copies of peers --------------------------------------------------------------------

    def new_copy_id(self) -> int:
        """Return an id for :meth:`copy`."""
        return next(self._copy_ids)

    def copy(
        self,
        copy_id: int,
        route: Route,
        group: str,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        after: int | Event | None,
        on_end: Callable[[CopyError | None], None],
        keys: bytes = b"",
    ) -> None:
        """Copy between blocks on the device and slots of the peer arena, as part of a plan.

        Args:
            copy_id: of ``new_copy_id``.
            route: from or to a peer.
            group: group of the blocks, or a range of layers.
            source_ids: device blocks or slots.
            target_ids: likewise, as many.
            after: the step or the event that the copy waits for; None for neither.
            on_end: gets the failure, or None, in a callback of the loop.
            keys: 32 bytes per slot in the memory of the device, which the copy seals or verifies;
                empty for slots in host memory.
        """
        plan = TransferPlan(
            transfer_id=copy_id,
            route=route,
            source_blocks=id_bytes(source_ids),
            target_blocks=id_bytes(target_ids),
            after_step=after if isinstance(after, int) else 0,
            group=group,
            digests=keys,
        )
        regions = blocks_of(self._memory.regions, group)
        counter = LayerDoneCounter(
            regions.num_layers, transfer_id=plan.transfer_id, direction=plan.direction
        )
        event = None if isinstance(after, int) else after
        num_bytes = regions.block_bytes * plan.num_blocks
        self._begin(Transfer(plan, counter, num_bytes, on_end, event))

    # --- states of a transfer ---------------------------------------------------------------

    def _begin(self, transfer: Transfer) -> None:
        self._transfers[transfer.plan.transfer_id] = transfer
        if self._gate.is_open(transfer.plan.after_step):
            self._gate.hold(transfer)
        else:
            self._lane_of(transfer).queue.push(transfer)
        self._pump(self._lane_of(transfer))

    def _lane_of(self, transfer: Transfer) -> Lane:
        return self._lanes[transfer.plan.group_route]

    def _take_back(self, transfer: Transfer) -> None:
        transfer.state = "ended"
        self._gate.remove(transfer)
        self._lane_of(transfer).queue.remove(transfer)
        transfer.counter.refuse(_CANCELLED)
        self._end_soon(transfer, "cancelled", _CANCELLED)

    def _pump(self, lane: Lane) -> None:
        while len(lane.submitted) < MAX_SUBMITTED and (transfer := lane.queue.first()) is not None:
            self._start(lane, transfer)

    def _expedite(self, transfer_id: int) -> bool:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return True
        if transfer.state == "queued":
            self._start(self._lane_of(transfer), transfer)
        return transfer.state != "held"

    def _start(self, lane: Lane, transfer: Transfer) -> None:
        """Give a queued transfer to the device."""
        lane.submitted[transfer.plan.transfer_id] = transfer
        lane.queue.remove(transfer)
        transfer.state = "submitted"
        transfer.started_at = time.monotonic()
        transfer.counter.note_start(transfer.started_at)
        try:
            copy = self._copy(transfer)
            events = copy.layer_events
        except Exception as error:  # the report tells it, like any other failure of the copy
            failure = CopyError(0, str(error) or type(error).__name__)
            transfer.counter.refuse(failure)
            self._end_soon(transfer, "failed", failure)
            return
        transfer.counter.attach(copy)
        if events:
            self._watch(lane, transfer, events)
        else:
            self._end_soon(transfer, "done", None)

    def _copy(self, transfer: Transfer) -> Copy:
        plan = transfer.plan
        after = transfer.after
        if after is None:
            after = self._events.event_for(plan.after_step)
        if self._checksums is not None:
            self._checksums.begin(plan)
        ids = plan.source_ids, plan.target_ids
        if plan.digests:
            device: Any = self._device  # one with slots in its memory
            copy: Copy = device.copy(plan.route, *ids, after, plan.group, keys=plan.digests)
            return copy
        return self._device.copy(plan.route, *ids, after, plan.group)

    def _watch(self, lane: Lane, transfer: Transfer, events: Sequence[Event]) -> None:
        """Watch each distinct event of a copy; layers that share one arrive together."""
        seconds = lane.expected_seconds(transfer)
        in_order = self._device.in_order
        first = 0
        for layer, event in enumerate(events):
            if layer + 1 < len(events) and events[layer + 1] is event:
                continue
            order = (transfer.plan.route, transfer.plan.group)
            key: Hashable = order if in_order else (*order, id(event))
            layers = range(first, layer + 1)
            share = (len(layers) if in_order else layer + 1) / len(events)
            self._poller.watch(
                event,
                key,
                partial(self._on_event, transfer, layers, event),
                None if seconds is None else seconds * share,
            )
            first = layer + 1

    def _on_event(
        self,
        transfer: Transfer,
        layers: range,
        event: Event,
        error: BaseException | None,
    ) -> None:
        """Take note that an event of a copy is done; an ``error`` of its device fails it all."""
        if transfer.state == "ended":
            return
        if error is not None:
            self._end_submitted(transfer, CopyError(0, str(error)))
        else:
            self._layers_done(transfer, layers, event)

    def _layers_done(self, transfer: Transfer, layers: range, event: Event) -> None:
        finished_seconds: float | None = getattr(event, "finished_seconds", None)
        counter, plan = transfer.counter, transfer.plan
        arrived = dict.fromkeys(layers, finished_seconds)
        if self._checksums is not None and plan.group_route == ("all", ONLOAD):
            transfer.unproven |= arrived
            if len(transfer.unproven) < counter.num_layers:
                return
            arrived = transfer.unproven
            copy_failure = counter.failure
            failure = self._checksums.verify(plan, copy_failure)
            if failure is not None:
                self.corrupt += failure is not copy_failure
                self._end_submitted(transfer, failure, finished_seconds)
                return
        for layer, at in arrived.items():
            counter.mark_layer_done(layer, at)
        if counter.all_arrived:
            self._end_submitted(transfer, counter.failure, finished_seconds)

    def _end_submitted(
        self,
        transfer: Transfer,
        failure: CopyError | None,
        finished_seconds: float | None = None,
    ) -> None:
        """End a transfer within this callback; the next one starts before the report is sent."""
        transfer.state = "ended"
        lane = self._lane_of(transfer)
        if lane.submitted.pop(transfer.plan.transfer_id, None) is not None and failure is None:
            lane.note_end(
                transfer, time.monotonic() if finished_seconds is None else finished_seconds
            )
        try:
            self._pump(lane)
        finally:
            self._end(transfer, "done" if failure is None else "failed", failure)

    def _end_soon(self, transfer: Transfer, outcome: Outcome, failure: CopyError | None) -> None:
        transfer.state = "ended"
        self._poller.soon(partial(self._end, transfer, outcome, failure))

    def _end(self, transfer: Transfer, outcome: Outcome, failure: CopyError | None) -> None:
        transfer_id, lane = transfer.plan.transfer_id, self._lane_of(transfer)
        transfer.counter.finish(failure)
        lane.submitted.pop(transfer_id, None)
        if transfer.on_end is not None:
            transfer.on_end(failure)
        elif not transfer.reported:
            self._report(transfer_id, outcome, failure)
        self._on_end(transfer_id)
        del self._transfers[transfer_id]
        lane.outcomes[outcome] += 1
        if outcome != "cancelled":
            lane.queue_seconds += transfer.started_at - transfer.created_at
        self._pump(lane)

    def _report(self, transfer_id: int, outcome: Outcome, failure: CopyError | None) -> None:
        report = TransferReport(
            transfer_id=transfer_id,
            outcome=outcome,
            first_bad_block=failure.first_bad_block if failure is not None else 0,
            reason=failure.reason if failure is not None else "",
        )
        deliver(self._on_report, report)


def _ignore_report(report: TransferReport) -> None:
    """Take the place of ``on_report`` before ``open``."""
