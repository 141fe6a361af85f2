"""Blocks of sliding windows in host memory: saved by the policy, brought back where needed."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig, CacheEngine, Regions, WindowGroup
from aiokv.base.plan import OFFLOAD, ONLOAD, STATE_CLONE, group_routes
from aiokv.errors import ConfigError, LeaseError, TransferError, UsageError
from aiokv.testing import ManualDevice, ManualEvent, ScriptedDevice, spin
from tests.harness.flaky import ChaosDevice
from tests.harness.settling import settle
from tests.harness.windows import WINDOWS, Windowed

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT = list(range(20))
NEEDED = {"near": 1, "far": 3}  # window blocks of a hit

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


def windowed(**config) -> Windowed:
    """Return a model whose windows have host copies."""
    return Windowed(**{"host_windows": 40, "host_blocks": 60, "device_blocks": 60, **config})


def onloaded(model: Windowed) -> dict[str, int]:
    groups = model.engine.statistics().groups
    return {name: groups[name].onloaded_blocks for name in NEEDED}


def saved(model: Windowed) -> dict[str, int]:
    groups = model.engine.statistics().groups
    return {name: groups[name].offloaded_blocks for name in NEEDED}


def others(count: int = 2) -> list[list[int]]:
    return [list(range(first, first + 20)) for first in range(100, 100 + 100 * count, 100)]


async def serve_and_save(model: Windowed, tokens=PROMPT) -> int:
    cached = await model.serve(tokens)
    await model.engine.drain()
    return cached


async def saved_on(device: ManualDevice, model: Windowed, prompts=None) -> None:
    """Serve PROMPT and save its windows; then let other prompts take their device blocks."""
    for tokens in prompts or (PROMPT, *others()):
        lease = model.engine.match(tokens)
        await lease.allocate(len(tokens))
        await settle(model.engine, device)
        model.prefill(lease, tokens)
        lease.release()
        await settle(model.engine, device)


async def test_windows_outlive_their_device_blocks():
    async with windowed() as model:
        for tokens in (PROMPT, *others()):
            assert await serve_and_save(model, tokens) == 0
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model) == NEEDED
        worker = model.engine.statistics().worker
        assert [worker.groups[name].onload.done for name in WINDOWS] == [1, 1]
        assert all(worker.groups[name].offload.done > 0 for name in WINDOWS)
        assert await serve_and_save(model, [*PROMPT, 8]) == 20
        assert onloaded(model) == NEEDED, "the device has them again"


async def test_blocks_and_windows_both_return_from_the_host():
    async with windowed() as model:
        for tokens in (PROMPT, *others()):
            await serve_and_save(model, tokens)
        await model.engine.evict(60)
        async with model.engine.match([*PROMPT, 7]) as lease:
            assert lease.hit == (0, 20)
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model) == NEEDED


async def test_a_hit_takes_each_block_from_the_tier_that_has_it():
    async with windowed(window_blocks=16) as model:
        await serve_and_save(model)
        await serve_and_save(model, others(1)[0])
        assert await serve_and_save(model, [*PROMPT[:6], 7]) == 6
        assert onloaded(model)["far"] == NEEDED["far"]
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model)["far"] == NEEDED["far"] + 1, "two of its blocks are on the device"


async def test_a_sink_returns_from_the_host():
    async with windowed(sinks={"near": 3, "far": 1}) as model:
        for tokens in (PROMPT, *others()):
            await serve_and_save(model, tokens)
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model) == {"near": 3, "far": 4}


async def test_the_least_recently_used_host_blocks_make_room():
    async with windowed(host_windows=12) as model:
        for tokens in (PROMPT, *others()):
            await serve_and_save(model, tokens)
        statistics = model.engine.statistics().groups["near"]
        assert (statistics.host.blocks, statistics.host.free) == (12, 0)
        assert statistics.host.evicted_blocks > 0
        assert await serve_and_save(model, [*PROMPT, 7]) == 0
        assert await serve_and_save(model, [*others()[1], 7]) == 20


async def test_the_selective_policy_saves_at_the_second_use():
    async with windowed(window_blocks=24, write_policy="nth_use:2") as model:
        await serve_and_save(model)
        assert saved(model) == {"near": 0, "far": 0}
        await serve_and_save(model, [*PROMPT, 7])
        assert saved(model) == NEEDED


async def test_write_back_saves_what_is_evicted_next():
    # An eighth is saved ahead: the blocks that a prompt takes before the loop runs again.
    async with windowed(window_blocks=80, device_blocks=160, write_policy="write_back") as model:
        await serve_and_save(model)
        assert saved(model) == {"near": 0, "far": 0}, "there are free blocks"
        for tokens in others(9):
            await serve_and_save(model, tokens)
        assert min(saved(model).values()) > 0
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model) == NEEDED


async def test_without_a_write_policy_nothing_is_saved():
    async with windowed(write_policy="none") as model:
        await serve_and_save(model)
        assert saved(model) == {"near": 0, "far": 0}


async def test_a_layer_is_ready_when_its_window_has_arrived():
    device = ManualDevice()
    async with windowed(device=device) as model:
        await saved_on(device, model)
        lease = model.engine.match([*PROMPT, 7])
        await lease.allocate(21)
        near, far = device.copies_of(ONLOAD, "window")
        assert (near.group, far.group) == tuple(WINDOWS)
        far.complete_all()
        waiting = asyncio.ensure_future(lease.layers.wait(0))
        await spin(3)
        assert not waiting.done()
        near.complete(0)
        await waiting
        assert lease.layers.pending_layers == [1, 2]
        await settle(model.engine, device)
        model.check(lease, [*PROMPT, 7], 20)
        lease.release()


async def test_usage_names_the_tiers_of_window_blocks():
    async with windowed() as model:
        await serve_and_save(model)
        async with model.engine.match([*PROMPT, 7]) as lease:
            await lease.allocate(21)
            assert lease.usage.groups == {name: (blocks, 0) for name, blocks in NEEDED.items()}
        for tokens in others():
            await serve_and_save(model, tokens)
        async with model.engine.match([*PROMPT, 7]) as lease:
            await lease.allocate(21)
            assert lease.usage.groups == {name: (0, blocks) for name, blocks in NEEDED.items()}
            await lease.layers.wait_all()


async def test_positions_that_are_committed_during_an_onload_keep_its_targets():
    device = ManualDevice()
    tokens = [*PROMPT, 7, 8, 9, 10]
    async with windowed(device=device) as model:
        await saved_on(device, model)
        lease = model.engine.match(tokens)
        await lease.allocate(24)
        for copy in device.copies_of(ONLOAD, "window"):
            for layer in range(3):
                copy.submit(layer)
        table = {group: lease.window_table(group) for group in WINDOWS}
        lease.commit(24)  # computed in a stream that waits for the layers
        assert model.engine.check_invariants() == []
        for group in WINDOWS:
            assert lease.window_table(group).tolist() == table[group].tolist()
        await settle(model.engine, device)
        assert (lease.window_table("near") >= 0).nonzero()[0].tolist() == [11]
        assert model.engine.check_invariants() == []
        lease.release()
        await settle(model.engine, device)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_failed_onload_drops_the_host_blocks_and_computes(refused: bool):
    device = ManualDevice()
    async with windowed(device=device) as model:
        await saved_on(device, model)
        lease = model.engine.match([*PROMPT, 7])
        assert lease.hit.total == 20
        if refused:
            device.refuse = RuntimeError("no")
        await lease.allocate(21)
        for copy in list(device.copies_of(ONLOAD, "window")):
            if copy.group == "far" and not refused:
                copy.complete(0)
                copy.fail_all(block=1)
            else:
                copy.complete_all()
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert caught.value.first_bad_token == 0
        await spin(3)
        assert lease.cached_tokens == 0
        assert lease.commit(6) == 0
        with pytest.raises(LeaseError, match="preempt"):
            lease.recompute_from()
        await lease.preempt()
        await lease.resume(21)
        await settle(model.engine, device)
        assert lease.cached_tokens < 20
        model.check(lease, [*PROMPT, 7], lease.cached_tokens)
        model.prefill(lease, [*PROMPT, 7])
        lease.release()
        await settle(model.engine, device)


async def test_a_failed_save_leaves_no_host_block():
    device = ScriptedDevice()
    for group in ("near", "far"):
        device.fail(f"{group} offload", block=0)
    async with windowed(device=device) as model:
        await serve_and_save(model)
        assert saved(model) == {"near": 0, "far": 0}
        assert model.engine.statistics().groups["near"].host.free == 40
        assert await model.serve([*PROMPT, 7]) == 20, "the device has it"
        device.end_script()


async def test_a_lease_released_during_its_onload_leaves_cached_blocks():
    device = ManualDevice()
    async with windowed(device=device) as model:
        await saved_on(device, model)
        lease = model.engine.match([*PROMPT, 7])
        await lease.allocate(21)
        device.copies_of(ONLOAD, "window")[0].complete(0)
        lease.release()
        assert model.engine.check_invariants() == []
        await settle(model.engine, device)
        again = model.engine.match([*PROMPT, 7])
        await again.allocate(21)
        assert again.layers.is_done, "the blocks that moved already are cached"
        model.check(again, [*PROMPT, 7], 20)
        again.release()
        await settle(model.engine, device)


async def test_a_reset_during_onloads_and_saves_frees_all_blocks():
    device = ManualDevice()
    async with windowed(device=device) as model:
        await saved_on(device, model)
        lease = model.engine.match([*PROMPT, 7])
        await lease.allocate(21)
        lease.release()
        reset = asyncio.ensure_future(model.engine.reset())
        await spin()
        assert model.engine.check_invariants() == []
        await settle(model.engine, device)
        await reset
        for name in NEEDED:
            group = model.engine.statistics().groups[name]
            assert (group.device.free, group.host.free) == (12, 40)
            assert group.set_aside_blocks == 0
        assert model.engine.match([*PROMPT, 7]).hit.total == 0


async def test_blocks_that_are_being_saved_are_not_reused():
    device = ManualDevice()
    async with windowed(device=device, window_blocks=9) as model:
        lease = model.engine.match(PROMPT)
        await lease.allocate(20)
        model.prefill(lease, PROMPT)
        lease.release()
        while not device.copies_of(OFFLOAD, "window"):
            for copy in device.offloads:
                copy.complete_all()
            await asyncio.sleep(0)
        late = model.engine.match(others()[0])
        assert not late.can_allocate(20)
        assert not late.try_allocate(20), "too few blocks that no save reads"
        assert model.engine.check_invariants() == []
        waiting = asyncio.ensure_future(late.allocate(20))
        await spin(3)
        assert not waiting.done()
        await settle(model.engine, device)
        await waiting
        late.release()
        await settle(model.engine, device)


async def test_a_save_waits_until_the_step_of_its_blocks_is_closed():
    device = ManualDevice()
    device.computes_in_stream = True
    async with windowed(device=device) as model:
        lease = model.engine.match(PROMPT)
        await lease.allocate(20)
        model.prefill(lease, PROMPT)
        lease.release()
        await spin(4)
        assert device.copies_of(OFFLOAD, "window") == []
        event = ManualEvent()
        model.engine.step(event)
        await spin(4)
        assert {copy.after for copy in device.copies_of(OFFLOAD, "window")} == {event}
        event.complete()
        await settle(model.engine, device)
        assert min(saved(model).values()) > 0


async def test_an_onload_never_waits_for_the_open_step():
    """Blocks only in host memory are computed again if the open step has all device blocks."""
    device = ManualDevice()
    device.computes_in_stream = True
    async with windowed(device=device, window_blocks=6) as model:
        for tokens in (PROMPT, *others(1)):
            lease = model.engine.match(tokens)
            await lease.allocate(20)
            model.prefill(lease, tokens)
            lease.release()
            event = ManualEvent()
            model.engine.step(event)
            event.complete()
            await settle(model.engine, device)
        writer = model.engine.match(others(2)[1])
        await writer.allocate(20)
        model.prefill(writer, others(2)[1])
        writer.release()  # its blocks belong to the open step
        lease = model.engine.match([*PROMPT, 7])
        assert lease.can_allocate(21)
        assert lease.try_allocate(21)
        assert all(copy.after is None for copy in device.copies_of(ONLOAD, "window"))
        assert lease.layers.is_done or device.copies_of(ONLOAD, "window")
        lease.release()
        model.engine.step()
        await settle(model.engine, device)


async def test_sleep_of_the_device_leaves_the_host_blocks():
    async with windowed() as model:
        await serve_and_save(model)
        await model.engine.sleep(["device"])
        assert model.engine.statistics().groups["far"].device.cached == 0
        for tensor in (model.kv, *model.near_and_far.values()):
            tensor[:] = 77
        await model.engine.wake_up(regions=model.new_regions())
        assert await serve_and_save(model, [*PROMPT, 7]) == 20
        assert onloaded(model) == NEEDED


async def test_sleep_of_the_host_discards_its_blocks():
    async with windowed() as model:
        await serve_and_save(model)
        await model.engine.sleep(["host"])
        assert model.engine.statistics().groups["far"].host.free == 40
        await model.engine.wake_up()
        assert await serve_and_save(model, [*PROMPT, 7]) == 20, "from the device"
        for tokens in others():
            await serve_and_save(model, tokens)
        assert await serve_and_save(model, [*PROMPT, 8]) == 20, "saved again when it was hit again"
        assert onloaded(model) == NEEDED


async def test_a_swapped_lease_whose_windows_were_taken_resumes_from_the_host():
    async with windowed(window_blocks=8) as model:
        lease = model.engine.match(PROMPT)
        await lease.allocate(20)
        model.prefill(lease, PROMPT)
        await model.engine.drain()
        await lease.preempt(swap=True)
        for tokens in others():
            await serve_and_save(model, tokens)
        await lease.resume(22)
        await lease.layers.wait_all()
        assert lease.cached_tokens == 20
        assert sum(onloaded(model).values()) > 0
        model.check(lease, PROMPT, 20)
        lease.release()


@pytest.mark.parametrize("sinks", [{}, {"near": 3, "far": 1}], ids=["windows", "sinks"])
@pytest.mark.parametrize("seed", range(3))
async def test_conversations_under_pressure_equal_recomputation_bit_for_bit(
    seed: int, sinks: Mapping[str, int]
):
    rng = random.Random(seed)
    policies = ["write_through", "nth_use:2", "write_back"]
    async with windowed(
        device_blocks=28,
        window_blocks=18,
        sinks=sinks,
        host_windows=24,
        host_blocks=40,
        write_policy=policies[seed],
    ) as model:
        found = 0
        for _ in range(8):  # a device that copies fast may find nothing to onload in one round
            found += await model.converse_together(
                rng,
                conversations=4,
                turns=24,
                longest=26,
                shortened=lambda rng: rng.randrange(3, 12),
            )
            if sum(onloaded(model).values()) > 0:
                break
        assert found > 0
        assert min(saved(model).values()) > 0
        assert sum(onloaded(model).values()) > 0


@pytest.mark.parametrize("seed", range(6))
async def test_random_failures_never_serve_a_wrong_window(seed: int):
    rng = random.Random(seed)
    device = ChaosDevice(rng, refuse_share=0.03, fail_share=0.05)
    async with windowed(window_blocks=14, device=device) as model:
        for _ in range(60):
            tokens = [rng.randrange(4), *PROMPT[: rng.randrange(3, 14)]]
            lease = model.engine.match(tokens)
            try:
                granting = asyncio.ensure_future(lease.allocate(len(tokens)))
                while not granting.done() or not lease.layers.is_done:
                    device.move(3)
                    await asyncio.sleep(0)
                await granting
                await lease.layers.wait_all()
                await spin()
                model.check(lease, tokens, lease.cached_tokens)
                model.prefill(lease, tokens)
            except TransferError:
                await spin()
                assert lease.cached_tokens == 0
            finally:
                lease.release()
            device.move(rng.randrange(12))
            await spin(2)
            assert model.engine.check_invariants() == []
        assert device.faults.count > 0
        assert sum(onloaded(model).values()) > 0


async def test_settings_that_cannot_save_are_refused():
    sizes = {"device_blocks": 8, "block_tokens": 2}
    group = WindowGroup(window_tokens=3, device_blocks=6, host_blocks=4)
    with pytest.raises(ConfigError, match=r"CacheConfig.host_blocks is 0"):
        CacheConfig(**sizes, windows={"near": group})
    with pytest.raises(ConfigError, match=r"host_blocks is -1"):
        WindowGroup(window_tokens=3, device_blocks=6, host_blocks=-1)
    config = CacheConfig(**sizes, host_blocks=8, windows={"near": group})
    device = ManualDevice()
    device.routes = group_routes(ONLOAD, OFFLOAD, retentions=["all"]) | {STATE_CLONE}
    with pytest.raises(ConfigError, match=r"\['near'\] of CacheConfig.windows"):
        CacheEngine(config, Regions(num_layers=0), device)
    model = Windowed(host_windows=4, host_blocks=8, window_blocks=8)
    regions = model.new_regions()
    with pytest.raises(UsageError, match=r"but CacheConfig\.windows does not"):
        CacheEngine(CacheConfig(**sizes), regions)
    large = {name: WindowGroup(window_tokens=3, device_blocks=9) for name in WINDOWS}
    with pytest.raises(UsageError, match="device_blocks=9, but its registered tensors hold only 8"):
        CacheEngine(CacheConfig(**sizes, windows=large), regions)
    bare = Regions(num_layers=1)
    bare.add("kv", layers=[model.kv])
    with pytest.raises(UsageError, match="host_blocks=4, but no registered tensors"):
        CacheEngine(config, bare)


async def test_host_windows_are_tracked_without_tensors():
    windows = {"near": WindowGroup(window_tokens=3, device_blocks=4, step_tokens=2, host_blocks=8)}
    config = CacheConfig(device_blocks=16, host_blocks=16, block_tokens=2, windows=windows)
    async with CacheEngine(config) as engine:
        for first in (1, 4, 5, 1):
            async with engine.match([first, 2, 3, 4]) as lease:
                await lease.allocate(4)
                await lease.layers.wait_all()
                for end in (2, 4):
                    lease.commit(end)
            await engine.drain()
        assert engine.statistics().groups["near"].onloaded_blocks > 0
