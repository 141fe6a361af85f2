"""``aiokv top URL``: the engines of a running server, refreshed in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final

from aiokv.cli.arguments import add_count, positive_float

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from aiokv.cli.top.dump import Dump, DumpClient
    from aiokv.cli.top.figures import EngineFigures

PLAIN_COLUMNS: Final = 120
PLAIN_LEASES: Final = 40

EPILOG = """\
URL is where the ASGI app of aiokv.observe.asgi is mounted, such as http://localhost:8000/aiokv. The
first request must succeed; later, top tries again until the server answers. Ctrl-C ends it.

Without a terminal, or with --once, top prints the state once; with --json, one line of JSON per
answer, with rates from the second one on.

exit status: 0 done, or ended by Ctrl-C; 2 the URL cannot be reached or is not the app of aiokv
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``top`` command."""
    parser = subparsers.add_parser(
        "top",
        help="watch the engines of a running server",
        description="Watch tiers, hits, transfers, stores and leases of a running server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", metavar="URL")
    add(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="SECONDS",
        help="time between two requests (default: %(default)s)",
    )
    add(
        "--timeout",
        type=positive_float,
        default=5.0,
        metavar="SECONDS",
        help="deadline of one request (default: %(default)s)",
    )
    add("--once", action="store_true", help="print the state once")
    add("--json", action="store_true", help="print a line of JSON per answer")
    add_count(parser, "--leases", PLAIN_LEASES, "maximum number of leases to show", minimum=0)


def run(args: argparse.Namespace) -> int:
    """Show the state until Ctrl-C.

    Returns:
        The exit status.

    Raises:
        UsageError: the URL is malformed.
        DumpError: the first answer is not the state of an engine.
    """
    from rich.console import Console

    from aiokv.cli.top.dump import DumpClient

    client = DumpClient(args.url, args.timeout)
    dump = client.fetch()
    try:
        if args.json:
            _print_json(client, dump, args)
        elif args.once or not sys.stdout.isatty():
            console = Console(
                file=sys.stdout,
                width=None if sys.stdout.isatty() else PLAIN_COLUMNS,
                highlight=False,
            )
            _print_once(console, client, dump, args)
        else:
            show(Console(), client, dump, args, time.sleep)
    except KeyboardInterrupt:
        return 0
    return 0


def _print_once(console: Console, client: DumpClient, dump: Dump, args: argparse.Namespace) -> None:
    from aiokv.cli.top.figures import figures_of
    from aiokv.cli.top.screen import screen

    engines = figures_of(dump, None)
    console.print(screen(client.url, engines, max_leases=args.leases))


def _print_json(client: DumpClient, dump: Dump, args: argparse.Namespace) -> None:
    import msgspec

    from aiokv.cli.top.dump import DumpError
    from aiokv.cli.top.figures import figures_of

    before = None
    while True:
        line = {"time_seconds": dump.time_seconds, "engines": figures_of(dump, before)}
        print(msgspec.json.encode(line).decode(), flush=True)
        if args.once:
            return
        before = dump
        while True:
            time.sleep(args.interval)
            try:
                dump = client.fetch()
                break
            except DumpError as error:
                print(f"aiokv: {error.args[0]}", file=sys.stderr)


def show(
    console: Console,
    client: DumpClient,
    dump: Dump,
    args: argparse.Namespace,
    sleep: Callable[[float], object],
) -> None:
    """Refresh the terminal until KeyboardInterrupt, which leaves the terminal as it was.

    Args:
        console: a terminal.
        client: client of the server.
        dump: the first answer.
        args: arguments of the command.
        sleep: waits for seconds, then returns.
    """
    from rich.live import Live

    from aiokv.cli.top.dump import DumpError
    from aiokv.cli.top.figures import figures_of
    from aiokv.cli.top.screen import screen

    engines: dict[str, EngineFigures] = figures_of(dump, None)
    problem, lost_at = "", 0.0
    # No refresh thread: the screen changes only when there is an answer.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            title = f"{client.url}   {time.strftime('%H:%M:%S')}   Ctrl-C ends"
            rest = console.render_lines(screen(title, engines, max_leases=0, problem=problem))
            room = (console.height - len(rest)) // max(len(engines), 1)
            leases = max(min(args.leases, room - 1), 0)  # one line has the names of the columns
            live.update(screen(title, engines, max_leases=leases, problem=problem), refresh=True)
            sleep(args.interval)
            try:
                newest = client.fetch()
            except DumpError as error:
                lost_at = lost_at or time.monotonic()
                seconds = time.monotonic() - lost_at
                problem = f"lost {seconds:.0f} s ago, trying again: {error.args[0]}"
            else:
                engines, dump = figures_of(newest, dump), newest
                problem, lost_at = "", 0.0
