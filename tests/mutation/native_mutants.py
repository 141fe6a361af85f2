"""Mutants of a C++ file, from its tokens; the code has to be formatted by clang-format.

Left alone: comments, strings, ``throw`` statements, the steps of ``for`` and ``while`` loops, and
``check(Report&)`` functions, which are the oracle of other tests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.mutation.mutant import Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator

_BINARY = {
    b"<": b"<=",
    b"<=": b"<",
    b">": b">=",
    b">=": b">",
    b"==": b"!=",
    b"!=": b"==",
    b"&&": b"||",
    b"||": b"&&",
    b"+": b"-",
    b"-": b"+",
    b"+=": b"-=",
    b"-=": b"+=",
}
_OPERATOR = re.compile(rb"(?<= )(<=?|>=?|==|!=|&&|\|\||[+-]=?)(?= )")
_NUMBER = re.compile(rb"(?<![\w.'])(\d+)(?=u?\b)(?![\w.]*[x.'])")
_MIN_MAX = re.compile(rb"(?<=std::)(min|max)(?=[(<])")
_NOT = re.compile(rb"!(?=[\w(])")
_STEP = re.compile(rb"\+\+|--")
_IF = re.compile(rb"(?<![\w])if \(")
_CALL = re.compile(rb"^ +[\w.\->:\[\]()*]+\(.*\);$")
_JUMP = re.compile(rb"(?<![\w])(continue|break);$")
_KEYWORDS = re.compile(rb"^ +(return|if|for|while|throw|const|auto|else|do|case|using|static)\b")
_HIDDEN = re.compile(
    rb"^void \w+::check\w*\(Report& report\b[^{]*\{.*?^\}|"
    rb'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\bthrow\b[^;]*;|^ *#[^\n]*',
    re.DOTALL | re.MULTILINE,
)


def native_mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of one file, in order."""
    visible = _HIDDEN.sub(lambda hidden: re.sub(rb"[^\n]", b"\x01", hidden[0]), source)
    found: list[Mutant] = []
    offset = 0
    ended = True  # the line before ended a statement
    for line in visible.splitlines(keepends=True):
        for kind, start, end, text in _of(line.rstrip(b"\n"), ended):
            found.append(Mutant(path, kind, offset + start, offset + end, text))
        offset += len(line)
        code = line.replace(b"\x01", b"").rstrip()
        ended = not code or code[-1:] in b";{}:"
    return found


def _of(line: bytes, starts_statement: bool) -> Iterator[tuple[str, int, int, bytes]]:
    for found in _OPERATOR.finditer(line):
        kind = "arithmetic" if found[1][:1] in b"+-" else "comparison"
        yield kind, *found.span(), _BINARY[found[1]]
    for found in _NUMBER.finditer(line):
        yield "constant", *found.span(1), str(int(found[1]) + 1).encode()
    for found in _MIN_MAX.finditer(line):
        yield "min-max", *found.span(), b"max" if found[1] == b"min" else b"min"
    for found in _NOT.finditer(line):
        yield "negated condition", *found.span(), b""
    if b"for (" not in line and b"while (" not in line:
        for found in _STEP.finditer(line):
            yield "arithmetic", *found.span(), b"--" if found[0] == b"++" else b"++"
    for found in _IF.finditer(line):
        end = _closing(line, found.end() - 1)
        if end is not None:
            yield (
                "negated condition",
                found.end() - 1,
                end,
                b"(!" + line[found.end() - 1 : end] + b")",
            )
    if starts_statement and _CALL.match(line) and not _KEYWORDS.match(line):
        start = len(line) - len(line.lstrip())
        yield "dropped call", start, len(line), b";"
    jump = _JUMP.search(line)
    if jump:
        yield "dropped jump", *jump.span(), b";"


def _closing(line: bytes, start: int) -> int | None:
    """Return the position after the parenthesis that closes the one at `start`, on that line."""
    depth = 0
    for index in range(start, len(line)):
        depth += {b"(": 1, b")": -1}.get(line[index : index + 1], 0)
        if depth == 0:
            return index + 1
    return None
