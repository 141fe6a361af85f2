"""Compile and load ``gpu_baselines.cu``: the baselines and the spinner of the wake-up bench."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("gpu_baselines.cu")
_P, _U32, _SIZE, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_int


@cache
def library() -> ctypes.CDLL:
    """The library, built with nvcc for the GPU of this machine."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    target = Path(tempfile.mkdtemp(prefix="aiokv-bench-")) / "baselines.so"
    subprocess.run(
        [
            *("nvcc", "-O3", "-std=c++17", f"-arch=sm_{capability}"),
            *("-shared", "-Xcompiler", "-fPIC", str(_SOURCE), "-ldl", "-o", str(target)),
        ],
        check=True,
    )
    loaded = ctypes.CDLL(str(target))
    loaded.copy_each.argtypes = (_P, _P, _U32, _SIZE, _P)
    loaded.copy_batch.argtypes = (_P, _P, _U32, _SIZE, _P)
    loaded.copy_warps.argtypes = (_P, _P, _U32, _U32, _INT, _P)
    loaded.spinner_start.argtypes = (_P, _P, _U32)
    loaded.spinner_start.restype = _P
    loaded.spinner_stop.argtypes = (_P,)
    loaded.write_flag.argtypes = (_P, _P)
    return loaded


def checked(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} in a baseline")
