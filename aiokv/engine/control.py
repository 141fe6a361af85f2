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
        """End one ``pause``, or one ``quiesce`` that has returned.

        Nothing is granted while a tier is asleep, inside ``updating_weights``, or
        while a ``quiesce`` waits.

        Raises:
            UsageError: there is none. Nothing changed.
        """
        self._check_open()
        self._admissions.resume()

    async def reset(self, timeout: float | None = None) -> None:
        """Forget everything that is cached; live leases keep their blocks but publish no more.

        Pins are released. Returns when all transfers that were in flight have ended.

        Raises:
            ControlTimeout: some have not ended in time; the cache is empty nevertheless.

        Cancellation: the cache is empty nevertheless; transfers end in the background.
        """
        self._check_open()
        timeout = checks.timeout(timeout)
        self._forget_cached("the cache was reset")
        self._waiting.pump()
        async with self._deadline("reset", timeout):
            await self._controller.settle()

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight, backups of what was committed included.

        Raises:
            ControlTimeout: something is; nothing changed.

        Cancellation: nothing changed.
        """
        self._check_open()
        async with self._deadline("drain", timeout):
            while self._transfers.send_backups():  # again: ended onloads publish, too
                await self._controller.drain()
            await self._controller.drain()

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until nothing uses the blocks; ``resume`` ends it.

        Waits until no lease is held, no transfer is in flight, and every step that used blocks is
        closed and has finished on the device.

        Raises:
            ControlTimeout: names the owners of the leases still held, or the step; the engine is
                not paused any more.

        Cancellation: the engine is not paused any more.
        """
        async with self._deadline("quiesce", timeout):
            await self._stand_still(lambda: not self._core.granted_leases)
        self._admissions.hand_over()

    async def _stand_still(self, at_rest: Callable[[], bool]) -> None:
        """Hold admission; then wait until ``at_rest()``, and no step or transfer is in flight.

        Cancellation: admission is not held any more.
        """
        self._check_open()
        self._admissions.hold()
        try:
            while True:
                await self._wait_until(lambda: at_rest() and self._steps.all_finished)
                await self.drain()
                if at_rest() and self._steps.all_finished:
                    return
        except BaseException:
            self._admissions.let_go()
            raise

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on leases and steps.

        Raises:
            ClosedError, BrokenEngineError: the engine was closed or broke.

        Cancellation: nothing changed.
        """
        await self._leases_changed.wait_for(
            lambda: not self._thread or self._broken is not None or condition(), None
        )
        self._check_open()

    @asynccontextmanager
    async def _deadline(
        self,
        verb: str,
        timeout: float | None,
        keepers: Callable[[], list[str]] | None = None,
    ) -> AsyncIterator[None]:
        """Raises:
        ControlTimeout: the block of ``verb`` took too long; the error names ``keepers()``.
        UsageError: ``timeout`` is not a number.
        """
        timeout = checks.timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            if isinstance(error, ControlTimeout):
                raise
            owners = (keepers or self._holders)()
            raise self._timeout(f"{verb} timed out after {timeout} s", owners) from None

    def _timeout(self, what: str, owners: list[str]) -> ControlTimeout:
        """Return an error that names the held leases, the unfinished step and silent ranks."""
        ranks = self._controller.silent_ranks
        step = self._open_step.explain() or self._steps.explain()
        leases = "no leases are held"
        if owners:
            leases = f"leases still held by: {', '.join(owners)}"
        causes = [what, leases, step]
        if ranks:
            causes.append(f"ranks that did not answer: {ranks}")
        return ControlTimeout(
            "; ".join(cause for cause in causes if cause), owners=tuple(owners), ranks=tuple(ranks)
        )

    def _holders(self) -> list[str]:
        """Return owners of leases that hold device blocks; waiting leases hold none."""
        return self._owner_names(self._core.is_granted)

    @asynccontextmanager
    async def updating_weights(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Grant nothing inside the block, and forget at its end all that is cached.

        New weights make all KV wrong. Open leases keep what they hold, and publish no more. Pins
        are released.

        Raises:
            ControlTimeout: transfers did not end in time; nothing changed.

        Cancellation: before the block is entered, nothing changed.
        """
        self._check_open()
        self._admissions.hold()
        try:
            async with self._deadline("updating_weights", timeout):
                await self._controller.settle()
            try:
                yield
            finally:
                self._forget_cached("the weights were updated")
        finally:
            self._admissions.let_go()

    def _forget_cached(self, reason: str) -> None:
        """Make sure that nothing that was computed before can be hit."""
        self._core.reset()
        self._pins.release_all(reason)
        self._pending.wake_all()

    async def resize(self, device_blocks: int, timeout: float | None = None) -> None:
        """Change the device tier's capacity; the regions must hold as many blocks.

        Shrinking waits for leases and copies on blocks beyond the new size. What is cached there,
        and what is cached on the device behind it, stays in host memory if it has a copy there, and
        is dropped otherwise.

        Raises:
            UsageError: larger than the regions, or not above ``reserve_blocks``.
            ControlTimeout: leases kept blocks beyond the new size; nothing changed.

        Cancellation: the size is the old one, or the new one.
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
        try:
            async with asyncio.timeout(timeout):
                # Resize as soon as the last block becomes free, before a waiting lease can take it.
                await self._wait_until(lambda: self._resized(device_blocks))
        except TimeoutError:
            if self._core.device_blocks == device_blocks:
                return  # the last block became free just before the timeout
            raise self._timeout(
                f"resize timed out after {timeout} s; blocks from {device_blocks} on are in use",
                self._holders(),
            ) from None
        finally:
            self._waiting.pump()

    def _resized(self, device_blocks: int) -> bool:
        try:
            self._core.resize_device(device_blocks)
        except UsageError:
            return False
        return True
