"""Sleep: a tier's memory goes to somebody else, such as a trainer, and comes back later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, get_args

from aiokv import checks
from aiokv.engine.control import Control
from aiokv.errors import LayoutError, UsageError
from aiokv.types import Tier
from aiokv.worker.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.config import CacheConfig
    from aiokv.ranks.group import RankGroup
    from aiokv.worker.device.base import Device

TIERS: Final[tuple[Tier, ...]] = get_args(Tier)


class Sleeping(Control):
    """Give memory away and take it again; nothing is granted while a tier is asleep."""

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | str | None = None,
        *,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(config, regions, device, ranks=ranks)
        self._asleep: frozenset[Tier] = frozenset()
        self._turn = asyncio.Lock()  # one sleep or wake_up at a time

    @property
    def asleep(self) -> frozenset[Tier]:
        """Tiers without memory."""
        return self._asleep

    async def sleep(self, tags: Iterable[Tier] = TIERS, *, timeout: float | None = None) -> None:
        """Forget what is cached in these tiers, and free their memory. Idempotent.

        Waits for leases and transfers first. ``"device"``: the engine keeps no reference to the
        tensors in ``regions``; what has a copy on the host can be hit there after ``wake_up``, and
        ``"write_back"`` saves what it can. ``"host"``: the arena is freed; preempted leases that
        keep their tables there count as out. From then on requests wait in line.

        Args:
            tags: ``"device"``, ``"host"``.
            timeout: seconds to wait for leases and transfers; 0.0 refuses at once when any is out.

        Raises:
            ControlTimeout: names the owners of the leases that were out, and all is as before; or
                the ranks that did not answer, and the tiers are asleep as ``asleep`` says.
            UsageError: no such tier.

        Cancellation: all is as before, or the tiers are asleep as ``asleep`` says; either way both
        verbs can be called again.
        """
        tiers = _checked(tags)
        self._check_open()
        async with self._deadline("asleep", timeout, lambda: self._keepers(tiers)), self._turn:
            falling = tiers - self._asleep
            if falling:
                await self._fall_asleep(falling)
            await self._controller.sleep(self._asleep)

    async def _fall_asleep(self, falling: frozenset[Tier]) -> None:
        """Up to its last await, all can be as before; from there on there is none."""
        await self._stand_still(lambda: not self._keepers(falling))
        try:
            if "device" in falling and "host" not in falling | self._asleep and self._saves_first:
                while self._transfers.make_clean(self._core.device_blocks):
                    await self.drain()
            self._check_open()
            if "device" in falling:
                self._core.forget_device()
            if "host" in falling:
                self._core.forget_host()
        except BaseException:
            self._admissions.resume()
            raise
        if self._asleep:
            self._admissions.resume()  # one pause is enough
        self._transfers.stopped = True
        self._asleep |= falling
        if "device" in falling:
            self.regions = self.regions.without_tensors()

    def _keepers(self, falling: frozenset[Tier]) -> list[str]:
        """Owners of leases that hold blocks which would go."""
        keepers = self._holders()
        if "host" in falling or self.config.state_slots or self.config.windows:
            # A swapped lease has its state and its windows on the device still.
            keepers += self._owner_names(self._core.is_swapped)
        return keepers

    async def wake_up(
        self,
        tags: Iterable[Tier] = TIERS,
        *,
        regions: Regions | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take memory again; when no tier is asleep any more, requests are granted. Idempotent.

        A cuda device pins host memory in the background; requests need not wait for that.

        Args:
            tags: tiers that are awake stay as they are.
            regions: the tensors of the device tier; of any address, but of the layout before.
            timeout: seconds to wait for a ``sleep`` or ``wake_up`` that is under way.

        Raises:
            LayoutError: the tensors differ from those before, or are missing. Still asleep.
            ConfigError: no memory for the host tier. Still asleep.
            ControlTimeout: the other call did not end in time, or ranks, which it names, did not
                answer. Still asleep.

        Cancellation: still asleep.
        """
        tiers = _checked(tags)
        self._check_open()
        async with self._deadline("awake", timeout), self._turn:
            waking = tiers & self._asleep
            if not waking:
                return
            if "device" in waking and regions is not None:
                self._check_blocks(regions)
            await self._controller.wake_up(waking, regions)
            self._check_open()
            if "device" in waking and regions is not None:
                self.regions = regions
            self._asleep -= waking
            if not self._asleep:
                self._transfers.stopped = False
                self._admissions.resume()

    def _check_blocks(self, regions: Regions) -> None:
        if not isinstance(regions, Regions):
            raise UsageError(f"regions is {regions!r}; it must be a Regions or None")
        blocks = regions.num_blocks
        if blocks is not None and blocks < self._core.device_blocks:
            raise LayoutError(
                f"the regions hold {blocks} blocks, fewer than the {self._core.device_blocks} of "
                "before",
                hint="resize the engine before it wakes up",
            )


def _checked(tags: Iterable[Tier]) -> frozenset[Tier]:
    names = checks.sequence("tags", tags)
    for name in names:
        checks.choice("tier", name, TIERS)
    return frozenset(names)
