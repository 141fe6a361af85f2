"""RedisStore: blocks in the memory of Valkey or Redis."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from aiokv.base.groups import ATTENTION
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, Store, StoreMemory, split_keys
from aiokv.stores.options import parted_url, url_options, url_text
from aiokv.stores.redis import commands
from aiokv.stores.redis.commands import BatchKey
from aiokv.stores.redis.connection import MAX_VALUE_BYTES
from aiokv.stores.redis.nodes import Nodes, Sentinels, in_passes
from aiokv.stores.redis.options import (
    DEFAULT_PORT,
    DEFAULT_SENTINEL_PORT,
    parse_server,
    split_url,
    without_secrets,
)
from aiokv.stores.redis.pool import until_ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from numpy.typing import NDArray

    from aiokv.stores.redis.nodes import Job

_MAX_THREADS: Final = 256
_KEY_TEXT: Final = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
_NO_BLOCK: Final = memoryview(b"")

_URL_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "prefix": str,
    "ttl_seconds": int,
    "connections": int,
    "connect_timeout_seconds": float,
    "max_concurrent": int,
    "sentinel": str,
    "sentinel_password": str,
}


class RedisStore(Store):
    """Blocks in the memory of Valkey or Redis: one server, or a cluster.

    An object is a string under the key ``prefix`` + 64 hexadecimal digits. All engines with the
    same model, weights and layout share it, on every machine that reaches the server. The store
    needs redis-py (``pip install 'aiokv[redis]'``) to read the URL and the TLS options and to
    compute the slots of a cluster; values do not pass through redis-py.

    **Sockets.** The store listens on no port. It opens up to ``connections`` + 3 TCP connections
    to each master, each when it is first needed, and keeps them. One thread at a time uses a
    socket: it reads values into host blocks and sends values from host blocks. The event loop
    moves no payload. The store asks the server for the slots of a cluster, follows redirections
    and fail-overs, and reads from masters only.

    **Authentication.** With a password, the store sends ``AUTH``, with the user name if there is
    one. An ACL user needs ``~aiokv:* +get +set +strlen +unlink``; with ``ttl_seconds`` also
    ``+getex +expire``, with a database ``+select``, and in a cluster ``+asking +cluster|slots``.
    Purges need ``+scan``. To know without a lookup which blocks the server does not have, the
    engine lists the keys once and then follows their changes (``CLIENT TRACKING``; not in a
    cluster): ``+scan +client|id +client|tracking +subscribe &__redis__:invalidate``.
    With ``redis://``, the password and the blocks travel as plain text: use ``rediss://`` on a
    network that others can read. No message and no statistics contain the password. A client that
    may write to the server can replace blocks: the checksum of a block detects errors, but it is
    not a signature.

    **Memory.** The server decides which blocks it keeps. Set its ``maxmemory``. With
    ``maxmemory-policy allkeys-lru`` or ``allkeys-lfu``, a full server drops blocks that were not
    used for long: the usual choice. With ``noeviction``, the default, a full server refuses saves
    (``Result.REFUSED``) until blocks are removed or expire. With ``ttl_seconds``, a block expires
    that long after its last save or load. A cache needs no persistence, and a snapshot can double
    the memory of the server: set ``save ""`` and ``appendonly no``.

    **Promises.** A load fills a block only with a value of the length of an object; the guard
    then verifies key and checksum. A save first asks with ``STRLEN`` which objects the server has,
    and sends the others, and those of a wrong length, with ``SET`` without ``NX``. The server
    stores an object whole or not at all. A key is a digest of the tokens and the model that
    determine a block, so it does not matter which of two saves of a key is kept. A server that
    restarts without persistence, or a fail-over to a replica that lags, loses blocks: they are
    missing afterwards.

    Args:
        url: ``redis://[user:password@]host[:port][,host2[:port2]...][/database]``; ``rediss://``
            for TLS, with redis-py's options ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
            ``ssl_cert_reqs``, ``ssl_check_hostname``. ``valkey://`` and ``valkeys://`` are the
            same. Further hosts are nodes of the same cluster, for when the first is down.
        username: ACL user; replaces the one of the URL.
        password: replaces the one of the URL.
        prefix: prefix of all keys on the server.
        ttl_seconds: time after which an unused object expires; 0 for never. Needs version 6.2.
        connections: connections per node for values; a large batch uses several.
        connect_timeout_seconds: limit for connecting, TLS and authentication together.
        max_concurrent: operations that the guard runs at a time.
        sentinel: name of the master that Redis Sentinel watches; the hosts of ``url`` are then
            Sentinels, with port 26379 unless given, which are asked for the master before the first
            use and after each failure of the master. User and password are those of the servers.
        sentinel_password: password of the Sentinels; empty for none.

    Raises:
        ConfigError: a number is out of range, or ``url`` is not a str. ``open`` checks the rest of
            the URL.
    """

    kind = "redis"
    remember_missing_seconds = 5.0
    follows_keys = True

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        username: str | None = None,
        password: str | None = None,
        prefix: str = "aiokv:",
        ttl_seconds: int = 0,
        connections: int = 4,
        connect_timeout_seconds: float = 1.0,
        max_concurrent: int = 8,
        sentinel: str = "",
        sentinel_password: str = "",
    ) -> None:
        _check_range("ttl_seconds", ttl_seconds, 0, 10**9)
        _check_range("connections", connections, 1, 64)
        _check_range("connect_timeout_seconds", connect_timeout_seconds, 0.001, 3600)
        _check_range("max_concurrent", max_concurrent, 1, 1024)
        self.url = without_secrets(url_text(url))
        self.max_concurrent = max_concurrent
        self._secret_url = url
        self._credentials = username, password
        self._prefix = prefix.encode()
        self._options: dict[str, Any] = {
            "username": username,
            "password": password,
            "prefix": prefix,
            "ttl_seconds": ttl_seconds,
            "connections": connections,
            "connect_timeout_seconds": connect_timeout_seconds,
            "max_concurrent": max_concurrent,
            "sentinel": sentinel,
            "sentinel_password": sentinel_password,
        }
        self._sentinels = Sentinels(sentinel, sentinel_password) if sentinel else None
        self._ttl_seconds = ttl_seconds
        self._connections = connections
        self._connect_seconds = connect_timeout_seconds
        self._memory: StoreMemory | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._nodes: Nodes | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._counts: Counter[str] = Counter()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return a store for a URL that may have the arguments of ``RedisStore`` as options.

        For example ``redis://host:6379/0?ttl_seconds=86400&connections=8``.

        Raises:
            ConfigError: an option is out of range, is not a number, or is given twice.
        """
        split_url(url)  # raises if malformed, without the password
        own, rest = parted_url(url, _URL_OPTIONS)
        options = url_options(without_secrets(own), _URL_OPTIONS)
        secret = dict(parse_qsl(urlsplit(own).query)).get("sentinel_password", "")
        return cls(rest, **options, sentinel_password=secret)

    def __repr__(self) -> str:
        return f"RedisStore({self.url!r})"

    # --- Store ------------------------------------------------------------------------------------

    def for_group(self, group: str) -> RedisStore:
        """Return a store on the same servers, with connections of its own; see :class:`Store`."""
        return RedisStore(self._secret_url, **self._options)

    async def open(self, memory: StoreMemory) -> None:
        """Check the URL and the size of objects; the first use connects. Again after ``aclose``.

        Raises:
            ConfigError: redis-py is not installed, the URL is wrong, or an object is larger than a
                server accepts.
        """
        if memory.object_bytes > MAX_VALUE_BYTES:
            raise ConfigError(
                f"an object has {memory.object_bytes} bytes; a value of Redis has at most "
                f"{MAX_VALUE_BYTES} bytes",
                hint="lower block_tokens"
                if memory.group == ATTENTION
                else "a snapshot of recurrent state is too large for Redis; use another store",
            )
        executor = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="aiokv-redis")
        try:  # in a thread: importing redis-py and reading certificates takes a while
            port = DEFAULT_PORT if self._sentinels is None else DEFAULT_SENTINEL_PORT
            parsed = executor.submit(parse_server, self._secret_url, *self._credentials, port)
            server = await until_ended(parsed)
        except BaseException:
            executor.shutdown()
            raise
        self._memory = memory
        self._executor = executor
        self._is_closed = False
        self._nodes = Nodes(
            server, executor, self._connections, self._connect_seconds, self._sentinels
        )

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the store has an object of the right length."""
        items = await self._items(keys)
        await self._run(items, partial(commands.lookup, object_bytes=self._object_bytes))
        return np.array([item.result is Result.DONE for item in items], np.bool_)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read object ``i`` into host block ``blocks[i]``; return ``[N]`` uint8 ``Result``.

        Cancellation: the connections of the call are closed, and no byte arrives afterwards.
        """
        items = await self._items(keys, blocks)
        await self._run(items, partial(commands.load, ttl_seconds=self._ttl_seconds))
        return self._results("load", items)

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Store the object in host block ``blocks[i]``; return ``[N]`` uint8 ``Result``.

        Cancellation: the connections of the call are closed. Objects that the server received
        whole are stored, and all others are not.
        """
        items = await self._items(keys, blocks)
        await self._run(items, partial(commands.save, ttl_seconds=self._ttl_seconds))
        return self._results("save", items)

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects; return ``[N]`` uint8 ``Result``. Keys that are missing are ``DONE``."""
        items = await self._items(keys)
        await self._run(items, commands.remove)
        return self._results("remove", items)

    async def stored_keys(self, label: bytes = b"") -> AsyncGenerator[bytes]:
        """Yield the keys of all masters, with ``SCAN``; see :class:`Store`.

        Raises:
            StoreError: a master cannot be reached, or refuses ``SCAN``.
        """
        if self._is_closed or self._nodes is None:
            raise StoreError(f"{self.url} is {'closed' if self._is_closed else 'not open'}")
        digits = 2 * (KEY_BYTES - len(label))
        pattern = commands.escaped(self._prefix) + b"[0-9a-f]" * digits + label.hex().encode()
        async for names in self._nodes.scan(pattern):
            yield self._keys_of(names)

    async def follow_keys(self) -> AsyncGenerator[bytes | None]:
        """Yield all keys, and then those that are saved; see :class:`Store`.

        Raises:
            StoreError: the server cannot be reached, refuses a command, or is part of a cluster.
        """
        if self._is_closed or self._nodes is None:
            raise StoreError(f"{self.url} is {'closed' if self._is_closed else 'not open'}")
        changes: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        following = asyncio.create_task(self._nodes.follow(self._prefix, changes.put_nowait))
        self._running.add(following)
        following.add_done_callback(lambda _: changes.put_nowait(None))  # behind all changes
        following.add_done_callback(self._running.discard)
        is_listed = False
        try:
            async with aclosing(self.stored_keys()) as listing:
                while (names := await changes.get()) is not None:
                    yield self._keys_of(names)
                    while changes.empty() and not is_listed:  # so that few changes are kept
                        keys = await anext(listing, None)
                        is_listed = keys is None
                        yield keys
            await following
        finally:
            following.cancel()
            await asyncio.wait({following})

    def _keys_of(self, names: list[bytes]) -> bytes:
        """Return the keys of the names that name objects."""
        start = len(self._prefix)
        texts = [name[start:] for name in names]
        return bytes.fromhex(b"".join(text for text in texts if _KEY_TEXT.fullmatch(text)).decode())

    def statistics(self) -> StoreStatistics:
        """Return counters since ``open``; size and capacity are known only to the server.

        ``details`` has the number of keys by operation and result (``load_done``,
        ``save_refused``, ``save_present`` for objects that were not sent again),
        ``connections_opened``, ``redirections`` and ``slot_refreshes``.
        """
        details = dict(self._counts)
        if self._nodes is not None:
            details |= self._nodes.counts
            details["connections_opened"] = self._nodes.connections_opened
        return StoreStatistics(details=details)

    async def aclose(self) -> None:
        """End operations in flight with ``StoreError``, and close all connections. Idempotent."""
        self._is_closed = True
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._nodes is not None:
            self._nodes.close_idle()
        if self._executor is not None:
            self._executor.shutdown()  # its threads have no jobs
        self._executor = self._memory = None

    # --- batches ----------------------------------------------------------------------------------

    @property
    def _object_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.object_bytes

    async def _items(self, keys: bytes, blocks: NDArray[np.int32] | None = None) -> list[BatchKey]:
        """Return an item per key; without blocks, for a request that moves no value."""
        items: list[BatchKey] = []
        ids = None if blocks is None else blocks.tolist()
        async for some in in_passes(split_keys(keys)):
            names = [self._prefix + key.hex().encode() for key in some]
            if ids is None or self._memory is None:
                items += [BatchKey(name, _NO_BLOCK) for name in names]
            else:
                numbers = ids[len(items) : len(items) + len(names)]
                objects = map(self._memory.object, numbers)
                items += map(BatchKey, names, objects)
        return items

    async def _run(self, items: Sequence[BatchKey], job: Job) -> None:
        """Run a job in a task that ``aclose`` can end.

        Raises:
            StoreError: no item got an answer, or the store was closed.
        """
        if self._is_closed or self._nodes is None:
            raise StoreError(f"{self.url} is {'closed' if self._is_closed else 'not open'}")
        task = asyncio.create_task(self._nodes.run(items, job))
        self._running.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not _is_cancelling():  # aclose() cancelled the task
                raise StoreError(f"{self.url} was closed during the operation") from None
            raise
        finally:
            self._running.discard(task)

    def _results(self, operation: str, items: Sequence[BatchKey]) -> NDArray[np.uint8]:
        results = [item.result for item in items]
        for result, count in Counter(results).items():
            self._counts[f"{operation}_{result.name.lower()}"] += count
        return np.array(results, np.uint8)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}; it must be between {least} and {most}")
