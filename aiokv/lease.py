"""Lease: one request's hold on cached blocks, and the blocks it computes into."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Final, Self

from aiokv import checks
from aiokv.checks import MAX_INT32, Unique
from aiokv.errors import LeaseError, UnreleasedLeaseWarning
from aiokv.types import Hit, LeaseState, as_priority
from aiokv.usage import Usage, Waits
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import CodeType, TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.engine.leases import Leases
    from aiokv.types import TokenIds
    from aiokv.worker.device.base import Event
    from aiokv.worker.views import LayerView


_NO_WAITS = Waits()
_NO_WAIT: Final = 0.0  # compared by identity: the default needs no check


class Lease(Unique):
    """A request's share of the cache, as ``engine.match`` returns it; made by the engine only.

    Life: *matched* (holds nothing) -> *granted* (refs on the cached blocks, own ids for the rest)
    -> *released* (dead: any further use raises ``LeaseError``). Used on the engine's loop, except
    ``block_table``, ``window_table``, ``layers.gpu_wait`` and ``layers.is_done``, which any thread
    may call; all else raises ``UsageError`` there. It cannot be copied: see :meth:`fork`.

    Attributes:
        id: number of the lease in its engine; 0 once released. Set by the engine only.
        owner: the caller's name for it, shown in messages.
        leases: the engine's side of all its leases.
        layers: waits for the blocks that come from other tiers; done when there are none.
    """

    __slots__ = (
        "__weakref__",
        "_read",
        "_released_at",
        "_waits",
        "id",
        "layers",
        "leases",
        "owner",
        "salt",
    )

    def __init__(
        self, leases: Leases, lease_id: int, owner: str, salt: str, layers: LayerView
    ) -> None:
        self.leases = leases
        self._read = leases.read
        self.id = lease_id
        self._released_at: tuple[CodeType, int] | None = None
        self._waits: Waits | None = None  # of one that had to wait
        self.owner = owner
        self.salt = salt
        self.layers = layers

    # --- life ---------------------------------------------------------------------------------

    def __await__(self) -> Generator[None, None, Self]:
        """``await engine.match(...)`` does not suspend: the match is there already."""
        yield from ()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.id:
            self.release()

    async def allocate(
        self,
        num_tokens: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
        wait_pending: float = _NO_WAIT,
    ) -> Self:
        """Wait for capacity, then take refs and blocks for ``num_tokens`` positions at once.

        The prefix is matched again when the turn comes; ``cached_tokens`` is final then, and
        onloads have started.

        The hit is taken as far as ``num_tokens`` reaches. ``extend`` adds empty blocks only, so
        cached blocks behind ``num_tokens`` would be computed again. For chunked prefill, make the
        first chunk end behind the hit: ``allocate(min(lease.hit.total + chunk, len(tokens)))``, and
        ``extend`` for each later chunk.

        Args:
            num_tokens: absolute number of positions, at least 1.
            priority: an integer; lower goes first, equal ones in order of arrival.
            timeout: seconds to wait for capacity; None or ``math.inf`` for no limit.
            wait_pending: seconds to wait first for blocks that another lease is computing; after
                that they are computed again.

        Raises:
            AllocateTimeout: the lease holds nothing and may try again.
            RequestTooLarge: it can never fit; at once.
            LeaseError: released, granted already, or waiting in another task. Also when it is
                released while it waits.
            UsageError: ``priority`` is not an integer, or another argument is not a number;
                nothing changed.
            ClosedError: the engine closes.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: the lease holds nothing, as after ``match``.
        Checkpoint: only when it has to wait.
        """
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        if timeout is not None:
            timeout = checks.timeout(timeout)
        if type(priority) is not int:
            priority = as_priority(priority)
        if wait_pending is not _NO_WAIT:
            wait_pending = checks.seconds("wait_pending", wait_pending)
            if wait_pending > 0 and self.pending_tokens:
                await self.leases.wait_pending(self, checks.timeout(wait_pending))
        if not self.leases.allocate(self, num_tokens, priority):
            await self.leases.wait_granted(self, num_tokens, timeout)
        return self

    def try_allocate(self, num_tokens: int) -> bool:
        """Allocate now, or return False: no room, or this or other leases wait in line."""
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        return self.leases.try_allocate(self, num_tokens)

    def can_allocate(self, num_tokens: int) -> bool:
        """Return whether ``try_allocate(num_tokens)`` would succeed now. Takes and evicts nothing.

        Exact where ``device_free + evictable_blocks`` promises too much: blocks that are being
        copied, or that ``"write_back"`` saves first, cannot be evicted yet. What the lease hits
        needs no room. Costs as much as an attempt.

        Args:
            num_tokens: absolute number of positions, at least 1.

        Raises:
            RequestTooLarge: it can never fit.
            LeaseError: released, or granted already.
            ClosedError: the engine closes.
            BrokenEngineError: the device failed, or a rank was lost.
        """
        return self.leases.can_allocate(self, checks.integer("num_tokens", num_tokens))

    async def preempt(self, *, swap: bool = False) -> None:
        """Give the device blocks back; ``resume`` takes blocks again.

        Args:
            swap: move the whole table to host memory first, the partial last block included, and
                keep it there. Without it, full blocks stay as cached as any, and the rest is to be
                computed again; what an earlier swap has kept is given up, too.

        Recurrent state and sliding windows stay on the device; when another lease needs their
        place, the lease goes on at the deepest border that can be hit. Commit all that was computed
        first.

        A swap waits until no batch computes with the lease; see ``CacheEngine.computing``.
        What was committed in the open step moves when ``engine.step`` has closed that: do not
        await the one before the other. While it moves, the lease can only be released.

        Raises:
            WouldBlock: the host tier has no room, or the cache was reset. The lease keeps its
                blocks, and nothing was evicted.
            TransferError: the copy failed. The lease keeps its blocks.
            LeaseError: swap of a lease that is not granted or whose onloads are still under way;
                or it stands in line. Or swap inside the block of a batch that computes with it.
            ClosedError: the engine closes; also while the swap waits for a batch.

        Cancellation: a swap that has begun goes on by itself; it ends as one.
        """
        await self.leases.preempt(self, swap=swap)

    async def resume(
        self, num_tokens: int, *, priority: int = 0, timeout: float | None = None
    ) -> Self:
        """``allocate`` after ``preempt``: ``cached_tokens`` says what need not be computed.

        Takes at least as many positions as were computed before a swap. After a reset all are to be
        computed again.

        Cancellation: the lease stays as it was, and can be resumed later.
        """
        return await self.allocate(num_tokens, priority=priority, timeout=timeout)

    def fork(self, *, owner: str = "", stream: object = None) -> Lease:
        """A second lease on the same positions, as for n > 1 samples of one prompt.

        Full blocks are shared; the rest is copied on the device.

        Args:
            owner: its name; this lease's without one.
            stream: the compute stream, on a GPU.

        Raises:
            WouldBlock: no room for the blocks that are not shared, or the salt's quota is used up;
                nothing changed.
            UsageError: tensors on a GPU, and no stream; or window groups. Nothing changed.
            LeaseError: not granted, or onloads of it are still under way.
        """
        return self.leases.fork(self, checks.text("owner", owner), stream)

    def release(self, after: Event | None = None) -> None:
        """Give everything back; idempotent.

        Blocks that a batch in flight computes with come back when the batch has ended.

        Args:
            after: event behind the last work that uses the blocks and all else of the open step,
                which it closes; without one the step stays open.
        """
        if not self.id:
            return
        if after is not None:
            after = as_event("after", after)
        caller = sys._getframe(1)
        self._released_at = (caller.f_code, caller.f_lineno)
        self.leases.release(self, after)

    def __del__(self) -> None:
        if self.id and self.leases.collect(self.id):
            warnings.warn(
                f"{self!r} was never released; it has freed itself",
                UnreleasedLeaseWarning,
                stacklevel=2,
                source=self,
            )

    # --- what was found -------------------------------------------------------------------------

    @property
    def state(self) -> LeaseState:
        """Where the lease is in its life."""
        self.leases.check_thread()
        return self._read.state(self.id) if self.id else LeaseState.RELEASED

    @property
    def hit(self) -> Hit:
        """The cached prefix by tier: as matched, and from ``allocate`` on as granted."""
        self.leases.check_thread()
        return self._read.hit(self.live_id())

    @property
    def pending_tokens(self) -> int:
        """Tokens behind the hit that another lease is computing; 0 once granted."""
        self.leases.check_thread()
        return self._read.pending_tokens(self.live_id())

    @property
    def cached_tokens(self) -> int:
        """Positions that need no computing, once granted; falls when an onload fails."""
        self.leases.check_thread()
        return self._read.cached_tokens(self.held_id())

    @property
    def usage(self) -> Usage:
        """Cached tokens and waiting times of the request so far; read it before ``release``."""
        self.leases.check_thread()
        prompt_tokens, cached_device, cached_host, computed_blocks = self._read.usage(
            self.live_id()
        )
        waits = self._waits or _NO_WAITS
        onload_seconds = waits.onload_seconds
        if (running := self.layers.elapsed_seconds) is not None:
            onload_seconds = (onload_seconds or 0.0) + running
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_device_tokens=cached_device,
            cached_host_tokens=cached_host,
            pending_tokens=waits.pending_tokens,
            computed_blocks=computed_blocks,
            capacity_wait_seconds=waits.capacity_seconds,
            pending_wait_seconds=waits.pending_seconds,
            onload_seconds=onload_seconds,
        )

    @property
    def num_tokens(self) -> int:
        """Positions that the block table holds."""
        self.leases.check_thread()
        return self._read.num_tokens(self.held_id())

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Device ids in order, ``[ceil(num_tokens / block_tokens)]`` int32: a snapshot.

        Granted ids never change; ``extend`` only adds some. Any thread.
        """
        return self._read.block_table(self.held_id())

    def window_table(self, group: str) -> NDArray[np.int32]:
        """The block table of a group of sliding-window layers, as long as ``block_table``: a copy.

        -1 stands for blocks behind the window, which ``commit`` gives back, and for those that are
        not reached yet; other entries stay as they are meanwhile. The blocks of the first
        ``WindowGroup.sink_tokens`` positions keep their ids as long as the lease has blocks.

        Raises:
            UsageError: no such group in ``CacheConfig.windows``.
        """
        return self._read.block_table(self.live_id(), checks.text("group", group))

    @property
    def reach_tokens(self) -> int:
        """The first position that has no block in some window group: where a step has to end.

        ``commit`` moves it on; ``num_tokens`` without window groups.
        """
        self.leases.check_thread()
        return self._read.reach_tokens(self.live_id())

    @property
    def state_slot(self) -> int:
        """Row of the recurrent state's tensors that is the lease's own while it is granted.

        It holds the state after ``cached_tokens`` positions once ``layers`` have arrived: zeros,
        or a copy of a snapshot. -1 without a grant, and of models without such state.
        """
        self.leases.check_thread()
        return self._read.state_slot(self.live_id())

    @property
    def snapshot_points(self) -> tuple[int, ...]:
        """Positions behind the hit at which a snapshot of the state would be worth most.

        Where this prompt leaves what is cached, as others may part there too; and the last
        block border that an equal prompt can hit. Ascending; let chunks of the prompt end there.
        """
        self.leases.check_thread()
        return self._read.snapshot_points(self.live_id())

    # --- what was computed ----------------------------------------------------------------------

    def commit(self, num_tokens: int, ready: Event | None = None) -> int:
        """Make the full blocks of the first ``num_tokens`` positions shareable: they are computed.

        Monotone; only named tokens are indexed. What depends on an onload is indexed when that is
        proven.

        Args:
            num_tokens: absolute; beyond what was committed before, or without effect.
            ready: event behind the computation and all else of the open step, which it closes;
                without one the step stays open.

        Returns:
            Blocks that became shareable.

        Raises:
            LeaseError: more positions than the lease has; nothing changed.
            UsageError: ``num_tokens`` is not an integer, or ``ready`` no event; nothing changed.
        """
        if type(num_tokens) is not int or not 0 < num_tokens <= MAX_INT32:
            num_tokens = checks.integer("num_tokens", num_tokens)
        if ready is not None:
            ready = as_event("ready", ready)
        return self.leases.commit(self, num_tokens, ready)

    def snapshot(self, num_tokens: int, stream: object = None) -> bool:
        """Save the recurrent state after ``num_tokens`` positions, so that prompts can hit there.

        To be called when those are committed, a multiple of ``block_tokens``, and the state in
        ``state_slot`` is that after exactly them: before the next step changes it.

        Args:
            num_tokens: absolute; what ``commit`` was last told.
            stream: the compute stream, on a GPU, in whose order the state is copied.

        Returns:
            False when nothing was saved: there is a snapshot already, the positions cannot be
            indexed, or every slot is in use.

        Raises:
            LeaseError: not granted, not what is committed, or no block border; nothing changed.
            UsageError: the model has no recurrent state.
        """
        return self.leases.snapshot(self, checks.integer("num_tokens", num_tokens), stream)

    def append(self, tokens: TokenIds) -> None:
        """Name the next positions, so that they can be indexed.

        Raises:
            LeaseError: more than the lease has positions for; nothing changed.
        """
        self.leases.append(self, tokens)

    def truncate(self, num_tokens: int) -> None:
        """Give back the positions from ``num_tokens`` on, such as rejected drafts.

        Raises:
            LeaseError: into shared blocks, into what ``resume`` still brings back, beyond the end,
                or inside a multimodal item of the prompt; nothing changed. Items behind
                ``num_tokens`` do not belong to the lease any more.
        """
        self.leases.truncate(self, checks.integer("num_tokens", num_tokens))

    def recompute_from(self) -> int | None:
        """Accept a failed onload, and go on from the position before it.

        Returns:
            The first position to compute again, or None when nothing failed; never inside a
            multimodal item, whose blocks are written again from its start. Until then ``commit``
            indexes nothing.

        Raises:
            LeaseError: a transfer still writes blocks of the lease, though it has failed already:
                await ``layers.wait_all()`` first, or, if a rank is slow, ``preempt`` or release
                the lease. Or the lease has recurrent state or windows, which cannot go back:
                ``preempt`` and ``resume`` it.
        """
        return self.leases.recompute_from(self)

    # --- for the engine -------------------------------------------------------------------------

    def live_id(self) -> int:
        """Return the id.

        Raises:
            LeaseError: it is released.
        """
        if not self.id:
            raise LeaseError(f"{self!r} cannot be used any more")
        return self.id

    def held_id(self) -> int:
        """Return the id, for methods that need the blocks.

        Raises:
            LeaseError: it is released, or its blocks were lost with a rank.
        """
        if self._read.lost and self.id in self._read.lost:
            raise LeaseError(
                f"{self!r} has lost its blocks: {self._read.lost[self.id]}",
                hint="resume() allocates anew, when engine.restart_ranks() has returned",
            )
        return self.id or self.live_id()

    def leave_layers(self, done: LayerView) -> None:
        """Note that the grant has ended, and with it the wait for its layers."""
        if (seconds := self.layers.elapsed_seconds) is not None:
            self._noted_waits().add_onload(seconds)
        self.layers = done

    def note_capacity_wait(self, seconds: float) -> None:
        """Add to the time in line, for ``usage``."""
        self._noted_waits().add_capacity(seconds)

    def note_pending_wait(self, tokens: int, seconds: float) -> None:
        """Add to the time of waiting for another lease, for ``usage``."""
        self._noted_waits().add_pending(tokens, seconds)

    def _noted_waits(self) -> Waits:
        if self._waits is None:
            self._waits = Waits()
        return self._waits

    def __repr__(self) -> str:
        if self.id:
            state = f"id {self.id:#x}"
        elif self._released_at is not None:
            code, line = self._released_at
            state = f"released at {code.co_filename}:{line}"
        else:
            state = "ended with its engine"
        return f"<Lease of {self.owner or 'unnamed'}, {state}>"
