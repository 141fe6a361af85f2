"""Blocks between servers with other block sizes, numbers of ranks, and axes."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from aiokv.errors import LayoutError
from aiokv.layout.regions import Regions
from aiokv.peers.ticket import Ticket, encode
from aiokv.stores.identity import StoreIdentity
from aiokv.testing import run_until_idle
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice
from tests.harness.pairwise import pairwise

from .workers import KEY, PeerWorker

pytestmark = pytest.mark.asyncio

LAYERS, TOKENS, HEADS, DIM = 2, 70, 4, 8
PROMPT = np.random.default_rng(0).integers(0, 1 << 16, (LAYERS, TOKENS, HEADS, DIM), np.uint16)
LATENT = np.random.default_rng(1).integers(0, 256, (LAYERS, TOKENS, 6), np.uint8)


class Rank(PeerWorker):
    """One rank of a server, with its heads of a cache; ``has_prompt`` if it has computed PROMPT."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        block_tokens: int,
        *,
        has_prompt: bool,
        heads_first: bool = False,
        slots: int = 48,
    ) -> None:
        super().__init__(slots=slots, block_tokens=block_tokens)
        own = HEADS // num_ranks
        self.rank, self.num_ranks, self.heads = rank, num_ranks, slice(rank * own, (rank + 1) * own)
        num_blocks = -(-TOKENS // block_tokens)
        self.ids = list(np.random.default_rng(rank).permutation(num_blocks))
        self.heads_first = heads_first
        shape = (num_blocks, block_tokens, own, DIM)
        if heads_first:
            shape = (num_blocks, own, block_tokens, DIM)
        self.kv = [np.zeros(shape, np.uint16) for _ in range(LAYERS)]
        self.latent = [np.zeros((num_blocks, block_tokens, 6), np.uint8) for _ in range(LAYERS)]
        axes = ("heads", "tokens", "dim") if heads_first else ("tokens", "heads", "dim")
        self.regions = Regions(num_layers=LAYERS)
        self.regions.add("kv", layers=self.kv, axes=axes)
        self.regions.add("latent", layers=self.latent, axes=("tokens", "dim"))
        pitch = self.regions.payload_bytes + 64
        self.peers = type(self.peers)(
            secret=self.peers.secret,
            listen="127.0.0.1",
            ring_bytes=slots * pitch,
            outgoing_bytes=slots * pitch,
        )
        self.controller = CacheController(self.regions, CpuDevice(), peers=self.peers)
        self._device_blocks = num_blocks
        self.identity = StoreIdentity(
            model="m",
            weights_version="w1",
            block_tokens=block_tokens,
            rank=rank,
            num_ranks=num_ranks,
        )
        if has_prompt:
            for layer in range(LAYERS):
                for token in range(TOKENS):
                    self.rows(layer, token)[:] = PROMPT[layer, token, self.heads]
                    self.latent_row(layer, token)[:] = LATENT[layer, token]

    def place(self, token: int) -> tuple[Any, ...]:
        block, row = divmod(token, self.block_tokens)
        return (self.ids[block], slice(None), row) if self.heads_first else (self.ids[block], row)

    def rows(self, layer: int, token: int) -> np.ndarray:
        """Return the heads of a token, ``[own heads, DIM]``."""
        return self.kv[layer][self.place(token)]

    def latent_row(self, layer: int, token: int) -> np.ndarray:
        block, row = divmod(token, self.block_tokens)
        return self.latent[layer][self.ids[block], row]

    def holds(self, first: int, end: int) -> bool:
        """Return True if the blocks have the right bytes of these positions."""
        return all(
            np.array_equal(self.rows(layer, token), PROMPT[layer, token, self.heads])
            and np.array_equal(self.latent_row(layer, token), LATENT[layer, token])
            for layer in range(LAYERS)
            for token in range(first, end)
        )


def ticket_for(receivers: list[Rank], first: int = 0) -> Ticket:
    return Ticket(
        ticket_id=os.urandom(16),
        generation=bytes(16),
        model="m",
        weights_version="w1",
        prompt_digest=bytes(32),
        first_position=first,
        num_tokens=TOKENS,
        timeout_seconds=60.0,
        block_tokens=receivers[0].block_tokens,
        transport="tcp",
        endpoints=[e for receiver in receivers for e in receiver.controller.tickets.endpoints],
    )


async def exchange(senders: list[Rank], receivers: list[Rank], first: int = 0) -> None:
    """Send the prompt from the position ``first`` on, and check the bytes on all receivers."""
    ticket = ticket_for(receivers, first)
    blob = encode(ticket, KEY)
    received = []
    for receiver in receivers:
        receiver.controller.tickets.expect(blob, 60.0, 60.0)
        start = first // receiver.block_tokens
        for block in range(start, len(receiver.ids), 2):
            blocks = range(block, min(block + 2, len(receiver.ids)))
            ids = [receiver.ids[i] for i in blocks]
            received.append((receiver, receiver.receive(ticket, blocks, ids)))
    layouts = [sender.controller.tickets.layout for sender in senders]
    for sender in senders:
        await sender.controller.tickets.open_ticket(blob, layouts)
    sent = []
    for sender in senders:
        start = first // sender.block_tokens
        blocks = range(start, len(sender.ids))
        sent.append((sender, sender.send(ticket, blocks, [sender.ids[i] for i in blocks])))
    for worker, transfer_id in received + sent:
        assert await worker.ended(transfer_id) == [("done", 0)]
    for receiver in receivers:
        assert receiver.holds(first, TOKENS)
        assert receiver.controller.tickets.violations() == []
    for worker in senders + receivers:
        worker.controller.tickets.close_ticket(ticket.ticket_id, "closed")
    for receiver in receivers:
        await run_until_idle(
            lambda r=receiver: r.free_slots == r.controller.tickets.statistics()[0].landing_slots
        )


async def servers(
    stack: AsyncExitStack, num_ranks: int, block_tokens: int, **options: Any
) -> list[Rank]:
    return [
        await stack.enter_async_context(Rank(rank, num_ranks, block_tokens, **options))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("senders", "receivers", "sent", "kept"),
    pairwise(
        (*ranks, *blocks)
        for ranks in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (4, 4)]
        for blocks in [(16, 16), (16, 32), (16, 64), (64, 16), (48, 16), (32, 64), (64, 48)]
    ),
)
async def test_blocks_arrive_whatever_the_block_sizes_and_ranks(senders, receivers, sent, kept):
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, senders, sent, has_prompt=True)
        to_ranks = await servers(stack, receivers, kept, has_prompt=False)
        await exchange(from_ranks, to_ranks)


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2), (4, 2)])
async def test_larger_blocks_of_fewer_heads_fit_in_the_slots_of_the_receiver(senders, receivers):
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, senders, 16, has_prompt=True, heads_first=True)
        to_ranks = await servers(stack, receivers, 16, has_prompt=False)
        await exchange(from_ranks, to_ranks)


async def test_the_rest_of_a_prompt_begins_within_a_block_of_the_sender():
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, 1, 16, has_prompt=True)
        to_ranks = await servers(stack, 2, 24, has_prompt=False)
        await exchange(from_ranks, to_ranks, first=24)


async def test_small_rings_exchange_blocks_of_other_layouts():
    """With two sender ranks, blocks that are incomplete hold assembly slots."""
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, 2, 16, has_prompt=True, slots=8)
        to_ranks = await servers(stack, 1, 16, has_prompt=False, slots=8)
        await exchange(from_ranks, to_ranks)


async def test_fragments_that_do_not_fit_in_a_slot_are_refused_at_the_handshake():
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, 1, 64, has_prompt=True)
        to_ranks = await servers(stack, 1, 16, has_prompt=False, slots=8)
        ticket = ticket_for(to_ranks)
        to_ranks[0].controller.tickets.expect(encode(ticket, KEY), 60.0, 60.0)
        with pytest.raises(LayoutError, match="landing slot"):
            await from_ranks[0].controller.tickets.open_ticket(encode(ticket, KEY))


async def test_ring_without_room_for_other_layouts_is_refused_at_the_handshake():
    async with AsyncExitStack() as stack:
        from_ranks = await servers(stack, 2, 16, has_prompt=True)
        to_ranks = await servers(stack, 1, 16, has_prompt=False, slots=3)
        ticket = ticket_for(to_ranks)
        to_ranks[0].controller.tickets.expect(encode(ticket, KEY), 60.0, 60.0)
        layouts = [sender.controller.tickets.layout for sender in from_ranks]
        with pytest.raises(LayoutError, match="ring_bytes"):
            await from_ranks[0].controller.tickets.open_ticket(encode(ticket, KEY), layouts)
