"""Pins and prefetches: copy cached prefixes to the device, and keep them there."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Final, get_args

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.base.plan import Priority
from aiokv.base.types import Hit, Tier, as_tokens
from aiokv.errors import RequestTooLarge, UsageError, WouldBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.types import Item, TokenIds
    from aiokv.engine.fetches import Fetches
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.leases import Leases
    from aiokv.engine.parts import Parts

# Most tokens that one pass of the loop matches and grants: the onload of so many takes 0.3 ms.
_PASS_TOKENS: Final = 100_000


class Pin(Unique):
    """Cached prefix that stays on the device until ``release()``, or for ``ttl_seconds``.

    A reset, an update of the weights, the loss of a rank, and closing the engine also release it.

    Attributes:
        tokens: number of pinned tokens: the cached full blocks of the prompt.
        release_reason: reason of the release; empty while the prefix is pinned.
    """

    def __init__(
        self,
        tokens: int,
        end: Callable[[str], object] = lambda reason: None,
        *,
        release_reason: str = "",
    ) -> None:
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = tokens
        self.release_reason = release_reason

    @property
    def released(self) -> bool:
        """True if the prefix is no longer pinned."""
        return bool(self.release_reason)

    def expire_after(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Release the pin after ``seconds``; never when they are infinite."""
        if seconds < math.inf:
            self._timer = loop.call_later(seconds, self._end, "ttl_seconds passed")

    def release(self) -> None:
        """Release the pin, so that its blocks can be evicted again. Idempotent.

        Raises:
            UsageError: the call is made outside the engine's loop. Nothing changed.
        """
        if not self.released:
            self._end("release() was called")

    def ended(self, reason: str) -> None:
        """Note that the engine has released the pin."""
        self.release_reason = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __repr__(self) -> str:
        state = f", released: {self.release_reason}" if self.released else ""
        return f"<Pin {self.tokens} tokens{state}>"


class Pins:
    """Pins of one engine, and the onloads of their prefixes."""

    def __init__(self, parts: Parts, leases: Leases, fetches: Fetches) -> None:
        config = parts.config
        self._external_device = config.external_device
        self._block_tokens = config.block_tokens
        self._leave_tokens = config.leave_tokens
        has_groups = config.state_slots > 0 or bool(config.windows)
        self._has_parts = not has_groups and config.salt_quota_blocks is None
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._transfers = parts.transfers
        self._observers = parts.observers
        self._leases = leases
        self._fetches = fetches
        self._pins: dict[int, tuple[Pin, LeaseRecord]] = {}  # by lease id
        parts.dispatcher.tell_unpinned(self._ended)

    async def prefetch(
        self,
        tokens: TokenIds,
        *,
        salt: str,
        adapter: str,
        items: Sequence[Item],
        ttl_seconds: float,
        timeout: float | None,
        tier: Tier,
        queued_tokens: int | None,
    ) -> Hit:
        """See ``CacheEngine.prefetch``."""
        ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        checks.choice("tier", tier, get_args(Tier))
        if queued_tokens is not None:
            queued_tokens = checks.integer("queued_tokens", queued_tokens, minimum=0)
        array = as_tokens(tokens)
        match = partial(
            self._leases.match_to_hold, salt=salt, adapter=adapter, items=items, owner="prefetch"
        )
        await self._fetch(partial(match, array, whole=False), timeout, queued_tokens)
        if self._external_device or tier == "host":
            record = match(array, whole=False)
            found = self._scheduler.read.hit(record.id)
            self._leases.release(record)
            return found
        parts = self._parts(array) if self._has_parts and not items else []
        record = match(parts[0], whole=True) if parts else match(array, whole=False)
        found = self._scheduler.read.hit(record.id)
        if not parts:
            await self._let_the_loop_run(record, found)
        pin = await self._bring(record, found, until_used=ttl_seconds > 0, parts=parts[1:])
        if pin is None:
            return Hit(found.device_tokens, 0)
        if ttl_seconds <= 0:
            pin.release()
        elif not pin.released:
            pin.expire_after(self._lifetime.loop, ttl_seconds)
        return Hit(pin.tokens, 0)

    async def pin(
        self,
        tokens: TokenIds,
        *,
        salt: str,
        adapter: str,
        items: Sequence[Item],
        ttl_seconds: float | None,
        timeout: float | None,
    ) -> Pin:
        """See ``CacheEngine.pin``."""
        if self._external_device:
            raise UsageError(
                "pin: with CacheConfig.external_device, a server owns the device blocks, not the "
                "engine",
                hint="a lease keeps its cached blocks in host memory from allocate to release",
            )
        if ttl_seconds is not None:
            ttl_seconds = checks.seconds("ttl_seconds", ttl_seconds, minimum=0.0)
        match = partial(
            self._leases.match_to_hold,
            tokens,
            salt=salt,
            adapter=adapter,
            items=items,
            owner="pin",
            whole=True,
        )
        await self._fetch(match, timeout)
        record = match()
        found = self._scheduler.read.hit(record.id)
        await self._let_the_loop_run(record, found)
        pin = await self._bring(record, found, until_used=False)
        if pin is None:
            if found.total:
                raise WouldBlock(
                    f"pin: no room on the device for {found.total} cached tokens, of which "
                    f"{found.host_tokens} are in host memory",
                    hint="waiting requests are granted first; raise CacheConfig.device_blocks",
                )
            return Pin(0, release_reason="nothing was cached")
        if ttl_seconds is not None and not pin.released:
            pin.expire_after(self._lifetime.loop, ttl_seconds)
        return pin

    async def _fetch(
        self,
        match: Callable[[], LeaseRecord],
        timeout: float | None,
        queued_tokens: int | None = None,
    ) -> None:
        """Fetch the blocks of a prompt from the stores to host memory.

        With ``queued_tokens``, only blocks that the model computes later are fetched.

        Cancellation: no lease is left; fetches in flight go on.
        """
        timeout = checks.timeout(timeout)
        if not self._fetches.has_stores or timeout == 0.0:
            return
        record = match()
        try:
            if queued_tokens is None:
                await self._fetches.bring(record.live_id(), timeout, Priority.PREFETCH)
            else:
                comparison = self._fetches.comparison(queued_tokens)
                lease_id = record.live_id()
                await self._fetches.bring(lease_id, timeout, Priority.DEMAND, comparison)
        finally:
            self._leases.release(record)

    def _parts(self, tokens: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Divide the blocks of a prompt that a hit may have into parts of a pass each.

        Returns:
            The parts; empty for a prompt that one pass can match.
        """
        if len(tokens) <= _PASS_TOKENS:
            return []
        size = self._block_tokens
        end = (len(tokens) - self._leave_tokens) // size * size
        step = max(_PASS_TOKENS // size, 1) * size
        return [tokens[first : min(first + step, end)] for first in range(0, end, step)]

    async def _let_the_loop_run(self, record: LeaseRecord, hit: Hit) -> None:
        """Wait for the next pass of the loop, if the match of a long prompt has held this one.

        Cancellation: the lease is released.
        """
        if hit.total <= _PASS_TOKENS:
            return
        try:
            await asyncio.sleep(0)
            self._lifetime.check_open()
        except BaseException:
            self._leases.release(record)
            raise

    async def _bring(
        self,
        record: LeaseRecord,
        hit: Hit,
        *,
        until_used: bool,
        parts: Iterable[NDArray[np.int32]] = (),
    ) -> Pin | None:
        """Onload and pin the whole hit.

        Args:
            record: lease of the prefix, which has matched it.
            hit: its hit.
            until_used: True if the pin ends when another lease has hit all its blocks.
            parts: tokens behind those of the lease, a part per pass of the loop. Their cached
                blocks are added until one is not cached, or has no room.

        Returns:
            The pin; None, and the lease is released, when nothing is cached or the device has no
            room.
        """
        apply, scheduler = self._dispatcher.apply, self._scheduler
        granting, lease_id = self._leases.granting, record.id
        try:
            if not hit.total or not granting.try_allocate(record, hit.total, Priority.PREFETCH):
                self._leases.release(record)
                return None
            for part in parts:
                await asyncio.sleep(0)
                if not granting.prolong(record, part):
                    break
            if until_used:
                apply(scheduler.pins.await_use(lease_id))
            await record.layers.wait_all()
            # Until a match finds the blocks on the device.
            while onloads := scheduler.read.onloads(lease_id):
                await self._transfers.ended(onloads[0])
            self._lifetime.check_open()
        except RequestTooLarge:
            self._leases.release(record)
            return None
        except BaseException:
            self._leases.release(record)
            raise
        tokens, reason = apply(scheduler.pins.pin(lease_id, until_used=until_used))
        if reason:
            record.id = 0
            return Pin(tokens, release_reason=reason)
        pin = Pin(tokens, partial(self._release, lease_id))
        self._pins[lease_id] = (pin, record)
        return pin

    def _release(self, lease_id: int, reason: str) -> None:
        if self._lifetime.is_usable:
            self._lifetime.check_loop()
            self._dispatcher.apply(self._scheduler.pins.unpin(lease_id, reason))
        else:
            self._ended(lease_id, reason)

    def _ended(self, lease_id: int, reason: str) -> None:
        """Note that the scheduler has released a pin. Idempotent."""
        if lease_id in self._pins:
            pin, record = self._pins[lease_id]
            record.id = 0
            pin.ended(reason)
            del self._pins[lease_id]
            if self._observers.active:
                self._observers.released(lease_id)
