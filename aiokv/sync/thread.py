"""LoopThread: the thread and the event loop of an engine or a rank, from opening to the end."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiokv import _native
from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.errors import AiokvError, BrokenEngineError, ClosedError, UsageError
from aiokv.sync.loop import SharedLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.sync.crossing import Crossing
    from aiokv.sync.futures import EngineFuture

log = Log(__name__)

EXIT_SECONDS: Final = 30.0  # time for transfers in flight when the interpreter exits

_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """Refuse all calls after ``os.fork``: the child has no thread with a loop."""
    for thread in list(_threads):
        thread.abandon()


def _close_at_exit() -> None:
    """Close the services that are open when the main thread ends."""
    for thread in list(_threads):
        thread.close_at_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
# Not atexit: the interpreter shuts down executors, which stores use, before it calls atexit. It
# also joins threads that wait for a service before that.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


class Service(Protocol):
    """An object with a loop that runs in a thread of its own: an engine, or a rank.

    Attributes:
        noun: ``"engine"`` or ``"rank"``, for messages.
        facade: name of the public class, whose objects threads use.
        opening: name of its method that starts the thread.
    """

    noun: str
    facade: str
    opening: str

    async def serve(self, opened: Future[None], closing: asyncio.Future[float | None]) -> None:
        """Run the service to its end.

        Args:
            opened: gets its result when calls may be made, or the error of the opening.
            closing: gets the drain timeout when the service has to close.
        """

    async def abort(self) -> None:
        """Close at once: a callback of the loop has failed, and has ended ``serve``."""

    def note_end(self) -> None:
        """Wake waiting threads: the loop runs no callback any more."""

    def new_closed_error(self) -> AiokvError:
        """Return the error of calls after the end of ``serve``."""


class LoopThread:
    """Runs a service on a loop of its own, and makes the calls of other threads there.

    Args:
        service: has not begun yet.
        loop_factory: returns the event loop.
    """

    def __init__(
        self, service: Service, loop_factory: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self._service = service
        self._loop_factory = loop_factory
        self._opening = threading.Lock()
        self._is_claimed = False  # open() was called
        self._has_begun = False  # the thread runs the loop and will close it
        self._thread: threading.Thread | None = None
        self._ident = 0  # id of the thread while it runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Future[float | None] | None = None  # its result is the drain timeout
        self._has_ended = False
        self._over = threading.Event()
        self._failure: BaseException | None = None  # the exception that ended the loop
        self._is_abandoned = False
        # Single operations of these sets are atomic, so they need no lock.
        self._unanswered: set[Crossing] = set()
        self._deferred: deque[Crossing] = deque()  # on the loop: they wait for earlier calls
        self._waits: set[EngineFuture[Any]] = set()
        self._ending: set[asyncio.Task[None]] = set()  # cancelled waits that have not ended
        self._begins_closing = False  # True until `serve` has seen that it has to close

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread, and wait until calls may be made; see ``SyncEngine.open``."""
        self.check_process()
        opened: Future[None] = Future()
        with self._opening:
            if self._is_claimed or self._has_ended:
                facade = self._service.facade
                raise UsageError(
                    f"this {facade} was opened or closed before; it can be opened once",
                    hint=f"make a new {facade}",
                )
            self._is_claimed = True
        try:
            loop = self._loop = self._loop_factory()
            self._closing = loop.create_future()
            self._thread = threading.Thread(
                target=self._run,
                args=(loop, self._closing, opened),
                name=f"aiokv-{self._service.noun}",
                daemon=True,
            )
            _threads.add(self)
            self._thread.start()
            opened.result()
        except BaseException:
            self.close(0.0)
            raise

    def close(self, drain_timeout: float | None) -> None:
        """End the service and its thread; see ``SyncEngine.close``."""
        checks.timeout(drain_timeout, "drain_timeout")
        if self._is_abandoned:
            return
        self.check_not_current("close()")
        if self._end_unbegun():
            return
        self.post(self._begin_closing, drain_timeout)
        self._over.wait()
        if self._thread is not None:
            self._thread.join()

    def close_at_exit(self) -> None:
        """Close without waiting for leases; leave a loop that does not react behind."""
        if self._is_abandoned or self._end_unbegun():
            return
        self.post(self._begin_closing, 0.0)
        if not self._over.wait(EXIT_SECONDS):
            _native.keep_forever(self)
            log.error("sync.exit_timeout", waited_seconds=EXIT_SECONDS)

    def abandon(self) -> None:
        """Refuse all calls: this process is a fork of the process of the thread."""
        self._is_abandoned = True
        self._ident = 0
        _native.keep_forever(self)  # otherwise destructors would close resources of the parent

    def _end_unbegun(self) -> bool:
        """End a service whose thread will never run its loop; return False if it runs."""
        with self._opening:
            if self._has_begun:
                return False
            self._has_ended = True
            if self._loop is not None:
                self._loop.close()
        self._end()
        return True

    def _begin_closing(self, drain_timeout: float | None) -> None:
        if self._closing is not None and self._loop is not None and not self._closing.done():
            self._closing.set_result(drain_timeout)
            self._begins_closing = True
            self._loop.call_soon(self._note_closing)  # after the present step of `serve`

    def _note_closing(self) -> None:
        self._begins_closing = False

    # --- the thread -------------------------------------------------------------------------------

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        closing: asyncio.Future[float | None],
        opened: Future[None],
    ) -> None:
        with self._opening:
            if self._has_ended:  # closed while the thread started
                loop.close()
                opened.set_exception(self.new_error())
                return
            self._has_begun = True
            self._ident = get_ident()
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                try:
                    runner.run(self._service.serve(opened, closing))
                except BaseException as error:  # a callback of the loop has raised SystemExit
                    self._failure = error
                    log.error("sync.thread_failed", reason=repr(error))
                    self._has_ended = True  # posted calls must fail, too
                    runner.run(self._service.abort())
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._end()

    def _end(self) -> None:
        """Answer all that waits: no callback of the loop runs any more."""
        self._has_ended = True
        for crossing in list(self._unanswered):
            crossing.fail(self.new_error)
        for wait in list(self._waits):
            wait.fail(self.new_error())
        self._service.note_end()
        self._ident = 0
        self._over.set()

    # --- calls of other threads -------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """True in the thread of the loop, and in one that has borrowed its turn."""
        loop = self._loop
        return get_ident() == self._ident or (
            loop is not None and asyncio._get_running_loop() is loop
        )

    @property
    def has_ended(self) -> bool:
        """True if the loop makes no more calls."""
        return self._has_ended

    @property
    def is_over(self) -> bool:
        """True if the thread has ended: no callback of the loop runs any more."""
        return self._over.is_set()

    @property
    def is_ending(self) -> bool:
        """True if the service was asked to close or has failed, so that its tasks are cancelled."""
        return self.has_failed or (self._closing is not None and self._closing.done())

    @property
    def is_abandoned(self) -> bool:
        """True if this process is a fork of the process of the thread."""
        return self._is_abandoned

    @property
    def has_failed(self) -> bool:
        """True if an exception has ended the loop."""
        return self._failure is not None

    @property
    def noun(self) -> str:
        """Noun for the service in messages: ``"engine"`` or ``"rank"``."""
        return self._service.noun

    def check_process(self) -> None:
        """Check that this process is that of the thread.

        Raises:
            ClosedError: this process is a fork of the process of the thread.
        """
        if self._is_abandoned:
            raise self.new_error()

    def check_not_current(self, what: str) -> None:
        """Check that this is not the thread of the loop.

        Raises:
            UsageError: this is the thread of the loop, where ``what`` would never end.
        """
        if self.is_current:
            raise UsageError(
                f"{what} was called in the {self.noun}'s own thread, for which it waits",
                hint="call it in another thread",
            )

    def check_open(self) -> None:
        """Check that the thread was started.

        Raises:
            UsageError: the thread was not started.
        """
        if self._loop is None and not self._has_ended:
            raise UsageError(
                f"the {self._service.facade} is not open",
                hint=f"use 'with', or call {self._service.opening}()",
            )

    def new_error(self) -> AiokvError:
        """Return the error of calls that the loop does not make any more."""
        noun = self._service.noun
        if self._is_abandoned:
            return ClosedError(
                f"the {noun} belongs to the parent process, which opened it before os.fork()",
                hint=f"open a {self._service.facade} in the child",
            )
        if self._failure is None:
            return self._service.new_closed_error()
        error = BrokenEngineError(f"the thread of the {noun} has failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def make_here(self, crossing: Crossing) -> bool:
        """Make the calls of a crossing in the calling thread.

        Returns:
            False, and none was made, if the thread is not that of the loop, and the loop is busy.
        """
        if self.is_current:
            crossing.make()
            return True
        loop = self._loop
        if not isinstance(loop, SharedLoop) or self._is_abandoned:
            return False
        return loop.call_here(self._make_now, crossing)

    def _make_now(self, crossing: Crossing) -> bool:
        if self._has_ended or self._has_to_wait:
            return False
        crossing.make()
        return True

    @property
    def _has_to_wait(self) -> bool:
        """True while calls have to wait until earlier calls of their threads have had their effect.

        A cancelled wait for capacity gives its place in line back, and a service that was asked to
        close refuses calls, after a pass of the loop.
        """
        return self._begins_closing or bool(self._ending)

    def send(self, crossing: Crossing) -> None:
        """Let the loop make the calls of a crossing.

        Raises:
            UsageError: the service is not open.
        """
        self.check_open()
        self._unanswered.add(crossing)
        if self._is_abandoned:
            crossing.fail(self.new_error)
            return
        if not self._has_ended:
            self.post(self._receive, crossing)
        if self._has_ended:  # `_end` may not have seen the crossing
            self._over.wait()
            crossing.fail(self.new_error)

    def _receive(self, crossing: Crossing) -> None:
        """Make the calls of a crossing, behind those of the crossings that have come before."""
        self._deferred.append(crossing)
        if len(self._deferred) == 1:
            self._make_deferred()

    def _make_deferred(self) -> None:
        """Make the calls that have come, as soon as they need not wait.

        Calls fail with the error of the thread once an exception has ended its service: whether a
        call arrives before or behind the close that follows does not change its error.
        """
        while self._deferred:
            if self._has_ended:
                self._deferred.popleft().fail(self.new_error)
            elif self._has_to_wait:
                self.post(self._make_deferred)
                return
            else:
                self._deferred.popleft().execute()

    def forget(self, crossing: Crossing) -> None:
        """Note that a crossing has its answers."""
        self._unanswered.discard(crossing)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` on the loop; without effect when the loop is closed."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *args)

    # --- waits, on the loop -----------------------------------------------------------------------

    def begin_wait(self, wait: EngineFuture[Any]) -> None:
        """Note a future that the loop has to settle."""
        self._waits.add(wait)

    def end_wait(self, wait: EngineFuture[Any]) -> None:
        """Note that a future was settled."""
        self._waits.discard(wait)

    def cancel_task(self, task: asyncio.Task[None], *, first: bool) -> None:
        """Cancel the task of a wait.

        Args:
            task: the task.
            first: True if crossings wait until the task has ended, which takes a few passes.
        """
        if first and not task.done():
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        task.cancel()
