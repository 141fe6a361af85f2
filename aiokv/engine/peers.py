"""Peers: receives and sends of leases, between this engine and engines on other servers.

::

    lease.receive ─► ticket ─► the user's request ─► engine.send
         │                                               │  commit ─► SEND plans, as far as computed
         └─► RECEIVE plans of all blocks                 └─► leaving waits for the acknowledgements
              chunk after chunk: commit_received

A :class:`Receiving` or :class:`Sending` is the handle of one ticket on its side, a :class:`Flow`
has the transfers of the ticket. :class:`Exchange` has all flows of the engine: it tells them the
ends of their transfers, and ends them when their leases give blocks back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_right
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base import checks
from aiokv.base.groups import STATE
from aiokv.base.logs import Log
from aiokv.base.statistics import PeerStatistics, RankPeerStatistics
from aiokv.base.types import LeaseState, lease_name
from aiokv.engine.progress import SendProgress
from aiokv.errors import LeaseError, PeerError, UsageError
from aiokv.peers import ticket as tickets
from aiokv.peers.options import CHUNK_BLOCKS
from aiokv.peers.statistics import PeerCounts
from aiokv.peers.ticket import Ticket
from aiokv.worker.device.base import as_event
from aiokv.worker.layer_marks import layer_mark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.base.plan import TransferReport
    from aiokv.config.cache_config import WindowGroup
    from aiokv.engine.flow import Flow
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.observers import End
    from aiokv.engine.parts import Parts
    from aiokv.scheduler.effects import Effects, Moved
    from aiokv.worker.device.base import Event

log = Log(__name__)

_COMPLETE: Final = "all positions have arrived"
_NO_PEERS: Final = "pass peers=Peers(...) to CacheEngine, or has_peers=True to the RankGroup"


class Exchange:
    """Receives and sends of all leases of one engine.

    Attributes:
        block_tokens: positions per block.
        groups: groups other than ``"attention"``; a receive needs their blocks at its end.
        counts: counts of all receives and sends.
        flows: by lease, those that have not ended or have transfers in flight.
    """

    def __init__(self, parts: Parts) -> None:
        self._lifetime = parts.lifetime
        self._transitions = parts.scheduler.peers
        self._read = parts.scheduler.read
        self._apply = parts.dispatcher.apply
        self._worker = parts.worker
        self._poller = parts.poller
        self._peer_wait = parts.requests.peer_wait
        self._observers = parts.observers
        self._model = parts.config.model
        self._weights_version = parts.config.weights_version
        self._generation = secrets.token_bytes(tickets.ID_BYTES)
        self._chunk_blocks = CHUNK_BLOCKS if parts.peers is None else parts.peers.chunk_blocks
        self._marks = count(1)
        self._by_transfer: dict[int, Flow] = {}
        self._reasons: dict[int, str] = {}  # why transfers are not done, by transfer
        self._ended: deque[Moved] = deque()  # transfers whose flows have not been told
        self._sent_tickets: set[bytes] = set()  # tickets that flows send
        self._loading: set[Flow] = set()  # wait for the onloads of their leases
        self._computing: set[Flow] = set()  # wait for the batches that compute with their leases
        self._windows = window_sizes(parts.config.windows)
        self.block_tokens = parts.config.block_tokens
        self.groups = [*self._windows, *([STATE] if parts.config.state_slots else ())]
        self.counts = PeerCounts()
        self.flows: dict[int, list[Flow]] = {}
        parts.dispatcher.on_moved(self._note_moved)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the engine."""
        return self._lifetime.loop

    def check_thread(self) -> None:
        """See ``Lifetime.check_thread``."""
        self._lifetime.check_thread()

    def statistics(self, ranks: list[RankPeerStatistics]) -> PeerStatistics:
        """Return the counts of receives and sends. Any thread."""
        running = [f for flows in list(self.flows.values()) for f in list(flows) if not f.ended]
        receiving = sum(flow.receives for flow in running)
        return PeerStatistics(
            receiving=receiving,
            sending=len(running) - receiving,
            ranks=ranks,
            **msgspec.structs.asdict(self.counts),
        )

    # --- tickets --------------------------------------------------------------------------------

    def new_ticket(
        self, record: LeaseRecord, num_tokens: int | None, timeout: float
    ) -> tuple[Ticket, bytes]:
        """Return a ticket for the positions of a lease that are not computed, and its blob.

        Raises:
            UsageError, LeaseError, ClosedError, BrokenEngineError: see ``Receiving.__aenter__``.
        """
        self._check_open("receive")
        endpoints = self._worker.tickets.endpoints
        if not endpoints:
            raise UsageError(
                "receive: Peers.listen is None, so the engine only sends",
                hint="pass Peers(listen=..., secret=...) with an address of this server",
            )
        lease_id = self._granted_id(record, "receive")
        if any(flow.receives for flow in self.flows.get(lease_id, ())):
            raise LeaseError(f"receive: {record!r} is being received already")
        read, block_tokens = self._read, self.block_tokens
        if num_tokens is None:
            num_tokens = min(read.num_tokens(lease_id), read.usage(lease_id)[0])
        elif num_tokens > read.num_tokens(lease_id):
            raise LeaseError(
                f"receive: num_tokens is {num_tokens}; it must be at most the "
                f"{read.num_tokens(lease_id)} positions of {record!r}"
            )
        first = read.computed_tokens(lease_id)
        if first >= num_tokens:
            raise LeaseError(
                f"receive: the first {first} positions of {record!r} are computed; of "
                f"{num_tokens}, none is missing",
                hint="send the request to no other engine",
            )
        if first % block_tokens:
            raise LeaseError(
                f"receive: {first} positions of {record!r} are computed; it must be a multiple of "
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
            windows=self._windows,
        )
        return ticket, tickets.encode(ticket, self._worker.tickets.ticket_key)

    def checked_ticket(self, record: LeaseRecord, blob: bytes) -> Ticket:
        """Return the ticket in a blob, for the prompt of a lease.

        Raises:
            UsageError, LeaseError, PeerError, ClosedError, BrokenEngineError: see
                ``Sending.__aenter__``.
        """
        self._check_open("send")
        ticket = tickets.decode(blob, self._worker.tickets.ticket_key)
        lease_id = self._granted_id(record, "send")
        settings: tuple[tuple[str, object, object], ...] = (
            ("CacheConfig.model", ticket.model, self._model),
            ("version of the weights", ticket.weights_version, self._weights_version),
            (
                "(window_tokens, sink_tokens) of each group of CacheConfig.windows",
                ticket.windows,
                self._windows,
            ),
        )
        for name, there, here in settings:
            if there != here:
                raise PeerError(
                    f"send: the {name} of the receiving engine is {there!r}, here it is {here!r}"
                )
        if self._read.digest(lease_id, ticket.num_tokens) != ticket.prompt_digest:
            raise UsageError(
                f"send: the ticket is for another prompt than that of {record!r}: tokens, salt, "
                f"adapter or items of the first {ticket.num_tokens} positions differ",
                hint="match the same prompt on both engines",
            )
        if ticket.ticket_id in self._sent_tickets:
            raise UsageError(
                f"send: ticket {ticket.ticket_id.hex()[:8]} is being sent already",
                hint="each ticket can be sent once",
            )
        return ticket

    def _check_open(self, verb: str) -> None:
        self._lifetime.check_open()
        if not self._worker.facts.capabilities.peers:
            raise UsageError(f"{verb}: the engine has no peers", hint=_NO_PEERS)

    def _granted_id(self, record: LeaseRecord, verb: str) -> int:
        lease_id = record.held_id()
        if (state := self._read.state(lease_id)) is not LeaseState.GRANTED:
            raise LeaseError(
                f"{verb}: {record!r} is {state}; it must be granted",
                hint="call allocate first",
            )
        return lease_id

    # --- receives -------------------------------------------------------------------------------

    async def open_receive(
        self, flow: Flow, blob: bytes, timeout: float, open_timeout: float
    ) -> None:
        """Let the other engine send the blocks of a ticket; see ``Lease.receive`` for the times.

        Raises:
            PeerError, ClosedError, BrokenEngineError: see ``Receiving.__aenter__``.

        Cancellation: the caller ends the flow.
        """
        self._worker.tickets.expect(blob, timeout, open_timeout)
        self._open(flow)
        flow.end_in(timeout)
        await self._worker.tickets.expected(flow.ticket.ticket_id, timeout)
        self.counts.receives += 1
        self.counts.wanted_tokens += flow.ticket.num_tokens - flow.ticket.first_position

    def begin_receive(self, flow: Flow) -> None:
        """Begin the transfers of a flow, unless onloads of the lease are in flight.

        Raises:
            AiokvError: the scheduler refuses a transfer.
        """
        if flow.ended or self._waits_for_onloads(flow):
            return
        if self._read.state(flow.lease_id) is LeaseState.FAILED:
            self._keep_cached(flow)
            flow.end(flow.reason or "an onload of the lease has failed")
            return
        end_block = self._read.blocks_for(flow.ticket.num_tokens)
        flow.begin(self._transitions.receive, end_block, self._chunk_blocks)

    def commit_arrived(self, flow: Flow, num_tokens: int) -> bool:
        """Commit the first ``num_tokens`` positions, whose blocks have arrived.

        With recurrent state or windows, only all positions of the ticket can be committed: the
        first call begins to receive the windows, a later one the state.

        Returns:
            True when they are committed.

        Raises:
            AiokvError: the lease cannot commit them, or the scheduler refuses a transfer.
        """
        if self.groups and (num_tokens < flow.ticket.num_tokens or flow.is_broken):
            return False
        for group in self._windows:
            flow.begin_group(self._transitions.receive, group, num_tokens)
        if not flow.moved_groups.issuperset(self._windows):
            return False
        if STATE not in self.groups:
            self._apply(self._transitions.commit_received(flow.lease_id, num_tokens))
            return True
        # The end of the transfer commits the positions.
        flow.begin_group(self._transitions.receive, STATE, num_tokens)
        return self.is_committed(flow)

    def is_committed(self, flow: Flow) -> bool:
        """Return True when the end of the receive of a state has committed all positions."""
        return STATE in flow.moved_groups

    def note_received(self, record: LeaseRecord, tokens: int) -> None:
        """Count positions that have arrived."""
        self.counts.received_tokens += tokens
        record.waits.received_tokens += tokens

    def note_wait(self, flow: Flow, seconds: float, outcome: End) -> None:
        """Add the time of one call of ``Receiving.wait``, which ends now."""
        self.counts.receive_wait_seconds += seconds
        self._peer_wait.add(seconds)
        flow.record.waits.add_peer(seconds)
        if self._observers.active:
            self._observers.end_wait(
                flow.lease_id,
                flow.record.owner,
                "peer",
                time.monotonic() - seconds,
                outcome,
            )

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
        self._sent_tickets.add(flow.ticket.ticket_id)
        try:
            async with asyncio.timeout_at(deadline):
                await self._worker.tickets.open_ticket(blob)
            if flow.ended:
                raise PeerError("the ticket was closed while it was opened")
        except BaseException as error:
            failure = flow.failure
            flow.end(f"the ticket could not be opened: {_cause(error)}")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"send: the receiving engine did not answer within {seconds:.4g} s"
                ) from None
            if isinstance(error, PeerError) and failure is not None:
                self._check_open("send")
                flow.record.live_id()
                raise PeerError(f"send: the ticket has ended: {failure}") from None
            raise
        flow.end_in(deadline - self.loop.time())
        self.counts.sends += 1

    def new_progress(self, first_block: int) -> SendProgress:
        """Return the progress of a send of the blocks from ``first_block`` on.

        Raises:
            PeerError: the ranks divide the layers in different ways.
        """
        num_ranges = max(len(self._worker.tickets.layer_ends), 1)
        return SendProgress(first_block, num_ranges, self._chunk_blocks)

    def note_layers(
        self,
        flow: Flow,
        progress: SendProgress,
        num_tokens: int,
        num_layers: int,
        event: Event | None,
    ) -> bytes:
        """Send layers of positions that are not committed; see ``Sending.layers_done``.

        Raises:
            UsageError, LeaseError: see ``Sending.layers_done``. Nothing changed.
        """
        limit = self._worker.facts.num_layers
        num_layers = checks.integer("num_layers", num_layers, minimum=0, maximum=limit)
        num_tokens = checks.integer("num_tokens", num_tokens, minimum=0)
        event = as_event("event", event)
        self._worker.steps.check_event(event)
        mark = next(self._marks)
        if flow.ended:
            return layer_mark(flow.ticket.ticket_id, mark)
        if num_tokens > (allocated := self._read.num_tokens(flow.record.live_id())):
            raise LeaseError(
                f"layers_done: num_tokens is {num_tokens}; it must be at most the {allocated} "
                f"positions of {flow.record!r}"
            )
        ticket = flow.ticket
        ranges = bisect_right(self._worker.tickets.layer_ends, num_layers)
        end_block = self._sendable_block(ticket, num_tokens)
        self._worker.tickets.layers_done(ticket.ticket_id, mark, event)
        progress.note_computed(end_block, ranges, mark)
        flow.proceed()
        return layer_mark(ticket.ticket_id, mark)

    def _sendable_block(self, ticket: Ticket, num_tokens: int) -> int:
        """Return the end of the blocks that can be sent when ``num_tokens`` are computed."""
        if num_tokens >= ticket.num_tokens:  # the last block of the prompt may be partial
            return self._read.blocks_for(ticket.num_tokens)
        return num_tokens // self.block_tokens

    def begin_send(self, flow: Flow, progress: SendProgress) -> None:
        """Begin transfers of the blocks that were computed since the last call.

        Those of the state and of the windows begin when exactly the positions of the ticket are
        computed, and no batch computes with the lease.

        Raises:
            LeaseError: positions behind those of the ticket are computed, so that the state and the
                windows of the ticket do not exist any more.
            AiokvError: the scheduler refuses a transfer.
        """
        if self._waits_for_onloads(flow):
            return
        if self._read.state(flow.lease_id) is not LeaseState.GRANTED:
            progress.forget_computed()  # an onload has failed
            return  # the next commit calls again
        computed = self._read.computed_tokens(flow.lease_id)
        committed_block = self._sendable_block(flow.ticket, computed)
        while (part := progress.next_part(committed_block)) is not None:
            is_early = bool(part.mark)
            if not flow.may_begin(is_early=is_early):
                break
            flow.begin_part(
                partial(
                    self._transitions.send,
                    first_range=part.first_range,
                    end_range=part.end_range,
                    mark=part.mark,
                ),
                part.first_block,
                part.num_blocks,
                share=progress.share(part),
                is_last=progress.is_last(part),
                is_early=is_early,
            )
            progress.begin(part)
        if computed >= flow.ticket.num_tokens:
            self._begin_groups(flow, computed)

    def _begin_groups(self, flow: Flow, computed: int) -> None:
        """Send the state and the windows behind the computed positions."""
        groups = [group for group in self.groups if not flow.has_begun(group)]
        if not groups:
            return
        limit = flow.ticket.num_tokens
        if computed > limit:
            raise LeaseError(
                f"send: {computed} positions of {flow.record!r} are computed; the recurrent state "
                f"and the windows can be sent only after exactly the {limit} positions of the "
                "ticket",
                hint=f"commit {limit} positions, and end the send before further ones are computed",
            )
        if self._read.batches(flow.lease_id):
            self._computing.add(flow)
            flow.is_computing = True
            return
        for group in groups:
            flow.begin_group(self._transitions.send, group, limit)

    # --- flows ----------------------------------------------------------------------------------

    def _open(self, flow: Flow) -> None:
        self.flows.setdefault(flow.lease_id, []).append(flow)

    def _waits_for_onloads(self, flow: Flow) -> bool:
        if not self._read.onloads(flow.lease_id):
            return False
        self._loading.add(flow)
        flow.is_loading = True
        return True

    def _keep_cached(self, flow: Flow) -> None:
        """Note that the lease has only the positions before its failed onload."""
        flow.kept_tokens = min(flow.kept_tokens, self._read.cached_tokens(flow.lease_id))

    def _end_loading(self, flow: Flow) -> None:
        self._loading.discard(flow)
        flow.is_loading = False

    def _end_computing(self, flow: Flow) -> None:
        self._computing.discard(flow)
        flow.is_computing = False

    def submit(self, flow: Flow, transfer_id: int, effects: Effects) -> None:
        """Apply the effects of the begin of a transfer."""
        self._by_transfer[transfer_id] = flow
        self._apply((None, effects))
        if self._observers.active:
            self._observers.caused(flow.lease_id, transfer_id)

    def end(self, flow: Flow) -> None:
        """Cancel the transfers of a flow that has ended."""
        ticket_id = flow.ticket.ticket_id
        if not flow.receives:  # a receive that has ended still waits: its lease is not complete
            self._end_loading(flow)
            self._end_computing(flow)
            self._sent_tickets.discard(ticket_id)
        if self._lifetime.is_running:
            # Before the transfers are cancelled: the other engine gets the reason.
            self._worker.tickets.close_ticket(ticket_id, flow.failure or _COMPLETE)
            if not flow.at_rest:
                self._apply(self._transitions.end(flow.lease_id, ticket_id))
        flow.context.run(_log_end, flow)
        self._settle(flow)

    def _settle(self, flow: Flow) -> None:
        """Wake the coroutines that wait for a flow, and forget it when it has ended. Idempotent."""
        flows = self.flows.get(flow.lease_id)
        if flow.ended and flow.at_rest and flows is not None and flow in flows:
            flows.remove(flow)
            if flow.failure is None and flow.receives:
                self.counts.complete_receives += 1
            elif flow.failure is None:
                self.counts.complete_sends += 1
        if flows is not None and not flows:
            self.flows.pop(flow.lease_id, None)
        flow.wake()

    # --- ends of transfers ----------------------------------------------------------------------

    def note_report(self, report: TransferReport) -> None:
        """Note why a transfer is not done, before the scheduler accounts for its report."""
        if report.outcome != "done" and report.transfer_id in self._by_transfer:
            self._reasons[report.transfer_id] = report.reason

    def after_report(self) -> None:
        """Proceed with the flows whose leases have no more onloads in flight."""
        for flow in list(self._loading):
            if not self._read.onloads(flow.lease_id):
                self._end_loading(flow)
                if flow.ended and self._read.state(flow.lease_id) is LeaseState.FAILED:
                    self._keep_cached(flow)
                flow.proceed()
                self._settle(flow)

    def after_batch(self) -> None:
        """Proceed with the flows whose leases no batch computes with any more."""
        for flow in list(self._computing):
            if not self._read.batches(flow.lease_id):
                self._end_computing(flow)
                flow.proceed()
                self._settle(flow)

    def _note_moved(self, moved: Moved) -> None:
        """Note the end of a transfer; the next pass of the loop makes the transitions for it."""
        if moved.transfer_id in self._by_transfer:
            self._ended.append(moved)
            if not self._poller.closed:
                self._poller.soon(self._tell_flows)

    def _tell_flows(self) -> None:
        """Tell the flows the ends of their transfers; an error of one does not keep the others."""
        while self._ended:
            moved = self._ended.popleft()
            try:
                self._tell_flow(moved)
            except Exception as error:
                self.loop.call_exception_handler(
                    {
                        "message": f"aiokv: after the end of transfer {moved.transfer_id}",
                        "exception": error,
                    }
                )
            self._forget(moved.transfer_id)

    def _tell_flow(self, moved: Moved) -> None:
        transfer_id = moved.transfer_id
        if (flow := self._by_transfer.get(transfer_id)) is not None:
            flow.moved(transfer_id, moved.blocks, self._reasons.get(transfer_id, ""))
            if flow.receives and self._read.state(flow.lease_id) is LeaseState.FAILED:
                self._keep_cached(flow)  # its windows or its state are lost
            flow.proceed()
            self._settle(flow)

    def _forget(self, transfer_id: int) -> None:
        self._by_transfer.pop(transfer_id, None)
        self._reasons.pop(transfer_id, None)

    def note_ticket_end(self, ticket_id: bytes, reason: str) -> None:
        """End the send of a ticket that has ended, when none of its transfers is in flight.

        Its last transfers may have succeeded. Idempotent.
        """
        for flow in [flow for flows in self.flows.values() for flow in flows]:
            if flow.ticket.ticket_id == ticket_id and not flow.receives:
                flow.note_ticket_end(reason)
                self._settle(flow)

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
            self._loading.discard(flow)
            self._computing.discard(flow)
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


def _cause(error: BaseException) -> str:
    """Return an error as the reason of the end of a flow."""
    if isinstance(error, TimeoutError):
        return "the receiving engine did not answer in time"
    if isinstance(error, asyncio.CancelledError):
        return "it was cancelled"
    return str(error) or type(error).__name__


def _log_end(flow: Flow) -> None:
    """Log the end of a flow; in the context of the task that has begun it."""
    owner, ticket = lease_name(flow.record.owner, flow.lease_id), flow.ticket.ticket_id.hex()
    if flow.failure is None:
        log.debug(
            "receive.completed" if flow.receives else "send.completed",
            owner=owner,
            ticket=ticket,
            tokens=flow.ticket.num_tokens - flow.ticket.first_position,
        )
    elif not flow.is_cancelled:
        log.warning(
            "receive.ended" if flow.receives else "send.ended",
            owner=owner,
            ticket=ticket,
            reason=flow.failure,
        )


def window_sizes(windows: Mapping[str, WindowGroup]) -> dict[str, tuple[int, int]]:
    """Return (window_tokens, sink_tokens) of each group, which both engines must have."""
    return {name: (group.window_tokens, group.sink_tokens) for name, group in windows.items()}
