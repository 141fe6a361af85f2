"""Nodes: brings the items of a batch to the nodes that have their keys."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from aiokv.errors import StoreError
from aiokv.stores.base import Result
from aiokv.stores.redis.commands import follow, scan
from aiokv.stores.redis.connection import ReplyError
from aiokv.stores.redis.options import Address
from aiokv.stores.redis.pool import ConnectionPool
from aiokv.stores.redis.slots import SlotMap
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from aiokv.stores.redis.commands import BatchKey
    from aiokv.stores.redis.connection import RedisConnection, Reply
    from aiokv.stores.redis.options import RedisServer

    Job: TypeAlias = Callable[[RedisConnection, Sequence[BatchKey]], None]

T = TypeVar("T")

KEYS_PER_PASS: Final = 256
MAX_ROUNDS: Final = 5  # requests for a key in one call: at most 4 redirections are followed
SMALL_CONNECTIONS: Final = 2  # per node, for requests that must not wait behind values
PART_BYTES: Final = 16 << 20  # a larger batch is spread over several connections


class Sentinels(NamedTuple):
    """Sentinels that know the address of a master.

    Attributes:
        master: name of the master.
        password: of the Sentinels; empty for no ``AUTH``.
    """

    master: str
    password: str


class Nodes:
    """The server, or the masters of a cluster.

    The slots of a cluster are asked for before the first batch, and again after a redirection, a
    lost connection or a cancelled call: a fail-over may be the cause of each of them.

    Args:
        server: seeds, credentials and TLS.
        executor: threads of the jobs; at least as many as there are connections.
        connections: connections per node for values.
        connect_seconds: limit of connecting, and of a question for the slots.
        sentinels: the seeds are Sentinels, which are asked for the server, not for the slots of a
            cluster; None if the seeds are servers.

    Attributes:
        counts: ``redirections`` of keys and ``slot_refreshes``.
    """

    def __init__(
        self,
        server: RedisServer,
        executor: Executor,
        connections: int,
        connect_seconds: float,
        sentinels: Sentinels | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._seeds = server.seeds
        self._connections = connections
        self._connect_seconds = connect_seconds
        self._values = ConnectionPool(server, executor, connections, connect_seconds)
        self._small = ConnectionPool(server, executor, SMALL_CONNECTIONS, connect_seconds)
        self._followed = ConnectionPool(server, executor, 1, connect_seconds)
        self._following: tuple[Address, asyncio.Task[None]] | None = None
        self._sentinels = sentinels
        self._asked, self._question = self._small, _ask_slots
        if sentinels is not None:
            login = replace(server, username="", password=sentinels.password, database=0)
            self._asked = ConnectionPool(login, executor, 1, connect_seconds)
            self._question = partial(_ask_master, name=sentinels.master)
        self._slots: SlotMap | None = None
        self._is_stale = True
        self._refreshing = asyncio.Lock()
        # Nodes in redirections since the last request for the slots.
        self._named: list[Address] = []
        self._failed: set[Address] = set()  # nodes that failed since then

    @property
    def connections_opened(self) -> int:
        """Number of connections opened so far."""
        return self._values.opened + self._small.opened + self._followed.opened

    def close_idle(self) -> None:
        """Close all connections; there must be no calls in flight."""
        for pool in {self._values, self._small, self._asked}:
            pool.close_idle()

    async def run(self, items: Sequence[BatchKey], job: Job) -> None:
        """Run a job on the items of each node, and again on redirected items.

        Raises:
            StoreError: no item got an answer.

        Cancellation: all jobs have ended.
        """
        rest = items
        errors: list[StoreError] = []
        for _ in range(MAX_ROUNDS):
            if not rest:
                break
            parts = await self._parts(rest)
            errors += await self._run_parts(parts, job)
            rest = [
                item
                for address, part in parts
                for item in part
                if item.error is not None and self._redirects(address, item, item.error)
            ]
        if items and all(item.result is Result.FAILED for item in items):
            raise errors[0] if errors else _refusal(items)

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Yield the names of all masters that match a pattern, in batches; some may be repeated.

        Raises:
            StoreError: a master cannot be reached, or refuses the command.
        """
        slots = await self._known_slots()
        for address in slots.masters:
            cursor = b"0"
            while True:
                job = partial(scan, cursor=cursor, pattern=pattern)
                cursor, names = await self._small.run(address, job)
                if names:
                    yield list(dict.fromkeys(names))
                if cursor == b"0":
                    break

    async def follow(self, prefix: bytes, deliver: Callable[[list[bytes]], object]) -> None:
        """Deliver the names that change on the server; see ``commands.follow``.

        Raises:
            StoreError: the connection was lost, the server refuses a command, or it is part of a
                cluster.
        """
        slots = await self._known_slots()
        if slots.is_cluster:  # whose slots may move to other nodes
            raise StoreError("redis store: the changes of a cluster are not followed")
        loop = asyncio.get_running_loop()

        def pass_on(names: list[bytes]) -> None:
            loop.call_soon_threadsafe(deliver, names)

        (master,) = slots.masters
        job = partial(follow, prefix=prefix, deliver=pass_on)
        task = loop.create_task(self._followed.run(master, job))
        self._following = master, task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await all_ended([task])
        if task.cancelled():
            raise StoreError(f"redis store: {master} has failed, or is no longer the master")
        task.result()

    async def _parts(self, items: Sequence[BatchKey]) -> list[tuple[Address, list[BatchKey]]]:
        """Return the items by node, in parts that run at the same time."""
        slots = await self._known_slots()
        groups: dict[tuple[Address, bool], list[BatchKey]] = defaultdict(list)
        async for some in in_passes(items):
            for item in some:
                groups[item.node or slots.node(item.name), item.asking].append(item)
        return [
            (address, part) for (address, _), group in groups.items() for part in self._split(group)
        ]

    def _split(self, group: list[BatchKey]) -> Iterable[list[BatchKey]]:
        """Return the parts of a batch that run at the same time.

        A batch takes at most half of the connections to a node; other calls have the rest.
        """
        num_bytes = len(group) * len(group[0].block)
        parts = max(1, min(self._connections // 2, len(group), num_bytes // PART_BYTES))
        return (group[i::parts] for i in range(parts))

    async def _run_parts(
        self, parts: Sequence[tuple[Address, list[BatchKey]]], job: Job
    ) -> list[StoreError]:
        if len(parts) == 1:
            found = [await self._run_part(*parts[0], job)]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_part(*part, job)) for part in parts]
            found = [task.result() for task in tasks]
        return [error for error in found if error is not None]

    async def _run_part(
        self, address: Address, items: list[BatchKey], job: Job
    ) -> StoreError | None:
        pool = self._values if items[0].block else self._small
        try:
            await pool.run(address, lambda connection: job(connection, items))
        except StoreError as error:
            self._lose(address)
            return error
        except asyncio.CancelledError:
            self._suspect(address)  # the node may have been too slow
            raise
        return None

    def _suspect(self, address: Address) -> None:
        self._is_stale = True
        self._failed.add(address)

    def _lose(self, address: Address) -> None:
        """Note that a node has failed, or is no longer the master."""
        self._suspect(address)
        if self._following is not None and self._following[0] == address:
            self._following[1].cancel()

    def _redirects(self, address: Address, item: BatchKey, error: ReplyError) -> bool:
        """Prepare an item for the node that the reply names; return False if it names none."""
        code, _, place = error.text.partition(" ")
        if code in ("CLUSTERDOWN", "READONLY", "MASTERDOWN"):
            self._lose(address)
        if code not in ("MOVED", "ASK"):
            return False
        host, _, port = place.rpartition(" ")[2].rpartition(":")
        if not port.isdecimal():
            return False
        item.redirect(Address(host or address.host, int(port)), asking=code == "ASK")
        self.counts["redirections"] += 1
        if code == "MOVED":
            self._is_stale = True
            self._named.append(item.node or address)
        return True

    # --- slots ------------------------------------------------------------------------------------

    async def _known_slots(self) -> SlotMap:
        async with self._refreshing:
            if self._slots is None or self._is_stale:
                self._slots = await self._ask_nodes()
                self.counts["slot_refreshes"] += 1
                if self._following is not None and self._following[0] not in self._slots.masters:
                    self._following[1].cancel()
        return self._slots

    async def _ask_nodes(self) -> SlotMap:
        """Return the slots as the first node that replies knows them.

        Raises:
            StoreError: no node replied; the first error.
        """
        masters = self._slots.masters if self._slots is not None else ()
        known = dict.fromkeys([*self._named, *masters, *self._seeds])
        if self._sentinels is not None:
            known = dict.fromkeys(self._seeds)
        first_error: StoreError | None = None
        for address in sorted(known, key=self._failed.__contains__):
            try:
                async with asyncio.timeout(self._connect_seconds):
                    reply = await self._asked.run(address, self._question)
                parse = _slot_map if self._sentinels is None else _master_of
                slots = parse(address, reply)
            except TimeoutError:
                error = StoreError(
                    f"redis store: {address} did not reply within {self._connect_seconds:g} s"
                )
                first_error = first_error or error
            except StoreError as error:
                first_error = first_error or error
            else:
                self._is_stale = False
                self._named.clear()
                self._failed.clear()
                return slots
        raise first_error or StoreError("redis store: no node is known")


async def in_passes(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield the items in parts, one per pass of the loop, so that no pass takes long."""
    for begin in range(0, len(items), KEYS_PER_PASS):
        if begin:
            await asyncio.sleep(0)
        yield items[begin : begin + KEYS_PER_PASS]


def _ask_slots(connection: RedisConnection) -> Reply:
    return connection.request(b"CLUSTER", b"SLOTS")


def _ask_master(connection: RedisConnection, name: str) -> Reply:
    return connection.request(b"SENTINEL", b"get-master-addr-by-name", name.encode())


def _master_of(address: Address, reply: Reply) -> SlotMap:
    """Return the map of a Sentinel's reply: one master has all keys."""
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit():
            return SlotMap(Address(host.decode(), int(port)), None)
    raise StoreError(f"redis store: the Sentinel {address} knows no such master: {reply!r}")


def _slot_map(address: Address, reply: Reply) -> SlotMap:
    if isinstance(reply, list):
        return SlotMap(address, reply)
    if isinstance(reply, ReplyError) and reply.code in ("ERR", "NOPERM"):
        return SlotMap(address, None)  # not a cluster, or the user may not query it
    raise StoreError(f"redis store: {address} replied {reply!r} to CLUSTER SLOTS")


def _refusal(items: Sequence[BatchKey]) -> StoreError:
    text = next((item.error.text for item in items if item.error is not None), "")
    if not text:
        return StoreError(f"redis store: nodes redirected the keys {MAX_ROUNDS} times in a row")
    return StoreError(f"redis store: the server replied {text!r}")
