"""Two engines: what arrives has the bytes of its prompt, whatever ends a transfer."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from contextlib import suppress
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from aiokv import CacheConfig, CacheEngine, Item, LeaseState, Peers
from aiokv.base.plan import RECEIVE, SEND
from aiokv.engine.flow import MAX_IN_FLIGHT
from aiokv.engine.receiving import Receiving
from aiokv.errors import (
    BrokenEngineError,
    ClosedError,
    ConfigError,
    ControlTimeout,
    DeviceError,
    LayoutError,
    LeaseError,
    PeerError,
    UsageError,
)
from aiokv.peers import ticket as tickets
from aiokv.stores import DiskStore, StoreUse
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.memory import Memory
from tests.peers.engines import KEY, SECRET, Side, prompt, two_engines
from tests.peers.installed import over, transports

pytestmark = pytest.mark.asyncio

# The other tests count passes of the loop, or end at their own instants: they run over tcp only.
OVER_NIXL = {
    "test_cached_blocks_are_sent_before_anything_is_computed",
    "test_received_positions_are_usable_before_the_prefill_ends",
    "test_engines_send_both_ways_at_once",
    "test_long_prompt_moves_in_more_transfers_than_are_in_flight_at_once",
    "test_sizes_of_blocks_differ",
    "test_layouts_that_cannot_be_mapped_are_refused",
    "test_many_tickets_share_a_small_ring",
    "test_lease_sends_to_several_receivers",
    "test_rest_is_received_from_another_engine",
    "test_wrong_secret_is_refused",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_prompt_arrives_whole:
        return  # has transports in its rows
    names = ("tcp", "nixl") if metafunc.function.__name__ in OVER_NIXL else ("tcp",)
    metafunc.parametrize(*transports(*names).args)


@pytest.fixture(autouse=True)
def _sides_use_transport(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Side, "default_transport", transport)


# --- whole prompts ------------------------------------------------------------------------------


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


# --- cancelled, left and late -------------------------------------------------------------------


async def test_receive_that_is_left_gives_its_blocks_back():
    tokens = prompt(40)
    async with two_engines() as (p, d):
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
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
        assert d.engine.statistics().attention.received_blocks == 4


async def test_cancelled_send_shortens_the_received_prefix():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
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
            assert "cancel() was called" in (receiving.failure or "")
        d.check(lease, tokens, 16)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, 16, 40)
        d.check(lease, tokens)


async def test_cancelled_receive_keeps_what_has_arrived_and_logs_no_warning(caplog):
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=2.0) as receiving:
            async with (
                await p.granted(tokens) as source,
                p.engine.send(source, receiving.ticket) as sending,
            ):
                p.compute(source, tokens, 0, 18)
                await receiving.wait(16)
                waiting = asyncio.create_task(receiving.wait())
                await spin(3)
                receiving.cancel()
                receiving.cancel()
                assert await waiting == 16
                assert receiving.failure == "cancel() was called"
                await run_until_idle(lambda: sending.failure is not None)
        d.check(lease, tokens, 16)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, 16, 40)
        d.check(lease, tokens)
    assert "receive.ended" not in caplog.text
    assert "send.ended" in caplog.text  # the sender did not ask for the end


@pytest.mark.parametrize(
    "how", ["error", "task", "release", "expire", "preempt", "truncate", "leave"]
)
@pytest.mark.clock
async def test_send_that_ends_early_shortens_the_received_prefix(how):
    tokens = prompt(40)
    reasons = {
        "error": "the send was left with ZeroDivisionError",
        "task": "the send was left with CancelledError",
        "release": "the lease was released",
        "expire": "the lease was not used for 2 s, and has expired",
        "preempt": "the lease was preempted",
        "truncate": "the lease was truncated to 17 positions",
        "leave": "the send was left before all positions were computed",
    }
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        source = await p.granted(tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
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
                    elif how == "expire":
                        source.expire_after(2.0)
                        await running_clock().advance(2.1)
                        assert source.state is LeaseState.RELEASED
                    elif how == "preempt":
                        await source.preempt()
                    elif how == "truncate":
                        source.truncate(17)
                        assert sending.failure == "the lease was truncated to 17 positions"
                return sending

            task = asyncio.create_task(prefill())
            await computed.wait()
            assert await receiving.wait(16) == 16
            if how == "task":
                task.cancel()
            go_on.set()
            assert await receiving.wait() == 16
            assert reasons[how] in (receiving.failure or "")
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


@pytest.mark.parametrize(
    "how", ["release", "expire", "preempt", "swap", "truncate", "reset", "weights"]
)
@pytest.mark.clock
async def test_receive_ends_when_the_lease_gives_its_blocks_back(how):
    tokens = prompt(40)
    reasons = {
        "release": "the lease was released",
        "expire": "the lease was not used for 2 s, and has expired",
        "preempt": "the lease was preempted",
        "swap": "the lease was preempted",
        "truncate": "the lease was truncated to 24 positions",
        "reset": "the cache was reset",
        "weights": "the weights are being updated",
    }
    async with two_engines() as (p, d), await p.granted(tokens) as source:
        lease = await d.granted(tokens)
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            p.engine.send(source, receiving.ticket) as sending,
        ):
            p.compute(source, tokens, 0, 18)
            assert await receiving.wait(16) == 16
            waiting = asyncio.create_task(receiving.wait())
            await spin(3)
            if how == "release":
                lease.release()
            elif how == "expire":
                lease.expire_after(2.0)
                await running_clock().advance(2.1)
            elif how == "truncate":
                lease.truncate(24)
            elif how == "reset":
                await d.engine.reset()
            elif how == "weights":
                async with d.engine.updating_weights(version="2"):
                    pass
            else:
                await lease.preempt(swap=how == "swap")
            expected = {"release": 0, "expire": 0, "preempt": 0}.get(how, 16)
            assert await waiting == expected
            assert reasons[how] in (receiving.failure or "")
            p.compute(source, tokens, 18, 40)
            await run_until_idle(lambda: sending.failure is not None)
            assert reasons[how] in (sending.failure or "")
        if how not in ("release", "expire", "truncate", "reset", "weights"):
            await lease.resume(40)
            d.check(lease, tokens, lease.cached_tokens)
            assert lease.cached_tokens == 16
        lease.release()


async def test_rest_is_received_from_another_engine():
    tokens = prompt(40)
    async with two_engines() as (p, d), Side(listen=None) as q, await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(tokens) as source,
        ):
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, tokens, 0, 18)
            assert await receiving.wait() == 16
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert tickets.decode(receiving.ticket, KEY).first_position == 16
            assert await q.prefill(tokens, receiving.ticket) == (24, None)
            assert await receiving.wait() == 40
        d.check(lease, tokens)
        assert lease.usage.received_tokens == 40
        assert d.engine.statistics().peers.complete_receives == 1


async def test_cancelled_wait_changes_nothing():
    tokens = prompt(40)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        waits = [asyncio.create_task(receiving.wait(position)) for position in (None, 8, 40)]
        await spin(2)
        waits[0].cancel()
        assert await p.prefill(tokens, receiving.ticket) == (40, None)
        assert await waits[1] >= 8
        assert await waits[2] == 40
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        d.check(lease, tokens)


async def test_drain_waits_for_receives_too():
    tokens = prompt(40)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        with pytest.raises(ControlTimeout):
            await d.engine.drain(timeout=0.0)
        draining = asyncio.create_task(d.engine.drain())
        assert await p.prefill(tokens, receiving.ticket) == (40, None)
        await draining
        assert await receiving.wait() == 40


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
                assert "deadline" in (receiving.failure or "")
                assert receiving.statistics.seconds == pytest.approx(3.0)
                assert receiving.statistics.wait_seconds == pytest.approx(3.0)
                with d.engine.computing([lease]):
                    d.compute(lease, tokens, 16, 40)
                p.compute(source, tokens, 18, 40)
            assert sending.failure
        d.check(lease, tokens)
        assert lease.usage.peer_wait_seconds == pytest.approx(3.0)
        assert lease.usage.received_tokens == 16


async def test_receiver_gives_up_as_soon_as_it_has_accepted():
    """Its cancellation arrives directly behind its acceptance; the ticket is not sent."""
    tokens = prompt(10)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with await p.granted(tokens) as source:
            async with lease.receive(timeout=60) as receiving:
                sending = p.engine.send(source, receiving.ticket)
                opening = asyncio.create_task(sending.__aenter__())
                await run_until_idle(lambda: d.engine.statistics().peers.ranks[0].received.opened)
                receiving.cancel()
                with pytest.raises(PeerError, match="the receiver gave up: "):
                    await opening
            assert p.engine.statistics().peers.ranks[0].sent.tickets == 0


@pytest.mark.clock
async def test_receive_into_blocks_of_an_open_step_ends_at_its_deadline():
    """The copies wait for the end of a step that the serving loop leaves open while it waits."""
    tokens = prompt(40)
    device = ManualDevice()
    device.computes_in_stream = True
    decode = Side(device, device_blocks=10, ring_blocks=16, write_policy="none")
    async with two_engines(decode=decode) as (p, d):
        await p.serve(tokens)
        await d.serve(prompt(40, seed=2))  # in a step that stays open
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=3.0) as receiving, await p.granted(tokens) as source:
                async with p.engine.send(source, receiving.ticket):
                    p.compute(source, tokens, 36, 40)
                waiting = asyncio.create_task(receiving.wait())
                await running_clock().advance(2.9)
                assert not waiting.done()
                await running_clock().advance(0.2)
                assert await waiting == 0
                assert "deadline" in (receiving.failure or "")
            assert d.engine.open_step == 1
            d.finish(lease, tokens, 0)
        d.engine.step()


async def test_error_after_a_transfer_does_not_keep_other_receives_from_going_on(monkeypatch):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    broken = RuntimeError("a bug")
    tokens, others = prompt(8), prompt(20, seed=2)

    async with two_engines() as (p, d):
        async with await d.granted(tokens) as lease, await d.granted(others) as other:
            async with (
                lease.receive(timeout=PATIENCE_SECONDS) as failing,
                other.receive(timeout=PATIENCE_SECONDS) as receiving,
            ):
                monkeypatch.setattr(failing._flow, "proceed", _raising(broken))
                assert await p.prefill(tokens, failing.ticket) == (8, None)
                assert await p.prefill(others, receiving.ticket) == (20, None)
                assert await receiving.wait() == 20
                failing.cancel()
                assert await failing.wait() == 0
                monkeypatch.undo()
        assert {id(context["exception"]) for context in errors} == {id(broken)}


def _raising(error: Exception):
    def call() -> None:
        raise error

    return call


@pytest.mark.clock
async def test_ticket_that_no_engine_sends_ends_at_its_deadline():
    async with Side() as d, await d.granted(prompt(40)) as lease:
        async with lease.receive(timeout=3.0) as receiving:
            waiting = asyncio.create_task(receiving.wait())
            await running_clock().advance(3.1)
            assert await waiting == 0
        assert d.engine.statistics().peers.receiving == 0


@pytest.mark.clock
@pytest.mark.parametrize(("given", "seconds"), [(None, 5.0), (2.0, 2.0), (60.0, 10.0)])
async def test_receive_ends_when_no_engine_opens_the_ticket_in_time(given, seconds):
    async with Side() as d, await d.granted(prompt(40)) as lease:
        async with lease.receive(timeout=10.0, open_timeout=given) as receiving:
            waiting = asyncio.create_task(receiving.wait())
            await running_clock().advance(seconds - 0.1)
            assert not waiting.done()
            await running_clock().advance(0.2)
            assert await waiting == 0
            reason = "no sender has opened the ticket" if seconds < 10.0 else "deadline"
            assert reason in (receiving.failure or "")
        assert d.engine.statistics().peers.ranks[0].received.expired == 1


@pytest.mark.clock
async def test_open_timeout_does_not_end_a_ticket_that_a_sender_has_opened():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=10.0, open_timeout=1.0) as receiving:
            async with await p.granted(tokens) as source:
                async with p.engine.send(source, receiving.ticket):
                    await running_clock().advance(5.0)
                    p.compute(source, tokens, 0, 40)
            assert await receiving.wait() == 40


async def test_sender_that_comes_too_late_is_refused():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS, open_timeout=0.001) as receiving,
            await p.granted(tokens) as source,
        ):
            assert await receiving.wait() == 0
            with pytest.raises(PeerError, match="the ticket is unknown, or has ended"):
                await p.engine.send(source, receiving.ticket).__aenter__()


@pytest.mark.parametrize("value", [0.0, -1.0, "1"])
async def test_wrong_open_timeouts_are_refused(value):
    async with Side() as d, await d.granted(prompt(40)) as lease:
        with pytest.raises(UsageError, match="open_timeout is"):
            lease.receive(open_timeout=value)


@pytest.mark.clock
async def test_send_is_left_at_the_deadline_of_the_ticket():
    """The copy from the device never ends: leaving the block does not wait longer."""
    tokens = prompt(20)
    device = ManualDevice()
    async with two_engines(Side(device, listen=None)) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=5.0) as receiving, await p.granted(tokens) as source:
            sending = p.engine.send(source, receiving.ticket)
            await sending.__aenter__()
            p.compute(source, tokens, 0, 20)
            await run_until_idle(lambda: bool(device.copies_of(SEND)))
            leaving = asyncio.create_task(sending.__aexit__(None, None, None))
            await running_clock().advance(4.9)
            assert not leaving.done()
            await running_clock().advance(0.2)
            await leaving
            assert "deadline" in (sending.failure or "")
            assert await receiving.wait() == 0


# --- blocks that another lease takes --------------------------------------------------------------


@pytest.mark.parametrize("ends", ["release", "expire", "preempt", "deadline", "cancel"])
@pytest.mark.clock
async def test_no_late_byte_reaches_a_lease_that_takes_the_blocks(ends):
    """I11: the copies of the receive are in the device when its lease gives its blocks back."""
    tokens, others = prompt(40), prompt(40, 2)
    device = ManualDevice()
    decode = Side(device, device_blocks=10, host_blocks=0, ring_blocks=4)
    async with (
        two_engines(decode=decode) as (p, d),
        await p.granted(tokens) as source,
    ):
        lease = await d.granted(tokens)
        receiving = lease.receive(timeout=5.0)
        await receiving.__aenter__()
        async with p.engine.send(source, receiving.ticket):
            p.compute(source, tokens, 0, 40)
            await run_until_idle(lambda: len(device.copies_of(RECEIVE)) > 0)
            device.copies_of(RECEIVE)[0].complete(0)
            if ends == "preempt":
                await lease.preempt()
            elif ends == "expire":
                lease.expire_after(2.0)
                await running_clock().advance(2.1)
                assert lease.state is LeaseState.RELEASED
            elif ends == "deadline":
                waiting = asyncio.create_task(receiving.wait())
                await running_clock().advance(5.1)
                assert receiving.failure
                assert not waiting.done()  # a copy still writes a block of the lease
            elif ends == "cancel":
                left = asyncio.create_task(receiving.__aexit__(None, None, None))
                await spin(3)
                assert not left.done()  # a copy still writes a block of the lease
            if ends != "preempt":
                lease.release()
            taker = d.engine.match(others)
            assert not taker.try_allocate(40)
            taking = asyncio.create_task(taker.allocate(40))
            await run_until_idle(lambda: bool(d.engine.statistics().waiting))
            assert not taking.done()
            assert d.engine.check_invariants() == []
            await complete_during(taking, device)
            with d.engine.computing([taker]):
                d.compute(taker, others, 0, 40)
            await run_until_idle(lambda: not p.engine.statistics().peers.sending)
        await d.at_rest()
        d.check(taker, others)
        taker.release()
        await receiving.__aexit__(None, None, None)
        if ends == "cancel":
            await left
        if ends == "deadline":
            assert await waiting == 0
        lease.release()


async def test_blocks_that_arrive_for_an_ended_ticket_are_dropped():
    """The sender goes on after the receiver has given its blocks to another lease."""
    tokens, others = prompt(80), prompt(80, 2)
    decode = Side(device_blocks=20, host_blocks=0, ring_blocks=2)
    async with two_engines(decode=decode) as (p, d), await p.granted(tokens) as source:
        for _ in range(5):
            lease = await d.granted(tokens)
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                async with p.engine.send(source, receiving.ticket):
                    if not p.engine.statistics().published_blocks:
                        p.compute(source, tokens, 0, 80)
                    await receiving.wait(8)
                    lease.release()
                    async with await d.granted(others) as taker:
                        with d.engine.computing([taker]):
                            d.compute(taker, others, 0, 80)
                        await run_until_idle(lambda: not p.engine.statistics().peers.sending)
                        d.check(taker, others)
            await d.engine.reset()


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [{"salt": "other"}, {"adapter": "other"}, {"items": [Item(b"image", 0, 2)]}, {"tokens": 1}],
)
async def test_ticket_for_another_prompt_is_refused(names):
    tokens = prompt(30)
    names = dict(names)
    other = names.pop("tokens", 0)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        changed = tokens.copy()
        changed[29] += other
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(changed, **names) as source,
        ):
            with pytest.raises(UsageError, match=r"send: the ticket is for another prompt"):
                await p.engine.send(source, receiving.ticket).__aenter__()
        assert p.engine.statistics().peers.refused_sends == 1
        assert d.engine.statistics().peers.received_tokens == 0


async def test_ticket_for_more_positions_than_are_known_is_refused():
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(tokens[:20]) as source,
        ):
            with pytest.raises(LeaseError, match="20"):
                await p.engine.send(source, receiving.ticket).__aenter__()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model": "other"},
            "CacheConfig.model of the receiving engine is 'm', here it is 'other'",
        ),
        ({"weights_version": "2"}, "version of the weights of the receiving engine is '', here"),
    ],
)
async def test_engine_of_another_model_is_refused(config, message):
    tokens = prompt(30)
    async with (
        two_engines(Side(listen=None, **config)) as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        await p.granted(tokens) as source,
    ):
        with pytest.raises(PeerError, match=message):
            await p.engine.send(source, receiving.ticket).__aenter__()


async def test_weights_are_compared_as_they_are_now():
    tokens = prompt(30)
    async with two_engines() as (p, d):
        async with p.engine.updating_weights(version="2"):
            pass
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            async with await p.granted(tokens) as source:
                with pytest.raises(PeerError, match="is '', here it is '2'"):
                    await p.engine.send(source, receiving.ticket).__aenter__()
        async with d.engine.updating_weights(version="2"):
            pass
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            assert await p.prefill(tokens, receiving.ticket) == (30, None)
            assert await receiving.wait() == 30
            d.check(lease, tokens)


@pytest.mark.clock
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_update_of_the_weights_that_fails_on_entry_leaves_peers_and_receives_alone(how):
    tokens, others = prompt(30), prompt(17, seed=2)
    device = ManualDevice()
    async with Side() as p, Side(device) as d:
        async with await d.granted(prompt(9, seed=3)) as cached:
            d.compute(cached, prompt(9, seed=3), 0, 9)
            d.engine.step()
        await spin(2)
        assert device.offloads, "a backup that does not end"
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            updating = d.engine.updating_weights(timeout=1.0, version="2")
            entering = asyncio.create_task(updating.__aenter__())
            await spin(2)
            if how == "cancelled":
                entering.cancel()
            await running_clock().advance(1.1)
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else ControlTimeout):
                await entering
            assert receiving.failure is None
            assert await complete_during(p.prefill(tokens, receiving.ticket), device) == (30, None)
            assert await receiving.wait() == 30
            d.check(lease, tokens)
        async with (
            await d.granted(others) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            sent = await complete_during(p.prefill(others, receiving.ticket), device)
            assert sent == (17, None)


async def test_update_of_the_weights_does_not_wait_for_receives():
    async with two_engines() as (_, d):
        async with await d.granted(prompt(30)) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                async with d.engine.updating_weights(0.0, version="2"):
                    assert receiving.failure == "the weights are being updated"
                assert await receiving.wait() == 0


async def test_weights_without_a_name_match_no_other_engine():
    tokens = prompt(30)
    async with two_engines() as (p, d):
        for side in (p, d):
            async with side.engine.updating_weights():
                pass
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            async with await p.granted(tokens) as source:
                with pytest.raises(PeerError, match="version of the weights"):
                    await p.engine.send(source, receiving.ticket).__aenter__()


async def test_blocks_of_old_weights_are_not_sent_as_new_ones():
    """A lease that was granted before an update cannot be sent after it."""
    tokens = prompt(30)
    async with two_engines() as (p, d), await p.granted(tokens) as source:
        p.compute(source, tokens, 0, 16)
        for side in (p, d):
            async with side.engine.updating_weights(version="2"):
                pass
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            with pytest.raises(LeaseError, match="reset"):
                await p.engine.send(source, receiving.ticket).__aenter__()
            assert await receiving.wait() == 0


async def test_wrong_secret_is_refused():
    tokens = prompt(30)
    async with (
        two_engines(Side(listen=None, secret="another secret 16")) as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        await p.granted(tokens) as source,
    ):
        with pytest.raises(PeerError):
            await p.engine.send(source, receiving.ticket).__aenter__()
        assert p.engine.statistics().peers.refused_sends == 1


async def test_ticket_that_has_ended_is_refused():
    tokens = prompt(30)
    async with two_engines() as (p, d), await p.granted(tokens) as source:
        async with (
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            blob = receiving.ticket
        with pytest.raises(PeerError, match="unknown, or has ended"):
            await p.engine.send(source, blob).__aenter__()


async def test_engine_that_is_gone_is_a_peer_error():
    tokens = prompt(30)
    async with Side(listen=None) as p, await p.granted(tokens) as source:
        async with Side() as d, await d.granted(tokens) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                blob = receiving.ticket
        with pytest.raises(PeerError) as caught, structlog.testing.capture_logs() as logs:
            await p.engine.send(source, blob).__aenter__()
        (line,) = [line for line in logs if line["event"] == "send.ended"]
        assert line["reason"] == f"the ticket could not be opened: {caught.value}"


async def test_ticket_is_sent_once():
    tokens = prompt(30)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        await p.granted(tokens) as source,
    ):
        async with p.engine.send(source, receiving.ticket):
            with pytest.raises(UsageError, match="is being sent already"):
                await p.engine.send(source, receiving.ticket).__aenter__()
            p.compute(source, tokens, 0, 30)
            assert await receiving.wait() == 30
        with pytest.raises(PeerError, match=r"has ended|the receiver gave up"):
            await p.engine.send(source, receiving.ticket).__aenter__()


@pytest.mark.parametrize("blob", [b"", b"ticket", "ticket", None])
async def test_malformed_ticket_is_refused(blob):
    async with two_engines() as (p, _), await p.granted(prompt(30)) as source:
        with pytest.raises(UsageError, match=r"^ticket "):
            await p.engine.send(source, blob).__aenter__()


async def test_forged_ticket_lets_no_engine_connect():
    tokens = prompt(30)
    accepted: list[object] = []
    server = await asyncio.start_server(lambda *ends: accepted.append(ends), "127.0.0.1", 0)
    async with server, two_engines() as (p, d), await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(tokens) as source,
        ):
            ticket = tickets.decode(receiving.ticket, KEY)
            port = server.sockets[0].getsockname()[1]
            endpoints = [msgspec.structs.replace(e, port=port) for e in ticket.endpoints]
            forged = msgspec.structs.replace(ticket, endpoints=endpoints)
            body = msgspec.msgpack.encode(forged)
            other_key = tickets.ticket_key(b"secret of another cluster")
            for blob in (
                body + receiving.ticket[-tickets.MAC_BYTES :],
                body + bytes(tickets.MAC_BYTES),
                tickets.encode(forged, other_key),
            ):
                with pytest.raises(PeerError, match="another secret made it"):
                    await p.engine.send(source, blob).__aenter__()
            assert p.engine.statistics().peers.ranks[0].connections == 0
            await spin(20)
            assert accepted == []
            assert await p.prefill(tokens, receiving.ticket) == (30, None)


async def test_wrong_calls_of_receive_change_nothing():
    tokens = prompt(30)
    async with Side() as d:
        async with d.engine.match(tokens) as lease:
            with pytest.raises(LeaseError, match=r"is matched; it must be granted.*allocate"):
                await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
            for arguments, message in [
                ({"timeout": 0}, "timeout is 0"),
                ({"timeout": None}, "timeout is None"),
                ({"timeout": float("inf")}, "timeout is inf"),
                ({"timeout": 86401}, "at most 86400"),
                ({"num_tokens": 0}, "num_tokens is 0"),
                ({"num_tokens": "all"}, "num_tokens is 'all'"),
            ]:
                with pytest.raises(UsageError, match=message):
                    lease.receive(**arguments)
            await lease.allocate(30)
            with pytest.raises(LeaseError, match="num_tokens is 31; it must be at most the 30"):
                await lease.receive(31).__aenter__()
            d.compute(lease, tokens, 0, 18)
            with pytest.raises(LeaseError, match=r"18 positions .* multiple of block_tokens"):
                await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
            with pytest.raises(LeaseError, match="of 18, none is missing"):
                await lease.receive(18, timeout=PATIENCE_SECONDS).__aenter__()
            d.compute(lease, tokens, 18, 20)
            receiving = lease.receive(timeout=PATIENCE_SECONDS)
            with pytest.raises(UsageError, match="inside its `async with`"):
                await receiving.wait()
            with d.engine.computing([lease]), pytest.raises(LeaseError, match="batch computes"):
                await receiving.__aenter__()
            assert d.engine.statistics().peers.receiving == 0
            async with receiving:
                with pytest.raises(UsageError, match="entered once"):
                    await receiving.__aenter__()
                with pytest.raises(LeaseError, match="being received already"):
                    await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
                with pytest.raises(UsageError, match="position is 31"):
                    await receiving.wait(31)
                with pytest.raises(UsageError, match=r"position is 1\.5"):
                    await receiving.wait(1.5)  # type: ignore[arg-type]
                with pytest.raises(LeaseError, match="still being received"):
                    lease.commit(24)
                with pytest.raises(LeaseError, match="still being received"):
                    d.engine.computing([lease]).__enter__()
                assert await receiving.wait(20) == 20
            assert "in flight" not in repr(receiving)
        with pytest.raises(LeaseError, match="released"):
            lease.receive(timeout=PATIENCE_SECONDS)


async def test_wrong_calls_of_send_change_nothing():
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            with pytest.raises(UsageError, match="must be a Lease"):
                p.engine.send("lease", receiving.ticket)  # type: ignore[arg-type]
            with pytest.raises(LeaseError, match="another engine"):
                p.engine.send(lease, receiving.ticket)
            async with p.engine.match(tokens) as source:
                sending = p.engine.send(source, receiving.ticket)
                with pytest.raises(LeaseError, match="is matched; it must be granted"):
                    await sending.__aenter__()
                with pytest.raises(UsageError, match="inside its `async with`"):
                    sending.cancel()
                await source.allocate(30)
                async with sending:
                    with pytest.raises(UsageError, match="entered once"):
                        await sending.__aenter__()
                    p.compute(source, tokens, 0, 30)
                    assert await receiving.wait() == 30


async def test_engine_without_peers_refuses_both():
    config = CacheConfig(device_blocks=8, block_tokens=4)
    async with CacheEngine(config) as engine, engine.match([1, 2, 3]) as lease:
        await lease.allocate(3)
        with pytest.raises(UsageError, match=r"receive: the engine has no peers.*peers=Peers"):
            await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        with pytest.raises(UsageError, match="send: the engine has no peers"):
            await engine.send(lease, b"").__aenter__()
        assert engine.statistics().peers.ranks == []


async def test_engine_that_only_sends_cannot_receive():
    async with Side(listen=None) as p, await p.granted(prompt(30)) as lease:
        with pytest.raises(UsageError, match=r"Peers.listen is None.*only sends"):
            await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()


@pytest.mark.parametrize(
    ("config", "peers", "message"),
    [
        ({}, "peers", "peers is of type str; it must be an aiokv.Peers"),
        ({"model": ""}, Peers(secret=SECRET), "CacheConfig.model is empty; with peers"),
    ],
)
async def test_wrong_configuration_is_refused(config, peers, message):
    with pytest.raises(ConfigError, match=message):
        CacheEngine(CacheConfig(device_blocks=8, **{"model": "m", **config}), peers=peers)


# --- the engine closes, breaks or sleeps ---------------------------------------------------------


@pytest.mark.parametrize("slow", [False, True])
async def test_receiver_closes_with_transfers_in_flight(slow):
    tokens = prompt(40)
    device = ManualDevice() if slow else None
    async with Side(listen=None) as p, await p.granted(tokens) as source:
        d = Side(device)
        await d.engine.__aenter__()
        lease = await d.granted(tokens)
        receiving = lease.receive(timeout=PATIENCE_SECONDS)
        await receiving.__aenter__()
        async with p.engine.send(source, receiving.ticket) as sending:
            p.compute(source, tokens, 0, 18)
            if device is not None:
                await run_until_idle(lambda: bool(device.copies_of(RECEIVE)))
            waiting = asyncio.create_task(receiving.wait())
            await spin(3)
            closing = asyncio.create_task(d.engine.aclose(0.0))
            while not closing.done():
                if device is not None:
                    device.complete_all()
                await asyncio.sleep(0)
            await closing
            assert await waiting < 40
            assert receiving.failure == "the engine was closed"
            p.compute(source, tokens, 18, 40)
        assert sending.failure
        await receiving.__aexit__(None, None, None)
        lease.release()
        with pytest.raises(ClosedError):
            await Receiving(lease.record.leases.exchange, lease, None, 1.0, 0.5).__aenter__()


@pytest.mark.parametrize("slow", [False, True])
async def test_sender_closes_with_transfers_in_flight(slow):
    tokens = prompt(40)
    device = ManualDevice() if slow else None
    async with (
        Side() as d,
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        p = Side(device, listen=None)
        await p.engine.__aenter__()
        source = await p.granted(tokens)
        sending = p.engine.send(source, receiving.ticket)
        await sending.__aenter__()
        p.compute(source, tokens, 0, 18)
        if device is not None:
            await run_until_idle(lambda: bool(device.copies_of(SEND)))
        leaving = asyncio.create_task(sending.__aexit__(None, None, None))
        await spin(3)
        closing = asyncio.create_task(p.engine.aclose(0.0))
        while not closing.done():
            if device is not None:
                device.complete_all()
            await asyncio.sleep(0)
        await closing
        await leaving
        source.release()
        assert sending.failure
        first = await receiving.wait()
        assert first < 40
        d.check(lease, tokens, first)
        with d.engine.computing([lease]):
            d.compute(lease, tokens, first, 40)
        d.check(lease, tokens)


async def test_engine_closes_while_a_send_connects():
    tokens = prompt(40)
    async with (
        Side() as d,
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        p = Side(listen=None)
        await p.engine.__aenter__()
        source = await p.granted(tokens)
        entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
        await spin(2)
        await p.engine.aclose(0.0)
        with pytest.raises((ClosedError, PeerError)):
            await entering
        source.release()
        assert await receiving.wait(0) == 0


async def test_lease_released_while_a_send_connects():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            source = await p.granted(tokens)
            entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
            await spin(2)
            source.release()
            with pytest.raises(LeaseError):
                await entering
            assert p.engine.statistics().peers.sending == 0


async def test_cancelled_connect_leaves_nothing_behind():
    tokens = prompt(40)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            await p.granted(tokens) as source,
        ):
            for passes in range(12):
                sending = p.engine.send(source, receiving.ticket)
                entering = asyncio.create_task(sending.__aenter__())
                await spin(passes)
                if entering.done():
                    break
                entering.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await entering
                assert p.engine.statistics().peers.sending == 0
                await p.at_rest()


async def test_failed_onload_ends_the_receive_before_it_begins():
    tokens = prompt(29)
    device = ManualDevice()
    d = Side(device, write_policy="write_through")
    async with two_engines(decode=d) as (_p, _):
        await d.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: d.engine.statistics().attention.offloaded_blocks == 4)
        await d.engine.evict(64)
        async with await d.granted(tokens) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert d.engine.statistics().receives == 0
                device.onloads[0].fail_all(block=2)
                assert await receiving.wait() == 8
                assert receiving.failure == "an onload of the lease has failed"
            assert lease.recompute_from() == 8
            with d.engine.computing([lease]):
                d.compute(lease, tokens, 8, 29)
            d.check(lease, tokens)


async def test_lease_neither_receives_nor_sends_during_an_update_of_the_weights():
    tokens = prompt(30)
    async with (
        two_engines() as (p, d),
        await d.granted(tokens) as lease,
        await p.granted(tokens) as source,
    ):
        p.compute(source, tokens, 0, 16)
        async with d.engine.updating_weights(version=""):
            with pytest.raises(LeaseError, match="reset"):
                await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        async with (
            await d.granted(tokens) as other,
            other.receive(timeout=PATIENCE_SECONDS) as receiving,
            p.engine.updating_weights(version=""),
        ):
            with pytest.raises(PeerError, match="here it is 'unnamed "):
                await p.engine.send(source, receiving.ticket).__aenter__()


async def test_failed_device_ends_the_receive():
    tokens = prompt(40)
    device: Any = ManualDevice()
    async with Side(listen=None) as p, await p.granted(tokens) as source:
        d = Side(device)
        await d.engine.__aenter__()
        lease = await d.granted(tokens)
        other = await d.granted(prompt(40, 2))
        async with (
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            other.receive(timeout=PATIENCE_SECONDS) as second,
        ):
            async with p.engine.send(source, receiving.ticket) as sending:
                p.compute(source, tokens, 0, 18)
                await run_until_idle(lambda: bool(device.copies_of(RECEIVE)))
                device.failure = DeviceError("the device is broken")
                device.copies_of(RECEIVE)[0].fail_all()
                waiting = asyncio.create_task(receiving.wait())
                await complete_during(waiting, device)
                assert (await waiting, await second.wait()) == (0, 0)
                assert "the device is broken" in (second.failure or "")
                with pytest.raises(BrokenEngineError):
                    await other.receive(timeout=PATIENCE_SECONDS).__aenter__()
                device.complete_all()
            assert sending.failure
        lease.release()
        other.release()
        await complete_during(d.engine.aclose(0.0), device)


@pytest.mark.clock
async def test_ended_receives_and_sends_leave_no_timer():
    tokens = prompt(30)
    async with two_engines() as (p, d), await d.granted(tokens) as lease:
        before = running_clock().timers
        async with lease.receive(timeout=1000.0) as receiving:
            async with await p.granted(tokens) as source:
                async with p.engine.send(source, receiving.ticket):
                    assert running_clock().timers >= before + 2
                    p.compute(source, tokens, 0, 30)
            assert await receiving.wait() == 30
        await run_until_idle(lambda: p.is_at_rest() and d.is_at_rest())
        assert d.engine.check_invariants() == []


async def test_leaving_a_send_waits_for_the_onloads_of_its_lease():
    tokens = prompt(29)
    device = ManualDevice()
    p = Side(device, listen=None, write_policy="write_through")
    async with two_engines(p) as (_, d):
        await p.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: p.engine.statistics().attention.offloaded_blocks == 4)
        await p.engine.evict(64)
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                async with p.engine.send(source, receiving.ticket) as sending:
                    leaving = asyncio.create_task(sending.__aexit__(None, None, None))
                    await spin(5)
                    assert not leaving.done()
                    await complete_during(leaving, device)
                    assert sending.delivered_tokens == 16
                assert await receiving.wait() == 16
                d.check(lease, tokens, 16)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends", ["position", "deadline", "left"])
@pytest.mark.clock
async def test_wait_returns_when_no_onload_writes_the_lease_any_more(ends, fails):
    tokens = prompt(29)
    device = ManualDevice()
    d = Side(device, write_policy="write_through")
    async with two_engines(decode=d) as (_p, _):
        await d.serve(tokens[:17])
        await spin(2)
        device.complete_all()
        await run_until_idle(lambda: d.engine.statistics().attention.offloaded_blocks == 4)
        await d.engine.evict(64)
        async with await d.granted(tokens) as lease:
            receiving = lease.receive(timeout=3.0)
            await receiving.__aenter__()
            position = 12 if ends == "position" else None
            waiting = asyncio.create_task(receiving.wait(position))
            if ends == "left":
                leaving = asyncio.create_task(receiving.__aexit__(None, None, None))
            elif ends == "deadline":
                await running_clock().advance(3.1)
            await spin(5)
            assert not waiting.done()
            assert ends != "left" or not leaving.done()
            if fails:
                device.onloads[0].fail_all(block=2)
            else:
                device.complete_all()
            assert await waiting == (8 if fails else 16)
            d.check(lease, tokens, 8 if fails else 16)
            await receiving.__aexit__(None, None, None)
            if ends == "left":
                await leaving
            assert not d.engine.check_invariants()


@pytest.mark.clock
async def test_send_whose_lease_ends_while_it_connects_leaves_nothing_behind():
    """At each pass of the loop; meanwhile and afterwards, the ticket is sent again."""
    tokens = prompt(40)
    for passes in range(100):
        async with two_engines() as (p, d), await d.granted(tokens) as lease:
            async with lease.receive(timeout=100.0) as receiving:
                source = await p.granted(tokens)
                entering = asyncio.create_task(p.engine.send(source, receiving.ticket).__aenter__())
                await spin(passes)
                was_late = entering.done()
                source.release()
                again = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                await run_until_idle(lambda: entering.done() and again.done())  # noqa: B023
                if was_late:
                    await entering
                else:
                    with pytest.raises((LeaseError, PeerError)):
                        await entering
                with suppress(PeerError, UsageError):
                    await again
                (rank,) = p.engine.statistics().peers.ranks
                assert rank.sent.tickets == 0
                with suppress(PeerError):
                    await p.prefill(tokens, receiving.ticket)
                waiting = asyncio.create_task(receiving.wait())
                await run_until_idle(waiting.done)  # the receiver knows of the end
                d.finish(lease, tokens, await waiting)
            await run_until_idle(lambda: p.is_at_rest() and d.is_at_rest())
            await running_clock().advance(61.0)
            (rank,) = p.engine.statistics().peers.ranks
            assert rank.connections == 0, "a use of the connection was not ended"
        if was_late:
            return
    raise AssertionError("the send is never entered")


async def test_end_of_a_ticket_takes_no_time_per_slot():
    """Small blocks and the default sizes of the rings are hundreds of thousands of slots."""
    slots = 100_000
    sides = (
        Side(listen=None, ring_blocks=slots, device_blocks=8, host_blocks=0),
        Side(ring_blocks=slots, device_blocks=8, host_blocks=0),
    )
    async with two_engines(*sides) as (p, d):
        tokens = prompt(4)

        async def calls_of_one_ticket() -> int:
            """Return the number of events of the interpreter in a whole receive and send."""
            events = 0

            def count(*_: object) -> Any:
                nonlocal events
                events += 1
                return count

            async with await d.granted(tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    sys.settrace(count)  # lines of frames that begin from here on
                    try:
                        assert await p.prefill(tokens, receiving.ticket) == (4, None)
                    finally:
                        sys.settrace(None)
                    assert await receiving.wait() == 4
            return events

        assert await calls_of_one_ticket() < slots / 2


async def test_stores_of_an_engine_with_peers_keep_their_limit(tmp_path):
    """The slots of peers are no pool of a store: none of its bytes is reserved for them."""
    sides = []
    for name, peers in (("a", None), ("b", Peers(secret=SECRET, listen="127.0.0.1"))):
        memory = Memory(16, 4)
        engine = CacheEngine(
            CacheConfig(model="m", device_blocks=16, block_tokens=4, host_blocks=8),
            memory.regions,
            stores=[StoreUse(DiskStore(tmp_path / name, bytes="1MiB", min_free_bytes=0))],
            peers=peers,
        )
        async with engine:
            sides.append(
                (
                    [store.store.capacity_bytes for store in engine.statistics().stores],
                    sorted(path.name for path in (tmp_path / name).iterdir()),
                )
            )
    assert sides[0] == sides[1]


async def test_receive_whose_lease_was_released_leaves_no_object():
    async with two_engines() as (_p, d):
        lease = await d.granted(prompt(40))
        receiving = await lease.receive(timeout=PATIENCE_SECONDS).__aenter__()
        lease.release()
        await receiving.__aexit__(None, None, None)
        left = weakref.ref(receiving)
        del receiving, lease
        await d.at_rest()
        gc.collect()
        assert left() is None
