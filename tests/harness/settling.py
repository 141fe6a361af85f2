"""Completion of all transfers of an engine with a manual device."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv import CacheEngine
    from aiokv.testing import ManualDevice


async def settle(engine: CacheEngine, device: ManualDevice) -> None:
    """Complete all transfers, backups included."""
    draining = asyncio.ensure_future(engine.drain())
    while not draining.done():
        device.complete_all()
        await asyncio.sleep(0)
    await draining
