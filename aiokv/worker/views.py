"""LayerView: the layers of all transfers that a lease owns or has joined.

There are three ways to wait. ``await wait(layer)`` returns when the bytes have arrived, and
``host_wait(layer)`` does so in an ordinary thread. ``gpu_wait(layer, stream)`` lets a stream wait
instead of the host. It orders work but does not verify the transfer, so a step that used it calls
``raise_for_error()`` before its outputs are used.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.checks import integer
from aiokv.base.checks import timeout as checked_timeout
from aiokv.errors import TransferError, UsageError
from aiokv.worker.device.base import CopyError
from aiokv.worker.layer_waits import LayerWaits
from aiokv.worker.layers import ALL, LayerDoneCounter
from aiokv.worker.thread_waits import Deadline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence


class LayerView:
    """One counter for all transfers that a lease owns or has joined.

    Args:
        counters: counters of those transfers, all with the same number of layers.
        num_layers: required without counters; see :func:`done_view`.
        locate: maps ``(transfer_id, first_bad_block)`` to the first position that the lease has to
            compute; None when the lease needs no block from there on.
        owner: name of the lease's owner, for messages.
        check_wait: called before a coroutine waits; raises when the wait would never end.
        waits: gets the durations of the waits of this view, besides the view itself.
        after_step: last step whose end the transfers await, as of the creation of the view; 0 for
            none.
    """

    def __init__(
        self,
        counters: Sequence[LayerDoneCounter] = (),
        *,
        num_layers: int | None = None,
        locate: Callable[[int, int], int | None] | None = None,
        owner: str = "",
        check_wait: Callable[[], None] | None = None,
        waits: LayerWaits | None = None,
        after_step: int = 0,
    ) -> None:
        self.check_wait = check_wait
        self.after_step = after_step
        self.waits = waits
        self._own_waits: LayerWaits | None = None  # made by the first wait
        self._owner = f" for {owner}" if owner else ""
        self.counters = tuple(counters)
        self.num_layers = (
            counters[0].num_layers if num_layers is None and counters else num_layers or 0
        )
        self._locate = locate
        self._created = time.monotonic() if counters else 0.0

    @property
    def elapsed_seconds(self) -> float | None:
        """Seconds from the creation of the view to its last end of a transfer; None without any."""
        ends = [counter.end_seconds for counter in self.counters]
        return max(max(ends) - self._created, 0.0) if ends else None

    @property
    def is_done(self) -> bool:
        """True if no byte of these transfers moves any more. Any thread."""
        return all(counter.is_done for counter in self.counters)

    @property
    def at_rest(self) -> bool:
        """True if no byte of these transfers moves any more."""
        return all(counter.at_rest for counter in self.counters)

    @property
    def given_up(self) -> bool:
        """True if waiters failed because of a slow rank, though bytes may still move."""
        return any(counter.given_up for counter in self.counters)

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids that a rank's runner passes to ``Rank.layers`` to wait for the same transfers."""
        return tuple(counter.transfer_id for counter in self.counters)

    @property
    def pending_layers(self) -> list[int]:
        """Layers that are pending in at least one transfer, ascending."""
        return sorted({layer for counter in self.counters for layer in counter.pending_layers})

    def has_arrived(self, layer: int = ALL) -> bool:
        """Return True if a layer, or each layer, has arrived in all transfers and none failed.

        Any thread.

        Raises:
            UsageError: there is no such layer.
        """
        if layer != ALL:
            self._check(layer)
        return all(counter.has_arrived(layer) for counter in self.counters)

    def wait_seconds(self, layer: int) -> float:
        """Return how long callers of this view have waited for a layer so far. Any thread.

        Counts the waits of ``wait``, ``host_wait`` and ``gpu_wait`` that have ended; see
        :class:`LayerWaitStatistics`.

        Raises:
            UsageError: there is no such layer.
        """
        self._check(layer)
        return 0.0 if self._own_waits is None else self._own_waits.seconds(layer)

    @contextmanager
    def _timed(self, layer: int) -> Iterator[None]:
        """Note the duration of a wait for a layer that has not arrived."""
        if not self.num_layers or self.has_arrived(layer):
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            if self._own_waits is None:
                self._own_waits = LayerWaits()
            for waits in (self._own_waits, self.waits):
                if waits is not None:
                    waits.note(layer, self.num_layers, seconds)

    def raise_for_error(self) -> None:
        """Raise the failure with the lowest position.

        Failed blocks of a joined transfer that the lease does not use are ignored.

        Raises:
            TransferError: ``first_bad_token`` is the first position to compute again.
        """
        self._raise_first((counter, counter.failure) for counter in self.counters)

    def _raise_first(self, ends: Iterable[tuple[LayerDoneCounter, CopyError | None]]) -> None:
        """Raise the failure with the lowest position of the lease."""
        errors = [
            (token, counter, failure)
            for counter, failure in ends
            if failure is not None
            and (token := self.first_bad_token(counter.transfer_id, failure)) is not None
        ]
        if errors:
            token, counter, failure = min(errors, key=lambda error: error[0])
            raise TransferError(
                f"{counter.direction} {counter.transfer_id}{self._owner} failed at block "
                f"{failure.first_bad_block}: {failure.reason}",
                direction=counter.direction,
                first_bad_token=token,
                rank=failure.rank,
            )

    def first_bad_token(self, transfer_id: int, failure: CopyError) -> int | None:
        """Return the first position to compute again after a failure, or None."""
        if self._locate is None:
            return 0
        token = self._locate(transfer_id, failure.first_bad_block)
        # A lease that has joined the transfer needs at least one of its blocks.
        return 0 if token is None and failure.first_bad_block == 0 else token

    async def wait(self, layer: int, timeout: float | None = None) -> None:
        """Wait until the layer has arrived in every transfer; does not suspend when it has.

        Raises:
            TransferError: a block of the lease failed, or its transfer was cancelled. Raised when
                no byte of the transfer moves any more, so that the blocks can be written again.
            TransferTimeout: names the layer.
            UsageError: there is no such layer; or a transfer waits for the end of a step that the
                calling task has to close.

        Cancellation: detaches this waiter; the transfers go on.
        """
        self._check(layer)
        await self._arrived(layer, timeout)

    async def _arrived(self, layer: int, timeout: float | None) -> None:
        timeout = checked_timeout(timeout)
        if self.check_wait is not None and not self.is_done:
            self.check_wait()
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        with self._timed(layer):
            for counter in self.counters:
                left = None if deadline is None else max(deadline - now(), 0.0)
                await counter.settled(layer, left)
            for counter in self.counters:  # one may have failed during the wait
                if counter.failure is not None:
                    left = None if deadline is None else max(deadline - now(), 0.0)
                    await counter.settled(ALL, left)
        self.raise_for_error()

    def host_wait(self, layer: int, timeout: float | None = None) -> None:
        """Block the calling thread, without the GIL, until the layer has arrived in every transfer.

        Any thread but the loop's. Without transfers it returns at once. A transfer of blocks of an
        open step waits until another thread, or a callback of the loop, closes the step.

        Args:
            layer: from 0.
            timeout: seconds for all transfers together; None for no limit.

        Raises:
            TransferError: a block of the lease failed, and no byte of its transfer moves any more;
                ``first_bad_token`` is the first position to compute again.
            TransferTimeout: the layer has not arrived in time. The transfers go on.
            UsageError: there is no such layer; or this is the loop's thread, which would wait for
                itself.
            KeyboardInterrupt: the transfers go on.
        """
        self._check(layer)
        self._host_arrived(layer, timeout)

    def _host_arrived(self, layer: int, timeout: float | None) -> None:
        deadline = Deadline(timeout)
        with self._timed(layer):
            for counter in self.counters:
                counter.host_settled(layer, deadline)
            for counter in self.counters:  # one may have failed during the wait
                if counter.failure is not None:
                    counter.host_settled(ALL, deadline)
        self.raise_for_error()

    def host_wait_all(self, timeout: float | None = None) -> None:
        """Block the calling thread until all layers have arrived; see ``host_wait``."""
        self._host_arrived(ALL, timeout)

    async def wait_all(self, timeout: float | None = None) -> None:
        """Wait for all layers; see ``wait``."""
        await self._arrived(ALL, timeout)

    def _check(self, layer: int) -> None:
        if self.num_layers:  # without tensors there are no layers to wait for
            integer("layer", layer, minimum=0, maximum=self.num_layers - 1)

    def __aiter__(self) -> AsyncIterator[int]:
        """Layers in ascending order, each when it has arrived in every transfer."""
        return _Iterator(self)

    def gpu_wait(self, layer: int, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for the layer of every transfer; the host does not wait. Any thread.

        Blocks the calling thread, without the GIL, until the layer has been submitted: an event
        that is not recorded yet would count as done. On the loop's own thread, the transfers are
        submitted before their turn instead.

        Args:
            layer: from 0.
            stream: a stream of the device.
            timeout: seconds that the layer may take to be submitted in all transfers together; None
                for no limit. It does not limit how long the stream waits.

        Raises:
            TransferError: a block of the lease failed or its transfer was cancelled, and no byte of
                it moves any more; or the layer will never be submitted. ``first_bad_token`` is the
                first position to compute again.
            TransferTimeout: the layer was not submitted in time. The stream may wait for some of
                the transfers.
            UsageError: there is no such layer; or this is the loop's thread, and a transfer waits
                for a step to be closed.
        """
        self._check(layer)
        _check_stream("gpu_wait", stream)
        deadline = Deadline(timeout)
        with self._timed(layer):
            ends = [(counter, counter.order(layer, stream, deadline)) for counter in self.counters]
        self._raise_first(ends)

    def gpu_wait_all(self, stream: Any, timeout: float | None = None) -> None:
        """Let ``stream`` wait for every layer of every transfer; see ``gpu_wait``. Any thread."""
        _check_stream("gpu_wait_all", stream)
        deadline = Deadline(timeout)
        with self._timed(ALL):
            ends = [(counter, counter.order_all(stream, deadline)) for counter in self.counters]
        self._raise_first(ends)

    @classmethod
    def of_batch(cls, views: Iterable[LayerView]) -> LayerView | None:
        """Return one view for the transfers of several leases; None without transfers.

        It raises the failures that affect at least one of the leases, with ``first_bad_token`` 0.
        """
        views = [view for view in views if view.counters]
        counters = {counter: None for view in views for counter in view.counters}
        if not counters:
            return None

        def locate(transfer_id: int, block: int) -> int | None:
            failure = CopyError(block, "")
            concerned = (
                view.first_bad_token(transfer_id, failure) is not None
                for view in views
                if transfer_id in view.transfer_ids
            )
            return 0 if any(concerned) else None

        def check_wait() -> None:
            for view in views:
                if view.check_wait is not None and not view.is_done:
                    view.check_wait()

        after_step = max(view.after_step for view in views)
        return cls(
            list(counters),
            locate=locate,
            check_wait=check_wait,
            waits=views[0].waits,
            after_step=after_step,
        )


class _Iterator:
    """``async for`` without an async generator, which would need closing."""

    def __init__(self, view: LayerView) -> None:
        self._view = view
        self._next = 0

    def __aiter__(self) -> _Iterator:
        return self

    async def __anext__(self) -> int:
        layer = self._next
        if layer == self._view.num_layers:
            raise StopAsyncIteration
        self._next += 1
        await self._view.wait(layer)
        return layer


def _check_stream(call: str, stream: object) -> None:
    """Refuse None even without transfers: otherwise the mistake shows only at a hit."""
    if stream is None:
        raise UsageError(
            f"{call}: stream is None; it must be the stream that computes",
            hint="a thread that computes on the host calls host_wait(layer)",
        )


@cache
def done_view(num_layers: int) -> LayerView:
    """Return the shared view of leases without transfers."""
    return LayerView(num_layers=num_layers)


DONE: Final = done_view(0)
