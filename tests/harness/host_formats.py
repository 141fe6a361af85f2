"""Host formats for tests, which run on the threads of the cpu device."""

from __future__ import annotations

import ctypes
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from aiokv.layout.host_format import PiecePayload

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_CONVERT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _bytes_at(address: int, num_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class _Format(ABC):
    """Calls ``write`` and ``read`` with the bytes of a piece on the device, and on the host.

    Attributes:
        refusals: number of blocks that are still to be refused, by direction.
    """

    is_exact = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.refusals = {"encode": 0, "decode": 0}
        self._encode = self._function("encode", self.write)
        self._decode = self._function("decode", self.read)

    def _function(self, direction: str, convert: Callable[[Bytes, Bytes], None]) -> object:
        def call(target: int, source: int, num_bytes: int) -> int:
            if self.refusals[direction]:
                self.refusals[direction] -= 1
                return 1
            sizes = num_bytes, self.host_bytes(num_bytes)
            if direction == "encode":
                sizes = sizes[::-1]
            convert(_bytes_at(target, sizes[0]), _bytes_at(source, sizes[1]))
            return 0

        return _CONVERT(call)

    def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
        encode, decode = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (self._encode, self._decode)
        )
        return PiecePayload(self.host_bytes(num_bytes), encode, decode)

    def host_bytes(self, num_bytes: int) -> int:
        return num_bytes

    @abstractmethod
    def write(self, host: Bytes, device: Bytes) -> None: ...

    @abstractmethod
    def read(self, device: Bytes, host: Bytes) -> None: ...


class Masked(_Format):
    """As many bytes on the host, each combined with a mask by exclusive or."""

    def __init__(self, mask: int) -> None:
        self.mask = mask
        super().__init__(f"masked {mask}")

    def write(self, host: Bytes, device: Bytes) -> None:
        host[:] = device ^ self.mask

    def read(self, device: Bytes, host: Bytes) -> None:
        device[:] = host ^ self.mask


class Framed(_Format):
    """The CRC-32 of the bytes, then the bytes in the reverse order."""

    HEADER_BYTES = 4

    def __init__(self) -> None:
        super().__init__("framed")

    def host_bytes(self, num_bytes: int) -> int:
        return self.HEADER_BYTES + num_bytes

    def write(self, host: Bytes, device: Bytes) -> None:
        host[:4] = np.frombuffer(zlib.crc32(device).to_bytes(4, "little"), np.uint8)
        host[4:] = device[::-1]

    def read(self, device: Bytes, host: Bytes) -> None:
        device[:] = host[:3:-1]
        assert zlib.crc32(device).to_bytes(4, "little") == host[:4].tobytes()


class Halved(_Format):
    """Every other byte of the elements ``float16``; other elements are copied unchanged."""

    is_exact = False

    def __init__(self) -> None:
        super().__init__("halved")

    def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
        return super().payload(num_bytes, dtype) if dtype == "float16" else PiecePayload(num_bytes)

    def host_bytes(self, num_bytes: int) -> int:
        return num_bytes // 2

    def write(self, host: Bytes, device: Bytes) -> None:
        host[:] = device[1::2]

    def read(self, device: Bytes, host: Bytes) -> None:
        device[::2] = 0
        device[1::2] = host
