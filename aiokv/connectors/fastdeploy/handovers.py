"""Handovers: prompts that a prefill server computes, and sends to a decode server through peers.

::

    decode     blocks of a request ──► receive ──► ticket ──► FastDeploy's message to prefill
    prefill    ticket ──► send ──► schedule(): marks of the batch ──► workers ──► layers move
    prefill    first token, when the send has ended ──► decode, when the receive has ended
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from aiokv import Lease
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.sync import Answer, Calls, EngineFuture, SyncEngine

GIVEN_UP_SECONDS: Final = 30.0  # limit for a prefill server to report that its send has failed
OPEN_SECONDS: Final = 30.0  # limit for the prefill server to open a ticket
MAX_SECONDS: Final = 86_400.0  # longest time of a receive
FINISHED: Final = "finished"  # FastDeploy's word for a send that has succeeded
NOT_HELD: Final = "the request has given its blocks back"
MAX_PREEMPTED: Final = 4096  # preempted requests whose outcomes are kept

LayerMark = tuple[int, bytes]  # number of computed layers, and what lets them be sent


class Sent:
    """Blocks of one prompt that this server sends. Any thread.

    Args:
        engine: has the lease.
        lease: lease of the prompt, granted.
        ticket: of the decode server; None if it has none, so that nothing is sent.
    """

    def __init__(self, engine: SyncEngine, lease: Lease, ticket: bytes | None) -> None:
        self._sending: Any = None  # set on the engine's loop when the decode server is connected
        self._end: EngineFuture[str] = engine.submit(self._send, engine, lease, ticket)

    async def _send(self, engine: SyncEngine, lease: Lease, ticket: bytes | None) -> str:
        if ticket is None:
            return "the decode server has no ticket"
        try:
            async with engine.cache.send(lease, ticket) as self._sending:
                return await self._sending.ended() or FINISHED
        except AiokvError as error:
            return str(error)

    def layers_done(self, num_tokens: int, layer_ends: Sequence[int]) -> list[LayerMark]:
        """Announce layers of the next batch. On the engine's loop.

        Returns:
            Marks for ``Rank.layers_done``; none before the decode server is connected, and after
            the end.
        """
        if self._sending is None or self._end.done():
            return []
        return [(end, self._sending.layers_done(num_tokens, end)) for end in layer_ends]

    @property
    def outcome(self) -> str:
        """``FINISHED``, the reason of a failure, or "" while blocks move."""
        return _outcome(self._end)


class Received:
    """Blocks of one prompt that this server receives. Any thread.

    Args:
        engine: has the lease.
        lease: lease of the prompt, granted and without computed positions.
        num_tokens: length of the prompt.
        seconds: limit for all blocks to arrive.
    """

    def __init__(self, engine: SyncEngine, lease: Lease, num_tokens: int, seconds: float) -> None:
        self._ticket: Future[bytes] = Future()
        self._end: EngineFuture[str] = engine.submit(
            self._receive, lease, num_tokens, min(seconds, MAX_SECONDS)
        )
        self._end.add_done_callback(lambda _: self._ticket.cancel())

    async def _receive(self, lease: Lease, num_tokens: int, seconds: float) -> str:
        receive = lease.receive(
            num_tokens, timeout=seconds, open_timeout=min(seconds, OPEN_SECONDS)
        )
        try:
            async with receive as receiving:
                self._ticket.set_result(receiving.ticket)
                arrived = await receiving.wait()
                if arrived == num_tokens:
                    return FINISHED
                return receiving.failure or f"{arrived} of {num_tokens} positions have arrived"
        except AiokvError as error:
            return str(error)

    def ticket(self, timeout: float) -> bytes | None:
        """Return the ticket when all workers listen; None if they cannot, or not in time."""
        try:
            return self._ticket.result(timeout)
        except (CancelledError, TimeoutError):
            self._end.cancel()
            return None

    @property
    def outcome(self) -> str:
        """``FINISHED``, the reason of a failure, or "" while blocks may arrive."""
        return _outcome(self._end)


class Handovers:
    """Sends and receives of the requests of one scheduler, by request id. Any thread.

    Args:
        engine: the cache.
        layer_ends: numbers of layers after which a prefill server sends those before, while the
            workers compute the others.
        lock: lock of ``holdings``.
        holdings: requests with blocks.

    Attributes:
        begun_receives: number of receives that have begun.
    """

    def __init__(
        self,
        engine: SyncEngine,
        layer_ends: Sequence[int],
        lock: AbstractContextManager[Any],
        holdings: Mapping[str, Holding],
    ) -> None:
        self._engine = engine
        self._layer_ends = layer_ends
        self._lock = lock
        self._holdings = holdings
        self._sent: dict[str, Sent] = {}
        self._preempted: dict[str, Sent] = {}  # sends of preempted requests, oldest first
        self._received: dict[str, Received] = {}
        self._moving: list[Sent | Received] = []
        self.begun_receives = 0

    # --- prefill ----------------------------------------------------------------------------------

    def send(self, request_id: str, ticket: bytes | None) -> None:
        """Begin to send the prompt of a request to the decode server that has made a ticket."""
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is not None and holding.lease is not None:
                sent = self._sent[request_id] = Sent(self._engine, holding.lease.inner, ticket)
                self._moving.append(sent)

    def is_sent(self, request_id: str) -> bool:
        """Return True while the prompt of a request is being sent."""
        sent = self._sent.get(request_id)
        return sent is not None and not sent.outcome

    def send_outcome(self, request_id: str) -> str:
        """Return ``FINISHED``, the reason of a failure, or "" while a prompt is being sent."""
        with self._lock:
            sent = self._sent.get(request_id) or self._preempted.get(request_id)
            if sent is not None:
                return sent.outcome
            holding = self._holdings.get(request_id)
            is_held = holding is not None and holding.lease is not None  # its ticket may still come
            return "" if is_held else NOT_HELD

    def record_layers(
        self, calls: Calls, holdings: Iterable[Holding]
    ) -> list[Answer[list[LayerMark]]]:
        """Announce the layers that the scheduled batch computes. The caller holds the lock.

        Args:
            calls: gets the calls; the step that the batch closes is closed already.
            holdings: requests in prefill.
        """
        return [
            calls.add(sent.layers_done, holding.batch_end, self._layer_ends)
            for holding in holdings
            if holding.batch_end > holding.scheduled_tokens
            and (sent := self._sent.get(holding.request.request_id)) is not None
            and not sent.outcome
        ]

    # --- decode -----------------------------------------------------------------------------------

    def receive(self, request: Request, seconds: float) -> Received | None:
        """Begin to receive the prompt of a request; None if its blocks are not those of its lease.

        They are not after a second allocation for the same id.
        """
        with self._lock:
            holding = self._holdings.get(request.request_id)
            if holding is None or holding.lease is None:
                return None
            if list(request.block_tables) != holding.block_ids:
                return None
            lease, num_tokens = holding.lease.inner, holding.prefill_tokens
            received = Received(self._engine, lease, num_tokens, seconds)
            self._received[request.request_id] = received
            self._moving.append(received)
            self.begun_receives += 1
            return received

    def receive_outcome(self, request_id: str) -> str:
        """Return ``FINISHED``, the reason of a failure, or "" while a prompt is being received."""
        with self._lock:
            received, holding = self._received.get(request_id), self._holdings.get(request_id)
            if received is None:
                return "the request receives no blocks"
            if holding is None or not holding.table:  # after `reset_cache`, for example
                return NOT_HELD
            return received.outcome

    def late_requests(self, seconds: float) -> list[Request]:
        """Return the requests whose KV another server has not sent within this time.

        When a receive has failed, ``GIVEN_UP_SECONDS`` are left for the other server to say so.
        """
        with self._lock:
            now, late = time.monotonic(), []
            for holding in self._holdings.values():
                outputs = len(holding.request.output_token_ids)
                if not holding.awaited_since or outputs > holding.base_outputs:
                    continue
                received = self._received.get(holding.request.request_id)
                if received is not None and received.outcome not in ("", FINISHED):
                    left_since = now - seconds + GIVEN_UP_SECONDS
                    holding.awaited_since = min(holding.awaited_since, left_since)
                if holding.awaited_since <= now - seconds:
                    late.append(holding.request)
            return late

    # --- both -------------------------------------------------------------------------------------

    @property
    def are_moving(self) -> bool:
        """True while blocks move, or wait for a step to end. The caller holds the lock."""
        self._moving = [handover for handover in self._moving if not handover.outcome]
        return bool(self._moving)

    @property
    def are_arriving(self) -> bool:
        """True while blocks arrive. The caller holds the lock."""
        return self.are_moving and any(isinstance(moves, Received) for moves in self._moving)

    def forget(self, request_id: str) -> None:
        """Forget a request that ends: the end of its lease ends what moves."""
        with self._lock:
            self._sent.pop(request_id, None)
            self._preempted.pop(request_id, None)
            self._received.pop(request_id, None)

    def preempt(self, request_id: str) -> None:
        """Forget a request, but for the outcome of its send.

        A prefill server that resumes the request sends it to no server again, and reports this
        outcome. FastDeploy preempts the requests that it aborts, too, and never resumes those: so
        only the last ``MAX_PREEMPTED`` outcomes are kept.
        """
        with self._lock:
            self._received.pop(request_id, None)
            if (sent := self._sent.pop(request_id, None)) is not None:
                self._preempted[request_id] = sent
                if len(self._preempted) > MAX_PREEMPTED:
                    del self._preempted[next(iter(self._preempted))]


def _outcome(end: EngineFuture[str]) -> str:
    """Return the value of a future; "" before it is done, or why it has none."""
    if not end.done():
        return ""
    try:
        return end.result()
    except CancelledError:
        return "the transfer was cancelled"
    except Exception as error:  # the engine's thread has failed, for example
        return f"{type(error).__name__}: {error}"
