"""Engines with peers whose ranks are processes of their own; the heads are split over the ranks.

::

    engine (in the test, or in a child) ──steps, over a socket──► rank 0, rank 1, ... (children)
                    └──────────────── tensors in files, mapped by all ───────────┘
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine, Peers, Regions
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.ranks import Rank, RankGroup
from aiokv.testing import run_until_idle
from tests.harness.closing import close
from tests.harness.memory import WORDS
from tests.harness.side_memory import SideMemory
from tests.peers.engines import SECRET, Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import Lease
    from tests.peers.processes import Child, Nursery

HEADS = 4
AXES = ("heads", "tokens", "dim")


class HeadsMemory(SideMemory):
    """Tensors ``[device_blocks, heads, block_tokens, 3]`` in files of a directory.

    Args:
        directory: of the files; a process creates those that are missing.
        heads: of the regions; the bytes that are written and checked are those of all heads.
        layers: of the model.
    """

    def __init__(
        self,
        directory: Path,
        device_blocks: int,
        block_tokens: int,
        heads: slice = slice(HEADS),
        *,
        layers: int = 2,
    ) -> None:
        self._directory = directory
        self._heads = heads
        super().__init__(device_blocks, block_tokens, windows={}, layers=layers)

    def take(self, device_blocks: int) -> None:
        """Map the files."""
        shape = (device_blocks, HEADS, self.block_tokens, WORDS)
        whole = []
        for number in range(self.layers * len(self.names)):
            file = self._directory / f"tensor{number}"
            with file.open("ab") as created:  # by several processes at once
                created.truncate(math.prod(shape) * np.dtype(np.uint64).itemsize)
            whole.append(np.memmap(file, np.uint64, "r+", shape=shape))
        self.regions = Regions(num_layers=self.layers)
        for number, name in enumerate(self.names):
            layers = [tensor[:, self._heads] for tensor in whole[number :: len(self.names)]]
            self.regions.add(name, layers=layers, axes=AXES)
        self.tensors = [tensor.swapaxes(1, 2) for tensor in whole]

    def erase(self) -> None:
        """Overwrite all bytes: those of an earlier engine do not compare equal."""
        for tensor in self.tensors:
            tensor[:] = 99

    def _bytes(self, index: int, words: np.ndarray) -> np.ndarray:
        heads = np.arange(HEADS, dtype=np.uint64)[:, np.newaxis] << np.uint64(8)
        return (words + np.uint64(index))[..., np.newaxis, np.newaxis] + heads


def peers_for(
    regions: Regions,
    ring_blocks: int,
    listen: str | None,
    chunk_blocks: int,
    layer_ranges: int = 1,
) -> Peers:
    """Return the options of a rank with rings of so many of its blocks."""
    ring_bytes = ring_blocks * (regions.payload_bytes + TRAILER_BYTES)
    return Peers(
        secret=SECRET,
        listen=listen,
        chunk_blocks=chunk_blocks,
        layer_ranges=layer_ranges,
        ring_bytes=ring_bytes,
        outgoing_bytes=ring_bytes,
    )


class RankedSide(Side):
    """An engine of ``num_ranks`` ranks; of one, in its own process.

    Args:
        directory: of the tensors and sockets, for this engine and its ranks only.
        num_ranks: number of ranks; their processes are started by :class:`Ranks`.
        listen: as for ``Peers``.
        device_blocks: number of device blocks.
        block_tokens: positions per block.
        ring_blocks: landing slots, and outgoing slots.
        chunk_blocks: as for ``Peers``.
        layers: of the model.
        layer_ranges: as for ``Peers``.
    """

    def __init__(
        self,
        *,
        directory: str,
        num_ranks: int,
        listen: str | None = "127.0.0.1",
        device_blocks: int,
        block_tokens: int,
        ring_blocks: int,
        chunk_blocks: int,
        layers: int = 2,
        layer_ranges: int = 1,
    ) -> None:
        self.directory = Path(directory)
        self.is_layered = layer_ranges > 1
        self.device = None
        self.block_tokens = block_tokens
        self.num_ranks = num_ranks
        self.memory: HeadsMemory = HeadsMemory(
            self.directory, device_blocks, block_tokens, layers=layers
        )
        config = CacheConfig(
            model="m", device_blocks=device_blocks, host_blocks=0, block_tokens=block_tokens
        )
        if num_ranks == 1:
            peers = peers_for(self.memory.regions, ring_blocks, listen, chunk_blocks, layer_ranges)
            self.engine = CacheEngine(config, self.memory.regions, peers=peers)
        else:
            group = RankGroup(num_ranks, path=self.directory / "ranks", has_peers=True)
            self.engine = CacheEngine(config, ranks=group)
        self._runners: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(
            self._on_runner, str(self.directory / "runner")
        )
        await super().__aenter__()
        await self.all_runners()
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        try:
            if exc is None:
                await self.at_rest()
        finally:
            for _, writer in self._runners.values():
                writer.close()  # the ranks wait for the end of their group from now on
            await close(self.engine, None, exc)
            self._server.close()
            await self._server.wait_closed()

    async def _on_runner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._runners[int(await reader.readline())] = reader, writer

    async def all_runners(self) -> None:
        """Wait until each rank has a runner."""
        if self.num_ranks > 1:
            await run_until_idle(lambda: len(self._runners) == self.num_ranks)

    def forget(self, rank: int) -> None:
        """Close the runner of a rank that was killed."""
        self._runners.pop(rank)[1].close()

    async def granted(self, tokens: np.ndarray, **names: Any) -> Lease:
        """Return a granted lease, whose blocks no open step uses."""
        lease = await super().granted(tokens, **names)
        self.step()
        return lease

    def compute(self, lease: Lease, tokens: np.ndarray, first: int, end: int) -> None:
        """Write positions of all heads, commit them, and close the step."""
        super().compute(lease, tokens, first, end)
        self.step()

    def note_layers(self, mark: bytes) -> None:
        """Let all ranks send the layers of a mark."""
        self._tell_runners(f"mark {mark.hex()}")

    def step(self) -> None:
        """Close the open step on all ranks."""
        if self._runners:
            self._tell_runners(str(self.engine.step()))  # raises for a rank that was lost

    def _tell_runners(self, line: str) -> None:
        for _, writer in self._runners.values():
            if not writer.is_closing():
                writer.write(f"{line}\n".encode())

    async def at_rest(self, *, empty: bool = False) -> None:
        """Wait until nothing moves; check that neither a lease nor a rank holds anything."""
        if self.num_ranks == 1:
            await super().at_rest(empty=empty)
            return
        await run_until_idle(self.is_at_rest)
        await self.engine.drain()
        if empty:
            await self.engine.reset()
            statistics = self.engine.statistics()
            assert statistics.attention.device.free == statistics.attention.device.blocks
            assert not statistics.leases
        assert self.engine.check_invariants() == []
        await self.heard()

    async def heard(self) -> None:
        """Wait until the ranks have got all messages of the engine; they hold nothing."""
        for rank, (reader, writer) in self._runners.items():
            writer.write(b"rest\n")
            assert json.loads(await reader.readline()) == [], rank

    def is_at_rest(self) -> bool:
        """Return True if no transfer moves, as far as the engine knows."""
        if self.num_ranks == 1:
            return super().is_at_rest()
        peers = self.engine.statistics().peers
        return not self.engine.statistics().releasing_leases + peers.receiving + peers.sending


class Ranks:
    """The rank processes of one engine, which a test starts, kills and replaces.

    Args:
        nursery: forks them.
        options: of the :class:`RankedSide`.
    """

    def __init__(self, nursery: Nursery, options: dict[str, Any]) -> None:
        self._nursery = nursery
        self._options = options
        count = options["num_ranks"]
        self.children = [self._new(rank) for rank in range(count if count > 1 else 0)]

    def _new(self, rank: int) -> Child:
        return self._nursery.child(rank=rank, **self._options)

    async def start(self) -> None:
        """Wait until all ranks have begun, together with their engine."""
        await asyncio.gather(*(child.__aenter__() for child in self.children))

    async def killed(self, rank: int) -> None:
        """Kill a rank, and wait until its process has ended."""
        await self.children[rank].killed()
        await self.children[rank].__aexit__(RuntimeError)

    async def replaced(self, rank: int) -> None:
        """Start another process for a rank; returns when its group has begun again."""
        self.children[rank] = self._new(rank)
        await self.children[rank].__aenter__()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for child in self.children:
            child.signal(number)

    async def ended(self) -> None:
        """Wait until all have ended, as they do when their engine closes or is killed."""
        for child in self.children:
            await child.ended()


class Server:
    """All processes of one engine with ranks, which ``kill`` ends at once."""

    def __init__(self, nursery: Nursery, options: dict[str, Any]) -> None:
        self.manager = nursery.child(**options)
        self.ranks = Ranks(nursery, options)

    async def __aenter__(self) -> Self:
        await asyncio.gather(self.manager.__aenter__(), self.ranks.start())
        return self

    async def __aexit__(self, exc_type: object, *error: object) -> None:
        if exc_type is not None:
            self.ranks.signal(signal.SIGKILL)
        await self.manager.__aexit__(exc_type, *error)
        await self.ranks.ended()

    async def killed(self) -> None:
        """Kill all processes, and wait until they have ended."""
        self.ranks.signal(signal.SIGKILL)
        await self.manager.killed()
        await self.ranks.ended()


class LocalServer:
    """An engine in this process, and its ranks in theirs.

    Args:
        nursery: forks the ranks.
        options: of the :class:`RankedSide`.
    """

    def __init__(self, nursery: Nursery, options: dict[str, Any]) -> None:
        self.side = RankedSide(**options)
        self.ranks = Ranks(nursery, options)

    async def __aenter__(self) -> Self:
        await asyncio.gather(self.side.__aenter__(), self.ranks.start())
        return self

    async def __aexit__(self, exc_type: object, *error: object) -> None:
        if exc_type is not None:
            self.ranks.signal(signal.SIGKILL)
        try:
            await self.side.__aexit__(exc_type, *error)
        finally:
            await self.ranks.ended()

    async def restart(self, rank: int) -> None:
        """Start another process for a rank that was killed."""
        self.side.forget(rank)
        await asyncio.gather(self.side.engine.restart_ranks(), self.ranks.replaced(rank))
        await self.side.all_runners()
        self.side.memory.erase()


async def run_rank(rank: int, options: dict[str, Any], replies: asyncio.StreamWriter) -> None:
    """Run a rank until its group ends; close its steps and check it for the engine."""
    directory, num_ranks = Path(options["directory"]), options["num_ranks"]
    own = HEADS // num_ranks
    heads = slice(rank * own, (rank + 1) * own)
    memory = HeadsMemory(
        directory,
        options["device_blocks"],
        options["block_tokens"],
        heads,
        layers=options.get("layers", 2),
    )
    peers = peers_for(
        memory.regions,
        options["ring_blocks"],
        options.get("listen", "127.0.0.1"),
        options["chunk_blocks"],
        options.get("layer_ranges", 1),
    )
    async with Rank(directory / "ranks", rank, memory.regions, peers=peers) as worker:
        reader, writer = await asyncio.open_unix_connection(str(directory / "runner"))
        writer.write(f"{rank}\n".encode())
        replies.write(b'{"port": 0}\n')
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"rest\n":
                    writer.write(json.dumps(await _held(worker)).encode() + b"\n")
                elif line.startswith(b"mark "):
                    worker.layers_done(bytes.fromhex(line[5:].decode()))
                else:
                    worker.step(int(line))
        await worker.closed()
        writer.close()


async def _held(worker: Rank) -> Sequence[str]:
    """Wait until all slots of a rank are free; return its violated invariants."""

    def is_free() -> bool:
        (statistics,) = worker.peer_statistics()
        return statistics.free_slots == statistics.landing_slots

    await run_until_idle(is_free)
    return worker._controller.tickets.violations()
