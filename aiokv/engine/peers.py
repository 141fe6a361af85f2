"""Peers: receives and sends of leases, between this engine and engines on other servers.

::

    lease.receive ─► ticket ─► the user's request ─► engine.send
         │                                               │  commit ─► SEND plans, as far as computed
         └─► RECEIVE plans of all blocks                 └─► leaving waits for the acknowledgements
              chunk after chunk: commit_received

A :class:`Receiving` or :class:`Sending` is the handle of one ticket on its side. A :class:`Flow`
holds the transfers of the ticket. :class:`Exchange` has all flows of the engine: it hands them the
ends of their transfers, and ends them when their lease gives its blocks back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import msgspec

from aiokv import checks
from aiokv.checks import Unique
from aiokv.errors import AiokvError, LeaseError, PeerError, UsageError
from aiokv.observe.logs import Log
from aiokv.peers import ticket as tickets
from aiokv.peers.options import CHUNK_BLOCKS
from aiokv.peers.statistics import PeerCounts, PeerStatistics, ReceivingStatistics
from aiokv.peers.ticket import Ticket
from aiokv.types import LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from aiokv.engine.parts import Parts
    from aiokv.lease import Lease
    from aiokv.plan import TransferReport
    from aiokv.scheduler.effects import Effects, Moved

log = Log(__name__)

_NO_PEERS: Final = "pass peers=Peers(...) to CacheEngine, or has_peers=True to the RankGroup"


class Flow:
    """Transfers of one ticket between a lease of this engine and another engine.

    Args:
        exchange: all flows of the engine.
        lease: the lease.
        ticket: the ticket.
        first_block: of the lease, to move.
        proceed: called when a transfer has ended, when positions were committed, and when onloads
            of the lease have ended.
        receives: True on the side that receives.

    Attributes:
        lease: as given.
        lease_id: its id, also after its release.
        ticket: as given.
        receives: as given.
        arrived_block: blocks before it, from ``first_block`` on, have moved.
        kept_tokens: positions that the lease still has.
        is_broken: a transfer has ended without all of its blocks.
        reason: why that transfer has ended.
        ended_at: time of the loop at which it has ended; None before.
        failure: why it has ended early; None if it has not.
    """

    def __init__(
        self,
        exchange: Exchange,
        lease: Lease,
        ticket: Ticket,
        first_block: int,
        proceed: Callable[[], None],
        *,
        receives: bool,
    ) -> None:
        self._exchange = exchange
        self._timer: asyncio.TimerHandle | None = None
        self._blocks: dict[int, int] = {}  # of transfers that have not ended in order, oldest first
        self._moved: dict[int, int] = {}  # blocks of those that have ended out of order
        self._waiters: list[asyncio.Future[None]] = []
        self._next_block = first_block
        self.proceed = proceed
        self.lease = lease
        self.lease_id = lease.id
        self.ticket = ticket
        self.receives = receives
        self.arrived_block = first_block
        self.kept_tokens = checks.MAX_INT32
        self.is_broken = False
        self.reason = ""
        self.ended_at: float | None = None
        self.failure: str | None = None

    @property
    def ended(self) -> bool:
        """True when no further transfer begins."""
        return self.ended_at is not None

    @property
    def at_rest(self) -> bool:
        """True when no transfer is in flight."""
        return len(self._blocks) == len(self._moved)

    @property
    def transfer_ids(self) -> list[int]:
        """Transfers that have not ended in order."""
        return list(self._blocks)

    def end_in(self, seconds: float) -> None:
        """End the flow after ``seconds``, by the loop's clock."""
        reason = f"the deadline of {seconds:.4g} s passed"
        self._timer = self._exchange.loop.call_later(seconds, self.end, reason)

    def begin(
        self,
        transition: Callable[[int, bytes, int, int], tuple[int, Effects]],
        end_block: int,
        chunk_blocks: int,
    ) -> None:
        """Begin transfers of the blocks that have none yet, up to ``end_block``.

        Raises:
            AiokvError: the scheduler refuses a transfer; those before it have begun.
        """
        while self._next_block < end_block and not self.ended:
            num_blocks = min(chunk_blocks, end_block - self._next_block)
            transfer_id, effects = transition(
                self.lease_id, self.ticket.ticket_id, self._next_block, num_blocks
            )
            self._blocks[transfer_id] = num_blocks
            self._next_block += num_blocks
            self._exchange.submit(self, transfer_id, effects)

    def moved(self, transfer_id: int, blocks: int, reason: str) -> None:
        """Note the end of a transfer, of which the first ``blocks`` blocks have moved. Idempotent.

        Blocks behind the first that has not moved do not count.
        """
        if transfer_id not in self._blocks:
            return
        self._moved[transfer_id] = blocks
        if blocks < self._blocks[transfer_id]:
            self.reason = self.reason or reason
        for first in list(self._blocks):
            if first not in self._moved:
                return
            if not self.is_broken:
                self.is_broken = self._moved[first] < self._blocks[first]
                self.arrived_block += self._moved[first]
            del self._blocks[first], self._moved[first]

    def end(self, failure: str | None = None) -> None:
        """Begin no further transfer, and cancel those in flight. The first reason is kept."""
        if self.ended:
            return
        self.failure = failure
        self.ended_at = self._exchange.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._exchange.end(self)

    def forget(self) -> None:
        """Note that no end of a transfer follows: the lease no longer has the blocks."""
        self._blocks.clear()
        self._moved.clear()

    def wake(self) -> None:
        """Let the waiting coroutines test their conditions."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on this flow.

        Cancellation: nothing changed.
        """
        while not condition():
            waiter: asyncio.Future[None] = self._exchange.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)


class Receiving(Unique):
    """Blocks of a lease that another engine computes and sends; see ``Lease.receive``."""

    def __init__(
        self, exchange: Exchange, lease: Lease, num_tokens: int | None, timeout: float
    ) -> None:
        self._exchange = exchange
        self._lease = lease
        self._asked_tokens = num_tokens
        self._timeout = timeout
        self._flow: Flow | None = None
        self._blob = b""
        self._committed = 0  # positions that are cached or were received
        self._began = 0.0
        self._first_at: float | None = None
        self._wait_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Make the ticket, and let the blocks be received.

        Raises:
            LeaseError: the lease is not granted, is being received already, has nothing to receive,
                or a batch computes with it. Nothing changed.
            UsageError: the engine has no peers, does not listen, or this object was entered before.
                Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.

        Checkpoint: never.
        """
        if self._flow is not None:
            raise UsageError(
                f"{self!r} was entered already; it can be entered once",
                hint="call lease.receive() again",
            )
        exchange = self._exchange
        ticket, blob = exchange.new_ticket(self._lease, self._asked_tokens, self._timeout)
        first_block = ticket.first_position // ticket.block_tokens
        flow = Flow(exchange, self._lease, ticket, first_block, self._proceed, receives=True)
        self._committed = ticket.first_position
        self._began = exchange.loop.time()
        try:
            exchange.open_receive(flow, blob, self._timeout)
            exchange.begin_receive(flow)
        except BaseException:
            flow.end("the receive could not begin")
            raise
        self._flow, self._blob = flow, blob
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        flow = self._entered()
        flow.end("the receive was left before all positions had arrived")
        await flow.wait_for(lambda: flow.at_rest)

    @property
    def ticket(self) -> bytes:
        """Ticket for ``engine.send`` of the other engine; put it into the user's request."""
        self._entered()
        return self._blob

    async def wait(self, position: int | None = None) -> int:
        """Wait until positions have arrived, or the receive has ended.

        The receive ends at its deadline at the latest. A failure of the other engine raises
        nothing: the caller computes what is missing. When the receive has ended, no transfer
        writes the blocks of the lease any more: compute from the returned position on. Before that,
        the lease cannot compute.

        Args:
            position: return when all positions before this one have arrived; None for all positions
                of the ticket, which is the end of the receive.

        Returns:
            The first position that is not there; the ``num_tokens`` of the ticket when all have
            arrived, 0 when the lease has given its blocks back.

        Raises:
            UsageError: ``position`` is not an integer, or is not within the positions of the
                ticket; the ``async with`` block has not begun; or the call is made in another
                thread.

        Cancellation: nothing changed.
        """
        flow = self._entered()
        limit = flow.ticket.num_tokens
        target = limit
        if position is not None:
            target = checks.integer("position", position, minimum=0, maximum=limit)
        began = self._exchange.loop.time()
        try:
            await flow.wait_for(lambda: flow.at_rest if flow.ended else self._committed >= target)
        finally:
            seconds = self._exchange.loop.time() - began
            self._wait_seconds += seconds
            self._exchange.note_wait(flow.lease, seconds)
        return self._position

    @property
    def received_tokens(self) -> int:
        """Number of positions that have arrived, from the first of the ticket on."""
        flow = self._entered()
        return max(self._position - flow.ticket.first_position, 0)

    @property
    def failure(self) -> str | None:
        """Reason why the receive has ended early; None while it runs, and when all is there."""
        return self._entered().failure

    @property
    def statistics(self) -> ReceivingStatistics:
        """Progress and times so far."""
        flow = self._entered()
        ticket = flow.ticket
        now = self._exchange.loop.time() if flow.ended_at is None else flow.ended_at
        return ReceivingStatistics(
            wanted_tokens=ticket.num_tokens - ticket.first_position,
            received_tokens=self.received_tokens,
            first_chunk_seconds=None if self._first_at is None else self._first_at - self._began,
            seconds=now - self._began,
            wait_seconds=self._wait_seconds,
        )

    @property
    def _position(self) -> int:
        return min(self._committed, self._entered().kept_tokens)

    def _entered(self) -> Flow:
        self._exchange.check_thread()
        if self._flow is None:
            raise UsageError(f"{self!r} can only be used inside its `async with` block")
        return self._flow

    def _proceed(self) -> None:
        """Commit the blocks that have arrived in order; end the flow at the first missing one."""
        flow = self._flow
        if flow is None or flow.ended:
            return
        exchange = self._exchange
        try:
            exchange.begin_receive(flow)
            arrived = min(flow.arrived_block * exchange.block_tokens, flow.ticket.num_tokens)
            if arrived > self._committed:
                exchange.commit_received(flow, arrived)
                self._first_at = self._first_at or exchange.loop.time()
                flow.lease.note_received(arrived - self._committed)
                exchange.counts.received_tokens += arrived - self._committed
                self._committed = arrived
        except AiokvError as error:
            flow.end(str(error))
        if flow.is_broken:
            flow.end(flow.reason or "a transfer was cancelled")
        elif self._committed == flow.ticket.num_tokens:
            exchange.counts.complete_receives += not flow.ended
            flow.end()

    def __repr__(self) -> str:
        if self._flow is None:
            return "<Receiving, not entered>"
        return f"<Receiving {_state(self._flow)}>"


class Sending(Unique):
    """Blocks of a lease that another engine receives; see ``CacheEngine.send``."""

    def __init__(self, exchange: Exchange, lease: Lease, blob: bytes) -> None:
        self._exchange = exchange
        self._lease = lease
        self._blob = blob
        self._flow: Flow | None = None
        self._counted_tokens = 0  # in PeerCounts.delivered_tokens

    async def __aenter__(self) -> Self:
        """Check the ticket, and connect to the engine that made it.

        Raises:
            UsageError: the ticket is malformed, is for another prompt, or is being sent already; or
                the engine has no peers. Nothing changed.
            LeaseError: the lease is not granted, or belongs to another engine. Nothing changed.
            LayoutError: the blocks of the two engines cannot be mapped. Nothing changed.
            PeerError: the other engine has another model, version of the weights or transport,
                cannot be reached, or refuses the ticket. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: nothing is left behind.
        """
        if self._flow is not None:
            raise UsageError(
                f"{self!r} was entered already; it can be entered once",
                hint="call engine.send() again",
            )
        exchange = self._exchange
        try:
            ticket = exchange.checked_ticket(self._lease, self._blob)
            first_block = ticket.first_position // exchange.block_tokens
            flow = Flow(exchange, self._lease, ticket, first_block, self._proceed, receives=False)
            await exchange.open_send(flow, self._blob)
        except Exception:
            exchange.counts.refused_sends += 1
            raise
        try:
            exchange.begin_send(flow)
        except BaseException:
            flow.end("the send could not begin")
            raise
        self._flow = flow
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        flow = self._entered()
        if exc_type is not None:
            flow.end(f"the send was left with {exc_type.__name__}")
            return
        try:
            await flow.wait_for(
                lambda: flow.ended or (flow.at_rest and not self._exchange.is_loading(flow))
            )
        except BaseException:
            flow.end("the send was cancelled")
            raise
        flow.end("the send was left before all positions were computed")

    def cancel(self) -> None:
        """Send nothing more; the receiving engine computes what is missing. Idempotent.

        Raises:
            UsageError: the ``async with`` block has not begun, or the call is made in another
                thread.
        """
        self._entered().end("cancel() was called")

    @property
    def delivered_tokens(self) -> int:
        """Number of positions that the receiver has acknowledged, from the first on."""
        flow = self._entered()
        ticket = flow.ticket
        delivered = min(flow.arrived_block * self._exchange.block_tokens, ticket.num_tokens)
        return max(delivered - ticket.first_position, 0)

    @property
    def failure(self) -> str | None:
        """Reason why the send has ended early; None while it runs, and when all was delivered."""
        return self._entered().failure

    def _entered(self) -> Flow:
        self._exchange.check_thread()
        if self._flow is None:
            raise UsageError(f"{self!r} can only be used inside its `async with` block")
        return self._flow

    def _proceed(self) -> None:
        """Send the blocks that are computed, and end the flow when all were acknowledged."""
        flow = self._flow
        if flow is None or flow.ended:
            return
        try:
            self._exchange.begin_send(flow)
        except AiokvError as error:
            flow.end(str(error))
        counts = self._exchange.counts
        counts.delivered_tokens += self.delivered_tokens - self._counted_tokens
        self._counted_tokens = self.delivered_tokens
        if flow.is_broken:
            flow.end(flow.reason or "a transfer was cancelled")
        elif flow.arrived_block * self._exchange.block_tokens >= flow.ticket.num_tokens:
            counts.complete_sends += not flow.ended
            flow.end()

    def __repr__(self) -> str:
        if self._flow is None:
            return "<Sending, not entered>"
        return f"<Sending {_state(self._flow)}>"


def _state(flow: Flow) -> str:
    ticket = flow.ticket
    state = "in flight"
    if flow.ended:
        state = "complete" if flow.failure is None else f"ended: {flow.failure}"
    return (
        f"of positions {ticket.first_position} to {ticket.num_tokens}, ticket "
        f"{ticket.ticket_id.hex()[:8]}, {state}"
    )


class Exchange:
    """Receives and sends of all leases of one engine.

    Attributes:
        block_tokens: positions per block.
        counts: of all receives and sends.
        flows: by lease, those that have not ended or have transfers in flight.
    """

    def __init__(self, parts: Parts) -> None:
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._read = parts.scheduler.read
        self._apply = parts.dispatcher.apply
        self._worker = parts.worker
        self._poller = parts.poller
        self._model = parts.config.model
        self._weights_version = parts.config.weights_version
        self._generation = secrets.token_bytes(tickets.ID_BYTES)
        self._chunk_blocks = CHUNK_BLOCKS if parts.peers is None else parts.peers.chunk_blocks
        self._by_transfer: dict[int, Flow] = {}
        self._reasons: dict[int, str] = {}  # of transfers that have failed, by transfer
        self._ended: deque[Moved] = deque()  # transfers whose flows have not been told
        self._loading: set[Flow] = set()  # wait for the onloads of their leases
        self.block_tokens = parts.config.block_tokens
        self.counts = PeerCounts()
        self.flows: dict[int, list[Flow]] = {}
        parts.dispatcher.tell_moved(self._note_moved)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the engine."""
        return self._lifetime.loop

    def check_thread(self) -> None:
        """See ``Lifetime.check_thread``."""
        self._lifetime.check_thread()

    def statistics(self) -> PeerStatistics:
        """See ``CacheEngine.peer_statistics``."""
        self._lifetime.check_thread()
        running = [f for flows in self.flows.values() for f in flows if not f.ended]
        receiving = sum(flow.receives for flow in running)
        return PeerStatistics(
            receiving=receiving,
            sending=len(running) - receiving,
            ranks=self._worker.peer_statistics(),
            **msgspec.structs.asdict(self.counts),
        )

    # --- tickets --------------------------------------------------------------------------------

    def new_ticket(
        self, lease: Lease, num_tokens: int | None, timeout: float
    ) -> tuple[Ticket, bytes]:
        """Return a ticket for the positions of a lease that are not computed, and its blob.

        Raises:
            UsageError, LeaseError, ClosedError, BrokenEngineError: see ``Receiving.__aenter__``.
        """
        self._check_open("receive")
        endpoints = self._worker.endpoints
        if not endpoints:
            raise UsageError(
                "receive: Peers.listen is None, so the engine only sends",
                hint="pass Peers(listen=..., secret=...) with an address of this server",
            )
        lease_id = self._granted_id(lease, "receive")
        if any(flow.receives for flow in self.flows.get(lease_id, ())):
            raise LeaseError(f"receive: {lease!r} is being received already")
        read, block_tokens = self._read, self.block_tokens
        if num_tokens is None:
            num_tokens = min(read.num_tokens(lease_id), read.usage(lease_id)[0])
        elif num_tokens > read.num_tokens(lease_id):
            raise LeaseError(
                f"receive: num_tokens is {num_tokens}; it must be at most the "
                f"{read.num_tokens(lease_id)} positions of {lease!r}"
            )
        first = read.computed_tokens(lease_id)
        if first >= num_tokens:
            raise LeaseError(
                f"receive: the first {first} positions of {lease!r} are computed; of "
                f"{num_tokens}, none is missing",
                hint="send the request to no other engine",
            )
        if first % block_tokens:
            raise LeaseError(
                f"receive: {first} positions of {lease!r} are computed; it must be a multiple of "
                f"block_tokens ({block_tokens})",
                hint="call receive before the first commit",
            )
        ticket = Ticket(
            ticket_id=secrets.token_bytes(tickets.ID_BYTES),
            generation=self._generation,
            model=self._model,
            weights_version=self._weights_version,
            prompt_digest=read.digest(lease_id, num_tokens),
            first_position=first,
            num_tokens=num_tokens,
            timeout_seconds=timeout,
            block_tokens=block_tokens,
            transport=endpoints[0].transport,
            endpoints=endpoints,
        )
        return ticket, tickets.encode(ticket)

    def checked_ticket(self, lease: Lease, blob: bytes) -> Ticket:
        """Return the ticket in a blob, for the prompt of a lease.

        Raises:
            UsageError, LeaseError, PeerError, ClosedError, BrokenEngineError: see
                ``Sending.__aenter__``.
        """
        self._check_open("send")
        ticket = tickets.decode(blob)
        lease_id = self._granted_id(lease, "send")
        for name, there, here in (
            ("CacheConfig.model", ticket.model, self._model),
            ("version of the weights", ticket.weights_version, self._weights_version),
        ):
            if there != here:
                raise PeerError(
                    f"send: the {name} of the receiving engine is {there!r}, here it is {here!r}"
                )
        if self._read.digest(lease_id, ticket.num_tokens) != ticket.prompt_digest:
            raise UsageError(
                f"send: the ticket is for another prompt than that of {lease!r}: tokens, salt, "
                f"adapter or items of the first {ticket.num_tokens} positions differ",
                hint="match the same prompt on both engines",
            )
        running = (flow for flows in self.flows.values() for flow in flows if not flow.receives)
        if any(flow.ticket.ticket_id == ticket.ticket_id for flow in running):
            raise UsageError(
                f"send: ticket {ticket.ticket_id.hex()[:8]} is being sent already",
                hint="each ticket can be sent once",
            )
        return ticket

    def _check_open(self, verb: str) -> None:
        self._lifetime.check_open()
        if not self._worker.capabilities.peers:
            raise UsageError(f"{verb}: the engine has no peers", hint=_NO_PEERS)

    def _granted_id(self, lease: Lease, verb: str) -> int:
        lease_id = lease.held_id()
        if (state := self._read.state(lease_id)) is not LeaseState.GRANTED:
            raise LeaseError(
                f"{verb}: {lease!r} is {state}; it must be granted",
                hint="call allocate first",
            )
        return lease_id

    # --- receives -------------------------------------------------------------------------------

    def open_receive(self, flow: Flow, blob: bytes, timeout: float) -> None:
        """Let the other engine send the blocks of a ticket, for ``timeout`` seconds."""
        self._worker.expect(blob, timeout)
        self._open(flow)
        flow.end_in(timeout)
        self.counts.receives += 1
        self.counts.wanted_tokens += flow.ticket.num_tokens - flow.ticket.first_position

    def begin_receive(self, flow: Flow) -> None:
        """Begin the transfers of a flow, unless onloads of the lease are in flight.

        Raises:
            AiokvError: the scheduler refuses a transfer.
        """
        if self._waits_for_onloads(flow):
            return
        if self._read.state(flow.lease_id) is LeaseState.FAILED:
            flow.kept_tokens = self._read.cached_tokens(flow.lease_id)
            flow.end("an onload of the lease has failed")
            return
        end_block = self._read.blocks_for(flow.ticket.num_tokens)
        flow.begin(self._scheduler.receive, end_block, self._chunk_blocks)

    def commit_received(self, flow: Flow, num_tokens: int) -> None:
        """Index the blocks of the first ``num_tokens`` positions, which have arrived.

        Raises:
            LeaseError: the lease cannot commit them.
        """
        self._apply(self._scheduler.commit_received(flow.lease_id, num_tokens))

    def note_wait(self, lease: Lease, seconds: float) -> None:
        """Add the time of one call of ``Receiving.wait``."""
        self.counts.receive_wait_seconds += seconds
        lease.note_peer_wait(seconds)

    # --- sends ----------------------------------------------------------------------------------

    async def open_send(self, flow: Flow, blob: bytes) -> None:
        """Connect to the engine that made a ticket.

        Raises:
            LayoutError, PeerError, LeaseError, ClosedError, BrokenEngineError: see
                ``Sending.__aenter__``. The flow has ended.

        Cancellation: the flow has ended.
        """
        seconds = flow.ticket.timeout_seconds
        deadline = self.loop.time() + seconds
        self._open(flow)
        try:
            async with asyncio.timeout_at(deadline):
                await self._worker.open_ticket(blob)
            self._check_open("send")
            flow.lease.live_id()
            if flow.ended:
                raise PeerError(f"send: the ticket has ended: {flow.failure}")
        except BaseException as error:
            flow.end("the ticket could not be opened")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"send: the receiving engine did not answer within {seconds:.4g} s"
                ) from None
            raise
        flow.end_in(deadline - self.loop.time())
        self.counts.sends += 1

    def begin_send(self, flow: Flow) -> None:
        """Begin transfers of the blocks that were computed since the last call.

        Raises:
            AiokvError: the scheduler refuses a transfer.
        """
        if self._waits_for_onloads(flow):
            return
        if self._read.state(flow.lease_id) is not LeaseState.GRANTED:
            return  # the next commit calls again
        limit = flow.ticket.num_tokens
        computed = self._read.computed_tokens(flow.lease_id)
        # The last block of the prompt may be partial.
        end_block = computed // self.block_tokens
        if computed >= limit:
            end_block = self._read.blocks_for(limit)
        flow.begin(self._scheduler.send, end_block, self._chunk_blocks)

    # --- flows ----------------------------------------------------------------------------------

    def _open(self, flow: Flow) -> None:
        self.flows.setdefault(flow.lease_id, []).append(flow)

    def _waits_for_onloads(self, flow: Flow) -> bool:
        if not self._read.onloads(flow.lease_id):
            return False
        self._loading.add(flow)
        return True

    def is_loading(self, flow: Flow) -> bool:
        """Return True if transfers of the flow begin when onloads of its lease have ended."""
        return flow in self._loading

    def submit(self, flow: Flow, transfer_id: int, effects: Effects) -> None:
        """Apply the effects of the begin of a transfer."""
        self._by_transfer[transfer_id] = flow
        self._apply((None, effects))

    def end(self, flow: Flow) -> None:
        """Cancel the transfers of a flow that has ended, even if an interrupt ends this call."""
        self._poller.surely(partial(self._end, flow))

    def _end(self, flow: Flow) -> None:
        """Cancel the transfers of a flow that has ended. Idempotent."""
        self._loading.discard(flow)
        ticket_id = flow.ticket.ticket_id
        if self._lifetime.is_running:
            if not flow.at_rest:
                self._apply(self._scheduler.end_peer(flow.lease_id, ticket_id))
            self._worker.close_ticket(ticket_id)
        if flow.failure is not None:
            log.warning(
                "receive.ended" if flow.receives else "send.ended",
                owner=flow.lease.owner,
                ticket=ticket_id.hex(),
                reason=flow.failure,
            )
        self._settle(flow)

    def _settle(self, flow: Flow) -> None:
        """Wake the coroutines that wait for a flow, and forget it when it has ended. Idempotent."""
        flows = self.flows.get(flow.lease_id)
        if flow.ended and flow.at_rest and flows is not None and flow in flows:
            flows.remove(flow)
            if not flows:
                del self.flows[flow.lease_id]
        flow.wake()

    # --- ends of transfers ----------------------------------------------------------------------

    def note_report(self, report: TransferReport) -> None:
        """Note why a transfer has failed, before the scheduler accounts for its report."""
        if report.outcome == "failed" and report.transfer_id in self._by_transfer:
            self._reasons[report.transfer_id] = report.reason

    def after_report(self) -> None:
        """Proceed with the flows whose leases have no more onloads in flight."""
        for flow in list(self._loading):
            if not self._read.onloads(flow.lease_id):
                self._loading.discard(flow)
                flow.proceed()
                self._settle(flow)

    def _note_moved(self, moved: Moved) -> None:
        """Note the end of a transfer; the next pass of the loop makes the transitions for it."""
        if moved.transfer_id in self._by_transfer:
            self._ended.append(moved)
            if not self._poller.closed:
                self._poller.soon(self._tell_flows)

    def _tell_flows(self) -> None:
        while self._ended:
            transfer_id, _, blocks = self._ended[0]
            if (flow := self._by_transfer.get(transfer_id)) is not None:
                flow.moved(transfer_id, blocks, self._reasons.get(transfer_id, ""))
                flow.proceed()
                self._settle(flow)
            self._forget(transfer_id)
            self._ended.popleft()

    def _forget(self, transfer_id: int) -> None:
        self._by_transfer.pop(transfer_id, None)
        self._reasons.pop(transfer_id, None)

    # --- changes of leases and of the engine ------------------------------------------------------

    def committed(self, lease_id: int) -> None:
        """Send the blocks of a lease that were computed."""
        for flow in list(self.flows.get(lease_id, ())):
            flow.proceed()

    def truncated(self, lease_id: int, num_tokens: int) -> None:
        """End the flows of a lease that has given positions of their tickets back."""
        for flow in list(self.flows.get(lease_id, ())):
            if num_tokens < flow.ticket.num_tokens:
                flow.kept_tokens = min(flow.kept_tokens, num_tokens)
                flow.end(f"the lease was truncated to {num_tokens} positions")

    def gave_back(self, lease_id: int, reason: str) -> None:
        """End the flows of a lease that has given all its blocks back."""
        for flow in list(self.flows.get(lease_id, ())):
            flow.kept_tokens = 0
            for transfer_id in flow.transfer_ids:
                self._forget(transfer_id)
            flow.forget()
            flow.end(reason)
            self._settle(flow)

    async def stop(self, lease_id: int, reason: str) -> None:
        """End the flows of a lease; return when none of its transfers is in flight.

        Cancellation: the flows have ended.
        """
        flows = list(self.flows.get(lease_id, ()))
        for flow in flows:
            flow.end(reason)
        for flow in flows:
            await flow.wait_for(lambda flow=flow: flow.at_rest)  # type: ignore[misc]

    def end_all(self, reason: str) -> None:
        """End all flows."""
        for flow in [flow for flows in self.flows.values() for flow in flows]:
            flow.end(reason)

    def lose_all(self, reason: str) -> None:
        """End all flows: no lease has its blocks any more, and no report of a transfer follows."""
        for lease_id in list(self.flows):
            self.gave_back(lease_id, reason)

    def change_weights(self, version: str) -> None:
        """Exchange blocks with engines that have this version of the weights only."""
        self._weights_version = version

    def renew(self) -> None:
        """Let no ticket from before be valid: the worker has lost its memory."""
        self._generation = secrets.token_bytes(tickets.ID_BYTES)
