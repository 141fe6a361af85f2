"""The files of ``examples/`` and what their docstrings say."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


class Example(NamedTuple):
    """Header of an example: the first line, what to install, the command, and what it prints."""

    title: str
    install: str
    run: str
    output: str


def header_of(path: Path) -> Example:
    """Return the header of an example.

    Raises:
        AssertionError: the docstring has not all parts, in this order.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    parts = re.fullmatch(
        r"(.+?)\n\n.*\n\nInstall: (.+)\nRun:     (.+)\nOutput:\n(.+)", docstring, re.DOTALL
    )
    assert parts is not None, f"{path.name}: a docstring has a title, Install, Run and Output"
    title, install, run, output = parts.groups()
    return Example(title, install, run, re.sub(r"^    ", "", output, flags=re.MULTILINE))


@cache
def loaded(name: str) -> ModuleType:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module
