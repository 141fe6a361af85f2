"""Checks of a machine, each on files and answers of its own; and the ``doctor`` command."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from aiokv import cli
from aiokv.doctor import gpu, software, system
from aiokv.doctor.examination import examine
from aiokv.doctor.machine import GPU_PROBE, Machine, ProbeError, run_python

if TYPE_CHECKING:
    from aiokv.doctor.findings import Finding

CUDA = SimpleNamespace(runtime_version=lambda: 13000)
INFO = {
    "compiler": "GCC 12.2",
    "type": "Release",
    "optimized": True,
    "cuda_architectures": "80-real,90",
}
VERSIONS = {"aiokv": "1.2", "uvloop": "0.21", "cupy-cuda13x": "14.2", "matplotlib": "3.9"}
H100 = {
    "ordinal": 0,
    "name": "NVIDIA H100",
    "compute": [9, 0],
    "memory_bytes": 80 << 30,
    "pci_address": "0000:3b:00.0",
}
GEN_5 = {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16}
GOOD_FILES = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n",
    "proc/meminfo": "MemTotal:  4194304 kB\nMemAvailable:  2097152 kB\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "proc/sys/kernel/io_uring_disabled": "0\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Module  580.159.04  Release\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}


class FakeQueue:
    """An IoQueue whose backend the test sets."""

    backend = "io_uring"
    reason = ""
    closed = 0

    def __init__(self, entries: int, backend: str) -> None:
        assert backend == "auto"

    def close(self) -> None:
        type(self).closed += 1


class Probes:
    """Answers of the programs that checks run, by their last arguments."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {
            "list": {"cuda": 13000, "gpus": [H100]},
            "copy 0": {
                "bytes_per_second": {"to_device": 55e9, "to_host": 54e9},
                "link": GEN_5,
            },
            "cupy": "1\n",
        }

    def run(self, arguments, deadline_seconds):
        assert 0 < deadline_seconds <= 60
        key = "cupy" if arguments[0] == "-c" else " ".join(arguments[2:])
        answer = self.answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else json.dumps(answer)


@pytest.fixture
def probes():
    return Probes()


@pytest.fixture
def machine(tmp_path, probes):
    """Return a machine on which everything is fine."""
    for path, text in GOOD_FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    FakeQueue.backend, FakeQueue.reason = "io_uring", ""
    return Machine(
        root=tmp_path,
        python="3.12.1",
        system="Linux",
        release="6.8",
        cpus=frozenset(range(4)),
        soft_limit=lambda which: resource.RLIM_INFINITY,
        version=VERSIONS.get,
        run=probes.run,
        native=SimpleNamespace(
            cuda=CUDA,
            sha256_implementation=lambda: "sha instructions",
            IoQueue=FakeQueue,
            build_info=lambda: INFO,
        ),
        open_eventfd=lambda: None,
        clock_seconds=lambda: 40e-9,
    )


def write(machine, path, text):
    (machine.root / path).parent.mkdir(parents=True, exist_ok=True)
    (machine.root / path).write_text(text)


def one(found) -> Finding:
    (finding,) = found
    return finding


def check(finding, status, found, advice=""):
    assert finding.status == status, finding
    assert found in finding.found
    assert advice in finding.advice
    assert bool(finding.advice) == (status != "ok")  # each other line says what to do


def test_a_good_machine_has_no_complaint(machine, probes):
    announced = []
    report = examine(machine, require_gpu=True, announce=announced.append)
    assert report.healthy
    assert [f for f in report.findings if f.status != "ok"] == []
    assert announced == list(report.findings)
    assert FakeQueue.closed > 0
    names = {finding.name for finding in report.findings}
    assert {"GPU 0, PCIe link", "GPU 0, copies to device", "GPU 0, copies to host"} <= names


def test_an_empty_root_and_no_gpu_are_no_failure(machine, tmp_path, probes):
    machine.root = tmp_path / "nothing"
    probes.answers["list"] = ProbeError("libcuda.so.1: cannot open shared object file")
    probes.answers["cupy"] = ProbeError("cudaErrorNoDevice")
    report = examine(machine)
    assert report.healthy
    assert [f.name for f in report.findings if f.status == "missing"] == ["CuPy", "GPU driver"]
    assert [f.name for f in report.findings if f.status == "slow"] == [
        "memory", "huge pages", "clock",
    ]  # fmt: skip
    assert not examine(machine, require_gpu=True).healthy


def test_other_operating_systems_are_refused(machine):
    check(one(system.check_kernel(machine)), "ok", "Linux 6.8")
    machine.system = "Darwin"
    finding = one(system.check_kernel(machine))
    check(finding, "missing", "Darwin", "Linux")
    assert finding.is_fatal
    assert not examine(machine).healthy


def test_processor(machine):
    check(one(system.check_processor(machine)), "ok", "4 CPUs of Some CPU")
    machine.cpus = frozenset([2])
    check(one(system.check_processor(machine)), "slow", "1 CPU of", "2 CPUs or more")


def test_memory_and_the_limit_of_the_control_group(machine):
    check(one(system.check_memory(machine)), "ok", "2.00 GiB available of 4.00 GiB")
    write(machine, "sys/fs/cgroup/memory.max", "max\n")
    assert "control group" not in one(system.check_memory(machine)).found
    write(machine, "sys/fs/cgroup/memory.max", f"{1 << 30}\n")
    check(one(system.check_memory(machine)), "ok", "the control group may use 1.00 GiB")


@pytest.mark.parametrize(
    ("text", "status", "advice"),
    [
        ("[always] madvise never", "ok", ""),
        ("always [madvise] never", "ok", ""),
        ("always madvise [never]", "slow", "echo madvise >"),
    ],
)
def test_huge_pages(machine, text, status, advice):
    write(machine, "sys/kernel/mm/transparent_hugepage/enabled", text)
    check(one(system.check_huge_pages(machine)), status, "transparent", advice)


def test_locked_memory(machine):
    check(one(system.check_locked_memory(machine)), "ok", "unlimited")
    machine.soft_limit = lambda which: 8 << 20 if which == resource.RLIMIT_MEMLOCK else 0
    check(one(system.check_locked_memory(machine)), "slow", "8.00 MiB", "ulimit -l unlimited")
    write(machine, "proc/self/status", "CapEff:\t0000000000004000\n")
    check(one(system.check_locked_memory(machine)), "ok", "CAP_IPC_LOCK")


def test_open_files(machine):
    check(one(system.check_open_files(machine)), "ok", "unlimited")
    machine.soft_limit = lambda which: 1024
    check(one(system.check_open_files(machine)), "ok", "1,024")
    machine.soft_limit = lambda which: 256
    check(one(system.check_open_files(machine)), "slow", "256", "ulimit -n 1024")


def test_numa(machine):
    check(one(system.check_numa(machine)), "ok", "one node")
    write(machine, "sys/devices/system/node/node1/cpulist", "4-5,7\n")
    write(machine, "sys/devices/system/node/node2/cpulist", "\n")  # memory without CPUs
    check(one(system.check_numa(machine)), "ok", "2 nodes; the process may run on node 0")
    machine.cpus = frozenset([0, 7])
    check(one(system.check_numa(machine)), "slow", "node 0, node 1", "numactl")


def test_clock(machine):
    folder = "sys/devices/system/clocksource/clocksource0"
    check(one(system.check_clock(machine)), "ok", "tsc, 40.0 ns per reading")
    machine.clock_seconds = lambda: 2e-6
    check(one(system.check_clock(machine)), "slow", "tsc, 2.00 µs per reading", "sandbox")
    write(machine, f"{folder}/current_clocksource", "hpet\n")
    check(one(system.check_clock(machine)), "slow", "hpet", "tsc=reliable")
    write(machine, f"{folder}/available_clocksource", "hpet tsc acpi_pm\n")
    check(one(system.check_clock(machine)), "slow", "hpet", "echo tsc >")


@pytest.mark.parametrize(("python", "status"), [("3.10.9", "missing"), ("3.11.0", "ok")])
def test_python(machine, python, status):
    machine.python = python
    finding = one(software.check_python(machine))
    check(finding, status, python)
    assert finding.is_fatal == (status == "missing")


def test_build(machine):
    version, build, sha = software.check_build(machine)
    check(version, "ok", "1.2")
    check(build, "ok", "GCC 12.2, Release")
    check(sha, "ok", "sha instructions")
    machine.version = lambda name: None
    machine.native.sha256_implementation = lambda: "portable"
    machine.native.build_info = lambda: INFO | {"type": "Debug", "optimized": False}
    version, build, sha = software.check_build(machine)
    check(version, "slow", "not installed", "pip install")
    check(build, "slow", "Debug, without optimization", "Release")
    check(sha, "slow", "portable", "several times")


def test_the_name_of_the_portable_implementation_is_known():
    """The native extension names it so; see sha256_implementation."""
    from aiokv import _native

    assert _native.sha256_implementation() in ("portable", "sha instructions")


def test_cuda_build(machine):
    check(one(software.check_cuda_build(machine)), "ok", "CUDA 13.0, architectures 80-real, 90")
    del machine.native.cuda
    check(one(software.check_cuda_build(machine)), "missing", "without CUDA", "nvcc")
    assert examine(machine).healthy
    assert not examine(machine, require_gpu=True).healthy


def test_uvloop(machine):
    check(one(software.check_uvloop(machine)), "ok", "0.21")
    machine.version = lambda name: None
    finding = one(software.check_uvloop(machine))
    check(finding, "missing", "not installed", "pip install uvloop")
    assert finding.is_fatal


def test_eventfd(machine):
    check(one(software.check_eventfd(machine)), "ok", "works")

    def refuse():
        raise OSError(errno.EPERM, "Operation not permitted")

    machine.open_eventfd = refuse
    finding = one(software.check_eventfd(machine))
    check(finding, "missing", "Operation not permitted", "seccomp")
    assert finding.is_fatal


def test_io_uring(machine):
    check(one(software.check_io_uring(machine)), "ok", "works")
    FakeQueue.backend, FakeQueue.reason = "threads", "EPERM"
    check(one(software.check_io_uring(machine)), "slow", "EPERM", "seccomp")
    write(machine, "proc/sys/kernel/io_uring_disabled", "2\n")
    check(one(software.check_io_uring(machine)), "slow", "threads", "sysctl")

    def refuse(entries, backend):
        raise OSError(errno.EMFILE, "Too many open files")

    machine.native.IoQueue = refuse
    check(one(software.check_io_uring(machine)), "slow", "Too many open files", "ulimit")


def test_cupy(machine, probes):
    check(one(software.check_cupy(machine)), "ok", "cupy-cuda13x 14.2")
    probes.answers["cupy"] = ProbeError("ImportError: libnvrtc.so.13")
    check(one(software.check_cupy(machine)), "missing", "finds no GPU: ImportError", "cuda13")
    machine.version = lambda name: None
    check(one(software.check_cupy(machine)), "missing", "not installed", "pip install")


def test_extras(machine):
    check(one(software.check_extras(machine)), "ok", "plot; not installed: events")


def test_driver(machine, probes):
    driver, *_ = gpu.check_gpus(machine)
    check(driver, "ok", "580.159.04, CUDA 13.0")
    probes.answers["list"] = {"cuda": 12080, "gpus": []}
    driver, none = gpu.check_gpus(machine)
    check(driver, "missing", "CUDA 12.8; aiokv was built with CUDA 13.0", "update the driver")
    check(none, "missing", "can use none", "CUDA_VISIBLE_DEVICES")
    machine.native.cuda = None
    check(next(iter(gpu.check_gpus(machine))), "ok", "CUDA 12.8")


def test_a_driver_that_does_not_answer(machine, probes):
    probes.answers["list"] = ProbeError("no answer within 30 s")
    check(one(gpu.check_gpus(machine)), "missing", "no answer", "driver 580.159.04 is loaded")
    (machine.root / "proc/driver/nvidia/version").unlink()
    check(one(gpu.check_gpus(machine)), "missing", "no answer", "--gpus all")
    probes.answers["list"] = "Traceback"
    check(one(gpu.check_gpus(machine)), "missing", "unexpected answer", "install")


def test_compute_capability(machine, probes):
    _, found, *_ = gpu.check_gpus(machine)
    check(found, "ok", "NVIDIA H100, 80.0 GiB, compute capability 9.0")
    old = H100 | {"compute": [7, 5]}
    probes.answers["list"] = {"cuda": 13000, "gpus": [old]}
    _, found, *_ = gpu.check_gpus(machine)
    check(
        found,
        "missing",
        "compute capability 7.5; the native extension has code for 80-real",
        "CUDAARCHS=75",
    )
    machine.native.build_info = lambda: INFO | {"cuda_architectures": ""}  # built without CUDA
    _, found, *_ = gpu.check_gpus(machine)
    check(found, "ok", "compute capability 7.5")


@pytest.mark.parametrize(
    ("architectures", "compute", "runs"),
    [
        ("80-real,90", (8, 0), True),
        ("80-real,90", (8, 9), True),
        ("80-real,90", (7, 5), False),
        ("80-real,90", (12, 0), True),
        ("80-real,90-real", (10, 0), False),
        ("86-real", (8, 0), False),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("80-virtual", (9, 0), True),
        ("120", (12, 0), True),
        ("native", (7, 0), True),
    ],
)
def test_code_runs_on_later_gpus(architectures, compute, runs):
    assert gpu.has_code_for(architectures, compute) == runs


def test_the_extension_says_how_it_was_built():
    from aiokv import _native

    info = _native.build_info()
    assert set(info) == set(INFO)
    assert info["type"] in ("Release", "Debug", "Sanitize")
    assert bool(info["cuda_architectures"]) == hasattr(_native, "cuda")


def test_numa_node_of_a_gpu(machine):
    names = [finding.name for finding in gpu.check_gpus(machine)]
    assert "GPU 0, NUMA" not in names
    write(machine, "sys/devices/system/node/node1/cpulist", "4-7\n")
    write(machine, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n")
    found = {finding.name: finding for finding in gpu.check_gpus(machine)}
    check(found["GPU 0, NUMA"], "ok", "node 0")
    machine.cpus = frozenset([5])
    found = {finding.name: finding for finding in gpu.check_gpus(machine)}
    check(found["GPU 0, NUMA"], "slow", "node 0, but", "numactl --cpunodebind=0")


def by_name(machine):
    return {finding.name.removeprefix("GPU 0, "): finding for finding in gpu.check_gpus(machine)}


def test_link_and_speed(machine, probes):
    found = by_name(machine)
    check(found["PCIe link"], "ok", "generation 5, x16")
    check(found["copies to device"], "ok", "55.0 GB/s of 63.0 GB/s of the link")
    probes.answers["copy 0"] = {
        "bytes_per_second": {"to_device": 24e9, "to_host": 12e9},
        "link": GEN_5 | {"generation": 4},
    }
    found = by_name(machine)
    check(found["PCIe link"], "slow", "generation 4, x16; the GPU can have generation 5", "slot")
    check(found["copies to device"], "ok", "24.0 GB/s of 31.5 GB/s")
    check(found["copies to host"], "slow", "12.0 GB/s of 31.5 GB/s of the link; 24 GB/s", "iommu")


def test_the_link_is_read_from_files_where_the_driver_does_not_know_it(machine, probes):
    probes.answers["copy 0"] = {"bytes_per_second": {"to_device": 25e9}, "link": None}
    found = by_name(machine)
    assert "PCIe link" not in found
    check(found["copies to device"], "ok", "25.0 GB/s; the PCIe link is unknown")
    folder = "sys/bus/pci/devices/0000:3b:00.0"
    write(machine, f"{folder}/current_link_speed", "16.0 GT/s PCIe\n")
    write(machine, f"{folder}/current_link_width", "8\n")
    write(machine, f"{folder}/max_link_speed", "16.0 GT/s PCIe\n")
    write(machine, f"{folder}/max_link_width", "16\n")
    found = by_name(machine)
    check(found["PCIe link"], "slow", "generation 4, x8; the GPU can have generation 4, x16")
    check(found["copies to device"], "ok", "25.0 GB/s of 15.8 GB/s")


def test_copies_that_fail_or_are_left_out(machine, probes):
    probes.answers["copy 0"] = ProbeError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
    check(by_name(machine)["copies"], "missing", "OUT_OF_MEMORY", "free memory")
    names = [finding.name for finding in gpu.check_gpus(machine, measure=False)]
    assert names == ["GPU driver", "GPU 0"]


def test_a_program_that_does_not_end_is_killed():
    with pytest.raises(ProbeError, match=r"no answer within 0\.2 s"):
        run_python(["-c", "import signal; signal.pause()"], 0.2)


def test_failures_of_programs_are_told_in_one_line(monkeypatch):
    with pytest.raises(ProbeError, match=r"^ValueError: no$"):
        run_python(["-c", "raise ValueError('no')"], 60)
    with pytest.raises(ProbeError, match="ended by signal 9"):
        run_python(["-c", "import os; os.kill(os.getpid(), 9)"], 60)
    assert run_python(["-c", "print(3)"], 60) == "3\n"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ProbeError, match="cannot start /no/such/python"):
        run_python([], 60)


FAKE_DRIVER = """\
#include <stddef.h>
#include <string.h>
#include <stdlib.h>
int cuInit(unsigned flags) { return 0; }
int cuGetErrorName(int status, const char** name) { *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t* size, int device) { *size = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
    *value = which == 75 ? 9 : 0;
    return 0;
}
int cuDeviceGetPCIBusId(char* text, int length, int device) {
    strcpy(text, "0000:3B:00.0");
    return 0;
}
int cuDeviceGetName(char* text, int length, int device) { strcpy(text, "Fake"); return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemHostAlloc(void** memory, size_t size, unsigned flags) { *memory = malloc(size); return 0; }
int cuMemAlloc_v2(unsigned long long* memory, size_t size) {
    if (getenv("FULL")) return 2;
    *memory = (unsigned long long)malloc(size);
    return 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t size) {
    memcpy((void*)to, from, size);
    return 0;
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t size) {
    memcpy(to, (void*)from, size);
    return 0;
}
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """Build a libcuda.so.1 whose GPU is host memory; skip without a C compiler."""
    import shutil

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(FAKE_DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "fake.c"], check=True
    )
    return folder


@pytest.mark.slow
def test_the_probe_speaks_to_the_driver(fake_driver, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    assert json.loads(run_python(["-I", GPU_PROBE, "list"], 60)) == {
        "cuda": 13000,
        "gpus": [H100 | {"name": "Fake"}],
    }
    copies = json.loads(run_python(["-I", GPU_PROBE, "copy", "0"], 60))
    assert copies["link"] is None
    assert set(copies["bytes_per_second"]) == {"to_device", "to_host"}
    assert all(speed > 0 for speed in copies["bytes_per_second"].values())
    monkeypatch.setenv("FULL", "1")
    with pytest.raises(ProbeError, match=r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        run_python(["-I", GPU_PROBE, "copy", "0"], 60)


def test_the_command_runs_here(capsys, tmp_path):
    """Checks this machine, with a GPU or without."""
    assert cli.main(["doctor", "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["eventfd"]["status"] == found["uvloop"]["status"] == "ok"
    assert cli.main(["doctor", "--no-measure"]) == 0
    printed = capsys.readouterr().out
    assert "ok      eventfd: works\n" in printed
    assert "aiokv works here" in printed
    for finding in report["findings"]:
        assert f"{finding['status']:<8}{finding['name']}: " in printed
        assert finding["advice"] in printed


@pytest.mark.parametrize(("arguments", "status"), [(["doctor"], 0), (["doctor", "--gpu"], 1)])
def test_status_says_whether_something_required_is_missing(
    machine, probes, monkeypatch, capsys, arguments, status
):
    probes.answers["list"] = ProbeError("libcuda.so.1: cannot open")
    monkeypatch.setattr("aiokv.doctor.machine.Machine", lambda: machine)
    assert cli.main(arguments) == status
    printed = capsys.readouterr().out
    assert "missing GPU driver: libcuda.so.1" in printed
    assert ("required and missing: GPU driver" in printed) == (status == 1)


def test_an_output_file_that_cannot_be_written_is_refused(capsys):
    assert cli.main(["doctor", "--json", "/no/such/folder/x"]) == 2
    assert "is not a folder" in capsys.readouterr().err
