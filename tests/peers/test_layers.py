"""Layers of positions that are being computed are sent early, and used after the commit only."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.base.plan import SEND
from aiokv.errors import LayoutError, LeaseError, UsageError
from aiokv.testing import (
    ManualDevice,
    ManualEvent,
    TransitionLog,
    record,
    replay_transitions,
    run_until_idle,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.pairwise import pairwise

from .engines import Side, prompt, two_engines
from .test_sides import complete

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np

    from aiokv import Lease
    from aiokv.engine.receiving import Receiving
    from aiokv.engine.sending import Sending

pytestmark = pytest.mark.asyncio

LAYERS = 5


def sides(layer_ranges: int = 3, **options: Any) -> tuple[Side, Side]:
    options |= {"layers": LAYERS, "layer_ranges": layer_ranges}
    return Side(listen=None, **options), Side(**options)


def fragments(side: Side) -> int:
    """Return the fragments that an engine has received and verified."""
    (rank,) = side.engine.statistics().peers.ranks
    return rank.received.fragments


@asynccontextmanager
async def transfer(
    p: Side, lease: Lease, tokens: np.ndarray, **receive: Any
) -> AsyncIterator[tuple[Receiving, Lease, Sending]]:
    """Let ``lease`` receive a prompt that a granted lease of ``p`` sends."""
    async with (
        lease.receive(**receive) as receiving,
        await p.granted(tokens) as source,
        p.engine.send(source, receiving.ticket) as sending,
    ):
        yield receiving, source, sending


async def arrival(side: Side, count: int) -> None:
    """Wait until so many fragments have arrived, and check that no further one does."""
    await run_until_idle(lambda: fragments(side) >= count)
    assert fragments(side) == count


@pytest.mark.parametrize(
    ("length", "step", "layer_ranges"),
    pairwise(product([1, 4, 5, 30, 131], [7, 1000], [2, 3, 64])),
)
async def test_prompt_arrives_in_layers(length, step, layer_ranges):
    tokens = prompt(length)
    async with two_engines(*sides(layer_ranges)) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(
                p.prefill(tokens, receiving.ticket, step=step, by_layer=True)
            )
            assert await receiving.wait() == length
            assert receiving.failure is None
        assert await prefill == (length, None)
        d.check(lease, tokens)
        assert d.engine.statistics().published_blocks == length // 4
        # Some blocks may have been committed before their first layers could be sent.
        assert 0 < fragments(d) <= -(-length // 4) * min(layer_ranges, LAYERS)


async def test_layers_arrive_before_the_commit_and_are_used_after_it():
    tokens = prompt(30)
    async with two_engines(*sides(3)) as (p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(21), sending)  # all layers
            await arrival(d, 2 * 5)  # but for the last range of layers
            assert receiving.received_tokens == 0
            assert d.engine.statistics().published_blocks == 0
            assert d.engine.would_hit(tokens).device_tokens == 0
            assert sending.delivered_tokens == 0
            source.commit(21)
            assert await receiving.wait(16) == 16
            await arrival(d, 3 * 5)
            p.compute(source, tokens, 21, 30)  # in whole blocks
            assert await receiving.wait() == 30
        d.check(lease, tokens)
        assert fragments(d) == 3 * 5 + 3
        assert d.engine.statistics().attention.received_blocks == 8


async def cancel(p: Side, source: Lease, sending: Sending) -> None:
    sending.cancel()


async def release(p: Side, source: Lease, sending: Sending) -> None:
    source.release()


async def preempt(p: Side, source: Lease, sending: Sending) -> None:
    await source.preempt()


async def truncate(p: Side, source: Lease, sending: Sending) -> None:
    source.truncate(8)


async def error(p: Side, source: Lease, sending: Sending) -> None:
    await sending.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)


async def reset(p: Side, source: Lease, sending: Sending) -> None:
    await p.engine.reset()


async def close(p: Side, source: Lease, sending: Sending) -> None:
    await complete_during(p.engine.aclose(0.0), p.device)


@pytest.mark.parametrize("give_up", [cancel, release, preempt, truncate, error, reset, close])
@pytest.mark.parametrize("committed", [0, 8])
async def test_layers_that_are_never_committed_are_dropped(give_up, committed):
    tokens = prompt(30)
    p, d = sides(3)
    await p.engine.__aenter__()
    async with d, await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            source = await p.granted(tokens)
            sending = await p.engine.send(source, receiving.ticket).__aenter__()
            if committed:
                p.compute(source, tokens, 0, committed)
                assert await receiving.wait(committed) == committed
            p.compute_layers(source, tokens, range(committed, 24), sending)
            blocks = (24 - committed) // 4
            await arrival(d, committed // 4 + 2 * blocks)
            await give_up(p, source, sending)
            assert await receiving.wait() == committed
            assert receiving.failure
        assert d.engine.statistics().published_blocks == committed // 4
        d.finish(lease, tokens, committed)
    source.release()
    await p.engine.aclose(0.0)


async def test_last_layers_wait_for_the_commit_of_their_own_positions():
    tokens = prompt(24)
    async with two_engines(*sides(2)) as (p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(8), sending)
            p.compute_layers(source, tokens, range(8, 24), sending, range(4))
            await arrival(d, 6)
            source.commit(8)
            assert await receiving.wait(8) == 8
            await arrival(d, 8)
            p.compute_layers(source, tokens, range(8, 24), sending, range(4, 5))
            await arrival(d, 8)
            source.commit(24)
            assert await receiving.wait() == 24
        d.check(lease, tokens)


async def test_layers_of_a_later_call_do_not_bring_those_of_an_earlier_one():
    tokens = prompt(16)
    async with two_engines(*sides(5)) as (p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(8), sending, range(3))
            p.compute_layers(source, tokens, range(8, 16), sending, range(1))
            sending.layers_done(4, 2)  # known
            sending.layers_done(8, 0)  # no layer
            await arrival(d, 3 * 2 + 2)
            p.compute(source, tokens, 0, 16)
            assert await receiving.wait() == 16
        d.check(lease, tokens)
        assert fragments(d) == 5 * 4


async def test_without_ranges_layers_are_sent_when_they_are_committed():
    tokens = prompt(16)
    async with two_engines(*sides(1)) as (p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(16), sending)
            await arrival(d, 0)
            source.commit(16)
            assert await receiving.wait() == 16
        d.check(lease, tokens)
        assert fragments(d) == 4


async def test_long_prompt_with_more_parts_than_transfers_in_flight():
    tokens = prompt(1200)
    options: dict[str, Any] = {"device_blocks": 400, "chunk_blocks": 1}
    async with two_engines(*sides(5, **options)) as (p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(1200), sending)
            source.commit(1200)
            assert await receiving.wait() == 1200
        d.check(lease, tokens)


@pytest.mark.parametrize(("sender", "receiver"), [(3, 2), (3, 1), (1, 3)])
async def test_receiver_takes_its_own_ranges_or_whole_blocks(sender, receiver):
    tokens = prompt(16)
    p = Side(listen=None, layers=LAYERS, layer_ranges=sender)
    d = Side(layers=LAYERS, layer_ranges=receiver)
    async with (
        two_engines(p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        if sender == 1:
            assert await p.prefill(tokens, receiving.ticket, by_layer=True) == (16, None)
            assert await receiving.wait() == 16
            d.check(lease, tokens)
            return
        text = f"into 3 ranges, the receiver into {receiver}"
        async with await p.granted(tokens) as source:
            with pytest.raises(LayoutError, match=text):
                await p.engine.send(source, receiving.ticket).__aenter__()


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (12, 8)])
async def test_blocks_of_other_sizes_arrive_in_layers(sizes):
    tokens = prompt(90)
    p = Side(listen=None, layers=LAYERS, layer_ranges=3, block_tokens=sizes[0], ring_blocks=32)
    d = Side(layers=LAYERS, layer_ranges=3, block_tokens=sizes[1], ring_blocks=32)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            p.compute_layers(source, tokens, range(48), sending)
            await run_until_idle(lambda: fragments(d) > 0)
            assert receiving.received_tokens == 0
            source.commit(48)
            assert await receiving.wait(32) >= 32
            p.compute_layers(source, tokens, range(48, 90), sending)
            source.commit(90)
            assert await receiving.wait() == 90
        d.check(lease, tokens)


async def test_assembly_slots_are_left_for_committed_blocks():
    """A prompt whose layers wait for their commit does not keep another one from arriving."""
    p = Side(listen=None, layers=LAYERS, layer_ranges=3, block_tokens=4, ring_blocks=16)
    d = Side(layers=LAYERS, layer_ranges=3, block_tokens=8, ring_blocks=16)
    one, other = prompt(120), prompt(96, seed=2)
    async with two_engines(p, d), await d.granted(one) as lease, await d.granted(other) as second:
        async with transfer(p, lease, one) as (receiving, source, sending):
            p.compute_layers(source, one, range(120), sending)
            await run_until_idle(lambda: fragments(d) > 0)
            async with second.receive(timeout=PATIENCE_SECONDS) as arriving:
                assert await p.prefill(other, arriving.ticket, by_layer=True) == (96, None)
                assert await arriving.wait() == 96
            d.check(second, other)
            source.commit(120)
            assert await receiving.wait() == 120
        d.check(lease, one)


@pytest.mark.parametrize("sizes", [(8, 4), (8, 12)])
async def test_fragments_without_room_leave_their_outgoing_slots_to_others(sizes):
    """Layers fill their half of the assembly slots; the last layers then need an outgoing slot."""
    tokens = prompt(42)
    p = Side(listen=None, layers=LAYERS, layer_ranges=3, block_tokens=sizes[0], ring_blocks=2)
    d = Side(layers=LAYERS, layer_ranges=3, block_tokens=sizes[1], ring_blocks=24)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens, timeout=PATIENCE_SECONDS) as (
            receiving,
            source,
            sending,
        ):
            first = 0
            for end in (17, 30, 42):  # no pass of the loop between them
                p.compute_layers(source, tokens, range(first, end), sending)
                source.commit(end)
                first = end
            assert await receiving.wait() == 42
        d.check(lease, tokens)


@pytest.mark.parametrize("seed", range(40))
async def test_every_order_of_layers_commits_and_copies_ends(seed):
    """All positions are committed, and both engines run: all of them arrive."""
    random = Random(seed)
    sizes = random.choice([(8, 4), (4, 8), (12, 8), (8, 12), (4, 4)])
    length = random.choice([42, 90, 130])
    ends = sorted({*random.sample(range(1, length), random.randrange(4)), length})
    options: dict[str, Any] = {"layers": LAYERS, "layer_ranges": random.choice([2, 3, 5])}
    devices = [ManualDevice(), ManualDevice()]
    p = Side(
        devices[0],
        listen=None,
        block_tokens=sizes[0],
        ring_blocks=random.choice([2, 3, 8]),
        **options,
    )
    d = Side(devices[1], block_tokens=sizes[1], ring_blocks=random.choice([24, 32, 48]), **options)

    async def complete_copies() -> None:
        while True:
            for device in devices:
                if device.copies and random.random() < 0.3:
                    random.choice(device.copies).complete_all()
            await asyncio.sleep(0)

    tokens = prompt(length)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        copying = asyncio.create_task(complete_copies())
        async with transfer(p, lease, tokens, timeout=PATIENCE_SECONDS) as (
            receiving,
            source,
            sending,
        ):
            first = 0
            for end in ends:
                p.compute_layers(source, tokens, range(first, end), sending)
                await spin(random.choice([0, 0, 60]))
                source.commit(end)
                await spin(random.choice([0, 0, 30]))
                first = end
            assert await receiving.wait() == length, receiving.failure
        d.check(lease, tokens)
        copying.cancel()


async def test_layers_wait_for_their_event_and_the_last_ones_for_their_step():
    tokens = prompt(8)
    device = ManualDevice()
    device.computes_in_stream = True
    p = Side(device, listen=None, layers=LAYERS, layer_ranges=3)
    d = Side(layers=LAYERS, layer_ranges=3)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with transfer(p, lease, tokens) as (receiving, source, sending):
            events = [ManualEvent(), ManualEvent()]
            sending.layers_done(8, 1, events[0])
            sending.layers_done(8, 3, events[1])
            await run_until_idle(lambda: len(device.copies_of(SEND)) == 2)
            assert [copy.after for copy in device.copies_of(SEND)] == events
            p.compute(source, tokens, 0, 8)
            p.engine.step(step := ManualEvent())
            for copy, event in zip(list(device.copies_of(SEND)), events, strict=True):
                event.complete()
                copy.complete_all()
            await run_until_idle(lambda: [copy.after for copy in device.copies_of(SEND)] == [step])
            step.complete()
            await complete(device, until=lambda: receiving.received_tokens == 8)
        d.check(lease, tokens)


async def test_layers_computed_behind_a_failed_onload_are_not_sent():
    tokens = prompt(29)
    device = ManualDevice()
    options: dict[str, Any] = {"layers": LAYERS, "layer_ranges": 3}
    p = Side(device, listen=None, write_policy="write_through", **options)
    async with two_engines(p, Side(**options)) as (_, d):
        await p.serve(tokens[:17])
        await complete(device, until=lambda: p.engine.statistics().attention.offloaded_blocks == 4)
        await p.engine.evict(64)
        async with await d.granted(tokens) as lease, await p.granted(tokens) as source:
            async with (
                lease.receive(timeout=PATIENCE_SECONDS) as receiving,
                p.engine.send(source, receiving.ticket) as sending,
            ):
                p.compute_layers(source, tokens + 1, range(16, 29), sending)  # wrong bytes
                device.onloads[0].fail_all(block=2)
                await run_until_idle(lambda: source.state == "failed")
                assert source.recompute_from() == 8
                for first, end in ((8, 16), (16, 29)):
                    p.compute(source, tokens, first, end)
                    await complete(device, until=lambda e=end: receiving.received_tokens == e)
            d.check(lease, tokens)


async def test_end_of_an_idle_send_is_known_at_once():
    tokens = prompt(30)
    async with (
        two_engines(*sides(3)) as (p, d),
        await d.granted(tokens) as lease,
        transfer(p, lease, tokens) as (receiving, source, sending),
    ):
        p.compute(source, tokens, 0, 8)
        assert await receiving.wait(8) == 8
        ended = asyncio.create_task(sending.ended())
        await spin(10)
        assert not ended.done()
        receiving.cancel()
        assert await ended == "the receiver gave up: cancel() was called"
        assert sending.failure == await ended
        assert sending.delivered_blocks == sending.delivered_tokens / 4 == 2


async def test_end_of_a_complete_send_has_no_failure():
    tokens = prompt(30)
    async with (
        two_engines(*sides(3)) as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        await p.granted(tokens) as source,
    ):
        async with p.engine.send(source, receiving.ticket) as sending:
            p.compute_layers(source, tokens, range(30), sending)
            await arrival(d, 16)
            await run_until_idle(lambda: sending.delivered_blocks > 5.3)
            assert sending.delivered_blocks == pytest.approx(16 / 3)
            source.commit(30)
            assert await sending.ended() is None
            assert sending.delivered_blocks == pytest.approx(8)
        assert await receiving.wait() == 30


async def test_wrong_arguments_are_refused():
    tokens = prompt(16)
    async with (
        two_engines(*sides()) as (p, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        await p.granted(tokens) as source,
    ):
        sending = p.engine.send(source, receiving.ticket)
        with pytest.raises(UsageError, match="can only be used inside"):
            sending.layers_done(4, 1)
        async with sending:
            with pytest.raises(UsageError, match="num_layers is 6"):
                sending.layers_done(4, 6)
            with pytest.raises(UsageError, match="num_tokens is -1"):
                sending.layers_done(-1, 1)
            with pytest.raises(LeaseError, match="num_tokens is 17; it must be at most the 16"):
                sending.layers_done(17, 1)
            event: Any = 3
            with pytest.raises(UsageError, match="event is 3"):
                sending.layers_done(4, 1, event)
            p.compute(source, tokens, 0, 16)
        sending.layers_done(16, 5)  # without effect: it has ended
        assert await receiving.wait() == 16


async def test_transitions_with_layers_can_be_replayed(tmp_path):
    tokens = prompt(30)
    p, d = sides(3)
    with record(p.engine, tmp_path / "log"):
        async with (
            two_engines(p, d),
            await d.granted(tokens) as lease,
            lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        ):
            await p.prefill(tokens, receiving.ticket, by_layer=True)
            assert await receiving.wait() == 30
    assert replay_transitions(TransitionLog.load(tmp_path / "log")) > 0
