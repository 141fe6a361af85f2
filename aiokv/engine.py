"""CacheEngine: what a serving loop awaits. The only place that joins scheduler and worker.

    lease.allocate ─► CacheManager decides ─► plan ─► CacheController moves ─► report ─► manager
         ▲                                                                         │
         └──────────────── the next waiter in line ◄───────────────────────────────┘

There is no background task: everything happens in the caller's calls and in callbacks of the loop.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from aiokv.errors import (
    AllocateTimeout,
    BrokenEngineError,
    ClosedError,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.flows.control import Admissions, LeasesChanged
from aiokv.flows.pending import PendingBlocks
from aiokv.flows.pins import Pin, Pins
from aiokv.flows.quota import SaltQuota
from aiokv.flows.steps import Steps
from aiokv.flows.transfers import Transfers
from aiokv.flows.waiting import CapacityQueue
from aiokv.lease import Lease
from aiokv.observe.logs import Log
from aiokv.scheduler.manager import CacheManager
from aiokv.types import Hit, Statistics, as_tokens
from aiokv.worker.blocks import clone_blocks
from aiokv.worker.checksums import Checksums
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.layers import LayerView, done_view
from aiokv.worker.poller import EventPoller
from aiokv.worker.regions import Regions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from aiokv.config import CacheConfig
    from aiokv.plan import TransferReport
    from aiokv.types import Tier, TokenIds
    from aiokv.worker.controller import WorkerStatistics
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.poller import PollerStatistics

log = Log(__name__)

_NO_ROOM, _READY, _LOADING = range(3)  # what Core.allocate returns


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
        self._waiting = CapacityQueue(self._grant)
        self._admissions = Admissions(on_open=self._waiting.pump)
        self._pending = PendingBlocks(self._core)
        self._pins = Pins()
        self._quota = SaltQuota(config.salt_quota_blocks)
        self._checksums = Checksums(self.regions) if config.verify == "checksum" else None
        self._unrecorded: list[NDArray[np.int32]] = []  # computed in the open step
        self._saves_first = config.host_blocks > 0 and config.write_policy == "write_back"
        self._owners: dict[int, str] = {}  # live leases
        self._done = done_view(self.regions.num_layers)
        self._thread = 0  # of the loop; 0 before and after
        self._closing: str | None = None
        self._leases_changed = LeasesChanged()
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
            on_report=lambda report: self._transfers.on_report(report),
            checksums=self._checksums,
        )
        self._transfers = Transfers(
            self._loop, self._manager, self._controller, on_report=self._after_report
        )
        self._steps = Steps(
            self._core,
            self._controller,
            self._poller,
            tracked=self._device.computes_in_stream,
            on_finished=self._waiting.pump,
            on_broken=self._break,
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
        self._waiting.fail_all(ClosedError("the engine closed while the lease waited for capacity"))
        self._pins.release_all()
        self._pending.wake_all()
        timeout = self.config.drain_timeout_seconds if drain_timeout is None else drain_timeout
        await self._wait_for_leases(timeout)
        self._transfers.stopped = True
        if self._steps.open:  # transfers must not wait for a step that nobody will close
            self._steps.close(None)
        await self._controller.aclose()
        self._poller.close()
        self._closing = "is closed"
        self._thread = 0

    async def _wait_for_leases(self, timeout: float) -> None:
        if not await self._leases_changed.wait_for(lambda: not self._owners, timeout):
            log.warning("engine.leases_out", owners=self._owner_names(), waited_seconds=timeout)

    def _owner_names(self) -> list[str]:
        return sorted(owner or "unnamed" for owner in self._owners.values())

    # --- batches --------------------------------------------------------------------------------

    def match_many(self, prompts: Iterable[TokenIds], *, salt: str = "") -> list[Lease]:
        """``match`` for each; a bad prompt raises after those before it were released."""
        leases: list[Lease] = []
        try:
            leases.extend(self.match(tokens, salt=salt) for tokens in prompts)
        except BaseException:
            self.release_many(leases)
            raise
        return leases

    def commit_many(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> int:
        """``commit`` for each; returns the blocks that became shareable.

        Raises:
            LeaseError: of the first lease that refuses; those before it are committed.
        """
        return sum(
            self._commit(lease, n, None) for lease, n in zip(leases, num_tokens, strict=True)
        )

    def release_many(self, leases: Iterable[Lease]) -> None:
        """``release`` for each."""
        for lease in leases:
            lease.release()

    def layers(self, leases: Sequence[Lease]) -> LayerView:
        """One counter for all transfers that a batch waits for.

        Its errors carry no position: ask each lease's ``recompute_from``.
        """
        counters = {counter: None for lease in leases for counter in lease.layers.counters}
        return LayerView(list(counters)) if counters else self._done

    def block_tables(
        self, leases: Sequence[Lease], out: NDArray[np.int32] | None = None, fill: int = -1
    ) -> NDArray[np.int32]:
        """The block tables as rows, padded with ``fill``.

        Args:
            leases: B leases.
            out: ``[>= B, >= M]`` C-contiguous int32 to write into, M being the longest table; all
                of it is written. A new ``[B, M]`` array without it.
            fill: what stands behind each table, and in rows without a lease.

        Raises:
            UsageError: ``out`` is too small; nothing was written.
        """
        ids = [lease._live_id() for lease in leases]
        if out is None:
            width = max((self._blocks_for(self._core.num_tokens(i)) for i in ids), default=0)
            out = np.empty((len(ids), width), dtype=np.int32)
        self._core.block_tables(ids, out, fill)
        return out

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
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        owner: str = "",
        read: bool = True,
        write: bool = True,
    ) -> Lease:
        """Look up how much of a prompt is cached. Nothing is pinned; recency is refreshed.

        Args:
            tokens: ``[N]`` token ids, N >= 1; copied. A contiguous int32 array is the fastest.
            salt: prompts share blocks only with prompts of the same salt (a tenant, say).
            adapter: likewise; names what else changes the KV, such as a LoRA adapter.
            owner: a name for messages.
            read: False to hit nothing.
            write: False to publish nothing.

        Returns:
            A lease, which may be awaited (it does not suspend) or entered with ``async with``.

        Raises:
            UsageError: no tokens, or one outside int32.
            ClosedError: the engine is closed or closing.
        """
        self._check_open()
        context = f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""
        lease_id, _, _ = self._core.match(as_tokens(tokens), context, read, write)
        self._owners[lease_id] = owner
        return Lease(self, lease_id, owner, salt, self._done)

    async def _allocate(
        self, lease: Lease, num_tokens: int, priority: int, timeout: float | None
    ) -> None:
        """What is left of ``Lease.allocate`` when it has to wait."""
        num_blocks = self._blocks_for(num_tokens)
        try:
            async with asyncio.timeout(timeout):
                await self._quota.take(lease._live_id(), lease.salt, num_blocks)
                await self._waiting.wait(lease, num_tokens, priority)
        except BaseException as error:
            granted = bool(lease._id) and self._core.is_granted(lease._id)
            if granted and isinstance(error, TimeoutError):
                return
            if granted:
                self._retract(lease)
            self._quota.give_back(lease._id)
            if isinstance(error, TimeoutError):
                raise self._timed_out(lease, num_tokens, timeout) from None
            raise

    def _timed_out(self, lease: Lease, num_tokens: int, timeout: float | None) -> AllocateTimeout:
        what = f"no room for {num_tokens} positions within {timeout} s"
        held = self._quota.held(lease.salt)
        if not self._quota.fits(lease.salt, self._blocks_for(num_tokens)):
            return AllocateTimeout(
                f"{what}: salt {lease.salt!r} holds {held} blocks of {self._quota.limit_blocks}",
                hint="raise CacheConfig.salt_quota_blocks, or preempt a lease of that salt",
            )
        statistics = self._core.statistics()
        return AllocateTimeout(
            f"{what}: {statistics.device_free} device blocks are free and at most "
            f"{statistics.evictable_blocks} evictable",
            hint="raise CacheConfig.device_blocks, or preempt a lease",
        )

    def _try_allocate(self, lease: Lease, num_tokens: int) -> bool:
        self._check_open()
        if self._waiting:
            return False
        if self._quota.limit_blocks is None:
            return self._grant(lease, num_tokens)
        lease_id = lease._live_id()
        if not self._quota.try_take(lease_id, lease.salt, self._blocks_for(num_tokens)):
            return False
        granted = False
        try:
            granted = self._grant(lease, num_tokens)
        finally:
            if not granted:
                self._quota.give_back(lease_id)
        return granted

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_tokens)

    def _grant(self, lease: Lease, num_tokens: int) -> bool:
        if self._admissions.paused:
            return False
        lease_id = lease._live_id()
        granted = self._core.allocate(lease_id, num_tokens)
        if granted == _NO_ROOM and self._saves_first:
            if self._transfers.make_clean(self._blocks_for(num_tokens)):
                return False  # the end of that transfer is the next try
            granted = self._core.allocate(lease_id, num_tokens)
        if granted == _NO_ROOM:
            return False
        if granted == _LOADING:
            lease.layers = self._transfers.start_onloads(lease_id)
        if self._pins:
            self._pins.release_used()
        if self._core.wants_write_backs():
            self._transfers.schedule_backups()
        return True

    def _retract(self, lease: Lease) -> None:
        """The grant crossed a cancellation: as if it had not been made."""
        self._core.retract(lease._id, self._steps.open)
        lease.layers = self._done
        self._transfers.cancel_abandoned()
        self._waiting.pump()
        self._leases_changed.notify()

    def _commit(self, lease: Lease, num_tokens: int, ready: Event | None) -> int:
        step = self._steps.open if ready is None else self.step(ready)
        if self._checksums is not None:
            self._record_checksums(lease, num_tokens)
        published = self._core.commit(lease._live_id(), num_tokens, step)
        if published and not self._steps.open:
            self._transfers.schedule_backups()
        if self._pending:
            self._pending.wake(lease._id)
        return published

    def _record_checksums(self, lease: Lease, num_tokens: int) -> None:
        block_tokens = self.config.block_tokens
        first = self._core.computed_tokens(lease._live_id()) // block_tokens
        self._unrecorded.append(lease.block_table[first : num_tokens // block_tokens])
        if not self._steps.open:
            self._flush_checksums()

    def _flush_checksums(self) -> None:
        if self._checksums is not None:
            for block_ids in self._unrecorded:
                self._checksums.record(block_ids)
        self._unrecorded.clear()

    def _truncate(self, lease: Lease, num_tokens: int) -> None:
        self._core.truncate(lease._live_id(), num_tokens, self._steps.open)
        self._waiting.pump()

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

    async def _preempt(self, lease: Lease, *, swap: bool) -> None:
        self._check_open()
        lease_id = lease._live_id()
        if swap:
            await self._swap_out(lease_id)
        else:
            self._core.retract(lease_id, self._steps.open)
        self._quota.give_back(lease_id)
        lease.layers = self._done
        self._transfers.cancel_abandoned()
        self._waiting.pump()
        self._pending.wake(lease_id)
        self._leases_changed.notify()

    async def _swap_out(self, lease_id: int) -> None:
        if not self._core.swap_out(lease_id):
            raise WouldBlock(
                "the host tier has no room for the table, or the cache was reset under the lease",
                hint="preempt without swap, or raise CacheConfig.host_blocks",
            )
        transfer_id = self._core.swap_transfer(lease_id)
        if not transfer_id:
            return
        plan = self._manager.swap_plan(transfer_id)
        if self._checksums is not None:
            self._checksums.record(plan.device_ids)
        await self._transfers.run(plan)
        if lease_id in self._owners and not self._core.is_swapped(lease_id):
            raise TransferError(
                "the table could not be moved; the lease keeps it", direction="offload"
            )

    def _fork(self, lease: Lease, owner: str, stream: object) -> Lease:
        self._check_open()
        lease_id, sources, targets = self._core.fork(lease._live_id())
        if not lease_id:
            raise WouldBlock("no room to fork the lease", hint="preempt another one")
        self._owners[lease_id] = owner or lease.owner
        child = Lease(self, lease_id, owner or lease.owner, lease.salt, self._done)
        clone_blocks(self.regions, sources, targets, stream)
        return child

    def _release(self, lease: Lease, after: Event | None) -> None:
        lease_id, lease._id = lease._id, 0
        if lease_id in self._owners:  # else the engine closed without it
            in_open_step = after is None or self._closing
            self._forget(lease_id, self._steps.open if in_open_step else self.step(after))

    def _forget(self, lease_id: int, step: int) -> None:
        del self._owners[lease_id]
        self._core.release(lease_id, step)
        self._quota.give_back(lease_id)
        self._transfers.cancel_abandoned()
        if self._waiting:
            self._waiting.pump()
        if self._pending:
            self._pending.wake(lease_id)
        self._leases_changed.notify()

    def _collect(self, lease_id: int) -> bool:
        """A lease was garbage-collected; returns whether it held blocks. Any thread."""
        if lease_id not in self._owners:
            return False
        holds_blocks = self._core.is_granted(lease_id)
        if threading.get_ident() == self._thread:
            self._forget(lease_id, self._steps.open)
        elif self._thread:
            self._loop.call_soon_threadsafe(self._forget, lease_id, self._steps.open)
        return holds_blocks

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
        if self._unrecorded:
            if event is not None:
                event.synchronize()
            self._flush_checksums()
        step = self._steps.close(event)
        self._transfers.send_backups()
        return step

    def _after_report(self, report: TransferReport) -> None:
        if report.outcome != "done":
            self._pending.wake_all()  # whoever failed will not publish what was promised
        self._waiting.pump()

    def _break(self, error: BaseException) -> None:
        """The device cannot go on: refuse everything, wake everybody."""
        self._broken = error
        failure = BrokenEngineError(f"the device failed: {error}")
        failure.__cause__ = error
        self._waiting.fail_all(failure)
        log.error("engine.broken", reason=str(error))

    # --- capacity and state ---------------------------------------------------------------------

    async def evict(self, num_blocks: int, tier: Tier = "device") -> int:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        Blocks with a host copy only lose the device copy; under ``"write_back"`` the others are
        saved first, as far as the host has room.

        Returns:
            How many were evicted; fewer when the rest is leased or being copied.

        Cancellation: copies that have begun end as host copies.
        """
        self._check_open()
        if num_blocks < 0:
            raise UsageError(f"cannot evict {num_blocks} blocks")
        evicted = 0
        if tier == "host":
            evicted = self._core.evict_host(num_blocks)
        else:
            evicted = self._core.evict_device(num_blocks)
            while evicted < num_blocks and self._transfers.make_clean(num_blocks - evicted):
                await self._controller.drain()
                evicted += self._core.evict_device(num_blocks - evicted)
        self._waiting.pump()
        return evicted

    async def prefetch(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        ttl_seconds: float = 0.0,
    ) -> Hit:
        """Bring what is cached in host memory onto the device; does not wait for capacity.

        Args:
            tokens: the prompt, as for ``match``; so are ``salt`` and ``adapter``.
            ttl_seconds: keep it there until a lease uses it, at most so long.

        Returns:
            What is on the device at the end, as ``device_tokens``.

        Raises:
            TransferError: a copy failed; the blocks before it are there.

        Cancellation: copies that have begun end as cached blocks.
        """
        lease = self.match(tokens, salt=salt, adapter=adapter, owner="prefetch")
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
        ttl_seconds: float | None = None,
    ) -> Pin:
        """Keep what is cached of a prompt on the device; host blocks are onloaded first.

        Args:
            tokens: the prompt, as for ``match``; so are ``salt`` and ``adapter``.
            ttl_seconds: release by itself after so long; None for never.

        Raises:
            WouldBlock: no room for the blocks that are not on the device.
            TransferError: a copy failed; nothing is pinned.

        Cancellation: nothing is pinned.
        """
        lease = self.match(tokens, salt=salt, adapter=adapter, owner="pin")
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
        if not hit.total or not lease.try_allocate(hit.total):
            lease.release()
            return None
        try:
            await lease.layers.wait_all()
        except BaseException:
            lease.release()
            raise
        return self._pins.add(lease, lease.cached_tokens, until_used=until_used)

    async def reset(self) -> None:
        """Forget everything that is cached; live leases keep their blocks but publish no more.

        Returns when no transfer that was under way is left.

        Cancellation: the cache is empty all the same; transfers end in the background.
        """
        self._check_open()
        self._core.reset()
        self._pending.wake_all()
        self._waiting.pump()
        await self._controller.drain()

    # --- control --------------------------------------------------------------------------------

    def pause(self) -> None:
        """Grant nothing until ``resume``; requests wait in line. Counts: pair the calls."""
        self._check_open()
        self._admissions.pause()

    def resume(self) -> None:
        """Undo one ``pause``.

        Raises:
            UsageError: there was none.
        """
        self._check_open()
        self._admissions.resume()

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until no lease is out and nothing is in flight; ``resume`` ends it.

        Raises:
            TimeoutError: names the owners of the leases still out; not paused any more.

        Cancellation: not paused any more.
        """
        self.pause()
        try:
            async with asyncio.timeout(timeout):
                await self._leases_changed.wait_for(self._only_idle_leases, None)
                await self.drain()
        except BaseException as error:
            self.resume()
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"not quiet within {timeout} s; leases out: {self._owner_names()}"
                ) from None
            raise

    def _only_idle_leases(self) -> bool:
        """Those in line hold nothing."""
        return not any(self._core.is_granted(lease_id) for lease_id in self._owners)

    @asynccontextmanager
    async def updating_weights(self, timeout: float | None = None) -> AsyncIterator[None]:
        """New weights make all KV wrong: nothing is granted inside, nothing is cached after.

        Live leases may go on with what they hold; they publish no more.

        Raises:
            TimeoutError: transfers did not end in time; nothing changed.
        """
        self.pause()
        try:
            async with asyncio.timeout(timeout):
                await self._controller.drain()
            try:
                yield
            finally:
                self._core.reset()
        finally:
            self._admissions.resume()

    async def resize(self, device_blocks: int, timeout: float | None = None) -> None:
        """Change the device tier's capacity; the regions must hold as many blocks.

        Shrinking drops cached blocks beyond the new size and waits for leases that hold such.

        Raises:
            UsageError: larger than the regions, or not above ``reserve_blocks``.
            TimeoutError: leases kept blocks beyond the new size; nothing changed.
        """
        self._check_open()
        blocks = self.regions.num_blocks
        if blocks is not None and device_blocks > blocks:
            raise UsageError(f"cannot resize to {device_blocks} blocks: the regions hold {blocks}")
        if device_blocks <= self.config.reserve_blocks:
            raise UsageError(
                f"cannot resize to {device_blocks} blocks: reserve_blocks is "
                f"{self.config.reserve_blocks}"
            )
        if not await self._leases_changed.wait_for(lambda: self._resized(device_blocks), timeout):
            raise TimeoutError(
                f"blocks beyond {device_blocks} are still in use after {timeout} s; leases out: "
                f"{self._owner_names()}"
            )
        self._waiting.pump()

    def _resized(self, device_blocks: int) -> bool:
        try:
            self._core.resize_device(device_blocks)
        except UsageError:
            return False
        return True

    # --- state ----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until nothing is in flight, backups of what was committed included."""
        self._check_open()
        self._transfers.send_backups()
        await self._controller.drain()

    def statistics(self) -> Statistics:
        core = self._core.statistics()
        fields = {name: getattr(core, name) for name in _CORE_FIELDS}
        return Statistics(
            device_blocks=self._core.device_blocks,
            host_blocks=self.config.host_blocks,
            waiting=len(self._waiting),
            **fields,
        )

    def worker_statistics(self) -> WorkerStatistics:
        return self._controller.statistics()

    def poller_statistics(self) -> PollerStatistics:
        return self._poller.statistics()

    def dump(self) -> dict[str, object]:
        """Who holds what, for a person to read; plain values, ready for JSON."""
        return {
            "leases": [
                {"owner": owner or "unnamed", **self._manager.describe(lease_id)}
                for lease_id, owner in self._owners.items()
            ],
            "waiting": [
                {"owner": lease.owner or "unnamed", "num_tokens": num_tokens}
                for lease, num_tokens in self._waiting.entries()
            ],
            "pins": len(self._pins),
            "paused": self._admissions.paused,
            "statistics": msgspec.to_builtins(self.statistics()),
            "worker": msgspec.to_builtins(self._controller.statistics()),
        }

    def check_invariants(self) -> list[str]:
        """What of I1-I6 does not hold, as sentences; empty when all is well. Scans everything."""
        return self._core.violations()

    def __repr__(self) -> str:
        s = self._core.statistics()
        return (
            f"<CacheEngine device {self.config.device_blocks - s.device_free}/"
            f"{self.config.device_blocks} host {self.config.host_blocks - s.host_free}/"
            f"{self.config.host_blocks}, {len(self._owners)} leases, "
            f"{len(self._waiting)} waiting>"
        )


_CORE_FIELDS = tuple(
    name
    for name in Statistics.__struct_fields__
    if name not in ("device_blocks", "host_blocks", "waiting")
)
