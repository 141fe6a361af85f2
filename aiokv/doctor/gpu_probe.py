"""GPU probe: prints the GPUs that the CUDA driver reports, or the speed of copies, as JSON.

The probe runs in a separate process, which can be killed while it waits for the driver and whose
end frees the CUDA context. It uses the libraries of the driver, and no other module of aiokv.

``python gpu_probe.py list`` and ``python gpu_probe.py copy ORDINAL``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any, Final

COPY_BYTES: Final = 256 << 20
COPIES: Final = 4  # number of copies, of which the fastest counts

_COMPUTE_MAJOR: Final = 75  # CUdevice_attribute
_COMPUTE_MINOR: Final = 76
_NVML_LINK: Final = {  # name -> function of NVML
    "generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "width": "nvmlDeviceGetCurrPcieLinkWidth",
    "max_generation": "nvmlDeviceGetMaxPcieLinkGeneration",
    "max_width": "nvmlDeviceGetMaxPcieLinkWidth",
}


class Driver:
    """Functions of ``libcuda``; each raises RuntimeError where the function reports an error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")

    def integer(self, name: str, *arguments: Any) -> int:
        """Return the integer that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def device(self, ordinal: int) -> int:
        return self.integer("cuDeviceGet", ordinal)

    def text(self, name: str, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.call(name, buffer, len(buffer), device)
        return buffer.value.decode(errors="replace")


def list_gpus() -> dict[str, Any]:
    """Return the CUDA version of the driver, and name, capability and address of each GPU."""
    driver = Driver()
    gpus = []
    for ordinal in range(driver.integer("cuDeviceGetCount")):
        device = driver.device(ordinal)
        size = ctypes.c_size_t()
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        major = driver.integer("cuDeviceGetAttribute", _COMPUTE_MAJOR, device)
        minor = driver.integer("cuDeviceGetAttribute", _COMPUTE_MINOR, device)
        address = ctypes.create_string_buffer(64)
        driver.call("cuDeviceGetPCIBusId", address, len(address), device)
        gpus.append(
            {
                "ordinal": ordinal,
                "name": driver.text("cuDeviceGetName", device),
                "compute": [major, minor],
                "memory_bytes": size.value,
                "pci_address": address.value.decode().lower(),
            }
        )
    return {"cuda": driver.integer("cuDriverGetVersion"), "gpus": gpus}


def measure_copies(ordinal: int) -> dict[str, Any]:
    """Return the speed of copies between pinned memory and a GPU, and its link while it is busy."""
    driver = Driver()
    device = driver.device(ordinal)
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    host, memory = ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(COPY_BYTES)
    driver.call("cuMemHostAlloc", ctypes.byref(host), size, 0)
    ctypes.memset(host, 1, COPY_BYTES)
    driver.call("cuMemAlloc_v2", ctypes.byref(memory), size)
    seconds = {
        "to_device": _fastest(driver, "cuMemcpyHtoD_v2", memory, host, size),
        "to_host": _fastest(driver, "cuMemcpyDtoH_v2", host, memory, size),
    }
    link = _link(driver, device)
    return {
        "bytes_per_second": {name: COPY_BYTES / value for name, value in seconds.items()},
        "link": link,
    }


def _fastest(driver: Driver, name: str, *arguments: Any) -> float:
    times = []
    for _ in range(1 + COPIES):
        begin = time.perf_counter()
        driver.call(name, *arguments)
        driver.call("cuCtxSynchronize")
        times.append(time.perf_counter() - begin)
    return min(times[1:])  # the first copy wakes the link, so it does not count


def _link(driver: Driver, device: int) -> dict[str, int] | None:
    """Return the PCIe link by NVML; None where NVML does not know it."""
    address = ctypes.create_string_buffer(64)
    driver.call("cuDeviceGetPCIBusId", address, len(address), device)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(
            address, ctypes.byref(handle)
        ):
            return None
        found = {}
        for name, function in _NVML_LINK.items():
            value = ctypes.c_uint()
            if getattr(nvml, function)(handle, ctypes.byref(value)):
                return None
            found[name] = value.value
    except (OSError, AttributeError):  # no such library or function
        return None
    return found


def main(arguments: list[str]) -> int:
    try:
        is_copy = arguments[:1] == ["copy"]
        result = measure_copies(int(arguments[1])) if is_copy else list_gpus()
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
