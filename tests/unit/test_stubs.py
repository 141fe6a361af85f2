"""The committed stub equals the stub of the built extension."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stub_equals_the_built_extension():
    stub = runpy.run_path(str(ROOT / "native" / "stubgen.py"))["stub"]
    assert (ROOT / "aiokv" / "_native.pyi").read_text() == stub(), "run `make stubs`"
