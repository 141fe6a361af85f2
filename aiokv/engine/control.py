"""The control plane: pausing, and changes that need the cache to stand still."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokv.engine.residency import Residency
from aiokv.errors import (
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Control(Residency):
    """Pause, quiesce, new weights, resize."""

    def pause(self) -> None:
        """Grant nothing until ``resume``; requests wait in line. Counts: pair the calls."""
        self._check_open()
        self._admissions.pause()

    def resume(self) -> None:
        """Undo one ``pause``.

        Raises:
            UsageError: there was none.
        """
        self._check_open()
        self._admissions.resume()

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until no lease is out and nothing is in flight; ``resume`` ends it.

        Raises:
            TimeoutError: names the owners of the leases still out; not paused any more.

        Cancellation: not paused any more.
        """
        self.pause()
        try:
            async with asyncio.timeout(timeout):
                await self._leases_changed.wait_for(self._only_idle_leases, None)
                await self.drain()
        except BaseException as error:
            self._admissions.resume()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"not quiet within {timeout} s; {self._what_is_out()}") from None
            raise

    def _what_is_out(self) -> str:
        unclosed = self._open_step.explain()
        return f"leases out: {self._owner_names()}" + (f"; {unclosed}" if unclosed else "")

    def _only_idle_leases(self) -> bool:
        """Those in line hold nothing."""
        return not any(self._core.is_granted(lease_id) for lease_id in self._owners)

    @asynccontextmanager
    async def updating_weights(self, timeout: float | None = None) -> AsyncIterator[None]:
        """New weights make all KV wrong: nothing is granted inside, nothing is cached after.

        Live leases may go on with what they hold; they publish no more.

        Raises:
            TimeoutError: transfers did not end in time; nothing changed.
        """
        self.pause()
        try:
            try:
                async with asyncio.timeout(timeout):
                    await self._controller.settle()
            except TimeoutError:
                raise TimeoutError(
                    f"transfers did not end within {timeout} s; {self._what_is_out()}"
                ) from None
            try:
                yield
            finally:
                self._core.reset()
                self._pending.wake_all()
        finally:
            self._admissions.resume()

    async def resize(self, device_blocks: int, timeout: float | None = None) -> None:
        """Change the device tier's capacity; the regions must hold as many blocks.

        Shrinking waits for leases and copies on blocks beyond the new size. What is cached there,
        and what is cached on the device behind it, stays in host memory if it has a copy there, and
        is dropped otherwise.

        Raises:
            UsageError: larger than the regions, or not above ``reserve_blocks``.
            TimeoutError: leases kept blocks beyond the new size; nothing changed.
        """
        self._check_open()
        blocks = self.regions.num_blocks
        if blocks is not None and device_blocks > blocks:
            raise UsageError(f"cannot resize to {device_blocks} blocks: the regions hold {blocks}")
        if device_blocks <= self.config.reserve_blocks:
            raise UsageError(
                f"cannot resize to {device_blocks} blocks: reserve_blocks is "
                f"{self.config.reserve_blocks}"
            )
        if not await self._leases_changed.wait_for(lambda: self._resized(device_blocks), timeout):
            raise TimeoutError(
                f"blocks beyond {device_blocks} are still in use after {timeout} s; "
                f"{self._what_is_out()}"
            )
        self._waiting.pump()

    def _resized(self, device_blocks: int) -> bool:
        try:
            self._core.resize_device(device_blocks)
        except UsageError:
            return False
        return True
