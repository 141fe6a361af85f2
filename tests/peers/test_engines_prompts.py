"""Two engines: whole prompts arrive, in any layout, length and order."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Item, Peers
from aiokv.engine.ticket_transfers import MAX_IN_FLIGHT
from aiokv.errors import (
    LayoutError,
)
from aiokv.peers import ticket as tickets
from aiokv.testing import run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import KEY, SECRET, Side, prompt, two_engines
from tests.peers.installed import over, transports

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("sides_use_transport")]


@pytest.mark.parametrize(
    ("transport", "length", "step"),
    [over("tcp", *row) for row in product([1, 4, 5, 30, 131], [1, 7, 8, 1000])]
    + [over("nixl", *row) for row in [(1, 7), (4, 1), (5, 1000), (30, 7), (131, 8)]],
)
async def test_prompt_arrives_whole(length, step):
    tokens = prompt(length)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=step))
            assert await receiving.wait() == length
            assert receiving.failure is None
            assert receiving.received_tokens == length
        assert await prefill == (length, None)
        d.check(lease, tokens)
        assert lease.usage.received_tokens == length
        assert lease.usage.peer_wait_seconds is not None
        assert lease.usage.computed_blocks == 0
        full = length // 4
        assert d.engine.statistics().published_blocks == full
        async with d.engine.match(tokens) as other:
            assert other.hit.device_tokens == (length - 1) // 4 * 4
        # The lease decodes on from there.
        d.engine.extend([lease], 3)
        lease.append([7, 8, 9])
        longer = np.concatenate([tokens, [7, 8, 9]])
        with d.engine.computing([lease]):
            d.compute(lease, longer, length, length + 3)
        d.check(lease, longer)


async def test_blocks_that_the_receiver_has_are_not_sent():
    tokens = prompt(30)
    async with two_engines() as (p, d):
        await d.serve(tokens[:13])
        await p.serve(tokens[:20])
        async with await d.granted(tokens) as lease:
            assert lease.cached_tokens == 12
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                ticket = tickets.decode(receiving.ticket, KEY)
                assert (ticket.first_position, ticket.num_tokens) == (12, 30)
                assert await p.prefill(tokens, receiving.ticket) == (18, None)
                assert await receiving.wait() == 30
            d.check(lease, tokens)
        assert p.engine.statistics().attention.sent_blocks == 5
        assert d.engine.statistics().attention.received_blocks == 5


@transports("tcp", "nixl")
async def test_cached_blocks_are_sent_before_anything_is_computed():
    tokens = prompt(30)
    async with two_engines() as (p, d):
        await p.serve(tokens)
        async with (
            await d.granted(tokens) as lease,
            await p.granted(tokens) as source,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            p.engine.send(source, receiving.ticket) as sending,
        ):
            assert await receiving.wait(24) == 24  # whole chunks
            assert not d.engine.statistics().failed_receives
            assert receiving.failure is None
            await run_until_idle(lambda: sending.delivered_tokens == 28)
            p.compute(source, tokens, 28, 30)
            assert await receiving.wait() == 30
            d.check(lease, tokens)


async def test_prefixes_in_host_memory_are_onloaded_first():
    tokens = prompt(29)
    config = {"write_policy": "write_through"}
    async with two_engines(Side(listen=None, **config), Side(**config)) as (p, d):
        for side, length in ((p, 21), (d, 9)):
            await side.serve(tokens[:length])
            await side.engine.drain()
            await side.engine.evict(64)
        async with await d.granted(tokens) as lease:
            assert lease.usage.cached_host_tokens == 8
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(tokens, receiving.ticket) == (21, None)
                assert await receiving.wait() == 29
            d.check(lease, tokens)


@transports("tcp", "nixl")
async def test_received_positions_are_usable_before_the_prefill_ends():
    tokens = prompt(40)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        await p.granted(tokens) as source,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        p.engine.send(source, receiving.ticket),
    ):
        p.compute(source, tokens, 0, 18)
        assert await receiving.wait(16) == 16
        d.check(lease, tokens, 16)
        assert receiving.statistics.received_tokens == 16
        assert receiving.statistics.first_chunk_seconds is not None
        async with d.engine.match(tokens[:17]) as cached:
            assert cached.hit.device_tokens == 16
        p.compute(source, tokens, 18, 40)
        assert await receiving.wait() == 40
        d.check(lease, tokens)


@transports("tcp", "nixl")
async def test_engines_send_both_ways_at_once():
    there, back = prompt(50, 1), prompt(45, 2)
    async with two_engines(Side(), Side()) as (a, b):

        async def decode(side: Side, other: Side, tokens: np.ndarray) -> None:
            async with await side.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    sent = asyncio.create_task(other.prefill(tokens, receiving.ticket))
                    assert await receiving.wait() == len(tokens)
                    assert await sent == (len(tokens), None)
                side.check(lease, tokens)

        await asyncio.gather(decode(b, a, there), decode(a, b, back))


@transports("tcp", "nixl")
async def test_long_prompt_moves_in_more_transfers_than_are_in_flight_at_once():
    length = 4 * (2 * MAX_IN_FLIGHT + 9) + 1
    tokens = prompt(length)
    sides = Side(listen=None, device_blocks=200), Side(device_blocks=200, chunk_blocks=1)
    async with two_engines(*sides) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert d.engine.statistics().receives == MAX_IN_FLIGHT
            assert await p.prefill(tokens, receiving.ticket, step=length) == (length, None)
            assert await receiving.wait() == length
        d.check(lease, tokens)
        assert d.engine.statistics().receives == 2 * MAX_IN_FLIGHT + 10


@transports("tcp", "nixl")
@pytest.mark.parametrize("blocks", [(4, 16), (16, 4), (8, 12), (12, 8), (1, 16), (64, 16)])
@pytest.mark.parametrize("cached", [0, 40])
async def test_sizes_of_blocks_differ(blocks, cached):
    tokens = prompt(131)
    prefill = Side(listen=None, block_tokens=blocks[0], device_blocks=160)
    decode = Side(block_tokens=blocks[1], device_blocks=40, ring_blocks=160)
    async with two_engines(prefill, decode) as (p, d):
        if cached:
            await d.serve(tokens[:cached])
            await p.serve(tokens[: 2 * cached])
        async with await d.granted(tokens) as lease:
            first = lease.cached_tokens
            assert first == cached // blocks[1] * blocks[1]
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(tokens, receiving.ticket, step=7) == (131 - first, None)
                assert await receiving.wait() == 131
            d.check(lease, tokens)
            assert lease.usage.received_tokens == 131 - first


@transports("tcp", "nixl")
async def test_layouts_that_cannot_be_mapped_are_refused(transport):
    tokens = prompt(30)
    p = Side(listen=None)
    p.memory.names = ("k",)
    p.memory.take(64)
    engine = CacheEngine(
        CacheConfig(device_blocks=64, block_tokens=4, model="m"),
        p.memory.regions,
        peers=Peers(secret=SECRET, outgoing_bytes=4096, transport=transport),
    )
    async with (
        Side() as d,
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        async with engine, engine.match(tokens) as source:
            await source.allocate(30)
            with pytest.raises(LayoutError):
                await engine.send(source, receiving.ticket).__aenter__()
            assert engine.statistics().peers.sending == 0


async def test_items_and_salt_travel_with_the_prompt():
    tokens = prompt(30)
    names: dict[str, Any] = {"salt": "tenant", "items": [Item(b"image", 3, 9)]}
    async with two_engines() as (p, d), await d.granted(tokens, **names) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert await p.prefill(tokens, receiving.ticket, **names) == (30, None)
            assert await receiving.wait() == 30
        d.check(lease, tokens)
        async with d.engine.match(tokens, **names) as other:
            assert other.hit.device_tokens == 28
        async with d.engine.match(tokens) as other:
            assert other.hit.device_tokens == 0


@transports("tcp", "nixl")
async def test_many_tickets_share_a_small_ring():
    prompts = [prompt(11 + 3 * seed, seed) for seed in range(1, 13)]
    sides = Side(listen=None, device_blocks=256), Side(device_blocks=256, ring_blocks=2)
    async with two_engines(*sides) as (p, d):

        async def decode(tokens: np.ndarray) -> None:
            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    sent = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                    assert await receiving.wait() == len(tokens)
                    await sent
                d.check(lease, tokens)

        await asyncio.gather(*map(decode, prompts))
        statistics = d.engine.statistics().peers
        assert statistics.complete_receives == statistics.receives == 12
        assert statistics.received_tokens == statistics.wanted_tokens == sum(map(len, prompts))
        assert statistics.receive_wait_seconds > 0
        assert p.engine.statistics().peers.complete_sends == 12
        assert p.engine.statistics().peers.delivered_tokens == sum(map(len, prompts))


@transports("tcp", "nixl")
async def test_lease_sends_to_several_receivers():
    tokens = prompt(30)
    async with two_engines() as (p, d), Side() as e, await p.granted(tokens) as source:
        async with (
            await d.granted(tokens) as first,
            await e.granted(tokens) as second,
            first.receive(timeout=PATIENCE_SECONDS) as one,
            second.receive(timeout=PATIENCE_SECONDS) as two,
            p.engine.send(source, one.ticket),
            p.engine.send(source, two.ticket),
        ):
            p.compute(source, tokens, 0, 30)
            assert (await one.wait(), await two.wait()) == (30, 30)
            d.check(first, tokens)
            e.check(second, tokens)


async def test_fewer_positions_are_received_than_the_lease_has():
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(18, timeout=PATIENCE_SECONDS) as receiving:
            assert await p.prefill(tokens, receiving.ticket) == (18, None)
            assert await receiving.wait() == 18
        d.check(lease, tokens, 18)
        d.compute(lease, tokens, 18, 30)
        d.check(lease, tokens)


async def test_positions_behind_the_prompt_are_not_asked_for():
    tokens = prompt(10)
    async with two_engines() as (p, d), d.engine.match(tokens) as lease:
        await lease.allocate(25)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert tickets.decode(receiving.ticket, KEY).num_tokens == 10
            assert await p.prefill(tokens, receiving.ticket) == (10, None)
            assert await receiving.wait() == 10


async def test_generated_tokens_move_with_a_request():
    """A decoding request moves to another engine: its tokens are the prompt there."""
    tokens = prompt(20)
    longer = np.concatenate([tokens, [5, 6, 7, 8, 9]])
    async with two_engines() as (p, d), await p.granted(tokens) as source:
        p.compute(source, tokens, 0, 20)
        p.engine.extend([source], 5)
        source.append(longer[20:])
        async with (
            await d.granted(longer) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, longer, 20, 25)
            assert await receiving.wait() == 25
            d.check(lease, longer)
