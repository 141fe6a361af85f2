"""Shared parts of the engine: its components, opening and closing, granting of blocks."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Self

from aiokv import _native, checks
from aiokv.config import CacheConfig
from aiokv.engine.computing import Computing
from aiokv.engine.gates import Admissions, LeasesChanged
from aiokv.engine.open_step import OpenStepWatch
from aiokv.engine.pending import PendingBlocks
from aiokv.engine.pins import Pins
from aiokv.engine.quota import SaltQuota
from aiokv.engine.sharded import SHARDS, Sharded
from aiokv.engine.steps import Steps
from aiokv.engine.transfers import Transfers
from aiokv.engine.waiting import CapacityQueue
from aiokv.errors import (
    AiokvError,
    AllocateTimeout,
    BrokenEngineError,
    ClosedError,
    ConfigError,
    LeaseError,
    UsageError,
)
from aiokv.lease import Lease
from aiokv.observe.logs import Log
from aiokv.plan import Priority
from aiokv.scheduler.manager import CacheManager
from aiokv.worker.controller import CacheController
from aiokv.worker.device.names import named_device
from aiokv.worker.poller import EventPoller
from aiokv.worker.regions import Regions
from aiokv.worker.views import done_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from aiokv.errors import RankLost
    from aiokv.plan import TransferReport
    from aiokv.ranks.group import RankGroup
    from aiokv.worker.base import Worker
    from aiokv.worker.device.base import Device

log = Log(__name__)

_NO_ROOM, _READY, _LOADING = range(3)  # what Core.allocate returns

_entered: weakref.WeakSet[EngineBase] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """After ``os.fork``: the child has neither the threads nor the loop of its parent's engines."""
    for engine in list(_entered):
        engine._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)


class EngineBase:
    """State of a :class:`CacheEngine`, and the plumbing between its verbs."""

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | str | None = None,
        *,
        ranks: RankGroup | None = None,
    ) -> None:
        _check_types(config, regions, ranks)
        self.config = config
        self.regions = Regions(num_layers=0) if regions is None else regions
        if ranks is not None and device is not None:
            raise ConfigError("both device= and ranks=", hint="pass the device to each Rank")
        self._verify = config.verify == "checksum"
        self._controller: Worker = (
            CacheController(self.regions, named_device(device), checksums=self._verify)
            if ranks is None
            else ranks
        )
        self._check_regions()
        self._poller = EventPoller()
        self._manager = _new_manager(config)
        self._core = self._manager.core
        self._waiting = CapacityQueue(self._grant)
        self._admissions = Admissions(on_open=self._waiting.pump)
        self._pending = PendingBlocks(self._core)
        self._pins = Pins()
        self._quota = SaltQuota(config.salt_quota_blocks)
        self._saves_first = config.host_blocks > 0 and config.write_policy == "write_back"
        self._owners: Sharded[str] = Sharded()  # live leases
        self._taken_back: dict[int, BaseException | None] = {}  # leases that lost their blocks
        self._thread = 0  # of the loop; 0 before and after
        self._entered = False  # stays True after closing
        self._closing: str | None = None
        self._abandoned = False  # in a forked process
        self._leases_changed = LeasesChanged()
        self._broken: BaseException | None = None

    def _check_regions(self) -> None:
        blocks = self.regions.num_blocks
        can = self._controller.capabilities
        if not can.owns_tensors and blocks is not None:
            raise ConfigError("both regions= and ranks=", hint="pass the regions to each Rank")
        if not can.checksums and self.config.verify != "off":
            raise ConfigError(
                f"verify is {self.config.verify!r}; with ranks, which have the tensors, it must be "
                "'off'"
            )
        if not can.recurrent_state and self.config.state_slots:
            raise ConfigError("ranks have no recurrent state: state_slots must be 0")
        if blocks is not None and blocks < self.config.device_blocks:
            raise UsageError(
                f"the regions hold {blocks} blocks, fewer than the {self.config.device_blocks} of "
                "device_blocks",
                hint="make the tensors larger, or lower CacheConfig.device_blocks",
            )
        slots = self.regions.num_state_slots
        if slots is None and (not self.config.state_slots or blocks is None):
            return
        if not 0 < self.config.state_slots <= (slots or 0):
            raise UsageError(
                f"the regions hold {slots or 0} slots of recurrent state; state_slots is "
                f"{self.config.state_slots}",
                hint="register the state with Regions.add_state, and set CacheConfig.state_slots",
            )

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._thread or self._closing:
            raise UsageError("a CacheEngine is entered once")
        self._loop = asyncio.get_running_loop()
        self._poller.open(self._loop)
        try:
            await self._controller.open(
                device_blocks=self.config.device_blocks,
                host_blocks=self.config.host_blocks,
                poller=self._poller,
                on_report=lambda report: self._transfers.on_report(report),
                on_step=lambda step, error: self._steps.on_step(step, error),
                on_lost=self._on_rank_lost,
            )
        except BaseException:
            self._poller.close()
            raise
        self._done = done_view(self._controller.num_layers)
        self._transfers = Transfers(
            self._loop,
            self._manager,
            self._controller,
            on_report=self._after_report,
            on_submit=lambda after_step: self._open_step.note(after_step),
            check_wait=lambda after_step: self._steps.check_wait(after_step),
            soon=self._poller.soon,
        )
        self._steps = Steps(
            self._core,
            self._controller,
            tracked=self._controller.computes_in_stream,
            on_finished=self._on_blocks_free,
            on_broken=self._break,
        )
        self._open_step = OpenStepWatch(self._loop, self._steps, self._controller)
        self._computing = Computing(
            self._loop,
            self._core,
            self._steps,
            self._controller,
            self._poller,
            on_freed=self._after_release,
            lease_id=self._own_id,
            check_loop=self._check_loop,
        )
        self._entered = True
        self._thread = get_ident()
        _entered.add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception no task may be left that releases the leases: naming them is enough.
        await self.aclose(0.0 if exc_type is not None else None)

    async def aclose(self, drain_timeout: float | None = None) -> None:
        """Refuse new work, wait for leases and transfers, join threads, free memory. Idempotent.

        Args:
            drain_timeout: seconds to wait for leases that are still held, instead of the
                configuration's; their owners are logged when it passes.

        Raises:
            UsageError: ``drain_timeout`` is not a number; or the call is made outside the engine's
                loop, which is not closed. Nothing changed.

        Cancellation: memory is kept until transfers have ended; call it again.
        """
        timeout = self.config.drain_timeout_seconds if drain_timeout is None else drain_timeout
        timeout_seconds = checks.timeout(timeout, "drain_timeout")
        if not self._thread:
            self._closing = self._closing or "is closed"
            return
        if self._loop.is_closed():
            self._close_without_loop()
            return
        self._check_loop()
        self._closing = "is closing"
        self._fail_waiting(
            lambda: ClosedError("the engine closed while the lease waited for capacity")
        )
        self._pins.release_all("the engine closed")
        self._pending.close()
        await self._wait_for_leases(timeout_seconds)
        self._computing.close()
        self._transfers.stopped = True
        if self._steps.open:  # transfers must not wait for a step that no task will close
            self._steps.close(None)
        self._open_step.stop()
        await self._controller.aclose()
        self._poller.close()
        self._closing = "is closed"
        self._thread = 0
        self._leases_changed.notify()

    def _close_without_loop(self) -> None:
        """Close after the loop was closed: no callback will run."""
        self._closing = "is closed"
        self._thread = 0
        self._computing.closed = True
        self._controller.close_without_loop()

    def _abandon(self) -> None:
        """Use no device, thread or loop from now on; called in a forked process.

        Leases end without effect, ``aclose`` returns at once, and all else raises ``ClosedError``.
        """
        if not self._thread:
            return
        self._abandoned = True
        _native.keep_forever(self)  # destructors would join threads that this process lacks
        self._closing = "belongs to the process that has entered it"
        self._thread = 0
        self._owners = Sharded()
        self._computing.closed = True
        self._admissions.hold()  # tasks of the parent that unwind here are granted nothing
        self._transfers.stopped = True

    async def _wait_for_leases(self, timeout: float | None) -> None:
        if not await self._leases_changed.wait_for(lambda: not self._owners, timeout):
            log.warning("engine.leases_out", owners=self._owner_names(), waited_seconds=timeout)

    def _owner_names(self, which: Callable[[int], bool] = lambda lease_id: True) -> list[str]:
        named = (owner for lease_id, owner in self._owners.items() if which(lease_id))
        return sorted(owner or "unnamed" for owner in named)

    def _check_open(self) -> None:
        self._check_loop()
        if self._closing:
            raise ClosedError(f"the engine {self._closing}")
        if self._broken is not None:
            raise BrokenEngineError(
                f"an earlier failure broke the engine: {self._broken}"
            ) from self._broken

    def _check_loop(self) -> None:
        """Check the loop of a call that open leases may make until the engine is closed."""
        if not self._thread:
            if self._closing:
                raise ClosedError(f"the engine {self._closing}")
            raise UsageError("the engine is used before `async with`")
        if asyncio._get_running_loop() is not self._loop:
            raise UsageError("the engine is used outside the loop that it was entered on")

    def _check_thread(self) -> None:
        """Check the thread of a call that reads the loop's state; the engine need not be open.

        Raises:
            UsageError: this is not the thread of the loop.
        """
        if get_ident() != self._thread and self._thread:
            raise UsageError(
                "the engine is used in a thread other than that of its loop",
                hint="read it on the loop and pass the values; block_table and statistics() may "
                "be called in any thread",
            )

    def _break(self, error: BaseException) -> None:
        """Refuse all calls and fail all waiters: the device or a rank has failed."""
        self._broken = error

        def failure() -> BrokenEngineError:
            broken = BrokenEngineError(f"the worker failed: {error}")
            broken.__cause__ = error
            return broken

        self._fail_waiting(failure)
        self._leases_changed.notify()
        log.error("engine.broken", reason=str(error))

    def _on_rank_lost(self, lost: RankLost) -> None:
        """The bytes of all blocks are incomplete: forget them, and take them from the leases."""
        self._break(lost)
        self._pins.release_all("a rank was lost")
        self._core.reset()
        self._take_back()
        self._pending.wake_all()
        self._on_blocks_free()

    def _take_back(self) -> None:
        """All leases hold nothing, as after ``preempt``; but for tables that move just now."""
        for lease_id in list(self._owners):
            holds = self._core.is_granted(lease_id) or self._core.is_swapped(lease_id)
            if self._core.is_released(lease_id) or self._core.swap_transfer(lease_id):
                continue
            if holds:
                self._give_up_grant(lease_id)
                self._quota.give_back(lease_id)
                self._taken_back[lease_id] = self._broken
        self._transfers.cancel_abandoned()

    def _fail_waiting(self, failure: Callable[[], AiokvError]) -> None:
        self._waiting.fail_all(failure)
        self._quota.fail_all(failure)

    def _end_waits(self, lease_id: int) -> None:
        """Fail the tasks that wait for a lease which is being released."""
        error = LeaseError(
            f"lease {self._owners[lease_id] or 'unnamed'!r} was released while it waited"
        )
        self._pending.drop(lease_id, error)
        self._quota.drop(lease_id, error)
        self._waiting.drop(lease_id, error)

    # --- granting -------------------------------------------------------------------------------

    async def _allocate(
        self, lease: Lease, num_tokens: int, priority: int, timeout: float | None
    ) -> None:
        """Do the waiting part of ``Lease.allocate``, after ``_try_allocate`` returned False."""
        lease_id = lease._live_id()
        if lease._is_in_line:
            raise LeaseError(f"{lease!r} waits for its blocks already, in another task")
        lease._is_in_line = True
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self._quota.take(lease_id, lease.salt, self._blocks_for(num_tokens))
                # Its turn may have come in the pass in which the engine closed or broke, or the
                # lease was released.
                self._check_open()
                lease._live_id()
                # A swapped table that was granted is in pieces: taking it back would lose it.
                swapped = self._core.is_swapped(lease_id)
                await self._waiting.wait(lease, num_tokens, priority, takes_turn=swapped)
        except TimeoutError:
            if lease._id and self._core.is_granted(lease._id):
                return  # the grant crossed the deadline
            self._quota.give_back(lease_id)
            raise self._timed_out(lease, num_tokens, timeout) from None
        except BaseException:
            if lease._id and self._core.is_granted(lease._id):
                self._retract(lease)  # the grant crossed a cancellation
            self._quota.give_back(lease_id)
            raise
        finally:
            lease._is_in_line = False
            lease._noted_waits().add_capacity(time.monotonic() - began)

    def _timed_out(self, lease: Lease, num_tokens: int, timeout: float | None) -> AllocateTimeout:
        what = f"no room for {num_tokens} positions within {timeout} s"
        if self._admissions.paused:
            return AllocateTimeout(f"{what}: admission is paused")
        held = self._quota.held(lease.salt)
        if not self._quota.fits(lease.salt, self._blocks_for(num_tokens)):
            return AllocateTimeout(
                f"{what}: salt {lease.salt!r} holds {held} blocks of {self._quota.limit_blocks}",
                hint="raise CacheConfig.salt_quota_blocks, or preempt a lease of that salt",
            )
        if unclosed := self._open_step.explain():
            return AllocateTimeout(f"{what}: {unclosed}", hint=self._open_step.advice())
        device_free, evictable, state_room = self._core.room()
        if self.config.state_slots and not state_room:
            return AllocateTimeout(
                f"{what}: leases hold all {self.config.state_slots} state slots",
                hint="raise CacheConfig.state_slots, or preempt a lease",
            )
        return AllocateTimeout(
            f"{what}: {device_free} device blocks are free and at most {evictable} evictable",
            hint="raise CacheConfig.device_blocks, or preempt a lease",
        )

    def _try_allocate(
        self,
        lease: Lease,
        num_tokens: int,
        onload_priority: Priority = Priority.DEMAND,
        line_priority: int | None = None,
    ) -> bool:
        if not self._may_grant(lease, num_tokens, line_priority):
            return False
        if self._quota.limit_blocks is None:
            return self._grant(lease, num_tokens, onload_priority)
        lease_id = lease._live_id()
        if not self._quota.try_take(lease_id, lease.salt, self._blocks_for(num_tokens)):
            return False
        granted = False
        try:
            granted = self._grant(lease, num_tokens, onload_priority)
        finally:
            if not granted:
                self._quota.give_back(lease_id)
        return granted

    def _can_allocate(self, lease: Lease, num_tokens: int) -> bool:
        return (
            self._may_grant(lease, num_tokens)
            and self._quota.can_take(lease.salt, self._blocks_for(num_tokens))
            and self._core.can_allocate(
                lease._live_id(), num_tokens, self._saves_first and not self._transfers.stopped
            )
        )

    def _may_grant(self, lease: Lease, num_tokens: int, priority: int | None = None) -> bool:
        """Return False when the lease has to wait in line or for ``resume``.

        Args:
            priority: of a request that would be first in line: it need not stand there.

        Raises:
            LeaseError: released or granted; or not a number of positions.
            RequestTooLarge: it can never fit.
        """
        self._check_open()
        lease_id = lease._live_id()
        if self._quota.limit_blocks is not None:
            self._core.check_request(lease_id, num_tokens)
            self._quota.check_request(self._blocks_for(num_tokens))
        if (
            (self._waiting and (priority is None or not self._waiting.would_be_first(priority)))
            or self._admissions.paused
            or lease._is_in_line
        ):
            self._core.check_request(lease_id, num_tokens)
            return False
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_tokens)

    def _grant(
        self, lease: Lease, num_tokens: int, onload_priority: Priority = Priority.DEMAND
    ) -> bool:
        if self._admissions.paused:
            return False
        lease_id = lease._live_id()
        granted = self._core.allocate(lease_id, num_tokens)
        if granted == _NO_ROOM and self._saves_first:
            granted = self._try_after_saving(
                lambda: self._core.allocate(lease_id, num_tokens), self._blocks_for(num_tokens)
            )
        if granted == _NO_ROOM:
            return False
        try:
            if granted == _LOADING:
                lease.layers = self._transfers.start_onloads(lease_id, onload_priority, lease.owner)
        except BaseException:
            self._retract(lease)  # its layers are not known: it must not count as granted
            raise
        if self._taken_back:
            self._taken_back.pop(lease_id, None)
        if self._pins.until_used:
            self._pins.release_used(self._core.take_used())
        if self._core.wants_backups():
            self._transfers.schedule_backups()
        return True

    def _try_after_saving(self, attempt: Callable[[], int], num_blocks: int) -> int:
        """Save, or drop unsaved, the blocks that keep ``num_blocks`` from being free; then try.

        The front of the eviction queue is not always evicted first: a parent waits for its
        children, and comes to the front when they have been evicted. So where the host has no room,
        another try follows each try that evicted a block, and a try that evicted none is repeated
        further along the queue.

        Returns:
            What ``attempt`` returns; 0 while blocks are being saved: try again when they are saved.
        """
        while True:
            if self._transfers.make_clean(num_blocks):
                return 0
            evicted_blocks = self._core.statistics().evicted_device_blocks
            result = attempt()
            if result or not self._core.must_look_further():
                return result
            if self._core.statistics().evicted_device_blocks > evicted_blocks:
                continue
            if num_blocks >= self._core.device_blocks:
                return result
            num_blocks = min(2 * num_blocks, self._core.device_blocks)

    def _give_up_grant(self, lease_id: int) -> None:
        """Take a grant back; a lease without a handle keeps blocks for the batches in flight."""
        keeper = self._core.retract(lease_id, self._steps.open)
        if keeper:
            self._owners[keeper] = self._owners[lease_id]
            self._quota.hand_over(lease_id, keeper)

    def _after_release(self, lease_ids: Sequence[int]) -> None:
        """Account for leases that have given back all they held, and wake waiters."""
        for lease_id in lease_ids:
            del self._owners.shards[lease_id % SHARDS][lease_id]
            if self._taken_back:
                self._taken_back.pop(lease_id, None)
            if self._quota.limit_blocks is not None:
                self._quota.give_back(lease_id)
        self._transfers.cancel_abandoned()
        if self._waiting:
            self._waiting.pump()
        if self._pending:
            for lease_id in lease_ids:
                self._pending.wake(lease_id)
        self._leases_changed.notify()

    def _retract(self, lease: Lease) -> None:
        """Undo a grant, as for a task that was cancelled meanwhile."""
        self._give_up_grant(lease._id)
        lease._leave_layers(self._done)
        self._transfers.cancel_abandoned()
        if self._pending:
            self._pending.wake(lease._id)  # it does not compute what it has promised
        self._on_blocks_free()

    def _after_report(self, report: TransferReport) -> None:
        failure = self._controller.failure if report.outcome == "failed" else None
        if failure is not None and self._broken is None:
            self._break(failure)  # not this transfer's alone
        if self._controller.lost is not None:
            self._take_back()  # a table that moved when the rank was lost
        if report.outcome != "done":
            self._pending.wake_all()  # leases of the transfer will not publish what they promised
        elif self._pending:
            self._pending.reported(report.transfer_id)
        self._on_blocks_free()

    def _check_lines(self) -> list[str]:
        """Return a description of each violated invariant of the lines and of the leases."""
        if self._abandoned:
            return []  # of a forked process: its tasks and leases are the parent's
        core, live = self._core, self._owners
        held = {
            lease_id: self._blocks_for(core.num_tokens(lease_id))
            for lease_id in live
            if core.is_granted(lease_id)
        }
        found = self._waiting.check(live) + self._pending.check(live)
        found += self._quota.check(held, live)
        found += [
            f"capacity line: lease {lease._id:#x} waits, but it is granted"
            for lease, _ in self._waiting.entries()
            if lease._id in held
        ]
        if self._closing and (self._waiting or self._quota.entries()):
            found.append("lines: leases wait for capacity of a closed engine")
        statistics = core.statistics()
        if (in_core := statistics.leases + statistics.releasing_leases) != len(live):
            found.append(f"leases: the core has {in_core}, the engine {len(live)}")
        return found

    def _on_blocks_free(self) -> None:
        """Let waiters try again: blocks may have become free."""
        self._waiting.pump()
        self._leases_changed.notify()

    def _own_ids(self, leases: Sequence[Lease]) -> list[int]:
        if type(leases) is not list:
            leases = checks.sequence("leases", leases)
        return [
            lease._id
            if type(lease) is Lease and lease._engine is self and lease._id
            else self._own_id(lease)  # raises, but for a subclass
            for lease in leases
        ]

    def _own_id(self, lease: Lease) -> int:
        if not isinstance(lease, Lease):
            raise UsageError(f"lease is {lease!r}; it must be a Lease")
        if lease._engine is not self:
            raise LeaseError(f"{lease!r} belongs to another engine")
        return lease._live_id()


def _new_manager(config: CacheConfig) -> CacheManager:
    try:
        return CacheManager(config)
    except MemoryError:
        sizes = ("device_blocks", "host_blocks", "block_tokens", "state_slots")
        raise ConfigError(
            "there is not enough memory for the index of a cache with "
            + ", ".join(f"{name}={getattr(config, name)}" for name in sizes),
            hint="lower them; CacheConfig.for_regions computes the blocks from bytes",
        ) from None


def _check_types(config: object, regions: object, ranks: object) -> None:
    if not isinstance(config, CacheConfig):
        raise ConfigError(
            f"config is {config!r}; it must be a CacheConfig",
            hint="CacheEngine(CacheConfig(device_blocks=...)), or CacheConfig(**mapping)",
        )
    if regions is not None and not isinstance(regions, Regions):
        raise ConfigError(
            f"regions is {regions!r}; it must be a Regions",
            hint="register the tensors: regions = Regions(num_layers=...); regions.add(...)",
        )
    if ranks is not None and not hasattr(ranks, "restart"):
        raise ConfigError(f"ranks is {ranks!r}; it must be an aiokv.ranks.RankGroup")
