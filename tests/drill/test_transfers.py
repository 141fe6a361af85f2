"""Defects of transfers and of layer counters: each is provoked, none occurs."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD, TransferPlan
from aiokv.errors import LayoutError, TransferError, UsageError
from aiokv.testing import ManualDevice, ScriptedDevice, run_until_idle, running_clock, spin
from aiokv.worker.device.base import Device
from aiokv.worker.device.cpu import CpuDevice, CpuEvent, CpuStream
from aiokv.worker.device.cuda import CudaDevice
from aiokv.worker.device.cuda_numa import placement
from tests.drill.drill import Drill, Shaped, prompt, regions_of
from tests.harness.flaky import ChaosDevice, FlakyDevice

A, B, C, D = (prompt(seed, 2) for seed in range(1, 5))
TOKENS = np.arange(7, dtype=np.int32)  # of a Shaped: six of its blocks can be hit

pytestmark = pytest.mark.asyncio


async def test_late_waiter_still_waits_for_its_layer():
    """Defect: Events are dropped after submission; a late waiter is told that all layers have
    arrived.
    """
    async with Drill() as drill:
        await drill.to_host(A)
        onload = drill.device.hold("onload", 0)
        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        await spin(20)
        assert not lease.layers.is_done
        late = asyncio.create_task(lease.layers.wait(0))
        await spin(5)
        assert not late.done()
        onload.open()
        await late
        drill.check(lease, A)
        lease.release()


async def test_event_is_recorded_on_the_stream_of_its_copy():
    """Defect: The copy runs on one stream and its event is recorded on another."""
    shape = ((512, 1024), "u1", (0, 1, 2, 3))
    shaped = Shaped(regions_of(4, k=shape))
    stream = CpuStream("aiokv-compute")
    async with shaped.engine as engine:
        held = await shaped.to_host(TOKENS)
        async with engine.match(TOKENS) as lease:
            await lease.allocate(len(TOKENS))
            table = lease.block_table[:6]
            for layer in range(4):  # the stream waits, the host does not
                lease.layers.gpu_wait(layer, stream)
                behind = CpuEvent()
                stream.record(behind)
                behind.synchronize()
                arrived = shaped.layer_bytes(table)[layer]
                assert arrived == [piece[: len(arrived[0])] for piece in held[layer]]
            lease.layers.raise_for_error()
    stream.close()


@pytest.mark.parametrize("stuck", ["onload", "offload"])
async def test_directions_do_not_wait_for_each_other(stuck):
    """Defect: Streams synchronise implicitly; an offload blocks the thread that submitted it."""
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        drill.device.hold(stuck)
        if stuck == "onload":
            lease = drill.engine.match(A)
            await lease.allocate(len(A))
            await drill.fill(B)
            await run_until_idle(lambda: drill.statistics.attention.offloaded_blocks == 4)
            assert drill.device.running("onload") == [0]
        else:
            await drill.fill(B)
            await drill.running("offload")
            lease = await drill.serve(A)
            assert lease.cached_tokens == 8
            assert drill.device.running("offload") == [1]
        lease.release()


@pytest.mark.clock
async def test_wait_for_layers_keeps_its_deadline_without_spinning():
    """Defect: A wait blocks the host and ignores its timeout, or polls every millisecond."""
    clock = running_clock()
    async with Drill() as drill:
        await drill.to_host(A)
        onload = drill.device.hold("onload", 0)
        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        waiting = asyncio.create_task(lease.layers.wait(1, timeout=5.0))
        await clock.advance(4.0)
        assert not waiting.done()
        before = drill.engine.statistics().poller.queries
        passes = 5_000
        await spin(passes)
        assert drill.engine.statistics().poller.queries - before < passes / 2
        await clock.advance(2.0)
        with pytest.raises(TimeoutError, match="layer 1 did not arrive within 5"):
            await waiting
        onload.open()
        await lease.layers.wait(1)
        drill.check(lease, A)
        lease.release()


SHAPES = {
    "scales": {
        "k": ((16, 4), "i1", (0, 1, 2)),
        "k_scale": ((4,), "f4", (0, 1, 2)),
    },
    "extra layers and an indexer": {
        "k": ((24,), "f2", (0, 1, 2)),
        "mtp": ((24,), "f2", (3,)),
        "indexer": ((5,), "u1", (1, 2)),
    },
    "one tensor per layer": {"latent": ((37,), "u1", (0, 1))},
    "quantised blocks": {
        "k": ((3, 7), "i1", (0, 1)),
        "scale": ((3,), "f4", (0, 1)),
    },
}


async def copy_there_and_back(name: str) -> None:
    """Copy blocks to the host and back, and compare every byte, layer by layer."""
    shapes = SHAPES[name]
    num_layers = 1 + max(layer for _, _, layers in shapes.values() for layer in layers)
    device = ScriptedDevice()
    shaped = Shaped(regions_of(num_layers, **shapes), device)
    async with shaped.engine as engine:
        held = await shaped.to_host(TOKENS)
        gates = [device.hold("onload", 0, layer) for layer in range(num_layers)]
        async with engine.match(TOKENS) as lease:
            await lease.allocate(len(TOKENS))
            table = lease.block_table[:6]
            for layer in range(num_layers):
                gates[layer].open()
                await lease.layers.wait(layer)
                sizes = [piece.block_bytes * 6 for piece in shaped.regions.layer_pieces(layer)]
                assert shaped.layer_bytes(table)[layer] == [
                    piece[:size] for piece, size in zip(held[layer], sizes, strict=True)
                ]
        device.end_script()


async def test_scales_are_copied_with_their_blocks():
    """Defect: fp8 scales are copied to the host, but not back layer by layer."""
    await copy_there_and_back("scales")


async def test_extra_layers_and_indexer_caches_are_copied():
    """Defect: Transfers cover the layers of the model only: MTP layers and indexer caches are not
    copied.
    """
    await copy_there_and_back("extra layers and an indexer")


async def test_cache_without_values_is_copied_and_its_failures_are_reported():
    """Defect: Each transfer of a cache with one tensor per layer fails, and failed layers count as
    done.
    """
    await copy_there_and_back("one tensor per layer")
    device = ScriptedDevice()
    device.fail("onload", 0, layer=0, block=2)
    shaped = Shaped(regions_of(2, latent=((37,), "u1", (0, 1))), device)
    async with shaped.engine as engine:
        await shaped.to_host(TOKENS)
        async with engine.match(TOKENS) as lease:
            await lease.allocate(len(TOKENS))
            for layer in (0, 1):
                with pytest.raises(TransferError):
                    await lease.layers.wait(layer)
            assert lease.cached_tokens == 2


@pytest.mark.clock
async def test_failed_offload_does_not_delay_later_transfers():
    """Defect: The counter of a failed offload never ends, and the next submission waits for it for
    300 s.
    """
    clock = running_clock()
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        drill.device.fail("offload", 1)
        drill.device.reject("offload", 2)
        for tokens in (B, C):
            await drill.fill(tokens)
            await drill.engine.drain()
        lease = await drill.serve(A)
        assert lease.cached_tokens == 8
        lease.release()
        assert (clock.now, clock.timers) == (1000.0, 0), "no timer was used"


async def test_missing_or_foreign_tensors_are_refused():
    """Defect: Caches are looked up by names made of ranks: a miss copies nothing, and no error is
    raised.
    """
    first, second = (Shaped(regions_of(2, k=((8,), "u1", (0, 1)))) for _ in range(2))
    for piece in second.regions.pieces():
        piece.view()[:] ^= 0xFF
    async with first.engine, second.engine:
        for shaped in (first, second):
            held = await shaped.to_host(TOKENS)
            async with shaped.engine.match(TOKENS) as lease:
                await lease.allocate(len(TOKENS))
                await lease.layers.wait_all()
                now = shaped.layer_bytes(lease.block_table[:6])
                assert now == [[piece[: 6 * 8] for piece in layer] for layer in held]
    with pytest.raises(LayoutError, match="no region"):
        first.regions.host_offset(1, "k_rank1")


async def test_backups_do_not_starve_onloads():
    """Defect: One pool of four threads runs all copies: slow backups delay onloads that requests
    wait for.
    """
    async with Drill(device_blocks=32, host_blocks=32) as drill:
        await drill.to_host(A)
        drill.device.hold("offload")
        for seed in range(10, 16):
            await drill.fill(prompt(seed, 2))
        worker = drill.engine.statistics().worker
        assert (worker.attention.offload.submitted, worker.attention.offload.queued) == (2, 4)
        lease = await drill.serve(A)
        assert lease.cached_tokens == 8
        lease.release()


async def test_step_does_not_wait_for_earlier_offloads():
    """Defect: Each batch first waits for all earlier evictions."""
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        offload = drill.device.hold("offload", 1)
        await drill.fill(B)
        await drill.running("offload")
        lease = drill.engine.match(A)
        assert lease.try_allocate(len(A))
        await lease.layers.wait_all()
        drill.check(lease, A)
        assert drill.device.running("offload") == [1]
        offload.open()
        lease.release()


async def test_each_request_waits_for_its_own_transfer():
    """Defect: One slot holds the newest counter: an older batch waits for the layers of a newer
    one.
    """
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A, B)
        first, second = (drill.device.hold("onload", number) for number in range(2))
        older, newer = drill.engine.match(A), drill.engine.match(B)
        await older.allocate(len(A))
        await newer.allocate(len(B))
        second.open()
        await newer.layers.wait_all()
        drill.check(newer, B)
        waiting = asyncio.create_task(older.layers.wait(0))
        await spin(20)
        assert not waiting.done()
        first.open()
        await waiting
        drill.check(older, A)
        older.release()
        newer.release()


async def test_errors_reach_all_waiters_and_the_loop(loop_errors):
    """Defect: Exceptions of callbacks are swallowed, failed events are warnings, errors are
    printed.
    """
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)

        def fail(layer: int) -> None:
            raise ZeroDivisionError(layer)

        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        lease.layers.counters[0].add_callback(fail)
        await lease.layers.wait_all()
        assert [type(error["exception"]) for error in loop_errors] == [ZeroDivisionError] * 2
        loop_errors.clear()
        lease.release()
        await drill.engine.evict(16)
        drill.device.hold("onload", 1)
        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        await drill.running("onload")
        drill.device.onloads[0].layer_events[1].query_error = RuntimeError("lost")
        with pytest.raises(TransferError, match="lost"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 0
        lease.release()


async def test_memory_is_kept_until_copies_end_and_devices_implement_every_method():
    """Defect: Memory is freed while copies run, by a shutdown that calls methods that do not
    exist.
    """
    cache = Drill()
    await cache.engine.__aenter__()
    await cache.fill(A)
    backup = cache.device.hold("offload")
    await cache.fill(B)
    arena = cache.engine.inspect.parts.worker.memory.arena
    closing = asyncio.create_task(cache.engine.aclose(0.0))
    await spin(10)
    assert not closing.done()
    assert arena.blocks.shape[0] == 8, "the copy still has its memory"
    assert not cache.device.closed
    backup.open()
    await closing
    assert cache.device.closed
    abstract = {name for name, _ in inspect.getmembers(Device, inspect.isfunction)} - {"__init__"}
    for device in (CpuDevice, CudaDevice, ManualDevice, ScriptedDevice, FlakyDevice, ChaosDevice):
        for name in (name for name in abstract if not name.startswith("_")):
            wanted = list(inspect.signature(getattr(Device, name)).parameters)
            found = inspect.signature(getattr(device, name)).parameters
            required = [p for p in found if found[p].default is inspect.Parameter.empty]
            takes_all = list(found)[: len(wanted)] == wanted and set(required) <= set(wanted)
            assert takes_all or list(found) == ["self", "args"], f"{device.__name__}.{name}"


async def test_queued_transfers_have_priorities_and_can_be_cancelled():
    """Defect: Transfers run in order of arrival only: no priority, no cancellation, no deadline."""
    async with Drill(device_blocks=32, host_blocks=32) as drill:
        lease = await drill.serve(A)
        await drill.engine.drain()
        drill.device.hold("offload", 1)
        second, third = drill.device.hold("offload", 2), drill.device.hold("offload", 3)
        for tokens in (B, C, D):  # two are in the device, one is queued
            await drill.fill(tokens)
        swapping = asyncio.create_task(lease.preempt(swap=True))
        await spin(5)
        second.open()
        await run_until_idle(lambda: drill.device.running("offload") == [1, 3])
        moving = [len(copy.host_ids) for copy in drill.device.offloads]
        assert moving == [2, 1], "the partial block of the swap goes before the older backup"
        third.open()
        await swapping
        drill.device.end_script()
        await drill.engine.drain()
        await drill.engine.evict(32)
        drill.device.hold("onload")
        leases = [drill.engine.match(tokens) for tokens in (B, C, D)]
        for wanting in leases:
            await wanting.allocate(9)
        leases[2].release()
        await spin(3)
        assert drill.engine.statistics().worker.attention.onload.cancelled == 1
        for used in (*leases, lease):
            used.release()
        drill.device.end_script()
        await drill.nothing_lost()


async def test_affinity_of_the_calling_thread_does_not_change(monkeypatch):
    """Defect: A subprocess is asked for the location of the GPU, and the calling thread stays
    bound to it.
    """

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError(f"a subprocess: {args}")

    for name in ("Popen", "run", "check_output"):
        monkeypatch.setattr(subprocess, name, refuse)
    before = os.sched_getaffinity(0)
    shaped = Shaped(regions_of(1, k=((8,), "u1", (0,))))
    async with shaped.engine:
        await shaped.to_host(TOKENS)
        placement("0000:3b:00.0", 1 << 20)
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


async def test_plans_of_a_batch_share_no_lists():
    """Defect: A batch merges plans into the lists of the first request, and so changes that
    request.
    """
    plan = TransferPlan(
        transfer_id=1, route=ONLOAD, source_blocks=b"\2\0\0\0", target_blocks=b"\1\0\0\0"
    )
    with pytest.raises(AttributeError):
        plan.target_blocks = b""  # type: ignore[misc]
    assert not plan.target_ids.flags.writeable
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A, B)
        onloads = drill.device.hold("onload")
        leases = [drill.engine.match(tokens) for tokens in (A, B)]
        for lease in leases:
            await lease.allocate(9)
        await drill.running("onload", 2)
        first, second = drill.device.onloads
        assert not set(first.device_ids) & set(second.device_ids)
        assert not set(first.host_ids) & set(second.host_ids)
        onloads.open()
        for lease, tokens in zip(leases, (A, B), strict=True):
            table = lease.block_table
            if table.flags.writeable:
                table[:] = 0  # the caller's own
            await lease.layers.wait_all()
            drill.check(lease, tokens)
            lease.release()


async def test_host_memory_fits_quantised_blocks():
    """Defect: Host memory is sized by another dtype than the device's: copies exceed it."""
    await copy_there_and_back("quantised blocks")
    shaped = Shaped(regions_of(2, **SHAPES["quantised blocks"]))
    async with shaped.engine as engine:
        arena = engine.inspect.parts.worker.memory.arena
        pieces = list(shaped.regions.pieces())
        ends = [piece.host_offset_bytes + piece.block_bytes for piece in pieces]
        assert max(ends) <= arena.pitch_bytes
        assert arena.nbytes == Shaped.BLOCKS * arena.pitch_bytes
        beyond = np.array([Shaped.BLOCKS], np.int32).tobytes()
        plan = TransferPlan(
            transfer_id=9, route=OFFLOAD, source_blocks=b"\0" * 4, target_blocks=beyond
        )
        with pytest.raises(UsageError):
            engine.inspect.parts.worker.plans.submit(plan)


async def test_offload_counts_only_after_its_own_event():
    """Defect: No event proves the end of an offload; it is right only while copies are
    synchronous.
    """
    async with Drill() as drill:
        last = drill.device.hold("offload", 0, layer=1)
        await drill.fill(A)
        await drill.running("offload")
        draining = asyncio.create_task(drill.engine.drain())
        await spin(20)
        assert [end.layer for end in drill.device.ends] == [0]
        assert not draining.done()
        assert drill.statistics.attention.host.cached == 0
        last.open()
        await draining
        assert drill.statistics.attention.host.cached == 2
    device, regions = CpuDevice(), regions_of(3, k=((8,), "u1", (0, 1, 2)))
    shaped = Shaped(regions, device)
    async with shaped.engine:
        copy = device.copy(OFFLOAD, np.array([0], np.int32), np.array([0], np.int32), None)
        assert len(copy.layer_events) == 3
        copy.layer_events[2].synchronize()
        assert copy.error() is None
