"""A process that owns tensors on a GPU, shares them, and changes them when a line says so."""

from __future__ import annotations

import sys

from aiokv.frameworks.ipc import share

BLOCKS, WIDTH = 16, 512


def main() -> None:
    import cupy

    pool = cupy.arange(3 * BLOCKS * WIDTH, dtype=cupy.int32)  # the tensors are parts of it
    whole = pool[BLOCKS * WIDTH : 2 * BLOCKS * WIDTH].reshape(BLOCKS, WIDTH)
    strided = pool[2 * BLOCKS * WIDTH :].reshape(BLOCKS, WIDTH)[:, : WIDTH // 2]
    cupy.cuda.Device().synchronize()
    for tensor in (whole, strided):
        print(share(tensor).to_bytes().hex(), flush=True)
    for line in sys.stdin:
        value = int(line)
        whole[:] = value
        cupy.cuda.Device().synchronize()
        print(int(strided.sum()), flush=True)


if __name__ == "__main__":
    main()
