"""Two engines: tickets, models, weights and calls that are refused, and change nothing."""

# ruff: noqa: SIM117  (nested blocks show which of them ends first)

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog

from aiokv import CacheConfig, CacheEngine, Item, Peers
from aiokv.errors import (
    ConfigError,
    ControlTimeout,
    LeaseError,
    PeerError,
    UsageError,
)
from aiokv.peers import ticket as tickets
from aiokv.testing import ManualDevice, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.peers.engines import KEY, SECRET, Side, prompt, two_engines
from tests.peers.installed import transports

pytestmark = pytest.mark.asyncio


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


@pytest.mark.usefixtures("sides_use_transport")
@transports("tcp", "nixl")
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
