"""Blocks from the engine of one process to the engine of another one, over loopback TCP.

Per size of a slice (the bytes of one layer of a block):

* ``plain_gbps``: ``sock_sendall`` and ``sock_recv_into`` of as many bytes, a block at a time, on
  one connection of asyncio; nothing is framed, proven or copied;
* ``whole_gbps``: a prompt that is computed at once, from ``commit`` on the prefill side until
  ``receiving.wait`` returns on the decode side: device blocks to device blocks, sealed, verified
  and indexed. ``ratio_to_plain`` is the median of the ratios within each round;
* ``first_chunk_ms``: from the commit of the first half of a prompt until its first chunk is cached
  on the decode side. The other half is computed afterwards: a chunk that became usable only when
  the prefill ended would stop the bench;
* ``last_chunk_ms``: from the commit of the last two blocks, when the others have arrived, until the
  decode side has all;
* ``after_prefill_ms``: from the commit of the last chunk of a prompt until the decode side has all.
  Each of the chunks takes ``LAYERS`` times ``LAYER_SECONDS``, for which the prefill side waits in
  place of a model. ``by_chunk``: blocks are sent when their chunk is committed; ``by_layer``:
  ``layers_done`` names each layer, so that only the last of ``LAYER_RANGES`` parts is left. Both
  alternate in one run; ``ratio`` is that of their medians.

``idle`` is the CPU time of each process, as a share of the elapsed time, while both engines are
open and connected and nothing moves.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine, Peers, Regions
from aiokv.base.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import Lease

SLICES = {"4_kib": 4 << 10, "32_kib": 32 << 10, "128_kib": 128 << 10}
LAYERS = 8
BLOCK_TOKENS = 16
CHUNK_BLOCKS = 16
TOTAL_BYTES = 64 << 20  # per round
QUICK_BYTES = 16 << 20
STEP_BLOCKS = 64  # of a prompt that is computed in steps
LAST_BLOCKS = 2
CHUNKS = 4  # of a prompt that is computed layer by layer
LAYER_RANGES = 4
LAYER_SECONDS = 0.005
SECRET = b"a secret of the bench of peers"
TIMEOUT = 60.0


def run(quick: bool) -> dict[str, Any]:
    """Return GB/s and milliseconds by size of a slice, and the CPU share of idle processes."""
    return uvloop.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, slice_bytes in SLICES.items():
        async with _Decode(slice_bytes, QUICK_BYTES if quick else TOTAL_BYTES) as decode:
            results[name] = await decode.measure(rounds=1 if quick else 9, steps=2 if quick else 50)
            if slice_bytes == max(SLICES.values()):
                results["idle"] = await decode.idle(1.0 if quick else 10.0)
    return results


class _Side:
    """Engine of one process, and plain memory of as many bytes."""

    def __init__(self, slice_bytes: int, total_bytes: int, listen: str | None) -> None:
        self.block_bytes = LAYERS * slice_bytes
        self.num_blocks = total_bytes // self.block_bytes
        device_blocks = max(self.num_blocks, STEP_BLOCKS)
        shape = (device_blocks, slice_bytes)
        regions = Regions(num_layers=LAYERS)
        regions.add("kv", layers=[np.ones(shape, np.uint8) for _ in range(LAYERS)])
        self.plain = np.ones(total_bytes, np.uint8)
        self.engine = CacheEngine(
            CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, model="bench"),
            regions,
            peers=Peers(
                secret=SECRET,
                listen=listen,
                chunk_blocks=CHUNK_BLOCKS,
                layer_ranges=LAYER_RANGES,
                ring_bytes="64MiB",
                outgoing_bytes="64MiB",
            ),
        )

    def pieces(self) -> Sequence[memoryview]:
        """Return the plain memory, block by block."""
        step, view = self.block_bytes, memoryview(self.plain)
        return [view[at : at + step] for at in range(0, len(view), step)]

    async def granted(self, number: int, num_blocks: int) -> Lease:
        """Return a granted lease of a prompt that no other number has."""
        tokens = np.arange(num_blocks * BLOCK_TOKENS, dtype=np.int32)
        tokens[0] = number + 1_000_000
        lease = self.engine.match(tokens)
        await lease.allocate(len(tokens))
        return lease


# --- decode side, in this process ---------------------------------------------------------------


class _Decode(_Side):
    """The decode side; starts the prefill side and commands it."""

    def __init__(self, slice_bytes: int, total_bytes: int) -> None:
        super().__init__(slice_bytes, total_bytes, "127.0.0.1")
        self._sizes = slice_bytes, total_bytes
        self._number = 0

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            arguments = json.dumps([*self._sizes, listening.getsockname()[1]])
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.peers", arguments
            )
            loop = asyncio.get_running_loop()
            control, _ = await loop.sock_accept(listening)
            self._plain, _ = await loop.sock_accept(listening)
        self._plain.setblocking(False)
        self._commands = _Commands(*await asyncio.open_connection(sock=control))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._plain.close()
        self._commands.close()
        if await self._process.wait() and exc[0] is None:
            raise RuntimeError(f"peers: the prefill side exited with {self._process.returncode}")
        await self.engine.__aexit__(None, None, None)

    async def measure(self, rounds: int, steps: int) -> dict[str, Any]:
        plain, whole = [], []
        for _ in range(1 + rounds):
            plain.append(await self._copy_plain())
            whole.append(await self._receive_whole())
        first, last = zip(*[await self._receive_steps() for _ in range(1 + steps)], strict=True)
        by_chunk, by_layer = [], []
        for _ in range(2 + rounds):
            by_chunk.append(await self._receive_chunks(by_layer=False))
            by_layer.append(await self._receive_chunks(by_layer=True))
        after = {"by_chunk": _percentiles(by_chunk[1:]), "by_layer": _percentiles(by_layer[1:])}
        del plain[0], whole[0]  # the first round warms the connections up
        ratios = [alone / engines for alone, engines in zip(plain, whole, strict=True)]
        return {
            "plain_gbps": self.plain.nbytes / 1e9 / statistics.median(plain),
            "whole_gbps": self.plain.nbytes / 1e9 / statistics.median(whole),
            "ratio_to_plain": statistics.median(ratios),
            "first_chunk_ms": _percentiles(first[1:]),
            "last_chunk_ms": _percentiles(last[1:]),
            "after_prefill_ms": {
                **after,
                "ratio": statistics.median(by_chunk[1:]) / statistics.median(by_layer[1:]),
            },
        }

    async def idle(self, seconds: float) -> dict[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        prefill = await self._commands.ask("idle", seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - began)
        return {"cpu_share_decode": share, "cpu_share_prefill": prefill}

    async def _copy_plain(self) -> float:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        self._commands.send("plain")
        for piece in self.pieces():
            target = piece
            while target:
                target = target[await loop.sock_recv_into(self._plain, target) :]
        return time.perf_counter() - began

    async def _receive_whole(self) -> float:
        self._number += 1
        num_blocks = self.num_blocks
        async with (
            await self.granted(self._number, num_blocks) as lease,
            lease.receive(timeout=TIMEOUT) as receiving,
        ):
            ticket = receiving.ticket.hex()
            self._commands.send("whole", self._number, num_blocks, ticket)
            await _arrive(receiving, num_blocks)
            ended = time.perf_counter()
            return ended - await self._commands.receive()

    async def _receive_steps(self) -> tuple[float, float]:
        """Return the seconds from a commit until its blocks are cached: first and last chunk."""
        self._number += 1
        async with (
            await self.granted(self._number, STEP_BLOCKS) as lease,
            lease.receive(timeout=TIMEOUT) as receiving,
        ):
            ask = self._commands.ask
            began = await ask("half", self._number, STEP_BLOCKS, receiving.ticket.hex())
            await _arrive(receiving, CHUNK_BLOCKS)
            first = time.perf_counter() - began
            began = await ask("rest")
            await _arrive(receiving, STEP_BLOCKS)
            return first, time.perf_counter() - began

    async def _receive_chunks(self, *, by_layer: bool) -> float:
        """Return the seconds from the last commit of a prompt until all blocks are cached."""
        self._number += 1
        num_blocks = self.num_blocks
        async with (
            await self.granted(self._number, num_blocks) as lease,
            lease.receive(timeout=TIMEOUT) as receiving,
        ):
            ticket = receiving.ticket.hex()
            self._commands.send("chunks", self._number, num_blocks, ticket, by_layer)
            await _arrive(receiving, num_blocks)
            ended = time.perf_counter()
            return ended - await self._commands.receive()


async def _arrive(receiving: Any, num_blocks: int) -> None:
    position = num_blocks * BLOCK_TOKENS
    if await receiving.wait(position) < position:
        raise RuntimeError(f"peers: not all blocks have arrived: {receiving.failure}")


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{percent}": percentile(ordered, percent) * 1e3 for percent in (50, 99)}


class _Commands:
    """JSON lines: a command with arguments, or the number that answers it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *values: Any) -> None:
        self._writer.write(json.dumps(values).encode() + b"\n")

    async def receive_all(self) -> list[Any]:
        """Return what the other side has sent; nothing at its end."""
        line = await self._reader.readline()
        values: list[Any] = json.loads(line) if line else []
        return values

    async def receive(self) -> Any:
        (value,) = await self.receive_all()
        return value

    async def ask(self, *values: Any) -> Any:
        self.send(*values)
        return await self.receive()

    def close(self) -> None:
        self._writer.close()


# --- prefill side, in another process -----------------------------------------------------------


async def _prefill(slice_bytes: int, total_bytes: int, port: int) -> None:
    side = _Side(slice_bytes, total_bytes, None)
    loop = asyncio.get_running_loop()
    async with side.engine:
        commands = _Commands(*await asyncio.open_connection("127.0.0.1", port))
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.setblocking(False)
            while values := await commands.receive_all():
                command, *arguments = values
                if command == "plain":
                    for piece in side.pieces():
                        await loop.sock_sendall(plain, piece)
                elif command == "idle":
                    commands.send(await _idle(*arguments))
                elif command == "chunks":
                    await _send_chunks(side, commands, *arguments)
                elif command == "whole":
                    await _send_whole(side, commands, *arguments)
                else:
                    await _send_steps(side, commands, *arguments)
        commands.close()


async def _idle(seconds: float) -> float:
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - began)


async def _send_whole(
    side: _Side, commands: _Commands, number: int, num_blocks: int, ticket: str
) -> None:
    async with await side.granted(number, num_blocks) as lease:
        async with side.engine.send(lease, bytes.fromhex(ticket)):
            began = time.perf_counter()
            lease.commit(lease.num_tokens)
        commands.send(began)


async def _send_chunks(
    side: _Side,
    commands: _Commands,
    number: int,
    num_blocks: int,
    ticket: str,
    by_layer: bool,
) -> None:
    async with await side.granted(number, num_blocks) as lease:
        async with side.engine.send(lease, bytes.fromhex(ticket)) as sending:
            for i in range(CHUNKS):
                stop = (i + 1) * num_blocks // CHUNKS * BLOCK_TOKENS
                for layer in range(LAYERS):
                    await asyncio.sleep(LAYER_SECONDS)
                    if by_layer:
                        sending.layers_done(stop, layer + 1)
                began = time.perf_counter()
                lease.commit(stop)
        commands.send(began)


async def _send_steps(
    side: _Side, commands: _Commands, number: int, num_blocks: int, ticket: str
) -> None:
    async with (
        await side.granted(number, num_blocks) as lease,
        side.engine.send(lease, bytes.fromhex(ticket)) as sending,
    ):
        commands.send(time.perf_counter())
        lease.commit(num_blocks // 2 * BLOCK_TOKENS)
        await commands.receive()  # the first chunk is cached on the decode side
        most = (num_blocks - LAST_BLOCKS) * BLOCK_TOKENS
        lease.commit(most)
        while sending.delivered_tokens < most:  # noqa: ASYNC110  (a send has no event)
            await asyncio.sleep(0.0005)
        commands.send(time.perf_counter())
        lease.commit(lease.num_tokens)


if __name__ == "__main__":
    uvloop.run(_prefill(*json.loads(sys.argv[1])))
