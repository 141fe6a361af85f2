"""Checks of the operating system: kernel, memory, pages, limits, NUMA and clock."""

from __future__ import annotations

import re
import resource
from typing import TYPE_CHECKING, Final

from aiokv.base.units import format_bytes, format_seconds
from aiokv.doctor.findings import Finding, missing, ok, slow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.doctor.machine import Machine

MIN_OPEN_FILES: Final = 1024
FAST_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
MAX_CLOCK_SECONDS: Final = 500e-9  # limit of one reading; without a system call, it takes a tenth
_CAP_IPC_LOCK: Final = 1 << 14


def check_kernel(machine: Machine) -> Iterator[Finding]:
    name, is_linux = "operating system", machine.system == "Linux"
    found = f"Linux {machine.release}" if is_linux else machine.system
    yield missing(name, found, "run aiokv on Linux", required=True, unless=is_linux)


def check_processor(machine: Machine) -> Iterator[Finding]:
    info = machine.read("proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    name = f" of {found[1]}" if found else ""
    count = len(machine.cpus)
    text = f"{count} CPU{'s' if count != 1 else ''}{name}"
    advice = "give the process 2 CPUs or more: copies run in threads beside the event loop"
    yield slow("processor", text, advice, unless=count >= 2)


def check_memory(machine: Machine) -> Iterator[Finding]:
    info = machine.read("proc/meminfo") or ""
    sizes = {
        name: int(size) << 10
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB", info, re.MULTILINE)
    }
    available = sizes.get("MemAvailable")
    if available is None:
        yield slow("memory", "unknown: /proc/meminfo cannot be read", "mount /proc")
        return
    text = f"{format_bytes(available)} available of {format_bytes(sizes.get('MemTotal', 0))}"
    limit = machine.number("sys/fs/cgroup/memory.max")
    if limit is not None:
        text += f"; the control group may use {format_bytes(limit)}"
    yield ok("memory", text)


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Check huge pages, with which pinning and copies of host memory are faster."""
    text = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root"
    if text is None:
        yield slow("huge pages", "the kernel has no transparent huge pages", "use such a kernel")
        return
    chosen = re.search(r"\[(\w+)\]", text)
    mode = chosen[1] if chosen else text
    yield slow("huge pages", f"transparent, {mode}", advice, unless=mode in ("always", "madvise"))


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """Check the limit of locked memory, which includes host memory that io_uring keeps mapped."""
    limit = machine.soft_limit(resource.RLIMIT_MEMLOCK)
    status = machine.read("proc/self/status") or ""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if limit == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited")
    elif found and int(found[1], 16) & _CAP_IPC_LOCK:
        yield ok("locked memory", f"limit {format_bytes(limit)}; CAP_IPC_LOCK lifts it")
    else:
        yield slow(
            "locked memory",
            f"limit {format_bytes(limit)}: the disk store cannot keep host memory mapped",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity",
        )


def check_open_files(machine: Machine) -> Iterator[Finding]:
    limit = machine.soft_limit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        yield ok("open files", "unlimited")
        return
    is_enough = limit >= MIN_OPEN_FILES
    text = f"limit {limit:,}" + ("" if is_enough else ": stores and peers need descriptors")
    yield slow("open files", text, f"ulimit -n {MIN_OPEN_FILES} or more", unless=is_enough)


def check_numa(machine: Machine) -> Iterator[Finding]:
    """Check the NUMA nodes: copies are slower from CPUs of another node than that of the GPU."""
    nodes = numa_nodes(machine)
    if len(nodes) < 2:
        yield ok("NUMA", "one node")
        return
    used = sorted(node for node, cpus in nodes.items() if cpus & machine.cpus)
    text = f"{len(nodes)} nodes; the process may run on {', '.join(f'node {n}' for n in used)}"
    advice = "run each server on its GPU's node: numactl --cpunodebind=N --preferred=N"
    yield slow("NUMA", text, advice, unless=len(used) <= 1)


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Check the clock: each transition and transfer reads it, and a slow one enters the kernel."""
    folder = "sys/devices/system/clocksource/clocksource0"
    name = machine.read(f"{folder}/current_clocksource")
    if name is None:
        yield slow("clock", "the clock source is unknown: /sys cannot be read", "mount /sys")
    elif name in FAST_CLOCKS:
        seconds = machine.clock_seconds()
        text = f"{name}, {format_seconds(seconds)} per reading"
        advice = "run without the sandbox or hypervisor that intercepts it"
        yield slow("clock", text, advice, unless=seconds <= MAX_CLOCK_SECONDS)
    else:
        available = (machine.read(f"{folder}/available_clocksource") or "").split()
        better = [clock for clock in FAST_CLOCKS if clock in available]
        advice = "boot with tsc=reliable if the processor has a constant TSC"
        if better:
            advice = f"echo {better[0]} > /{folder}/current_clocksource, as root"
        yield slow("clock", f"{name}: each reading enters the kernel", advice)


def numa_nodes(machine: Machine) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node that has some."""
    nodes = {}
    for path in sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*")):
        try:
            cpus = _cpu_list((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = cpus
    return nodes


def _cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
