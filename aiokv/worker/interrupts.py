"""Work that an interrupt must not lose.

A signal handler of Python (Ctrl-C) may raise between any two instructions. What it ends is called
again later, and must be idempotent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")


def call_surely(
    action: Callable[[], T], call_again: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return ``action()``; when an interrupt ends it, call ``call_again(*args)`` and raise that.

    Args:
        action: called now. An ``Exception`` that it raises is the caller's to handle.
        call_again: schedules the repetition.
        args: arguments of ``call_again``.
        kwargs: likewise.
    """
    try:
        return action()
    except Exception:
        raise
    except BaseException:  # KeyboardInterrupt, SystemExit
        call_again(*args, **kwargs)
        raise
