"""The wire protocol: accepted peers, refused messages, and equal bytes for equal decisions."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.base.plan import ONLOAD, TransferPlan, TransferReport
from aiokv.errors import ConfigError, InternalError, RankLost, TransferError, UsageError
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.ranks.messages import (
    MANAGER_CODEC,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Begin,
    Hello,
    Ready,
    Reports,
    TransferBatch,
    decode_from_manager,
    decode_from_rank,
    decode_hello,
    layout_of,
)
from aiokv.testing import ManualDevice, run_until_idle, running_clock, spin
from aiokv.wire import unix
from aiokv.wire.messages import encode
from tests.ranks.loopback import Ranked
from tests.ranks.raw import Peer, frame_of, send_raw

if TYPE_CHECKING:
    from collections.abc import Iterator

A = [1, 2, 3, 4, 5, 6, 7]
BEGIN = Begin(generation=1, host_blocks=1, closed_step=0, asleep=[])
PLAN = TransferPlan(
    transfer_id=3, route=ONLOAD, source_blocks=bytes(8), target_blocks=bytes(8), after_step=2
)


def regions_of(*widths: int, blocks: int = 8) -> Regions:
    regions = Regions(num_layers=len(widths))
    regions.add("kv", layers=[np.zeros((blocks, width), np.int8) for width in widths])
    return regions


# --- messages -------------------------------------------------------------------------------------


def test_messages_are_equal_after_encoding_and_decoding():
    batch = TransferBatch(generation=1, plans=[PLAN], cancels=[1, 2])
    assert decode_from_manager(encode(batch)) == batch
    reports = Reports(
        generation=4,
        arrived=[(3, [0, 1])],
        ended=[TransferReport(transfer_id=9, outcome="failed", first_bad_block=1, reason="x")],
        finished_step=7,
    )
    assert decode_from_rank(encode(reports)) == reports
    hello = Hello(protocol=PROTOCOL_VERSION, rank=1, layout=layout_of(regions_of(8, 8)))
    assert decode_hello(encode(hello)) == hello
    with pytest.raises(msgspec.ValidationError):
        decode_from_rank(encode(batch))
    with pytest.raises(msgspec.ValidationError):
        decode_from_manager(encode(Ready(generation=1)))


def test_layout_is_compared_by_region_names_and_bytes_not_by_blocks():
    same = layout_of(regions_of(8, 8)).fingerprint
    assert layout_of(regions_of(8, 8, blocks=9)).fingerprint == same
    assert layout_of(regions_of(8, 9)).fingerprint != same
    assert layout_of(regions_of(8, 8, 8)).fingerprint != same
    other = Regions(num_layers=2)
    other.add("k", layers=[np.zeros((8, 8), np.int8)] * 2)
    assert layout_of(other).fingerprint != same


def test_layout_has_the_bytes_on_the_device_and_on_the_host():
    regions = regions_of(8, 8)
    regions.add_window("near", "near", layers=[np.zeros((8, 5), np.int8)], layer_indices=[0])
    layout = layout_of(regions)
    assert layout.block_bytes == {"attention": 16, "near": 5}
    assert layout.pitch_bytes == 128
    assert layout_of(regions, with_stores=True).pitch_bytes == 4096


def test_message_above_the_frame_limit_is_not_sent():
    plan = msgspec.structs.replace(PLAN, source_blocks=bytes(MAX_MESSAGE_BYTES))
    with pytest.raises(InternalError, match="the limit is"):
        MANAGER_CODEC.encoded(TransferBatch(generation=1, plans=[plan], cancels=[]))


# --- the socket -----------------------------------------------------------------------------------


def test_only_the_user_may_open_the_socket(tmp_path):
    with unix.listening_socket(tmp_path / "s", 1):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="another process listens there"):
            unix.listening_socket(tmp_path / "s", 1)
    with unix.listening_socket(tmp_path / "s", 1):  # a socket file of an earlier group
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="not a socket"):
            unix.listening_socket(tmp_path / "file", 1)
        with pytest.raises(ConfigError, match="at most 107"):
            unix.listening_socket(tmp_path / ("s" * 120), 1)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write"):
        unix.listening_socket(tmp_path / "open" / "s", 1)


GARBAGE = {
    "no message": frame_of(b"\xc1garbage"),
    "a message of the manager": frame_of(
        encode(Begin(generation=1, host_blocks=1, closed_step=0, asleep=[]))
    ),
    "another first message": frame_of(encode(Ready(generation=1))),
    "oversized": struct.pack("<I", MAX_MESSAGE_BYTES + 1) + b"x",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_cuts_its_own_connection_only(tmp_path, garbage):
    async with Ranked(tmp_path, new_device=None) as ranked:
        peer = await Peer().connect(ranked)
        peer.send(garbage)
        await peer.ended()
        assert peer.received == []
        assert await ranked.serve(A) == 0
        assert await ranked.serve(A) == 6


@pytest.mark.asyncio
async def test_rank_that_sends_garbage_is_lost(tmp_path):
    async with Ranked(tmp_path) as ranked:
        send_raw(ranked.shards[1].worker._connection, GARBAGE["no message"])
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert "rank 1 is lost: protocol" in str(ranked.group.failure)
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


@pytest.mark.asyncio
async def test_frames_may_arrive_in_pieces(tmp_path):
    async with Ranked(tmp_path) as ranked:
        peer = await Peer().connect(ranked)
        hello = frame_of(encode(Hello(protocol=0, rank=0, layout=layout_of(regions_of(8, 8)))))
        for byte in hello:
            peer.send(bytes([byte]))
            await spin()
        await peer.ended()
        assert f"protocol 0, not {PROTOCOL_VERSION}".encode() in peer.received[0]


@pytest.mark.asyncio
async def test_connection_of_another_user_is_refused(tmp_path, monkeypatch):
    async with Ranked(tmp_path) as ranked:
        other = (1, os.getuid() + 1, os.getgid())
        monkeypatch.setattr("aiokv.wire.sockets._credentials", lambda connected: other)
        worker = Rank(ranked.group.path, 0, regions_of(8, 8))
        with pytest.raises(RankLost, match="runs as user"):
            await worker.__aenter__()
        assert ranked.group.failure is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rank", "regions", "why"),
    [
        (2, regions_of(8, 8), "rank is 2; it must be in \\[0, 2\\)"),
        (-1, regions_of(8, 8), r"rank is -1; it must be in \[0, 2\)"),
        (1, regions_of(8, 8), "rank 1 is connected already"),
    ],
)
async def test_rank_number_that_is_taken_or_out_of_range_is_refused(tmp_path, rank, regions, why):
    async with Ranked(tmp_path) as ranked:
        worker = Rank(ranked.group.path, 0, regions)
        worker.rank = rank
        with pytest.raises(RankLost, match=f"refused: .*{why}"):
            await worker.__aenter__()
        assert ranked.group.failure is None


@pytest.mark.clock
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("regions", "why"),
    [
        (regions_of(8, 9), "layout of rank 1 differs from the other ranks'"),
        (
            regions_of(8, 8, blocks=7),
            "the tensors of rank 1 hold only 7 blocks",
        ),
    ],
)
async def test_a_rank_of_another_layout_is_refused(tmp_path, regions, why):
    ranked = Ranked(tmp_path, timeouts=RankTimeouts(start=0.3))
    ranked.shards[1].worker = Rank(tmp_path / "ranks", 1, regions)
    refused = asyncio.ensure_future(_enter_after(ranked, 1))
    entering = asyncio.gather(
        ranked.engine.__aenter__(),
        ranked.shards[0].worker.__aenter__(),
        refused,
        return_exceptions=True,
    )
    await run_until_idle(refused.done)
    await running_clock().advance(0.4)
    results = await entering
    assert all(why in str(results[i]) for i in (0, 2)), results
    assert not (tmp_path / "ranks").exists()


async def _enter_after(ranked: Ranked, rank: int) -> None:
    """Enter a rank after another one has connected."""
    group = ranked.group
    await run_until_idle(
        lambda: group._membership is not None and group._membership.layout is not None
    )
    await ranked.shards[rank].worker.__aenter__()


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_ranks_that_do_not_connect_are_named_and_nothing_is_left(tmp_path):
    group = RankGroup(2, path=tmp_path / "s", timeouts=RankTimeouts(start=0.05))
    with pytest.raises(RankLost, match=r"rank 0: it has not connected, after 0.05 s"):
        await CacheEngine(CacheConfig(device_blocks=4), ranks=group).__aenter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_opening_may_be_cancelled(tmp_path):
    engine = CacheEngine(CacheConfig(device_blocks=4), ranks=RankGroup(1, path=tmp_path / "s"))
    opening = asyncio.create_task(engine.__aenter__())
    await spin(5)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_rank_without_a_manager_times_out(tmp_path):
    with pytest.raises(TimeoutError):
        await Rank(tmp_path / "s", 0, regions_of(8), connect_timeout=0.02).__aenter__()


def test_ranks_and_local_tensors_are_mutually_exclusive():
    group = RankGroup(1, path="s")
    for config, here, why in (
        (CacheConfig(device_blocks=4), {"regions": regions_of(8)}, "regions has tensors, but"),
        (CacheConfig(device_blocks=4), {"device": ManualDevice()}, "but ranks is given"),
        (CacheConfig(device_blocks=4, verify="checksum"), {}, "verify is 'checksum'"),
    ):
        with pytest.raises(ConfigError, match=why):
            CacheEngine(config, ranks=group, **here)
    for bad in ({"num_ranks": 0, "path": "s"}, {"num_ranks": 1}):
        with pytest.raises(ConfigError):
            RankGroup(**bad)
    with pytest.raises(ConfigError):
        RankTimeouts(heartbeat=0)


# --- merging and determinism ----------------------------------------------------------------------


async def _decisions(tmp_path, name: str) -> list[bytes]:
    """Return the messages to the ranks while requests arrive, in two passes of the loop."""
    sent: list[bytes] = []
    (tmp_path / name).mkdir(mode=0o700)
    async with Ranked(tmp_path / name, device_blocks=32, host_blocks=32) as ranked:
        prompts = [[seed] * 5 for seed in range(1, 6)]
        for tokens in prompts:
            await ranked.to_host(tokens)
        send = ranked.group._membership.send
        ranked.group._membership.send = lambda message: (
            sent.append(encode(message)),
            send(message),
        )[1]
        leases = [ranked.engine.match(tokens) for tokens in prompts]
        for lease in leases:
            await lease.allocate(5)
        await spin(2)
        for lease in leases:
            lease.release()
        await ranked.finish()
        ranked.step()
    return sent


@pytest.mark.asyncio
async def test_the_plans_of_a_pass_leave_together_in_order(tmp_path):
    sent = await _decisions(tmp_path, "a")
    batch = decode_from_manager(sent[0])
    assert [plan.direction for plan in batch.plans] == ["onload"] * 5
    ids = [plan.transfer_id for plan in batch.plans]
    assert ids == sorted(ids)
    assert batch.cancels == []
    assert decode_from_manager(sent[1]).cancels == ids


@pytest.mark.asyncio
async def test_equal_requests_give_equal_bytes(tmp_path):
    assert await _decisions(tmp_path, "a") == await _decisions(tmp_path, "b")


@pytest.mark.asyncio
async def test_reports_of_an_earlier_generation_are_ignored(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        (transfer_id,) = lease.layers.transfer_ids
        await ranked.copies()
        for shard in ranked.shards:
            done = TransferReport(transfer_id=transfer_id, outcome="done")
            shard.worker._send(Reports(generation=0, arrived=[], ended=[done], finished_step=99))
        stale = ranked.group.group_statistics
        await run_until_idle(lambda: stale().stale_reports == 2)
        assert not lease.layers.is_done
        lease.release()
        await ranked.finish()
        ranked.step()


@pytest.mark.asyncio
async def test_plan_refused_by_a_rank_fails_and_names_the_rank(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        with refused_plans(ranked.shards[1].worker):
            await lease.allocate(7)
            (transfer_id,) = lease.layers.transfer_ids
            with pytest.raises(TransferError, match="rank 1: no such id") as caught:
                await lease.layers.wait_all()
        assert caught.value.rank == 1
        view = await ranked.shards[1].worker.layers([transfer_id])
        with pytest.raises(TransferError, match="no such id"):
            await view.wait_all()
        lease.release()
        ranked.step()


@contextmanager
def refused_plans(worker: Rank) -> Iterator[None]:
    """Let the controller refuse all plans."""

    def refuse(plan: object) -> None:
        raise UsageError("no such id")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker._controller.plans, "submit", refuse)
        yield
