"""Copies and zeroing of recurrent-state slots on a GPU, on a stream of their own.

A slot is a row of every state tensor. Rows at equal distances, such as those of one tensor
``[layers, slots, ...]``, are moved by one 2D copy. Copies within device memory run at terabytes per
second and wait for nothing but their step, so they are submitted on the loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokv.errors import UsageError
from aiokv.worker.device.cuda_handles import event_handle, stream_handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.layout.arrays import Piece
    from aiokv.layout.regions import Regions
    from aiokv.worker.device.base import CopyError, Event

MAX_PITCH_BYTES: Final = 2**31 - 1  # limit of a 2D copy


class Rows(NamedTuple):
    """The same slot of several tensors: slot s of tensor i is at base + i * pitch + s * stride."""

    base: int
    stride_bytes: int
    num_bytes: int
    num_tensors: int
    pitch_bytes: int


def merge_rows(pieces: Sequence[Piece]) -> list[Rows]:
    """Return the pieces in order, merged where they have equal distances."""
    merged: list[Rows] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and (last.stride_bytes, last.num_bytes) == (
            piece.stride_bytes,
            piece.block_bytes,
        ):
            pitch = piece.pointer - last.base if last.num_tensors == 1 else last.pitch_bytes
            follows = piece.pointer == last.base + last.num_tensors * pitch
            if follows and last.num_bytes <= pitch <= MAX_PITCH_BYTES:
                merged[-1] = last._replace(num_tensors=last.num_tensors + 1, pitch_bytes=pitch)
                continue
        merged.append(
            Rows(piece.pointer, piece.stride_bytes, piece.block_bytes, 1, piece.block_bytes)
        )
    return merged


class CudaStateCopy:
    """Submitted copies with one event, which was recorded before this object is created."""

    def __init__(self, cupy: Any, event: Any, num_layers: int) -> None:
        self._runtime = cupy.cuda.runtime
        self._event = event
        self._num_layers = num_layers

    @property
    def layer_events(self) -> Sequence[Event]:
        return [self._event] * self._num_layers

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        """Return True: the copies are on their stream."""
        return True

    def stream_wait(self, layer: int, stream: Any) -> None:
        """Make a CuPy, PyTorch, Paddle or raw stream wait.

        Raises:
            UsageError: the stream is being captured into a graph.
        """
        handle = stream_handle(stream)
        if self._runtime.streamIsCapturing(handle):
            raise UsageError(
                "stream_wait: the stream is being captured; the graph would wait at every launch",
                hint="call gpu_wait_all(stream) before the launch instead",
            )
        self._runtime.streamWaitEvent(handle, self._event.ptr, 0)

    def error(self) -> CopyError | None:
        return None  # the query of a lost event raises


class CudaStateMover:
    """The state tensors of one GPU.

    Args:
        cupy: the module.
        ordinal: the GPU.
        regions: has state.
    """

    def __init__(self, cupy: Any, ordinal: int, regions: Regions) -> None:
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._rows = merge_rows(regions.state_pieces)
        self._num_layers = regions.num_layers
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def move(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], after: Event | None
    ) -> CudaStateCopy:
        """Submit the copies of a plan whose ids have been checked; see :meth:`Device.copy`."""
        runtime, stream = self._cupy.cuda.runtime, self._stream.ptr
        with self._device:
            if after is not None:
                runtime.streamWaitEvent(stream, event_handle(after), 0)
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                for rows in self._rows:
                    self._move_rows(rows, source, target)
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return CudaStateCopy(self._cupy, event, self._num_layers)

    def close(self) -> None:
        """Wait for the submitted copies."""
        self._stream.synchronize()

    def _move_rows(self, rows: Rows, source: int, target: int) -> None:
        runtime, stream = self._cupy.cuda.runtime, self._stream.ptr
        to = rows.base + target * rows.stride_bytes
        if source >= 0:
            runtime.memcpy2DAsync(
                to,
                rows.pitch_bytes,
                rows.base + source * rows.stride_bytes,
                rows.pitch_bytes,
                rows.num_bytes,
                rows.num_tensors,
                runtime.memcpyDeviceToDevice,
                stream,
            )
            return
        for i in range(rows.num_tensors):
            runtime.memsetAsync(to + i * rows.pitch_bytes, 0, rows.num_bytes, stream)
