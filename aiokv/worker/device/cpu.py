"""The cpu device: "device" memory is plain memory, streams are native threads that really copy.

Not a mock: events are real, the routes run at once, and a copy is in flight when the call that
started it has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv import _native
from aiokv.base.checks import Unique
from aiokv.base.groups import ATTENTION, retention_of
from aiokv.base.plan import (
    CLONE,
    OFFLOAD,
    ONLOAD,
    PEER_ROUTES,
    STATE_CLONE,
    Pool,
    group_routes,
)
from aiokv.errors import LayoutError, UsageError
from aiokv.worker.base import UNLIMITED_BLOCKS
from aiokv.worker.device.base import CopyError, blocks_of, host_pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.plan import GroupRoute, Route
    from aiokv.layout.regions import Regions
    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event

CpuEvent = _native.Event
CpuStream = _native.Stream

_NOT_ATTACHED: Final = "the cpu device has no memory: attach() it first"


class CpuCopy:
    """One native copy job; its layers are submitted when it is created."""

    def __init__(self, job: _native.CopyJob, num_layers: int) -> None:
        self._job = job
        events = job.layer_events
        # An offload has one event for all layers.
        self._events = events if len(events) == num_layers else events * num_layers

    @property
    def layer_events(self) -> Sequence[Event]:
        return self._events

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        """Return True: the job is on its stream."""
        return True

    def stream_wait(self, layer: int, stream: CpuStream) -> None:
        """Make a :class:`CpuStream` wait for the layer."""
        if not hasattr(stream, "wait_event"):
            raise UsageError(
                f"gpu_wait: stream is a {type(stream).__name__}; the cpu device takes a CpuStream",
                hint="a thread that computes on the host calls host_wait(layer)",
            )
        stream.wait_event(self._events[layer])

    def error(self) -> CopyError | None:
        error = self._job.error
        return None if error is None else CopyError(*error)


class CpuDevice(Unique):
    """Copies with one native thread per route, GIL released."""

    name = "cpu"
    routes = group_routes(ONLOAD, OFFLOAD, *PEER_ROUTES) | {STATE_CLONE}
    in_order = True
    computes_in_stream = False

    def __init__(self) -> None:
        self._streams: dict[GroupRoute, CpuStream] = {}
        self._maps: dict[Pool, _native.BlockMap] = {}  # pools with host memory
        self._memory: tuple[Regions, dict[Pool, HostArena]] | None = None
        self._num_layers = 0

    def attach(
        self,
        regions: Regions,
        arena: HostArena,
        side_arenas: Mapping[Pool, HostArena] | None = None,
    ) -> None:
        """Bind the memory and start the threads.

        Raises:
            LayoutError: a tensor is not in plain memory.
        """
        if elsewhere := regions.devices - {"cpu"}:
            raise LayoutError(
                f"the tensors are on {', '.join(elsewhere)}; the cpu device copies plain memory",
                hint="pass device='cuda' to the engine",
            )
        arenas: dict[Pool, HostArena] = {Pool(ATTENTION, "host"): arena, **(side_arenas or {})}
        self._maps = {
            pool: block_map(blocks_of(regions, pool), own) for pool, own in arenas.items()
        }
        self._memory = (regions, arenas)
        self._num_layers = regions.num_layers
        held = {(retention_of(pool.group), pool.tier) for pool in arenas}
        self._streams = {
            (retention, route): CpuStream(f"aiokv-{route.name}-{retention}")
            for retention, tier in held
            if tier == "host"
            for route in (ONLOAD, OFFLOAD)
        }
        if regions.state_pieces:
            self._streams[STATE_CLONE] = CpuStream("aiokv-clone")
        if ("all", "peer") in held:
            for route in PEER_ROUTES:
                self._streams |= dict.fromkeys(
                    group_routes(route), CpuStream(f"aiokv-{route.name}")
                )

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
    ) -> CpuCopy:
        """Queue a copy on the thread of its route; see :meth:`Device.copy`."""
        if route == CLONE:
            job = self._copy_slots(source_ids, target_ids, after)
        else:
            blocks = self._maps.get(host_pool(route, group))
            to_device = (source_ids, target_ids)
            host_ids, device_ids = to_device if route.is_onload else to_device[::-1]
            stream = self._streams.get((retention_of(group), route))
            job = self._copy_blocks(
                stream, blocks, host_ids, device_ids, after, onload=route.is_onload
            )
        return CpuCopy(job, self._num_layers)

    def _copy_blocks(
        self,
        stream: CpuStream | None,
        blocks: _native.BlockMap | None,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: Event | None,
        *,
        onload: bool,
    ) -> _native.CopyJob:
        if stream is None or blocks is None:
            raise UsageError(_NOT_ATTACHED)
        return _native.copy_blocks(
            stream,
            blocks,
            host_ids,
            device_ids,
            onload=onload,
            after=_cpu_event(after),
            owner=self._memory,
        )

    def _copy_slots(
        self,
        source_slots: NDArray[np.int32],
        target_slots: NDArray[np.int32],
        after: Event | None,
    ) -> _native.CopyJob:
        if self._memory is None:
            raise UsageError(_NOT_ATTACHED)
        regions = self._memory[0]
        return _native.move_slots(
            self._streams.get(
                ("last", CLONE), self._streams["all", ONLOAD]
            ),  # without tensors, no bytes move
            [
                (piece.pointer, piece.stride_bytes, piece.block_bytes)
                for piece in regions.state_pieces
            ],
            UNLIMITED_BLOCKS if regions.num_state_slots is None else regions.num_state_slots,
            source_slots,
            target_slots,
            after=_cpu_event(after),
            owner=self._memory,
        )

    def check_event(self, event: Event) -> None:
        """Raise unless the event is a :class:`CpuEvent` that was recorded or begun."""
        cpu_event = _cpu_event(event)
        if cpu_event is not None and not cpu_event.recorded:
            raise UsageError(
                "the event was never recorded, so nothing can wait for it",
                hint="call CpuEvent.begin() or CpuStream.record(event) before you close the step",
            )

    def detach(self, *, keep_host: bool) -> None:
        """Detach, and close the streams, which keep the copied memory alive."""
        self.close()

    def close(self) -> None:
        """Finish submitted copies, join the threads, release the memory. Idempotent."""
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        self._maps = {}
        self._memory = None


def _cpu_event(after: Event | None) -> CpuEvent | None:
    if after is not None and not isinstance(after, CpuEvent):
        raise UsageError(
            f"the cpu device cannot wait for a {type(after).__name__}",
            hint="close steps with a CpuEvent recorded on a CpuStream, or with None",
        )
    return after


def block_map(regions: Regions, arena: HostArena) -> _native.BlockMap:
    """Return the native view of both tiers' memory, which it borrows."""
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
        host_stride=arena.pitch_bytes,
        host_blocks=arena.num_blocks,
        device_blocks=device_blocks(regions),
    )


def device_blocks(regions: Regions) -> int:
    """Return the blocks of the device tier; ``UNLIMITED_BLOCKS`` without tensors."""
    return UNLIMITED_BLOCKS if regions.num_blocks is None else regions.num_blocks
