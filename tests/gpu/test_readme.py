"""The README's code for a GPU runs with torch, with smaller sizes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SMALLER = {"8192": "64", "65536": "128"}

pytestmark = pytest.mark.asyncio


async def test_second_request_hits_kv_computed_by_torch():
    torch = pytest.importorskip("torch")
    (block,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "torch.zeros" in code
    ]
    for size, smaller in SMALLER.items():
        block = block.replace(size, smaller)
    setup, serving = block.split("async with aiokv.CacheEngine", 1)
    opening, request = serving.split("\n", 1)
    program = (
        "import torch, aiokv\n"
        "async def serve(tokens, stream, hits):\n"
        + textwrap.indent(setup, "    ")
        + f"    async with aiokv.CacheEngine{opening}\n"
        + "        def run_layer(layer, table):\n"
        + "            with torch.cuda.stream(stream):\n"
        + "                kv[layer][torch.tensor(table).to('cuda').long()] = layer\n"
        + "        for _ in range(2):\n"
        + textwrap.indent(request, "        ")
        + "            hits.append(lease_hit)\n"
    )
    granted = "await lease.allocate(len(tokens))\n"
    program = program.replace(granted, f"{granted}{16 * ' '}lease_hit = lease.hit.total\n")
    names: dict[str, object] = {}
    exec(program, names)
    hits: list[int] = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        await names["serve"](list(range(100)), stream, hits)
    assert hits == [0, 96]
