"""Guarded transitions: handling of exceptions in transitions of the scheduler."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from aiokv.errors import AiokvError, BrokenEngineError
from aiokv.scheduler.effects import NO_EFFECTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.state_guard import StateGuard
    from aiokv.scheduler.effects import Effects
    from aiokv.scheduler.owners import Owners

ENDINGS: Final = frozenset(
    {
        "advance",
        "close",
        "collect",
        "collect_backups",
        "complete",
        "discard_snapshot",
        "end",
        "end_at",
        "end_batch",
        "end_store_wait",
        "expire",
        "fail",
        "finish_step",
        "lose_blocks",
        "note_cancelling",
        "release",
        "stop_saving",
        "stop_wait_pending",
        "stop_waiting",
        "unpin",
    }
)
"""Transitions of callbacks and of ``finally`` blocks. A broken engine makes them without effect."""

P = ParamSpec("P")
R = TypeVar("R")


class TransitionErrors:
    """Notes the exceptions of the transitions of one scheduler.

    An ``AiokvError`` means that nothing changed; it gets the owner of its lease. Other exceptions
    go to ``guard``.

    Args:
        owners: names of the leases.
        guard: breaks the engine.

    Attributes:
        guard: breaks the engine.
    """

    __slots__ = ("_owners", "guard")

    def __init__(self, owners: Owners, guard: StateGuard) -> None:
        self._owners = owners
        self.guard = guard

    def note(self, error: BaseException) -> None:
        """Note an exception that ends a transition; the caller raises it again."""
        if isinstance(error, AiokvError):
            self._owners.add_to(error)
        else:
            self.guard.note(error)

    def refuse(self, name: str) -> tuple[Any, Effects]:
        """Make a transition of a broken engine: return nothing, with no effects.

        Raises:
            BrokenEngineError: the transition is not in ``ENDINGS``.
        """
        if name in ENDINGS:
            return None, NO_EFFECTS
        raise broken(self.guard.failure)


class _Part(Protocol):
    @property
    def errors(self) -> TransitionErrors: ...


S = TypeVar("S", bound=_Part)


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Report exceptions of a transition to ``self.errors``, and refuse calls of a broken engine.

    ``match``, ``try_allocate``, ``append``, ``commit``, ``extend``, ``release``, ``close_step`` and
    ``finish_step`` contain this code instead, which saves a function call: they are called most
    often. Transitions that are called only after a check of the engine need not refuse calls.
    """
    name = method.__name__

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        errors = self.errors
        if errors.guard.failure is not None:
            refused: Any = errors.refuse(name)
            return refused  # type: ignore[no-any-return]
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            errors.note(error)
            raise

    functools.update_wrapper(call, method)
    return call


def broken(failure: BaseException | None) -> BrokenEngineError:
    """Return the error of calls of an engine that ``failure`` has broken."""
    error = BrokenEngineError(
        f"the engine is broken: {type(failure).__name__} has ended a change of its state",
        hint="close the engine, and create a new one",
    )
    error.__cause__ = failure
    return error
