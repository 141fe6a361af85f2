"""Drive a loop without sleeping."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


PATIENCE_SECONDS: Final = 60.0  # for events that are due soon, on a busy machine


async def spin(passes: int = 1) -> None:
    """Let the loop make ``passes`` passes."""
    for _ in range(passes):
        await asyncio.sleep(0)


async def run_until_idle(ready: Callable[[], bool], passes: int = 100_000) -> None:
    """Make loop passes until ``ready()``; for work that native threads finish.

    Raises:
        TimeoutError: ``ready`` was False for ``passes`` passes and ``PATIENCE_SECONDS``.
    """
    patient_until = time.monotonic() + PATIENCE_SECONDS
    left = passes
    while left > 0 or time.monotonic() < patient_until:
        if ready():
            return
        left -= 1
        await asyncio.sleep(0)
    raise TimeoutError(f"not ready after {passes - left} passes of the loop")
