"""Output files of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.cli.arguments import STDOUT
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def check_writable(path: Path | None) -> None:
    """Check, before the work starts, that a file can be written.

    Args:
        path: path of the file; None for no file.

    Raises:
        UsageError: the folder of the file does not exist, or ``path`` is a folder.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: {path.parent} is not a folder")
    if path is not None and path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def print_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to a file, or to stdout if the path is ``-``.

    Raises:
        UsageError: the file cannot be written.
    """
    if path == STDOUT:
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    else:
        write_json(path, value)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; raise the errors of :func:`write_file`."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
