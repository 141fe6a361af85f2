"""Two workers of one process that exchange blocks over TCP."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Self

import numpy as np

from aiokv.base.plan import RECEIVE, SEND, TransferPlan, TransferReport, id_bytes
from aiokv.layout.regions import Regions
from aiokv.peers.options import Peers
from aiokv.peers.ticket import Ticket, encode, ticket_key
from aiokv.stores.identity import StoreIdentity
from aiokv.testing import ManualDevice, run_until_idle, spin
from aiokv.worker.base import WorkerStart
from aiokv.worker.controller import CacheController
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiokv.worker.device.base import Device

SECRET = "0123456789abcdef"
KEY = ticket_key(SECRET.encode())
BLOCK_TOKENS = 4
SLOT_BYTES = 3 * (64 + 64) + 64 + 64  # of the blocks of PeerWorker, with the trailer


class PeerWorker:
    """A controller with peers over random bytes; checks at its end that nothing is left.

    Args:
        device: cpu or manual.
        slots: landing slots, and outgoing slots.
        listens: False for a worker that only sends.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        seed: int = 1,
        device_blocks: int = 32,
        slots: int = 8,
        listens: bool = True,
        weights: str = "w1",
        width: int = 37,
        layers: int = 3,
        block_tokens: int = BLOCK_TOKENS,
        layer_ranges: int = 1,
    ) -> None:
        random = np.random.default_rng(seed)
        self.regions = Regions(num_layers=layers)
        k = [random.integers(0, 256, (device_blocks, width), np.uint8) for _ in range(layers)]
        v = [random.integers(0, 256, (device_blocks, 18), np.uint8) for _ in range(layers)]
        extra = random.integers(0, 256, (device_blocks, 5), np.uint8)
        self.regions.add("k", layers=k)
        self.regions.add("v", layers=v)
        self.regions.add("extra", layers=[extra], layer_indices=[1])
        self.device = device or CpuDevice()
        self.reports: list[TransferReport] = []
        self.poller = EventPoller()
        slot_bytes = self.regions.payload_bytes + 64
        self.peers = Peers(
            secret=SECRET,
            listen="127.0.0.1" if listens else None,
            ring_bytes=slots * slot_bytes,
            outgoing_bytes=slots * slot_bytes,
            layer_ranges=layer_ranges,
        )
        self.controller = CacheController(self.regions, self.device, peers=self.peers)
        self.generation = os.urandom(16)
        self.block_tokens = block_tokens
        self.identity = StoreIdentity(model="m", weights_version=weights, block_tokens=block_tokens)
        self._weights = weights
        self.checks = True  # False after an interrupt, which may have lost a slot
        self._device_blocks = device_blocks
        self._ids = count(1)

    async def __aenter__(self) -> Self:
        self.poller.open(asyncio.get_running_loop())
        await self.controller.open(
            WorkerStart(
                device_blocks=self._device_blocks,
                host_blocks=0,
                poller=self.poller,
                on_report=self.reports.append,
                on_step=lambda step, error: None,
                identity=self.identity,
            )
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if isinstance(self.device, ManualDevice):
            self.device.complete_all()
        await self.controller.aclose()
        self.poller.close()
        await spin(2)
        assert not self.checks or self.controller.tickets.violations() == []

    def ticket(self, num_blocks: int, *, seconds: float = 60.0, **changes: object) -> Ticket:
        """Return a ticket for the first blocks of a prompt, which this worker does not expect."""
        values: dict[str, object] = {
            "ticket_id": os.urandom(16),
            "generation": self.generation,
            "model": "m",
            "weights_version": self._weights,
            "prompt_digest": bytes(32),
            "first_position": 0,
            "num_tokens": num_blocks * self.block_tokens,
            "timeout_seconds": seconds,
            "block_tokens": self.block_tokens,
            "transport": "tcp",
            "endpoints": self.controller.tickets.endpoints,
        }
        return Ticket(**(values | changes))  # type: ignore[arg-type]

    def expect(self, num_blocks: int, *, seconds: float = 60.0, **changes: object) -> Ticket:
        """Return a ticket that senders may open now."""
        ticket = self.ticket(num_blocks, seconds=seconds, **changes)
        self.controller.tickets.expect(encode(ticket, KEY), seconds, seconds)
        return ticket

    def receive(
        self, ticket: Ticket, blocks: Sequence[int], device_ids: Sequence[int], after_step: int = 0
    ) -> int:
        """Submit a RECEIVE plan; return its id."""
        return self._submit(ticket, blocks, device_ids, after_step, is_receive=True)

    def send(
        self,
        ticket: Ticket,
        blocks: Sequence[int],
        device_ids: Sequence[int],
        after_step: int = 0,
        *,
        ranges: tuple[int, int] = (0, 0),
        mark: int = 0,
    ) -> int:
        """Submit a SEND plan; return its id."""
        layers = {"first_range": ranges[0], "end_range": ranges[1], "mark": mark}
        return self._submit(ticket, blocks, device_ids, after_step, is_receive=False, **layers)

    def _submit(
        self,
        ticket: Ticket,
        blocks: Sequence[int],
        device_ids: Sequence[int],
        after_step: int,
        *,
        is_receive: bool,
        **layers: int,
    ) -> int:
        transfer_id = next(self._ids)
        self.controller.plans.submit(
            TransferPlan(
                transfer_id=transfer_id,
                route=RECEIVE if is_receive else SEND,
                source_blocks=id_bytes(blocks if is_receive else device_ids),
                target_blocks=id_bytes(device_ids if is_receive else blocks),
                after_step=after_step,
                peer=ticket.ticket_id,
                **layers,
            )
        )
        return transfer_id

    def block(self, device_id: int) -> bytes:
        """Return the bytes of a device block."""
        return b"".join(piece.view()[device_id].tobytes() for piece in self.regions.pieces())

    def blocks(self, device_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of device blocks."""
        return [self.block(device_id) for device_id in device_ids]

    def outcome(self, transfer_id: int) -> tuple[str, int] | None:
        """Return outcome and first bad block of the only report of a plan; None before it."""
        reports = [r for r in self.reports if r.transfer_id == transfer_id]
        assert len(reports) <= 1
        return (reports[0].outcome, reports[0].first_bad_block) if reports else None

    async def ended(self, *transfer_ids: int) -> list[tuple[str, int] | None]:
        """Wait for the reports of plans; return them."""
        await run_until_idle(
            lambda: set(transfer_ids) <= {report.transfer_id for report in self.reports}
        )
        different = {(r.transfer_id, r.outcome, r.first_bad_block) for r in self.reports}
        # An interrupt at the end of a report repeats the report.
        assert len({transfer_id for transfer_id, *_ in different}) == len(different)
        assert not self.checks or len(different) == len(self.reports)
        found = {r.transfer_id: (r.outcome, r.first_bad_block) for r in self.reports}
        return [found[transfer_id] for transfer_id in transfer_ids]

    @property
    def free_slots(self) -> int:
        """Landing slots without an owner."""
        return self.controller.tickets.statistics()[0].free_slots


@asynccontextmanager
async def two_workers(
    sender: PeerWorker | None = None, receiver: PeerWorker | None = None
) -> AsyncIterator[tuple[PeerWorker, PeerWorker]]:
    """Open a sending and a receiving worker of different bytes."""
    async with sender or PeerWorker(seed=1) as p, receiver or PeerWorker(seed=2) as d:
        yield p, d
