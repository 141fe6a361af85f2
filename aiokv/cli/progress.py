"""Progress of a command: a bar per stage on a terminal, one line per stage otherwise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # (stage, total) -> function that takes the number of steps done since its last call
    Stages = Callable[[str, int], Callable[[int], None]]


@contextmanager
def show_progress(unit: str, stream: TextIO, prefix: str = "aiokv: ") -> Iterator[Stages]:
    """Yield the function that starts a stage of ``total`` units.

    Args:
        unit: unit of the totals, e.g. "requests".
        stream: stream for the progress.
        prefix: prefix of the lines on a stream that is not a terminal.
    """
    from rich.console import Console

    console = Console(file=stream)
    if not console.is_terminal:

        def print_line(stage: str, total: int) -> Callable[[int], None]:
            print(f"{prefix}{stage}: {total} {unit}", file=stream, flush=True)
            return lambda count: None

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    # No refresh thread: its CPU time and its use of the GIL would distort the measurement.
    with Progress(*columns, console=console, auto_refresh=False) as bars:

        def start(stage: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(stage, total=total)
            shown = done = 0

            def advance(count: int) -> None:
                nonlocal shown, done
                done += count
                if done == total or (done - shown) * 50 >= total:
                    shown = done
                    bars.update(task, completed=done, refresh=True)

            return advance

        yield start
