"""Progress of the demo: a bar on a terminal, one line per run elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import rich.progress

from aiokv.observe.units import format_seconds

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from aiokv.demo.report import RunResult


class BarProgress:
    """One bar a run."""

    def __init__(self, console: Console) -> None:
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:14}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("requests"),
            rich.progress.TimeElapsedColumn(),
            console=console,
        )
        self._task = rich.progress.TaskID(0)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, label: str, requests: int) -> None:
        self._task = self._bars.add_task(label, total=requests)

    def advance(self) -> None:
        self._bars.advance(self._task)

    def end(self, result: RunResult) -> None:
        self._bars.stop_task(self._task)


class LineProgress:
    """One line when a run begins and one when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def begin(self, label: str, requests: int) -> None:
        self._console.print(f"{label}: {requests} requests ...")

    def advance(self) -> None:
        pass

    def end(self, result: RunResult) -> None:
        reused = result.reused_tokens
        self._console.print(
            f"{result.label}: {format_seconds(result.seconds)}, reused {reused.device:,} prompt "
            f"tokens from the device, {reused.host:,} from the host"
        )
