"""``aiokv completion bash|zsh|fish``: a script that completes commands and options in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiokv.errors import UsageError

if TYPE_CHECKING:
    import argparse

SHELLS: Final = ("bash", "zsh", "fish")

EPILOG = """\
    aiokv completion bash > ~/.local/share/bash-completion/completions/aiokv
    aiokv completion zsh > ~/.zfunc/_aiokv        (a folder of fpath)
    aiokv completion fish > ~/.config/fish/completions/aiokv.fish

Write the file again after an update of aiokv.

exit status: 0, or 2 bad usage, or the package shtab is not installed
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``completion`` command."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands and options",
        description="Print a script with which a shell completes aiokv's commands and options.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script on stdout.

    Returns:
        The exit status.

    Raises:
        UsageError: the package shtab is not installed.
    """
    from aiokv.cli import command_parser

    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "aiokv completion needs the package shtab", hint="pip install 'aiokv[completion]'"
        ) from error

    parser = command_parser()
    for action in parser.arguments():
        if action.type is Path or action.metavar in ("TRACE", "PATH"):  # a file, "-" or "example"
            setattr(action, "complete", shtab.FILE)  # noqa: B010  (shtab's own attribute)
    print(shtab.complete(parser, shell=args.shell))
    return 0
