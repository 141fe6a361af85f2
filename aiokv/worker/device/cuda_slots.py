"""Slots in the memory of a GPU, through which blocks move from and to GPUs of other processes.

::

    send      device blocks ─gather and seal──► slots ─copy engine, NVLink► slots of the receiver
    receive   slots ─verify─► result, and slots ─scatter─► device blocks

A pass computes the checksum of the bytes that it copies, if each piece of a block is a multiple of
4 KiB; otherwise a second kernel reads the slots. Both give the trailers of
``_native.seal_blocks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiokv import _native
from aiokv.errors import ClosedError, ConfigError, DeviceError
from aiokv.stores.base import Result
from aiokv.worker.device.base import CopyError
from aiokv.worker.device.cuda_handles import event_handle, stream_handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.layout.regions import Regions
    from aiokv.worker.device.base import Event

HIGHEST_PRIORITY: Final = -5  # clamped by CUDA: a short pass runs before the model's next CTAs
_WRONG: Final = bytes([Result.WRONG])

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler


class DeviceArena:
    """Slots in the memory of one GPU; another process on the same server can map them.

    Args:
        ordinal: number of the GPU.
        num_blocks: number of slots.
        pitch_bytes: distance from one slot to the next.

    Raises:
        ConfigError: the GPU has not that much memory.
    """

    def __init__(self, ordinal: int, *, num_blocks: int, pitch_bytes: int) -> None:
        self.ordinal = ordinal
        self.num_blocks = num_blocks
        self.pitch_bytes = pitch_bytes
        self.nbytes = num_blocks * pitch_bytes
        try:
            self._memory: Any = _cuda.DeviceMemory(ordinal, self.nbytes)
        except DeviceError as error:
            raise ConfigError(
                f"cannot reserve {self.nbytes} bytes on cuda:{ordinal} for peers: {error}",
                hint="lower Peers(ring_bytes=..., outgoing_bytes=...)",
            ) from error

    @property
    def memory(self) -> Any:
        """The memory; it is allocated as long as this object, or the arena, refers to it.

        Raises:
            ClosedError: the arena is closed.
        """
        if self._memory is None:
            raise ClosedError("the memory of the slots was freed")
        return self._memory

    @property
    def pointer(self) -> int:
        """Address of slot 0."""
        return int(self.memory.address)

    @property
    def handle(self) -> bytes:
        """Handle with which another process maps the memory."""
        return bytes(self.memory.handle())

    def close(self) -> None:
        """Give up the memory; it is freed with the last reference to ``memory``. Idempotent."""
        self._memory = None


class SlotCopy:
    """One pass; its event is recorded."""

    def __init__(self, work: Any, num_layers: int, after: Event | None) -> None:
        self._work = work
        self._after = after
        self._num_layers = num_layers
        self._is_final = False  # True when the work has ended; its failure is ``_error``
        self._error: CopyError | None = None

    @property
    def layer_events(self) -> Sequence[Event]:
        """The event of the work, once per layer."""
        return [self._work] * self._num_layers

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        """Return True: the pass is on its stream."""
        return True

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Make a CuPy, PyTorch, Paddle or raw stream wait for the pass."""
        self._work.stream_wait(stream_handle(stream))

    def error(self) -> CopyError | None:
        """Return the failure of the GPU, the first slot that is wrong, or None."""
        if not self._is_final:
            is_done = bool(self._work.done)  # True also after a failure
            failure = self._work.failure()
            if failure is not None:
                return CopyError(failure[0], failure[2])
            self._is_final = is_done
            wrong = self.results.find(_WRONG) if self._is_final else -1
            if wrong >= 0:
                self._error = CopyError(wrong, "the bytes of a slot do not match its proof")
        return self._error

    @property
    def results(self) -> bytes:
        """``Result`` of each slot that was verified, one byte each; all wrong before the end."""
        return bytes(self._work.results())


class CudaSlots:
    """Passes between the device blocks of one GPU and slots in its memory.

    Args:
        cupy: the module.
        regions: the device tensors.
        layout: slices of a block and the first slice of each layer, as ``SwapEngine`` takes them.
        arena: the slots.
        ctas: thread blocks of a pass.
        bulk: use bulk copies, where the GPU has them (compute capability 9.0 and later).

    Attributes:
        arena: the slots.
        ordinal: number of the GPU.
        address: address of slot 0.
        num_slots: number of slots.
        slot_bytes: distance from one slot to the next.
        memory: object that keeps the slots allocated, and exports them.

    Raises:
        LayoutError: a slot has no place for a block and its trailer.
        DeviceError: the GPU has no memory.
    """

    def __init__(
        self,
        cupy: Any,
        regions: Regions,
        layout: tuple[list[tuple[int, int, int, int, int]], list[int]],
        arena: DeviceArena,
        *,
        ctas: int,
        bulk: bool = True,
    ) -> None:
        slices, layer_begin = layout
        self.arena = arena
        self.ordinal = arena.ordinal
        self.address = arena.pointer
        self.num_slots = arena.num_blocks
        self.slot_bytes = arena.pitch_bytes
        self.memory = arena.memory
        with cupy.cuda.Device(arena.ordinal):
            self._streams = [
                cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY) for _ in range(2)
            ]
        self._num_layers = regions.num_layers
        self._engine = _cuda.SlotEngine(
            device_blocks=regions.num_blocks,
            num_slots=arena.num_blocks,
            address=arena.pointer,
            slot_bytes=arena.pitch_bytes,
            slices=slices,
            layer_begin=layer_begin,
            send_stream=self._streams[0].ptr,
            receive_stream=self._streams[1].ptr,
            device=arena.ordinal,
            blocks=ctas,
            bulk=bulk,
        )

    @property
    def fused(self) -> bool:
        """True if a pass copies and sums at once."""
        return bool(self._engine.fused)

    @property
    def broken_code(self) -> int:
        """CUDA's code of the error that broke the GPU; 0 without one."""
        return int(self._engine.broken_code)

    @property
    def broken_reason(self) -> str:
        """Text of that error."""
        return str(self._engine.broken_reason)

    def gather(
        self,
        device_ids: NDArray[np.int32],
        slots: NDArray[np.int32],
        keys: bytes,
        after: Event | None = None,
    ) -> SlotCopy:
        """Copy blocks to slots, and seal the slots with ``keys``, 32 bytes each."""
        handle = 0 if after is None else event_handle(after)
        work = self._engine.gather(device_ids, slots, keys, handle)
        return SlotCopy(work, self._num_layers, after)

    def verify(self, slots: NDArray[np.int32], keys: bytes) -> SlotCopy:
        """Verify slots; see ``SlotCopy.results``."""
        return SlotCopy(self._engine.verify(slots, keys), self._num_layers, None)

    def scatter_verified(
        self,
        slots: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        keys: bytes,
        after: Event | None = None,
    ) -> SlotCopy:
        """Copy slots to blocks, and verify the copied bytes.

        A block of a slot whose result is not ``DONE`` has wrong bytes.
        """
        handle = 0 if after is None else event_handle(after)
        work = self._engine.scatter_verified(slots, device_ids, keys, handle)
        return SlotCopy(work, self._num_layers, after)

    def close(self) -> None:
        """Wait for all passes, and free the memory of the kernels. Idempotent."""
        self._engine.close()
        self.memory = None
