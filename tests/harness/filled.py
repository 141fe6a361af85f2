"""A stand-in for an engine, each number of whose statistics is used nowhere else."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from aiokv import CacheConfig
from aiokv.base.groups import ATTENTION
from aiokv.base.statistics import DurationHistogram, Statistics

_numbers = count(1_000)


def filled(kind: Any) -> Any:
    """Return a value of a type, each of whose numbers is used nowhere else."""
    if kind is DurationHistogram:
        first = next(_numbers)
        return DurationHistogram([first, next(_numbers)], next(_numbers) + 0.5, [2.0**-first])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{name: filled(hints[name]) for name in kind.__struct_fields__})
    if get_origin(kind) is dict:
        return {"a": filled(get_args(kind)[1])}
    if get_origin(kind) is list:
        return [filled(get_args(kind)[0])]
    if kind in (bool, str):
        return "open" if kind is str else True
    assert kind in (int, float) or int in get_args(kind), kind
    return next(_numbers) + (0.5 if kind is float else 0)


def filled_records() -> dict[str, Any]:
    """Return filled statistics by the name of the method of an engine that returns such."""
    statistics = filled(Statistics)
    statistics.groups[ATTENTION] = statistics.groups.pop("a")
    return {
        "statistics": statistics,
        "cache_statistics": statistics,
        "device_blocks_by_salt": filled(dict[str, int]),
    }


def engine_with(records: dict[str, Any]) -> Any:
    """Return an object that shows these statistics as an engine does, and has a quota.

    It has nothing else: metrics and pages need only the public statistics of an engine.
    """
    answers = {name: lambda value=value: value for name, value in records.items()}
    by_salt = answers.pop("device_blocks_by_salt")
    return SimpleNamespace(
        config=CacheConfig(device_blocks=8, salt_quota_blocks=8),
        health=lambda: SimpleNamespace(failure=""),
        asleep=frozenset(),
        inspect=SimpleNamespace(
            device_blocks_by_salt=by_salt, retained_blocks_by_salt=lambda: dict(by_salt())
        ),
        **answers,
    )
