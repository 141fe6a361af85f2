"""Sliding-window layers: early freed ids, hits, and the attention sink."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, WindowGroup
from aiokv.errors import ConfigError, LeaseError, UsageError, WouldBlock
from tests.harness.windows import Windowed

if TYPE_CHECKING:
    from collections.abc import Mapping


pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


async def test_a_long_prompt_needs_a_window_of_blocks_and_no_more():
    tokens = list(range(60))
    async with Windowed() as model:
        assert await model.serve(tokens) == 0
        assert await model.serve(tokens) == 58
        assert await model.serve([*tokens, 1, 2, 3]) == 60
        async with model.engine.match(tokens) as lease:
            await lease.allocate(60)
            table = lease.window_table("near")
            assert len(table) == len(lease.block_table) == 30
            assert (table >= 0).nonzero()[0].tolist() == [28, 29]
            rows = model.engine.block_tables([lease], group="far", fill=-9)
            assert np.array_equal(rows[0], lease.window_table("far"))
        assert lease.owner == ""


async def test_prefix_is_hit_where_its_whole_window_is_cached():
    async with Windowed(window_blocks=8) as model:
        tokens = list(range(24))
        await model.serve(tokens)
        assert await model.serve([*tokens[:20], 99]) == 20
        assert await model.serve([*tokens[:4], 99]) == 0, "its window had to go; the KV is there"
        assert await model.serve([*tokens[:4], 98]) == 4, "computed again"


async def test_truncation_in_a_batch_is_refused_only_if_it_gives_blocks_back():
    tokens = list(range(9))
    async with Windowed() as model, model.engine.match(tokens) as lease:
        await lease.allocate(9)
        model.prefill(lease, tokens[:6])
        tables = lease.block_table, lease.window_table("near"), lease.window_table("far")
        with model.engine.computing([lease]):
            with pytest.raises(LeaseError, match=r"truncate to 8 .*windows.*at least 9 positions"):
                lease.truncate(8)
            assert lease.num_tokens == 9
            now = lease.block_table, lease.window_table("near"), lease.window_table("far")
            assert all(map(np.array_equal, now, tables))
            model.engine.extend([lease], 1)
            lease.truncate(9)
            assert lease.num_tokens == 9
        lease.truncate(6)
        assert lease.num_tokens == 6
        model.check(lease, tokens, 6)


async def test_decoding_frees_blocks_behind_the_window():
    async with Windowed() as model:
        tokens = [1, 2, 3]
        lease = model.engine.match(tokens)
        await lease.allocate(3)
        model.prefill(lease, tokens)
        for token in range(40):
            model.engine.extend([lease], 1)
            tokens.append(token)
            lease.append([token])
            model.compute(lease, tokens, len(tokens) - 1, len(tokens))
            lease.commit(len(tokens))
            model.check(lease, tokens, len(tokens))
            assert (lease.window_table("near") >= 0).sum() <= 5
        lease.release()
        assert await model.serve([*tokens, 5]) == 42


async def test_a_sink_stays_with_a_lease_that_decodes_far_beyond_its_window():
    async with Windowed(sinks={"near": 3}) as model:
        tokens = [1, 2, 3]
        lease = model.engine.match(tokens)
        await lease.allocate(3)
        model.prefill(lease, tokens)
        first = int(lease.window_table("near")[0])
        for token in range(40):
            model.engine.extend([lease], 1)
            tokens.append(token)
            lease.append([token])
            model.compute(lease, tokens, len(tokens) - 1, len(tokens))
            lease.commit(len(tokens))
            model.check(lease, tokens, len(tokens))
            table = lease.window_table("near")
            assert table[0] == first
            assert (table[:2] >= 0).all()
            assert (table >= 0).sum() <= 2 + 4, "a sink of 2 blocks; a window and a step of 4"
        assert lease.window_table("far")[0] == -1, "that group has no sink"
        lease.release()
        assert await model.serve([*tokens, 5]) == 42


async def test_a_prefix_is_hit_with_its_sink_or_not_at_all():
    async with Windowed(window_blocks=12, sinks={"near": 4, "far": 1}) as model:
        tokens = list(range(24))
        assert await model.serve(tokens) == 0
        assert await model.serve([*tokens, 99]) == 24
        for seed in range(100, 500, 100):
            assert await model.serve(list(range(seed, seed + 24))) == 0
        assert await model.serve([*tokens, 98]) == 0, "others needed the blocks of its windows"
        assert await model.serve([*tokens, 97]) == 24


async def test_swapped_lease_continues_with_its_sink():
    tokens = list(range(20))
    async with Windowed(sinks={"near": 3, "far": 2}, host_blocks=20) as model:
        lease = model.engine.match(tokens)
        await lease.allocate(20)
        model.compute(lease, tokens, 0, 4)
        lease.commit(4)
        for end in range(8, 17, 4):
            model.compute(lease, tokens, end - 4, end)
            lease.commit(end)
        before = lease.window_table("near").tolist()
        await lease.preempt(swap=True)
        await lease.resume(20)
        await lease.layers.wait_all()
        assert lease.cached_tokens == 16
        assert lease.window_table("near").tolist() == before
        model.check(lease, tokens, 16)
        model.prefill(lease, tokens)
        lease.release()


async def test_requests_that_windows_cannot_serve_raise_typed_errors():
    async with Windowed(window_blocks=13) as model:
        lease = model.engine.match(list(range(30)))
        with pytest.raises(UsageError, match="'wide'"):
            lease.window_table("wide")
        await lease.allocate(30)
        assert lease.max_extend_tokens < 30
        with pytest.raises(LeaseError, match="step_tokens"):
            lease.commit(30)
        with pytest.raises(UsageError, match="fork"):
            lease.fork()
        others = [model.engine.match([n]) for n in range(3)]
        assert [other.try_allocate(30) for other in others] == [True, False, False]
        assert others[1].try_allocate(1), "one block is left to reserve"
        with pytest.raises(WouldBlock):
            model.engine.extend([others[1]], 2)
        for one in (lease, *others):
            one.release()
    with pytest.raises(ConfigError, match="window_tokens"):
        WindowGroup(window_tokens=0, device_blocks=3)
    with pytest.raises(ConfigError, match=r"sink_tokens is -1; it must be between 0 and "):
        WindowGroup(window_tokens=1, device_blocks=3, sink_tokens=-1)
    with pytest.raises(ConfigError, match=r"sink_tokens is 1\.5"):
        WindowGroup(window_tokens=1, device_blocks=3, sink_tokens=1.5)  # type: ignore[arg-type]
    sunk = {"w": WindowGroup(window_tokens=16, device_blocks=3, sink_tokens=17)}
    with pytest.raises(ConfigError, match=r"a sink of 17 tokens, a window of 16 tokens .* need 4 "):
        CacheEngine(CacheConfig(device_blocks=9, windows=sunk))
    narrow = {"w": WindowGroup(window_tokens=60, device_blocks=3)}
    with pytest.raises(ConfigError, match="the group has 3"):
        CacheEngine(CacheConfig(device_blocks=9, windows=narrow))


@pytest.mark.parametrize("sinks", [{}, {"near": 3, "far": 1}], ids=["windows", "sinks"])
@pytest.mark.parametrize("seed", range(2))
async def test_conversations_under_pressure_equal_recomputation_bit_for_bit(
    seed: int, sinks: Mapping[str, int]
):
    rng = random.Random(seed)
    policy = rng.choice(["write_through", "write_back"])
    async with Windowed(
        device_blocks=28, window_blocks=18, sinks=sinks, host_blocks=40, write_policy=policy
    ) as model:
        found = await model.converse_together(
            rng,
            conversations=3,
            turns=14,
            longest=26,
            shortened=lambda rng: rng.randrange(3, 12),
        )
        assert found > 0
