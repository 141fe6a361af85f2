"""Recurrent state and sliding windows between engines: they arrive behind the last block."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheEngine, Peers, Regions, WindowGroup
from aiokv.base import plan
from aiokv.base.plan import STATE_CLONE, GroupRoute
from aiokv.errors import ConfigError, LayoutError, LeaseError, PeerError
from aiokv.testing import (
    ManualDevice,
    record,
    replay_transitions,
    run_until_idle,
    running_clock,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.pairwise import pairwise

from .engines import SECRET, Side, prompt, two_engines

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from aiokv import Lease
    from aiokv.testing import ManualCopy

pytestmark = pytest.mark.asyncio

NEAR = WindowGroup(window_tokens=6, device_blocks=40, step_tokens=8)
FAR = WindowGroup(window_tokens=19, device_blocks=60, step_tokens=8, sink_tokens=3)
RECEIVE: GroupRoute = ("all", plan.RECEIVE)
STATE_RECEIVE: GroupRoute = ("last", plan.RECEIVE)
STATE_SEND: GroupRoute = ("last", plan.SEND)
WINDOW_RECEIVE: GroupRoute = ("window", plan.RECEIVE)
STATE: dict[str, Any] = {"state_slots": 6}
WINDOWS: dict[str, Any] = {"windows": {"near": NEAR, "far": FAR}}
KINDS = {"state": STATE, "windows": WINDOWS, "both": STATE | WINDOWS}
MODELS = pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)


def groups_of(model: dict[str, Any]) -> list[str]:
    return [*(["state"] if "state_slots" in model else []), *model.get("windows", ())]


def sides(model: dict[str, Any], **decode: Any) -> tuple[Side, Side]:
    return Side(listen=None, **model), Side(**model, **decode)


@pytest.mark.parametrize(
    ("kind", "length", "step"), pairwise(product(KINDS, [1, 4, 5, 30, 131], [1, 7, 1000]))
)
async def test_state_and_windows_arrive_behind_the_prompt(kind, length, step):
    model = KINDS[kind]
    tokens = prompt(length)
    async with two_engines(*sides(model)) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=step))
            assert await receiving.wait() == length
            assert receiving.failure is None
        assert await prefill == (length, None)
        d.check(lease, tokens)
        d.check_sides(lease, tokens)
        assert lease.usage.received_tokens == length
        assert lease.usage.computed_blocks == 0
        for side, verb in ((p, "send"), (d, "receive")):
            groups = side.engine.statistics().worker.groups
            moved = {name: group.routes[verb] for name, group in groups.items()}
            del moved["attention"]
            assert sorted(moved) == sorted(groups_of(model))
            assert all(route.done == 1 for route in moved.values())
            assert all(route.moved_bytes for name, route in moved.items() if name == "state")
        # The lease decodes on from there: each position checks the state and the windows before it.
        longer = prompt(length + 30)
        d.engine.extend([lease], 30)
        lease.append(longer[length:])
        with d.engine.computing([lease]):
            d.compute(lease, longer, length, len(longer))
        d.check_sides(lease, longer)


@MODELS
@pytest.mark.parametrize("blocks", [(4, 4), (16, 4), (12, 6), (8, 8)])
async def test_sizes_of_blocks_differ(model, blocks):
    tokens = prompt(91)
    p = Side(listen=None, block_tokens=blocks[0], **model)
    d = Side(block_tokens=blocks[1], ring_blocks=40, **model)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert await p.prefill(tokens, receiving.ticket, step=7) == (91, None)
            assert await receiving.wait() == 91
        d.check(lease, tokens)
        d.check_sides(lease, tokens)


@pytest.mark.parametrize("blocks", [(4, 16), (6, 4)])
async def test_windows_of_smaller_blocks_are_refused(blocks):
    """A block of the receiver may begin before the first block that the sender still has."""
    tokens = prompt(91)
    p = Side(listen=None, block_tokens=blocks[0], **WINDOWS)
    d = Side(block_tokens=blocks[1], ring_blocks=40, **WINDOWS)
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            with pytest.raises(Exception, match="must be a multiple of those of the receiver"):
                await p.prefill(tokens, receiving.ticket)
        d.finish(lease, tokens, 0)


@MODELS
async def test_state_of_smaller_and_larger_blocks_is_the_same(model):
    for blocks in (4, 16), (16, 4):
        tokens = prompt(90)
        if "windows" in model and blocks == (4, 16):
            continue
        p = Side(listen=None, block_tokens=blocks[0], **model)
        d = Side(block_tokens=blocks[1], ring_blocks=60, **model)
        async with two_engines(p, d), await d.granted(tokens) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(tokens, receiving.ticket) == (90, None)
                assert await receiving.wait() == 90
            d.check_sides(lease, tokens)


async def test_windows_of_two_engines_must_be_equal():
    tokens = prompt(30)
    far = WindowGroup(window_tokens=19, device_blocks=60, step_tokens=8, sink_tokens=4)
    p = Side(listen=None, windows={"near": NEAR, "far": far})
    async with (
        two_engines(p, Side(**WINDOWS)) as (_, d),
        await d.granted(tokens) as lease,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
    ):
        with pytest.raises(PeerError, match=r"CacheConfig.windows .* \(19, 4\)"):
            await p.prefill(tokens, receiving.ticket)


@pytest.mark.parametrize("models", [(STATE, {}), ({}, STATE), (WINDOWS | STATE, WINDOWS)])
async def test_engine_with_state_and_engine_without_are_refused(models):
    tokens = prompt(30)
    p, d = Side(listen=None, **models[0]), Side(**models[1])
    async with two_engines(p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            with pytest.raises(LayoutError, match="pools"):
                await p.prefill(tokens, receiving.ticket)
        d.finish(lease, tokens, 0)


async def test_window_group_without_tensors_is_refused_with_peers():
    d = Side(**WINDOWS)
    regions = Regions(num_layers=2)
    regions.add("k", layers=d.memory.tensors[::2])
    with pytest.raises(ConfigError, match=r"\['far', 'near'\] have no registered tensors"):
        await CacheEngine(d.engine.config, regions, peers=Peers(secret=SECRET)).__aenter__()


@MODELS
async def test_only_positions_with_state_and_windows_are_there(model):
    """Blocks alone are of no use: the receive has nothing before the state arrives."""
    tokens = prompt(40)
    device = ManualDevice()
    async with (
        two_engines(Side(device, listen=None, **model), Side(**model)) as (p, d),
        await d.granted(tokens) as lease,
        await granted(p, tokens) as source,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        p.engine.send(source, receiving.ticket),
    ):
        p.compute(source, tokens, 0, 40)
        await complete_blocks(device, d, 10, model)
        assert receiving.received_tokens == 0
        async with d.engine.match(tokens) as other:
            assert other.hit.device_tokens == 0
        waiting = asyncio.create_task(receiving.wait(1))
        await spin(20)
        assert not waiting.done()
        await complete(device, until=waiting.done)
        assert await waiting == 40
        d.check_sides(lease, tokens)


async def cache(side: Side, tokens: np.ndarray, length: int) -> None:
    """Let prompts hit behind the first positions of a prompt."""
    async with await granted(side, tokens[: length + 1]) as lease:
        side.compute(lease, tokens, 0, length)
        if len(side.memory.state):
            assert lease.snapshot(length)


@MODELS
@pytest.mark.parametrize("blocks", [(4, 4), (8, 4)])
async def test_state_and_windows_arrive_behind_a_prefix_that_the_receiver_has(model, blocks):
    tokens = prompt(60)
    p = Side(listen=None, block_tokens=blocks[0], **model)
    d = Side(block_tokens=blocks[1], ring_blocks=24, **model)
    async with two_engines(p, d):
        await cache(d, tokens, 44)
        async with await granted(d, tokens) as lease:
            assert lease.cached_tokens == 44
            d.check_sides(lease, tokens[:44])
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(tokens, receiving.ticket) == (16, None)
                assert await receiving.wait() == 60
            d.check(lease, tokens)
            d.check_sides(lease, tokens)


@MODELS
async def test_lost_state_and_windows_leave_what_was_cached(model):
    """The lease gives up its positions, but prompts still hit the blocks that were cached."""
    tokens = prompt(60)
    device = ManualDevice()
    async with two_engines(Side(listen=None, **model), Side(device, **model)) as (p, d):
        await cache(d, tokens, 44)
        lease = await granted(d, tokens)
        assert lease.cached_tokens == 44
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            routes = [WINDOW_RECEIVE] if "windows" in model else []
            routes += [STATE_RECEIVE] if "state_slots" in model else []
            failing = routes.pop()
            await complete(device, RECEIVE, *routes, until=has_copies(device, failing))
            for copy in [copy for copy in device.copies if copy.group_route == failing]:
                copy.fail_all()
            await complete(device, until=prefill.done)
            assert await receiving.wait() == 0
        await compute_rest(d, lease, tokens, 0)
        assert lease.cached_tokens == 44
        lease.release()


@pytest.mark.parametrize("model", [WINDOWS, STATE | WINDOWS], ids=["windows", "both"])
async def test_receive_that_is_cancelled_before_it_is_told_of_its_windows(model, monkeypatch):
    """The windows have arrived, and nothing is in flight: the lease has lost its positions."""
    tokens = prompt(60)
    async with two_engines(*sides(model)) as (p, d):
        await cache(d, tokens, 44)
        lease = await granted(d, tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            peer_tickets: Any = d.engine._peer_tickets
            tell = peer_tickets._deliver_end

            def cancel_and_tell(moved: Any) -> None:
                groups = d.engine.statistics().groups
                has_windows = any(groups[name].received_blocks for name in d.engine.config.windows)
                if has_windows and not peer_tickets._read.peer_transfers(lease.id):
                    receiving.cancel()
                tell(moved)

            monkeypatch.setattr(peer_tickets, "_deliver_end", cancel_and_tell)
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            assert await receiving.wait() == 0
            await prefill
        assert lease.state == "failed"
        await compute_rest(d, lease, tokens, 0)
        lease.release()


# --- failures at each stage ---------------------------------------------------------------------


async def granted(side: Side, tokens: np.ndarray) -> Lease:
    """Return a granted lease whose state is zeroed."""
    lease = await side.granted(tokens)
    if isinstance(side.device, ManualDevice):
        await complete(side.device, STATE_CLONE)
    await lease.layers.wait_all()
    return lease


async def complete(
    device: ManualDevice, *routes: GroupRoute, until: Callable[[], bool] = lambda: True
) -> None:
    """Complete the copies of some routes, all by default, and those that follow.

    Args:
        device: of the copies.
        routes: of them.
        until: returns True when no copy follows.
    """

    def step() -> bool:
        copies = [copy for copy in device.copies if not routes or copy.group_route in routes]
        for copy in copies:
            copy.complete_all()
        return not copies and until()

    await run_until_idle(step)


async def complete_blocks(
    device: ManualDevice, d: Side, num_blocks: int, model: dict[str, Any]
) -> None:
    """Let blocks arrive, but not the state behind them; without a state, not the near windows.

    Copies that are held have credits of the receiver. Those of the state, the near and the far
    windows together would keep all credits from the blocks.

    Args:
        device: of the sender.
        d: the receiver.
        num_blocks: number of blocks that arrive.
        model: of both.
    """

    def is_held(copy: ManualCopy) -> bool:
        return copy.group_route == STATE_SEND if "state_slots" in model else copy.group == "near"

    def step() -> bool:
        for copy in device.copies:
            if not is_held(copy):
                copy.complete_all()
        return d.engine.statistics().attention.received_blocks == num_blocks

    await run_until_idle(step)


def has_copies(device: ManualDevice, *routes: GroupRoute) -> Callable[[], bool]:
    """Return a condition: the device has copies of each route."""
    return lambda: set(routes) <= {copy.group_route for copy in device.copies}


async def compute_rest(d: Side, lease: Lease, tokens: np.ndarray, first: int) -> None:
    """Compute the positions from ``first`` on; a lease that has lost its windows begins again."""
    if lease.state == "failed":
        assert first == 0
        with pytest.raises(LeaseError, match="preempt"):
            lease.recompute_from()
        await lease.preempt()
        await lease.allocate(len(tokens))
        if isinstance(d.device, ManualDevice):
            await complete(d.device)
        await lease.layers.wait_all()
        first = lease.cached_tokens
    with d.engine.computing([lease]):
        d.compute(lease, tokens, first, len(tokens))
    d.check(lease, tokens)
    d.check_sides(lease, tokens)


def is_lost(model: dict[str, Any]) -> bool:
    """Return True if the end of the send leaves windows that have begun to arrive."""
    return "windows" in model


@MODELS
@pytest.mark.parametrize("end", ["cancel", "close", "release", "error"])
async def test_sender_that_ends_between_blocks_and_state(model, end):
    tokens = prompt(40)
    device = ManualDevice()
    p = Side(device, listen=None, **model)
    async with Side(**model) as d, await d.granted(tokens) as lease:
        await p.engine.__aenter__()
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            source = await granted(p, tokens)
            sending = p.engine.send(source, receiving.ticket)
            await sending.__aenter__()
            p.compute(source, tokens, 0, 40)
            await complete_blocks(device, d, 10, model)
            closing = None
            if end == "cancel":
                sending.cancel()
            elif end == "release":
                source.release()
            elif end == "error":
                await sending.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
            else:
                closing = asyncio.create_task(p.engine.aclose(0.0))
            first = await receiving.wait()
            assert first == 0
            assert receiving.failure
            assert receiving.received_tokens == 0
        assert (lease.state == "failed") == is_lost(model)
        await compute_rest(d, lease, tokens, first)
        source.release()
        await complete_during(closing or p.engine.aclose(0.0), device)


@MODELS
@pytest.mark.parametrize("last", [False, True])
async def test_copy_of_state_or_windows_that_fails_loses_them(model, last):
    """On the receiver: what was written is neither computed with nor cached."""
    tokens = prompt(40)
    device = ManualDevice()
    async with two_engines(Side(listen=None, **model), Side(device, **model)) as (p, d):
        lease = await granted(d, tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            routes = [WINDOW_RECEIVE] if "windows" in model else []
            routes += [STATE_RECEIVE] if "state_slots" in model else []
            failing = routes[-1] if last else routes[0]
            others = [route for route in routes if route != failing]
            await complete(device, RECEIVE, *others, until=has_copies(device, failing))
            copy = next(copy for copy in device.copies if copy.group_route == failing)
            copy.fail_all(block=0)
            await complete(device, until=prefill.done)
            assert await receiving.wait() == 0
        assert lease.state == "failed"
        async with d.engine.match(tokens) as other:
            assert other.hit.device_tokens == 0
        await compute_rest(d, lease, tokens, 0)
        lease.release()


@MODELS
@pytest.mark.clock
async def test_state_and_windows_that_do_not_arrive_end_at_the_deadline(model):
    tokens = prompt(40)
    device = ManualDevice()
    p = Side(device, listen=None, **model)
    async with two_engines(p, Side(**model)) as (p, d), await granted(d, tokens) as lease:
        async with lease.receive(timeout=3.0) as receiving:
            source = await granted(p, tokens)
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, tokens, 0, 40)
                await complete_blocks(device, d, 10, model)
                await running_clock().advance(2.9)
                assert receiving.failure is None
                await running_clock().advance(0.2)
                assert await receiving.wait() == 0
                assert receiving.failure
                await complete(device)
            source.release()
        await compute_rest(d, lease, tokens, 0)


@MODELS
@pytest.mark.parametrize("verb", ["leave", "release", "preempt", "reset"])
async def test_receive_that_ends_while_the_device_writes_state_or_windows(model, verb):
    """I11: their slot and blocks are free after the copy only."""
    tokens = prompt(40)
    device = ManualDevice()
    d = Side(device, **(model | ({"state_slots": 2} if "state_slots" in model else {})))
    async with two_engines(Side(listen=None, **model), d) as (p, _):
        lease = await granted(d, tokens)
        receiving = lease.receive(timeout=PATIENCE_SECONDS)
        await receiving.__aenter__()
        prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
        side = WINDOW_RECEIVE if "windows" in model else STATE_RECEIVE
        await complete(device, RECEIVE, until=has_copies(device, side))
        if verb == "leave":
            leaving = asyncio.create_task(receiving.__aexit__(None, None, None))
            await spin(5)
            assert not leaving.done()
        elif verb == "reset":
            leaving = asyncio.create_task(d.engine.reset(timeout=5.0))
            await spin(5)
        else:
            result = getattr(lease, verb)()
            leaving = asyncio.ensure_future(result) if result is not None else None
        assert d.engine.check_invariants() == []
        others = [asyncio.create_task(d.granted(prompt(8, seed))) for seed in (5, 6)]
        await spin(10)
        await complete(device)
        if leaving is not None:
            await leaving
        await receiving.__aexit__(None, None, None)
        await prefill
        if verb != "release":
            lease.release()
        for seed, other in zip((5, 6), others, strict=True):
            await complete(device)
            async with await other as next_lease:
                await complete(device)
                await next_lease.layers.wait_all()
                with d.engine.computing([next_lease]):
                    d.compute(next_lease, prompt(8, seed), 0, 8)
                d.check_sides(next_lease, prompt(8, seed))


# --- the sending lease --------------------------------------------------------------------------


@MODELS
async def test_state_is_sent_when_the_batch_that_computes_it_has_ended(model):
    tokens = prompt(20)
    async with (
        two_engines(*sides(model)) as (p, d),
        await d.granted(tokens) as lease,
        await granted(p, tokens) as source,
        lease.receive(timeout=PATIENCE_SECONDS) as receiving,
        p.engine.send(source, receiving.ticket) as sending,
    ):
        with p.engine.computing([source]):
            p.compute(source, tokens, 0, 20)
            await run_until_idle(lambda: d.engine.statistics().attention.received_blocks == 5)
            await run_until_idle(
                lambda: p.engine.statistics().attention.sent_blocks == 5
            )  # all reported
            assert (
                p.engine.statistics().sends == p.engine.statistics().attention.sent_blocks // 2 + 1
            )
            assert sending.failure is None
        assert await receiving.wait() == 20
        d.check_sides(lease, tokens)


@MODELS
async def test_state_is_sent_after_exactly_the_positions_of_the_ticket(model):
    tokens = prompt(30)
    async with two_engines(*sides(model)) as (p, d), await granted(d, tokens) as lease:
        async with (
            await granted(p, tokens) as source,
            lease.receive(18, timeout=PATIENCE_SECONDS) as receiving,
            p.engine.send(source, receiving.ticket) as sending,
        ):
            assert sending.num_tokens == 18
            p.compute(source, tokens, 0, sending.num_tokens)
            assert await receiving.wait() == 18
            await run_until_idle(
                lambda: sending.failure is None and not p.engine.statistics().peers.sending
            )
            p.compute(source, tokens, 18, 30)
            p.check_sides(source, tokens)
        d.check_sides(lease, tokens[:18])
        await compute_rest(d, lease, tokens, 18)


@MODELS
async def test_positions_behind_the_ticket_end_the_send(model):
    tokens = prompt(30)
    async with two_engines(*sides(model)) as (p, d), await granted(d, tokens) as lease:
        async with (
            await granted(p, tokens) as source,
            lease.receive(18, timeout=PATIENCE_SECONDS) as receiving,
            p.engine.send(source, receiving.ticket) as sending,
        ):
            p.compute(source, tokens, 0, 16)
            p.compute(source, tokens, 16, 24)  # its state after 18 positions never exists
            assert "exactly the 18 positions of the ticket" in (sending.failure or "")
            assert await receiving.wait() == 0
            async with (
                await granted(d, tokens) as other,
                other.receive(18, timeout=PATIENCE_SECONDS) as again,
            ):
                late = p.engine.send(source, again.ticket)
                with pytest.raises(LeaseError, match="exactly the 18 positions"):
                    await late.__aenter__()
        await compute_rest(d, lease, tokens, 0)


@MODELS
async def test_lease_does_not_compute_while_its_state_is_sent(model):
    tokens = prompt(24)
    device = ManualDevice()
    p = Side(device, listen=None, **model)
    async with two_engines(p, Side(**model)) as (p, d), await granted(d, tokens) as lease:
        async with (
            lease.receive(20, timeout=PATIENCE_SECONDS) as receiving,
            await granted(p, tokens) as source,
        ):
            async with p.engine.send(source, receiving.ticket):
                p.compute(source, tokens, 0, 20)
                with pytest.raises(LeaseError, match="is being sent"):
                    p.engine.computing([source]).__enter__()
                waiting = asyncio.create_task(receiving.wait())
                await complete(device, until=waiting.done)
                assert await waiting == 20
            with p.engine.computing([source]):
                p.compute(source, tokens, 20, 24)
        await compute_rest(d, lease, tokens, 20)


@MODELS
async def test_many_prompts_share_a_ring_of_two_slots(model):
    prompts = [prompt(11 + 3 * seed, seed) for seed in range(1, 9)]
    if "windows" in model:  # each lease sets blocks aside for its windows
        prompts = prompts[:4]
    p, d = (
        Side(listen=None, device_blocks=256, **model),
        Side(device_blocks=256, ring_blocks=2, **model),
    )
    async with two_engines(p, d):

        async def decode(tokens: np.ndarray) -> None:
            async with await granted(d, tokens) as lease:
                async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                    sent = asyncio.create_task(p.prefill(tokens, receiving.ticket))
                    assert await receiving.wait() == len(tokens)
                    assert await sent == (len(tokens), None)
                d.check(lease, tokens)
                d.check_sides(lease, tokens)

        await asyncio.gather(*map(decode, prompts))


@pytest.mark.parametrize("model", [STATE, STATE | WINDOWS], ids=["state", "both"])
async def test_state_that_arrives_behind_the_end_of_the_receive_is_there(model):
    """The end of its transfer commits the positions: the lease must not compute them again."""
    tokens = prompt(40)
    device = ManualDevice()
    async with two_engines(Side(listen=None, **model), Side(device, **model)) as (p, d):
        lease = await granted(d, tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            routes = (RECEIVE, WINDOW_RECEIVE)
            await complete(device, *routes, until=has_copies(device, STATE_RECEIVE))
            receiving.cancel()
            waiting = asyncio.create_task(receiving.wait())
            await spin(5)
            assert not waiting.done()
            await complete(device, until=waiting.done)
            assert await waiting == 40
            assert receiving.received_tokens == lease.usage.received_tokens == 40
            await prefill
        d.check_sides(lease, tokens)
        lease.release()


@pytest.mark.parametrize("model", [WINDOWS, STATE | WINDOWS], ids=["windows", "both"])
async def test_windows_that_arrive_behind_the_end_of_the_receive_are_lost(model):
    """The window tables are those behind positions that are not committed: no batch may begin."""
    tokens = prompt(40)
    device = ManualDevice()
    async with two_engines(Side(listen=None, **model), Side(device, **model)) as (p, d):
        lease = await granted(d, tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            await complete(device, RECEIVE, until=has_copies(device, WINDOW_RECEIVE))
            receiving.cancel()
            waiting = asyncio.create_task(receiving.wait())
            await spin(5)
            await complete(device, until=waiting.done)
            assert await waiting == 0
            await prefill
        assert lease.state == "failed"
        await compute_rest(d, lease, tokens, await receiving.wait())
        lease.release()


async def test_state_that_was_written_in_part_is_lost_also_by_a_cancelled_receive():
    """A cancelled receive leaves the state before, unless the device has written the slot."""
    tokens = prompt(40)
    device = ManualDevice()
    async with two_engines(Side(listen=None, **STATE), Side(device, **STATE)) as (p, d):
        lease = await granted(d, tokens)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket))
            await complete(device, RECEIVE, until=has_copies(device, STATE_RECEIVE))
            receiving.cancel()
            waiting = asyncio.create_task(receiving.wait())
            await spin(5)
            (copy,) = [copy for copy in device.copies if copy.group_route == STATE_RECEIVE]
            copy.fail_all()
            assert await waiting == 0
            await prefill
        assert lease.state == "failed"
        await compute_rest(d, lease, tokens, 0)
        lease.release()


@MODELS
async def test_decisions_of_both_engines_replay(model):
    tokens = prompt(60)
    p, d = sides(model)
    with record(p.engine) as sent, record(d.engine) as received:
        async with two_engines(p, d):
            await cache(d, tokens, 44)
            async with (
                await granted(d, tokens) as lease,
                lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            ):
                await p.prefill(tokens, receiving.ticket)
                assert await receiving.wait() == 60
            lost = prompt(30, seed=2)
            async with (
                await granted(d, lost) as lease,
                lease.receive(timeout=PATIENCE_SECONDS) as receiving,
            ):
                prefill = asyncio.create_task(p.prefill(lost, receiving.ticket))
                await run_until_idle(lambda: d.engine.statistics().attention.received_blocks > 8)
                receiving.cancel()
                await prefill
    for recording, verb in ((sent, "send"), (received, "receive")):
        log = recording.log
        assert replay_transitions(log) == len(log.transitions)
        names = {transition.name for transition in log.transitions}
        ends = {"peers.end"} if verb == "receive" else set()
        assert {f"peers.{verb}"} | ends <= names
        moved = [each for each in log.transitions if each.name == f"peers.{verb}"]
        groups = {group for each in moved for group in each.args[3:]}
        assert groups == set(groups_of(model))
