"""``EVENTS.md`` lists each event of the log with its level and fields, and no other."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import aiokv
from aiokv.base.logs import RESERVED

PACKAGE = Path(aiokv.__file__).parent
TABLE = PACKAGE / "observe" / "EVENTS.md"
LEVELS = ("debug", "info", "warning", "error")
LOGS = ("log", "_log")


class Line(NamedTuple):
    """A call that logs, or a row of the table."""

    event: str
    level: str
    fields: frozenset[str]


def lines_of(source: str) -> list[Line]:
    """Return the calls of ``log.<level>`` in a module, also those that are passed on as callbacks.

    The event of a call is a constant, or one of the two of a conditional expression.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        arguments = node.args
        level = level_of(node.func)
        for i, argument in enumerate(node.args):  # call_later(seconds, log.warning, "event", ...)
            if level is None and (level := level_of(argument)) is not None:
                arguments = node.args[i + 1 :]
        if level is None:
            continue
        fields = frozenset(keyword.arg or "**" for keyword in node.keywords)
        name = arguments[0]
        names = [name.body, name.orelse] if isinstance(name, ast.IfExp) else [name]
        for event in names:
            assert isinstance(event, ast.Constant), ast.unparse(node)
            found.append(Line(event.value, level, fields))
    return found


def level_of(node: ast.expr) -> str | None:
    if (
        isinstance(node, ast.Attribute)
        and node.attr in LEVELS
        and isinstance(node.value, ast.Name)
        and node.value.id in LOGS
    ):
        return node.attr
    return None


def in_the_code() -> set[Line]:
    return {line for path in PACKAGE.rglob("*.py") for line in lines_of(path.read_text())}


def in_the_table() -> list[Line]:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    found = []
    for row in rows:
        event, level, fields, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert meaning.endswith("."), row
        names = frozenset(name.strip(" `") for name in fields.split(",")) - {""}
        found.append(Line(event.strip("`"), level, names))
    return found


def test_each_event_is_in_the_table_with_its_level_and_fields():
    table = in_the_table()
    assert set(table) == in_the_code()
    assert len(table) == len({line.event for line in table}), "an event is listed twice"
    assert table == sorted(table)


def test_names_are_a_noun_and_a_verb():
    for line in in_the_table():
        noun, verb = line.event.split(".")
        assert noun.islower(), line
        assert verb.replace("_", "").islower(), line


def test_fields_do_not_collide_with_attributes_of_log_records():
    collisions = {line.event: RESERVED & line.fields - {"exc_info"} for line in in_the_table()}
    assert {event: names for event, names in collisions.items() if names} == {}


def test_calls_are_found():
    source = """
log.info("a.b", x=1)
_log.error("c.d" if x else "e.f", **fields)
loop.call_later(partial(log.warning, "g.h", y=2))
math.log("not", base=2)
"""
    assert lines_of(source) == [
        Line("a.b", "info", frozenset({"x"})),
        Line("c.d", "error", frozenset({"**"})),
        Line("e.f", "error", frozenset({"**"})),
        Line("g.h", "warning", frozenset({"y"})),
    ]
