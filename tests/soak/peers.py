"""Another engine of the soak: it computes prompts for the clients, and fails at random."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from aiokv import Peers
from aiokv.errors import (
    AllocateTimeout,
    ClosedError,
    ControlTimeout,
    PeerError,
    RequestTooLarge,
    UsageError,
)
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.testing import spin
from tests.peers.engines import SECRET, Side

if TYPE_CHECKING:
    import random

    import numpy as np

    from tests.harness.memory import Memory


class Prefill:
    """An engine that sends prompts, with the same blocks and weights.

    Args:
        memory: of the engine that receives.
        rng: the caller's, so that a seed repeats a run.

    Attributes:
        sends: prompts that were sent, or in part.
    """

    def __init__(self, memory: Memory, rng: random.Random) -> None:
        self.rng = rng
        self.sends = 0
        self.side = Side(
            listen=None,
            device_blocks=rng.choice((60, 200)),
            host_blocks=rng.choice((0, 50)),
            block_tokens=memory.block_tokens,
            chunk_blocks=rng.choice((1, 3)),
            ring_blocks=rng.choice((1, 8)),
            model="soak",
            weights_version=str(memory.weights),
        )
        self.side.memory.weights = memory.weights
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.side.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        if tasks := set(self._tasks):
            await asyncio.wait(tasks)
        await self.side.__aexit__(*error)

    def begin(self, tokens: np.ndarray, salt: str, ticket: bytes) -> None:
        """Compute a prompt, and send it; at random not all of it, or not at all."""
        if self.rng.random() < 0.05:
            return
        task = asyncio.create_task(self._send(tokens, salt, ticket))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # the exception handler of the loop gets an error

    async def _send(self, tokens: np.ndarray, salt: str, ticket: bytes) -> None:
        rng, side = self.rng, self.side
        try:
            async with side.engine.match(tokens, salt=salt) as lease:
                await lease.allocate(len(tokens), timeout=0.5)
                async with side.engine.send(lease, ticket) as sending:
                    await lease.layers.wait_all()
                    self.sends += 1
                    done = lease.cached_tokens
                    while done < len(tokens):
                        end = min(done + rng.randint(1, 4 * side.block_tokens), len(tokens))
                        side.compute(lease, tokens, done, end)
                        done = end
                        await spin(rng.randint(0, 3))
                        match rng.randrange(60):
                            case 0:
                                sending.cancel()
                            case 1:
                                return
                            case 2:
                                await lease.preempt()
                                return
        except (AllocateTimeout, RequestTooLarge, ClosedError, PeerError, UsageError):
            return

    async def update_weights(self, weights: int, version: str | None) -> None:
        """Go to other weights; a lease that computes keeps the old ones, and is not sent."""
        try:
            async with self.side.engine.updating_weights(timeout=0.05, version=version):
                await spin(4)
                self.side.memory.weights = weights
        except ControlTimeout:
            return


def receiving_peers(memory: Memory, rng: random.Random) -> Peers:
    """Return options of the engine that receives."""
    slot_bytes = memory.regions.payload_bytes + TRAILER_BYTES
    return Peers(
        secret=SECRET,
        listen="127.0.0.1",
        ring_bytes=rng.choice((1, 3, 16)) * slot_bytes,
        outgoing_bytes=slot_bytes,
        chunk_blocks=rng.choice((1, 2, 16)),
    )
