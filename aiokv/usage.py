"""What one request cost and was spared, for the usage field of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A lease's account, as of now.

    Cached tokens are those of the last grant, 0 without one: they fall when an onload fails, and
    after a preemption what the lease computed itself may be among them. All else is summed over
    the life of the lease. Times are None where nothing was waited for.

    Attributes:
        prompt_tokens: as matched; a fork has its parent's.
        cached_device_tokens: of the prompt, were on the device and need no computing.
        cached_host_tokens: likewise, from host memory.
        pending_tokens: behind the match, that another lease was computing and that were waited
            for.
        computed_blocks: blocks begun by ``commit``, generated tokens and repetitions included.
        capacity_wait_seconds: in line for capacity, quota included.
        pending_wait_seconds: until another lease had computed, or given up.
        onload_seconds: from each grant until the last byte from another tier had arrived, whether
            or not a coroutine waited; increases while an onload is in flight.
    """

    prompt_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    pending_tokens: int
    computed_blocks: int
    capacity_wait_seconds: float | None
    pending_wait_seconds: float | None
    onload_seconds: float | None

    @property
    def cached_tokens(self) -> int:
        """On all tiers."""
        return self.cached_device_tokens + self.cached_host_tokens


@dataclass(slots=True)
class Waits:
    """The times of a lease that had to wait; others have none."""

    pending_tokens: int = 0
    capacity_seconds: float | None = None
    pending_seconds: float | None = None
    onload_seconds: float | None = None

    def add_capacity(self, seconds: float) -> None:
        self.capacity_seconds = (self.capacity_seconds or 0.0) + seconds

    def add_pending(self, tokens: int, seconds: float) -> None:
        self.pending_tokens += tokens
        self.pending_seconds = (self.pending_seconds or 0.0) + seconds

    def add_onload(self, seconds: float) -> None:
        self.onload_seconds = (self.onload_seconds or 0.0) + seconds
