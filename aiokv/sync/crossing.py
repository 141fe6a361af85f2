"""Crossing: recorded calls on their way to the engine's loop, and the wait for their answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.sync.answers import Answer, make_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.sync.thread import LoopThread

T = TypeVar("T")


class Crossing:
    """Calls that are made one after the other, without other code of the loop between them.

    The caller makes them itself if the loop waits for events. Otherwise the loop makes them in one
    callback, and the caller waits for a lock that the loop releases. That takes one wake-up of the
    caller, and the GIL passes from thread to thread only when its owner begins to wait.

    Attributes:
        done: True when all calls have their answers.
        first_error: first error of the calls in their order; None without errors.
    """

    __slots__ = (
        "_answered",
        "_answers",
        "_begun",
        "_claim",
        "_is_sent",
        "_thread",
        "done",
        "first_error",
    )

    def __init__(self, thread: LoopThread, answers: Sequence[Answer[Any]]) -> None:
        self._thread = thread
        self._answers = answers
        # `pop` is atomic, so the calls are made once, even if an interrupt makes the caller send
        # the crossing again, or the thread ends meanwhile.
        self._claim = [None]
        self._answered: threading.Lock | None = None  # made when the loop makes the calls
        self._is_sent = False
        self._begun = False  # the caller has begun to make the calls itself
        self.done = False
        self.first_error: BaseException | None = None

    def send(self, *, here: bool) -> None:
        """Make the calls, or send them to the loop. Idempotent.

        Args:
            here: True to make them in this thread if the loop waits for events. In the thread of
                the loop, they are made at once in any case.

        Raises:
            UsageError: the engine is not open.
            KeyboardInterrupt: the calls may be made all the same; ``send`` may be called again, and
                makes no call twice.
        """
        if self._is_sent or self.done:
            return
        if self._answered is None:
            if (here or self._thread.is_current) and self._thread.make_here(self):
                return
            answered = threading.Lock()
            answered.acquire()
            self._answered = answered
        self._thread.send(self)
        self._is_sent = True

    def wait(self) -> None:
        """Send the calls, and block the calling thread without the GIL until they are answered.

        Raises:
            UsageError: the engine is not open.
            KeyboardInterrupt: as for ``send``.
        """
        self.send(here=True)
        if not self.done and self._thread.is_abandoned:  # sent before `os.fork`
            self.fail(self._thread.new_error)
        if not self.done and self._answered is not None:
            self._answered.acquire()

    def make(self) -> None:
        """Make the calls; after an interrupt, those that are left. With the turn of the loop."""
        answers = self._answers
        if self._begun:
            answers = [answer for answer in answers if not answer.done]
        self._begun = True
        error = make_calls(answers)
        self.first_error = self.first_error or error
        self.done = True

    def execute(self) -> None:
        """Make the calls that were sent, on the loop. Idempotent."""
        if self._take():
            self.make()
            self._finish()

    def fail(self, new_error: Callable[[], BaseException]) -> None:
        """Answer all calls with an error: no loop makes them. Idempotent. Any thread."""
        if self._take():
            for answer in self._answers:
                if not answer.done:
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
        if self._answered is not None:
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
