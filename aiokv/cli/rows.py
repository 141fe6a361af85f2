"""Results of commands as rows of a name and a value."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def print_rows(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a table on a terminal, and a line per row otherwise."""
    if not sys.stdout.isatty():
        for name, value in rows:
            print(f"{name}: {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
