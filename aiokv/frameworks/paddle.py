"""KV regions as Paddle tensors, in place.

DLPack cannot name some element types (bfloat16, float8), so a tensor is registered as a view of
integers of the same size. Needs ``paddlepaddle`` (cpu) or ``paddlepaddle-gpu``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import LayoutError, UsageError
from aiokv.layout.arrays import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.layout.regions import Regions


_INTEGERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


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

    Borrowed, as in :meth:`Regions.add`, which takes only dtypes that DLPack can name. The other
    arguments are those of :meth:`Regions.add`.

    Raises:
        LayoutError: the tensors do not fit; the registry is unchanged.
    """
    regions.add(
        name,
        layers=[as_integers(tensor) for tensor in layers],
        layer_indices=layer_indices,
        more_blocks=more_blocks,
        dtypes=[dtype_name(tensor) for tensor in layers],
        axes=axes,
        heads=heads,
    )


def as_integers(tensor: Any) -> Any:
    """Return a view of the tensor as integers of the same size, which DLPack can export.

    Raises:
        LayoutError: there is no such view.
    """
    size_bytes = tensor.element_size()
    if size_bytes not in _INTEGERS:
        raise LayoutError(
            f"elements of {tensor.dtype} have {size_bytes} bytes; the size must be 1, 2, 4 or 8"
        )
    # The view has elements of the same size: Paddle 3.3 misplaces a view with another size if it
    # does not begin at the start of its storage.
    view = tensor.detach().view(_INTEGERS[size_bytes])
    if view.data_ptr() != tensor.data_ptr():
        raise LayoutError(f"Paddle copied a tensor of {tensor.dtype} to view it as integers")
    return view
