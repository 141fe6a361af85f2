"""Peers: receives and sends of leases, between this engine and engines on other servers.

::

    lease.receive ─► ticket ─► the user's request ─► engine.send
         │                                               │  commit ─► SEND plans, as far as computed
         └─► RECEIVE plans of all blocks                 └─► leaving waits for the acknowledgements
              chunk after chunk: commit_received

A :class:`Receiving` or :class:`Sending` is the handle of one ticket on its side. The ticket's
:class:`TicketTransfers` begin and count its transfers. :class:`PeerTickets` has the tickets of the
engine: it passes the ends of transfers on to them, and ends a ticket when its lease gives blocks
back.
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
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.observers import End
    from aiokv.engine.parts import Parts
    from aiokv.engine.ticket_transfers import TicketTransfers
    from aiokv.scheduler.effects import Effects, Moved
    from aiokv.worker.device.base import Event

log = Log(__name__)

_COMPLETE: Final = "all positions have arrived"
_NO_PEERS: Final = "pass peers=Peers(...) to CacheEngine, or has_peers=True to the RankGroup"


class PeerTickets:
    """Receives and sends of all leases of one engine.

    Attributes:
        block_tokens: positions per block.
        groups: groups other than ``"attention"``; a receive needs their blocks at its end.
        counts: counts of all receives and sends.
        by_lease: tickets by lease that have not ended or have transfers in flight.
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
        self._by_transfer: dict[int, TicketTransfers] = {}
        self._reasons: dict[int, str] = {}  # why transfers are not done, by transfer
        self._ended: deque[Moved] = deque()  # ended transfers that were not reported yet
        self._sent_tickets: set[bytes] = set()  # ids of tickets that this engine sends
        self._loading: set[TicketTransfers] = set()  # those that wait for onloads of their leases
        self._computing: set[TicketTransfers] = (
            set()
        )  # those that wait for batches that compute with their leases
        self._windows = window_sizes(parts.config.windows)
        self.block_tokens = parts.config.block_tokens
        self.groups = [*self._windows, *([STATE] if parts.config.state_slots else ())]
        self.counts = PeerCounts()
        self.by_lease: dict[int, list[TicketTransfers]] = {}
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
        running = [
            f for active in list(self.by_lease.values()) for f in list(active) if not f.ended
        ]
        receiving = sum(transfers.receives for transfers in running)
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
        if any(transfers.receives for transfers in self.by_lease.get(lease_id, ())):
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
        self, transfers: TicketTransfers, blob: bytes, timeout: float, open_timeout: float
    ) -> None:
        """Let the other engine send the blocks of a ticket; see ``Lease.receive`` for the times.

        Raises:
            PeerError, ClosedError, BrokenEngineError: see ``Receiving.__aenter__``.

        Cancellation: the caller ends the ticket.
        """
        self._worker.tickets.expect(blob, timeout, open_timeout)
        self._open(transfers)
        transfers.end_in(timeout)
        await self._worker.tickets.expected(transfers.ticket.ticket_id, timeout)
        self.counts.receives += 1
        self.counts.wanted_tokens += transfers.ticket.num_tokens - transfers.ticket.first_position

    def begin_receive(self, transfers: TicketTransfers) -> None:
        """Begin the transfers of a ticket, unless onloads of the lease are in flight.

        Raises:
            AiokvError: the scheduler refuses a transfer.
        """
        if transfers.ended or self._waits_for_onloads(transfers):
            return
        if self._read.state(transfers.lease_id) is LeaseState.FAILED:
            self._keep_cached(transfers)
            transfers.end(transfers.reason or "an onload of the lease has failed")
            return
        end_block = self._read.blocks_for(transfers.ticket.num_tokens)
        transfers.begin(self._transitions.receive, end_block, self._chunk_blocks)

    def commit_arrived(self, transfers: TicketTransfers, num_tokens: int) -> bool:
        """Commit the first ``num_tokens`` positions, whose blocks have arrived.

        With recurrent state or windows, only all positions of the ticket can be committed: the
        first call begins to receive the windows, a later one the state.

        Returns:
            True when they are committed.

        Raises:
            AiokvError: the lease cannot commit them, or the scheduler refuses a transfer.
        """
        if self.groups and (num_tokens < transfers.ticket.num_tokens or transfers.is_broken):
            return False
        for group in self._windows:
            transfers.begin_group(self._transitions.receive, group, num_tokens)
        if not transfers.moved_groups.issuperset(self._windows):
            return False
        if STATE not in self.groups:
            self._apply(self._transitions.commit_received(transfers.lease_id, num_tokens))
            return True
        # The end of the transfer commits the positions.
        transfers.begin_group(self._transitions.receive, STATE, num_tokens)
        return self.is_committed(transfers)

    def is_committed(self, transfers: TicketTransfers) -> bool:
        """Return True when the end of the receive of a state has committed all positions."""
        return STATE in transfers.moved_groups

    def note_received(self, record: LeaseRecord, tokens: int) -> None:
        """Count positions that have arrived."""
        self.counts.received_tokens += tokens
        record.waits.received_tokens += tokens

    def note_wait(self, transfers: TicketTransfers, seconds: float, outcome: End) -> None:
        """Add the time of one call of ``Receiving.wait``, which ends now."""
        self.counts.receive_wait_seconds += seconds
        self._peer_wait.add(seconds)
        transfers.record.waits.add_peer(seconds)
        if self._observers.active:
            self._observers.end_wait(
                transfers.lease_id,
                transfers.record.owner,
                "peer",
                time.monotonic() - seconds,
                outcome,
            )

    # --- sends ----------------------------------------------------------------------------------

    async def open_send(self, transfers: TicketTransfers, blob: bytes) -> None:
        """Connect to the engine that made a ticket.

        Raises:
            LayoutError, PeerError, LeaseError, ClosedError, BrokenEngineError: see
                ``Sending.__aenter__``. The ticket has ended.

        Cancellation: the ticket has ended.
        """
        seconds = transfers.ticket.timeout_seconds
        deadline = self.loop.time() + seconds
        self._open(transfers)
        self._sent_tickets.add(transfers.ticket.ticket_id)
        try:
            async with asyncio.timeout_at(deadline):
                await self._worker.tickets.open_ticket(blob)
            if transfers.ended:
                raise PeerError("the ticket was closed while it was opened")
        except BaseException as error:
            failure = transfers.failure
            transfers.end(f"the ticket could not be opened: {_cause(error)}")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"send: the receiving engine did not answer within {seconds:.4g} s"
                ) from None
            if isinstance(error, PeerError) and failure is not None:
                self._check_open("send")
                transfers.record.live_id()
                raise PeerError(f"send: the ticket has ended: {failure}") from None
            raise
        transfers.end_in(deadline - self.loop.time())
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
        transfers: TicketTransfers,
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
        if transfers.ended:
            return layer_mark(transfers.ticket.ticket_id, mark)
        if num_tokens > (allocated := self._read.num_tokens(transfers.record.live_id())):
            raise LeaseError(
                f"layers_done: num_tokens is {num_tokens}; it must be at most the {allocated} "
                f"positions of {transfers.record!r}"
            )
        ticket = transfers.ticket
        ranges = bisect_right(self._worker.tickets.layer_ends, num_layers)
        end_block = self._sendable_block(ticket, num_tokens)
        self._worker.tickets.layers_done(ticket.ticket_id, mark, event)
        progress.note_computed(end_block, ranges, mark)
        transfers.proceed()
        return layer_mark(ticket.ticket_id, mark)

    def _sendable_block(self, ticket: Ticket, num_tokens: int) -> int:
        """Return the end of the blocks that can be sent when ``num_tokens`` are computed."""
        if num_tokens >= ticket.num_tokens:  # the last block of the prompt may be partial
            return self._read.blocks_for(ticket.num_tokens)
        return num_tokens // self.block_tokens

    def begin_send(self, transfers: TicketTransfers, progress: SendProgress) -> None:
        """Begin transfers of the blocks that were computed since the last call.

        Those of the state and of the windows begin when exactly the positions of the ticket are
        computed, and no batch computes with the lease.

        Raises:
            LeaseError: positions behind those of the ticket are computed, so that the state and the
                windows of the ticket do not exist any more.
            AiokvError: the scheduler refuses a transfer.
        """
        if self._waits_for_onloads(transfers):
            return
        if self._read.state(transfers.lease_id) is not LeaseState.GRANTED:
            progress.forget_computed()  # an onload has failed
            return  # the next commit calls again
        computed = self._read.computed_tokens(transfers.lease_id)
        committed_block = self._sendable_block(transfers.ticket, computed)
        while (part := progress.next_part(committed_block)) is not None:
            is_early = bool(part.mark)
            if not transfers.may_begin(is_early=is_early):
                break
            transfers.begin_part(
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
        if computed >= transfers.ticket.num_tokens:
            self._begin_groups(transfers, computed)

    def _begin_groups(self, transfers: TicketTransfers, computed: int) -> None:
        """Send the state and the windows behind the computed positions."""
        groups = [group for group in self.groups if not transfers.has_begun(group)]
        if not groups:
            return
        limit = transfers.ticket.num_tokens
        if computed > limit:
            raise LeaseError(
                f"send: {computed} positions of {transfers.record!r} are computed; the recurrent "
                f"state and the windows can be sent only after exactly the {limit} positions of "
                "the ticket",
                hint=f"commit {limit} positions, and end the send before further ones are computed",
            )
        if self._read.batches(transfers.lease_id):
            self._computing.add(transfers)
            transfers.is_computing = True
            return
        for group in groups:
            transfers.begin_group(self._transitions.send, group, limit)

    # --- tickets ----------------------------------------------------------------------------------

    def _open(self, transfers: TicketTransfers) -> None:
        self.by_lease.setdefault(transfers.lease_id, []).append(transfers)

    def _waits_for_onloads(self, transfers: TicketTransfers) -> bool:
        if not self._read.onloads(transfers.lease_id):
            return False
        self._loading.add(transfers)
        transfers.is_loading = True
        return True

    def _keep_cached(self, transfers: TicketTransfers) -> None:
        """Note that the lease has only the positions before its failed onload."""
        transfers.kept_tokens = min(
            transfers.kept_tokens, self._read.cached_tokens(transfers.lease_id)
        )

    def _end_loading(self, transfers: TicketTransfers) -> None:
        self._loading.discard(transfers)
        transfers.is_loading = False

    def _end_computing(self, transfers: TicketTransfers) -> None:
        self._computing.discard(transfers)
        transfers.is_computing = False

    def submit(self, transfers: TicketTransfers, transfer_id: int, effects: Effects) -> None:
        """Apply the effects of the begin of a transfer."""
        self._by_transfer[transfer_id] = transfers
        self._apply((None, effects))
        if self._observers.active:
            self._observers.caused(transfers.lease_id, transfer_id)

    def end(self, transfers: TicketTransfers) -> None:
        """Cancel the transfers of a ticket that has ended."""
        ticket_id = transfers.ticket.ticket_id
        if not transfers.receives:  # an ended receive waits as long as its lease is incomplete
            self._end_loading(transfers)
            self._end_computing(transfers)
            self._sent_tickets.discard(ticket_id)
        if self._lifetime.is_running:
            # Send the reason to the other engine before the transfers are cancelled.
            self._worker.tickets.close_ticket(ticket_id, transfers.failure or _COMPLETE)
            if not transfers.at_rest:
                self._apply(self._transitions.end(transfers.lease_id, ticket_id))
        transfers.context.run(_log_end, transfers)
        self._settle(transfers)

    def _settle(self, transfers: TicketTransfers) -> None:
        """Wake the coroutines that wait for a ticket; forget it when it has ended. Idempotent."""
        active = self.by_lease.get(transfers.lease_id)
        if transfers.ended and transfers.at_rest and active is not None and transfers in active:
            active.remove(transfers)
            if transfers.failure is None and transfers.receives:
                self.counts.complete_receives += 1
            elif transfers.failure is None:
                self.counts.complete_sends += 1
        if active is not None and not active:
            self.by_lease.pop(transfers.lease_id, None)
        transfers.wake()

    # --- ends of transfers ----------------------------------------------------------------------

    def note_report(self, report: TransferReport) -> None:
        """Note why a transfer is not done, before the scheduler accounts for its report."""
        if report.outcome != "done" and report.transfer_id in self._by_transfer:
            self._reasons[report.transfer_id] = report.reason

    def after_report(self) -> None:
        """Proceed with the tickets whose leases have no more onloads in flight."""
        for transfers in list(self._loading):
            if not self._read.onloads(transfers.lease_id):
                self._end_loading(transfers)
                if transfers.ended and self._read.state(transfers.lease_id) is LeaseState.FAILED:
                    self._keep_cached(transfers)
                transfers.proceed()
                self._settle(transfers)

    def after_batch(self) -> None:
        """Proceed with the tickets whose leases no batch computes with any more."""
        for transfers in list(self._computing):
            if not self._read.batches(transfers.lease_id):
                self._end_computing(transfers)
                transfers.proceed()
                self._settle(transfers)

    def _note_moved(self, moved: Moved) -> None:
        """Note the end of a transfer; the next pass of the loop makes the transitions for it."""
        if moved.transfer_id in self._by_transfer:
            self._ended.append(moved)
            if not self._poller.closed:
                self._poller.soon(self._deliver_ends)

    def _deliver_ends(self) -> None:
        """Report the ends of transfers to their tickets, even after an error of one of them."""
        while self._ended:
            moved = self._ended.popleft()
            try:
                self._deliver_end(moved)
            except Exception as error:
                self.loop.call_exception_handler(
                    {
                        "message": f"aiokv: after the end of transfer {moved.transfer_id}",
                        "exception": error,
                    }
                )
            self._forget(moved.transfer_id)

    def _deliver_end(self, moved: Moved) -> None:
        transfer_id = moved.transfer_id
        if (transfers := self._by_transfer.get(transfer_id)) is not None:
            transfers.moved(transfer_id, moved.blocks, self._reasons.get(transfer_id, ""))
            if transfers.receives and self._read.state(transfers.lease_id) is LeaseState.FAILED:
                self._keep_cached(transfers)  # its windows or its state are lost
            transfers.proceed()
            self._settle(transfers)

    def _forget(self, transfer_id: int) -> None:
        self._by_transfer.pop(transfer_id, None)
        self._reasons.pop(transfer_id, None)

    def note_ticket_end(self, ticket_id: bytes, reason: str) -> None:
        """End the send of a ticket that has ended, when none of its transfers is in flight.

        Its last transfers may have succeeded. Idempotent.
        """
        for transfers in [transfers for active in self.by_lease.values() for transfers in active]:
            if transfers.ticket.ticket_id == ticket_id and not transfers.receives:
                transfers.note_ticket_end(reason)
                self._settle(transfers)

    # --- changes of leases and of the engine ------------------------------------------------------

    def committed(self, lease_id: int) -> None:
        """Send the blocks of a lease that were computed."""
        for transfers in list(self.by_lease.get(lease_id, ())):
            transfers.proceed()

    def truncated(self, lease_id: int, num_tokens: int) -> None:
        """End the tickets of a lease that has given positions of their tickets back."""
        for transfers in list(self.by_lease.get(lease_id, ())):
            if num_tokens < transfers.ticket.num_tokens:
                transfers.kept_tokens = min(transfers.kept_tokens, num_tokens)
                transfers.end(f"the lease was truncated to {num_tokens} positions")

    def gave_back(self, lease_id: int, reason: str) -> None:
        """End the tickets of a lease that has given all its blocks back."""
        for transfers in list(self.by_lease.get(lease_id, ())):
            transfers.kept_tokens = 0
            for transfer_id in transfers.transfer_ids:
                self._forget(transfer_id)
            self._loading.discard(transfers)
            self._computing.discard(transfers)
            transfers.forget()
            transfers.end(reason)
            self._settle(transfers)

    async def stop(self, lease_id: int, reason: str) -> None:
        """End the tickets of a lease; return when none of its transfers is in flight.

        Cancellation: the tickets have ended.
        """
        active = list(self.by_lease.get(lease_id, ()))
        for transfers in active:
            transfers.end(reason)
        for transfers in active:
            await transfers.wait_for(lambda transfers=transfers: transfers.at_rest)  # type: ignore[misc]

    def end_all(self, reason: str) -> None:
        """End all tickets."""
        for transfers in [transfers for active in self.by_lease.values() for transfers in active]:
            transfers.end(reason)

    def lose_all(self, reason: str) -> None:
        """End all tickets: no lease has its blocks any more, and no transfer is reported again."""
        for lease_id in list(self.by_lease):
            self.gave_back(lease_id, reason)

    def change_weights(self, version: str) -> None:
        """PeerTickets blocks with engines that have this version of the weights only."""
        self._weights_version = version

    def renew(self) -> None:
        """Let no ticket from before be valid: the worker has lost its memory."""
        self._generation = secrets.token_bytes(tickets.ID_BYTES)


def _cause(error: BaseException) -> str:
    """Return an error as the reason of the end of a ticket."""
    if isinstance(error, TimeoutError):
        return "the receiving engine did not answer in time"
    if isinstance(error, asyncio.CancelledError):
        return "it was cancelled"
    return str(error) or type(error).__name__


def _log_end(transfers: TicketTransfers) -> None:
    """Log the end of a ticket. Call it in the context of the task that has begun the ticket."""
    owner, ticket = (
        lease_name(transfers.record.owner, transfers.lease_id),
        transfers.ticket.ticket_id.hex(),
    )
    if transfers.failure is None:
        log.debug(
            "receive.completed" if transfers.receives else "send.completed",
            owner=owner,
            ticket=ticket,
            tokens=transfers.ticket.num_tokens - transfers.ticket.first_position,
        )
    elif not transfers.is_cancelled:
        log.warning(
            "receive.ended" if transfers.receives else "send.ended",
            owner=owner,
            ticket=ticket,
            reason=transfers.failure,
        )


def window_sizes(windows: Mapping[str, WindowGroup]) -> dict[str, tuple[int, int]]:
    """Return (window_tokens, sink_tokens) of each group, which both engines must have."""
    return {name: (group.window_tokens, group.sink_tokens) for name, group in windows.items()}
