"""Sleep: release the memory of a tier, e.g. to a trainer, and reallocate it later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, get_args

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.base.types import Tier
from aiokv.engine.lifecycle import SAVE_SECONDS
from aiokv.errors import LayoutError, UsageError
from aiokv.layout.regions import Regions
from aiokv.stores.guard_statistics import unavailable_stores

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.engine.control import Control
    from aiokv.engine.parts import Parts

log = Log(__name__)

TIERS: Final[tuple[Tier, ...]] = get_args(Tier)


class Sleep:
    """Frees and reallocates the memory of tiers; nothing is granted while a tier is asleep.

    Attributes:
        asleep: tiers whose memory is freed.
        regions: the device tensors; without tensors while the device tier is asleep.
    """

    def __init__(self, parts: Parts, regions: Regions, control: Control) -> None:
        config = parts.config
        self.asleep: frozenset[Tier] = frozenset()
        self.regions = regions
        self._has_sides = bool(config.state_slots or config.windows)
        self._saves_first = config.host_blocks > 0 and config.write_policy != "none"
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._read = parts.scheduler.read
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._control = control
        self._turn = asyncio.Lock()  # one sleep or wake_up at a time

    async def sleep(self, tags: Iterable[Tier], timeout: float | None) -> None:
        """See ``CacheEngine.sleep``."""
        tiers = _checked(tags)
        self._lifetime.check_open()
        async with (
            self._control.deadline(
                "sleep", timeout, lambda: self._keepers(tiers), lambda: self._changed(tiers)
            ),
            self._turn,
        ):
            falling = tiers - self.asleep
            if falling:
                await self._fall_asleep(falling)
            await self._worker.sleep(self.asleep)
            if falling:
                log.info("engine.slept", tiers=sorted(falling))

    def _changed(self, tiers: frozenset[Tier]) -> str:
        """Return which of the tiers are asleep, for the error of a timeout; "" for none."""
        asleep = sorted(tiers & self.asleep)
        if not asleep:
            return ""
        return f"these tiers are asleep already: {asleep}; call sleep again, or wake_up"

    async def _fall_asleep(self, falling: frozenset[Tier]) -> None:
        """Free the memory of tiers. An error up to the last await undoes all changes.

        Args:
            falling: tiers that are awake.
        """
        apply, scheduler = self._dispatcher.apply, self._scheduler
        await self._control.stand_still(lambda: not self._num_keepers(falling))
        try:
            if "device" in falling and "host" not in falling | self.asleep and self._saves_first:
                while apply(scheduler.save(self._read.device_blocks)):
                    await self._control.drain(None)
            if "host" in falling and scheduler.has_stores:
                await self._save_to_stores()
            self._lifetime.check_open()
            apply(scheduler.sleep(falling))
        except BaseException:
            self._control.let_go()
            raise
        if self.asleep:
            self._control.let_go()  # one hold suffices
        self.asleep |= falling
        if "device" in falling:
            self.regions = self.regions.without_tensors()

    async def _save_to_stores(self) -> None:
        """Save the queued blocks; begin no more saves after ``SAVE_SECONDS``."""
        loop, collect = self._lifetime.loop, self._scheduler.store_saver.collect
        until = loop.time() + SAVE_SECONDS
        while self._dispatcher.apply(collect(by_holder=True)):
            await self._worker.plans.drain()
            if loop.time() >= until:
                log.warning("engine.not_saved", waited_seconds=SAVE_SECONDS)
                return

    def _num_keepers(self, falling: frozenset[Tier]) -> int:
        """Return the number of leases that ``_keepers`` names, in constant time."""
        swapped_too = "host" in falling or self._has_sides
        return self._read.granted_leases + (self._read.swapped_leases if swapped_too else 0)

    def _keepers(self, falling: frozenset[Tier]) -> list[str]:
        """Return the owners of leases that hold blocks of the tiers; sleep waits for these leases.

        Args:
            falling: tiers to put to sleep.
        """
        keepers = self._read.holders()
        if "host" in falling or self._has_sides:
            # Swapped leases still have their recurrent state and windows on the device.
            keepers += self._read.swapped()
        return keepers

    async def wake_up(
        self, tags: Iterable[Tier], regions: Regions | None, timeout: float | None
    ) -> None:
        """See ``CacheEngine.wake_up``."""
        tiers = _checked(tags)
        self._lifetime.check_open()
        async with (
            self._control.deadline("wake_up", timeout, detail=self._unavailable_stores),
            self._turn,
        ):
            waking = tiers & self.asleep
            if regions is not None:
                self._check_regions(regions, waking)
            if not waking:
                return
            await self._worker.wake_up(waking, regions)
            self._lifetime.check_open()
            if "device" in waking and regions is not None:
                self.regions = regions
            self.asleep -= waking
            if not self.asleep:
                self._dispatcher.apply(self._scheduler.wake_up())
                self._control.let_go()
            log.info("engine.woke_up", tiers=sorted(waking), still_asleep=sorted(self.asleep))

    def _unavailable_stores(self) -> str:
        """Return which stores are unavailable, for the error of a timeout; "" for none."""
        urls = unavailable_stores(self._worker.inspect().stores)
        return f"these stores are unavailable: {urls}" if urls else ""

    def _check_regions(self, regions: Regions, waking: frozenset[Tier]) -> None:
        """Check the tensors for a ``wake_up`` of the tiers ``waking``.

        Raises:
            UsageError: ``regions`` is not a ``Regions``, or has tensors that would not be used.
            LayoutError: the tensors hold too few blocks.
        """
        if not isinstance(regions, Regions):
            raise UsageError(f"regions is {regions!r}; it must be a Regions or None")
        if "device" not in waking:
            if _addresses(regions) != _addresses(self.regions):
                state = "is not in tags" if "device" in self.asleep else "is awake"
                raise UsageError(
                    f"wake_up: regions has new tensors, but the device tier {state}",
                    hint="pass regions to the call that wakes up the 'device' tier",
                )
            return
        blocks = regions.num_blocks
        if blocks is not None and blocks < self._read.device_blocks:
            raise LayoutError(
                f"wake_up: the tensors of regions hold {blocks} blocks; they must hold at least "
                f"the {self._read.device_blocks} blocks of the device tier",
                hint="pass larger tensors, or call resize first",
            )


def _addresses(regions: Regions) -> list[int]:
    return [piece.pointer for piece in regions.all_pieces()]


def _checked(tags: Iterable[Tier]) -> frozenset[Tier]:
    names = checks.sequence("tags", tags)
    for name in names:
        checks.choice("tier", name, TIERS)
    return frozenset(names)
