"""SyncReceiving and SyncSending: blocks from and to engines on other servers, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

from aiokv.base.checks import Unique
from aiokv.engine.receiving import Receiving
from aiokv.engine.sending import Sending
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from aiokv.peers.statistics import ReceivingStatistics
    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.port import Port
    from aiokv.worker.device.base import Event

F = TypeVar("F", Receiving, Sending)
T = TypeVar("T")


class _SyncFlow(Unique, Generic[F]):
    """Enters and leaves an async context manager of the engine from a thread."""

    def __init__(self, port: Port, make: Callable[[], F]) -> None:
        self._port = port
        self._make: Callable[[], F] = make
        self._handle: F | None = None

    def __enter__(self) -> Self:
        self._port.begin(self._enter).wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._port.begin(self._entered().__aexit__, exc_type, exc, traceback).wait()

    async def _enter(self) -> None:
        if self._handle is not None:
            raise UsageError(f"{self!r} was entered already; it can be entered once")
        handle = self._make()
        await handle.__aenter__()
        self._handle = handle

    def cancel(self) -> None:
        """Transfer nothing more. Idempotent."""
        self._ask(lambda handle: handle.cancel())

    @property
    def failure(self) -> str | None:
        """Reason why the transfer has ended early; None while it runs, and after success."""
        return self._ask(lambda handle: handle.failure)

    def _entered(self) -> F:
        if self._handle is None:
            raise UsageError(f"{self!r} can only be used inside its `with` block")
        return self._handle

    def _ask(self, read: Callable[[F], T]) -> T:
        return self._port.call(lambda calls: calls.add(lambda: read(self._entered())))


class SyncReceiving(_SyncFlow[Receiving]):
    """Blocks of a lease that another engine computes and sends; see ``SyncLease.receive``."""

    @property
    def ticket(self) -> bytes:
        """Ticket for ``send`` of the other engine; put it into the user's request."""
        return self._ask(lambda handle: handle.ticket)

    @property
    def statistics(self) -> ReceivingStatistics:
        """Progress and times so far."""
        return self._ask(lambda handle: handle.statistics)

    def wait(self, position: int | None = None) -> EngineFuture[int]:
        """Wait until positions have arrived, or the receive has ended, as ``Receiving.wait``.

        Returns:
            A future of the first position that is not there. Cancelling it changes nothing.
        """
        return self._port.begin(self._entered().wait, position)


class SyncSending(_SyncFlow[Sending]):
    """Blocks of a lease on their way to another engine; see ``SyncEngine.send``."""

    @property
    def delivered_tokens(self) -> int:
        """Number of positions that the receiver has acknowledged, from the first on."""
        return self._ask(lambda handle: handle.delivered_tokens)

    def layers_done(self, num_tokens: int, num_layers: int, event: Event | None = None) -> bytes:
        """Send layers of positions that are not committed yet; see ``Sending.layers_done``."""
        return self._ask(lambda handle: handle.layers_done(num_tokens, num_layers, event))

    def ended(self) -> EngineFuture[str | None]:
        """Wait until the send has ended, as ``Sending.ended``.

        Returns:
            A future of its failure; None when all was delivered. Cancelling it changes nothing.
        """
        return self._port.begin(self._entered().ended)
