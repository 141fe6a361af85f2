"""The exceptions of aiokv, sorted by whose turn it is to act.

``UsageError``: the caller's, state unchanged. ``CapacityError``: wait, preempt or give up.
``ControlTimeout``: end the leases it names. ``TransferError``: recompute. ``DeviceError`` and
``BrokenEngineError``: restart. ``InternalError``: ours.
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
    """aiokv was called wrong; nothing changed."""


class ConfigError(UsageError, ValueError):
    """A configuration value is out of range or contradicts another."""


class LayoutError(UsageError, ValueError):
    """A region's shape, strides, dtype or device does not fit the cache."""


class LeaseError(UsageError):
    """A lease is released, foreign, or asked for positions it does not have."""


class ClosedError(UsageError):
    """The engine is closed, or is closing."""


class CapacityError(AiokvError):
    """Not enough blocks: now, in time, or ever."""


class WouldBlock(CapacityError):
    """The call would have to wait for capacity; nothing changed."""


class AllocateTimeout(CapacityError, TimeoutError):
    """The deadline passed while the lease waited for capacity; it holds nothing."""


class RequestTooLarge(CapacityError):
    """The request needs more blocks than the pool has; it can never be granted."""


class ControlTimeout(AiokvError, TimeoutError):
    """A control request did not get the stillness or the answers that it needs in time.

    Attributes:
        owners: of the leases that were out.
        ranks: that had not answered.
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
    """Blocks did not arrive.

    Attributes:
        direction: ``"onload"`` or ``"offload"``.
        first_bad_token: first position of the lease whose KV must be recomputed.
        rank: which of several ranks failed; None without ranks.
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


class DeviceError(AiokvError):
    """The device reported an error; ``cuda_code`` is 0 when it was not CUDA's."""

    def __init__(self, message: str, *, cuda_code: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cuda_code = cuda_code


class RankLost(DeviceError):
    """A rank died, went silent, or broke: what was cached is gone on all ranks.

    Attributes:
        rank: which one; the first, when several did.
    """

    def __init__(self, message: str, *, rank: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class BrokenEngineError(AiokvError):
    """The engine cannot go on; ``__cause__`` holds the first failure."""


class InternalError(AiokvError):
    """An invariant of aiokv does not hold: please report it."""


class UnreleasedLeaseWarning(ResourceWarning):
    """A lease was garbage-collected before it was released; it has freed itself."""
