"""The verbs that move cached blocks between the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from aiokv import checks
from aiokv.engine.batches import Batches
from aiokv.engine.pins import Pin
from aiokv.errors import RequestTooLarge, WouldBlock
from aiokv.plan import Priority
from aiokv.types import Hit, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.lease import Lease
    from aiokv.types import Item, TokenIds


class Residency(Batches):
    """Evict, prefetch and pin."""

    async def evict(self, num_blocks: int, tier: Tier = "device") -> int:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        Blocks with a host copy only lose the device copy; under ``"write_back"`` the others are
        saved first, as far as the host has room.

        Returns:
            How many were evicted; fewer when the rest is leased or being copied.

        Cancellation: copies that have begun end as host copies.
        """
        self._check_open()
        num_blocks = checks.integer("num_blocks", num_blocks, minimum=0, maximum=checks.MAX_INT32)
        checks.choice("tier", tier, get_args(Tier))
        evicted = 0
        if tier == "host":
            evicted = self._core.evict_host(num_blocks)
        else:
            evicted = self._core.evict_device(num_blocks)
            while evicted < num_blocks and (saving := self._save_oldest(num_blocks - evicted)):
                await self._transfers.ended(saving)
                evicted += self._core.evict_device(num_blocks - evicted)
        self._waiting.pump()
        return evicted

    def _save_oldest(self, num_blocks: int) -> int:
        """Begin to save what ``num_blocks`` evictions would lose; 0 if they would lose nothing."""
        if not self._saves_first:
            return 0
        return self._transfers.make_clean(self._core.statistics().device_free + num_blocks)

    async def prefetch(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        ttl_seconds: float = 0.0,
    ) -> Hit:
        """Bring what is cached in host memory onto the device; does not wait for capacity.

        Args:
            tokens: the prompt, as for ``match``; so are ``salt``, ``adapter`` and ``items``.
            ttl_seconds: keep it there until a lease uses it, at most so long.

        Returns:
            What is on the device at the end, as ``device_tokens``.

        Raises:
            UsageError: ``ttl_seconds`` is no number or negative; nothing changed.
            TransferError: a copy failed; the blocks before it are there.

        Cancellation: copies that have begun end as cached blocks.
        """
        ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        lease = self.match(tokens, salt=salt, adapter=adapter, items=items, owner="prefetch")
        found = lease.hit
        pin = await self._bring(lease, until_used=True)
        if pin is None:
            return Hit(found.device_tokens, 0)
        if ttl_seconds > 0:
            pin.expire_after(self._loop, ttl_seconds)
        else:
            pin.release()
        return Hit(pin.tokens, 0)

    async def pin(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        ttl_seconds: float | None = None,
    ) -> Pin:
        """Keep what is cached of a prompt on the device; host blocks are onloaded first.

        Args:
            tokens: the prompt, as for ``match``; so are ``salt``, ``adapter`` and ``items``.
            ttl_seconds: release by itself after so long; None for never.

        Raises:
            UsageError: ``ttl_seconds`` is no number or negative; nothing changed.
            WouldBlock: no room for the blocks that are not on the device.
            TransferError: a copy failed; nothing is pinned.

        Cancellation: nothing is pinned.
        """
        if ttl_seconds is not None:
            ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        lease = self.match(tokens, salt=salt, adapter=adapter, items=items, owner="pin")
        found = lease.hit
        pin = await self._bring(lease, until_used=False)
        if pin is None:
            if found.total:
                raise WouldBlock(f"no room to pin {found.total} tokens: {found}")
            return Pin(lease, 0)
        if ttl_seconds is not None:
            pin.expire_after(self._loop, ttl_seconds)
        return pin

    async def _bring(self, lease: Lease, *, until_used: bool) -> Pin | None:
        """Pin the whole hit; None, with the lease released, when that is nothing or has no room."""
        hit = lease.hit
        self._core.hold_only(lease._live_id())
        try:
            if not hit.total or not self._try_allocate(lease, hit.total, Priority.PREFETCH):
                lease.release()
                return None
            await lease.layers.wait_all()
            self._check_open()
        except RequestTooLarge:
            lease.release()
            return None
        except BaseException:
            lease.release()
            raise
        return self._pins.add(lease, lease.cached_tokens, until_used=until_used)
