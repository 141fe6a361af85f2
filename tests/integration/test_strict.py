"""Strict mode: commits of positions that no batch covers warn, all others do not."""

from __future__ import annotations

import asyncio
import logging
import warnings
from concurrent.futures import Future as ThreadFuture

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.engine.coverage import MAX_WARNINGS
from aiokv.errors import ConfigError, UncoveredCommitWarning
from tests.harness.served import Served
from tests.peers.engines import Side, two_engines
from tests.peers.engines import prompt as long_prompt

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("error::aiokv.errors.UncoveredCommitWarning"),
]

A = [1, 2, 3, 4, 5, 6, 7]


def strict(**config) -> Served:
    return Served(strict=True, **config)


def compute(served: Served, *leases) -> None:
    with served.engine.computing(leases):
        pass


def warns(first: int, last: int):
    return pytest.warns(UncoveredCommitWarning, match=f"covers positions {first} to {last} of ")


# --- when it is on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("debug", "value", "is_on"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
async def test_strict_mode_follows_the_debug_mode_of_the_loop_unless_it_is_set(debug, value, is_on):
    asyncio.get_running_loop().set_debug(debug)
    with warnings.catch_warnings(record=True, action="always") as caught:
        async with Served(strict=value) as served:
            await served.serve(A)
            await served.complete_offloads()
    assert [warning.category for warning in caught] == [UncoveredCommitWarning] * is_on


async def test_strict_must_be_a_bool_or_none():
    with pytest.raises(ConfigError, match="strict is 1; it must be True or False"):
        CacheConfig(device_blocks=4, strict=1)


# --- what warns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("advances", [False, True])
async def test_uncovered_commit_names_the_positions_and_the_line_of_the_caller(advances, caplog):
    caplog.set_level(logging.DEBUG, "aiokv.engine.coverage")
    engine = CacheEngine(CacheConfig(device_blocks=8, strict=True))
    async with engine, engine.match(range(40), owner="r1") as lease:
        await lease.allocate(40)
        with warns(0, 39) as caught:
            _ = engine.advance(engine.batch([lease]), [7]) if advances else lease.commit(40)
        assert caught[0].filename == __file__
        assert "lease 'r1'" in str(caught[0].message)
    record = caplog.records[0]
    assert (record.event, record.levelname) == ("lease.uncovered", "WARNING")
    assert (record.owner, record.first, record.end) == ("r1", 0, 40)


async def test_warning_that_is_an_error_leaves_the_lease_as_it_was():
    engine = CacheEngine(CacheConfig(device_blocks=8, strict=True))
    async with engine, engine.match(range(40)) as lease:
        await lease.allocate(40)
        with pytest.raises(UncoveredCommitWarning):
            lease.commit(40)
        assert engine.statistics().published_blocks == 0
        assert lease.commit(40) == 2


async def test_owner_is_warned_once():
    async with CacheEngine(CacheConfig(device_blocks=8, strict=True)) as engine:
        with warnings.catch_warnings(record=True, action="always") as caught:
            for owner in ("r1", "r1", "r2"):
                async with engine.match(range(40), owner=owner, read=False) as lease:
                    await lease.allocate(40)
                    for end in (38, 39, 40):
                        lease.commit(end)
        assert [str(warning.message).split("'")[1] for warning in caught] == ["r1", "r2"]


async def test_warnings_are_limited():
    async with CacheEngine(CacheConfig(device_blocks=8, strict=True)) as engine:
        with warnings.catch_warnings(record=True, action="always") as caught:
            for number in range(MAX_WARNINGS + 10):
                async with engine.match([number], owner=f"r{number}") as lease:
                    await lease.allocate(1)
                    lease.commit(1)
        assert len(caught) == MAX_WARNINGS


async def test_positions_added_after_the_batch_are_not_covered():
    async with strict() as served, served.engine.match(A) as lease:
        await lease.allocate(4)
        compute(served, lease)
        served.engine.extend([lease], 3)
        lease.commit(4)
        with warns(4, 6):
            lease.commit(7)


async def test_positions_cut_after_the_batch_are_not_covered_when_they_return():
    async with strict() as served, served.engine.match(A) as lease:
        await lease.allocate(7)
        compute(served, lease)
        lease.truncate(5)
        served.engine.extend([lease], 2)
        with warns(5, 6):
            lease.commit(7)


async def test_resumed_lease_needs_a_new_batch():
    async with strict() as served, served.engine.match(A) as lease:
        await lease.allocate(7)
        compute(served, lease)
        await lease.preempt()
        await lease.resume(7)
        with warns(0, 6):
            lease.commit(7)


async def test_lease_that_the_batch_does_not_name_is_not_covered():
    async with (
        strict() as served,
        served.engine.match(A) as first,
        served.engine.match([9]) as other,
    ):
        await first.allocate(7)
        await other.allocate(1)
        compute(served, other)
        with warns(0, 6):
            first.commit(7)


async def test_fork_does_not_inherit_positions_that_the_parent_has_not_committed():
    async with strict() as served, served.engine.match(A) as parent:
        await parent.allocate(7)
        compute(served, parent)
        child = parent.fork()
        with warns(0, 6):
            child.commit(7)
        child.release()
        parent.commit(7)


async def test_recomputed_positions_need_a_new_batch():
    async with strict() as served:
        with pytest.warns(UncoveredCommitWarning):
            await served.to_host(A)
        async with served.engine.match(A, owner="again") as lease:
            await lease.allocate(7)
            served.device.onloads[0].fail_all()
            await served.settle()
            compute(served, lease)
            assert lease.recompute_from() == 0
            with warns(0, 6):
                lease.commit(7)
        await served.complete_offloads()


# --- what does not warn -------------------------------------------------------------------------


async def test_chunks_decoding_and_cached_positions_do_not_warn():
    async with strict() as served:
        async with served.engine.match(A) as lease:
            await lease.allocate(4)
            compute(served, lease)
            lease.commit(4)
            served.engine.extend([lease], 3)
            compute(served, lease)
            lease.commit(7)
            for token in (8, 9, 10):
                served.engine.extend([lease], 1)
                lease.append([token])
                compute(served, lease)
                lease.commit(lease.num_tokens)
                lease.commit(lease.num_tokens)  # shares the blocks that were named since
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            lease.commit(lease.cached_tokens)
        await served.complete_offloads()


async def test_commit_while_the_batch_is_in_flight_does_not_warn():
    async with strict() as served, served.engine.match(A) as lease:
        await lease.allocate(4)
        work: ThreadFuture[None] = ThreadFuture()
        with served.engine.computing([lease]) as batch:
            batch.ends_with(work)
            served.engine.extend([lease], 2)  # before the batch has begun to compute
        lease.commit(5)
        work.set_result(None)
        await served.settle()
        assert batch.done
        lease.commit(6)


async def test_swapped_table_of_computed_positions_does_not_warn():
    async with strict(manual=False) as served, served.engine.match(A) as lease:
        await lease.allocate(7)
        compute(served, lease)
        lease.commit(7)
        served.engine.step()
        await lease.preempt(swap=True)
        await lease.resume(7)
        lease.commit(7)
        await lease.layers.wait_all()


async def test_fork_of_committed_positions_does_not_warn():
    async with strict() as served, served.engine.match(A) as parent:
        await parent.allocate(7)
        compute(served, parent)
        parent.commit(7)
        child = parent.fork()
        child.commit(7)
        child.release()
        await served.complete_offloads()


async def test_received_positions_do_not_warn():
    tokens = long_prompt(30)
    async with two_engines(decode=Side(strict=True)) as (p, d), await d.granted(tokens) as lease:
        async with lease.receive(timeout=30) as receiving:
            prefill = asyncio.create_task(p.prefill(tokens, receiving.ticket, step=7))
            assert await receiving.wait() == 30
            lease.commit(30)
        await prefill


async def test_blocks_of_a_server_do_not_warn():
    config = CacheConfig(device_blocks=8, host_blocks=8, external_device=True, strict=True)
    async with CacheEngine(config) as engine, engine.match(range(40)) as lease:
        await lease.allocate(40)
        lease.assign([3, 4, 5])
        lease.commit(40)


# --- positions that are released uncommitted ------------------------------------------------------


@pytest.mark.parametrize("covered", [False, True])
async def test_uncommitted_positions_of_a_released_lease_are_logged(covered, caplog):
    caplog.set_level(logging.DEBUG, "aiokv.engine.coverage")
    async with strict() as served:
        async with served.engine.match(A, owner="r1") as lease:
            await lease.allocate(7)
            if covered:
                compute(served, lease)
        async with served.engine.match(A, owner="r2") as lease:
            await lease.allocate(7)
            compute(served, lease)
            lease.commit(7)
        async with served.engine.match(A, owner="r3"):
            pass
        await served.complete_offloads()
    (record,) = caplog.records
    assert (record.event, record.levelname, record.owner) == ("lease.uncommitted", "DEBUG", "r1")
    assert (record.first, record.end) == (0, 7)
    assert record.uncovered_tokens == (0 if covered else 7)
