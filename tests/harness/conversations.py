"""Small models that are computed twice, and conversations that compare both results."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from aiokv.errors import WouldBlock
from aiokv.testing import run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import close

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv import CacheEngine, Lease
    from aiokv.worker.device.base import Device


class TwiceComputed(ABC):
    """An engine, its tensors and a model; ``async with`` checks invariants at its end."""

    engine: CacheEngine
    device: Device | None = None

    @property
    def can_fork(self) -> bool:
        """Return True if conversations currently fork leases."""
        return False

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        await close(self.engine, self.device, exc)

    @abstractmethod
    def compute(self, lease: Lease, tokens: Sequence[int], first: int, end: int) -> None:
        """Compute positions ``[first, end)`` from the tensors."""

    @abstractmethod
    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Compare the tensors bit for bit with a recomputation from scratch."""

    @abstractmethod
    def prefill(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Compute and commit all positions that are not cached."""

    @abstractmethod
    def first_chunk(self, cached: int, length: int, rng: random.Random) -> int:
        """Return where the chunk ends that is computed before a preemption."""

    async def serve(self, tokens: Sequence[int], *, wait_store: float = 0.0, **prefill: Any) -> int:
        """Serve a whole request; return the tokens that it found."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens), wait_store=wait_store)
            await lease.layers.wait_all()
            cached = lease.cached_tokens
            self.check(lease, tokens, cached)
            self.prefill(lease, tokens, **prefill)
            self.check(lease, tokens, len(tokens))
        assert self.engine.check_invariants() == []
        return cached

    async def converse(
        self,
        rng: random.Random,
        name: int,
        *,
        turns: int,
        longest: int,
        shortened: Callable[[random.Random], int],
    ) -> int:
        """Take turns of one conversation, some of them cancelled; return the tokens found.

        Args:
            rng: decides.
            name: of the conversation; two of them share their beginning.
            turns: how many.
            longest: number of tokens after which the conversation is truncated.
            shortened: returns to which number.
        """
        tokens, found = [1, 2, 3, 4, name % 2], 0
        for _ in range(turns):
            tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            if len(tokens) > longest:
                tokens = tokens[: shortened(rng)]
            lease = self.engine.match(tokens)
            try:
                turn = self._turn(lease, tokens, rng)
                await asyncio.wait_for(
                    turn, rng.choice([0.0005, PATIENCE_SECONDS, PATIENCE_SECONDS])
                )
                found += lease.cached_tokens
            except TimeoutError:
                await self.engine.evict(rng.randrange(4))
            finally:
                lease.release()
            assert self.engine.check_invariants() == []
        return found

    async def converse_together(
        self,
        rng: random.Random,
        *,
        conversations: int,
        turns: int,
        longest: int,
        shortened: Callable[[random.Random], int],
    ) -> int:
        """Hold conversations at the same time, see ``converse``; return the tokens found."""
        clients = [
            asyncio.create_task(
                self.converse(
                    random.Random(rng.random()),
                    name,
                    turns=turns,
                    longest=longest,
                    shortened=shortened,
                )
            )
            for name in range(conversations)
        ]
        await run_until_idle(lambda: all(client.done() for client in clients))
        return sum(client.result() for client in clients)

    async def _turn(self, lease: Lease, tokens: list[int], rng: random.Random) -> None:
        await lease.allocate(len(tokens))
        await lease.layers.wait_all()
        self.check(lease, tokens, lease.cached_tokens)
        if rng.random() < 0.4:
            end = self.first_chunk(lease.cached_tokens, len(tokens), rng)
            self.compute(lease, tokens, lease.cached_tokens, end)
            lease.commit(end)
            try:
                await lease.preempt(swap=rng.random() < 0.5)
            except WouldBlock:
                await lease.preempt()
            await asyncio.sleep(0)
            await lease.resume(len(tokens))
            await lease.layers.wait_all()
            self.check(lease, tokens, lease.cached_tokens)
        self.prefill(lease, tokens)
        self.check(lease, tokens, len(tokens))
        if self.can_fork and rng.random() < 0.2:
            self._fork(lease, tokens)

    def _fork(self, lease: Lease, tokens: Sequence[int]) -> None:
        try:
            child = lease.fork()
        except WouldBlock:
            return
        self.check(child, tokens, len(tokens))
        child.release()
