"""SyncLease: a lease whose methods any thread may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.errors import LeaseError, UsageError
from aiokv.sync.layers import SyncLayers
from aiokv.sync.transfers import SyncReceiving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.types import Hit, Item, LeaseState, TokenIds
    from aiokv.base.usage import Usage
    from aiokv.engine.lease import Lease
    from aiokv.sync.answers import Answer
    from aiokv.sync.calls import Calls
    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.port import Port
    from aiokv.worker.device.base import Event

T = TypeVar("T")


class SyncLease(Unique):
    """Blocks of one request: an :class:`aiokv.Lease` for threads; only the engine makes leases.

    Any thread may call any method. Each one crosses to the engine's thread and returns its answer,
    except where its text says that it does not cross: :class:`Calls` has the same methods for many
    leases in one crossing. Errors are those of the method of :class:`aiokv.Lease`. Methods that
    may wait return an :class:`EngineFuture`.

    A lease that is garbage-collected unreleased is released on the engine's loop, whichever thread
    collects it.

    Attributes:
        inner: the :class:`aiokv.Lease`, for functions that run on the engine's loop. Before the
            match, it raises ``UsageError``; after a failed match, ``LeaseError``.
        hit: cached prefix in tokens by tier that the match has found; raises as ``inner`` does.
        cached_tokens: number of leading positions of the grant that need no computing; 0 before the
            grant. ``recompute_from`` decreases it after a failed onload.
    """

    __slots__ = ("__weakref__", "_error", "_port", "cached_tokens", "hit", "inner")

    inner: Lease
    hit: Hit

    def __init__(self, port: Port) -> None:
        self._port = port
        self._error: BaseException | None = None  # of the match
        self.cached_tokens = 0

    # --- without a crossing -----------------------------------------------------------------------

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise the error of ``inner`` and ``hit`` before the match, which sets them."""
            if name not in ("inner", "hit"):
                raise AttributeError(f"SyncLease has no attribute {name!r}")
            if self._error is None:
                raise UsageError("this lease is not matched yet", hint="call run() first")
            raise LeaseError(f"this lease was not matched: {self._error}") from self._error

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Device block ids in order, as ``Lease.block_table``."""
        return self.inner.block_table

    def window_table(self, group: str) -> NDArray[np.int32]:
        """Return the block table of a window group, as ``Lease.window_table``."""
        return self.inner.window_table(group)

    @property
    def layers(self) -> SyncLayers:
        """Layers of the transfers that this lease waits for."""
        return SyncLayers(self._port, self.inner.layers)

    # --- capacity ---------------------------------------------------------------------------------

    def try_allocate(
        self,
        num_tokens: int,
        *,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> bool:
        """Allocate without waiting; return False if that is not possible now."""
        return self._call(
            lambda calls: calls.try_allocate(
                self, num_tokens, reserve_blocks=reserve_blocks, ttl_seconds=ttl_seconds
            )
        )

    def can_allocate(self, num_tokens: int, *, reserve_blocks: int | None = None) -> bool:
        """Return True if ``try_allocate(num_tokens)`` would succeed now; changes nothing."""
        return self._call(
            lambda calls: calls.can_allocate(self, num_tokens, reserve_blocks=reserve_blocks)
        )

    def allocate(
        self,
        num_tokens: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
        wait_pending: float = 0.0,
        wait_store: float = 0.0,
        queued_tokens: int = 0,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> EngineFuture[SyncLease]:
        """Wait for capacity, then take the blocks of ``num_tokens`` positions at once.

        ::

            lease.allocate(len(tokens), timeout=5.0).result()

        Args:
            num_tokens: as for ``Lease.allocate``, and so are the others.
            priority: a lower number is granted first.
            timeout: seconds to wait for capacity; None for no limit.
            wait_pending: seconds to wait first for blocks that another lease is computing.
            wait_store: seconds to wait for blocks that a store has.
            queued_tokens: tokens of other prompts that the model computes before this one.
            reserve_blocks: blocks that the grant leaves to ``extend``; None for the configured
                number.
            ttl_seconds: seconds after the grant at which the lease is released unless it is used
                before; None for no limit.

        Returns:
            A future of this lease, granted; it is done already when the device has room. After
            ``cancel()`` the lease holds no blocks, as after ``match``.
        """
        return self._port.start(
            lambda calls: calls.allocate(
                self,
                num_tokens,
                priority=priority,
                timeout=timeout,
                wait_pending=wait_pending,
                wait_store=wait_store,
                queued_tokens=queued_tokens,
                reserve_blocks=reserve_blocks,
                ttl_seconds=ttl_seconds,
            )
        )

    def preempt(self) -> None:
        """Give the device blocks back; ``allocate`` takes blocks again."""
        self._call(lambda calls: calls.preempt(self))

    def swap_out(self) -> EngineFuture[None]:
        """Move the whole block table to host memory, as ``Lease.preempt(swap=True)``.

        Returns:
            A future that ends with the copy. A swap that has begun completes in the background
            after ``cancel()``.
        """
        return self._port.start(lambda calls: calls.swap_out(self))

    def expire_after(self, seconds: float) -> None:
        """Let the engine release the lease after ``seconds``, as ``Lease.expire_after``."""
        self._call(lambda calls: calls.expire_after(self, seconds))

    def keep(self) -> None:
        """End the limit of ``expire_after``, as ``Lease.keep``."""
        self._call(lambda calls: calls.keep(self))

    def fork(self, *, owner: str = "", stream: object = None) -> SyncLease:
        """Return a second lease on the same positions, as ``Lease.fork``."""
        return self._call(lambda calls: calls.fork(self, owner=owner, stream=stream))

    def release(self, after: Event | None = None) -> None:
        """Release the lease and give all its blocks back. Idempotent, also after ``close``."""
        self._call(lambda calls: calls.release(self, after))

    # --- device blocks of a server ----------------------------------------------------------------

    def assign(self, block_ids: TokenIds, *, computed_tokens: int = 0) -> None:
        """Name the device blocks of the next positions, as ``Lease.assign``."""
        self._call(lambda calls: calls.assign(self, block_ids, computed_tokens=computed_tokens))

    @property
    def transfer_ids(self) -> tuple[int, ...]:
        """Ids of the transfers in flight that write blocks of the lease."""
        return self._ask(lambda lease: lease.transfer_ids)

    @property
    def is_idle(self) -> bool:
        """True when no transfer uses device blocks of ``assign``; also after ``release``."""
        return self._call(lambda calls: calls.is_idle(self))

    def idle(self) -> EngineFuture[None]:
        """Wait until no transfer uses device blocks of ``assign``, as ``Lease.idle``."""
        return self._port.start(lambda calls: calls.idle(self))

    # --- computed positions -----------------------------------------------------------------------

    def commit(self, num_tokens: int, ready: Event | None = None) -> int:
        """Note that the first ``num_tokens`` positions are computed, as ``Lease.commit``."""
        return self._call(lambda calls: calls.commit(self, num_tokens, ready))

    def append(self, tokens: TokenIds, *, items: Sequence[Item] = ()) -> None:
        """Set the tokens of the next positions, as ``Lease.append``."""
        self._call(lambda calls: calls.append(self, tokens, items=items))

    def truncate(self, num_tokens: int) -> None:
        """Give back the positions from ``num_tokens`` on."""
        self._call(lambda calls: calls.truncate(self, num_tokens))

    def snapshot(self, num_tokens: int, stream: object = None) -> bool:
        """Save the recurrent state after ``num_tokens`` positions, as ``Lease.snapshot``."""
        return self._call(lambda calls: calls.snapshot(self, num_tokens, stream))

    def recompute_from(self) -> int | None:
        """Accept a failed onload, as ``Lease.recompute_from``."""
        return self._call(lambda calls: calls.recompute_from(self))

    # --- other engines ----------------------------------------------------------------------------

    def receive(
        self,
        num_tokens: int | None = None,
        *,
        timeout: float = 10.0,
        open_timeout: float | None = None,
    ) -> SyncReceiving:
        """Let another engine compute positions of this lease, and send their blocks.

        ::

            with lease.receive(timeout=10.0) as receiving:
                ...  # send the prompt and receiving.ticket to the server of the other engine
                first = receiving.wait().result()

        Args:
            num_tokens: as for ``Lease.receive``; so are the other arguments.
            timeout: seconds after which the receive ends.
            open_timeout: seconds after which it ends if the other engine has not opened the ticket.

        Returns:
            A context manager that can be entered once; nothing crosses before.
        """
        return SyncReceiving(
            self._port,
            lambda: self.inner.receive(num_tokens, timeout=timeout, open_timeout=open_timeout),
        )

    # --- state ------------------------------------------------------------------------------------

    @property
    def hit_blocks(self) -> NDArray[np.int32]:
        """Device ids of the blocks of the hit, as ``Lease.hit_blocks``."""
        return self._call(lambda calls: calls.hit_blocks(self))

    @property
    def state(self) -> LeaseState:
        """State of the lease."""
        return self._ask(lambda lease: lease.state)

    @property
    def num_tokens(self) -> int:
        """Number of positions that the block table holds."""
        return self._ask(lambda lease: lease.num_tokens)

    @property
    def pending_tokens(self) -> int:
        """Number of tokens after the hit that another lease is computing; 0 once granted."""
        return self._ask(lambda lease: lease.pending_tokens)

    @property
    def usage(self) -> Usage:
        """Cached tokens and waiting times of the request so far; read it before ``release``."""
        return self._ask(lambda lease: lease.usage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _call(self, record: Callable[[Calls], Answer[T]]) -> T:
        return self._port.call(record)

    def _ask(self, read: Callable[[Lease], T]) -> T:
        return self._port.call(lambda calls: calls.add(lambda: read(self.inner)))

    # --- for the engine's thread --------------------------------------------------------------

    @property
    def is_unmatched(self) -> bool:
        """True when the match has failed."""
        return self._error is not None

    def note_match(self, lease: Lease) -> None:
        """Note that the lease was matched."""
        self.hit = lease.hit
        self.inner = lease

    def note_fork(self, lease: Lease) -> None:
        """Note that the lease is a fork, which is granted."""
        self.note_match(lease)
        self.cached_tokens = lease.cached_tokens

    def note_no_match(self, error: BaseException) -> None:
        """Note why the lease could not be matched."""
        self._error = error

    def note_grant(self, lease: Lease) -> None:
        """Note what the grant has found."""
        self.cached_tokens = lease.cached_tokens

    def __repr__(self) -> str:
        try:
            return f"<Sync{repr(self.inner)[1:]}"
        except UsageError:
            return f"<SyncLease, not matched{'' if self._error else ' yet'}>"


def inner_of(lease: SyncLease) -> Lease:
    """Return the engine's lease of a handle.

    Raises:
        UsageError: ``lease`` is not a ``SyncLease``, or is not matched yet.
        LeaseError: the lease could not be matched.
    """
    try:
        return lease.inner
    except AttributeError:
        raise UsageError(f"lease is {checks.shown(lease)}; it must be a SyncLease") from None


def inners_of(leases: Sequence[SyncLease]) -> list[Lease]:
    """Return the engine's leases of handles; raise the errors of ``inner_of``."""
    try:
        return [lease.inner for lease in leases]
    except AttributeError:
        return [inner_of(lease) for lease in leases]  # raises
