"""No object touches a private attribute of another one."""

from __future__ import annotations

import ast
from pathlib import Path

import aiokv

PACKAGE = Path(aiokv.__file__).parent

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


def test_no_private_attribute_of_another_object_is_touched() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    found = {path.relative_to(PACKAGE).as_posix(): reaches(path.read_text()) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_reaches_are_found_and_own_attributes_are_not() -> None:
    source = """
class A:
    def f(self, other):
        other._x = self._x + self.b._y
        self.__class__.__name__
        super()._f()
"""
    assert reaches(source) == ["line 4: other._x", "line 4: self.b._y"]
