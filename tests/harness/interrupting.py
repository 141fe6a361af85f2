"""Exceptions that are raised before a chosen line of the guarded code."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiokv
from aiokv.engine.dispatcher import Dispatcher
from aiokv.ranks.rank import Rank
from aiokv.scheduler.scheduler import TRANSITIONS, CacheScheduler
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

HERE = str(Path(aiokv.__file__).parent)
PARTS = {
    "fetches": "aiokv.scheduler.fetches.Fetches",
    "peers": "aiokv.scheduler.peers.ReceivesAndSends",
    "pins": "aiokv.scheduler.pins.Pins",
    "retention": "aiokv.scheduler.retention.Retention",
    "store_saver": "aiokv.scheduler.store_saver.StoreSaver",
}

Place = tuple[str, int]
"""File and line."""


@functools.cache
def guarded_lines() -> dict[CodeType, range]:
    """Return the functions whose exceptions break the engine, and the lines of their ``try``.

    What these lines call is guarded, too.
    """
    functions: list[Callable[..., Any]] = [inspect.unwrap(_attribute(name)) for name in TRANSITIONS]
    functions += [Dispatcher.apply, Rank._on_message]
    functions += [EventPoller._on_timer, EventPoller._on_next_pass, EventPoller._run_soon]
    return {function.__code__: _lines_of(function) for function in functions}


def _attribute(name: str) -> Callable[..., Any]:
    part, _, method = name.rpartition(".")
    if not part:
        return getattr(CacheScheduler, method)  # type: ignore[no-any-return]
    module, _, kind = PARTS[part].rpartition(".")
    return getattr(getattr(sys.modules[module], kind), method)  # type: ignore[no-any-return]


def _lines_of(function: Callable[..., Any]) -> range:
    """Return the lines of the ``try`` in a function; all lines if its caller has the ``try``."""
    lines, first = inspect.getsourcelines(function)
    (definition,) = ast.parse(textwrap.dedent("".join(lines))).body
    for node in ast.walk(definition):
        if isinstance(node, ast.Try):
            return range(first + node.body[0].lineno - 1, first + (node.body[-1].end_lineno or 0))
    return range(first, first + len(lines))


class Interrupter:
    """Tracer that raises an exception once, before the n-th guarded line.

    Args:
        at: the line; 0 for none.
        exception: type of the exception.

    Attributes:
        places: place of each guarded line that ran, in order.
    """

    def __init__(self, at: int = 0, exception: type[BaseException] = KeyboardInterrupt) -> None:
        self.places: list[Place] = []
        self._at = at
        self._exception = exception
        self._guarded = guarded_lines()

    @property
    def has_raised(self) -> bool:
        """True after the exception was raised."""
        return 0 < self._at <= len(self.places)

    def __enter__(self) -> Self:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Trace the lines of aiokv; for ``sys.settrace`` and ``threading.settrace``."""
        filename = frame.f_code.co_filename
        if not filename.startswith(HERE) or "/testing/" in filename:
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.has_raised:
            sys.settrace(None)
            return None
        if event == "line" and self._is_guarded(frame):
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) == self._at:
                raise self._exception
        return self._on_line

    def _is_guarded(self, frame: FrameType) -> bool:
        # CPython checks for signals on no line "try:", and an outer "try" does not cover it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return line.strip() != "try:" and any(
            caller.f_lineno in self._guarded.get(caller.f_code, ()) for caller in _callers(frame)
        )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        yield frame
        frame = frame.f_back


def first_of_each(places: list[Place]) -> list[int]:
    """Return the numbers of the lines that ran for the first time at their place, from 1 on."""
    first: dict[Place, int] = {}
    for number, place in enumerate(places, 1):
        first.setdefault(place, number)
    return list(first.values())
