"""Control: pause, evict, and operations that first wait until no block is in use."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, get_args
from uuid import uuid4

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.base.plan import PEER_ROUTES
from aiokv.base.types import Tier
from aiokv.errors import ControlTimeout, UsageError
from aiokv.stores.labels import label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import PeerTickets
    from aiokv.scheduler.gate import GateChange

log = Log(__name__)


class Control:
    """Control operations of an engine; see ``CacheEngine`` for each."""

    def __init__(self, parts: Parts, peer_tickets: PeerTickets) -> None:
        self._config = parts.config
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._read = parts.scheduler.read
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._transfers = parts.transfers
        self._open_step = parts.open_step
        self._peer_tickets = peer_tickets

    def change_gate(self, change: GateChange) -> None:
        """Begin or end a pause or a hold."""
        self._lifetime.check_open()
        self._change_gate(change)
        if change in ("pause", "resume"):
            log.info("engine.paused" if change == "pause" else "engine.resumed")

    def _change_gate(self, change: GateChange) -> None:
        self._dispatcher.apply(self._scheduler.change_gate(change))

    def let_go(self) -> None:
        """End one hold, even if the engine was closed meanwhile."""
        self._change_gate("let_go")

    async def evict(self, num_blocks: int, tier: Tier) -> int:
        """See ``CacheEngine.evict``."""
        self._lifetime.check_open()
        num_blocks = checks.integer("num_blocks", num_blocks, minimum=0, maximum=checks.MAX_INT32)
        checks.choice("tier", tier, get_args(Tier))
        evicted = 0
        while True:
            more, saving = self._dispatcher.apply(self._scheduler.evict(num_blocks - evicted, tier))
            evicted += more
            if not saving:
                log.debug("blocks.evicted_on_request", tier=tier, blocks=evicted, asked=num_blocks)
                return evicted
            await self._transfers.ended(saving)

    async def reset(self, timeout: float | None) -> None:
        """See ``CacheEngine.reset``."""
        self._lifetime.check_open()
        timeout = checks.timeout(timeout)
        self._peer_tickets.end_all("the cache was reset")
        self._dispatcher.apply(self._scheduler.reset("the cache was reset"))
        log.info("cache.reset")
        async with self.deadline("reset", timeout):
            await self._transfers.settle()

    async def purge(self, salt: str, hold_seconds: float, timeout: float | None) -> int:
        """See ``CacheEngine.purge``."""
        self._lifetime.check_open()
        salt_label = label("salt", salt)
        hold_seconds = checks.seconds("hold_seconds", hold_seconds, minimum=0)
        timeout = checks.timeout(timeout)
        self._dispatcher.apply(self._scheduler.begin_purge(salt))
        try:
            if hold_seconds:
                await asyncio.sleep(hold_seconds)
            async with self.deadline("purge", timeout, keepers=list):
                await self._transfers.settle(but=PEER_ROUTES)
                has_stores = self._scheduler.has_stores
                removed = await self._worker.stores.purge(salt_label) if has_stores else 0
        finally:
            self._dispatcher.apply(self._scheduler.end_purge(salt))
        log.info("cache.purged", salt=salt_label.hex(), objects=removed)
        return removed

    async def drain(self, timeout: float | None) -> None:
        """See ``CacheEngine.drain``."""
        self._lifetime.check_open()
        async with self.deadline("drain", timeout):
            await self.settle_all()

    async def settle_all(self) -> None:
        """Wait until no transfer is in flight, and no backup or save is due."""
        self._collect()
        await self._worker.plans.drain()
        while self._collect():  # ended onloads and backups may have requested further backups
            await self._worker.plans.drain()

    def _collect(self) -> bool:
        """Begin backups, or else saves to the stores; return False if there are none."""
        apply, scheduler = self._dispatcher.apply, self._scheduler
        if apply(scheduler.collect_backups()):
            return True
        return scheduler.has_stores and apply(scheduler.store_saver.collect())

    async def quiesce(self, timeout: float | None) -> None:
        """See ``CacheEngine.quiesce``."""
        async with self.deadline("quiesce", timeout):
            await self.stand_still(lambda: not self._read.granted_leases)
        self._change_gate("hold_to_pause")

    async def stand_still(self, at_rest: Callable[[], bool]) -> None:
        """Hold admission, then wait until ``at_rest()`` and no step or transfer is in flight.

        Cancellation: admission is no longer held.
        """
        self.change_gate("hold")
        try:
            while True:
                await self._wait_until(lambda: at_rest() and self._read.steps_finished)
                await self.drain(None)
                if at_rest() and self._read.steps_finished:
                    return
        except BaseException:
            self.let_go()
            raise

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on leases and steps.

        Raises:
            ClosedError: the engine was closed.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: nothing changed.
        """
        lifetime = self._lifetime
        await self._dispatcher.conditions.wait_for(
            lambda: not lifetime.is_running or lifetime.failure is not None or condition(), None
        )
        lifetime.check_open()

    @asynccontextmanager
    async def deadline(
        self,
        verb: str,
        timeout: float | None,
        keepers: Callable[[], list[str]] | None = None,
        detail: Callable[[], str] | None = None,
    ) -> AsyncIterator[None]:
        """Limit the time of the ``async with`` block.

        Args:
            verb: name of the method that the user called.
            timeout: seconds; None for no limit.
            keepers: returns the owners of the leases that the block waits for; None for the owners
                of all granted leases.
            detail: returns what the error also says, such as what has changed already; "" for
                nothing.

        Raises:
            ControlTimeout: the time has passed; the error names ``keepers()`` and ``detail()``.
            UsageError: ``timeout`` is not a number.
        """
        timeout = checks.timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            if isinstance(error, ControlTimeout):
                raise
            owners = (keepers or self._read.holders)()
            what = f"{verb} timed out after {timeout} s"
            if detail is not None and (text := detail()):
                what = f"{what}; {text}"
            raise self._timeout(what, owners) from None

    def _timeout(self, what: str, owners: list[str]) -> ControlTimeout:
        """Return an error that names the held leases, the unfinished step and the silent ranks."""
        ranks = [rank.rank for rank in self._worker.inspect().ranks if rank.owes_reply]
        step = self._open_step.explain() or self._read.explain_steps()
        leases = "no leases are held"
        if owners:
            leases = f"leases still held by: {', '.join(owners)}"
        causes = [what, leases, step]
        if ranks:
            causes.append(f"ranks that did not answer: {ranks}")
        return ControlTimeout(
            "; ".join(cause for cause in causes if cause), owners=tuple(owners), ranks=tuple(ranks)
        )

    @asynccontextmanager
    async def updating_weights(
        self, timeout: float | None, version: str | None
    ) -> AsyncIterator[None]:
        """See ``CacheEngine.updating_weights``."""
        nonce = f"unnamed {uuid4().hex}"  # no store has blocks with this name
        next_version = nonce if version is None else checks.text("version", version)
        self.change_gate("hold")  # from here on, nothing is saved to the stores
        try:
            async with self.deadline("updating_weights", timeout):
                await self._transfers.settle(but=PEER_ROUTES)
            self._lifetime.check_open()  # it may have been closed meanwhile
            try:  # no await until the block begins, so an entry that fails has changed nothing
                self._peer_tickets.change_weights(nonce)
                self._peer_tickets.end_all("the weights are being updated")
                # Open leases may compute with other weights from now on, so they publish nothing
                # more.
                reason = "the weights are being updated"
                self._dispatcher.apply(self._scheduler.reset(reason, new_weights=True))
                yield
            except BaseException:
                next_version = nonce  # the weights may have been updated in part
                raise
            finally:  # nothing was granted in the block, so no tier has blocks of either weights
                self._peer_tickets.change_weights(next_version)
                self._worker.change_weights(next_version)
                log.info("weights.updated", version=next_version)
        finally:
            self.let_go()

    async def resize(self, device_blocks: int, timeout: float | None) -> None:
        """See ``CacheEngine.resize``."""
        self._lifetime.check_open()
        device_blocks = checks.integer("device_blocks", device_blocks)
        timeout = checks.timeout(timeout)
        blocks = self._worker.facts.device_blocks
        if device_blocks > blocks:
            raise UsageError(
                f"resize: device_blocks is {device_blocks}, but the registered tensors hold only "
                f"{blocks} blocks"
            )
        if device_blocks <= self._config.reserve_blocks:
            raise UsageError(
                f"resize: device_blocks is {device_blocks}; it must be larger than "
                f"CacheConfig.reserve_blocks, which is {self._config.reserve_blocks}"
            )
        before = self._read.device_blocks
        try:
            async with asyncio.timeout(timeout):
                # Resize as soon as the last block becomes free, before a waiting lease can take it.
                await self._wait_until(
                    lambda: self._dispatcher.apply(self._scheduler.resize(device_blocks))
                )
        except TimeoutError:
            if self._read.device_blocks == device_blocks:
                return  # the last block became free just before the timeout
            raise self._timeout(
                f"resize timed out after {timeout} s; blocks from {device_blocks} on are in use",
                self._read.holders(),
            ) from None
        log.info("engine.resized", device_blocks=device_blocks, before_blocks=before)
