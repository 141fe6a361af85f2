"""The page of the documentation about GPUs runs, and prints what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_page import SEPARATOR, blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guide/gpu.md"


def test_the_python_of_the_page_runs_and_prints_what_the_page_says(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", str(PAGE)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    printed = [part.strip() for part in done.stdout.split(SEPARATOR)]
    expected = [block.text.strip() for block in blocks_of(PAGE) if block.language == "text"]
    assert expected
    assert [text for text in printed if text] == expected
