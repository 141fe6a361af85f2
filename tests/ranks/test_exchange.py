"""Ranks with peers: each sends or receives its shard, and a block is there when all have it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from aiokv import Peers
from aiokv.errors import ConfigError, PeerError, RankLost, UsageError
from aiokv.peers.peer_transfers import PeerTransfers
from aiokv.peers.ticket import Endpoint, Ticket, decode, encode, ticket_key
from aiokv.ranks import Rank, RankGroup
from aiokv.testing import run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.ranks.loopback import Ranked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio

A = list(range(11))
PEERS = Peers(secret="0123456789abcdef", listen="127.0.0.1", ring_bytes=4096, outgoing_bytes=4096)


def ranked(path: Path, name: str, num_ranks: int = 2, **options: object) -> Ranked:
    (path / name).mkdir()
    return Ranked(
        path / name,
        num_ranks=num_ranks,
        new_device=None,
        peers=PEERS,
        model="tests",
        weights_version="1",
        device_blocks=16,
        host_blocks=0,
        **options,
    )


@asynccontextmanager
async def two(path: Path, **options: object) -> AsyncIterator[tuple[Ranked, Ranked]]:
    """Open a sending and a receiving engine of two ranks each."""
    async with ranked(path, "p", **options) as p, ranked(path, "d", **options) as d:
        yield p, d


def check_received(d: Ranked, table: object, num_blocks: int) -> None:
    for block in range(num_blocks):
        for shard in d.shards:
            for layer, kv in enumerate(shard.kv):
                expected = d.content(A, block, layer, shard.number)
                assert (kv[table[block]] == expected).all(), (block, shard.number, layer)


async def arrived(d: Ranked, num_blocks: int) -> None:
    """Wait until each rank has so many blocks of the only ticket."""
    await run_until_idle(
        lambda: all(
            shard.worker.peer_statistics()[0].received.fragments == num_blocks
            and shard.worker.peer_statistics()[0].free_slots
            == shard.worker.peer_statistics()[0].landing_slots
            for shard in d.shards
        )
    )


async def test_each_rank_sends_its_shard_to_the_same_rank_of_the_other_engine(tmp_path):
    async with two(tmp_path) as (p, d):
        async with d.engine.match(A) as receiving, p.engine.match(A) as sending:
            await receiving.allocate(11)
            await sending.allocate(11)
            async with receiving.receive(timeout=PATIENCE_SECONDS) as arriving:
                async with p.engine.send(sending, arriving.ticket) as delivering:
                    p.compute(sending, A)
                    sending.commit(4)
                    p.step()
                    await arrived(d, 2)
                    check_received(d, receiving.block_table, 2)
                    sending.commit(11)
                    p.step()
                assert delivering.failure is None
                assert await arriving.wait() == 11
            check_received(d, receiving.block_table, 5)
            statistics = [shard.worker.peer_statistics()[0] for shard in d.shards]
            assert [s.received.fragments for s in statistics] == [6, 6]
        p.step()
        d.step()


async def test_lost_rank_of_the_sender_ends_the_receive(tmp_path):
    async with two(tmp_path) as (p, d):
        async with d.engine.match(A) as receiving:
            await receiving.allocate(11)
            async with receiving.receive(timeout=PATIENCE_SECONDS) as arriving:
                sending = p.engine.match(A)
                await sending.allocate(11)
                delivering = p.engine.send(sending, arriving.ticket)
                await delivering.__aenter__()
                p.compute(sending, A)
                sending.commit(4)
                p.step()
                await arrived(d, 2)
                await p.lose(1)
                assert await arriving.wait() == 4
                assert arriving.failure is not None
                sending.release()
                await delivering.__aexit__(None, None, None)
            check_received(d, receiving.block_table, 2)
        await p.restart(1)
        d.step()


async def test_lost_rank_of_the_receiver_ends_the_send(tmp_path):
    async with two(tmp_path) as (p, d):
        receiving = d.engine.match(A)
        await receiving.allocate(11)
        async with p.engine.match(A) as sending:
            await sending.allocate(11)
            arriving = receiving.receive(timeout=PATIENCE_SECONDS)
            await arriving.__aenter__()
            async with p.engine.send(sending, arriving.ticket) as delivering:
                await d.lose(0)
                p.compute(sending, A)
                sending.commit(11)
                p.step()
            assert delivering.failure is not None
        receiving.release()
        await arriving.__aexit__(None, None, None)
        await d.restart(0)
        p.step()


async def test_all_ranks_expect_a_ticket_before_the_caller_has_it(tmp_path):
    async with two(tmp_path) as (_, d), d.engine.match(A) as receiving:
        await receiving.allocate(11)
        async with receiving.receive(timeout=PATIENCE_SECONDS):
            for shard in d.shards:
                assert shard.worker.peer_statistics()[0].received.tickets == 1
        d.step()


async def test_ticket_that_a_rank_refuses_is_expected_by_none(tmp_path, monkeypatch):
    """The lease can receive with another ticket, and ``receive`` can be cancelled."""
    async with two(tmp_path) as (_, d), d.engine.match(A) as receiving:
        await receiving.allocate(11)
        controller = d.shards[1].worker._controller
        with monkeypatch.context() as patch:
            patch.setattr(controller.tickets, "expect", _refuse)
            with pytest.raises(PeerError, match="rank 1: no"):
                await receiving.receive(timeout=PATIENCE_SECONDS).__aenter__()
        assert d.engine.statistics().peers.receives == 0
        entering = asyncio.create_task(receiving.receive(timeout=PATIENCE_SECONDS).__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        async with receiving.receive(timeout=PATIENCE_SECONDS):
            await run_until_idle(
                lambda: all(
                    shard.worker.peer_statistics()[0].received.tickets == 1 for shard in d.shards
                )
            )
        d.step()


def _refuse(ticket: bytes, seconds: float, open_seconds: float) -> None:
    raise PeerError("no")


async def test_ticket_that_one_rank_cannot_open_is_open_on_none(tmp_path):
    async with two(tmp_path) as (p, d):
        async with d.engine.match(A) as receiving, p.engine.match(A) as sending:
            await receiving.allocate(11)
            await sending.allocate(11)
            async with receiving.receive(timeout=PATIENCE_SECONDS) as arriving:
                # Rank 1 of the receiver does not know the ticket any more.
                other = d.shards[1].worker
                other._close_ticket(
                    decode(arriving.ticket, ticket_key(PEERS.key)).ticket_id, "closed"
                )
                with pytest.raises(PeerError, match=r"rank 1: .* unknown, or has ended"):
                    async with p.engine.send(sending, arriving.ticket):
                        pass
                await run_until_idle(
                    lambda: all(
                        shard.worker.peer_statistics()[0].sent.tickets == 0 for shard in p.shards
                    )
                )
        p.step()
        d.step()


async def test_statistics_of_peers_come_with_the_heartbeats(tmp_path):
    async with ranked(tmp_path, "p") as p:
        assert p.group.inspect().peers == []
        p.pass_time(1.0)
        await run_until_idle(lambda: len(p.group.inspect().peers) == 2)
        assert [statistics.rank for statistics in p.group.inspect().peers] == [0, 1]
        assert [endpoint.rank for endpoint in p.group.tickets.endpoints] == [0, 1]


async def test_rank_without_peers_in_a_group_with_peers_is_refused(tmp_path):
    (tmp_path / "p").mkdir()
    r = Ranked(tmp_path / "p", num_ranks=1, new_device=None, peers=PEERS, model="tests")
    r.shards[0].peers = None
    r.shards[0].fresh()
    entering = asyncio.create_task(r.engine.__aenter__())
    with pytest.raises(RankLost, match=r"rank 0 has no peers, but .* has_peers=True"):
        await r.shards[0].worker.__aenter__()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering


async def test_opening_that_ends_late_leaves_a_newer_one_of_its_ticket_alone(tmp_path, monkeypatch):
    class Opening:
        """Connecting to receivers, which ends when the test lets it."""

        def __init__(self) -> None:
            self.is_cancelled = False
            self.end = asyncio.Event()

    openings: list[Opening] = []

    async def open_ticket(transfers: object, ticket: bytes, layouts: object = ()) -> None:
        opening = Opening()
        openings.append(opening)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            opening.is_cancelled = True
            await opening.end.wait()
            raise

    monkeypatch.setattr(PeerTransfers, "open_ticket", open_ticket)
    async with ranked(tmp_path, "p", num_ranks=1) as p:
        ticket = Ticket(
            ticket_id=bytes(16),
            generation=bytes(16),
            model="tests",
            weights_version="1",
            prompt_digest=bytes(32),
            first_position=0,
            num_tokens=8,
            timeout_seconds=60.0,
            block_tokens=2,
            transport="tcp",
            endpoints=[Endpoint("127.0.0.1", 1)],
        )
        blob = encode(ticket, ticket_key(PEERS.key))
        try:
            for number in range(2):
                waiting = asyncio.create_task(p.group.tickets.open_ticket(blob))
                await run_until_idle(lambda expected=number + 1: len(openings) == expected)
                if number == 1:
                    openings[0].end.set()
                    await run_until_idle(lambda: len(running_openings()) == 1)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await run_until_idle(lambda newest=openings[number]: newest.is_cancelled)
        finally:
            for opening in openings:
                opening.end.set()
        await run_until_idle(lambda: not running_openings())


def running_openings() -> list[object]:
    return [task for task in asyncio.all_tasks() if "_open_at_receivers" in repr(task)]


async def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has_peers"):
        RankGroup(1, path=tmp_path / "x", has_peers=1)
    with pytest.raises(ConfigError, match=r"aiokv\.Peers"):
        Rank(tmp_path / "x", 0, ranked(tmp_path, "r").shards[0].regions, peers="10.0.0.5")
    with pytest.raises(UsageError, match="no peers"):
        RankGroup(1, path=tmp_path / "x").tickets.expect(b"", 1.0, 1.0)
