"""ZmqPublisher: KV events of an engine over ZeroMQ, as vLLM publishes them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.errors import ConfigError, UsageError
from aiokv.events.schema import LAYOUTS, AllBlocksCleared, BatchEncoder, KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.engine.engine import CacheEngine
    from aiokv.events.schema import HashKind, Layout

log = Log(__name__)

END_SEQUENCE: Final = (-1).to_bytes(8, "big", signed=True)
MAX_PORT: Final = 2**16 - 1
_LINGER_MS: Final = 1000  # time to send the last batch after close
_QUEUED_MESSAGES: Final = 100_000  # per subscriber; ZeroMQ drops further ones
_SENDS_PER_PASS: Final = 64  # batches that a replay sends per pass
_SUBSCRIBES: Final = 1  # first byte of an XPUB message


class PublisherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a publisher, from its start on.

    Attributes:
        published_batches: batches sent to the subscribers; the next sequence number.
        published_bytes: bytes of their payloads.
        snapshots: times that all blocks were reported again because a subscriber joined.
        replay_requests: requests for earlier batches.
        replayed_batches: batches sent again.
        invalid_requests: replay requests that could not be read.
        dropped_blocks: blocks whose changes were replaced by ``AllBlocksCleared`` and all blocks.
    """

    published_batches: int
    published_bytes: int
    snapshots: int
    replay_requests: int
    replayed_batches: int
    invalid_requests: int
    dropped_blocks: int


class ZmqPublisher:
    """Publishes the KV events of an engine to routers that read vLLM's events.

        async with CacheEngine(config) as engine, ZmqPublisher(engine, bind="tcp://*:5557"):
            ...

    A message has three frames: the topic, the sequence number of the batch (8 bytes, big-endian,
    from 0 on), and the batch in MessagePack. A receiver that misses a number requests the batches
    from that number on from the replay socket: it sends an empty frame and the number (8 bytes). It
    gets an empty frame, the number and the payload per batch, then the number -1 with an empty
    payload. ZeroMQ drops messages to a slow receiver without an error; the receiver detects the
    gap in the numbers. When a subscriber joins, all blocks are reported again, so that a restarted
    router knows them; subscribers that know the blocks get them again.

    The sockets have no authentication or encryption, and the messages contain the token ids, salts
    and adapters of prompts: bind them to a network that only the routers reach.

    Args:
        engine: an open engine.
        bind: where to listen for subscribers, e.g. ``"tcp://*:5557"``; port 0 for any free port.
        replay: where to listen for replay requests; None for no replay.
        topic: first frame of each message; receivers subscribe to it.
        buffer_batches: batches kept for replay.
        hashes: see ``CacheEngine.kv_events``.
        layout: ``"map"`` for receivers of vLLM 0.24 and later, ``"array"`` for earlier ones.
        data_parallel_rank: field of the batches, for receivers of several engines.
        stores: see ``CacheEngine.kv_events``; for receivers that know the medium ``"STORAGE"``,
            such as those of vLLM 0.27 and later.

    Raises:
        ConfigError: pyzmq is not installed.
        UsageError: an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        bind: str,
        replay: str | None = None,
        topic: str = "",
        buffer_batches: int = 10_000,
        hashes: HashKind = "int64",
        layout: Layout = "map",
        data_parallel_rank: int = 0,
        stores: bool = False,
    ) -> None:
        self._zmq = _import_zmq()
        if not callable(getattr(engine, "kv_events", None)):
            raise UsageError(f"engine is {checks.shown(engine)}; it must be a CacheEngine")
        checks.choice("layout", layout, LAYOUTS)
        buffer_batches = checks.integer(
            "buffer_batches", buffer_batches, minimum=1, maximum=checks.MAX_INT32
        )
        self._bind = _address("bind", bind)
        self._bind_replay = None if replay is None else _address("replay", replay)
        self._topic = checks.text("topic", topic).encode()
        self._rank = data_parallel_rank
        self._events = engine.kv_events(
            hashes=hashes, data_parallel_rank=data_parallel_rank, stores=stores
        )
        self._encode = BatchEncoder(layout).encode
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._context: Any = None
        self._publisher: Any = None
        self._replays: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = False  # no batch follows the last one, which has `AllBlocksCleared`
        self._published_batches = 0
        self._published_bytes = 0
        self._snapshots = 0
        self._replay_requests = 0
        self._replayed_batches = 0
        self._invalid_requests = 0

    async def __aenter__(self) -> Self:
        """Bind the sockets, and publish from now on.

        Raises:
            UsageError: an address cannot be bound, or the publisher was entered before.
            ClosedError: the engine is closed.
        """
        await self._events.__aenter__()
        try:
            self._open()
        except BaseException:
            await self.aclose()
            raise
        self._start("publish", self._publish)
        self._start("watch subscribers", self._watch_subscribers)
        if self._replays is not None:
            self._start("replay", self._serve_replays)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _open(self) -> None:
        zmq = self._zmq
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.set(zmq.XPUB_VERBOSE, 1)  # report each subscription, even to a known topic
        self._publisher.set(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._listen("bind", self._publisher, self._bind)
        if self._bind_replay is not None:
            self._replays = self._context.socket(zmq.ROUTER)
            # The queue takes a whole replay, because a router drops messages above this mark.
            self._replays.set(zmq.SNDHWM, (self._buffer.maxlen or 0) + 1)
            self._listen("replay", self._replays, self._bind_replay)

    def _listen(self, name: str, socket: Any, address: str) -> None:
        socket.set(self._zmq.LINGER, _LINGER_MS)
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise UsageError(
                f"{name} is {address!r}, which cannot be bound: {error}",
                hint="pass an address of this host, such as 'tcp://127.0.0.1:5557'",
            ) from error

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(self._watched(name, work), name=f"aiokv {name}"))

    async def _watched(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:
            log.error("events.publisher_failed", task=name, exc_info=error)

    async def aclose(self) -> None:
        """Publish ``AllBlocksCleared``, and close the sockets. Idempotent.

        Cancellation: the sockets are closed; the last batch may not have been sent.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
            if self._publisher is not None and self._buffer:
                self._send_cleared()
        finally:
            await self._events.__aexit__(None, None, None)
            for socket in (self._publisher, self._replays):
                if socket is not None:
                    socket.close()
            context, self._context = self._context, None
            self._publisher = self._replays = None
            if context is not None:  # blocks until the last batch is sent, or for _LINGER_MS
                await asyncio.to_thread(context.term)

    @property
    def address(self) -> str:
        """Address that subscribers connect to, with the real port.

        Raises:
            UsageError: the publisher is not open.
        """
        return self._address_of(self._publisher)

    @property
    def replay_address(self) -> str:
        """Address of the replay socket, with the real port.

        Raises:
            UsageError: the publisher is not open, or has no replay socket.
        """
        return self._address_of(self._replays)

    def _address_of(self, socket: Any) -> str:
        if socket is None:
            raise UsageError("the publisher is not open, or has no such socket")
        address: bytes = socket.get(self._zmq.LAST_ENDPOINT)
        return address.rstrip(b"\0").decode()

    def statistics(self) -> PublisherStatistics:
        """Return the counts from the start on."""
        return PublisherStatistics(
            published_batches=self._published_batches,
            published_bytes=self._published_bytes,
            snapshots=self._snapshots,
            replay_requests=self._replay_requests,
            replayed_batches=self._replayed_batches,
            invalid_requests=self._invalid_requests,
            dropped_blocks=self._events.dropped_blocks,
        )

    # --- tasks ----------------------------------------------------------------------------------

    async def _publish(self) -> None:
        try:
            async for batch in self._events:
                await self._send(batch)
        except Exception:
            self._send_cleared()  # a router must drop its knowledge of this engine
            raise
        finally:
            self._ended = True

    def _send_cleared(self) -> None:
        self._send(KVEventBatch(time.time(), [AllBlocksCleared()], self._rank))

    def _send(self, batch: KVEventBatch) -> Any:
        """Send a batch, and keep it for replay; the socket never blocks."""
        payload = self._encode(batch)
        sequence = self._published_batches
        self._published_batches += 1
        self._published_bytes += len(payload)
        self._buffer.append((sequence, payload))
        return self._send_again(sequence, payload)

    def _send_again(self, sequence: int, payload: bytes) -> Any:
        return self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    async def _watch_subscribers(self) -> None:
        while True:
            message = await self._publisher.recv()
            if message[:1] == bytes([_SUBSCRIBES]) and self._topic.startswith(message[1:]):
                self._snapshots += 1
                if not (self._ended or self._events.has_ended):
                    self._events.repeat()
                elif self._buffer:
                    await self._send_again(*self._buffer[-1])

    async def _serve_replays(self) -> None:
        while True:
            frames = await self._replays.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._invalid_requests += 1
                log.warning("events.invalid_replay_request", frames=len(frames))
                continue
            self._replay_requests += 1
            await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, receiver: bytes, first: int) -> None:
        kept = [entry for entry in self._buffer if entry[0] >= first]
        for number, (sequence, payload) in enumerate(kept, start=1):
            await self._replays.send_multipart(
                (receiver, b"", sequence.to_bytes(8, "big"), payload)
            )
            self._replayed_batches += 1
            if number % _SENDS_PER_PASS == 0:
                await asyncio.sleep(0)
        await self._replays.send_multipart((receiver, b"", END_SEQUENCE, b""))


def _address(name: str, value: object) -> str:
    """Return an address, whose port ZeroMQ would take modulo 65536.

    Raises:
        UsageError: it is not a str, or its port is out of range.
    """
    address = checks.text(name, value)
    scheme, port = address.partition("://")[0], address.rpartition(":")[2]
    if scheme == "tcp" and port.isdecimal() and int(port) > MAX_PORT:
        raise UsageError(f"{name} is {address!r}; its port must be between 0 and {MAX_PORT}")
    return address


def _import_zmq() -> Any:
    """Import pyzmq.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zmq
        import zmq.asyncio
    except ImportError as error:
        raise ConfigError(
            f"ZmqPublisher needs pyzmq, which cannot be imported: {error}",
            hint="pip install 'aiokv[events]'",
        ) from error
    return zmq
