"""The cpu device: "device" memory is plain memory, streams are native threads that really copy.

Not a mock: events are real, both directions run at once, and a copy is under way when the call
that started it has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv import _native
from aiokv.checks import Unique
from aiokv.errors import LayoutError, UsageError
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event
    from aiokv.worker.regions import Regions

CpuEvent = _native.Event
CpuStream = _native.Stream


class CpuCopy:
    """One native copy job. Its layers are submitted as soon as it exists."""

    def __init__(self, job: _native.CopyJob, num_layers: int) -> None:
        self._job = job
        events = job.layer_events
        # an offload is one piece of work for all layers
        self._events = events if len(events) == num_layers else events * num_layers

    @property
    def layer_events(self) -> Sequence[Event]:
        return self._events

    def wait_submitted(self, layer: int) -> None:
        """Nothing to wait for: the job is on its stream."""

    def stream_wait(self, layer: int, stream: CpuStream) -> None:
        """Make a :class:`CpuStream` wait for the layer."""
        stream.wait_event(self._events[layer])

    def error(self) -> CopyError | None:
        error = self._job.error
        return None if error is None else CopyError(*error)


class CpuDevice(Unique):
    """Copies with one native thread a direction, GIL released."""

    name = "cpu"
    in_order = True
    computes_in_stream = False

    def __init__(self) -> None:
        self._onloads: CpuStream | None = None
        self._offloads: CpuStream | None = None
        self._states: CpuStream | None = None  # only for regions that have state
        self._map: _native.BlockMap | None = None
        self._memory: tuple[Regions, HostArena] | None = None
        self._num_layers = 0

    def attach(self, regions: Regions, arena: HostArena) -> None:
        if elsewhere := regions.devices - {"cpu"}:
            raise LayoutError(f"the cpu device cannot copy tensors on {', '.join(elsewhere)}")
        self._map = block_map(regions, arena)
        self._onloads = CpuStream("aiokv-onload")
        self._offloads = CpuStream("aiokv-offload")
        self._memory = (regions, arena)
        self._num_layers = regions.num_layers
        if regions.state_pieces:
            self._states = CpuStream("aiokv-state")

    def onload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> CpuCopy:
        return self._copy(self._onloads, host_ids, device_ids, after, onload=True)

    def offload(
        self, host_ids: NDArray[np.int32], device_ids: NDArray[np.int32], after: Event | None
    ) -> CpuCopy:
        return self._copy(self._offloads, host_ids, device_ids, after, onload=False)

    def move_state(
        self, source_slots: NDArray[np.int32], target_slots: NDArray[np.int32], after: Event | None
    ) -> CpuCopy:
        stream = self._states or self._onloads  # without tensors no bytes move
        if self._memory is None or stream is None:
            raise UsageError("the cpu device has no memory: attach() it first")
        regions, _ = self._memory
        job = _native.move_slots(
            stream,
            [
                (piece.pointer, piece.stride_bytes, piece.block_bytes)
                for piece in regions.state_pieces
            ],
            2**31 - 1 if regions.num_state_slots is None else regions.num_state_slots,
            source_slots,
            target_slots,
            after=_cpu_event(after),
            owner=self._memory,
        )
        return CpuCopy(job, self._num_layers)

    def check_event(self, event: Event) -> None:
        """Raise unless the event is a :class:`CpuEvent` that was recorded or begun."""
        cpu_event = _cpu_event(event)
        if cpu_event is not None and not cpu_event.recorded:
            raise UsageError(
                "the event was never recorded, so nothing can wait for it",
                hint="call CpuEvent.begin() or CpuStream.record(event) before the step is closed",
            )

    def detach(self, *, keep_host: bool) -> None:
        """The streams go, too: they keep alive what they have copied to and from."""
        self.close()

    def close(self) -> None:
        """Finish what is submitted, join the threads, let go of the memory. Idempotent."""
        for stream in (self._onloads, self._offloads, self._states):
            if stream is not None:
                stream.close()
        self._onloads = self._offloads = self._states = None
        self._map = None
        self._memory = None

    def _copy(
        self,
        stream: CpuStream | None,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: Event | None,
        *,
        onload: bool,
    ) -> CpuCopy:
        if self._map is None or stream is None:
            raise UsageError("the cpu device has no memory: attach() it first")
        job = _native.copy_blocks(
            stream,
            self._map,
            host_ids,
            device_ids,
            onload=onload,
            after=_cpu_event(after),
            owner=self._memory,
        )
        return CpuCopy(job, self._num_layers)


def _cpu_event(after: Event | None) -> CpuEvent | None:
    if after is not None and not isinstance(after, CpuEvent):
        raise UsageError(
            f"the cpu device cannot wait for a {type(after).__name__}",
            hint="close steps with a CpuEvent recorded on a CpuStream, or with None",
        )
    return after


def block_map(regions: Regions, arena: HostArena) -> _native.BlockMap:
    """The native view of both tiers' memory, which it borrows."""
    pieces = [
        (
            piece.layer,
            piece.pointer,
            piece.stride_bytes,
            piece.block_bytes,
            piece.host_offset_bytes,
        )
        for piece in regions.pieces()
    ]
    return _native.BlockMap(
        num_layers=regions.num_layers,
        pieces=pieces,
        host_base=arena.pointer,
        host_stride=arena.block_bytes,
        host_blocks=arena.num_blocks,
        device_blocks=device_blocks(regions),
    )


def device_blocks(regions: Regions) -> int:
    """Blocks of the device tier; without tensors any id will do."""
    return 2**31 - 1 if regions.num_blocks is None else regions.num_blocks
