"""The README's first program runs unchanged, and its links lead to files.

The program for GPUs is run by ``tests/gpu/test_readme.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiokv import CacheConfig, CacheEngine
from tests.harness.patience import PROGRAM_SECONDS

README = Path(__file__).parents[2] / "README.md"


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_program_hits_all_but_the_last_block_of_the_second_request(tmp_path):
    (tmp_path / "serve.py").write_text(code_blocks()[0])
    done = subprocess.run(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
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
    body = textwrap.indent(f"{decoding}return tokens\n", "    ")
    exec(f"async def decode(engine, batch, decode_step):\n{body}", names)
    config = CacheConfig(block_tokens=4, device_blocks=16)
    async with CacheEngine(config) as engine:
        async with engine.match([1, 2, 3, 4, 5]) as lease:
            await lease.allocate(5)
            batch, tokens = engine.batch([lease]), [6]
            with engine.computing(batch) as step:
                pass
            assert engine.advance(step, tokens) == ()
            for _ in range(8):
                tokens = await names["decode"](engine, batch, lambda tables, t=tokens: [t[0] + 1])
        assert engine.match(list(range(1, 15))).hit.total == 12


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
