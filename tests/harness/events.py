"""Subscriber of a ZmqPublisher."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from aiokv.testing.loops import PATIENCE_SECONDS
from tests.models.kv_events import View, decode, index_of

if TYPE_CHECKING:
    from aiokv.events import ZmqPublisher
    from aiokv.scheduler.reader import CacheReader


class Receiver:
    """Subscriber as vLLM documents it: it sees gaps in the numbers, and asks for what is missing.

    Args:
        publisher: an open publisher.
        topic: its topic.
        layout: its layout.

    Attributes:
        view: blocks as the events tell.
        next: number of the next batch.
        lost: numbers of the batches that were missing.
    """

    def __init__(self, publisher: ZmqPublisher, topic: str = "kv", layout: str = "map") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(publisher.address)
        self.socket.subscribe(topic)
        self.publisher = publisher
        self.topic = topic
        self.layout = layout
        self.view = View()
        self.next = 0
        self.lost: list[int] = []

    async def message(self) -> tuple[int, bytes]:
        """Return the number and the payload of the next message."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            topic, sequence, payload = await self.socket.recv_multipart()
        assert topic == self.topic.encode()
        return int.from_bytes(sequence, "big"), payload

    def apply(self, sequence: int, payload: bytes) -> None:
        """Apply a batch to the view."""
        self.view.apply(decode(payload, self.layout))
        self.next = sequence + 1

    async def replay(self) -> list[int]:
        """Ask for the batches from the next number on, apply them, and return their numbers."""
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.publisher.replay_address)
            await dealer.send_multipart((b"", self.next.to_bytes(8, "big")))
            replayed = []
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    empty, number, payload = await dealer.recv_multipart()
                    assert empty == b""
                    sequence = int.from_bytes(number, "big", signed=True)
                    if sequence == -1:
                        assert payload == b""
                        return replayed
                    replayed.append(sequence)
                    self.apply(sequence, payload)

    async def receive(self) -> None:
        """Receive and apply a message, after those that are missing before it."""
        sequence, payload = await self.message()
        if sequence > self.next:
            self.lost += range(self.next, sequence)
            await self.replay()
        if sequence >= self.next:
            self.apply(sequence, payload)

    async def catch_up(self, read: CacheReader) -> None:
        """Receive until the view is equal to the index."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.view.contents() != index_of(read):
                await self.receive()

    def close(self) -> None:
        """Close the sockets."""
        self.socket.close()
        self.context.destroy(linger=0)
