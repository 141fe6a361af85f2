"""CacheEngine: the facade that a serving loop awaits.

    engine, lease ─► scheduler decides ─► (value, effects) ─► dispatcher applies ─► worker moves
                         ▲                                                              │
                         └──────────────── scheduler.complete(report) ◄─────────────────┘

There is no background task: everything happens in the caller's calls and in callbacks of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

import msgspec

from aiokv.checks import Unique, arguments
from aiokv.engine.batches import Batches
from aiokv.engine.computing import Computing
from aiokv.engine.control import Control
from aiokv.engine.leases import NO_NAME, Leases
from aiokv.engine.lifecycle import Lifecycle
from aiokv.engine.lifetime import Phase
from aiokv.engine.parts import Parts, check_arguments
from aiokv.engine.pins import Pins
from aiokv.engine.recovery import Recovery
from aiokv.engine.sleeping import TIERS, Sleep
from aiokv.engine.steps import Steps
from aiokv.worker.device.base import as_event
from aiokv.worker.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.config import CacheConfig
    from aiokv.engine.computing import ComputeBatch
    from aiokv.engine.pins import Pin
    from aiokv.lease import Lease
    from aiokv.ranks.group import RankGroup
    from aiokv.scheduler.scheduler import CacheScheduler
    from aiokv.types import Hit, Item, Statistics, Tier, TokenIds
    from aiokv.worker.base import Worker
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.lanes import WorkerStatistics
    from aiokv.worker.poller import PollerStatistics
    from aiokv.worker.views import LayerView


@final
@arguments()
class CacheEngine(Unique):
    """Prefix cache over device and host memory, for one event loop.

    Args:
        config: sizes and rules.
        regions: the device tensors. Without any, the cache keeps books only: transfers move
            nothing and are done in the next pass of the loop.
        device: where the regions live: ``"cpu"``, which is the default, ``"cuda"`` for the current
            GPU, ``"cuda:1"``, or a :class:`CpuDevice` or :class:`CudaDevice`.
        ranks: instead of both: the tensors are those of several processes.

    ``async with`` binds it to the running loop; every method is to be called on that loop. Methods
    that only read may be called before ``async with`` and after closing, too. In other threads,
    ``statistics()``, ``worker_statistics()``, ``asleep``, ``open_step``, ``has_begun`` and
    ``repr()`` may be called; all else raises ``UsageError`` there.

    Raises:
        ConfigError: an argument is of the wrong type, unknown, or contradicts another; or there is
            no memory for the index.
        UsageError: the regions are too small for ``config``.
    """

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | str | None = None,
        *,
        ranks: RankGroup | None = None,
    ) -> None:
        check_arguments(config, regions, device, ranks)
        regions = Regions(num_layers=0) if regions is None else regions
        parts = Parts.new(
            config,
            regions,
            device,
            ranks,
            on_report=lambda report: self._recovery.on_report(report),
        )
        self.config = config
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._worker = parts.worker
        self._poller = parts.poller
        self._steps = Steps(parts)
        self._recovery = Recovery(parts, self._steps)
        computing = Computing(parts, on_failure=self._recovery.fail)
        self._leases = Leases(parts, self._steps, computing)
        self._batches = Batches(parts, self._leases, computing)
        self._pins = Pins(parts, self._leases)
        self._control = Control(parts)
        self._sleep = Sleep(parts, regions, self._control)
        self._lifecycle = Lifecycle(parts, self._steps, computing, self._leases, self._recovery)

    # --- opening and closing ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._lifecycle.open()
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
        await self._lifecycle.aclose(drain_timeout)

    # --- prompts --------------------------------------------------------------------------------

    def match(
        self,
        tokens: TokenIds,
        *,
        salt: str = NO_NAME,
        adapter: str = NO_NAME,
        items: Sequence[Item] = (),
        owner: str = NO_NAME,
        read: bool = True,
        write: bool = True,
    ) -> Lease:
        """Look up how much of a prompt is cached. Nothing is pinned; recency is refreshed.

        Args:
            tokens: ``[N]`` token ids, N >= 1; copied. A contiguous int32 array is the fastest.
            salt: prompts share blocks only with prompts of the same salt (a tenant, say).
            adapter: likewise; names what else changes the KV, such as a LoRA adapter.
            items: the prompt's multimodal items, in order; they do not overlap.
            owner: a name for messages.
            read: False to hit nothing.
            write: False to publish nothing.

        Returns:
            A lease, which may be awaited (it does not suspend) or entered with ``async with``.

        Raises:
            UsageError: no tokens, or one outside int32; or items that are not in the prompt, or
                out of order; or another argument is of the wrong type.
            ClosedError: the engine is closed or closing.
        """
        return self._leases.match(
            tokens, salt=salt, adapter=adapter, items=items, owner=owner, read=read, write=write
        )

    def match_many(self, prompts: Iterable[TokenIds], *, salt: str = "") -> list[Lease]:
        """``match`` for each; a bad prompt raises after those before it were released."""
        return self._batches.match(prompts, salt=salt)

    # --- batches of the model ---------------------------------------------------------------------

    def computing(self, leases: Iterable[Lease]) -> ComputeBatch:
        """Name the leases of a batch before the model computes with them.

        ::

            with engine.computing(leases) as batch:
                await batch.run(model.forward, ...)

        A lease that is released, cancelled, preempted, truncated or collected while the batch is
        in flight gives its blocks back when the batch has ended. So no other request gets a block
        that a thread or a stream may still write. The batch has ended when the ``with`` block has
        ended and everything that ``batch.run`` and ``batch.ends_with`` were given is done. On a
        device that computes in a stream, and with ranks, work without an event belongs to the step
        that is open at the end of the batch: ``step(event)`` covers it.

        Args:
            leases: allocated leases, each once. A lease may be in several batches at a time.

        Returns:
            A context manager, to be entered once.

        Raises:
            LeaseError: on entering: a lease is not allocated, is being swapped, is released, or
                belongs to another engine. Nothing changed.
        """
        return self._batches.computing(leases)

    def extend(self, leases: Sequence[Lease], num_tokens: int) -> None:
        """Give each lease ``num_tokens`` more positions; all of them or none.

        Never waits, and does not queue behind ``allocate``.

        Raises:
            WouldBlock: not enough room; preempt a lease and try again. Nothing changed.
            LeaseError: a lease is released, not granted, named twice, or of another engine. Nothing
                changed.
        """
        self._batches.extend(leases, num_tokens)

    def commit_many(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> int:
        """``commit`` for each; returns the blocks that became shareable.

        Raises:
            LeaseError: of the first lease that refuses; those before it are committed.
            UsageError: not one number per lease; nothing changed.
        """
        return self._batches.commit(leases, num_tokens)

    def release_many(self, leases: Iterable[Lease]) -> None:
        """``release`` for each."""
        self._batches.release(leases)

    def layers(self, leases: Sequence[Lease]) -> LayerView:
        """One counter for all transfers that a batch waits for.

        It raises when blocks of a lease of the batch failed. Its errors have no position: call
        ``recompute_from`` of each lease.
        """
        return self._batches.layers(leases)

    def block_tables(
        self,
        leases: Sequence[Lease],
        out: NDArray[np.int32] | None = None,
        fill: int = -1,
        group: str | None = None,
    ) -> NDArray[np.int32]:
        """The block tables as rows, padded with ``fill``.

        Args:
            leases: B leases.
            out: ``[>= B, >= M]`` C-contiguous int32 array, M being the longest table; all of it is
                written. None for a new ``[B, M]`` array.
            fill: the value behind each table, and in rows without a lease.
            group: a window group, as of ``Lease.window_table``; None for all other layers.

        Raises:
            UsageError: ``out`` is too small or of another kind, or no such group; nothing was
                written.
        """
        return self._batches.block_tables(leases, out, fill, group)

    def step(self, event: Event | None = None) -> int:
        """Close the open step: what was computed in it is covered by ``event``.

        The step covers what was committed in it, what was computed by batches that ended in it (see
        ``computing``), and what was released in it by leases that no batch has named. Transfers of
        those blocks wait for the event on the device. On a device that computes before it
        returns (cpu), closing a step only sends the backups on their way. On others, close a step
        also after a last commit: what belongs to an open step cannot be saved, so ``"write_back"``
        cannot evict it, and ``allocate`` waits. Timeouts name such a step, and a warning is logged.

        Args:
            event: recorded on the compute stream behind the step's work, the events of later
                steps behind it; None when the work has finished. With ranks always None: the step
                is over when the runner of every rank has closed it with ``Rank.step``, and it is.

        Returns:
            The number of the step that was closed.

        Raises:
            UsageError: the worker cannot wait for such an event; the step stays open.
        """
        self._lifetime.check_loop()
        return self._steps.close(as_event("event", event))

    @property
    def open_step(self) -> int:
        """The number that ``step()`` will return; what a rank's runner passes to ``Rank.step``.

        Any thread.
        """
        return self._scheduler.read.next_step

    # --- tiers ------------------------------------------------------------------------------------

    async def evict(self, num_blocks: int, tier: Tier = "device") -> int:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        Blocks with a host copy only lose the device copy; under ``"write_back"`` the others are
        saved first, as far as the host has room.

        Returns:
            How many were evicted; fewer when the rest is leased or being copied.

        Cancellation: copies that have begun end as host copies.
        """
        return await self._control.evict(num_blocks, tier)

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
        return await self._pins.prefetch(
            tokens, salt=salt, adapter=adapter, items=items, ttl_seconds=ttl_seconds
        )

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
        return await self._pins.pin(
            tokens, salt=salt, adapter=adapter, items=items, ttl_seconds=ttl_seconds
        )

    # --- control ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Grant nothing until ``resume``; requests wait in line. Counts: pair the calls."""
        self._control.change_gate("pause")

    def resume(self) -> None:
        """End one ``pause``, or one ``quiesce`` that has returned.

        Nothing is granted while a tier is asleep, inside ``updating_weights``, or
        while a ``quiesce`` waits.

        Raises:
            UsageError: there is none. Nothing changed.
        """
        self._control.change_gate("resume")

    async def reset(self, timeout: float | None = None) -> None:
        """Forget everything that is cached; live leases keep their blocks but publish no more.

        Pins are released. Returns when all transfers that were in flight have ended.

        Raises:
            ControlTimeout: some have not ended in time; the cache is empty nevertheless.

        Cancellation: the cache is empty nevertheless; transfers end in the background.
        """
        await self._control.reset(timeout)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight, backups of what was committed included.

        Raises:
            ControlTimeout: something is; nothing changed.

        Cancellation: nothing changed.
        """
        await self._control.drain(timeout)

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until nothing uses the blocks; ``resume`` ends it.

        Waits until no lease is held, no transfer is in flight, and every step that used blocks is
        closed and has finished on the device.

        Raises:
            ControlTimeout: names the owners of the leases still held, or the step; the engine is
                not paused any more.

        Cancellation: the engine is not paused any more.
        """
        await self._control.quiesce(timeout)

    def updating_weights(self, timeout: float | None = None) -> AbstractAsyncContextManager[None]:
        """Grant nothing inside the block, and forget at its end all that is cached.

        New weights make all KV wrong. Open leases keep what they hold, and publish no more. Pins
        are released.

        Raises:
            ControlTimeout: transfers did not end in time; nothing changed.

        Cancellation: before the block is entered, nothing changed.
        """
        return self._control.updating_weights(timeout)

    async def resize(self, device_blocks: int, timeout: float | None = None) -> None:
        """Change the device tier's capacity; the regions must hold as many blocks.

        Shrinking waits for leases and copies on blocks beyond the new size. What is cached there,
        and what is cached on the device behind it, stays in host memory if it has a copy there, and
        is dropped otherwise.

        Raises:
            UsageError: larger than the regions, or not above ``reserve_blocks``.
            ControlTimeout: leases kept blocks beyond the new size; nothing changed.

        Cancellation: the size is the old one, or the new one.
        """
        await self._control.resize(device_blocks, timeout)

    @property
    def asleep(self) -> frozenset[Tier]:
        """Tiers without memory."""
        return self._sleep.asleep

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
        await self._sleep.sleep(tags, timeout)

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
        await self._sleep.wake_up(tags, regions, timeout)

    async def restart_ranks(self) -> None:
        """Bring lost ranks back; the cache is empty then, and the engine serves again.

        When a rank is lost, everything that was cached is forgotten at once, and all leases hold
        nothing, as after ``preempt``: their next use raises ``LeaseError``, ``resume`` allocates
        anew, and all their positions are to be computed again. Until this has returned, ``match``,
        ``allocate`` and ``resume`` raise ``BrokenEngineError``.

        Call it when no step runs any more on the ranks that are left.

        Raises:
            UsageError: no rank is lost.
            RankLost: not all came back; nothing changed.

        Cancellation: nothing changed; call it again.
        """
        await self._recovery.restart_ranks()

    # --- what is there ----------------------------------------------------------------------------

    @property
    def regions(self) -> Regions:
        """The device tensors; without tensors while the device tier is asleep."""
        return self._sleep.regions

    @property
    def scheduler(self) -> CacheScheduler:
        """The part that decides, for tools such as :func:`aiokv.testing.record`.

        Its transitions are the engine's to call: the effects of others would not be applied.
        """
        return self._scheduler

    @property
    def worker(self) -> Worker:
        """The part that moves the bytes, for tools. Its plans are the engine's to submit."""
        return self._worker

    @property
    def has_begun(self) -> bool:
        """True from the first ``async with`` on, and after ``aclose``."""
        return self._lifetime.phase is not Phase.NEW

    def statistics(self) -> Statistics:
        """Return counts and the state of the pools. Any thread."""
        return self._scheduler.read.statistics()

    def worker_statistics(self) -> WorkerStatistics:
        """Return what the worker has moved; zeros before ``async with``. Any thread."""
        return self._worker.statistics()

    def poller_statistics(self) -> PollerStatistics:
        """Return what waiting has cost; zeros before ``async with``."""
        self._lifetime.check_thread()
        return self._poller.statistics()

    def dump(self) -> dict[str, object]:
        """Return which lease holds which blocks, as plain values that JSON can represent."""
        self._lifetime.check_thread()
        return {
            **self._scheduler.read.describe(),
            "open_step": self._scheduler.read.open_step,
            "asleep": sorted(self.asleep),
            "statistics": msgspec.to_builtins(self.statistics()),
            "worker": msgspec.to_builtins(self.worker_statistics()),
            "ranks": self._worker.describe(),
        }

    def check_invariants(self) -> list[str]:
        """Return a description of each violated invariant: I1-I6, and those of the waiting lines.

        Scans everything.
        """
        self._lifetime.check_thread()
        return self._scheduler.violations()

    def __repr__(self) -> str:
        s = self._scheduler.read.statistics()
        return (
            f"<CacheEngine device {self.config.device_blocks - s.device_free}/"
            f"{self.config.device_blocks} host {self.config.host_blocks - s.host_free}/"
            f"{self.config.host_blocks}, {self._scheduler.read.num_leases} leases, "
            f"{s.waiting} waiting>"
        )
