"""A scheduler with transfers of peers, and no worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiokv import CacheConfig
from aiokv.base.plan import TransferReport
from aiokv.scheduler.effects import NO_EFFECTS, Moved
from aiokv.scheduler.scheduler import CacheScheduler

BLOCK_TOKENS = 4
TICKET = bytes(range(16))
OTHER_TICKET = bytes(16)


class Cache:
    """A scheduler, and the effects of its transitions.

    Attributes:
        plans: submitted plans that have not ended, by transfer.
        moved: ends of transfers that were reported.
        cancelled: transfers that were cancelled.
    """

    def __init__(self, device_blocks: int = 12, **config: Any) -> None:
        config = {"block_tokens": BLOCK_TOKENS, "device_blocks": device_blocks, **config}
        self.scheduler = CacheScheduler(CacheConfig(**config))
        self.read = self.scheduler.read
        self.plans: dict[int, Any] = {}
        self.moved: list[Moved] = []
        self.cancelled: list[int] = []

    def apply(self, result: tuple[Any, Any]) -> Any:
        value, effects = result
        if effects is not NO_EFFECTS:
            self.plans |= {plan.transfer_id: plan for plan in effects.submit}
            self.moved += effects.moved
            self.cancelled += effects.cancel
            effects.clear()
            self.scheduler.applied()
        assert self.scheduler.violations() == []
        return value

    def granted(self, num_tokens: int, seed: int = 0, **match: Any) -> int:
        tokens = np.arange(num_tokens, dtype=np.int32) + 1000 * seed
        lease_id = self.apply(self.scheduler.match(tokens, **match))
        assert self.apply(self.scheduler.try_allocate(lease_id, num_tokens)) is not None
        return lease_id

    def receive(self, lease_id: int, first: int, num: int, ticket: bytes = TICKET) -> int:
        end = (first + num) * BLOCK_TOKENS
        return self.apply(self.scheduler.peers.receive(lease_id, ticket, end, first_block=first))

    def send(self, lease_id: int, first: int, num: int, ticket: bytes = TICKET) -> int:
        end = (first + num) * BLOCK_TOKENS
        return self.apply(self.scheduler.peers.send(lease_id, ticket, end, first_block=first))

    def end(self, transfer_id: int, outcome: Any = "done", first_bad: int = 0) -> None:
        del self.plans[transfer_id]
        report = TransferReport(transfer_id=transfer_id, outcome=outcome, first_bad_block=first_bad)
        self.apply(self.scheduler.complete(report))

    def commit(self, lease_id: int, num_tokens: int) -> int:
        return self.apply(self.scheduler.commit(lease_id, num_tokens))

    def commit_received(self, lease_id: int, num_tokens: int) -> int:
        return self.apply(self.scheduler.peers.commit_received(lease_id, num_tokens))

    def table(self, lease_id: int) -> list[int]:
        return self.read.block_table(lease_id).tolist()

    @property
    def free(self) -> int:
        return self.read.statistics().attention.device.free


def receive_group(cache: Cache, lease_id: int, group: str, num_tokens: int) -> int:
    return cache.apply(cache.scheduler.peers.receive(lease_id, TICKET, num_tokens, group))


def send_group(cache: Cache, lease_id: int, group: str, num_tokens: int) -> int:
    return cache.apply(cache.scheduler.peers.send(lease_id, TICKET, num_tokens, group))
