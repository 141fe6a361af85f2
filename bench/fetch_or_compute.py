"""Fetch or compute: simulated servers with stores of different bandwidths and without a store.

The engine, its stores and its decisions are real, and run on a loop with a simulated clock. The
model, the disk and the clients of the server advance this clock. So the figures do not depend on
the speed of the machine. Two runs differ by up to a fifth where fetching and computing take about
as long, and less elsewhere.

The sizes are those of :mod:`bench.vllm` on an H100: a model of 8B parameters with 32,000 prompt
tokens per second and 128 KiB of KV per token, 8 GiB on the device, 12 GiB of host memory, 4
clients, conversations of 4 to 6 turns. The bytes are scaled down. The disk serves reads before
writes, but at most 7 of 8 operations are reads.

The model ``hybrid`` has recurrent state, so a hit also needs a snapshot. A snapshot is as large as
the KV of 512 tokens.

The model ``uneven`` computes 47,000 prompt tokens per second in three of four steps, and
20,000 in the fourth. Its average is 35,000.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.stores import StoreUse
from aiokv.testing import ScriptedDevice, ScriptedStore, clocked_loop, running_clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

BANDWIDTHS_GBPS: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
QUICK_GBPS: Final = (3.0,)
HYBRID_GBPS: Final = (0.5, 3.0, 6.0, 10.0, 20.0)
UNEVEN_GBPS: Final = (3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 8.0, 20.0)

TOKENS_PER_SECOND: Final = 32_000.0
UNEVEN_TOKENS_PER_SECOND: Final = 35_000.0
UNEVEN_STEPS: Final = (0.75, 0.75, 0.75, 1.75)  # times of successive steps, relative to the average
BYTES_PER_TOKEN: Final = 128 << 10
SNAPSHOT_BLOCKS: Final = 32  # size of a snapshot, in blocks
STATE_SLOTS: Final = 16
HOST_STATE_SLOTS: Final = 32
PCIE_BYTES_PER_SECOND: Final = 50e9
LEAST_STEP_SECONDS: Final = 0.008
STEP_TOKENS: Final = 8_192
BLOCK_TOKENS: Final = 16
DEVICE_BLOCKS: Final = (8 << 30) // (BYTES_PER_TOKEN * BLOCK_TOKENS)
HOST_BLOCKS: Final = (12 << 30) // (BYTES_PER_TOKEN * BLOCK_TOKENS)
CLIENTS: Final = 4
SESSIONS: Final = 20
QUICK_SESSIONS: Final = 8
OUTPUT_TOKENS: Final = 16
STORE_WAIT_SECONDS: Final = 1.0
DECISION_SECONDS: Final = 0.002
MEASURED_TOKENS: Final = 1_024  # tokens of a step that measures the speed of the model

PAYLOAD_BYTES: Final = 2_048  # bytes per block in this process
SCALE: Final = BYTES_PER_TOKEN * BLOCK_TOKENS // PAYLOAD_BYTES
DISK_BLOCKS: Final = 8  # blocks per operation of the disk
READS_PER_WRITE: Final = 7
TICK_SECONDS: Final = 0.004


def run(quick: bool) -> dict[str, Any]:
    """Return requests per second and times to first token, by server and bandwidth."""
    prompts = conversations(QUICK_SESSIONS if quick else SESSIONS)
    results: dict[str, Any] = {
        "no_offload": measure(Server(has_host=False), prompts),
        "host": measure(Server(), prompts),
    }
    for gbps in QUICK_GBPS if quick else BANDWIDTHS_GBPS:
        results[f"disk_{gbps:g}_gbps"] = measure(Server(gbps=gbps), prompts)
        any_price = Server(gbps=gbps, knows_speed=False)
        results[f"any_price_{gbps:g}_gbps"] = measure(any_price, prompts)
    results["hybrid_no_offload"] = measure(Server(has_host=False, is_hybrid=True), prompts)
    for gbps in QUICK_GBPS if quick else HYBRID_GBPS:
        results[f"hybrid_{gbps:g}_gbps"] = measure(Server(gbps=gbps, is_hybrid=True), prompts)
    results["uneven_no_offload"] = measure(Server(has_host=False, is_uneven=True), prompts)
    for gbps in QUICK_GBPS if quick else UNEVEN_GBPS:
        uneven = Server(gbps=gbps, is_uneven=True)
        results[f"uneven_{gbps:g}_gbps"] = measure(uneven, prompts)
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Settings of one simulated server.

    Attributes:
        has_host: False for a device cache only.
        gbps: bandwidth of the disk store; 0 without one.
        latency_seconds: latency of each operation of the disk.
        knows_speed: False if the engine does not know the speed of the model. Then it fetches all
            blocks that the store has, as long as the request may wait.
        is_hybrid: True if the model has recurrent state.
        is_uneven: True if the speed of the model differs between steps.
        changes: later bandwidths, by number of requests answered.
    """

    has_host: bool = True
    gbps: float = 0.0
    latency_seconds: float = 0.0001
    knows_speed: bool = True
    is_hybrid: bool = False
    is_uneven: bool = False
    changes: tuple[tuple[int, float], ...] = ()


class Disk:
    """A medium with a bandwidth that serves reads before writes."""

    def __init__(self, server: Server) -> None:
        self.bytes_per_second = server.gbps * 1e9
        self._latency_seconds = server.latency_seconds
        self._reads: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reads_in_turn = 0
        self._task: asyncio.Task[None] | None = None

    async def move(self, blocks: int, *, reads: bool) -> None:
        """Wait for the duration of an operation on blocks."""
        await asyncio.sleep(self._latency_seconds)
        line = self._reads if reads else self._writes
        last = None
        for first in range(0, blocks, DISK_BLOCKS):
            last = asyncio.get_running_loop().create_future()
            line.append((min(DISK_BLOCKS, blocks - first), last))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        if last is not None:
            await last

    async def _work(self) -> None:
        while self._reads or self._writes:
            blocks, done = self._next()
            await asyncio.sleep(blocks * BLOCK_TOKENS * BYTES_PER_TOKEN / self.bytes_per_second)
            if not done.done():
                done.set_result(None)
        self._task = None

    def _next(self) -> tuple[int, asyncio.Future[None]]:
        is_read = bool(self._reads) and not (
            self._writes and self._reads_in_turn == READS_PER_WRITE
        )
        self._reads_in_turn = self._reads_in_turn + 1 if is_read else 0
        return (self._reads if is_read else self._writes).popleft()


class DiskStore(ScriptedStore):
    """A store in memory whose operations take the time of a disk.

    Args:
        disk: the disk, shared with the stores of other pools.
        object_blocks: size of an object, in blocks.
    """

    def __init__(self, disk: Disk, object_blocks: int = 1) -> None:
        super().__init__("disk", max_concurrent=8)
        self._disk = disk
        self._object_blocks = object_blocks

    def for_group(self, group: str) -> DiskStore:
        """See ``Store.for_group``: snapshots are on the same disk."""
        return DiskStore(self._disk, SNAPSHOT_BLOCKS)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """See ``Store.load``."""
        await self._disk.move(self._object_blocks * len(blocks), reads=True)
        return await super().load(keys, blocks)

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """See ``Store.save``."""
        await self._disk.move(self._object_blocks * len(blocks), reads=False)
        return await super().save(keys, blocks)


@dataclass(slots=True, eq=False)
class Running:
    """A request on the GPU.

    Attributes:
        left: number of prompt tokens to compute.
        outputs: tokens to generate.
        first: is done when the first token is generated; ``last`` when the last one is.
    """

    left: int
    outputs: int
    first: asyncio.Future[None]
    last: asyncio.Future[None]


class Gpu:
    """Computes steps of the running requests: a token per answer, then prompts in order."""

    def __init__(self, engine: CacheEngine, *, tells_speed: bool, is_uneven: bool) -> None:
        self._engine = engine
        self._tells_speed = tells_speed
        self._is_uneven = is_uneven
        self._num_steps = 0
        self.computed_tokens = 0
        self.computing_seconds = 0.0  # of the steps that are large enough to measure
        self._running: list[Running] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        return sum(request.left for request in self._running)

    def start(self, num_tokens: int) -> Running:
        """Compute ``num_tokens`` of a prompt, and generate an answer."""
        loop = asyncio.get_running_loop()
        request = Running(num_tokens, OUTPUT_TOKENS, loop.create_future(), loop.create_future())
        self._running.append(request)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return request

    async def _work(self) -> None:
        while self._running:
            prompts = self._budgets()
            total = sum(tokens for _, tokens in prompts)
            seconds = max(self._computing_seconds(total), LEAST_STEP_SECONDS)
            answering = [request for request in self._running if not request.left]
            await asyncio.sleep(seconds)
            if total >= MEASURED_TOKENS:
                self.computed_tokens += total
                self.computing_seconds += seconds
                if self._tells_speed:
                    self._engine.note_prefill(total, seconds)
            for request, tokens in prompts:
                request.left -= tokens
                if not request.left:
                    answering.append(request)
            for request in answering:
                request.outputs -= 1
                if not request.first.done():
                    request.first.set_result(None)
                if not request.outputs:
                    request.last.set_result(None)
            self._running = [request for request in self._running if request.outputs]
        self._task = None

    def _computing_seconds(self, num_tokens: int) -> float:
        """Return the time of the next step, which computes ``num_tokens`` of prompts."""
        if not self._is_uneven:
            return num_tokens / TOKENS_PER_SECOND
        if num_tokens >= MEASURED_TOKENS:
            self._num_steps += 1
        share = UNEVEN_STEPS[self._num_steps % len(UNEVEN_STEPS)]
        return share * num_tokens / UNEVEN_TOKENS_PER_SECOND

    def _budgets(self) -> list[tuple[Running, int]]:
        budget = STEP_TOKENS - sum(not request.left for request in self._running)
        budgets = []
        for request in self._running:
            if request.left and budget:
                tokens = min(request.left, budget)
                budgets.append((request, tokens))
                budget -= tokens
        return budgets


def conversations(num_sessions: int, seed: int = 0) -> list[NDArray[np.int32]]:
    """Return the prompts of all turns, one turn of each conversation after the other."""
    rng = np.random.default_rng(seed)
    sessions = []
    for _ in range(num_sessions):
        tokens = rng.integers(0, 1 << 30, int(rng.integers(2_048, 12_288)), dtype=np.int32)
        turns = [tokens]
        for _ in range(int(rng.integers(3, 6))):
            more = rng.integers(0, 1 << 30, int(rng.integers(200, 2_000)), dtype=np.int32)
            tokens = np.concatenate([tokens, more])
            turns.append(tokens)
        sessions.append(turns)
    longest = max(map(len, sessions))
    return [turns[i] for i in range(longest) for turns in sessions if i < len(turns)]


def measure(server: Server, prompts: Sequence[NDArray[np.int32]]) -> dict[str, Any]:
    """Return the figures of one server."""
    # The thresholds of the engine in bytes are scaled, too. All checksums are computed on the loop,
    # because threads do not use the simulated clock.
    with (
        mock.patch("aiokv.stores.guard.PART_BYTES", (256 << 20) // SCALE),
        mock.patch("aiokv.stores.cost.LATENCY_BYTES", (256 << 10) // SCALE),
        mock.patch("aiokv.stores.proof.INLINE_BYTES", 1 << 40),
        asyncio.Runner(loop_factory=clocked_loop()) as runner,
    ):
        return runner.run(_run_server(server, prompts))


async def _run_server(server: Server, prompts: Sequence[NDArray[np.int32]]) -> dict[str, Any]:
    disk = Disk(server)
    config = CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=DEVICE_BLOCKS,
        host_blocks=HOST_BLOCKS if server.has_host else 0,
        write_policy="write_through" if server.has_host else "none",
        state_slots=STATE_SLOTS if server.is_hybrid else 0,
        host_state_slots=HOST_STATE_SLOTS if server.is_hybrid and server.has_host else 0,
        model="bench",
    )
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((DEVICE_BLOCKS, PAYLOAD_BYTES), np.uint8)])
    if server.is_hybrid:
        state = np.zeros((STATE_SLOTS, SNAPSHOT_BLOCKS * PAYLOAD_BYTES), np.uint8)
        regions.add_state("state", layers=[state])
    stores = [StoreUse(DiskStore(disk))] if server.gbps else []
    async with CacheEngine(config, regions, ScriptedDevice(), stores=stores) as engine:
        clients = Clients(engine, server, prompts, disk)
        serving = asyncio.create_task(clients.serve())
        while not serving.done():
            await running_clock().advance(TICK_SECONDS)
        await serving
        result = clients.result()
        disk.bytes_per_second = math.inf  # the remaining saves take no time
        closing = asyncio.create_task(engine.aclose())
        while not closing.done():
            await running_clock().advance(TICK_SECONDS)
    return result


class Clients:
    """Clients that each send a prompt when the previous answer has ended."""

    def __init__(
        self,
        engine: CacheEngine,
        server: Server,
        prompts: Sequence[NDArray[np.int32]],
        disk: Disk,
    ) -> None:
        self._engine = engine
        self._server = server
        self._prompts = list(prompts)
        self._disk = disk
        self._gpu = Gpu(engine, tells_speed=server.knows_speed, is_uneven=server.is_uneven)
        self._left: Iterator[NDArray[np.int32]] = iter(self._prompts)
        self._changes = list(server.changes)
        self._scheduling = asyncio.Lock()
        self._loading_tokens = 0  # tokens to compute for requests whose hit is being copied
        self._first_tokens: list[float] = []
        self._hit_tokens = 0
        self._fetched_tokens = 0
        self._seconds = 0.0

    async def serve(self) -> None:
        """Serve all prompts."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        self._seconds = asyncio.get_running_loop().time() - began

    async def _client(self) -> None:
        for tokens in self._left:
            await self._request(tokens)

    async def _request(self, tokens: NDArray[np.int32]) -> None:
        loop = asyncio.get_running_loop()
        if self._changes and len(self._first_tokens) >= self._changes[0][0]:
            self._disk.bytes_per_second = self._changes.pop(0)[1] * 1e9
        arrived = loop.time()
        async with self._engine.match(tokens) as lease:
            async with self._scheduling:  # one request at a time decides, as in vLLM
                granting = asyncio.create_task(
                    lease.allocate(
                        len(tokens),
                        wait_store=STORE_WAIT_SECONDS,
                        queued_tokens=self._gpu.queued_tokens + self._loading_tokens,
                    )
                )
                await asyncio.wait([granting], timeout=DECISION_SECONDS)
                computes = granting.done()
                if computes:
                    self._loading_tokens += len(tokens) - lease.cached_tokens
            await granting
            await lease.layers.wait_all()
            loaded = lease.usage.cached_host_tokens
            if loaded:
                await asyncio.sleep(loaded * BYTES_PER_TOKEN / PCIE_BYTES_PER_SECOND)
            if computes:
                self._loading_tokens -= len(tokens) - lease.cached_tokens
            running = self._gpu.start(len(tokens) - lease.cached_tokens)
            await running.first
            self._first_tokens.append(loop.time() - arrived)
            self._hit_tokens += lease.cached_tokens
            self._fetched_tokens += lease.usage.fetched_tokens
            for end in (*lease.snapshot_points, len(tokens)):
                lease.commit(end)
                if end < len(tokens):
                    lease.snapshot(end)
            self._engine.step()
            await running.last

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        tokens = sum(map(len, self._prompts))
        waits = self._engine.statistics().requests
        first_tokens = sorted(self._first_tokens)
        return {
            "requests_per_second": len(self._prompts) / self._seconds,
            "first_token_p50_ms": statistics.median(first_tokens) * 1e3,
            "first_token_p99_ms": first_tokens[int(0.99 * len(first_tokens))] * 1e3,
            "hits": self._hit_tokens / tokens,
            "fetched": self._fetched_tokens / tokens,
            "declined_fetches": waits.declined_fetches,
            "late_fetches": waits.late_fetches,
            "model_tokens_per_second": self._gpu.computed_tokens / self._gpu.computing_seconds,
            "estimated_tokens_per_second": waits.prefill_tokens_per_second,
        }
