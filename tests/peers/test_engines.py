"""Two engines: what arrives has the bytes of its prompt, whatever ends a transfer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiokv import (
    CacheConfig,
    CacheEngine,
    ClosedError,
    ConfigError,
    Item,
    LeaseError,
    PeerError,
    Peers,
    UsageError,
    WouldBlock,
)
from aiokv.peers import ticket as tickets
from aiokv.plan import RECEIVE, SEND
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from tests.peers.engines import SECRET, Side, prompt, two_engines
from tests.peers.installed import transports

pytestmark = [pytest.mark.asyncio, transports("tcp", "nixl")]


@pytest.fixture(autouse=True)
def _sides_use_transport(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Side, "default_transport", transport)


# --- whole prompts ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 5, 30, 131])
@pytest.mark.parametrize("step", [1, 7, 8, 1000])
async def test_prompt_arrives_whole(length, step):
    tokens = prompt(length)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive() as receiving:
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
            async with lease.receive() as receiving:
                ticket = tickets.decode(receiving.ticket)
                assert (ticket.first_position, ticket.num_tokens) == (12, 30)
                assert await p.prefill(tokens, receiving.ticket) == (18, None)
                assert await receiving.wait() == 30
            d.check(lease, tokens)
        assert p.engine.statistics().sent_blocks == 5
        assert d.engine.statistics().received_blocks == 5


async def test_cached_blocks_are_sent_before_anything_is_computed():
    tokens = prompt(30)
    async with two_engines() as (p, d):
        await p.serve(tokens)
        async with (
            await d.granted(tokens) as lease,
            await p.granted(tokens) as source,
            lease.receive() as receiving,
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
            async with lease.receive() as receiving:
                assert await p.prefill(tokens, receiving.ticket) == (21, None)
                assert await receiving.wait() == 29
            d.check(lease, tokens)


async def test_received_positions_are_usable_before_the_prefill_ends():
    tokens = prompt(40)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        await p.granted(tokens) as source,
        lease.receive() as receiving,
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


async def test_engines_send_both_ways_at_once():
    there, back = prompt(50, 1), prompt(45, 2)
    async with two_engines(Side(), Side()) as (a, b):

        async def decode(side: Side, other: Side, tokens: np.ndarray) -> None:
            async with await side.granted(tokens) as lease:
                async with lease.receive() as receiving:
                    sent = asyncio.create_task(other.prefill(tokens, receiving.ticket))
                    assert await receiving.wait() == len(tokens)
                    assert await sent == (len(tokens), None)
                side.check(lease, tokens)

        await asyncio.gather(decode(b, a, there), decode(a, b, back))


async def test_items_and_salt_travel_with_the_prompt():
    tokens = prompt(30)
    names: dict[str, Any] = {"salt": "tenant", "items": [Item(b"image", 3, 9)]}
    async with two_engines() as (p, d), await d.granted(tokens, **names) as lease:
        async with lease.receive() as receiving:
            assert await p.prefill(tokens, receiving.ticket, **names) == (30, None)
            assert await receiving.wait() == 30
        d.check(lease, tokens)
        async with d.engine.match(tokens, **names) as other:
            assert other.hit.device_tokens == 28
        async with d.engine.match(tokens) as other:
            assert other.hit.device_tokens == 0


async def test_many_tickets_share_a_small_ring():
    prompts = [prompt(11 + 3 * seed, seed) for seed in range(1, 13)]
    sides = Side(listen=None, device_blocks=256), Side(device_blocks=256, ring_blocks=2)
    async with two_engines(*sides) as (p, d):

        async def decode(tokens: np.ndarray) -> None:
            async with await d.granted(tokens) as lease:
                async with lease.receive() as receiving:
                    sent = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                    assert await receiving.wait() == len(tokens)
                    await sent
                d.check(lease, tokens)

        await asyncio.gather(*map(decode, prompts))
        statistics = d.engine.peer_statistics()
        assert statistics.complete_receives == statistics.receives == 12
        assert statistics.received_tokens == statistics.wanted_tokens == sum(map(len, prompts))
        assert statistics.receive_wait_seconds > 0
        assert p.engine.peer_statistics().complete_sends == 12
        assert p.engine.peer_statistics().delivered_tokens == sum(map(len, prompts))


async def test_lease_sends_to_several_receivers():
    tokens = prompt(30)
    async with two_engines() as (p, d), Side() as e, await p.granted(tokens) as source:
        async with (
            await d.granted(tokens) as first,
            await e.granted(tokens) as second,
            first.receive() as one,
            second.receive() as two,
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
        async with lease.receive(18) as receiving:
            assert await p.prefill(tokens, receiving.ticket) == (18, None)
            assert await receiving.wait() == 18
        d.check(lease, tokens, 18)
        d.compute(lease, tokens, 18, 30)
        d.check(lease, tokens)


async def test_positions_behind_the_prompt_are_not_asked_for():
    tokens = prompt(10)
    async with two_engines() as (p, d), d.engine.match(tokens) as lease:
        await lease.allocate(25)
        async with lease.receive() as receiving:
            assert tickets.decode(receiving.ticket).num_tokens == 10
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
        async with await d.granted(longer) as lease, lease.receive() as receiving:
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, longer, 20, 25)
            assert await receiving.wait() == 25
            d.check(lease, longer)


# --- cancelled, left and late -------------------------------------------------------------------


async def test_receive_that_is_left_gives_its_blocks_back():
    tokens = prompt(40)
    async with two_engines() as (p, d):
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive() as receiving:
                sending = p.engine.send(source, receiving.ticket)
                await sending.__aenter__()
                p.compute(source, tokens, 0, 18)
                assert await receiving.wait(16) == 16
            assert receiving.failure == "the receive was left before all positions had arrived"
            with d.engine.computing([lease]):
                d.compute(lease, tokens, 16, 40)  # nothing writes them any more
            p.compute(source, tokens, 18, 40)
            await sending.__aexit__(None, None, None)
            assert sending.failure
            assert sending.delivered_tokens >= 16
            d.check(lease, tokens)
        assert d.engine.statistics().received_blocks == 4


async def test_cancelled_send_shortens_the_received_prefix():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive() as receiving:
            async with await p.granted(tokens) as source:
                async with p.engine.send(source, receiving.ticket) as sending:
                    p.compute(source, tokens, 0, 18)
                    await receiving.wait(16)
                    sending.cancel()
                    sending.cancel()
                    p.compute(source, tokens, 18, 40)
                assert sending.failure == "cancel() was called"
            first = await receiving.wait()
            assert first == 16
            assert "sender" in (receiving.failure or "")
        d.check(lease, tokens, 16)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, 16, 40)
        d.check(lease, tokens)


@pytest.mark.parametrize("how", ["error", "task", "release", "preempt", "truncate", "leave"])
async def test_send_that_ends_early_shortens_the_received_prefix(how):
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        source = await p.granted(tokens)
        async with lease.receive() as receiving:
            computed = asyncio.Event()
            go_on = asyncio.Event()

            async def prefill() -> Any:
                async with p.engine.send(source, receiving.ticket) as sending:
                    p.compute(source, tokens, 0, 18)
                    computed.set()
                    await go_on.wait()
                    if how == "error":
                        raise ZeroDivisionError
                    if how == "release":
                        source.release()
                    elif how == "preempt":
                        await source.preempt()
                    elif how == "truncate":
                        source.truncate(8)
                return sending

            task = asyncio.create_task(prefill())
            await computed.wait()
            assert await receiving.wait(16) == 16
            if how == "task":
                task.cancel()
            go_on.set()
            assert await receiving.wait() == 16
            assert receiving.failure
            if how == "task":
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "error":
                with pytest.raises(ZeroDivisionError):
                    await task
            else:
                assert (await task).failure
        source.release()
        d.check(lease, tokens, 16)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, 16, 40)
        d.check(lease, tokens)


@pytest.mark.parametrize("how", ["release", "preempt", "swap", "truncate", "reset", "weights"])
async def test_receive_ends_when_the_lease_gives_its_blocks_back(how):
    tokens = prompt(40)
    async with two_engines() as (p, d), await p.granted(tokens) as source:
        lease = await d.granted(tokens)
        async with lease.receive() as receiving:
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, tokens, 0, 18)
                assert await receiving.wait(16) == 16
                waiting = asyncio.create_task(receiving.wait())
                await spin(3)
                if how == "release":
                    lease.release()
                elif how == "truncate":
                    lease.truncate(12)
                elif how == "reset":
                    await d.engine.reset()
                elif how == "weights":
                    async with d.engine.updating_weights(version="2"):
                        pass
                else:
                    await lease.preempt(swap=how == "swap")
                expected = {"truncate": 12, "release": 0, "preempt": 0}.get(how, 16)
                assert await waiting == expected
                assert receiving.failure
                p.compute(source, tokens, 18, 40)
        if how not in ("release", "truncate", "reset", "weights"):
            await lease.resume(40)
            d.check(lease, tokens, lease.cached_tokens)
            assert lease.cached_tokens == 16
        lease.release()


@pytest.mark.clock
async def test_receive_ends_at_its_deadline():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=3.0) as receiving, await p.granted(tokens) as source:
            async with p.engine.send(source, receiving.ticket) as sending:
                p.compute(source, tokens, 0, 18)
                assert await receiving.wait(16) == 16
                waiting = asyncio.create_task(receiving.wait())
                await running_clock().advance(2.9)
                assert not waiting.done()
                await running_clock().advance(0.2)
                assert await waiting == 16
                assert receiving.failure == "the deadline of 3 s passed"
                assert receiving.statistics.seconds == pytest.approx(3.0)
                assert receiving.statistics.wait_seconds == pytest.approx(3.0)
                with d.engine.computing([lease]):
                    d.compute(lease, tokens, 16, 40)
                p.compute(source, tokens, 18, 40)
            assert sending.failure
        d.check(lease, tokens)
        assert lease.usage.peer_wait_seconds == pytest.approx(3.0)
        assert lease.usage.received_tokens == 16


@pytest.mark.clock
async def test_ticket_that_no_engine_sends_ends_at_its_deadline():
    async with Side() as d, await d.granted(prompt(40)) as lease:
        async with lease.receive(timeout=3.0) as receiving:
            waiting = asyncio.create_task(receiving.wait())
            await running_clock().advance(3.1)
            assert await waiting == 0
        assert d.engine.peer_statistics().receiving == 0


@pytest.mark.clock
async def test_send_is_left_at_the_deadline_of_the_ticket():
    """The copy from the device never ends: leaving the block does not wait longer."""
    tokens = prompt(20)
    device = ManualDevice()
    async with two_engines(Side(device, listen=None)) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=5.0) as receiving, await p.granted(tokens) as source:
            sending = p.engine.send(source, receiving.ticket)
            async with sending:
                p.compute(source, tokens, 0, 20)
                await run_until_idle(lambda: bool(device.running))
                left = asyncio.create_task(sending.__aexit__(None, None, None))
                await running_clock().advance(4.9)
                assert not left.done()
                await running_clock().advance(0.2)
                await left
                assert "deadline" in (sending.failure or "")
            assert await receiving.wait() == 0
            device.complete_all()
