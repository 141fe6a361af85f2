"""Random requests on ranks that fail, are slow or end: served KV is right, and all waits end."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiokv.errors import BrokenEngineError, LeaseError, TransferError
from aiokv.testing import spin
from tests.harness.flaky import ChaosDevice
from tests.ranks.loopback import PATIENT, Ranked

pytestmark = pytest.mark.asyncio

PASSES = 250
PROMPTS = [[1, 2, 3, 4, *range(10 * i, 10 * i + 4), 9] for i in range(1, 7)]


class Chaos:
    """Random requests and rank failures, drawn from a seed."""

    def __init__(self, ranked: Ranked, rng: random.Random) -> None:
        self.ranked = ranked
        self.rng = rng
        self.tasks: set[asyncio.Task[None]] = set()
        self.served = self.hits = self.failed = self.restarts = 0

    async def request(self, tokens: list[int]) -> None:
        """Compare the cached tokens of the lease on every rank."""
        ranked = self.ranked
        try:
            async with ranked.engine.match(tokens) as lease:
                await lease.allocate(len(tokens))
                try:
                    await lease.layers.wait_all()
                except TransferError:
                    lease.recompute_from()
                ranked.check(lease, tokens)
                self.hits += lease.cached_tokens
                ranked.compute(lease, tokens, lease.cached_tokens)
                await spin(self.rng.randrange(3))
                lease.commit(len(tokens))
                self.served += 1
        except (TransferError, BrokenEngineError, LeaseError):
            self.failed += 1

    async def once(self) -> None:
        """Run some of the events that may occur in a pass of the loop."""
        rng, ranked = self.rng, self.ranked
        if len(self.tasks) < 5 and rng.random() < 0.5:
            task = asyncio.create_task(self.request(rng.choice(PROMPTS)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        if self.tasks and rng.random() < 0.05:
            rng.choice(list(self.tasks)).cancel()
        if rng.random() < 0.2:
            evicting = asyncio.create_task(ranked.engine.evict(16))  # may wait for saves
            self.tasks.add(evicting)
            evicting.add_done_callback(self.tasks.discard)
        if rng.random() < 0.3:
            ranked.step()
        for shard in ranked.shards:
            shard.device.move(rng.randrange(4))
        await spin(rng.randrange(1, 6))
        if rng.random() < 0.04:
            ranked.pass_time(PATIENT.transfer + 1)
        if rng.random() < 0.03:
            rng.choice(ranked.shards).worker._connection.abort("killed")
            await spin(4)
        if ranked.group.failure is not None:
            await self.restart()
        assert ranked.engine.check_invariants() == []

    async def restart(self) -> None:
        """Restart lost ranks, with other bytes."""
        lost = [s.rank for s in self.ranked.group._membership.ranks if s.connection is None]
        for rank in lost:
            await self.ranked.shards[rank].leave()
            self.ranked.shards[rank].fresh()
        await self.ranked.restart(*lost)
        self.restarts += 1

    async def finish(self) -> None:
        while self.tasks:
            for shard in self.ranked.shards:
                shard.device.move(4)
            self.ranked.step()
            await spin()
        self.ranked.step()
        await self.ranked.finish()


@pytest.mark.parametrize("seed", [1])
async def test_random_rank_failures_never_serve_wrong_kv(tmp_path, seed):
    rng = random.Random(seed)
    async with Ranked(
        tmp_path,
        num_ranks=3,
        device_blocks=16,
        host_blocks=16,
        new_device=lambda: ChaosDevice(rng, refuse_share=0.01, fail_share=0.01),
    ) as ranked:
        chaos = Chaos(ranked, rng)
        for _ in range(PASSES):
            await chaos.once()
        await chaos.finish()
    assert chaos.served > 50
    assert chaos.hits > 50
    assert chaos.failed > 0
    assert chaos.restarts > 0
