"""MooncakeClient: the client library of Mooncake Store. All methods block."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np

from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import Result, StoreMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

# The library reads these variables once, when it is imported or set up. With its own defaults, a
# call may wait for 30 seconds and more. Values that the user has set are kept.
ENVIRONMENT: Final = {
    "MC_RPC_TIMEOUT_MS": "500",
    "MC_RPC_CONNECT_TIMEOUT_MS": "200",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
    "MC_TCP_LANES_PER_PEER": "16",  # lanes time out one after the other: 1 s per 16 transfers
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_KEYS_PER_CALL: Final = 128  # few, because a call cannot be interrupted even when the process stops
_LOCAL_BUFFER_BYTES: Final = 16 << 20  # the library requires it, but aiokv does not use it


class Code(IntEnum):
    """Result codes of the library that have a meaning here."""

    OK = 0
    NO_ROOM = -200
    WRONG_LENGTH = -600
    NOT_READY = -703
    NOT_FOUND = -704
    EXISTS = -705
    RPC_FAILED = -900
    RPC_TIMED_OUT = -901
    QUOTA_EXCEEDED = -1700


# After these codes the library no longer accesses the block: the request was refused before
# its transfer began. After another failure a transfer may still run.
_AT_REST: Final = np.array([code.value for code in Code], np.int64)

_LOADED: Final = {
    Code.NOT_FOUND: Result.MISSING,
    Code.NOT_READY: Result.MISSING,
    Code.WRONG_LENGTH: Result.WRONG,
}
_SAVED: Final = {
    Code.OK: Result.DONE,
    Code.EXISTS: Result.PRESENT,
    Code.NO_ROOM: Result.REFUSED,
    Code.QUOTA_EXCEEDED: Result.REFUSED,
}


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a client's connection.

    Attributes:
        master: ``host:port`` of the master.
        hostname: name or address under which other clients reach this one.
        metadata_server: as the other clients of the cluster have it.
        protocol: ``"tcp"`` or ``"rdma"``.
        devices: names of RDMA devices, separated by commas; empty to choose.
        segment_bytes: memory that this process gives to the cluster.
        replicas: copies of each object.
    """

    master: str
    hostname: str
    metadata_server: str
    protocol: str
    devices: str
    segment_bytes: int
    replicas: int


def import_library() -> Any:
    """Set the timeouts of the library, and import it.

    Raises:
        ConfigError: the package, or a library that it needs, is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise ConfigError(
            "MooncakeStore needs the package mooncake-transfer-engine",
            hint="pip install 'aiokv[mooncake]', or 'aiokv[mooncake-cpu]' without CUDA",
        ) from error
    except ImportError as error:
        if "libibverbs" in str(error):
            hint = "apt-get install libibverbs1"
        elif "libcuda" in str(error):
            hint = "without CUDA, pip install 'aiokv[mooncake-cpu]' instead"
        else:
            hint = "install this library"
        raise ConfigError(f"mooncake.store cannot be loaded: {error}", hint=hint) from error
    return store


class MooncakeClient:
    """A connected client with the host arena registered.

    Args:
        library: the module ``mooncake.store``.
        options: arguments of the connection.
        memory: the host arena.

    Raises:
        StoreError: the cluster cannot be reached, or refuses the memory.
    """

    def __init__(self, library: Any, options: ClientOptions, memory: StoreMemory) -> None:
        self._memory = memory
        self._protocol = options.protocol
        self._replication = library.ReplicateConfig()
        self._replication.replica_num = options.replicas
        self._users = 0
        self._idle = threading.Condition()
        self._is_closed = False
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(
            options.hostname,
            options.metadata_server,
            options.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        if code == 0:
            code = self._store.register_buffer(memory.address, memory.num_bytes)
        if code != 0:
            self._store.close()
            raise StoreError(f"Mooncake client cannot be set up at {options.master}: code {code}")

    def exist(self, names: list[str]) -> NDArray[np.bool_]:
        """Return for each name whether the cluster has an object.

        Raises:
            StoreError: the master did not answer.
        """
        with self._in_use():
            codes = np.array(self._store.batch_is_exist(names), np.int64)
        _raise_if_lost(codes)
        return np.equal(codes, 1)

    def load(
        self, names: list[str], blocks: NDArray[np.int32], unwanted: threading.Event
    ) -> NDArray[np.uint8]:
        """Read objects into host blocks; return ``Result`` codes.

        Raises:
            StoreError: no object could be read.
        """
        codes = self._transferred(self._store.batch_get_into, names, blocks, unwanted)
        results = _translated(codes, _LOADED)
        results[codes >= 0] = Result.WRONG
        results[codes == self._memory.object_bytes] = Result.DONE
        return results

    def save(
        self, names: list[str], blocks: NDArray[np.int32], unwanted: threading.Event
    ) -> NDArray[np.uint8]:
        """Write host blocks as objects; return ``Result`` codes.

        Raises:
            StoreError: no object could be written.
        """

        def put(names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
            return cast(
                "list[int]",
                self._store.batch_put_from(names, addresses, sizes, self._replication),
            )

        return _translated(self._transferred(put, names, blocks, unwanted), _SAVED)

    def _transferred(
        self,
        call: Callable[[list[str], list[int], list[int]], list[int]],
        names: list[str],
        blocks: NDArray[np.int32],
        unwanted: threading.Event,
    ) -> NDArray[np.int64]:
        """Move blocks by several calls, until one of them moves none; return the codes."""
        memory = self._memory
        addresses = (memory.address + blocks.astype(np.int64) * memory.pitch_bytes).tolist()
        codes = np.full(len(names), Code.RPC_FAILED, np.int64)
        for first in range(0, len(names), _KEYS_PER_CALL):
            if unwanted.is_set():
                break
            part = slice(first, first + _KEYS_PER_CALL)
            count = len(names[part])
            with self._in_use():
                codes[part] = call(names[part], addresses[part], [memory.object_bytes] * count)
            self._settle(codes[part])
            if not _are_known(codes[part]).any():
                break
        _raise_if_lost(codes)
        return codes

    def remove(self, names: list[str]) -> NDArray[np.uint8]:
        """Remove objects, even while another client reads them. Return ``Result`` codes.

        Raises:
            StoreError: the master did not answer.
        """
        with self._in_use():
            codes = np.array(self._store.batch_remove(names, True), np.int64)
        _raise_if_lost(codes)
        return _translated(codes, {Code.OK: Result.DONE, Code.NOT_FOUND: Result.DONE})

    def remove_matching(self, pattern: str) -> int:
        """Remove the objects whose names match a regular expression, even while another client
        reads them; return their number.

        Raises:
            StoreError: the master did not answer.
        """
        with self._in_use():
            removed = int(self._store.remove_by_regex(pattern, True))
        if removed < 0:
            raise StoreError(f"the Mooncake master removed no objects: code {removed}")
        return removed

    @property
    def is_closed(self) -> bool:
        """True after ``close``, and after a failed transfer over RDMA."""
        return self._is_closed

    def close(self) -> None:
        """Wait for calls in flight and disconnect; no memory is accessed afterwards. Idempotent."""
        with self._idle:
            if self._is_closed:
                return
            self._is_closed = True
            self._idle.wait_for(lambda: self._users == 0)
        self._store.unregister_buffer(self._memory.address)
        self._store.close()

    def _settle(self, codes: NDArray[np.int64]) -> None:
        """End the client after a failed transfer that might still access its block.

        Over TCP, a transfer has failed when its connection is closed.
        """
        if self._protocol != "tcp" and not ((codes >= 0) | np.isin(codes, _AT_REST)).all():
            self.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._idle:
            if self._is_closed:
                raise StoreError("the Mooncake client was closed after a failed transfer")
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()


def _translated(codes: NDArray[np.int64], meaning: dict[Code, Result]) -> NDArray[np.uint8]:
    results = np.full(len(codes), Result.FAILED, np.uint8)
    for code, result in meaning.items():
        results[codes == code] = result
    return results


def _are_known(codes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each code whether it tells about its key, and not about the cluster."""
    return (codes >= 0) | np.isin(codes, (*_LOADED, *_SAVED))


def _raise_if_lost(codes: NDArray[np.int64]) -> None:
    """Raise when each key has failed for a reason that is not the key's own."""
    if len(codes) and not _are_known(codes).any():
        code = int(codes[0])
        if code in (Code.RPC_FAILED, Code.RPC_TIMED_OUT):
            raise StoreError(f"the Mooncake master did not answer: code {code}")
        raise StoreError(
            f"the Mooncake cluster moved no block: code {code}",
            hint="check the processes that hold its memory",
        )
