"""Handovers: prompts that a prefill server computes, and sends to a decode server through peers.

::

    decode     blocks of a request ──► receive ──► ticket ──► FastDeploy's message to prefill
    prefill    ticket ──► send ──► schedule(): marks of the batch ──► workers ──► layers move
    prefill    first token, when the send has ended ──► decode, when the receive has ended
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv import Lease
    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.sync import Answer, Calls, EngineFuture, SyncEngine

OPEN_SECONDS: Final = 30.0  # limit for the prefill server to open a ticket
MAX_SECONDS: Final = 86_400.0  # longest time of a receive
FINISHED: Final = "finished"  # FastDeploy's word for a send that has succeeded

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
    """Sends and receives of the requests of one scheduler, by request id.

    The caller holds the lock of :class:`RequestBlocks`.

    Args:
        engine: the cache.
        layer_ends: numbers of layers after which a prefill server sends those before, while the
            workers compute the others.
    """

    def __init__(self, engine: SyncEngine, layer_ends: Sequence[int]) -> None:
        self._engine = engine
        self._layer_ends = layer_ends
        self._sent: dict[str, Sent] = {}
        self._received: dict[str, Received] = {}
        self._moving: list[Sent | Received] = []

    @property
    def are_moving(self) -> bool:
        """True while blocks move, or wait for a step to end. Does not cross."""
        self._moving = [handover for handover in self._moving if not handover.outcome]
        return bool(self._moving)

    def send(self, holding: Holding, ticket: bytes | None) -> None:
        """Begin to send the prompt of a request."""
        if holding.lease is not None:
            sent = Sent(self._engine, holding.lease.inner, ticket)
            self._sent[holding.request.request_id] = sent
            self._moving.append(sent)

    def receive(self, holding: Holding, seconds: float) -> Received | None:
        """Begin to receive the prompt of a request."""
        if holding.lease is None:
            return None
        received = Received(self._engine, holding.lease.inner, holding.prefill_tokens, seconds)
        self._received[holding.request.request_id] = received
        self._moving.append(received)
        return received

    def is_sent(self, request_id: str) -> bool:
        """Return True if the prompt of a request is sent from these blocks."""
        sent = self._sent.get(request_id)
        return sent is not None and not sent.outcome

    def send_outcome(self, request_id: str) -> str | None:
        """Return the outcome of a send; None for a request whose send has not begun."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.outcome

    def receive_outcome(self, request_id: str) -> str | None:
        """Return the outcome of a receive; None for a request whose receive has not begun."""
        received = self._received.get(request_id)
        return None if received is None else received.outcome

    def forget(self, request_id: str) -> None:
        """Forget a request; the end of its lease ends what moves."""
        self._sent.pop(request_id, None)
        self._received.pop(request_id, None)

    def record_layers(
        self, calls: Calls, holdings: Iterable[Holding]
    ) -> list[Answer[list[LayerMark]]]:
        """Announce the layers that the scheduled batch computes.

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
