"""Sleep: release the memory of a tier, e.g. to a trainer, and reallocate it later."""

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

        Waits for leases, transfers and steps first, as ``quiesce`` does. ``"device"``: the engine
        keeps no reference to the tensors in ``regions``; what has a copy on the host can be hit
        there after ``wake_up``, and ``"write_back"`` saves what it can. ``"host"``: the arena is
        freed; preempted leases that keep their tables there are waited for, too. From then on
        requests wait in line.

        Args:
            tags: ``"device"``, ``"host"``.
            timeout: seconds to wait for leases and transfers; 0.0 raises at once if there are any.

        Raises:
            ControlTimeout: names the owners of the leases still held, and nothing changed; or names
                the ranks that did not answer, and ``asleep`` says which tiers are asleep.
            UsageError: no such tier.

        Cancellation: ``asleep`` says which tiers are asleep; both verbs can be called again.
        """
        tiers = _checked(tags)
        self._check_open()
        async with self._deadline("sleep", timeout, lambda: self._keepers(tiers)), self._turn:
            falling = tiers - self._asleep
            if falling:
                await self._fall_asleep(falling)
            await self._controller.sleep(self._asleep)

    async def _fall_asleep(self, falling: frozenset[Tier]) -> None:
        """Can be rolled back until the last await; does not suspend after it."""
        await self._stand_still(lambda: not self._num_keepers(falling))
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
            self._admissions.let_go()
            raise
        if self._asleep:
            self._admissions.let_go()  # one hold is enough
        self._transfers.stopped = True
        self._asleep |= falling
        if "device" in falling:
            self.regions = self.regions.without_tensors()

    def _num_keepers(self, falling: frozenset[Tier]) -> int:
        """Return how many leases ``_keepers`` names, in constant time."""
        swapped_too = "host" in falling or self.config.state_slots or self.config.windows
        return self._core.granted_leases + (self._core.swapped_leases if swapped_too else 0)

    def _keepers(self, falling: frozenset[Tier]) -> list[str]:
        """Return owners of leases that hold blocks of the tiers: sleep waits for them."""
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
        async with self._deadline("wake_up", timeout), self._turn:
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
                self._admissions.let_go()

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
