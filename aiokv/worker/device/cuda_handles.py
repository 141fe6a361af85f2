"""Raw handles of other libraries' streams and events."""

from __future__ import annotations

from typing import Any, Final

from aiokv.errors import UsageError

_STREAM_ATTRIBUTES: Final = ("ptr", "cuda_stream", "handle")  # CuPy; PyTorch and Paddle; Numba
_STREAM_WRAPPERS: Final = ("stream_base", "stream")  # paddle.device.Stream
_EVENT_ATTRIBUTES: Final = ("ptr", "cuda_event", "handle")
_EVENT_WRAPPERS: Final = ("event_base", "event")  # paddle.device.Event


def stream_handle(stream: Any) -> int:
    """Return the ``cudaStream_t`` of a CuPy, PyTorch, Paddle or Numba stream, or of an integer.

    Objects with ``__cuda_stream__`` (NVIDIA's protocol) work as well.

    Raises:
        UsageError: it has no handle.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    return _handle(stream, _STREAM_ATTRIBUTES, _STREAM_WRAPPERS, "stream")


def event_handle(event: Any) -> int:
    """Return the ``cudaEvent_t`` of a CuPy, PyTorch, Paddle or Numba event, or of an integer.

    Raises:
        UsageError: it has no handle, or none yet: PyTorch creates it when the event is recorded.
    """
    handle = _handle(event, _EVENT_ATTRIBUTES, _EVENT_WRAPPERS, "event")
    if handle == 0:
        raise UsageError(
            "the event was never recorded, so nothing can wait for it",
            hint="record it on the compute stream before the step is closed",
        )
    return handle


def _handle(thing: Any, attributes: tuple[str, ...], wrappers: tuple[str, ...], what: str) -> int:
    if isinstance(thing, int):
        return thing
    for name in attributes:
        value = getattr(thing, name, None)
        if value is not None and not callable(value):
            return int(getattr(value, "value", value) or 0)
    for name in wrappers:
        inner = getattr(thing, name, None)
        if inner is not None and not callable(inner):
            return _handle(inner, attributes, wrappers, what)
    raise UsageError(
        f"{what} is a {type(thing).__module__}.{type(thing).__name__}; it must be a CUDA {what} of "
        "CuPy, PyTorch, Paddle or Numba, or a handle",
        hint="for an event of Paddle 2.6, which has no handle, use "
        "aiokv.frameworks.paddle.recorded_event",
    )
