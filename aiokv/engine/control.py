"""The control plane: pausing, and changes that need the cache to stand still."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokv import checks
from aiokv.engine.residency import Residency
from aiokv.errors import ControlTimeout, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Control(Residency):
    """Reset, drain, pause, quiesce, new weights, resize."""

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

    async def reset(self, timeout: float | None = None) -> None:
        """Forget everything that is cached; live leases keep their blocks but publish no more.

        Returns when no transfer that was under way is left.

        Raises:
            ControlTimeout: some is; the cache is empty all the same.

        Cancellation: the cache is empty all the same; transfers end in the background.
        """
        self._check_open()
        timeout = checks.timeout(timeout)
        self._core.reset()
        self._pending.wake_all()
        self._waiting.pump()
        async with self._deadline("rid of the transfers of before", timeout):
            await self._controller.settle()

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight, backups of what was committed included.

        Raises:
            ControlTimeout: something is; nothing changed.

        Cancellation: nothing changed.
        """
        self._check_open()
        async with self._deadline("drained", timeout):
            while self._transfers.send_backups():  # again: ended onloads publish, too
                await self._controller.drain()
            await self._controller.drain()

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until no lease is out and nothing is in flight; ``resume`` ends it.

        Raises:
            ControlTimeout: names the owners of the leases still out; not paused any more.

        Cancellation: not paused any more.
        """
        async with self._deadline("quiet", timeout):
            await self._stand_still(lambda: not self._holders())

    async def _stand_still(self, at_rest: Callable[[], bool]) -> None:
        """Pause; then wait until ``at_rest()`` and nothing is in flight.

        Cancellation: not paused any more.
        """
        self.pause()
        try:
            await self._leases_changed.wait_for(at_rest, None)
            await self.drain()
        except BaseException:
            self._admissions.resume()
            raise

    @asynccontextmanager
    async def _deadline(
        self,
        state: str,
        timeout: float | None,
        keepers: Callable[[], list[str]] | None = None,
    ) -> AsyncIterator[None]:
        """Raises:
        ControlTimeout: the cache has not become ``state`` in time; it names ``keepers()``.
        UsageError: ``timeout`` is no number.
        """
        timeout = checks.timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            if isinstance(error, ControlTimeout):
                raise
            owners = (keepers or self._holders)()
            raise self._timeout(f"not {state} within {timeout} s", owners) from None

    def _timeout(self, what: str, owners: list[str]) -> ControlTimeout:
        """It names what was out, who was silent, and an open step that holds transfers up."""
        ranks = self._controller.silent_ranks
        causes = [what, f"leases out: {owners}", self._open_step.explain()]
        if ranks:
            causes.append(f"ranks that did not answer: {ranks}")
        return ControlTimeout(
            "; ".join(cause for cause in causes if cause), owners=tuple(owners), ranks=tuple(ranks)
        )

    def _holders(self) -> list[str]:
        """Owners of leases that hold device blocks; those in line hold nothing."""
        return self._owner_names(self._core.is_granted)

    @asynccontextmanager
    async def updating_weights(self, timeout: float | None = None) -> AsyncIterator[None]:
        """New weights make all KV wrong: nothing is granted inside, nothing is cached after.

        Live leases may go on with what they hold; they publish no more.

        Raises:
            ControlTimeout: transfers did not end in time; nothing changed.
        """
        self.pause()
        try:
            async with self._deadline("without transfers", timeout):
                await self._controller.settle()
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
            ControlTimeout: leases kept blocks beyond the new size; nothing changed.
        """
        self._check_open()
        device_blocks = checks.integer("device_blocks", device_blocks)
        timeout = checks.timeout(timeout)
        blocks = self._controller.device_blocks
        if device_blocks > blocks:
            raise UsageError(f"cannot resize to {device_blocks} blocks: the regions hold {blocks}")
        if device_blocks <= self.config.reserve_blocks:
            raise UsageError(
                f"cannot resize to {device_blocks} blocks: reserve_blocks is "
                f"{self.config.reserve_blocks}"
            )
        if not await self._leases_changed.wait_for(lambda: self._resized(device_blocks), timeout):
            raise self._timeout(
                f"blocks beyond {device_blocks} are still in use after {timeout} s", self._holders()
            )
        self._waiting.pump()

    def _resized(self, device_blocks: int) -> bool:
        try:
            self._core.resize_device(device_blocks)
        except UsageError:
            return False
        return True
