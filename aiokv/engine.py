"""CacheEngine: what a serving loop awaits. The only place that joins scheduler and worker.

    lease.allocate ─► CacheManager decides ─► plan ─► CacheController moves ─► report ─► manager
         ▲                                                                         │
         └──────────────── the next waiter in line ◄───────────────────────────────┘

There is no background task: everything happens in the caller's calls and in callbacks of the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Self

from aiokv.errors import (
    AiokvError,
    AllocateTimeout,
    BrokenEngineError,
    ClosedError,
    UsageError,
    WouldBlock,
)
from aiokv.lease import Lease
from aiokv.observe.logs import Log
from aiokv.plan import Priority
from aiokv.scheduler.admission import Admission
from aiokv.scheduler.manager import CacheManager
from aiokv.types import Hit, Statistics, as_tokens
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.layers import LayerView, done_view
from aiokv.worker.poller import EventPoller
from aiokv.worker.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from aiokv.config import CacheConfig
    from aiokv.plan import TransferPlan, TransferReport
    from aiokv.types import Tier, TokenIds
    from aiokv.worker.controller import WorkerStatistics
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.poller import PollerStatistics

log = Log(__name__)


class _Waiter:
    """A lease in line for capacity."""

    __slots__ = ("future", "granted", "lease", "num_tokens")

    def __init__(self, lease: Lease, num_tokens: int, future: asyncio.Future[None]) -> None:
        self.lease = lease
        self.num_tokens = num_tokens
        self.future = future
        self.granted = False


class CacheEngine:
    """Prefix cache over device and host memory, for one event loop.

    Args:
        config: sizes and rules.
        regions: the device tensors. Without any, the cache keeps books only: transfers move
            nothing and are done in the next pass of the loop.
        device: where the regions live; the cpu device by default.

    ``async with`` binds it to the running loop; every method is to be called on that loop.
    """

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | None = None,
    ) -> None:
        self.config = config
        self.regions = Regions(num_layers=0) if regions is None else regions
        self._check_regions()
        self._device = device or CpuDevice()
        self._manager = CacheManager(config)
        self._core = self._manager.core
        self._admission: Admission[_Waiter] = Admission()
        self._owners: dict[int, str] = {}  # live leases
        self._done = done_view(self.regions.num_layers)
        self._onloads: dict[int, tuple[TransferPlan, LayerDoneCounter]] = {}
        self._steps: deque[tuple[int, Event | None]] = deque()  # closed, oldest first, not done
        self._step = 1  # the open one
        # A device that computes before it returns needs no steps: what is committed, is computed.
        self._tracks_steps = self._device.computes_in_stream
        self._keeps_backups = config.host_blocks > 0
        self._flush_scheduled = False
        self._thread = 0  # of the loop; 0 before and after
        self._closing: str | None = None
        self._leases_gone: asyncio.Event | None = None
        self._broken: BaseException | None = None

    def _check_regions(self) -> None:
        blocks = self.regions.num_blocks
        if blocks is not None and blocks < self.config.device_blocks:
            raise UsageError(
                f"the regions hold {blocks} blocks, fewer than the {self.config.device_blocks} of "
                "device_blocks",
                hint="make the tensors larger, or lower CacheConfig.device_blocks",
            )

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._thread or self._closing:
            raise UsageError("a CacheEngine is entered once")
        self._loop = asyncio.get_running_loop()
        self._poller = EventPoller(self._loop)
        self._controller = CacheController(
            regions=self.regions,
            host_blocks=self.config.host_blocks,
            device=self._device,
            poller=self._poller,
            on_report=self._on_report,
        )
        self._thread = threading.get_ident()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception nobody is left to release the leases: naming them is enough.
        await self.aclose(0.0 if exc_type is not None else None)

    async def aclose(self, drain_timeout: float | None = None) -> None:
        """Refuse new work, wait for leases and transfers, join threads, free memory. Idempotent.

        Args:
            drain_timeout: seconds to wait for leases that are out, instead of the
                configuration's; their owners are logged when it passes.

        Cancellation: memory is kept until transfers have ended; call it again.
        """
        if not self._thread:
            self._closing = "is closed"
            return
        self._closing = "is closing"
        self._fail_waiters(ClosedError("the engine closed while the lease waited for capacity"))
        timeout = self.config.drain_timeout_seconds if drain_timeout is None else drain_timeout
        await self._wait_for_leases(timeout)
        self._release_steps()
        await self._controller.aclose()
        self._poller.close()
        self._closing = "is closed"
        self._thread = 0

    async def _wait_for_leases(self, timeout: float) -> None:
        if self._owners and timeout > 0:
            self._leases_gone = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await self._leases_gone.wait()
            except TimeoutError:
                pass
        if self._owners:
            log.warning(
                "engine.leases_out",
                owners=sorted(owner or "unnamed" for owner in self._owners.values()),
                waited_seconds=timeout,
            )

    def _release_steps(self) -> None:
        """Transfers behind a step that nobody will close must not wait for it."""
        if self._tracks_steps:
            self._controller.close_step(self._step, None)

    def _check_open(self) -> None:
        if self._thread != threading.get_ident():
            if self._closing:
                raise ClosedError(f"the engine {self._closing}")
            raise UsageError("the engine is used outside its loop's thread, or before `async with`")
        if self._closing:
            raise ClosedError(f"the engine {self._closing}")
        if self._broken is not None:
            raise BrokenEngineError("an earlier failure broke the engine") from self._broken

    # --- leases ---------------------------------------------------------------------------------

    def match(
        self, tokens: TokenIds, *, salt: str = "", adapter: str = "", owner: str = ""
    ) -> Lease:
        """Look up how much of a prompt is cached. Nothing is pinned; recency is refreshed.

        Args:
            tokens: ``[N]`` token ids, N >= 1; copied. A contiguous int32 array is the fastest.
            salt: prompts share blocks only with prompts of the same salt (a tenant, say).
            adapter: likewise; names what else changes the KV, such as a LoRA adapter.
            owner: a name for messages.

        Returns:
            A lease, which may be awaited (it does not suspend) or entered with ``async with``.

        Raises:
            UsageError: no tokens, or one outside int32.
            ClosedError: the engine is closed or closing.
        """
        self._check_open()
        context = f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""
        lease_id, _, _ = self._core.match(as_tokens(tokens), context)
        self._owners[lease_id] = owner
        return Lease(self, lease_id, owner, self._done)

    def _try_allocate(self, lease: Lease, num_tokens: int) -> bool:
        self._check_open()
        return not self._admission and self._grant(lease, num_tokens)

    def _grant(self, lease: Lease, num_tokens: int) -> bool:
        granted = self._core.allocate(lease._live_id(), num_tokens)
        if granted == _LOADING:
            self._start_onloads(lease)
        return granted != _NO_ROOM

    async def _wait_for_capacity(
        self, lease: Lease, num_tokens: int, priority: int, timeout: float | None
    ) -> None:
        waiter = _Waiter(lease, num_tokens, self._loop.create_future())
        ticket = self._admission.push(waiter, priority)
        try:
            self._pump()
            async with asyncio.timeout(timeout):
                await waiter.future
        except TimeoutError:
            if not waiter.granted:
                raise AllocateTimeout(
                    f"no room for {num_tokens} positions within {timeout} s; "
                    f"{self.device_room()} blocks are free or evictable",
                    hint="raise CacheConfig.device_blocks, or preempt a lease",
                ) from None
        except asyncio.CancelledError:
            if waiter.granted and lease._id:
                self._core.retract(lease._id, self._open_step())
                lease.layers = self._done
            raise
        finally:
            self._admission.leave(ticket)
            self._pump()

    def _pump(self) -> None:
        """Grant to whoever is first in line, as long as there is room."""
        while (waiter := self._admission.first()) is not None:
            try:
                if not waiter.future.done() and not self._grant(waiter.lease, waiter.num_tokens):
                    return
            except AiokvError as error:
                waiter.future.set_exception(error)
            else:
                if not waiter.future.done():
                    waiter.granted = True
                    waiter.future.set_result(None)
            self._admission.drop_first()

    def _fail_waiters(self, error: AiokvError) -> None:
        while (waiter := self._admission.first()) is not None:
            if not waiter.future.done():
                waiter.future.set_exception(error)
            self._admission.drop_first()

    def device_room(self) -> int:
        """Device blocks that are free, or could be at once by evicting."""
        statistics = self._core.statistics()
        return statistics.device_free + statistics.evictable_blocks

    def _commit(self, lease: Lease, num_tokens: int, ready: Event | None) -> int:
        step = self._step if self._tracks_steps else 0
        if ready is not None:
            step = self.step(ready)
        published = self._core.commit(lease._live_id(), num_tokens, step)
        if published and self._keeps_backups and not self._flush_scheduled:
            self._schedule_flush()
        return published

    def _truncate(self, lease: Lease, num_tokens: int) -> None:
        self._core.truncate(lease._live_id(), num_tokens, self._open_step())
        self._pump()

    def extend(self, leases: Sequence[Lease], num_tokens: int) -> None:
        """Give each lease ``num_tokens`` more positions; all of them or none.

        Never waits, and does not queue behind ``allocate``.

        Raises:
            WouldBlock: not enough room; preempt a lease and try again. Nothing changed.
            LeaseError: a lease is released, not granted, or named twice. Nothing changed.
        """
        if not self._core.extend([lease._live_id() for lease in leases], num_tokens):
            raise WouldBlock(
                f"no room to extend {len(leases)} leases by {num_tokens} positions",
                hint="preempt a lease, or raise CacheConfig.reserve_blocks",
            )

    def _release(self, lease: Lease, after: Event | None) -> None:
        lease_id, lease._id = lease._id, 0
        if lease_id not in self._owners:
            return  # the engine closed without it
        step = self._open_step() if after is None else self.step(after)
        self._forget(lease_id, step)

    def _forget(self, lease_id: int, step: int) -> None:
        del self._owners[lease_id]
        self._core.release(lease_id, step)
        if self._onloads:
            self._cancel_abandoned()
        if self._admission:
            self._pump()
        if self._leases_gone is not None and not self._owners:
            self._leases_gone.set()

    def _collect(self, lease_id: int) -> bool:
        """A lease was garbage-collected; returns whether it held blocks. Any thread."""
        if lease_id not in self._owners:
            return False
        holds_blocks = self._core.is_granted(lease_id)
        if threading.get_ident() == self._thread:
            self._forget(lease_id, self._open_step())
        elif self._thread:
            self._loop.call_soon_threadsafe(self._forget, lease_id, self._open_step())
        return holds_blocks

    # --- steps ----------------------------------------------------------------------------------

    def _open_step(self) -> int:
        return self._step if self._tracks_steps else 0

    def step(self, event: Event | None = None) -> int:
        """Close the open step: what was committed or released in it is covered by ``event``.

        Transfers of those blocks wait for the event on the device. On a device that computes
        before it returns (cpu), closing a step only sends the backups on their way.

        Args:
            event: recorded on the compute stream behind the step's work, the events of later
                steps behind it; None when the work has finished.

        Returns:
            The number of the step that was closed.
        """
        self._check_open()
        step = self._step
        self._step += 1
        self._controller.close_step(step, event)
        if event is None or event.done:
            self._steps_done_up_to(step)
        else:
            self._steps.append((step, event))
            self._poller.watch(event, "steps", lambda error: self._on_step_done(step, error))
        self._flush_backups()
        return step

    def _on_step_done(self, step: int, error: BaseException | None) -> None:
        if isinstance(error, ClosedError):
            return
        if error is not None:
            self._break(error)
            return
        self._steps_done_up_to(step)

    def _steps_done_up_to(self, step: int) -> None:
        """Steps end in order: an event that is done early waits for those before it."""
        while self._steps and self._steps[0][0] <= step:
            self._steps.popleft()
        if not self._steps:
            self._core.finish_step(step)
        if self._admission:
            self._pump()

    # --- transfers ------------------------------------------------------------------------------

    def _start_onloads(self, lease: Lease) -> None:
        counters = []
        for transfer_id in self._core.onloads(lease._live_id()):
            if transfer_id not in self._onloads:
                plan = self._manager.onload_plan(transfer_id, Priority.DEMAND)
                self._onloads[transfer_id] = (plan, self._controller.submit(plan))
            counters.append(self._onloads[transfer_id])
        lease.layers = LayerView(
            [counter for _, counter in counters],
            locate=_position_finder(
                {plan.transfer_id: plan for plan, _ in counters},
                lease.block_table.tolist(),
                self.config.block_tokens,
            ),
        )

    def _cancel_abandoned(self) -> None:
        for transfer_id in self._core.take_abandoned():
            self._controller.cancel(transfer_id)

    def _schedule_flush(self) -> None:
        """Without steps, what one pass of the loop commits is backed up together."""
        if not self._tracks_steps:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_backups)

    def _flush_backups(self) -> None:
        self._flush_scheduled = False
        if not self._keeps_backups or self._closing:
            return
        plan = self._manager.backup_plan()
        if plan is not None:
            self._controller.submit(plan)

    def _on_report(self, report: TransferReport) -> None:
        self._onloads.pop(report.transfer_id, None)
        self._manager.complete(report)
        if report.outcome == "failed":
            log.warning(
                "transfer.failed",
                transfer_id=report.transfer_id,
                first_bad_block=report.first_bad_block,
                reason=report.reason,
            )
        self._schedule_flush_after_report()
        if self._admission:
            self._pump()

    def _schedule_flush_after_report(self) -> None:
        """A finished onload publishes what its leases committed meanwhile."""
        if self._keeps_backups and not self._flush_scheduled and not self._closing:
            self._schedule_flush()

    def _break(self, error: BaseException) -> None:
        """The device cannot go on: refuse everything, wake everybody."""
        self._broken = error
        failure = BrokenEngineError(f"the device failed: {error}")
        failure.__cause__ = error
        self._fail_waiters(failure)
        log.error("engine.broken", reason=str(error))

    # --- capacity and state ---------------------------------------------------------------------

    async def evict(self, num_blocks: int, tier: Tier = "device") -> int:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        Device blocks that have a host copy only lose the device copy.

        Returns:
            How many were evicted; fewer when the rest is leased or being copied.
        """
        self._check_open()
        if num_blocks < 0:
            raise UsageError(f"cannot evict {num_blocks} blocks")
        evict = self._core.evict_device if tier == "device" else self._core.evict_host
        evicted = evict(num_blocks)
        self._pump()
        return evicted

    async def prefetch(self, tokens: TokenIds, *, salt: str = "", adapter: str = "") -> Hit:
        """Bring what is cached in host memory onto the device; does not wait for capacity.

        Returns:
            What is on the device at the end, as ``device_tokens``.

        Raises:
            TransferError: a copy failed; the blocks before it are there.

        Cancellation: copies that have begun end as cached blocks.
        """
        async with self.match(tokens, salt=salt, adapter=adapter, owner="prefetch") as lease:
            hit = lease.hit
            if not hit.host_tokens or not lease.try_allocate(hit.total):
                return Hit(hit.device_tokens, 0)
            await lease.layers.wait_all()
            return Hit(lease.cached_tokens, 0)

    async def reset(self) -> None:
        """Forget everything that is cached; live leases keep their blocks but publish no more.

        Returns when no transfer that was under way is left.

        Cancellation: the cache is empty all the same; transfers end in the background.
        """
        self._check_open()
        self._core.reset()
        self._pump()
        await self._controller.drain()

    async def drain(self) -> None:
        """Wait until nothing is in flight, backups of what was committed included."""
        self._check_open()
        self._flush_backups()
        await self._controller.drain()

    def statistics(self) -> Statistics:
        core = self._core.statistics()
        fields = {name: getattr(core, name) for name in _CORE_FIELDS}
        return Statistics(
            device_blocks=self.config.device_blocks,
            host_blocks=self.config.host_blocks,
            waiting=len(self._admission),
            **fields,
        )

    def worker_statistics(self) -> WorkerStatistics:
        return self._controller.statistics()

    def poller_statistics(self) -> PollerStatistics:
        return self._poller.statistics()

    def check_invariants(self) -> list[str]:
        """What of I1-I6 does not hold, as sentences; empty when all is well. Scans everything."""
        return self._core.violations()

    def __repr__(self) -> str:
        s = self._core.statistics()
        return (
            f"<CacheEngine device {self.config.device_blocks - s.device_free}/"
            f"{self.config.device_blocks} host {self.config.host_blocks - s.host_free}/"
            f"{self.config.host_blocks}, {len(self._owners)} leases, "
            f"{len(self._admission)} waiting>"
        )


_NO_ROOM = 0
_LOADING = 2

_CORE_FIELDS = tuple(
    name
    for name in Statistics.__struct_fields__
    if name not in ("device_blocks", "host_blocks", "waiting")
)


def _position_finder(
    plans: dict[int, TransferPlan], block_table: list[int], block_tokens: int
) -> Callable[[int, int], int]:
    """(transfer, index of a block in its plan) -> first position of that block in the lease."""

    def locate(transfer_id: int, block: int) -> int:
        device_block = int(plans[transfer_id].device_ids[block])
        return block_table.index(device_block) * block_tokens

    return locate
