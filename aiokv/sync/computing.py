"""SyncComputing: leases whose blocks the model computes with, named from a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aiokv.base.checks import Unique
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.engine import ComputeBatch
    from aiokv.sync.port import Port


LeaseT = TypeVar("LeaseT")


class SyncComputing(Unique, Generic[LeaseT]):
    """Batch of leases that the model computes with; see ``CacheEngine.computing``.

    ::

        with engine.computing(leases):
            run_model(...)

    ``Calls.begin_computing`` and ``Calls.end_computing`` do the same in crossings that the
    scheduler makes anyway.
    """

    __slots__ = ("_batch", "_make", "_port")

    def __init__(self, port: Port, make: Callable[[], ComputeBatch[Any]]) -> None:
        self._port = port
        self._make: Callable[[], ComputeBatch[Any]] | None = make
        self._batch: ComputeBatch[Any] | None = None

    def __enter__(self) -> Self:
        self._port.call(lambda calls: calls.add(self.begin))
        return self

    def __exit__(self, *exc: object) -> None:
        self._port.call(lambda calls: calls.end_computing(self))

    def ends_with(self, work: Any) -> None:
        """Let the batch end no earlier than ``work``, as ``ComputeBatch.ends_with``.

        Args:
            work: an event that was recorded on the compute stream after the work of the batch, or a
                ``concurrent.futures.Future``.

        Raises:
            UsageError: as ``ComputeBatch.ends_with``. Nothing changed.
        """
        self._port.call(lambda calls: calls.add(lambda: self.inner.ends_with(work)))

    # --- for the engine's thread --------------------------------------------------------------

    def begin(self) -> None:
        """Begin the batch. On the loop."""
        if self._make is None:
            raise UsageError("this SyncComputing was entered already; it can be entered once")
        batch = self._make()
        batch.__enter__()
        self._batch, self._make = batch, None

    def end(self, *work: Any) -> None:
        """End the batch, no earlier than ``work``. On the loop.

        Raises:
            UsageError: see ``ends_with``. The batch has not ended: other work may still be running.
        """
        batch = self.inner
        for one in work:
            batch.ends_with(one)
        batch.__exit__(None, None, None)

    @property
    def inner(self) -> ComputeBatch[Any]:
        """The engine's object.

        Raises:
            UsageError: the batch has not begun.
        """
        if self._batch is None:
            raise UsageError("this SyncComputing has not begun")
        return self._batch
