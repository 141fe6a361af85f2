"""Tensors shared by CUDA IPC, with a driver whose memory is that of numpy."""

from __future__ import annotations

import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from aiokv import Regions
from aiokv.errors import ClosedError, ConfigError, DeviceError, LayoutError, UsageError
from aiokv.frameworks import ipc
from aiokv.frameworks.ipc import SharedTensor, open_shared, share

OFFSET = 64


class Tensor:
    """A tensor "on a GPU": bytes of numpy."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype
        self.__cuda_array_interface__ = array.__array_interface__


class FakeDriver:
    """One allocation, which another process has at another address.

    Attributes:
        opened: number of mappings that are open.
    """

    def __init__(self) -> None:
        self.mine = np.zeros(4096, np.uint8)
        self.theirs = np.zeros(4096, np.uint8)
        self.uuids = [b"0" * 16, b"1" * 16]
        self.opened = 0

    def count(self) -> int:
        return len(self.uuids)

    def uuid(self, ordinal: int) -> bytes:
        return self.uuids[ordinal]

    def device_of(self, pointer: int) -> int:
        return 1

    def base_of(self, ordinal: int, pointer: int) -> int:
        return self.mine.ctypes.data

    def export(self, ordinal: int, base: int) -> bytes:
        assert (ordinal, base) == (1, self.mine.ctypes.data)
        return b"h" * 64

    def open(self, ordinal: int, handle: bytes) -> SimpleNamespace:
        assert handle == b"h" * 64
        self.opened += 1

        def close() -> None:
            self.opened -= 1

        return SimpleNamespace(address=self.theirs.ctypes.data, close=close)


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(ipc, "_driver", lambda: driver)
    return driver


def shared_blocks(driver: FakeDriver) -> SharedTensor:
    """A view of 5 blocks of 3 float32, 16 bytes apart, behind an offset."""
    blocks = driver.mine[OFFSET : OFFSET + 80].view(np.float32).reshape(5, 4)[:, :3]
    return share(Tensor(blocks))


def of_another_process(shared: SharedTensor) -> SharedTensor:
    return msgspec.structs.replace(shared, process=b"another process!")


def test_a_view_is_described_by_its_place_in_the_allocation(driver):
    shared = shared_blocks(driver)
    assert (shared.offset_bytes, shared.num_bytes) == (OFFSET, 4 * 16 + 12)
    assert (shared.shape, shared.strides_bytes) == ((5, 3), (16, 4))
    assert (shared.dtype, shared.item_bytes) == ("float32", 4)
    assert shared.device_uuid == driver.uuids[1]
    assert SharedTensor.from_bytes(shared.to_bytes()) == shared
    assert share(Tensor(driver.mine[:8].view(np.int16)), dtype="bfloat16").dtype == "bfloat16"


def test_another_process_registers_the_same_bytes(driver):
    shared = of_another_process(shared_blocks(driver))
    with open_shared(shared.to_bytes()) as tensor:
        assert tensor.device == "cuda:1"
        interface = tensor.__cuda_array_interface__
        assert interface["data"] == (driver.theirs.ctypes.data + OFFSET, False)
        assert (interface["shape"], interface["typestr"]) == ((5, 3), "<f4")
        regions = Regions(num_layers=1)
        regions.add("kv", layers=[tensor])
        (piece,) = regions.pieces()
        assert (piece.pointer, piece.stride_bytes, piece.block_bytes) == (
            driver.theirs.ctypes.data + OFFSET, 16, 12,
        )  # fmt: skip
        assert (piece.device, piece.dtype, piece.num_blocks) == ("cuda", "float32", 5)
        assert driver.opened == 1
    assert driver.opened == 0
    tensor.close()
    with pytest.raises(ClosedError):
        _ = tensor.__cuda_array_interface__


def test_an_allocation_is_mapped_once_for_all_its_tensors(driver):
    shared = of_another_process(shared_blocks(driver))
    first, second = open_shared(shared), open_shared(shared)
    assert driver.opened == 1
    first.close()
    assert driver.opened == 1
    assert second.__cuda_array_interface__["data"][0] == driver.theirs.ctypes.data + OFFSET
    second.close()
    assert driver.opened == 0


def test_tensors_that_cannot_be_shared_are_refused(driver, monkeypatch):
    with pytest.raises(LayoutError, match="on the cpu"):
        share(np.zeros(4))
    with pytest.raises(LayoutError, match="negative strides"):
        share(Tensor(driver.mine[:8][::-1]))
    with pytest.raises(LayoutError, match="must have elements"):
        share(Tensor(driver.mine[:0]))
    with pytest.raises(LayoutError):
        share(object())

    def refuse(ordinal, base):
        raise DeviceError("cudaIpcGetMemHandle: cudaErrorInvalidValue", cuda_code=1)

    monkeypatch.setattr(driver, "export", refuse)
    with pytest.raises(DeviceError, match="expandable_segments"):
        shared_blocks(driver)


def test_tensors_that_cannot_be_mapped_are_refused(driver):
    shared = shared_blocks(driver)
    with pytest.raises(UsageError, match="belongs to this process"):
        open_shared(shared)
    other = of_another_process(shared)
    with pytest.raises(UsageError, match="another machine"):
        open_shared(msgspec.structs.replace(other, machine="another"))
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        open_shared(msgspec.structs.replace(other, device_uuid=b"2" * 16))
    with pytest.raises(UsageError, match="not a SharedTensor"):
        open_shared(b"what")
    with pytest.raises(UsageError, match="it must be a SharedTensor"):
        open_shared(7)
    assert driver.opened == 0


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (5,)},
        {"shape": (5, 0)},
        {"shape": (5, -3)},
        {"strides_bytes": (16, -4)},
        {"offset_bytes": -64},
        {"item_bytes": 0, "dtype": "bfloat16"},
        {"item_bytes": 2},
        {"dtype": "float16"},
        {"num_bytes": 4096},
        {"shape": (6, 3)},
    ],
)
def test_contradictory_descriptions_are_refused(driver, change):
    shared = of_another_process(shared_blocks(driver))
    with pytest.raises(LayoutError, match="not consistent"):
        msgspec.structs.replace(shared, **change)
    forged = msgspec.msgpack.encode({**msgspec.structs.asdict(shared), **change})
    with pytest.raises(UsageError, match="not a SharedTensor"):
        open_shared(forged)
    assert driver.opened == 0


def test_a_dtype_of_another_size_is_refused(driver):
    with pytest.raises(LayoutError, match="dtype 'float32' has 2 bytes"):
        share(Tensor(driver.mine[:8].view(np.int16)), dtype="float32")
    with pytest.raises(LayoutError, match="are not numbers"):
        share(Tensor(driver.mine[:16].view("M8[s]")))


def test_a_mapping_that_fails_is_tried_again(driver, monkeypatch):
    shared = of_another_process(shared_blocks(driver))
    with monkeypatch.context() as patch:

        def refuse(ordinal, handle):
            raise DeviceError("cudaIpcOpenMemHandle: cudaErrorMapBufferObjectFailed", cuda_code=205)

        patch.setattr(driver, "open", refuse)
        with pytest.raises(DeviceError):
            open_shared(shared)
    with open_shared(shared) as tensor:
        assert tensor.device == "cuda:1"
    assert driver.opened == 0


def test_closed_tensor_is_closed_once_and_can_be_mapped_again(driver):
    shared = of_another_process(shared_blocks(driver))
    first, second = open_shared(shared), open_shared(shared)
    first.close()
    first.close()
    assert driver.opened == 1, "the other tensor of the allocation is open"
    with pytest.raises(ClosedError):
        Regions(num_layers=1).add("kv", layers=[first])
    second.close()
    with open_shared(shared):
        assert driver.opened == 1


def test_forked_processes_have_different_names(driver):
    """Such as the workers of a server, which import aiokv before the fork."""
    shared = shared_blocks(driver)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_shared(shared)
            os.write(writing, open_shared(shared).device.encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, "rb") as answer:
        assert answer.read() == b"cuda:1"


def test_sharing_needs_cuda(monkeypatch):
    monkeypatch.setattr(ipc, "_cuda", None)
    with pytest.raises(ConfigError, match="needs CUDA"):
        share(Tensor(np.zeros(4)))
