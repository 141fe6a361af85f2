"""CacheController: executes transfer plans and reports how they ended. It never decides.

    submit ─► held (step open) ─► queue by priority ─► at most 2 in the device ─► report

Blocks named by a plan belong to it until its report (I3); a report is sent when the device's events
have proven the bytes (I4), from a callback of the loop.

Each change of a transfer is a method that may be called again: when an interrupt (Ctrl-C) ends it,
the poller calls it again, and it goes on from where it was. See :class:`EventPoller`.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ClosedError, UsageError
from aiokv.plan import StatePlan, TransferReport
from aiokv.worker.blocks import clone_blocks, clone_slots
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import Lane, WorkerStatistics
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.memory import WorkerMemory
from aiokv.worker.transfers import StepGate, Transfer, is_done

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
_WAITING: Final = ("new", "held", "queued")  # states of a plan that was not given to the device
SLOTS: Final = 2  # submitted at once per direction: one moves, one is ready behind it


class CacheController:
    """Owns the host memory and the device; made and used on one loop.

    Args:
        regions: the device tensors, borrowed until ``aclose()`` has returned.
        host_blocks: capacity of the host tier; its memory is reserved here.
        device: attached here, closed by ``aclose()``.
        poller: of the same loop; stays the caller's.
        on_report: gets exactly one report per plan, in a callback of the loop, never inside a call.
            Idempotent: it gets the report again when an interrupt kept it from returning.
        on_step: called when a closed step is over, or with the error of its event. Idempotent.
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
        """Empty: there are no ranks."""
        return []

    # --- plans ------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> LayerDoneCounter:
        """Take a plan; its blocks or slots are the transfer's until its report.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a destination named twice, or
                a transfer id that is in use. Nothing changed.
            ClosedError: the controller is closing.
        """
        if self._closing or self._poller.closed:
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
        self._poller.surely(partial(self._place, transfer))
        return counter

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that the device does not have yet.

        Returns:
            ``"at once"``: no report follows, ``gpu_wait`` raises from now on, and coroutines that
            wait get their error in the next pass of the loop. ``"too late"``: the device has it,
            and its end will be reported; or the id is unknown, because the report came before
            the cancellation.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state not in _WAITING:
            return "too late"
        transfer.reported = True  # the caller knows that it has ended
        self._poller.surely(partial(self._take_back, transfer))
        return "at once"

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Submit a plan that still waits as if it had been given with this priority.

        Without effect on a plan that the device has, on unknown ids, and when ``priority`` is not
        lower than the plan's.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or priority >= transfer.priority:
            return
        transfer.priority = priority
        if transfer.state == "queued":
            self._lane_of(transfer).queue.raise_priority(transfer)

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
        if self._poller.closed:
            raise ClosedError("the cache controller is closed")
        self._gate.close(step, event)
        self._poller.surely(partial(self._follow_step, step, event))

    def _follow_step(self, step: int, event: Event | None) -> None:
        for transfer in self._gate.free():
            if transfer.state == "held":
                self._lane_of(transfer).queue.push(transfer)
        for lane in self._lanes.values():
            self._pump(lane)
        if is_done(event):
            self._on_step(step, None)
        elif event is not None:
            self._poller.watch(event, "steps", partial(self._step_over, step))

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

        A plan whose step is open is waited for too: another task has to close the step.

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
            if transfer.state in _WAITING:
                self._poller.surely(partial(self._take_back, transfer))
        await self.drain()

    async def aclose(self) -> None:
        """Cancel what waits, drain what moves, join the device's threads, free the arena.

        Memory is never freed under a copy. Idempotent; after a cancellation call it again.
        """
        self._closing = True
        await self.abandon()
        if not self._closed:
            self.memory.close()
            self._closed = True

    def close_without_loop(self) -> None:
        """As aclose(), when the loop is closed: finish what the device has; nothing is reported."""
        self._closing = True
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

    # --- states of a transfer; every method may be called again ---------------------------

    def _lane_of(self, transfer: Transfer) -> Lane:
        return self._lanes[transfer.plan.direction]

    def _place(self, transfer: Transfer) -> None:
        """Hold or queue a new transfer."""
        if transfer.state == "new" and self._gate.is_open(transfer.plan.after_step):
            self._gate.hold(transfer)
        elif transfer.state == "new":
            self._lane_of(transfer).queue.push(transfer)
        self._pump(self._lane_of(transfer))

    def _take_back(self, transfer: Transfer) -> None:
        transfer.state = "ended"
        self._gate.remove(transfer)
        self._lane_of(transfer).queue.remove(transfer)
        transfer.counter.refuse(_CANCELLED)
        self._end_soon(transfer, "cancelled", _CANCELLED)

    def _pump(self, lane: Lane) -> None:
        while len(lane.submitted) < SLOTS and (transfer := lane.queue.first()) is not None:
            self._start(lane, transfer)

    def _expedite(self, transfer_id: int) -> bool:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return True
        if transfer.state == "queued":
            self._start(self._lane_of(transfer), transfer)
        return transfer.state != "held"

    def _start(self, lane: Lane, transfer: Transfer) -> None:
        self._poller.surely(partial(self._submit, lane, transfer))

    def _submit(self, lane: Lane, transfer: Transfer) -> None:
        """Give a queued transfer to the device.

        When an interrupt has lost the device's answer, the transfer is submitted once more. Of two
        equal copies, the second ends last (``Device.in_order``), and only its end counts.
        """
        if transfer.ending is not None:
            self._end_soon(transfer, *transfer.ending)
            return
        lane.submitted[transfer.plan.transfer_id] = transfer
        lane.queue.remove(transfer)
        transfer.state = "submitted"
        transfer.started_at = time.monotonic()
        try:
            if transfer.copy is None:
                transfer.copy = self._move(transfer.plan)
            events = transfer.copy.layer_events
        except Exception as error:  # told by the report, like any other failure of the copy
            failure = CopyError(0, str(error) or type(error).__name__)
            transfer.counter.refuse(failure)
            self._end_soon(transfer, "failed", failure)
            return
        transfer.counter.attach(transfer.copy)
        if not events:
            self._end_soon(transfer, "done", None)
        elif not transfer.watched:
            self._watch(lane, transfer, transfer.copy, events)
            transfer.watched = True

    def _move(self, plan: Plan) -> Copy:
        after = self._gate.event_for(plan.after_step)
        if isinstance(plan, StatePlan):
            return self._device.move_state(plan.source_ids, plan.target_ids, after)
        if self._checksums is not None:
            self._checksums.begin(plan)
        move = self._device.onload if plan.is_onload else self._device.offload
        return move(plan.host_ids, plan.device_ids, after)

    def _watch(self, lane: Lane, transfer: Transfer, copy: Copy, events: Sequence[Event]) -> None:
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
                _Marker(self, transfer, copy, layers, event),
                None if seconds is None else seconds * share,
            )
            first = layer + 1

    def _layers_done(self, transfer: Transfer, layers: range, event: Event) -> None:
        finished_seconds: float | None = getattr(event, "finished_seconds", None)
        counter, plan = transfer.counter, transfer.plan
        arrived = dict.fromkeys(layers, finished_seconds)
        if self._checksums is not None and not isinstance(plan, StatePlan) and plan.is_onload:
            transfer.unproven |= arrived
            if len(transfer.unproven) < counter.num_layers:
                return
            arrived = transfer.unproven
            failure = self._checksums.prove(plan, counter.failure)
            if failure is not None:
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
        """End it within this callback; the next one starts before the report is sent."""
        transfer.ending = ("done" if failure is None else "failed", failure)
        transfer.state = "ended"
        lane = self._lane_of(transfer)
        if lane.submitted.pop(transfer.plan.transfer_id, None) is not None and failure is None:
            lane.note_end(
                transfer, time.monotonic() if finished_seconds is None else finished_seconds
            )
        try:
            self._pump(lane)
        finally:
            self._end(transfer)

    def _end_soon(self, transfer: Transfer, outcome: Outcome, failure: CopyError | None) -> None:
        transfer.ending = (outcome, failure)
        transfer.state = "ended"
        self._poller.soon(partial(self._end, transfer))

    def _end(self, transfer: Transfer) -> None:
        transfer_id, lane = transfer.plan.transfer_id, self._lane_of(transfer)
        if transfer.ending is None or self._transfers.get(transfer_id) is not transfer:
            return
        outcome, failure = transfer.ending
        transfer.counter.finish(failure)
        lane.submitted.pop(transfer_id, None)
        if not transfer.reported:
            self._report(transfer_id, outcome, failure)
            transfer.reported = True
        self._wake(transfer_id)
        del self._transfers[transfer_id]
        lane.outcomes[outcome] += 1
        self._pump(lane)

    def _report(self, transfer_id: int, outcome: Outcome, failure: CopyError | None) -> None:
        report = TransferReport(
            transfer_id=transfer_id,
            outcome=outcome,
            first_bad_block=failure.first_bad_block if failure is not None else 0,
            reason=failure.reason if failure is not None else "",
        )
        try:
            self._on_report(report)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"aiokv: the report of {transfer_id} raised", "exception": error}
            )

    def _wake(self, transfer_id: int) -> None:
        """Resume settle() and drain(), as far as they wait for this transfer only."""
        for waited_for, settled in self._settling:
            waited_for.discard(transfer_id)
            if not waited_for and not settled.done():
                settled.set_result(None)
        if len(self._transfers) == 1:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)


class _Marker:
    """Callback of the poller when an event of a transfer is done."""

    __slots__ = ("_controller", "_copy", "_event", "_layers", "_transfer")

    def __init__(
        self,
        controller: CacheController,
        transfer: Transfer,
        copy: Copy,
        layers: range,
        event: Event,
    ) -> None:
        self._controller = controller
        self._transfer = transfer
        self._copy = copy
        self._layers = layers
        self._event = event

    def __call__(self, error: BaseException | None) -> None:
        """End a transfer with an ``error`` of its device: none of its bytes are proven."""
        transfer = self._transfer
        if transfer.copy is not self._copy:
            return
        if transfer.state == "ended":
            self._controller._end(transfer)
        elif error is not None:
            self._controller._end_submitted(transfer, CopyError(0, str(error)))
        else:
            self._controller._layers_done(transfer, self._layers, self._event)
