"""OneSidedTransport: fragments through a library that writes into the memory of another process.

Each connection has an endpoint of the library on either side, with a thread that runs its blocking
calls. An endpoint is closed with its connection, so that a peer that fails affects no other one.

::

    sender     connection lost ─► no write begins; the endpoint is closed ─► its socket is closed
    receiver   connection lost ─► slots with credits are quarantined ─► the socket of the sender is
               closed, by itself or by the kernel ─► the endpoint is closed ─► the slots are free

Why the socket: on one machine a library may write with a system call or a mapping of the sender
alone, which an endpoint that the receiver has closed does not prevent. A sender closes its socket
when none of its writes is in progress, and the kernel closes it behind the end of the process. A
sender on another machine cannot write to host memory through an endpoint that is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from aiokv.base.logs import Log
from aiokv.errors import ConfigError, InternalError, PeerError
from aiokv.peers.messages import Return

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aiokv.peers.transport import Outgoing, PeerMemory
    from aiokv.peers.wire import Connection

log = Log(__name__)

_T = TypeVar("_T")

WRITE_BYTES: Final = 4 << 20  # per call of a library that writes from host memory
START_SECONDS: Final = 30.0  # time for the first endpoints, which load the library
ENDPOINT_SECONDS: Final = 5.0  # time to create or connect a further endpoint
CLOSE_SECONDS: Final = 3.0  # time to close an endpoint; after that ``aclose`` abandons it
_MACHINE: Final = Path("/proc/sys/kernel/random/boot_id")
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")

_left_behind: list[PeerMemory] = []  # memory that the library may access until the process ends


class EndpointError(Exception):
    """A call of a library failed."""


class WritePiece(NamedTuple):
    """Bytes to write.

    Attributes:
        source: local address.
        target: address in the process of the receiver.
        num_bytes: length.
    """

    source: int
    target: int
    num_bytes: int


class LibraryEndpoint(Protocol):
    """An object of the library, for one connection. Its calls block, and run in one thread.

    All methods but ``close`` raise ``EndpointError``.
    """

    def metadata(self) -> bytes:
        """Return the metadata that the endpoint of a sender needs for ``connect``."""

    def connect(self, metadata: bytes, device: int | None) -> None:
        """Prepare to write to the endpoint of a receiver.

        Args:
            metadata: metadata of that endpoint.
            device: ordinal, on its machine, of the GPU that has its memory; None for host memory.
        """

    def write(self, pieces: Sequence[WritePiece], unwanted: threading.Event) -> None:
        """Write pieces; return when they are in the memory of the receiver.

        An endpoint whose write failed is closed next. ``unwanted`` is set when the connection has
        ended; a write that can end early checks it.
        """

    def close(self) -> None:
        """Release the memory: when it returns, the endpoint neither reads nor writes it."""


class Backend(Protocol):
    """A library that writes into the memory of other processes.

    Attributes:
        name: name of the transport.
        is_reused: an endpoint whose connection ended without a write in progress serves the next
            connection, because a new one is expensive.
        write_bytes: most bytes of one call of ``LibraryEndpoint.write``, which announces them
            together.
    """

    name: str
    is_reused: bool
    write_bytes: int

    def load(self) -> None:
        """Import the library. Blocks.

        Raises:
            ConfigError: the package, or a library that it needs, is missing; or an option is wrong.
        """

    def create(self, memory: PeerMemory, *, receives: bool) -> LibraryEndpoint:
        """Return an endpoint that has registered ``memory``. Blocks.

        Args:
            memory: slots.
            receives: the slots are written by a sender; otherwise they are sent.

        Raises:
            EndpointError: the library cannot start, or cannot register the memory.
        """


class _Origin(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a sender: the machine it runs on; empty if unknown."""

    machine: str


class _Target(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a receiver: its landing slots, and its endpoint."""

    address: int
    num_slots: int
    slot_bytes: int
    device: int | None
    endpoint: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_origin: Final = msgspec.msgpack.Decoder(_Origin).decode
_decode_target: Final = msgspec.msgpack.Decoder(_Target).decode


def this_machine() -> str:
    """Return an id of the running system, equal in all its containers; empty if unknown."""
    try:
        return _MACHINE.read_text("ascii").strip()
    except OSError:
        return ""


def rdma_devices() -> list[str]:
    """Return the names of the RDMA devices of this machine."""
    try:
        return sorted(device.name for device in _RDMA_DEVICES.iterdir())
    except OSError:
        return []


class _EndpointThread:
    """An endpoint and its thread. A thread that does not end keeps no process from ending."""

    def __init__(self, backend: Backend, memory: PeerMemory, *, receives: bool) -> None:
        self.write_bytes = backend.write_bytes
        self._memory = memory
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._unwanted = threading.Event()
        self._endpoint: LibraryEndpoint | None = None
        self._closing: Future[None] | None = None
        self.created = self._submit(lambda: self._create(backend, receives))
        threading.Thread(target=self._run, name=f"aiokv-{backend.name}", daemon=True).start()

    def connect(self, target: _Target) -> Future[None]:
        """Begin to connect to the endpoint of a receiver."""
        return self._submit(lambda: self._open_endpoint().connect(target.endpoint, target.device))

    def write(self, pieces: Sequence[WritePiece]) -> Future[None]:
        """Begin to write pieces, behind those of earlier calls. The first failure is final."""
        return self._submit(lambda: self._write(pieces))

    def close(self) -> Future[None]:
        """Begin to close the endpoint. Writes that have not begun fail. Idempotent."""
        self._unwanted.set()
        if self._closing is None:
            self._closing = self._submit(self._close)
            self._calls.put(None)
        return self._closing

    @property
    def is_created(self) -> bool:
        """True if the endpoint can be used."""
        return self.created.done() and self.created.exception() is None

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        if self._closing is None:
            self._calls.put((future, call))
        else:
            future.set_exception(EndpointError("the connection ended"))
        return future

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del entry, future, call

    def _create(self, backend: Backend, receives: bool) -> bytes:
        if self._unwanted.is_set():
            raise EndpointError("it was closed")
        self._endpoint = backend.create(self._memory, receives=receives)
        return self._endpoint.metadata()

    def _open_endpoint(self) -> LibraryEndpoint:
        if self._endpoint is None or self._unwanted.is_set():
            raise EndpointError("the connection ended")
        return self._endpoint

    def _write(self, pieces: Sequence[WritePiece]) -> None:
        try:
            self._open_endpoint().write(pieces, self._unwanted)
        except BaseException:
            self._unwanted.set()
            self._close()  # until then, the library may read the memory
            raise

    def _close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()


class _ReceivingEnd(NamedTuple):
    """The receiving end of a connection.

    Attributes:
        channel: its endpoint.
        is_near: the sender may be able to write without the endpoint.
    """

    channel: _EndpointThread
    is_near: bool


class OneSidedTransport:
    """See :class:`~aiokv.peers.transport.Transport`.

    Args:
        backend: library that moves the bytes.
        machine: id of this machine, as of ``this_machine``.
    """

    one_sided = True

    def __init__(self, backend: Backend, machine: str | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._machine = this_machine() if machine is None else machine
        self._landing: PeerMemory | None = None
        self._outgoing: PeerMemory | None = None
        # By ``receives``; created, but not connected.
        self._spares: dict[bool, _EndpointThread] = {}
        self._incoming: dict[Connection, _ReceivingEnd] = {}
        self._links: set[OneSidedLink] = set()
        self._connecting: set[_EndpointThread] = set()
        self._is_open = False

    async def open(self, landing: PeerMemory, outgoing: PeerMemory) -> None:
        """Load the library, and register the memory once; see ``Transport.open``."""
        self._landing, self._outgoing, self._is_open = landing, outgoing, True
        loading = asyncio.get_running_loop().run_in_executor(None, self._backend.load)
        try:
            await asyncio.shield(loading)
            for memory, receives in ((landing, True), (outgoing, False)):
                if memory.num_slots:
                    channel = _EndpointThread(self._backend, memory, receives=receives)
                    self._spares[receives] = channel
                    await _ended(channel.created, START_SECONDS, "its library did not start")
        except BaseException as error:
            await self.aclose()
            if isinstance(error, PeerError | EndpointError):
                raise ConfigError(f"the transport {self.name!r} cannot start: {error}") from error
            raise

    def metadata(self) -> bytes:
        """Return the machine of this process."""
        return _encode(_Origin(self._machine))

    # --- receiver ---------------------------------------------------------------------------------

    async def accept(self, connection: Connection, metadata: bytes) -> bytes:
        """Give the connection an endpoint; see ``Transport.accept``."""
        landing = self._landing
        if landing is None or not landing.num_slots or connection in self._incoming:
            raise InternalError(f"the {self.name} transport does not receive from {connection!r}")
        try:
            machine = _decode_origin(metadata).machine
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"the metadata of the sender is malformed: {error}") from error
        channel = self._new_channel(landing, receives=True)
        is_near = landing.device is not None or not machine or machine == self._machine
        self._incoming[connection] = _ReceivingEnd(channel, is_near)
        connection.hold()
        try:
            endpoint = await _ended(channel.created, ENDPOINT_SECONDS, "no endpoint was made")
        except EndpointError as error:
            raise PeerError(f"the {self.name} transport of the receiver failed: {error}") from error
        return _encode(
            _Target(
                landing.address, landing.num_slots, landing.slot_bytes, landing.device, endpoint
            )
        )

    async def fence(self, connection: Connection, *, may_write: bool) -> None:
        """Close the endpoint when the sender has ended; see ``Transport.fence``."""
        incoming = self._incoming.get(connection)
        if incoming is None:
            return
        if may_write or not self._keep(incoming.channel, receives=True):
            if may_write and incoming.is_near:
                await connection.peer_ended()
            await _settled(incoming.channel.close())
        if self._incoming.pop(connection, None) is not None:
            connection.unhold()

    # --- sender -----------------------------------------------------------------------------------

    async def connect(self, connection: Connection, metadata: bytes) -> OneSidedLink:
        """Give the connection an endpoint; see ``Transport.connect``."""
        outgoing = self._outgoing
        if outgoing is None:
            raise InternalError(f"the {self.name} transport is not open")
        try:
            target = _decode_target(metadata)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"the metadata of the receiver is malformed: {error}") from error
        channel = self._new_channel(outgoing, receives=False)
        self._connecting.add(channel)
        try:
            await _ended(channel.created, ENDPOINT_SECONDS, "no endpoint was made")
            connecting = channel.connect(target)
            await _ended(connecting, ENDPOINT_SECONDS, "the endpoint did not connect")
        except BaseException as error:
            channel.close()  # nothing was written, so the library reads no memory of it
            if isinstance(error, EndpointError):
                raise PeerError(
                    f"the {self.name} transport cannot reach {connection.remote}: {error}"
                ) from error
            raise
        finally:
            self._connecting.discard(channel)
        link = OneSidedLink(self, connection, channel, outgoing, target)
        self._links.add(link)
        return link

    def link_ended(self, link: OneSidedLink, channel: _EndpointThread | None) -> bool:
        """Forget a link; return True if its idle channel is kept for the next one."""
        self._links.discard(link)
        return channel is not None and self._keep(channel, receives=False)

    # --- both -------------------------------------------------------------------------------------

    def _new_channel(self, memory: PeerMemory, *, receives: bool) -> _EndpointThread:
        spare = self._spares.pop(receives, None)
        return spare or _EndpointThread(self._backend, memory, receives=receives)

    def _keep(self, channel: _EndpointThread, *, receives: bool) -> bool:
        """Keep a channel for the next connection, if that is cheaper than a new one."""
        is_usable = self._is_open and self._backend.is_reused and channel.is_created
        if not is_usable or receives in self._spares:
            return False
        self._spares[receives] = channel
        return True

    async def aclose(self) -> None:
        """Close all endpoints; see ``Transport.aclose``."""
        self._is_open = False
        closing = [
            *(link.aclose() for link in list(self._links)),
            *(self._close_incoming(*item) for item in list(self._incoming.items())),
            *(_settled(c.close()) for c in [*self._spares.values(), *self._connecting]),
        ]
        tasks = [asyncio.ensure_future(work) for work in closing]
        if tasks:
            try:
                await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            finally:
                late = [task for task in tasks if not task.done()]
                for task in late:
                    task.cancel()
                await asyncio.sleep(0)
            if late:
                self._leave_behind(len(late))
        for connection, incoming in list(self._incoming.items()):
            incoming.channel.close()  # do not wait for a peer that did not end
            del self._incoming[connection]
            connection.unhold()
        self._spares.clear()
        self._links.clear()
        self._landing = self._outgoing = None

    async def _close_incoming(self, connection: Connection, incoming: _ReceivingEnd) -> None:
        connection.abort("the transport was closed")
        if incoming.is_near:
            await connection.peer_ended()
        await _settled(incoming.channel.close())

    def _leave_behind(self, count: int) -> None:
        """Keep the memory allocated: a peer, or the library, may still access it."""
        memories = [memory for memory in (self._landing, self._outgoing) if memory is not None]
        _left_behind.extend(memories)
        log.error(
            "peer.memory_left_behind",
            transport=self.name,
            endpoints=count,
            num_bytes=sum(memory.num_bytes for memory in memories),
            reason=f"endpoints or peers did not end within {CLOSE_SECONDS} s; this memory stays "
            "allocated until the process ends",
        )


class OneSidedLink:
    """See :class:`~aiokv.peers.transport.Link`. It closes itself after its connection has ended."""

    def __init__(
        self,
        transport: OneSidedTransport,
        connection: Connection,
        channel: _EndpointThread,
        outgoing: PeerMemory,
        target: _Target,
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._channel = channel
        self._outgoing = outgoing
        self._target = target
        self._writing = 0  # calls in progress
        self._is_sound = True  # False after a write that failed
        self._is_held = True
        connection.hold()
        self._closing = asyncio.get_running_loop().create_task(self._close_behind())

    async def write(self, fragments: Sequence[Outgoing]) -> None:
        """Write fragments; see :meth:`~aiokv.peers.transport.Link.write`."""
        batches = [
            (batch, self._pieces(batch)) for batch in _batches(fragments, self._channel.write_bytes)
        ]
        if self._connection.reason or not self._is_held:
            raise PeerError(self._why("the link was closed"))
        self._writing += 1
        writes = deque((batch, self._channel.write(pieces)) for batch, pieces in batches)
        try:
            while writes:
                batch, written = writes[0]
                await _settled(written)
                written.result()
                self._announce(batch)
                writes.popleft()
            if self._connection.reason:
                raise PeerError(self._connection.reason)
        except asyncio.CancelledError:
            await self._withdraw(writes)
            raise
        except EndpointError as error:
            # The library no longer reads the memory, because it closed the endpoint before it
            # reported the failure.
            self._is_sound = False
            raise PeerError(self._why(f"a write failed: {error}")) from error
        finally:
            self._writing -= 1

    def _why(self, otherwise: str) -> str:
        """Return why the connection ended, or ``otherwise``."""
        return self._connection.reason or otherwise

    def _pieces(self, batch: Sequence[Outgoing]) -> list[WritePiece]:
        pieces = []
        target = self._target
        for slot, landed in batch:
            self._outgoing.check(slot, landed.fragment_bytes)
            if landed.slot >= target.num_slots or landed.fragment_bytes > target.slot_bytes:
                raise PeerError(
                    f"the receiver gave credit for slot {landed.slot}; it has {target.num_slots} "
                    f"slots of {target.slot_bytes} bytes"
                )
            source = self._outgoing.address + slot * self._outgoing.slot_bytes
            place = target.address + landed.slot * target.slot_bytes
            pieces.append(WritePiece(source, place, landed.fragment_bytes))
        return pieces

    def _announce(self, batch: Sequence[Outgoing]) -> None:
        for fragment in batch:
            self._connection.send(fragment.landed)

    async def _withdraw(self, writes: Iterable[tuple[list[Outgoing], Future[None]]]) -> None:
        """Return the credits of writes that have not begun; wait for the others."""
        begun = [(batch, written) for batch, written in writes if not written.cancel()]
        unsent = [
            fragment.landed.credit
            for batch, written in writes
            if written.cancelled()
            for fragment in batch
        ]
        if unsent:
            self._connection.send(Return(slots=unsent))
        for batch, written in begun:
            await _surely_settled(written)
            if written.exception() is None:
                self._announce(batch)

    async def _close_behind(self) -> None:
        await self._connection.closed()
        is_idle = self._is_sound and not self._writing
        if self._transport.link_ended(self, self._channel if is_idle else None):
            self._unhold()
        else:
            self._close()

    def _close(self) -> None:
        """Begin to close; the connection is held until the endpoint is closed."""
        loop = asyncio.get_running_loop()

        def closed(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._unhold)

        self._channel.close().add_done_callback(closed)

    def _unhold(self) -> None:
        if self._is_held:
            self._is_held = False
            self._connection.unhold()

    async def aclose(self) -> None:
        """Close the endpoint. Cancellation: call it again."""
        if self._closing.done() and not self._is_held:
            return  # its connection has closed it; the endpoint may serve another one
        self._closing.cancel()
        self._close()
        await _settled(self._channel.close())
        self._unhold()
        self._transport.link_ended(self, None)


def _batches(fragments: Sequence[Outgoing], write_bytes: int) -> list[list[Outgoing]]:
    """Return the fragments in order, cut into calls of about ``write_bytes``."""
    batches: list[list[Outgoing]] = []
    room = 0
    for fragment in fragments:
        num_bytes = fragment.landed.fragment_bytes
        if num_bytes > room:
            batches.append([])
            room = max(write_bytes, num_bytes)
        batches[-1].append(fragment)
        room -= num_bytes
    return batches


async def _ended(work: Future[_T], seconds: float, what: str) -> _T:
    """Wait for the work of a thread.

    Raises:
        EndpointError: it did not end within ``seconds``, or failed with this error.
    """
    done, _ = await asyncio.wait((_end_of(work),), timeout=seconds)
    if not done:
        raise EndpointError(f"{what} within {seconds:g} s")
    return work.result()


async def _settled(work: Future[Any]) -> None:
    """Wait for the end of the work of a thread, whatever it is. Cancellation: stops waiting."""
    if not work.done():
        await asyncio.wait((_end_of(work),))


async def _surely_settled(work: Future[Any]) -> None:
    """Wait likewise, however often the task is cancelled meanwhile."""
    while not work.done():
        try:
            await _settled(work)
        except asyncio.CancelledError:
            continue


def _end_of(work: Future[Any]) -> asyncio.Future[None]:
    """Return a future of this loop that is done when the work of a thread has ended."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()

    def set_end() -> None:
        if not end.done():
            end.set_result(None)

    def ended(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_end)

    work.add_done_callback(ended)
    return end
