"""Blocks from one GPU to another, in two processes on one server, against a plain peer copy.

``python -m bench.peers_gpu`` needs two GPUs. The sender gathers random blocks into outgoing slots
and seals them with their checksums, copies the slots into landing slots of the receiver, and the
receiver verifies them and scatters them to random blocks. The yardstick is one ``cudaMemcpyAsync``
per ring from memory of the sender to memory of the receiver, of the same bytes, in the same run.

Rates count the bytes of the blocks, not those of trailers. With ``--gemm``, matrix products run on
both GPUs all the time while transfers come and go; their times with transfers are divided by those
without.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from aiokv.layout.regions import Regions
from aiokv.peers.slots import device_slot_bytes
from aiokv.worker.device.cuda import slice_layout
from aiokv.worker.device.cuda_slots import CudaSlots, DeviceArena
from bench import harness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from aiokv.worker.device.cuda_slots import SlotCopy

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS: Final = 32
SLICES_KIB: Final = (128, 32, 4)
CTAS: Final = (16, 24, 32, 48)
TRANSFER_BYTES: Final = 2 * GIB
RING_BYTES: Final = 256 * MIB
BATCHES_MIB: Final = (32,)  # of one pass and copy
ROUNDS: Final = 7
GEMM_SIZE: Final = 8192
ON_SECONDS, OFF_SECONDS, GEMM_CYCLES = 0.12, 0.12, 6
SEED: Final = 11
STUCK_SECONDS: Final = 60  # of one phase, after which a process shows its stacks and ends

Interval = tuple[float, float]  # on the monotonic clock


class Setup(NamedTuple):
    """Options of both processes.

    Attributes:
        slice_bytes: of one region in one layer of a block.
        gpus: of the sender, and of the receiver.
        gemm: run matrix products beside transfers.
        bulk: use bulk copies.
        cases: CTAs and bytes of a launch of each row.
    """

    slice_bytes: int
    gpus: tuple[int, int]
    gemm: bool
    bulk: bool
    cases: list[tuple[int, int]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "peers_gpu.json")
    parser.add_argument("--slices", type=int, nargs="*", default=SLICES_KIB, help="in KiB")
    parser.add_argument("--ctas", type=int, nargs="*", default=CTAS)
    parser.add_argument(
        "--batches", type=int, nargs="*", default=BATCHES_MIB, help="MiB of a launch"
    )
    parser.add_argument("--gemm", action="store_true")
    parser.add_argument("--registers", action="store_true", help="without bulk copies")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), help="sender, receiver")
    args = parser.parse_args()
    results: dict[str, Any] = {"slices": {}}
    run = harness.Run(machine=harness.machine(), benches={"peers_gpu": results})
    begin = time.perf_counter()
    batches = [mib * MIB for mib in args.batches]
    cases = list(itertools.product(args.ctas, batches))
    for kib in args.slices:
        setup = Setup(kib * KIB, args.gpus, args.gemm, not args.registers, cases)
        row = measure(setup)
        run.machine["gpu"] = row.pop("gpu")
        results["slices"][f"{kib}_kib"] = row
        harness.save(run, args.out)
        print(f"{kib} KiB at {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    Console(width=160, highlight=False).print(*tables(results))
    return 0


def measure(setup: Setup) -> dict[str, Any]:
    """Run a sender and a receiver process; return what they measured."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    answers, report = context.Pipe(duplex=False)
    receiver = context.Process(target=receive, args=(ends[1], setup), daemon=True)
    sender = context.Process(target=send, args=(ends[0], report, setup), daemon=True)
    receiver.start()
    sender.start()
    for end in (*ends, report):
        end.close()  # a process that ended closes the last copy
    try:
        row: dict[str, Any] = answers.recv()
    except EOFError:
        raise SystemExit("a process failed: see its traceback above") from None
    receiver.join()
    sender.join()
    return row


# --- both processes -----------------------------------------------------------------------------


class Pool:
    """Device blocks with bytes that both processes know, and slots."""

    def __init__(self, setup: Setup, *, is_sender: bool) -> None:
        import cupy

        gpu = setup.gpus[0 if is_sender else 1]
        slice_bytes = setup.slice_bytes
        self.cupy, self.gpu, self._bulk = cupy, gpu, setup.bulk
        cupy.cuda.Device(gpu).use()
        self.num_blocks = TRANSFER_BYTES // (LAYERS * 2 * slice_bytes)
        self.pool = 2 * self.num_blocks
        self.regions = Regions(num_layers=LAYERS)
        self.tensors = [cupy.empty((self.pool, slice_bytes), cupy.uint8) for _ in range(2 * LAYERS)]
        if is_sender:
            for index, tensor in enumerate(self.tensors):
                tensor[:] = content(cupy, index, self.pool, slice_bytes)
        self.regions.add("k", layers=self.tensors[:LAYERS])
        self.regions.add("v", layers=self.tensors[LAYERS:])
        self.block_bytes = self.regions.payload_bytes
        self.slot_bytes = device_slot_bytes(self.block_bytes)
        self.num_slots = RING_BYTES // self.block_bytes
        self.batch = self.num_slots
        self.arena = DeviceArena(gpu, num_blocks=self.num_slots, pitch_bytes=self.slot_bytes)
        random = np.random.default_rng(SEED + is_sender)
        self.ids = random.permutation(self.pool)[: self.num_blocks].astype(np.int32)
        self.keys = np.random.default_rng(SEED).bytes(32 * self.num_blocks)
        cupy.cuda.Device().synchronize()

    def slots(self, ctas: int) -> CudaSlots:
        return CudaSlots(
            self.cupy,
            self.regions,
            slice_layout(self.regions),
            self.arena,
            ctas=ctas,
            bulk=self._bulk,
        )

    def use(self, batch_bytes: int) -> None:
        """Move so many bytes per launch."""
        self.batch = min(max(batch_bytes // self.block_bytes, 1), self.num_slots // 2)

    @property
    def batches_in_ring(self) -> int:
        return self.num_slots // self.batch

    @property
    def num_batches(self) -> int:
        return self.num_blocks // self.batch

    def batch_ids(self, number: int) -> NDArray[np.int32]:
        return self.ids[number * self.batch : (number + 1) * self.batch]

    def batch_slots(self, number: int) -> NDArray[np.int32]:
        first = number % self.batches_in_ring * self.batch
        return np.arange(first, first + self.batch, dtype=np.int32)

    def batch_keys(self, number: int) -> bytes:
        return self.keys[32 * number * self.batch : 32 * (number + 1) * self.batch]


def content(cupy: Any, index: int, blocks: int, slice_bytes: int) -> Any:
    """Bytes of a tensor of the sender: a hash of the address of each word."""
    words = cupy.arange(blocks * slice_bytes // 8, dtype=cupy.uint64)
    words *= cupy.uint64(0x9E3779B97F4A7C15)
    words ^= words >> cupy.uint64(29)
    words += cupy.uint64(index)
    words *= cupy.uint64(0xBF58476D1CE4E5B9)
    return words.view(cupy.uint8).reshape(blocks, slice_bytes)


def rate(seconds: list[float], num_bytes: int) -> float:
    return num_bytes / statistics.median(seconds) / 1e9


def pass_rate(pool: Pool, slots: CudaSlots, *, is_sender: bool) -> float:
    """Rate of the kernel of one side alone, GB/s of payload."""
    ids, arena_slots = pool.ids[: pool.batch], pool.batch_slots(0)
    keys = pool.batch_keys(0)
    num_bytes = pool.batch * pool.block_bytes
    call: Callable[[], SlotCopy] = partial(slots.scatter_verified, arena_slots, ids, keys)
    if is_sender:
        call = partial(slots.gather, ids, arena_slots, keys)
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        works = [call() for _ in range(8)]
        for work in works:
            work.layer_events[0].synchronize()
        times.append((time.perf_counter() - begin) / 8)
    return rate(times[1:], num_bytes)


def note(who: str, what: str) -> None:
    """Print progress; a process that prints nothing for a while shows its stacks, and ends."""
    print(f"{time.monotonic():.3f} {who}: {what}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)


class Gemms(threading.Thread):
    """Matrix products without a pause, and when each ended on the clock of all processes."""

    def __init__(self, gpu: int) -> None:
        super().__init__(name="gemms")
        self._gpu = gpu
        self._stop_now = threading.Event()
        self.running = threading.Event()
        self.ends: list[float] = []

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.running.set()

    def _run(self) -> None:
        import torch

        torch.cuda.set_device(self._gpu)
        a = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
        b, out = torch.randn_like(a), torch.empty_like(a)
        stream = torch.cuda.Stream()
        events: list[Any] = []
        with torch.cuda.stream(stream):
            torch.mm(a, b, out=out)
            stream.synchronize()
            first = torch.cuda.Event(enable_timing=True)
            first.record()
            first.synchronize()
            begin = time.monotonic()
            while not self._stop_now.is_set():
                torch.mm(a, b, out=out)
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
                if len(events) > 32:
                    events[-32].synchronize()
                    self.running.set()
            stream.synchronize()
        self.ends = [begin + first.elapsed_time(event) / 1e3 for event in events]

    def stop(self) -> list[float]:
        self._stop_now.set()
        self.join()
        return self.ends


def beside(ends: list[float], intervals: list[Interval]) -> list[float]:
    """Seconds of the matrix products that began and ended within one interval."""
    return [
        end - begin
        for begin, end in itertools.pairwise(ends)
        if any(first <= begin and end <= last for first, last in intervals)
    ]


# --- receiver -----------------------------------------------------------------------------------


def receive(pipe: Connection, setup: Setup) -> None:
    note("receiver", f"begins on GPU {setup.gpus[1]}")
    pool = Pool(setup, is_sender=False)
    pipe.send((pool.arena.handle, pool.ids))
    sources = pipe.recv()
    gemms: Gemms | None = None
    slots = pool.slots(8)
    while True:
        command, argument = pipe.recv()
        note("receiver", f"{command} {argument}")
        if command == "use":
            slots.close()
            slots = pool.slots(argument[0])
            pool.use(argument[1])
            pipe.send("ready")
        elif command == "pass":
            pipe.send(pass_rate(pool, slots, is_sender=False))
        elif command == "transfer":
            pipe.send(take(pipe, pool, slots))
        elif command == "check":
            pipe.send(differing(pool, sources))
        elif command == "gemms":
            gemms = Gemms(pool.gpu)
            gemms.start()
            gemms.running.wait()
            pipe.send("ready")
        elif command == "gemms end" and gemms is not None:
            pipe.send(gemms.stop())
        elif command == "end":
            slots.close()
            pipe.send("ended")
            pipe.recv()  # the sender has unmapped the memory
            pool.arena.close()
            return


def take(pipe: Connection, pool: Pool, slots: CudaSlots) -> int:
    """Receive batches until all are in device blocks; return how many slots were wrong."""
    pending: deque[tuple[int, SlotCopy]] = deque()
    done = wrong = 0
    while done < pool.num_batches:
        while pipe.poll():
            number = pipe.recv()
            ids, landing = pool.batch_ids(number), pool.batch_slots(number)
            work = slots.scatter_verified(landing, ids, pool.batch_keys(number))
            pending.append((number, work))
        while pending and pending[0][1].layer_events[0].done:
            number, work = pending.popleft()
            wrong += sum(result != 0 for result in work.results)
            done += 1
            pipe.send(number)
    return wrong


def differing(pool: Pool, sources: NDArray[np.int32]) -> int:
    """Compare all blocks with those of the sender; return how many bytes differ."""
    total = 0
    cupy = pool.cupy
    for index, tensor in enumerate(pool.tensors):
        wanted = content(cupy, index, *tensor.shape)
        count = pool.num_batches * pool.batch
        targets = cupy.asarray(pool.ids[:count])
        total += int((tensor[targets] != wanted[cupy.asarray(sources[:count])]).sum())
    return total


# --- sender -------------------------------------------------------------------------------------


class Sender:
    """Sends batches through mapped landing slots."""

    def __init__(self, pipe: Connection, pool: Pool, handle: bytes) -> None:
        from aiokv import _native

        cuda: Any = vars(_native)["cuda"]
        self.pipe, self.pool = pipe, pool
        self.landing = cuda.MappedMemory(pool.gpu, handle)
        self.copies = cuda.PeerCopies(pool.gpu)

    def ask(self, command: str, argument: Any = None) -> Any:
        self.pipe.send((command, argument))
        return self.pipe.recv()

    def plain(self) -> float:
        """Seconds of a plain copy of the bytes of a transfer."""
        pool = self.pool
        size = pool.num_slots * pool.slot_bytes
        total = pool.num_batches * pool.batch * pool.block_bytes
        sizes = [size] * (total // size) + ([total % size] if total % size else [])
        begin = time.perf_counter()
        works = [
            self.copies.copy([(self.landing.address, pool.arena.pointer, part)]) for part in sizes
        ]
        works[-1].synchronize()
        return time.perf_counter() - begin

    def begin(self, slots: CudaSlots, number: int) -> Any:
        """Begin to send a batch; return the end of its work."""
        pool = self.pool
        slot_ids = pool.batch_slots(number)
        gathered = slots.gather(pool.batch_ids(number), slot_ids, pool.batch_keys(number))
        offset = int(slot_ids[0]) * pool.slot_bytes
        span = pool.batch * pool.slot_bytes
        place = (self.landing.address + offset, pool.arena.pointer + offset, span)
        return self.copies.copy([place], gathered.layer_events[0])

    def transfer(self, slots: CudaSlots) -> tuple[float, int]:
        """Send all batches; return the seconds until all were acknowledged, and wrong slots."""
        pool, pipe = self.pool, self.pipe
        begin = time.perf_counter()
        pipe.send(("transfer", None))
        works: deque[tuple[int, Any]] = deque()
        submitted = acknowledged = 0
        while acknowledged < pool.num_batches:
            if submitted < pool.num_batches and submitted - acknowledged < pool.batches_in_ring:
                works.append((submitted, self.begin(slots, submitted)))
                submitted += 1
            while works and works[0][1].done:
                pipe.send(works.popleft()[0])
            while acknowledged < pool.num_batches and pipe.poll():
                pipe.recv()
                acknowledged += 1
        seconds = time.perf_counter() - begin
        return seconds, pipe.recv()


def send(pipe: Connection, report: Connection, setup: Setup) -> None:
    gpu = setup.gpus[0]
    note("sender", f"begins on GPU {gpu}")
    pool = Pool(setup, is_sender=True)
    note("sender", "has filled its blocks")
    handle, _ = pipe.recv()
    pipe.send(pool.ids)
    sender = Sender(pipe, pool, handle)
    note("sender", "has mapped the slots of the receiver")
    name = pool.cupy.cuda.runtime.getDeviceProperties(gpu)["name"].decode()
    row: dict[str, Any] = {
        "gpu": name,
        "block_bytes": pool.block_bytes,
        "slot_bytes": pool.slot_bytes,
        "cases": [],
    }
    for ctas, batch_bytes in setup.cases:
        slots = pool.slots(ctas)
        pool.use(batch_bytes)
        sender.ask("use", (ctas, batch_bytes))
        moved = pool.num_batches * pool.batch * pool.block_bytes
        entry: dict[str, Any] = {
            "ctas": ctas,
            "launch_bytes": pool.batch * pool.block_bytes,
        }
        entry["gather_sealed_gbps"] = pass_rate(pool, slots, is_sender=True)
        entry["scatter_verified_gbps"] = sender.ask("pass")
        plain = rate([sender.plain() for _ in range(ROUNDS)][1:], moved)
        entry["plain_gbps"] = plain
        times, wrong = zip(*[sender.transfer(slots) for _ in range(ROUNDS)], strict=True)
        entry["moved_gbps"] = rate(list(times)[1:], moved)
        entry["moved_ratio"] = entry["moved_gbps"] / plain
        entry["wrong_slots"] = sum(wrong)
        entry["differing_bytes"] = sender.ask("check")
        if setup.gemm and importlib.util.find_spec("torch") is not None:
            entry |= with_gemms(sender, slots, gpu, moved)
        note("sender", f"{entry}")
        row["cases"].append(entry)
        slots.close()
    sender.ask("end")
    sender.copies.close()
    sender.landing.close()
    pipe.send("unmapped")
    report.send(row)
    faulthandler.cancel_dump_traceback_later()


def with_gemms(sender: Sender, slots: CudaSlots, gpu: int, moved: int) -> dict[str, float]:
    """Times of matrix products on both GPUs with transfers beside them, over those without."""
    gemms = Gemms(gpu)
    gemms.start()
    gemms.running.wait()
    sender.ask("gemms")
    found: dict[str, float] = {}
    intervals: dict[str, tuple[list[Interval], list[Interval]]] = {}
    moves: dict[str, Callable[[], float]] = {
        "moved": lambda: sender.transfer(slots)[0],
        "plain": sender.plain,
    }
    for name, move in moves.items():
        busy, idle = intervals[name] = ([], [])
        rates = []
        for _ in range(GEMM_CYCLES):
            begin = time.monotonic()
            time.sleep(OFF_SECONDS)
            end = time.monotonic()
            idle.append((begin + OFF_SECONDS / 4, end))
            rates += [rate([move()], moved) for _ in _until(end + ON_SECONDS)]
            busy.append((end + ON_SECONDS / 4, time.monotonic()))
        found[f"{name}_beside_gemm_gbps"] = statistics.median(rates)
    ends = {"sender": gemms.stop(), "receiver": sender.ask("gemms end")}
    for (name, (busy, idle)), (side, times) in itertools.product(intervals.items(), ends.items()):
        with_moves, without = beside(times, busy), beside(times, idle)
        if with_moves and without:
            alone = statistics.mean(without)
            found[f"gemm_{side}_ms"] = 1e3 * alone
            found[f"gemm_beside_{name}_{side}_slowdown"] = statistics.mean(with_moves) / alone
    return found


def _until(end: float) -> Iterator[None]:
    while time.monotonic() < end:
        yield


# --- tables -------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[Table]:
    columns = {
        "moved_gbps": "moved GB/s",
        "plain_gbps": "plain GB/s",
        "moved_ratio": "ratio",
        "gather_sealed_gbps": "gather+seal",
        "scatter_verified_gbps": "verify+scatter",
        "moved_beside_gemm_gbps": "GB/s by GEMM",
        "gemm_beside_moved_sender_slowdown": "GEMM sender",
        "gemm_beside_moved_receiver_slowdown": "GEMM receiver",
        "gemm_beside_plain_sender_slowdown": "plain sender",
        "gemm_beside_plain_receiver_slowdown": "plain receiver",
        "wrong_slots": "wrong",
        "differing_bytes": "differ",
    }
    table = Table("slice", "CTAs", "MiB", *columns.values(), title="random blocks, GPU to GPU")
    for slice_name, row in results["slices"].items():
        for entry in row["cases"]:
            cells = [f"{entry[key]:.4g}" if key in entry else "-" for key in columns]
            mib = f"{entry['launch_bytes'] / MIB:g}"
            table.add_row(slice_name, str(entry["ctas"]), mib, *cells)
    return [table]


if __name__ == "__main__":
    sys.exit(main())
