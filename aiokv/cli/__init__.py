"""The ``aiokv`` command; each subcommand is a module that imports its dependencies in ``run``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from aiokv.cli.running import Terminated, open_standard_streams, sigterm_raises
from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

# Each command is a module of this package with add_parser(subparsers) and run(args) -> int.
COMMANDS = (
    "completion",
    "config",
    "demo",
    "doctor",
    "explain",
    "replay",
    "serve",
    "size",
    "store",
    "top",
)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 128 + 2
EXIT_BROKEN_PIPE = 128 + 13
EXIT_TERMINATED = 128 + 15


class Parser(argparse.ArgumentParser):
    """Parser of the command and of each subcommand: options have to be written in full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if options.get("epilog"):  # its lines stay as they are
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options | {"allow_abbrev": False})
        self.add_argument(
            "-V", "--version", action=_Version, nargs=0, help="print the version and exit"
        )
        self.add_argument(
            "--log-level",
            default=argparse.SUPPRESS,  # a command without the option keeps the value before it
            choices=("debug", "info", "warning", "error"),
            help="least severe log line to print on stderr (default: warning)",
        )

    def arguments(self) -> Iterator[argparse.Action]:
        """Yield the arguments and options of the command and of all its subcommands."""
        for action in self._actions:
            yield action
            if isinstance(action.choices, dict):  # of subcommands
                for parser in action.choices.values():
                    yield from parser.arguments()


def main(argv: Sequence[str] | None = None, make_parser: Callable[[], Parser] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: arguments after the name of the command; None for those of the process.
        make_parser: returns a parser made by :func:`new_parser`, whose ``run`` takes the parsed
            arguments and returns the exit status; None for the parser of ``aiokv``.

    Raises:
        SystemExit: raised by argparse for ``--help``, ``--version`` and bad flags (status 2).
    """
    open_standard_streams()
    try:
        with sigterm_raises():
            return _run(argv, (make_parser or command_parser)())
    except Terminated:
        print("aiokv: terminated", file=sys.stderr)
        return EXIT_TERMINATED


def _run(argv: Sequence[str] | None, parser: Parser) -> int:
    try:
        args = parser.parse_args(argv)
        if args.run is None:
            parser.print_help()
            sys.stdout.flush()
            return 0
        _configure_logs(args.log_level)
        status: int = args.run(args)
        sys.stdout.flush()
    except AiokvError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("aiokv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, too many open files
        _drop_output()
        print(f"aiokv: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except MemoryError as error:
        return _report(UsageError(f"out of memory: {error}", hint="lower --device-blocks"))
    return status


def _drop_output() -> None:
    """Redirect stdout to ``/dev/null``, so that the flush of the interpreter at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """Prints the installed version; loads the package metadata only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"aiokv {version('aiokv')}", flush=True)
        parser.exit()


def new_parser(prog: str, description: str, epilog: str | None = None) -> Parser:
    """Return the parser of a program."""
    parser = Parser(prog=prog, description=description, epilog=epilog)
    parser.set_defaults(run=None, log_level="warning")
    return parser


def command_parser() -> Parser:
    """Return the parser of ``aiokv`` with all its commands."""
    parser = new_parser("aiokv", "Asyncio event-driven KV-cache engine for LLM serving.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command, module in _command_modules():
        module.add_parser(subparsers)
        subparsers.choices[command].set_defaults(run=module.run)
    return parser


def _command_modules() -> Iterator[tuple[str, ModuleType]]:
    for command in COMMANDS:
        name = f"{__name__}.{command}"
        if importlib.util.find_spec(name):
            yield command, importlib.import_module(name)


def _report(error: AiokvError) -> int:
    print(f"aiokv: error: {error.args[0]}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return EXIT_ERROR


def _configure_logs(level: str) -> None:
    """Render the log lines of the library on stderr; only the command line configures logs."""
    import logging

    import structlog

    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
    ]
    foreign: list[structlog.typing.Processor] = [*shared, structlog.stdlib.ExtraAdder()]
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=foreign,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logger = logging.getLogger("aiokv")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
