"""A rank on a GPU in its own process; the test controls its runner over a socket."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiokv import Regions
from aiokv.ranks import Rank
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, LAYERS, BLOCK_BYTES = 8, 2, 4096


async def main(path: Path, rank: int) -> None:
    import cupy

    gpu = rank % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(gpu):
        kv = [cupy.zeros((BLOCKS, BLOCK_BYTES), cupy.uint8) for _ in range(LAYERS)]
        regions = Regions(num_layers=LAYERS)
        regions.add("kv", layers=kv)
        device = CudaDevice(gpu, options=CudaOptions(slot_bytes=1 << 20))
        async with Rank(path, rank, regions, device) as worker:
            reader, writer = await asyncio.open_unix_connection(str(path.parent / "runner"))
            _answer(writer, {"rank": rank, "gpu": gpu})
            while line := await reader.readline():
                _answer(writer, _obey(json.loads(line), kv, worker, cupy))
            await worker.closed()
            writer.close()


def _obey(command: dict[str, Any], kv: list[Any], worker: Rank, cupy: Any) -> dict[str, Any]:
    if "fill" in command:  # as a model would, on the current stream
        for layer, tensor in enumerate(kv):
            for block in command["blocks"]:
                tensor[block] = command["fill"] + 16 * layer + block
    if "step" in command:
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        worker.step(command["step"], event)
    if "read" in command:
        return {"values": [[int(t[b].min()) for b in command["read"]] for t in kv]}
    return {}


def _answer(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
