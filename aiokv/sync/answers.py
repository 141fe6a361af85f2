"""Answer: the value or the error of one call that has crossed to the engine's thread."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class Answer(msgspec.Struct, Generic[T], eq=False):
    """Value or error of a recorded call; only :class:`Calls` makes answers.

    A ``Struct``, because it is made several times faster than an object with ``__init__``.

    Attributes:
        function: what the call runs on the engine's loop.
        args: its arguments.
        done: True when the call has been made: it has a value or an error.
        error: the exception of the call; None without one, and before the call.
    """

    function: Callable[..., T]
    args: tuple[Any, ...]
    done: bool = False
    error: BaseException | None = None
    _value: T | None = None

    @property
    def value(self) -> T:
        """Result of the call.

        Raises:
            UsageError: ``Calls.run`` has not made the call yet.
            Exception: the error of the call.
        """
        if self.error is None:
            if self.done:
                return cast("T", self._value)
            raise UsageError(f"{self!r} has no value yet", hint="call run() first")
        try:
            raise self.error
        finally:
            del self  # the traceback of the error has this frame: break the cycle

    def execute(self) -> None:
        """Make the call. On the engine's loop."""
        try:
            self._value = self.function(*self.args)
        except BaseException as error:  # also SystemExit: it belongs to the caller
            self.error = without_frames(error)
        self.done = True

    def fail(self, error: BaseException) -> None:
        """Note that the call cannot be made any more: the engine's thread has ended."""
        self.error = error
        self.done = True

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function)).lstrip("_")
        state = "not called yet" if not self.done else repr(self.error) if self.error else "done"
        return f"<Answer of {name}, {state}>"


class ReturnAnswer(Answer[None]):
    """Answer of a call that gives something back: without an engine, that is done already."""

    def fail(self, error: BaseException) -> None:
        """Give back what the caller's objects still name: the engine holds nothing any more."""
        with suppress(AiokvError):
            self.function(*self.args)
        self.done = True


def first_error(answers: Sequence[Answer[Any]]) -> BaseException | None:
    """Return the error of the first call that has one; None without errors."""
    for answer in answers:
        if answer.error is not None:
            return answer.error
    return None


def without_frames(error: E) -> E:
    """Drop the traceback of an error of aiokv, whose message says what to do.

    Its frames refer, also through their callers, to the object that keeps the error: the cycle
    would keep leases until the garbage collector finds it. Errors of other code keep theirs.
    """
    return error.with_traceback(None) if isinstance(error, AiokvError) else error
