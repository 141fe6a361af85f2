"""Lifecycle: open and close an engine, and abandon it in a forked process."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from typing import TYPE_CHECKING, Final

from aiokv import _native
from aiokv.base import checks
from aiokv.base.logs import INFO, Log
from aiokv.engine.lifetime import Phase
from aiokv.errors import BrokenEngineError
from aiokv.worker.base import WorkerStart

if TYPE_CHECKING:
    from aiokv.engine.computing import Computing
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.leases import Leases
    from aiokv.engine.parts import Parts
    from aiokv.engine.peers import PeerTickets
    from aiokv.engine.recovery import Recovery
    from aiokv.engine.retention import Retention
    from aiokv.engine.steps import Steps

log = Log(__name__)

SAVE_SECONDS: Final = 30.0  # limit for saves to the stores when the engine closes

_opened: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """Abandon all engines after ``os.fork``: the child lacks the threads of its parent."""
    for lifecycle in list(_opened):
        lifecycle.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)


class Lifecycle:
    """Opens and closes the parts of an engine in the right order."""

    def __init__(
        self,
        parts: Parts,
        steps: Steps,
        computing: Computing,
        leases: Leases,
        recovery: Recovery,
        peer_tickets: PeerTickets,
        timers: tuple[Expiries, Retention],
    ) -> None:
        self._config = parts.config
        self._lifetime = parts.lifetime
        self._guard = parts.guard
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._poller = parts.poller
        self._observers = parts.observers
        self._open_step = parts.open_step
        self._identity = parts.identity
        self._steps = steps
        self._computing = computing
        self._leases = leases
        self._recovery = recovery
        self._peer_tickets = peer_tickets
        self._timers = timers
        self._opened_at = 0.0

    async def open(self) -> None:
        """Bind the engine to the running loop, and allocate host memory.

        Raises:
            UsageError: the engine was entered before.

        Cancellation: no memory is allocated; the engine cannot be entered again.
        """
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        self._lifetime.enter(loop)
        self._guard.open(self._recovery.give_up)
        self._poller.open(loop)
        try:
            await self._worker.open(
                WorkerStart(
                    device_blocks=self._config.device_blocks,
                    host_blocks=self._config.host_blocks,
                    poller=self._poller,
                    on_report=self._recovery.on_report,
                    on_step=self._recovery.on_step,
                    on_lost=self._recovery.on_lost,
                    identity=self._identity,
                    windows=self._config.windows,
                    on_ticket_end=self._peer_tickets.note_ticket_end,
                )
            )
        except BaseException:
            self._poller.close()
            raise
        try:
            self._dispatcher.apply(
                self._scheduler.track_steps(self._worker.facts.computes_in_stream)
            )
        except BaseException:
            await self._worker.aclose()
            self._poller.close()
            raise
        self._leases.open()
        self._lifetime.open()
        _opened.add(self)
        self._opened_at = time.monotonic()
        self._log_opened(self._opened_at - began)

    def _log_opened(self, seconds: float) -> None:
        config, worker = self._config, self._worker
        facts = worker.facts
        if not log.is_on(INFO):
            return
        log.info(
            "engine.opened",
            device=facts.device_name,
            block_tokens=config.block_tokens,
            device_blocks=config.device_blocks,
            device_bytes=config.device_blocks * facts.block_bytes,
            host_blocks=config.host_blocks,
            host_bytes=config.host_blocks * facts.pitch_bytes,
            layers=facts.num_layers,
            write_policy=config.write_policy,
            eviction_policy=config.eviction_policy,
            stores=list(dict.fromkeys(store.url for store in worker.inspect().stores)),
            endpoints=[f"{endpoint.host}:{endpoint.port}" for endpoint in worker.tickets.endpoints],
            opening_seconds=seconds,
        )

    async def aclose(self, drain_timeout: float | None) -> None:
        """See ``CacheEngine.aclose``."""
        lifetime = self._lifetime
        default = self._config.drain_timeout_seconds
        timeout = default if drain_timeout is None else drain_timeout
        timeout_seconds = checks.timeout(timeout, "drain_timeout")
        if not lifetime.is_running:
            if not lifetime.is_closing:
                lifetime.close(Phase.CLOSED)
                self._observers.close()
            return
        if lifetime.loop.is_closed():
            self._close_without_loop()
            return
        lifetime.check_running()
        lifetime.close(Phase.CLOSING)
        try:
            await self._finish(timeout_seconds)
        except BrokenEngineError:
            if not lifetime.is_unknown:
                raise
        if lifetime.is_unknown:
            self._recovery.end_waits()
            self._poller.wake()
        self._computing.close()
        self._open_step.stop()
        await self._worker.aclose()
        self._poller.close()
        lifetime.close(Phase.CLOSED)
        for timers in self._timers:
            timers.close()
        self._peer_tickets.lose_all("the engine was closed")
        self._observers.close()
        self._dispatcher.end_idle_waits()
        self._dispatcher.conditions.test()
        log.info(
            "engine.closed",
            open_seconds=time.monotonic() - self._opened_at,
            leases_held=self._scheduler.read.num_leases,
        )

    async def _finish(self, timeout: float | None) -> None:
        """Wait for the leases, save their blocks, and begin no more transfers.

        Raises:
            BrokenEngineError: the state of the engine is unknown, also if it became so meanwhile.
        """
        self._lifetime.check_loop()
        self._dispatcher.apply(self._scheduler.close())
        await self._wait_for_leases(timeout)
        self._computing.close()
        self._peer_tickets.end_all("the engine was closed")
        if self._scheduler.has_stores and timeout != 0.0:
            await self._save(timeout)
        self._dispatcher.apply(self._scheduler.stop_saving())
        # Transfers wait for the open step, which no task will close.
        if self._scheduler.read.open_step:
            self._steps.close(None)

    async def _save(self, timeout: float | None) -> None:
        """Save the committed blocks to the stores, for the next process.

        Stops after ``SAVE_SECONDS``: a store that is stuck does not keep the engine open.
        """
        limit = SAVE_SECONDS if timeout is None else min(timeout, SAVE_SECONDS)
        if self._scheduler.read.open_step:
            self._steps.close(None)
        apply, scheduler = self._dispatcher.apply, self._scheduler
        try:
            async with asyncio.timeout(limit):
                await self._worker.plans.drain()  # only blocks whose backup has ended can be saved
                while apply(scheduler.collect_backups()) or apply(scheduler.store_saver.collect()):
                    await self._worker.plans.drain()
        except TimeoutError:
            log.warning("engine.not_saved", waited_seconds=limit)

    async def _wait_for_leases(self, timeout: float | None) -> None:
        read = self._scheduler.read
        conditions = self._dispatcher.conditions
        if self._config.external_device:
            began = time.monotonic()
            if await conditions.wait_for(lambda: not read.has_handles, timeout) and read.open_step:
                self._steps.close(None)  # saves of released leases wait for it
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - began), 0.0)
        if not await conditions.wait_for(lambda: not read.has_leases, timeout):
            log.warning("engine.leases_held", owners=read.owners(), waited_seconds=timeout)

    def _close_without_loop(self) -> None:
        """Close an engine whose loop is closed: no callback runs any more."""
        self._lifetime.close(Phase.CLOSED)
        self._computing.stop()
        self._worker.close_without_loop()
        self._observers.close()

    def abandon(self) -> None:
        """Stop using the device, threads and loop; called in a forked process.

        Releasing a lease has no effect then, ``aclose`` returns at once, and all other methods
        raise ``ClosedError``.
        """
        if not self._lifetime.is_running:
            return
        # Destructors would join threads, which a forked child does not have.
        _native.keep_forever(self)
        self._lifetime.close(Phase.ABANDONED)
        self._computing.stop()
        self._dispatcher.stop()
