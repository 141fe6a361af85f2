"""The README's code blocks run unchanged."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import aiokv
from aiokv import CacheConfig, CacheEngine, Regions

README = Path(__file__).parents[2] / "README.md"


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_program_hits_all_but_the_last_block_of_the_second_request(tmp_path):
    (tmp_path / "serve.py").write_text(code_blocks()[0])
    done = subprocess.run(
        [sys.executable, "serve.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Hit(device_tokens=0, host_tokens=0) [0 1 2 3 4 5 6]",
        "Hit(device_tokens=96, host_tokens=0) [0 1 2 3 4 5 6]",
    ]


@pytest.mark.asyncio
async def test_decoding_in_the_order_of_the_readme_indexes_generated_blocks():
    (decoding,) = [block for block in code_blocks() if "decode_step" in block]
    names: dict[str, object] = {}
    exec(
        f"async def decode(engine, lease, decode_step):\n{textwrap.indent(decoding, '    ')}", names
    )
    kv = np.zeros((8, 4, 2), np.float32)
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[kv])
    prompt = list(range(5))
    async with CacheEngine(CacheConfig(block_tokens=4, device_blocks=8), regions) as engine:
        async with engine.match(prompt) as lease:
            await lease.allocate(len(prompt) + 1)
            lease.commit(len(prompt))
            lease.append([100])
            for token in (101, 102, 103):
                await names["decode"](engine, lease, lambda table, token=token: token)
            assert lease.num_tokens == 9
        with_generated = [*prompt, 100, 101, 102, 103]
        assert engine.match(with_generated).hit.total == 8
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_the_stores_of_the_readme_bring_blocks_to_the_next_engine(tmp_path, capsys):
    (stores,) = [block for block in code_blocks() if "DiskStore" in block]
    shared = ', RedisStore("redis://10.0.0.5:6379")'  # no test may leave the machine
    assert shared in stores
    stores = stores.replace(shared, "").replace("/nvme/kv", str(tmp_path)).replace("GiB", "MiB")
    stores = stores.replace("wait_store=0.5", "wait_store=float('inf')")  # on any machine
    prompt = np.arange(100)
    for is_second in (False, True):
        regions = Regions(num_layers=1)
        regions.add("kv", layers=[np.zeros((8192, 16, 2), np.float32)])
        code = textwrap.indent(stores, "    ")
        code += textwrap.indent("lease.commit(len(prompt))\nengine.step()\n", " " * 12)
        code += textwrap.indent("await engine.drain()\n", " " * 8)
        names: dict[str, object] = {"aiokv": aiokv}
        exec(f"async def serve(prompt, regions):\n{code}", names)
        await names["serve"](prompt, regions)
        assert capsys.readouterr().out == ("96 96\n" if is_second else "0 0\n")


@pytest.mark.asyncio
async def test_the_engines_of_the_readme_move_a_prompt():
    (peers,) = [block for block in code_blocks() if "aiokv.Peers(" in block]
    names: dict[str, object] = {"aiokv": aiokv, "asyncio": asyncio, "np": np, "secrets": secrets}
    computing = "...  # compute the positions from `first` on, and decode"
    assert computing in peers
    exec(peers.replace(computing, "result.append(first)"), names)
    names["result"] = result = []
    tokens = np.arange(500)
    async with names["new_engine"]("127.0.0.1") as d, names["new_engine"](None) as p:
        sent = []

        async def prefill_server(tokens, ticket):
            sent.append(await names["prefill"](p, tokens, ticket))

        await names["decode"](d, tokens, prefill_server)
        assert (result, sent) == ([500], [(500, None)])
        assert d.would_hit(tokens).total == 496


def test_every_method_that_the_readme_names_exists():
    text = README.read_text()
    for owner, cls in (("engine", CacheEngine), ("lease", None), ("regions", Regions)):
        names = set(re.findall(rf"`(?:await |async with )?{owner}\.(\w+)", text))
        target = cls
        if cls is None:
            from aiokv import Lease as target
        missing = {name for name in names if not hasattr(target, name)}
        assert names
        assert not missing, f"{owner}: {missing}"
