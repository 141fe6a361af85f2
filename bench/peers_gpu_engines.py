"""A prompt from one engine to another, each in a process with a GPU of its own.

``python -m bench.peers_gpu_engines`` moves prompts through ``cuda_ipc`` between two GPUs, and
compares every byte. The time runs from the ticket to the end of ``receiving.wait()``: it has the
handshake, the messages, the proofs and the reports in it. Prompts evict one another. The yardstick
is a plain copy from memory of the sender to memory of the receiver, in the same run.

With ``--gemm``, more prompts follow while matrix products run on both GPUs; their times beside
prompts are divided by those between prompts. ``--transport tcp --cpu`` moves prompts over TCP
without GPUs.
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
from aiokv.worker.device.cuda_slots import DeviceArena
from bench import harness
from bench.peers_gpu import KIB, LAYERS, MIB, Gemms, Interval, beside, note

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCK_TOKENS: Final = 64
SECRET: Final = "a secret of this bench"
ROUNDS: Final = 6
GEMM_ROUNDS: Final = 10
GEMM_PAUSE_SECONDS: Final = 0.1
MAX_BYTES, MAX_BLOCKS = 2 << 30, 2048  # of a prompt
PLAIN_BYTES: Final = 256 * MIB
WAIT_SECONDS: Final = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_gpu_engines", description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "peers_gpu_engines.json")
    parser.add_argument("--slices", type=int, nargs="*", default=(128, 32, 4), help="in KiB")
    parser.add_argument("--max-blocks", type=int, default=MAX_BLOCKS, help="of a prompt")
    parser.add_argument("--ring-mib", type=int, default=2048, help="landing and outgoing slots")
    parser.add_argument("--chunk-blocks", type=int, default=32)
    parser.add_argument("--gemm", action="store_true")
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
            args.ctas, args.gemm,
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
        gemm: move prompts beside matrix products, too.
    """

    slice_bytes: int
    num_blocks: int
    transport: Any
    gpus: tuple[int, ...] | None
    slots_bytes: int
    chunk_blocks: int
    ctas: int
    gemm: bool

    @property
    def rounds(self) -> int:
        """Number of prompts."""
        return ROUNDS + (GEMM_ROUNDS if self.gemm else 0)


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
        self._gpu: int | None = None
        self._gemms: Gemms | None = None
        self._busy: list[Interval] = []  # with a prompt on its way, beside matrix products
        self._idle: list[Interval] = []
        if setup.gpus is not None:
            import cupy

            gpu = self._gpu = setup.gpus[1 if listens else 0]
            cupy.cuda.Device(gpu).use()
            self._arrays = cupy
            device = CudaDevice(gpu, options=CudaOptions(peer_ctas=setup.ctas))
        pool = 2 * num_blocks
        shape = (pool, setup.slice_bytes // 8)
        self.tensors = [self._arrays.zeros(shape, np.uint64) for _ in range(2 * LAYERS)]
        regions = Regions(num_layers=LAYERS)
        regions.add("k", layers=self.tensors[:LAYERS])
        regions.add("v", layers=self.tensors[LAYERS:])
        self.block_bytes = regions.payload_bytes
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

    def begin_round(self, number: int) -> None:
        """Start the matrix products in front of the first prompt beside them."""
        if number == ROUNDS and self._gpu is not None:
            self._gemms = Gemms(self._gpu)
            self._gemms.start()
            self._gemms.running.wait()

    def slowdown(self) -> float | None:
        """Mean time of a matrix product beside prompts, over that between prompts."""
        if self._gemms is None:
            return None
        ends = self._gemms.stop()
        return statistics.mean(beside(ends, self._busy)) / statistics.mean(beside(ends, self._idle))

    async def prefill(self) -> None:
        async with self.engine:
            if self._gpu is not None:
                self._pipe.send(plain_gbps(self._gpu, await self.take()))
            for number in range(self._setup.rounds):
                tokens = self.tokens(number)
                lease = self.engine.match(tokens)
                await lease.allocate(len(tokens))
                self._compute(number, np.asarray(lease.block_table))
                with self.engine.computing([lease]):
                    lease.commit(len(tokens))
                self.engine.step()
                self.begin_round(number)
                self._pipe.send("computed")
                paused = time.monotonic()
                ticket = await self.take()
                began = time.monotonic()
                async with self.engine.send(lease, ticket) as sending:
                    pass
                self._idle.append((paused, began))
                self._busy.append((began, time.monotonic()))
                note("prefill", f"sent {sending.delivered_tokens}, {sending.failure}")
                self._pipe.send("sent")
                lease.release()
                self.engine.step()  # the next prompt can take the blocks
            self._pipe.send(self.slowdown())
            await self.take()

    def _compute(self, number: int, table: np.ndarray) -> None:
        for index, tensor in enumerate(self.tensors):
            tensor[table] = self._wanted(number, index, tensor.shape[1])
        if self._arrays is not np:
            self._arrays.cuda.Device().synchronize()

    async def decode(self) -> dict[str, Any]:
        seconds, wrong, row = [], 0, self._setup._asdict()
        async with self.engine:
            if self._gpu is not None:
                memory = DeviceArena(self._gpu, num_blocks=1, pitch_bytes=PLAIN_BYTES)
                self._pipe.send(memory.handle)
                row["plain_gbps"] = await self.take()
                memory.close()
            for number in range(self._setup.rounds):
                await self.take()
                tokens = self.tokens(number)
                lease = self.engine.match(tokens)
                await lease.allocate(len(tokens))
                self.begin_round(number)
                paused = time.monotonic()
                if self._gemms is not None:
                    await asyncio.sleep(GEMM_PAUSE_SECONDS)
                began = time.monotonic()
                async with lease.receive(timeout=WAIT_SECONDS) as receiving:
                    self._pipe.send(receiving.ticket)
                    end = await receiving.wait()
                self._idle.append((paused, began))
                self._busy.append((began, time.monotonic()))
                seconds.append(self._busy[-1][1] - began)
                if end != len(tokens):
                    raise RuntimeError(f"{end} of {len(tokens)} arrived: {receiving.failure}")
                await self.take()
                wrong += self._wrong_words(number, np.asarray(lease.block_table))
                note("decode", f"prompt {number}: {seconds[-1]:.4f} s, {wrong} words differ")
                lease.release()
                self.engine.step()  # the next prompt can take the blocks
            row["gemm_sender_slowdown"] = await self.take()
            row["gemm_receiver_slowdown"] = self.slowdown()
            self._pipe.send("end")
        moved = self._num_blocks * self.block_bytes
        row |= {
            "prompt_bytes": moved,
            "block_bytes": self.block_bytes,
            "first_seconds": seconds[0],
            "seconds": statistics.median(seconds[1:ROUNDS]),
            "moved_gbps": moved / statistics.median(seconds[1:ROUNDS]) / 1e9,
            "wrong_words": wrong,
        }
        if self._gemms is not None:
            row["moved_beside_gemm_gbps"] = moved / statistics.median(seconds[ROUNDS:]) / 1e9
        return row

    def _wanted(self, number: int, index: int, words: int) -> Any:
        span = self._arrays.arange(words, dtype=np.uint64)[None, :]
        return self.content(number, index)[:, None] ^ span

    def _wrong_words(self, number: int, table: np.ndarray) -> int:
        return sum(
            int((tensor[table] != self._wanted(number, index, tensor.shape[1])).sum())
            for index, tensor in enumerate(self.tensors)
        )


def plain_gbps(gpu: int, handle: bytes) -> float:
    """Rate of a plain copy from memory of this process to that of another one."""
    from aiokv import _native

    cuda: Any = vars(_native)["cuda"]
    own = DeviceArena(gpu, num_blocks=1, pitch_bytes=PLAIN_BYTES)
    target, copies = cuda.MappedMemory(gpu, handle), cuda.PeerCopies(gpu)
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        works = [copies.copy([(target.address, own.pointer, PLAIN_BYTES)]) for _ in range(8)]
        works[-1].synchronize()
        seconds.append(time.perf_counter() - begin)
    for each in (copies, target, own):
        each.close()
    return 8 * PLAIN_BYTES / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    sys.exit(main())
