"""Command-line arguments that several commands have, and types of arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# The policies that copy blocks to host memory, in the order in which they are compared.
SAVING_POLICIES: Final = ("write_through", "nth_use:2", "write_back")


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are ``minimum`` or more."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return parse


def share(text: str) -> float:
    """Parse a number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def positive_share(text: str) -> float:
    """Parse a number above 0, at most 1."""
    value = share(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return value


def size_bytes(text: str) -> int:
    """Parse a size with its unit, such as ``80GiB``, ``1.5TB`` or ``4096``; return bytes."""
    from aiokv.errors import ConfigError
    from aiokv.stores.options import parse_bytes

    try:
        return 0 if text.strip() == "0" else parse_bytes(text)
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size, such as 80GiB, 1.5TB or 4096"
        ) from None


def positive_size_bytes(text: str) -> int:
    """Parse a size above 0 with its unit; return bytes."""
    size = size_bytes(text)
    if size == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size above 0, such as 80GiB, 1.5TB or 4096"
        )
    return size


_AGE_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def age(text: str) -> float:
    """Parse an age with its unit, such as ``7d``, ``12h``, ``30m`` or ``90s``; return seconds."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    if not number.isdecimal() or unit not in _AGE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number with a unit, such as 7d, 12h, 30m or 90s"
        )
    return float(int(number) * _AGE_SECONDS[unit])


def add_option(
    group: argparse._ActionsContainer,
    flag: str,
    parse: Callable[[str], Any],
    default: object,
    text: str,
    metavar: str = "N",
    **options: Any,
) -> None:
    """Add a flag with a value, whose help text ends with the default.

    Args:
        group: parser or group of the flag.
        flag: name of the flag, with its dashes.
        parse: parser of the value.
        default: default value.
        text: help text.
        metavar: name of the value in the help text.
        options: further options of ``add_argument``.
    """
    group.add_argument(
        flag,
        type=parse,
        default=default,
        metavar=metavar,
        help=f"{text} (default: %(default)s)",
        **options,
    )


def add_count(
    group: argparse._ActionsContainer,
    flag: str,
    default: int,
    text: str,
    metavar: str = "N",
    *,
    minimum: int = 1,
) -> None:
    """Add a flag with a whole number of ``minimum`` or more; see :func:`add_option`."""
    add_option(group, flag, at_least(minimum), default, text, metavar)


def add_choice(
    group: argparse._ActionsContainer,
    flag: str,
    choices: Sequence[str],
    text: str,
    default: str | None = None,
) -> None:
    """Add a flag with one of a few values; without a default, it is the first one."""
    text = f"{text} (default: %(default)s)"
    group.add_argument(flag, choices=choices, default=default or choices[0], help=text)


def from_arguments(kind: type[T], args: argparse.Namespace, **others: Any) -> T:
    """Return an object whose fields are the arguments of the same names.

    Args:
        kind: a dataclass or a struct; arguments of other names are left out.
        args: parsed arguments.
        others: further fields, and those that replace arguments.
    """
    given = {name: value for name, value in vars(args).items() if name in kind.__annotations__}
    return kind(**given | others)


STDOUT: Final = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which prints the result as JSON, or writes it to a file."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="print the result as JSON on stdout, or write it to FILE",
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace of a command, for :func:`trace_path`, and the number of its requests."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a file, possibly compressed with gzip; - for standard input; example for the trace "
        "of the package",
    )
    parser.add_argument(
        "--limit", type=at_least(1), metavar="N", help="read only the first N requests"
    )


def trace_path(trace: str) -> str:
    """Return the path of a trace; a file ``example`` takes precedence over that of the package."""
    from aiokv.trace.format import EXAMPLE

    return str(EXAMPLE) if trace == "example" and not Path(trace).exists() else trace
