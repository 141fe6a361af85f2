"""Tensors in the memory of a GPU that several processes use, by CUDA's inter-process communication.

    exporter: share(tensor) ─► SharedTensor, as bytes over any channel ─► open_shared(...): importer

A server whose worker process owns the KV tensors thereby lets another process, such as a separate
transfer process, register the same memory with ``Regions.add``. No byte is copied. Both processes
run on one machine, in one IPC namespace (one container, or ``--ipc=host``).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final, NoReturn, Protocol, Self

import msgspec

from aiokv import _native
from aiokv.base.checks import Unique
from aiokv.errors import ClosedError, ConfigError, DeviceError, LayoutError, UsageError
from aiokv.layout.arrays import dense_strides, dtype_name, interface_of, item_bytes_of
from aiokv.peers.cuda_ipc import this_process
from aiokv.peers.one_sided import this_machine

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a tensor with which another process can map it.

    The bytes allow a process to write the memory: send them over a private channel only.

    Attributes:
        machine: boot id of the exporter's machine.
        process: 16 random bytes of the exporter's process.
        device_uuid: 16 bytes, of the GPU.
        handle: 64 bytes, CUDA's handle of the allocation that holds the tensor.
        offset_bytes: from the begin of the allocation to the first element.
        num_bytes: from the first element to the end of the last one.
        shape: elements per axis.
        strides_bytes: bytes from one element to the next, per axis.
        item_bytes: bytes of an element.
        dtype: name of the element type, such as ``"bfloat16"``.

    Raises:
        LayoutError: the shape, the strides and the sizes contradict one another.
    """

    machine: str
    process: bytes
    device_uuid: bytes
    handle: bytes
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides_bytes) or min(self.shape, default=1) < 1:
            self._refuse(f"the shape is {self.shape}, the strides are {self.strides_bytes}")
        typestr = _TYPESTRS.get(self.dtype)
        if self.item_bytes < 1 or (typestr and int(typestr[2:]) != self.item_bytes):
            self._refuse(f"an element of dtype {self.dtype!r} has {self.item_bytes} bytes")
        reach = sum(
            (length - 1) * stride
            for length, stride in zip(self.shape, self.strides_bytes, strict=True)
        )
        if min(self.strides_bytes, default=0) < 0 or self.offset_bytes < 0:
            self._refuse(f"the strides are {self.strides_bytes}, the offset {self.offset_bytes}")
        if self.num_bytes != reach + self.item_bytes:
            self._refuse(f"num_bytes is {self.num_bytes}, not {reach + self.item_bytes}")

    def _refuse(self, what: str) -> NoReturn:
        raise LayoutError(f"a SharedTensor is not consistent: {what}")

    def to_bytes(self) -> bytes:
        """Return the description as MessagePack, about 250 bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the description that ``to_bytes`` has encoded.

        Raises:
            UsageError: the bytes are no description.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, TypeError) as error:
            raise UsageError(f"the bytes are not a SharedTensor: {error}") from error


class MappedTensor(Unique):
    """A tensor of another process, in the memory of a GPU; ``with`` unmaps it at the end.

    ``Regions.add``, CuPy and PyTorch take it: it has ``__cuda_array_interface__``. An element type
    that the interface cannot name, such as ``bfloat16``, is exported as bytes of its size.

    Attributes:
        shape: elements per axis.
        dtype: name of the element type.
        device: ``"cuda:N"`` in this process.
    """

    def __init__(self, shared: SharedTensor, ordinal: int, mapping: _MappedAllocation) -> None:
        self.shape = shared.shape
        self.dtype = shared.dtype
        self.device = f"cuda:{ordinal}"
        self._shared = shared
        self._mapping: _MappedAllocation | None = mapping

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address and layout, for CUDA libraries.

        Raises:
            ClosedError: the tensor was unmapped.
        """
        if self._mapping is None:
            raise ClosedError("the tensor of the other process was closed")
        return {
            "version": 3,
            "data": (self._mapping.address + self._shared.offset_bytes, False),
            "shape": self._shared.shape,
            "strides": self._shared.strides_bytes,
            "typestr": _TYPESTRS.get(self.dtype, f"|V{self._shared.item_bytes}"),
            "stream": None,
        }

    def close(self) -> None:
        """Unmap the memory, if no other tensor of the same allocation is open. Idempotent.

        Close engines that copy from and to it first.

        Raises:
            DeviceError: the GPU is lost.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else self.device
        return f"<MappedTensor {list(self.shape)} {self.dtype}, {state}>"


def share(tensor: Any, *, dtype: str | None = None) -> SharedTensor:
    """Return a description with which another process on this machine can map a tensor.

    The tensor must exist until the other process has closed it: CUDA does not check that.

    Args:
        tensor: a tensor on a GPU, of any library; views and strided tensors, too. Its allocation is
            of ``cudaMalloc``, as are CuPy's and PyTorch's by default; expandable segments of
            PyTorch and ``cudaMallocAsync`` cannot be shared.
        dtype: name of the element type; None for the tensor's own.

    Raises:
        LayoutError: it is not on a GPU, or has negative strides, or the size of its elements
            is not that of ``dtype``.
        ConfigError: aiokv was built without CUDA, or CuPy is not installed.
        DeviceError: the memory cannot be shared.
    """
    _, interface, kind = interface_of(tensor, "tensor")
    if kind != "cuda":
        raise LayoutError(f"the tensor is on the {kind}; only memory of a GPU can be shared")
    shape = tuple(int(length) for length in interface["shape"])
    item_bytes = item_bytes_of(interface["typestr"], "tensor")
    strides = interface.get("strides") or dense_strides(shape, item_bytes)
    if 0 in shape or min(strides, default=0) < 0:
        raise LayoutError(
            f"the tensor has the shape {shape} and the strides {strides}; it must have elements, "
            "and no negative strides"
        )
    pointer = int(interface["data"][0])
    num_bytes = item_bytes + sum(
        (length - 1) * int(stride) for length, stride in zip(shape, strides, strict=True)
    )
    driver = _driver()
    ordinal = driver.device_of(pointer)
    try:
        base = driver.base_of(ordinal, pointer)
        handle = driver.export(ordinal, base)
    except DeviceError as error:
        error.hint = (
            "allocate the tensor by cudaMalloc; PyTorch's expandable_segments and cudaMallocAsync "
            "cannot be shared"
        )
        raise
    return SharedTensor(
        machine=this_machine(),
        process=this_process(),
        device_uuid=driver.uuid(ordinal),
        handle=handle,
        offset_bytes=pointer - base,
        num_bytes=num_bytes,
        shape=shape,
        strides_bytes=tuple(int(stride) for stride in strides),
        item_bytes=item_bytes,
        dtype=dtype or dtype_name(tensor, interface["typestr"]),
    )


def open_shared(shared: SharedTensor | bytes) -> MappedTensor:
    """Map a tensor of another process, as an array that ``Regions.add`` takes.

    Args:
        shared: what ``share`` has returned in the other process, or ``to_bytes`` of it.

    Returns:
        The tensor; close it after its last use, before the other process frees the memory.

    Raises:
        UsageError: it is of another machine, of this process, or no description.
        ConfigError: this process does not see the GPU; or aiokv was built without CUDA, or CuPy is
            not installed.
        DeviceError: CUDA cannot map the memory: the processes have different IPC namespaces, or
            the other one has ended.
    """
    if isinstance(shared, bytes | bytearray | memoryview):
        shared = SharedTensor.from_bytes(bytes(shared))
    if not isinstance(shared, SharedTensor):
        raise UsageError(f"shared is a {type(shared).__name__}; it must be a SharedTensor or bytes")
    if shared.machine != this_machine():
        raise UsageError(
            "the tensor is on another machine; CUDA shares memory between processes of one machine"
        )
    if shared.process == this_process():
        raise UsageError(
            "the tensor belongs to this process, which cannot map it",
            hint="use the tensor itself",
        )
    driver = _driver()
    visible = [driver.uuid(ordinal) for ordinal in range(driver.count())]
    if shared.device_uuid not in visible:
        raise ConfigError(
            f"the tensor is on GPU {shared.device_uuid.hex()}, which this process does not see",
            hint="see CUDA_VISIBLE_DEVICES of both processes",
        )
    ordinal = visible.index(shared.device_uuid)
    return MappedTensor(shared, ordinal, _MappedAllocation.take(driver, ordinal, shared.handle))


class _MappedAllocation:
    """An allocation of another process, mapped once for all its tensors."""

    _lock: Final = threading.Lock()
    _open: Final[dict[tuple[int, bytes], _MappedAllocation]] = {}

    def __init__(self, key: tuple[int, bytes], memory: Any) -> None:
        self._key = key
        self._memory = memory
        self._users = 0
        self.address = int(memory.address)

    @classmethod
    def take(cls, driver: Driver, ordinal: int, handle: bytes) -> _MappedAllocation:
        """Return the mapping of a handle, for one more tensor."""
        key = (ordinal, handle)
        with cls._lock:
            mapping = cls._open.get(key)
            if mapping is None:
                mapping = cls._open[key] = cls(key, driver.open(ordinal, handle))
            mapping.count(1)
        return mapping

    def count(self, change: int) -> int:
        """Change the number of tensors, and return it."""
        self._users += change
        return self._users

    def release(self) -> None:
        """Unmap the memory if this was the last tensor."""
        with self._lock:
            if self.count(-1) == 0:
                del self._open[self._key]
                self._memory.close()


class Driver(Protocol):
    """The calls of CUDA; GPUs are named by their numbers in this process."""

    def count(self) -> int:
        """Number of GPUs that this process sees."""

    def uuid(self, ordinal: int) -> bytes:
        """16 bytes."""

    def device_of(self, pointer: int) -> int:
        """Return the GPU that has the memory."""

    def base_of(self, ordinal: int, pointer: int) -> int:
        """First address of the allocation with ``pointer``."""

    def export(self, ordinal: int, base: int) -> bytes:
        """Handle of an allocation."""

    def open(self, ordinal: int, handle: bytes) -> Any:
        """Mapped memory with ``address`` and ``close()``."""


class _CudaDriver:
    """CUDA, by CuPy, aiokv's extension, and the driver's library."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def count(self) -> int:
        return int(self._cupy.cuda.runtime.getDeviceCount())

    def uuid(self, ordinal: int) -> bytes:
        uuid, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return bytes(uuid)

    def device_of(self, pointer: int) -> int:
        return int(self._cupy.cuda.runtime.pointerGetAttributes(pointer).device)

    def base_of(self, ordinal: int, pointer: int) -> int:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._cupy.cuda.Device(ordinal):
            self._cupy.cuda.runtime.free(0)  # makes the context current in this thread
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(size),
                ctypes.c_uint64(pointer),
            )
        return base.value

    def _call(self, name: str, *args: Any) -> None:
        """Call a function of the driver's library.

        Raises:
            DeviceError: it has failed.
        """
        code = int(getattr(ctypes.CDLL("libcuda.so.1"), name)(*args))
        if code:
            raise DeviceError(f"{name}: error {code} of the CUDA driver", cuda_code=code)

    def export(self, ordinal: int, base: int) -> bytes:
        return bytes(_cuda.memory_handle(ordinal, base))

    def open(self, ordinal: int, handle: bytes) -> Any:
        return _cuda.MappedMemory(ordinal, handle)


def _driver() -> Driver:
    """Return CUDA.

    Raises:
        ConfigError: aiokv was built without CUDA, or CuPy is not installed.
    """
    if _cuda is None:
        raise ConfigError(
            "sharing tensors needs CUDA, but aiokv was built without CUDA",
            hint="install aiokv again where nvcc can be found",
        )
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"sharing tensors needs CuPy: {error}", hint="pip install 'aiokv[cuda12]' or [cuda13]"
        ) from error
    return _CudaDriver(cupy)


_TYPESTRS: Final = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
}
