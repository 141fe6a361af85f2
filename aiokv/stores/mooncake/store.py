"""MooncakeStore: blocks in the memory of a Mooncake Store cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np

from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Store, StoreMemory, split_keys
from aiokv.stores.mooncake.client import ClientOptions, MooncakeClient, import_library
from aiokv.stores.mooncake.link import MasterLink
from aiokv.stores.options import parse_bytes, url_options
from aiokv.stores.threads import StoreThreads

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from numpy.typing import NDArray

_MAX_CONCURRENT: Final = 2  # more threads share the bandwidth of one
_PROTOCOLS: Final = ("rdma", "tcp")


class MooncakeStore(Store):
    """Blocks in the memory of a Mooncake Store cluster.

    The cluster is a process ``mooncake_master`` and clients that give it memory: processes of
    their own, or servers with ``segment_bytes``. The client listens on all interfaces, on ports
    that it chooses, and neither it nor the master has authentication or encryption: a process
    that reaches them can read and write all blocks, from which prompts can be reconstructed. Use
    them on a network that only the servers of the cluster can reach.

    The library holds the interpreter's lock while a client is set up (about 0.1 s: when the store
    is opened, or when the master is reached for the first time) and closed (up to 1 s).

    Opening sets the environment variables ``MC_RPC_TIMEOUT_MS=500``,
    ``MC_RPC_CONNECT_TIMEOUT_MS=200`` and further timeouts of the library, unless they are set: by
    default, a call waits for a stopped process for half a minute.

    Args:
        master: ``host:port`` of the master.
        protocol: ``"tcp"``, or ``"rdma"`` for all clients of the cluster.
        devices: names of RDMA devices, separated by commas; empty to choose.
        hostname: name or address under which other clients reach this one; None for the address
            of the interface that leads to the master.
        metadata_server: as the other clients have it; by default they find each other through the
            master alone.
        segment_bytes: memory that this process gives to the cluster, as a number or ``"16GiB"``;
            blocks in it are lost when the process ends. None to give none.
        replicas: copies of each object, each in the memory of another client.

    Raises:
        ConfigError: an argument is out of range.
    """

    kind: str = "mooncake"
    remember_missing_seconds: float = 5.0

    def __init__(
        self,
        master: str,
        *,
        protocol: str = "tcp",
        devices: str = "",
        hostname: str | None = None,
        metadata_server: str = "P2PHANDSHAKE",
        segment_bytes: int | str | None = None,
        replicas: int = 1,
    ) -> None:
        self._host, self._port = _host_and_port(master)
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"protocol is {protocol!r}; it must be one of {_PROTOCOLS}")
        if replicas < 1:
            raise ConfigError(f"replicas is {replicas}; it must be at least 1")
        self.url = f"mooncake://{master}"
        self.max_concurrent = _MAX_CONCURRENT
        self._options = ClientOptions(
            master=master,
            hostname=hostname or "",
            metadata_server=metadata_server,
            protocol=protocol,
            devices=devices,
            segment_bytes=0 if segment_bytes is None else parse_bytes(segment_bytes),
            replicas=replicas,
        )
        self._library: Any = None
        self._memory: StoreMemory | None = None
        self._client: MooncakeClient | None = None
        self._connections = 0
        self._connecting = asyncio.Lock()
        self._link: MasterLink | None = None
        self._threads: StoreThreads | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of ``mooncake://host:port?protocol=rdma&replicas=2``.

        Raises:
            ConfigError: the URL has no host and port, or an option is unknown or out of range.
        """
        options: dict[str, Callable[[str], Any]] = {
            "protocol": str,
            "devices": str,
            "hostname": str,
            "metadata_server": str,
            "segment_bytes": parse_bytes,
            "replicas": int,
        }
        return cls(urlsplit(url).netloc, **url_options(url, options))

    def for_group(self, group: str) -> MooncakeStore:
        """Return a store of the same cluster; see :class:`Store`. It has a client of its own, which
        contributes no memory to the cluster."""
        options = self._options
        return MooncakeStore(
            options.master,
            protocol=options.protocol,
            devices=options.devices,
            hostname=options.hostname or None,
            metadata_server=options.metadata_server,
            replicas=options.replicas,
        )

    async def open(self, memory: StoreMemory) -> None:
        """Import the library and connect; see :class:`Store`.

        Raises:
            ConfigError: the package, or a library that it needs, is not installed.

        Cancellation: nothing is left behind.
        """
        threads = StoreThreads(
            "mooncake", 2 * _MAX_CONCURRENT
        )  # one thread per lookup and per transfer
        self._threads, self._memory = threads, memory
        self._link, self._connecting = MasterLink(self._host, self._port), asyncio.Lock()
        try:
            self._library = await threads.run(lambda _: import_library())
            await self._connected()
        except StoreError:
            return  # the next operation connects
        except BaseException:
            await self.aclose()
            raise

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the cluster has it; see :class:`Store`.

        Raises:
            StoreError: the master cannot be reached.
        """
        return await self._run(keys, lambda client, names, _: client.exist(names), np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read objects into host blocks; see :class:`Store`.

        Raises:
            StoreError: the master, or each process that holds one of the objects, is unreachable.
        """
        return await self._run(
            keys, lambda client, names, unwanted: client.load(names, blocks, unwanted)
        )

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Write objects from host blocks; see :class:`Store`.

        Raises:
            StoreError: the master, or each process that was to hold an object, is unreachable.
        """
        return await self._run(
            keys, lambda client, names, unwanted: client.save(names, blocks, unwanted)
        )

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects; see :class:`Store`.

        Raises:
            StoreError: the master cannot be reached.
        """
        return await self._run(keys, lambda client, names, _: client.remove(names))

    async def purge(self, label: bytes) -> int:
        """Remove all objects of a label with a pattern of their names; see :class:`Store`.

        Raises:
            StoreError: the master cannot be reached.
        """
        pattern = f"^aiokv/[0-9a-f]{{{2 * (KEY_BYTES - len(label))}}}{label.hex()}$"
        client, threads = await self._connected()
        return await threads.run(lambda _: client.remove_matching(pattern))

    def statistics(self) -> StoreStatistics:
        """Return counters; the size of the cluster is not known here."""
        return StoreStatistics(details={"connections": self._connections})

    async def aclose(self) -> None:
        """End operations in flight and disconnect. Idempotent.

        Cancellation: takes effect when the library no longer accesses the memory.
        """
        if self._threads is None:
            return
        threads, link = self._threads, self._link
        self._threads = self._link = self._memory = None
        try:
            await threads.aclose()
        finally:  # a cancellation, too, must unregister the memory
            if self._client is not None:
                await _in_a_thread(self._client.close)
                self._client = None
            if link is not None:
                await link.aclose()

    async def _run(
        self,
        keys: bytes,
        call: Callable[[MooncakeClient, list[str], threading.Event], NDArray[Any]],
        dtype: type[np.generic] = np.uint8,
    ) -> NDArray[Any]:
        """Return the result of a call with the names of objects; without keys, an empty array."""
        if not keys:
            return np.zeros(0, dtype)
        names = [f"aiokv/{key.hex()}" for key in split_keys(keys)]
        client, threads = await self._connected()
        return await threads.run(lambda unwanted: call(client, names, unwanted))

    async def _connected(self) -> tuple[MooncakeClient, StoreThreads]:
        """Return the client, connected to a master that runs, and the threads to use it in."""
        link, threads, memory = self._link, self._threads, self._memory
        if link is None or threads is None or memory is None:
            raise StoreError(f"{self.url} is not open")
        address = await link.ensure()
        options = self._options
        if not options.hostname:
            options = msgspec.structs.replace(options, hostname=address)

        def connect(_: threading.Event) -> None:
            self._client = MooncakeClient(self._library, options, memory)

        async with self._connecting:
            if self._client is None or self._client.is_closed:
                await link.check()
                await threads.run(connect)
                self._connections += 1
            if self._client is None:
                raise StoreError(f"{self.url} is not open")
            return self._client, threads


async def _in_a_thread(call: Callable[[], None]) -> None:
    threads = StoreThreads("mooncake", 1)
    try:
        await threads.run(lambda _: call())
    finally:
        await threads.aclose()


def _host_and_port(master: str) -> tuple[str, int]:
    parts = urlsplit(f"//{master}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.path:
        raise ConfigError(f"master is {master!r}; it must be host:port, such as 10.0.0.5:50051")
    return parts.hostname, port
