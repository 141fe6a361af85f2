"""A worker over random bytes, for the tests of the worker."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD, Priority, TransferPlan, TransferReport, id_bytes
from aiokv.layout.regions import Regions
from aiokv.testing import ManualDevice, spin
from aiokv.worker.base import WorkerStart
from aiokv.worker.controller import CacheController
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.worker.device.base import Device
    from aiokv.worker.layers import LayerDoneCounter


class Worker:
    """A controller and its dependencies; checks that nothing remains afterwards.

    Blocks have 37 and 18 bytes a layer, and layer 1 has 5 more: nothing is a multiple of 8.
    """

    def __init__(
        self, device: Device, *, layers: int = 3, device_blocks: int = 12, host_blocks: int = 16
    ) -> None:
        random = np.random.default_rng(1)
        self.regions = Regions(num_layers=layers)
        if layers:
            k = [random.integers(0, 256, (device_blocks, 37), np.uint8) for _ in range(layers)]
            kv = [random.integers(0, 256, (device_blocks, 3, 18), np.uint8) for _ in range(layers)]
            self.regions.add("k", layers=k)
            self.regions.add("v", layers=[tensor[:, 1] for tensor in kv])
        if layers > 1:
            extra = random.integers(0, 256, (device_blocks, 5), np.uint8)
            self.regions.add("extra", layers=[extra], layer_indices=[1])
        self.device = device
        self.reports: list[TransferReport] = []
        self.steps: list[tuple[int, BaseException | None]] = []
        self.on_report: Callable[[TransferReport], object] = lambda report: None
        self.poller = EventPoller()
        self.controller = CacheController(self.regions, device)
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self._random = random
        self._ids = count(1)

    def _take_report(self, report: TransferReport) -> None:
        self.on_report(report)
        self.reports.append(report)

    async def __aenter__(self) -> Self:
        self.poller.open(asyncio.get_running_loop())
        await self.controller.open(
            WorkerStart(
                device_blocks=self._device_blocks,
                host_blocks=self._host_blocks,
                poller=self.poller,
                on_report=self._take_report,
                on_step=lambda step, error: self.steps.append((step, error)),
            )
        )
        blocks = self.controller.memory.arena.blocks
        blocks[:] = self._random.integers(0, 256, blocks.shape, np.uint8)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if isinstance(self.device, ManualDevice):
            self.device.complete_all()
        await self.controller.aclose()
        self.poller.close()
        await spin(2)

    def submit(
        self,
        direction: str = "onload",
        device_ids: Sequence[int] = (1, 2),
        host_ids: Sequence[int] = (3, 4),
        *,
        priority: int = Priority.DEMAND,
        after_step: int = 0,
        transfer_id: int | None = None,
    ) -> LayerDoneCounter:
        plan = TransferPlan(
            transfer_id=next(self._ids) if transfer_id is None else transfer_id,
            route=ONLOAD if direction == "onload" else OFFLOAD,
            source_blocks=id_bytes(host_ids if direction == "onload" else device_ids),
            target_blocks=id_bytes(device_ids if direction == "onload" else host_ids),
            priority=priority,
            after_step=after_step,
        )
        return self.controller.plans.submit(plan)

    async def settle(self, passes: int = 10) -> None:
        """Let the poller see all finished events without waiting for its timer."""
        for _ in range(passes):
            for stream in self.poller._streams.values():
                stream.next_query = 0.0
            self.poller._pass()
            await asyncio.sleep(0)

    def contents(self) -> dict[str, np.ndarray]:
        """Return copies of all bytes: the arena's and every tensor's."""
        found = {f"{p.region}{p.layer}": p.view().copy() for p in self.regions.pieces()}
        found["host"] = self.controller.memory.arena.blocks.copy()
        return found

    def after_plain_copy(
        self,
        before: dict[str, np.ndarray],
        direction: str,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
    ) -> dict[str, np.ndarray]:
        """Return the expected contents() after a transfer."""
        after = {name: array.copy() for name, array in before.items()}
        for piece in self.regions.pieces():
            begin = piece.host_offset_bytes
            host = after["host"][:, begin : begin + piece.block_bytes]
            device = after[f"{piece.region}{piece.layer}"]
            for device_id, host_id in zip(device_ids, host_ids, strict=True):
                if direction == "onload":
                    device[device_id] = host[host_id]
                else:
                    host[host_id] = device[device_id]
        return after


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture
def new_worker() -> type[Worker]:
    return Worker


@pytest.fixture
def same_bytes() -> Any:
    return same
