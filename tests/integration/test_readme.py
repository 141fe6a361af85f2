"""The README's code blocks run unchanged, and so do those of the guides that it links to.

The program for GPUs is run by ``tests/gpu/test_readme.py``.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide"


def code_blocks(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


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
async def test_the_stores_of_the_guide_bring_blocks_to_the_next_engine(tmp_path, monkeypatch):
    (stores,) = [block for block in code_blocks(GUIDE / "stores.md") if "DiskStore" in block]
    definitions, separator, _ = stores.partition("\nprint(await serve()")
    assert separator
    limit = "wait_store=5.0"
    assert limit in definitions
    definitions = definitions.replace(limit, "wait_store=float('inf')")  # on any machine
    definitions = definitions.replace(
        "return lease.usage", "hit = engine.statistics().hit_store_tokens; return hit, lease.usage"
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(definitions, names)
    assert await names["serve"]() == (0, 0)
    assert await names["serve"]() == (96, 96)


@pytest.mark.asyncio
async def test_the_engines_of_the_guide_move_a_prompt(capsys):
    (peers,) = [block for block in code_blocks(GUIDE / "peers.md") if "aiokv.Peers(" in block]
    definitions, separator, _ = peers.partition("\n# In production")
    assert separator
    delivered = "return sending.delivered_tokens"
    assert delivered in definitions
    names: dict[str, object] = {}
    exec(definitions.replace(delivered, f"{delivered}, sending.failure"), names)
    tokens = np.arange(500)
    async with names["new_engine"]("127.0.0.1") as d, names["new_engine"](None) as p:

        async def prefill_server(tokens, ticket):
            return await names["prefill"](p, tokens, ticket)

        await names["decode"](d, tokens, prefill_server)
        assert capsys.readouterr().out == "sent: (500, None) first position to compute: 500\n"
        assert d.would_hit(tokens).total == 496


def test_every_method_that_the_readme_and_the_documentation_name_exists():
    pages = [README, *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    for owner, cls in (("engine", CacheEngine), ("lease", None), ("regions", Regions)):
        names = set(re.findall(rf"`(?:await |async with )?{owner}\.(\w+)", text))
        target = cls
        if cls is None:
            from aiokv import Lease as target
        missing = {name for name in names if not hasattr(target, name)}
        assert names
        assert not missing, f"{owner}: {missing}"


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
