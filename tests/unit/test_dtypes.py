"""Tensors of number formats without a numpy name as regions, and errors that explain how."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import LayoutError

BFLOAT16, FLOAT8_E4M3FN, FLOAT4_E2M1FN = 4, 10, 17  # DLPack's codes of types


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_lent: list[Exported] = []


class Exported:
    """Tensor with the interface of PyTorch's: memory that only ``__dlpack__`` describes."""

    def __init__(self, array: np.ndarray, code: int, bits: int, device_type: int = 1) -> None:
        self.array = array
        self.dtype = f"dlpack:{code}"
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(
            *(stride // array.itemsize for stride in array.strides)
        )
        self._tensor = _Tensor(
            array.ctypes.data, device_type, 0, array.ndim, code, bits, 1, self._shape, self._strides
        )
        _lent.append(self)  # no deleter would report that the consumer has finished

    def __dlpack__(self) -> object:
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        capsule: object = new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._tensor.device_type, 0)


@pytest.mark.parametrize(
    ("code", "storage"), [(BFLOAT16, np.uint16), (FLOAT8_E4M3FN, np.uint8)], ids=["bf16", "fp8"]
)
def test_dlpack_of_a_type_without_a_numpy_name_is_viewed_in_place(code, storage):
    blocks = np.arange(2 * 6 * 4).reshape(6, 2, 4).astype(storage)
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[Exported(blocks, code, 8 * blocks.itemsize)])
    (piece,) = regions.pieces()
    assert (piece.pointer, piece.device) == (blocks.ctypes.data, "cpu")
    assert (piece.num_blocks, piece.block_bytes) == (6, 8 * blocks.itemsize)
    piece.view()[3] = 0
    assert not blocks[3].any()
    assert blocks[4].all()


def test_dlpack_strides_are_in_elements():
    every_other = np.zeros((8, 5), np.uint16)[::2]
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[Exported(every_other, BFLOAT16, 16)])
    assert next(iter(regions.pieces())).stride_bytes == 20


def test_dlpack_of_a_cuda_tensor_needs_no_library_that_supports_its_type():
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[Exported(np.zeros((4, 8), np.uint8), FLOAT8_E4M3FN, 8, 2)])
    assert regions.devices == {"cuda"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Exported(np.zeros((4, 8), np.uint8), FLOAT4_E2M1FN, 4), "4 bits.*as uint8"),
        (Exported(np.zeros((4, 8), np.uint8), FLOAT8_E4M3FN, 8, 8), "device type 8"),
        (object(), "neither an array interface nor DLPack"),
    ],
    ids=["float4", "metal", "no tensor"],
)
def test_a_layout_that_cannot_be_used_is_refused_with_the_reason(tensor, message):
    regions = Regions(num_layers=1)
    with pytest.raises(LayoutError, match=message):
        regions.add("kv", layers=[tensor])
    assert regions.names == ()


def test_error_of_a_tensor_without_dlpack_names_the_view_to_register():
    class Refusing:
        dtype = "float8_e4m3fn"

        @property
        def __cuda_array_interface__(self) -> object:
            raise KeyError("float8_e4m3fn")

        def __dlpack__(self) -> object:
            raise BufferError("float8 types are not supported by dlpack")

    with pytest.raises(LayoutError, match=r"float8_e4m3fn.*not supported.*view\(torch.uint8\)"):
        Regions(num_layers=1).add("kv", layers=[Refusing()])


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
@pytest.mark.asyncio
async def test_arrays_of_ml_dtypes_are_offloaded_and_onloaded(dtype):
    kv = np.zeros((4, 2, 8), dtype)
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[kv])
    config = CacheConfig(device_blocks=4, host_blocks=4, block_tokens=2)
    async with CacheEngine(config, regions, "cpu") as engine:
        async with engine.match([1, 2, 3]) as lease:
            await lease.allocate(3)
            block = int(lease.block_table[0])
            kv[block] = dtype(1.5)
            lease.commit(2)
        await engine.drain()
        await engine.evict(4)
        kv[:] = dtype(0)
        async with engine.match([1, 2, 3]) as lease:
            await lease.allocate(3)
            await lease.layers.wait_all()
            assert lease.cached_tokens == 2
            assert (kv[lease.block_table[0]] == dtype(1.5)).all()
