"""Shutdown of an engine whose copies a test completes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from aiokv.testing import ManualDevice, spin

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aiokv import CacheEngine
    from aiokv.worker.device.base import Device

T = TypeVar("T")


async def complete_during(verb: Awaitable[T], device: Device | None) -> T:
    """Await ``verb`` while a manual device completes all copies, and those that follow."""
    task = asyncio.ensure_future(verb)
    while not task.done():
        if isinstance(device, ManualDevice):
            device.complete_all()
        await spin()
    return await task


async def close(engine: CacheEngine, device: Device | None, error: object) -> None:
    """Leave an engine; after a test without ``error``, check its invariants first."""
    assert error is not None or engine.check_invariants() == []
    await complete_during(engine.aclose(None if error is None else 0.0), device)
