"""The README's first program runs unchanged, and its links lead to files.

The program for GPUs is run by ``tests/gpu/test_readme.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
