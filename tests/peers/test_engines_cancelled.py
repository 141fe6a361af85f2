"""Two engines: receives and sends that are cancelled, left, or late."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiokv import LeaseState
from aiokv.base.plan import SEND
from aiokv.errors import (
    ControlTimeout,
    PeerError,
    UsageError,
)
from aiokv.peers import ticket as tickets
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import KEY, Side, prompt, two_engines
from tests.peers.installed import transports

pytestmark = pytest.mark.asyncio


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


@pytest.mark.usefixtures("sides_use_transport")
@transports("tcp", "nixl")
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
                monkeypatch.setattr(failing._transfers, "proceed", _raising(broken))
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
