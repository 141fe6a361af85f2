"""Mutants of a Python module, from its syntax tree.

Left alone, since no test has to notice: messages (``raise`` statements, f-strings, log calls,
``__repr__``), annotations, decorators and ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.mutation.mutant import Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
_SKIPPED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
_MESSAGES = ("__repr__", "__str__")
_LOGS = ("log", "logger", "warnings")


class PythonMutants:
    """Generator of the mutants of one module."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def all(self) -> list[Mutant]:
        return sorted(self._walk(ast.parse(self._source)), key=lambda m: (m.start, m.end))

    def _walk(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, _SKIPPED) or _is_message(node):
            return
        yield from self._of(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                old, new = _COMPARISONS[type(op)]
                yield from self._between("comparison", left, right, old, new)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                yield from self._between("arithmetic", left, right, *_ARITHMETIC[type(op)])
            case ast.AugAssign(target=left, op=ast.Add() | ast.Sub() as op, value=right):
                old, new = _ARITHMETIC[type(op)]
                yield from self._between("arithmetic", left, right, f"{old}=", f"{new}=")
            case ast.BoolOp(op=op, values=[left, right, *_]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from self._between("and-or", left, right, old, new)
            case ast.Constant(value=bool() as value):
                yield self._replaced("constant", node, str(not value))
            case ast.Constant(value=int() as value):
                yield self._replaced("constant", node, str(value + 1))
            case ast.Name(id="min" | "max" as name):
                yield self._replaced("min-max", node, "max" if name == "min" else "min")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._replaced("dropped call", node, "pass")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = self._span(node.test)
            text = self._source[start:end].decode()
            yield self._replaced("negated condition", node.test, f"(not ({text}))")
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield from self._without(keyword)

    def _without(self, keyword: ast.keyword) -> Iterator[Mutant]:
        """Yield the call without that argument, which its default replaces."""
        if keyword.arg is None:
            return
        start, end = self._span(keyword)
        comma = re.compile(rb"\s*,\s*").match(self._source, end)
        end = comma.end() if comma else end
        yield Mutant(self._path, "dropped argument", start, end, b"")

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[Mutant]:
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.compile(re.escape(old.encode())).search(self._source, start, end)
        if found:
            yield Mutant(self._path, kind, found.start(), found.end(), new.encode())

    def _replaced(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Mutant:
        return Mutant(self._path, kind, *self._span(node), text.encode())

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )


def _is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in _MESSAGES
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return any(part.strip("_") in _LOGS for part in ast.unparse(node.value.func).split("."))
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__slots__")
