"""Sliding-window layers: ids that go back early, hits, and an attention sink that stays."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, LeaseError, Regions, UsageError, WindowGroup, WouldBlock
from aiokv.errors import ConfigError
from aiokv.testing import run_until_idle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv import Lease

BLOCK_TOKENS = 2
WINDOWS = {"near": 3, "far": 6}
STEP_TOKENS = 4

pytestmark = pytest.mark.asyncio


def mix(token: int, seen: Sequence[int]) -> int:
    """The KV of a position, from all that its layer sees."""
    value = token + 1
    for other in seen:
        value = (value * 6364136223846793005 + other + 1) % 2**64
    return value


def seen_by(position: int, window: int, sink: int) -> list[int]:
    """The positions that one position sees, itself left out."""
    first = max(position - window + 1, 0)
    return [*range(min(sink, first)), *range(first, position)]


class Windowed:
    """An engine and a model: full attention, and two groups of sliding windows, all with bytes."""

    def __init__(
        self,
        *,
        device_blocks: int = 40,
        window_blocks: int = 12,
        sinks: Mapping[str, int] | None = None,
        **config: Any,
    ) -> None:
        self.sinks = {group: (sinks or {}).get(group, 0) for group in WINDOWS}
        self.kv = np.zeros((device_blocks, BLOCK_TOKENS), np.uint64)
        self.near_and_far = {
            group: np.zeros((window_blocks, BLOCK_TOKENS), np.uint64) for group in WINDOWS
        }
        regions = Regions(num_layers=1)
        regions.add("kv", layers=[self.kv])
        windows = {
            group: WindowGroup(
                window_tokens=window,
                device_blocks=window_blocks,
                step_tokens=STEP_TOKENS,
                sink_tokens=self.sinks[group],
            )
            for group, window in WINDOWS.items()
        }
        sizes = {"block_tokens": BLOCK_TOKENS, "device_blocks": device_blocks}
        self.engine = CacheEngine(CacheConfig(windows=windows, **sizes, **config), regions)

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert exc[0] is not None or self.engine.check_invariants() == []
        await self.engine.__aexit__(*exc)

    def tables(self, lease: Lease) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """(window, sink, table, memory) of every kind of layer; full attention sees everything."""
        found = [(10**9, 0, lease.block_table, self.kv)]
        for group, window in WINDOWS.items():
            table = lease.window_table(group)
            found.append((window, self.sinks[group], table, self.near_and_far[group]))
        return found

    def compute(self, lease: Lease, tokens: Sequence[int], first: int, end: int) -> None:
        for window, sink, table, memory in self.tables(lease):
            for position in range(first, end):
                seen = []
                for other in seen_by(position, window, sink):
                    block = table[other // BLOCK_TOKENS]
                    assert block >= 0, (window, position, other)
                    seen.append(int(memory[block, other % BLOCK_TOKENS]))
                block = table[position // BLOCK_TOKENS]
                assert block >= 0
                memory[block, position % BLOCK_TOKENS] = mix(tokens[position], seen)

    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """All that the next position will see is what computing from nothing gives."""
        for window, sink, table, memory in self.tables(lease):
            values: list[int] = []
            for position in range(num_tokens):
                seen = [values[other] for other in seen_by(position, window, sink)]
                values.append(mix(tokens[position], seen))
            for position in seen_by(num_tokens, window, sink):
                block = table[position // BLOCK_TOKENS]
                assert memory[block, position % BLOCK_TOKENS] == values[position], (
                    window,
                    position,
                )

    def prefill(self, lease: Lease, tokens: Sequence[int]) -> None:
        computed = lease.cached_tokens
        while computed < len(tokens):
            end = min(computed + STEP_TOKENS, len(tokens))
            assert end <= lease.reach_tokens
            self.compute(lease, tokens, computed, end)
            lease.commit(end)
            computed = end
            self.check(lease, tokens, computed)

    async def serve(self, tokens: Sequence[int]) -> int:
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens))
            await lease.layers.wait_all()
            cached = lease.cached_tokens
            self.check(lease, tokens, cached)
            self.prefill(lease, tokens)
        assert self.engine.check_invariants() == []
        return cached


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


async def test_prefixes_are_hit_where_their_window_is_still_there():
    async with Windowed(window_blocks=8) as model:
        tokens = list(range(24))
        await model.serve(tokens)
        assert await model.serve([*tokens[:20], 99]) == 20
        assert await model.serve([*tokens[:4], 99]) == 0, "its window had to go; the KV is there"
        assert await model.serve([*tokens[:4], 98]) == 4, "computed again"


async def test_decoding_gives_back_what_falls_behind():
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


async def test_a_swapped_lease_goes_on_with_its_sink():
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


async def test_what_can_not_be_is_said():
    async with Windowed(window_blocks=13) as model:
        lease = model.engine.match(list(range(30)))
        with pytest.raises(UsageError, match="'wide'"):
            lease.window_table("wide")
        await lease.allocate(30)
        assert lease.reach_tokens < 30
        with pytest.raises(LeaseError, match="step_tokens"):
            lease.commit(30)
        with pytest.raises(UsageError, match="fork"):
            lease.fork()
        others = [model.engine.match([n]) for n in range(3)]
        assert [other.try_allocate(30) for other in others] == [True, False, False]
        assert others[1].try_allocate(1), "one block is left to be set aside"
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
        clients = [
            asyncio.create_task(_converse(model, random.Random(rng.random()), name))
            for name in range(3)
        ]
        await run_until_idle(lambda: all(client.done() for client in clients))
        assert sum(client.result() for client in clients) > 0


async def _converse(model: Windowed, rng: random.Random, name: int) -> int:
    tokens = [1, 2, 3, 4, name % 2]
    found = 0
    for _ in range(14):
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        if len(tokens) > 26:
            tokens = tokens[: rng.randrange(3, 12)]
        lease = model.engine.match(tokens)
        try:
            await asyncio.wait_for(_turn(model, lease, tokens, rng), rng.choice([0.0005, 10, 10]))
            found += lease.cached_tokens
        except TimeoutError:
            await model.engine.evict(rng.randrange(4))
        finally:
            lease.release()
        assert model.engine.check_invariants() == []
    return found


async def _turn(model: Windowed, lease: Lease, tokens: list[int], rng: random.Random) -> None:
    await lease.allocate(len(tokens))
    await lease.layers.wait_all()
    model.check(lease, tokens, lease.cached_tokens)
    if rng.random() < 0.4:
        half = min(lease.cached_tokens + rng.randrange(STEP_TOKENS), len(tokens))
        model.compute(lease, tokens, lease.cached_tokens, half)
        lease.commit(half)
        try:
            await lease.preempt(swap=rng.random() < 0.5)
        except WouldBlock:
            await lease.preempt()
        await asyncio.sleep(0)
        await lease.resume(len(tokens))
        await lease.layers.wait_all()
        model.check(lease, tokens, lease.cached_tokens)
    model.prefill(lease, tokens)
