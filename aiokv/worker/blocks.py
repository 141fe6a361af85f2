"""Blocks of the device tier, on the cpu or a GPU: copied within the tier, and checksummed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.layout.arrays import Piece
    from aiokv.layout.regions import Regions


def clone_rows(
    pieces: list[Piece],
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    stream: Any = None,
) -> None:
    """Copy row ``sources[i]`` to row ``targets[i]`` in all tensors.

    Args:
        pieces: on one device; a row is a block, or a slot of recurrent state.
        sources: ``[N]`` int32.
        targets: ``[N]`` int32, none of them a source.
        stream: the compute stream (cupy, PyTorch or Paddle), in whose order the copy happens. On
            the cpu the copy is done on return.

    Raises:
        UsageError: tensors on a GPU, and no stream.
    """
    if not len(sources) or not pieces:
        return
    if all(piece.device == "cpu" for piece in pieces):
        for piece in pieces:
            view = piece.view()
            view[targets] = view[sources]
        return
    if stream is None:
        raise UsageError(
            "stream is None; blocks on a GPU are copied in the order of the compute stream",
            hint="pass stream=, the stream that the model computes on",
        )
    import cupy

    views = [_gpu_view(piece) for piece in pieces]
    with views[0].device, _cupy_stream(stream):
        to, source = cupy.asarray(targets), cupy.asarray(sources)
        for view in views:
            view[to] = view[source]


def checksum_blocks(regions: Regions, block_ids: NDArray[np.int32]) -> list[int]:
    """Return the CRC-32 of each block over all layers and regions; wait for the bytes."""
    sums = [0] * len(block_ids)
    for piece in regions.pieces():
        rows = _host_rows(piece, block_ids)
        for i, row in enumerate(rows):
            sums[i] = zlib.crc32(row, sums[i])
    return sums


def _host_rows(piece: Piece, block_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    if piece.device == "cpu":
        return np.ascontiguousarray(piece.view()[block_ids])
    import cupy

    view = _gpu_view(piece)
    with view.device:
        rows: NDArray[np.uint8] = cupy.asnumpy(view[cupy.asarray(block_ids)])
    return rows


def _gpu_view(piece: Piece) -> Any:
    import cupy

    return cupy.asarray(_GpuBytes(piece))


def _cupy_stream(stream: Any) -> Any:
    """Return a stream of any library as CuPy takes it."""
    import cupy

    from aiokv.worker.device.cuda_handles import stream_handle

    if isinstance(stream, cupy.cuda.Stream):
        return stream
    handle = stream_handle(stream)
    from_external = getattr(cupy.cuda.Stream, "from_external", None)  # since CuPy 14
    if from_external is None:
        return cupy.cuda.ExternalStream(handle)
    return from_external(_StreamHandle(handle))


class _StreamHandle:
    """A handle behind NVIDIA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class _GpuBytes:
    """Memory of a piece for CuPy; keeps its owner alive."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.__cuda_array_interface__ = piece.interface
