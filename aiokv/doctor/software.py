"""Checks of the software: Python, packages, the native extension, and what the kernel permits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.doctor.findings import Finding, missing, ok, slow
from aiokv.doctor.machine import ProbeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.doctor.machine import Machine

CUPY_SECONDS: Final = 60.0  # the first import reads hundreds of files

CUPY_PACKAGES: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
EXTRAS: Final = {  # extra -> distribution
    "events": "pyzmq",
    "metrics": "prometheus-client",
    "mooncake": "mooncake-transfer-engine",
    "nixl": "nixl",
    "plot": "matplotlib",
    "redis": "redis",
    "s3": "obstore",
    "serve": "uvicorn",
    "tracing": "opentelemetry-api",
}


def check_python(machine: Machine) -> Iterator[Finding]:
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    advice, is_new = "use Python 3.11 or newer", version >= (3, 11)
    yield missing("Python", machine.python, advice, required=True, unless=is_new)


def check_build(machine: Machine) -> Iterator[Finding]:
    version = machine.version("aiokv")
    found = version or "not installed as a package"
    yield slow("aiokv", found, "pip install aiokv", unless=version is not None)
    info = machine.native.build_info()
    text = f"{info['compiler']}, {info['type']}"
    if info["optimized"]:
        yield ok("native extension", text)
    else:
        yield slow(
            "native extension",
            f"{text}, without optimization",
            "install aiokv again as Release: pip install -C cmake.build-type=Release ...",
        )
    implementation = machine.native.sha256_implementation()
    if "portable" in implementation:
        yield slow(
            "SHA-256",
            f"{implementation}: the processor has no SHA instructions",
            "expect digests of prompts to take several times as long",
        )
    else:
        yield ok("SHA-256", implementation)


def check_cuda_build(machine: Machine) -> Iterator[Finding]:
    if getattr(machine.native, "cuda", None) is None:
        yield missing(
            "CUDA in the native extension",
            "built without CUDA: only the cpu device works",
            "install aiokv again where nvcc can be found: pip install --no-cache-dir aiokv",
        )
    else:
        version = format_cuda(machine.native.cuda.runtime_version())
        architectures = machine.native.build_info()["cuda_architectures"].replace(",", ", ")
        yield ok("CUDA in the native extension", f"CUDA {version}, architectures {architectures}")


def check_uvloop(machine: Machine) -> Iterator[Finding]:
    version = machine.version("uvloop")
    found = version or "not installed"
    yield missing("uvloop", found, "pip install uvloop", required=True, unless=bool(version))


def check_eventfd(machine: Machine) -> Iterator[Finding]:
    try:
        machine.open_eventfd()
    except OSError as error:
        yield missing(
            "eventfd",
            f"refused: {error.strerror or error}",
            "permit eventfd2 in the sandbox (seccomp profile), and raise ulimit -n",
            required=True,
        )
    else:
        yield ok("eventfd", "works")


def check_io_uring(machine: Machine) -> Iterator[Finding]:
    """Check io_uring, without which threads read and write the files of stores."""
    try:
        queue = machine.native.IoQueue(1, "auto")
    except OSError as error:
        yield slow("io_uring", f"the queue cannot be opened: {error}", "raise ulimit -n")
        return
    backend, reason = queue.backend, queue.reason
    queue.close()
    if backend == "io_uring":
        yield ok("io_uring", "works")
        return
    disabled = machine.read("proc/sys/kernel/io_uring_disabled")
    advice = "permit io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"
    if disabled not in (None, "0"):
        advice = "sysctl kernel.io_uring_disabled=0, as root"
    yield slow("io_uring", f"refused ({reason}): threads access the files of stores", advice)


def check_cupy(machine: Machine) -> Iterator[Finding]:
    installed = [(name, version) for name in CUPY_PACKAGES if (version := machine.version(name))]
    hint = "pip install 'aiokv[cuda12]' or 'aiokv[cuda13]', for the CUDA version of the driver"
    if not installed:
        yield missing("CuPy", "not installed: the cuda device needs it", hint)
        return
    name, version = installed[0]
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    try:
        machine.run(["-c", code], CUPY_SECONDS)
    except ProbeError as error:
        yield missing("CuPy", f"{name} {version} finds no GPU: {error}", hint)
    else:
        yield ok("CuPy", f"{name} {version}")


def check_extras(machine: Machine) -> Iterator[Finding]:
    installed = [extra for extra, package in EXTRAS.items() if machine.version(package)]
    others = [extra for extra in EXTRAS if extra not in installed]
    text = ", ".join(installed) or "none"
    if others:
        text += f"; not installed: {', '.join(others)}"
    yield ok("extras", text)


def format_cuda(version: int) -> str:
    """Return a version of CUDA as text: 12080 is 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}"
