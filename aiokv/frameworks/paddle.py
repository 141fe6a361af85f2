"""KV regions as Paddle tensors, in place.

Tensors of Paddle 2.6 export their memory neither through DLPack nor an array interface, and DLPack
cannot name some element types (bfloat16, float8). So :class:`TensorMemory` exports address, shape
and strides. Needs ``paddlepaddle`` (cpu) or ``paddlepaddle-gpu``, 2.6.2 or newer.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from aiokv.errors import LayoutError, UsageError
from aiokv.layout.arrays import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.layout.regions import Regions


def import_paddle() -> Any:
    """Import and return ``paddle``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found")  # not needed here
            import paddle
    except ImportError as error:
        raise UsageError(
            f"import paddle failed: {error}",
            hint="pip install paddlepaddle, or paddlepaddle-gpu with aiokv's cuda12 extra",
        ) from error
    return paddle


def recorded_event() -> Any:
    """Return a new CUDA event, recorded on Paddle's current stream of this thread.

    It is one of CuPy, because events of Paddle 2.6 have no handle.

    Raises:
        UsageError: Paddle or CuPy is not installed.
    """
    stream = import_paddle().device.cuda.current_stream()
    try:
        import cupy
    except ImportError as error:
        raise UsageError(
            f"import cupy failed: {error}", hint="install aiokv's extra cuda12 or cuda13"
        ) from error
    event = cupy.cuda.Event(disable_timing=True)
    handle = getattr(stream, "stream_base", stream).cuda_stream
    event.record(cupy.cuda.ExternalStream(handle))
    return event


def add_region(
    regions: Regions,
    name: str,
    layers: Sequence[Any],
    *,
    layer_indices: Sequence[int] | None = None,
    more_blocks: bool = False,
    axes: Sequence[str] | None = None,
    heads: tuple[int, int] | None = None,
) -> None:
    """Register Paddle tensors ``[device_blocks, ...]``, one per layer, of any dtype.

    Borrowed, as in :meth:`Regions.add`, whose arguments the others are.

    Raises:
        LayoutError: the tensors do not fit; the registry is unchanged.
    """
    regions.add(
        name,
        layers=[TensorMemory(tensor) for tensor in layers],
        layer_indices=layer_indices,
        more_blocks=more_blocks,
        axes=axes,
        heads=heads,
    )


class TensorMemory:
    """Memory of a dense Paddle tensor of any dtype, on the CPU or a GPU; keeps the tensor alive.

    Has ``__array_interface__`` or ``__cuda_array_interface__``, with elements of opaque bytes.

    Args:
        tensor: the tensor; it may be a view with strides.

    Raises:
        LayoutError: the tensor is neither on the CPU nor on a CUDA GPU, or is not dense.
    """

    def __init__(self, tensor: Any) -> None:
        place = tensor.place
        if not (place.is_gpu_place() or place.is_cpu_place() or place.is_cuda_pinned_place()):
            raise LayoutError(f"the tensor is on {place}; it must be on the CPU or a CUDA GPU")
        if not tensor.is_dense():
            raise LayoutError(f"a sparse tensor of shape {list(tensor.shape)} has no blocks")
        size_bytes = tensor.element_size()
        interface = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size_bytes for stride in tensor.strides),
            "typestr": f"|V{size_bytes}",
        }
        self.tensor = tensor
        self.dtype = dtype_name(tensor)
        if place.is_gpu_place():
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface
