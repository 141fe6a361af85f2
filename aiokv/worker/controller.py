"""CacheController: executes transfer plans and reports how they ended. It never decides.

    submit ─► held (step open) ─► queue by priority ─► at most 2 in the device ─► report

Blocks named by a plan belong to it until its report (I3); a report is sent when the device's events
have proven the bytes (I4), exactly once, from a callback of the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ClosedError, UsageError
from aiokv.plan import StatePlan, TransferReport
from aiokv.worker.blocks import clone_blocks, clone_slots
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import Lane, WorkerStatistics
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.memory import WorkerMemory
from aiokv.worker.transfers import StepGate, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.plan import Direction, Outcome, Plan
    from aiokv.types import Tier
    from aiokv.worker.base import Cancelled
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Copy, Device, Event
    from aiokv.worker.poller import EventPoller
    from aiokv.worker.regions import Regions

_CANCELLED: Final = CopyError(0, "cancelled before it was submitted")
SLOTS: Final = 2  # submitted at once per direction: one moves, one is ready behind it


class CacheController:
    """Owns the host memory and the device; made and used on one loop.

    Args:
        regions: the device tensors, borrowed until ``aclose()`` has returned.
        host_blocks: capacity of the host tier; its memory is reserved here.
        device: attached here, closed by ``aclose()``.
        poller: of the same loop; stays the caller's.
        on_report: gets exactly one report a plan, in a callback of the loop, never inside a call.
        on_step: called when a closed step is over, or with the error of its event.
        checksums: proves each onload after its last byte; layers are announced only then.
    """

    def __init__(
        self,
        *,
        regions: Regions,
        host_blocks: int,
        device: Device,
        poller: EventPoller,
        on_report: Callable[[TransferReport], None],
        on_step: Callable[[int, BaseException | None], None] = lambda step, error: None,
        checksums: Checksums | None = None,
    ) -> None:
        self._checksums = checksums
        self._loop = asyncio.get_running_loop()
        self._device = device
        self._poller = poller
        self._on_report = on_report
        self._on_step = on_step
        self._gate = StepGate()
        directions: tuple[Direction, ...] = ("onload", "offload", "state")
        self._lanes = {direction: Lane(direction) for direction in directions}
        self._transfers: dict[int, Transfer] = {}
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._settling: list[tuple[set[int], asyncio.Future[None]]] = []
        self._closing = False
        self._closed = False
        self.memory = WorkerMemory(regions, host_blocks, device, checksums)

    @property
    def num_layers(self) -> int:
        return self.memory.regions.num_layers

    @property
    def device_blocks(self) -> int:
        return self.memory.device_blocks

    @property
    def computes_in_stream(self) -> bool:
        return self._device.computes_in_stream

    @property
    def failure(self) -> BaseException | None:
        """The device's, after which no transfer can succeed."""
        failure: BaseException | None = getattr(self._device, "failure", None)
        return failure

    @property
    def silent_ranks(self) -> list[int]:
        """None: there is nobody to ask."""
        return []

    # --- plans ------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> LayerDoneCounter:
        """Take a plan; its blocks or slots are the transfer's until its report.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a destination named twice, or
                a transfer id that is in use. Nothing changed.
            ClosedError: the controller is closing.
        """
        if self._closing:
            raise ClosedError("the cache controller is closing")
        if self.memory.asleep:
            raise UsageError(f"the tiers {sorted(self.memory.asleep)} are asleep")
        if plan.transfer_id in self._transfers:
            raise UsageError(f"transfer {plan.transfer_id} is under way already")
        num_bytes = self.memory.check(plan)
        counter = LayerDoneCounter(
            self.memory.regions.num_layers,
            transfer_id=plan.transfer_id,
            direction=plan.direction,
            expedite=lambda: self._expedite(plan.transfer_id),
        )
        transfer = Transfer(plan, counter, num_bytes)
        self._transfers[plan.transfer_id] = transfer
        if self._gate.is_open(plan.after_step):
            self._gate.hold(transfer)
        else:
            lane = self._lanes[plan.direction]
            lane.queue.push(transfer)
            self._pump(lane)
        return counter

    def cancel(self, transfer_id: int) -> Cancelled:
        """Take back a plan that the device does not have yet.

        Returns:
            ``"at once"``: its waiters have their error, and no report follows. ``"too late"``: the
            device has it, and it is reported as it ends; or the id is unknown, since the report has
            crossed the cancellation.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or not self._take_back(transfer):
            return "too late"
        self._finish(transfer, "cancelled", _CANCELLED)
        return "at once"

    def _take_back(self, transfer: Transfer) -> bool:
        if transfer.state == "held":
            self._gate.remove(transfer)
        elif transfer.state == "queued":
            self._lanes[transfer.plan.direction].queue.remove(transfer)
        else:
            return False
        return True

    def check_event(self, event: Event | None) -> None:
        """Raise unless ``close_step`` can take the event. Cheap; changes nothing.

        Raises:
            UsageError: ``event`` is no event, one of another device, or was never recorded.
        """
        if event is not None:
            self._device.check_event(event)

    def close_step(self, step: int, event: Event | None) -> None:
        """Steps up to ``step`` are submitted; plans after them start when ``event`` is done.

        Args:
            step: greater than any closed before.
            event: recorded behind the step's work; None when that has finished.

        Raises:
            UsageError: the step was closed before, or ``check_event`` refuses the event. The step
                stays open; nothing changed.
        """
        self.check_event(event)
        freed = self._gate.close(step, event)
        for transfer in freed:
            self._lanes[transfer.plan.direction].queue.push(transfer)
        for lane in self._lanes.values():
            self._pump(lane)
        if event is None or event.done:
            self._on_step(step, None)
        else:
            self._poller.watch(event, "steps", lambda error: self._step_over(step, error))

    def _step_over(self, step: int, error: BaseException | None) -> None:
        if not isinstance(error, ClosedError):  # the poller's, at its end
            self._on_step(step, error)

    def clone(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Copy blocks within the device; see :func:`clone_blocks`."""
        clone_blocks(self.memory.regions, sources, targets, stream)

    def clone_slots(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], stream: Any = None
    ) -> None:
        """Copy slots of recurrent state within the device; see :func:`clone_slots`."""
        clone_slots(self.memory.regions, sources, targets, stream)

    # --- sleep ------------------------------------------------------------------------------

    async def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the memory of these tiers; see :meth:`WorkerMemory.sleep`. Does not suspend.

        Nothing can be submitted until all tiers are awake.

        Raises:
            UsageError: a transfer is under way. Nothing changed.
        """
        if self._transfers:
            raise UsageError(f"{len(self._transfers)} transfers are under way")
        self.memory.sleep(tiers)

    async def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Take memory again; see :meth:`WorkerMemory.wake_up`. Does not suspend."""
        self.memory.wake_up(tiers, regions)

    # --- end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every plan submitted so far, and since, has been reported.

        A plan whose step is open is waited for too: somebody else has to close the step.

        Cancellation: stops waiting; the transfers go on.
        """
        while self._transfers:
            idle: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters.append(idle)
            try:
                await idle
            finally:
                if idle in self._idle_waiters:
                    self._idle_waiters.remove(idle)

    async def settle(self) -> None:
        """As drain(), but only for the plans submitted so far: it ends however busy it is."""
        if not self._transfers:
            return
        entry = (set(self._transfers), self._loop.create_future())
        self._settling.append(entry)
        try:
            await entry[1]
        finally:
            self._settling.remove(entry)

    async def abandon(self) -> None:
        """Cancel what waits, and report it so; wait for what moves.

        Cancellation: what waited is cancelled; the rest goes on.
        """
        for transfer in list(self._transfers.values()):
            if self._take_back(transfer):
                self._loop.call_soon(self._end, transfer, "cancelled", _CANCELLED)
        await self.drain()

    async def aclose(self) -> None:
        """Cancel what waits, drain what moves, join the device's threads, free the arena.

        Memory is never freed under a copy. Idempotent; after a cancellation call it again.
        """
        self._closing = True
        await self.abandon()
        if not self._closed:
            self._closed = True
            self.memory.close()

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(
            held=len(self._gate),
            onload=self._lanes["onload"].statistics(),
            offload=self._lanes["offload"].statistics(),
            state=self._lanes["state"].statistics(),
        )

    # --- the life of a transfer -------------------------------------------------------------

    def _pump(self, lane: Lane) -> None:
        while lane.submitted < SLOTS:
            transfer = lane.queue.pop()
            if transfer is None:
                return
            self._start(lane, transfer)

    def _expedite(self, transfer_id: int) -> bool:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state == "queued":
            lane = self._lanes[transfer.plan.direction]
            lane.queue.remove(transfer)
            self._start(lane, transfer)
        return transfer is None or transfer.state != "held"

    def _start(self, lane: Lane, transfer: Transfer) -> None:
        plan = transfer.plan
        transfer.state = "submitted"
        transfer.started_at = time.monotonic()
        lane.submitted += 1
        try:
            copy = self._move(plan, self._gate.event_for(plan.after_step))
        except Exception as error:  # told by the report, like any other failure of the copy
            self._loop.call_soon(self._end_submitted, transfer, CopyError(0, str(error)))
            transfer.counter.refuse(CopyError(0, str(error)))
            return
        transfer.counter.attach(copy)
        if not copy.layer_events:
            self._loop.call_soon(self._end_submitted, transfer, None)
            return
        self._watch(lane, transfer, copy.layer_events)

    def _move(self, plan: Plan, after: Event | None) -> Copy:
        if isinstance(plan, StatePlan):
            return self._device.move_state(plan.source_ids, plan.target_ids, after)
        if self._checksums is not None:
            self._checksums.begin(plan)
        move = self._device.onload if plan.is_onload else self._device.offload
        return move(plan.host_ids, plan.device_ids, after)

    def _watch(self, lane: Lane, transfer: Transfer, events: Sequence[Event]) -> None:
        """Watch each distinct event; layers that share one arrive together."""
        seconds = lane.expected_seconds(transfer)
        in_order = self._device.in_order
        first = 0
        for layer, event in enumerate(events):
            if layer + 1 < len(events) and events[layer + 1] is event:
                continue
            key: Hashable = lane.direction if in_order else (lane.direction, id(event))
            layers = range(first, layer + 1)
            share = (len(layers) if in_order else layer + 1) / len(events)
            self._poller.watch(
                event,
                key,
                _Marker(self, transfer, layers, event),
                None if seconds is None else seconds * share,
            )
            first = layer + 1

    def _layers_done(self, transfer: Transfer, layers: range, event: Event) -> None:
        finished_seconds: float | None = getattr(event, "finished_seconds", None)
        arrived = [(layer, finished_seconds) for layer in layers]
        plan = transfer.plan
        if self._checksums is not None and not isinstance(plan, StatePlan) and plan.is_onload:
            transfer.unproven += arrived
            if len(transfer.unproven) < transfer.counter.num_layers:
                return
            arrived = transfer.unproven
            failure = self._checksums.prove(plan, transfer.counter.failure)
            if failure is not None:
                self._end_submitted(transfer, failure, finished_seconds)
                return
        ended = False
        for layer, at in arrived:
            ended = transfer.counter.mark_layer_done(layer, at)
        if ended:
            self._end_submitted(transfer, transfer.counter.failure, finished_seconds)

    def _lost(self, transfer: Transfer, error: BaseException) -> None:
        """The device cannot tell any more: nothing of the transfer is proven."""
        if transfer.state == "submitted":
            self._end_submitted(transfer, CopyError(0, str(error)))

    def _end_submitted(
        self,
        transfer: Transfer,
        failure: CopyError | None,
        finished_seconds: float | None = None,
    ) -> None:
        transfer.state = "ended"
        lane = self._lanes[transfer.plan.direction]
        lane.submitted -= 1
        if failure is None:
            lane.note_end(
                transfer, time.monotonic() if finished_seconds is None else finished_seconds
            )
        self._pump(lane)
        self._end(transfer, "done" if failure is None else "failed", failure)

    def _end(self, transfer: Transfer, outcome: Outcome, failure: CopyError | None) -> None:
        plan = transfer.plan
        report = TransferReport(
            transfer_id=plan.transfer_id,
            outcome=outcome,
            first_bad_block=failure.first_bad_block if failure is not None else 0,
            reason=failure.reason if failure is not None else "",
        )
        self._finish(transfer, outcome, failure, report)

    def _finish(
        self,
        transfer: Transfer,
        outcome: Outcome,
        failure: CopyError | None,
        report: TransferReport | None = None,
    ) -> None:
        """The transfer is over; ``report`` goes to the scheduler, unless that knows already."""
        plan = transfer.plan
        transfer.counter.finish(failure)
        del self._transfers[plan.transfer_id]
        self._lanes[plan.direction].outcomes[outcome] += 1
        try:
            if report is not None:
                self._on_report(report)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"aiokv: the report of {plan.transfer_id} raised", "exception": error}
            )
        for waited_for, settled in self._settling:
            waited_for.discard(plan.transfer_id)
            if not waited_for and not settled.done():
                settled.set_result(None)
        if not self._transfers:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)


class _Marker:
    """What the poller calls when an event of a transfer is done."""

    __slots__ = ("_controller", "_event", "_layers", "_transfer")

    def __init__(
        self, controller: CacheController, transfer: Transfer, layers: range, event: Event
    ) -> None:
        self._controller = controller
        self._transfer = transfer
        self._layers = layers
        self._event = event

    def __call__(self, error: BaseException | None) -> None:
        if error is not None:
            self._controller._lost(self._transfer, error)
        else:
            self._controller._layers_done(self._transfer, self._layers, self._event)
