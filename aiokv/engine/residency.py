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
        if tier == "host":
            return self._core.evict_host(num_blocks)
        evicted = self._core.evict_device(num_blocks)
        try:
            while evicted < num_blocks and (saving := self._save_oldest(num_blocks - evicted)):
                await self._transfers.ended(saving)
                evicted += self._core.evict_device(num_blocks - evicted)
        finally:
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
            ttl_seconds: how long to keep there what a match of the prompt would hit, at most until
                a lease has hit all of it; other prefetches and pins do not count. 0 keeps nothing,
                ``math.inf`` sets no time limit.

        Returns:
            What is on the device at the end, as ``device_tokens``.

        Raises:
            UsageError: ``ttl_seconds`` is negative or not a number; nothing changed.
            TransferError: a copy failed; the blocks before it are on the device.

        Cancellation: copies that have begun end as cached blocks.
        """
        ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        lease = self.match(tokens, salt=salt, adapter=adapter, items=items, owner="prefetch")
        self._core.hold_only(lease._live_id())
        found = lease.hit
        pin = await self._bring(lease, until_used=ttl_seconds > 0)
        if pin is None:
            return Hit(found.device_tokens, 0)
        if ttl_seconds <= 0:
            pin.end("the prefetch has ended")
        elif not pin.released:
            pin.expire_after(self._loop, ttl_seconds)
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

        All full blocks of the prompt are kept, the last one included. ``reset`` and new weights
        release the pin, since its blocks cannot be hit any more.

        Args:
            tokens: the prompt, as for ``match``; so are ``salt``, ``adapter`` and ``items``.
            ttl_seconds: the pin is released after this time; None for no limit.

        Returns:
            The pin. When nothing is cached, or a reset came between, it has 0 tokens and is
            released already.

        Raises:
            UsageError: ``ttl_seconds`` is negative or not a number; nothing changed.
            WouldBlock: no room for the blocks that are not on the device.
            TransferError: a copy failed; nothing is pinned.

        Cancellation: nothing is pinned.
        """
        if ttl_seconds is not None:
            ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        lease = self.match(tokens, salt=salt, adapter=adapter, items=items, owner="pin")
        self._core.hold_only(lease._live_id(), whole=True)
        found = lease.hit
        pin = await self._bring(lease, until_used=False)
        if pin is None:
            if found.total:
                raise WouldBlock(
                    f"no room to pin {found.total} tokens: {found}",
                    hint="requests in line go first; raise CacheConfig.device_blocks",
                )
            return Pin(lease, 0, release_reason="nothing was cached")
        if ttl_seconds is not None and not pin.released:
            pin.expire_after(self._loop, ttl_seconds)
        return pin

    async def _bring(self, lease: Lease, *, until_used: bool) -> Pin | None:
        """Pin the whole hit; None, with the lease released, when that is nothing or has no room."""
        hit = lease.hit
        lease_id = lease._live_id()
        try:
            if not hit.total or not self._try_allocate(lease, hit.total, Priority.PREFETCH):
                lease.release()
                return None
            if until_used:
                self._core.await_use(lease_id)
            await lease.layers.wait_all()
            while onloads := self._core.onloads(lease_id):  # until a match finds the blocks
                await self._transfers.ended(onloads[0])
            self._check_open()
        except RequestTooLarge:
            lease.release()
            return None
        except BaseException:
            lease.release()
            raise
        if not self._core.is_current(lease_id):
            lease.release()
            return Pin(lease, 0, release_reason="its blocks are not cached any more")
        pin = self._pins.add(lease, lease.cached_tokens, until_used=until_used)
        if until_used and not self._core.awaits_use(lease_id):
            pin.end("a lease used it")
        return pin
