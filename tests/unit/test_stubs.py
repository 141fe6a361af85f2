"""The committed stubs equal those of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.sync import stubgen

ROOT = Path(__file__).parents[2]


def test_stub_equals_the_built_extension():
    stub = runpy.run_path(str(ROOT / "native" / "stubgen.py"))["stub"]
    assert (ROOT / "aiokv" / "_native.pyi").read_text() == stub(), "run `make stubs`"


def test_stub_equals_the_verbs_for_threads():
    assert (ROOT / "aiokv" / "sync" / "verbs.pyi").read_text() == stubgen.stub(), "run `make stubs`"
