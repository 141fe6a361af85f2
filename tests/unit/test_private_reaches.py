"""No object touches a private attribute of another one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import aiokv

PACKAGE = Path(aiokv.__file__).parent

# Remaining accesses to private attributes, per file. A number may only become smaller.
LEFT: dict[str, int] = {}

# Names that the standard library documents, or that have no public name.
PUBLIC = (
    "_replace",
    "_ActionsContainer",
    "_ArgumentGroup",
    "_SubParsersAction",
    "_get_running_loop",
    "_getframe",
    "_match_result",  # an attribute that FastDeploy's scheduler reads
    "_register_atexit",
)


def reaches(source: str) -> list[str]:
    """Return each private attribute that is taken from anything but self, cls or super()."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        owner = ast.unparse(node.value)
        if owner not in ("self", "cls", "super()"):
            found.append(f"line {node.lineno}: {owner}.{node.attr}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_no_private_attribute_of_another_object_is_touched(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    found = reaches(path.read_text())
    assert len(found) == LEFT.get(name, 0), found


def test_reaches_are_found_and_own_attributes_are_not() -> None:
    source = """
class A:
    def f(self, other):
        other._x = self._x + self.b._y
        self.__class__.__name__
        super()._f()
"""
    assert reaches(source) == ["line 4: other._x", "line 4: self.b._y"]


def test_the_list_of_exceptions_names_existing_files() -> None:
    assert [name for name in LEFT if not (PACKAGE / name).is_file()] == []
