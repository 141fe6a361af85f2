"""HostService: the process that owns the shared memory of a host.

The service knows which key is in which slot; engines copy objects to and from the slots themselves.
A slot that an engine copies from is pinned, and a slot that it writes has no key until the object
is whole. Both end with the connection of the engine.

Only processes of the same user attach. Such a process can write to slots of others; an engine
verifies each object that it loads, so damaged objects are not used.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import msgspec

from aiokv.base.logs import Log
from aiokv.errors import AiokvError, ConfigError, StoreError
from aiokv.layout.host_block import STORE_ALIGNMENT_BYTES, TRAILER_BYTES
from aiokv.stores.disk.store import DiskStore
from aiokv.stores.guard import Costs
from aiokv.stores.host.attachment import Attachment
from aiokv.stores.host.below import Below
from aiokv.stores.host.messages import (
    ADMISSION_CODEC,
    FIRST_CODEC,
    PROTOCOL_VERSION,
    SERVICE_CODEC,
    Counts,
    Hello,
    Newest,
    Purge,
    Refuse,
    Report,
    Welcome,
)
from aiokv.stores.host.pools import SlotPools
from aiokv.stores.host.requests import Requests
from aiokv.stores.labels import MAX_LABELS, usage
from aiokv.stores.threads import StoreThreads
from aiokv.wire.connection import Callbacks, Connection, WireLimits
from aiokv.wire.frames import FrameWriter, ProtocolError
from aiokv.wire.listener import Listener
from aiokv.wire.sockets import HandshakeError, check_user, first_message, send_with_descriptor
from aiokv.wire.unix import OwnedSocket

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from aiokv.stores.host.messages import FromEngine, FromService
    from aiokv.stores.host.pools import SlotPool
    from aiokv.stores.use import StoreUse

_log: Final = Log(__name__)
_BACKLOG: Final = 128
_THREADS: Final = 2
_LABEL_SECONDS: Final = 1.0  # between two replies with labels to an engine


class HostService:
    """Shared memory behind a Unix socket. Used on one loop, as a context manager.

    Args:
        path: path of the socket, in a directory that no other user can write.
        capacity_bytes: limit of the shared memory.
        below: store that gets all objects, too, and whose objects are loaded again; None for none.

    Raises:
        ConfigError: the store below cannot have objects of several sizes.
    """

    def __init__(self, path: Path, capacity_bytes: int, below: StoreUse | None = None) -> None:
        self._path = path
        self._below_use = below
        self._costs = None if below is None else Costs.new(below)
        self._below: dict[tuple[int, int], asyncio.Task[Below]] = {}
        self._threads = StoreThreads("host", _THREADS)
        self._limits = WireLimits()
        self._socket: OwnedSocket | None = None
        self._listener: Listener[Connection[FromService, FromEngine]] | None = None
        # None between the handshake and the start of a process that attaches to no size.
        self._peers: dict[Connection[FromService, FromEngine], Attachment | Requests | None] = {}
        self._disk: DiskStore | None = None
        if below is not None:
            if not isinstance(below.store, DiskStore):
                raise ConfigError(
                    f"below is a store of kind {below.store.kind!r}; it must be a disk store",
                    hint="write --below 'disk:/nvme/kv?bytes=400GiB'",
                )
            self._disk = below.store
        below_bytes = 0 if self._disk is None else self._disk.statistics().capacity_bytes
        self._pools = SlotPools(capacity_bytes, below_bytes)

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: the socket cannot be created, or another process listens there.
        """
        self._socket = OwnedSocket(self._path, _BACKLOG)
        self._listener = Listener(
            self._socket.listening, str(self._path), self._admit, self._start, self._limits
        )
        _log.info("host.opened", path=str(self._path), capacity_bytes=self._pools.capacity_bytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Detach all engines, save queued objects to the store below, and remove the socket."""
        if self._socket is not None and self._listener is not None:
            self._socket.remove()
            await self._listener.aclose()
        for peer in self._peers.values():
            if peer is not None:
                await peer.aclose()
        for opening in list(self._below.values()):
            with suppress(AiokvError):  # its engine was refused
                await (await opening).aclose()
        await self._threads.aclose()
        self._pools.close()
        _log.info("host.closed", path=str(self._path))

    def report(self) -> Report:
        """Return the counts of all sizes."""
        counts: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        for pool in self._pools.pools.values():
            for kind, by_label in pool.table.label_counts(MAX_LABELS).items():
                counts[kind].update(by_label)
        blocks = sum(pool.table.stored for pool in self._pools.pools.values())
        return Report(
            capacity_bytes=self._pools.capacity_bytes,
            below="" if self._below_use is None else self._below_use.store.url,
            sizes=[self._with_labels(pool)() for pool in self._pools.pools.values()],
            labels=usage(counts, blocks),
        )

    def _counts_of(self, pool: SlotPool) -> Counts:
        opening = self._below.get((pool.payload_bytes, pool.pitch_bytes))
        if opening is None or not opening.done() or _failed(opening):
            return pool.counts
        below = opening.result()
        return msgspec.structs.replace(
            pool.counts,
            saved_below=below.saved_blocks,
            loaded_below=below.loaded_blocks,
            dropped_below=below.dropped_blocks,
        )

    def _with_labels(self, pool: SlotPool) -> _CountsWithLabels:
        return _CountsWithLabels(partial(self._counts_of, pool), pool)

    # --- engines ----------------------------------------------------------------------------------

    async def _admit(
        self, _: object, accepted: socket.socket, remote: str
    ) -> Connection[FromService, FromEngine]:
        """Return the connection of an engine, or of a process that reads the counts."""
        check_user(accepted)
        first = await first_message(accepted, FIRST_CODEC)
        attachment = None
        try:
            if first.version != PROTOCOL_VERSION:
                raise StoreError(
                    f"the engine has version {first.version} of the protocol; this service has "
                    f"version {PROTOCOL_VERSION}"
                )
            if isinstance(first, Hello):
                attachment = await self._attachment(first)
        except AiokvError as error:
            await _send(accepted, Refuse(reason=str(error)))
            raise HandshakeError(str(error)) from error
        connection = Connection(accepted, remote, SERVICE_CODEC)
        if attachment is None:
            await _send(accepted, self.report())
        else:
            pool = attachment.pool
            welcome = Welcome(num_slots=pool.num_slots, num_counters=len(pool.memory.counters))
            frame = FrameWriter(None).frame(ADMISSION_CODEC.encoded(welcome))
            await send_with_descriptor(accepted, frame, pool.descriptor)
        self._peers = {c: peer for c, peer in self._peers.items() if not c.reason}
        self._peers[connection] = attachment
        return connection

    async def _attachment(self, hello: Hello) -> Attachment:
        size = hello.payload_bytes, hello.pitch_bytes
        is_aligned = hello.pitch_bytes % STORE_ALIGNMENT_BYTES == 0
        if not (0 < hello.payload_bytes + TRAILER_BYTES <= hello.pitch_bytes and is_aligned):
            raise StoreError(f"objects of {size[0]} bytes in slots of {size[1]} bytes")
        if not 0 < hello.share <= 1:
            raise StoreError(f"share is {hello.share}; it must be above 0, at most 1")
        if hello.pitch_bytes > self._pools.capacity_bytes:
            raise StoreError(
                f"a block takes {hello.pitch_bytes} bytes; the shared memory has "
                f"{self._pools.capacity_bytes} bytes"
            )
        pool = self._pools.pool(*size)
        counts = self._with_labels(pool)
        below = None
        if self._disk is not None and self._below_use is not None:
            if size not in self._below or _failed(self._below[size]):
                disk = self._disk.for_group(f"{size[0]}-{size[1]}")
                disk.publish_keys(pool.memory.counters)
                use = replace(self._below_use, store=disk)
                below = Below(use, pool, self._pools, self._threads, hello.share, self._costs)
                self._below[size] = asyncio.create_task(below.opened())
            below = await asyncio.shield(self._below[size])
        return Attachment(pool, self._pools, below, self._threads, hello.share, counts)

    async def _purge(self, label: bytes) -> int:
        """Remove all objects with a label, below first: then no load brings one back.

        Returns:
            The number of objects in memory or below, whichever is larger.
        """
        removed, disk = 0, self._disk
        if disk is not None:  # sizes without an engine since the start of the service
            removed = await self._threads.run(lambda _: disk.purge_closed(label))
        for opening in list(self._below.values()):
            await asyncio.wait({opening})
            if not _failed(opening):  # otherwise its files are not open
                removed += await opening.result().purge(label)
        return max(removed, sum(pool.purge(label) for pool in self._pools.pools.values()))

    def _start(self, connection: Connection[FromService, FromEngine]) -> None:
        peer = self._peers[connection]
        if isinstance(peer, Attachment):
            peer.start(connection)
        else:
            self._peers[connection] = self._serve_visitor(connection)

    def _serve_visitor(self, connection: Connection[FromService, FromEngine]) -> Requests:
        """Answer a process that moves no objects, about those of all sizes."""
        requests = Requests(connection)

        def on_message(message: FromEngine) -> None:
            match message:
                case Purge():
                    requests.begin(message.number, self._purged(message.label))
                case Newest():
                    pool = self._pools.pools.get((message.payload_bytes, message.pitch_bytes))
                    keys = b"" if pool is None else pool.table.newest(message.count)
                    requests.reply(message.number, keys)
                case _:
                    raise ProtocolError(f"the message {type(message).__name__} without Hello")

        connection.start(Callbacks(on_message, lambda _: requests.cancel_all()))
        return requests

    async def _purged(self, label: bytes) -> bytes:
        return (await self._purge(label)).to_bytes(8, "little")


class _CountsWithLabels:
    """Counts of a pool for one receiver, once per ``_LABEL_SECONDS`` with the labels."""

    def __init__(self, counts: Callable[[], Counts], pool: SlotPool) -> None:
        self._counts = counts
        self._pool = pool
        self._next = 0.0

    def __call__(self) -> Counts:
        counts, now = self._counts(), time.monotonic()
        if now < self._next:
            return counts
        self._next = now + _LABEL_SECONDS
        table = self._pool.table
        labels = usage(table.label_counts(MAX_LABELS), table.stored)
        return msgspec.structs.replace(counts, labels=labels)


def _failed(opening: asyncio.Task[Below]) -> bool:
    return opening.done() and opening.exception() is not None


async def _send(accepted: socket.socket, message: Refuse | Report) -> None:
    frame = FrameWriter(None).frame(ADMISSION_CODEC.encoded(message))
    await asyncio.get_running_loop().sock_sendall(accepted, frame)
