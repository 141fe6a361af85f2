"""Paddle tensors as regions: used in place, with any dtype."""

import numpy as np
import pytest

from aiokv import Regions
from aiokv.errors import LayoutError

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "int64", "complex128"]


def skip_missing(paddle, dtype):
    if not hasattr(paddle, dtype):
        pytest.skip(f"Paddle {paddle.__version__} has no {dtype}")


@pytest.fixture
def frameworks(paddle):
    import aiokv.frameworks.paddle as module

    return module


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_borrowed(paddle, frameworks, dtype):
    skip_missing(paddle, dtype)
    layers = [paddle.zeros([4, 2, 3], dtype=dtype) for _ in range(2)]
    regions = Regions(num_layers=2)
    frameworks.add_region(regions, "k", layers)
    assert regions.layer_bytes(0) == 6 * layers[0].element_size()
    for tensor, piece in zip(layers, regions.pieces(), strict=True):
        assert piece.pointer == tensor.data_ptr()
        one = paddle.ones([2, 3]).cast(dtype).view("uint8").numpy()
        piece.view()[2] = one.reshape(-1)
        found = tensor.cast("float32").numpy()
        assert found[2].tolist() == [[1.0] * 3] * 2
        assert found.sum() == 6


def test_axes_are_those_of_regions(paddle, frameworks):
    regions = Regions(num_layers=1)
    axes = ("heads", "tokens", "dim")
    layers = [paddle.zeros([4, 2, 16, 8], dtype="bfloat16")]
    frameworks.add_region(regions, "k", layers, axes=axes, heads=(2, 8))
    (piece,) = regions.pieces()
    assert (piece.shape, piece.axes, piece.heads) == ((2, 16, 8), axes, (2, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_keys_and_values_of_one_tensor(paddle, frameworks, dtype):
    """`[B, K/V, T, D]`: both begin inside the same storage, with strides of their own."""
    skip_missing(paddle, dtype)
    both = paddle.zeros([6, 2, 2, 4], dtype=dtype)
    regions = Regions(num_layers=1)
    frameworks.add_region(regions, "k", [both[:, 0]])
    frameworks.add_region(regions, "v", [both[:, 1]])
    k, v = regions.layer_pieces(0)
    size = both.element_size()
    assert (k.pointer, v.pointer) == (both.data_ptr(), both.data_ptr() + 8 * size)
    assert k.stride_bytes == v.stride_bytes == 16 * size
    one = paddle.ones([2, 4]).cast(dtype).view("uint8").numpy().reshape(-1)
    v.view()[3] = one
    found = both.cast("float32").numpy()
    assert found[3, 1].tolist() == [[1.0] * 4] * 2
    assert found.sum() == 8


def test_tensor_with_gaps_inside_a_block_is_refused(paddle, frameworks):
    regions = Regions(num_layers=1)
    with pytest.raises(LayoutError, match="not C-contiguous"):
        frameworks.add_region(regions, "k", [paddle.zeros([4, 8, 6]).transpose([0, 2, 1])])
    assert regions.names == ()


def test_sparse_tensor_is_refused(paddle, frameworks):
    regions = Regions(num_layers=1)
    sparse = paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], [4, 4])
    with pytest.raises(LayoutError, match=r"sparse tensor of shape \[4, 4\]"):
        frameworks.add_region(regions, "k", [sparse])
    assert regions.names == ()


def test_tensor_on_another_device_is_refused(paddle, frameworks):
    class Place:
        def is_gpu_place(self):
            return False

        is_cpu_place = is_cuda_pinned_place = is_gpu_place

        def __str__(self):
            return "Place(xpu:0)"

    class Tensor:
        place, dtype, shape = Place(), "float32", [4, 2]

    with pytest.raises(
        LayoutError, match=r"on Place\(xpu:0\); it must be on the CPU or a CUDA GPU"
    ):
        frameworks.add_region(Regions(num_layers=1), "k", [Tensor()])


def test_region_keeps_a_tensor_alive(paddle, frameworks):
    """Paddle may give the memory of a dropped tensor to the next one."""
    regions = Regions(num_layers=1)
    frameworks.add_region(regions, "k", [paddle.full([64, 1024], 3, dtype="int32")])
    for _ in range(8):
        paddle.zeros([64, 1024], dtype="int32")
    (piece,) = regions.pieces()
    assert (piece.view().view(np.int32) == 3).all()


def test_missing_paddle_package_is_a_named_error(monkeypatch):
    import sys

    from aiokv.errors import UsageError
    from aiokv.frameworks.paddle import import_paddle

    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(UsageError, match="import paddle failed"):
        import_paddle()


def test_paddle_reads_the_bytes_that_the_engine_wrote(paddle, frameworks):
    """The bits of a bfloat16 survive a round trip through a region's bytes."""
    values = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    source = paddle.to_tensor(values).cast("bfloat16")
    target = paddle.zeros([2, 8], dtype="bfloat16")
    regions = Regions(num_layers=2)
    frameworks.add_region(regions, "k", [source, target])
    first, second = regions.pieces()
    second.view()[:] = first.view()
    assert bool((source == target).all())
