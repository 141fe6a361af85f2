"""The cuda device: native lanes move blocks between pinned host memory and one GPU.

    onload   host blocks ─copy engine► staging ring ─scatter► regions    layer group by layer group
             host blocks ─────────kernel, at most 4 CTAs────► regions    lone small pieces
    offload  regions ─gather► staging ring ─copy engine► host blocks     whole blocks

Slots of recurrent state and blocks of window groups move between the tiers in the same way, each
pool in an engine of its own. A native thread per engine and direction submits the work, so a call
here takes microseconds. CuPy creates the streams; the arrays may be CuPy's, Paddle's or PyTorch's:
all use the primary context.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from aiokv import _native
from aiokv.base.checks import Unique, arguments, choice, flag, integer
from aiokv.base.groups import ATTENTION, STATE, layers_of
from aiokv.base.plan import (
    CLONE,
    OFFLOAD,
    ONLOAD,
    PEER_ROUTES,
    SEND,
    STATE_CLONE,
    Pool,
    group_routes,
)
from aiokv.errors import ConfigError, DeviceError, LayoutError, UsageError
from aiokv.layout.host_block import aligned
from aiokv.worker.device.base import (
    CopyError,
    blocks_of,
    check_event_type,
    host_pool,
)
from aiokv.worker.device.cuda_handles import event_handle, stream_handle
from aiokv.worker.device.cuda_numa import placement
from aiokv.worker.device.cuda_slots import CudaSlots, DeviceArena, SlotCopy
from aiokv.worker.device.cuda_state import CudaStateCopy, CudaStateMover

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.base.plan import Route
    from aiokv.layout.regions import Regions
    from aiokv.worker.arena import HostArena
    from aiokv.worker.device.base import Event

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

_MAIN: Final[Pool] = Pool(ATTENTION, "host")  # the pool of the blocks
_STAGING_ALIGNMENT: Final = 4096
HIGHEST_PRIORITY: Final = -5  # clamped by CUDA: a short scatter runs before the model's next CTAs

Path = Literal["auto", "staged", "direct"]


@arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """Options of transfers; the defaults fit PCIe 4 and 5 links.

    Attributes:
        path: ``"auto"`` lets the planner choose by run length and piece size; the others force.
        slot_bytes: size of a staging slot, which is also the largest chunk that moves at once.
        num_slots: staging slots per direction, for each pool that has host memory.
        queued_pieces: chunks that a direction has in the driver's queue at most. Its thread fills
            the queue and sleeps until half of it has moved, which takes little CPU time.
        max_group_layers: layers of the largest group of an onload; they become usable together.
        staged_ctas: thread blocks of the kernels within device memory; 8 move 350 GB/s.
        peer_ctas: thread blocks of the kernels that prove blocks of peers in device memory; 48
            move 350 GB/s between two H200.
        direct_ctas: thread blocks of the kernel across the link.
        timing: record times on the device, for :meth:`CudaCopy.layer_seconds`.
        touch_threads: threads that touch the host arena's pages ahead of the pinning.
        register_chunk_bytes: the arena is pinned in chunks of this size; a multiple of 4 MiB.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    path: Path = "auto"
    slot_bytes: int = 64 << 20
    num_slots: int = 2
    queued_pieces: int = 8
    max_group_layers: int = 8
    staged_ctas: int = 8
    direct_ctas: int = 3
    peer_ctas: int = 48
    timing: bool = False
    touch_threads: int = 8
    register_chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        choice("path", self.path, get_args(Path), ConfigError)
        flag("timing", self.timing, ConfigError)
        for name in _COUNTS:
            integer(name, getattr(self, name), minimum=1, error=ConfigError)


_COUNTS: Final = (
    "slot_bytes",
    "num_slots",
    "queued_pieces",
    "max_group_layers",
    "staged_ctas",
    "direct_ctas",
    "peer_ctas",
    "touch_threads",
    "register_chunk_bytes",
)


class CudaCopy:
    """One transfer in its lane; its events are not done before the lane has recorded them."""

    def __init__(
        self, transfer: Any, groups: Sequence[tuple[int, int]], after: Event | None
    ) -> None:
        self._transfer = transfer
        self._after = after  # kept alive until the lane has waited for it
        events: list[Event] = []
        for first, end in groups:
            events += [transfer.layer_event(end - 1)] * (end - first)
        self._events = tuple(events)

    @property
    def layer_events(self) -> Sequence[Event]:
        """One a layer; the layers of a group share one."""
        return self._events

    @property
    def started(self) -> bool:
        """True if the lane has submitted the first command, and needs ``after`` no longer."""
        return bool(self._transfer.started)

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        """Block, without the GIL, until the layer is on its stream; False after ``timeout``.

        Raises:
            DeviceError: the layer will never be submitted.
        """
        return bool(self._transfer.wait_submitted(layer, timeout))

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Make a CuPy, PyTorch, Paddle or raw stream wait for the layer.

        Raises:
            UsageError: the stream is being captured into a graph.
            DeviceError: the layer will never arrive.
        """
        self._transfer.stream_wait(layer, stream_handle(stream))

    def error(self) -> CopyError | None:
        failure = self._transfer.failure()
        return None if failure is None else CopyError(failure[0], failure[2])

    def layer_seconds(self) -> list[float | None]:
        """Return the device time from the transfer's first command to the end of each layer.

        None for layers that have not arrived, and without ``CudaOptions.timing``.
        """
        times = (self._transfer.layer_milliseconds(layer) for layer in range(len(self._events)))
        return [time / 1e3 if time >= 0 else None for time in times]

    def group_paths(self) -> list[tuple[int, int, str]]:
        """Return ``(first layer, end layer, path)`` as planned; empty before that."""
        return [(first, end, path.name.lower()) for first, end, path in self._transfer.groups()]


class CudaDevice(Unique):
    """Moves blocks between the host arena and one GPU.

    Args:
        ordinal: number of the GPU; by default CuPy's current one.
        options: options of the transfers.

    Raises:
        ConfigError: aiokv was built without CUDA, CuPy is not installed, or there is no such GPU.
    """

    routes = group_routes(ONLOAD, OFFLOAD, *PEER_ROUTES) | {STATE_CLONE}
    in_order = True
    computes_in_stream = True

    def __init__(self, ordinal: int | None = None, *, options: CudaOptions | None = None) -> None:
        if _cuda is None:
            raise ConfigError(
                "aiokv was built without CUDA",
                hint="install it again where nvcc can be found, or use the cpu device",
            )
        self._cupy = _import_cupy()
        self.options = options or CudaOptions()
        self.ordinal = _existing_gpu(self._cupy, ordinal)
        self.name = f"cuda:{self.ordinal}"
        self._streams: list[Any] = []
        self._engines: dict[Pool, Any] = {}  # pools with host memory
        self._hosts: dict[int, Any] = {}  # pinned memory, by address: pools may share it
        self._main_host: Any = None  # the arena of the blocks
        self._memory: tuple[Regions, dict[Pool, HostArena]] | None = None
        self._layer_groups: dict[tuple[Pool, Any], list[tuple[int, int]]] = {}
        self._starting: deque[CudaCopy] = deque()
        self._states: CudaStateMover | None = None
        self._peer_slots: CudaSlots | None = None

    # --- memory -----------------------------------------------------------------------------

    def attach(
        self,
        regions: Regions,
        arena: HostArena,
        side_arenas: Mapping[Pool, HostArena] | None = None,
    ) -> None:
        """Bind the memory and start to pin the arena; transfers may start at once.

        A transfer waits until its host blocks are pinned; low ids are pinned first.

        Raises:
            LayoutError: there are no tensors, or they are not on this GPU.
            DeviceError: the GPU has no memory for the staging rings.
        """
        if regions.devices != {"cuda"} or regions.num_blocks is None:
            raise LayoutError(
                f"the tensors are on {sorted(regions.devices) or 'no device'}; {self.name} copies "
                "tensors on a GPU"
            )
        for piece in regions.all_pieces():
            self._check_device(piece.pointer, f"region {piece.region!r}, layer {piece.layer}")
        if regions.state_pieces:
            self._states = CudaStateMover(self._cupy, self.ordinal, regions)
        arenas: dict[Pool, HostArena] = {_MAIN: arena, **(side_arenas or {})}
        self._memory = (regions, arenas)
        for pool, own in arenas.items():
            self._open_pool(pool, blocks_of(regions, pool), own)

    def _open_pool(self, pool: Pool, blocks: Regions, arena: HostArena) -> None:
        """Pin the host memory of a pool, unless it is, and make its engine."""
        if blocks.num_blocks is None:
            return
        if arena.pointer not in self._hosts:
            self._hosts[arena.pointer] = self._register(arena)
        if pool == _MAIN:
            self._main_host = self._hosts[arena.pointer]
        # Slots of recurrent state are copied one by one, so a staging slot need not be larger than
        # one.
        moved_bytes = arena.pitch_bytes if pool.group == STATE else arena.nbytes
        slot_bytes = self.options.slot_bytes
        if layers_of(pool.group) is not None:
            slot_bytes = self._share_of_slot(slot_bytes, blocks)
        if pool != _MAIN:
            slot_bytes = min(slot_bytes, moved_bytes)
        engine = self._make_engine(blocks, arena, self._hosts[arena.pointer], slot_bytes)
        self._engines[pool] = engine
        for direction in (_cuda.Direction.ONLOAD, _cuda.Direction.OFFLOAD):
            self._layer_groups[pool, direction] = engine.groups(direction)

    def _share_of_slot(self, slot_bytes: int, blocks: Regions) -> int:
        """Return the staging slot of a range of layers: all ranges together have that of a pool."""
        if self._memory is None:
            raise UsageError(f"{self.name} has no blocks: attach() it first")
        own_bytes, all_bytes = blocks.payload_bytes, self._memory[0].payload_bytes
        share = max(slot_bytes * own_bytes // all_bytes, own_bytes)
        return aligned(share, _STAGING_ALIGNMENT)

    def open_peer_slots(self, num_slots: int, slot_bytes: int) -> CudaSlots:
        """Reserve slots for peers in the memory of the GPU, until ``detach``.

        The routes from and to ``"peer"`` then copy between device blocks and these slots.

        Args:
            num_slots: number of slots.
            slot_bytes: distance between slots; a host block and its trailer fit.

        Raises:
            ConfigError: the GPU has not that much memory.
            UsageError: the device has no blocks yet.
        """
        if self._memory is None:
            raise UsageError(f"{self.name} has no blocks: attach() it first")
        regions = self._memory[0]
        arena = DeviceArena(self.ordinal, num_blocks=num_slots, pitch_bytes=slot_bytes)
        try:
            slots = self._peer_slots = CudaSlots(
                self._cupy, regions, slice_layout(regions), arena, ctas=self.options.peer_ctas
            )
        except BaseException:
            arena.close()
            raise
        return slots

    def detach(self, *, keep_host: bool) -> None:
        """Release the memory and the staging rings; ``keep_host`` leaves the arena pinned."""
        if self._peer_slots is not None:
            self._peer_slots.close()
            self._peer_slots.arena.close()
            self._peer_slots = None
        if self._states is not None:
            self._states.close()
            self._states = None
        for engine in self._engines.values():
            engine.close()
        self._engines = {}
        if not keep_host:
            for host in self._hosts.values():
                host.close()
            self._hosts, self._main_host = {}, None
        self._starting.clear()
        self._streams = []
        self._memory = None

    def close(self) -> None:
        """Finish submitted copies, join the threads, unpin the arena. Idempotent."""
        self.detach(keep_host=False)

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes of the host arena, from its beginning; grows in the background."""
        return 0 if self._main_host is None else int(self._main_host.ready_bytes)

    def wait_pinned(self) -> float:
        """Block, without the GIL, until the whole arena is pinned; return the seconds it took.

        Raises:
            DeviceError: pinning failed, or the device was closed.
        """
        host = self._main_host
        host.wait_ready(host.total_bytes)
        return float(host.elapsed_seconds)

    # --- transfers --------------------------------------------------------------------------

    def copy(
        self,
        route: Route,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
        after: Event | None,
        group: str = ATTENTION,
        keys: bytes = b"",
    ) -> CudaCopy | CudaStateCopy | SlotCopy:
        """Give a copy to the native lane of its route; see :meth:`Device.copy`.

        Args:
            route: see :meth:`Device.copy`, as the arguments behind it.
            source_ids: [N] int32.
            target_ids: [N] int32.
            after: event that the first byte waits for.
            group: group of the pool.
            keys: with slots in device memory, 32 bytes per slot: ``SEND`` seals the slots with
                them, and ``RECEIVE`` fails for slots that do not have them.
        """
        if self._peer_slots is not None and route in PEER_ROUTES:
            if route == SEND:
                return self._peer_slots.gather(source_ids, target_ids, keys, after)
            return self._peer_slots.scatter_verified(source_ids, target_ids, keys, after)
        if route == CLONE:
            if self._states is None:
                raise UsageError(
                    "no region has recurrent state", hint="register it with Regions.add_state"
                )
            return self._states.move(source_ids, target_ids, after)
        pool = host_pool(route, group)
        if route.is_onload:
            path = _cuda.Path[self.options.path.upper()]
            direction = _cuda.Direction.ONLOAD
            return self._submit(pool, direction, source_ids, target_ids, after, path)
        direction = _cuda.Direction.OFFLOAD
        return self._submit(pool, direction, target_ids, source_ids, after, _cuda.Path.AUTO)

    def check_event(self, event: Event) -> None:
        """Raise unless the event can be queried and has a CUDA handle, i.e. was recorded."""
        check_event_type(event)
        event_handle(event)

    @property
    def unpinned_bytes(self) -> int:
        """Host memory that is not pinned yet; copies wait for the part that they use."""
        return sum(host.total_bytes - host.ready_bytes for host in self._hosts.values())

    @property
    def failure(self) -> DeviceError | None:
        """The error after which no result of the GPU is valid; None without one."""
        engines = [*self._engines.values()]
        if self._peer_slots is not None:
            engines.append(self._peer_slots)
        for engine in engines:
            if engine.broken_code:
                return DeviceError(
                    f"{self.name}: {engine.broken_reason}",
                    cuda_code=engine.broken_code,
                    hint="restart the process: the CUDA context is lost",
                )
        return None

    @property
    def submit_cpu_seconds(self) -> float:
        """CPU time of the submitting threads since attach()."""
        return float(sum(engine.cpu_seconds for engine in self._engines.values()))

    def _submit(
        self,
        key: Pool,
        direction: Any,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: Event | None,
        path: Any,
    ) -> CudaCopy:
        if key not in self._engines:
            raise UsageError(
                f"{self.name} has no host memory for {' '.join(key).strip()} blocks: attach() it "
                "first"
            )
        transfer = self._engines[key].submit(
            direction,
            np.ascontiguousarray(host_ids, dtype=np.int32),
            np.ascontiguousarray(device_ids, dtype=np.int32),
            0 if after is None else event_handle(after),
            path,
        )
        copy = CudaCopy(transfer, self._layer_groups[key, direction], after)
        while self._starting and self._starting[0].started:
            self._starting.popleft()
        if after is not None:
            self._starting.append(copy)  # keeps the event alive until the lane has waited for it
        return copy

    # --- set-up -----------------------------------------------------------------------------

    def _check_device(self, pointer: int, what: str) -> None:
        attributes = self._cupy.cuda.runtime.pointerGetAttributes(pointer)
        if attributes.device != self.ordinal:
            raise LayoutError(
                f"{what} is on cuda:{attributes.device}, but the device is {self.name}",
                hint="create one engine per GPU",
            )

    def _register(self, arena: HostArena) -> Any:
        pci_address = self._cupy.cuda.Device(self.ordinal).pci_bus_id
        near = placement(pci_address, arena.nbytes)
        return _cuda.HostRegistration(
            arena.pointer,
            arena.nbytes,
            device=self.ordinal,
            chunk_bytes=self.options.register_chunk_bytes,
            touch_threads=self.options.touch_threads,
            numa_node=near.node,
            numa_strict=near.strict,
        )

    def _make_engine(self, regions: Regions, arena: HostArena, host: Any, slot_bytes: int) -> Any:
        slices, layer_begin = slice_layout(regions)
        with self._cupy.cuda.Device(self.ordinal):
            streams = [
                self._cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)
                for _ in range(4)
            ]
        self._streams += streams
        handles = [stream.ptr for stream in streams]
        return _cuda.SwapEngine(
            host,
            device_blocks=regions.num_blocks,
            host_blocks=arena.num_blocks,
            host_base=arena.pointer,
            host_pitch=arena.pitch_bytes,
            slices=slices,
            layer_begin=layer_begin,
            onload_streams=(handles[0], handles[1]),
            offload_streams=(handles[2], handles[3]),
            device=self.ordinal,
            timing=self.options.timing,
            slot_bytes=slot_bytes,
            num_slots=self.options.num_slots,
            queued_pieces=self.options.queued_pieces,
            max_group_layers=self.options.max_group_layers,
            staged_blocks=self.options.staged_ctas,
            direct_blocks=self.options.direct_ctas,
        )


def slice_layout(
    regions: Regions,
) -> tuple[list[tuple[int, int, int, int, int]], list[int]]:
    """Return ``(device base, stride, bytes, host offset, host bytes)`` per piece, and each layer's
    first index."""
    pieces = list(regions.pieces())
    ends = [piece.host_offset_bytes for piece in pieces[1:]] + [regions.payload_bytes]
    slices = [
        (
            piece.pointer,
            piece.stride_bytes,
            piece.block_bytes,
            piece.host_offset_bytes,
            end - piece.host_offset_bytes,
        )
        for piece, end in zip(pieces, ends, strict=True)
    ]
    layer_begin = [0]
    for layer in range(regions.num_layers):
        layer_begin.append(layer_begin[-1] + len(regions.layer_pieces(layer)))
    return slices, layer_begin


def _existing_gpu(cupy: Any, ordinal: int | None) -> int:
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
        found: int = cupy.cuda.Device().id if ordinal is None else ordinal
    except Exception as error:  # CuPy's exception class is only available with a driver
        raise ConfigError(
            f"no GPU can be used: {error}", hint="see nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    if not 0 <= integer("ordinal", found, error=ConfigError) < count:
        raise ConfigError(
            f"cuda:{found} does not exist: this process can use {count} GPUs",
            hint="see CUDA_VISIBLE_DEVICES",
        )
    return found


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"the cuda device needs CuPy: {error}", hint="pip install 'aiokv[cuda12]' or [cuda13]"
        ) from error
    return cupy
