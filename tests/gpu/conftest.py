"""GPU tests: skipped, with the reason, where there is no GPU. `make test-gpu` runs them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def _missing() -> str:
    """Return the reason why GPU tests cannot run here; empty when they can."""
    from aiokv import _native

    if not hasattr(_native, "cuda"):
        return "aiokv was built without CUDA"
    try:
        import cupy
    except Exception as error:  # a broken installation raises anything
        return f"CuPy: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return "" if count else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    ours = [item for item in items if str(item.path).startswith(here)]
    reason = _missing() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Replace the check of the suite: descriptors are not counted, since the driver opens some."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
