"""The engine over Paddle tensors on the GPU; needs a Paddle for CUDA, 2.6.2 or newer."""

from importlib.util import find_spec

import numpy as np
import pytest

from .test_ordering import spin

__all__ = ["spin"]  # a fixture


@pytest.fixture(params=["default stream", "new stream"])
def stream(request):
    """Let Paddle copy on its default stream, or on another one."""
    if find_spec("paddle") is None:
        pytest.skip("paddlepaddle-gpu is not installed")
    from aiokv.frameworks.paddle import import_paddle

    paddle = import_paddle()
    if not paddle.is_compiled_with_cuda():
        pytest.skip(f"Paddle {paddle.__version__} is for the CPU")
    paddle.device.set_device("gpu:0")
    if request.param == "default stream":
        yield paddle.device.cuda.current_stream()
    else:
        with paddle.device.cuda.stream_guard(paddle.device.cuda.Stream()):
            yield paddle.device.cuda.current_stream()


@pytest.mark.asyncio
async def test_blocks_return_from_host_memory(stream):
    from tests.models.paddle_blocks import assert_blocks_return

    await assert_blocks_return("gpu:0")


def test_event_is_recorded_behind_the_work_of_paddles_stream(stream, spin):
    import cupy

    from aiokv.frameworks.paddle import recorded_event
    from aiokv.worker.device.cuda_handles import stream_handle

    assert stream_handle(stream) == stream.cuda_stream
    spin(cupy.cuda.ExternalStream(stream.cuda_stream))
    event = recorded_event()
    assert not event.done
    event.synchronize()
    assert event.done


def test_memory_has_the_address_that_cupy_writes(stream):
    import cupy

    from aiokv.frameworks.paddle import TensorMemory, import_paddle
    from tests.models.paddle_blocks import SHAPE, bytes_of

    tensor = import_paddle().empty(SHAPE, dtype="bfloat16")
    interface = TensorMemory(tensor).__cuda_array_interface__
    num_bytes = int(np.prod(SHAPE)) * 2
    memory = cupy.cuda.UnownedMemory(interface["data"][0], num_bytes, tensor)
    view = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    view[:] = 7
    cupy.cuda.Device().synchronize()
    assert (bytes_of(tensor) == 7).all()
