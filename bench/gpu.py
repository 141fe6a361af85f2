"""Bandwidth of the cuda device, and the slowdown of compute that runs beside transfers.

``python -m bench.gpu`` prints one table and writes JSON. Every row is compared with a contiguous
``cudaMemcpyAsync`` of the same bytes, measured just before it. Baselines copy a part of the same
blocks slice by slice: one memcpy per slice, one batch, and a kernel with one warp per slice.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aiokv.base.plan import OFFLOAD, ONLOAD
from bench import gpu_wakeup, harness
from bench.gpu_native import checked, library
from bench.gpu_pools import GIB, HISTOGRAM, LAYERS, GpuPools

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.worker.device.cuda import CudaCopy

KIB, MIB = 1 << 10, 1 << 20
SLICES_KIB = (128, 32, 16, 4)
ROUNDS = 5
BASELINE_BYTES = 256 * MIB
GEMM_PHASE, GEMM_CYCLES = 60, 6  # GEMMs with or without transfers, and how often
OTHERS = ("vllm", "sgl_kernel", "lmcache")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--slices", type=int, nargs="*", default=SLICES_KIB)
    parser.add_argument("--layouts", nargs="*")
    parser.add_argument("--quick", action="store_true", help="skip baselines and wake-ups")
    args = parser.parse_args()
    out = args.out or harness.RESULTS / f"gpu-{gpu_name()}.json"
    layouts = args.layouts or ["random", "runs64", *(["replay"] if HISTOGRAM.exists() else [])]
    results: dict[str, Any] = {"transfers": {}}
    run = harness.Run(machine=machine(), benches={"gpu": results})

    def note(what: str) -> None:
        harness.save(run, out)  # keep results measured so far if a later part fails
        print(f"bench.gpu: {what} at {time.perf_counter() - begin:.0f} s", file=sys.stderr)

    begin = time.perf_counter()
    for kib in args.slices:
        pools = GpuPools(kib * KIB)
        note(f"pools of {kib} KiB slices")
        for layout in layouts:
            results["transfers"][f"{kib}_kib.{layout}"] = measure_row(pools, layout)
            note(f"{kib} KiB {layout}")
        if not args.quick:
            results.setdefault("baselines", {})[f"{kib}_kib"] = measure_baselines(pools)
        pools.close()
    if not args.quick:
        results["others"] = {name: _availability(name) for name in OTHERS}
        results["arena"] = measure_arena()
        note("arena")
        results["wakeup"] = {}
        for name, measured in gpu_wakeup.run():
            results["wakeup"][name] = measured
            note(name)
    Console(width=200, highlight=False).print(*tables(results))
    return 0


def gpu_name() -> str:
    """Return the name of the GPU as in result files: ``h100``, ``h200``, ``a10g``, ..."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode().lower()
    return str(name.removeprefix("nvidia ").split()[0])


def machine() -> dict[str, str]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return harness.machine() | {
        "gpu": properties["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cupy": cupy.__version__,
    }


def _availability(package: str) -> str:
    return "installed, not run" if importlib.util.find_spec(package) else "not installed"


# --- one row ----------------------------------------------------------------------------------


def measure_row(pools: GpuPools, layout: str) -> dict[str, Any]:
    host_ids, device_ids = pools.host_ids(layout, 1), pools.device_ids(2)
    count = min(len(host_ids), len(device_ids))
    host_ids, device_ids = host_ids[:count], device_ids[:count]
    num_bytes = count * pools.arena.pitch_bytes
    unused_host = np.setdiff1d(np.arange(2 * pools.num_blocks, dtype=np.int32), host_ids)
    other_host = unused_host[:count]
    if layout == "random":
        other_host = np.random.default_rng(3).permutation(other_host)
    unused_device = np.setdiff1d(np.arange(2 * pools.num_blocks, dtype=np.int32), device_ids)
    both = min(len(other_host), len(unused_device), count)

    def onload() -> list[CudaCopy]:
        return [pools.device.copy(ONLOAD, host_ids, device_ids, None)]

    def offload() -> list[CudaCopy]:
        return [pools.device.copy(OFFLOAD, device_ids, host_ids, None)]

    def duplex() -> list[CudaCopy]:
        return [
            pools.device.copy(ONLOAD, host_ids[:both], device_ids[:both], None),
            pools.device.copy(OFFLOAD, unused_device[:both], other_host[:both], None),
        ]

    contiguous = Contiguous(pools)
    row: dict[str, Any] = {"gib": num_bytes / GIB, "mean_run": _mean_run(host_ids)}
    for name, move, moved in (
        ("onload", onload, num_bytes),
        ("offload", offload, num_bytes),
        ("both", duplex, 2 * both * pools.arena.pitch_bytes),
    ):
        yardstick = contiguous.gbps(name)
        seconds, cpu, call = zip(*[_timed(pools, move) for _ in range(ROUNDS + 1)][1:], strict=True)
        row[f"{name}_gbps"] = moved / statistics.median(seconds) / 1e9
        row[f"{name}_contiguous_gbps"] = yardstick
        row[f"{name}_ratio"] = row[f"{name}_gbps"] / yardstick
        row[f"{name}_submit_cpu_ms"] = statistics.median(cpu) * 1e3 * (2 * GIB / moved)
        row[f"{name}_loop_call_ms"] = statistics.median(call) * 1e3
        row[f"{name}_loop_call_max_ms"] = max(call) * 1e3
    row |= _first_layer(pools, onload)
    row |= {f"gemm_beside_{name}_ratio": ratio for name, ratio in _gemms(onload, offload, duplex)}
    return row


def _mean_run(ids: np.ndarray) -> float:
    ordered = np.sort(ids)
    return len(ids) / (1 + int((np.diff(ordered) != 1).sum()))


def _finish(copies: list[CudaCopy]) -> None:
    for copy in copies:
        copy.layer_events[-1].synchronize()
        if (error := copy.error()) is not None:
            raise RuntimeError(error.reason)


def _timed(pools: GpuPools, move: Callable[[], list[CudaCopy]]) -> tuple[float, float, float]:
    """Return seconds to the last layer, CPU seconds of submitting threads, seconds of the call."""
    cpu = pools.device.submit_cpu_seconds
    own = time.thread_time()
    started = time.perf_counter()
    copies = move()
    called = time.perf_counter() - started
    own = time.thread_time() - own
    _finish(copies)
    return time.perf_counter() - started, pools.device.submit_cpu_seconds - cpu + own, called


class Contiguous:
    """Return the baseline: the host pool in one piece, in as few calls as registration allows."""

    def __init__(self, pools: GpuPools) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._pools = pools
        self._chunk = pools.device.options.register_chunk_bytes
        self._buffers = [cupy.empty(self._chunk, cupy.uint8) for _ in range(2)]
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def gbps(self, name: str) -> float:
        directions = {"onload": (0,), "offload": (1,), "both": (0, 1)}[name]
        times = [self._once(directions) for _ in range(4)][1:]
        return len(directions) * self._pools.transfer_bytes / statistics.median(times) / 1e9

    def _once(self, directions: tuple[int, ...]) -> float:
        started = time.perf_counter()
        for offset in range(0, self._pools.transfer_bytes, self._chunk):
            for direction in directions:  # disjoint halves of the pool
                host = self._pools.arena.pointer + offset + direction * self._pools.transfer_bytes
                device = self._buffers[direction].data.ptr
                to, source = (device, host) if direction == 0 else (host, device)
                self._runtime.memcpyAsync(
                    to, source, self._chunk, 1 + direction, self._streams[direction].ptr
                )
        for direction in directions:
            self._streams[direction].synchronize()
        return time.perf_counter() - started


def _first_layer(pools: GpuPools, onload: Callable[[], list[CudaCopy]]) -> dict[str, Any]:
    shares = []
    for _ in range(3):
        started = time.perf_counter()
        (copy,) = onload()
        while not copy.layer_events[0].done:
            pass
        first = time.perf_counter() - started
        _finish([copy])
        shares.append(first / (time.perf_counter() - started))
    groups = copy.group_paths()
    return {
        "first_group_layers": groups[0][1],
        "first_group_share": statistics.median(shares),
        "first_group_share_allowed": (groups[0][1] + 1) / LAYERS,
        "groups": " ".join(f"{end - first}{path[0]}" for first, end, path in groups),
    }


def _gemms(*moves: Callable[[], list[CudaCopy]]) -> list[tuple[str, float]]:
    """Return the mean time of a bf16 GEMM beside transfers divided by its mean time alone.

    The GEMMs never stop, transfers come and go beside them: a GPU that rested runs faster for a
    while, and its clock then follows its power.
    """
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    stream = torch.cuda.Stream()
    found = []
    for name, move in zip(("onload", "offload", "both"), moves, strict=True):
        total = GEMM_PHASE * (2 * GEMM_CYCLES + 2)
        with torch.cuda.stream(stream):
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(total)]
            for end in ends:
                torch.mm(a, b, out=out)
                end.record()
        times: dict[bool, list[float]] = {False: [], True: []}
        first = GEMM_PHASE  # warm
        ends[first].synchronize()
        for phase in range(2 * GEMM_CYCLES):
            beside = phase % 2 == 1
            transfers = _Transfers(move) if beside else None
            last = first + GEMM_PHASE
            ends[last].synchronize()
            if transfers is not None:
                transfers.stop()
            settled = first + GEMM_PHASE // 4
            times[beside].append(ends[settled].elapsed_time(ends[last]) / (last - settled))
            first = last
        stream.synchronize()
        found.append((name, statistics.mean(times[True]) / statistics.mean(times[False])))
    return found


class _Transfers:
    """Transfers back to back from a thread: one is running and the next one is submitted."""

    def __init__(self, move: Callable[[], list[CudaCopy]]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(move,))
        self._thread.start()

    def _run(self, move: Callable[[], list[CudaCopy]]) -> None:
        previous = move()
        while not self._stop.is_set():
            following = move()
            _finish(previous)
            previous = following
        _finish(previous)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


# --- baselines --------------------------------------------------------------------------------


def measure_baselines(pools: GpuPools) -> dict[str, float]:
    """Return GB/s of three baseline copies of single slices of random blocks."""
    import cupy

    size = pools.slice_bytes
    slices = BASELINE_BYTES // size
    blocks = max(1, slices // LAYERS)
    host_ids, device_ids = pools.host_ids("random", 5), pools.device_ids(6)
    host, device = [], []
    for layer in range(LAYERS):  # as a per-layer swap of the K region would
        offset = pools.regions.host_offset(layer, "k")
        base = pools.tensors["k"][layer].data.ptr
        for i in range(min(blocks, len(host_ids))):
            host.append(pools.arena.pointer + int(host_ids[i]) * pools.arena.pitch_bytes + offset)
            device.append(base + int(device_ids[i]) * size)
    hosts, devices = np.array(host, np.uint64), np.array(device, np.uint64)
    on_gpu = cupy.asarray(hosts), cupy.asarray(devices)
    stream = cupy.cuda.Stream(non_blocking=True)
    count, native = len(hosts), library()
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    found = {}
    for direction in ("onload", "offload"):
        to, source = (devices, hosts) if direction == "onload" else (hosts, devices)
        gpu_to, gpu_source = on_gpu[::-1] if direction == "onload" else on_gpu
        plain = (to.ctypes.data, source.ctypes.data, count, size, stream.ptr)
        mapped = (gpu_to.data.ptr, gpu_source.data.ptr, count, size, sms, stream.ptr)
        for name, way, arguments in (
            ("memcpy_each", native.copy_each, plain),
            ("memcpy_batch", native.copy_batch, plain),
            ("warp_a_slice", native.copy_warps, mapped),
        ):
            times = []
            for _ in range(3):
                started = time.perf_counter()
                checked(way(*arguments))
                stream.synchronize()
                times.append(time.perf_counter() - started)
            found[f"{direction}_{name}_gbps"] = count * size / min(times) / 1e9
    return found


def measure_arena() -> dict[str, float]:
    """Measure touching and pinning of new memory in the background, with the default chunks."""
    from aiokv import _native
    from aiokv.worker.arena import HostArena

    arena = HostArena(num_blocks=16, pitch_bytes=GIB)
    registration = _native.cuda.HostRegistration(arena.pointer, arena.nbytes, device=0)
    registration.wait_ready(1)
    usable = registration.elapsed_seconds
    registration.wait_ready(arena.nbytes)
    seconds = registration.elapsed_seconds
    registration.close()
    arena.close()
    return {"gib": 16.0, "gbps": 16 * GIB / seconds / 1e9, "first_chunk_ms": usable * 1e3}


# --- the table --------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[Table]:
    transfers = Table(
        "block size and ids", title="transfers; memcpy = contiguous cudaMemcpyAsync in the same run"
    )
    columns = {
        "onload_ratio": "onload / memcpy",
        "offload_ratio": "offload / memcpy",
        "both_ratio": "both / memcpy",
        "onload_gbps": "onload GB/s",
        "offload_gbps": "offload GB/s",
        "both_gbps": "both GB/s",
        "gemm_beside_onload_ratio": "GEMM slowdown, onload",
        "gemm_beside_offload_ratio": "GEMM slowdown, offload",
        "gemm_beside_both_ratio": "GEMM slowdown, both",
        "onload_submit_cpu_ms": "submit CPU, onload (ms)",
        "offload_submit_cpu_ms": "submit CPU, offload (ms)",
        "onload_loop_call_max_ms": "longest loop call (ms)",
        "first_group_share": "time to first group / total",
        "groups": "layers per group",
    }
    for title in columns.values():
        transfers.add_column(title, justify="right")
    for name, row in results["transfers"].items():
        values = [row.get(key, "") for key in columns]
        transfers.add_row(name, *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values))
    rest = Table("metric", "value")
    for key in ("baselines", "arena", "wakeup"):
        for metric, value in harness.flatten(results.get(key, {}), f"{key}.").items():
            rest.add_row(metric, f"{value:.4g}")
    return [transfers, rest]


if __name__ == "__main__":
    sys.exit(main())
