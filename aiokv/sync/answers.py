"""Answer: the value or the error of one call that has crossed to the engine's thread."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec

from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

PENDING: Final = object()  # value before the call was made


class Answer(msgspec.Struct, Generic[T], eq=False):
    """Value or error of a recorded call; only :class:`Calls` makes answers.

    A ``Struct``, because it is made several times faster than an object with ``__init__``.

    Attributes:
        function: what the call runs on the engine's loop.
        args: its arguments.
        error: the exception of the call; None without one, and before the call.
        returned: what the call has returned; for the caller, ``value`` checks it.
    """

    function: Callable[..., T]
    args: tuple[Any, ...]
    error: BaseException | None = None
    returned: object = PENDING

    @property
    def done(self) -> bool:
        """True if the call has been made: it has a value or an error."""
        return self.returned is not PENDING or self.error is not None

    @property
    def value(self) -> T:
        """Result of the call.

        Raises:
            UsageError: ``Calls.run`` has not made the call yet.
            Exception: the error of the call.
        """
        if self.error is None:
            if self.returned is not PENDING:
                return cast("T", self.returned)
            raise UsageError(f"{self!r} has no value yet", hint="call run() first")
        try:
            raise without_frames(self.error)  # otherwise the traceback would grow with each call
        finally:
            del self  # break the cycle: the error's traceback has this frame

    def fail(self, error: BaseException) -> None:
        """Fail the call, because the engine's thread has ended."""
        self.error = error

    def note_interrupt(self) -> None:
        """Note that an interrupt, which is ``error``, has ended the call."""

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
        self.returned = None


class FutureAnswer(Answer[None]):
    """Answer of a call that settles a future, or begins to wait for it: its first argument."""

    def fail(self, error: BaseException) -> None:
        """Fail the call and its future: nothing else would settle it."""
        self.error = error
        self.args[0].fail(error)

    def note_interrupt(self) -> None:
        """Cancel the future: nothing else might settle it."""
        self.args[0].abandon()


def make_calls(answers: Sequence[Answer[Any]]) -> BaseException | None:
    """Make calls, in order, and note their values and errors. With the turn of the engine's loop.

    One loop without a call of its own per answer: it runs while a scheduler waits.

    Returns:
        The first interrupt, such as ``KeyboardInterrupt`` or ``SystemExit``, or else the first
        error; None without errors.
    """
    first: BaseException | None = None
    for answer in answers:
        try:
            answer.returned = answer.function(*answer.args)
        except Exception as error:
            answer.error = error  # before any call, behind which an interrupt may come
            answer.error = without_frames(error)
            first = first or answer.error
        except BaseException as error:  # it belongs to the caller
            answer.error = error
            if first is None or isinstance(first, Exception):
                first = error
            answer.note_interrupt()
    return first


def without_frames(error: E) -> E:
    """Drop the traceback of an error of aiokv, whose message says what to do.

    Its frames refer, also through their callers, to the object that keeps the error: the cycle
    would keep leases until the garbage collector finds it. Errors of other code keep theirs.
    """
    return error.with_traceback(None) if isinstance(error, AiokvError) else error
