"""Progress on stderr: a bar on a terminal, one line a stage otherwise."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # (stage, total) -> what to call with the number of steps done since the last call
    Stages = Callable[[str, int], Callable[[int], None]]


@contextmanager
def show_progress(unit: str) -> Iterator[Stages]:
    """Give what starts a stage of ``total`` units."""
    if not sys.stderr.isatty():
        yield lambda stage, total: _start_plain(stage, total, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    # No refresh thread: its CPU time and its turns with the GIL would be measured along.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bars:

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


def _start_plain(stage: str, total: int, unit: str) -> Callable[[int], None]:
    print(f"aiokv: {stage}: {total} {unit}", file=sys.stderr, flush=True)
    return lambda count: None
