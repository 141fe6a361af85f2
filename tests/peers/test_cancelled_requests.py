"""Several requests between two engines, of which some are cancelled: the others do not stall."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pytest

from aiokv import WindowGroup
from aiokv.errors import AiokvError
from aiokv.testing import spin

from .engines import Side, prompt, two_engines

if TYPE_CHECKING:
    from aiokv.engine.receiving import Receiving

pytestmark = pytest.mark.asyncio

REQUESTS: Final = 8
WINDOW = {"w": WindowGroup(window_tokens=8, device_blocks=400)}
KINDS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "blocks": ({}, {}),
    "layers": ({"layers": 5, "layer_ranges": 3}, {"layers": 5, "layer_ranges": 3}),
    "windows": ({"windows": WINDOW}, {"windows": WINDOW}),
    "state": ({"state_slots": 40}, {"state_slots": 40}),
    "other sizes": ({"ring_blocks": 32}, {"ring_blocks": 32, "block_tokens": 8}),
    "layers of other sizes": (
        {"layers": 5, "layer_ranges": 3, "ring_blocks": 32},
        {"layers": 5, "layer_ranges": 3, "ring_blocks": 32, "block_tokens": 8},
    ),
}
"""Options of the sending and of the receiving engine."""


class Request:
    """A prompt that one engine computes and sends, and the other one receives.

    Args:
        random: chooses its length, how it is computed, and if it is cancelled.
        number: makes its prompt different from those of the others.
    """

    def __init__(self, random: Random, number: int) -> None:
        self.random = random
        self.tokens = prompt(random.randint(1, 150), seed=10 + number)
        self.end = random.choice(["arrives"] * 4 + ["receiver cancels", "release", "sender ends"])

    async def run(self, p: Side, d: Side) -> None:
        """Send it from ``p`` to ``d``; all of it arrives, unless it is cancelled."""
        async with (
            await d.granted(self.tokens) as lease,
            lease.receive(timeout=60) as receiving,
        ):
            sending = asyncio.create_task(self._prefill(p, receiving))
            if self.end == "arrives":
                assert await receiving.wait() == len(self.tokens), receiving.failure
                await sending
                d.check(lease, self.tokens)
                return
            await spin(self.random.randrange(200))
            if self.end == "receiver cancels":
                receiving.cancel()
            elif self.end == "release":
                lease.release()
            else:
                sending.cancel()
            with suppress(AiokvError, asyncio.CancelledError):
                await sending

    async def _prefill(self, p: Side, receiving: Receiving) -> None:
        random, tokens = self.random, self.tokens
        async with (
            await p.granted(tokens) as source,
            p.engine.send(source, receiving.ticket) as sending,
        ):
            await source.layers.wait_all()
            done = 0
            while done < len(tokens):
                end = min(done + random.choice([4, 16, 64]), len(tokens))
                for layer in range(p.memory.layers if p.is_layered else 0):
                    layers = range(layer, layer + 1)
                    p.compute_layers(source, tokens, range(done, end), sending, layers)
                    await spin(random.randrange(3))
                p.compute(source, tokens, done, end)
                done = end
                await spin(random.randrange(20))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_requests_do_not_delay_others(kind, seed):
    random = Random(f"{kind} {seed}")
    sizes = {"device_blocks": 400, "ring_blocks": random.choice([4, 8, 16])}
    sender, receiver = KINDS[kind]
    requests = [Request(random, number) for number in range(REQUESTS)]
    async with (
        two_engines(Side(listen=None, **sizes | sender), Side(**sizes | receiver)) as (p, d),
        asyncio.TaskGroup() as tasks,
    ):
        for request in requests:
            tasks.create_task(request.run(p, d))
