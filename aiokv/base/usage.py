"""Cached and computed tokens and waiting times of one request, for the usage field of a reply."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from aiokv.base.types import GroupHit  # noqa: TC001  (msgspec needs it)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and waiting times of a lease, up to now.

    The numbers of cached tokens are those of the last grant, and 0 without a grant. They decrease
    when an onload fails. After a preemption they may include tokens that the lease itself computed.
    All other counts and times are sums since ``match``. A time is None when the lease did not wait.

    Attributes:
        prompt_tokens: tokens of the matched prompt; a fork has the number of its parent.
        cached_device_tokens: prompt tokens that were on the device and need no computing.
        cached_host_tokens: prompt tokens that were onloaded from host memory.
        groups: cached blocks of the other groups that the last grant used: ``"state"``, and the
            window groups. Empty for a model with attention only.
        fetched_tokens: cached tokens of both tiers that a store has brought, and that no other
            lease had used before.
        received_tokens: tokens that another engine has computed and sent.
        pending_tokens: prompt tokens after the match that another lease was computing while this
            lease waited for them.
        computed_blocks: blocks that ``commit`` has begun, including blocks of generated tokens and
            blocks that were computed again.
        capacity_wait_seconds: wait for capacity and for the salt's quota.
        pending_wait_seconds: wait until another lease had computed the blocks, or had stopped.
        store_wait_seconds: wait for blocks from the stores.
        peer_wait_seconds: wait for blocks that another engine sends.
        onload_seconds: time from each grant until the last byte of its onloads had arrived, whether
            or not a coroutine waited; increases while an onload is in flight.
    """

    prompt_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    groups: dict[str, GroupHit]
    fetched_tokens: int
    received_tokens: int
    pending_tokens: int
    computed_blocks: int
    capacity_wait_seconds: float | None
    pending_wait_seconds: float | None
    store_wait_seconds: float | None
    peer_wait_seconds: float | None
    onload_seconds: float | None

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens of all tiers."""
        return self.cached_device_tokens + self.cached_host_tokens


@dataclass(slots=True)
class Waits:
    """Waiting times of a lease; made when the lease first waits."""

    received_tokens: int = 0
    pending_tokens: int = 0
    capacity_seconds: float | None = None
    pending_seconds: float | None = None
    store_seconds: float | None = None
    peer_seconds: float | None = None
    onload_seconds: float | None = None

    def add_capacity(self, seconds: float) -> None:
        self.capacity_seconds = (self.capacity_seconds or 0.0) + seconds

    def add_pending(self, tokens: int, seconds: float) -> None:
        self.pending_tokens += tokens
        self.pending_seconds = (self.pending_seconds or 0.0) + seconds

    def add_store(self, seconds: float) -> None:
        self.store_seconds = (self.store_seconds or 0.0) + seconds

    def add_peer(self, seconds: float) -> None:
        self.peer_seconds = (self.peer_seconds or 0.0) + seconds

    def add_onload(self, seconds: float) -> None:
        self.onload_seconds = (self.onload_seconds or 0.0) + seconds
