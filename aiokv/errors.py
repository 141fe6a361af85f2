"""The exceptions of aiokv, by the reaction that they require.

``UsageError``: correct the call; nothing changed. ``CapacityError``: wait, preempt or give up.
``ControlTimeout``: release the leases that it names. ``TransferError``: recompute.
``TransferTimeout``: wait again, or give up. ``DeviceError`` and ``BrokenEngineError``: restart.
``InternalError``: report a bug of aiokv.
"""

from __future__ import annotations


class AiokvError(Exception):
    """Base of all aiokv errors.

    Attributes:
        hint: what to do; printed with the message.
        config_field: field of ``CacheConfig`` that sets the limit, or ``""``.
        lease_id: id of the lease that the error is about, or 0.
        owner: name of that lease; printed before the message.
    """

    config_field: str = ""
    lease_id: int = 0
    owner: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        if self.owner:
            message = f"lease {self.owner!r}: {message}"
        return f"{message} (hint: {self.hint})" if self.hint else message


class UsageError(AiokvError):
    """The call is invalid; nothing changed."""


class ConfigError(UsageError, ValueError):
    """A configuration value is out of range or contradicts another."""


class LayoutError(UsageError, ValueError):
    """The shape, strides, dtype or device of a tensor does not fit the cache."""


class LeaseError(UsageError):
    """A lease is released, belongs to another engine, or lacks the positions of the call."""


class ClosedError(UsageError):
    """The engine is closed, or is closing."""


class CapacityError(AiokvError):
    """There are not enough blocks: now, within the timeout, or ever."""


class WouldBlock(CapacityError):
    """The call would have to wait for capacity; nothing changed."""


class AllocateTimeout(CapacityError, TimeoutError):
    """The timeout passed while the lease waited for capacity; it holds no blocks."""


class RequestTooLarge(CapacityError):
    """The request needs more blocks than the pool has; it can never be granted."""


class ControlTimeout(AiokvError, TimeoutError):
    """A control request timed out: leases, steps, transfers or ranks did not end or reply.

    Attributes:
        owners: owners of the leases that were still held.
        ranks: ranks that had not replied.
    """

    def __init__(
        self,
        message: str,
        *,
        owners: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.owners = owners
        self.ranks = ranks


class TransferError(AiokvError):
    """A transfer failed, or was cancelled.

    Attributes:
        direction: name of the route, such as ``"onload"``, or of another group than
            ``"attention"``, as in ``"state onload"``.
        first_bad_token: first position of the lease whose KV must be recomputed.
        rank: number of the rank that failed; None without ranks.
    """

    def __init__(
        self,
        message: str,
        *,
        direction: str = "onload",
        first_bad_token: int = 0,
        rank: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.direction = direction
        self.first_bad_token = first_bad_token
        self.rank = rank


class TransferTimeout(AiokvError, TimeoutError):
    """A layer or a transfer did not arrive within the timeout of a wait. The transfer continues.

    Its blocks may be incomplete: use none of them, and return none of them, before the transfer has
    ended.
    """


class DeviceError(AiokvError):
    """The device reported an error.

    Attributes:
        cuda_code: CUDA's error code; 0 for other errors.
    """

    def __init__(self, message: str, *, cuda_code: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cuda_code = cuda_code


class StoreError(AiokvError):
    """An operation of a store failed. A request does not get this error: it computes the blocks."""


class PeerError(AiokvError):
    """An engine on another server cannot be reached, or refuses a ticket.

    Only the sending side gets this error: the receiving side computes what does not arrive.
    """


class RankLost(DeviceError):
    """A rank ended, became unresponsive, or failed; the cache is lost on all ranks.

    Attributes:
        rank: number of the rank; of the first, when several were lost.
        has_left: True if the process of the rank has closed it.
    """

    def __init__(self, message: str, *, rank: int, has_left: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.has_left = has_left


class BrokenEngineError(AiokvError):
    """The engine serves no more requests; ``__cause__`` is the first failure.

    After a failure of a device or a rank, leases can still be used and released. After an exception
    such as ``KeyboardInterrupt`` inside a change of the engine's state, ``aclose`` is the only call
    that has an effect, and ``release`` the only other one that does not raise.
    """


class InternalError(AiokvError):
    """An invariant of aiokv is violated: please report it."""


class UncoveredCommitWarning(RuntimeWarning):
    """Positions were committed that no batch of ``engine.computing`` covers.

    See ``CacheConfig.strict``.
    """


class UnreleasedLeaseWarning(ResourceWarning):
    """A lease was garbage-collected before it was released; its blocks have been freed."""
