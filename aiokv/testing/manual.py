"""ManualDevice: real bytes, but every copy ends only when the test says so, in any order.

copy = device.onloads[0]
copy.complete(2)          # layer 2 moves its bytes; others are still on their way
copy.fail(1, block=3)     # blocks from index 3 on of layer 1 are not written
copy.complete_all()
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from aiokv.errors import DeviceError, UsageError
from aiokv.worker.device.base import CopyError, check_event_type
from aiokv.worker.device.cpu import block_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import _native
    from aiokv.plan import Direction
    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event
    from aiokv.worker.regions import Regions


class ManualEvent:
    """An event that ``complete()`` makes done. Thread-safe.

    Attributes:
        query_error: raised by ``done`` while set, as a broken device would.
        queries: times that ``done`` was read.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self.finished_seconds: float | None = None
        self.query_error: Exception | None = None
        self.queries = 0

    @property
    def done(self) -> bool:
        self.queries += 1
        if self.query_error is not None:
            raise self.query_error
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()

    def complete(self) -> None:
        self.finished_seconds = time.monotonic()
        self._done.set()


class ManualStream:
    """Records what it was told to wait for."""

    def __init__(self) -> None:
        self.waits: list[tuple[ManualCopy, int]] = []


class ManualCopy:
    """A copy in the hands of the test.

    Attributes:
        host_ids: copied from the plan.
        device_ids: copied from the plan.
        after: what the first byte has to wait for; completing a layer earlier is a mistake of the
            test and raises.
    """

    def __init__(
        self,
        device: ManualDevice,
        direction: Direction,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: Event | None,
    ) -> None:
        self.direction: Direction = direction
        self.host_ids = host_ids.copy()
        self.device_ids = device_ids.copy()
        self.after = after
        self._device = device
        self._events = [ManualEvent() for _ in range(device.regions.num_layers)]
        self._submitted = [threading.Event() for _ in self._events]
        self._error: CopyError | None = None
        for layer, submitted in enumerate(self._submitted):
            if layer not in device.delayed_layers:
                submitted.set()

    # --- the test's side --------------------------------------------------------------------

    def complete(self, layer: int) -> None:
        """Move the bytes of one layer and end it.

        Raises:
            UsageError: ``after`` is not done yet, or the layer has ended.
        """
        self._move(layer, len(self.host_ids))
        self._end(layer)

    def complete_all(self) -> None:
        """complete() all layers that have not ended, ascending."""
        for layer in self.pending_layers:
            self.complete(layer)

    def fail(self, layer: int, *, block: int = 0, reason: str = "failed by the test") -> None:
        """End one layer with blocks from index ``block`` on not written; the rest of the copy is
        still to be completed or failed."""
        self._move(layer, block)
        if self._error is None or block < self._error.first_bad_block:
            self._error = CopyError(block, reason)
        self._end(layer)

    def fail_all(self, *, block: int = 0, reason: str = "failed by the test") -> None:
        """fail() all layers that have not ended."""
        for layer in self.pending_layers:
            self.fail(layer, block=block, reason=reason)

    def submit(self, layer: int) -> None:
        """Let a layer of ``device.delayed_layers`` reach its stream."""
        self._submitted[layer].set()

    @property
    def pending_layers(self) -> list[int]:
        return [i for i, event in enumerate(self._events) if event.finished_seconds is None]

    def _move(self, layer: int, num_blocks: int) -> None:
        self._check_turn(layer)
        host_ids, device_ids = self.host_ids[:num_blocks], self.device_ids[:num_blocks]
        for piece in self._device.regions.layer_pieces(layer):
            begin = piece.host_offset_bytes
            host = self._device.arena.blocks[:, begin : begin + piece.block_bytes]
            if self.direction == "onload":
                piece.view()[device_ids] = host[host_ids]
            else:
                host[host_ids] = piece.view()[device_ids]

    def _check_turn(self, layer: int) -> None:
        if self.after is not None and not self.after.done:
            raise UsageError("the step that this copy comes after is not done")
        if layer not in self.pending_layers:
            raise UsageError(f"layer {layer} has ended already")

    def _end(self, layer: int) -> None:
        self._submitted[layer].set()
        self._events[layer].complete()
        self._device.ended(self)

    # --- the controller's side --------------------------------------------------------------

    @property
    def layer_events(self) -> Sequence[ManualEvent]:
        return self._events

    def wait_submitted(self, layer: int) -> None:
        self._submitted[layer].wait()

    def stream_wait(self, layer: int, stream: Any) -> None:
        if not self._submitted[layer].is_set():
            raise UsageError(f"layer {layer} is not submitted: the stream would not wait for it")
        stream.waits.append((self, layer))

    def error(self) -> CopyError | None:
        return self._error


class ManualStateCopy(ManualCopy):
    """Slots of recurrent state: ``host_ids`` are the sources, -1 for zeros."""

    def _move(self, layer: int, num_blocks: int) -> None:
        self._check_turn(layer)
        for piece in self._device.regions.state_pieces:
            if piece.layer != layer:
                continue
            view = piece.view()
            for source, target in zip(
                self.host_ids[:num_blocks], self.device_ids[:num_blocks], strict=True
            ):
                view[target] = 0 if source < 0 else view[source]


class ManualDevice:
    """A cpu device whose copies wait for the test.

    Attributes:
        onloads: copies that have not ended, in the order of submission.
        offloads: likewise.
        state_moves: likewise.
        delayed_layers: layers that new copies submit only on ``copy.submit(layer)``.
        refuse: raised by the next submission, then forgotten.
    """

    name = "manual"
    in_order = False
    computes_in_stream = False

    def __init__(self) -> None:
        self.onloads: list[ManualCopy] = []
        self.offloads: list[ManualCopy] = []
        self.state_moves: list[ManualCopy] = []
        self.delayed_layers: frozenset[int] = frozenset()
        self.refuse: DeviceError | None = None
        self.closed = False
        self._memory: tuple[Regions, HostArena, _native.BlockMap] | None = None

    @property
    def regions(self) -> Regions:
        return self._attached[0]

    @property
    def arena(self) -> HostArena:
        return self._attached[1]

    @property
    def copies(self) -> list[ManualCopy]:
        """All copies that have not ended, onloads first."""
        return [*self.onloads, *self.offloads, *self.state_moves]

    def attach(self, regions: Regions, arena: HostArena) -> None:
        self._memory = (regions, arena, block_map(regions, arena))

    def detach(self, *, keep_host: bool) -> None:
        """Raises:
        UsageError: a copy is in flight.
        """
        if self.copies:
            raise UsageError(f"{len(self.copies)} copies are in flight")
        self._memory = None

    def onload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> ManualCopy:
        self._attached[2].check_ids(host_ids, device_ids, onload=True)
        return self._start(ManualCopy(self, "onload", host_ids, device_ids, after))

    def offload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> ManualCopy:
        self._attached[2].check_ids(host_ids, device_ids, onload=False)
        return self._start(ManualCopy(self, "offload", host_ids, device_ids, after))

    def move_state(
        self, source_slots: NDArray[np.int32], target_slots: NDArray[np.int32], after: Event | None
    ) -> ManualCopy:
        return self._start(ManualStateCopy(self, "state", source_slots, target_slots, after))

    def check_event(self, event: Event) -> None:
        """Raise unless the event has ``done`` and ``synchronize()``."""
        check_event_type(event)

    def complete_all(self) -> None:
        """Complete everything that is in the device now, in the order of submission."""
        for copy in self.copies:
            copy.complete_all()

    def close(self) -> None:
        """Raises:
        UsageError: a copy is in flight, whose memory would go away under it.
        """
        if self.copies:
            raise UsageError(f"{len(self.copies)} copies are in flight")
        self.closed = True

    def ended(self, copy: ManualCopy) -> None:
        """A layer of the copy ended; forget the copy after its last one."""
        if not copy.pending_layers:
            self._copies_of(copy.direction).remove(copy)

    def _copies_of(self, direction: Direction) -> list[ManualCopy]:
        lists = {"onload": self.onloads, "offload": self.offloads, "state": self.state_moves}
        return lists[direction]

    @property
    def _attached(self) -> tuple[Regions, HostArena, _native.BlockMap]:
        if self._memory is None:
            raise UsageError("the manual device has no memory: attach() it first")
        return self._memory

    def _start(self, copy: ManualCopy) -> ManualCopy:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        if copy.layer_events:
            self._copies_of(copy.direction).append(copy)
        return copy
