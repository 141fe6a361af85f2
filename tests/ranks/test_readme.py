"""The README's program with several ranks runs unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_program_for_several_ranks_runs(tmp_path):
    (program,) = re.findall(r"```python\n(# serve\.py\n.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "serve.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "serve.py")],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Hit(device_tokens=0, host_tokens=0) 1",
        "Hit(device_tokens=96, host_tokens=0) 2",
    ]
