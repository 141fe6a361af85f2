"""Lines of the application, for messages: those of aiokv do not help their readers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from types import FrameType

# Modules that call the engine on behalf of the application; exit stacks leave `async with` blocks.
_INTERNAL: Final = ("aiokv.engine", "contextlib")


class Caller(NamedTuple):
    """Frame of the application, and its ``stacklevel`` for ``warnings.warn``."""

    frame: FrameType
    stacklevel: int


def outer_caller() -> Caller:
    """Return the innermost frame outside the engine, seen from the calling function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INTERNAL):
        frame, level = frame.f_back, level + 1
    return Caller(frame, level)
