"""CudaIpcBackend: fragments from one GPU to another on the same server, by its copy engines.

The receiver exports the memory of its landing slots, and the sender maps it: CUDA's inter-process
communication, over NVLink or PCIe. Nothing listens beside the control connection, which carries the
handle to authenticated senders only. Both engines have their slots in GPU memory, and both
processes run in one IPC namespace (one container, or ``--ipc=host``).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv import _native
from aiokv.errors import ConfigError, DeviceError
from aiokv.peers.one_sided import EndpointError, this_machine

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from aiokv.peers.one_sided import WritePiece
    from aiokv.peers.transport import PeerMemory

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

# When the process of a sender has ended, the driver stops its copies, each of which takes less than
# a millisecond. The proof of a fragment is computed again when it is copied to device blocks.
LAST_COPIES_SECONDS: Final = 0.05


class _Export(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a receiver: memory that a sender on the same machine can map."""

    machine: str
    process: bytes
    address: int
    handle: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Export).decode


@cache
def this_process() -> bytes:
    """Return 16 random bytes that identify this process; a forked process has different bytes."""
    return os.urandom(16)


def _rename_process() -> None:
    this_process.cache_clear()
    this_process()  # create the name now, because two threads could create different ones


_rename_process()
if hasattr(os, "register_at_fork"):  # a server may fork its workers after the import
    os.register_at_fork(after_in_child=_rename_process)


class CudaIpcBackend:
    """See :class:`~aiokv.peers.one_sided.Backend`.

    Args:
        machine: id of this machine, as of ``this_machine``.
    """

    name = "cuda_ipc"
    is_reused = False
    write_bytes = 64 << 20  # per call: 0.2 ms over NVLink

    def __init__(self, machine: str | None = None) -> None:
        self._machine = this_machine() if machine is None else machine

    def load(self) -> None:
        """Check that aiokv was built with CUDA; see ``Backend.load``."""
        if _cuda is None:
            raise ConfigError(
                "the transport 'cuda_ipc' needs CUDA, but aiokv was built without CUDA",
                hint="install aiokv again where nvcc can be found",
            )
        if not self._machine:
            raise ConfigError(
                "the transport 'cuda_ipc' cannot tell this machine from others: "
                "/proc/sys/kernel/random/boot_id cannot be read"
            )

    def create(self, memory: PeerMemory, *, receives: bool) -> CudaIpcEndpoint:
        """Return an endpoint of slots in the memory of a GPU; see ``Backend.create``."""
        if memory.device is None:
            raise EndpointError(
                "the slots are in host memory; the transport 'cuda_ipc' needs the cuda device"
            )
        return CudaIpcEndpoint(self._machine, memory, memory.device, receives=receives)


class CudaIpcEndpoint:
    """Exported or mapped memory of one connection; see :class:`~aiokv.peers.one_sided.Endpoint`."""

    def __init__(self, machine: str, memory: PeerMemory, device: int, *, receives: bool) -> None:
        self._machine = machine
        self._memory = memory
        self._device = device
        self._receives = receives
        self._export: _Export | None = None
        self._mapped: Any = None
        self._base = 0  # address of the mapped memory in this process
        self._copies: Any = None
        if not receives:
            self._copies = _checked(_cuda.PeerCopies, device)

    def metadata(self) -> bytes:
        """Return the handle of the memory."""
        if not self._receives:
            return b""
        owner: Any = self._memory.owner
        handle = bytes(_checked(owner.handle))
        return _encode(_Export(self._machine, this_process(), self._memory.address, handle))

    def connect(self, metadata: bytes, device: int | None) -> None:
        """Map the memory of the receiver."""
        try:
            export = self._export = _decode(metadata)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EndpointError(f"the metadata of the receiver is malformed: {error}") from error
        if device is None:
            raise EndpointError(
                "the slots of the receiver are in host memory; they must be in GPU memory"
            )
        if export.machine != self._machine:
            raise EndpointError(
                "the receiver runs on another server; 'cuda_ipc' connects GPUs of one server: use "
                "Peers(transport='nixl')"
            )
        if export.process == this_process():
            self._base = export.address  # memory of this process needs no mapping
            return
        self._mapped = _checked(_cuda.MappedMemory, self._device, export.handle)
        self._base = int(self._mapped.address)

    def write(self, pieces: Sequence[WritePiece], unwanted: threading.Event) -> None:
        """Copy pieces; return when they are in the memory of the receiver."""
        export = self._export
        if export is None:
            raise EndpointError("the endpoint is not connected")
        offset = self._base - export.address
        copies = [(piece.target + offset, piece.source, piece.num_bytes) for piece in pieces]
        work = _checked(self._copies.copy, copies)
        work.synchronize()
        if (failure := work.failure()) is not None:
            raise EndpointError(failure[2])

    def close(self) -> None:
        """End all copies, and unmap the memory of the receiver."""
        copies, self._copies = self._copies, None
        mapped, self._mapped = self._mapped, None
        for each in (copies, mapped):
            if each is not None:
                with suppress(DeviceError):  # the GPU is lost, so nothing runs on it any more
                    each.close()
        if self._receives:
            time.sleep(LAST_COPIES_SECONDS)
        self._receives = False


def _checked(call: Any, *args: Any) -> Any:
    """Call a function of the driver.

    Raises:
        EndpointError: it failed.
    """
    try:
        return call(*args)
    except DeviceError as error:
        raise EndpointError(str(error)) from error
