"""Models with recurrent state: slots, snapshots at block boundaries, and hits that end there."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.base.plan import CLONE
from aiokv.errors import (
    AllocateTimeout,
    ConfigError,
    LayoutError,
    LeaseError,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.testing import ManualDevice, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.recurrence import Hybrid
from tests.harness.settling import settle

PROMPT = [5, 6, 7, 8, 9, 10, 11]  # 3 full blocks and a partial one

pytestmark = pytest.mark.asyncio


async def granted(hybrid: Hybrid, tokens=PROMPT, extra: int = 0):
    lease = hybrid.engine.match(tokens, owner=str(tokens))
    await lease.allocate(len(tokens) + extra)
    await lease.layers.wait_all()
    return lease


async def test_a_prefix_is_hit_where_a_snapshot_was_saved_and_nowhere_else():
    async with Hybrid() as hybrid:
        assert await hybrid.serve(PROMPT, save=False) == 0
        assert await hybrid.serve(PROMPT) == 0, "all of its KV is cached, and no state"
        assert await hybrid.serve(PROMPT) == 6
        assert await hybrid.serve(PROMPT[:5]) == 0, "no snapshot in front of that"
        assert await hybrid.serve(PROMPT[:5]) == 4
        assert await hybrid.serve([*PROMPT, 1, 2, 3]) == 6


async def test_snapshot_points_are_at_branches_and_at_the_last_possible_hit():
    async with Hybrid() as hybrid:
        lease = await granted(hybrid)
        assert lease.snapshot_points == (6,)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        other = [*PROMPT[:4], 1, 1, 1, 1, 1]
        lease = await granted(hybrid, other)
        assert (lease.cached_tokens, lease.snapshot_points) == (0, (4, 8))
        hybrid.prefill(lease, other)
        lease.release()
        assert await hybrid.serve([*PROMPT[:4], 2, 2]) == 4, "what the two have in common"
        async with hybrid.engine.match(PROMPT) as lease:
            assert (lease.hit.total, lease.snapshot_points) == (6, ())


async def test_a_lease_has_a_slot_of_its_own_while_it_is_granted():
    async with Hybrid(state_slots=3) as hybrid:
        first = hybrid.engine.match(PROMPT)
        assert first.state_slot == -1
        await first.allocate(7)
        second = await granted(hybrid)
        assert {first.state_slot, second.state_slot} == {0, 1}
        await first.preempt()
        assert first.state_slot == -1
        statistics = hybrid.engine.statistics()
        assert (
            statistics.groups["state"].device.free,
            statistics.groups["state"].device.cached,
        ) == (2, 0)
        first.release()
        second.release()
        assert hybrid.engine.statistics().groups["state"].device.free == 3


async def test_slots_are_zeroed_before_use_and_snapshots_remain_after_release():
    async with Hybrid(state_slots=2) as hybrid:
        for round_ in range(3):
            tokens = [round_, *PROMPT]
            lease = await granted(hybrid, tokens)
            assert not any(state[lease.state_slot].any() for state in hybrid.state)
            hybrid.prefill(lease, tokens)
            lease.release()
            assert await hybrid.serve(tokens) == 6
        assert hybrid.engine.statistics().groups["state"].device.evicted_blocks >= 2


async def test_snapshot_eviction_evicts_no_block_and_takes_the_oldest():
    async with Hybrid(state_slots=3) as hybrid:
        prompts = [[first, *PROMPT] for first in range(3)]
        await hybrid.serve(prompts[0])
        await hybrid.serve(prompts[1])
        assert await hybrid.serve(prompts[0]) == 6, "used now"
        cached = hybrid.engine.statistics().attention.device.cached
        await hybrid.serve(prompts[2])
        assert hybrid.engine.statistics().attention.device.cached == cached + 4
        assert hybrid.engine.match(prompts[1]).hit.total == 0
        assert hybrid.engine.match(prompts[0]).hit.total == 6


async def test_the_only_slot_is_taken_over_from_the_snapshot():
    async with Hybrid(state_slots=1) as hybrid:
        lease = await granted(hybrid)
        hybrid.compute(lease, PROMPT, 0, 6)
        lease.commit(6)
        assert not lease.snapshot(6), "no slot to save it in"
        lease.release()
        assert await hybrid.serve(PROMPT, save=False) == 0
    async with Hybrid(state_slots=2) as hybrid:
        await hybrid.serve(PROMPT)
        other = await granted(hybrid, [1, 1])
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        assert lease.layers.is_done, "there was nothing to copy"
        assert lease.cached_tokens == 6
        hybrid.check(lease, PROMPT, 6)
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        other.release()
        lease.release()


async def test_request_without_a_free_slot_waits_for_one():
    async with Hybrid(state_slots=1) as hybrid:
        holder = await granted(hybrid)
        lease = hybrid.engine.match(PROMPT)
        assert not lease.try_allocate(7)
        with pytest.raises(AllocateTimeout, match="state"):
            await lease.allocate(7, timeout=0.001)
        waiting = asyncio.ensure_future(lease.allocate(7))
        await spin(3)
        assert not waiting.done()
        assert hybrid.engine.statistics().attention.device.leased == 4, (
            "a waiting lease holds nothing"
        )
        holder.release()
        await waiting
        lease.release()


async def test_slots_of_a_copy_in_flight_are_not_reused():
    device = ManualDevice()
    async with Hybrid(state_slots=3, device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        leases = [hybrid.engine.match(PROMPT) for _ in range(2)]
        for lease in leases:
            await lease.allocate(7)
        assert len(device.copies_of(CLONE, "last")) == 2, "two copies of one snapshot at once"
        leases[0].release()
        assert hybrid.engine.check_invariants() == []
        assert hybrid.engine.statistics().groups["state"].device.free == 0
        late = hybrid.engine.match([1, 2, 3])
        assert not late.try_allocate(3), "a slot that is being written, or read, is in use"
        await settle(hybrid.engine, device)
        hybrid.check(leases[1], PROMPT, 6)
        assert late.try_allocate(3)
        await settle(hybrid.engine, device)
        late.release()
        leases[1].release()


async def test_blocks_and_snapshots_are_published_only_after_the_state_copy():
    device = ManualDevice()
    async with Hybrid(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        for layer in range(3):
            device.copies_of(CLONE, "last")[0].complete(
                layer
            )  # the bytes are there, the report is not
        hybrid.compute(lease, PROMPT, 0, 6)
        assert lease.commit(6) == 0
        assert lease.snapshot(6)
        assert not lease.snapshot(6), "once is enough"
        assert hybrid.engine.match(PROMPT).hit.total == 0
        assert hybrid.engine.check_invariants() == []
        await spin(4)
        assert hybrid.engine.match(PROMPT).hit.total == 6
        lease.release()


@pytest.mark.parametrize("refused", [False, True])
async def test_failed_restore_restarts_the_lease_from_position_zero(refused: bool):
    device = ManualDevice()
    async with Hybrid(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        lease = hybrid.engine.match(PROMPT)
        if refused:
            device.refuse = RuntimeError("no")
        await lease.allocate(7)
        if not refused:
            device.copies_of(CLONE, "last")[0].fail_all()
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert caught.value.first_bad_token == 0
        await spin(3)
        assert lease.cached_tokens == lease.usage.cached_tokens == 0
        assert lease.commit(6) == 0
        with pytest.raises(LeaseError, match="preempt"):
            lease.recompute_from()
        await lease.preempt()
        await lease.resume(7)
        await settle(hybrid.engine, device)
        assert lease.cached_tokens == 6, "the snapshot was right all the time"
        hybrid.check(lease, PROMPT, 6)
        lease.release()


async def test_failed_onload_of_kv_discards_the_state():
    device = ManualDevice()
    async with Hybrid(device=device, host_blocks=16) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        await settle(hybrid.engine, device)
        await hybrid.engine.evict(4)
        lease = hybrid.engine.match(PROMPT)
        assert lease.hit.host_tokens == 6, "the snapshot stays while its block is on the host"
        await lease.allocate(7)
        device.onloads[0].fail_all(block=2)
        await settle(hybrid.engine, device)
        assert lease.cached_tokens == 0
        await lease.preempt()
        await lease.resume(7)
        await settle(hybrid.engine, device)
        assert lease.cached_tokens == 0, "the block of the snapshot was lost"
        lease.release()


async def test_a_swapped_lease_keeps_its_state():
    async with Hybrid(host_blocks=32, device_blocks=8, state_slots=2) as hybrid:
        lease = await granted(hybrid)
        hybrid.prefill(lease, PROMPT, save=False)
        await lease.preempt(swap=True)
        assert lease.state_slot >= 0
        await hybrid.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
        await lease.resume(8)
        await lease.layers.wait_all()
        assert lease.cached_tokens == 7
        hybrid.check(lease, PROMPT, 7)
        lease.release()


async def test_swapped_leases_do_not_delay_requests_ahead_of_them():
    async with Hybrid(host_blocks=32, state_slots=2) as hybrid:
        leases = [await granted(hybrid, [name, *PROMPT], extra=1) for name in range(2)]
        for name, lease in enumerate(leases):
            hybrid.prefill(lease, [name, *PROMPT], save=False)
            await lease.preempt(swap=True)
        first = asyncio.ensure_future(granted(hybrid, [8, 8, 8]))
        resumed = [asyncio.ensure_future(lease.resume(9)) for lease in leases]
        newcomer = await asyncio.wait_for(first, PATIENCE_SECONDS)
        assert hybrid.engine.check_invariants() == []
        newcomer.release()
        await asyncio.wait_for(asyncio.gather(*resumed), PATIENCE_SECONDS)
        assert sorted(lease.cached_tokens for lease in leases) == [0, 8], "one has lost its state"
        for name, lease in enumerate(leases):
            await lease.layers.wait_all()
            hybrid.check(lease, [name, *PROMPT], lease.cached_tokens)
            lease.release()


async def test_a_fork_has_a_state_of_its_own():
    async with Hybrid(state_slots=2) as hybrid:
        parent = await granted(hybrid, extra=2)
        hybrid.prefill(parent, PROMPT, save=False)
        child = parent.fork()
        assert child.state_slot != parent.state_slot
        for lease, token in ((parent, 1), (child, 2)):
            lease.append([token, token])
            tokens = [*PROMPT, token, token]
            hybrid.compute(lease, tokens, 7, 9)
            lease.commit(9)
        for lease, token in ((parent, 1), (child, 2)):
            hybrid.check(lease, [*PROMPT, token, token], 9)
        with pytest.raises(WouldBlock):
            parent.fork()
        parent.release()
        child.release()


async def test_a_pin_keeps_the_snapshot_and_takes_no_slot():
    async with Hybrid(state_slots=2, host_blocks=16) as hybrid:
        await hybrid.serve(PROMPT)
        pin = await hybrid.engine.pin(PROMPT)
        assert pin.tokens == 6
        assert hybrid.engine.statistics().groups["state"].device.free == 1
        for first in range(3):
            await hybrid.serve([first, *PROMPT])
        assert await hybrid.serve(PROMPT) == 6
        pin.release()
        hit = await hybrid.engine.prefetch(PROMPT)
        assert hit.device_tokens == 6


async def test_state_is_saved_at_committed_block_boundaries_and_cannot_be_rolled_back():
    async with Hybrid() as hybrid:
        lease = await granted(hybrid)
        hybrid.compute(lease, PROMPT, 0, 5)
        lease.commit(5)
        for num_tokens in (0, 4, 5, 6):
            with pytest.raises(LeaseError):
                lease.snapshot(num_tokens)
        with pytest.raises(LeaseError, match="state"):
            lease.truncate(4)
        lease.truncate(6)
        lease.release()
        blind = hybrid.engine.match(PROMPT, write=False)
        await blind.allocate(7)
        await blind.layers.wait_all()
        hybrid.prefill(blind, PROMPT)
        assert blind.snapshot_points == ()
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        blind.release()


async def test_a_copy_that_raises_saves_nothing(monkeypatch: pytest.MonkeyPatch):
    async with Hybrid() as hybrid:
        lease = await granted(hybrid)
        hybrid.compute(lease, PROMPT, 0, 6)
        lease.commit(6)

        def fail(*_: object) -> None:
            raise UsageError("name the stream")

        with monkeypatch.context() as patch:
            patch.setattr(hybrid.engine.inspect.parts.worker.steps, "clone", fail)
            with pytest.raises(UsageError):
                lease.snapshot(6)
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        assert hybrid.engine.check_invariants() == []
        assert lease.snapshot(6)
        lease.release()


async def test_a_reset_clears_the_snapshots():
    async with Hybrid() as hybrid:
        await hybrid.serve(PROMPT)
        lease = await granted(hybrid)
        await hybrid.engine.reset()
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        hybrid.compute(lease, PROMPT, 6, 7)
        hybrid.check(lease, PROMPT, 7)
        lease.release()
        assert await hybrid.serve(PROMPT) == 0


async def test_state_that_is_computed_during_an_update_of_weights_is_not_saved():
    async with Hybrid() as hybrid:
        lease = await granted(hybrid)
        assert await hybrid.serve(PROMPT) == 0
        async with hybrid.engine.updating_weights():
            hybrid.weights = 1
            hybrid.prefill(lease, PROMPT)
            assert hybrid.engine.statistics().groups["state"].device.cached == 0
            child = lease.fork()
            hybrid.check(child, PROMPT, len(PROMPT))
            child.release()
        lease.release()
        assert await hybrid.serve(PROMPT) == 0
        assert await hybrid.serve(PROMPT) == 6


async def test_state_tensors_that_contradict_the_config_are_refused():
    kv, state = [np.zeros((4, 8))], [np.zeros((3, 5))]
    regions = Regions(num_layers=1)
    regions.add("kv", layers=kv)
    with pytest.raises(UsageError, match="state_slots"):
        CacheEngine(CacheConfig(device_blocks=4, state_slots=2), regions)
    regions.add_state("s", layers=state)
    for slots in (0, 4):
        with pytest.raises(UsageError, match="state_slots"):
            CacheEngine(CacheConfig(device_blocks=4, state_slots=slots), regions)
    with pytest.raises(LayoutError, match="3"):
        regions.add_state("t", layers=[np.zeros((2, 5))])
    assert regions.block_bytes == 64, "state is no part of a block"
    async with CacheEngine(CacheConfig(device_blocks=4), Regions(num_layers=0)) as engine:
        lease = engine.match([1, 2])
        await lease.allocate(2)
        with pytest.raises(UsageError, match="state_slots"):
            lease.snapshot(2)
        lease.release()


async def test_no_lease_or_snapshot_gets_the_sentinel_slot():
    kv, state = [np.zeros((16, 8))], [np.full((4, 5), 7.0)]
    regions = Regions(num_layers=1)
    regions.add("kv", layers=kv)
    regions.add_state("s", layers=state)
    config = CacheConfig(device_blocks=16, block_tokens=2, state_slots=3, sentinel_state_slot=True)
    async with CacheEngine(config, regions) as engine:
        leases = [engine.match([number, 1, 2]) for number in range(3)]
        for lease in leases:
            await lease.allocate(3)
            await lease.layers.wait_all()
        assert sorted(lease.state_slot for lease in leases) == [0, 1, 2]
        assert not engine.match([9]).try_allocate(1)
        assert (state[0][:3] == 0).all(), "the slots of leases are zeroed"
        assert (state[0][config.state_slots] == 7).all(), "the sentinel slot is left alone"
        for lease in leases:
            lease.release()
    with pytest.raises(UsageError, match="hold 4 slots of recurrent state, for state_slots and"):
        CacheEngine(CacheConfig(device_blocks=16, state_slots=4, sentinel_state_slot=True), regions)
    with pytest.raises(ConfigError, match="sentinel_state_slot is True, but state_slots is 0"):
        CacheConfig(device_blocks=16, sentinel_state_slot=True)
    with pytest.raises(ConfigError, match="sentinel_state_slot is 1"):
        CacheConfig(device_blocks=16, state_slots=4, sentinel_state_slot=1)


async def test_state_slots_are_tracked_without_tensors():
    async with CacheEngine(CacheConfig(device_blocks=8, block_tokens=2, state_slots=2)) as engine:
        for expected in (0, 2):
            async with engine.match([1, 2, 3]) as lease:
                await lease.allocate(3)
                await lease.layers.wait_all()
                await spin(2)
                assert lease.cached_tokens == expected
                lease.commit(2)
                lease.snapshot(2)


@pytest.mark.parametrize("seed", range(3))
async def test_conversations_under_pressure_equal_recomputation_bit_for_bit(seed: int):
    """Few slots, few blocks, a host tier: evictions, preemptions, swaps, forks, cancellations."""
    rng = random.Random(seed)
    async with Hybrid(
        device_blocks=24,
        state_slots=5,
        host_blocks=40,
        write_policy=rng.choice(["write_through", "write_back"]),
    ) as hybrid:
        found = await hybrid.converse_together(
            rng, conversations=4, turns=12, longest=24, shortened=lambda rng: 5
        )
        assert found > 0
        statistics = hybrid.engine.statistics()
        assert statistics.restored_states > 0
        assert statistics.groups["state"].device.evicted_blocks > 0


async def test_sleep_discards_the_state_and_waits_for_swapped_leases():
    async with Hybrid(host_blocks=16) as hybrid:
        await hybrid.serve(PROMPT)
        lease = await granted(hybrid, [9, *PROMPT])
        hybrid.prefill(lease, [9, *PROMPT], save=False)
        await lease.preempt(swap=True)
        with pytest.raises(TimeoutError):
            await hybrid.engine.sleep(["device"], timeout=0.001)
        lease.release()
        await hybrid.engine.sleep(["device"])
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        for tensor in (*hybrid.kv, *hybrid.state):
            tensor[:] = 77
        await hybrid.engine.wake_up(regions=hybrid.new_regions())
        assert await hybrid.serve(PROMPT) == 0
        assert await hybrid.serve(PROMPT) == 6
