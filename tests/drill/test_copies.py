"""Defects of copies: sizes, id lists, runs and directions."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import UsageError
from aiokv.testing import run_until_idle
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cpu import CpuDevice, CpuEvent
from tests.drill.drill import Drill, Shaped, prompt, regions_of

TOKENS = np.arange(7, dtype=np.int32)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class Attached:
    """A cpu device over both tiers; all bytes differ."""

    def __init__(self) -> None:
        self.regions = regions_of(2, k=((37,), "u1", (0, 1)), s=((3,), "u1", (1,)))
        self.arena = HostArena(num_blocks=Shaped.BLOCKS, pitch_bytes=self.regions.payload_bytes)
        random = np.random.default_rng(2)
        self.views = [*(piece.view() for piece in self.regions.pieces()), self.arena.blocks]
        for view in self.views:
            view[:] = random.integers(0, 256, view.shape, np.uint8)
        self.device = CpuDevice()
        self.device.attach(self.regions, self.arena)

    def close(self) -> None:
        self.device.close()

    def bytes(self) -> list[bytes]:
        return [view.tobytes() for view in self.views]


@pytest.fixture
def attached():
    made = Attached()
    yield made
    made.close()


def test_every_byte_is_copied_and_every_id_is_checked(attached):
    """Defect: Bytes beyond a multiple of 8 are dropped; the first id and shorter lists are not
    checked.
    """
    before = attached.bytes()
    for host_ids, device_ids in (
        (ids(-1, 2), ids(1, 2)),
        (ids(1, 2), ids(Shaped.BLOCKS, 2)),
        (ids(Shaped.BLOCKS, 2), ids(1, 2)),
        (ids(1), ids(1, 2)),
        (ids(1, 2), ids(1)),
        (ids(1, 2), ids(3, 3)),
    ):
        with pytest.raises(UsageError):
            attached.device.copy(ONLOAD, host_ids, device_ids, None)
    assert attached.bytes() == before
    attached.device.copy(ONLOAD, ids(1, 5), ids(2, 0), None).layer_events[-1].synchronize()
    for piece in attached.regions.pieces():
        begin = piece.host_offset_bytes
        for host, device in ((1, 2), (5, 0)):
            row = attached.arena.blocks[host, begin : begin + piece.block_bytes]
            assert (piece.view()[device] == row).all()


def test_copy_that_cannot_run_raises(attached):
    """Defect: Errors of a kernel launch are ignored."""
    step = CpuEvent()
    step.begin()
    before = attached.bytes()
    copy = attached.device.copy(OFFLOAD, ids(1), ids(1), step)
    step.finish("out of memory")
    copy.layer_events[0].synchronize()
    assert "out of memory" in copy.error().reason
    assert attached.bytes() == before


@pytest.mark.asyncio
async def test_host_blocks_are_allocated_in_runs():
    """Defect: Ids are handed out last in, first out: no run survives, and copies without runs are
    slow.
    """
    async with Drill(device_blocks=32, host_blocks=32) as drill:
        await drill.to_host(*(prompt(seed, 2) for seed in range(10, 18)))
        await drill.engine.evict(8, "host")  # holes, and 16 ids that were never allocated
        leases = [drill.engine.match(prompt(seed, 0)) for seed in range(20, 40)]
        for lease in leases:
            await lease.allocate(1)
        for lease in leases[::2]:
            lease.release()  # holes on the device
        drill.device.hold("offload")
        await drill.fill(prompt(50, 8))
        await drill.running("offload")
        (copy,) = drill.device.offloads
        assert (np.diff(copy.host_ids) == 1).all()
        assert not (np.diff(np.sort(copy.device_ids)) == 1).all()
        for lease in leases[1::2]:
            lease.release()


def test_each_direction_writes_its_destination_only(attached):
    """Defect: The ids of source and destination are swapped."""
    host = attached.arena.blocks.tobytes()
    attached.device.copy(ONLOAD, ids(1, 2), ids(6, 7), None).layer_events[-1].synchronize()
    assert attached.arena.blocks.tobytes() == host
    device = [piece.view().tobytes() for piece in attached.regions.pieces()]
    attached.device.copy(OFFLOAD, ids(0, 1), ids(3, 4), None).layer_events[-1].synchronize()
    assert [piece.view().tobytes() for piece in attached.regions.pieces()] == device
    assert attached.arena.blocks.tobytes() != host


@pytest.mark.asyncio
async def test_transfer_of_any_length_is_one_submission():
    """Defect: Each call uploads its id lists from pageable memory, which the device cannot read
    asynchronously.
    """
    async with Drill(device_blocks=128, host_blocks=128) as drill:
        held = drill.device.hold("offload")
        await drill.fill(prompt(1, 100))
        await drill.running("offload")
        (copy,) = drill.device.offloads
        assert len(copy.host_ids) == 100
        worker = drill.engine.statistics().worker
        assert (worker.attention.offload.submitted, worker.attention.offload.queued) == (1, 0)
        held.open()
        await run_until_idle(lambda: drill.statistics.attention.host.cached == 100)
