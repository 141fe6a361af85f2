"""Each example says how it is run, prints what it says, and is a row of the table."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.examples.files import EXAMPLES, header_of
from tests.harness.patience import PROGRAM_SECONDS

ROOT = EXAMPLES.parent
FILES = sorted(EXAMPLES.glob("*.py"))
NEEDS = {"torch_server.py": "torch"}  # packages that are not among those of `make setup`
SERVERS = {"torch_http.py", "vllm_stores.py"}  # see test_torch_http.py, test_vllm.py


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name not in SERVERS], ids=lambda path: path.name
)
def test_example_prints_what_it_says(path, tmp_path):
    needed = NEEDS.get(path.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: make test-vllm")
    example = header_of(path)
    command = shlex.split(example.run)
    assert command[:2] == ["python", f"examples/{path.name}"]
    # A clone in which `pip install .` was run: its sources lack the compiled core.
    (tmp_path / "aiokv").mkdir()
    (tmp_path / "aiokv/__init__.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, path, *command[2:]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == example.output
    assert all((tmp_path / name).stat().st_size for name in command[2:])  # files that it writes


def test_table_has_a_row_per_example():
    table = re.findall(
        r"^\| \[(.+?)\]\((.+?)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert all(name == Path(link).name for name, link in table)
    assert all((EXAMPLES / link).is_file() for _, link in table)
    assert [name for name, link in table if "/" not in link] == [path.name for path in FILES]


def test_mypy_checks_each_example():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["modules"] == [path.stem for path in FILES]


def test_examples_import_public_names_only():
    for path in FILES:
        source = path.read_text()
        for module in re.findall(r"^(?:from|import) (aiokv[\w.]*)", source, re.MULTILINE):
            assert module in {"aiokv", "aiokv.errors", "aiokv.stores", "aiokv.demo.http_server"}
