"""Crossing: recorded calls on their way to the engine's thread, and the wait for their answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.sync.answers import Answer, make_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.sync.thread import LoopThread

T = TypeVar("T")


class Crossing:
    """Calls that the loop makes one after the other in one callback.

    The caller waits for a lock that the loop releases. That takes one wake-up of the loop and one
    of the caller, and the GIL passes from thread to thread only when its owner begins to wait.

    Attributes:
        done: True when all calls have their answers.
        first_error: first error of the calls in their order; None without errors.
    """

    __slots__ = ("_answered", "_answers", "_claim", "_is_sent", "_thread", "done", "first_error")

    def __init__(self, thread: LoopThread, answers: Sequence[Answer[Any]]) -> None:
        self._thread = thread
        self._answers = answers
        # `pop` is atomic, so the calls are made once, even if an interrupt makes the caller send
        # the crossing again, or the thread ends meanwhile.
        self._claim = [None]
        self._answered = threading.Lock()
        self._answered.acquire()
        self._is_sent = False
        self.done = False
        self.first_error: BaseException | None = None

    def send(self) -> None:
        """Send the calls. Idempotent.

        Raises:
            UsageError: the engine is not open.
            KeyboardInterrupt: the calls may be made all the same; ``send`` may be called again.
        """
        if not self._is_sent:
            self._thread.send(self)
            self._is_sent = True

    def wait(self) -> None:
        """Send the calls, and block the calling thread without the GIL until they are answered.

        Raises:
            UsageError: the engine is not open.
            KeyboardInterrupt: the calls are made all the same; ``wait`` may be called again.
        """
        if self.done:
            return
        self.send()
        if self._thread.is_abandoned:  # sent before `os.fork`
            self.fail(self._thread.new_error)
        if not self.done:
            self._answered.acquire()

    def execute(self) -> None:
        """Make the calls, on the loop. Idempotent."""
        if self._take():
            self.first_error = make_calls(self._answers)
            self._finish()

    def fail(self, new_error: Callable[[], BaseException]) -> None:
        """Answer all calls with an error: no loop makes them. Idempotent. Any thread."""
        if self._take():
            for answer in self._answers:
                answer.fail(new_error())
                self.first_error = self.first_error or answer.error
            self._finish()

    def _take(self) -> bool:
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def _finish(self) -> None:
        self.done = True
        self._thread.forget(self)
        self._answered.release()


def cross(thread: LoopThread, function: Callable[..., T], *args: Any) -> T:
    """Make one call on the loop; return its value or raise its error.

    Raises:
        UsageError: the thread was not started.
        KeyboardInterrupt: the call may be made all the same.
    """
    answer = Answer(function, args)
    try:
        Crossing(thread, [answer]).wait()
        return answer.value
    finally:
        del answer  # break the cycle: the error's traceback has this frame
