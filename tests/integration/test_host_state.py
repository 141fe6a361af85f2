"""Snapshots of recurrent state in host memory: saved by the policy, restored where needed."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.base.plan import OFFLOAD, ONLOAD, STATE_CLONE, group_routes
from aiokv.base.types import GroupHit
from aiokv.errors import ConfigError, LeaseError, TransferError
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin
from tests.harness.flaky import ChaosDevice
from tests.harness.recurrence import Hybrid
from tests.harness.settling import settle

PROMPT = [5, 6, 7, 8, 9, 10, 11]  # 3 full blocks and a partial one
OTHER = [1, *PROMPT]

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


def hybrid_with_host(**config) -> Hybrid:
    """Return a model with 2 state slots: one for a lease, one for a snapshot."""
    return Hybrid(**{"state_slots": 2, "host_state_slots": 4, "host_blocks": 32, **config})


async def serve_and_save(hybrid: Hybrid, tokens=PROMPT) -> int:
    cached = await hybrid.serve(tokens)
    await hybrid.engine.drain()
    return cached


async def restored(hybrid: Hybrid, tokens=PROMPT) -> int:
    """Serve a request; return the tokens whose state came from host memory."""
    before = hybrid.engine.statistics().groups["state"].onloaded_blocks
    cached = await serve_and_save(hybrid, tokens)
    return cached * (hybrid.engine.statistics().groups["state"].onloaded_blocks - before)


async def saved_on(device: ManualDevice, hybrid: Hybrid) -> None:
    """Serve PROMPT, save its snapshot, and let another prompt take the device slot."""
    for tokens in (PROMPT, OTHER):
        lease = hybrid.engine.match(tokens)
        await lease.allocate(len(tokens))
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, tokens)
        lease.release()
        await settle(hybrid.engine, device)


async def test_a_snapshot_outlives_its_device_slot():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        await serve_and_save(hybrid, OTHER)
        statistics = hybrid.engine.statistics()
        assert (
            statistics.groups["state"].device.evicted_blocks,
            statistics.groups["state"].offloaded_blocks,
        ) == (1, 2)
        assert (statistics.groups["state"].host.free, statistics.groups["state"].host.cached) == (
            2,
            2,
        )
        assert await restored(hybrid) == 6
        assert hybrid.engine.statistics().worker.groups["state"].onload.done == 1
        assert hybrid.engine.statistics().worker.groups["state"].offload.done == 2


async def test_blocks_and_state_both_return_from_the_host():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        await serve_and_save(hybrid, OTHER)
        await hybrid.engine.evict(32)
        async with hybrid.engine.match(PROMPT) as lease:
            assert lease.hit == (0, 6)
        assert await restored(hybrid) == 6


async def test_the_device_is_preferred():
    async with Hybrid(state_slots=4, host_state_slots=4, host_blocks=32) as hybrid:
        await serve_and_save(hybrid)
        assert await serve_and_save(hybrid) == 6
        statistics = hybrid.engine.statistics()
        assert (statistics.restored_states, statistics.groups["state"].onloaded_blocks) == (1, 0)


async def test_the_deepest_boundary_counts_wherever_its_snapshot_is():
    longer = [*PROMPT, 12, 13, 14]
    async with hybrid_with_host(state_slots=3) as hybrid:
        await serve_and_save(hybrid)
        await serve_and_save(hybrid, longer)
        for name in range(2):
            await serve_and_save(hybrid, [name, *PROMPT])
        assert hybrid.engine.match(longer).hit.total == 8
        assert hybrid.engine.match(PROMPT).hit.total == 6


async def test_the_least_recently_used_host_snapshot_makes_room():
    async with hybrid_with_host(host_state_slots=2) as hybrid:
        await serve_and_save(hybrid)
        await serve_and_save(hybrid, OTHER)
        assert await serve_and_save(hybrid) == 6, "used now"
        await serve_and_save(hybrid, [2, *PROMPT])
        assert hybrid.engine.statistics().groups["state"].host.evicted_blocks == 1
        assert await restored(hybrid) == 6
        assert await restored(hybrid, OTHER) == 0


async def test_the_selective_policy_saves_at_the_second_use():
    async with hybrid_with_host(state_slots=3, write_policy="nth_use:2") as hybrid:
        await serve_and_save(hybrid)
        assert hybrid.engine.statistics().groups["state"].offloaded_blocks == 0
        await serve_and_save(hybrid)
        assert hybrid.engine.statistics().groups["state"].offloaded_blocks == 1
        for name in range(3):
            await serve_and_save(hybrid, [name, *PROMPT])
        assert await restored(hybrid) == 6


async def test_write_back_saves_what_is_evicted_next():
    async with hybrid_with_host(state_slots=4, write_policy="write_back") as hybrid:
        for name in range(2):
            await serve_and_save(hybrid, [name, *PROMPT])
        assert hybrid.engine.statistics().groups["state"].offloaded_blocks == 0, (
            "there are free slots"
        )
        for name in range(2, 5):
            await serve_and_save(hybrid, [name, *PROMPT])
        statistics = hybrid.engine.statistics()
        assert statistics.groups["state"].device.evicted_blocks == 2
        # How many are saved ahead depends on when the loop looks: the newest never is.
        assert 3 <= statistics.groups["state"].offloaded_blocks <= 4
        assert await restored(hybrid, [0, *PROMPT]) == 6
        assert await restored(hybrid, [1, *PROMPT]) == 6


async def test_without_a_write_policy_nothing_is_saved():
    async with hybrid_with_host(write_policy="none") as hybrid:
        await serve_and_save(hybrid)
        assert hybrid.engine.statistics().groups["state"].offloaded_blocks == 0


async def test_a_slot_that_is_being_saved_is_not_reused():
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        await spin(4)
        assert len(device.copies_of(OFFLOAD, "last")) == 1
        first, second = (hybrid.engine.match([name, 1, 2]) for name in (3, 4))
        assert first.try_allocate(3)
        assert not second.try_allocate(3), "the other slot is being read"
        assert hybrid.engine.check_invariants() == []
        waiting = asyncio.ensure_future(second.allocate(3))
        await spin(3)
        assert not waiting.done()
        for state in hybrid.state:
            state[first.state_slot] = 55
        await settle(hybrid.engine, device)
        await waiting
        first.release()
        second.release()
        await settle(hybrid.engine, device)
        assert hybrid.engine.statistics().groups["state"].host.cached == 1


@pytest.mark.parametrize("arrived_layers", [0, 1])
async def test_a_failed_save_leaves_no_host_snapshot(arrived_layers: int):
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        while not device.copies_of(OFFLOAD, "last"):
            for copy in device.offloads:
                copy.complete_all()
            await asyncio.sleep(0)
        save = device.copies_of(OFFLOAD, "last")[0]
        for layer in range(arrived_layers):
            save.complete(layer)
        save.fail_all()
        await settle(hybrid.engine, device)
        statistics = hybrid.engine.statistics()
        assert (
            statistics.groups["state"].offloaded_blocks,
            statistics.groups["state"].host.free,
        ) == (0, 4)
        assert hybrid.engine.match(PROMPT).hit.total == 6, "the device has it"
        other = hybrid.engine.match(OTHER)
        await other.allocate(8)
        await settle(hybrid.engine, device)
        hybrid.prefill(other, OTHER)
        other.release()
        assert hybrid.engine.match(PROMPT).hit.total == 0
        await settle(hybrid.engine, device)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_failed_restore_drops_the_host_snapshot_and_computes(refused: bool):
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        await saved_on(device, hybrid)
        lease = hybrid.engine.match(PROMPT)
        assert lease.hit.total == 6
        if refused:
            device.refuse = RuntimeError("no")
        await lease.allocate(7)
        if not refused:
            device.copies_of(ONLOAD, "last")[0].complete(1)
            device.copies_of(ONLOAD, "last")[0].fail_all()
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert caught.value.first_bad_token == 0
        await spin(3)
        assert lease.cached_tokens == 0
        assert lease.usage.groups == {"state": (0, 0)}
        assert lease.commit(6) == 0
        with pytest.raises(LeaseError, match="preempt"):
            lease.recompute_from()
        assert hybrid.engine.check_invariants() == []
        await lease.preempt()
        await lease.resume(7)
        await settle(hybrid.engine, device)
        assert lease.cached_tokens == 0, "the same copy might fail again"
        hybrid.prefill(lease, PROMPT)
        hybrid.check(lease, PROMPT, 7)
        lease.release()
        await settle(hybrid.engine, device)


async def test_layers_of_the_state_are_awaited_one_by_one():
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        await saved_on(device, hybrid)
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        waiting = asyncio.ensure_future(lease.layers.wait(0))
        await spin(3)
        assert not waiting.done()
        device.copies_of(ONLOAD, "last")[0].complete(0)
        await waiting
        assert lease.layers.pending_layers == [1, 2]
        await settle(hybrid.engine, device)
        hybrid.check(lease, PROMPT, 6)
        lease.release()


async def test_usage_names_the_tier_of_the_snapshot():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        async with hybrid.engine.match(PROMPT) as lease:
            assert lease.usage.groups == {"state": (0, 0)}, "not granted"
            await lease.allocate(7)
            assert lease.usage.groups == {"state": (1, 0)}
            await lease.preempt()
            assert lease.usage.groups == {"state": (0, 0)}
        await serve_and_save(hybrid, OTHER)
        async with hybrid.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            assert lease.usage.groups == {"state": GroupHit(device_blocks=0, host_blocks=1)}
            await lease.layers.wait_all()
        async with hybrid.engine.match([90, *PROMPT]) as lease:
            await lease.allocate(8)
            assert lease.usage.groups == {"state": (0, 0)}, "nothing is cached"


async def test_a_lease_released_during_its_restore_keeps_slot_and_snapshot_in_use():
    device = ManualDevice()
    async with hybrid_with_host(device=device, host_state_slots=2) as hybrid:
        await saved_on(device, hybrid)
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        device.copies_of(ONLOAD, "last")[0].complete(0)
        lease.release()
        assert hybrid.engine.check_invariants() == []
        reset = asyncio.ensure_future(hybrid.engine.reset())
        await spin()
        assert hybrid.engine.check_invariants() == []
        statistics = hybrid.engine.statistics()
        assert (statistics.groups["state"].device.free, statistics.groups["state"].host.cached) == (
            1,
            0,
        )
        assert statistics.groups["state"].host.free == 1, "the transfer still reads the other"
        await settle(hybrid.engine, device)
        await reset
        statistics = hybrid.engine.statistics()
        assert (statistics.groups["state"].device.free, statistics.groups["state"].host.free) == (
            2,
            2,
        )


async def test_a_cancelled_allocate_gives_back_the_slot_and_keeps_the_snapshot():
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        await saved_on(device, hybrid)
        held = [hybrid.engine.match(PROMPT) for _ in range(2)]
        await held[0].allocate(7)
        await held[1].allocate(7)
        late = hybrid.engine.match(PROMPT)
        waiting = asyncio.ensure_future(late.allocate(7))
        await spin(3)
        waiting.cancel()
        for lease in (*held, late):
            lease.release()
        await settle(hybrid.engine, device)
        assert hybrid.engine.statistics().groups["state"].device.free == 2
        assert hybrid.engine.match(PROMPT).hit.total == 6


async def test_a_reset_during_a_save_frees_both_slots():
    device = ManualDevice()
    async with hybrid_with_host(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await settle(hybrid.engine, device)
        hybrid.prefill(lease, PROMPT)
        lease.release()
        await spin(4)
        assert device.copies_of(OFFLOAD, "last")
        reset = asyncio.ensure_future(hybrid.engine.reset())
        await spin()
        assert hybrid.engine.check_invariants() == []
        await settle(hybrid.engine, device)
        await reset
        statistics = hybrid.engine.statistics()
        assert (statistics.groups["state"].device.free, statistics.groups["state"].host.free) == (
            2,
            4,
        )
        assert hybrid.engine.match(PROMPT).hit.total == 0


async def test_a_save_waits_until_the_step_of_its_snapshot_is_closed():
    device = ManualDevice()
    device.computes_in_stream = True
    async with hybrid_with_host(device=device) as hybrid:
        lease = hybrid.engine.match(PROMPT)
        await lease.allocate(7)
        await spin()
        device.complete_all()
        await spin(4)
        hybrid.prefill(lease, PROMPT)
        await spin(4)
        assert device.copies_of(OFFLOAD, "last") == []
        event = ManualEvent()
        hybrid.engine.step(event)
        await run_until_idle(lambda: bool(device.copies_of(OFFLOAD, "last")))
        assert [copy.after for copy in device.copies_of(OFFLOAD, "last")] == [event]
        event.complete()
        lease.release()
        hybrid.engine.step()
        await settle(hybrid.engine, device)
        assert hybrid.engine.statistics().groups["state"].offloaded_blocks == 1


async def test_sleep_of_the_device_leaves_the_host_snapshots():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        await hybrid.engine.sleep(["device"])
        assert hybrid.engine.statistics().groups["state"].device.cached == 0
        for tensor in (*hybrid.kv, *hybrid.state):
            tensor[:] = 77
        await hybrid.engine.wake_up(regions=hybrid.new_regions())
        assert await restored(hybrid) == 6


async def test_sleep_of_the_host_discards_its_snapshots():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        await hybrid.engine.sleep(["host"])
        assert hybrid.engine.statistics().groups["state"].host.free == 4
        await hybrid.engine.wake_up()
        assert await serve_and_save(hybrid) == 6, "from the device"
        await serve_and_save(hybrid, OTHER)
        assert await restored(hybrid) == 6, "hit again, it was saved again"


async def test_a_pin_keeps_a_host_snapshot():
    async with hybrid_with_host(host_state_slots=2) as hybrid:
        await serve_and_save(hybrid)
        await serve_and_save(hybrid, OTHER)
        pin = await hybrid.engine.pin(PROMPT)
        assert pin.tokens == 6
        for name in range(2, 5):
            await serve_and_save(hybrid, [name, *PROMPT])
        assert await restored(hybrid) == 6
        pin.release()


async def test_dropping_a_block_drops_its_host_snapshot():
    async with hybrid_with_host() as hybrid:
        await serve_and_save(hybrid)
        await hybrid.engine.evict(8)
        await hybrid.engine.evict(8, tier="host")
        statistics = hybrid.engine.statistics()
        assert (statistics.groups["state"].host.cached, statistics.groups["state"].host.free) == (
            0,
            4,
        )
        assert hybrid.engine.match(PROMPT).hit.total == 0


@pytest.mark.parametrize("seed", range(4))
async def test_conversations_with_failing_copies_equal_recomputation_bit_for_bit(seed: int):
    """Few slots on both tiers: evictions, preemptions, swaps, forks, cancellations."""
    rng = random.Random(seed)
    policies = ["write_through", "nth_use:2", "write_back"]
    async with Hybrid(
        device_blocks=24,
        state_slots=4,
        host_state_slots=6,
        host_blocks=40,
        write_policy=policies[seed % 3],
    ) as hybrid:
        found = await hybrid.converse_together(
            rng, conversations=4, turns=12, longest=24, shortened=lambda rng: 5
        )
        assert found > 0
        statistics = hybrid.engine.statistics()
        assert statistics.groups["state"].offloaded_blocks > 0
        assert statistics.groups["state"].onloaded_blocks > 0


@pytest.mark.parametrize("seed", range(6))
async def test_random_failures_never_serve_a_wrong_state(seed: int):
    rng = random.Random(seed)
    device = ChaosDevice(rng, refuse_share=0.05, fail_share=0.1)
    async with hybrid_with_host(state_slots=3, device_blocks=16, device=device) as hybrid:
        for _ in range(60):
            tokens = [rng.randrange(4), *PROMPT[: rng.randrange(3, 8)]]
            lease = hybrid.engine.match(tokens)
            try:
                await lease.allocate(len(tokens))
                while not lease.layers.is_done:
                    device.move(3)
                    await asyncio.sleep(0)
                await lease.layers.wait_all()
                await spin()
                hybrid.check(lease, tokens, lease.cached_tokens)
                hybrid.prefill(lease, tokens)
                hybrid.check(lease, tokens, len(tokens))
            except TransferError:
                await spin()
                assert lease.cached_tokens == 0
            finally:
                lease.release()
            device.move(rng.randrange(6))
            await spin(2)
            assert hybrid.engine.check_invariants() == []
        assert device.faults.count > 0
        assert hybrid.engine.statistics().groups["state"].onloaded_blocks > 0


async def test_settings_that_cannot_save_are_refused():
    sizes = {"device_blocks": 8, "host_blocks": 8}
    with pytest.raises(ConfigError, match="state_slots is 0"):
        CacheConfig(**sizes, host_state_slots=2)
    with pytest.raises(ConfigError, match="host_blocks is 0"):
        CacheConfig(device_blocks=8, state_slots=2, host_state_slots=2)
    device = ManualDevice()
    device.routes = group_routes(ONLOAD, OFFLOAD, retentions=["all"]) | {STATE_CLONE}
    with pytest.raises(ConfigError, match="host_state_slots is 2"):
        CacheEngine(
            CacheConfig(**sizes, state_slots=2, host_state_slots=2), Regions(num_layers=0), device
        )


async def test_host_snapshots_are_tracked_without_tensors():
    config = CacheConfig(
        device_blocks=8, host_blocks=8, block_tokens=2, state_slots=2, host_state_slots=2
    )
    async with CacheEngine(config) as engine:
        for first in (1, 4, 1):
            async with engine.match([first, 2, 3]) as lease:
                await lease.allocate(3)
                await lease.layers.wait_all()
                await spin(2)
                lease.commit(2)
                lease.snapshot(2)
            await engine.drain()
        assert engine.statistics().groups["state"].onloaded_blocks == 1
