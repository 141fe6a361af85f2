"""Drive a loop without sleeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def spin(passes: int = 1) -> None:
    """Let the loop make that many passes."""
    for _ in range(passes):
        await asyncio.sleep(0)


async def run_until_idle(ready: Callable[[], bool], passes: int = 100_000) -> None:
    """Make loop passes until ``ready()``; for work that native threads finish.

    Raises:
        TimeoutError: not within that many passes.
    """
    for _ in range(passes):
        if ready():
            return
        await asyncio.sleep(0)
    raise TimeoutError(f"not ready after {passes} passes of the loop")
