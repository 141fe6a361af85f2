"""Subscribers of the KV events of a round: their views are equal to the index at any time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from aiokv.events import ZmqPublisher
from aiokv.events.schema import BatchEncoder
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.events import Receiver
from tests.models.kv_events import View, decode, index_of
from tests.soak.load import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from aiokv import CacheEngine

ANY_PORT = "tcp://127.0.0.1:0"
LOSE_SHARE = 0.1  # of the messages that the receiver does not see


@contextmanager
def _violations_of_views() -> Iterator[None]:
    """Raise a :class:`Violation` when a view cannot apply an event."""
    try:
        yield
    except (AssertionError, KeyError) as error:
        raise Violation(f"events: {error!r}") from error


class RoundEvents:
    """A subscriber in the process, which is compared often, and one over ZeroMQ, which loses some.

    Args:
        engine: engine of the round, which must be open.
        rng: random choices of the round.

    Attributes:
        views: number of comparisons with the index.
    """

    def __init__(self, engine: CacheEngine, rng: Random) -> None:
        self._engine = engine
        self._rng = rng
        self._view = View()
        self._encode = BatchEncoder("map").encode
        self._events = engine.kv_events(
            hashes=rng.choice(("int64", "bytes")), max_queued_blocks=1024
        )
        self._publisher = ZmqPublisher(engine, bind=ANY_PORT, replay=ANY_PORT, topic="kv")
        self._receiver: Receiver | None = None
        self._stack = AsyncExitStack()
        self.views = 0

    @property
    def lost(self) -> int:
        """Number of messages that were lost and replayed."""
        return 0 if self._receiver is None else len(self._receiver.lost)

    @property
    def dropped(self) -> int:
        """Number of blocks whose changes a full queue has dropped."""
        return self._events.dropped_blocks

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._events)
        await self._stack.enter_async_context(self._publisher)
        self._receiver = Receiver(self._publisher)
        self._stack.callback(self._receiver.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def take_some(self) -> None:
        """Take a batch of events, or none."""
        if self._rng.random() < 0.5:
            self._take()

    def _take(self) -> bool:
        if (batch := self._events.take()) is None:
            return False
        with _violations_of_views():
            self._view.apply(decode(self._encode(batch)))
        return True

    def violations(self) -> list[str]:
        """Take all events, and compare the view with the index."""
        while self._take():
            pass
        self.views += 1
        return _differences(self._view, self._engine)

    async def receive(self) -> None:
        """Receive messages, and lose some, until cancelled."""
        assert self._receiver is not None
        while True:
            if self._rng.random() < LOSE_SHARE:
                await self._receiver.message()
            else:
                with _violations_of_views():
                    await self._receiver.receive()

    async def remote_violations(self) -> list[str]:
        """Receive what is under way, and compare the view of the receiver with the index.

        The engine must be at rest.
        """
        receiver = self._receiver
        assert receiver is not None
        with _violations_of_views():
            async with asyncio.timeout(PATIENCE_SECONDS):
                await receiver.replay()  # what was lost last
                while _differences(receiver.view, self._engine):
                    await receiver.receive()
        return _differences(receiver.view, self._engine)


def _differences(view: View, engine: CacheEngine) -> list[str]:
    expected, found = index_of(engine.inspect.parts.scheduler.read), view.contents()
    return [
        f"events: on {medium}, the view lacks {len(blocks - found[medium])} blocks of "
        f"{len(blocks)}, and has {len(found[medium] - blocks)} others"
        for medium, blocks in expected.items()
        if blocks != found[medium]
    ]
