"""Checks of the GPUs: driver, compute capability, NUMA node, PCIe link and measured speed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from aiokv.base.units import format_bytes
from aiokv.doctor.findings import Finding, missing, ok, slow
from aiokv.doctor.machine import GPU_PROBE, ProbeError
from aiokv.doctor.software import format_cuda
from aiokv.doctor.system import numa_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.doctor.machine import Machine

_T = TypeVar("_T", bound=msgspec.Struct)

LIST_SECONDS: Final = 30.0  # the driver starts the GPUs, which takes seconds without persistence
COPY_SECONDS: Final = 60.0

# Bandwidth of one lane in one direction, in bytes per second, without line coding.
LANE_BYTES: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_GENERATIONS: Final = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
SLOW_COPIES: Final = (
    "end other users of the link, bind the process to the GPU's NUMA node, and turn off the IOMMU "
    "or set it to passthrough (iommu=pt)"
)
EXPECTED_SHARE: Final = 0.75  # share of the link's rate; packet headers take the rest


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as the driver describes it."""

    ordinal: int
    name: str
    compute: tuple[int, int]
    memory_bytes: int
    pci_address: str


class Gpus(msgspec.Struct, frozen=True):
    """The CUDA version that the driver supports, and the GPUs that the process can use."""

    cuda: int
    gpus: list[Gpu]


class PcieLink(msgspec.Struct, frozen=True):
    """PCIe link of a GPU: now, and the most that the GPU can have."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    @property
    def bytes_per_second(self) -> float:
        """Speed in one direction."""
        return LANE_BYTES.get(self.generation, LANE_BYTES[6]) * self.width


class Copies(msgspec.Struct, frozen=True):
    """Measured speed by direction, and the link while it was busy."""

    bytes_per_second: dict[str, float]
    link: PcieLink | None


def check_gpus(machine: Machine, *, measure: bool = True) -> Iterator[Finding]:
    """Check the driver and each GPU.

    Args:
        machine: what to look at.
        measure: False to skip the copies.
    """
    version = machine.read("proc/driver/nvidia/version") or ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", version)
    try:
        gpus = _ask(machine, Gpus, LIST_SECONDS, "list")
    except ProbeError as error:
        advice = "install the NVIDIA driver; in a container: docker run --gpus all"
        if found:
            advice = f"driver {found[1]} is loaded: see nvidia-smi and the kernel's log"
        yield missing("GPU driver", str(error), advice)
        return
    text = f"{found[1]}, " if found else ""
    yield from _check_driver(machine, f"{text}CUDA {format_cuda(gpus.cuda)}", gpus.cuda)
    if not gpus.gpus:
        yield missing("GPU", "the process can use none", "check CUDA_VISIBLE_DEVICES")
    for gpu in gpus.gpus:
        yield from _check_gpu(machine, gpu)
        if measure:
            yield from _check_copies(machine, gpu)


def _check_driver(machine: Machine, text: str, cuda: int) -> Iterator[Finding]:
    extension = getattr(machine.native, "cuda", None)
    built = 0 if extension is None else extension.runtime_version()
    is_new = built // 1000 <= cuda // 1000
    found = text if is_new else f"{text}; aiokv was built with CUDA {format_cuda(built)}"
    advice = "update the driver, or build aiokv with an older CUDA"
    yield missing("GPU driver", found, advice, unless=is_new)


def _check_gpu(machine: Machine, gpu: Gpu) -> Iterator[Finding]:
    compute = f"{gpu.compute[0]}.{gpu.compute[1]}"
    text = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {compute}"
    name = f"GPU {gpu.ordinal}"
    built = machine.native.build_info()["cuda_architectures"]
    if built and not has_code_for(built, gpu.compute):
        yield missing(
            name,
            f"{text}; the native extension has code for {built.replace(',', ', ')}",
            f"build aiokv with CUDAARCHS={compute.replace('.', '')}, or use another GPU",
        )
    else:
        yield ok(name, text)
    node = machine.number(f"sys/bus/pci/devices/{gpu.pci_address}/numa_node")
    nodes = numa_nodes(machine)
    if node is None or node < 0 or len(nodes) < 2:
        return
    is_near = bool(nodes.get(node, frozenset()) & machine.cpus)
    found = f"node {node}" + ("" if is_near else ", but the process runs on other nodes")
    advice = f"numactl --cpunodebind={node} --preferred={node}"
    yield slow(f"{name}, NUMA", found, advice, unless=is_near)


def has_code_for(architectures: str, compute: tuple[int, int]) -> bool:
    """Return True if code for these architectures runs on a GPU.

    Machine code (``80-real``) runs on GPUs of the same major version and of the same or a later
    minor version; PTX (``80``, ``80-virtual``) on all later GPUs, too; ``90a`` on 9.0 alone.

    Args:
        architectures: as ``CMAKE_CUDA_ARCHITECTURES`` has them, separated by commas.
        compute: compute capability of the GPU.
    """
    for architecture in architectures.split(","):
        found = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", architecture.strip())
        if found is None:
            return True  # "native", "all": not known here
        built = int(found[1]), int(found[2])
        if built == compute or (
            not found[3] and built <= compute and (built[0] == compute[0] or found[4] != "real")
        ):
            return True
    return False


def _check_copies(machine: Machine, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.ordinal}"
    try:
        copies = _ask(machine, Copies, COPY_SECONDS, "copy", str(gpu.ordinal))
    except ProbeError as error:
        yield missing(f"{name}, copies", str(error), "free memory of the GPU, then try again")
        return
    link = copies.link or _link_of_files(machine, gpu)
    if link is not None:
        yield _check_link(name, link)
    for direction, speed in copies.bytes_per_second.items():
        text = f"{speed / 1e9:.1f} GB/s"
        line = f"{name}, copies {direction.replace('_', ' ')}"
        if link is None:
            yield ok(line, f"{text}; the PCIe link is unknown")
            continue
        expected = link.bytes_per_second * EXPECTED_SHARE
        text += f" of {link.bytes_per_second / 1e9:.1f} GB/s of the link"
        is_usual = speed >= expected
        text += "" if is_usual else f"; {expected / 1e9:.0f} GB/s or more are usual"
        yield slow(line, text, SLOW_COPIES, unless=is_usual)


def _check_link(name: str, link: PcieLink) -> Finding:
    now = f"generation {link.generation}, x{link.width}"
    if (link.generation, link.width) == (link.max_generation, link.max_width):
        return ok(f"{name}, PCIe link", now)
    return slow(
        f"{name}, PCIe link",
        f"{now}; the GPU can have generation {link.max_generation}, x{link.max_width}",
        "put the GPU in a slot with all lanes, and check riser and firmware settings",
    )


def _link_of_files(machine: Machine, gpu: Gpu) -> PcieLink | None:
    folder = f"sys/bus/pci/devices/{gpu.pci_address}"
    found = {}
    for prefix in ("current", "max"):
        speed = (machine.read(f"{folder}/{prefix}_link_speed") or "").split(" ")[0]
        width = machine.number(f"{folder}/{prefix}_link_width")
        if speed not in _GENERATIONS or not width:
            return None
        found[prefix] = _GENERATIONS[speed], width
    return PcieLink(*found["current"], *found["max"])


def _ask(machine: Machine, kind: type[_T], deadline_seconds: float, *arguments: str) -> _T:
    """Return the answer of the probe.

    Raises:
        ProbeError: it did not answer in time, failed, or answered something else.
    """
    output = machine.run(["-I", GPU_PROBE, *arguments], deadline_seconds)
    try:
        return msgspec.json.decode(output, type=kind)
    except msgspec.DecodeError as error:
        raise ProbeError(f"unexpected answer of the driver: {error}") from error
