"""Answer: the value or the error of one call that has crossed to the engine's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

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
            self.error = without_frame(error)
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
        """Note that the engine, which has ended, holds nothing any more."""
        self.done = True


def without_frame(error: E) -> E:
    """Drop the calling frame from the traceback of an error that it has caught.

    That frame refers to the object that keeps the error: the cycle would keep leases until the
    garbage collector runs.
    """
    trace = error.__traceback__
    return error.with_traceback(None if trace is None else trace.tb_next)
