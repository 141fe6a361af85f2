"""Standard streams, signals and event loop of the command's process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import FrameType
    from typing import Any

T = TypeVar("T")

_STREAMS: Final = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))


class Terminated(BaseException):
    """The process received SIGTERM; as with KeyboardInterrupt, only ``main`` catches it."""


def open_standard_streams() -> None:
    """Open ``/dev/null`` in place of each standard stream that the parent process closed.

    Otherwise a file that is opened later would get a descriptor from 0 to 2: libuv aborts when it
    closes such a file, and output would be written into the file.
    """
    for number, (name, flags) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if flags == os.O_RDONLY else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, unless the parent process set SIGTERM to be ignored."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def run_async(
    main: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run ``main`` on a new loop of ``loop_factory``, or on a new uvloop.

    Raises:
        KeyboardInterrupt: SIGINT arrived; ``main`` was cancelled and has ended.
        Terminated: SIGTERM arrived inside :func:`sigterm_raises`; ``main`` was cancelled and has
            ended.
    """
    import uvloop

    with asyncio.Runner(loop_factory=loop_factory or uvloop.new_event_loop) as runner:
        return runner.run(_cancel_on_sigterm(main))


async def _cancel_on_sigterm(main: Coroutine[Any, Any, T]) -> T:
    """Await ``main``, and cancel it on SIGTERM.

    Without this handler, SIGTERM would raise in whichever callback runs at that moment.
    """
    if signal.getsignal(signal.SIGTERM) is not _raise_terminated:
        return await main
    task, terminated = asyncio.current_task(), False

    def cancel() -> None:
        nonlocal terminated
        terminated = True
        if task is not None:
            task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, _raise_terminated)
