"""LayerDoneCounter: the layers of a transfer that have arrived.

A :class:`~aiokv.worker.views.LayerView` waits for the layers of one or more counters: its ``wait``
awaits ``settled``, its ``host_wait`` calls ``host_settled``, and its ``gpu_wait`` calls ``order``.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.checks import timeout as checked_timeout
from aiokv.errors import DeviceError, TransferError, TransferTimeout, UsageError
from aiokv.worker.device.base import CopyError
from aiokv.worker.thread_waits import Deadline, ThreadWaits

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.worker.device.base import Copy

ALL: Final = -1  # key of waiters for the end
REST: Final = -2  # key of threads that wait until no byte moves


class LayerDoneCounter:
    """Progress of one transfer, layer by layer.

    ``order``, ``order_all``, ``host_settled``, ``rest``, ``is_done``, ``at_rest``, ``failure`` and
    ``raise_for_error`` may be used in any thread, all other methods only on the loop. The counter
    keeps the copy and its events alive.

    Attributes:
        at_rest: no byte moves any more. Waiters are released at that time, except when one of
            several ranks is slow: they are released earlier, with a failure.
        created_seconds: ``time.monotonic()`` when the plan was submitted to the worker.
        started_seconds: ``time.monotonic()`` when a device, a store or a peer began with the
            transfer, or when it was sent to the ranks; None before.
        num_bytes: as given.

    Args:
        num_layers: layers of the model; with 0, coroutines wait for the end of the transfer only.
        transfer_id: the plan's.
        direction: the plan's.
        num_bytes: bytes of the plan; 0 if unknown.
        expedite: submits the transfer before its turn; returns False when that is impossible now.
            Called only on the loop's thread, by an ``order`` that would otherwise never return.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        transfer_id: int = 0,
        direction: str = "onload",
        num_bytes: int = 0,
        expedite: Callable[[], bool] | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.transfer_id = transfer_id
        self.num_bytes = num_bytes
        self.direction = direction
        self._loop = asyncio.get_running_loop()
        self._expedite = expedite
        self.created_seconds = time.monotonic()
        self.started_seconds: float | None = None
        self._times: list[float | None] = [None] * num_layers
        self._owed = set(range(num_layers))
        self._ended = False
        self.at_rest = False
        self._abandoned = False
        self._ended_seconds: float | None = None
        self._failure: CopyError | None = None
        self._copy: Copy | None = None
        self._is_verified = False  # the loop compares the bytes when all layers have arrived
        self._threads = ThreadWaits()  # threads that wait for the copy, a layer or the end
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._callbacks: list[Callable[[int], None]] = []

    # --- progress -------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """True if no byte moves any more, and ``failure`` is final. Any thread."""
        if self._ended or self._is_verified:
            return self._ended
        copy = self._copy
        events = () if copy is None else copy.layer_events
        return len(events) > 0 and all(event.done for event in events)

    @property
    def given_up(self) -> bool:
        """True if waiters were released although bytes may still move."""
        return self._ended and not self.at_rest

    @property
    def pending_layers(self) -> list[int]:
        """Layers that are not known to have arrived, ascending."""
        return sorted(self._owed)

    @property
    def all_arrived(self) -> bool:
        """True if no layer is pending; with 0 layers, also before the end."""
        return not self._owed

    def has_arrived(self, layer: int) -> bool:
        """Return True if a layer has arrived without a failure; ``ALL`` asks for all layers.

        Any thread.
        """
        return self._is_settled(layer) and self.failure is None

    @property
    def failure(self) -> CopyError | None:
        """The first failure that the device has reported; None without one."""
        if self._failure is None and self._copy is not None:
            return self._copy.error()
        return self._failure

    def raise_for_error(self) -> None:
        """Raise the failure of the transfer, if there is one.

        Raises:
            TransferError: with ``first_bad_token`` 0; a :class:`LayerView` knows the token.
        """
        failure = self.failure
        if failure is not None:
            raise TransferError(
                f"{self.direction} {self.transfer_id} failed at block {failure.first_bad_block}: "
                f"{failure.reason}",
                direction=self.direction,
                rank=failure.rank,
            )

    def layer_done_seconds(self, layer: int) -> float | None:
        """``time.monotonic()`` when the layer arrived; None before.

        By the device's clock where its events have times, else by the poller's observation.
        """
        return self._times[layer]

    def layer_times(self) -> list[float | None]:
        """Return ``layer_done_seconds()`` of all layers."""
        return list(self._times)

    @property
    def arrived_seconds(self) -> float | None:
        """``time.monotonic()`` when the last layer arrived; None before."""
        return None if self._owed else max((at or 0.0 for at in self._times), default=None)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from the submission of the plan to the arrival of its last layer."""
        return self.end_seconds - self.created_seconds

    @property
    def end_seconds(self) -> float:
        """``time.monotonic()`` when the last layer arrived, or the transfer failed; else now."""
        for at in (self.arrived_seconds, self._ended_seconds):
            if at is not None:
                return at
        return time.monotonic()

    # --- waiting on the loop ----------------------------------------------------------------

    async def settled(self, layer: int, timeout: float | None = None) -> None:
        """Wait until a layer has arrived (``ALL``: each layer), or the transfer has failed.

        Does not suspend if it has. A failed transfer is awaited until no byte of it moves any more,
        so that the blocks can be written again; see ``at_rest``.

        Raises:
            TransferTimeout: names the layer.

        Cancellation: detaches this waiter; the transfer goes on.
        """
        timeout = checked_timeout(timeout)
        if layer != ALL:
            self._check(layer)
        if self._is_settled(layer):
            return
        future: asyncio.Future[None] = self._loop.create_future()
        waiters = self._waiters.setdefault(layer, [])
        waiters.append(future)
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            raise self._timeout(layer, timeout) from None
        finally:
            waiters.remove(future)

    def _is_settled(self, key: int) -> bool:
        """Return True if no wait for a layer, ``ALL`` or ``REST`` is needed. Any thread."""
        if key == REST:
            return self.at_rest or self._abandoned
        arrived = key != ALL and key not in self._owed
        return self._ended or (arrived and self.failure is None)

    def _timeout(self, key: int, timeout: float | None) -> TransferTimeout:
        what = f"layer {key}" if key >= 0 else "the last layer" if key == ALL else "the end"
        return TransferTimeout(
            f"{self.direction} {self.transfer_id}: {what} did not arrive within {timeout} s"
        )

    # --- waiting in a thread ----------------------------------------------------------------

    def rest(self, deadline: Deadline) -> None:
        """Block the calling thread until no byte moves any more, after success or failure.

        Raises:
            TransferError: the loop has ended, so the end of the transfer stays unknown.
            TransferTimeout, UsageError, KeyboardInterrupt: as for ``host_settled``.
        """
        self.host_settled(REST, deadline)
        if not self.at_rest:
            self.raise_for_error()

    def host_settled(self, layer: int, deadline: Deadline) -> None:
        """Block the calling thread, without the GIL; see ``settled``.

        Raises:
            TransferTimeout: the layer has not arrived in time. The transfer goes on.
            UsageError: there is no such layer; or this is the loop's thread, which would wait for
                itself.
            KeyboardInterrupt: the transfer goes on.
        """
        if layer >= 0:
            self._check(layer)
        if self._is_settled(layer):
            return
        if self._is_on_loop:
            raise UsageError(
                f"host_wait on the loop's thread would never return: the loop observes the end of "
                f"{self.direction} {self.transfer_id}",
                hint="await wait(layer), or call host_wait in another thread",
            )
        if not self._threads.wait(partial(self._is_settled, layer), deadline):
            raise self._timeout(layer, deadline.timeout)

    # --- waiting on a stream, any thread ----------------------------------------------------

    def order(self, layer: int, stream: Any, deadline: Deadline) -> CopyError | None:
        """Let ``stream`` wait for the layer; the host does not wait.

        Blocks the calling thread, without the GIL, until the layer has been submitted: an event
        that is not recorded yet would count as done. On the loop's own thread, the transfer is
        submitted before its turn instead.

        Args:
            layer: from 0.
            stream: a stream of the device. It also waits for a failing transfer that still moves
                bytes.
            deadline: of the submission; it does not limit how long the stream waits.

        Returns:
            None if the stream waits for the layer, or the layer has arrived; the failure of a
            transfer that was refused or has failed.

        Raises:
            TransferTimeout: the layer was not submitted in time; the stream does not wait for it.
            UsageError: on the loop's thread, while the transfer waits for a step to be closed.
        """
        self._check(layer)
        if layer not in self._owed and self.failure is None:
            return None
        copy = self._accepted_copy(deadline)
        if copy is None or self._ended:
            return self._end()
        try:
            if not copy.wait_submitted(layer, deadline.left()):
                raise self._not_submitted(f"layer {layer}", deadline)
            copy.stream_wait(layer, stream)
        except DeviceError as error:  # it was not submitted, so no block is proven
            return CopyError(0, str(error))
        return None

    def order_all(self, stream: Any, deadline: Deadline) -> CopyError | None:
        """As ``order``, for every layer; return the first failure."""
        for layer in range(self.num_layers):
            failure = self.order(layer, stream, deadline)
            if failure is not None:
                return failure
        return None if self.num_layers else self.failure

    def _end(self) -> CopyError | None:
        """Return the failure of a transfer that does not move; None when all has arrived."""
        if self.failure is not None or self._ended:
            return self.failure
        return CopyError(0, "the transfer was not submitted")

    def _accepted_copy(self, deadline: Deadline) -> Copy | None:
        if not self._is_accepted():
            if not self._is_on_loop:
                if not self._threads.wait(self._is_accepted, deadline):
                    raise self._not_submitted("the transfer", deadline)
            elif self._expedite is None or not self._expedite():
                raise UsageError(
                    f"gpu_wait on the loop's thread would never return: {self.direction} "
                    f"{self.transfer_id} waits for an open step",
                    hint="close the step first, or call gpu_wait in another thread",
                )
        return self._copy

    @property
    def _is_on_loop(self) -> bool:
        """True in the thread that runs the loop now."""
        return asyncio._get_running_loop() is self._loop

    def _is_accepted(self) -> bool:
        """Return True if the device has the copy, or will never get it. Any thread."""
        return self._copy is not None or self._failure is not None or self._ended

    def _not_submitted(self, what: str, deadline: Deadline) -> TransferTimeout:
        return TransferTimeout(
            f"{self.direction} {self.transfer_id}: {what} was not submitted to the device within "
            f"{deadline.timeout} s"
        )

    # --- callbacks --------------------------------------------------------------------------

    def add_callback(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(layer)`` for each layer from now on, in the order of arrival.

        The loop's exception handler gets an exception of a callback, and the other callbacks are
        called all the same.
        """
        self._callbacks.append(callback)

    # --- for the worker ---------------------------------------------------------------------

    def note_start(self, seconds: float | None = None) -> None:
        """Note that the transfer has begun, at ``seconds`` or now. The first time is kept."""
        if self.started_seconds is None:
            self.started_seconds = time.monotonic() if seconds is None else seconds

    def attach(self, copy: Copy, *, is_verified: bool = False) -> None:
        """Note that the device has accepted the copy.

        Args:
            copy: the copy.
            is_verified: True if its bytes are verified before the transfer ends, and may fail then.
        """
        self._is_verified = is_verified
        self._copy = copy
        self._threads.wake()

    def refuse(self, failure: CopyError) -> None:
        """Note that no device gets the copy: ``gpu_wait`` raises from now on, and coroutines wait
        until ``finish``."""
        self._failure = failure
        self._threads.wake()

    def mark_layer_done(self, layer: int, finished_seconds: float | None = None) -> bool:
        """Note that a layer has arrived; return True when it was the last one.

        Idempotent.
        """
        self._check(layer)
        if layer not in self._owed or self._ended:
            return False
        self._times[layer] = time.monotonic() if finished_seconds is None else finished_seconds
        has_arrived = self.failure is None
        self._owed.discard(layer)
        is_last = not self._owed
        if is_last:
            self.finish()
        elif has_arrived:
            self._threads.wake()
            self._release(layer)
        if has_arrived:
            self._call_back(layer)
        return is_last

    def finish(self, failure: CopyError | None = None) -> None:
        """End the transfer, which moves no more bytes, and release all waiters.

        Idempotent; the first failure is kept.
        """
        if self._failure is None:
            self._failure = failure or (self._copy.error() if self._copy is not None else None)
        self.at_rest = True
        self._release_all()

    def give_up(self, failure: CopyError) -> None:
        """Release all waiters, though bytes may still move until ``finish``."""
        if self._ended:
            return
        self._failure = self._failure or failure
        self._release_all()

    def abandon(self, failure: CopyError) -> None:
        """Release all waiters, because the loop has ended and ``finish`` will not be called."""
        self._abandoned = True
        self.give_up(failure)
        self._threads.wake()

    def _release_all(self) -> None:
        if not self._ended:
            self._ended, self._ended_seconds = True, time.monotonic()
        self._threads.wake()
        for layer in list(self._waiters):
            self._release(layer)

    def _release(self, layer: int) -> None:
        for future in self._waiters.get(layer, ()):
            if not future.done():
                future.set_result(None)

    def _call_back(self, layer: int) -> None:
        """Call all callbacks with a layer that has arrived."""
        for callback in self._callbacks:
            try:
                callback(layer)
            except Exception as error:
                self._loop.call_exception_handler(
                    {"message": f"aiokv: a callback of layer {layer} raised", "exception": error}
                )

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise UsageError(f"layer is {layer}; it must be in [0, {self.num_layers})")
