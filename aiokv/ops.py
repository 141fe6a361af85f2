"""Copies of blocks between given tensors, outside of any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from aiokv import _native
from aiokv.base.checks import choice, sequence, shown
from aiokv.errors import ConfigError, LayoutError, UsageError
from aiokv.layout.arrays import describe
from aiokv.worker.device.cpu import CpuStream
from aiokv.worker.device.cuda_handles import stream_handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from aiokv.layout.arrays import DescribedArray

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

_BYTES: Final = "uint8"


def swap_blocks(
    device_tensors: Sequence[Any],
    host_tensors: Sequence[Any],
    device_ids: ArrayLike,
    host_ids: ArrayLike,
    *,
    direction: Literal["onload", "offload"],
    stream: Any = None,
) -> None:
    """Copy blocks between device tensors and host tensors, without an engine.

    ::

        aiokv.ops.swap_blocks(keys + values, host_keys + host_values, [3, 5], [0, 1],
                              direction="offload", stream=stream)

    Block ``host_ids[i]`` of each host tensor and block ``device_ids[i]`` of the device tensor with
    the same index are the two ends of a copy. Blocks that are adjacent on both sides move as one.

    Args:
        device_tensors: L tensors ``[num_device_blocks, ...]`` of one GPU, or of plain memory for
            the cpu device; such as the K and V tensors of all layers. Blocks may be strided, and
            each block is contiguous.
        host_tensors: L tensors ``[num_host_blocks, ...]`` in host memory, each with the block
            shape and dtype of its device tensor, or ``[num_host_blocks, bytes]`` uint8. A copy is
            asynchronous only if the whole tensor is page-locked by one allocation or registration.
        device_ids: [N] integers, from 0 to ``num_device_blocks - 1``.
        host_ids: [N] integers, from 0 to ``num_host_blocks - 1``. The ids of the destination are
            distinct.
        direction: ``"onload"`` copies from host to device, ``"offload"`` from device to host.
        stream: submits the copies after the work of a stream of CuPy, PyTorch or Paddle, a raw
            handle, or a ``CpuStream``; the caller keeps the tensors until they have been copied.
            None to return when the bytes have been copied; the work that writes or reads the
            blocks has finished before then.

    Raises:
        LayoutError: the tensors of a pair differ in the bytes, shape or dtype of a block, or in
            their devices; a tensor has no block layout; or two destinations are the same tensor.
            Nothing was copied.
        UsageError: an id is out of range, or a destination is named twice; the lists have different
            lengths; a tensor is on both sides, with a block that is source and destination; or the
            stream is not one of the device. Nothing was copied.
        ConfigError: the tensors are on a GPU, and aiokv or CuPy is missing for it.
        DeviceError: the GPU has reported an error; some of the blocks may have been copied.
    """
    choice("direction", direction, ("onload", "offload"))
    pairs = _pairs(
        sequence("device_tensors", device_tensors), sequence("host_tensors", host_tensors)
    )
    device, host = _ids("device_ids", device_ids), _ids("host_ids", host_ids)
    onload = direction == "onload"
    if len(device) != len(host):
        raise UsageError(
            f"device_ids has {len(device)} ids and host_ids has {len(host)}; pass as many of each"
        )
    if not pairs or not len(device):
        return
    ends = [
        (device, "device", pairs[0][0].num_blocks),
        (host, "host", pairs[0][1].num_blocks),
    ]
    (sources, source, source_blocks), (targets, target, target_blocks) = ends[
        :: -1 if onload else 1
    ]
    _native.check_ids(
        sources,
        targets,
        source=source,
        source_blocks=source_blocks,
        target=target,
        target_blocks=target_blocks,
    )
    _check_memory(pairs, sources, targets, target)
    if pairs[0][0].device == "cpu":
        _swap_on_cpu(pairs, device, host, onload, stream)
    else:
        _swap_on_gpu(pairs, device, host, onload, stream)


def _pairs(
    device_tensors: Sequence[Any], host_tensors: Sequence[Any]
) -> list[tuple[DescribedArray, DescribedArray]]:
    if len(device_tensors) != len(host_tensors):
        raise UsageError(
            f"there are {len(device_tensors)} device_tensors and {len(host_tensors)} host_tensors"
        )
    pairs = [
        (describe(device, f"device_tensors[{i}]"), describe(host, f"host_tensors[{i}]"))
        for i, (device, host) in enumerate(zip(device_tensors, host_tensors, strict=True))
    ]
    for i, (device, host) in enumerate(pairs):
        _check_pair(i, device, host)
        for name, tensor, first in (
            ("device_tensors", device, pairs[0][0]),
            ("host_tensors", host, pairs[0][1]),
        ):
            if (tensor.num_blocks, tensor.device) != (first.num_blocks, first.device):
                raise LayoutError(
                    f"{name}[{i}] has {tensor.num_blocks} blocks on {tensor.device}, but "
                    f"{name}[0] has {first.num_blocks} on {first.device}"
                )
    return pairs


def _check_pair(index: int, device: DescribedArray, host: DescribedArray) -> None:
    if host.device != "cpu":
        raise LayoutError(f"host_tensors[{index}] is on {host.device}, not in host memory")
    if device.block_bytes != host.block_bytes:
        raise LayoutError(
            f"a block of device_tensors[{index}] has {device.block_bytes} bytes, but one of "
            f"host_tensors[{index}] has {host.block_bytes}"
        )
    same = (device.dtype, device.shape) == (host.dtype, host.shape)
    if not same and _BYTES not in (device.dtype, host.dtype):
        raise LayoutError(
            f"a block of device_tensors[{index}] is {list(device.shape)} {device.dtype}, but of "
            f"host_tensors[{index}] is {list(host.shape)} {host.dtype}",
            hint="pass a view as uint8 to copy bytes",
        )


def _check_memory(
    pairs: list[tuple[DescribedArray, DescribedArray]],
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    target: str,
) -> None:
    """Check that no block is the destination of two copies, or a destination and a source."""
    ends = [host if target == "host" else device for device, host in pairs]
    first_of: dict[int, int] = {}  # by address
    for i, tensor in enumerate(ends):
        first = first_of.setdefault(tensor.pointer, i)
        if first != i:
            raise LayoutError(
                f"{target}_tensors[{i}] has the memory of {target}_tensors[{first}], and both are "
                "destinations"
            )
    on_gpu = pairs[0][0].device != "cpu"
    if on_gpu or {d.pointer for d, _ in pairs}.isdisjoint(h.pointer for _, h in pairs):
        return
    both = np.intersect1d(sources, targets)
    if both.size:
        raise UsageError(
            f"block {both[0]} is a source and a destination, and a tensor is on both sides",
            hint="copy to a tensor of its own first",
        )


def _ids(name: str, ids: ArrayLike) -> NDArray[np.int32]:
    try:
        array = np.asarray(ids)
    except Exception as error:  # tensors of a GPU raise errors of their libraries
        raise UsageError(f"{name} is not an array of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{name} is {shown(ids)}; it must be a list of integers")
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise UsageError(
            f"{name} has ids from {array.min()} to {array.max()}; "
            f"block ids are from 0 to {limits.max}"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def _swap_on_cpu(
    pairs: list[tuple[DescribedArray, DescribedArray]],
    device_ids: NDArray[np.int32],
    host_ids: NDArray[np.int32],
    onload: bool,
    stream: CpuStream | None,
) -> None:
    if stream is not None and not isinstance(stream, CpuStream):
        raise UsageError(
            f"stream is a {type(stream).__name__}; tensors in plain memory need a CpuStream or None"
        )
    own = CpuStream("aiokv-swap") if stream is None else stream
    try:
        for device, host in pairs:
            size = device.block_bytes
            blocks = _native.BlockMap(
                num_layers=1,
                pieces=[(0, device.pointer, device.stride_bytes, size, 0)],
                host_base=host.pointer,
                host_stride=host.stride_bytes,
                host_blocks=host.num_blocks,
                device_blocks=device.num_blocks,
            )
            owner = (device.owner, host.owner)
            _native.copy_blocks(
                own, blocks, host_ids, device_ids, onload=onload, after=None, owner=owner
            )
    finally:
        if stream is None:
            own.close()  # behind the copies


def _swap_on_gpu(
    pairs: list[tuple[DescribedArray, DescribedArray]],
    device_ids: NDArray[np.int32],
    host_ids: NDArray[np.int32],
    onload: bool,
    stream: Any,
) -> None:
    if _cuda is None:
        raise ConfigError(
            "the tensors are on a GPU, but aiokv was built without CUDA",
            hint="install it again where nvcc can be found",
        )
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"tensors on a GPU need CuPy: {error}", hint="pip install 'aiokv[cuda12]' or [cuda13]"
        ) from error
    runtime = cupy.cuda.runtime
    gpus = {runtime.pointerGetAttributes(device.pointer).device for device, _ in pairs}
    if len(gpus) > 1:
        raise LayoutError(f"the device tensors are on several GPUs: {sorted(gpus)}")
    (ordinal,) = gpus
    own = None
    if stream is None:
        with cupy.cuda.Device(ordinal):
            own = cupy.cuda.Stream(non_blocking=True)
    _cuda.swap_blocks(
        [
            (
                device.pointer,
                device.stride_bytes,
                host.pointer,
                host.stride_bytes,
                device.block_bytes,
            )
            for device, host in pairs
        ],
        host_ids,
        device_ids,
        _cuda.Direction.ONLOAD if onload else _cuda.Direction.OFFLOAD,
        device=ordinal,
        stream=stream_handle(stream if own is None else own),
    )
    if own is not None:
        own.synchronize()
