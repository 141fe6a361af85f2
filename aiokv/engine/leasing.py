"""The verbs on leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv import checks
from aiokv.engine.base import EngineBase
from aiokv.engine.computing import ComputeBatch
from aiokv.engine.sharded import SHARDS
from aiokv.errors import LeaseError, TransferError, WouldBlock
from aiokv.lease import Lease
from aiokv.plan import CLONE, STATE, clone_plan
from aiokv.types import as_items, as_tokens
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.types import Item, TokenIds
    from aiokv.worker.device.base import Event

_NO_NAME: Final = ""  # compared by identity: the default needs no check


class Leasing(EngineBase):
    """Match, commit, extend, preempt, fork, release, and the steps they belong to."""

    def match(
        self,
        tokens: TokenIds,
        *,
        salt: str = _NO_NAME,
        adapter: str = _NO_NAME,
        items: Sequence[Item] = (),
        owner: str = _NO_NAME,
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
        self._check_open()
        if salt is not _NO_NAME:
            checks.text("salt", salt)
        if adapter is not _NO_NAME:
            checks.text("adapter", adapter)
        if owner is not _NO_NAME:
            checks.text("owner", owner)
        if read is not True:
            checks.flag("read", read)
        if write is not True:
            checks.flag("write", write)
        context = f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""
        if items:
            found = self._core.match_items(as_tokens(tokens), as_items(items), context, read, write)
        else:
            found = self._core.match(as_tokens(tokens), context, read, write)
        lease_id = found[0]
        self._owners.shards[lease_id % SHARDS][lease_id] = owner
        return Lease(self, lease_id, owner, salt, self._done)

    def _commit(self, lease: Lease, num_tokens: int, ready: Event | None) -> int:
        self._check_loop()
        lease._live_id()
        step = self._steps.open if ready is None else self._steps.next
        first = self._core.computed_tokens(lease._live_id())
        published = self._core.commit(lease._live_id(), num_tokens, step)
        if self._verify:
            self._record_checksums(lease, first, num_tokens)
        if ready is not None:
            self._close_step(ready)
        if published and not self._steps.open:
            self._transfers.schedule_backups()
        if self._pending:
            self._pending.advanced(lease._id)
        return published

    def _record_checksums(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        block_tokens = self.config.block_tokens
        blocks = slice(first_token // block_tokens, num_tokens // block_tokens)
        self._controller.record_checksums(lease.block_table[blocks], self._steps.open)

    def _truncate(self, lease: Lease, num_tokens: int) -> None:
        self._check_loop()
        num_blocks = self._blocks_for(self._core.num_tokens(lease._live_id()))
        keeper = self._core.truncate(lease._id, num_tokens, self._steps.open)
        if keeper:
            self._owners[keeper] = lease.owner
            cut_blocks = num_blocks - self._blocks_for(num_tokens)
            self._quota.count(keeper, lease.salt, cut_blocks)
        self._recount([lease._id])
        if self._pending:
            self._pending.wake(lease._id)  # the cut blocks may have been promised to waiters
        self._on_blocks_free()

    def extend(self, leases: Sequence[Lease], num_tokens: int) -> None:
        """Give each lease ``num_tokens`` more positions; all of them or none.

        Never waits, and does not queue behind ``allocate``.

        Raises:
            WouldBlock: not enough room; preempt a lease and try again. Nothing changed.
            LeaseError: a lease is released, not granted, named twice, or of another engine. Nothing
                changed.
        """
        self._check_loop()
        lease_ids = self._own_ids(leases)
        num_tokens = checks.integer("num_tokens", num_tokens)
        extended: int = self._core.extend(lease_ids, num_tokens)
        if not extended and self._saves_first:
            # What stands in the way is on its way to the host now, or may be dropped.
            wanted = len(lease_ids) * self._blocks_for(num_tokens)
            extended = self._try_after_saving(
                lambda: self._core.extend(lease_ids, num_tokens), wanted
            )
        if self._core.wants_backups():
            self._transfers.schedule_backups()
        if not extended:
            raise WouldBlock(
                f"no room to extend {len(lease_ids)} leases by {num_tokens} positions",
                hint="preempt a lease, or raise CacheConfig.reserve_blocks",
            )
        self._recount(lease_ids)

    def _recount(self, lease_ids: Sequence[int]) -> None:
        if self._quota.limit_blocks is not None:
            for lease_id in lease_ids:
                self._quota.recount(lease_id, self._blocks_for(self._core.num_tokens(lease_id)))

    async def _preempt(self, lease: Lease, *, swap: bool) -> None:
        self._check_open()
        lease_id = lease._live_id()
        if lease._is_in_line:
            raise LeaseError(f"{lease!r} waits for its blocks, in another task")
        if swap:
            await self._swap_out(lease)
            return
        self._give_up_grant(lease_id)
        lease._leave_layers(self._done)
        self._transfers.cancel_abandoned()
        self._note_preempted(lease_id)
        self._on_blocks_free()

    async def _swap_out(self, lease: Lease) -> None:
        await self._computing.wait_ended(lease)
        while saving := self._core.saving(lease._live_id()):
            await self._transfers.ended(saving)
            await self._computing.wait_ended(lease)
        self._check_open()
        lease_id = lease._live_id()
        if not self._core.swap_out(lease_id, self._steps.open):
            raise WouldBlock(
                "the host tier has no room for the table, or the cache was reset under the lease",
                hint="preempt without swap, or raise CacheConfig.host_blocks",
            )
        lease._leave_layers(self._done)
        transfer_id = self._core.swap_transfer(lease_id)
        if not transfer_id:
            self._note_preempted(lease_id)
            self._on_blocks_free()
            return
        if self._verify:
            self._record_partial_block(lease_id)
        plan = self._manager.swap_plan(transfer_id)
        await self._transfers.run(plan, lambda: self._note_preempted(lease_id))
        if lease_id in self._owners and self._core.is_granted(lease_id):
            raise TransferError(
                "the table could not be moved; the lease keeps it", direction="offload"
            )

    def _record_partial_block(self, lease_id: int) -> None:
        """Commit has recorded the full blocks; a swap moves this one, too."""
        full_blocks, more_tokens = divmod(
            self._core.computed_tokens(lease_id), self.config.block_tokens
        )
        if more_tokens:
            table = self._core.block_table(lease_id)
            block = table[full_blocks : full_blocks + 1]
            self._controller.record_checksums(block, self._steps.open)

    def _note_preempted(self, lease_id: int) -> None:
        if lease_id not in self._owners or self._core.is_granted(lease_id):
            return  # released meanwhile, or it keeps its blocks
        self._quota.give_back(lease_id)
        self._pending.wake(lease_id)

    def _fork(self, lease: Lease, owner: str, stream: object) -> Lease:
        self._check_open()
        parent_id = lease._live_id()
        num_blocks = self._blocks_for(self._core.num_tokens(parent_id))
        if not self._quota.fits(lease.salt, num_blocks):
            raise WouldBlock(
                f"salt {lease.salt!r} holds {self._quota.held(lease.salt)} blocks; a fork needs "
                f"{num_blocks} more",
                hint="raise CacheConfig.salt_quota_blocks, or preempt a lease of that salt",
            )
        lease_id, sources, targets = self._core.fork(parent_id, self._steps.open)
        if not lease_id:
            raise WouldBlock("no room to fork the lease", hint="preempt another one")
        self._owners[lease_id] = owner or lease.owner
        self._quota.count(lease_id, lease.salt, num_blocks)
        child = Lease(self, lease_id, owner or lease.owner, lease.salt, self._done)
        try:
            self._controller.clone(clone_plan(CLONE, sources, targets), stream)
            if self.config.state_slots:
                self._copy_state(
                    self._core.state_slot(parent_id), self._core.state_slot(lease_id), stream
                )
        except BaseException:
            child.release()
            raise
        if self._verify:
            self._controller.record_checksums(targets, self._steps.open)
        return child

    def _snapshot(self, lease: Lease, num_tokens: int, stream: object) -> bool:
        self._check_loop()
        source, target = self._core.snapshot(lease._live_id(), num_tokens, self._steps.open)
        if target < 0:
            return False
        try:
            self._copy_state(source, target, stream)
        except BaseException:
            self._core.discard_snapshot(lease._live_id(), target)
            raise
        return True

    def _copy_state(self, source: int, target: int, stream: object) -> None:
        self._controller.clone(clone_plan(STATE, [source], [target]), stream)

    def _release(self, lease: Lease, after: Event | None) -> None:
        if not self._thread:
            lease._id = 0  # the engine closed without it
            return
        self._check_loop()
        used_in = 0 if after is None else self._close_step(after)
        lease_id, lease._id = lease._id, 0
        self._forget(lease_id, used_in or self._steps.open, used_in, lease._is_in_line)

    def _forget(self, lease_id: int, step: int, used_in: int = 0, is_in_line: bool = False) -> None:
        """Release a lease that has no handle any more.

        Args:
            lease_id: the lease.
            step: covers the blocks of a lease that no batch has named.
            used_in: a step that used the blocks, whatever batches say; 0 for none.
            is_in_line: a task waits for its grant.
        """
        if self._pending or is_in_line:
            self._end_waits(lease_id)
        if self._core.release(lease_id, step, used_in):
            self._after_release((lease_id,))
        elif self._pending:  # a batch keeps the blocks, but no further block will be indexed
            self._pending.wake(lease_id)

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
        self._check_loop()
        return ComputeBatch(self._computing, checks.sequence("leases", leases))

    def _collect(self, lease_id: int) -> bool:
        """A lease was garbage-collected; returns whether it held blocks. Any thread."""
        if lease_id not in self._owners:
            return False
        # Not now: the collector may run in the middle of a grant.
        if self._thread and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, lease_id, self._steps.open)
        return self._core.is_granted(lease_id) or self._core.is_swapped(lease_id)

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
        self._check_loop()
        return self._close_step(as_event("event", event))

    def _close_step(self, event: Event | None) -> int:
        self._controller.check_event(event)
        step = self._steps.close(event)
        self._transfers.send_backups()
        return step
