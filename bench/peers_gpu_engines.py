"""A prompt from one engine to another, each in a process with a GPU of its own.

``python -m bench.peers_gpu_engines`` moves prompts through ``cuda_ipc`` between two GPUs, and
compares every byte. The time runs from the ticket to the end of ``receiving.wait()``: it has the
handshake, the messages, the proofs and the reports in it. Prompts evict one another.
``--transport tcp --cpu`` does the same over TCP without GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiokv import CacheConfig, CacheEngine, Peers, Regions
from aiokv.worker.device.cuda import CudaDevice, CudaOptions
from bench import harness
from bench.peers_gpu import KIB, LAYERS, MIB, note

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCK_TOKENS: Final = 64
SECRET: Final = "a secret of this bench"
ROUNDS: Final = 6
MAX_BYTES, MAX_BLOCKS = 1 << 30, 1024  # of a prompt
WAIT_SECONDS: Final = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_gpu_engines", description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "peers_gpu_engines.json")
    parser.add_argument("--slices", type=int, nargs="*", default=(128, 32, 4), help="in KiB")
    parser.add_argument("--max-blocks", type=int, default=MAX_BLOCKS, help="of a prompt")
    parser.add_argument("--ring-mib", type=int, default=512, help="landing and outgoing slots")
    parser.add_argument("--chunk-blocks", type=int, default=16)
    parser.add_argument("--ctas", type=int, default=CudaOptions().peer_ctas)
    parser.add_argument("--transport", default="cuda_ipc")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), help="sender, receiver")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    run = harness.Run(machine=harness.machine(), benches={"peers_gpu_engines": results})
    gpus = None if args.cpu else tuple(args.gpus)
    for kib in args.slices:
        num_blocks = min(MAX_BYTES // (2 * LAYERS * kib * KIB), args.max_blocks)
        setup = Setup(
            kib * KIB, num_blocks, args.transport, gpus, args.ring_mib * MIB, args.chunk_blocks,
            args.ctas,
        )  # fmt: skip
        row = measure(setup)
        results[f"{kib}_kib"] = row
        harness.save(run, args.out)
        print(f"{kib} KiB: {row}")
    return 0


class Setup(NamedTuple):
    """Options of both processes.

    Attributes:
        slice_bytes: of one region in one layer of a block.
        num_blocks: of a prompt.
        transport: of both engines.
        gpus: of the sender and of the receiver; None for the cpu device.
        slots_bytes: landing slots, and outgoing slots.
        chunk_blocks: of one transfer.
        ctas: of the kernels that prove blocks.
    """

    slice_bytes: int
    num_blocks: int
    transport: Any
    gpus: tuple[int, ...] | None
    slots_bytes: int
    chunk_blocks: int
    ctas: int


def measure(setup: Setup) -> dict[str, Any]:
    """Run both processes; return what the receiver measured."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    answers, report = context.Pipe(duplex=False)
    sides = [
        context.Process(target=run_side, args=(*own, setup))
        for own in (("prefill", ends[0], None), ("decode", ends[1], report))
    ]
    for side in sides:
        side.start()
    for end in (*ends, report):
        end.close()  # a process that ended closes the last copy
    try:
        row: dict[str, Any] = answers.recv()
    except EOFError:
        raise SystemExit("a process failed: see its traceback above") from None
    finally:
        for side in sides:
            side.join(WAIT_SECONDS)
            side.kill()
    return row


def run_side(name: str, pipe: Connection, report: Connection | None, setup: Setup) -> None:
    note(name, "begins")
    side = Side(pipe, setup, listens=report is not None)
    row = asyncio.run(side.decode() if report is not None else side.prefill())
    if report is not None:
        report.send(row)
    faulthandler.cancel_dump_traceback_later()


class Side:
    """An engine, and the other process."""

    def __init__(self, pipe: Connection, setup: Setup, *, listens: bool) -> None:
        self._pipe = pipe
        self._setup = setup
        num_blocks = self._num_blocks = setup.num_blocks
        device: Any = "cpu"
        self._arrays: Any = np
        if setup.gpus is not None:
            import cupy

            gpu = setup.gpus[1 if listens else 0]
            cupy.cuda.Device(gpu).use()
            self._arrays = cupy
            device = CudaDevice(gpu, options=CudaOptions(peer_ctas=setup.ctas))
        pool = 2 * num_blocks
        shape = (pool, setup.slice_bytes // 8)
        self.tensors = [self._arrays.zeros(shape, np.uint64) for _ in range(2 * LAYERS)]
        regions = Regions(num_layers=LAYERS)
        regions.add("k", layers=self.tensors[:LAYERS])
        regions.add("v", layers=self.tensors[LAYERS:])
        self.block_bytes = regions.host_block_bytes
        self.engine = CacheEngine(
            CacheConfig(
                model="m", block_tokens=BLOCK_TOKENS, device_blocks=pool, host_blocks=1,
            ),
            regions,
            device,
            peers=Peers(
                secret=SECRET,
                listen="127.0.0.1" if listens else None,
                transport=setup.transport,
                ring_bytes=setup.slots_bytes,
                outgoing_bytes=setup.slots_bytes,
                chunk_blocks=setup.chunk_blocks,
            ),
        )  # fmt: skip

    def tokens(self, number: int) -> np.ndarray:
        return np.arange(self._num_blocks * BLOCK_TOKENS, dtype=np.int32) + 1_000_000 * number

    def content(self, number: int, index: int) -> Any:
        """One word per block of a prompt, for a tensor."""
        words = self._arrays.arange(self._num_blocks, dtype=np.uint64)
        return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1000 * number + index)

    async def take(self) -> Any:
        """Return the next message of the other process."""
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(None, self._take), WAIT_SECONDS + 1)

    def _take(self) -> Any:
        if not self._pipe.poll(WAIT_SECONDS):
            raise TimeoutError("the other process sent nothing")
        return self._pipe.recv()

    async def prefill(self) -> None:
        async with self.engine:
            for number in range(ROUNDS):
                lease = self.engine.match(self.tokens(number))
                await lease.allocate(len(self.tokens(number)))
                words = slice(0, None)
                for index, tensor in enumerate(self.tensors):
                    column = self.content(number, index)[:, None]
                    span = self._arrays.arange(tensor.shape[1], dtype=np.uint64)[None, :]
                    tensor[np.asarray(lease.block_table), words] = column ^ span
                if self._arrays is not np:
                    self._arrays.cuda.Device().synchronize()
                with self.engine.computing([lease]):
                    lease.commit(len(self.tokens(number)))
                self.engine.step()
                self._pipe.send("computed")
                ticket = await self.take()
                async with self.engine.send(lease, ticket) as sending:
                    pass
                note("prefill", f"sent {sending.delivered_tokens}, {sending.failure}")
                self._pipe.send("sent")
                lease.release()
                self.engine.step()  # the next prompt can take the blocks
            await self.take()

    async def decode(self) -> dict[str, Any]:
        seconds, wrong = [], 0
        async with self.engine:
            for number in range(ROUNDS):
                await self.take()
                tokens = self.tokens(number)
                lease = self.engine.match(tokens)
                await lease.allocate(len(tokens))
                begin = time.perf_counter()
                async with lease.receive(timeout=WAIT_SECONDS) as receiving:
                    self._pipe.send(receiving.ticket)
                    end = await receiving.wait()
                    seconds.append(time.perf_counter() - begin)
                if end != len(tokens):
                    raise RuntimeError(f"{end} of {len(tokens)} arrived: {receiving.failure}")
                await self.take()
                wrong += self._wrong_words(number, np.asarray(lease.block_table))
                note("decode", f"prompt {number}: {seconds[-1]:.4f} s, {wrong} words differ")
                lease.release()
                self.engine.step()  # the next prompt can take the blocks
            self._pipe.send("end")
        moved = self._num_blocks * self.block_bytes
        return {
            **self._setup._asdict(),
            "prompt_bytes": moved,
            "block_bytes": self.block_bytes,
            "first_seconds": seconds[0],
            "seconds": statistics.median(seconds[1:]),
            "moved_gbps": moved / statistics.median(seconds[1:]) / 1e9,
            "wrong_words": wrong,
        }

    def _wrong_words(self, number: int, table: np.ndarray) -> int:
        total = 0
        for index, tensor in enumerate(self.tensors):
            span = self._arrays.arange(tensor.shape[1], dtype=np.uint64)[None, :]
            wanted = self.content(number, index)[:, None] ^ span
            total += int((tensor[table] != wanted).sum())
        return total


if __name__ == "__main__":
    sys.exit(main())
