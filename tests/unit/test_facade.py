"""The shape of CacheEngine: a facade over parts that exist from the constructor on."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Lease
from aiokv.base.checks import Unique
from aiokv.engine import engine as module
from aiokv.scheduler.scheduler import CacheScheduler

PARTS = ("aiokv.engine.", "aiokv.scheduler.")
MAX_STATEMENTS = 5


def test_engine_has_no_base_class_with_behaviour():
    assert CacheEngine.__mro__ == (CacheEngine, Unique, object)
    assert CacheEngine.__final__  # type: ignore[attr-defined]


def public_functions(cls: type) -> dict[str, Any]:
    """Return methods and getters of properties by name."""
    found = {}
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function) and not name.startswith("_"):
            found[name] = function
    return found


@pytest.mark.parametrize("cls", [CacheEngine, Lease, CacheScheduler])
def test_each_public_method_is_documented(cls: type):
    functions = public_functions(cls)
    assert len(functions) > 15
    assert [name for name, function in functions.items() if not function.__doc__] == []


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of simple and compound statements, without the docstring."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return len(nodes) - 1 - (ast.get_docstring(function) is not None)


def test_each_method_of_the_engine_is_short():
    (cls,) = (
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == "CacheEngine"
    )
    methods = [
        node
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__"
    ]
    assert len(methods) > 30
    lengths = {method.name: statements(method) for method in methods}
    assert {name: n for name, n in lengths.items() if n > MAX_STATEMENTS} == {}


def attributes(part: object, seen: dict[int, object] | None = None) -> dict[str, set[str]]:
    """Return the attribute names of an object and of all parts that it references, by class."""
    seen = {} if seen is None else seen
    seen[id(part)] = part
    cls = type(part)
    values = dict(getattr(part, "__dict__", {}))
    for base in cls.__mro__:
        for name in getattr(base, "__slots__", ()):
            if name != "__weakref__" and hasattr(part, name):
                values[name] = getattr(part, name)
    found = {cls.__qualname__: set(values)}
    for value in values.values():
        if type(value).__module__.startswith(PARTS) and id(value) not in seen:
            for name, names in attributes(value, seen).items():
                found[name] = found.get(name, set()) | names
    return found


def test_attributes_of_parts_are_found():
    scheduler = CacheScheduler(CacheConfig(device_blocks=8))
    found = attributes(scheduler)
    assert {"CacheReader", "Gate", "SaltQuota", "Outbox"} <= set(found)
    assert {"closed"} < found["Gate"]
    scheduler.read.later = 1  # type: ignore[attr-defined]
    assert attributes(scheduler)["CacheReader"] - found["CacheReader"] == {"later"}


@pytest.mark.asyncio
async def test_all_attributes_of_all_parts_exist_after_the_constructor():
    engine = CacheEngine(CacheConfig(device_blocks=8, host_blocks=8, block_tokens=4))
    before = attributes(engine)
    assert {"CacheEngine", "CacheScheduler", "Dispatcher", "Lifetime", "Leases"} <= set(before)
    tokens = np.arange(9, dtype=np.int32)
    async with engine:
        async with engine.match(tokens) as lease:
            await lease.allocate(9)
            lease.commit(9)
        pin = await engine.pin(tokens)
        engine.step()
        engine.pause()
        engine.resume()
        pin.release()
        await engine.drain()
        during = attributes(engine)
    after = attributes(engine)
    for name, names in before.items():
        assert during[name] - names == set(), name
        assert after[name] - names == set(), name


def test_an_engine_that_is_not_entered_can_be_read():
    engine = CacheEngine(CacheConfig(device_blocks=8, host_blocks=4))
    dump = engine.inspect.dump()
    assert (dump["leases"], dump["pins"], dump["open_step"]) == ([], 0, 0)
    assert engine.statistics().worker.held == 0
    assert engine.statistics().poller is not None
    assert engine.statistics().attention.device.free == 8
    assert engine.open_step == 1
    assert engine.asleep == frozenset()
    assert engine.check_invariants() == []
    assert engine.regions.num_layers == 0
