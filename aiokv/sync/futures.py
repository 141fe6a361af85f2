"""EngineFuture: a wait on the loop of an engine, as a future that any thread may use."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.base import checks
from aiokv.errors import UsageError
from aiokv.sync.answers import without_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.sync.thread import LoopThread

T = TypeVar("T")


class EngineFuture(Future[T]):
    """A ``concurrent.futures.Future`` of a wait in the engine's thread.

    ``concurrent.futures.wait`` and ``as_completed`` take it. Functions of ``add_done_callback`` run
    on the engine's loop, in whichever thread has its turn, and may make direct calls there, but not
    wait for other futures.
    """

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._engine_thread = thread
        self._task: asyncio.Task[None] | None = None
        self._is_sent = False
        self._ends_first = False

    def cancel(self) -> bool:
        """Cancel the wait, unless it has ended.

        Returns:
            True when the wait is cancelled. A lease that waited for capacity gets no blocks, and
            has left its place in line before any call that the same thread makes afterwards. Other
            coroutines end soon: ``concurrent.futures.wait`` returns when they have. False when the
            future has its value or error.

        Raises:
            ClosedError: this process is a fork of the process of the engine.
        """
        self._engine_thread.check_process()
        if not super().cancel():
            return False
        self._engine_thread.post(self._cancel_task)
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value.

        Args:
            timeout: seconds; None for no limit. The wait in the engine goes on afterwards.

        Raises:
            TimeoutError: ``timeout`` has passed.
            concurrent.futures.CancelledError: the future was cancelled.
            UsageError: ``timeout`` is not a number; ``Calls.run`` has not sent the call yet; or the
                call is made in the engine's own thread.
            ClosedError: this process is a fork of the process of the engine.
            Exception: the error of the wait.
            KeyboardInterrupt: the wait in the engine goes on; call ``cancel`` to end it.
        """
        self._check_wait()
        try:
            return super().result(checks.timeout(timeout))
        finally:
            del self  # break the cycle: the error's traceback has this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error of the wait; None without one.

        Raises:
            TimeoutError, UsageError, ClosedError: as for ``result``.
        """
        self._check_wait()
        return super().exception(checks.timeout(timeout))

    def _check_wait(self) -> None:
        thread = self._engine_thread
        thread.check_process()
        if self.done():
            return
        if not self._is_sent:
            raise UsageError("the call of this future was not sent yet", hint="call run() first")
        if thread.is_current:
            raise UsageError(
                f"a future of the {thread.noun} was waited for in the {thread.noun}'s own thread",
                hint="wait in another thread, or add another callback",
            )

    # --- for the engine's thread --------------------------------------------------------------

    def wait(self) -> T:
        """Wait for the value; when an interrupt ends this call, cancel the wait in the engine."""
        try:
            return self.result()
        except BaseException:
            self.cancel()  # does nothing if the future is done
            raise
        finally:
            del self

    def note_sent(self) -> None:
        """Note that the call is on its way: waiting for it will end."""
        self._is_sent = True

    def abandon(self) -> None:
        """Cancel the wait, because an interrupt has ended the call that begins it."""
        if self.cancel() and self._task is None:
            self.note_cancelled()

    def note_cancelled(self) -> None:
        """Wake the waiters of this future, which was cancelled before its call was made."""
        self.set_running_or_notify_cancel()

    def start(
        self,
        coroutine: Coroutine[Any, Any, T],
        undo: Callable[[], object] | None = None,
    ) -> None:
        """Await ``coroutine`` in a task, and settle this future with its end. On the loop.

        Args:
            coroutine: the wait.
            undo: takes back the effect of the wait, when the future was cancelled in the same
                moment. With it, crossings wait for the end of a cancelled task.
        """
        self._ends_first = undo is not None
        self._engine_thread.begin_wait(self)
        self._task = asyncio.get_running_loop().create_task(self._drive(coroutine, undo))

    async def _drive(
        self, coroutine: Coroutine[Any, Any, T], undo: Callable[[], object] | None
    ) -> None:
        try:
            value = await coroutine
        except asyncio.CancelledError:
            if self._engine_thread.is_ending:
                # Does nothing if its owner has cancelled it.
                self.fail(self._engine_thread.new_error())
            else:
                self._note_end_by_cancellation()
        except BaseException as error:  # also SystemExit: it belongs to the caller
            # True if the engine was closed for that reason.
            has_failed = self._engine_thread.has_failed
            self.fail(self._engine_thread.new_error() if has_failed else without_frames(error))
        else:
            if not self.settle(value) and undo is not None:
                undo()

    def settle(self, value: T) -> bool:
        """Set the value; return False when the future was cancelled before."""
        self._engine_thread.end_wait(self)
        if not self.set_running_or_notify_cancel():
            return False
        self.set_result(value)
        return True

    def fail(self, error: BaseException) -> None:
        """Set the error, unless the future was cancelled before."""
        self._engine_thread.end_wait(self)
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    def _note_end_by_cancellation(self) -> None:
        """Record that a coroutine was cancelled, by its owner or by itself."""
        self._engine_thread.end_wait(self)
        super().cancel()
        self.set_running_or_notify_cancel()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._engine_thread.cancel_task(self._task, first=self._ends_first)
