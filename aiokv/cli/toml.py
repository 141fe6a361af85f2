"""Settings as TOML, in the form that ``CacheConfig.load`` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def toml_lines(settings: Mapping[str, Any], *, table: str = "") -> Iterator[str]:
    """Yield the lines of a TOML document: plain values first, then tables.

    Args:
        settings: values by name; mappings and dataclasses are tables. None is left out, and so is a
            field of a dataclass that has its default.
        table: name of the table that contains ``settings``; empty for the document.
    """
    tables = {}
    for name, value in settings.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(value)
                if getattr(value, field.name) != field.default
            }
        if isinstance(value, Mapping):
            tables[name] = value
        elif value is not None:
            yield f"{_key(name)} = {_value(value)}"
    for name, value in tables.items():
        path = f"{table}.{_key(name)}" if table else _key(name)
        lines = list(toml_lines(value, table=path))
        if lines and not lines[0].startswith("["):
            yield f"[{path}]"
        yield from lines


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)
