"""CacheEngine: the facade that a serving loop awaits.

    engine, lease ─► scheduler decides ─► (value, effects) ─► dispatcher applies ─► worker moves
                         ▲                                                              │
                         └──────────────── scheduler.complete(report) ◄─────────────────┘

The engine starts no background task: it runs inside the caller's calls and in callbacks of the
event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

from aiokv.base import checks
from aiokv.base.checks import Unique, arguments
from aiokv.engine.batches import Batches
from aiokv.engine.computing import Computing
from aiokv.engine.control import Control
from aiokv.engine.events import Events
from aiokv.engine.expiries import Expiries
from aiokv.engine.fetches import Fetches
from aiokv.engine.inspection import Inspection
from aiokv.engine.leases import NO_NAME, Leases
from aiokv.engine.lifecycle import Lifecycle
from aiokv.engine.parts import Parts, check_arguments
from aiokv.engine.peers import PeerTickets
from aiokv.engine.pins import Pins
from aiokv.engine.recording import TraceRecording, writer_for
from aiokv.engine.recovery import Recovery
from aiokv.engine.retention import Retention
from aiokv.engine.sleeping import TIERS, Sleep
from aiokv.engine.status import Status
from aiokv.engine.steps import Steps
from aiokv.layout.regions import Regions
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    import asyncio
    import os
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.statistics import CacheStatistics, Statistics
    from aiokv.base.types import Health, Hit, Item, StepTokenIds, Tier, TokenIds
    from aiokv.config.cache_config import CacheConfig
    from aiokv.engine.batch import Batch, LeaseT
    from aiokv.engine.computing import ComputeBatch
    from aiokv.engine.events import KVEvents
    from aiokv.engine.lease import Lease
    from aiokv.engine.pins import Pin
    from aiokv.engine.sending import Sending
    from aiokv.events.schema import HashKind
    from aiokv.peers.options import Peers
    from aiokv.ranks.group import RankGroup
    from aiokv.stores.base import Store
    from aiokv.stores.use import StoreUse
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.views import LayerView


@final
@arguments()
class CacheEngine(Unique):
    """Prefix cache over device and host memory, for one event loop.

    Args:
        config: sizes and policies of the cache.
        regions: the device tensors. Without tensors the engine only keeps the index: transfers
            move no bytes and complete in the next pass of the event loop.
        device: the device of the tensors: ``"cpu"`` (the default), ``"cuda"`` for the current GPU,
            ``"cuda:1"``, or a :class:`CpuDevice` or :class:`CudaDevice`.
        ranks: the processes that own the tensors; replaces ``regions``, ``device``, ``stores`` and
            ``peers``.
        stores: stores below the host tier, in the order in which they are asked: a ``DiskStore``
            and the like from :mod:`aiokv.stores`, or URLs such as ``"disk:/nvme/kv?bytes=400GiB"``.
            They belong to the engine, which opens and closes them; see :class:`StoreUse` for stores
            that cannot be opened. ``CacheConfig.model`` must name the model.
        peers: how the engine exchanges blocks with engines on other servers: see
            :class:`aiokv.Peers`, ``Lease.receive`` and ``send``. ``CacheConfig.model`` must name
            the model.

    ``async with`` binds the engine to the running event loop. Call every method on that loop.
    Read-only methods may also be called before ``async with`` and after closing. Any thread may
    call ``batch()``, ``statistics()``, ``cache_statistics()``, ``asleep``, ``open_step``, ``loop``,
    ``inspect`` and ``repr()``; all other methods raise ``UsageError`` in another thread.

    Raises:
        ConfigError: an argument has the wrong type, is unknown, or contradicts another argument;
            or the memory does not suffice for the index.
        UsageError: the tensors hold fewer blocks or state slots than ``config`` requires.
    """

    def __init__(
        self,
        config: CacheConfig,
        regions: Regions | None = None,
        device: Device | str | None = None,
        *,
        ranks: RankGroup | None = None,
        stores: Sequence[Store | StoreUse | str] = (),
        peers: Peers | None = None,
    ) -> None:
        check_arguments(config, regions, device, ranks, stores, peers)
        regions = Regions(num_layers=0) if regions is None else regions
        parts = Parts.new(config, regions, device, ranks, stores, peers)
        self.config = config
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._speed = parts.speed
        self._steps = Steps(parts)
        peer_tickets = PeerTickets(parts)
        self._recovery = Recovery(parts, self._steps, peer_tickets)
        expiries = Expiries(parts.lifetime)
        computing = Computing(
            parts, expiries, on_failure=self._recovery.fail, on_end=peer_tickets.after_batch
        )
        fetches = Fetches(parts)
        self._leases = Leases(parts, self._steps, computing, fetches, peer_tickets, expiries)
        self._batches = Batches(parts, self._leases, computing, expiries)
        self._pins = Pins(parts, self._leases, fetches)
        self._retention = Retention(parts)
        self._control = Control(parts, peer_tickets)
        self._sleep = Sleep(parts, regions, self._control)
        self._lifecycle = Lifecycle(
            parts,
            self._steps,
            computing,
            self._leases,
            self._recovery,
            peer_tickets,
            (expiries, self._retention),
        )
        self._peer_tickets = peer_tickets
        self._status = Status(parts, self._sleep, peer_tickets)
        self._inspection = Inspection(parts, self._status, self._sleep)
        self._events = Events(parts)

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
        # After an exception, the tasks that would release the leases may have ended: do not wait
        # for them.
        await self.aclose(0.0 if exc_type is not None else None)

    async def aclose(self, drain_timeout: float | None = None) -> None:
        """Close the engine: wait for leases and transfers, join threads, free memory.

        From the call on, the engine refuses new work. Idempotent. With stores, the engine then
        saves the committed blocks for at most 30 s, or ``drain_timeout`` if that is less.

        ``drain_timeout`` does not limit the wait for transfers in flight, because memory that a
        copy or a store may access is not freed. A store that does not end its operations delays the
        return by up to 20 s: after 10 s its operations are cancelled, and 10 s later the engine
        keeps the host memory until the process ends, and closes without the store.

        Args:
            drain_timeout: seconds to wait for leases that are still held; None for
                ``CacheConfig.drain_timeout_seconds``. When the time has passed, the engine logs
                the owners of these leases and closes without them.

        Raises:
            UsageError: ``drain_timeout`` is not a number, or the engine's loop is not closed and
                the call is made outside it. Nothing changed.

        Cancellation: the engine keeps its memory, and transfers go on; call ``aclose`` again.
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
        """Look up the cached prefix of a prompt, and refresh its recency.

        The lease holds no blocks until it is granted: the prefix can still be evicted.

        Args:
            tokens: ``[N]`` token ids, N >= 1; copied. A contiguous int32 array is fastest.
            salt: namespace of the prompt, e.g. a tenant; prompts share blocks only within one salt.
            adapter: name of a LoRA adapter, or of anything else that changes the KV; prompts share
                blocks only within one adapter.
            items: multimodal items of the prompt, in order and without overlap.
            owner: name of the request for error and log messages.
            read: False to use no cached block.
            write: False to publish no block.

        Returns:
            A lease in state ``MATCHED``. It can be awaited, which does not suspend, or entered with
            ``async with``, which releases it at the end.

        Raises:
            UsageError: ``tokens`` is empty or has an id outside int32, an item is outside the
                prompt or out of order, or another argument has the wrong type. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """
        return self._leases.match(tokens, salt, adapter, items, owner, read, write)

    def would_hit(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
    ) -> Hit:
        """Return the cached prefix that ``match`` would find, and change nothing.

        A router that asks several engines sends the prompt to the one with the longest prefix. The
        call refreshes no recency and holds nothing, so prompts that are sent elsewhere keep no
        block in the cache.

        Args:
            tokens: ``[N]`` token ids of the prompt, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The prefix in tokens by tier. Blocks that only a store has are not counted.

        Raises:
            UsageError: an argument is wrong, as for ``match``; or the call is made outside the
                engine's loop.
            ClosedError: the engine is closed.
        """
        return self._leases.would_hit(tokens, salt=salt, adapter=adapter, items=items)

    # --- order of eviction ------------------------------------------------------------------------

    def retain(
        self,
        tokens: TokenIds,
        *,
        seconds: float,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
    ) -> int:
        """Evict the cached blocks of a prompt after all blocks that are not retained.

        Unlike a pin, a retention refuses no memory to a request: when no other block can be
        evicted, retained blocks are, the lowest priority first, and then those whose retention
        ends first. A second call for the same blocks extends the retention or raises its priority.
        The call covers full blocks of full attention on the device and in host memory; later blocks
        of the session, its snapshots of recurrent state and its sliding windows are not covered.
        Priorities and times are those of TensorRT-LLM's ``KvCacheRetentionConfig``.

        Args:
            tokens: ``[N]`` token ids, as for ``match``. Call after the commit of their blocks.
            seconds: time from now, at most 86,400. The retention ends at most an eighth of the time
                later, or one second; the blocks then count as used at that time.
            priority: 0 to 3; blocks of higher priorities are evicted later.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of retained tokens: the cached full blocks of the prompt.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """
        return self._retention.retain(
            tokens, seconds=seconds, priority=priority, salt=salt, adapter=adapter, items=items
        )

    def demote(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
    ) -> int:
        """Evict the last cached blocks of a prompt before all other blocks, until their next use.

        These are the blocks that only this prompt has: none that another cached prompt continues,
        or that a lease or a transfer uses. So release the leases of the session first.

        Args:
            tokens: ``[N]`` token ids of the whole session, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of demoted tokens.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """
        return self._retention.demote(tokens, salt=salt, adapter=adapter, items=items)

    def forget(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
    ) -> int:
        """Drop the last cached blocks of a prompt from the device and host memory.

        For a session that has ended. The blocks are those of ``demote``; stores keep theirs.

        Args:
            tokens: ``[N]`` token ids of the whole session, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.

        Returns:
            The number of dropped tokens.

        Raises:
            UsageError: an argument is wrong; or the call is made outside the engine's loop.
            ClosedError: the engine is closed.
        """
        return self._retention.forget(tokens, salt=salt, adapter=adapter, items=items)

    # --- other engines ----------------------------------------------------------------------------

    def send(self, lease: Lease, ticket: bytes) -> Sending:
        """Send the blocks of a lease to the engine that has made a ticket.

        ::

            async with engine.send(lease, ticket):
                for n in chunks_of_the_prompt:
                    ...  # compute the positions up to n
                    lease.commit(n)

        Entering the block checks the ticket and connects. Cached blocks are sent at once, the
        others as ``lease.commit`` notes them, while the model computes the next ones. On a device
        that computes in a stream, blocks move when their step is closed: see ``step``. Leaving the
        block waits until the receiver has acknowledged all blocks, but not beyond the deadline of
        the ticket; an exception cancels the send. The failure of the other engine raises nothing
        after the entry: see ``Sending.failure``.

        Recurrent state and windows are sent when exactly ``Sending.num_tokens`` positions are
        committed, and no batch computes with the lease: let a step end there. Until they are
        acknowledged, the lease can neither compute nor commit. A commit of further positions in the
        same step ends the send, because the state of the ticket does not exist any more.

        ``preempt`` and ``release`` end the send, and so does ``truncate`` into the positions of the
        ticket; so do ``reset`` and ``updating_weights``.

        Args:
            lease: a granted lease of the same prompt, salt, adapter and items as that of the
                receiving engine.
            ticket: ``Receiving.ticket`` of that engine.

        Returns:
            A :class:`Sending`, to be entered with ``async with`` once. Entering raises the errors
            of the ticket and of the connection: see ``Sending.__aenter__``.

        Raises:
            UsageError: ``lease`` is not a lease.
            LeaseError: the lease is released, or belongs to another engine.

        Cancellation: while connecting, nothing is left behind; later, the send is cancelled, and
        the receiver keeps the blocks that have arrived.
        """
        return self._leases.send(lease, ticket)

    # --- batches of the model ---------------------------------------------------------------------

    def batch(self, leases: Iterable[Lease] = ()) -> Batch[Lease]:
        """Return a batch with these leases, for ``advance`` and other methods that take leases.

        Args:
            leases: its first rows, in any state but released.

        Raises:
            UsageError: an element is not a lease, or is listed twice.
            LeaseError: a lease is released, or belongs to another engine.
        """
        return self._batches.new(leases)

    def advance(
        self,
        batch: ComputeBatch[LeaseT] | Batch[LeaseT],
        tokens: StepTokenIds,
        counts: TokenIds | None = None,
        *,
        draft_tokens: int = 0,
    ) -> tuple[LeaseT, ...]:
        """Account for a step of the model in one call: commit, append and extend for each lease.

        ::

            with engine.computing(batch) as step:
                tokens = await step.run(model, engine.block_tables(batch))
            for lease in engine.advance(step, tokens):
                ...  # no room: preempt it, or call advance again later
            engine.step()

        The next step computes the last token of each lease. So the call names the tokens of the
        lease, commits all positions before the last token, and makes sure that the lease has
        positions for the last token and for ``draft_tokens`` behind it. The first call for a lease
        follows its prefill: it commits the whole prompt. The commits belong to the open step, so
        call ``advance`` before ``step``; on a GPU, where the tokens arrive later, the blocks are
        saved one step later.

        With speculative decoding, the tokens of a lease are the accepted draft tokens, whose
        positions the step has computed, and then the token that the model has sampled. The
        positions of rejected draft tokens stay with the lease; the next step computes them anew.

        Leases get blocks in the order of their rows. A lease without room is left as it is, and
        ``advance`` can be called again for it alone. Before you preempt it, call ``append`` with
        all its tokens but the last, and ``commit`` of these positions: otherwise the model computes
        them again.

        Args:
            batch: what ``computing(batch)`` has returned, so that the rows are those of the step:
                leases that were released or removed since its block was entered are skipped, and
                leases that were added are not advanced. Or a ``Batch`` that ``computing`` has not
                had, such as ``engine.batch([lease])``. Each lease is granted.
            tokens: ids from 0, one row per lease: ``[N]`` or ``[N, K]`` integers, or a list of N
                lists. An int32 array is fastest.
            counts: ``[N]``, with ``[N, K]``: number of leading tokens of each row, the others are
                padding; a lease with 0 tokens is left as it is. None for all K.
            draft_tokens: positions behind the last token of each lease, for the draft tokens of the
                next step.

        Returns:
            The leases for which there was no room, in the order of their rows; usually empty.

        Raises:
            UsageError: a token is negative or too large, a count is out of range, or ``tokens`` has
                another number of rows than the batch. ``computing`` has had the ``Batch``; or the
                ``ComputeBatch`` was not entered, or has a list. Nothing changed in any lease.
            LeaseError: a lease is not granted; or it has fewer positions than the tokens before its
                last one need. ``lease_id`` and ``owner`` of the error name it. Nothing changed in
                any lease.
            ClosedError: the engine is closed.
        """
        return self._batches.advance(batch, tokens, counts, draft_tokens)

    def computing(self, leases: Batch[LeaseT] | Iterable[LeaseT]) -> ComputeBatch[LeaseT]:
        """Protect the blocks of leases while the model computes with them.

        ::

            with engine.computing(leases) as batch:
                await batch.run(model.forward, ...)

        When a lease is released, cancelled, preempted, truncated or garbage-collected while the
        batch is in flight, the engine reuses its blocks only after the batch has ended. So no other
        request gets a block that a thread or a stream may still write. ``truncate`` of a lease with
        sliding windows raises ``LeaseError`` instead if it would give whole blocks back.

        The batch ends when the ``with`` block, all calls of ``batch.run`` and all work passed to
        ``batch.ends_with`` have ended. On a device that computes in a stream, and with ranks, work
        without an event belongs to the step that is open when the batch ends; ``step(event)``
        covers that work.

        Args:
            leases: granted leases, each listed once; or a batch, from which the entry of the block
                drops the released leases. A lease may be computed with in several blocks at a time.

        Returns:
            A context manager that can be entered once.

        Raises:
            UsageError: ``leases`` is not a sequence of leases.
            LeaseError: raised on entry: a lease is not granted, is being swapped, is released, is
                listed twice, or belongs to another engine. Nothing changed.
        """
        return self._batches.computing(leases)

    def extend(self, leases: Batch[Any] | Iterable[Lease], num_tokens: int) -> None:
        """Add ``num_tokens`` positions to each lease: to all of them, or to none.

        Never waits, and takes free blocks before leases that wait in ``allocate``. ``advance`` adds
        the positions of a decode step.

        Args:
            leases: granted leases, each listed once.
            num_tokens: positions to add per lease, 0 to 2147483647.

        Raises:
            WouldBlock: too few blocks are free or evictable; preempt a lease and call ``extend``
                again. Nothing changed.
            LeaseError: a lease is released, not granted, listed twice, or belongs to another
                engine. Nothing changed.
            UsageError: an argument has the wrong type; or a server owns the device blocks, and
                names those of new positions with ``lease.assign``. Nothing changed.
        """
        self._batches.extend(leases, num_tokens)

    def allocatable_blocks(
        self, *, salt: str = "", reserve_blocks: int | None = None, limit: int | None = None
    ) -> int:
        """Return the number of blocks of the largest request that could be granted now.

        ``try_allocate`` of a prompt of which nothing is cached succeeds up to that number of
        blocks, and not beyond; the call changes nothing. It is 0 while another lease waits for
        capacity, and while granting is paused. Ask ``Lease.can_allocate`` for a prompt with a hit,
        whose cached blocks need no room; and for models with recurrent state or sliding windows,
        which need state slots or window blocks too.

        The number is exact, unlike ``attention.device.free + evictable_blocks`` of the statistics,
        which includes blocks that are being copied, or that have to be saved before they can be
        evicted.

        Args:
            salt: salt of the request, whose quota counts the blocks, and whose guaranteed share
                makes room before other shares.
            reserve_blocks: as for ``Lease.allocate``.
            limit: the result is at most this number, from 0; None for no limit. With ``limit=n``,
                it is n exactly when a request of n blocks would be granted: ask so for one request.
                With a host tier, the call costs as much as evicting the blocks that it counts,
                except with the write policy ``"none"``; and where the host tier has no room to
                save what a large request evicts, that request drops unsaved blocks and may
                succeed although a smaller one waits.

        Raises:
            UsageError: ``salt`` is not a string, or a number is not an integer or is negative.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
        """
        return self._leases.granting.allocatable_blocks(salt, reserve_blocks, limit)

    def extendable_blocks(self, *, salt: str = "", limit: int | None = None) -> int:
        """Return the number of device blocks that ``extend`` could take now.

        ``extend`` succeeds when all its leases together need at most that number of further blocks,
        and raises ``WouldBlock`` otherwise; the call changes nothing. Reserve, quota, pauses and
        leases that wait do not count, because they do not stop ``extend``. A lease needs
        ``ceil(n / block_tokens)`` blocks for ``n`` positions, of which ``len(block_table)`` are
        there. Models with sliding windows need window blocks, too.

        Args:
            salt: salt of the first lease, whose guaranteed share makes room before other shares.
            limit: as for ``allocatable_blocks``.

        Raises:
            UsageError: ``salt`` is not a string, or ``limit`` is not an integer or is negative.
            ClosedError: the engine is closed.
        """
        return self._leases.granting.extendable_blocks(salt, limit)

    def layers(self, leases: Batch[Any] | Iterable[Lease]) -> LayerView:
        """Return one layer counter over all transfers that a step waits for.

        Args:
            leases: leases of the step.

        Returns:
            A view that raises ``TransferError`` when blocks of any of these leases failed. The
            error has no position: call ``recompute_from`` of each lease to get one.

        Raises:
            LeaseError: a lease is released or belongs to another engine.
        """
        return self._batches.layers(leases)

    def block_tables(
        self,
        leases: Batch[Any] | Iterable[Lease],
        out: NDArray[np.int32] | None = None,
        fill: int = -1,
        group: str | None = None,
    ) -> NDArray[np.int32]:
        """Return the block tables as rows, padded with ``fill``.

        Args:
            leases: B leases; the table of a lease that is not granted is empty, and that of a
                released lease of a batch.
            out: ``[>= B, >= M]`` writable C-contiguous int32 array, where M is the length of the
                longest table; every element is written. None for a new ``[B, M]`` array.
            fill: value of the elements after the end of a table, and of rows without a lease.
            group: name of a window group, as for ``Lease.window_table``; None for the layers
                outside window groups.

        Returns:
            ``out``, or the new array: int32 device block ids.

        Raises:
            UsageError: ``out`` is too small or has another type or layout, or ``group`` is
                unknown. Nothing was written.
            LeaseError: a lease is released or belongs to another engine.
        """
        return self._batches.block_tables(leases, out, fill, group)

    def lengths(self, leases: Batch[Any] | Iterable[Lease]) -> NDArray[np.int32]:
        """Return the number of positions of each lease whose tokens are named.

        In a decode step, these are the sequence lengths for attention kernels: the last named token
        is the one that the step computes.

        Args:
            leases: B leases.

        Returns:
            ``[B]`` int32; 0 for a released lease of a batch.

        Raises:
            LeaseError: a lease is released or belongs to another engine.
        """
        return self._batches.lengths(leases)

    def step(self, event: Event | None = None) -> int:
        """Close the open step, whose work finishes with ``event``.

        A step consists of the blocks that were committed in it, the blocks of batches that ended
        in it (see ``computing``), and the blocks that leases outside any batch released in it.
        Transfers of these blocks wait for the event on the device.

        On a device that computes before the call returns (cpu), closing a step only starts the
        backups. On other devices, close a step after the last commit, too: blocks of an open step
        cannot be saved, so ``allocate`` waits where it has to save them first. A timeout
        error names such a step, and the engine logs a warning.

        Args:
            event: an event that was recorded on the compute stream after the work of the step and
                before the work of later steps; None when the work has finished. With ranks always
                None: the step finishes when every rank has closed it with ``Rank.step`` and has
                finished its work.

        Returns:
            The number of the step that was closed.

        Raises:
            UsageError: the worker cannot wait for an event of this type. The step stays open.
            DeviceError: with ``verify="checksum"``, the event has failed. The next call of ``step``
                ends this step, too.
            ClosedError: the engine is closed.
        """
        self._lifetime.check_loop()
        return self._steps.close(as_event("event", event))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note the time in which the model has computed tokens of prompts.

        With this speed, the engine decides which blocks of a store to fetch, and which to compute.
        It measures the batches of ``computing`` itself. If the configuration has
        ``prefill_tokens_per_second``, measurements have no effect.

        Args:
            num_tokens: positions of prompts that one batch has computed, without generated ones.
                Batches of fewer than 64, or a quarter of a larger recent batch, do not count.
            seconds: duration of the batch alone, without pauses. Leave out batches that waited for
                onloads.

        Raises:
            UsageError: an argument is not a number, or is not above 0.
        """
        self._lifetime.check_loop()
        self._speed.note(
            checks.integer("num_tokens", num_tokens, minimum=1),
            checks.positive("seconds", seconds),
        )

    @property
    def open_step(self) -> int:
        """Number of the open step, which ``step()`` returns next. Any thread.

        The runner of a rank passes it to ``Rank.step``.
        """
        return self._scheduler.read.next_step

    # --- tiers ------------------------------------------------------------------------------------

    async def evict(self, num_blocks: int, tier: Tier = "device") -> int:
        """Evict up to ``num_blocks`` cached blocks of a tier, least recently used first.

        An evicted device block with a host copy stays cached in host memory. A block without one is
        saved first while the host tier has room, except with the write policy ``"none"``; blocks of
        an open step are saved when it is closed.

        Args:
            num_blocks: blocks to evict, 0 to 2147483647.
            tier: ``"device"`` or ``"host"``.

        Returns:
            The number of evicted blocks; fewer than ``num_blocks`` when the other blocks are
            leased or being copied.

        Raises:
            UsageError: ``num_blocks`` or ``tier`` is out of range. Nothing changed.

        Cancellation: blocks evicted so far stay evicted; transfers in flight complete, and their
        blocks stay cached in host memory.
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
        timeout: float | None = None,
        tier: Tier = "device",
        queued_tokens: int | None = None,
    ) -> Hit:
        """Copy the cached prefix of a prompt from the stores and host memory to the device.

        Does not wait for capacity: without room, the blocks stay in host memory. Prompts of more
        than 100,000 tokens are copied in parts, up to the first part that has no room.

        Args:
            tokens: ``[N]`` token ids of the prompt, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.
            ttl_seconds: seconds to keep the prefix on the device, or until a lease has hit it all;
                prefetches and pins are no hits. 0 does not protect it, ``math.inf`` sets no limit.
            timeout: seconds to wait for blocks of the stores; None for no limit, 0 to ask no store.
                Blocks that arrive later are cached in host memory.
            tier: ``"host"`` to copy blocks of the stores to host memory only, as is always done
                with ``CacheConfig.external_device``. ``ttl_seconds`` has no effect then.
            queued_tokens: None to fetch blocks at any speed. For a request that waits for them: the
                number of tokens of other prompts that the model computes before this one; blocks
                that the model computes sooner are not fetched, as in ``Lease.allocate``.

        Returns:
            The prefix that is on the device at the end, as ``device_tokens``; with
            ``tier="host"``, the cached prefix by tier.

        Raises:
            UsageError: ``ttl_seconds`` or ``queued_tokens`` is negative or not a number, or
                ``tier`` is unknown. Nothing changed.
            TransferError: a copy failed; the blocks before the failed block are on the device.
            ClosedError: the engine is closed or closing.

        Cancellation: copies in flight complete, and their blocks stay cached on the device.
        """
        return await self._pins.prefetch(
            tokens,
            salt=salt,
            adapter=adapter,
            items=items,
            ttl_seconds=ttl_seconds,
            timeout=timeout,
            tier=tier,
            queued_tokens=queued_tokens,
        )

    async def pin(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        ttl_seconds: float | None = None,
        timeout: float | None = None,
    ) -> Pin:
        """Keep the cached prefix of a prompt on the device.

        Blocks that are in the stores or in host memory are brought to the device first.

        The pin covers all cached full blocks of the prompt, including the last one. ``reset`` and
        ``updating_weights`` release the pin, because its blocks can no longer be hit.

        Args:
            tokens: ``[N]`` token ids of the prompt, as for ``match``.
            salt: as for ``match``.
            adapter: as for ``match``.
            items: as for ``match``.
            ttl_seconds: seconds after which the pin is released; None for no limit.
            timeout: seconds to wait for blocks of the stores, as for ``prefetch``.

        Returns:
            The pin. When no block is cached, or the cache was reset during the call, the pin has
            0 tokens and is already released.

        Raises:
            UsageError: ``ttl_seconds`` is negative or not a number. Nothing changed.
            WouldBlock: the device has no room for the blocks that are in host memory.
            TransferError: a copy failed; nothing is pinned.
            ClosedError: the engine is closed or closing.

        Cancellation: nothing is pinned.
        """
        return await self._pins.pin(
            tokens,
            salt=salt,
            adapter=adapter,
            items=items,
            ttl_seconds=ttl_seconds,
            timeout=timeout,
        )

    # --- control ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop granting until ``resume``; ``allocate`` waits meanwhile.

        Calls nest: each ``pause`` needs its own ``resume``.

        Raises:
            ClosedError: the engine is closed or closing.
        """
        self._control.change_gate("pause")

    def resume(self) -> None:
        """End one ``pause``, or one ``quiesce`` that has returned.

        Even without a pause, nothing is granted while a tier is asleep, inside
        ``updating_weights``, or while a ``quiesce`` waits.

        Raises:
            UsageError: the engine is not paused. Nothing changed.
            ClosedError: the engine is closed or closing.
        """
        self._control.change_gate("resume")

    async def reset(self, timeout: float | None = None) -> None:
        """Drop all cached blocks of both tiers, and release all pins.

        Blocks in stores are found again: after a change of the weights, use ``updating_weights``.
        Open leases keep their blocks, but publish no more. Receives and sends in flight end.
        Returns when all transfers that started before the call have ended.

        Args:
            timeout: seconds to wait for these transfers; None for no limit.

        Raises:
            ControlTimeout: transfers did not end in time; the cache is empty nevertheless.

        Cancellation: the cache is empty nevertheless; transfers end in the background.
        """
        await self._control.reset(timeout)

    async def purge(
        self, salt: str, *, hold_seconds: float = 0.0, timeout: float | None = 60.0
    ) -> int:
        """Remove all blocks of a salt from memory and from all stores; return the number of objects
        that were removed from stores.

        After the return, no block of the salt that existed before the call, or that a request open
        at its call computes, is found: on the device, in host memory, in any block group, or in a
        store of this engine. Open leases of the salt keep their blocks, but use and publish no
        others. Leases that are made during the call do not use the cache. Pins of the salt end.
        Saves in flight end before the stores are purged. With ranks, each rank purges its stores.

        Engines that share a store each need a call, since blocks in the memory of one engine can be
        saved again. Call all of them with ``hold_seconds`` above the time that it takes to call
        them, plus the longest ``StoreUse.deadline_seconds``: then all have stopped using the salt
        before the first one purges the store.

        A call that fails, is cancelled or is killed has removed a part. Call again: a second call
        removes the rest. ``aiokv store purge`` removes the blocks of stores that no engine uses.

        Args:
            salt: as for ``match``; ``""`` for prompts without a salt.
            hold_seconds: time before the stores are purged.
            timeout: seconds after ``hold_seconds``; None for no limit.

        Raises:
            StoreError: a store cannot be reached, is used with ``save=False``, or failed; memory
                and the other stores were purged.
            ControlTimeout: saves or stores did not end in time; memory was purged.

        Cancellation: memory was purged, and stores in part.
        """
        return await self._control.purge(salt, hold_seconds, timeout)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until no transfer is in flight, including the backups of committed blocks.

        With stores, this includes the saves of all blocks that are queued for them; during a pause,
        ``sleep`` or ``updating_weights`` only of those whose save has begun. With peers, this
        includes the blocks that are being received or sent, at most until their deadlines.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            ControlTimeout: a transfer is still in flight. Nothing changed.

        Cancellation: nothing changed.
        """
        await self._control.drain(timeout)

    async def quiesce(self, timeout: float | None = None) -> None:
        """Pause, then wait until no lease, transfer or step uses a block.

        ``resume`` ends the pause. Waits until no lease is granted, no transfer is in flight, and
        every step that used blocks is closed and has finished on the device.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            ControlTimeout: names the owners of the leases still held, or the step. The engine is no
                longer paused.

        Cancellation: the engine is no longer paused.
        """
        await self._control.quiesce(timeout)

    def updating_weights(
        self, timeout: float | None = None, *, version: str | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Drop all cached blocks, and stop granting inside the ``async with`` block.

        KV that was computed with the old weights is wrong for the new ones. Open leases keep their
        blocks and may go on computing, with either weights; from the start of the block on, they
        publish, save and send no more, until they are preempted and resumed. Pins are released.
        Receives and sends in flight end when the block is entered; their leases keep the positions
        that have arrived.

        Args:
            timeout: seconds to wait on entry for transfers in flight within this engine and to its
                stores; None for no limit.
            version: version of the new weights: blocks of this version are found in the stores
                from now on. With None, or after an exception in the block, the weights get a random
                version, of which no store has blocks.

        Returns:
            An async context manager.

        Raises:
            ControlTimeout: raised on entry: transfers did not end in time. Nothing changed: the
                engine grants again, and receives and sends go on.

        Cancellation: before the block is entered, as for ``ControlTimeout``; inside the block, the
        engine grants again, without cached blocks.
        """
        return self._control.updating_weights(timeout, version)

    async def resize(self, device_blocks: int, timeout: float | None = None) -> None:
        """Change the capacity of the device tier.

        Shrinking waits for leases and transfers that use block ids from ``device_blocks`` on.
        Cached blocks with these ids, and the blocks that follow them in a prefix, stay cached in
        host memory when they have a host copy, and are dropped otherwise.

        Args:
            device_blocks: new capacity in blocks; larger than ``CacheConfig.reserve_blocks`` and at
                most the blocks of the registered tensors.
            timeout: seconds to wait; None for no limit.

        Raises:
            UsageError: ``device_blocks`` is out of range. Nothing changed.
            ControlTimeout: leases or transfers still use blocks beyond the new capacity. Nothing
                changed.

        Cancellation: the capacity is either the old or the new one.
        """
        await self._control.resize(device_blocks, timeout)

    @property
    def asleep(self) -> frozenset[Tier]:
        """Tiers whose memory ``sleep`` has freed. Any thread."""
        return self._sleep.asleep

    async def sleep(self, tags: Iterable[Tier] = TIERS, *, timeout: float | None = None) -> None:
        """Drop the cached blocks of these tiers, and free the tiers' memory. Idempotent.

        Waits for leases, transfers and steps first, as ``quiesce`` does. From the call until
        ``wake_up``, nothing is granted.

        - ``"device"``: the engine drops its references to the tensors in ``regions``. Blocks with a
          host copy stay cached in host memory, where a match hits them after ``wake_up``; the
          engine first saves the other blocks while the host tier has room, except with the write
          policy ``"none"``.
        - ``"host"``: the engine frees the host arena. It also waits for swapped leases, whose
          tables are in host memory. With stores it first saves the blocks that are queued for them,
          and begins no more saves after 30 s; nothing is saved during a pause, an update of the
          weights, or while the device tier is asleep already.

        Args:
            tags: ``"device"``, ``"host"``, or both.
            timeout: seconds to wait; None for no limit, 0.0 to raise at once if the engine would
                have to wait.

        Raises:
            ControlTimeout: names the owners of the leases still held, and nothing changed; or names
                the ranks that did not answer, or a store or a peer was still closing, and
                ``asleep`` lists the tiers that are asleep: nothing is granted before ``wake_up``.
                Then their memory may still be in use: call ``sleep`` again, or ``wake_up``.
            UsageError: ``tags`` has an unknown tier. Nothing changed.

        Cancellation: as for ``ControlTimeout``.
        """
        await self._sleep.sleep(tags, timeout)

    async def wake_up(
        self,
        tags: Iterable[Tier] = TIERS,
        *,
        regions: Regions | None = None,
        timeout: float | None = None,
    ) -> None:
        """Reallocate the memory of these tiers; grant again when no tier is asleep. Idempotent.

        A cuda device page-locks host memory in the background; requests need not wait for that.

        When it fails, the tiers are still asleep, and the engine does not keep ``regions``: free
        them, or pass the same or others to the next call. With ranks, a rank may use its tensors
        until the next ``sleep`` or ``wake_up``. Host memory may be allocated, and stores open,
        until ``sleep`` is called again.

        Args:
            tags: tiers to wake; tiers that are awake stay as they are.
            regions: the tensors of the device tier, with the same layout as before ``sleep``; their
                addresses may differ. Required when a ``"device"`` tier with tensors wakes up.
            timeout: seconds to wait for another ``sleep`` or ``wake_up`` in progress, for stores
                and peers to open, and for ranks; None for no limit.

        Raises:
            LayoutError: the tensors are missing, or their layout differs. Still asleep.
            ConfigError: there is not enough memory for the host tier. Still asleep.
            ControlTimeout: the time has passed; the error names ranks that did not answer and
                stores that are unavailable. Still asleep.
            UsageError: ``tags`` has an unknown tier; or ``regions`` is not a ``Regions``, or has
                other tensors than the engine uses, and the call does not wake the device tier.
                Nothing changed.

        Cancellation: the tiers are still asleep.
        """
        await self._sleep.wake_up(tags, regions, timeout)

    async def restart_ranks(self) -> None:
        """Restart lost ranks; afterwards the cache is empty, and the engine serves again.

        When a rank is lost, the engine drops all cached blocks and takes the blocks of all leases,
        as ``preempt`` does: the next use of a lease's blocks raises ``LeaseError``, ``resume``
        allocates again, and all positions must be computed again. Until ``restart_ranks`` has
        returned, ``match``, ``allocate`` and ``resume`` raise ``BrokenEngineError``.

        Call it when no step runs on the remaining ranks.

        Raises:
            UsageError: no rank is lost. Nothing changed.
            RankLost: a rank did not start again. The ranks are still lost, and no block moves: call
                ``restart_ranks`` again.
            ClosedError: the engine is closed or closing.

        Cancellation: as for ``RankLost``. The open step is closed in any case.
        """
        await self._recovery.restart_ranks()

    # --- tensors, statistics and events -----------------------------------------------------------

    @property
    def regions(self) -> Regions:
        """Device tensors; without tensors while the device tier is asleep."""
        return self._sleep.regions

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop that the engine was entered on; None before. Any thread."""
        return self._lifetime.entered_loop

    @property
    def inspect(self) -> Inspection:
        """Leases, prefixes, transfers and records of the engine, for pages and tools. Any thread.

        See :class:`aiokv.statistics.Inspection`.
        """
        return self._inspection

    def statistics(self) -> Statistics:
        """Return all counters since the engine was made, and the state of its parts. Any thread.

        With ranks, numbers of their stores, peers and pollers are at most
        ``RankTimeouts.heartbeat`` old. Layer waits are those in this process: see
        ``RankThread.layer_wait_statistics`` for those of a rank.
        """
        return self._status.statistics()

    def cache_statistics(self) -> CacheStatistics:
        """Return the part of ``statistics()`` about leases, pools and index. Any thread.

        Takes a third of the time: for callers that need counts in each step.
        """
        return self._scheduler.read.statistics()

    @property
    def free_device_blocks(self) -> int:
        """Number of device blocks that hold nothing, in less than a microsecond. Any thread."""
        return self._scheduler.read.room()[0]

    @property
    def evictable_device_blocks(self) -> int:
        """Number of cached device blocks that no lease uses, in less than a microsecond.

        Blocks that must be saved before they are evicted count, too. Any thread.
        """
        return self._scheduler.read.room()[1]

    def health(self) -> Health:
        """Return the state of the engine, for health checks. Takes microseconds.

        Raises:
            UsageError: the call is made in another thread.
        """
        return self._status.health()

    def kv_events(
        self,
        *,
        hashes: HashKind = "int64",
        max_queued_blocks: int = 65_536,
        data_parallel_rank: int | None = None,
        stores: bool = False,
    ) -> KVEvents:
        """Subscribe to the changes of the blocks in the tiers, in the schema of vLLM.

        ::

            async with engine.kv_events() as events:
                async for batch in events:
                    router.update(batch)

        The first batches have the blocks that the tiers hold, then each change follows, at most one
        batch per pass of the event loop. A batch is a :class:`aiokv.events.KVEventBatch`. Models
        with recurrent state or sliding windows may hit less than the reported blocks.

        A subscriber that falls behind by more than ``max_queued_blocks`` gets ``AllBlocksCleared``
        and all blocks again. Without a subscriber, the engine records no event.

        Args:
            hashes: ``"int64"`` for block hashes that are unsigned 64-bit integers, as vLLM
                publishes by default, or ``"bytes"`` for all 32 bytes.
            max_queued_blocks: changes of blocks that may wait for the subscriber, at least 1,024;
                each takes about ``100 + 4 * block_tokens`` bytes.
            data_parallel_rank: field of the batches, for receivers of several engines.
            stores: also report ``BlockStored`` with the medium ``"STORAGE"`` for blocks of the
                tiers, when a save to a store, or a fetch from one, has ended, and ``BlockRemoved``
                when a request finds that the stores lack the block: a hint until then. A purge is
                reported as ``AllBlocksCleared``, and the blocks that the tiers hold follow.

        Raises:
            UsageError: an argument is out of range. ``async with`` raises it outside the engine's
                loop, and ``ClosedError`` when the engine is closed.
        """
        return self._events.subscribe(hashes, max_queued_blocks, data_parallel_rank, stores=stores)

    def record_trace(
        self,
        path: str | os.PathLike[str],
        *,
        max_file_bytes: int = 256 << 20,
        max_files: int = 8,
    ) -> TraceRecording:
        """Record the requests to a trace, which ``aiokv replay`` reads, while they are served.

        ::

            async with engine.record_trace("/var/log/aiokv/trace.jsonl.gz"):
                await serve(engine)

        The trace has the public Mooncake format: arrival, numbers of prompt and output tokens, and
        an id per 512 prompt tokens, which is equal for equal prefixes. It contains no token, salt
        or adapter, and the ids tell nothing about them. A request is written when its lease is
        released, if it has computed a block; the lines are in that order. Forks are left out.

        A thread writes. When it cannot keep up, or the disk is full, requests are left out and
        counted, and no request waits. Full files are kept beside ``path`` as
        ``trace.000001.jsonl.gz`` and so on; each is a trace of its own.

        Args:
            path: the newest file; compressed if the name ends in ``.gz``. A file that exists there
                is kept as an older one; a folder, a link or a device is refused, and a file that
                another recording writes.
            max_file_bytes: size at which the next file begins, at least 64 KiB.
            max_files: files to keep; the oldest are deleted.

        Raises:
            UsageError: an argument is out of range. ``async with`` raises it when the file cannot
                be written or another recording is in progress, and ``ClosedError`` when the engine
                is closed.
        """
        writer = writer_for(path, max_file_bytes, max_files)
        return TraceRecording(self._leases.recordings, self._lifetime, writer)

    def check_invariants(self) -> list[str]:
        """Return a description of each violated invariant: I1-I6, and those of the waiting lines.

        Scans all blocks and leases: meant for tests and debugging.

        Raises:
            UsageError: the call is made in another thread.
        """
        self._lifetime.check_thread()
        return self._scheduler.violations()

    def __repr__(self) -> str:
        s = self._scheduler.read.statistics()
        device, host = s.attention.device, s.attention.host
        return (
            f"<CacheEngine device {self.config.device_blocks - device.free}/"
            f"{self.config.device_blocks} host {host.blocks - host.free}/{host.blocks}, "
            f"{self._scheduler.read.num_leases} leases, {s.waiting} waiting>"
        )
