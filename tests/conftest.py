"""Fixtures of all tests: async tests run on asyncio and uvloop and leave no task or thread."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import uvloop

import tests.harness.searches  # noqa: F401  (loads the profile of Hypothesis for all tests)
from aiokv.testing import clocked_loop
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.leftovers import open_descriptors, running_threads

# Their asserts show values also where other folders import them.
pytest.register_assert_rewrite("tests.stores.conformance", "tests.stores.failures")

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_loops: list[asyncio.AbstractEventLoop] = []
_loop_errors: list[dict[str, Any]] = []
_stderr = 2


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    _stderr = os.dup(2)  # pytest captures the output of tests on descriptor 2 itself
    # A shell starts background jobs with ignored signals, which programs of tests would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    uvloop.run(asyncio.sleep(0))  # libuv opens a pipe for the whole process with its first loop


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze imported objects: each test collects garbage twice and need not visit them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the interpreter free frozen objects at its end: nanobind reports all others."""
    gc.unfreeze()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, LoopFactory]:
    if item.get_closest_marker("clock") is not None:
        factories = {
            "asyncio": _watched(clocked_loop(asyncio.SelectorEventLoop)),
            "uvloop": _watched(clocked_loop(uvloop.Loop)),
        }
    else:
        factories = {
            "asyncio": _watched(asyncio.new_event_loop),
            "uvloop": _watched(uvloop.new_event_loop),
        }
    only = item.get_closest_marker("loop")
    return factories if only is None else {only.args[0]: factories[only.args[0]]}


def _watched(factory: LoopFactory) -> LoopFactory:
    def make() -> asyncio.AbstractEventLoop:
        loop = factory()
        loop.set_exception_handler(lambda _, context: _loop_errors.append(context))
        _loops.append(loop)
        return loop

    return make


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is terminated prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = f"\nFAILED {report.nodeid} ({report.when}): {crash.message if crash else ''}\n"
        os.write(_stderr, text.encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the process when the test waits in native code far beyond its limit, with all stacks.

    pytest-timeout raises in Python code only. After each test, freeze what it has left: lazily
    imported modules and reports of pytest.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(1.5 * limit, exit=True, file=_stderr)
    try:
        result = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """After each test: no task is left, and the loop's exception handler was not called."""
    _loop_errors.clear()
    result = yield
    gc.collect()  # "exception was never retrieved" comes with the last reference
    tasks = [task for loop in _loops if not loop.is_closed() for task in asyncio.all_tasks(loop)]
    assert not tasks, f"tasks left: {tasks}"
    assert not _loop_errors, f"the loop's exception handler got: {_loop_errors}"
    return result


@pytest.fixture
def loop_errors() -> list[dict[str, Any]]:
    """Contexts of the loop's exception handler; a test that provokes some clears the list."""
    return _loop_errors


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Check that the test closed the threads and descriptors that it opened."""
    before = running_threads(), open_descriptors()
    logger = logging.getLogger("aiokv")
    log = list(logger.handlers), logger.level, logger.propagate
    yield
    # The command line configures logging for its process.
    structlog.reset_defaults()
    logger.handlers[:], logger.propagate = log[0], log[2]
    logger.setLevel(log[1])
    _loops.clear()
    gc.collect()
    # A thread whose work has ended may not have been removed from the list of threads yet.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (threads := running_threads() - before[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads, f"threads left: {threads}"
    descriptors = open_descriptors() - before[1]
    assert not descriptors, f"descriptors left: {descriptors}"
